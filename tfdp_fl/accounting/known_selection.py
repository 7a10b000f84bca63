"""The cost of a round if its selection of clients counts as known."""

from __future__ import annotations

import attr
import dp_accounting
import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from tfdp_fl.accounting import gaussian

# Beyond this many standard deviations (probability below 1e-23), a loss counts as
# infinite.
_TAIL = 10.0


@attr.s(frozen=True, slots=True, auto_attribs=True)
class KnownSelectionDpEvent(dp_accounting.DpEvent):
    """With probability q, a Gaussian release, otherwise nothing; it is known which.

    It dominates an attempt at a round that draws a cohort of a fixed size and is
    abandoned if any client of the cohort fails. With probability at most q = m/N, a
    client is drawn and the round is released; in all other cases, the client has no
    influence. Revealing which case it is can only help an observer.

    Attributes:
      sampling_probability: The probability of taking part, q.
      event: The Gaussian with noise stddev / sensitivity; z / 2 for replace-one.
    """

    sampling_probability: float
    event: dp_accounting.GaussianDpEvent


def renyi_divergence(event: KnownSelectionDpEvent, orders: np.ndarray) -> np.ndarray:
    """Returns the Renyi divergence at orders: log(1 - q + q exp((a - 1) r)) / (a - 1).

    The Gaussian's own divergence is r = a / (2 z^2). The two mixtures share the known
    selection, so the moments of their components add up with the mixture weights.

    Args:
      event: The event.
      orders: Float64 [K], a > 1.
    """
    q, z = event.sampling_probability, event.event.noise_multiplier
    log_moment = (orders - 1) * orders / (2 * z * z)
    # Near order 1, the sum is just above 1; far from it, it would overflow a float.
    near = np.log1p(q * np.expm1(np.minimum(log_moment, 1.0)))
    far = np.logaddexp(np.log1p(-q), np.log(q) + log_moment)
    return np.where(log_moment < 1, near, far) / (orders - 1) * (1 + 1e-14)


def privacy_loss(
    event: KnownSelectionDpEvent, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss distribution: loss 0 with probability 1 - q.

    The Gaussian's loss is N(mu^2 / 2, mu^2), mu = 1/z, in both directions; each is
    rounded up to a multiple of `interval`.
    """
    q, mu = event.sampling_probability, 1 / event.event.noise_multiplier
    mean = mu * mu / 2
    first, last = np.ceil((mean + np.array([-_TAIL, _TAIL]) * mu) / interval)
    cells = np.arange(first, last + 1)
    *mass, above = q * gaussian.normal_cells((cells * interval - mean) / mu)
    losses = dict(zip(cells.astype(int).tolist(), map(float, mass), strict=True))
    losses[0] = losses.get(0, 0.0) + 1 - q
    rounded = privacy_loss_distribution.PrivacyLossDistribution
    return rounded.create_from_rounded_probability(losses, float(above), interval)
