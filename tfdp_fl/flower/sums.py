"""A round's release: the noisy mean of clipped updates, and the next clip.

There are two ways to clip. Either the clients clip to the S that the server sends them,
and the server clips again. Or only the server clips, with the mechanism's own
functions, if the clip depends on all clients' updates or the noise on earlier rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from tfdp_fl import accounting, algorithm, mechanisms
from tfdp_fl._lazy_tf import tf
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.flower import client as client_lib
from tfdp_fl.flower import history, replies, updates
from tfdp_fl.mechanisms import noise
from tfdp_fl.mechanisms.contribution import Contribution
from tfdp_fl.terms import NoiseSite, TrustModel

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from flwr.common import Parameters
    from flwr.server.client_proxy import ClientProxy

    from tfdp_fl.mechanisms.contribution import NoiseStateLike

# The clip that clients are sent if the server clips for them.
NO_CLIP = 1e30
# The relative error by which a float32 factor may be rounded up.
_ROUNDING = 1e-6

# Mechanisms for which a client only clips to a given S, sends a bit, and adds noise.
# (Not their subclasses, which may need more: for those, the server clips.)
_CLIPPED_BY_CLIENTS = (mechanisms.FixedClipping, mechanisms.AdaptiveClipping)

# The model as Flower sent it: the older API's parameters, or a record and its name.
Template: TypeAlias = "Parameters | tuple[str, ArrayRecord]"
# Arrays that a release keeps at 0 or above: indices or names, or a built Keras model.
NonNegative: TypeAlias = "Sequence[int | str] | set[int | str] | tf.keras.Model | None"


@dataclasses.dataclass(frozen=True)
class ConfiguredRound:
    """A round's configuration, fixed when the clients were asked.

    Attributes:
      sent_model: w, the model's arrays.
      clients: The clients that were asked, by name.
      plan: The round as it is charged if no client fails.
      mechanism: The mechanism.
      context: What the mechanism may know about the run.
      round_state: S, z and m, as floats.
      template: The model as Flower sent it; the result has the same form.
      non_negative: The indices of arrays that the release keeps at 0 or above.
    """

    sent_model: list[np.ndarray]
    clients: dict[Hashable, ClientProxy | None]
    plan: history.ChargedRound
    mechanism: mechanisms.Mechanism
    context: mechanisms.PrivacyContext
    round_state: mechanisms.RoundState
    template: Template
    non_negative: Sequence[int] = ()

    @property
    def shapes(self) -> replies.Shapes:
        """The shapes of the model's arrays."""
        return [array.shape for array in self.sent_model]

    @property
    def participation(self) -> accounting.RoundCharge:
        """Who could be in it, and its cost, if abandoning it reveals who was drawn."""
        charge = self.plan.charge
        is_known = charge.draws_depend_on_each_other
        return dataclasses.replace(charge, known_selection=is_known)

    @functools.cached_property
    def client_noise(self) -> Mapping[str, float]:
        """The stddevs of the noise that clients add to the sums; {} for none."""
        if self.mechanism.noise_site != NoiseSite.CLIENT:
            return {}
        return self.mechanism.noise_stddevs(self.round_state, self.context)

    @property
    def clients_clip(self) -> bool:
        """Whether the clients clip (and the server clips again)."""
        return type(self.mechanism) in _CLIPPED_BY_CLIENTS

    @property
    def instruction(self) -> client_lib.Instruction:
        """The clients' instructions.

        If clients add noise, its stddev is stddev / sqrt(m): m independent draws of
        N(0, (z S)^2 / m) sum to N(0, (z S)^2), the noise of McMahan et al. (2018),
        Section 2, Eq. (1).
        """
        if not self.clients_clip:
            return client_lib.Instruction(NO_CLIP)
        share = 0.0
        if self.client_noise:
            share = float(self.client_noise["update"]) / len(self.clients) ** 0.5
        return client_lib.Instruction(
            float(self.round_state.clip_norm), share, bool(self.mechanism.side_names)
        )


class Outcome(NamedTuple):
    """The result of a round's release.

    Attributes:
      model: w plus the noisy mean of the updates, in the dtypes of w.
      next_clip_norm: S of the next round.
      noise_state: the state of correlated noise after the round; () without one.
    """

    model: list[np.ndarray]
    next_clip_norm: float
    noise_state: NoiseStateLike = ()


def resolve_non_negative(non_negative: NonNegative) -> Sequence[int | str] | None:
    """Returns given indices or names; for a Keras model, finds the indices."""
    if non_negative is None:
        return None
    if callable(getattr(non_negative, "get_weights", None)):
        from tfdp_fl.engine import synthetic

        return synthetic.non_negative_positions(non_negative)
    indices_or_names = (
        list(non_negative) if isinstance(non_negative, list | tuple | set) else [{}]
    )
    if not all(isinstance(value, str | int) for value in indices_or_names):
        raise TypeError(
            "non_negative must be indices or names of the model's arrays, or a built "
            f"Keras model, got {non_negative!r}."
        )
    return indices_or_names


def check_mechanism(
    mechanism: mechanisms.Mechanism, context: mechanisms.PrivacyContext
) -> None:
    """Raises ValueError if a mechanism can be run in neither way."""
    mechanism.check(context)
    if type(mechanism) in _CLIPPED_BY_CLIENTS:
        return
    one_gaussian = charge_lib.noise_multiplier_of(mechanism.round_event(0, context))
    new_each_round = (
        mechanism.event_period is None and mechanism.init_noise_state(context) == ()
    )
    if not (
        mechanism.trust_model == TrustModel.CENTRAL
        and mechanism.noise_site == NoiseSite.SERVER
        and mechanism.scales_updates
        and one_gaussian is not None
        and (new_each_round or isinstance(mechanism, mechanisms.CorrelatedNoise))
        # Rounds under Flower do not call these methods.
        and not mechanism.overrides("add_noise", "bind", "event_at", "event_index")
    ):
        raise ValueError(
            "mechanism must be a central one that scales updates, whose noise the "
            "server adds (with FixedClipping and AdaptiveClipping, also the clients), "
            f"and that costs one Gaussian per round, got {mechanism!r}."
        )


@dataclasses.dataclass(frozen=True)
class Collected:
    """The collected replies of a round, which have not been published.

    Attributes:
      num_replies: The number of clients that replied.
      is_enough: Whether the round may be released; otherwise there is no sum.
      round_state: The round's state, with its clip.
      update: sum_k c_k Delta_k, float64 arrays.
      sums: The side sums, by name.
      discarded: The number of updates that were not finite and became zero.
    """

    num_replies: int
    is_enough: bool
    round_state: mechanisms.RoundState
    update: list[np.ndarray] = dataclasses.field(default_factory=list)
    sums: Mapping[str, float] = dataclasses.field(default_factory=dict)
    discarded: int = 0


@np.errstate(all="ignore")  # Otherwise one client's numbers could end the round.
def collect(configured: ConfiguredRound, answers: Sequence[replies.Reply]) -> Collected:
    """Clips each client's update and adds them up.

    The sum is computed in float64, so it has none of the rounding errors of single
    updates (which are large in float16). A missing client only reduces the sum: noise
    and m stay as planned.

    If the server adds the noise, it clips each update again. If clients add it, the
    server scales down updates that are larger than any honest client's. If clients
    clip, their norm bits are centred (b - 1/2), so that a missing client moves S
    neither up nor down (Andrew et al. 2021, Algorithm 1). Otherwise, the mechanism
    computes c_k.

    Raises:
      InvalidArgumentError: The mechanism now has less noise than is charged for.
    """
    instruction, round_state = configured.instruction, configured.round_state
    size = sum(map(math.prod, configured.shapes))
    bound = updates.largest_honest_norm(
        instruction.clip_norm, instruction.noise_stddev, size
    )

    def clip_reply(reply: replies.Reply) -> updates.ClippedUpdate:
        return updates.clip(
            updates.difference(reply.arrays, configured.sent_model), bound
        )

    factors: Sequence[float] = [1.0] * len(answers)
    largest = bound
    if configured.clients_clip:
        sums = {
            name: sum(bool(reply.norm_bit) - 0.5 for reply in answers)
            for name in configured.mechanism.side_names
        }
    else:
        round_state, factors, sums = _clip_by_mechanism(
            configured, [clip_reply(reply) for reply in answers]
        )
        largest = float(configured.mechanism.l2_norm_bound(round_state))
    total = [np.zeros(shape) for shape in configured.shapes]
    step = updates.fine_grid_step(largest, float(round_state.clients_per_round))
    discarded = 0
    for factor, update in zip(factors, map(clip_reply, answers), strict=True):
        discarded += update.discarded
        for array, part in zip(total, update.arrays, strict=True):
            array += updates.to_grid(factor * part, step)
    return Collected(len(answers), True, round_state, total, sums, discarded)


def release(
    configured: ConfiguredRound,
    collected: Collected,
    paid: accounting.Receipt,
    noise_state: NoiseStateLike = (),
) -> Outcome:
    """Returns w + (sum_k c_k Delta_k + noise) / m, and the next S.

    Args:
      configured: The round.
      collected: The result of `collect`.
      paid: The receipt, without which nothing is released.
      noise_state: The state of correlated noise; () without one.

    Raises:
      InvalidArgumentError: The mechanism now has less noise than was paid for.
    """
    query = configured.mechanism.bind(configured.context)
    _, z, m, *_ = collected.round_state  # If the cohort size is random, m is expected.
    charged = query.paid_mu_squared(paid.redeem(), float(m), float(z))
    total = _sum_before_noise(configured, collected)
    stddevs = tf.nest.map_structure(tf.constant, dict(configured.client_noise))
    state = _to_tensors(collected.round_state)
    state = state._replace(noise_state=noise_state, shared_stddevs=stddevs)
    with noise.use_seed(tf.constant(noise.fresh_seed())):
        mean, state = algorithm.release(query, total, state, charged)
    model = updates.apply(configured.sent_model, [array.numpy() for array in mean])
    for index in configured.non_negative:
        model[index] = np.maximum(model[index], 0)
    return Outcome(model, float(state.clip_norm), state.noise_state)


def _sum_before_noise(
    configured: ConfiguredRound, collected: Collected
) -> Contribution:
    """Returns the sum of the contributions, to which `algorithm.release` adds noise.

    If clients add the noise, this sum has all of it, including what they did not add:
    the shares of clients whose reply is missing, unusable or discarded, and the noise
    of the side sums.
    """
    update = [tf.constant(array) for array in collected.update]
    sums = {
        name: tf.constant(value, tf.float64) for name, value in collected.sums.items()
    }
    if stddevs := configured.client_noise:
        m = float(configured.round_state.clients_per_round)
        missing = m - collected.num_replies + collected.discarded
        if missing:
            stddev = float(stddevs["update"]) * (missing / m) ** 0.5
            update = noise.add_normal(update, stddev)
        sums = {
            name: noise.add_normal([value], stddevs[name])[0]
            for name, value in sums.items()
        }
    zero = tf.zeros([])
    return Contribution(update, sums, zero, zero, zero, zero)


def _to_tensors(state: mechanisms.RoundState) -> mechanisms.RoundState:
    """Returns a round's numbers as float32 scalars."""
    return mechanisms.RoundState(*(tf.constant(v, tf.float32) for v in state[:3]))


def _clip_by_mechanism(
    configured: ConfiguredRound, clipped_updates: Sequence[updates.ClippedUpdate]
) -> tuple[mechanisms.RoundState, Sequence[float], dict[str, float]]:
    """Returns the round with its clip, each update's factor, and the side sums.

    Raises:
      InvalidArgumentError: The mechanism now has less noise than was charged for.
    """
    from tfdp_fl.engine import program  # Clients do without TensorFlow.

    mechanism, round_state = configured.mechanism, configured.round_state
    # The query bounds each contribution as it is charged, whatever the mechanism
    # computes.
    query = mechanism.bind(configured.context)
    norms = tf.constant([updates.norm(c.arrays) for c in clipped_updates], tf.float32)
    if mechanism.clip_to_cohort is not None:
        clip = mechanism.clip_to_cohort(norms, _to_tensors(round_state))
        round_state = round_state._replace(clip_norm=float(clip))
    usable = tf.constant([not update.discarded for update in clipped_updates], tf.bool)
    tensors = _to_tensors(round_state)
    _, z, m, *_ = round_state
    query.check_noise(tensors, query.expected_mu_squared(float(m), float(z)))
    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, (norms, usable, tensors))
    bounded = program.Program(query.contributions_of_norms, *specs)
    contribution = bounded(norms, usable, tensors)  # Keeps nothing of a client.
    factors = np.asarray(contribution.update, np.float64) * (1 - _ROUNDING)
    sums = {
        name: float(np.sum(value.numpy(), dtype=np.float64))
        for name, value in contribution.sums.items()
    }
    return round_state, factors.tolist(), sums
