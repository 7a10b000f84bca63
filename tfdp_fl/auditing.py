"""Canary clients that take part in a training, and an estimate of epsilon from them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import stats

from tfdp_fl import _validate, engine
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import format_up, gaussian_epsilon
from tfdp_fl.mechanisms import bounded_sums
from tfdp_fl.terms import Sampling, TrustModel

__all__ = ["CanaryAudit", "Estimate", "Scores"]

FINAL, ALL = "final", "all"
# The number of coordinates of directions in memory at once: 64 MiB of float32.
_MAX_COORDINATES = 2**24
# The two-sided confidence level, its normal quantile, and by how many standard errors
# a standard deviation may exceed that without participation and still count as equal.
_CONFIDENCE = 0.95
_SAME_SPREAD = 4.0
# The false positive rates of the thresholds.
_FALSE_POSITIVES = (1e-4, 1e-3, 1e-2, 1e-1)


class CanaryAudit:
    """Estimates epsilon from one training run, with canary clients.

    Andrew et al. (2023), "One-shot Empirical Privacy Estimation for Federated
    Learning" (https://arxiv.org/abs/2302.03098): along with the clients, canaries take
    part. Each canary's update is a random direction, scaled to the clip. How much of
    it is found in the model shows how well an attacker who knows the direction can tell
    that the canary took part. The attacker also knows the other canaries'
    contributions and removes them.

    It is an estimate of the success of one attack, not a bound. A value far above the
    claimed epsilon means that something is broken; a value below it proves nothing.
    Pass it to one `fit`, as `fit(audit=...)`. The canaries act as noise in training:
    with K canaries and m of N clients per round, each mean has about K m / N additional
    directions of length S / m. They have no other effect: the adaptive clip and
    `History` follow the clients alone. The clients' guarantee stays the same, because
    canaries do not depend on anyone's data.

    It can audit central mechanisms whose server adds the noise and that scale updates
    by their norm (including fixed, adaptive and median clips).

    Attributes:
      num_canaries: The number of canary clients, K.
      iterates: "final": the attacker sees the model before and after the `fit`. "all":
        the attacker sees the model after every round, and a canary's score is the
        largest over all rounds and over differences of consecutive rounds. This takes
        4 K inner products of the model's size per round.
    """

    def __init__(self, num_canaries: int = 1000, iterates: str = FINAL):
        """Declares an audit; `fit` draws its canaries.

        Args:
          num_canaries: K, at least 2; a thousand determine epsilon to within about a
            tenth.
          iterates: "final" or "all".

        Raises:
          ValueError: An argument is not allowed.
        """
        self.num_canaries = _validate.positive_integer(num_canaries=num_canaries)
        if self.num_canaries < 2:
            raise ValueError(f"num_canaries must be at least 2, got {num_canaries!r}.")
        self.iterates = _validate.one_of((FINAL, ALL), iterates=iterates)
        self._engine: Any = None  # Set by `begin`.
        self._rounds = 0
        self._scores: Scores | None = None

    # The methods that `fit` calls.

    def begin(self, cohort_engine: engine.CohortEngine) -> None:
        """Draws the canaries before the first round.

        Args:
          cohort_engine: The engine that runs the rounds.

        Raises:
          ValueError: The mechanism cannot be audited, or the audit was used before.
        """
        if self._engine is not None:
            raise ValueError(
                "audit must be a new CanaryAudit for each fit, got one that was used."
            )
        query = cohort_engine.query
        if (
            query.mechanism.trust_model != TrustModel.CENTRAL
            or not query.only_scales
            or cohort_engine.collects_contributions
        ):
            raise ValueError(
                "audit must be None unless a trusted server adds the noise to "
                "updates that are scaled by their norm, and sums them itself; "
                f"got {query.mechanism.name} with noise_site="
                f"{query.mechanism.noise_site!r}."
            )
        self._engine = cohort_engine
        size, count = cohort_engine.update_spec.size, self.num_canaries
        self._canaries = Canaries(count, size)
        self._controls = Canaries(count, size)  # They never take part.
        self._rng = np.random.default_rng()
        self._positions: dict[Any, np.ndarray] = {}
        self._start = self._last = self._weights()
        self._added = np.zeros(size)
        self._times = np.zeros(count)
        self._best = np.full([2, count], -np.inf)
        self._before: tuple[np.ndarray, np.ndarray] | None = None
        self._pending: tuple[np.ndarray, np.ndarray] | None = None

    def join(
        self, pending: engine.PendingRound, charge: charge_lib.RoundCharge
    ) -> None:
        """Adds the canaries' updates to a round's sum.

        Args:
          pending: The round, collected but not released.
          charge: The round's cost, which includes how the cohort was drawn.
        """
        query, spec = self._engine.query, self._engine.update_spec
        params = query.derive_sample_params(pending.state)
        norm = tf.cast(query.l2_norm_bound(pending.state), tf.float32)
        scale = query.mechanism.contribution_of_norm(
            norm, tf.constant(True), params
        ).update
        drawn = self._draw(charge)
        length = float(scale * norm)
        direction = self._canaries.sum_of(drawn) * length
        times = np.zeros(self.num_canaries)
        times[drawn] = length
        self._pending = direction, times
        # All other numbers are zero, as canaries' bits would move an adaptive clip.
        update = spec.unflatten(tf.constant(direction, tf.float32))
        pending.add_contribution(
            query.initial_sample_state(spec.variables)._replace(
                update=bounded_sums.to_grid(update, query.fine_grid_step(params))
            )
        )

    def observe_release(self) -> None:
        """Looks at the model after a round was released."""
        if self._pending is None:
            return
        direction, times = self._pending
        self._pending = None
        self._added += direction
        self._times += times
        self._rounds += 1
        if self.iterates == ALL:
            weights = self._weights()
            observation = np.stack([weights - self._last, direction]), times
            self._last = weights
            self._score(*observation)
            if self._before is not None:
                # If two rounds have the same noise, it cancels in the difference.
                update, participations = (
                    new - old
                    for new, old in zip(observation, self._before, strict=True)
                )
                self._score(update, participations)
            self._before = observation

    def _score(self, update: np.ndarray, participations: np.ndarray) -> None:
        """Stores each canary's best score so far."""
        change, added = update
        zeros = np.zeros(self.num_canaries)
        for row, canaries, times in (
            (self._best[0], self._canaries, participations),
            (self._best[1], self._controls, zeros),
        ):
            # A canary in the earlier of two rounds counts with the opposite sign.
            values = scores(canaries, change, added, times) * np.where(
                participations < 0, -1, 1
            )
            np.maximum(row, values, out=row)

    def end(self) -> None:
        """Looks at the model after the last round."""
        if not self._rounds:
            return
        observed, unobserved = self._best
        if self.iterates == FINAL:
            change = self._weights() - self._start
            observed = scores(self._canaries, change, self._added, self._times)
        self._scores = Scores(
            observed=observed,
            unobserved=unobserved if self.iterates == ALL else None,
            null_std=self._canaries.size**-0.5,
        )

    # The results.

    @property
    def scores(self) -> Scores:
        """The scores of the canaries after the run.

        Raises:
          ValueError: No round was released with this audit yet.
        """
        if self._scores is None:
            raise ValueError(
                "audit must have been given to a fit that released a round."
            )
        return self._scores

    def estimate(self, delta: float) -> Estimate:
        """Returns the estimate of epsilon from the canaries' scores.

        Args:
          delta: Strictly between 0 and 1.

        Raises:
          ValueError: No round was released with this audit yet.
        """
        return estimate(self.scores, delta)

    def sentence(self, delta: float) -> str:
        """Returns the privacy statement's sentences about the audit."""
        if self._scores is None:
            return "An audit with canary clients was begun, and not finished."
        result = self.estimate(delta)
        when = "after the last" if self.iterates == FINAL else "after each"
        return (
            f"An audit with {result.num_canaries} canary clients in "
            f"{self._rounds} of the rounds, by one who sees the model before "
            f"the first of them and {when}, estimates epsilon as "
            f"{format_up(result.epsilon, 3)} (95 % interval {result.low:.3g} to "
            f"{format_up(result.high, 3)}) at delta = {format_up(delta)} "
            "(Andrew et al. 2023): what one attack found, and no bound."
        )

    # Details.

    def _weights(self) -> np.ndarray:
        """Returns the weights that clients update, float64 [d]."""
        variables = [each.numpy() for each in self._engine.server.variables]
        return np.concatenate([each.astype(np.float64).ravel() for each in variables])

    def _draw(self, charge: charge_lib.RoundCharge) -> np.ndarray:
        """Draws the canaries of a round, in the same way as clients."""
        size, population = charge.clients_per_round, charge.num_clients
        if charge.pass_index is not None and charge.pass_offset is not None:
            # Like a client, each canary has a position in the pass's order, or one of
            # its rounds.
            is_allocated = charge.sampling == Sampling.RANDOM_ALLOCATION
            start = charge.pass_offset * (size if is_allocated else 1)
            key = (charge.partition, charge.pass_index)
            if key not in self._positions:
                self._positions = {
                    key: self._rng.uniform(0, population, self.num_canaries)
                }
            positions = self._positions[key] - start
            return np.flatnonzero((positions >= 0) & (positions < size))
        probability = size / population
        drawn = self._rng.random(self.num_canaries)
        if not charge.sampling.startswith("cyclic"):
            return np.flatnonzero(drawn < probability)
        # Each is in one of b groups, which take turns.
        groups = self._engine.query.mechanism.min_separation
        groups = groups or max(1, int(population // size))
        if "groups" not in self._positions:
            self._positions["groups"] = self._rng.integers(
                groups, size=self.num_canaries
            )
        turn = self._positions["groups"] == self._rounds % groups
        return np.flatnonzero(turn & (drawn < probability * groups))


class Canaries:
    """Directions drawn uniformly from the unit sphere in R^d.

    Directions are generated from a secret seed whenever they are needed, so memory does
    not depend on their number.

    Attributes:
      count: The number of directions.
      size: The number of coordinates, d.
    """

    def __init__(self, count: int, size: int, seed: int | None = None):
        """Draws the seed; no direction is made yet.

        Args:
          count: The number of directions.
          size: d, the number of elements in an update.
          seed: For tests; None: a seed from the operating system.
        """
        self.count = count
        self.size = size
        self._seed = secrets.randbits(128) if seed is None else seed

    def _directions(self, indices: Sequence[int]) -> np.ndarray:
        """Returns some of the directions, float32 [len(places), d]."""
        directions = np.empty([len(indices), self.size], np.float32)
        for row, index in enumerate(indices):
            rng = np.random.Generator(
                np.random.SFC64(np.random.SeedSequence([self._seed, index]))
            )
            rng.standard_normal(out=directions[row], dtype=np.float32)
            directions[row] /= np.linalg.norm(directions[row].astype(np.float64))
        return directions

    def _map_blocks(
        self, function: Callable[[np.ndarray], np.ndarray], indices: np.ndarray
    ) -> list[np.ndarray]:
        """Applies a function to some of the directions, one block after another."""
        step = max(1, _MAX_COORDINATES // max(1, self.size))
        parts = [
            indices[start : start + step] for start in range(0, len(indices), step)
        ]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(
                pool.map(lambda block: function(self._directions(block)), parts)
            )

    def sum_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the sum of some directions, float32 [d].

        Args:
          indices: Int [K], each from 0 to count - 1.
        """
        sums = self._map_blocks(lambda block: block.sum(axis=0), np.asarray(indices))
        return sum(sums, np.zeros(self.size, np.float32))

    def projections(self, update: np.ndarray) -> np.ndarray:
        """Returns each direction's inner product with an update.

        Args:
          update: Float [d].

        Returns:
          Float64 [count].
        """
        update = np.asarray(update, np.float32)
        parts = self._map_blocks(lambda block: block @ update, np.arange(self.count))
        return np.concatenate(parts).astype(np.float64)


def scores(
    canaries: Canaries,
    update: np.ndarray,
    added: np.ndarray,
    participations: np.ndarray,
) -> np.ndarray:
    """Returns how much of each canary is in an update, relative to everything else.

    An attacker on one client knows all others. So the contribution of all canaries is
    removed by least squares (the multiple of `added` that best explains the update),
    and the canary's own share is put back.

    Args:
      canaries: All canaries.
      update: Float [d], the change of the model.
      added: Float [d], the sum of the canaries' directions in it.
      participations: Int [count], how often each canary is in it.

    Returns:
      Float64 [count]. The score of a canary that is not in the update is N(0, 1/d), to
      a good approximation for d in the thousands, whatever the rest of the update.
      All scores are zero for an update of zero.
    """
    update = np.asarray(update, np.float64)
    added = np.asarray(added, np.float64)
    added_squared = float(added @ added)
    share = float(update @ added) / added_squared if added_squared > 0 else 0.0
    residual = update - share * added
    norm = float(np.linalg.norm(residual))
    if not norm > 0:
        return np.zeros(canaries.count)
    return canaries.projections(residual / norm) + share * participations / norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """The canaries' scores.

    Attributes:
      observed: Float64 [k], scores of canaries that took part.
      unobserved: Float64 [k'], scores of canaries that did not; None if their
        distribution is known to be N(0, null_std^2).
      null_std: The standard deviation of a single score of a canary that did not take
        part, 1/sqrt(d). With `unobserved`, whose scores may each be the best of
        several, it only determines d.
    """

    observed: np.ndarray
    unobserved: np.ndarray | None = None
    null_std: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of epsilon, not a bound.

    Attributes:
      epsilon: The estimate at `delta`.
      low: The lower end of a 95 % interval (see `estimate`).
      high: The upper end.
      delta: The delta of that epsilon.
      num_canaries: The number of canaries that took part.
    """

    epsilon: float
    low: float
    high: float
    delta: float
    num_canaries: int


def estimate(scores: Scores, delta: float) -> Estimate:
    """Returns epsilon between the distributions of scores with and without a client.

    It is the larger of two estimates. The first assumes that both distributions are
    Gaussian (Andrew et al. 2023, "One-shot Empirical Privacy Estimation for Federated
    Learning", Section 4) with the same standard deviation, the larger of the two. (If
    clients are sampled, the scores with a client are a wider mixture. A fit with two
    standard deviations would assume tails that do not exist, and overestimate epsilon.)
    The second holds for any distributions: epsilon is at least
    log((TPR - delta) / FPR) for a threshold's true and false positive rates, taken at
    the ends of their joint 95 % interval (Clopper and Pearson 1934).

    The interval is that of the mean score, which has three independent errors:

    - From the number K of canaries: (standard deviation) / sqrt(K).
    - From the unit of the scores, the norm of everything except canaries. It is the
      same for all canaries of one look, so more canaries do not help. If the noise is
      equal in all d coordinates, it is sigma chi_(d-1), whose quantiles are used: with
      few weights, they are far from symmetric. (The best of several looks, each with
      its own norm, has at most this error.)
    - From unobserved canaries, if measured: the errors of their mean and of their
      standard deviation, by which scores are divided.

    Args:
      scores: At least two observed scores and, if any, at least two unobserved ones.
      delta: Strictly between 0 and 1.
    """
    delta = _validate.inside_unit_interval(delta=delta)
    observed, unobserved = scores.observed, scores.unobserved
    null_mean, null_std = 0.0, scores.null_std
    if unobserved is not None:
        null_mean, null_std = float(unobserved.mean()), float(unobserved.std(ddof=1))
        unobserved = (unobserved - null_mean) / null_std
    # From here on, in units of the standard deviation without participation.
    # `scores` takes one direction out of the update before the norm.
    degrees_of_freedom = max(scores.null_std**-2 - 1, 1.0)
    ends = np.sqrt(stats.chi2.ppf([0.025, 0.975], degrees_of_freedom))
    smallest, largest = ends * scores.null_std
    in_units = abs(float(observed.mean())) / null_std
    below, above = in_units * (1 - smallest), in_units * (largest - 1)
    observed = (observed - null_mean) / null_std
    mean, spread = float(observed.mean()), float(observed.std(ddof=1))
    count = len(observed)
    null_error = null_spread_error = 0.0
    if unobserved is not None:
        # The influence of each of them on (mean - null_mean) / null_std.
        influence = unobserved + mean * (unobserved**2 - 1) / 2
        null_error = float(influence.std()) / math.sqrt(len(unobserved))
        null_spread_error = 1 / math.sqrt(len(unobserved))
    spread_error = math.hypot(spread / math.sqrt(2 * count), null_spread_error)
    used_spread = spread if spread > 1 + _SAME_SPREAD * spread_error else 1.0
    # Student's: the standard deviations are those of a few scores.
    fewest = min(count, count if unobserved is None else len(unobserved))
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, fewest - 1))
    error = quantile * math.hypot(spread / math.sqrt(count), null_error)
    bound = _threshold_bound(observed - below, unobserved, delta)

    def epsilon(shift: float) -> float:
        distance = abs(shift) / used_spread
        return gaussian_epsilon(1 / distance if distance else math.inf, delta)

    return Estimate(
        epsilon=max(bound, epsilon(mean)),
        low=max(bound, epsilon(max(0.0, abs(mean) - math.hypot(error, below)))),
        high=max(bound, epsilon(abs(mean) + math.hypot(error, above))),
        delta=delta,
        num_canaries=count,
    )


def _threshold_bound(
    observed: np.ndarray, unobserved: np.ndarray | None, delta: float
) -> float:
    """Returns the largest log((TPR - delta) / FPR) over a few thresholds."""
    best = 0.0
    share = (1 - _CONFIDENCE) / (2 * len(_FALSE_POSITIVES))
    for rate in _FALSE_POSITIVES:
        if unobserved is None:
            threshold, fpr = float(stats.norm.isf(rate)), rate
        else:
            threshold = float(np.quantile(unobserved, 1 - rate))
            hits = int((unobserved > threshold).sum())
            fpr = float(stats.beta.isf(share, hits + 1, len(unobserved) - hits))
        hits = int((observed > threshold).sum())
        if not hits:
            continue
        tpr = float(stats.beta.ppf(share, hits, len(observed) - hits + 1))
        if tpr > delta:
            best = max(best, math.log((tpr - delta) / fpr))
    return best
