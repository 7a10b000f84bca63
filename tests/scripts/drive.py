"""Runs programs of scripts/ with many command lines in one process.

TensorFlow takes seconds to start, and programs whose flags have the same names
cannot be in the tests' own process; so a test starts this once, with a JSON
list of command lines (a program's name, and its flags) on standard input. It
writes a JSON list of [exit code, standard output, standard error] to the file
that it is given.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pathlib
import sys
import traceback

from absl import app
from absl.testing import flagsaver


def drive(command_lines: list[list[str]]) -> list[list]:
    results = []
    for name, *arguments in command_lines:
        program = importlib.import_module(f"scripts.{name}")
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with (
            flagsaver.flagsaver(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                app.run(program.main, argv=[f"{name}.py", *arguments])
            except SystemExit as end:
                code = end.code
                if isinstance(code, str):  # As the interpreter does.
                    print(code, file=sys.stderr)
                    code = 1
            except Exception:
                traceback.print_exc()
                code = 2
        results.append([code or 0, out.getvalue(), err.getvalue()])
    return results


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
    found = drive(json.load(sys.stdin))
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found), "utf-8")
