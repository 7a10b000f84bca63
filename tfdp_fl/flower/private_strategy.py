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
    """Applies a mechanism to any averaging strategy of `flwr.serverapp`.

    It wraps any object with Flower's methods `configure_train(server_round, arrays,
    config, grid)` and `aggregate_train(server_round, replies)`. Its clients must have
    `private_mod` among their mods. All other methods, including `start`, are those of
    the wrapped strategy:

        strategy = PrivateStrategy(
            FedAvg(min_available_nodes=1000),
            tfdp_fl.AdaptiveClipping(noise_multiplier=1.0),
            num_clients=1000, clients_per_round=50,
            target_epsilon=8.0, target_delta=1e-5, ledger="ledger.jsonl")
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=99)

    In each round, some of the connected nodes are drawn (see `sampling`) with the
    operating system's random numbers, regardless of the nodes that the wrapped strategy
    would have asked. Their replies are read as if they were hostile, clipped and added
    up. The server adds noise and divides by m, however many replied. The wrapped
    strategy gets the resulting model as its only reply, without metrics or errors. Its
    further processing costs no privacy.

    With `FixedClipping` and `AdaptiveClipping`, the clients clip, and the server clips
    again if it adds the noise. All other central mechanisms (`MedianClipping`, your
    own) clip at the server. The server releases with the mechanism's own TensorFlow
    functions; its clients need only numpy. `LocalDP` does not need this class: with a
    plain strategy, the server can send the clip and the noise to the clients'
    `private_mod`.

    With `CorrelatedNoise`, clients may come and go, and a node is drawn only if it has
    waited long enough and may take part again. The server keeps a record of the nodes
    in each released round, by the node's id or by the name that `client_of` returns.
    No one may see the memory of this process: together with the models, it reveals the
    sums without noise. A server that restarts begins new correlated noise, which is
    charged separately.

    The guarantee covers the model. It does not cover anything else from clients:
    metrics of an evaluation, the fact that they failed, or the initial arrays if the
    server asks a client for them.

    Source: McMahan et al. (2018), Algorithm 1, and each mechanism's own.
    """

    _configure_method, _aggregate_method = "configure_train", "aggregate_train"
    _metrics_attribute = "train_metrics_aggr_fn"
    _sent: Sequence[Message] = ()
    _template_message: Message = None

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args, **kwargs) -> Result:
        """Runs the rounds as the wrapped strategy's `start` does.

        Once the budget is spent, no more clients are asked to train, and the model no
        longer changes.
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
        """Draws the round's nodes; tells them the clip (and the noise to add).

        Returns:
          Messages with the content of the wrapped strategy's messages. The list is
          empty if the strategy made none, if the round would exceed the budget, or if
          T rounds were charged.

        Raises:
          ValueError: Fewer than N nodes are connected before the first round (a later
            round is abandoned instead), or the strategy sends them different messages,
            or a model that does not consist of real numbers.
        """
        self._sent = []
        messages = self._ask_strategy(server_round, arrays, config, grid)
        if not messages:
            return []
        self._template_message = messages[0]
        content = private_rounds.require_identical(
            [message.content for message in messages]
        )
        key, record = client_lib.only_record(content, "The wrapped strategy")
        configured = self._begin_round(
            server_round,
            {node: node for node in grid.get_node_ids()},
            [np.array(array.numpy()) for array in record.values()],
            (key, record),
            tuple(record),
        )
        if configured is None:
            return []
        instructions = configured.instruction.config | {
            client_lib.WEIGHT_KEY: self._weight_key
        }
        content, metadata = _with_config(content, instructions), messages[0].metadata
        self._sent = [
            type(messages[0])(
                content,
                node,
                metadata.message_type,
                ttl=metadata.ttl,
                group_id=metadata.group_id,
            )
            for node in configured.clients
        ]
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Passes the noisy mean, as the only reply, to the wrapped strategy.

        No reply raises an error here. A client with an invalid reply counts as failed;
        if clients add the noise, its update counts as zero instead.

        Returns:
          The result of the wrapped strategy; `(None, None)` if there is nothing to
          release.

        Raises:
          RoundNotConfiguredError: The round's `configure_train` was not called, or its
            replies have arrived before. Nothing is released then.
          LedgerWriteError: The round could not be recorded. Nothing is released then.
        """
        message_ids = {
            m.metadata.dst_node_id: m.metadata.message_id for m in self._sent
        }

        def read(
            message: Message, round_config: sums.ConfiguredRound
        ) -> replies_lib.Reply:
            names = tuple(round_config.template[1])
            return replies_lib.read_message(
                message,
                round_config.shapes,
                round_config.instruction,
                names,
                message_ids,
            )

        results: list[tuple[int, Message]] = []
        for message in replies:
            node = message.metadata.src_node_id
            if message.has_error():
                _logger.warning("Round %s, node %s failed.", server_round, node)
            else:
                results.append((node, message))
        released = self._finish_round(server_round, results, read)
        if released is None:
            return None, None
        configured, model = released
        key, record = configured.template
        arrays = dict(zip(record, model, strict=True))
        metrics = client_lib.flower_class("MetricRecord")({self._weight_key: 1})
        mean_message = copy.copy(self._template_message)
        mean_message.content = type(mean_message.content)(
            {
                key: client_lib.array_record(record, arrays),
                "metrics" if key != "metrics" else "weight": metrics,
            }
        )
        return self.strategy.aggregate_train(server_round, [mean_message])

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Calls the wrapped strategy's method; if that fails, the run continues."""
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


def _with_config(content: RecordDict, instructions: Json) -> RecordDict:
    """Returns a copy with further entries in its first ConfigRecord."""
    configs = dict(content.config_records)
    key = next(iter(configs), "config")
    kind = type(configs[key]) if configs else client_lib.flower_class("ConfigRecord")
    return type(content)(
        {**content, key: kind({**configs.get(key, {}), **instructions})}
    )
