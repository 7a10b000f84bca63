"""The plan for the rounds of an aggregation process, and the process's state."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import attrs
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from scipy import stats

from tfdp_fl import _files, _validate, sampling, schedules
from tfdp_fl.accounting import charge
from tfdp_fl.mechanisms import clipping, cohort_query, contribution, noise
from tfdp_fl.mechanisms import mechanism as mechanism_lib
from tfdp_fl.terms import Json, TrustModel

if TYPE_CHECKING:
    from tfdp_fl.datasets.nests import Nest

# One number for all rounds, or one per round.
Table: TypeAlias = float | tuple[float, ...]

# Strings or numbers; NumPy arrays in a state that a process returned.
_Vector: TypeAlias = np.ndarray | tf.Tensor

# The probability with which a cohort that was drawn as declared is refused.
_REFUSAL_PROBABILITY = 1e-12
# A bound on all noise, in standard deviations (`noise._box_muller` ends at 9.42).
LARGEST_DRAW = 9.5
# How much a sum's rounding may add to a client's share, relative to its bound.
LARGEST_ROUNDING = 1e-3

# What must hold in a round: a condition, and the words before and after a number that
# say why it does not.
_Requirement: TypeAlias = tuple[tf.Tensor, str, contribution.Scalar, str]


class RoundHistory(NamedTuple):
    """The cost of each round, recorded by the process that ran it.

    The record stays valid if a state is passed from process to process. T is the number
    of rounds so far, and A is the number of cohorts drawn for them.

    Attributes:
      lines: String [T], see `history_line`.
      answered: Float64 [T], the number of clients in the sum.
      attempts: String [A], who could have been in each cohort (see `with_cohort`),
        including the cohorts of failed rounds.
      attempted: Int64 [T], the number of `attempts` when a round ended. The round's own
        attempts are those since the previous round, and the last one was released.
        Empty if no cohort was ever recorded.
    """

    lines: _Vector
    answered: _Vector
    attempts: _Vector = ()
    attempted: _Vector = ()

    def cohorts(self) -> tuple[list[list[Json]], list[Json]]:
        """Returns the cohorts drawn for each round, and those drawn after the last."""
        draws = [json.loads(text) for text in np.asarray(self.attempts).tolist()]
        ended = (
            np.asarray(self.attempted) if len(self.attempted) else [0] * len(self.lines)
        )
        ends = [0, *map(int, ended)]
        parts = [draws[i:j] for i, j in itertools.pairwise(ends)]
        return parts, draws[ends[-1] :]

    def abandoned(self) -> list[Json]:
        """Returns the cohorts whose round was not released."""
        draws_by_round, later_draws = self.cohorts()
        return [*(d for draws in draws_by_round for d in draws[:-1]), *later_draws]


def history_kind(mechanism: mechanism_lib.Mechanism) -> Json:
    """Returns what rounds must have in common for one epsilon, as JSON values.

    The noise may differ, as each round's line has its own cost.
    """
    return {
        "mechanism": mechanism.name,
        "trust_model": mechanism.trust_model,
        "privacy_unit": mechanism.privacy_unit,
        "caveats": list(mechanism.all_caveats()),
        "noise_site": mechanism.noise_site,
        "static_config": mechanism.state_fingerprint(),
    }


def history_line(
    mechanism: mechanism_lib.Mechanism,
    context: contribution.PrivacyContext,
    round_index: int,
    sum_changed: bool = False,
    enlarged: float = 1.0,
) -> str:
    """Describes a round and its cost as JSON.

    It has `history_kind`, `sampling`, `num_clients` (null if the process does not know
    it) and `clients_per_round`. For a local guarantee, it also has `mu_squared`,
    (sensitivity / sigma)^2 of one client's share, and whether the summation changes the
    clients' noise (`sum_changed`). For other guarantees, it has the `event`, and the
    factor by which the summation may enlarge a client's share (`enlarged`).
    """
    line = {
        **history_kind(mechanism),
        "sampling": context.sampling,
        "num_clients": context.num_clients,
        "clients_per_round": context.cohort_size(round_index),
    }
    if mechanism.trust_model == TrustModel.LOCAL:
        line["mu_squared"] = float(mechanism.mu_squared(context))
        line["sum_changed"] = sum_changed
    else:
        event = charge.normalise(mechanism.round_event(round_index, context))
        line["event"], line["enlarged"] = charge.event_to_json(event), enlarged
    return _files.to_canonical_json(line)


def charged_by(
    line: str, query: cohort_query.CohortQuery, noise_multiplier: float
) -> float:
    """Returns `CohortQuery.paid_mu_squared` of a round's `history_line`.

    It is infinite for a local guarantee, whose noise the server does not add.
    """
    fields = json.loads(line)
    if "event" not in fields:
        return math.inf
    z = charge.noise_multiplier_of(charge.event_from_json(fields["event"]))
    return query.paid_mu_squared(z, fields["clients_per_round"], noise_multiplier)


def tabulate(
    schedule: schedules.Schedule,
    name: str,
    rounds: int | None,
    check: Callable[..., float],
) -> Table:
    """Returns a schedule as a number, or as one number for each round.

    Args:
      schedule: A number, a sequence, or a callable of the round.
      name: The argument that the schedule came from.
      rounds: The planned number of rounds, required for a callable.
      check: A function of `_validate`, for each value.

    Raises:
      ValueError: It is a callable, and `rounds` is unknown.
    """
    if callable(schedule):
        if rounds is None:
            raise ValueError(
                f"{name} is a callable, which a TFF computation cannot call when it "
                "runs: pass rounds=, the number of rounds for which to tabulate it, or "
                "a sequence with one value per round."
            )
        schedule = [schedules.value_at(schedule, t, name) for t in range(rounds)]
    return cast(Table, schedules.check_schedule(schedule, check, name))


def distinct_values(table: Table) -> set[float]:
    """Returns the distinct values in a table."""
    return set(table) if isinstance(table, tuple) else {table}


def _value_at(
    table: Table | str | tuple[str, ...], round_index: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Returns a round's scalar; past the end of the table, the round fails."""
    if not isinstance(table, tuple):
        return tf.constant(table, dtype)
    in_range = tf.debugging.assert_less(
        round_index,
        len(table),
        message=(
            f"There is a plan for {len(table)} rounds, but this round lies past its "
            "end."
        ),
    )
    with tf.control_dependencies([in_range]):
        return tf.gather(tf.constant(table, dtype), tf.identity(round_index))


class SumGrid(NamedTuple):
    """The numbers that a sum adds up without changing them: a grid between two bounds.

    Attributes:
      argument: The argument for the sum's factory.
      limit: The largest absolute value that the sum does not cut off.
      step: The distance between two of the numbers; 0 for a plain sum.
      rounding: The most that rounding adds to the norm of a client's share.
    """

    argument: str
    limit: float
    step: float
    rounding: float

    def requirements(
        self, name: str, bound: contribution.Scalar, share: tf.Tensor | None
    ) -> Iterator[_Requirement]:
        """Yields what must hold so that the sum costs what is charged for it.

        Args:
          name: What is added up.
          bound: The bound on the norm of a client's share, without noise.
          share: The stddev of the noise that the client adds; None: it adds none.
        """
        if not self.step:
            return
        bound = tf.cast(bound, tf.float32)
        yield (
            bound < math.inf,
            f"{self.argument} must be None or a tff.aggregators.SumFactory, because a "
            f"secure sum rounds a client's {name}, which the mechanism bounds by",
            bound,
            "(a TF-Privacy query states no bound)",
        )
        yield (
            self.rounding <= LARGEST_ROUNDING * bound,
            f"{self.argument} must have closer bounds: its sum rounds a client's "
            f"{name} by up to {self.rounding:.3g}, which is not negligible beside its "
            "bound of",
            bound,
            f"(at most {LARGEST_ROUNDING:g} of it would be)",
        )
        if share is None:
            return
        yield (
            (share <= 0) | (share >= noise.STEPS_OF_NOISE * self.step),
            f"{self.argument} must have closer bounds: its sum rounds a client's "
            f"{name} to steps of {self.step:.3g}, which is too coarse for noise that "
            "the client adds (noise_site='client') with a standard deviation of",
            share,
            f"(at least {noise.STEPS_OF_NOISE:g} steps are needed)",
        )
        needed = bound + LARGEST_DRAW * share
        yield (
            needed <= self.limit,
            f"{self.argument} must have bounds of",
            needed,
            f"or more for a client's {name}, got {self.limit:g}: it would cut off "
            "noise that the clients add (noise_site='client'), leaving less than is "
            "charged for",
        )

    def clip_limits(
        self, bound: tf.Tensor, share: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the least and the largest clip that meet the requirements.

        Args:
          bound: The bound of a clip of 1, to which a clip's own is proportional.
          share: Likewise.
        """
        least = self.rounding / LARGEST_ROUNDING / bound
        most = tf.constant(clipping.LARGEST_CLIP_NORM)
        if share is not None:
            for_noise = noise.STEPS_OF_NOISE * self.step
            least = tf.maximum(least, tf.math.divide_no_nan(for_noise, share))
            most = tf.minimum(most, self.limit / (bound + LARGEST_DRAW * share))
        # (Neither is off by more than rounding.)
        return least * (1 + 1e-5), most * (1 - 1e-5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The values of each round, and the requirements on its cohort.

    If a round's cohort is not allowed, the whole round fails: `next` raises an error,
    nothing is released, and the state does not change.

    Attributes:
      noise_multiplier: The mechanism's z.
      clients_per_round: The expected number of clients in a round, m.
      lines: See `RoundHistory`: one for all rounds, or one per round.
      charged: `charged_by` of these lines, likewise.
      update_grid: What the sum of the updates does to them.
      scalar_grid: What the sum of the other numbers does to each of them.
      exact: Whether exactly m clients must answer, because each adds its share of the
        noise.
      at_most_expected: Whether no more than m may answer, as under fixed-size
        sampling.
      max_cohort_size: The most clients that may answer (the population), or None.
      requires_weight: Whether at least one usable answer is required, because the
        answers replace the model.
    """

    noise_multiplier: Table
    clients_per_round: Table
    lines: str | tuple[str, ...]
    charged: Table
    update_grid: SumGrid
    scalar_grid: SumGrid
    exact: bool = False
    at_most_expected: bool = False
    max_cohort_size: int | None = None
    requires_weight: bool = False

    def values(self, round_index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns z and m of a round, float32 scalars."""
        return (
            _value_at(self.noise_multiplier, round_index, tf.float32),
            _value_at(self.clients_per_round, round_index, tf.float32),
        )

    def charged_at(self, round_index: tf.Tensor) -> tf.Tensor:
        """Returns what a round's line allows, float32 scalar."""
        return _value_at(self.charged, round_index, tf.float32)

    def append_round(
        self, history: RoundHistory, round_index: tf.Tensor, answered: tf.Tensor
    ) -> RoundHistory:
        """Returns a history with one more round, in which `answered` clients were."""
        line = _value_at(self.lines, round_index, tf.string)
        answered = tf.cast(answered, tf.float64)
        return RoundHistory(
            lines=tf.concat([history.lines, [line]], axis=0),
            answered=tf.concat([history.answered, [answered]], axis=0),
            attempts=history.attempts,
            attempted=tf.concat(
                [history.attempted, [tf.size(history.attempts, tf.int64)]], axis=0
            ),
        )

    def clip_limits(
        self, query: cohort_query.CohortQuery, query_state: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the least and the largest clip that `check_sums` allows in a round.

        Args:
          query: Its bound and its noise are proportional to the clip.
          query_state: The round's state.
        """
        one = query.with_clip(query_state, tf.ones([]))
        bound = tf.cast(query.l2_norm_bound(one), tf.float32)
        return self.update_grid.clip_limits(bound, _client_noise(query, one)["update"])

    def _sum_requirements(
        self, query: cohort_query.CohortQuery, query_state: Any
    ) -> Iterator[_Requirement]:
        """Yields what must hold of all that a round releases through sums."""
        shares = _client_noise(query, query_state)
        bound = query.l2_norm_bound(query_state)
        yield from self.update_grid.requirements("update", bound, shares["update"])
        for name, bound in query.mechanism.side_bounds.items():
            yield from self.scalar_grid.requirements(name, bound, shares[name])
        yield from self.scalar_grid.requirements("part of the cohort size", 1.0, None)

    def check_first_round(self, query: cohort_query.CohortQuery) -> None:
        """Raises ValueError if `check_sums` would fail in the first round.

        If its clip follows from the cohort, both ends of the `clip_limits` are checked.
        """
        if not (self.update_grid.step or self.scalar_grid.step):
            return
        with tf.init_scope():
            first = query.begin_round(
                query.initial_global_state(), *self.values(tf.constant(0))
            )
            states = [first]
            if query.two_phase:
                limits = self.clip_limits(query, first)
                states = [query.with_clip(first, clip_norm) for clip_norm in limits]
            for query_state in states:
                for is_met, *words in self._sum_requirements(query, query_state):
                    if not is_met:
                        before, number, after = words
                        raise ValueError(f"{before} {float(number):.3g} {after}.")

    def check_sums(
        self, query: cohort_query.CohortQuery, query_state: Any
    ) -> list[tf.Operation]:
        """Raises InvalidArgumentError if a sum would not cost what is charged for it.

        Returns:
          In a graph, the operations that raise the error, for `after_assertions`.
        """
        checks = [
            tf.debugging.Assert(is_met, [*words, "The round is abandoned."])
            for is_met, *words in self._sum_requirements(query, query_state)
        ]
        return [check for check in checks if check is not None]

    def check_size(
        self,
        size: tf.Tensor,
        expected: tf.Tensor,
        weight: tf.Tensor,
    ) -> tf.Tensor:
        """Returns a cohort's size after checking that it is allowed.

        Args:
          size: Float32 scalar, the number of clients that answered.
          expected: Float32 scalar, m.
          weight: Float32 scalar, the sum of the clients' weights.
        """
        checks = []

        def require(condition: tf.Tensor, message: str) -> None:
            text = f"{message}; the round is abandoned."
            checks.append(tf.debugging.Assert(condition, [text]))

        if self.exact:
            require(
                tf.equal(size, expected),
                "cohort size differs from clients_per_round: with noise_site='client' "
                "the noise is complete only if exactly clients_per_round answer",
            )
        if self.at_most_expected:
            require(
                size <= expected,
                "cohort size exceeds clients_per_round, which contradicts the declared "
                "sampling",
            )
        if self.max_cohort_size is not None:
            require(
                size <= float(self.max_cohort_size),
                f"cohort size exceeds {self.max_cohort_size}, the largest one with the "
                "declared sampling",
            )
        if self.requires_weight:
            require(weight > 0, "cohort has nothing usable to replace the model with")
        # In eager mode, a check that passes is None.
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(size)


def _client_noise(
    query: cohort_query.CohortQuery, query_state: Any
) -> Mapping[str, tf.Tensor | None]:
    """Returns the stddevs of the noise that each client adds; None for no noise."""
    if query.mechanism.needs_exact_cohort:
        return query.noise_shares(query_state)
    return dict.fromkeys(("update", *query.mechanism.side_names))


def largest_poisson_cohort(num_clients: int, clients_per_round: float) -> int:
    """Returns a size that Poisson sampling exceeds with probability below 1e-12.

    Args:
      num_clients: The number of clients, N.
      clients_per_round: m, the expected size: Binomial(N, m / N).
    """
    rate = clients_per_round / num_clients
    return int(stats.binom.isf(_REFUSAL_PROBABILITY, num_clients, rate))


class AggregatorState(NamedTuple):
    """The server's state of an aggregation process.

    Attributes:
      query_state: The state of the mechanism's query, such as the clip.
      rounds: Int32 scalar, the number of aggregated rounds.
      sum_state: The states of the factories that sum contributions.
      history: A `RoundHistory`.
    """

    query_state: Nest
    rounds: tf.Tensor
    sum_state: Nest
    history: RoundHistory


# The states that `accounted_state` accepts.
ServerState: TypeAlias = AggregatorState | tff.learning.templates.LearningAlgorithmState

_BUILD_INSTEAD = (
    "Build the process with tfdp_fl.learning.build_dp_fed_avg, or give the mechanism's "
    "factory itself to tff.learning.algorithms.build_unweighted_fed_avg."
)


def _holds_mechanism(state: Nest) -> bool:
    if isinstance(state, AggregatorState):
        return True
    if isinstance(state, Mapping):
        state = state.values()
    elif attrs.has(type(state)):
        state = attrs.astuple(state, recurse=False)
    elif not isinstance(state, (list, tuple)):
        return False
    return any(map(_holds_mechanism, state))


def accounted_state(state: ServerState) -> AggregatorState:
    """Returns the mechanism's state, if everything in a state can be accounted for.

    This is the case for `tff.learning`'s federated averaging if its aggregator is the
    mechanism's own, and if the sums (the mechanism's `inner_factory` and
    `scalars_factory`) have no state.

    Args:
      state: A `LearningAlgorithmState`, or the state of such an aggregator.

    Raises:
      ValueError: It is another state, in which something outside the mechanism may
        make releases that the mechanism's epsilon does not count.
    """
    if isinstance(state, tff.learning.templates.LearningAlgorithmState):
        _check_client_work(state.client_work)
        if _holds_mechanism(state.distributor) or _holds_mechanism(state.finalizer):
            raise ValueError(
                "state must have only one mechanism, in its aggregator, got another "
                f"in its distributor or finalizer. {_BUILD_INSTEAD}"
            )
        state = state.aggregator
    if not isinstance(state, AggregatorState):
        raise ValueError(
            "state must come from a learning process (LearningAlgorithmState) whose "
            "aggregator is the mechanism's own, or from that aggregator "
            f"(AggregatorState), got {type(state).__name__}: an aggregator around it "
            "may release more than the mechanism does (a mean divides once more, by a "
            "count or by weights without noise; a norm that follows the clients' "
            "values lets one client change what others contribute). "
            f"{_BUILD_INSTEAD}"
        )
    if tf.nest.flatten(state.sum_state):
        raise ValueError(
            "state must come from a sum that is the same in every round "
            "(inner_factory and scalars_factory without a state), got one with a "
            "state, such as a secure sum or zeroing with adaptive bounds: one client "
            "then changes what others contribute, after the clip. "
            f"{_BUILD_INSTEAD}"
        )
    return state


def with_cohort(state: ServerState, cohort: sampling.Cohort) -> ServerState:
    """Returns a state that records the cohort of its next round.

    The history records who could have been in the cohort, not who was. A round without
    a recorded cohort is charged as if every client had been in it; under Poisson
    sampling, as if its cohort had been newly drawn as declared.

    An abandoned cohort stays in the state until another one is recorded. So after
    `abandon`, record the next cohort before `next`; otherwise, the round counts as the
    abandoned cohort's.

    Args:
      state: A state that `accounted_state` accepts.
      cohort: A cohort drawn by a sampler of `tfdp_fl.sampling`. Passing the same one
        again changes nothing.

    Raises:
      RuntimeError: The cohort was already in a round of this state, or a sampler with a
        seed may have drawn the same clients for one; or the state has an unreleased
        cohort of a fixed size, which cannot be abandoned.
    """
    accounted = accounted_state(state)
    _validate.instance_of(sampling.Cohort, cohort=cohort)
    rounds, later_draws = accounted.history.cohorts()
    if any(draw["draw_id"] == cohort.draw_id for part in rounds for draw in part):
        raise RuntimeError(
            "cohort must be newly drawn, got one that was in a round of this state "
            "already: its clients would take part twice. Call sampler.draw()."
        )
    if later_draws and later_draws[-1]["draw_id"] == cohort.draw_id:
        return state
    seeded = [
        draw["round_from_seed"]
        for part in (*rounds, later_draws)
        for draw in part
        if "round_from_seed" in draw
    ]
    if cohort.from_seed and seeded and cohort.round_index <= max(seeded):
        raise RuntimeError(
            f"cohort must be for a round after {max(seeded)}, the last one for which "
            "this state has a cohort drawn from a seed, got one for round "
            f"{cohort.round_index}: a new sampler with the same seed draws the same "
            "clients again. Restore the sampler (sampler.restore(state)), set its "
            "next_round, or leave out the seed."
        )
    for draw in later_draws:
        participation = charge.Participation.from_json(draw["participation"])
        is_free = participation.is_charged_if_abandoned
        if participation.draws_depend_on_each_other and not is_free:
            raise RuntimeError(
                "cohort must be the last one that the state was given, which has a "
                "fixed size and whose round did not end: leave out the clients that "
                "failed and call next again, or make the sampler with "
                "may_abandon=True, which increases the charge of every round."
            )
    line = {
        "participation": json.loads(cohort.participation.to_json()),
        "draw_id": cohort.draw_id,
        **({"round_from_seed": cohort.round_index} if cohort.from_seed else {}),
    }
    attempts = tf.constant(accounted.history.attempts, tf.string)
    attempts_now = tf.concat([attempts, [_files.to_canonical_json(line)]], axis=0)
    accounted = accounted._replace(
        history=accounted.history._replace(attempts=attempts_now)
    )
    if isinstance(state, tff.learning.templates.LearningAlgorithmState):
        return state._replace(aggregator=accounted)
    return accounted


def _check_client_work(state: Nest) -> None:
    """Raises ValueError unless the client work's state has only optimizer settings.

    Any other state could come from clients' data, bypassing the aggregator.
    """
    settings = state.values() if isinstance(state, Mapping) else [state]
    is_allowed = not tf.nest.flatten(state) or all(
        not isinstance(setting, (tuple, list, Mapping)) and np.ndim(setting) == 0
        for setting in settings
    )
    if not is_allowed:
        raise ValueError(
            "state must come from federated averaging, got client work with a state of "
            "its own (Mime's has full gradients): it is released without the "
            f"mechanism's noise. {_BUILD_INSTEAD}"
        )
