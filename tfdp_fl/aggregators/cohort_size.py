"""What a mechanism takes for granted about how many clients answer."""

from __future__ import annotations

import dataclasses

import tensorflow as tf


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
    """

    exact: bool = False
    at_most_expected: bool = False
    at_most: int | None = None
    some_weight: bool = False

    def checked(
        self,
        cohort_size: tf.Tensor,
        clients_per_round: tf.Tensor,
        weight: tf.Tensor,
    ) -> tf.Tensor:
        """Returns the cohort size, once it was found to be allowed.

        Args:
          cohort_size: Float32 scalar, the number of clients that answered.
          clients_per_round: Float32 scalar, the number that is expected.
          weight: Float32 scalar, the sum of the weights of the clients.
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
                        f"cohort size exceeds num_clients={self.at_most}; "
                        "the round is abandoned."
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
        with tf.control_dependencies(checks):
            return tf.identity(cohort_size)
