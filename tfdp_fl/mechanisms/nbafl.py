"""NbAFL: noise before model aggregation, on both channels (Wei et al. 2020)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import dp_accounting
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.mechanisms import clipping, mechanism, noise


def uplink_noise_stddev(
    weight_clip: float, constant: float, epsilon: float, rounds: int, examples
):
    """Returns sigma_U = 2 C T c / (n epsilon) (Wei et al. 2020, eq. 10).

    Args:
      weight_clip: C.
      constant: c.
      epsilon: The budget of the whole training.
      rounds: T.
      examples: n, the client's number of examples (number or tensor).
    """
    return 2.0 * weight_clip * rounds * constant / (examples * epsilon)


def downlink_noise_stddev(
    weight_clip: float,
    constant: float,
    epsilon: float,
    rounds: int,
    num_clients: int,
    clients_per_round: float,
    min_examples: int,
) -> float:
    """Returns sigma_D (Wei et al. 2020, Theorem 1 with L of N clients).

    sigma_D = 2 c C sqrt(T^2 - L^2 N) / (min_n N epsilon) if T > sqrt(N) L, and
    0 otherwise: then the noise of the uplink already covers the downlink.
    """
    if rounds <= math.sqrt(num_clients) * clients_per_round:
        return 0.0
    return (
        2.0
        * constant
        * weight_clip
        * math.sqrt(rounds**2 - clients_per_round**2 * num_clients)
        / (min_examples * num_clients * epsilon)
    )


class NbAFLQuery(mechanism.CohortQuery):
    """Clips and noises weights at the clients; clips and noises the mean."""

    releases = "weights"
    client_noise = "own"

    def __init__(
        self, weight_clip: float, uplink_factor: float, downlink_stddev: float
    ):
        self._weight_clip = weight_clip
        self._uplink_factor = uplink_factor
        self._downlink_stddev = downlink_stddev

    def initial_global_state(self) -> mechanism.QueryState:
        """Implements `DPQuery.initial_global_state`."""
        state = super().initial_global_state()
        return state._replace(clip_norm=tf.constant(self._weight_clip))

    def noise_stddev(self, state: mechanism.QueryState) -> tf.Tensor:
        """Returns the stddev of the noise before broadcast."""
        del state
        return tf.constant(self._downlink_stddev, tf.float32)

    def derive_sample_params(
        self, state: mechanism.QueryState
    ) -> mechanism.SampleParams:
        """Returns the clip, and sigma_U times the client's n."""
        return mechanism.SampleParams(
            clip_norm=state.clip_norm,
            noise_stddev=tf.constant(self._uplink_factor, tf.float32),
            count_noise_stddev=tf.zeros([]),
        )

    def preprocess_record(
        self,
        params: mechanism.SampleParams,
        record: list[tf.Tensor],
        num_examples: tf.Tensor | None = None,
    ) -> mechanism.Record:
        """Clips the weights w / max(1, ||w|| / C), then adds N(0, sigma_U^2).

        A client without examples has nothing to say and weighs nothing.

        Args:
          params: From `derive_sample_params`.
          record: The client's weights (not its update).
          num_examples: Scalar, n.
        """
        if num_examples is None:
            raise ValueError("num_examples must be given to NbAFL.")
        clipped = clipping.clip_by_norm(record, params.clip_norm)
        examples = tf.cast(num_examples, tf.float32)
        weight = examples * (1.0 - clipped.discarded)
        stddev = tf.math.divide_no_nan(params.noise_stddev, examples)
        noised = noise.add_normal(clipped.update, stddev)
        return mechanism.Record(
            update=clipping.scaled(noised, weight),
            below_clip=tf.zeros([]),
            weight=weight,
            norm=clipped.norm,
            clipped=clipped.clipped,
            discarded=clipped.discarded,
        )

    def get_noised_result(
        self, sample_state: mechanism.Record, global_state: mechanism.QueryState
    ) -> tuple[
        list[tf.Tensor], mechanism.QueryState, dp_accounting.NonPrivateDpEvent
    ]:
        """Returns the new weights: mean, elementwise clip, downlink noise.

        p / max(1, |p| / C) for every element, then N(0, sigma_D^2).
        """
        mean = [
            tf.math.divide_no_nan(
                tensor, tf.cast(sample_state.weight, tensor.dtype)
            )
            for tensor in sample_state.update
        ]
        bound = self._weight_clip
        weights = [tf.clip_by_value(tensor, -bound, bound) for tensor in mean]
        if self._downlink_stddev > 0:
            weights = noise.add_normal(
                weights, tf.constant(self._downlink_stddev, tf.float32)
            )
        return weights, global_state, dp_accounting.NonPrivateDpEvent()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NbAFL(mechanism.Mechanism):
    """Noising before model aggregation in federated learning.

    Wei et al. (2020), "Federated Learning with Differential Privacy:
    Algorithms and Performance Analysis", Algorithm 1, as in FederatedScope:

    * local training minimises loss + (mu/2) ||w - w_received||^2;
    * the client's **weights** are clipped, w / max(1, ||w|| / C), and noised
      with sigma_U = 2 C T c / (n epsilon) before upload;
    * the server averages (weighted by n), clips every element to [-C, C], and
      adds sigma_D before broadcast if T > sqrt(N) L.

    The guarantee is per **record** (one example of one client), not per
    client. It rests on the paper's assumption that one record moves a client's
    clipped weights by at most 2C/n, which holds for a mean over records, and
    not in general for SGD; the statement says so.

    Attributes:
      epsilon: The budget of a record over all T rounds.
      constant: c > 0; the implied delta is 1.25 exp(-c^2 / 2).
      weight_clip: C > 0, an L2 norm over all the weights of a client.
      mu: Weight of the proximal term, >= 0.
    """

    epsilon: float
    constant: float
    weight_clip: float
    mu: float = 0.0

    guarantee: ClassVar[str] = "record"

    def __post_init__(self):
        for name in ("epsilon", "constant", "weight_clip"):
            value = _validate.positive(**{name: getattr(self, name)})
            object.__setattr__(self, name, value)
        object.__setattr__(self, "mu", _validate.non_negative(mu=self.mu))

    @property
    def implied_delta(self) -> float:
        """The delta at which `epsilon` is claimed: 1.25 exp(-c^2/2)."""
        return min(1.0, 1.25 * math.exp(-(self.constant**2) / 2))

    def _check_known(self, deployment: mechanism.Deployment) -> None:
        for name in ("rounds", "num_clients"):
            if getattr(deployment, name) is None:
                raise ValueError(
                    f"{name} must be known to NbAFL, got None: the noise "
                    "depends on it."
                )
        downlink = deployment.rounds > math.sqrt(
            deployment.num_clients
        ) * deployment.cohort_size(0)
        if downlink and not deployment.min_examples:
            raise ValueError(
                "min_examples (the smallest number of examples that a client "
                "holds) must be known to NbAFL, because the noise before "
                f"broadcast depends on it, got {deployment.min_examples!r}."
            )

    def bind(self, deployment: mechanism.Deployment) -> NbAFLQuery:
        """Implements `Mechanism.bind`."""
        self._check_known(deployment)
        downlink = 0.0
        if deployment.min_examples:
            downlink = downlink_noise_stddev(
                self.weight_clip,
                self.constant,
                self.epsilon,
                deployment.rounds,
                deployment.num_clients,
                deployment.cohort_size(0),
                deployment.min_examples,
            )
        uplink = uplink_noise_stddev(
            self.weight_clip,
            self.constant,
            self.epsilon,
            deployment.rounds,
            examples=1.0,
        )
        return NbAFLQuery(self.weight_clip, uplink, downlink)

    def mu_squared(self, deployment: mechanism.Deployment) -> float:
        """Returns (sensitivity / sigma_U)^2 of one upload, for any n.

        With the paper's sensitivity 2C/n it is (epsilon / (T c))^2.
        """
        return (self.epsilon / (deployment.rounds * self.constant)) ** 2

    def round_event(
        self, round_index: int, deployment: mechanism.Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: no client is protected."""
        del round_index, deployment
        return dp_accounting.NonPrivateDpEvent()

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
            f"requires it. As published, epsilon={self.epsilon:g} at the "
            f"implied delta={self.implied_delta:.3g}."
        )
