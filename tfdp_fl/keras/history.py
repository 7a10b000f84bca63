"""The `History` that `fit` returns."""

from __future__ import annotations

import tensorflow as tf


class History(tf.keras.callbacks.History):
    """Keras's own, which the model holds from the beginning of `fit` on.

    Keras has the model hold it anew after every epoch. Setting an attribute of
    a model takes as long as a good part of what Python does in a small round.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Notes a round's values."""
        if self.model.history is not self:
            super().on_epoch_end(epoch, logs)
            return
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
