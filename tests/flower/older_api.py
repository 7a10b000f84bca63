"""Flower's older API without Flower: a strategy, a client manager, clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tfdp_fl.flower import DPFedAvgNumPyClient


@dataclasses.dataclass
class FitIns:
    """As `flwr.common.FitIns`."""

    parameters: Any
    config: dict


@dataclasses.dataclass
class FitRes:
    """As `flwr.common.FitRes`."""

    parameters: Any
    num_examples: int
    metrics: dict


class Manager:
    """A client manager with these clients connected."""

    def __init__(self, clients: Iterable[Any]):
        self.clients = list(clients)

    def all(self) -> dict[str, Any]:
        return {str(i): client for i, client in enumerate(self.clients)}


class Strategy:
    """Asks everybody, averages; remembers what it is handed."""

    def __init__(self, config: dict | None = None):
        self.config = config or {}
        self.handed: list[list[Any]] = []

    def configure_fit(self, server_round, parameters, client_manager):
        ins = FitIns(parameters, {**self.config})
        return [(client, ins) for client in client_manager.all().values()]

    def aggregate_fit(self, server_round, results, failures):
        self.handed.append(results)
        total = sum(result.num_examples for _, result in results)
        first = results[0][1].parameters
        if not isinstance(first, list):
            return first, {}
        mean = [
            sum(
                result.num_examples / total * np.asarray(result.parameters[i])
                for _, result in results
            )
            for i in range(len(first))
        ]
        return mean, {"seen": len(results)}

    def evaluate(self, server_round, parameters):
        return 0.5, {"round": server_round}


class Trainer:
    """A client that adds the same update to whatever it is sent."""

    def __init__(self, update: Sequence[Any], num_examples: int = 7):
        self.update = update
        self.num_examples = num_examples

    def fit(self, parameters, config):
        new = [p + u for p, u in zip(parameters, self.update, strict=True)]
        return new, self.num_examples, {"loss": 1.0}


def fit(instructions: Sequence[tuple[Any, FitIns]]) -> list[tuple[Any, FitRes]]:
    """Lets every client that was asked train, through the client wrapper."""
    return [
        (client, FitRes(*DPFedAvgNumPyClient(client).fit(ins.parameters, ins.config)))
        for client, ins in instructions
    ]


def a_round(
    wrapper: Any, model: Any, updates: Sequence[Any], server_round: int = 1
) -> Any:
    """Runs one round of clients with these updates; returns the new model."""
    manager = Manager(Trainer(update) for update in updates)
    told = wrapper.configure_fit(server_round, model, manager)
    return wrapper.aggregate_fit(server_round, fit(told), [])[0]
