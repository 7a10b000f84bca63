"""The cost of releasing the best of a random number of trials.

Papernot & Steinke 2022, "Hyperparameter tuning with Rényi differential privacy",
https://arxiv.org/abs/2110.03620: if the number of trials is random and secret, the
best trial costs little more than a single one, however many there are. Koskela,
Redberg & Wang 2024, "Privacy profiles for private selection",
https://arxiv.org/abs/2402.06701: privacy profiles give an even smaller bound.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import attr
import dp_accounting
import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant

from tfdp_fl import _validate
from tfdp_fl.accounting.loss_distribution import LossDistribution

# The named distributions of the number of trials, by their shape.
_SHAPES = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
# With smaller ones, nearly all numbers drawn are 0, and so are drawn again.
_MIN_SHAPE = 1e-3


@attr.s(frozen=True, slots=True, auto_attribs=True)
class BestOfTrialsDpEvent(dp_accounting.DpEvent):
    """The best of a random number of trials; nothing else about them is released.

    It extends `dp_accounting.RepeatAndSelectDpEvent` to trials with different costs: a
    trial costs one of several events, not their sum. Which one it is may be drawn
    independently of the data (a candidate), or may differ by client (training on some,
    scoring on others).

    Attributes:
      events: The possible costs of a trial.
      mean: The expected number of trials.
      shape: The shape of the number's distribution: infinity for Poisson, 0 for
        logarithmic, otherwise truncated negative binomial (1: geometric).
    """

    events: tuple[dp_accounting.DpEvent, ...]
    mean: float
    shape: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialCount:
    """The distribution of the secret number of trials.

    Attributes:
      mean: The expected number, at least 1.
      shape: As in `BestOfTrialsDpEvent`.
    """

    mean: float
    shape: float

    @classmethod
    def from_arguments(
        cls, expected_trials: float, distribution: str | float
    ) -> TrialCount:
        """Returns the distribution for the arguments of `PrivateSearch`.

        Raises:
          ValueError, TypeError: An argument is not allowed; the message names it.
        """
        mean = _validate.positive(expected_trials=expected_trials)
        if mean < 1:
            raise ValueError(
                f"expected_trials must be at least 1, got {expected_trials!r}."
            )
        if isinstance(distribution, str):
            _validate.one_of(_SHAPES, distribution=distribution)
            return cls(mean=mean, shape=_SHAPES[distribution])
        shape = _validate.non_negative(distribution=distribution)
        if 0 < shape < _MIN_SHAPE:
            raise ValueError(
                f"distribution must be at least {_MIN_SHAPE:g} or 'logarithmic', which "
                f"is its limit, got {distribution!r}."
            )
        return cls(mean=mean, shape=shape)

    @property
    def may_be_zero(self) -> bool:
        """Whether there can be no trial at all."""
        return math.isinf(self.shape)

    @property
    def theorem(self) -> str:
        """The theorem that bounds the Renyi divergence, in words for a statement."""
        number = 6 if self.may_be_zero else 2
        return f"theorem {number} of Papernot & Steinke (2022, arXiv 2110.03620)"

    def describe(self) -> str:
        """Returns the distribution in words."""
        names = {shape: name for name, shape in _SHAPES.items()}
        name = names.get(
            self.shape, f"truncated negative binomial (shape {self.shape:g})"
        )
        return f"{name} with mean {self.mean:g}"

    def draw(self, generator: np.random.Generator) -> int:
        """Draws a number of trials; a Poisson distribution may yield 0."""
        if self.may_be_zero:
            return int(generator.poisson(self.mean))
        # Rounded so that slightly fewer trials are drawn than are accounted for.
        gamma = min(1.0, _stopping_probability(self.shape, self.mean) * (1 + 1e-8))
        if self.shape == 0:
            return int(generator.logseries(1 - gamma)) if gamma < 1 else 1
        if self.shape == 1 or gamma == 1:
            return int(generator.geometric(gamma))
        numbers, size = np.zeros(1, np.int64), 16
        while not numbers.any():  # With a mean near 1, few draws are above zero.
            numbers = generator.negative_binomial(self.shape, gamma, size)
            size = min(2 * size, 2**20)
        return int(numbers[numbers > 0][0])


def epsilon_of_best(
    event: BestOfTrialsDpEvent,
    trials: Sequence[LossDistribution],
    delta: float,
) -> float:
    """Returns a bound on the best trial's epsilon at delta, by privacy profiles.

    Let p and q be a trial's densities with and without a client, t_p and t_q the
    probabilities that another trial is better than a given outcome, and f(x) = E x^K
    for the number K of trials. If ties are broken at random, the best trial has the
    density p f'(1 - t_p). f' increases up to E K. If f'(1 - t_p) <= C f'(1 - t_q) for
    every outcome,

        p f'(1 - t_p) - e^eps q f'(1 - t_q) <= f'(1 - t_p) (p - e^eps / C q),

    so the best trial has delta(eps) <= E K delta_trial(eps - log C), as Koskela,
    Redberg & Wang (2024) show. C is found here as follows.

    Poisson: f'(1 - t_p) / f'(1 - t_q) = exp(E K (t_q - t_p)), and t_q - t_p is a
    total variation, at most delta_trial(0).

    Truncated negative binomial with shape s and g = gamma: the ratio is R^(1 + s),
    R = (g + (1 - g) t_q) / (g + (1 - g) t_p). Here t_q is at most 1 and, for every
    a >= 0, at most e^a t_p + delta_trial(a). As a function of t_p, R is then monotone
    up to t_p = e^-a (1 - delta_trial(a)), and falls from there on. So it is largest at
    0 or at that point.

    Args:
      event: The search.
      trials: The privacy loss distributions of its `events`. Whether the event is drawn
        independently of the data or differs by client, a trial's delta is at most the
        largest of theirs.
      delta: Between 0 and 1.
    """
    if math.isinf(event.shape):
        log_c = event.mean * max(trial.delta(0.0) for trial in trials)
    else:
        gamma = _stopping_probability(event.shape, event.mean)
        a = np.linspace(0.0, -math.log(gamma), 300)
        deltas = np.max([trial.delta_at(a) for trial in trials], axis=0)
        ratio = np.maximum(
            1 + (1 / gamma - 1) * deltas,
            1 / (gamma + (1 - gamma) * (1 - deltas) * np.exp(-a)),
        )
        log_c = (1 + event.shape) * math.log(ratio.min())
    delta = delta / event.mean
    return float(log_c + max(trial.epsilon(delta) for trial in trials))


@functools.lru_cache(maxsize=256)
def _stopping_probability(shape: float, mean: float) -> float:
    """Returns gamma, the parameter of the truncated negative binomial."""
    return rdp_privacy_accountant._gamma_truncated_negative_binomial(shape, mean)
