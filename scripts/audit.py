r"""Attacks a training with canary clients, and compares with what is claimed.

    python scripts/audit.py --mechanism=fixed --sampling=shuffled --rounds=5
    python scripts/audit.py --mechanism=adaptive --num_canaries=4000 \
        --iterates=all --output_dir=audits/adaptive

The flags are those of train.py, and three more. The canaries train along
(docs/auditing.md): how much of each is found in the model tells an epsilon. The
output directory receives audit.json and audit.png, the scores of canaries that
took part and of such that did not. The exit status is 1 if the estimate is
significantly above the claim: something is broken. An estimate below it proves
nothing.

Local mechanisms, and noise of the clients' own, are refused, with the reason.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from tfdp_fl import _console

_console.load_tensorflow()

from absl import flags

from tfdp_fl.mechanisms import registry

# Flags are made of the mechanisms that are known by then.
registry.load_named_in(sys.argv[1:], "mechanism_module")

from tfdp_fl import auditing
from tfdp_fl.experiments import Settings, audits, setting_flags, training
from tfdp_fl.experiments.settings import groups as settings_groups

# An audit is one fit, and saves nothing to go on from.
_LEFT_OUT = {"checkpoint_every", "validation_freq", "secure_aggregation"}
setting_flags.define({field.name for field in dataclasses.fields(Settings)} - _LEFT_OUT)

_NUM_CANARIES = flags.DEFINE_integer(
    "num_canaries", 1000, "K; a thousand tell epsilon to about a tenth."
)
_ITERATES = flags.DEFINE_enum(
    "iterates",
    "final",
    ("final", "all"),
    "What the attacker sees: the model before and after, or after each round.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "audits", "Where audit.json and audit.png go."
)
_VERBOSE = flags.DEFINE_enum(
    "verbose", "1", ("0", "1", "2"), "0 nothing, 1 a bar, 2 a line a round."
)
_GROUPS = {
    "The audit": ("num_canaries", "iterates", "output_dir", "verbose"),
    **{
        title: [name for name in names if name not in _LEFT_OUT]
        for title, names in settings_groups().items()
    },
}
# What a first audit needs.
_FIRST = (
    *("num_canaries", "iterates", "output_dir"),
    *("dataset", "data_path", "num_clients", "model"),
    *("mechanism", "target_epsilon", "sampling", "clients_per_round", "rounds"),
)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        sys.exit(f"{_console.name()}: {argv[1]!r} is not a flag.")
    training.use_one_thread_per_operation()
    try:
        settings = Settings(**setting_flags.given())
        audit = auditing.CanaryAudit(_NUM_CANARIES.value, _ITERATES.value)
        prepared = training.prepare(settings)
        path = pathlib.Path(_OUTPUT_DIR.value)
        path.mkdir(parents=True, exist_ok=True)
        result = audits.run(prepared, audit, path, int(_VERBOSE.value))
    except (ImportError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{_console.name()}: {error}")
    print(
        f"\n{result['mechanism']}, {result['rounds']} rounds, "
        f"{result['sampling']} sampling, with "
        f"{result['num_canaries']} canaries in {result['seconds']:.0f} s:\n"
        f"Claimed:  {result['claimed']:.3f} at delta = {result['delta']:.3g}.\n"
        f"Found:    {result['estimate']:.3f} (95 % interval "
        f"{result['low']:.3f} to {result['high']:.3f}).\n"
        f"Files in {path}: {audits.CHART}, {audits.RESULT}"
    )
    if result["above_the_claim"]:
        sys.exit(
            f"{_console.name()}: the estimate is significantly above the claim: "
            "something is broken."
        )


def run() -> None:
    """Entry point of the installed command."""
    _console.run(main, __doc__, _GROUPS, _FIRST)


if __name__ == "__main__":
    run()
