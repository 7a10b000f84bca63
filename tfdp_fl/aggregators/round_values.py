"""Schedules inside a TFF computation, which cannot call Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import tensorflow as tf

from tfdp_fl import schedules


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
