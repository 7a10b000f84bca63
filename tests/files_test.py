from __future__ import annotations

import os
import pathlib
import stat
import tempfile

from absl.testing import parameterized

from tfdp_fl import _files


class ReplacingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.path = self.folder / "file.txt"

    @parameterized.parameters(False, True)
    def test_readers_see_the_old_file_until_the_new_one_is_whole(self, sync):
        _files.write_text(self.path, "old")
        with _files.replacing(self.path, sync=sync) as file:
            file.write(b"ne")
            file.flush()
            self.assertEqual(self.path.read_text(), "old")
            file.write(b"w")
        self.assertEqual(self.path.read_text(), "new")
        self.assertEqual(os.listdir(self.folder), ["file.txt"])

    def test_what_fails_leaves_the_old_file_and_nothing_else(self):
        _files.write_text(self.path, "old")
        with (
            self.assertRaises(KeyboardInterrupt),
            _files.replacing(self.path) as file,
        ):
            file.write(b"half")
            raise KeyboardInterrupt
        self.assertEqual(self.path.read_text(), "old")
        self.assertEqual(os.listdir(self.folder), ["file.txt"])

    @parameterized.parameters((0o666, 0o640), (0o600, 0o600))
    def test_permissions_are_those_asked_for_less_the_umask(self, mode, made):
        before = os.umask(0o027)
        try:
            with _files.replacing(self.path, mode=mode):
                pass
        finally:
            os.umask(before)
        self.assertEqual(stat.S_IMODE(self.path.stat().st_mode), made)
