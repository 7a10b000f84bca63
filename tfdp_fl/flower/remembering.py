"""Rounds whose noise goes by earlier rounds: memory, and who took part when."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp_fl import correlated_noise, mechanisms
from tfdp_fl._on_use import tf
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting import ledger_contents
from tfdp_fl.flower import rounds
from tfdp_fl.mechanisms import noise

# The name of a client that is a node.
ClientOf = Callable[[int], str | int]


def remembers(mechanism: mechanisms.Mechanism) -> bool:
    """Whether the noise of a round goes by that of earlier ones."""
    return isinstance(mechanism, mechanisms.CorrelatedNoise)


class Remembered:
    """What a server keeps from round to round, beside the model. Secret.

    Attributes:
      mechanism: whose noise it is.
      record: who took part when, by the names that `client_of` gives.
      memory: of the noise; None before the first round.
    """

    def __init__(
        self,
        mechanism: mechanisms.CorrelatedNoise,
        client_of: ClientOf | None = None,
    ):
        self.mechanism = mechanism
        self.client_of = client_of
        self.record = mechanism.participation_record()
        self.memory: Any = None

    def client(self, node: int) -> str | int:
        """Returns the name of the client that a node is."""
        return int(node) if self.client_of is None else self.client_of(node)

    def eligible(self, nodes: Sequence[int]) -> list[int]:
        """Returns the nodes of clients who may take part now, one of each."""
        by_client: dict[Any, int] = {}
        for node in nodes:
            by_client.setdefault(self.client(node), node)
        return [by_client[name] for name in self.record.eligible(by_client)]

    def check(self, nodes: Sequence[int]) -> None:
        """Raises ValueError if not all of these may take part now."""
        self.record.check([self.client(node) for node in nodes])

    def memory_for(self, sent: Sequence[np.ndarray]) -> Any:
        """Returns the memory for a model, at first one of zeros.

        Raises:
          ValueError: the model is none of the rounds before.
        """
        shapes = tuple(tuple(np.shape(array)) for array in sent)
        if self.memory is None:
            self.memory = self.mechanism.first_memory(
                mechanisms.Deployment(clients_per_round=1, shapes=shapes)
            )
        known = tuple(tuple(each.shape[1:]) for each in self.memory.buffers)
        if shapes != known:
            raise ValueError(
                "The wrapped strategy must send a model of the same shapes in "
                f"every round, {known}, because the noise is correlated over "
                f"the rounds, got {shapes}."
            )
        return self.memory

    def released(self, memory: Any, nodes: Sequence[int]) -> None:
        """Takes over the memory after a round, and who was in its sum."""
        self.record.add([self.client(node) for node in nodes])
        self.memory = memory

    def begin_segment(self) -> None:
        """Forgets the noise: later noise is not correlated with it."""
        self.memory = None
        self.record.begin_segment()

    def state(self) -> dict[str, Any]:
        """Returns what a restarted server has to know, as JSON values."""
        memory = None
        if self.memory is not None:
            memory = {
                "position": int(self.memory.position),
                "buffers": [
                    {
                        "shape": list(buffer.shape),
                        "float32": base64.b64encode(
                            buffer.numpy().astype("<f4").tobytes()
                        ).decode("ascii"),
                    }
                    for buffer in self.memory.buffers
                ],
            }
        return {
            "record": self.record.state(),
            "memory": memory,
            "made_for": self.mechanism.memory_key(),
            "named_by_the_server": self.client_of is not None,
        }

    def restore(self, state: dict[str, Any], goes_on: bool) -> None:
        """Takes over a state.

        Args:
          state: what `state` returned.
          goes_on: whether it is known that nothing was released since. If not,
            a new segment begins: going on with these buffers would cost more
            than each round's charge says.

        Raises:
          ValueError: nodes had names, and `client_of` is missing, or the other
            way round.
        """
        named = self.client_of is not None
        if state["named_by_the_server"] != named:
            raise ValueError(
                "client_of must be given if and only if the run whose state "
                f"this is had one, got {self.client_of!r}."
            )
        if state["made_for"] != self.mechanism.memory_key():
            # Other noise, in a segment of its own; the promise may be another.
            return
        self.record = correlated_noise.ParticipationRecord.from_state(state["record"])
        memory = state["memory"]
        if not goes_on or memory is None:
            self.begin_segment()
            return
        buffers = [
            np.frombuffer(base64.b64decode(each["float32"]), "<f4").reshape(
                each["shape"]
            )
            for each in memory["buffers"]
        ]
        self.memory = correlated_noise.Memory(
            tf.constant(memory["position"], tf.int32),
            [tf.constant(buffer, tf.float32) for buffer in buffers],
        )


def remembered_for(
    mechanism: mechanisms.Mechanism, client_of: ClientOf | None
) -> Remembered | None:
    """Returns what is kept for a mechanism; None if it needs nothing.

    Raises:
      ValueError: `client_of` is given, and nobody needs it.
    """
    if isinstance(mechanism, mechanisms.CorrelatedNoise):
        return Remembered(mechanism, client_of)
    if client_of is not None:
        raise ValueError(
            "client_of must be left out, as who takes part when is of no "
            f"account with {mechanism.name}, got {client_of!r}."
        )
    return None


def noised(
    mechanism: mechanisms.Mechanism,
    total: Sequence[np.ndarray],
    stddev: float,
    memory: Any,
) -> tuple[list[np.ndarray], Any]:
    """Returns a sum with the mechanism's noise, and the memory after it.

    Every call takes its randomness anew from the operating system.

    Args:
      mechanism: what is released.
      total: float64 arrays.
      stddev: of the fresh noise.
      memory: before this round.
    """
    zeros = [tf.zeros(np.shape(array)) for array in total]
    with noise.seeded(tf.constant(noise.fresh_seed())):
        made, memory = mechanism.add_noise(
            zeros, tf.constant(stddev, tf.float32), memory
        )
    added = [
        array + each.numpy().astype(np.float64)
        for array, each in zip(total, made, strict=True)
    ]
    return added, memory


class SeparatedHistory(rounds.RoundHistory):
    """Rounds of clients who come as they like, checked for how far apart.

    A round is charged by itself, without amplification: neighbours differ by a
    client that counts as zero in its place.
    """

    def epsilon(
        self,
        num_clients: int | None,
        delta: float,
        sampling: str,
        accountant: str,
    ) -> float:
        """Returns epsilon at delta; who is drawn has no part in it."""
        del num_clients, sampling
        return self._spent.epsilon(delta, accountant)

    def _charge_of(self, released: rounds.ReleasedRound) -> Any:
        return dataclasses.replace(released.charge(), sampling=charge_lib.SEPARATED)

    def _charge_of_entry(
        self,
        entry: ledger_contents.LedgerEntry,
        ledger: ledger_lib.PrivacyLedger,
    ) -> Any:
        if entry.charge is None or entry.charge.sampling != (charge_lib.SEPARATED):
            raise ValueError(
                "ledger must hold rounds of correlated noise in Flower only, "
                f"got {ledger.path} with one of {entry.charge!r}: its "
                "neighbouring relation is another, and no one epsilon covers "
                "both."
            )
        return entry.charge

    def _ledger_line(self, released: rounds.ReleasedRound) -> dict[str, Any]:
        return {"charge": self._charge_of(released)}
