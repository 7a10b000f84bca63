"""Tests of what the programs share: a quiet start, and help by group."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

from absl import flags
from absl.testing import absltest

from tests.scripts import programs
from tfdp_fl import _console


class QuietStartTest(absltest.TestCase):
    def _written(self, *lines: str) -> str:
        """Returns what comes out of lines that native code writes."""
        out = io.StringIO()
        with mock.patch.object(sys, "stderr", out), _console.quiet_start():
            for line in lines:
                os.write(2, f"{line}\n".encode())
        return out.getvalue()

    def test_only_what_tensorflow_says_at_its_start_is_left_out(self):
        noise = [
            "2026-11-22 03:00:00.1: E tensorflow/compiler/xla/stream_executor/"
            "cuda/cuda_dnn.cc:9342] Unable to register cuDNN factory",
            "WARNING: All log messages before absl::InitializeLog() is called "
            "are written to STDERR",
            "E0000 00:00:1.1 12 cuda_platform.cc:52] failed call to cuInit",
            "I0000 00:00:1.1 12 port.cc:153] oneDNN custom operations are on.",
        ]
        told = [
            "Traceback (most recent call last):",
            "E0000 00:00:1.1 12 my_kernel.cc:3] out of memory",
            "ImportError: no such thing as cuDNN",
        ]
        out = self._written(noise[0], told[0], *noise[1:], *told[1:])
        self.assertEqual(out.splitlines(), told)

    def test_an_error_shows_what_was_held(self):
        out = io.StringIO()
        with (
            mock.patch.object(sys, "stderr", out),
            self.assertRaises(ImportError),
            _console.quiet_start(),
        ):
            os.write(2, b"why it failed\n")
            raise ImportError("no")
        self.assertIn("why it failed", out.getvalue())


class RunTest(absltest.TestCase):
    def _ended(self, *arguments):
        out = io.StringIO()
        values = flags.FlagValues()
        flags.DEFINE_bool("loud", False, "Whether.", flag_values=values)
        with (
            mock.patch.object(flags, "FLAGS", values),
            mock.patch.object(sys, "argv", ["prog", *arguments]),
            contextlib.redirect_stdout(out),
            self.assertRaises(SystemExit) as end,
        ):
            _console.run(lambda _: sys.exit(3), "Does it.", {"Some": ["loud"]})
        return end.exception.code, out.getvalue()

    def test_the_installed_program_says_its_own_name(self):
        doc = "    python scripts/train.py --rounds=3"
        for called, said in (
            ("/usr/bin/tfdp-fl-train", "    tfdp-fl-train --rounds=3"),
            ("scripts/train.py", doc),
        ):
            with mock.patch.object(sys, "argv", [called]):
                self.assertIn(said.strip(), _console.help_text(doc, {}))

    def test_a_reader_that_leaves_early_sees_no_traceback(self):
        code = (
            "import sys; from tfdp_fl import _console; sys.argv = ['x', '--help'];"
            "_console.run(print, 'line\\n' * 100_000, {})"
        )
        ended = subprocess.run(
            ["bash", "-c", f'{sys.executable} -c "{code}" | head -1'],
            capture_output=True,
            text=True,
            cwd=programs.ROOT,
            check=True,
        )
        self.assertEqual((ended.stdout, ended.stderr), ("line\n", ""))

    def test_short_help_shows_the_first_flags(self):
        values = flags.FlagValues()
        for name in ("often", "rarely"):
            flags.DEFINE_bool(name, False, "Whether.", flag_values=values)
        for asked, there in (("--help", False), ("--helpfull", True)):
            out = io.StringIO()
            with (
                mock.patch.object(flags, "FLAGS", values),
                mock.patch.object(sys, "argv", ["prog", asked]),
                contextlib.redirect_stdout(out),
                self.assertRaises(SystemExit),
            ):
                _console.run(print, "D.", {"G": ["often", "rarely"]}, ["often"])
            self.assertIn("--[no]often", out.getvalue())
            self.assertEqual("--[no]rarely" in out.getvalue(), there)

    def test_help_is_no_error(self):
        for name in ("--help", "-h", "--helpshort"):
            code, out = self._ended(name)
            self.assertEqual(code, 0)
            self.assertRegex(out, r"Does it\.\n\nSome:\n  --")


class FlagTest(absltest.TestCase):
    def test_how_flags_are_shown(self):
        values = flags.FlagValues()
        flags.DEFINE_enum("way", "a", ["a", "b"], "Which.", values)
        flags.DEFINE_integer("many", None, "How many.", flag_values=values)
        flags.DEFINE_bool("loud", False, "Whether.", flag_values=values)
        with mock.patch.object(flags, "FLAGS", values):
            text = _console.help_text("D.", {"G": ["way", "many", "loud"]})
        self.assertEqual(
            text,
            "D.\n\nG:\n  --way=a|b\n      Which. [a]\n  --many=N\n      How "
            "many.\n  --[no]loud\n      Whether.",
        )


if __name__ == "__main__":
    absltest.main()
