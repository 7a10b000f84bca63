"""What is planned for a round of a TFF process, and checked in that round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias, cast

import tensorflow as tf
from scipy import stats

from tfdp_fl import schedules
from tfdp_fl.aggregators import state

# One number for all rounds, or one for each.
Table: TypeAlias = float | tuple[float, ...]

# How often a cohort that was drawn as declared is refused.
_REFUSED_BY_CHANCE = 1e-12


def tabulated(
    schedule: schedules.Schedule,
    name: str,
    rounds: int | None,
    check: Callable[..., float],
) -> Table:
    """Returns a schedule as a number, or as one number for each round.

    Args:
      schedule: A number, a sequence, or a callable of the round.
      name: The argument that the schedule came from.
      rounds: How many rounds are planned, which a callable needs.
      check: A function of `_validate`, for each value.

    Raises:
      ValueError: A callable, and `rounds` is not known.
    """
    if callable(schedule):
        if rounds is None:
            raise ValueError(
                f"{name} is a callable, which a TFF computation cannot call "
                "when it runs: pass rounds=, the number of rounds for which "
                "to tabulate it, or a sequence with one value a round."
            )
        schedule = [schedules.value_at(schedule, t, name) for t in range(rounds)]
    return cast(Table, schedules.checked(schedule, check, name))


def distinct(table: Table) -> set[float]:
    """Returns every value that occurs."""
    return set(table) if isinstance(table, tuple) else {table}


def _at(
    table: Table | str | tuple[str, ...], round_index: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Returns the scalar of a round; past the end the round fails."""
    if not isinstance(table, tuple):
        return tf.constant(table, dtype)
    in_range = tf.debugging.assert_less(
        round_index,
        len(table),
        message=(
            f"There is a plan for {len(table)} rounds, and this round lies past its "
            "end."
        ),
    )
    with tf.control_dependencies([in_range]):
        return tf.gather(tf.constant(table, dtype), tf.identity(round_index))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What holds in a round because of its number, and what is asked of its cohort.

    A round with a cohort that is not allowed fails as a whole: `next` raises,
    nothing is released, and the state stays what it was.

    Attributes:
      noise_multiplier: The mechanism's z.
      clients_per_round: m.
      lines: See `RoundHistory`: one for all rounds, or one for each.
      exact: Whether exactly m have to answer, because each adds its share of the
        noise.
      at_most_expected: Whether no more than m may answer, as under fixed-size
        sampling.
      at_most: No more than so many may answer (the population), or None.
      some_weight: Whether somebody has to answer with something usable, because
        the answers replace the model.
      smallest_clip: The clip must be at least this, or a secure sum's rounding
        would count beside it.
    """

    noise_multiplier: Table
    clients_per_round: Table
    lines: str | tuple[str, ...]
    exact: bool = False
    at_most_expected: bool = False
    at_most: int | None = None
    some_weight: bool = False
    smallest_clip: float = 0.0

    def values(self, round_index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns z and m of a round, float32 scalars."""
        return (
            _at(self.noise_multiplier, round_index, tf.float32),
            _at(self.clients_per_round, round_index, tf.float32),
        )

    def written_down(
        self, history: state.RoundHistory, round_index: tf.Tensor, answered: tf.Tensor
    ) -> state.RoundHistory:
        """Returns a history with one more round, and how many were in its sum."""
        line = _at(self.lines, round_index, tf.string)
        answered = tf.cast(answered, tf.float64)
        return state.RoundHistory(
            lines=tf.concat([history.lines, [line]], axis=0),
            answered=tf.concat([history.answered, [answered]], axis=0),
        )

    def checked(
        self,
        size: tf.Tensor,
        expected: tf.Tensor,
        weight: tf.Tensor,
        clip_norm: tf.Tensor | float,
    ) -> tf.Tensor:
        """Returns a cohort's size, once it was found to be allowed.

        Args:
          size: Float32 scalar, the number of clients that answered.
          expected: Float32 scalar, m.
          weight: Float32 scalar, the sum of the weights of the clients.
          clip_norm: Float32 scalar, the largest norm of a client's share.
        """
        checks = []

        def require(holds: tf.Tensor, otherwise: str) -> None:
            text = f"{otherwise}; the round is abandoned."
            checks.append(tf.debugging.Assert(holds, [text]))

        if self.exact:
            require(
                tf.equal(size, expected),
                "cohort size differs from clients_per_round: with noise_site='client' "
                "the noise is complete only if exactly clients_per_round answer",
            )
        if self.at_most_expected:
            require(
                size <= expected,
                "cohort size exceeds clients_per_round, against the declared sampling",
            )
        if self.at_most is not None:
            require(
                size <= float(self.at_most),
                f"cohort size exceeds {self.at_most}, the most of what was declared",
            )
        if self.some_weight:
            require(weight > 0, "cohort has nothing usable to replace the model by")
        if self.smallest_clip:
            require(
                tf.cast(clip_norm, tf.float32) >= self.smallest_clip,
                "the clip has become so small that the secure sum's rounding counts "
                "beside it: give its inner_factory closer bounds",
            )
        # Eagerly a check that holds is None.
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(size)


def largest_poisson_cohort(num_clients: int, clients_per_round: float) -> int:
    """Returns the size that Poisson sampling passes with probability below 1e-12.

    Args:
      num_clients: N.
      clients_per_round: m, the expected size: Binomial(N, m / N).
    """
    rate = clients_per_round / num_clients
    return int(stats.binom.isf(_REFUSED_BY_CHANCE, num_clients, rate))
