"""Losses for clients that hold few of the classes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.terms import Json


@tf.keras.utils.register_keras_serializable("tfdp_fl")
class BalancedSoftmaxCrossentropy(tf.keras.losses.Loss):
    """Cross entropy that allows for the labels a client happens to hold.

    A client with two of ten classes learns, before anything else, that the
    other eight never occur. Its update is large, says nothing about images,
    and other clients' updates cancel it in the sum; yet it uses up the clip,
    and the noise stays. Here, the class frequencies pi of the client's batch
    enter the softmax as a known prior, so the logits z need not learn them:

        loss(y, z) = -log(pi_y exp(z_y) / sum_c pi_c exp(z_c)),
        pi_c = (n_c / n + smoothing) / (1 + C smoothing),

    with n_c of the batch's n labels equal to c. If all classes are equally
    frequent in a batch, this is the usual cross entropy; on a large, balanced
    test set, nearly so. The trained model needs no correction. The loss is
    computed at the client, before clipping, so it changes no guarantee.

    A batch must reflect the client's labels: use `fit(shuffle=True)`, or a
    batch size as large as the client's data.

    Source: balanced softmax, Ren et al., Balanced Meta-Softmax for Long-Tailed
    Visual Recognition (2020); with each client's own label counts, Zhang et
    al., Federated Learning with Label Distribution Skew via Logits Calibration
    (2022).
    """

    def __init__(
        self,
        smoothing: float = 0.01,
        reduction: str = "sum_over_batch_size",
        name: str = "balanced_softmax_crossentropy",
    ):
        """Makes the loss.

        Args:
          smoothing: Added to each class's share; positive. A
            class that the batch lacks keeps the share
            `smoothing / (1 + C smoothing)`: the smaller, the less a client's
            update says about classes it has never seen. Large values are the
            usual cross entropy.
          reduction: As in any Keras loss.
          name: As in any Keras loss.

        Raises:
          TypeError, ValueError: `smoothing` is not a positive, finite number.
        """
        super().__init__(reduction=reduction, name=name)
        self.smoothing = _validate.positive(smoothing=smoothing)

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """Returns each example's loss.

        Args:
          y_true: Integer labels, `[n]`, `[n, 1]`, or with more axes between.
          y_pred: Logits, `[n, C]`, or with the same axes between.

        Returns:
          `[n]`, or with the same axes between; of the dtype of `y_pred`.
        """
        logits = tf.convert_to_tensor(y_pred)
        labels = tf.reshape(tf.cast(y_true, tf.int32), tf.shape(logits)[:-1])
        classes = logits.shape[-1]
        ones = tf.one_hot(tf.reshape(labels, [-1]), classes, dtype=logits.dtype)
        smoothing = tf.cast(self.smoothing, logits.dtype)
        prior = (tf.reduce_mean(ones, axis=0) + smoothing) / (1 + classes * smoothing)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels, logits + tf.math.log(prior)
        )

    def get_config(self) -> Json:
        """Returns the arguments that make the same loss again."""
        return {**super().get_config(), "smoothing": self.smoothing}
