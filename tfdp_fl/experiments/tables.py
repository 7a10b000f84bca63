"""Markdown tables of a sweep, from the `summary.csv` that it wrote."""

from __future__ import annotations

import csv
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

from tfdp_fl import _validate
from tfdp_fl.experiments import sweeps

_NOTHING = "–"
_EPSILONS = ("epsilon", "central_epsilon")


def read_summary(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """Returns the rows of a `summary.csv`, or of the one in a directory.

    Raises:
      ValueError: There is none, or it has no rows.
    """
    path = pathlib.Path(path)
    if path.is_dir():
        path /= sweeps.SUMMARY_TABLE
    if not path.is_file():
        raise ValueError(f"{path} is not there; scripts/sweep.py writes it.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path} has no rows.")
    return rows


def markdown(
    rows: Sequence[Mapping[str, str]],
    by: Sequence[str],
    columns: str | None = None,
    values: Sequence[str] = ("accuracy",),
    where: Mapping[str, str] | None = None,
) -> str:
    """Returns a Markdown table.

    An accuracy comes with its standard deviation over the runs; an epsilon is
    rounded up, never down.

    Args:
      rows: From `read_summary`.
      by: What a row of the table is: names of the summary's columns.
      columns: A name whose values become columns; every cell is then
        `values[0]`. None: the columns are `values`.
      values: Names of the summary's columns.
      where: Only rows that have these values.

    Raises:
      ValueError: A name is no column, or two rows would fall into one cell.
    """
    where = where or {}
    names = [*by, *values, *where, *([columns] if columns else [])]
    for name in names:
        _validate.one_of(tuple(rows[0]), column=name)
    kept = [r for r in rows if all(r[k] == v for k, v in where.items())]
    if columns is None:
        head = [*by, *values]
        body = [
            [_shown(row, n) for n in by] + [_shown(row, n) for n in values]
            for row in kept
        ]
    else:
        head, body = _pivoted(kept, by, columns, values)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pivoted(
    rows: Sequence[Mapping[str, str]],
    by: Sequence[str],
    columns: str,
    values: Sequence[str],
) -> tuple[list[str], list[list[str]]]:
    if len(values) != 1:
        raise ValueError(
            f"values must be one name where columns is given, got {values}."
        )
    titles = list(dict.fromkeys(_shown(row, columns) for row in rows))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = cells.setdefault(tuple(_shown(row, n) for n in by), {})
        title = _shown(row, columns)
        if title in line:
            raise ValueError(
                f"by={','.join(by)} and columns={columns} must tell the runs "
                "apart; two have the same."
            )
        line[title] = _shown(row, values[0])
    head = [*by, *(f"{columns}={title}" for title in titles)]
    body = [
        [*key, *(line.get(title, _NOTHING) for title in titles)]
        for key, line in cells.items()
    ]
    return head, body


def _shown(row: Mapping[str, str], name: str) -> str:
    text = row[name]
    if not text:
        return _NOTHING
    if name == "accuracy":
        spread = f" ± {float(row['stddev']):.3f}" if row.get("stddev") else ""
        return f"{float(text):.3f}{spread}"
    if name in _EPSILONS:
        return rounded_up(float(text))
    if name == "delta":
        return f"{float(text):.2g}"
    if name == "seconds":
        return f"{float(text):.0f}"
    return text


def rounded_up(epsilon: float, decimals: int = 2) -> str:
    """Returns an epsilon as text, rounded up."""
    if not math.isfinite(epsilon):
        return "none"
    # A calibrated epsilon of 8 - 1e-12, read back as 8, is no more than 8.
    scale = 10**decimals
    return f"{math.ceil(round(scale * epsilon, 6)) / scale:.{decimals}f}"
