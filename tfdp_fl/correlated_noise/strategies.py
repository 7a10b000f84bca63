"""What a user says of correlated noise; the numbers follow for each run."""

from __future__ import annotations

import abc
import dataclasses
import functools

from tfdp_fl import _validate
from tfdp_fl.correlated_noise import generators, toeplitz
from tfdp_fl.correlated_noise.participation import Participation


@dataclasses.dataclass(frozen=True)
class Strategy(abc.ABC):
    """How the noise of one round is correlated with that of others.

    Privacy depends on it and on which clients take part when (`Participation`).
    """

    @abc.abstractmethod
    def generator(self, participation: Participation) -> generators.Generator:
        """Returns the noise of one run; kept, so that it is optimised once.

        Args:
          participation: (k, b) and T.

        Raises:
          ValueError: The strategy's sensitivity is not known there.
        """

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns a few words for the privacy statement."""


@dataclasses.dataclass(frozen=True)
class BandedToeplitz(Strategy):
    """A Toeplitz matrix of a few diagonals (BandMF).

    Choquette-Choo et al. (2023), https://arxiv.org/abs/2306.08153. It keeps
    bands - 1 copies of the model. Best where a client takes part several
    times, with as many bands as rounds lie between.

    Attributes:
      bands: How many diagonals; None for the min separation b of the run.
      coefficients: Theirs, from 1, never rising, at least 0; None for the
        best ones.
    """

    bands: int | None = None
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.coefficients is not None:
            values = toeplitz.checked(self.coefficients)
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
    def generator(self, participation: Participation) -> generators.BandedGenerator:
        """See base class."""
        if self.coefficients is not None:
            return generators.BandedGenerator(self.coefficients, participation)
        bands = min(self.bands or participation.min_separation, participation.rounds)
        best = toeplitz.banded(bands, participation)
        return generators.BandedGenerator(best, participation)

    def describe(self) -> str:
        """See base class."""
        bands = self.bands or "as many as the min separation"
        return f"a banded Toeplitz strategy (bands: {bands})"


@dataclasses.dataclass(frozen=True)
class BLT(Strategy):
    """A buffered linear Toeplitz matrix: a few buffers, any number of rounds.

    Dvijotham et al. (2024), https://arxiv.org/abs/2404.16706, and McMahan et
    al. (2024), https://arxiv.org/abs/2408.08868. It keeps d copies of the
    model; 2 or 3 are enough.

    Attributes:
      num_buffers: d; where theta is given, its length.
      theta: The poles of C(x), between 0 and 1; None for the best ones.
      theta_hat: Its zeros, as many: given together with theta.
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
            # Raises where c would rise or be negative within a few rounds.
            generators.BLTGenerator(
                self.theta, self.theta_hat, Participation(rounds=64)
            )
        object.__setattr__(self, "num_buffers", buffers)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def generator(self, participation: Participation) -> generators.BLTGenerator:
        """See base class."""
        if self.theta is not None and self.theta_hat is not None:
            return generators.BLTGenerator(self.theta, self.theta_hat, participation)
        best = toeplitz.blt(self.num_buffers, participation)
        return generators.BLTGenerator(*best, participation)

    def describe(self) -> str:
        """See base class."""
        return f"a buffered linear Toeplitz strategy ({self.num_buffers} buffers)"


_BY_WORD = {"banded": BandedToeplitz, "blt": BLT}


def checked(**checked: Strategy | str) -> Strategy:
    """Returns a strategy, or what a text stands for, or raises.

    The text is "blt" or "banded", with a colon and the number of buffers or of bands,
    as in "blt:2".
    """
    ((name, value),) = checked.items()
    if isinstance(value, Strategy):
        return value
    word, colon, number = str(value).partition(":")
    if word in _BY_WORD and (number.isdigit() if colon else True):
        return _BY_WORD[word](*([int(number)] if colon else []))
    raise ValueError(
        f"{name} must be a BandedToeplitz or a BLT, or a text that stands for one "
        f"(blt or banded, or one of them with a number, as in blt:2), got {value!r}."
    )
