"""Starts `drive.py`: a program of scripts/ in a process of its own."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
_DRIVE = pathlib.Path(__file__).with_name("drive.py")


class Outcome(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str


def run_all(name: str, command_lines: Sequence[Sequence[str]]) -> list[Outcome]:
    """Returns the outcomes of `scripts/<name>.py` with each command line."""
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        log = pathlib.Path(folder) / "log.txt"
        with log.open("w") as file:
            subprocess.run(
                [sys.executable, str(_DRIVE), name, str(results)],
                input=json.dumps([list(line) for line in command_lines]),
                text=True,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                check=False,
            )
        if not results.exists():
            raise RuntimeError(log.read_text(errors="replace"))
        return [Outcome(*each) for each in json.loads(results.read_text())]
