r"""Runs a sweep over the settings of train.py, such as a grid.

    python scripts/sweep.py --config=digits_mechanisms \
        --output_dir=runs/digits_mechanisms

The configuration is a JSON file (its format is documented in
`tfdp_fl/experiments/sweeps.py`). Runs that have a result are skipped, so the same
command continues an interrupted sweep. The output directory gets one directory per run,
runs.csv and summary.csv.
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

# Before the next imports, which define flags for the mechanisms registered so far.
declaration.load_named_in(sys.argv[1:], "mechanism_module")

from tfdp_fl.experiments import sweeps

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "The configuration file, or the name of a built-in one: digits_epsilon or "
    "digits_mechanisms.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", None, "The directory of the runs; default: runs/<config's name>."
)
flags.DEFINE_string(
    "mechanism_module",
    None,
    "A Python file or module that registers your own mechanisms.",
)
_DATA_PATH = flags.DEFINE_string(
    "data_path", None, "Keras's mnist.npz, or the text of Shakespeare's plays."
)

# The folder of built-in configurations.
_BUILT_IN = pathlib.Path(__file__).parent / "configs"


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{_progress.name()}: {argv[1]!r} is not a flag.")
    if not _CONFIG.value:
        sys.exit(f"{_progress.name()}: --config must be given.")
    path = pathlib.Path(_CONFIG.value)
    if not path.exists() and (_BUILT_IN / f"{path.name}.json").exists():
        path = _BUILT_IN / f"{path.name}.json"
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
