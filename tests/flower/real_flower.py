"""The real Flower in one process: its strategies, clients and workflows."""

from __future__ import annotations

import copy
import importlib.util
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdp_fl.flower import DPFedAvgNumPyClient

INSTALLED = importlib.util.find_spec("flwr") is not None
WHY_NOT = "flwr is not installed (tests only)"


def client(
    update: Sequence[Any], num_examples: int = 1, wrapped: bool = True
) -> Any:
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
    return (
        DPFedAvgNumPyClient(inner).to_client() if wrapped else inner.to_client()
    )


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

    flwr.common.logger.logger.setLevel("ERROR")
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


def secagg_round(
    wrapper: Any,
    clients: Sequence[Any],
    model: Any,
    gone: Sequence[int] = (),
    **arguments: Any,
) -> list[np.ndarray]:
    """Runs one round under Flower's SecAgg+ workflow; returns the new model.

    Args:
      wrapper: the server's strategy.
      clients: Flower clients, all of whom are sampled.
      model: Flower's parameters.
      gone: clients that fall silent when it is their turn to train.
      **arguments: of `SecAggPlusWorkflow`.
    """
    import flwr
    from flwr.client.mod import secaggplus_mod
    from flwr.common import Context, Message, Metadata, RecordSet
    from flwr.common import recordset_compat as compat
    from flwr.common.message import Error
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server.workflow import SecAggPlusWorkflow

    flwr.common.logger.logger.setLevel("CRITICAL")

    def app(one):
        def client_fn(context: Context):
            return one

        return flwr.client.ClientApp(client_fn=client_fn, mods=[secaggplus_mod])

    apps = [app(one) for one in clients]
    contexts = [Context(i, {}, RecordSet(), {}) for i in range(len(clients))]

    def create_message(content, message_type, dst_node_id, group_id, ttl=None):
        return Message(
            Metadata(1, "", 0, dst_node_id, "", group_id, 3600.0, message_type),
            copy.deepcopy(content),  # As if it went over a wire.
        )

    def send_and_receive(messages, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            trains = "fitins.parameters" in message.content.parameters_records
            if node in gone and trains:
                replies.append(message.create_error_reply(Error(0, "gone")))
            else:
                message.metadata._message_id = "1"
                replies.append(apps[node](message, contexts[node]))
        return replies

    driver = types.SimpleNamespace(
        create_message=create_message, send_and_receive=send_and_receive
    )
    context = LegacyContext(
        Context(0, {}, RecordSet(), {}),
        config=ServerConfig(num_rounds=1),
        strategy=wrapper,
        client_manager=manager(clients),
    )
    context.state.configs_records["config"] = flwr.common.ConfigsRecord(
        {"current_round": 1}
    )
    context.state.parameters_records["parameters"] = (
        compat.parameters_to_parametersrecord(model, keep_input=True)
    )
    SecAggPlusWorkflow(
        num_shares=1.0, reconstruction_threshold=0.5, **arguments
    )(driver, context)
    return arrays(
        compat.parametersrecord_to_parameters(
            context.state.parameters_records["parameters"], keep_input=True
        )
    )
