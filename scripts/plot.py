r"""Draws runs together.

    python scripts/plot.py --output=chart.png runs/a runs/b
    python scripts/plot.py --against=tradeoff --group_by=mechanism \
        --output=tradeoff.png runs/digits_mechanisms

Every directory is searched for runs of train.py or sweep.py. The seeds of a sweep's
configuration are one colour, with their mean as a thick line.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from tfdp_fl import _console

_console.load_tensorflow()

from absl import flags

from tfdp_fl.experiments import plots, sweeps
from tfdp_fl.experiments.settings import OPTIONS

_AGAINST = flags.DEFINE_enum(
    "against",
    "rounds",
    ("rounds", "tradeoff"),
    "Accuracy against rounds, or "
    "final accuracy against final epsilon (means over the seeds, a line a group).",
)
_GROUP_BY = flags.DEFINE_list(
    "group_by",
    [],
    "Settings by which runs belong together, as in mechanism,target_epsilon.",
)
_OUTPUT = flags.DEFINE_string("output", "chart.png", "The .png or .pdf file.")


def main(argv: Sequence[str]) -> None:
    try:
        if len(argv) < 2:
            raise ValueError("name at least one directory of runs.")
        _draw(argv[1:])
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"{_console.name()}: {error}")


def _draw(paths: Sequence[str]) -> None:
    for name in _GROUP_BY.value:
        if name not in OPTIONS:
            raise ValueError(f"--group_by: {name!r} is no setting.")
    path = pathlib.Path(_OUTPUT.value)
    if path.suffix not in (".png", ".pdf"):
        raise ValueError(f"--output must end in .png or .pdf, got {path}.")
    groups = sweeps.groups_of(sweeps.read_runs(paths), _GROUP_BY.value)
    plots.plot_comparison(groups, path, _AGAINST.value)
    print(f"{sum(map(len, groups.values()))} runs: {path}")


def run() -> None:
    """Entry point of the installed command."""
    _console.run(main, __doc__)


if __name__ == "__main__":
    run()
