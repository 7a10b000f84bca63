"""Flower's older API: stand-ins for it, and the real one in one process."""

import copy
import importlib.util
import io
import logging
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.flower import flower_messages
from tfdp_fl.flower import DPFedAvgNumPyClient

NEEDS_FLOWER = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None,
    reason="flwr is not installed (tests only)",
)


def parameters(*arrays: Any) -> Any:
    """As `flwr.common.ndarrays_to_parameters`."""
    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array)
    tensors = [file.getvalue() for file in files]
    return SimpleNamespace(tensors=tensors, tensor_type="numpy.ndarray")


def arrays(message: Any) -> list[np.ndarray]:
    """As `flwr.common.parameters_to_ndarrays`."""
    return [np.load(io.BytesIO(tensor)) for tensor in message.tensors]


class Manager:
    """A client manager with these clients connected."""

    def __init__(self, clients: Iterable[Any]):
        self.clients = list(clients)

    def all(self) -> dict[str, Any]:
        return {str(i): client for i, client in enumerate(self.clients)}


class Strategy:
    """Asks everybody, takes the one result for the model; remembers it."""

    def __init__(self, config: dict | None = None):
        self.config = config or {}
        self.handed: list[list[Any]] = []

    def configure_fit(self, server_round, parameters, client_manager):
        ins = SimpleNamespace(parameters=parameters, config={**self.config})
        return [(client, ins) for client in client_manager.all().values()]

    def aggregate_fit(self, server_round, results, failures):
        self.handed.append(results)
        ((_, result),) = results
        return result.parameters, {}

    def evaluate(self, server_round, parameters):
        return 0.5, {"round": server_round}


class Trainer:
    """A client that adds the same update to whatever it is sent."""

    def __init__(self, update: Sequence[Any], num_examples: int = 7):
        self.update, self.num_examples = update, num_examples

    def fit(self, parameters, config):
        pairs = zip(parameters, self.update, strict=True)
        new = [np.asarray(p + u, p.dtype) for p, u in pairs]
        return new, self.num_examples, {"loss": 1.0}


def fit(instructions: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Lets every client that was asked train, through the client wrapper."""
    results = []
    for client, ins in instructions:
        wrapped = DPFedAvgNumPyClient(client)
        new, number, metrics = wrapped.fit(arrays(ins.parameters), ins.config)
        done = {"parameters": parameters(*new), "num_examples": number}
        results.append((client, SimpleNamespace(**done, metrics=metrics)))
    return results


def a_round(
    wrapper: Any, model: Any, updates: Sequence[Any], server_round: int = 1
) -> list[np.ndarray]:
    """Runs one round of clients with these updates; returns the new model."""
    manager = Manager(Trainer(update) for update in updates)
    told = wrapper.configure_fit(server_round, parameters(*model), manager)
    return arrays(wrapper.aggregate_fit(server_round, fit(told), [])[0])


def client(update: Sequence[Any], num_examples: int = 1, wrapped: bool = True) -> Any:
    """A Flower client that adds the same update to whatever it is sent."""
    import flwr

    class Client(Trainer, flwr.client.NumPyClient):
        pass

    inner = Client(update, num_examples)
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


def _old_words() -> SimpleNamespace:
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

    return SimpleNamespace(
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


def _new_words() -> SimpleNamespace:
    """What flwr 1.42 calls it."""
    from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.compat.common import recorddict_compat as compat

    return SimpleNamespace(
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
    flow(SimpleNamespace(**grid), context)
    done = words.records(context.state)["parameters"]
    return arrays(words.to_parameters(done, keep_input=True))
