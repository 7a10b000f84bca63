"""Flower: FedAvg with its server-side fixed clipping, simulated with Ray.

Clients train a PyTorch network, as in Flower's own quickstart. The setting is
how many CPUs a client asks for: with 1 there are as many workers as cores.
"""

from __future__ import annotations

import itertools
import os
import time

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.simulation import run_simulation

from research.rivals import work as work_lib

_WORK = work_lib.asked()


def _network():
    layers = []
    units = _WORK.units
    for inputs, outputs in itertools.pairwise(units):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class _Client(NumPyClient):
    # Of the worker: made once.
    data = network = None

    def __init__(self, number):
        torch.set_num_threads(1)
        if _Client.data is None:
            x, y = _WORK.data()
            _Client.data = torch.from_numpy(x), torch.from_numpy(y)
            _Client.network = _network()
        self._x, self._y = (each[number] for each in _Client.data)

    def fit(self, parameters, config):
        """Trains one pass over the client's examples."""
        network = _Client.network
        with torch.no_grad():
            for own, given in zip(network.parameters(), parameters, strict=True):
                own.copy_(torch.from_numpy(given))
        optimizer = torch.optim.SGD(network.parameters(), _WORK.learning_rate)
        order = torch.randperm(len(self._x))
        for rows in order.split(_WORK.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                network(self._x[rows]), self._y[rows]
            ).backward()
            optimizer.step()
        updated = [each.detach().numpy() for each in network.parameters()]
        return updated, len(self._x), {}


_ENDS: list[float] = []


class _Timed(DifferentialPrivacyServerSideFixedClipping):
    def aggregate_fit(self, server_round, results, failures):
        """Notes when the round ends."""
        assert len(results) == _WORK.clients, failures
        found = super().aggregate_fit(server_round, results, failures)
        _ENDS.append(time.perf_counter())
        return found


def _server(_):
    torch.manual_seed(0)
    initial = [each.detach().numpy() for each in _network().parameters()]
    strategy = _Timed(
        FedAvg(
            fraction_fit=1.0,
            fraction_evaluate=0.0,
            min_fit_clients=_WORK.clients,
            min_available_clients=_WORK.clients,
            initial_parameters=ndarrays_to_parameters(initial),
        ),
        noise_multiplier=_WORK.noise_multiplier,
        clipping_norm=_WORK.clip_norm,
        num_sampled_clients=_WORK.clients,
    )
    rounds = work_lib.WARM_UP + _WORK.rounds
    return ServerAppComponents(
        strategy=strategy, config=ServerConfig(num_rounds=rounds)
    )


def main() -> None:
    """Runs the rounds."""
    run_simulation(
        server_app=ServerApp(server_fn=_server),
        client_app=ClientApp(
            client_fn=lambda context: _Client(
                int(context.node_config["partition-id"])
            ).to_client()
        ),
        num_supernodes=_WORK.clients,
        backend_config={
            "client_resources": {"num_cpus": int(_WORK.setting)},
            "init_args": {"num_cpus": os.cpu_count()},
        },
    )
    work_lib.answer(_ENDS)


if __name__ == "__main__":
    main()
