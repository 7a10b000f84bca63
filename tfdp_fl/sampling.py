"""Samplers, which draw the clients of each round, and the cost of their sampling.

Without a seed, cohorts come from the operating system's entropy and cannot be
predicted: Poisson and fixed-size cohorts from fresh entropy in every round, cohorts in
passes from a secret key that is drawn once. With a seed, a cohort depends only on the
seed and the number of the draw.

Cohorts are sorted by position, which reveals nothing about how they were drawn.

    cohort = sampler.draw()
    ...                                     # Train the clients in cohort.positions.
    charge = sampler.charge(cohort, event)  # The cost of what could have happened.
    sampler.release(cohort)                 # Then publish; or abandon(cohort).

A cohort must be settled before the next one is drawn. So no cohort is discarded if its
sampling does not allow that, and no group takes part again too soon.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import secrets
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar, cast

import dp_accounting
import numpy as np

from tfdp_fl import _validate, schedules
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.terms import Json, Sampling

# Separates the cohorts' random numbers from other uses of the same seed.
_STREAM = 0x636F686F7274  # "cohort"
# Separate, as the `SeedSequence`s of [seed, x] and [seed, x, 0] (round 0) are equal.
_GROUP_STREAM = 0x67726F757073  # "groups"


def make_sampler(
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    seed: int | None = None,
    num_groups: int | None = None,
    *,
    may_abandon: bool = False,
) -> CohortSampler:
    """Returns the sampler with this name.

    Args:
      sampling: "poisson", "fixed_size", "random_allocation", "shuffled" or
        "cyclic".
      num_clients: The number of clients, N.
      clients_per_round: m, at most N: a number (an integer, except for Poisson and
        random allocation, where it is the expected size), a sequence with one number
        per round, or a callable of the 0-based round.
      seed: None for secret, fresh entropy. With a seed, for experiments only, a process
        that starts again may draw the same cohorts; the charges do not cover that.
      num_groups: For "cyclic": the number of groups that take turns, which is the
        min separation of a client's rounds; None: the largest number of groups with m
        clients each.
      may_abandon: Whether rounds are abandoned if one of their clients fails. With
        "fixed_size", every round is then charged differently (see
        `Participation.known_selection`); other samplings are not affected.
    """
    by_name: Json = {
        "poisson": PoissonSampler,
        "fixed_size": FixedSizeSampler,
        "random_allocation": RandomAllocationSampler,
        "shuffled": ShuffledSampler,
        "cyclic": CyclicSampler,
    }
    _validate.one_of(by_name, sampling=sampling)
    options: Json = {}
    if sampling == Sampling.CYCLIC:
        options["num_groups"] = num_groups
    if sampling == Sampling.FIXED_SIZE:
        options["may_abandon"] = may_abandon
    return by_name[sampling](num_clients, clients_per_round, seed=seed, **options)


def expected_sizes(
    sampling: str, num_clients: int, clients_per_round: schedules.Schedule
) -> schedules.Schedule:
    """Returns the expected size of each cohort, by which a sum is divided.

    It is m. Under random allocation, whose t = floor(N/m) rounds share all clients, it
    is N/t.
    """
    if sampling != Sampling.RANDOM_ALLOCATION:
        return clients_per_round

    def size(m: float) -> float:
        m = charge_lib.check_size(m, num_clients, fractional=True)
        return num_clients / charge_lib.rounds_per_pass(num_clients, m)

    schedule = schedules.fix(clients_per_round)
    if callable(schedule):
        return lambda t: size(schedules.value_at(schedule, t, "clients_per_round"))
    return (
        size(schedule)
        if schedules.is_constant(schedule)
        else tuple(size(m) for m in cast(Sequence[float], schedule))
    )


def seed_sequence(
    seed: int, stream: int, attempt: tuple[int, ...]
) -> np.random.SeedSequence:
    """Returns the seed sequence of one draw of random numbers.

    NumPy concatenates all numbers as 32-bit words. The seed's own upper words come
    last, so that they cannot be confused with a stream or an attempt.

    Args:
      seed: The user's seed, if any.
      stream: The purpose of the random numbers.
      attempt: The number of the draw, and further numbers that distinguish it.
    """
    upper = [seed >> 32] if seed >> 32 else []
    return np.random.SeedSequence([seed & 0xFFFFFFFF, stream, *attempt, *upper])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cohort:
    """The clients of one round, and who else could have been in it.

    Attributes:
      positions: Int64 [K], sorted: the clients' positions in the population. Secret.
      participation: The basis of the round's charge. Not secret.
      round_index: The round for which it was drawn, from 0.
      draw_id: A random id that is unique to the draw. Not secret.
      from_seed: Whether a sampler with the same seed draws the same clients for that
        round.
    """

    positions: np.ndarray
    participation: charge_lib.Participation
    round_index: int
    draw_id: str
    from_seed: bool = False


class CohortSampler(abc.ABC):
    """Draws the cohort of each round.

    Attributes:
      sampling: The sampling's name in the accounting.
      num_clients: The number of clients, N.
      seed: The seed; None if cohorts are secret.
      unsettled: The last drawn cohort, until it is settled.
      attempt: With a seed, the key of the next draw (`keras.run`). Each attempt at a
        round needs a new draw: the same clients with different noise would be a single
        draw, whereas two draws are charged. None: the round is the key.
    """

    sampling: str
    attempt: tuple[int, ...] | None = None
    _fractional_sizes = False
    # A state's values that must match the sampler, and those that are restored.
    _config_names: ClassVar[tuple[str, ...]] = (
        "sampling",
        "num_clients",
        "seed",
        "shuffle_fingerprint",
    )
    _state_names: ClassVar[tuple[str, ...]] = ()
    # If NumPy drew other orders from the same key, clients might be scheduled too soon.
    shuffle_fingerprint: ClassVar[list[int]] = (
        np.random.default_rng(0).permutation(10).tolist()
    )

    def __init__(
        self,
        num_clients: int,
        clients_per_round: schedules.Schedule,
        seed: int | None = None,
    ):
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        if seed is not None:
            seed = _validate.non_negative_integer(seed=seed)
        self.seed = seed
        self._next_round = 0
        self._first_round = 0  # The round with which the sampler begins.
        self.unsettled: Cohort | None = None
        self._has_drawn = False
        # The key of orders and groups that are drawn for more than one round.
        self._key = None if seed is not None else secrets.token_hex(32)
        self._order: tuple[tuple[int, ...], np.ndarray] | None = None
        # The name of that order or those groups. It is public and reveals nothing.
        self._partition = secrets.token_hex(8)
        self._clients_per_round = schedules.check_schedule(
            clients_per_round, self._check_size, "clients_per_round"
        )

    @property
    def next_round(self) -> int:
        """The round that is drawn next, or that is drawn but not settled.

        It determines the position in schedules and in a pass. It may be set between
        rounds.
        """
        return self._next_round

    @next_round.setter
    def next_round(self, round_index: int) -> None:
        round_index = _validate.non_negative_integer(next_round=round_index)
        repeats = round_index < self._next_round and self.seed is not None
        if self.unsettled is not None or (repeats and self.attempt is None):
            raise RuntimeError(
                f"next_round must stay {self._next_round} until its cohort is settled, "
                "and with a seed, which would draw the same clients again, must not go "
                f"back, got {round_index}."
            )
        self._next_round = round_index
        if not self._has_drawn:
            self._first_round = round_index

    def draw(self) -> Cohort:
        """Returns the cohort of the next round.

        Raises:
          RuntimeError: The previous cohort is not settled.
        """
        if self.unsettled is not None:
            raise RuntimeError(
                f"The cohort of round {self.next_round} was drawn and is not settled: "
                "call release(cohort) when its round is charged and about to be "
                "released, abandon(cohort) if nothing of it is, or run it again "
                "(sampler.unsettled)."
            )
        positions = self._draw(self.next_round)
        positions.setflags(write=False)
        self.unsettled = Cohort(
            positions=positions,
            participation=self.participation(self.next_round),
            round_index=self.next_round,
            draw_id=secrets.token_hex(8),
            from_seed=self.seed is not None,
        )
        self._has_drawn = True
        return self.unsettled

    def release(self, cohort: Cohort) -> None:
        """Records that a cohort's round has been charged and is about to be released.

        Raises:
          RuntimeError: It is not the last drawn cohort, or it is already settled.
        """
        self._settle(cohort)

    def abandon(self, cohort: Cohort) -> None:
        """Records that nothing of a cohort's round is released.

        It is charged all the same if `cohort.participation.is_charged_if_abandoned`.

        Raises:
          RuntimeError: It is not the last drawn cohort, or it is already settled, or
            its sampling cannot abandon a cohort.
        """
        self._settle(cohort)

    def _settle(self, cohort: Cohort) -> None:
        if cohort is not self.unsettled:
            raise RuntimeError(
                "cohort must be the one that this sampler drew last and that is not "
                "settled yet (sampler.unsettled): each is released or abandoned once."
            )
        self.unsettled = None
        self._next_round += 1

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the positions of a round's clients, for a loop over rounds.

        It draws one round after another. Asking for the next round means that the
        previous one was released; a loop that abandons rounds must call `draw` and
        `abandon` instead. A sampler's first call may ask for a later round, with which
        it then begins.

        Args:
          round_index: The round, from 0: the same as in the last call, or the next.

        Returns:
          Int64 [size], sorted.

        Raises:
          RuntimeError: It is not the next round.
        """
        if not self._has_drawn:
            self.next_round = round_index
        if self.unsettled is not None and round_index == self.next_round + 1:
            self.release(self.unsettled)
        if round_index != self.next_round:
            raise RuntimeError(
                f"round_index must be {self.next_round}, the round that is next, got "
                f"{round_index}: a sampler draws each round once, in order, because "
                "its charge relies on it. A new sampler may begin with any round, and "
                "restore(state()) continues where another one was."
            )
        return (self.unsettled or self.draw()).positions

    @abc.abstractmethod
    def _draw(self, round_index: int) -> np.ndarray:
        """Returns the sorted positions of the next round's clients, int64 [size]."""

    def expected_cohort_size(self, round_index: int) -> float:
        """Returns m_t, the expected number of clients of a round."""
        return self._pass_fields(round_index)["clients_per_round"]

    def participation(self, round_index: int) -> charge_lib.Participation:
        """Returns which clients can be in a round, whether drawn or planned."""
        return charge_lib.Participation(
            sampling=self.sampling,
            num_clients=self.num_clients,
            **self._pass_fields(round_index),
        )

    def charge(
        self, cohort: Cohort | int, event: dp_accounting.DpEvent
    ) -> charge_lib.RoundCharge:
        """Returns the cost of a round in which a mechanism releases `event`.

        Args:
          cohort: The cohort, or the number of a round, which may be a planned one.
          event: The event that is released about its clients, without sampling.
        """
        if not isinstance(cohort, Cohort):
            return self.participation(cohort).cost(event)
        return cohort.participation.cost(event)

    def costs(
        self, rounds: range, event: dp_accounting.DpEvent
    ) -> list[tuple[charge_lib.RoundCharge, int]]:
        """Returns planned rounds' distinct costs with counts, for one m and event."""
        return [(self.charge(t, event), len(rounds)) for t in rounds[:1]]

    def _pass_fields(self, round_index: int) -> Json:
        """Returns a participation's fields for the round's size and pass."""
        return {"clients_per_round": self._nominal_size(round_index)}

    def max_participations(self, rounds: int, first_round: int = 0) -> int:
        """Returns how often one client can be drawn in consecutive rounds."""
        del first_round  # Any client may be in every cohort.
        return rounds

    def begins_pass(self, round_index: int) -> bool:
        """Returns whether no pass over the clients is in progress."""
        del round_index  # Most cohorts do not come in passes.
        return True

    def state(self) -> Json:
        """Returns what a checkpoint must store, as JSON values.

        Without a seed, the state of shuffled and cyclic samplers holds their secret
        key: whoever reads it can compute the cohorts. A cohort that has been drawn is
        not stored: two processes that resume from one state would both release it,
        and each would charge it as a draw of its own.
        """
        config = {name: getattr(self, name) for name in self._config_names}
        values = {name: getattr(self, f"_{name}") for name in self._state_names}
        return {**config, **values, "next_round": self.next_round}

    def restore(self, state: Json) -> None:
        """Continues from `state`; a cohort that was not settled is drawn anew.

        Raises:
          ValueError: If the state has another sampling, population or seed.
        """
        for name in self._config_names:
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"state was saved with {name}={state.get(name)!r}, this "
                    f"sampler has {name}={getattr(self, name)!r}."
                )
        for name in self._state_names:
            setattr(self, f"_{name}", state[name])
        self._order, self._has_drawn = None, True
        self._next_round, self.unsettled = state["next_round"], None

    def _check_size(self, clients_per_round: Any) -> float:
        return charge_lib.check_size(
            clients_per_round, self.num_clients, self._fractional_sizes
        )

    def _nominal_size(self, round_index: int) -> float:
        return self._check_size(
            schedules.value_at(
                self._clients_per_round, round_index, "clients_per_round"
            )
        )

    def _generator(self, round_index: int) -> np.random.Generator:
        if self.seed is None:
            return np.random.default_rng(secrets.randbits(256))
        attempt = (round_index,) if self.attempt is None else self.attempt
        return np.random.default_rng(seed_sequence(self.seed, _STREAM, attempt))

    def _permutation(self, *stream: int) -> np.ndarray:
        """Returns an order of the clients that follows from the seed or the key."""
        if self._order is None or self._order[0] != stream:  # Takes 1 s for millions.
            first = cast(int, self.seed) if self._key is None else int(self._key, 16)
            rng = np.random.default_rng(np.random.SeedSequence([first, *stream]))
            self._order = (stream, rng.permutation(self.num_clients))
        return self._order[1]

    def _without_replacement(
        self, rng: np.random.Generator, size: int, among: np.ndarray | None = None
    ) -> np.ndarray:
        # Floyd's algorithm in NumPy: time and memory O(size), not O(N).
        clients = self.num_clients if among is None else among
        drawn = rng.choice(clients, size=size, replace=False, shuffle=False)
        return np.sort(drawn.astype(np.int64))


class PoissonSampler(CohortSampler):
    """Each client takes part with probability q = m/N, independently.

    The cohort's size is Binomial(N, q), and all cohorts of the same size are equally
    likely, so it can be drawn in O(m). An empty cohort is possible.
    """

    sampling = Sampling.POISSON
    _fractional_sizes = True

    def _draw(self, round_index: int) -> np.ndarray:
        """See base class."""
        q = self._nominal_size(round_index) / self.num_clients
        rng = self._generator(round_index)
        size = int(rng.binomial(self.num_clients, q))
        return self._without_replacement(rng, size)


class FixedSizeSampler(CohortSampler):
    """Draws exactly m of the N clients; all such cohorts are equally likely.

    If cohorts are abandoned because a client in them failed, this reveals who was in
    the others: if f clients fail, the released cohorts were drawn from N - f clients.
    So a sampler whose cohorts may be abandoned must say so from the start; its rounds
    are charged as if everybody knew who was drawn.

    Attributes:
      may_abandon: Whether cohorts may be abandoned.
    """

    sampling = Sampling.FIXED_SIZE
    _config_names = (*CohortSampler._config_names, "may_abandon")

    def __init__(
        self,
        num_clients: int,
        clients_per_round: schedules.Schedule,
        seed: int | None = None,
        *,
        may_abandon: bool = False,
    ):
        super().__init__(num_clients, clients_per_round, seed)
        self.may_abandon = _validate.instance_of(bool, may_abandon=may_abandon)

    def abandon(self, cohort: Cohort) -> None:
        """See base class."""
        if cohort.participation.is_amplified and not self.may_abandon:
            raise RuntimeError(
                "A fixed-size cohort cannot be abandoned, as that would reveal who "
                "is in the others: release the round without the clients that failed, "
                "run it again, or make the sampler with may_abandon=True, which makes "
                "every round cost more."
            )
        super().abandon(cohort)

    def _draw(self, round_index: int) -> np.ndarray:
        """See base class."""
        size = int(self._nominal_size(round_index))
        return self._without_replacement(self._generator(round_index), size)

    def _pass_fields(self, round_index: int) -> Json:
        return {
            **super()._pass_fields(round_index),
            "known_selection": self.may_abandon,
        }


class PassSampler(CohortSampler):
    """Draws cohorts in passes; a key sets the one round of each client in a pass."""

    _state_names: ClassVar[tuple[str, ...]] = ("key", "partition")

    def _draw(self, round_index: int) -> np.ndarray:
        """See base class."""
        return self.plan_cohort(round_index)

    @abc.abstractmethod
    def plan_cohort(self, round_index: int) -> np.ndarray:
        """Returns the clients in a round, int64 [size], as determined by the key."""

    def split(self, rounds: range) -> tuple[range, int, range]:
        """Splits rounds into the end of a pass, a number of whole passes, and the rest.

        This is for a constant m; with a schedule, all rounds are in the first part.
        """
        if not rounds or not schedules.is_constant(self._clients_per_round):
            return rounds, 0, rounds[:0]
        pass_start, t = self._pass_of(rounds.start)
        head = rounds[: (pass_start - rounds.start) % t]
        num_passes, remaining = divmod(len(rounds) - len(head), t)
        return head, num_passes, rounds[len(rounds) - remaining :]

    @abc.abstractmethod
    def _pass_of(self, round_index: int) -> tuple[int, int]:
        """Returns the first round of a pass and its number of rounds, for one m."""

    @abc.abstractmethod
    def _partial_pass(self, rounds: range) -> list[charge_lib.Participation]:
        """Returns the participations in some rounds of one pass, for one m."""

    def costs(
        self, rounds: range, event: dp_accounting.DpEvent
    ) -> list[tuple[charge_lib.RoundCharge, int]]:
        """See base class; a new pass costs as much as its first round."""
        head, num_passes, tail = self.split(rounds)
        participations = [*self._partial_pass(head), *map(self.participation, tail[:1])]
        costs = [(participation.cost(event), 1) for participation in participations]
        if num_passes:
            whole_pass = dataclasses.replace(
                self.participation(rounds[len(head)]),
                pass_index=None,
                pass_offset=None,
                partition=None,
            )
            costs.append((whole_pass.cost(event), num_passes))
        return costs

    def max_participations(self, rounds: int, first_round: int = 0) -> int:
        """Returns the number of passes that the rounds overlap."""
        head, num_passes, tail = self.split(range(first_round, first_round + rounds))
        passes = {self._pass_fields(t)["pass_index"] for t in head}
        return len(passes) + num_passes + bool(tail)


class RandomAllocationSampler(PassSampler):
    """Puts each client in one of a pass's t rounds, independently and in secret.

    With t = floor(N/m), N/t clients are expected in each round; a cohort's size is
    binomial and may be 0. A client's round depends only on the secret key, the pass and
    the client's position, so adding or removing clients at the end does not change the
    others' rounds. The first pass begins with the sampler's first round. If the sampler
    is replaced or restored during a pass, the remaining rounds' clients are drawn anew,
    as those of another pass.
    """

    sampling = Sampling.RANDOM_ALLOCATION
    _fractional_sizes = True
    # Without the key: the round after the state may have been drawn, and one of its
    # clients may be why the process ended. It would be known to be in the same cohort.
    _state_names = ("first_round",)
    # The pass's first round; with a seed, also the attempt's entropy.
    _salt: Sequence[int] = ()
    _passes: charge_lib.AllocationPasses | None = None

    def restore(self, state: Json) -> None:
        """See base class; the rest of a pass is allocated anew."""
        super().restore(state)
        self._key = None if self.seed is not None else secrets.token_hex(32)
        self._partition, self._salt = secrets.token_hex(8), ()

    def _draw(self, round_index: int) -> np.ndarray:
        """See base class."""
        pass_start = self._pass_fields(round_index)["pass_index"]
        self._salt = self._salt_of(pass_start)
        return self.plan_cohort(round_index)

    def plan_cohort(self, round_index: int) -> np.ndarray:
        """See base class."""
        fields = self._pass_fields(round_index)
        t = round(self.num_clients / fields["clients_per_round"])
        stream = (t, *self._salt_of(fields["pass_index"]))
        if self._order is None or self._order[0] != stream:
            secret = self._key if self.seed is None else f"seed {self.seed}"
            text = f"{secret} {_STREAM} {stream}"
            # Each position has its own 64 bits, whatever the number of positions. The
            # probabilities of two rounds differ by a relative 2^-64 t at most.
            words = hashlib.shake_256(text.encode()).digest(8 * self.num_clients)
            self._order = stream, np.frombuffer(words, "<u8") % t
        return np.flatnonzero(self._order[1] == fields["pass_offset"])

    def _salt_of(self, pass_start: int) -> tuple[int, ...]:
        """Returns the pass and, with a seed, the entropy of the attempt that began it.

        After a resume, later attempts in the pass may have other entropy.
        """
        if self._salt and self._salt[0] == pass_start:
            return tuple(self._salt)
        entropy = () if self.seed is None or not self.attempt else self.attempt[1:]
        return (pass_start, *entropy)

    def _pass_fields(self, round_index: int) -> Json:
        if self._passes is None or self._passes.first_round != self._first_round:
            self._passes = charge_lib.AllocationPasses(
                self.num_clients, self._clients_per_round, self._first_round
            )
        fields = self._passes.pass_fields(round_index)
        partition, (_, *entropy) = self._partition, self._salt_of(fields["pass_index"])
        if entropy:  # Allocated anew, it is another pass.
            suffix = hashlib.sha256(f"{entropy}".encode()).hexdigest()[:8]
            partition = f"{partition} {suffix}"
        return {"partition": partition, **fields}

    def _pass_of(self, round_index: int) -> tuple[int, int]:
        participation = self.participation(round_index)
        return cast(int, participation.pass_index), participation.rounds_per_pass

    def _partial_pass(self, rounds: range) -> list[charge_lib.Participation]:
        # No round of a later pass was charged yet, so the pass costs as much as one.
        is_current = rounds.start <= self.next_round + 1
        return [*map(self.participation, rounds if is_current else rounds[:1])]

    def begins_pass(self, round_index: int) -> bool:
        """See base class."""
        return self._pass_fields(round_index)["pass_offset"] == 0


class NamedAllocation:
    """Random allocation of clients that are identified by name, such as Flower nodes.

    A client with a new name draws its round like the others, without changing theirs.
    Each object has its own secret, so its first round begins a new pass.

    Args:
      num_clients: The number of clients, N.
      clients_per_round: m; a pass has t = floor(N/m) rounds.
    """

    def __init__(self, num_clients: int, clients_per_round: float):
        self._passes = charge_lib.AllocationPasses(num_clients, clients_per_round)
        self._key, self._partition = secrets.token_bytes(32), secrets.token_hex(8)
        self._next_round = 0

    def draw(self, names: Iterable[Hashable]) -> tuple[list[Hashable], Json]:
        """Returns the clients of the next round, and its fields for a charge."""
        fields = self._passes.pass_fields(self._next_round)
        self._next_round += 1
        t = round(self._passes.num_clients / fields["clients_per_round"])

        def round_of(name: Hashable) -> int:
            text = f"{fields['pass_index']} {name!r}".encode()
            word = hashlib.blake2b(text, digest_size=8, key=self._key).digest()
            return int.from_bytes(word, "little") % t

        drawn = [name for name in names if round_of(name) == fields["pass_offset"]]
        return drawn, {**fields, "partition": self._partition}


class ShuffledSampler(PassSampler):
    """Draws every client exactly once per pass, in a new order for each pass.

    A cohort never straddles two passes: if m does not divide N, the last cohort of a
    pass has the remaining clients. `expected_cohort_size` returns its size. No
    amplification by sampling is claimed.
    """

    sampling = Sampling.SHUFFLED

    def __init__(
        self,
        num_clients: int,
        clients_per_round: schedules.Schedule,
        seed: int | None = None,
    ):
        super().__init__(num_clients, clients_per_round, seed)
        self._cohorts = charge_lib.PassCohorts(num_clients, self._clients_per_round)

    def plan_cohort(self, round_index: int) -> np.ndarray:
        """See base class."""
        index, start, stop = self._cohorts.cohort(round_index)
        order = self._permutation(_STREAM, index)
        return np.sort(order[start:stop].astype(np.int64))

    def _pass_fields(self, round_index: int) -> Json:
        return {"partition": self._partition, **self._cohorts.pass_fields(round_index)}

    def _pass_of(self, round_index: int) -> tuple[int, int]:
        t = -(-self.num_clients // int(self._nominal_size(0)))
        return round_index // t * t, t

    def _partial_pass(self, rounds: range) -> list[charge_lib.Participation]:
        if not rounds:
            return []
        # Adjacent in the pass's order, they amount to one longer cohort.
        first, last = map(self._cohorts.cohort, (rounds[0], rounds[-1]))
        participation = self.participation(rounds[0])
        return [
            dataclasses.replace(participation, clients_per_round=last[2] - first[1])
        ]

    def begins_pass(self, round_index: int) -> bool:
        """See base class."""
        return self._cohorts.cohort(round_index)[1] == 0


class CyclicSampler(CohortSampler):
    """Fixed groups of clients that take turns, with m clients of a group per cohort.

    Clients are divided at random into b groups of (almost) equal size, once and for
    all. The cohort comes from group r mod b, where r is the number of rounds released
    before. So two rounds of one client have at least b - 1 released rounds between
    them, however many were abandoned, as correlated noise requires
    (`CorrelatedNoise`). No amplification is claimed for which clients of a group are
    drawn, or for the secrecy of the groups.

    Choquette-Choo et al. (2023), "(Amplified) Banded Matrix Factorization",
    algorithm 2 (https://arxiv.org/abs/2306.08153).

    Attributes:
      num_groups: b, which is also the min separation of a client's rounds.
    """

    sampling = Sampling.CYCLIC
    _config_names = (*CohortSampler._config_names, "num_groups")
    _state_names = ("key", "partition", "released")

    def __init__(
        self,
        num_clients: int,
        clients_per_round: float,
        num_groups: int | None = None,
        seed: int | None = None,
    ):
        """Divides the clients.

        Args:
          num_clients: The number of clients, N.
          clients_per_round: m, a number, at most floor(N / b).
          num_groups: b; None: floor(N / m).
          seed: The seed; None for secret, fresh entropy.

        Raises:
          ValueError: A group has fewer clients than a cohort.
        """
        super().__init__(num_clients, clients_per_round, seed)
        if not schedules.is_constant(self._clients_per_round):
            raise ValueError(
                "clients_per_round must be one number under "
                f"{self.sampling} sampling, got {clients_per_round!r}."
            )
        size = self._nominal_size(0)
        if num_groups is None:
            num_groups = max(1, int(self.num_clients // size))
        self.num_groups = _validate.positive_integer(num_groups=num_groups)
        group_size = self.num_clients // self.num_groups
        if size > group_size:
            raise ValueError(
                "clients_per_round must be at most the "
                f"{group_size} clients of a group, of which there are "
                f"{self.num_groups} (one for every round of the min "
                f"separation) over num_clients={self.num_clients}, got "
                f"{size:g}."
            )
        self._released = 0

    def _group(self) -> np.ndarray:
        """Returns the clients allowed in the next cohort: int64, in secret order."""
        order = self._permutation(_GROUP_STREAM)
        return order[self._released % self.num_groups :: self.num_groups]

    def _draw(self, round_index: int) -> np.ndarray:
        """See base class."""
        size, rng = int(self._nominal_size(0)), self._generator(round_index)
        return self._without_replacement(rng, size, self._group())

    def release(self, cohort: Cohort) -> None:
        """See base class; then it is the next group's turn."""
        super().release(cohort)
        self._released += 1

    def _pass_fields(self, round_index: int) -> Json:
        turn = self._released + round_index - self.next_round
        return {
            **super()._pass_fields(round_index),
            "partition": self._partition,
            "group": turn % self.num_groups,
        }

    def max_participations(self, rounds: int, first_round: int = 0) -> int:
        """Returns the largest number of turns of one group."""
        del first_round
        return -(-rounds // self.num_groups)
