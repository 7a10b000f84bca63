"""A progress bar over rounds."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

# They are in `History`; a line shows how good the model is, and what it costs.
_HIDDEN = (
    "between_client_variance",
    "client_noise_stddev",
    "clip_norm",
    "clipped_fraction",
    "cohort_size",
    "mean_update_norm",
    "noise_stddev",
    "update_scale",
)
_LONGEST_LINE = 100
# What Keras's bar takes of a line before the values.
_BAR = 48
# The trained model's quality and its cost come first, where not all fits.
_FIRST = ("epsilon", "val_accuracy", "abandoned_rounds")
# Of interest only where there is any.
_RARE = ("abandoned_rounds", "discarded_clients", "failed_clients")


class RoundProgress:
    """Shows rounds as Keras shows batches.

    `verbose` 1 is one bar for the whole training, 2 one line a round, 0
    nothing.
    """

    def __init__(self, verbose: int, first_round: int, last_round: int):
        self._verbose = verbose
        self._first_round = first_round
        self._last_round = last_round
        self._bar: Any = None
        if verbose == 1:
            self._bar = tf.keras.utils.Progbar(
                last_round - first_round, unit_name="round", verbose=1
            )

    def end_of_round(
        self, round_index: int, logs: dict[str, float], seconds: float
    ) -> None:
        """Shows a round that ended."""
        if not self._verbose:
            return
        start = f"Round {round_index + 1}/{self._last_round} - {seconds:.2f}s"
        left = _LONGEST_LINE - (len(start) if self._bar is None else _BAR)
        shown: list[tuple[str, float]] = []
        for name in sorted(logs, key=lambda name: name not in _FIRST):
            value = logs[name]
            if name in _HIDDEN or (name in _RARE and not value) or math.isnan(value):
                continue
            length = len(f" - {name}: {value:.4f}")
            if length <= left:
                left -= length
                shown.append((name, value))
        if self._bar is not None:
            self._bar.stateful_metrics = {name for name, _ in shown}
            self._bar.update(round_index + 1 - self._first_round, shown)
            return
        print(start + "".join(f" - {n}: {v:.4g}" for n, v in shown), flush=True)
