"""The cost of one event: its Renyi curve and its privacy loss distribution.

Both are cached for later rounds. dp-accounting computes one order after another in
Python, which takes up to a second for all orders of one event. So a curve is computed
once, and only near the orders that give the least epsilon; rounds are multiples of it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from dp_accounting.pld import common as pld_common
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant

from tfdp_fl.accounting import known_selection, random_allocation
from tfdp_fl.accounting.loss_distribution import LossDistribution
from tfdp_fl.accounting.private_selection import BestOfTrialsDpEvent

# Integers up to 8192 for a small epsilon; half-integers up to 32, and orders near 1 for
# a large one. Under sampling, the best order is sharp, so neighbouring orders differ by
# about 5 % in (order - 1). dp-accounting ignores orders up to 1.01 for an epsilon.
ORDERS = np.array(
    sorted(
        {
            *map(float, rdp_privacy_accountant.DEFAULT_RDP_ORDERS),
            *(1 + np.geomspace(1e-3, 10, 190)[48:]),
            *(x / 2 for x in range(22, 64)),
            *np.round(np.geomspace(64, 1024, 72)),
            *np.round(np.geomspace(1024, 8192, 12)),
        }
    )
)
_INTEGERS = ORDERS[np.floor(ORDERS) == ORDERS].astype(int)
# For a cohort of a fixed size, the time for an order is proportional to its square.
_INTEGERS_OF_FIXED_SIZE = np.array([*_INTEGERS[:64], *_INTEGERS[65::3], 8192])
# Most curves are needed only near one order, so they are computed in these parts. The
# first part is only the lowest order, which bounds the total variation.
PARTS = np.split(
    ORDERS,
    np.searchsorted(ORDERS, [ORDERS[1], 1.3, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
)
FIRST_PART = 5  # From order 8.
# A few roundings of a float64.
_ROUNDING = 1.25 * 2.0**-50
_TAIL = 13.0  # Standard deviations; exp(-13^2/2) = 2e-37.
_MAX_GRID_POINTS = 20_000

# PLD stores a probability for every multiple of this up to the largest loss.
_PLD_INTERVAL = 1e-4
_PLD_MAX_CELLS = 2_000_000
# Used if a slightly looser bound is sufficient; ten times as fast.
_PLD_COARSE_INTERVAL = 1e-3
# For random allocation, whose time grows with their square. They overstate epsilon by
# about 0.01 %; the coarse ones, by less than calibration tolerates.
_ALLOCATION_CELLS, _ALLOCATION_COARSE_CELLS = 1000, 600


@functools.lru_cache(maxsize=2**16)
def rdp_curve(
    event: dp_accounting.DpEvent, relation: dp_accounting.NeighboringRelation, part: int
) -> np.ndarray:
    """Returns an event's Renyi divergence at each of `PARTS[part]`.

    It is that of `dp_accounting.rdp.RdpAccountant`, rounded up, because near order 1 it
    is a quotient of small differences. A sampled Gaussian is computed at integer
    orders. Between them, log A = (order - 1) divergence is convex (Wang, Balle &
    Kasiviswanathan 2019, corollary 10), which bounds it at other orders.

    Raises:
      ValueError: dp-accounting knows no bound for the event.
    """
    alpha = PARTS[part]
    if isinstance(event, BestOfTrialsDpEvent):
        return _curves_of_best_trial(event, relation)[part]
    if isinstance(event, known_selection.KnownSelectionDpEvent):
        return known_selection.renyi_divergence(event, alpha)
    if isinstance(event, random_allocation.RandomAllocationDpEvent):
        return random_allocation.renyi_divergence(event, alpha)
    if _is_sampled_gaussian(event):
        fixed_size = isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)
        integers = _INTEGERS_OF_FIXED_SIZE if fixed_size else _INTEGERS
        first = max(0, np.searchsorted(integers, alpha[0], "right") - 1)
        integers = integers[first : np.searchsorted(integers, alpha[-1]) + 1]
        if fixed_size or not 0 < event.sampling_probability < 1:
            log_a = (integers - 1) * _library_divergence(event, relation, integers)
        else:
            log_a = _log_a_at_integers(integers, event)
        log_a += _rounding_of_log_a(log_a, integers, event)
        log_a = np.interp(alpha, [1, *integers], [0, *log_a])
        if not fixed_size:
            log_a = _with_fractional_orders(log_a, alpha, event)
        # Sampling never costs more than including every client.
        without_sampling = alpha / (2 * event.event.noise_multiplier**2)
        rdp = np.minimum(log_a / (alpha - 1), without_sampling)
    else:
        rdp = _library_divergence(event, relation, alpha) + _ROUNDING / (alpha - 1)
    rdp = np.maximum(rdp * (1 + 1e-13), 1e-15)
    rdp.setflags(write=False)
    return rdp


@functools.lru_cache(maxsize=256)
def _curves_of_best_trial(
    event: BestOfTrialsDpEvent, relation: dp_accounting.NeighboringRelation
) -> list[np.ndarray]:
    """Returns the curve of the best trial at each of `PARTS`.

    It uses theorem 6 of Papernot & Steinke (2022) for a Poisson number of trials, and
    theorem 2 for a truncated negative binomial one. If a trial's event is drawn
    independently of the data, or differs by client, the largest cost at each order is
    an upper bound.
    """
    parts = range(len(PARTS))
    trials = [
        np.concatenate([rdp_of_trial(trial, relation, part) for part in parts])
        for trial in event.events
    ]
    # (Its accountant accepts only events, and has no public form of the theorem.)
    best = rdp_privacy_accountant._compute_rdp_repeat_and_select(
        ORDERS, np.max(trials, axis=0), event.mean, event.shape
    )
    return np.split(best, np.cumsum([len(part) for part in PARTS])[:-1])


def rdp_of_trial(
    event: dp_accounting.DpEvent, relation: dp_accounting.NeighboringRelation, part: int
) -> np.ndarray:
    """Returns a trial's curve, summed from the cached curves of its rounds."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        return event.count * rdp_of_trial(event.event, relation, part)
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [rdp_of_trial(component, relation, part) for component in event.events]
        return np.sum([np.zeros(len(PARTS[part])), *parts], axis=0)
    return rdp_curve(event, relation, part)


# The logarithm of n! for n up to 8192.
_LOG_FACTORIALS = np.array([math.lgamma(n + 1) for n in range(_INTEGERS[-1] + 1)])


def _log_a_at_integers(
    orders: np.ndarray, event: dp_accounting.PoissonSampledDpEvent
) -> np.ndarray:
    """Returns log A of a Poisson-sampled Gaussian at integer orders, int [n].

    A = sum_k binom(order, k) (1 - q)^(order - k) q^k exp((k^2 - k) / (2 z^2)) (Mironov,
    Talwar & Zhang 2019, https://arxiv.org/abs/1908.10530, section 3.3), for all orders
    at once, whereas dp-accounting adds it up term by term in Python.
    """
    q, z = event.sampling_probability, event.event.noise_multiplier
    k = np.arange(orders[-1] + 1)
    order_minus_k = orders[:, None] - k
    factorials = _LOG_FACTORIALS[k] + _LOG_FACTORIALS[np.maximum(order_minus_k, 0)]
    logs = _LOG_FACTORIALS[orders, None] - factorials + order_minus_k * math.log1p(-q)
    logs += k * math.log(q) + (k * k - k) / (2 * z * z)
    logs[order_minus_k < 0] = -np.inf
    largest = logs.max(axis=1)
    return np.log(np.exp(logs - largest[:, None]).sum(axis=1)) + largest


def _rounding_of_log_a(log_a: np.ndarray, orders: np.ndarray, event: Any) -> np.ndarray:
    """Returns a bound on the rounding error of log A, computed as a sum at an order.

    The first term is near 1, with an error of a few roundings. The other terms come
    from sums of logarithms (of binomial coefficients and q^order), and have the error
    of these. Their share of the sum is at most order q + log A.
    """
    q = (
        event.sampling_probability
        if isinstance(event, dp_accounting.PoissonSampledDpEvent)
        else event.sample_size / event.source_dataset_size
    )
    log_a = np.maximum(log_a, 0.0)
    log_terms = orders * (2 + np.log(orders) - math.log(max(q, 1e-300)))
    return _ROUNDING * (4 + log_a + log_terms * np.minimum(1, orders * q + log_a))


def _is_sampled_gaussian(event: dp_accounting.DpEvent) -> bool:
    sampled_events = (
        dp_accounting.PoissonSampledDpEvent,
        dp_accounting.SampledWithoutReplacementDpEvent,
    )
    return isinstance(event, sampled_events) and (
        isinstance(event.event, dp_accounting.GaussianDpEvent)
        and event.event.noise_multiplier > 0
    )


def _library_divergence(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    orders: np.ndarray,
) -> np.ndarray:
    accountant = dp_accounting.rdp.RdpAccountant(orders, relation)
    return _compose(accountant, event, other="pld").rdp


def _compose(
    accountant: dp_accounting.PrivacyAccountant,
    event: dp_accounting.DpEvent,
    other: str,
) -> Any:
    try:
        return accountant.compose(event)
    except (dp_accounting.UnsupportedEventError, OverflowError) as error:
        raise ValueError(
            f"event {event!r} has no bound by {type(accountant).__name__}; "
            f"accountant={other!r} may have one. {error}"
        ) from error


def _with_fractional_orders(
    log_a: np.ndarray, orders: np.ndarray, event: dp_accounting.PoissonSampledDpEvent
) -> np.ndarray:
    """Replaces the bounds on log A at fractional orders by its actual values.

    dp-accounting's series for them does not converge below an order of about 2.4
    (it warns, and drops the order), and the bound costs up to a tenth of epsilon. We
    compute A = E_x~N(0, z^2) [((1 - q) + q exp((2x - 1) / (2 z^2)))^order] (Mironov,
    Talwar & Zhang 2019, https://arxiv.org/abs/1908.10530, section 3.3) by the
    trapezoidal rule, which converges exponentially for an analytic integrand.
    """
    q, z = event.sampling_probability, event.event.noise_multiplier
    fractional = np.floor(orders) != orders
    if not fractional.any():
        return log_a
    alpha = orders[fractional, None]
    step = min(z / 8, 0.4 * z * z)
    if not 0 < q < 1 or (alpha[-1, 0] + 2 * _TAIL * z) / step > _MAX_GRID_POINTS:
        return log_a  # With this little noise, the bound is good enough.
    x = np.arange(-_TAIL * z, alpha[-1, 0] + _TAIL * z, step)
    weight = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z))
    density = math.log(step / (z * math.sqrt(2 * math.pi))) - x * x / (2 * z * z)
    logs = alpha * weight + density
    terms = np.exp(logs - logs.max(axis=1, keepdims=True))
    total = terms.sum(axis=1)
    # Each term has the rounding errors of the summands of its logarithm.
    size = (terms * (np.abs(alpha * weight) + np.abs(density))).sum(axis=1) / total
    exact = log_a.copy()
    exact[fractional] = np.maximum(logs.max(axis=1) + np.log(total), 0.0)
    exact[fractional] += _ROUNDING * (4 + size)
    return exact


def pld_interval(largest_loss: float, coarse: bool) -> float:
    """Returns the width of a PLD's cells, wider for large losses to save memory."""
    interval = _PLD_COARSE_INTERVAL if coarse else _PLD_INTERVAL
    if math.isinf(largest_loss):
        return interval
    return max(interval, largest_loss / _PLD_MAX_CELLS)


@functools.lru_cache(maxsize=32)
def _of_one_release(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    interval: float,
) -> LossDistribution:
    """Returns one event's privacy loss distribution.

    Making it takes most of the time of a PLD epsilon, while self-composition takes
    little. So a cached one serves a whole curve of epsilon against rounds.
    """
    if isinstance(event, known_selection.KnownSelectionDpEvent):
        made = known_selection.privacy_loss(event, interval)
    elif isinstance(event, random_allocation.RandomAllocationDpEvent):
        is_fine = interval < _PLD_COARSE_INTERVAL
        cells = _ALLOCATION_CELLS if is_fine else _ALLOCATION_COARSE_CELLS
        made = random_allocation.privacy_loss(event, interval, cells)
    elif (gaussian := _gaussian_pld(event, relation, interval)) is not None:
        made = gaussian
    else:
        accountant = _compose(pld.PLDAccountant(relation, interval), event, other="rdp")
        made = accountant._pld  # There is no public name for it.
        if accountant.get_epsilon(0.5) == math.inf:
            # No privacy; the accountant stores that separately from the distribution.
            made = privacy_loss_distribution.from_privacy_parameters(
                pld_common.DifferentialPrivacyParameters(0.0, 1.0), interval
            )
        return LossDistribution.of(made, interval, is_transformed=True)
    return LossDistribution.of(made, interval)


def _gaussian_pld(
    event: Any, relation: dp_accounting.NeighboringRelation, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution | None:
    """Returns what `PLDAccountant` makes of a Gaussian, sampled or not; None of others.

    The accountant also transforms it once, which leaves rounding errors.
    """
    options: dict[str, Any] = {
        "value_discretization_interval": interval,
        "neighboring_relation": relation,
    }
    probability, release = 1.0, event
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        probability, release = event.sampling_probability, event.event
    if isinstance(release, dp_accounting.GaussianDpEvent):
        if not (release.noise_multiplier > 0 and probability > 0):
            return None
        return privacy_loss_distribution.from_gaussian_mechanism(
            release.noise_multiplier, sampling_prob=probability, **options
        )
    if isinstance(event, dp_accounting.TruncatedSubsampledGaussianDpEvent):
        sizes = event.dataset_size, event.truncated_batch_size
        if not min(event.noise_multiplier, event.sampling_probability, *sizes) > 0:
            return None
        return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=event.dataset_size,
            sampling_probability=event.sampling_probability,
            truncated_batch_size=event.truncated_batch_size,
            noise_multiplier=event.noise_multiplier,
            **options,
        )
    return None


def loss_distribution(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    interval: float,
) -> LossDistribution:
    """Returns an event's distribution; events in it are composed with their errors."""
    if isinstance(event, dp_accounting.SelfComposedDpEvent) and event.count > 0:
        one = loss_distribution(event.event, relation, interval)
        return one.self_compose(event.count)
    if isinstance(event, dp_accounting.ComposedDpEvent) and event.events:
        parts = [loss_distribution(part, relation, interval) for part in event.events]
        return functools.reduce(LossDistribution.compose, parts)
    return _of_one_release(event, relation, interval)
