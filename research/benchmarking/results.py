"""The file that holds what was measured, row by row."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import subprocess
from typing import Any

from research.benchmarking import machine
from tfdp_fl import _files

_FORMAT = 2


@functools.cache
def revision() -> str:
    """Returns the commit of this package's folder, "+" where it was changed."""
    folder = pathlib.Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, check=True, text=True, cwd=folder
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "..")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Results:
    """Rows that were measured, now or before.

    Attributes:
      rows: By row name, a dictionary with `result` or `error`, and with
        `machine`, `revision`, `quick`, `date`, `load` and `seconds`.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the file, if it is there.

        Raises:
          ValueError: The file is not one of these.
        """
        self._path = pathlib.Path(path)
        self.rows: dict[str, dict[str, Any]] = {}
        if not self._path.exists():
            return
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']}")
            self.rows = content["rows"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"json must be a file that this script wrote, got "
                f"{os.fspath(path)!r}: {error}."
            ) from error

    def is_current(self, name: str, quick: bool) -> bool:
        """Whether a row was measured here, as thoroughly, of this code."""
        row = self.rows.get(name)
        return (
            row is not None
            and "result" in row
            and row["quick"] <= quick
            and row["machine"] == machine.description()
            and row["revision"] == revision()
        )

    def put(self, name: str, quick: bool, load: float, **outcome: Any) -> None:
        """Stores a row's `result`, or `error`, and its `seconds`."""
        now = datetime.datetime.now(datetime.timezone.utc)
        self.rows[name] = {
            **outcome,
            "machine": machine.description(),
            "revision": revision(),
            "quick": quick,
            "load": load,
            "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "rows": self.rows}, indent=1)
        _files.write_text(self._path, text + "\n")

    def result(self, name: str) -> dict[str, Any] | None:
        """Returns what was measured, or None."""
        return self.rows.get(name, {}).get("result")
