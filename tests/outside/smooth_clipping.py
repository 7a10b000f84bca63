"""A mechanism of one's own, in one file (docs/architecture.md).

Instead of cutting an update off at the norm S, it squashes it smoothly,
Delta S / sqrt(S^2 + ||Delta||^2), and also releases how long updates were, as
the sum of min(||Delta|| / S, 1), by which S follows them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tfdp_fl import mechanisms, schedules


@mechanisms.register("smooth")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoothClipping(mechanisms.Mechanism):
    """Squashes updates smoothly; S follows their length."""

    side_bounds: ClassVar[Mapping[str, float]] = {"length": 1.0}
    own_caveats: ClassVar[Mapping[str, str]] = {
        "smooth": "Every update is shrunk, the small ones too."
    }

    noise_multiplier: schedules.Schedule = mechanisms.noise_multiplier_parameter()
    start_norm: float = mechanisms.parameter(
        mechanisms.positive, "S of the first round.", default=0.5
    )

    def first_clip_norm(self):
        return self.start_norm

    def scale(self, norm, round):
        squared = norm**2 + round.clip_norm**2
        return round.clip_norm * tf.math.rsqrt(squared)

    def side_statistics(self, norm, round):
        return {"length": tf.minimum(norm / round.clip_norm, 1.0)}

    def noise_stddevs(self, round, context) -> dict[str, Any]:
        # Two Gaussian releases of sqrt(2) z each cost z together.
        each = 2**0.5 * round.noise_multiplier
        return {"update": each * round.clip_norm, "length": each}

    def next_clip_norm(self, sums, round):
        fraction = sums["length"] / round.clients_per_round
        return round.clip_norm * 1.2 ** (fraction - 0.5)

    def describe(self):
        return "Updates are squashed smoothly to an L2 norm below S."

    def caveats(self):
        return ("smooth",)
