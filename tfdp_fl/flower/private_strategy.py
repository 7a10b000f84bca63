"""The server's side for Flower's message API."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdp_fl.flower import client as client_lib
from tfdp_fl.flower import private_rounds, sums
from tfdp_fl.flower import replies as replies_lib
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Result

_logger = logging.getLogger(__name__)


class PrivateStrategy(private_rounds.PrivateRounds):
    """A mechanism around any strategy of `flwr.serverapp` that averages.

    For any object with `configure_train(server_round, arrays, config, grid)`
    and `aggregate_train(server_round, replies)` in Flower's shape; its clients
    have `private_mod` among their mods. All other methods are the wrapped
    strategy's, `start` among them:

        strategy = PrivateStrategy(
            FedAvg(min_available_nodes=1000),
            tfdp_fl.AdaptiveClipping(noise_multiplier=1.0),
            num_clients=1000, clients_per_round=50,
            target_epsilon=8.0, target_delta=1e-5, ledger="ledger.jsonl")
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=99)

    Each round some of the connected nodes are drawn (see `sampling`), by the
    operating system's random numbers, whichever and however many nodes the
    wrapped strategy would have asked. What they send is read as if it were
    hostile, clipped, added up, noised and divided by m, however many replied; the
    wrapped strategy is handed that model as one reply, and nothing else: no
    metrics, no errors. Whatever it makes of it costs nothing more.

    The clients clip, and the server once more what it noises itself, for
    `FixedClipping` and `AdaptiveClipping`. The server needs numpy and
    dp-accounting then, and no TensorFlow. All other central mechanisms
    (`MedianClipping`, your own) clip at the server, by the mechanism's own
    TensorFlow functions. `LocalDP` needs no server of ours: a plain strategy
    tells the clients' `private_mod` clip and noise.

    With `CorrelatedNoise` clients come as they like: only nodes are drawn for
    whom it is not too soon, or too often, to take part again. Which nodes were in each
    released round is kept, by the node's id or by the name that `client_of`
    gives. The memory of this process may not be seen by anybody: with the models
    it tells the sums without noise. A server that restarts begins other noise,
    charged anew.

    The guarantee is about the model. It does not cover what clients report beside
    it: metrics of an evaluation, that they failed, the initial arrays if the server
    asks a client for them.

    Source: McMahan et al. (2018), Algorithm 1, and each mechanism's own.
    """

    _configure, _aggregate = "configure_train", "aggregate_train"
    _metrics_function = "train_metrics_aggr_fn"
    _sent: Sequence[Message] = ()
    _made: Message = None

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args, **kwargs) -> Result:
        """Runs the wrapped strategy's rounds; arguments and result are its own.

        Once the budget is spent no more clients are asked to train, and the
        model stays as it is.
        """
        try:
            return type(self.strategy).start(
                self, grid, initial_arrays, *args, **kwargs
            )
        finally:
            self._settle()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Draws the round's nodes, and tells them what to clip to (and to noise).

        Returns:
          Messages with the content of those that the wrapped strategy made. None
          if it made none, if the round would overspend the budget, or if T rounds
          were charged.

        Raises:
          ValueError: if fewer than N nodes are connected before the first round
            (in a later one the round is abandoned), or the strategy sends them
            different messages, or a model that is not of real numbers.
        """
        self._sent = []
        made = self._ask_strategy(server_round, arrays, config, grid)
        if not made:
            return []
        self._made = made[0]
        content = private_rounds.require_identical(
            [message.content for message in made]
        )
        key, record = client_lib.only_record(content, "The wrapped strategy")
        configured = self._begin(
            server_round,
            {node: node for node in grid.get_node_ids()},
            [np.array(array.numpy()) for array in record.values()],
            (key, record),
            tuple(record),
        )
        if configured is None:
            return []
        told = configured.instruction.config | {client_lib.WEIGHT_KEY: self._weight_key}
        content, metadata = _with_config(content, told), made[0].metadata
        self._sent = [
            type(made[0])(
                content,
                node,
                metadata.message_type,
                ttl=metadata.ttl,
                group_id=metadata.group_id,
            )
            for node in configured.asked
        ]
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hands the noised mean, as the only reply, to the strategy.

        Whatever a client replied, it is no error here: such a client counts as
        failed, or where clients share the noise its update as zero.

        Returns:
          What the wrapped strategy makes of it; `(None, None)` if there is
          nothing to release.

        Raises:
          RoundNotConfiguredError: if the round's `configure_train` was not
            called, or its replies were here before. Nothing is released then.
          LedgerWriteError: if the round could not be written down. Nothing is
            released then.
        """
        sent = {m.metadata.dst_node_id: m.metadata.message_id for m in self._sent}

        def read(message: Message, asked: sums.ConfiguredRound) -> replies_lib.Reply:
            names = tuple(asked.template[1])
            return replies_lib.read_message(
                message, asked.shapes, asked.instruction, names, sent
            )

        results: list[tuple[int, Message]] = []
        for message in replies:
            node = message.metadata.src_node_id
            if message.has_error():
                _logger.warning("Round %s, node %s failed.", server_round, node)
            else:
                results.append((node, message))
        released = self._release(server_round, results, read)
        if released is None:
            return None, None
        configured, model = released
        key, record = configured.template
        named = dict(zip(record, model, strict=True))
        metrics = client_lib.flower("MetricRecord")({self._weight_key: 1})
        handed = copy.copy(self._made)
        handed.content = type(handed.content)(
            {
                key: client_lib.array_record(record, named),
                "metrics" if key != "metrics" else "weight": metrics,
            }
        )
        return self.strategy.aggregate_train(server_round, [handed])

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The wrapped strategy's; replies that it refuses end no run."""
        try:
            return self.strategy.aggregate_evaluate(server_round, replies)
        except Exception:
            _logger.warning("Round %s has no evaluation.", server_round, exc_info=True)
            return None

    @property
    def _weight_key(self) -> str:
        return str(
            getattr(self.strategy, "weighted_by_key", client_lib.DEFAULT_WEIGHT_KEY)
        )


def _with_config(content: RecordDict, told: Json) -> RecordDict:
    """Returns a copy that tells a client more, in its (first) ConfigRecord."""
    configs = dict(content.config_records)
    key = next(iter(configs), "config")
    kind = type(configs[key]) if configs else client_lib.flower("ConfigRecord")
    return type(content)({**content, key: kind({**configs.get(key, {}), **told})})
