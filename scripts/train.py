r"""Trains a Keras model on many clients with a client-level guarantee.

    python scripts/train.py --dataset=digits --mechanism=adaptive \
        --target_epsilon=4 --output_dir=runs/digits

    python scripts/train.py --dataset=mnist --data_path=mnist.npz \
        --num_clients=1000 --clients_per_round=100 --output_dir=runs/mnist

The flags are the fields of `tfdp_fl.experiments.Settings`. Defaults depend on the data
set and the mechanism, and are printed. The output directory gets history.csv (one row
per round), model.keras (loads without this package), privacy.txt and privacy.json (the
statement), report.html (everything on one page), accuracy.png, config.json and
result.json.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tfdp_fl import _progress, accounting

_progress.load_tensorflow()

from absl import flags

from tfdp_fl.mechanisms import declaration

# Before the next imports, which define flags for the mechanisms registered so far.
declaration.load_named_in(sys.argv[1:], "mechanism_module")

from tfdp_fl.experiments import Settings, training
from tfdp_fl.experiments import settings as settings_lib

settings_lib.define_flags()

_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir",
    None,
    "The directory of the files; default: runs/<dataset>_<mechanism>. It must be empty "
    "or not exist, unless --overwrite or --resume is given.",
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Replace the files of an earlier run in --output_dir."
)
_RESUME = flags.DEFINE_bool(
    "resume",
    False,
    "Resume the interrupted run in --output_dir, with the settings in its "
    "config.json. A killed run repeats the rounds after its last checkpoint (see "
    "--checkpoint_every).",
)
_VERBOSE = flags.DEFINE_enum(
    "verbose",
    "auto",
    ("auto", "0", "1", "2"),
    "0: silent; 1: a progress bar; 2: a line per round; auto: 1 on a terminal, "
    "otherwise 2.",
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{_progress.name()}: {argv[1]!r} is not a flag.")
    given = settings_lib.given_flags()
    try:
        settings = Settings(**given)
        output_dir = _OUTPUT_DIR.value or os.path.join(
            "runs", f"{settings.dataset}_{settings.mechanism}"
        )
        training.check_directory(output_dir, _OVERWRITE.value, _RESUME.value)
        if _RESUME.value:
            settings = _read_settings(output_dir, given)
        prepared = training.prepare(settings)
    except (ImportError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{_progress.name()}: {error}")
    _print_settings(prepared.settings)
    # Like Ctrl-C: the finished rounds are saved, and the run can be resumed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = training.run(
            prepared,
            output_dir,
            overwrite=_OVERWRITE.value,
            resume=_RESUME.value,
            verbose=_verbosity(),
        )
    except KeyboardInterrupt:  # While files were written, at the end.
        sys.exit(f"{_progress.name()}: interrupted; --resume continues the run.")
    _print_result(result, output_dir)


def _read_settings(output_dir: str, given: dict[str, Any]) -> Settings:
    """Returns the settings of the run to resume."""
    settings = Settings.read(os.path.join(output_dir, training.CONFIG))
    for name, value in given.items():
        if str(getattr(settings, name)) != str(value):
            raise ValueError(
                f"--resume uses the settings in {output_dir}, which do not have "
                f"--{name}={value}."
            )
    return settings


def _verbosity() -> int:
    if _VERBOSE.value == "auto":
        return 1 if sys.stdout.isatty() else 2
    return int(_VERBOSE.value)


def _print_settings(settings: Settings) -> None:
    defaults = Settings()
    chosen = [
        f"--{name}={value}"
        for name, value in dataclasses.asdict(settings).items()
        if value != getattr(defaults, name) and name != "data_path"
    ]
    print("Settings: " + " ".join(chosen))


def _print_result(result: dict, output_dir: str) -> None:
    print(
        f"\nAccuracy: {result['accuracy']:.4f}, after {result['rounds']} rounds in "
        f"{result['seconds']:.0f} s"
        + (f" ({result['stopped']})." if result["stopped"] else ".")
    )
    if result["trust_model"] == "none":
        print("Epsilon:  none; there is no privacy guarantee.")
    else:
        scope = {
            ("central", "client"): "for each client, given the trained model",
            ("local", "client"): "for each client, given what it sends",
            ("local", "record"): "for each example, given what its client sends",
        }[result["trust_model"], result["privacy_unit"]]
        print(
            f"Epsilon:  {_format_epsilon(result['epsilon'])} at delta = "
            f"{accounting.format_up(result['delta'])} "
            f"({result['accountant'].upper()}) {scope}."
        )
    if result["stopped"] == "interrupted":
        print("Interrupted; --resume continues the run.")
    names = sorted(os.listdir(output_dir))
    print(f"Files in {output_dir}: {', '.join(names)}")


def _format_epsilon(epsilon: float) -> str:
    """Returns an epsilon as text, rounded up."""
    if not math.isfinite(epsilon):
        return "infinite"
    return accounting.format_up(epsilon)


def run() -> None:
    """Entry point of the installed command."""
    _progress.run(main, __doc__, settings_lib.__name__)


if __name__ == "__main__":
    run()
