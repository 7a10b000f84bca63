"""How large epsilon looks from canaries' scores."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import stats

from tfdp_fl import _validate
from tfdp_fl.accounting import gaussian_epsilon

# Two-sided, and how far a spread is from another that it passes for.
_CONFIDENCE, _Z95 = 0.95, 1.959964
_SAME_SPREAD = 4.0
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
        of several, it only tells d.
    """

    observed: np.ndarray
    unobserved: np.ndarray | None = None
    null_std: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of epsilon, not a bound.

    Attributes:
      epsilon: At `delta`.
      low: The lower end of a 95 % interval (see `estimate`).
      high: The upper end.
      delta: At which.
      num_canaries: How many took part.
    """

    epsilon: float
    low: float
    high: float
    delta: float
    num_canaries: int


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
    # From here on in units of the null's standard deviation.
    # `scores` takes one direction out of the update before the norm.
    freedom = max(scores.null_std**-2 - 1, 1.0)
    ends = np.sqrt(stats.chi2.ppf([0.025, 0.975], freedom))
    smallest, largest = ends * scores.null_std
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
        apart = abs(of_mean) / taken
        return gaussian_epsilon(1 / apart if apart else math.inf, delta)

    return Estimate(
        epsilon=max(bound, epsilon(mean)),
        low=max(bound, epsilon(max(0.0, abs(mean) - math.hypot(error, below)))),
        high=max(bound, epsilon(abs(mean) + math.hypot(error, above))),
        delta=delta,
        num_canaries=count,
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
