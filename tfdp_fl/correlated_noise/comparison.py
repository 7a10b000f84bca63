"""Which noise is best for a run, before it is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdp_fl import _validate
from tfdp_fl.accounting import gaussian
from tfdp_fl.correlated_noise import strategies
from tfdp_fl.correlated_noise.participation import Participation
from tfdp_fl.correlated_noise.workload import Workload

# What the counts of an adaptive clip cost unless told otherwise, as a part of
# what the updates cost (both as mu^2): z is then 2.5 % more than without.
SHARE_OF_COUNTS = 1 / 20

STRATEGIES: Mapping[str, strategies.Strategy] = {
    "independent": strategies.BandedToeplitz(1),
    "tree": strategies.Tree(),
    "2 buffers": strategies.BLT(2),
    "3 buffers": strategies.BLT(3),
    "8 bands": strategies.BandedToeplitz(8),
    "b bands": strategies.BandedToeplitz(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one strategy comes to in a run, unamplified.

    Attributes:
      name: The strategy's.
      copies: How many copies of the model its buffers hold.
      sensitivity: How far one client moves C x, in clips.
      max_error: Noise stddev of the noisiest model, for fresh noise of 1.
      rms_error: Root of the mean variance over the models, likewise.
      noise_multiplier: z that keeps the target.
      worst_stddev: Noise stddev of the noisiest model in every coordinate, in
        units of the clip, with server learning rate 1: z times its error over
        m.
    """

    name: str
    copies: int
    sensitivity: float
    max_error: float
    rms_error: float
    noise_multiplier: float
    worst_stddev: float


def compare(
    participation: Participation,
    clients_per_round: float,
    target_epsilon: float,
    target_delta: float,
    *,
    workload: Workload | None = None,
    adaptive_clip: bool = False,
    candidates: Mapping[str, strategies.Strategy] = STRATEGIES,
) -> list[Comparison]:
    """Returns what strategies come to at the same guarantee, the best first.

    The best has the least noise in the noisiest model: error times
    sensitivity is what decides, because all noise multipliers are the same
    multiple of the sensitivity.

    Args:
      participation: T, k and b of the run.
      clients_per_round: m.
      target_epsilon: Of the whole run, without amplification.
      target_delta: At this delta.
      workload: What is made of the sums; None for prefix sums.
      adaptive_clip: Whether the counts that move a clip are paid for as well.
      candidates: Strategies by name.

    Raises:
      TypeError, ValueError: An argument is not allowed; the message names it.
    """
    _validate.instance_of(Participation, participation=participation)
    clients_per_round = _validate.positive(clients_per_round=clients_per_round)
    if workload is not None:
        _validate.instance_of(Workload, workload=workload)
    _validate.instance_of(Mapping, candidates=candidates)
    for strategy in candidates.values():
        _validate.instance_of(strategies.Strategy, candidates=strategy)
    made = workload or Workload()
    one = gaussian.analytic_noise_multiplier(target_epsilon, target_delta)
    if adaptive_clip:
        one *= (1 + SHARE_OF_COUNTS) ** 0.5
    found = []
    for name, strategy in candidates.items():
        generator = strategy.generator(participation, made)
        noise = one * generator.sensitivity
        worst = generator.max_error(made)
        found.append(
            Comparison(
                name=name,
                copies=generator.copies,
                sensitivity=generator.sensitivity,
                max_error=worst,
                rms_error=generator.rms_error(made),
                noise_multiplier=noise,
                worst_stddev=noise * worst / clients_per_round,
            )
        )
    return sorted(found, key=lambda each: each.max_error * each.sensitivity)
