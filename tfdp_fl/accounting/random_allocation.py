"""The cost of a pass of random allocation.

In a pass of t rounds, each client draws, independently and in secret, the one round in
which it takes part. With a Gaussian of noise multiplier z in each round, adaptive or
not, a pass is dominated in both directions by a pair of distributions: P is
N(e_i, z^2 I) with i uniform over the t coordinates, and Q is N(0, z^2 I) (Feldman &
Shenfeld 2025, https://arxiv.org/abs/2502.08202, and 2026,
https://arxiv.org/abs/2602.17284). The privacy loss is log S, where under Q

    S = (Y_1 + ... + Y_t) / t,  log Y_i ~ N(-1 / (2 z^2), 1 / z^2)  independently.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import special, stats

from tfdp_fl.accounting import gaussian

# Tail mass that counts as an infinite loss, and tail mass that gets only few cells.
_TAIL, _RARE = 1e-18, 1e-5
# With less noise, the pass costs as if the allocation were known; more noise counts as
# the maximum.
_MIN_NOISE, _MAX_NOISE = 0.15, 1e3
# The bins of a coarse histogram that locates the mass.
_BINS = 512
_MAX_ORDER, _MAX_GRID_POINTS = 1024, 4_000_000
# More than the floating-point error of a logarithm here.
_ROUNDING = 1e-12

_T = TypeVar("_T")


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RandomAllocationDpEvent(dp_accounting.DpEvent):
    """A pass in which a client takes part in one round, drawn uniformly in secret.

    Attributes:
      rounds: t, the rounds of the pass.
      event: The Gaussian of one round, without sampling.
    """

    rounds: int
    event: dp_accounting.GaussianDpEvent


class _Distribution(NamedTuple):
    """A distribution that is at least S in the convex order.

    Attributes:
      values: Float64 [K], ascending, the first of them 0.
      masses: Float64 [K], their probabilities under Q.
      missing: The part of the mean that lies at infinity, with probability 0.
    """

    values: np.ndarray
    masses: np.ndarray
    missing: float


def privacy_loss(
    event: RandomAllocationDpEvent, interval: float, cells: int
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns an upper bound on a pass's privacy loss distribution.

    E_Q (S - e^eps)+ and E_Q (1 - e^eps S)+, the deltas of the two directions, are
    expectations of convex functions of S. So both can only grow if we spread the
    probability of a point over its two neighbours in a grid, preserving the mean. We do
    this for each Y_i, for each intermediate sum (sums of independent variables and
    limits preserve the convex order, Shaked & Shanthikumar 2007, theorem 3.A.12), and
    finally onto the powers of e^interval, as in "connect the dots" (Doroshenko et al.
    2022, https://arxiv.org/abs/2207.04380). The error is of second order in the width
    of a cell. (All terms are positive, so floating point changes a delta by a relative
    error of less than 1e-12, and S by less than 1e-12.)

    Args:
      event: The event. With noise below 0.15, the allocation counts as known; noise
        above 1e3 counts as 1e3.
      interval: The width of the cells of the loss.
      cells: The number of cells for intermediate sums.
    """
    z, t = event.event.noise_multiplier, event.rounds
    if z < _MIN_NOISE:
        return privacy_loss_distribution.from_gaussian_mechanism(
            z, value_discretization_interval=interval
        )
    single = _lognormal(1 / min(z, _MAX_NOISE), cells)
    total = _power(single, t, functools.partial(_add, cells=cells))
    values, missing = total.values / t, total.missing / t
    cell = np.log(values[1:]) / interval
    first, last = math.floor(cell[0]) - 1, math.ceil(cell[-1]) + 1
    grid = np.exp(np.arange(first, last + 1) * interval)
    cell = np.array([0.0, *(cell - first)])
    masses, beyond = _spread(values, total.masses, grid, cell)
    pmf = pld_pmf.DensePLDPmf
    return privacy_loss_distribution.PrivacyLossDistribution(
        pmf(interval, first, masses[1:] * grid, missing + beyond, True),
        pmf(interval, -last, masses[:0:-1], float(masses[0]), True),
    )


def _lognormal(sigma: float, cells: int) -> _Distribution:
    """Returns the distribution of exp(N(-sigma^2 / 2, sigma^2)), whose mean is 1."""
    limit = float(stats.norm.isf(_TAIL))
    normal = np.linspace(-limit, limit + sigma, cells)
    grid = np.exp(sigma * normal - sigma**2 / 2)
    # The probability of each cell and of the tails, and their shares of the mean.
    mass = gaussian.normal_cells(normal)
    mean = gaussian.normal_cells(normal - sigma)
    low, high = np.array([0.0, *grid[:-1]]), grid
    up = np.clip((mean[:-1] - low * mass[:-1]) / (high - low), 0.0, mass[:-1])
    masses = np.append(mass[:-1] - up, mass[-1])
    masses[1:] += up
    missing = max(0.0, float(mean[-1] - mass[-1] * grid[-1]))
    return _Distribution(np.array([0.0, *grid]), masses, missing)


def _add(first: _Distribution, second: _Distribution, cells: int) -> _Distribution:
    """Returns the distribution of a sum of independent variables, spread on a grid."""
    sums = np.add.outer(first.values, second.values).ravel()[1:]
    masses = np.outer(first.masses, second.masses).ravel()
    at_zero, masses = masses[0], masses[1:]
    sums, masses = sums[masses > 0], masses[masses > 0]
    logs = np.log(sums)
    start = logs.min()
    width = (logs.max() - start) / _BINS
    bin_index = np.minimum((logs - start) / width, _BINS - 1).astype(int)
    below = np.cumsum(np.bincount(bin_index, masses, _BINS))
    above = np.cumsum(np.bincount(bin_index, masses * sums, _BINS)[::-1])
    ends = [np.searchsorted(below, tail) for tail in (_TAIL, _RARE)]
    ends += [_BINS - np.searchsorted(above, tail) for tail in (_RARE, _TAIL)]
    # Four fifths of the cells cover most of the mass.
    counts, indices = np.array([0, 0.1, 0.9, 1]), np.arange(4)
    # (The knots must all differ.)
    knots = start + width * (np.maximum.accumulate(ends - indices) + indices)
    grid = np.exp(np.interp(np.linspace(0, 1, cells), counts, knots))
    cell = np.interp(logs, knots, counts) * (cells - 1)
    spread, beyond = _spread(sums, masses, grid, cell)
    spread[0] += at_zero
    missing = first.missing + second.missing + beyond
    return _Distribution(np.array([0.0, *grid]), spread, missing)


def _spread(
    values: np.ndarray, masses: np.ndarray, grid: np.ndarray, cell: np.ndarray
) -> tuple[np.ndarray, float]:
    """Spreads masses over 0 and a grid; returns them and the missing part of the mean.

    Mass above the grid goes to its end, and the rest of its mean lies at infinity.
    `cell` has the indices of the grid points below the values, before rounding down.
    """
    points = np.array([0.0, *grid])
    cell = np.where(values < grid[0], 0, np.minimum(cell + 1, len(grid) - 1))
    cell = cell.astype(int)
    up = np.clip((values - points[cell]) / np.diff(points)[cell], 0.0, 1.0)
    spread = np.bincount(cell, masses * (1 - up), len(points))
    spread += np.bincount(cell + 1, masses * up, len(points))
    return spread, float(masses @ np.maximum(values - grid[-1], 0.0))


def _power(base: _T, times: int, add: Callable[[_T, _T], _T]) -> _T:
    """Returns one + ... + one (`times` terms), by doubling."""
    total = None
    while True:
        if times & 1:
            total = base if total is None else add(total, base)
        times >>= 1
        if not times:
            return total  # type: ignore[return-value]
        base = add(base, base)


def renyi_divergence(event: RandomAllocationDpEvent, orders: np.ndarray) -> np.ndarray:
    """Returns the larger Renyi divergence of the two directions, rounded up.

    It is computed at integer orders. Between them, log E_Q S^a and log E_Q S^(1-a) are
    convex in a, and they are 0 at order 1. Beyond order 1024, it is that of the
    Gaussian alone, which is always an upper bound.

    Args:
      event: The event.
      orders: Float64 [K], a > 1.
    """
    z, t = event.event.noise_multiplier, event.rounds
    without_sampling = orders / (2 * z * z)
    max_order = max(2, math.ceil(min(orders[-1], _MAX_ORDER)))
    integers = np.arange(2, max_order + 1)
    logs = np.maximum(
        _log_moments(z, t, max_order), _log_inverse_moments(z, t, max_order)
    )
    logs = np.maximum(logs, 0.0) * (1 + _ROUNDING) + _ROUNDING
    log_moments = np.interp(orders, [1, *integers], [0.0, *logs], right=math.inf)
    return np.maximum(
        np.minimum(log_moments / (orders - 1), without_sampling), 1e-15
    ) * (1 + 1e-13)


def _log_moments(z: float, t: int, max_order: int) -> np.ndarray:
    """Returns log E_Q S^a at orders a = 2, ..., max_order: a sum over the multinomials.

    E_Q S^a = a! t^-a [x^a] (sum_k exp(k (k - 1) / (2 z^2)) x^k / k!)^t.
    """
    k = np.arange(max_order + 1)

    def multiply(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        terms = (first[: n + 1] + second[n::-1] for n in k)
        return np.array([special.logsumexp(term) for term in terms])

    series = _power(k * (k - 1) / (2 * z * z) - special.gammaln(k + 1), t, multiply)
    return (series + special.gammaln(k + 1) - k * math.log(t))[2:]


def _log_inverse_moments(z: float, t: int, max_order: int) -> np.ndarray:
    """Returns log E_Q S^(1 - a) at orders a = 2, ..., max_order.

    E_Q S^-b is the integral of u^(b - 1) E(exp(-u Y / t))^t / Gamma(b) over u > 0. The
    trapezoidal rule in log u and log Y converges exponentially.
    """
    b = np.arange(1, max_order)
    sigma = 1 / z
    mean = -sigma * sigma / 2
    last = (
        2 * max_order * sigma**2 / t
        + sigma * math.sqrt(80 / t)
        + math.log(max_order)
        + 4.5
    )
    step, step_of_y = min(0.1, 0.3 / math.sqrt(max_order)), min(sigma / 8, 0.2)
    lowered = math.log1p(sigma**2 * math.exp(min(last, 600)) / t)
    first_of_y, last_of_y = mean - 13 * sigma - lowered, mean + 13 * sigma
    points = (last + 45) / step * ((last_of_y - first_of_y) / step_of_y)
    # S is at least the geometric mean of the Y_i.
    bound = b * (b / t + 1) / (2 * z * z)
    if points > _MAX_GRID_POINTS or last > 600:
        return bound
    log_u = np.arange(-45, last, step)
    log_y = np.arange(first_of_y, last_of_y, step_of_y)
    density = -(((log_y - mean) / sigma) ** 2) / 2
    density += math.log(step_of_y / (sigma * math.sqrt(2 * math.pi)))
    transform = special.logsumexp(density - np.exp(log_u[:, None] + log_y) / t, axis=1)
    terms = b[:, None] * log_u + t * transform
    log_moments = special.logsumexp(terms, axis=1) + math.log(step) - special.gammaln(b)
    return np.minimum(log_moments, bound)
