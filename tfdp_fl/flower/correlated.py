"""Correlated noise: its memory, and which clients took part in which round."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl import correlated_noise, mechanisms
from tfdp_fl._on_use import tf

# The name of a client that is a node.
ClientOf = Callable[[int], str | int]


class Remembered:
    """What a server keeps from round to round, beside the model. Secret.

    Attributes:
      mechanism: the noise is its.
      client_of: names a node's client; None where every node is a client.
      record: which clients took part when, by these names.
      memory: of the noise; None before a segment's first round.
      segment: the random name of the noise since `memory` was last empty. In a
        ledger no two rounds have the same place in one segment: two servers
        that go on from one state would else use one memory twice.
    """

    def __init__(self, mechanism: mechanisms.CorrelatedNoise, client_of: Any = None):
        self.mechanism = mechanism
        self.client_of: ClientOf | None = client_of
        self._name: ClientOf = client_of or int
        self.record = mechanism.participation_record()
        self.memory: Any = None
        self.segment = secrets.token_hex(8)

    def eligible(self, nodes: Iterable[Any]) -> tuple[list[Hashable], int]:
        """Returns a node of each client that may take part, and how many there are."""
        by_client: dict[Any, Hashable] = {}
        for node in nodes:
            by_client.setdefault(self._name(node), node)
        may = [by_client[name] for name in self.record.eligible(by_client)]
        return may, len(by_client)

    @property
    def position(self) -> int:
        """The coming round's place in the segment."""
        return 0 if self.memory is None else int(self.memory.position)

    def memory_for(self, sent: Sequence[np.ndarray]) -> Any:
        """Returns the memory for a model, at first one of zeros.

        Raises:
          ValueError: the model is none of the rounds before.
        """
        shapes = tuple(array.shape for array in sent)
        if self.memory is None:
            self.memory = self.mechanism.first_memory(
                mechanisms.Deployment(clients_per_round=1, shapes=shapes)
            )
        known = tuple(tuple(b.shape[1:]) for b in self.memory.buffers)
        if shapes != known:
            raise ValueError(
                "The wrapped strategy must send a model of the same shapes in "
                f"every round, {known}, because the noise is correlated over "
                f"the rounds, got {shapes}."
            )
        return self.memory

    def released(self, memory: Any, nodes: Iterable[Any]) -> None:
        """Takes over the memory after a round, and which nodes were in its sum."""
        self.record.add([self._name(node) for node in nodes])
        self.memory = memory

    def begin_segment(self) -> None:
        """Forgets the noise: later noise is not correlated with it."""
        self.memory = None
        self.segment = secrets.token_hex(8)
        self.record.begin_segment()

    def state(self) -> dict[str, Any]:
        """Returns what a restarted server has to know, as JSON values."""
        return {
            "record": self.record.state(),
            "position": self.position,
            "buffers": self.memory
            and [
                {
                    "shape": list(buffer.shape),
                    "float32": base64.b64encode(
                        buffer.numpy().astype("<f4").tobytes()
                    ).decode(),
                }
                for buffer in self.memory.buffers
            ],
            "segment": self.segment,
            "made_for": self.mechanism.memory_key(),
            "named_by_the_server": self.client_of is not None,
        }

    def restore(self, state: Mapping[str, Any], has_ledger: bool) -> None:
        """Takes over a state.

        Args:
          state: what `state` returned.
          has_ledger: whether there is a ledger, which tells if the coming
            round's place is taken. If not, a new segment begins: going on with
            these buffers may cost more than each round's charge says.

        Raises:
          ValueError: nodes had names, and `client_of` is missing, or the other
            way round.
        """
        if state["named_by_the_server"] != (self.client_of is not None):
            raise ValueError(
                "client_of must be given if and only if the run that the "
                f"state was taken of had one, got {self.client_of!r}."
            )
        if state["made_for"] != self.mechanism.memory_key():
            # Other noise, in a segment of its own; the promise may be another.
            return
        self.record = correlated_noise.ParticipationRecord.from_state(state["record"])
        if not has_ledger or state["buffers"] is None:
            self.begin_segment()
            return
        self.segment = state["segment"]
        buffers = [
            np.frombuffer(base64.b64decode(saved["float32"]), "<f4")
            for saved in state["buffers"]
        ]
        self.memory = correlated_noise.Memory(
            tf.constant(state["position"], tf.int32),
            [
                tf.constant(buffer.reshape(saved["shape"]), tf.float32)
                for buffer, saved in zip(buffers, state["buffers"], strict=True)
            ],
        )
