"""Noise n = C^-1 z, round by round, from buffers of a fixed size.

A generator is what a strategy comes to in one run: its coefficients, what each
round of it is charged, and the recursion that makes its noise. z are fresh
N(0, 1) draws; a mechanism scales n by the noise multiplier and by the clip.
Buffers hold past n, so that a fresh draw is nowhere kept.

Coefficients are rounded to float32 first, and everything else follows from the
rounded ones: what is charged is the noise that is made.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdp_fl._on_use import tf
from tfdp_fl.correlated_noise import toeplitz, tree
from tfdp_fl.correlated_noise.participation import Participation
from tfdp_fl.correlated_noise.workload import Workload

# draw(i), i a Python integer or an int32 scalar: float32 N(0, 1) tensors of the
# update's shapes, others for every i and every round.
Draw = Callable[[Any], list[Any]]  # Of tensors.


class Memory(NamedTuple):
    """What the noise of the coming rounds depends on. It is secret.

    Whoever has it and what was released knows the sums without noise.

    Attributes:
      position: Int32 scalar, how many rounds had noise of this memory.
      buffers: For each variable float32 [copies, *shape].
    """

    position: tf.Tensor
    buffers: list[tf.Tensor]


class Generator(abc.ABC):
    """The noise of a run of T rounds.

    Attributes:
      participation: What it counts on.
      copies: How many copies of the model its buffers hold.
    """

    participation: Participation
    copies: int

    @functools.cached_property
    @abc.abstractmethod
    def charges(self) -> np.ndarray:
        """col, float64 [T]: round t costs a Gaussian of z / col_t.

        Their squares add up to the square of the sensitivity, also over the
        first rounds alone (nothing later has an effect on what was released).
        """

    @property
    @abc.abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """What the recursion is made with, to the last bit.

        Optimisers of other versions end in other digits. A memory goes on only
        with the numbers that it was begun with.
        """

    @abc.abstractmethod
    def squared_errors(self, workload: Workload) -> np.ndarray:
        """Returns each model's noise variance for z of variance 1, [T]."""

    @abc.abstractmethod
    def next_noise(self, memory: Memory, draw: Draw) -> tuple[list[tf.Tensor], Memory]:
        """Returns n of one of the first T rounds, and the memory after it.

        Args:
          memory: Of the rounds before.
          draw: Fresh draws for this round.
        """

    def noise(self, memory: Memory, draw: Draw) -> tuple[list[tf.Tensor], Memory]:
        """Returns n of a round, and the memory after it.

        After T rounds the memory is emptied: a new segment begins, whose
        charges begin anew.

        Args:
          memory: Of the rounds before.
          draw: Fresh draws for this round.
        """
        shapes = [each.shape[1:] for each in memory.buffers]
        memory = tf.cond(
            memory.position < self.participation.rounds,
            lambda: memory,
            lambda: self.first_memory(shapes),
        )
        return self.next_noise(memory, draw)

    def first_memory(self, shapes: Sequence[Sequence[int]]) -> Memory:
        """Returns the memory before the first round: zeros.

        Args:
          shapes: Of the model's variables.
        """
        return Memory(
            tf.zeros([], tf.int32),
            [tf.zeros([self.copies, *shape]) for shape in shapes],
        )

    @property
    def sensitivity(self) -> float:
        """How far one client moves C x, in clip norms."""
        return float(np.sqrt(np.sum(self.charges**2)))

    def max_error(self, workload: Workload) -> float:
        """Returns the noise stddev of the worst model for z of stddev 1."""
        return float(np.sqrt(self.squared_errors(workload).max()))

    def rms_error(self, workload: Workload) -> float:
        """Returns the root of the models' mean noise variance."""
        return float(np.sqrt(self.squared_errors(workload).mean()))


def _as_float32(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Returns float64 numbers that float32 can hold."""
    return np.array(values, np.float32).astype(np.float64)


class _Toeplitz(Generator):
    """A generator of a Toeplitz C.

    Attributes:
      coefficients: c_0, c_1, ..., float64, at most T; the rest is zero.
    """

    coefficients: np.ndarray

    @functools.cached_property
    def charges(self) -> np.ndarray:
        """See base class."""
        return toeplitz.charges(self.coefficients, self.participation)

    def squared_errors(self, workload: Workload) -> np.ndarray:
        """See base class."""
        return toeplitz.squared_errors(
            self.coefficients, self.participation.rounds, workload
        )


class BandedGenerator(_Toeplitz):
    """n_t = z_t - sum over 0 < j < bands of c_j n_(t-j).

    Choquette-Choo et al. (2023), algorithm 2. The buffers are a ring: row
    s mod (bands - 1) holds n_s.
    """

    def __init__(
        self,
        coefficients: Sequence[float] | np.ndarray,
        participation: Participation,
    ):
        """Rounds and checks coefficients.

        Args:
          coefficients: c_0, ..., c_(bands-1); those past T are dropped.
          participation: (k, b) and T.
        """
        self.coefficients = toeplitz.checked(
            _as_float32(coefficients[: participation.rounds])
        )
        self.participation = participation
        self.copies = len(self.coefficients) - 1

    @property
    def numbers(self) -> tuple[float, ...]:
        """See base class."""
        return tuple(self.coefficients.tolist())

    @property
    def bands(self) -> int:
        """How many diagonals of C are not zero."""
        return len(self.coefficients)

    @property
    def largest_column(self) -> float:
        """The norm of one column: what one participation moves."""
        return float(np.linalg.norm(self.coefficients))

    def next_noise(self, memory: Memory, draw: Draw) -> tuple[list[tf.Tensor], Memory]:
        """See base class."""
        position, buffers = memory
        fresh = draw(0)
        if not self.copies:
            return fresh, Memory(position + 1, buffers)
        row = position % self.copies
        # c_j weighs row (t - j) mod copies: backwards from the row before.
        backwards = tf.constant(self.coefficients[:0:-1], tf.float32)
        weights = tf.roll(backwards, row, 0)
        noise = [
            z - _weighted_sum(weights, buffer)
            for z, buffer in zip(fresh, buffers, strict=True)
        ]
        kept = [
            tf.tensor_scatter_nd_update(buffer, [[row]], n[None])
            for n, buffer in zip(noise, buffers, strict=True)
        ]
        return noise, Memory(position + 1, kept)


def _weighted_sum(weights: tf.Tensor, buffer: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a buffer, weighted and added up in float32.

    By a sparse product, row after row: a dense one is in fewer bits where
    TensorFlow or oneDNN was told so, and on GPUs by default.
    """
    rows = buffer.shape[0]
    places = [[0, row] for row in range(rows)]
    sparse = tf.SparseTensor(places, weights, [1, rows])
    flat = tf.reshape(buffer, [rows, -1])
    return tf.reshape(tf.sparse.sparse_dense_matmul(sparse, flat), buffer.shape[1:])


class BLTGenerator(_Toeplitz):
    """n_t = z_t - sum of w_i s_i; s_i <- theta_i s_i + n_t.

    Buffered linear Toeplitz: c_j = sum of w_i theta_i^(j-1). Dvijotham et al.
    (2024), algorithm 1 (https://arxiv.org/abs/2404.16706), with the buffers of
    C in the place of those of its inverse.
    """

    def __init__(
        self,
        theta: Sequence[float] | np.ndarray,
        theta_hat: Sequence[float] | np.ndarray,
        participation: Participation,
    ):
        """Makes the weights of poles and zeros.

        Args:
          theta: The poles of C(x) = product of (1 - theta^_i x) / (1 -
            theta_i x), from 0 to 1, no two alike.
          theta_hat: Its zeros.
          participation: (k, b) and T.

        Raises:
          ValueError: c would rise or be negative, or two poles are one.
        """
        poles = _as_float32(theta)
        distances = np.abs(poles[:, None] - poles) + np.eye(len(poles))
        if distances.min() == 0:
            raise ValueError(
                f"theta must hold numbers that differ in float32, got {tuple(theta)!r}."
            )
        self.theta = poles
        weights = [
            np.prod(pole - np.asarray(theta_hat)) / np.prod(np.delete(pole - poles, i))
            for i, pole in enumerate(poles)
        ]
        self.weights = _as_float32(weights)
        powers = np.arange(participation.rounds - 1)[:, None]
        tail = (poles**powers) @ self.weights
        if self.weights.min() >= 0 and 0 <= poles.min() <= poles.max() <= 1:
            # Then c falls, and what rises is the last bit of a float64.
            tail = np.minimum.accumulate(tail)
        self.coefficients = toeplitz.checked(np.concatenate([[1.0], tail]))
        self.participation = participation
        self.copies = len(poles)

    @property
    def numbers(self) -> tuple[float, ...]:
        """See base class."""
        return (*self.theta.tolist(), *self.weights.tolist())

    def next_noise(self, memory: Memory, draw: Draw) -> tuple[list[tf.Tensor], Memory]:
        """See base class."""
        position, buffers = memory
        weights = tf.constant(self.weights, tf.float32)
        theta = tf.constant(self.theta, tf.float32)
        noise, kept = [], []
        for z, buffer in zip(draw(0), buffers, strict=True):
            n = z - _weighted_sum(weights, buffer)
            column = tf.reshape(theta, [-1] + [1] * len(z.shape))
            noise.append(n)
            kept.append(column * buffer + n[None])
        return noise, Memory(position + 1, kept)


class TreeGenerator(Generator):
    """Differences of the estimates of finished subtrees (module `tree`).

    The first row of the buffers is the noise of the sum so far, row h + 1 the
    estimate of the finished subtree of height h that waits for its sister.
    """

    def __init__(self, restart_every: int, participation: Participation):
        """Makes a tree, or several.

        Args:
          restart_every: A new tree begins after so many rounds, at most T.
          participation: (k, b) and T.
        """
        self.restart_every = min(restart_every, participation.rounds)
        self.participation = participation
        self.copies = 1 + tree.height_count(self.restart_every)

    @property
    def numbers(self) -> tuple[float, ...]:
        """See base class."""
        return (self.restart_every,)

    @functools.cached_property
    def charges(self) -> np.ndarray:
        """See base class."""
        return tree.charges(self.participation, self.restart_every)

    def squared_errors(self, workload: Workload) -> np.ndarray:
        """See base class."""
        return tree.squared_errors(
            self.participation.rounds, self.restart_every, workload
        )

    def next_noise(self, memory: Memory, draw: Draw) -> tuple[list[tf.Tensor], Memory]:
        """See base class."""
        position, buffers = memory
        place = position % self.restart_every
        begins = tf.cast(place > 0, tf.float32)
        buffers = [begins * buffer for buffer in buffers]

        def merges(height: tf.Tensor, *estimates: tf.Tensor) -> tf.Tensor:
            del estimates
            finished = tf.bitwise.right_shift(place + 1, height)
            return tf.equal(finished % 2, 0)

        def merge(height: tf.Tensor, *estimates: tf.Tensor) -> list[tf.Tensor]:
            weight = 1.0 - 0.5 ** (tf.cast(height, tf.float32) + 1.0)
            parents = [
                (weight * (left[height + 1] + right) + own) / (weight + 1.0)
                for left, right, own in zip(
                    buffers, estimates, draw(height + 1), strict=True
                )
            ]
            return [height + 1, *parents]

        height, *estimates = tf.while_loop(
            merges, merge, [tf.zeros([], tf.int32), *draw(0)]
        )
        rows = tf.range(self.copies)
        noise, kept = [], []
        for estimate, buffer in zip(estimates, buffers, strict=True):
            # Rows up to the height were merged; row 0 is the sum, made below.
            stays = tf.reshape(rows > height + 1, [-1] + [1] * len(estimate.shape))
            stack = tf.where(stays, buffer, 0.0)
            stack = tf.tensor_scatter_nd_update(stack, [[height + 1]], estimate[None])
            total = tf.reduce_sum(stack, axis=0)
            noise.append(total - buffer[0])
            kept.append(tf.tensor_scatter_nd_update(stack, [[0]], total[None]))
        return noise, Memory(position + 1, kept)
