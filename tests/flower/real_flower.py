"""The real Flower in one process: its strategies, clients and workflows."""

from __future__ import annotations

import copy
import importlib.util
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.flower import flower_messages
from tfdp_fl.flower import DPFedAvgNumPyClient

INSTALLED = importlib.util.find_spec("flwr") is not None
WHY_NOT = "flwr is not installed (tests only)"


def client(update: Sequence[Any], num_examples: int = 1, wrapped: bool = True) -> Any:
    """A Flower client that adds the same update to whatever it is sent."""
    import flwr

    class Client(flwr.client.NumPyClient):
        def fit(self, parameters, config):
            new = [
                np.asarray(p + u, p.dtype)
                for p, u in zip(parameters, update, strict=True)
            ]
            return new, num_examples, {}

    inner = Client()
    return DPFedAvgNumPyClient(inner).to_client() if wrapped else inner.to_client()


def _proxy_class() -> type:
    import flwr

    class Proxy(flwr.server.client_proxy.ClientProxy):
        def __init__(self, cid, client):
            super().__init__(cid)
            self.node_id = int(cid)
            self.client = client

        def fit(self, ins, timeout, group_id):
            return self.client.fit(ins)

        def evaluate(self, ins, timeout, group_id):
            return self.client.evaluate(ins)

        def get_properties(self, ins, timeout, group_id):
            raise NotImplementedError

        def get_parameters(self, ins, timeout, group_id):
            raise NotImplementedError

        def reconnect(self, ins, timeout, group_id):
            raise NotImplementedError

    return Proxy


def manager(clients: Sequence[Any]) -> Any:
    """Flower's client manager, with these clients connected."""
    import flwr

    made = flwr.server.SimpleClientManager()
    proxy = _proxy_class()
    for i, one in enumerate(clients):
        made.register(proxy(str(i), one))
    return made


def strategy(name: str = "FedAvg", sampled: int = 2, **arguments: Any) -> Any:
    """One of Flower's strategies, which samples so many clients."""
    import flwr

    logging.getLogger("flwr").setLevel("ERROR")
    return getattr(flwr.server.strategy, name)(
        fraction_fit=0.0,
        fraction_evaluate=0.0,
        min_fit_clients=sampled,
        min_available_clients=sampled,
        **arguments,
    )


def parameters(*arrays: Any) -> Any:
    """Flower's message of a model."""
    import flwr

    return flwr.common.ndarrays_to_parameters([np.asarray(a) for a in arrays])


def arrays(message: Any) -> list[np.ndarray]:
    """The model in a message."""
    import flwr

    return flwr.common.parameters_to_ndarrays(message)


def round_of(
    wrapper: Any,
    client_manager: Any,
    model: Any,
    server_round: int = 1,
    change: Callable[[list], None] | None = None,
) -> tuple[Any, dict]:
    """Runs one round; `change` may do something to the results on the way."""
    instructions = wrapper.configure_fit(
        server_round=server_round,
        parameters=model,
        client_manager=client_manager,
    )
    results = [
        (proxy, proxy.fit(ins, timeout=None, group_id=server_round))
        for proxy, ins in instructions
    ]
    if change is not None:
        change(results)
    return wrapper.aggregate_fit(server_round, results, [])


def _old_words() -> types.SimpleNamespace:
    """What flwr 1.12 calls what SecAgg+ needs."""
    from flwr.client import ClientApp
    from flwr.client.mod import secaggplus_mod
    from flwr.common import (
        ConfigsRecord,
        Context,
        Message,
        Metadata,
        RecordSet,
    )
    from flwr.common import recordset_compat as compat
    from flwr.common.message import Error

    def create(content, message_type, dst_node_id, group_id, ttl=None):
        return Message(
            Metadata(1, "", 0, dst_node_id, "", group_id, 3600.0, message_type),
            copy.deepcopy(content),  # As if it went over a wire.
        )

    return types.SimpleNamespace(
        app=ClientApp,
        mod=secaggplus_mod,
        context=lambda i: Context(i, {}, RecordSet(), {}),
        config=ConfigsRecord,
        to_record=compat.parameters_to_parametersrecord,
        to_parameters=compat.parametersrecord_to_parameters,
        create=create,
        error=lambda m: m.create_error_reply(Error(0, "gone")),
        set_id=lambda m: setattr(m.metadata, "_message_id", "1"),
    )


def _new_words() -> types.SimpleNamespace:
    """What flwr 1.42 calls it."""
    from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
    from flwr.client.mod import secaggplus_mod
    from flwr.clientapp import ClientApp
    from flwr.compat.common import recorddict_compat as compat

    return types.SimpleNamespace(
        app=ClientApp,
        mod=secaggplus_mod,
        context=lambda i: Context(1, i, {}, RecordDict(), {}),
        config=ConfigRecord,
        to_record=compat.parameters_to_arrayrecord,
        to_parameters=compat.arrayrecord_to_parameters,
        create=None,
        error=lambda m: Message(Error(0, "gone"), reply_to=m),
        set_id=lambda m: m.metadata.__dict__.update(_message_id="1"),
    )


def secagg_round(
    wrapper: Any,
    clients: Sequence[Any],
    model: Any,
    gone: Sequence[int] = (),
    mods: Sequence[Any] = (),
    before: Sequence[Any] = (),
    **arguments: Any,
) -> list[np.ndarray]:
    """Runs one round under Flower's SecAgg+ workflow; returns the new model.

    Args:
      wrapper: the server's strategy.
      clients: Flower clients, all of whom are sampled.
      model: Flower's parameters.
      gone: clients that fall silent when it is their turn to train.
      mods: of the clients, between `secaggplus_mod` and them.
      before: and around it.
      **arguments: of `SecAggPlusWorkflow`.
    """
    from flwr.common import Context
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server.workflow import SecAggPlusWorkflow

    logging.getLogger("flwr").setLevel("CRITICAL")
    words = _new_words() if flower_messages.INSTALLED else _old_words()

    def app(one):
        def client_fn(context: Context):
            return one

        return words.app(client_fn=client_fn, mods=[*before, words.mod, *mods])

    apps = [app(one) for one in clients]
    contexts = [words.context(i) for i in range(len(clients))]

    def send_and_receive(messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            words.set_id(message)
            arrived = copy.deepcopy(message)  # As if it went over a wire.
            if node in gone and "fitins.parameters" in _records(arrived):
                replies.append(words.error(message))
            else:
                replies.append(apps[node](arrived, contexts[node]))
        return replies

    context = LegacyContext(
        words.context(0),
        config=ServerConfig(num_rounds=1),
        strategy=wrapper,
        client_manager=manager(clients),
    )
    _put(context.state, "config", words.config({"current_round": 1}))
    _put(context.state, "parameters", words.to_record(model, keep_input=True))
    SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.5, **arguments)(
        types.SimpleNamespace(
            create_message=words.create, send_and_receive=send_and_receive
        ),
        context,
    )
    return arrays(
        words.to_parameters(_records(context.state)["parameters"], keep_input=True)
    )


def _records(content: Any) -> Any:
    """The array records of a message or a state."""
    content = getattr(content, "content", content)
    if flower_messages.INSTALLED:
        return content.array_records
    return content.parameters_records


def _put(state: Any, key: str, record: Any) -> None:
    if flower_messages.INSTALLED:
        state[key] = record
    elif key == "config":
        state.configs_records[key] = record
    else:
        state.parameters_records[key] = record
