"""How large epsilon looks from canaries' scores."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.auditing import gaussians

# Two-sided 95 %, and how far a spread is from another that it passes for.
_Z95 = 1.959964
_SAME_SPREAD = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What was measured.

    Attributes:
      observed: Float64 [k], the canaries that took part.
      unobserved: Float64 [k'], canaries that did not; None where their
        distribution is known: N(0, null_std^2).
      null_std: See there.
    """

    observed: np.ndarray
    unobserved: np.ndarray | None = None
    null_std: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of epsilon, not a bound.

    Attributes:
      epsilon: At `delta`.
      low: The lower end of a 95 % interval, from the canaries' number alone.
      high: The upper end.
      delta: At which.
      num_canaries: How many took part.
      mean: The mean score of those, in standard deviations of one that did not.
      spread: Their standard deviation, in the same unit.
    """

    epsilon: float
    low: float
    high: float
    delta: float
    num_canaries: int
    mean: float
    spread: float


def estimate(scores: Scores, delta: float) -> Estimate:
    """Returns epsilon between the scores with and without a client.

    Both are taken to be Gaussian (Andrew et al. 2023, "One-shot Empirical
    Privacy Estimation for Federated Learning", Section 4), with the mean and
    the spread that were measured; a spread that is not to be told from that
    of the others is taken to be theirs.

    Args:
      scores: At least two of each kind.
      delta: Strictly between 0 and 1.
    """
    delta = _validate.inside_unit_interval(delta=delta)
    observed = np.asarray(scores.observed, np.float64)
    null_mean, null_std, null_error = 0.0, scores.null_std, 0.0
    if scores.unobserved is not None:
        others = np.asarray(scores.unobserved, np.float64)
        null_mean, null_std = float(others.mean()), float(others.std(ddof=1))
        null_error = 1 / math.sqrt(len(others))
    # From here on in units of the null's standard deviation.
    mean = (float(observed.mean()) - null_mean) / null_std
    spread = float(observed.std(ddof=1)) / null_std
    count = len(observed)
    spread_error = math.hypot(spread / math.sqrt(2 * count), null_error)
    taken = 1.0 if abs(spread - 1) <= _SAME_SPREAD * spread_error else spread
    error = _Z95 * math.hypot(spread / math.sqrt(count), null_error)

    def epsilon(of_mean: float) -> float:
        return gaussians.epsilon_of(of_mean, taken, 0.0, 1.0, delta)

    return Estimate(
        epsilon=epsilon(mean),
        low=epsilon(max(0.0, abs(mean) - error)),
        high=epsilon(abs(mean) + error),
        delta=delta,
        num_canaries=count,
        mean=mean,
        spread=spread,
    )
