r"""Writes a run of train.py as one HTML page, with nothing outside it.

    python scripts/report.py runs/digits
    python scripts/report.py --output=report.html runs/digits

The page has the privacy statement, charts of accuracy, loss, epsilon, clip and
cohorts, and the settings: what `tfdp_fl.callbacks.Report` writes of a training.
Most of what is drawn was computed from clients' data without noise, and the
page says so; publish it only where that may be seen.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

from tfdp_fl import _console

_console.load_tensorflow()

from absl import flags

from tfdp_fl.experiments import Run, run_directory

_OUTPUT = flags.DEFINE_string(
    "output", None, "The file; report.html in the run's directory unless given."
)
_GROUPS = {"Where it goes": ("output",)}


def main(argv: Sequence[str]) -> None:
    try:
        if len(argv) != 2:
            raise ValueError("name one directory of a run.")
        run = Run.read(argv[1])
        if not run.result:
            raise ValueError(f"{run.path} holds a run that has not ended.")
        path = pathlib.Path(_OUTPUT.value or run.path / run_directory.REPORT)
        run_directory.write_report(run, path)
    except (OSError, ValueError) as error:
        sys.exit(f"{_console.name()}: {error}")
    print(path)


def run() -> None:
    """Entry point of the installed command."""
    _console.run(main, __doc__, _GROUPS)


if __name__ == "__main__":
    run()
