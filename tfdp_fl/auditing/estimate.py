"""How large epsilon looks from canaries' scores."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
from scipy import optimize, special, stats

from tfdp_fl import _validate

# Two-sided, and how far a spread is from another that it passes for.
_CONFIDENCE, _Z95 = 0.95, 1.959964
_SAME_SPREAD = 4.0
# Beyond, e^epsilon times a mass is no number any more; it is told as infinite.
_LARGEST_EPSILON = 512.0
# Of the thresholds.
_FALSE_POSITIVES = (1e-4, 1e-3, 1e-2, 1e-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What was measured.

    Attributes:
      observed: Float64 [k], the canaries that took part.
      unobserved: Float64 [k'], canaries that did not; None where their
        distribution is known: N(0, null_std^2).
      null_std: The standard deviation of one score of one that did not take
        part, 1/sqrt(d). With `unobserved`, whose scores may each be the best
        of several, it only tells d; NaN stands for their own.
    """

    observed: np.ndarray
    unobserved: np.ndarray | None = None
    null_std: float = math.nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of epsilon, not a bound.

    Attributes:
      epsilon: At `delta`.
      low: The lower end of a 95 % interval (see `estimate`).
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

    The larger of two. First, both are taken to be Gaussian (Andrew et al.
    2023, "One-shot Empirical Privacy Estimation for Federated Learning",
    Section 4), with one spread: the larger of the two. (Where clients are
    sampled, who took part is a mixture, wider than the other; a fit with two
    spreads reads tails into it that are not there, and finds more than the
    truth.) Second, whatever the distributions are, epsilon is at least
    log((TPR - delta) / FPR) for a threshold's true and false positives, taken
    at the ends of their joint 95 % interval (Clopper and Pearson 1934).

    The interval is that of the mean score, off by three independent errors:

    - Of the K canaries: spread/sqrt(K).
    - Of the scores' unit, the norm of what is not canaries. It is one number
      for all canaries of a look, so that more canaries do not help. Of noise
      that is equal in all d coordinates it is sigma chi_(d-1), of which the
      quantiles are taken: for few weights they are far from symmetric. (The
      best of several looks, each with a norm of its own, is off by that at most.)
    - Of unobserved canaries, where these are measured: that of their mean,
      and of their spread, by which scores are divided.

    Args:
      scores: At least two of each kind.
      delta: Strictly between 0 and 1.
    """
    delta = _validate.inside_unit_interval(delta=delta)
    observed = np.asarray(scores.observed, np.float64)
    null_mean, null_std, others = 0.0, scores.null_std, None
    if scores.unobserved is not None:
        others = np.asarray(scores.unobserved, np.float64)
        null_mean, null_std = float(others.mean()), float(others.std(ddof=1))
        others = (others - null_mean) / null_std
    one_look = null_std if math.isnan(scores.null_std) else scores.null_std
    # From here on in units of the null's standard deviation.
    # `scores` takes one direction out of the update before the norm.
    freedom = max(one_look**-2 - 1, 1.0)
    smallest, largest = np.sqrt(stats.chi2.ppf([0.025, 0.975], freedom)) * one_look
    in_units = abs(float(observed.mean())) / null_std
    below, above = in_units * (1 - smallest), in_units * (largest - 1)
    observed = (observed - null_mean) / null_std
    mean, spread = float(observed.mean()), float(observed.std(ddof=1))
    count = len(observed)
    null_error = null_spread_error = 0.0
    if others is not None:
        # How far each of them moves (mean - null_mean) / null_std.
        moved = others + mean * (others**2 - 1) / 2
        null_error = float(moved.std()) / math.sqrt(len(others))
        null_spread_error = 1 / math.sqrt(len(others))
    spread_error = math.hypot(spread / math.sqrt(2 * count), null_spread_error)
    taken = spread if spread > 1 + _SAME_SPREAD * spread_error else 1.0
    error = _Z95 * math.hypot(spread / math.sqrt(count), null_error)
    bound = _threshold_bound(observed - below, others, delta)

    def epsilon(of_mean: float) -> float:
        return epsilon_of(of_mean / taken, 1.0, 0.0, 1.0, delta)

    return Estimate(
        epsilon=max(bound, epsilon(mean)),
        low=max(bound, epsilon(max(0.0, abs(mean) - math.hypot(error, below)))),
        high=max(bound, epsilon(abs(mean) + math.hypot(error, above))),
        delta=delta,
        num_canaries=count,
        mean=mean,
        spread=spread,
    )


def _threshold_bound(
    observed: np.ndarray, others: np.ndarray | None, delta: float
) -> float:
    """Returns the best of log((TPR - delta) / FPR) over a few thresholds."""
    best = 0.0
    share = (1 - _CONFIDENCE) / (2 * len(_FALSE_POSITIVES))
    for rate in _FALSE_POSITIVES:
        if others is None:
            threshold, false = float(stats.norm.isf(rate)), rate
        else:
            threshold = float(np.quantile(others, 1 - rate))
            hits = int((others > threshold).sum())
            false = float(stats.beta.isf(share, hits + 1, len(others) - hits))
        hits = int((observed > threshold).sum())
        if not hits:
            continue
        true = float(stats.beta.ppf(share, hits, len(observed) - hits + 1))
        if true > delta:
            best = max(best, math.log((true - delta) / false))
    return best


def delta_of(
    epsilon: float, mean: float, std: float, other_mean: float, other_std: float
) -> float:
    """Returns P(A) - e^epsilon Q(A) for the A where that is most.

    P is N(mean, std^2), Q is N(other_mean, other_std^2): the hockey-stick
    divergence of P from Q at e^epsilon.
    """
    # log p - log q - epsilon = a x^2 + b x + c, x from P's mean in P's std.
    ratio, shift = std / other_std, (mean - other_mean) / other_std
    a = (ratio**2 - 1) / 2
    b = shift * ratio
    c = shift**2 / 2 - math.log(ratio) - epsilon
    edges = [-math.inf, *_real_roots(a, b, c), math.inf]
    total = 0.0
    for low, high in itertools.pairwise(edges):
        inside = _between(low, high)
        if a * inside**2 + b * inside + c > 0:
            total += _mass(low, high) - math.exp(epsilon) * _mass(
                low * ratio + shift, high * ratio + shift
            )
    return max(0.0, total)


def epsilon_of(
    mean: float, std: float, other_mean: float, other_std: float, delta: float
) -> float:
    """Returns the least epsilon at which both directions are below delta.

    Args:
      mean: Of the one Gaussian.
      std: Its standard deviation, above 0.
      other_mean: Of the other.
      other_std: Likewise.
      delta: Between 0 and 1.
    """
    _validate.inside_unit_interval(delta=delta)
    _validate.positive(std=std)
    _validate.positive(other_std=other_std)

    def excess(epsilon: float) -> float:
        one, other = (mean, std), (other_mean, other_std)
        return (
            max(delta_of(epsilon, *one, *other), delta_of(epsilon, *other, *one))
            - delta
        )

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > _LARGEST_EPSILON:
            return math.inf
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-10))


def _real_roots(a: float, b: float, c: float) -> list[float]:
    if abs(a) < 1e-12:
        return [-c / b] if b else []
    return sorted(
        float(root.real)
        for root in np.roots([a, b, c])
        if abs(root.imag) <= 1e-12 * max(1.0, abs(root))
    )


def _between(low: float, high: float) -> float:
    if math.isinf(low) and math.isinf(high):
        return 0.0
    if math.isinf(low):
        return high - 1.0
    return low + 1.0 if math.isinf(high) else (low + high) / 2


def _mass(low: float, high: float) -> float:
    """Returns the standard normal's mass, from the tail that is exact."""
    if low > 0:
        return float(special.ndtr(-low) - special.ndtr(-high))
    return float(special.ndtr(high) - special.ndtr(low))
