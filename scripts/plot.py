r"""Draws runs together, or prints a sweep's table.

    python scripts/plot.py --output=chart.png runs/a runs/b
    python scripts/plot.py --against=tradeoff --group_by=mechanism \
        --output=tradeoff.png runs/digits_mechanisms
    python scripts/plot.py --kind=table --rows=target_epsilon \
        --columns=constant docs/results/nbafl_tradeoff

For a chart every directory is searched for runs of train.py or sweep.py. The
seeds of a sweep's configuration are one colour, with their mean as a thick
line. A table, in Markdown, needs no more than the summary.csv of a sweep.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from tfdp_fl import _console

_console.load_tensorflow()

from absl import flags

from tfdp_fl.experiments import Settings, plots, sweeps, tables

_KIND = flags.DEFINE_enum(
    "kind", "chart", ("chart", "table"), "A file, or Markdown that is printed."
)

_AGAINST = flags.DEFINE_enum(
    "against",
    "rounds",
    ("rounds", "tradeoff"),
    "chart: accuracy against rounds, or "
    "final accuracy against final epsilon (means over the seeds, a line a group).",
)
_GROUP_BY = flags.DEFINE_list(
    "group_by",
    [],
    "chart: settings by which runs belong together, as in mechanism,target_epsilon.",
)
_OUTPUT = flags.DEFINE_string("output", "chart.png", "chart: the .png or .pdf file.")
_ROWS = flags.DEFINE_list(
    "rows", [], "table: columns of summary.csv that make its rows."
)
_COLUMNS = flags.DEFINE_string(
    "columns", None, "table: one whose values become columns of the table."
)
_VALUES = flags.DEFINE_list(
    "values", ["accuracy"], "table: what is shown; one name with --columns."
)
_WHERE = flags.DEFINE_list(
    "where", [], "table: only these, as in mechanism=fixed,rounds=20."
)

_GROUPS = {
    "What is made": ("kind", "output"),
    "A chart": ("against", "group_by"),
    "A table": ("rows", "columns", "values", "where"),
}


def main(argv: Sequence[str]) -> None:
    try:
        if len(argv) < 2:
            raise ValueError("name at least one directory of runs.")
        if _KIND.value == "table":
            _print_tables(argv[1:])
        else:
            _draw(argv[1:])
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"{_console.name()}: {error}")


def _draw(paths: Sequence[str]) -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    for name in _GROUP_BY.value:
        if name not in names:
            raise ValueError(f"--group_by: {name!r} is no setting.")
    path = pathlib.Path(_OUTPUT.value)
    if path.suffix not in (".png", ".pdf"):
        raise ValueError(f"--output must end in .png or .pdf, got {path}.")
    groups = sweeps.groups_of(sweeps.read_runs(paths), _GROUP_BY.value)
    plots.plot_comparison(groups, path, _AGAINST.value)
    print(f"{sum(map(len, groups.values()))} runs: {path}")


def _print_tables(paths: Sequence[str]) -> None:
    if not _ROWS.value:
        raise ValueError("--kind=table needs --rows.")
    where = {}
    for text in _WHERE.value:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"--where must be name=value, got {text!r}.")
        where[name] = value
    for path in paths:
        table = tables.markdown(
            tables.read_summary(path),
            _ROWS.value,
            _COLUMNS.value,
            _VALUES.value,
            where,
        )
        print(table)


def run() -> None:
    """Entry point of the installed command."""
    _console.run(main, __doc__, _GROUPS)


if __name__ == "__main__":
    run()
