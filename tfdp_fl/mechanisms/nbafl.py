"""NbAFL: noise before model aggregation, on both channels (Wei et al. 2020)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from tfdp_fl import _validate
from tfdp_fl._lazy_tf import tf
from tfdp_fl.accounting.rounding import format_up
from tfdp_fl.mechanisms import (
    clipping,
    cohort_query,
    declaration,
    mechanism,
    noise,
)
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    Contribution,
    PrivacyContext,
    RoundState,
    Tensors,
)
from tfdp_fl.terms import Json, NoiseSite, PrivacyUnit, TrustModel


def _require_known(name: str, context: PrivacyContext) -> int:
    """Returns a number from the context; raises an error if it is unknown."""
    value = getattr(context, name)
    if not value:
        raise ValueError(
            f"{name} must be known to NbAFL, got {value!r}: the noise depends on it."
        )
    return value


def _num_examples(num_examples: tf.Tensor | None) -> tf.Tensor:
    """Returns n, float32 scalar; 0 if it is not a valid number of examples.

    Both the client's weight and its noise depend on it.
    """
    if num_examples is None:
        raise ValueError("num_examples must be given to NbAFL.")
    n = tf.cast(num_examples, tf.float32)
    # Larger numbers could overflow the sum and make the mean NaN.
    return tf.where((n > 0) & (n < 2.0**53), n, 0.0)


@declaration.register("nbafl")
@dataclasses.dataclass(frozen=True, kw_only=True)
class NbAFL(mechanism.Mechanism):
    """Noising before model aggregation federated learning (NbAFL).

    Wei et al. (2020), "Federated Learning with Differential Privacy:
    Algorithms and Performance Analysis", Algorithm 1, as in FederatedScope:

    * local training minimises loss + (mu/2) ||w - w_received||^2;
    * the client's **weights** are clipped, w / max(1, ||w|| / C), and noised
      with sigma_U = 2 C T c / (n epsilon) before upload;
    * the server averages (weighted by n), clips every element to [-C, C], and
      adds sigma_D before broadcast if T > sqrt(N) L.

    The guarantee is per **record** (one example of one client), not per client. It
    relies on the paper's assumption that one record moves a client's clipped weights
    by at most 2C/n. This holds for a mean over records, but not in general for SGD;
    the statement says so.

    Attributes:
      epsilon: The budget of a record over all T rounds.
      constant: c > 0; the implied delta is 1.25 exp(-c^2 / 2).
      weight_clip: C > 0, an L2 norm over all the weights of a client.
      mu: Weight of the proximal term, >= 0.
    """

    trust_model: ClassVar[str] = TrustModel.LOCAL
    privacy_unit: ClassVar[str] = PrivacyUnit.RECORD
    noise_site = NoiseSite.EVERY_CLIENT
    own_caveats: ClassVar[Mapping[str, str]] = {
        "record_sensitivity_assumed": (
            "The guarantee rests on the published assumption that one record "
            "moves a client's clipped weights by at most 2C/n, for a weight "
            "clip C and a client of n records; that holds for a mean over "
            "records, and is neither proven nor enforced for weights that were "
            "trained by SGD."
        )
    }
    releases_weights: ClassVar[bool] = True

    epsilon: float = declaration.parameter(
        noise.require_float32_range(_validate.positive),
        "the budget of a record over all rounds.",
    )
    constant: float = declaration.parameter(
        noise.require_float32_range(_validate.positive),
        "c, from which delta = 1.25 exp(-c^2/2) follows.",
        start=3.0,
    )
    weight_clip: float = declaration.parameter(
        declaration.clip, "C, the bound of a client's weights.", start=5.0
    )
    mu: float = declaration.parameter(
        _validate.non_negative, "weight of the proximal term.", default=0.0
    )

    @property
    def proximal_weight(self) -> float:
        """Mu, the weight of the proximal term."""
        return self.mu

    @property
    def implied_delta(self) -> float:
        """The delta at which `epsilon` is claimed: 1.25 exp(-c^2/2)."""
        return min(1.0, 1.25 * math.exp(-(self.constant**2) / 2))

    def downlink_stddev(self, context: PrivacyContext) -> float:
        """Returns sigma_D (Wei et al. 2020, Theorem 1).

        2 c C sqrt(T^2 - L^2 N) / (min_n N epsilon) if T > sqrt(N) L, and 0
        otherwise: then the noise of the uplink already covers the downlink.

        L is the number of clients in a round, as in FederatedScope; in the paper, it is
        how often a client's parameters are exposed. Every upload is charged by sigma_U,
        which uses T instead of L, so epsilon does not depend on L.
        """
        rounds = _require_known("rounds", context)
        num_clients = _require_known("num_clients", context)
        excess = rounds**2 - context.cohort_size(0) ** 2 * num_clients
        if excess <= 0:
            return 0.0
        examples = _require_known("min_examples", context)
        numerator = 2.0 * self.constant * self.weight_clip * math.sqrt(excess)
        return numerator / (examples * num_clients * self.epsilon)

    def bind(self, context: PrivacyContext) -> cohort_query.CohortQuery:
        """Implements `Mechanism.bind`."""
        self.downlink_stddev(context)
        return super().bind(context)

    def first_clip_norm(self) -> float:
        """Implements `Mechanism.first_clip_norm`: C."""
        return self.weight_clip

    def noise_stddevs(self, round: RoundState, context: PrivacyContext) -> Json:
        """Implements `Mechanism.noise_stddevs`: before broadcast."""
        return {"update": self.downlink_stddev(context)}

    def contribution(
        self,
        update: Tensors,
        round: RoundState,
        client: ClientContext,
        context: PrivacyContext,
    ) -> Contribution:
        """Implements `Mechanism.contribution`: n w / max(1, ||w|| / C)."""
        clipped = super().contribution(update, round, ClientContext(), context)
        n = _num_examples(client.num_examples)
        return clipped._replace(update=clipping.multiply(clipped.update, n))

    def local_weight(self, num_examples: tf.Tensor | None) -> tf.Tensor:
        """Implements `Mechanism.local_weight`: n, even if the update is discarded.

        Otherwise, one record with a NaN would remove the client from the mean.
        """
        return _num_examples(num_examples)

    def client_noise(
        self, round: RoundState, client: ClientContext, context: PrivacyContext
    ) -> tf.Tensor:
        """Implements `Mechanism.client_noise`: n sigma_U, on n times weights.

        sigma_U = 2 C T c / (n epsilon) (Wei et al. 2020, eq. 10), so n sigma_U is the
        same for all clients with examples.
        """
        rounds = _require_known("rounds", context)
        # (The round's own C: a TFF state may come from a process with another C.)
        stddev = 2.0 * rounds * self.constant / self.epsilon * round.clip_norm
        return tf.where(_num_examples(client.num_examples) > 0, stddev, 0.0)

    def mean(
        self,
        update: Tensors,
        weight: tf.Tensor,
        round: RoundState,
        context: PrivacyContext,
    ) -> Tensors:
        """Implements `Mechanism.mean`: p / max(1, |p| / C), N(0, sigma_D^2).

        The mean over the clients' examples, clipped element by element.
        """
        bound = self.weight_clip
        weights = [
            tf.clip_by_value(tensor, -bound, bound)
            for tensor in clipping.mean_of_answers(update, weight)
        ]
        stddev = self.downlink_stddev(context)
        return noise.add_normal(weights, stddev) if stddev > 0 else weights

    def mu_squared(self, context: PrivacyContext) -> float:
        """Returns (sensitivity / sigma_U)^2 of one upload, for any n.

        With the paper's sensitivity of 2C/n, it is (epsilon / (T c))^2.
        """
        rounds = _require_known("rounds", context)
        return (self.epsilon / (rounds * self.constant)) ** 2

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        return ("per_record", "record_sensitivity_assumed")

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "NbAFL: every client clips its weights to an L2 norm of "
            f"{self.weight_clip:g} and adds Gaussian noise scaled to its own "
            "number of examples before upload; the server clips the mean "
            "elementwise and adds noise before broadcast where the paper "
            f"requires it. As published, epsilon={format_up(self.epsilon)} at the "
            f"implied delta={format_up(self.implied_delta)}."
        )
