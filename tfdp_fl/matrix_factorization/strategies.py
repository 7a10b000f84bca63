"""How noise is correlated, and what makes it: n = C^-1 z, round by round.

A strategy is what a user chooses; a generator is the strategy within one run: its
coefficients, what each round is charged, and the recursion that makes its
noise, from buffers of a fixed size. z are fresh N(0, 1) draws; a mechanism scales n by
the noise multiplier and by the clip. Buffers hold past n, so that a fresh draw is
nowhere kept.

Coefficients are rounded to float32 first, and everything else follows from the
rounded ones: the charge is for exactly this noise.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast

import numpy as np
from scipy import signal

from tfdp_fl import _validate
from tfdp_fl._lazy_tf import tf
from tfdp_fl.matrix_factorization import toeplitz
from tfdp_fl.matrix_factorization.participation_pattern import ParticipationPattern
from tfdp_fl.terms import Json

Numbers: TypeAlias = Sequence[float] | np.ndarray
Tensors: TypeAlias = "list[tf.Tensor]"


class NoiseState(NamedTuple):
    """What the noise of the coming rounds depends on. It is secret.

    Together with the released models, it reveals the sums without noise.

    Attributes:
      round_index: Int32 scalar, how many rounds had noise from this state.
      buffers: For each variable float32 [copies, *shape].
    """

    round_index: tf.Tensor
    buffers: Tensors


class Generator(abc.ABC):
    """The noise of a run of T rounds, by a Toeplitz matrix C.

    Attributes:
      pattern: The assumed participations.
      coefficients: c_0, c_1, ..., float64, at most T; the rest is zero.
      copies: How many copies of the model its buffers hold.
      numbers: The recursion's constants, to the last bit. Optimisers of other versions
        may end in other digits, and a saved noise state continues only with the
        constants that it began with.
    """

    pattern: ParticipationPattern
    coefficients: np.ndarray
    copies: int
    numbers: tuple[float, ...]

    @functools.cached_property
    def round_sensitivities(self) -> np.ndarray:
        """col, float64 [T]: round t costs a Gaussian of z / col_t.

        Their squares add up to the square of the sensitivity, also over the
        first rounds alone (nothing later has an effect on what was released).
        """
        return toeplitz.round_sensitivities(self.coefficients, self.pattern)

    @abc.abstractmethod
    def next_noise(
        self, round_index: tf.Tensor, buffer: tf.Tensor, fresh: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns n of a round for one variable, and its buffer after the round.

        Args:
          round_index: Of the noise state after the rounds before, below T.
          buffer: The variable's.
          fresh: z of this round: float32 N(0, 1), of the variable's shape.
        """

    def begin_round(self, noise_state: NoiseState) -> NoiseState:
        """Returns the noise state for the next round: after T rounds, zeros.

        Then a new segment begins, with its own cost.
        """
        is_over = noise_state.round_index >= self.pattern.rounds

        def zero_if_over(value: tf.Tensor) -> tf.Tensor:
            return tf.cond(is_over, lambda: tf.zeros_like(value), lambda: value)

        return NoiseState(
            zero_if_over(noise_state.round_index),
            list(map(zero_if_over, noise_state.buffers)),
        )

    def init_noise_state(self, shapes: Sequence[Sequence[int]]) -> NoiseState:
        """Returns the noise state before the first round: zeros.

        Args:
          shapes: Of the model's variables.
        """
        return NoiseState(
            tf.zeros([], tf.int32),
            [tf.zeros([self.copies, *shape]) for shape in shapes],
        )

    @property
    def sensitivity(self) -> float:
        """How far one client moves C x, in clip norms."""
        return float(np.sqrt(np.sum(self.round_sensitivities**2)))

    def squared_errors(self) -> np.ndarray:
        """Returns each model's noise variance for z of variance 1, [T].

        After round t it is the sum over s of B_ts^2.
        """
        prefix_sum = np.ones(self.pattern.rounds)
        return np.cumsum(signal.lfilter([1.0], self.coefficients, prefix_sum) ** 2)


def _as_float32(values: Numbers) -> np.ndarray:
    """Returns float64 numbers that float32 can hold."""
    return np.array(values, np.float32).astype(np.float64)


class BandedGenerator(Generator):
    """n_t = z_t - sum over 0 < j < bands of c_j n_(t-j).

    Choquette-Choo et al. (2023), algorithm 2. The buffers are a ring: row
    s mod (bands - 1) holds n_s.
    """

    def __init__(self, coefficients: Numbers, pattern: ParticipationPattern):
        """Rounds and checks coefficients.

        Args:
          coefficients: c_0, ..., c_(bands-1); those past T are dropped.
          pattern: (k, b) and T.
        """
        self.coefficients = toeplitz.check_coefficients(
            _as_float32(coefficients[: pattern.rounds])
        )
        self.pattern = pattern
        self.copies = len(self.coefficients) - 1
        self.numbers = tuple(self.coefficients.tolist())

    def next_noise(
        self, round_index: tf.Tensor, buffer: tf.Tensor, fresh: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See base class."""
        if not self.copies:
            return fresh, buffer
        row = round_index % self.copies
        # c_j weighs row (t - j) mod copies: backwards from the row before.
        backwards = tf.constant(self.coefficients[:0:-1], tf.float32)
        noise = fresh - _weighted_sum(tf.roll(backwards, row, 0), buffer)
        return noise, tf.tensor_scatter_nd_update(buffer, [[row]], noise[None])


def _weighted_sum(weights: tf.Tensor, buffer: tf.Tensor) -> tf.Tensor:
    """Returns the rows of a buffer, weighted and added up in float32.

    Uses a sparse product, row by row: a dense one may be in fewer bits if
    TensorFlow or oneDNN was told so, and is on GPUs by default.
    """
    rows = buffer.shape[0]
    indices = [[0, row] for row in range(rows)]
    sparse = tf.SparseTensor(indices, weights, [1, rows])
    flat = tf.reshape(buffer, [rows, -1])
    return tf.reshape(tf.sparse.sparse_dense_matmul(sparse, flat), buffer.shape[1:])


class BLTGenerator(Generator):
    """n_t = z_t - sum of w_i s_i; s_i <- theta_i s_i + n_t.

    Buffered linear Toeplitz: c_j = sum of w_i theta_i^(j-1). Dvijotham et al.
    (2024), algorithm 1 (https://arxiv.org/abs/2404.16706), with the buffers of
    C instead of its inverse's.
    """

    def __init__(
        self, theta: Numbers, theta_hat: Numbers, pattern: ParticipationPattern
    ):
        """Makes the weights of poles and zeros.

        Args:
          theta: The poles of C(x) = product of (1 - theta^_i x) / (1 -
            theta_i x), from 0 to 1, no two alike.
          theta_hat: Its zeros, which alternate with the poles.
          pattern: (k, b) and T.

        Raises:
          ValueError: Poles and zeros do not alternate.
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
        if self.weights.min() < 0:
            # Terms of both signs could be large and cancel. Then noise would follow the
            # float32 errors of earlier rounds' noise, not C.
            raise ValueError(
                "theta and theta_hat must alternate, theta[0] > theta_hat[0] > "
                f"theta[1] > ..., got {tuple(theta)!r} and {tuple(theta_hat)!r}."
            )
        powers = np.arange(pattern.rounds - 1)[:, None]
        # It falls; what rises is the last bit of a float64.
        tail = np.minimum.accumulate((poles**powers) @ self.weights)
        self.coefficients = toeplitz.check_coefficients(np.concatenate([[1.0], tail]))
        self.pattern = pattern
        self.copies = len(poles)
        self.numbers = (*poles.tolist(), *self.weights.tolist())

    def next_noise(
        self, round_index: tf.Tensor, buffer: tf.Tensor, fresh: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """See base class."""
        noise = fresh - _weighted_sum(tf.constant(self.weights, tf.float32), buffer)
        theta = tf.constant(self.theta, tf.float32)
        column = tf.reshape(theta, [-1] + [1] * len(fresh.shape))
        return noise, column * buffer + noise[None]


@dataclasses.dataclass(frozen=True)
class BandedToeplitz:
    """A Toeplitz matrix of a few diagonals (BandMF).

    Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153. It keeps
    bands - 1 copies of the model. Best where a client takes part several
    times, with as many bands as there are rounds between.

    Attributes:
      bands: The number of diagonals; None: the run's `min_separation`.
      coefficients: One for each diagonal: the first is 1, none is larger than
        the one before, and none is negative. None: optimised.
    """

    bands: int | None = None
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.coefficients is not None:
            values = toeplitz.check_coefficients(self.coefficients)
            object.__setattr__(self, "coefficients", tuple(values.tolist()))
            if self.bands not in (None, len(values)):
                raise ValueError(
                    "bands must be the number of coefficients, "
                    f"{len(values)}, or left out, got {self.bands!r}."
                )
            object.__setattr__(self, "bands", len(values))
        elif self.bands is not None:
            bands = _validate.positive_integer(bands=self.bands)
            object.__setattr__(self, "bands", bands)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def generator(self, pattern: ParticipationPattern) -> BandedGenerator:
        """Returns the noise of one run; cached, because it takes an optimisation."""
        if self.coefficients is not None:
            return BandedGenerator(self.coefficients, pattern)
        bands = min(self.bands or pattern.min_separation, pattern.rounds)
        best = toeplitz.optimize_banded(bands, pattern)
        return BandedGenerator(best, pattern)

    def describe(self) -> str:
        """Returns a few words for the privacy statement."""
        bands = self.bands or "as many as the min separation"
        return f"a banded Toeplitz strategy (bands: {bands})"


@dataclasses.dataclass(frozen=True)
class BLT:
    """A buffered linear Toeplitz matrix: a few buffers, any number of rounds.

    Dvijotham et al. (2024), https://arxiv.org/abs/2404.16706, and McMahan et
    al. (2024), https://arxiv.org/abs/2408.08868. It keeps d copies of the
    model; 2 or 3 are enough.

    Attributes:
      num_buffers: d; where theta is given, its length.
      theta: The poles of C(x), between 0 and 1; None for the best ones.
      theta_hat: Its zeros, one below each pole and above the next: given with theta.
    """

    num_buffers: int = 3
    theta: tuple[float, ...] | None = None
    theta_hat: tuple[float, ...] | None = None

    def __post_init__(self):
        buffers = _validate.positive_integer(num_buffers=self.num_buffers)
        if (self.theta is None) != (self.theta_hat is None):
            raise ValueError(
                "theta and theta_hat must be given together, got "
                f"theta={self.theta!r}, theta_hat={self.theta_hat!r}."
            )
        if self.theta is not None:
            for name in ("theta", "theta_hat"):
                values = tuple(
                    _validate.probability(**{name: value})
                    for value in getattr(self, name)
                )
                object.__setattr__(self, name, values)
            buffers = len(self.theta)
            if not buffers or len(self.theta_hat) != buffers:
                raise ValueError(
                    "theta and theta_hat must hold equally many numbers, got "
                    f"{self.theta!r} and {self.theta_hat!r}."
                )
        object.__setattr__(self, "num_buffers", buffers)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def generator(self, pattern: ParticipationPattern) -> BLTGenerator:
        """Returns the noise of one run; cached, because it takes an optimisation."""
        if self.theta is not None and self.theta_hat is not None:
            return BLTGenerator(self.theta, self.theta_hat, pattern)
        best = toeplitz.blt(self.num_buffers, pattern)
        return BLTGenerator(*best, pattern)

    def describe(self) -> str:
        """Returns a few words for the privacy statement."""
        return f"a buffered linear Toeplitz strategy ({self.num_buffers} buffers)"


# How the noise of one round is correlated with that of others.
Strategy: TypeAlias = BandedToeplitz | BLT

_STRATEGIES: Json = {"banded": BandedToeplitz, "blt": BLT}


def check_strategy(**given: Strategy | str) -> Strategy:
    """Returns a strategy, or what a text stands for, or raises.

    The text is "blt" or "banded", with a colon and the number of buffers or of bands,
    as in "blt:2".
    """
    ((name, value),) = given.items()
    if type(value) in _STRATEGIES.values():  # The cost is read from it.
        return cast(Strategy, value)
    word, colon, number = str(value).partition(":")
    if word in _STRATEGIES and (number.isdigit() if colon else True):
        return _STRATEGIES[word](*([int(number)] if colon else []))
    raise ValueError(
        f"{name} must be a BandedToeplitz or a BLT, or a text that stands for one "
        f"(blt or banded, or one of them with a number, as in blt:2), got {value!r}."
    )
