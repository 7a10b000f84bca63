"""The calls of the old snippet, on today's functions.

Flower's page on differentially private federated averaging computes epsilon by

    import tensorflow_privacy as tfp
    orders = range(2, max_order + 1)
    rdp = tfp.compute_rdp_sample_without_replacement(q, z, n, orders)
    eps, _, _ = tfp.rdp_accountant.get_privacy_spent(rdp, target_delta=delta)

TF-Privacy 0.9 has neither function, the last call never had that shape (the
orders are missing), and passing z is wrong: with a cohort of fixed size a
client is replaced, not removed, which moves the clipped sum by twice the clip
norm, so the noise counts half. With `from tfdp_fl import rdp_accountant` in
the place of `tfp`, the same lines give the right figure.

New code should use `tfdp_fl.accounting.epsilon`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.accounting import rdp as rdp_lib


class _RdpCurve(np.ndarray):
    """A Renyi curve that remembers its orders."""

    orders: tuple[float, ...] | None

    def __array_finalize__(self, source):
        self.orders = getattr(source, "orders", None)


def compute_rdp_sample_without_replacement(
    q: float, noise_multiplier: float, steps: int, orders: Iterable[float]
) -> np.ndarray:
    """Returns the Renyi curve of rounds with cohorts of fixed size.

    Args:
      q: m/N, the fraction of clients in a cohort.
      noise_multiplier: z, noise stddev on the sum over the clip norm. (That a
        replaced client moves the sum by two clip norms is taken care of: the
        old function wanted z/2.)
      steps: The number of rounds.
      orders: Renyi orders, above 1.

    Returns:
      float64 [len(orders)], for `get_privacy_spent`; under replace-one.
    """
    return _curve(
        rdp_lib.fixed_size_gaussian_rdp, q, noise_multiplier, 2, steps, orders
    )


def compute_rdp(
    q: float, noise_multiplier: float, steps: int, orders: Iterable[float]
) -> np.ndarray:
    """Returns the Renyi curve of rounds with Poisson-sampled cohorts.

    Args:
      q: The probability of a client to be in a cohort.
      noise_multiplier: z, noise stddev on the sum over the clip norm.
      steps: The number of rounds.
      orders: Renyi orders, above 1.

    Returns:
      float64 [len(orders)], for `get_privacy_spent`; under add-or-remove-one.
    """
    return _curve(
        rdp_lib.poisson_gaussian_rdp, q, noise_multiplier, 1, steps, orders
    )


def get_privacy_spent(
    orders: Sequence[float] | np.ndarray,
    rdp: Sequence[float] | np.ndarray | None = None,
    target_eps: float | None = None,
    target_delta: float | None = None,
) -> tuple[float, float, float]:
    """Returns epsilon and delta of a Renyi curve, and the best order.

    Args:
      orders: The orders of the curve; or, as in the snippet, a curve made by
        one of this module's functions, with `rdp` left out.
      rdp: The curve.
      target_eps: Epsilon to compute delta at.
      target_delta: Delta to compute epsilon at. Exactly one of the two.

    Returns:
      (epsilon, delta, order), as the old function did.

    Raises:
      ValueError: If not exactly one target is given, or the orders are not
        known.
    """
    if rdp is None:
        rdp, orders = orders, getattr(orders, "orders", None)
        if orders is None:
            raise ValueError(
                "orders must be given before rdp, unless rdp comes straight "
                "from compute_rdp or compute_rdp_sample_without_replacement."
            )
    if (target_eps is None) == (target_delta is None):
        raise ValueError(
            "exactly one of target_eps and target_delta must be given, got "
            f"target_eps={target_eps!r} and target_delta={target_delta!r}."
        )
    alpha = np.array(_checked_orders(orders))
    curve = np.atleast_1d(np.asarray(rdp, dtype=np.float64))
    if curve.shape != alpha.shape:
        raise ValueError(
            f"rdp must have one value per order, got {curve.shape[0]} values "
            f"for {len(alpha)} orders."
        )
    if target_delta is not None:
        delta = _validate.inside_unit_interval(target_delta=target_delta)
        epsilon, order = rdp_lib.compute_epsilon(alpha, curve, delta)
        return epsilon, delta, order
    epsilon = _validate.non_negative(target_eps=target_eps)
    delta, order = rdp_lib.compute_delta(alpha, curve, epsilon)
    return epsilon, delta, order


def _curve(rdp_of, q, noise_multiplier, sensitivity, steps, orders):
    q = _validate.probability(q=q)
    z = _validate.non_negative(noise_multiplier=noise_multiplier)
    steps = _validate.non_negative_integer(steps=steps)
    orders = _checked_orders(orders)
    if steps and q:
        values = steps * rdp_of(q, z / sensitivity, orders)
    else:
        values = np.zeros(len(orders))
    curve = values.view(_RdpCurve)
    curve.orders = orders
    return curve


def _checked_orders(orders: Iterable[float]) -> tuple[float, ...]:
    values = tuple(float(order) for order in np.atleast_1d(list(orders)))
    if not values or not all(a > 1 and math.isfinite(a) for a in values):
        raise ValueError(f"orders must be numbers above 1, got {orders!r}.")
    if any(a >= b for a, b in itertools.pairwise(values)):
        raise ValueError(f"orders must increase, got {orders!r}.")
    return values
