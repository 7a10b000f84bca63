"""Runs programs of scripts/ with many command lines in one process.

TensorFlow takes seconds to start, and programs whose flags have the same names
cannot be in the tests' own process. So `run_all` starts this file once, with a
JSON list of command lines (a program's name, and its flags).
"""

import contextlib
import importlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str


def run_all(command_lines: Sequence[Sequence[str]]) -> list[Outcome]:
    """Returns what command lines did: a program's name, and its flags."""
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        ended = subprocess.run(
            [sys.executable, __file__, str(results)],
            input=json.dumps([list(line) for line in command_lines]),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            check=False,
        )
        if not results.exists():
            raise RuntimeError(ended.stdout)
        return [Outcome(*line) for line in json.loads(results.read_text())]


def _run(name: str, *arguments: str) -> Outcome:
    from absl import app
    from absl.testing import flagsaver

    program = importlib.import_module(f"scripts.{name}")
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
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
    return Outcome(int(code or 0), out.getvalue(), err.getvalue())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    found = [_run(*line) for line in json.load(sys.stdin)]
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found), "utf-8")
