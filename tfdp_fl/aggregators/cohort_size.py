"""What a mechanism takes for granted about a round, checked in that round."""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from scipy import stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class CohortSizeCheck:
    """The cohort sizes for which a round's guarantee holds.

    A round with another size fails as a whole: `next` raises, nothing is
    released, and the state stays what it was.

    Attributes:
      exact: Exactly clients_per_round have to answer, because each adds its
        share of the noise.
      at_most_expected: No more than clients_per_round may answer, as under
        fixed-size sampling.
      at_most: No more than so many may answer (the population), or None.
      some_weight: Somebody has to answer with something usable, because the
        answers replace the model.
      smallest_clip: The clip must be at least this, or a secure sum's rounding
        would count beside it.
    """

    exact: bool = False
    at_most_expected: bool = False
    at_most: int | None = None
    some_weight: bool = False
    smallest_clip: float = 0.0

    def checked(
        self,
        cohort_size: tf.Tensor,
        clients_per_round: tf.Tensor,
        weight: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tf.Tensor:
        """Returns the cohort size, once it was found to be allowed.

        Args:
          cohort_size: Float32 scalar, the number of clients that answered.
          clients_per_round: Float32 scalar, the number that is expected.
          weight: Float32 scalar, the sum of the weights of the clients.
          clip_norm: Float32 scalar, the largest norm of a client's share.
        """
        checks = []
        if self.exact:
            checks.append(
                tf.debugging.assert_equal(
                    cohort_size,
                    clients_per_round,
                    message=(
                        "cohort size differs from clients_per_round: with "
                        "noise_site='client' the noise is complete only if "
                        "exactly clients_per_round clients answer; the round "
                        "is abandoned."
                    ),
                )
            )
        elif self.at_most_expected:
            checks.append(
                tf.debugging.assert_less_equal(
                    cohort_size,
                    clients_per_round,
                    message=(
                        "cohort size exceeds clients_per_round, against the "
                        "sampling that was declared; the round is abandoned."
                    ),
                )
            )
        if self.at_most is not None:
            checks.append(
                tf.debugging.assert_less_equal(
                    cohort_size,
                    tf.constant(float(self.at_most)),
                    message=(
                        f"cohort size exceeds {self.at_most}, the most that the "
                        "declared sampling gives; the round is abandoned."
                    ),
                )
            )
        if self.some_weight:
            checks.append(
                tf.debugging.assert_positive(
                    weight,
                    message=(
                        "cohort has nothing usable, and this mechanism "
                        "replaces the model by what the cohort hands in; the "
                        "round is abandoned."
                    ),
                )
            )
        if self.smallest_clip:
            checks.append(
                tf.debugging.assert_greater_equal(
                    tf.cast(clip_norm, tf.float32),
                    tf.constant(self.smallest_clip, tf.float32),
                    message=(
                        "the clip has become so small that the secure sum's rounding "
                        "counts beside it: give its inner_factory closer bounds; the "
                        "round is abandoned."
                    ),
                )
            )
        with tf.control_dependencies(checks):
            return tf.identity(cohort_size)


# How often a cohort that was drawn as declared is refused.
_REFUSED_BY_CHANCE = 1e-12


def largest_poisson_cohort(num_clients: int, clients_per_round: float) -> int:
    """Returns the size that Poisson sampling passes with probability below 1e-12.

    Args:
      num_clients: N.
      clients_per_round: m, the expected size: Binomial(N, m / N).
    """
    rate = clients_per_round / num_clients
    return int(stats.binom.isf(_REFUSED_BY_CHANCE, num_clients, rate))
