"""Runs a program of scripts/ with many command lines in one process.

TensorFlow takes seconds to start, and two programs' flags cannot be in one
process; so a test starts this once, with the program's name as the argument
and a JSON list of command lines on standard input. It writes a JSON list of
[exit code, standard output, standard error] to the file named second.
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


def drive(name: str, command_lines: list[list[str]]) -> list[list]:
    program = importlib.import_module(f"scripts.{name}")
    results = []
    for command_line in command_lines:
        out, err = io.StringIO(), io.StringIO()
        code = 0
        with (
            flagsaver.flagsaver(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                app.run(program.main, argv=[f"{name}.py", *command_line])
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
    found = drive(sys.argv[1], json.load(sys.stdin))
    pathlib.Path(sys.argv[2]).write_text(json.dumps(found), "utf-8")
