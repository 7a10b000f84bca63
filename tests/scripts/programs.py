"""Starts `drive.py`: programs of scripts/ in a process of their own."""

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


def run_all(command_lines: Sequence[Sequence[str]]) -> list[Outcome]:
    """Returns what command lines did: a program's name, and its flags."""
    with tempfile.TemporaryDirectory() as folder:
        results = pathlib.Path(folder) / "results.json"
        log = pathlib.Path(folder) / "log.txt"
        with log.open("w") as file:
            subprocess.run(
                [sys.executable, str(_DRIVE), str(results)],
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
