"""What is planned for a round of a TFF process, and checked in that round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import tensorflow as tf
from scipy import stats

from tfdp_fl import schedules
from tfdp_fl.aggregators import state


def tabulated(
    schedule: schedules.Schedule,
    name: str,
    rounds: int | None,
    check: Callable[..., float],
) -> float | tuple[float, ...]:
    """Returns a schedule as a number, or as one number for each round.

    Args:
      schedule: A number, a sequence, or a callable of the round.
      name: The argument that the schedule came from.
      rounds: How many rounds are planned, which a callable needs.
      check: A function of `_validate`, for each value.

    Raises:
      ValueError: A callable, and `rounds` is not known.
    """
    schedule = schedules.checked(schedule, check, name)
    if schedules.is_constant(schedule):
        return float(schedule)
    if callable(schedule):
        if rounds is None:
            raise ValueError(
                f"{name} is a callable, which a TFF computation cannot call "
                "when it runs: pass rounds=, the number of rounds for which "
                "to tabulate it, or a sequence with one value a round."
            )
        count = rounds
    else:
        count = len(cast(Sequence[float], schedule))
    return tuple(
        check(**{name: schedules.value_at(schedule, index, name)})
        for index in range(count)
    )


class RoundValues:
    """A number that may differ from round to round, as a tensor."""

    def __init__(
        self,
        table: float | tuple[float, ...],
        name: str,
        dtype: tf.DType = tf.float32,
    ):
        self._table = table
        self._name = name
        self._dtype = dtype

    @property
    def distinct(self) -> set[float]:
        """Returns every value that occurs."""
        table = self._table
        return set(table) if isinstance(table, tuple) else {table}

    @property
    def num_rounds(self) -> int | None:
        """Returns for how many rounds there are values; None: for all."""
        return len(self._table) if isinstance(self._table, tuple) else None

    def at(self, round_index: tf.Tensor) -> tf.Tensor:
        """Returns the scalar of a round; past the end the round fails.

        Args:
          round_index: Int32 scalar, counted from 0.
        """
        if self.num_rounds is None:
            return tf.constant(self._table, self._dtype)
        in_range = tf.debugging.assert_less(
            round_index,
            self.num_rounds,
            message=(
                f"{self._name} has {self.num_rounds} values, one for each "
                "round, and this round lies past its end."
            ),
        )
        with tf.control_dependencies([in_range]):
            index = tf.identity(round_index)
        return tf.gather(tf.constant(self._table, self._dtype), index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What holds in a round because of its number.

    Attributes:
      noise_multiplier: The mechanism's z.
      clients_per_round: m.
      kind: See `history_kind`.
      cost: Float64, see `RoundHistory.costs`.
      cohort_size: Float64, m.
      population: N, or 0 if it is not known.
    """

    noise_multiplier: RoundValues
    clients_per_round: RoundValues
    kind: int
    cost: RoundValues
    cohort_size: RoundValues
    population: int

    def written_down(
        self, history: state.RoundHistory, round_index: tf.Tensor, answered: tf.Tensor
    ) -> state.RoundHistory:
        """Returns a history with one more round, and how many were in its sum."""
        row = state.RoundHistory(
            kinds=tf.constant(self.kind, tf.int64),
            costs=self.cost.at(round_index),
            cohort_sizes=self.cohort_size.at(round_index),
            populations=tf.constant(self.population, tf.int64),
            answered=tf.cast(answered, tf.float64),
        )
        return state.RoundHistory(
            *(
                tf.concat([past, [now]], axis=0)
                for past, now in zip(history, row, strict=True)
            )
        )


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
