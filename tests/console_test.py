"""What the programs share: a quiet start, and their help."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from absl.testing import absltest

from tests.scripts import programs
from tfdp_fl import _console


class QuietStartTest(absltest.TestCase):
    def _stderr(self, code):
        code = f"import os\nfrom tfdp_fl import _console\n{code}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=programs.ROOT,
            env={**os.environ, "PYTHONPATH": str(programs.ROOT)},
        )
        return done.stderr

    def test_it_is_quiet_unless_it_fails(self):
        code = "with _console.quiet_start():\n    os.write(2, b'oneDNN is on\\n')\n"
        self.assertEqual(self._stderr(code), "")
        failed = self._stderr(code + "    raise ImportError('no cuDNN')\n")
        self.assertIn("oneDNN is on\n", failed)
        self.assertIn("no cuDNN", failed)


class RunTest(absltest.TestCase):
    def _help(self, program, word):
        out = io.StringIO()
        with (
            mock.patch.object(sys, "argv", [program, word]),
            contextlib.redirect_stdout(out),
            self.assertRaises(SystemExit) as end,
        ):
            _console.run(
                mock.Mock(__module__="x"), "python scripts/train.py", "absl.logging"
            )
        self.assertEqual(end.exception.code, 0)
        return out.getvalue()

    def test_help_is_no_error_and_shows_the_flags(self):
        for word in ("--help", "-h", "--helpfull"):
            self.assertIn("--verbosity", self._help("train.py", word))

    def test_the_installed_program_says_its_own_name(self):
        self.assertStartsWith(self._help("tfdp-fl-train", "-h"), "tfdp-fl-train\n")
        self.assertStartsWith(self._help("train.py", "-h"), "python scripts/train.py")
