r"""Writes a run of train.py as one HTML page, with nothing outside it.

    python scripts/report.py runs/digits
    python scripts/report.py --output=report.html runs/digits

The page has the privacy statement, charts of accuracy, loss, epsilon, clip and
cohorts, and the settings: what `tfdp_fl.callbacks.Report` writes of a training.
Most of what is drawn was computed from clients' data without noise, and the
page says so; publish it only where that may be seen.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any

from tfdp_fl import _console

_console.load_tensorflow()

from absl import flags

from tfdp_fl import _files
from tfdp_fl.experiments import Run, run_directory
from tfdp_fl.keras import callbacks

_OUTPUT = flags.DEFINE_string(
    "output", None, "The file; report.html in the run's directory unless given."
)
_GROUPS = {"Where it goes": ("output",)}


class _OfDirectory(callbacks.Report):
    """A report of a run that has ended."""

    def __init__(self, run: Run, path: pathlib.Path):
        super().__init__(path)
        text = (run.path / run_directory.STATEMENT).read_text("utf-8")
        facts = json.loads(
            (run.path / run_directory.STATEMENT_JSON).read_text("utf-8")
        )
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
        rows: dict[int, dict[str, float]] = {}
        for name, (rounds, values) in run.history.items():
            for place, value in zip(rounds, values, strict=True):
                rows.setdefault(place, {})[name] = value
        self._rounds = sorted(rows.items())

    def settings(self) -> dict[str, Any]:
        """See base class."""
        return self._settings_of_run


def main(argv: Sequence[str]) -> None:
    try:
        if len(argv) != 2:
            raise ValueError("name one directory of a run.")
        run = Run.read(argv[1])
        if not run.result:
            raise ValueError(f"{run.path} holds a run that has not ended.")
        path = pathlib.Path(_OUTPUT.value or run.path / "report.html")
        page = _OfDirectory(run, path).page(
            ended_early=run.result.get("stopped") == "interrupted"
        )
        _files.write_text(path, page)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"report.py: {error}")
    print(path)


def run() -> None:
    """Entry point of the installed command."""
    _console.run(main, __doc__, _GROUPS)


if __name__ == "__main__":
    run()
