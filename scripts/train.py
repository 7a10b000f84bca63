r"""Trains a Keras model on many clients with a client-level guarantee.

    python scripts/train.py --dataset=digits --mechanism=adaptive \
        --target_epsilon=4 --output_dir=runs/digits

    python scripts/train.py --dataset=mnist --data_path=mnist.npz \
        --num_clients=1000 --clients_per_round=100 --output_dir=runs/mnist

The flags are the fields of `tfdp_fl.experiments.Settings`; a choice that is
left open is made by the data set and the mechanism, and printed. The output
directory receives history.csv (a row a round), model.keras (loads without this
package), privacy.txt and privacy.json (the statement), report.html (all of it
as one page), accuracy.png, config.json and result.json.
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

# Flags are made of the mechanisms that are known by then.
declaration.load_named_in(sys.argv[1:], "mechanism_module")

from tfdp_fl.experiments import Settings, run_directory, training
from tfdp_fl.experiments import settings as settings_lib

settings_lib.define_flags()

_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir",
    None,
    "Where the files go; runs/<dataset>_<mechanism> unless given. It must be "
    "empty or not exist, but for --overwrite and --resume.",
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Replace the files of an earlier run in --output_dir."
)
_RESUME = flags.DEFINE_bool(
    "resume",
    False,
    "Go on with the run in --output_dir, which was interrupted, with the "
    "settings in its config.json. A run that was killed "
    "loses what came after the last --checkpoint_every.",
)
_VERBOSE = flags.DEFINE_enum(
    "verbose",
    "auto",
    ("auto", "0", "1", "2"),
    "0 nothing, 1 a progress bar, 2 a line a round; auto: 1 on a terminal, "
    "otherwise 2.",
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{_progress.name()}: {argv[1]!r} is not a flag.")
    given = settings_lib.given_flags()
    if training.use_one_thread_per_operation():
        print(
            "One thread for each TensorFlow operation, and clients side by "
            f"side on {os.cpu_count()} cores."
        )
    try:
        settings = Settings(**given)
        output_dir = _OUTPUT_DIR.value or os.path.join(
            "runs", f"{settings.dataset}_{settings.mechanism}"
        )
        run_directory.check(output_dir, _OVERWRITE.value, _RESUME.value)
        if _RESUME.value:
            settings = _settings_of(output_dir, given)
        prepared = training.prepare(settings)
    except (ImportError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{_progress.name()}: {error}")
    _print_settings(prepared.settings)
    # As Ctrl-C does: what ran is saved, and can be gone on with.
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
        sys.exit(f"{_progress.name()}: interrupted; --resume goes on.")
    _print_result(result, output_dir)


def _settings_of(output_dir: str, given: dict[str, Any]) -> Settings:
    """Returns the settings of the run to resume."""
    settings = Settings.read(os.path.join(output_dir, run_directory.CONFIG))
    for name, value in given.items():
        if str(getattr(settings, name)) != str(value):
            raise ValueError(
                f"--resume goes on with the settings of {output_dir}, which "
                f"are not --{name}={value}."
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
        whom = {
            ("central", "client"): "for each client, of the trained model",
            ("local", "client"): "for each client, of what it sends",
            ("local", "record"): "for each example, of what its client sends",
        }[result["trust_model"], result["privacy_unit"]]
        print(
            f"Epsilon:  {_up(result['epsilon'])} at delta = "
            f"{accounting.format_up(result['delta'])} "
            f"({result['accountant'].upper()}) {whom}."
        )
    if result["stopped"] == "interrupted":
        print("Interrupted; --resume goes on.")
    names = sorted(os.listdir(output_dir))
    print(f"Files in {output_dir}: {', '.join(names)}")


def _up(epsilon: float) -> str:
    """Returns an epsilon rounded up, never down."""
    if not math.isfinite(epsilon):
        return "infinite"
    return accounting.format_up(epsilon)


def run() -> None:
    """Entry point of the installed command."""
    _progress.run(main, __doc__, settings_lib.__name__)


if __name__ == "__main__":
    run()
