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
        shown = [
            (name, value)
            for name, value in logs.items()
            if name not in _HIDDEN
            and not (name in _RARE and not value)
            and not (isinstance(value, float) and math.isnan(value))
        ]
        if self._bar is not None:
            self._bar.stateful_metrics = {name for name, _ in shown}
            self._bar.update(round_index + 1 - self._first_round, shown)
            return
        line = f"Round {round_index + 1}/{self._last_round} - {seconds:.2f}s"
        for name, value in shown:
            word = f" - {name}: {value:.4g}"
            if len(line) + len(word) <= _LONGEST_LINE:
                line += word
        print(line, flush=True)
