"""The real Flower in one process: its strategies, clients and workflows."""

from __future__ import annotations

import copy
import importlib.util
import logging
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.flower import flower_messages
from tfdp_fl.flower import DPFedAvgNumPyClient

NEEDS_FLOWER = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="flwr is not installed (tests only)",
)


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


def manager(clients: Sequence[Any]) -> Any:
    """Flower's client manager, with these clients connected."""
    import flwr

    class Proxy(flwr.server.client_proxy.ClientProxy):
        def __init__(self, cid, client):
            super().__init__(cid)
            self.node_id, self.client = int(cid), client

        def fit(self, ins, timeout, group_id):
            return self.client.fit(ins)

        evaluate = get_properties = get_parameters = reconnect = None

    made = flwr.server.SimpleClientManager()
    for i, one in enumerate(clients):
        made.register(Proxy(str(i), one))
    return made


def strategy(name: str = "FedAvg", sampled: int = 2, **arguments: Any) -> Any:
    """One of Flower's strategies, which samples so many clients."""
    import flwr

    logging.getLogger("flwr").setLevel("ERROR")
    arguments |= {"min_fit_clients": sampled, "min_available_clients": sampled}
    made = getattr(flwr.server.strategy, name)
    return made(fraction_fit=0.0, fraction_evaluate=0.0, **arguments)


def parameters(*arrays: Any) -> Any:
    """Flower's message of a model."""
    import flwr

    return flwr.common.ndarrays_to_parameters([np.asarray(a) for a in arrays])


def arrays(message: Any) -> list[np.ndarray]:
    """The model in a message."""
    import flwr

    return flwr.common.parameters_to_ndarrays(message)


def round_of(wrapper: Any, clients: Sequence[Any], model: np.ndarray) -> np.ndarray:
    """Runs one round; returns the new model."""
    told = wrapper.configure_fit(1, parameters(model), manager(clients))
    results = [(proxy, proxy.fit(ins, timeout=None, group_id=1)) for proxy, ins in told]
    new, _ = wrapper.aggregate_fit(1, results, [])
    (array,) = arrays(new)
    return array


def _old_words() -> types.SimpleNamespace:
    """What flwr 1.12 calls what SecAgg+ needs."""
    from flwr import common
    from flwr.client import ClientApp
    from flwr.common import recordset_compat as compat
    from flwr.common.message import Error

    def create(content, message_type, dst_node_id, group_id, ttl=None):
        return common.Message(
            common.Metadata(1, "", 0, dst_node_id, "", group_id, 3600.0, message_type),
            copy.deepcopy(content),  # As if it went over a wire.
        )

    def put(state, config, parameters):
        state.configs_records["config"] = common.ConfigsRecord(config)
        state.parameters_records["parameters"] = parameters

    return types.SimpleNamespace(
        app=ClientApp,
        context=lambda i: common.Context(i, {}, common.RecordSet(), {}),
        to_record=compat.parameters_to_parametersrecord,
        to_parameters=compat.parametersrecord_to_parameters,
        create=create,
        error=lambda m: m.create_error_reply(Error(0, "gone")),
        set_id=lambda m: setattr(m.metadata, "_message_id", "1"),
        records=lambda content: content.parameters_records,
        put=put,
    )


def _new_words() -> types.SimpleNamespace:
    """What flwr 1.42 calls it."""
    from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.compat.common import recorddict_compat as compat

    return types.SimpleNamespace(
        app=ClientApp,
        context=lambda i: Context(1, i, {}, RecordDict(), {}),
        to_record=compat.parameters_to_arrayrecord,
        to_parameters=compat.arrayrecord_to_parameters,
        create=None,
        error=lambda m: Message(Error(0, "gone"), reply_to=m),
        set_id=lambda m: m.metadata.__dict__.update(_message_id="1"),
        records=lambda content: content.array_records,
        put=lambda state, config, parameters: state.update(
            config=ConfigRecord(config), parameters=parameters
        ),
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

    Clients that are `gone` fall silent when it is their turn to train; `mods` stand
    between `secaggplus_mod` and the clients, and `before` around it.
    """
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Context
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server.workflow import SecAggPlusWorkflow

    logging.getLogger("flwr").setLevel("CRITICAL")
    words = _new_words() if flower_messages.INSTALLED else _old_words()

    def app(one):
        def client_fn(context: Context):
            return one

        return words.app(client_fn=client_fn, mods=[*before, secaggplus_mod, *mods])

    apps = [app(one) for one in clients]
    contexts = [words.context(i) for i in range(len(clients))]

    def send_and_receive(messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            words.set_id(message)
            arrived = copy.deepcopy(message)  # As if it went over a wire.
            trains = "fitins.parameters" in words.records(arrived.content)
            if node in gone and trains:
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
    record = words.to_record(model, keep_input=True)
    words.put(context.state, {"current_round": 1}, record)
    grid = {"create_message": words.create, "send_and_receive": send_and_receive}
    flow = SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.5, **arguments)
    flow(types.SimpleNamespace(**grid), context)
    done = words.records(context.state)["parameters"]
    return arrays(words.to_parameters(done, keep_input=True))
