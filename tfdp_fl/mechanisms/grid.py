"""Fixed clipping on a grid: whole numbers, added up and noised exactly.

    client    n_k = round(x_k / gamma), x_k the clipped update; zero if
              ||n_k|| > S / gamma
    server    (sum of n_k + round(g)) gamma / m, g ~ N(0, (z S / gamma)^2 I)

gamma is S / 2^20. What is handed in are whole numbers, and so is the noise
(`exact_gaussian`); float64 adds whole numbers below 2^53 without a rounding, in
any order. A client's n_k has an L2 norm of at most 2^20: that is looked at
after the rounding, in whole numbers. So the released sum is a function of the
ideal Gaussian mechanism's, with S and z as they are charged; to multiply by
gamma, to divide by m, and what becomes of the model is post-processing.

The clip is a little less than S, so that rounding leads nobody out of it:
rounding moves an update by at most sqrt(D) / 2 steps, 0.15 % of S for ten
million parameters.
"""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np

from tfdp_fl._on_use import tf
from tfdp_fl.mechanisms import cohort_query, exact_gaussian
from tfdp_fl.mechanisms.contribution import Client, Contribution

# Steps of the grid in a clip.
STEPS = 2**20
# What a float32 clip may be off by (docs/clipping.md), with room to spare.
_CLIP_ERROR = 2e-5
# More than a float32 z is below the z that is charged.
_Z_ERROR = 2.0**-22


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises ValueError unless the grid is fine, and wide, enough for a z."""
    if noise_multiplier and not 1 / STEPS <= noise_multiplier < STEPS / 2:
        raise ValueError(
            "noise_multiplier must be 0, or from 2^-20 to 2^19, with "
            f"noise_generator='exact', got {noise_multiplier!r}."
        )


class GridQuery(cohort_query.CohortQuery):
    """A mechanism with a clip and the server's noise, on a grid."""

    @property
    def only_scales(self) -> bool:
        """Implements `CohortQuery.only_scales`: updates are rounded, too."""
        return False

    @property
    def clip_share(self) -> float:
        """The part of S that updates are clipped to before they are rounded."""
        if self.deployment.shapes is None:
            raise ValueError("shapes must be known to noise on a grid, got None.")
        size = sum(math.prod(shape) for shape in self.deployment.shapes)
        share = 1 - _CLIP_ERROR - (math.sqrt(size) / 2 + 1) / STEPS
        if share < 0.5:
            raise ValueError(
                "noise_generator='exact' is for models of up to 10^11 "
                f"parameters, got {size}."
            )
        return share

    def initial_sample_state(self, template: list[tf.Tensor]) -> Contribution:
        """Implements `CohortQuery.initial_sample_state`: whole numbers."""
        return super().initial_sample_state(
            [tf.zeros(each.shape, tf.float64) for each in template]
        )

    def preprocess_record(
        self,
        params: Any,
        record: list[tf.Tensor],
        client: Client = Client(),  # noqa: B008
    ) -> Contribution:
        """Returns what a client hands in: its update in steps, float64."""
        clipped_to = params._replace(clip_norm=params.clip_norm * self.clip_share)
        one = self.mechanism.contribution(record, clipped_to, client, self.deployment)
        to_steps = STEPS / tf.cast(params.clip_norm, tf.float64)
        steps = [tf.round(tf.cast(each, tf.float64) * to_steps) for each in one.update]
        # Whole numbers, so this is exact as long as it is below 2^53; and not
        # below 2^40 if it is not. False for a NaN.
        squares = tf.add_n([tf.reduce_sum(each * each) for each in steps])
        within = squares <= float(STEPS) ** 2
        return one._replace(
            update=[tf.where(within, each, tf.zeros_like(each)) for each in steps]
        )

    def get_noised_result(
        self, sample_state: Contribution, global_state: Any
    ) -> tuple[list[tf.Tensor], Any, dp_accounting.DpEvent]:
        """Implements `CohortQuery.get_noised_result`; not for a worker."""
        mechanism, state = self.mechanism, global_state
        shapes = [each.shape for each in sample_state.update]
        sizes = [shape.num_elements() for shape in shapes]
        z = tf.cast(state.noise_multiplier, tf.float64) * (1 + _Z_ERROR)
        drawn = tf.ensure_shape(
            tf.numpy_function(_drawn, [z * STEPS, sum(sizes)], tf.float64),
            [sum(sizes)],
        )
        step = tf.cast(state.clip_norm, tf.float64) / STEPS
        noised = [
            (steps + tf.reshape(part, shape)) * step
            for steps, part, shape in zip(
                sample_state.update,
                tf.split(drawn, sizes),
                shapes,
                strict=True,
            )
        ]
        mean = mechanism.mean(noised, sample_state.weight, state, self.deployment)
        event = mechanism.query_event(state)
        return mean, state, event


def _drawn(stddev: float, size: int) -> np.ndarray:
    """Returns whole numbers as float64 [size]; zeros without a stddev."""
    if not float(stddev) > 0:
        return np.zeros(int(size))
    noise = exact_gaussian.rounded(float(stddev), int(size))
    return noise.astype(np.float64)
