"""What one round costs: the mechanism's event under the sampling done."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import math
from typing import Any, cast

import attr
import dp_accounting

from tfdp_fl import _storage, _validate, schedules
from tfdp_fl.accounting import gaussian, schema
from tfdp_fl.accounting.private_selection import BestOfTrialsDpEvent

SAMPLINGS = ("poisson", "fixed_size", "shuffled", "cyclic")
# How clients came where nobody drew them: as they liked, so many rounds apart.
SEPARATED = "separated"
# Those that make a round cheaper than its event.
_AMPLIFIED = ("poisson", "fixed_size")
ACCOUNTANTS = ("rdp", "pld")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCharge:
    """One round's privacy cost, as data.

    Two equal rounds make two equal charges, so a history is compressed to
    (charge, count) pairs. JSON holds a charge exactly.

    Attributes:
      sampling: How the cohort was really drawn: "poisson" (each client with
        probability q = m/N), "fixed_size" (m of N without replacement),
        "shuffled" (each client once per pass; no amplification claimed),
        "cyclic" (fixed groups in turn, m of a group without replacement; no
        amplification claimed); or "separated": clients came as they liked, and
        nothing is claimed for it.
      num_clients: N, the number of clients in the population.
      clients_per_round: m, the expected number of clients in this round.
      event: What the mechanism releases about the cohort, without sampling.
        `GaussianDpEvent(z)` for noise of z times the clip norm on the sum,
        several Gaussians composed, `NonPrivateDpEvent` for no privacy. Under
        "fixed_size" only these; elsewhere whatever the accountant supports.
      pass_index: For "shuffled": the pass over the clients that the round
        belongs to. None: unknown, and any client may be in the round.
      pass_offset: For "shuffled": where in the pass's order the cohort begins,
        so that it holds the positions from `pass_offset` up to `pass_offset +
        clients_per_round`; given together with `pass_index`.
      partition: For "shuffled": names the order that the passes follow. Rounds
        of two orders never count as one pass.
    """

    sampling: str
    num_clients: int
    clients_per_round: float
    event: dp_accounting.DpEvent
    pass_index: int | None = None
    pass_offset: int | None = None
    partition: str | None = None

    def __post_init__(self):
        _validate.one_of((*SAMPLINGS, SEPARATED), sampling=self.sampling)
        n = _validate.positive_integer(num_clients=self.num_clients)
        m = _validate.positive(clients_per_round=self.clients_per_round)
        if self.sampling != "poisson":
            m = checked_size(m, n)
        place = {"pass_index": self.pass_index, "pass_offset": self.pass_offset}
        place = {name: each for name, each in place.items() if each is not None}
        is_placed = bool(place) or self.partition is not None
        if len(place) == 1 or (is_placed and self.sampling != "shuffled"):
            raise ValueError(
                "pass_index and pass_offset must be given together, and they and "
                f"partition for shuffled sampling alone, got {place!r} and "
                f"partition={self.partition!r} for {self.sampling} sampling."
            )
        for name, value in place.items():
            value = _validate.non_negative_integer(**{name: value})
            object.__setattr__(self, name, value)
        object.__setattr__(self, "num_clients", n)
        object.__setattr__(self, "clients_per_round", m)
        object.__setattr__(self, "event", normalised(self.event))
        z = self.noise_multiplier
        if z is not None and z < 0:
            raise ValueError(
                f"event must have a noise multiplier of at least 0, got {self.event!r}."
            )
        if z is None and self.sampling == "fixed_size":
            raise ValueError(
                "event must be a GaussianDpEvent or a composition of them "
                f"under fixed_size sampling, got {self.event!r}."
            )

    @property
    def relation(self) -> dp_accounting.NeighboringRelation:
        """When two data sets are neighbours: the guarantee's first half."""
        return relation_of(self.sampling)

    @property
    def sampling_probability(self) -> float:
        """The ratio m/N, at most 1; 1 where no amplification is claimed."""
        if self.sampling not in _AMPLIFIED:
            return 1.0
        return min(1.0, self.clients_per_round / self.num_clients)

    @functools.cached_property
    def noise_multiplier(self) -> float | None:
        """Z of the one Gaussian the event amounts to; None if it is none.

        0.0 stands for no privacy and infinity for nothing released.
        """
        return noise_multiplier_of(self.event)

    @property
    def sensitivity(self) -> float:
        """How far one client moves the clipped sum, in clip norms."""
        return 2.0 if self.sampling == "fixed_size" else 1.0

    @property
    def is_amplified(self) -> bool:
        """Whether sampling makes the round cheaper than its event."""
        return self.sampling_probability < 1

    def dp_event(self, accountant: str = "rdp") -> dp_accounting.DpEvent:
        """Returns the event that dp_accounting charges for this round.

        Poisson sampling: `PoissonSampledDpEvent(q, Gaussian(z))` under
        add-or-remove-one. Fixed size: a replaced client moves the clipped sum
        by 2S, so RDP gets `SampledWithoutReplacementDpEvent(N, m,
        Gaussian(z/2))` (Wang, Balle & Kasiviswanathan 2019, theorem 27,
        https://arxiv.org/abs/1808.00087), and PLD gets
        `TruncatedSubsampledGaussianDpEvent(N, 1.0, m, z)`, which doubles the
        sensitivity itself; both under replace-one. Shuffled: the bare event,
        of which a client meets one per pass (see `PrivacyAccountant`). Cyclic:
        the bare event, also for a client who cannot be in the round.

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
        if self.sampling == "fixed_size":
            z = cast(float, z)  # Anything else was refused when it was made.
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
        return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, event)

    @functools.cached_property
    def _json(self) -> str:
        fields = {
            field.name: _storage.plain(getattr(self, field.name), event_to_json)
            for field in dataclasses.fields(self)
        }
        return _storage.canonical(
            {name: value for name, value in fields.items() if value is not None}
        )

    def to_json(self) -> str:
        """Returns the charge as one line of JSON, exact to the last bit."""
        return self._json

    @classmethod
    def from_json(cls, text: str | dict[str, Any]) -> RoundCharge:
        """Returns the charge that `to_json` wrote (text, or already parsed).

        Raises:
          TypeError, ValueError: It is not what `to_json` writes.
        """
        fields = dict(json.loads(text) if isinstance(text, str) else text)
        schema.check_event(fields.get("event"))
        return cls(**{**fields, "event": event_from_json(fields.get("event"))})

    def __hash__(self) -> int:
        return hash(self._json)


def relation_of(sampling: str) -> dp_accounting.NeighboringRelation:
    """Returns when two data sets are neighbours under a sampling."""
    if sampling == "fixed_size":
        return dp_accounting.NeighboringRelation.REPLACE_ONE
    return dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def checked_size(value: float, num_clients: int, fractional: bool = False) -> float:
    """Returns a cohort size, checked against the number of clients.

    Args:
      value: The size.
      num_clients: N.
      fractional: Whether an expected size need not be whole (Poisson).
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


class PassCohorts:
    """Cuts passes over N clients into cohorts of scheduled sizes.

    A cohort never straddles two passes: the last of a pass takes what is left.
    So every client is in exactly one cohort of each full pass.
    """

    def __init__(self, num_clients: int, clients_per_round: schedules.Schedule):
        self._num_clients = _validate.positive_integer(num_clients=num_clients)
        self._schedule = clients_per_round
        self._cohorts: list[tuple[int, int, int]] = []

    def place(self, round_index: int) -> dict[str, int]:
        """Returns what a `RoundCharge` says of a round's place in its pass."""
        index, start, stop = self.cohort(round_index)
        return {
            "clients_per_round": stop - start,
            "pass_index": index,
            "pass_offset": start,
        }

    def cohort(self, round_index: int) -> tuple[int, int, int]:
        """Returns (pass, first position, one past the last) of a round."""
        n = self._num_clients
        while len(self._cohorts) <= round_index:
            index, _, start = self._cohorts[-1] if self._cohorts else (0, 0, 0)
            if start == n:
                index, start = index + 1, 0
            size = checked_size(
                schedules.value_at(
                    self._schedule, len(self._cohorts), "clients_per_round"
                ),
                n,
            )
            self._cohorts.append((index, start, min(n, start + int(size))))
        return self._cohorts[round_index]


def noise_multiplier_of(event: dp_accounting.DpEvent) -> float | None:
    """Returns the noise multiplier of the one Gaussian an event amounts to.

    Gaussian releases about the same data, however nested, are one Gaussian
    with noise multiplier (sum z_i^-2)^(-1/2) (McMahan et al. 2018, "A general
    approach to adding differential privacy to iterative training procedures",
    section 3, https://arxiv.org/abs/1812.06210).

    Args:
      event: The mechanism's event, without sampling.

    Returns:
      z; 0.0 where there is no noise, infinity for `NoOpDpEvent`, and None for
      an event that is no composition of Gaussians.
    """
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return float(event.noise_multiplier)
    mu_squared = _mu_squared(event)
    return None if mu_squared is None else gaussian.noise_of_mu_squared(mu_squared)


def _mu_squared(event: dp_accounting.DpEvent) -> float | None:
    """Returns sum z_i^-2 over the Gaussians of an event, None for others."""
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
        one = _mu_squared(event.event) if event.count else 0.0
        return None if one is None else event.count * one
    if isinstance(event, dp_accounting.ComposedDpEvent):
        parts = [_mu_squared(part) for part in event.events]
        return None if None in parts else math.fsum(cast(list[float], parts))
    return None


def normalised(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Returns an equal event of plain Python numbers and tuples.

    NumPy scalars and lists would make two equal events differ, could not be
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
    if name == BestOfTrialsDpEvent.__name__:
        return BestOfTrialsDpEvent
    return getattr(dp_accounting.dp_event, str(name), None)


def event_to_json(event: dp_accounting.DpEvent) -> dict[str, Any]:
    """Returns an event as JSON can hold it exactly.

    A Gaussian's noise multiplier that no accountant can compute with is taken
    for less than it is: below 1e-3 for none, and above 1e6 for that.
    """
    kind = type(event)
    if _event_class(kind.__name__) is not kind:
        raise TypeError(
            "event must be one of dp_accounting's own events, of numbers and "
            f"lists, got {event!r}."
        )
    fields = {
        field.name: _storage.plain(getattr(event, field.name), event_to_json)
        for field in attr.fields(kind)
    }
    if "NaN" in _storage.canonical(fields):
        raise ValueError("event must not hold NaN.")
    if kind is dp_accounting.GaussianDpEvent:
        z = fields["noise_multiplier"]
        if 0 < z < gaussian.LEAST_NOISE:
            fields["noise_multiplier"] = 0.0
        elif gaussian.MOST_NOISE < z < math.inf:
            fields["noise_multiplier"] = gaussian.MOST_NOISE
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
            f"The event type {name!r} is not known to dp-accounting "
            f"{dp_accounting_version()}."
        )
    return kind(**fields)


def dp_accounting_version() -> str:
    """Returns the version of the installed dp-accounting."""
    return importlib.metadata.version("dp-accounting")
