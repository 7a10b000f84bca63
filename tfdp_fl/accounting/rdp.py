"""Renyi divergences of Gaussian rounds, vectorised over the orders.

dp_accounting computes the same quantities one order at a time, which is too
slow for an epsilon after every round of a schedule, and from 0.5 on it bounds
or drops fractional orders of the Poisson-sampled Gaussian. What is here is
tested against dp_accounting, which does everything that is not Gaussian.
"""

from __future__ import annotations

import functools
import math

import dp_accounting
import numpy as np
from scipy import special

from tfdp_fl.accounting import charge as charge_lib

# dp_accounting's own default, with which the published tables were made.
DEFAULT_DP_ACCOUNTING_ORDERS: tuple[float, ...] = (
    *(1 + x / 10.0 for x in range(1, 100)),
    *(float(x) for x in range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)

# Orders between 1 and 11 for a large epsilon, every half up to 32, integers
# from there to 8192 for a small one. Neighbours differ by at most 5 % in
# (order - 1) up to 1024: off the best order by a factor 1 + t, a Gaussian's
# epsilon rises by about t^2/2.
DENSE_ORDERS: tuple[float, ...] = tuple(
    sorted(
        {
            *DEFAULT_DP_ACCOUNTING_ORDERS,
            *(float(x) for x in 1 + np.geomspace(1e-3, 10, 190)),
            *(x / 2 for x in range(22, 64)),
            *(float(round(x)) for x in np.geomspace(64, 1024, 72)),
            *(float(round(x)) for x in np.geomspace(1024, 8192, 12)),
        }
    )
)

# Above this order Theorem 27's forward differences are not worth their cost
# (dp_accounting stops at the same one).
_MAX_EXACT_ORDER = 256
_MAX_GRID_POINTS = 20_000
_TAIL = 13.0  # Standard deviations; exp(-13^2/2) = 2e-37.


def charge_rdp(charge: charge_lib.RoundCharge, orders: tuple[float, ...]) -> np.ndarray:
    """Returns one round's Renyi divergence at each order.

    Args:
      charge: The round.
      orders: Increasing, all above 1.

    Returns:
      float64 of shape [len(orders)]; infinite without noise.
    """
    return _charge_rdp(charge, orders)


@functools.lru_cache(maxsize=8192)
def _charge_rdp(charge, orders):
    z = charge.noise_multiplier
    if z is None:
        rdp = event_rdp(charge.dp_event("rdp"), charge.relation, orders)
    elif charge.sampling == "fixed_size":
        q = charge.sampling_probability
        rdp = fixed_size_gaussian_rdp(q, z / 2, orders)
    else:
        rdp = poisson_gaussian_rdp(charge.sampling_probability, z, orders)
    rdp.setflags(write=False)
    return rdp


def is_sampled_gaussian(event: dp_accounting.DpEvent) -> bool:
    """Returns whether an event is a Poisson-sampled Gaussian."""
    return isinstance(event, dp_accounting.PoissonSampledDpEvent) and (
        isinstance(event.event, dp_accounting.GaussianDpEvent)
    )


@functools.lru_cache(maxsize=256)
def event_rdp(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    orders: tuple[float, ...],
) -> np.ndarray:
    """Returns the Renyi divergences of an event that is no Gaussian.

    They are those of dp_accounting's own accountant, but for a Poisson-sampled
    Gaussian under add-or-remove-one (`poisson_gaussian_rdp`).
    """
    by_removal = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if relation is by_removal and is_sampled_gaussian(event):
        rdp = poisson_gaussian_rdp(
            event.sampling_probability, event.event.noise_multiplier, orders
        )
    else:
        rdp = _dp_accountings_rdp(event, relation, orders)
    rdp.setflags(write=False)
    return rdp


def _dp_accountings_rdp(
    event: dp_accounting.DpEvent,
    relation: dp_accounting.NeighboringRelation,
    orders: tuple[float, ...],
) -> np.ndarray:
    accountant = dp_accounting.rdp.RdpAccountant(orders, relation)
    try:
        accountant.compose(event)
    except dp_accounting.UnsupportedEventError as error:
        raise ValueError(
            f"event {event!r} has no RDP bound in dp_accounting; "
            f"accountant='pld' may have one. {error}"
        ) from error
    return np.array(accountant._rdp)


def gaussian_rdp(noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """Returns alpha / (2 z^2) (Mironov 2017, proposition 7)."""
    if noise_multiplier == 0:
        return np.full(len(orders), np.inf)
    return np.asarray(orders) / (2 * noise_multiplier**2)


def poisson_gaussian_rdp(
    sampling_probability: float,
    noise_multiplier: float,
    orders: tuple[float, ...],
) -> np.ndarray:
    """Returns the divergences of the Poisson-sampled Gaussian.

    log A_alpha / (alpha - 1) with A_alpha = E_x~N(0, z^2) [w(x)^alpha],
    w = (1 - q) + q exp((2x - 1) / (2 z^2)) (Mironov, Talwar & Zhang 2019,
    https://arxiv.org/abs/1908.10530, section 3.3). Integer orders: its finite
    sum. Fractional ones: the trapezoidal rule, which converges exponentially
    for an analytic integrand (1e-12 here); under very little noise, where the
    grid would be too fine, the upper bound from the convexity of log A.

    Args:
      sampling_probability: q, from 0 to 1.
      noise_multiplier: z, against sensitivity 1 (a client added or removed).
      orders: Increasing, all above 1.

    Returns:
      float64 of shape [len(orders)].
    """
    q, z = sampling_probability, noise_multiplier
    if q == 0 or z == math.inf:
        return np.zeros(len(orders))
    unsampled = gaussian_rdp(z, orders)
    if q == 1 or z == 0:
        return unsampled
    alpha = np.asarray(orders)
    log_q, log_1mq = math.log(q), math.log1p(-q)
    step = min(z / 8, 0.4 * z * z)
    fractional = alpha != np.floor(alpha)
    points = (np.max(alpha[fractional], initial=0) + 2 * _TAIL * z) / step
    by_grid = points <= _MAX_GRID_POINTS
    table = _binomial_table(_integers(orders, bracket=not by_grid))
    i = table.i
    log_a_integer = table.log_sum(
        i * log_q + (table.alpha - i) * log_1mq + (i * i - i) / (2 * z * z)
    )
    log_a = _interpolated(alpha, table.orders, log_a_integer)
    if by_grid and np.any(fractional):
        log_a[fractional] = _log_a_by_grid(alpha[fractional], z, step, log_q, log_1mq)
    # Sampling never costs more than taking everybody.
    return np.clip(log_a / (alpha - 1), 0.0, unsampled)


def _log_a_by_grid(alpha, z, step, log_q, log_1mq):
    x = np.arange(-_TAIL * z, alpha[-1] + _TAIL * z, step)
    log_w = np.logaddexp(log_1mq, log_q + (2 * x - 1) / (2 * z * z))
    log_density = -x * x / (2 * z * z) + math.log(step / (z * math.sqrt(2 * math.pi)))
    terms = alpha[:, None] * log_w + log_density
    top = np.max(terms, axis=1)
    return top + np.log(np.sum(np.exp(terms - top[:, None]), axis=1))


def fixed_size_gaussian_rdp(
    sampling_fraction: float, noise_multiplier: float, orders: tuple[float, ...]
) -> np.ndarray:
    """Returns the divergences under sampling without replacement.

    Wang, Balle & Kasiviswanathan 2019, https://arxiv.org/abs/1808.00087,
    theorem 27 (the form for the Gaussian), under replace-one. It bounds
    integer orders; between them log A is convex (corollary 10), which bounds
    the fractional ones. As in dp_accounting, but the even forward differences
    are taken as what they are, E |p/q - 1|^l, a sum without cancellation.

    Args:
      sampling_fraction: m/N.
      noise_multiplier: Against the sensitivity of a replaced client: z/2 where
        the noise is z times the clip norm.
      orders: Increasing, all above 1.

    Returns:
      float64 of shape [len(orders)].
    """
    q, z = sampling_fraction, noise_multiplier
    if q == 0 or z == math.inf:
        return np.zeros(len(orders))
    unsampled = gaussian_rdp(z, orders)
    if q == 1 or z == 0:
        return unsampled
    alpha = np.asarray(orders)
    table = _binomial_table(_integers(orders, bracket=True))
    moment = _even_log_moments(z)
    j = np.arange(int(table.orders[-1]) + 1)
    cgf = j * (j - 1) / (2 * z * z)  # (j - 1) times the divergence at j.
    simple = math.log(2) + cgf
    tight = simple.copy()
    top = min(len(tight) - 1, _MAX_EXACT_ORDER)
    k = j[3 : top + 1]
    tight[3 : top + 1] = np.minimum(
        simple[3 : top + 1],
        math.log(4) + 0.5 * (moment[k // 2] + moment[(k + 1) // 2]),
    )
    two = 1 / (z * z)  # The divergence at order 2.
    tight[2] = simple[2] = min(
        math.log(4) + two + math.log1p(-math.exp(-two)), math.log(2) + two
    )
    i = table.i.astype(np.int64)
    terms = np.where(table.alpha <= _MAX_EXACT_ORDER, tight[i], simple[i])
    terms = terms + i * math.log(q)
    terms[i == 0] = 0.0  # The leading 1.
    terms[i == 1] = -np.inf
    log_a = _interpolated(alpha, table.orders, table.log_sum(terms))
    return np.clip(log_a / (alpha - 1), 0.0, unsampled)


@functools.lru_cache(maxsize=256)
def _even_log_moments(z: float) -> np.ndarray:
    """Returns log E_x~N(0,z^2) (e^((2x-1)/(2z^2)) - 1)^(2h) at index h."""
    step = z / 8
    chunks = []
    h = np.arange(1, _MAX_EXACT_ORDER // 2 + 1)
    # The integrand of order l peaks near l: a chunk of orders shares a grid.
    for part in np.array_split(h, 8):
        x = np.arange(-_TAIL * z, 2 * part[-1] + _TAIL * z, step)
        # With so little noise the simple bound is as good.
        if len(x) > _MAX_GRID_POINTS:
            chunks.append(np.full(len(part), np.inf))
            continue
        u = (2 * x - 1) / (2 * z * z)
        with np.errstate(divide="ignore"):
            log_abs = np.where(
                u > 0,
                u + np.log(-np.expm1(-np.abs(u))),
                np.log(-np.expm1(-np.abs(u))),
            )
        log_density = -x * x / (2 * z * z) + math.log(
            step / (z * math.sqrt(2 * math.pi))
        )
        terms = 2 * part[:, None] * log_abs + log_density
        chunks.append(special.logsumexp(terms, axis=1))
    moments = np.concatenate([[0.0], *chunks])
    moments.setflags(write=False)
    return moments


class _BinomialTable:
    """Rows of log C(alpha, i), i = 0..alpha, for several integer orders."""

    def __init__(self, orders: tuple[int, ...]):
        sizes = np.array(orders) + 1
        self.orders = np.array(orders, dtype=np.float64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        self.sizes = sizes
        self.alpha = np.repeat(self.orders, sizes)
        self.i = np.concatenate([np.arange(s, dtype=np.float64) for s in sizes])
        log_factorial = special.gammaln(np.arange(max(orders) + 2) + 1.0)
        index = self.i.astype(np.int64)
        top = self.alpha.astype(np.int64)
        self.log_comb = (log_factorial[top] - log_factorial[index]) - log_factorial[
            top - index
        ]

    def log_sum(self, log_terms: np.ndarray) -> np.ndarray:
        """Returns log sum_i C(alpha, i) exp(log_terms) for each alpha."""
        terms = self.log_comb + log_terms
        top = np.maximum.reduceat(terms, self.starts)
        scaled = np.exp(terms - np.repeat(top, self.sizes))
        return top + np.log(np.add.reduceat(scaled, self.starts))


@functools.lru_cache(maxsize=16)
def _binomial_table(orders: tuple[int, ...]) -> _BinomialTable:
    return _BinomialTable(orders)


@functools.lru_cache(maxsize=16)
def _integers(orders: tuple[float, ...], bracket: bool) -> tuple[int, ...]:
    """Returns the integer orders, with the fractional ones' neighbours."""
    found = {int(a) for a in orders if float(a).is_integer()}
    if bracket or not found:
        for a in orders:
            found |= {math.floor(a), math.ceil(a)}
    return tuple(sorted(found - {1})) or (2,)


def _interpolated(alpha, integers, log_a_integer):
    """Bounds log A at every order by its convexity; log A is 0 at order 1."""
    return np.interp(
        alpha,
        np.concatenate([[1.0], integers]),
        np.concatenate([[0.0], log_a_integer]),
    )


def compute_epsilon(
    orders: np.ndarray, rdp: np.ndarray, delta: float
) -> tuple[float, float]:
    """Returns the best (epsilon, order) of a Renyi curve at delta.

    epsilon = rdp + log(1 - 1/alpha) - log(delta alpha) / (alpha - 1)
    (Canonne, Kamath & Steinke 2020, https://arxiv.org/abs/2004.00010,
    proposition 12), and 0 where delta >= sqrt(1 - exp(-rdp)) already bounds
    the total variation; dp_accounting's `compute_epsilon`, vectorised.

    Args:
      orders: float64 [n], above 1.
      rdp: float64 [n].
      delta: Between 0 and 1.
    """
    epsilon = (
        rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    )
    epsilon = np.where(delta**2 + np.expm1(-rdp) > 0, 0.0, epsilon)
    best = int(np.argmin(epsilon))
    return max(0.0, float(epsilon[best])), float(orders[best])


def compute_delta(
    orders: np.ndarray, rdp: np.ndarray, epsilon: float
) -> tuple[float, float]:
    """Returns the best (delta, order) of a Renyi curve at epsilon.

    The inverse of `compute_epsilon`, by the same two bounds.

    Args:
      orders: float64 [n], above 1.
      rdp: float64 [n].
      epsilon: At least 0.
    """
    log_delta = (orders - 1) * (rdp - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    with np.errstate(divide="ignore"):
        by_variation = 0.5 * np.log(-np.expm1(-rdp))
    log_delta = np.minimum(np.minimum(log_delta, by_variation), 0.0)
    best = int(np.argmin(log_delta))
    return math.exp(log_delta[best]), float(orders[best])
