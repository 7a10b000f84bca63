"""The directory that a run writes.

config.json   the settings, with every open choice filled in
history.csv   one row per round
model.keras   the trained Keras model
privacy.txt   the privacy statement
privacy.json  the same, for programs
report.html   everything on one page
accuracy.png  accuracy and epsilon by round, if matplotlib is installed
result.json   the numbers that a sweep compares
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

_OWN_FILES = (
    *(CONFIG, HISTORY, MODEL, STATEMENT, STATEMENT_JSON),
    *(REPORT, CHART, RESULT, LEDGER, CHECKPOINT),
)


def check(
    path: str | os.PathLike[str], overwrite: bool = False, resume: bool = False
) -> None:
    """Raises ValueError if a run must not write to a directory."""
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
    for name in _OWN_FILES:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def delete_checkpoints(path: str | os.PathLike[str]) -> None:
    """Removes the checkpoints of a run that has ended, but keeps their ledger."""
    path = pathlib.Path(path)
    (path / CHECKPOINT / LEDGER).replace(path / LEDGER)
    shutil.rmtree(path / CHECKPOINT)


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes JSON; numbers that are not finite become null."""
    value = _files.to_finite(_files.to_plain(value))
    _files.write_text(path, json.dumps(value, indent=2) + "\n")


class HistoryFile(callbacks.FederatedCallback):
    """Writes `history.csv`, one row per round, after each round.

    (Keras's `CSVLogger` fixes its columns in the first round. If `validation_freq` is
    more than 1, it would omit the validation metrics.) A resumed run keeps the rows of
    the rounds before it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = pathlib.Path(path)
        self._rows: list[dict[str, str]] = []

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Keeps the rows of earlier rounds."""
        del last_round
        rows = _read_rows(self._path)
        self._rows = [row for row in rows if int(row["round"]) <= first_round]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds a round's row; rounds are counted from 1, as in the printed output."""
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


def draw_chart(path: pathlib.Path, title: str) -> None:
    """Draws accuracy (left axis) and epsilon (right axis) by round."""
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
    """Returns the rows of a `history.csv` as text, without empty cells."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: cell for name, cell in row.items() if cell != ""}
            for row in csv.DictReader(file)
        ]
