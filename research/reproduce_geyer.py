r"""Reproduces Table 1 of Geyer et al. (2017) on MNIST.

    python research/reproduce_geyer.py --data_path=mnist.npz

Runs the sweeps in research/configs/geyer, one after the other: for K = 100,
1000 and 10000 clients of two label shards each, at epsilon 8, the algorithm as
published, with a private median, and the best that this package does. Runs
that have a result are skipped and long ones continue from their checkpoint,
so the same command goes on after an interrupt. The output directory receives a
directory a sweep, and table1.md, table1.csv and runs.csv.

The settings were chosen on training points held out from the clients, as in

    python scripts/sweep.py --config=research/configs/geyer/search_k100.json \
        --set=data_path=mnist.npz
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from research import geyer
from tfdp_fl.experiments import training

_DATA_PATH = flags.DEFINE_string(
    "data_path", None, "MNIST as Keras stores it, mnist.npz."
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/geyer", "Where the runs and the table go."
)
_CLIENTS = flags.DEFINE_multi_enum(
    "clients",
    [str(k) for k in geyer.CLIENTS],
    [str(k) for k in geyer.CLIENTS],
    "K; several may be given.",
)
_ROWS = flags.DEFINE_multi_enum(
    "rows",
    list(geyer.ROWS),
    list(geyer.ROWS),
    "Which rows for each K; non_private is there for K=100.",
)
_SEEDS = flags.DEFINE_integer(
    "seeds",
    None,
    "At most so many seeds a row; by default all.",
    lower_bound=1,
)
_QUICK = flags.DEFINE_bool(
    "quick",
    False,
    "Three rounds of one seed a row, under ten minutes: to see that everything "
    "works. Give it an output_dir of its own.",
)
_CONFIGS = flags.DEFINE_string(
    "configs",
    str(pathlib.Path(__file__).parent / "configs" / "geyer"),
    "The directory of the sweeps' configurations.",
)
_VERBOSE = flags.DEFINE_integer("verbose", 0, "1 a progress bar, 2 a line a round.")


def main(argv: Sequence[str]) -> None:
    """Runs what the flags ask for, and writes the tables."""
    if len(argv) > 1:
        sys.exit(f"reproduce_geyer.py: {argv[1]!r} is not a flag.")
    if not _DATA_PATH.value:
        sys.exit("reproduce_geyer.py: --data_path must be given.")
    training.use_one_thread_per_operation()
    try:
        wanted = geyer.names([int(k) for k in _CLIENTS.value], _ROWS.value)
        failed = geyer.run_all(
            geyer.read_configs(
                _CONFIGS.value,
                wanted,
                _DATA_PATH.value,
                seeds=1 if _QUICK.value else _SEEDS.value,
                rounds=3 if _QUICK.value else None,
            ),
            _OUTPUT_DIR.value,
            say=lambda line: print(line, flush=True),
            verbose=_VERBOSE.value,
        )
        print(geyer.write_results(_OUTPUT_DIR.value))
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"reproduce_geyer.py: {error}")
    if failed:
        sys.exit(f"reproduce_geyer.py: {len(failed)} runs failed.")


def run() -> None:
    """Entry point of the program."""
    app.run(main)


if __name__ == "__main__":
    run()
