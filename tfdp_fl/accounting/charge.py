"""The cost of one round: the mechanism's event under the sampling that was used."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.metadata
import json
import math
from typing import TYPE_CHECKING, Any, cast

import attr
import dp_accounting

from tfdp_fl import _files, _validate, schedules
from tfdp_fl.accounting import gaussian, schema
from tfdp_fl.accounting.known_selection import KnownSelectionDpEvent
from tfdp_fl.accounting.private_selection import BestOfTrialsDpEvent
from tfdp_fl.accounting.random_allocation import RandomAllocationDpEvent
from tfdp_fl.terms import Json, Sampling

if TYPE_CHECKING:
    from typing import Self

SAMPLINGS = ("poisson", "fixed_size", "random_allocation", "shuffled", "cyclic")
# No sampling: clients take part when they like, but a minimum of rounds apart.
MIN_SEPARATION = Sampling.MIN_SEPARATION
# The samplings that make a round cheaper than its event, if the draw is secret.
AMPLIFIED = ("poisson", "fixed_size", "random_allocation")
# The samplings whose cost is known only for Gaussians.
_GAUSSIAN_ONLY = ("fixed_size", "random_allocation")
# The samplings with a random (binomial) cohort size.
OF_RANDOM_SIZE = ("poisson", "random_allocation")
# The samplings whose cost is that of passes over all clients.
IN_PASSES = ("random_allocation", "shuffled")
# The samplings in which clients take turns.
TAKING_TURNS = (*IN_PASSES, "cyclic")
ACCOUNTANTS = ("rdp", "pld")


class Relation(enum.Enum):
    """The neighbouring relation: how two data sets differ in one client.

    The names are dp_accounting's; the values follow "one client is" in a statement.
    """

    ADD_OR_REMOVE_ONE = "added or removed"
    REPLACE_ONE = "replaced by another"
    REPLACE_SPECIAL = "counted as zero in its place"

    @property
    def neighboring_relation(self) -> dp_accounting.NeighboringRelation:
        """The relation that an accountant computes with.

        Counting a client as zero moves a sum as much as removing it.
        """
        if self is Relation.REPLACE_ONE:
            return dp_accounting.NeighboringRelation.REPLACE_ONE
        return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Participation:
    """Which clients could have been in one round.

    Equal participations with equal events make equal charges, so a history is
    compressed to (charge, count) pairs.

    Attributes:
      sampling: How the cohort was actually drawn: "poisson" (each client with
        probability q = m/N), "fixed_size" (m of N without replacement),
        "random_allocation" (each client in one of the t = floor(N/m) rounds of a pass,
        which it draws uniformly, independently and in secret), "shuffled" (each client
        once per pass; no amplification claimed), "cyclic" (fixed groups take turns, m
        clients of a group without replacement; no amplification claimed), or
        "min_separation" (clients take part when they like; no amplification claimed).
      num_clients: N, the number of clients in the population.
      clients_per_round: m, the expected number of clients in this round; N/t under
        random allocation.
      known_selection: For "fixed_size": whether a cohort is abandoned if one of its
        clients fails. The released cohorts are then drawn only from clients that do not
        fail, so the selection does not count as secret. Every attempt, released or
        abandoned, is charged as if an observer saw whether the client is in it (with
        probability m/N).
      pass_index: For "shuffled": the pass over the clients to which the round belongs.
        For "random_allocation": the first round of its pass. None: unknown, so any
        client may be in the round.
      pass_offset: For "shuffled": where in the pass's order the cohort begins; it holds
        the positions from `pass_offset` up to `pass_offset + clients_per_round`. For
        "random_allocation": the index of the round in its pass, from 0. Given together
        with `pass_index`.
      partition: A random id: of the order that passes follow ("shuffled"), of the
        secret from which clients draw ("random_allocation"), or of the division into
        groups ("cyclic"). Rounds of different orders never count as one pass, and a
        client may be in any group of each division. None: unknown, so any client may be
        in the round.
      group: For "cyclic": the group of the division from which the cohort came.
    """

    sampling: str
    num_clients: int
    clients_per_round: float
    known_selection: bool = False
    pass_index: int | None = None
    pass_offset: int | None = None
    partition: str | None = None
    group: int | None = None

    def __post_init__(self):
        _validate.one_of((*SAMPLINGS, MIN_SEPARATION), sampling=self.sampling)
        n = _validate.positive_integer(num_clients=self.num_clients)
        m = _validate.positive(clients_per_round=self.clients_per_round)
        fractional = self.sampling in OF_RANDOM_SIZE
        if self.sampling != Sampling.POISSON:
            m = check_size(m, n, fractional)
        if self.known_selection and self.sampling != Sampling.FIXED_SIZE:
            raise ValueError(
                "known_selection must be False except for fixed_size sampling, got "
                f"{self.sampling} sampling."
            )
        fields = {"pass_index": self.pass_index, "pass_offset": self.pass_offset}
        fields = {name: index for name, index in fields.items() if index is not None}
        has_pass_fields = self.sampling in IN_PASSES
        has_partition = has_pass_fields or self.sampling == Sampling.CYCLIC
        if (
            len(fields) == 1
            or (fields and not has_pass_fields)
            or (self.partition is not None and not has_partition)
        ):
            raise ValueError(
                "pass_index and pass_offset must be given together, and only for "
                "shuffled sampling or random allocation; partition only for these or "
                f"cyclic sampling, got {fields!r} and partition={self.partition!r} for "
                f"{self.sampling} sampling."
            )
        if self.group is not None:
            if self.sampling != Sampling.CYCLIC:
                raise ValueError(
                    f"group must be None unless sampling is cyclic, got {self.group!r}."
                )
            fields["group"] = self.group
        for name, value in fields.items():
            value = _validate.non_negative_integer(**{name: value})
            object.__setattr__(self, name, value)
        object.__setattr__(self, "num_clients", n)
        object.__setattr__(self, "clients_per_round", m)
        if self.sampling == Sampling.RANDOM_ALLOCATION and (
            (self.pass_offset or 0) >= self.rounds_per_pass
        ):
            raise ValueError(
                "pass_offset must be below the floor(N/m) rounds of a pass, "
                f"{self.rounds_per_pass}, got {self.pass_offset}."
            )
        object.__setattr__(self, "known_selection", bool(self.known_selection))

    def cost(self, event: dp_accounting.DpEvent) -> RoundCharge:
        """Returns the cost of a round in which a mechanism releases `event`.

        Groups are left out, as the event of correlated noise already accounts for them.
        """
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(Participation)
        }
        if self.sampling == Sampling.CYCLIC:
            fields["partition"] = fields["group"] = None
        return RoundCharge(**fields, event=event)

    @property
    def rounds_per_pass(self) -> int:
        """The number of rounds in a pass of random allocation: t = floor(N/m)."""
        return rounds_per_pass(self.num_clients, self.clients_per_round)

    @property
    def sampling_probability(self) -> float:
        """The ratio m/N, at most 1; 1 if no amplification is claimed."""
        if self.sampling not in AMPLIFIED:
            return 1.0
        if self.sampling == Sampling.RANDOM_ALLOCATION:
            return 1 / self.rounds_per_pass
        return min(1.0, self.clients_per_round / self.num_clients)

    @property
    def is_amplified(self) -> bool:
        """Whether sampling makes the round cheaper than its event."""
        return self.sampling_probability < 1

    @property
    def draws_depend_on_each_other(self) -> bool:
        """Whether a failure reveals who else was drawn, as in fixed-size cohorts."""
        return self.sampling == Sampling.FIXED_SIZE and self.is_amplified

    @property
    def is_charged_if_abandoned(self) -> bool:
        """Whether an abandoned round costs as much as a released one.

        Poisson sampling and random allocation draw the others independently of any one
        client. Whether others fail is then like a public coin toss; if none does, the
        release is sampled as usual. Shuffled and cyclic cohorts claim no amplification.
        In no case is a failing client itself protected.
        """
        return self.known_selection and self.is_amplified

    @property
    def relation(self) -> Relation:
        """The neighbouring relation of the guarantee."""
        return relation_of(self.sampling)

    def to_json(self) -> str:
        """Returns all attributes as one line of JSON, exact to the last bit."""
        fields = {
            field.name: _files.to_plain(getattr(self, field.name), event_to_json)
            for field in dataclasses.fields(self)
        }
        return _files.to_canonical_json(
            {
                name: value
                for name, value in fields.items()
                if value is not None and value is not False
            }
        )

    @classmethod
    def from_json(cls, text: str | Json) -> Self:
        """Inverse of `to_json`, from text or parsed JSON.

        Raises:
          TypeError, ValueError: The argument is not something that `to_json` writes.
        """
        fields = dict(json.loads(text) if isinstance(text, str) else text)
        if "event" in fields:
            schema.check_event(fields["event"])
            fields["event"] = event_from_json(fields["event"])
        return cls(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCharge(Participation):
    """One round's privacy cost, as data: its participation and its event.

    `Participation.cost` makes it. JSON represents a charge exactly.

    Attributes:
      event: The event that the mechanism releases about the cohort, without sampling:
        `GaussianDpEvent(z)` for noise of z times the clip norm on the sum, a
        composition of Gaussians, or `NonPrivateDpEvent` for no privacy. Samplings other
        than "fixed_size" and "random_allocation" allow any event that the accountant
        supports.
    """

    event: dp_accounting.DpEvent

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "event", normalise(self.event))
        z = self.noise_multiplier
        if z is not None and z < 0:
            raise ValueError(
                f"event must have a noise multiplier of at least 0, got {self.event!r}."
            )
        if z is None and self.sampling in _GAUSSIAN_ONLY:
            raise ValueError(
                "event must be a GaussianDpEvent or a composition of them "
                f"under {self.sampling} sampling, got {self.event!r}."
            )

    @functools.cached_property
    def noise_multiplier(self) -> float | None:
        """The z of the single Gaussian equivalent to the event; None if none is.

        0.0 means no privacy, and infinity means that nothing is released.
        """
        return noise_multiplier_of(self.event)

    @property
    def sensitivity(self) -> float:
        """How far one client moves the clipped sum, in clip norms."""
        return 2.0 if self.sampling == Sampling.FIXED_SIZE else 1.0

    def dp_event(self, accountant: str = "rdp") -> dp_accounting.DpEvent:
        """Returns the event that dp_accounting charges for this round.

        Poisson sampling: `PoissonSampledDpEvent(q, Gaussian(z))` under
        add-or-remove-one. Fixed size, under replace-one: a replaced client moves the
        clipped sum by 2S, so RDP gets `SampledWithoutReplacementDpEvent(N, m,
        Gaussian(z/2))` (Wang, Balle & Kasiviswanathan 2019, theorem 27,
        https://arxiv.org/abs/1808.00087), and PLD gets
        `TruncatedSubsampledGaussianDpEvent(N, 1.0, m, z)`, which itself doubles the
        sensitivity. If the selection counts as known, it is
        `KnownSelectionDpEvent(q, Gaussian(z/2))`. Random allocation:
        `RandomAllocationDpEvent(t, Gaussian(z))`, the cost of the round's whole pass
        (see `PrivacyAccountant`). Shuffled: the bare event, which a client meets once
        per pass (see `PrivacyAccountant`). Cyclic: the bare event, even for a client
        that cannot be in the round.

        Args:
          accountant: "rdp" or "pld".

        Returns:
          The event; `NonPrivateDpEvent` when there is no noise.
        """
        _validate.one_of(ACCOUNTANTS, accountant=accountant)
        event, z = self.event, self.noise_multiplier
        if z == 0:
            return dp_accounting.NonPrivateDpEvent()
        if z == math.inf:
            return dp_accounting.NoOpDpEvent()
        if z is not None:
            event = dp_accounting.GaussianDpEvent(z)
        if self.known_selection and self.is_amplified:
            unsampled = dp_accounting.GaussianDpEvent(cast(float, z) / self.sensitivity)
            return KnownSelectionDpEvent(self.sampling_probability, unsampled)
        if self.sampling == Sampling.FIXED_SIZE:
            z = cast(float, z)  # The constructor refused everything else.
            if accountant == "pld":
                return dp_accounting.TruncatedSubsampledGaussianDpEvent(
                    self.num_clients, 1.0, self.clients_per_round, z
                )
            return dp_accounting.SampledWithoutReplacementDpEvent(
                self.num_clients,
                self.clients_per_round,
                dp_accounting.GaussianDpEvent(z / 2),
            )
        if not self.is_amplified:
            return event
        if self.sampling == Sampling.RANDOM_ALLOCATION:
            return RandomAllocationDpEvent(self.rounds_per_pass, event)
        return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, event)

    @functools.cached_property
    def _json(self) -> str:
        return super().to_json()

    def to_json(self) -> str:
        """See base class."""
        return self._json

    def __hash__(self) -> int:
        return hash(self._json)


def relation_of(*samplings: str) -> Relation:
    """Returns the neighbouring relation of rounds sampled in these ways.

    Together, rounds promise only what the weakest does: hiding that one client counts
    as zero in its place. (Hiding a replacement cannot be combined with the others.)
    """
    by_sampling = {
        "poisson": Relation.ADD_OR_REMOVE_ONE,
        "random_allocation": Relation.ADD_OR_REMOVE_ONE,
        "fixed_size": Relation.REPLACE_ONE,
    }
    found = {by_sampling.get(each, Relation.REPLACE_SPECIAL) for each in samplings}
    for relation in (Relation.REPLACE_ONE, Relation.REPLACE_SPECIAL):
        if relation in found:
            return relation
    return Relation.ADD_OR_REMOVE_ONE


def check_size(value: float, num_clients: int, fractional: bool = False) -> float:
    """Returns a cohort size, checked against the number of clients.

    Args:
      value: The size.
      num_clients: The number of clients, N.
      fractional: Whether the size is an expectation that need not be an integer.
    """
    size = _validate.positive(clients_per_round=value)
    if size > num_clients:
        raise ValueError(
            f"clients_per_round must be at most num_clients={num_clients}, "
            f"got {size:g}."
        )
    if size.is_integer():
        return int(size)
    if not fractional:
        raise ValueError(f"clients_per_round must be a whole number, got {value!r}.")
    return size


def rounds_per_pass(num_clients: int, clients_per_round: float) -> int:
    """Returns t = floor(N/m), even if m is a rounded N/t."""
    return max(1, math.floor(num_clients / clients_per_round * (1 + 1e-12)))


def require_constant_noise(
    round_index: int, z: float, pass_start: int, z_of_pass: float
) -> None:
    """Raises ValueError if a noise multiplier differs from its pass's first one."""
    if z != z_of_pass:
        raise ValueError(
            "noise_multiplier must be the same in all rounds of a pass of random "
            f"allocation, got {z_of_pass:g} in round {pass_start} (counted from 0), "
            f"in which a pass begins, and {z:g} in round {round_index}."
        )


class AllocationPasses:
    """Divides rounds into passes of random allocation, of t = floor(N/m) rounds each.

    The first pass begins with `first_round`.
    """

    def __init__(
        self,
        num_clients: int,
        clients_per_round: schedules.Schedule,
        first_round: int = 0,
    ):
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        self._schedule = clients_per_round
        self.first_round = first_round
        # For each known pass, its first round and one past its last.
        self._passes: list[tuple[int, int]] = [(first_round, first_round)]

    def pass_fields(self, round_index: int) -> Json:
        """Returns the fields of a `RoundCharge` for a round's place in its pass.

        Raises:
          ValueError: m implies another floor(N/m) than the pass began with.
        """
        round_index = max(round_index, self.first_round)
        pass_start, pass_end = self._pass_of(round_index)
        t = self._rounds_per_pass_at(round_index)
        if t != pass_end - pass_start:
            raise ValueError(
                "clients_per_round must give all rounds of a pass of random allocation "
                f"the same floor(N/m), got {pass_end - pass_start} in round "
                f"{pass_start} (counted from 0), in which a pass begins, and {t} in "
                f"round {round_index}."
            )
        return {
            "clients_per_round": self.num_clients / t,
            "pass_index": pass_start,
            "pass_offset": round_index - pass_start,
        }

    def _pass_of(self, round_index: int) -> tuple[int, int]:
        pass_start = self.first_round
        if schedules.is_constant(self._schedule):
            t = self._rounds_per_pass_at(0)
            pass_start += (round_index - pass_start) // t * t
            return pass_start, pass_start + t
        while self._passes[-1][1] <= round_index:
            end = self._passes[-1][1]
            self._passes.append((end, end + self._rounds_per_pass_at(end)))
        return next(
            bounds for bounds in reversed(self._passes) if bounds[0] <= round_index
        )

    def _rounds_per_pass_at(self, round_index: int) -> int:
        m = schedules.value_at(self._schedule, round_index, "clients_per_round")
        m = check_size(m, self.num_clients, fractional=True)
        return rounds_per_pass(self.num_clients, m)


class PassCohorts:
    """Divides passes over N clients into cohorts of scheduled sizes.

    A cohort never straddles two passes: the last cohort of a pass takes the remaining
    clients. So every client is in exactly one cohort of each full pass.
    """

    def __init__(self, num_clients: int, clients_per_round: schedules.Schedule):
        self._num_clients = _validate.positive_integer(num_clients=num_clients)
        self._schedule = clients_per_round
        self._cohorts: list[tuple[int, int, int]] = []

    def pass_fields(self, round_index: int) -> dict[str, int]:
        """Returns the fields of a `RoundCharge` for a round's place in its pass."""
        index, start, stop = self.cohort(round_index)
        return {
            "clients_per_round": stop - start,
            "pass_index": index,
            "pass_offset": start,
        }

    def cohort(self, round_index: int) -> tuple[int, int, int]:
        """Returns (pass, first position, one past the last) of a round."""
        n = self._num_clients
        if schedules.is_constant(self._schedule):
            m = int(check_size(self._schedule, n))
            index, index_in_pass = divmod(round_index, -(-n // m))
            return index, index_in_pass * m, min(n, index_in_pass * m + m)
        while len(self._cohorts) <= round_index:
            index, _, start = self._cohorts[-1] if self._cohorts else (0, 0, 0)
            if start == n:
                index, start = index + 1, 0
            size = check_size(
                schedules.value_at(
                    self._schedule, len(self._cohorts), "clients_per_round"
                ),
                n,
            )
            self._cohorts.append((index, start, min(n, start + int(size))))
        return self._cohorts[round_index]


def noise_multiplier_of(event: dp_accounting.DpEvent) -> float | None:
    """Returns the noise multiplier of the single Gaussian that an event amounts to.

    Gaussian releases about the same data, however nested, are a single Gaussian
    with noise multiplier (sum z_i^-2)^(-1/2) (McMahan et al. 2018, "A general
    approach to adding differential privacy to iterative training procedures",
    section 3, https://arxiv.org/abs/1812.06210).

    Args:
      event: The mechanism's event, without sampling.

    Returns:
      z; 0.0 without noise, infinity for `NoOpDpEvent`, and None for an event that is
      not a composition of Gaussians.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return float(event.noise_multiplier)
    mu_squared = _mu_squared(event)
    return None if mu_squared is None else gaussian.noise_of_mu_squared(mu_squared)


def _mu_squared(event: dp_accounting.DpEvent) -> float | None:
    """Returns sum z_i^-2 over an event's Gaussians; None for other events."""
    if isinstance(event, dp_accounting.NoOpDpEvent):
        return 0.0
    if isinstance(event, dp_accounting.NonPrivateDpEvent):
        return math.inf
    if isinstance(event, dp_accounting.LaplaceDpEvent):
        return None if event.noise_multiplier else math.inf
    if isinstance(event, dp_accounting.GaussianDpEvent):
        z = float(event.noise_multiplier)
        return z**-2 if z else math.inf
    if isinstance(event, dp_accounting.SelfComposedDpEvent):
        mu_squared = _mu_squared(event.event) if event.count else 0.0
        return None if mu_squared is None else event.count * mu_squared
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [_mu_squared(part) for part in event.events]
        return None if None in parts else math.fsum(cast(list[float], parts))
    return None


def normalise(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns an equal event made of plain Python numbers and tuples.

    With NumPy scalars and lists, equal events could compare as different, could not be
    hashed, and would not survive a JSON round trip.
    """
    if not isinstance(event, dp_accounting.DpEvent):
        raise TypeError(
            "event must be a dp_accounting.DpEvent, got "
            f"{event!r} of type {type(event).__name__}."
        )
    as_json = event_to_json(event)
    schema.check_event(as_json)
    return event_from_json(as_json)


def _event_class(name: Any) -> Any:
    kinds = (BestOfTrialsDpEvent, KnownSelectionDpEvent, RandomAllocationDpEvent)
    own_events = {kind.__name__: kind for kind in kinds}
    return own_events.get(name) or getattr(dp_accounting.dp_event, str(name), None)


def event_to_json(event: dp_accounting.DpEvent) -> Json:
    """Returns an event as JSON that represents it exactly.

    A Gaussian's noise multiplier that no accountant can handle is rounded down: below
    1e-4 to 0, and above 1e6 to 1e6.
    """
    kind = type(event)
    if _event_class(kind.__name__) is not kind:
        raise TypeError(
            "event must be one of dp_accounting's own events, of numbers and "
            f"lists, got {event!r}."
        )
    fields = {
        field.name: _files.to_plain(getattr(event, field.name), event_to_json)
        for field in attr.fields(kind)
    }
    if "NaN" in _files.to_canonical_json(fields):
        raise ValueError("event must not hold NaN.")
    if kind is dp_accounting.GaussianDpEvent:
        z = fields["noise_multiplier"]
        if 0 < z < gaussian.MIN_NOISE:
            fields["noise_multiplier"] = 0.0
        elif gaussian.MAX_NOISE < z < math.inf:
            fields["noise_multiplier"] = gaussian.MAX_NOISE
    return {"type": kind.__name__, **fields}


def event_from_json(value: Any) -> Any:
    """Inverse of `event_to_json`; only dp_accounting's own events are made."""
    if isinstance(value, list):
        return tuple(event_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = {key: event_from_json(field) for key, field in value.items()}
    name = fields.pop("type", None)
    kind = _event_class(name)
    if not (isinstance(kind, type) and issubclass(kind, dp_accounting.DpEvent)):
        raise ValueError(
            f"The event type {name!r} is unknown to dp-accounting "
            f"{dp_accounting_version()}."
        )
    return kind(**fields)


def dp_accounting_version() -> str:
    """Returns the version of the installed dp-accounting."""
    return importlib.metadata.version("dp-accounting")
