"""Plain federated averaging, for the baseline."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import dp_accounting
import tensorflow as tf

from tfdp_fl.mechanisms import clipping, mechanism


class NoPrivacyQuery(mechanism.CohortQuery):
    """The mean of the updates of those who answered, neither more nor less."""

    def derive_sample_params(
        self, state: mechanism.QueryState
    ) -> mechanism.SampleParams:
        """Returns parameters that clip nothing and add no noise."""
        del state
        return mechanism.SampleParams(
            clip_norm=tf.constant(float("inf")),
            noise_stddev=tf.zeros([]),
            count_noise_stddev=tf.zeros([]),
        )

    @property
    def only_scales(self) -> bool:
        """Implements `CohortQuery.only_scales`."""
        return True

    def scale_of(
        self,
        params: mechanism.SampleParams,
        norm: tf.Tensor,
        usable: tf.Tensor,
    ) -> mechanism.Record:
        """Implements `CohortQuery.scale_of`: everything usable, unscaled."""
        del params
        usable = tf.cast(usable, tf.float32)
        return mechanism.Record(
            update=usable,
            below_clip=tf.zeros_like(norm),
            weight=tf.ones_like(norm),
            norm=norm,
            clipped=tf.zeros_like(norm),
            discarded=1.0 - usable,
        )

    def preprocess_record(
        self, params: mechanism.SampleParams, record: list[tf.Tensor]
    ) -> mechanism.Record:
        """Hands the update on; one with a NaN or an Inf becomes zero."""
        one = self.scale_of(params, *clipping.usable_norm(record))
        return one._replace(update=clipping.scaled(record, one.update))

    def get_noised_result(
        self, sample_state: mechanism.Record, global_state: mechanism.QueryState
    ) -> tuple[
        list[tf.Tensor], mechanism.QueryState, dp_accounting.NonPrivateDpEvent
    ]:
        """Returns the mean over the clients that took part (0 for none)."""
        mean = [
            tf.math.divide_no_nan(
                tensor, tf.cast(sample_state.weight, tensor.dtype)
            )
            for tensor in sample_state.update
        ]
        return mean, global_state, dp_accounting.NonPrivateDpEvent()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPrivacy(mechanism.Mechanism):
    """Federated averaging without clipping or noise (McMahan et al. 2017).

    Every client that took part has the same weight, whatever its number of
    examples. There is no guarantee, and the statement says so.
    """

    guarantee: ClassVar[str] = "none"

    def bind(self, deployment: mechanism.Deployment) -> NoPrivacyQuery:
        """Implements `Mechanism.bind`."""
        del deployment
        return NoPrivacyQuery()

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return "Plain federated averaging: nothing is clipped or noised."
