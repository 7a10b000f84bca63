"""NbAFL as a TFF aggregation factory."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow_federated as tff

from tfdp_fl import schedules
from tfdp_fl.aggregators import bound_mechanism, mechanism_factory
from tfdp_fl.mechanisms import contribution, nbafl


class NbAFLFactory(
    mechanism_factory.BoundFactory, tff.aggregators.WeightedAggregationFactory
):
    """Aggregates weights with per-client noise (see `NbAFL`).

    A client's value is its **weights** after training, not a change of them;
    its weight n, the number of its examples. The result is the new weights.
    A client with n = 0 counts for nothing, and a round in which no client has
    anything usable fails.

    Measurements, state and `inner_factory` are those of `MechanismFactory`;
    `noise_stddev` is that of the noise before broadcast.
    """

    def __init__(
        self,
        mechanism: nbafl.NbAFL | None = None,
        *,
        clients_per_round: schedules.Schedule,
        num_clients: int,
        rounds: int,
        min_examples: int | None = None,
        epsilon: float | None = None,
        constant: float | None = None,
        weight_clip: float | None = None,
        downlink_noise: bool = True,
        inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        scalars_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
        sampling: str | None = None,
        max_participations: int | None = None,
    ):
        """Checks the arguments.

        Args:
          mechanism: The mechanism, instead of the next three arguments
            (`mu` plays no part in the aggregation).
          clients_per_round: L, the expected cohort size.
          num_clients: The population N.
          rounds: The number of rounds T that are planned.
          min_examples: The smallest n of any client, needed if T > sqrt(N) L.
          epsilon: See `NbAFL`.
          constant: See `NbAFL`.
          weight_clip: See `NbAFL`.
          downlink_noise: Whether the noise before broadcast is added here, to
            the result. `tfdp_fl.learning` adds it in the distribution.
          inner_factory: See `MechanismFactory`.
          scalars_factory: See `MechanismFactory`.
          sampling: "poisson", "fixed_size", "shuffled" or None.
          max_participations: The most rounds that any one client takes part
            in, or None if unknown.
        """
        if mechanism is None:
            given: dict[str, Any] = {
                "epsilon": epsilon,
                "constant": constant,
                "weight_clip": weight_clip,
            }
            mechanism = nbafl.NbAFL(**given)
        super().__init__(
            bound_mechanism.BoundMechanism(
                mechanism,
                clients_per_round,
                num_clients=num_clients,
                rounds=rounds,
                min_examples=min_examples,
                sampling=sampling,
                max_participations=max_participations,
            ),
            inner_factory=inner_factory,
            scalars_factory=scalars_factory,
        )
        self._downlink_noise = downlink_noise

    @property
    def downlink_noise_stddev(self) -> float:
        """Sigma_D, the stddev of the noise before broadcast."""
        return self.mechanism.downlink_stddev(self.deployment)

    def create(
        self, value_type: tff.types.Type, weight_type: tff.types.Type
    ) -> tff.templates.AggregationProcess:
        """Implements `WeightedAggregationFactory.create`.

        Args:
          value_type: A structure of float tensors, the weights.
          weight_type: A scalar, the number of examples.
        """
        return self._bound.create(
            value_type,
            weight_type,
            wrap=lambda query: (
                query
                if self._downlink_noise
                else _WithoutDownlinkNoise(**query.mechanism.parameters()).bind(
                    query.deployment
                )
            ),
            **self._factories,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WithoutDownlinkNoise(nbafl.NbAFL):
    """NbAFL whose noise before broadcast somebody else adds."""

    def downlink_stddev(self, deployment: contribution.Deployment) -> float:
        return 0.0
