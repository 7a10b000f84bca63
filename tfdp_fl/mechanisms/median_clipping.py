"""Client-level median clipping (Geyer et al. 2017), exact and private."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from tfdp_fl import _validate, schedules
from tfdp_fl._lazy_tf import tf
from tfdp_fl.mechanisms import (
    clipping,
    declaration,
    fixed_clipping,
    mechanism,
    noise,
)
from tfdp_fl.mechanisms.contribution import PrivacyContext, RoundState, Scalar

# The private median is searched on a geometric grid that does not depend on the data:
# 2^12 cells over eight decades, 0.45 % apart.
SMALLEST_NORM = 1e-4
LARGEST_NORM = 1e4
SEARCH_STEPS = 12
# The stddev of the noise on one answer, for z_median = 1.
_ANSWER_STDDEV = math.sqrt(SEARCH_STEPS) / 2
# A wrong answer early in the search makes the median wrong by decades. So a unanimous
# cohort must outweigh this many standard deviations of the noise.
_SAFE_STDDEVS = 4.0
# By default, z_median is five times the sum's z, which adds 2 % to the sum's noise. It
# is never less than one and a half times, which adds 20 %.
_USUAL_RATIO, _MIN_RATIO = 5.0, 1.5


def median(values: tf.Tensor) -> tf.Tensor:
    """Returns the median (float32 scalar) of a non-empty vector.

    For an even number of values, it is the mean of the two in the middle.
    """
    ordered = tf.sort(values)
    count = tf.shape(ordered)[0]
    # Slicing an empty vector would fail even if it is only traced.
    middle = tf.gather(ordered, [(count - 1) // 2, count // 2])
    return 0.5 * (middle[0] + middle[1])


def private_median(norms: tf.Tensor, median_noise_multiplier: float) -> tf.Tensor:
    """Returns a differentially private median of the norms of a cohort.

    It is a bisection over a geometric grid from `SMALLEST_NORM` to `LARGEST_NORM`.
    Each of its J = `SEARCH_STEPS` steps asks whether sum_k (1[norm_k <= x] - 1/2) is
    positive, and answers with Gaussian noise. A client moves the sum by at most 1/2.
    So with noise of stddev sigma = z_median sqrt(J) / 2, all J answers together (an
    adaptive composition of Gaussians) cost as much as one Gaussian with noise
    multiplier z_median.

    Args:
      norms: Float32 vector, one norm per client of the cohort; may be empty.
      median_noise_multiplier: z_median > 0.

    Returns:
      Float32 scalar between `SMALLEST_NORM` and `LARGEST_NORM`.
    """
    stddev = median_noise_multiplier * _ANSWER_STDDEV
    low = tf.constant(math.log(SMALLEST_NORM))
    high = tf.constant(math.log(LARGEST_NORM))
    for _ in range(SEARCH_STEPS):
        middle = 0.5 * (low + high)
        below = tf.cast(norms <= tf.exp(middle), tf.float32) - 0.5
        answer = tf.reduce_sum(below) + noise.normal([], stddev)
        high = tf.where(answer > 0, middle, high)
        low = tf.where(answer > 0, low, middle)
    return tf.exp(0.5 * (low + high))


def default_median_noise_multiplier(
    noise_multiplier: float, clients_per_round: float
) -> float:
    """Returns the default of z_median.

    It is five times the noise multiplier, which makes the noise on the sum 2 % larger.
    In a small cohort, whose counts would drown in that noise, it is about m / 14, but
    at least 1.5 times the noise multiplier, which makes the noise 20 % larger.

    Args:
      noise_multiplier: z > 0 of the sum.
      clients_per_round: m, the smallest expected cohort size.
    """
    reliable = clients_per_round / (2 * _SAFE_STDDEVS * _ANSWER_STDDEV)
    smallest, usual = _MIN_RATIO * noise_multiplier, _USUAL_RATIO * noise_multiplier
    return min(usual, max(reliable, smallest))


@declaration.register("median")
@dataclasses.dataclass(frozen=True, kw_only=True)
class MedianClipping(mechanism.Mechanism):
    """Clips to the median norm of the same round's updates.

    Geyer et al. (2017), "Differentially Private Federated Learning: A Client
    Level Perspective", Algorithm 1: S = median of the cohort's unclipped
    norms, w <- w + (sum_k Delta_k / max(1, ||Delta_k|| / S) + N(0, (zS)^2))/m.

    The paper's median is exact and therefore not private: the statement says so, and
    epsilon covers only the noisy sum. With a `median_noise_multiplier`, the median is
    private (see `private_median`), and its cost is composed into the same sampled
    event: z_total = (z^-2 + z_median^-2)^(-1/2).

    Memory: the updates of a round, one per client of the cohort, are kept until the
    median is known.

    Attributes:
      noise_multiplier: z >= 0 of the sum; a constant, a sequence with one
        value per round, or a callable of the round (the paper's sigma_t).
      median_noise_multiplier: None for the exact median, as published, or
        z_median > 0. For cohorts of m clients, it should be at most m / 14; otherwise
        the median is occasionally far off.
      noise_site: "server" or "client" (needs fixed-size sampling).
    """

    own_caveats: ClassVar[Mapping[str, str]] = {
        "exact_median": (
            "The clip norm of each round was the exact median of that round's "
            "update norms, as published; that median is not private, so "
            "strictly epsilon holds only for what the models reveal beyond it."
        )
    }

    noise_multiplier: schedules.Schedule = fixed_clipping.noise_multiplier_parameter()
    median_noise_multiplier: float | None = declaration.parameter(
        declaration.optional(noise.require_float32_range(_validate.positive)),
        "noise multiplier of a private median, whose cost is included (by "
        "default 5 times --noise_multiplier, less for small cohorts); or "
        "exact: the cohort's own median as published, which is not private "
        "(privacy.txt says so).",
        default=None,
        none_word="exact",
    )
    noise_site: str = fixed_clipping.noise_site_parameter()

    @classmethod
    def from_budget(
        cls, target: mechanism.CalibrationTarget, **options: Any
    ) -> mechanism.Mechanism:
        """Implements `Mechanism.from_budget`: the median is private."""
        if options.get("median_noise_multiplier") is None:
            smallest: Any = target.noise_multiplier
            if isinstance(smallest, tuple):
                smallest = min(smallest)
            options["median_noise_multiplier"] = default_median_noise_multiplier(
                smallest, target.clients_per_round
            )
        return super().from_budget(target, **options)

    def check(self, context: PrivacyContext) -> None:
        """Refuses an exact median of so few clients that one of them controls it."""
        super().check(context)
        constant = schedules.is_constant(context.clients_per_round)
        rounds = range(1 if constant else context.rounds or 1)
        smallest = min(map(context.cohort_size, rounds))
        if self.median_noise_multiplier is None and smallest < 3:
            raise ValueError(
                "clients_per_round must be at least 3 with the exact median, which "
                "one of two clients can make as large as it likes, got "
                f"{smallest:g}; a median_noise_multiplier gives a private one."
            )

    def clip_to_cohort(self, norms: tf.Tensor, round: RoundState) -> tf.Tensor:
        """Returns the median of the cohort's norms (float32 vector).

        An empty cohort has no exact median, and keeps the S of the previous round.
        """
        if self.median_noise_multiplier is not None:
            return private_median(norms, self.median_noise_multiplier)
        return tf.cond(
            tf.size(norms) > 0,
            lambda: tf.clip_by_value(
                median(norms),
                clipping.SMALLEST_CLIP_NORM,
                clipping.LARGEST_CLIP_NORM,
            ),
            lambda: round.clip_norm,
        )

    def round_mu_squared(
        self,
        round: RoundState,
        context: PrivacyContext,
        stddevs: Mapping[str, Scalar] | None = None,
    ) -> Scalar:
        """Implements `Mechanism.round_mu_squared`: the sum, and a private median."""
        of_sum = super().round_mu_squared(round, context, stddevs)
        z_median = self.median_noise_multiplier
        return of_sum if z_median is None else of_sum + z_median**-2

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        clip = "the exact median norm of the round's updates"
        if self.median_noise_multiplier is not None:
            clip = (
                "a differentially private median norm of the round's updates, "
                "whose cost is included"
            )
        return (
            "DP-FedAvg with client-level median clipping: every client's "
            f"update is clipped to {clip}, and Gaussian noise is added to the "
            f"sum {fixed_clipping.site_phrase(self.noise_site)}."
        )

    @property
    def all_releases_are_noisy(self) -> bool:
        """Implements `Mechanism.all_releases_are_noisy`: if the median is."""
        is_noisy = self.median_noise_multiplier is not None
        return is_noisy and super().all_releases_are_noisy

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        return ("exact_median",) if self.median_noise_multiplier is None else ()
