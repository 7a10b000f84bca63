r"""Draws runs together: against rounds, against epsilon, or their frontier.

    python scripts/plot.py --against=epsilon --output=chart.png runs/a runs/b
    python scripts/plot.py --against=frontier --group_by=mechanism \
        --output=frontier.png runs/digits_mechanisms

Every directory is searched for runs of train.py or sweep.py. The seeds of a
sweep's configuration are one colour, with their mean as a thick line.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from absl import app, flags

from tfdp_fl.experiments import Settings, plots, sweeps

_AGAINST = flags.DEFINE_enum(
    "against",
    "rounds",
    ("rounds", "epsilon", "frontier"),
    "Accuracy against rounds, against the epsilon spent by then, or final "
    "accuracy against final epsilon.",
)
_GROUP_BY = flags.DEFINE_list(
    "group_by",
    [],
    "Settings by which runs belong together, as in mechanism,target_epsilon.",
)
_OUTPUT = flags.DEFINE_string("output", "chart.png", "The .png or .pdf file.")


def main(argv: Sequence[str]) -> None:
    names = {field.name for field in dataclasses.fields(Settings)}
    try:
        if len(argv) < 2:
            raise ValueError("name at least one directory of runs.")
        for name in _GROUP_BY.value:
            if name not in names:
                raise ValueError(f"--group_by: {name!r} is no setting.")
        path = pathlib.Path(_OUTPUT.value)
        if path.suffix not in (".png", ".pdf"):
            raise ValueError(f"--output must end in .png or .pdf, got {path}.")
        groups = sweeps.groups_of(sweeps.read_runs(argv[1:]), _GROUP_BY.value)
        plots.plot_comparison(groups, path, _AGAINST.value)
    except (OSError, ValueError) as error:
        sys.exit(f"plot.py: {error}")
    print(f"{sum(map(len, groups.values()))} runs: {path}")


def run() -> None:
    """Entry point of the program."""
    app.run(main)


if __name__ == "__main__":
    run()
