"""The directory that a run writes.

config.json   the settings, every open choice filled in
history.csv   a row a round
model.keras   the trained Keras model
privacy.txt   the privacy statement
privacy.json  the same, for programs
report.html   all of it as one page
accuracy.png  accuracy and epsilon against rounds, where matplotlib is installed
result.json   the figures that a sweep compares; written last
"""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import shutil
from typing import Any

from tfdp_fl import _files
from tfdp_fl.accounting import format_up
from tfdp_fl.keras import callbacks

CONFIG = "config.json"
HISTORY = "history.csv"
MODEL = "model.keras"
STATEMENT = "privacy.txt"
STATEMENT_JSON = "privacy.json"
REPORT = "report.html"
CHART = "accuracy.png"
RESULT = "result.json"
LEDGER = "ledger.jsonl"
CHECKPOINT = "checkpoint"

_OWNED = (
    *(CONFIG, HISTORY, MODEL, STATEMENT, STATEMENT_JSON),
    *(REPORT, CHART, RESULT, LEDGER, CHECKPOINT),
)


def check(
    path: str | os.PathLike[str], overwrite: bool = False, resume: bool = False
) -> None:
    """Raises ValueError if a run may not write to a directory."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output_dir={path} is a file.")
    if overwrite and resume:
        raise ValueError("--overwrite and --resume exclude each other.")
    if resume and not (path / CHECKPOINT).is_dir():
        raise ValueError(f"--resume: there is no interrupted run in {path}.")
    if path.is_dir() and any(path.iterdir()) and not (overwrite or resume):
        raise ValueError(
            f"--output_dir={path} is not empty; choose another, or add "
            "--overwrite or --resume."
        )


def clear(path: str | os.PathLike[str]) -> None:
    """Removes the files of an earlier run, and no others."""
    path = pathlib.Path(path)
    for name in _OWNED:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def delete_all_but_ledger(path: str | os.PathLike[str]) -> None:
    """Removes the checkpoints of a run that has ended, but for their ledger."""
    path = pathlib.Path(path)
    (path / CHECKPOINT / LEDGER).replace(path / LEDGER)
    shutil.rmtree(path / CHECKPOINT)


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes JSON; what is not finite becomes null."""
    value = _files.to_finite(_files.to_plain(value))
    _files.write_text(path, json.dumps(value, indent=2) + "\n")


class HistoryFile(callbacks.FederatedCallback):
    """Keeps `history.csv` up to date: a row a round, written as it ends.

    Keras's `CSVLogger` fixes its columns in the first round, before anything
    was validated if `validation_freq` is more than 1. A resumed run goes on
    below the rows of the rounds before it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = pathlib.Path(path)
        self._rows: list[dict[str, str]] = []

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Keeps the rows of the rounds that were already run."""
        del last_round
        rows = _read_rows(self._path)
        self._rows = [row for row in rows if int(row["round"]) <= first_round]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds a round's row; rounds are counted from 1, as printed."""
        row = {"round": epoch + 1, **(logs or {})}
        self._rows.append(
            {
                name: format_up(value, 7) if name == "epsilon" else f"{value:.7g}"
                for name, value in row.items()
            }
        )
        columns = dict.fromkeys(name for row in self._rows for name in row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        _files.write_text(self._path, text.getvalue())


def draw(path: pathlib.Path, title: str) -> None:
    """Draws accuracy (left axis) and epsilon (right) against rounds."""
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        return  # The report says how to get charts.
    chart = figure.Figure(figsize=(7, 4), layout="constrained")
    left = chart.add_subplot(title=title, xlabel="round", ylabel="accuracy")
    right = left.twinx()
    rows = _read_rows(path / HISTORY)
    for axes, name, line in ((left, "val_accuracy", "C0-"), (right, "epsilon", "C1--")):
        points = [(int(row["round"]), float(row[name])) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), line)
    left.set_ylim(0, 1)
    left.grid(alpha=0.3)
    right.set(ylabel="epsilon (dashed)", ylim=(0, None))
    chart.savefig(path / CHART, dpi=100)


def _read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of a `history.csv`, as text, empty cells left out."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: cell for name, cell in row.items() if cell != ""}
            for row in csv.DictReader(file)
        ]
