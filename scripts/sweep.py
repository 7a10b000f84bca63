r"""Runs a grid over the settings of train.py.

    python scripts/sweep.py --config=digits_mechanisms \
        --output_dir=runs/digits_mechanisms

The configuration is a JSON file (`tfdp_fl/experiments/sweeps.py` says what may
stand in it). Runs that have a result are skipped, so the same command goes on
after an interrupt. The output directory receives a directory a run, runs.csv and
summary.csv.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

from tfdp_fl import _progress

_progress.load_tensorflow()

from absl import flags

from tfdp_fl.mechanisms import declaration

# Flags are made of the mechanisms that are known by then.
declaration.load_named_in(sys.argv[1:], "mechanism_module")

from tfdp_fl.experiments import sweeps, training

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "The configuration's file, or the name of one that comes with the program: "
    "digits_epsilon, digits_mechanisms.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", None, "Where the runs go; runs/<config's name> unless given."
)
flags.DEFINE_string(
    "mechanism_module",
    None,
    "A Python file or module that registers mechanisms of your own.",
)
_DATA_PATH = flags.DEFINE_string(
    "data_path", None, "mnist.npz of Keras, or Shakespeare's text."
)

# Those that come with the program.
_SHIPPED = pathlib.Path(__file__).parent / "configs"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{_progress.name()}: {argv[1]!r} is not a flag.")
    if not _CONFIG.value:
        sys.exit(f"{_progress.name()}: --config must be given.")
    path = pathlib.Path(_CONFIG.value)
    if not path.exists() and (_SHIPPED / f"{path.name}.json").exists():
        path = _SHIPPED / f"{path.name}.json"
    training.use_one_thread_per_operation()
    try:
        config = json.loads(path.read_text("utf-8"))
        if _DATA_PATH.value:
            config["base"] = {**config.get("base", {}), "data_path": _DATA_PATH.value}
        sweeps.run_sweep(config, _OUTPUT_DIR.value or pathlib.Path("runs") / path.stem)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"{_progress.name()}: {error}")


def run() -> None:
    """Entry point of the installed command."""
    _progress.run(main, __doc__)


if __name__ == "__main__":
    run()
