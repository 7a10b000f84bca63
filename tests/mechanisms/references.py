"""The mechanisms once more, in float64 NumPy, straight from the papers.

An update is a list of arrays, one for each variable. Nothing of `tfdp_fl` is
used here.
"""

import itertools
import math

import numpy as np
from scipy import linalg, optimize, stats


def l2_norm(update) -> float:
    """Returns the norm over all variables together."""
    return math.sqrt(sum(np.sum(np.square(v, dtype=float)) for v in update))


def clipped(update, bound: float):
    """McMahan et al. (2018), FlatClip: Delta min(1, S / ||Delta||)."""
    norm = l2_norm(update)
    factor = 1.0 if norm <= bound else bound / norm
    return [np.asarray(v, float) * factor for v in update]


def total(updates):
    """Returns the sum of updates, variable by variable."""
    return [np.sum(parts, axis=0, dtype=float) for parts in zip(*updates, strict=True)]


def fixed_clipping_mean(updates, bound: float, clients_per_round: float):
    """McMahan et al. (2018), Algorithm 1 without noise and weights."""
    summed = total([clipped(update, bound) for update in updates])
    return [v / clients_per_round for v in summed]


def median_clipping_mean(updates, clients_per_round: float):
    """Geyer et al. (2017), Algorithm 1, lines 9 and 10, without noise."""
    bound = float(np.median([l2_norm(update) for update in updates]))
    return fixed_clipping_mean(updates, bound, clients_per_round), bound


def next_clip(bound, norms, quantile, rate, clients_per_round, noise=0.0):
    """Andrew et al. (2021), Algorithm 1: S exp(-eta (b - gamma))."""
    bits = sum(1.0 for norm in norms if norm <= bound)
    fraction = (bits + noise) / clients_per_round
    return bound * math.exp(-rate * (fraction - quantile))


def update_noise_multiplier(z: float, sigma_b: float) -> float:
    """Andrew et al. (2021), Theorem 1."""
    return (z**-2 - (2 * sigma_b) ** -2) ** -0.5


def gaussian_delta(sigma: float, sensitivity: float, epsilon: float) -> float:
    """Balle & Wang (2018), Theorem 8: delta of one Gaussian release."""
    a = sensitivity / (2 * sigma) - epsilon * sigma / sensitivity
    b = -sensitivity / (2 * sigma) - epsilon * sigma / sensitivity
    return stats.norm.cdf(a) - math.exp(epsilon) * stats.norm.cdf(b)


def analytic_sigma(sensitivity: float, epsilon: float, delta: float) -> float:
    """Balle & Wang (2018): the smallest sigma that keeps (epsilon, delta)."""

    def off(log_sigma: float) -> float:
        return gaussian_delta(math.exp(log_sigma), sensitivity, epsilon) - delta

    low, high = math.log(sensitivity * 1e-2), math.log(sensitivity * 1e6)
    return math.exp(optimize.brentq(off, low, high, xtol=1e-12))


def classic_sigma(sensitivity: float, epsilon: float, delta: float) -> float:
    """Dwork & Roth (2014), Theorem A.1."""
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def nbafl_uplink_sigma(clip, constant, rounds, examples, epsilon) -> float:
    """Wei et al. (2020), as `inject_noise_in_upload` in FederatedScope."""
    return clip * rounds * 2 * constant / examples / epsilon


def nbafl_downlink_sigma(
    clip, constant, rounds, clients_per_round, num_clients, least, epsilon
) -> float:
    """Wei et al. (2020), as `inject_noise_in_broadcast` in FederatedScope."""
    if not rounds > math.sqrt(num_clients) * clients_per_round:
        return 0.0
    root = math.sqrt(rounds**2 - clients_per_round**2 * num_clients)
    return 2 * clip * constant * root / (least * num_clients * epsilon)


def variance_and_scale(updates) -> tuple[float, float]:
    """Geyer et al. (2017), Section 3: V_c and U_s over all parameters."""
    flat = np.array([np.concatenate([np.ravel(v) for v in u]) for u in updates], float)
    return float(flat.var(axis=0).mean()), float(np.mean(flat.mean(axis=0) ** 2))


def dense(coefficients, rounds):
    """Returns C, lower-triangular Toeplitz."""
    column = np.zeros(rounds)
    column[: len(coefficients)] = coefficients[:rounds]
    return linalg.toeplitz(column, np.zeros(rounds))


def worst_by_count(strategy, min_separation):
    """Returns max over patterns of sum |(C'C)_ij|, by how many rounds.

    Entry k is for at most k participations, at least `min_separation` apart.
    """
    rounds = strategy.shape[1]
    products = np.abs(strategy.T @ strategy)
    worst = np.zeros(rounds + 1)
    for count in range(1, -(-rounds // min_separation) + 1):
        slack = rounds - (count - 1) * (min_separation - 1)
        for places in itertools.combinations(range(slack), count):
            pattern = np.array(places) + np.arange(count) * (min_separation - 1)
            value = products[np.ix_(pattern, pattern)].sum()
            worst[count] = max(worst[count], value)
    return np.maximum.accumulate(worst)
