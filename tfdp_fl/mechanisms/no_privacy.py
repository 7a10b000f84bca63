"""Plain federated averaging, for the baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from tfdp_fl._on_use import tf
from tfdp_fl.mechanisms import clipping, mechanism, registry
from tfdp_fl.mechanisms.contribution import Deployment, Round, Tensors


@registry.register("none")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPrivacy(mechanism.Mechanism):
    """Federated averaging without clipping or noise (McMahan et al. 2017).

    The mean is that of those who answered; every client that took part has the
    same weight, whatever its number of examples. There is no guarantee, and
    the statement says so.
    """

    guarantee: ClassVar[str] = "none"
    suggested_run: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def for_target(cls, target: mechanism.Target, **options: Any) -> NoPrivacy:
        """Implements `Mechanism.for_target`: no target is kept."""
        return cls(**options)

    def largest_norm(self, round: Round) -> float:
        """Implements `Mechanism.largest_norm`: there is no bound."""
        return float("inf")

    def scale(self, norm: tf.Tensor, round: Round) -> tf.Tensor:
        """Implements `Mechanism.scale`: nothing is clipped."""
        return tf.ones_like(norm)

    def add_noise(
        self, update: Tensors, stddev: tf.Tensor, memory: Any
    ) -> tuple[Tensors, Any]:
        """Implements `Mechanism.add_noise`: nothing is added."""
        return update, memory

    def mean(
        self, update: Tensors, weight: tf.Tensor, round: Round, deployment: Deployment
    ) -> Tensors:
        """Implements `Mechanism.mean`: over those who answered, 0 for none."""
        return clipping.mean_of_answers(update, weight)

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return "Plain federated averaging: nothing is clipped or noised."
