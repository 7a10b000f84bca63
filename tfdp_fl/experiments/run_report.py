"""A run's directory as one HTML page."""

from __future__ import annotations

import json
import os
import pathlib
import types
from typing import Any

from tfdp_fl import _files
from tfdp_fl.experiments import run_directory
from tfdp_fl.experiments.run_directory import Run
from tfdp_fl.keras import callbacks
from tfdp_fl.keras.callbacks import report as report_lib


def write(run: Run, path: str | os.PathLike[str]) -> None:
    """Writes what `callbacks.Report` writes of a training.

    Args:
      run: A run that has ended, perhaps early.
      path: The file.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: There is a folder in the file's place.
    """
    place = pathlib.Path(path)
    page = _OfDirectory(run, place).page(
        ended_early=run.result.get("stopped") == "interrupted"
    )
    _files.write_text(place, page)


def write_scalars(run: Run, log_dir: str | os.PathLike[str]) -> None:
    """Writes what the page's charts show, for TensorBoard.

    Args:
      run: A run that has ended, perhaps early.
      log_dir: The folder; it is made.

    Raises:
      ImportError: tensorboard is not installed.
      ValueError: There is a file in the folder's place.
    """
    report_lib.check_log_dir(log_dir)
    scalars = report_lib.Scalars(log_dir)
    for number, logs in _rounds(run):
        scalars.write(number, logs)
    scalars.close((run.path / run_directory.STATEMENT).read_text("utf-8"))


def _rounds(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Returns each round's values, the rounds counted from 1."""
    rows: dict[int, dict[str, float]] = {}
    for name, (rounds, values) in run.history.items():
        for place, value in zip(rounds, values, strict=True):
            rows.setdefault(place, {})[name] = value
    return sorted(rows.items())


class _OfDirectory(callbacks.Report):
    """A report of a run that has ended."""

    def __init__(self, run: Run, path: pathlib.Path):
        super().__init__(path)
        text = (run.path / run_directory.STATEMENT).read_text("utf-8")
        facts = json.loads((run.path / run_directory.STATEMENT_JSON).read_text("utf-8"))
        target = run.settings.target_epsilon
        self._settings_of_run = run.settings.to_dict()
        self.set_federated_model(
            types.SimpleNamespace(
                model=types.SimpleNamespace(name=run.path.resolve().name),
                rounds=run.result["rounds"],
                target=None
                if target is None
                else types.SimpleNamespace(epsilon=target),
                privacy_statement=lambda delta, format="text": (
                    facts if format == "dict" else text.strip()
                ),
            )
        )
        self._rounds = _rounds(run)

    def settings(self) -> dict[str, Any]:
        """See base class."""
        return self._settings_of_run
