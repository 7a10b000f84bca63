"""The facts about a round and about a client; a client's weight and contribution."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from tfdp_fl import _validate, schedules
from tfdp_fl._lazy_tf import tf

# One tensor for each variable of the model.
Tensors: TypeAlias = "list[tf.Tensor]"
Scalar: TypeAlias = "float | tf.Tensor"
# A nest of tensors that only the server keeps from round to round.
NoiseStateLike: TypeAlias = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientWeighting:
    """Weights a client by its number of examples, with a weight of at most 1.

    McMahan et al. (2018), "Learning Differentially Private Recurrent Language Models",
    section 2: client k has the weight w_k = min(n_k / n_hat, 1), and the mean is the
    estimator with a fixed denominator,

        f = (sum_k w_k clip(Delta_k, S) + N(0, (z S)^2 I)) / (q W),

    here with q W = m * mean_weight, where m is the expected cohort size.

    The bound. The update is first clipped, so ||clip(Delta_k, S)|| <= S, and then
    multiplied by w_k. The weight w_k depends on client k's data alone, and is always in
    [0, 1] (see `weight`; NaN and Inf give 0), so

        ||w_k clip(Delta_k, S)|| = w_k ||clip(Delta_k, S)|| <= 1 * S.

    Adding client k, removing it, or counting it as zero therefore moves the sum by at
    most S, and replacing it by at most 2 S, just as without weights. The denominator
    m * mean_weight is set before anyone sees the data, so it does not change. Noise of
    stddev z S on the sum costs the same as for clients of weight 1. (In floating point,
    the factor min(1, S / norm) is rounded, then multiplied by w <= 1. Rounding is
    monotone, so the product is at most the factor.)

    Anything else that is released about a client (the bit of adaptive clipping, its
    norm for a median clip) has a bound of its own, and counts once for each client,
    whatever its weight.

    The mean is never divided by the sum of the cohort's weights, because that depends
    on who takes part. (`NoPrivacy`, which makes no promise, does divide by it.) If the
    weights add up to less than m * mean_weight, the mean is smaller by that factor.
    With the default mean_weight of 1, it is never larger than with the weights' own
    sum. A smaller mean_weight enlarges the server's step and the noise in it by the
    same factor; the cost does not change.

    Attributes:
      cap: n_hat > 0, in examples; a client with this many or more has weight 1.
      mean_weight: In (0, 1], the clients' expected average weight, W / N. It must be
        known without looking at the clients' data.
    """

    cap: float
    mean_weight: float = 1.0

    def __post_init__(self) -> None:
        cap = _validate.positive(cap=self.cap)
        mean_weight = _validate.positive(mean_weight=self.mean_weight)
        if mean_weight > 1:
            raise ValueError(
                "mean_weight must be above 0 and at most 1, because no client "
                f"counts more than 1, got {self.mean_weight!r}."
            )
        if not math.isfinite(1 / cap) or cap > 3e38:
            raise ValueError(f"cap must be representable in float32, got {self.cap!r}.")
        object.__setattr__(self, "cap", cap)
        object.__setattr__(self, "mean_weight", mean_weight)

    @classmethod
    def num_examples(cls, cap: float, mean_weight: float = 1.0) -> ClientWeighting:
        """Weights a client by its number of examples n: min(n / cap, 1).

        Args:
          cap: n_hat > 0, in examples.
          mean_weight: See the class.
        """
        return cls(cap=cap, mean_weight=mean_weight)

    def weight(self, num_examples: tf.Tensor) -> tf.Tensor:
        """Returns the clients' weights, float32 in [0, 1].

        Args:
          num_examples: Scalar, the clients' numbers of examples, or any other numbers
            that clients make up.
        """
        share = tf.cast(num_examples, tf.float32) / tf.constant(self.cap, tf.float32)
        share = tf.where(tf.math.is_finite(share), share, 0.0)
        return tf.clip_by_value(share, 0.0, 1.0)

    def describe(self) -> str:
        """Returns one sentence for the privacy statement."""
        return (
            "A client's clipped update counts by its number of examples n, as min(n / "
            f"{self.cap:g}, 1), so that none counts more than 1 and the clip "
            "bounds what one client adds to the sum as without weights."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyContext:
    """The context in which a mechanism is used.

    Attributes:
      clients_per_round: The expected cohort size m; constant or a schedule.
      num_clients: The population N, or None if unknown.
      sampling: One of `accounting.charge.SAMPLINGS`, or None if unknown.
      rounds: The planned number of rounds T, or None if unknown.
      max_participations: The most rounds in which a client may take part, or None if
        unknown.
      num_variables: The number of tensors in an update, or None if unknown.
      shapes: The tensors' shapes, or None if unknown.
      min_examples: The smallest number of examples of any client, or None if unknown.
      client_weighting: The clients' weights in the mean; None: 1 each.
      noise_generator: "exact" for a sum and noise on a grid (`grid`); other values make
        no difference here.
    """

    clients_per_round: schedules.Schedule
    num_clients: int | None = None
    sampling: str | None = None
    rounds: int | None = None
    max_participations: int | None = None
    num_variables: int | None = None
    shapes: tuple[tuple[int, ...], ...] | None = None
    min_examples: int | None = None
    client_weighting: ClientWeighting | None = None
    noise_generator: str = "philox"

    def cohort_size(self, round_index: int) -> float:
        """Returns the expected cohort size m_t of one round."""
        return float(
            schedules.value_at(self.clients_per_round, round_index, "clients_per_round")
        )

    def expected_weight(self, clients_per_round: Scalar) -> Scalar:
        """Returns m times the expected weight of a client; both are public."""
        weighting = self.client_weighting
        return clients_per_round * (1.0 if weighting is None else weighting.mean_weight)


class RoundState(NamedTuple):
    """The state of one round: Python floats, or float32 scalars.

    A query carries it from round to round. Without the noise state, it is sent to every
    client of a round, and passed to the mechanism's members.

    Attributes:
      clip_norm: The clip S of this round, or of the next one.
      noise_multiplier: This round's z.
      clients_per_round: This round's expected cohort size m.
      noise_state: State that only the server keeps from round to round, such as the
        noise with which later noise is correlated: a nest of tensors, () if there is
        none.
      shared_stddevs: If clients add shares of the noise, the stddevs of the whole
        noise of this round, by name; otherwise ().
    """

    clip_norm: Scalar
    noise_multiplier: Scalar
    clients_per_round: Scalar
    noise_state: NoiseStateLike = ()
    shared_stddevs: Mapping[str, Scalar] | tuple[()] = ()

    def without_noise_state(self) -> RoundState:
        """Returns the state without what must stay secret."""
        return self._replace(noise_state=())


class ClientContext(NamedTuple):
    """What a client knows about itself.

    Attributes:
      num_examples: Scalar, its number of examples n.
      window: Float32 [W, L], the norms of its last updates in each of the L variables,
        NaN where there are none; None without such a window.
      weight: Float32 scalar in [0, 1], its weight; None: 1.
    """

    num_examples: tf.Tensor | None = None
    window: tf.Tensor | None = None
    weight: tf.Tensor | None = None


class Contribution(NamedTuple):
    """What one client sends, and (summed) what the server receives.

    Attributes:
      update: List of float tensors: the clipped update, with noise if clients add it.
      sums: Float32 scalars by name, released along with the update (such as the bit of
        adaptive clipping).
      weight: Float32 scalar, the client's weight in the mean.
      norm: Float32 scalar, the L2 norm before clipping.
      clipped: Float32 scalar, 1 if the update was scaled down.
      discarded: Float32 scalar, 1 if the update was replaced by zero.

    `norm`, `clipped` and `discarded` are diagnostics: they get no noise, and the
    guarantee does not cover them.
    """

    update: Tensors | tf.Tensor
    sums: Mapping[str, tf.Tensor]
    weight: tf.Tensor
    norm: tf.Tensor
    clipped: tf.Tensor
    discarded: tf.Tensor

    def scalars(self) -> list[tf.Tensor]:
        """Returns everything except the update, diagnostics last."""
        return [*self.sums.values(), *self[2:]]

    def with_scalars(self, update: Any, scalars: Any) -> Contribution:
        """Inverse of `scalars`."""
        count = len(self.sums)
        sums = dict(zip(self.sums, scalars[:count], strict=True))
        return Contribution(update, sums, *scalars[count:])

    def scale_by(self, weight: Any) -> Contribution:
        """Scales only the update and the weight.

        Args:
          weight: Float32 in [0, 1], of the shape of `update`, which here holds the
            factors of updates; None: 1.
        """
        if weight is None:
            return self
        return self._replace(update=self.update * weight, weight=self.weight * weight)


# How many of `Contribution.scalars` are diagnostics; they come last.
NUM_DIAGNOSTICS = 3
