"""Flower's older API without Flower: a strategy, a client manager, clients."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tfdp_fl.flower import DPFedAvgNumPyClient


def parameters(*arrays: Any) -> Any:
    """As `flwr.common.ndarrays_to_parameters`."""
    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array)
    return SimpleNamespace(tensors=[file.getvalue() for file in files])


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

    def __init__(self, update: Sequence[Any]):
        self.update = update

    def fit(self, parameters, config):
        new = [p + u for p, u in zip(parameters, self.update, strict=True)]
        return new, 7, {"loss": 1.0}


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
