"""Who takes part in a round, and what that sampling costs.

Without a seed, cohorts come from the operating system's entropy and cannot be
predicted: Poisson and fixed-size cohorts from fresh entropy in every round,
shuffled ones from a secret key drawn once. With a seed, a cohort depends on the
seed and the number of the draw alone.

Cohorts are sorted by position, which says nothing about how they were drawn.
"""

from __future__ import annotations

import abc
import secrets
from typing import Any, ClassVar, cast

import dp_accounting
import numpy as np

from tfdp_fl import _json, _validate, schedules
from tfdp_fl.accounting import charge as charge_lib

# Keeps the cohorts' random numbers apart from other uses of the same seed.
_STREAM = 0x636F686F7274  # "cohort"
# Of its own: a `SeedSequence` of [seed, x] is that of [seed, x, 0], round 0's.
_GROUP_STREAM = 0x67726F757073  # "groups"
_ENTROPY_BYTES = 32


def make_sampler(
    sampling: str,
    num_clients: int,
    clients_per_round: schedules.Schedule,
    seed: int | None = None,
    num_groups: int | None = None,
) -> CohortSampler:
    """Returns the sampler of that name.

    Args:
      sampling: "poisson", "fixed_size", "shuffled" or "cyclic".
      num_clients: N.
      clients_per_round: m, at most N: a number (whole, except for Poisson,
        where it is the expected size), a sequence with one per round, or a
        callable of the 0-based round.
      seed: None for secret, fresh entropy.
      num_groups: For "cyclic": how many groups take turns, which is
        the min separation of a client's rounds; None: as many as there are
        with m clients in each.
    """
    kinds = (PoissonSampler, FixedSizeSampler, ShuffledSampler, CyclicSampler)
    by_name: dict[str, Any] = {kind.sampling: kind for kind in kinds}
    _validate.one_of(by_name, sampling=sampling)
    options = {"num_groups": num_groups} if sampling == "cyclic" else {}
    return by_name[sampling](num_clients, clients_per_round, seed=seed, **options)


def seed_sequence(
    seed: int, stream: int, attempt: tuple[int, ...]
) -> np.random.SeedSequence:
    """Returns what one draw of random numbers follows from.

    NumPy strings all numbers together in words of 32 bits. The seed's own upper
    words come last, so that they cannot pass for a stream or an attempt.

    Args:
      seed: The user's.
      stream: What the numbers are for.
      attempt: The number of the draw, and what else sets it apart.
    """
    upper = [seed >> 32] if seed >> 32 else []
    return np.random.SeedSequence([seed & 0xFFFFFFFF, stream, *attempt, *upper])


class CohortSampler(abc.ABC):
    """Draws the cohort of each round.

    Attributes:
      sampling: The name that the accounting knows the sampling by.
      attempt: With a seed, the key of the coming draw (`keras.run`):
        the same clients with other noise would be one draw seen twice, and two
        draws are what is charged. None: the round is the key.
    """

    sampling: str
    attempt: tuple[int, ...] | None = None
    _fractional_sizes = False
    # What a state has besides, and what of it another sampler may not differ in.
    _kept: ClassVar[tuple[str, ...]] = ()
    _fixed: ClassVar[tuple[str, ...]] = ("num_clients", "seed")

    def __init__(
        self,
        num_clients: int,
        clients_per_round: schedules.Schedule,
        seed: int | None = None,
    ):
        self._num_clients = _validate.positive_integer(num_clients=num_clients)
        if seed is not None:
            seed = _validate.non_negative_integer(seed=seed)
        self._seed = seed
        self._order: tuple[tuple[int, ...], np.ndarray] | None = None
        self._clients_per_round = schedules.checked(
            schedules.fixed(clients_per_round), self._checked, "clients_per_round"
        )

    @property
    def num_clients(self) -> int:
        """N."""
        return self._num_clients

    @property
    def seed(self) -> int | None:
        """The seed; None where cohorts are secret."""
        return self._seed

    @abc.abstractmethod
    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the sorted positions of a round's clients, int64 [size].

        Without a seed, Poisson and fixed-size cohorts are drawn afresh by
        every call.

        Args:
          round_index: The round, from 0.
        """

    def expected_cohort_size(self, round_index: int) -> float:
        """Returns m_t, the expected number of clients of a round."""
        return self._place(round_index)["clients_per_round"]

    def charge(
        self, round_index: int, event: dp_accounting.DpEvent
    ) -> charge_lib.RoundCharge:
        """Returns what a round costs in which a mechanism releases `event`."""
        return charge_lib.RoundCharge(
            sampling=self.sampling,
            num_clients=self._num_clients,
            event=event,
            **self._place(round_index),
        )

    def _place(self, round_index: int) -> dict[str, Any]:
        """Returns what a charge says of the round's size, and where it is in a pass."""
        return {"clients_per_round": self._nominal_size(round_index)}

    def max_participations(self, rounds: int, first_round: int = 0) -> int:
        """Returns how often one client can be drawn in consecutive rounds."""
        del first_round  # Any client may be in every cohort.
        return _validate.non_negative_integer(rounds=rounds)

    def begins_pass(self, round_index: int) -> bool:
        """Returns whether no pass over the clients is in progress."""
        del round_index  # Only shuffled cohorts come in passes.
        return True

    def released(self, positions: np.ndarray) -> None:
        """Notes which clients took part in a round that is about to be released.

        Args:
          positions: Int64 [size], sorted.
        """
        del positions  # Only cyclic cohorts go by it.

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must keep, as JSON values.

        For shuffled cohorts without a seed this holds the secret key: a
        reader of the checkpoint can tell the cohorts.
        """
        own = {name: getattr(self, f"_{name}") for name in (*self._fixed, *self._kept)}
        return {"sampling": self.sampling, **_json.plain(own)}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was taken.

        Raises:
          ValueError: If the state is of another sampling, population or seed.
        """
        own = self.state()
        for name in ("sampling", *self._fixed):
            if state.get(name) != own[name]:
                raise ValueError(
                    f"state was saved with {name}={state.get(name)!r}, this "
                    f"sampler has {name}={own[name]!r}."
                )
        for name in self._kept:
            setattr(self, f"_{name}", state[name])
        self._order = None

    def _checked(self, clients_per_round: Any) -> float:
        return charge_lib.checked_size(
            clients_per_round, self._num_clients, self._fractional_sizes
        )

    def _nominal_size(self, round_index: int) -> float:
        return self._checked(
            schedules.value_at(
                self._clients_per_round, round_index, "clients_per_round"
            )
        )

    def _generator(self, round_index: int) -> np.random.Generator:
        if self._seed is None:
            entropy = np.frombuffer(secrets.token_bytes(_ENTROPY_BYTES), np.uint32)
            return np.random.default_rng(np.random.SeedSequence(entropy))
        attempt = (round_index,) if self.attempt is None else self.attempt
        return np.random.default_rng(seed_sequence(self._seed, _STREAM, attempt))

    def _permutation(self, key: str | None, *stream: int) -> np.ndarray:
        """Returns an order of the clients that follows from the seed, or a key."""
        if self._order is None or self._order[0] != stream:  # A second for millions.
            first = cast(int, self._seed) if key is None else int(key, 16)
            rng = np.random.default_rng(np.random.SeedSequence([first, *stream]))
            self._order = (stream, rng.permutation(self._num_clients))
        return self._order[1]

    def _without_replacement(self, rng: np.random.Generator, size: int) -> np.ndarray:
        # Floyd's algorithm in NumPy: time and memory O(size), not O(N).
        drawn = rng.choice(self._num_clients, size=size, replace=False, shuffle=False)
        return np.sort(drawn.astype(np.int64))


class PoissonSampler(CohortSampler):
    """Each client takes part with probability q = m/N, independently.

    The cohort's size is Binomial(N, q), and given its size every cohort is
    equally likely, so it is drawn in O(m). An empty cohort is possible.
    """

    sampling = "poisson"
    _fractional_sizes = True

    def cohort(self, round_index: int) -> np.ndarray:
        """See base class."""
        q = self._nominal_size(round_index) / self._num_clients
        rng = self._generator(round_index)
        size = int(rng.binomial(self._num_clients, q))
        return self._without_replacement(rng, size)


class FixedSizeSampler(CohortSampler):
    """Exactly m of the N clients, every such cohort equally likely."""

    sampling = "fixed_size"

    def cohort(self, round_index: int) -> np.ndarray:
        """See base class."""
        size = int(self._nominal_size(round_index))
        return self._without_replacement(self._generator(round_index), size)


class ShuffledSampler(CohortSampler):
    """Every client exactly once per pass, in an order drawn for each pass.

    A cohort never straddles two passes: where m does not divide N, the last
    cohort of a pass is what is left. `expected_cohort_size` tells its size.
    No amplification by sampling is claimed.
    """

    sampling = "shuffled"
    _kept = ("key", "partition")

    def __init__(
        self,
        num_clients: int,
        clients_per_round: schedules.Schedule,
        seed: int | None = None,
    ):
        super().__init__(num_clients, clients_per_round, seed)
        self._cohorts = charge_lib.PassCohorts(num_clients, self._clients_per_round)
        self._key = None if seed is not None else secrets.token_hex(32)
        # Public, and says nothing of the order: tells the ledger which rounds
        # follow the same one.
        self._partition = secrets.token_hex(8)

    def cohort(self, round_index: int) -> np.ndarray:
        """See base class."""
        index, start, stop = self._cohorts.cohort(round_index)
        order = self._permutation(self._key, _STREAM, index)
        return np.sort(order[start:stop].astype(np.int64))

    def _place(self, round_index: int) -> dict[str, Any]:
        return {"partition": self._partition, **self._cohorts.place(round_index)}

    def max_participations(self, rounds: int, first_round: int = 0) -> int:
        """Returns how many passes the rounds touch."""
        rounds = _validate.non_negative_integer(rounds=rounds)
        if not rounds:
            return 0
        first = self._cohorts.cohort(first_round)[0]
        return self._cohorts.cohort(first_round + rounds - 1)[0] - first + 1

    def begins_pass(self, round_index: int) -> bool:
        """See base class."""
        return self._cohorts.cohort(round_index)[1] == 0


class CyclicSampler(CohortSampler):
    """Fixed groups of clients in turn, m clients of a group in each cohort.

    Clients are divided at random into b groups as equal as can be, once and
    for all. The cohort comes from group r mod b, r the number of rounds that
    were released before, so that two rounds of one client have at least b - 1
    released rounds between them, however many were abandoned. That is what
    correlated noise counts on (`CorrelatedNoise`); nothing is claimed for which
    clients of a group are drawn, nor for the secrecy of the groups.

    Choquette-Choo et al. (2023), "(Amplified) Banded Matrix Factorization",
    algorithm 2 (https://arxiv.org/abs/2306.08153).
    """

    sampling = "cyclic"
    _fixed = ("num_clients", "seed", "num_groups")
    _kept = ("key", "released", "last")

    def __init__(
        self,
        num_clients: int,
        clients_per_round: float,
        num_groups: int | None = None,
        seed: int | None = None,
    ):
        """Divides the clients.

        Args:
          num_clients: N.
          clients_per_round: m, a number, at most floor(N / b).
          num_groups: b; None: floor(N / m).
          seed: None for secret, fresh entropy.

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
            num_groups = max(1, int(self._num_clients // size))
        self._num_groups = _validate.positive_integer(num_groups=num_groups)
        smallest = self._num_clients // self._num_groups
        if size > smallest:
            raise ValueError(
                "clients_per_round must be at most the "
                f"{smallest} clients of a group, of which there are "
                f"{self._num_groups} (one for every round of the min "
                f"separation) over num_clients={self._num_clients}, got "
                f"{size:g}."
            )
        self._key = None if seed is not None else secrets.token_hex(32)
        self._released = 0
        # In which released round each client was last, or -1.
        self._last = np.full(self._num_clients, -1, np.int64)

    @property
    def num_groups(self) -> int:
        """B, which is also the min separation of a client's rounds."""
        return self._num_groups

    def _group(self) -> np.ndarray:
        """Returns who may be in the coming cohort: int64, in secret order."""
        order = self._permutation(self._key, _GROUP_STREAM)
        return order[self._released % self._num_groups :: self._num_groups]

    def cohort(self, round_index: int) -> np.ndarray:
        """See base class.

        Raises:
          RuntimeError: One of the clients was in a round less than b ago.
        """
        size = int(self._nominal_size(0))
        members = self._generator(round_index).choice(
            self._group(), size=size, replace=False, shuffle=False
        )
        cohort = np.sort(members.astype(np.int64))
        last = self._last[cohort]
        early = last[last >= 0] > self._released - self._num_groups
        if early.any():
            raise RuntimeError(
                f"{early.sum()} client(s) of the cohort took part less than "
                f"{self._num_groups} released rounds ago, which correlated "
                "noise does not cover: the state of the sampler is damaged."
            )
        return cohort

    def released(self, positions: np.ndarray) -> None:
        """See base class; the next group has its turn then."""
        self._last[positions] = self._released
        self._released += 1

    def max_participations(self, rounds: int, first_round: int = 0) -> int:
        """Returns how often a group's turn can come."""
        del first_round
        rounds = _validate.non_negative_integer(rounds=rounds)
        return -(-rounds // self._num_groups)

    def restore(self, state: dict[str, Any]) -> None:
        """See base class."""
        super().restore(state)
        self._last = np.array(state["last"], np.int64)
