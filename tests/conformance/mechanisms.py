"""The mechanisms that the conformance suite runs, with what the papers say of each.

A new mechanism is one more `Case` in `CASES`.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

import tfdp_fl
from tests.mechanisms import references

S, Z, M = 0.5, 1.5, 4
_BITS = 1.0  # Stddev of the noise on the count of adaptive clipping.


@dataclasses.dataclass(frozen=True)
class Case:
    """A mechanism.

    Attributes:
      make: Returns it, for a noise multiplier.
      stddev: Of its noise on the mean of M answers, at Z.
      mean: Of updates (float64 [K, D]), without noise.
      bound: The most that one client moves the mean of M.
      by_answers: Whether the mean is over the clients that answered.
      sampled: Whether epsilon is that of cohorts of a fixed size.
      correlation: c_1: the second round's noise and so much of the first one's are
        fresh noise.
      not_in: Why some runtimes do not run it.
    """

    make: Callable[[float], tfdp_fl.Mechanism]
    stddev: float = Z * S / M
    mean: Callable[[np.ndarray], np.ndarray] = lambda updates: _clipped_mean(updates, S)
    bound: float = S / M
    by_answers: bool = False
    sampled: bool = True
    correlation: float = 0.0
    not_in: dict[str, str] = dataclasses.field(default_factory=dict)


def _clipped_mean(updates: np.ndarray, bound: float) -> np.ndarray:
    (mean,) = references.fixed_clipping_mean([[each] for each in updates], bound, M)
    return mean


def _median_mean(updates: np.ndarray) -> np.ndarray:
    (mean,), _ = references.median_clipping_mean([[each] for each in updates], M)
    return mean


def _adaptive(z: float, noise_site: str) -> tfdp_fl.Mechanism:
    return tfdp_fl.AdaptiveClipping(
        noise_multiplier=z,
        initial_clip_norm=S,
        count_noise_stddev=_BITS,
        clip_learning_rate=1e-9,  # So that every round is of one clip.
        noise_site=noise_site,
    )


def _plain_mean(updates: np.ndarray) -> np.ndarray:
    return updates.mean(axis=0)


def _only_in(*these: str, why: str) -> dict[str, str]:
    return dict.fromkeys({*_OTHERS} - {*these}, why)


_OTHERS = ("threads", "side by side", "XLA", "batched", "Ray", "TFF", "Flower")
_ADDS_NOISE = "only updates that are scaled, and no more, need no model of their own"
_WHOLE_COHORT = "its clip needs every client's norm"
_CLIENTS_ONLY = "Flower runs local mechanisms on the client's side only"

CASES = {
    "NoPrivacy": Case(
        lambda z: tfdp_fl.NoPrivacy(),
        stddev=0.0,
        mean=_plain_mean,
        bound=math.inf,
        by_answers=True,
        sampled=False,
        not_in={"Flower": "PrivateStrategy refuses it: it hides nobody"},
    ),
    "FixedClipping": Case(
        lambda z: tfdp_fl.FixedClipping(clip_norm=S, noise_multiplier=z)
    ),
    "FixedClipping, noise at clients": Case(
        lambda z: tfdp_fl.FixedClipping(
            clip_norm=S, noise_multiplier=z, noise_site="client"
        ),
        not_in={"side by side": _ADDS_NOISE},
    ),
    "AdaptiveClipping": Case(
        lambda z: _adaptive(z, "server"),
        stddev=references.update_noise_multiplier(Z, _BITS) * S / M,
    ),
    "AdaptiveClipping, noise at clients": Case(
        lambda z: _adaptive(z, "client"),
        stddev=references.update_noise_multiplier(Z, _BITS) * S / M,
        not_in=_only_in("query", "Flower", "TFF", why=_ADDS_NOISE),
    ),
    "MedianClipping": Case(
        lambda z: tfdp_fl.MedianClipping(noise_multiplier=z),
        mean=_median_mean,
        bound=math.inf,  # One client moves the clip of all others.
        not_in={"side by side": _WHOLE_COHORT},
    ),
    "MedianClipping, noise at clients": Case(
        lambda z: tfdp_fl.MedianClipping(noise_multiplier=z, noise_site="client"),
        mean=_median_mean,
        bound=math.inf,
        not_in={
            "side by side": _WHOLE_COHORT,
            "Flower": "its clients add noise before the clip of the round is known",
        },
    ),
    "PerLayerClipping": Case(
        lambda z: tfdp_fl.PerLayerClipping(clip_norm=S, noise_multiplier=z),
        not_in={"side by side": _ADDS_NOISE, "Flower": "its clip is no one factor"},
    ),
    "LocalDP": Case(
        lambda z: tfdp_fl.LocalDP(clip_norm=S, noise_multiplier=max(z, 1e-7)),
        stddev=Z * S / math.sqrt(M),
        by_answers=True,
        sampled=False,
        not_in={"side by side": _ADDS_NOISE, "Flower": _CLIENTS_ONLY},
    ),
    "AdaptiveLocalDP": Case(
        lambda z: tfdp_fl.AdaptiveLocalDP(
            epsilon=8.0 if z else 1e14,
            delta=1e-5 if z else 0.5,
            clipping_radius=S,
        ),
        # Sixteen releases within epsilon = 8.
        stddev=2 * S * references.analytic_sigma(1.0, 8.0, 1e-5) * 4 / math.sqrt(M),
        by_answers=True,
        sampled=False,
        not_in=_only_in("query", why="its noise goes by the rounds of the whole run"),
    ),
    "NbAFL": Case(
        lambda z: tfdp_fl.NbAFL(
            epsilon=100.0 if z else 1e14, constant=1.3, weight_clip=S
        ),
        stddev=references.nbafl_uplink_sigma(S, 1.3, 16, 5, 100.0) / math.sqrt(M),
        by_answers=True,
        sampled=False,
        not_in=_only_in("query", why="it releases weights, not updates"),
    ),
    "CorrelatedNoise": Case(
        lambda z: tfdp_fl.CorrelatedNoise(
            clip_norm=S,
            noise_multiplier=z,
            strategy=tfdp_fl.BLT(theta=(0.6, 0.1), theta_hat=(0.2, 0.05)),
            rounds=16,
            min_separation=1,
        ),
        sampled=False,
        correlation=0.6 + 0.1 - 0.2 - 0.05,
    ),
}
