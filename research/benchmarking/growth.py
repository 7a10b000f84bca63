"""What a piece of work costs, small and large: by what else there is, not by itself."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdp_fl
from research.benchmarking import machine
from tfdp_fl import accounting

Work = Callable[[], Any]
_DELTA = 1e-6
_BATCH = 20


class _StopAtOnce(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends the training after its first round."""
        self.model.stop_training = True


def _model(units: int = 16) -> tf.keras.Model:
    layers = tf.keras.layers
    stack = [layers.Input([8]), layers.Dense(units), layers.Dense(3)]
    return tf.keras.Sequential(stack)


def _federated(
    mechanism: Any = None, sampling: str = "poisson", clients: int = 50, units: int = 16
) -> Any:
    usual = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    fed = tfdp_fl.DPFederatedModel(_model(units), mechanism or usual, clients, sampling)
    fed.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fed


def _rows(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(number, 8)).astype("f4"), rng.integers(0, 3, number)


def _clients(number: int) -> Any:
    rows = np.random.default_rng(1).integers(0, 1000, (number, 5), np.int32)
    return tfdp_fl.FederatedDataset.from_indices(*_rows(1000), rows)


def _fit(fed: Any, clients: Any, rounds: int = 1, callbacks: Any = ()) -> Work:
    def work() -> Any:
        return fed.fit(
            clients,
            rounds=rounds,
            batch_size=_BATCH,
            callbacks=list(callbacks),
            verbose=0,
        )

    work()  # Traces.
    return work


def _start(clients: int) -> Work:
    fed = _federated()
    _fit(fed, _clients(clients))
    return lambda: fed.fit(_clients(clients), batch_size=_BATCH, verbose=0)


def _parquet(rows: int) -> Work:
    import pandas

    x, y = _rows(rows)
    frame = pandas.DataFrame(x, columns=[f"x{k}" for k in range(8)])
    frame = frame.assign(label=y, who=np.arange(rows) // 20)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "table.parquet")
        frame.to_parquet(path)
        clients = tfdp_fl.FederatedDataset.from_parquet(path, "who")
    return _fit(_federated(), clients)


def _save(clients: int, before: int = 1, rounds: int = 1) -> Work:
    fed, data = _federated(sampling="shuffled"), _clients(clients)
    callback = tfdp_fl.callbacks.RoundCheckpoint(tempfile.mkdtemp())
    _fit(fed, data, before, [callback])
    return _fit(fed, data, rounds, [callback])


def _wide(weights: int) -> Work:
    return _fit(_federated(clients=2, units=weights // 12), _clients(20))


def _local(clients: int) -> Work:
    mechanism = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=5.0)
    budget = tfdp_fl.callbacks.PrivacyBudget(1e4, _DELTA)
    return _fit(_federated(mechanism), _clients(clients), callbacks=[budget])


def _planned(rounds: int, sampling: str = "poisson") -> Work:
    callbacks = [_StopAtOnce(), tfdp_fl.callbacks.PrivacyBudget(1e4, _DELTA)]
    return _fit(_federated(sampling=sampling), _clients(1000), rounds, callbacks)


def _target(rounds: int, accountant: str = "rdp") -> Work:
    plan = {"num_clients": 10**5, "clients_per_round": 100, "rounds": rounds}
    target = {"target_epsilon": 2.0, "target_delta": _DELTA, "accountant": accountant}
    return lambda: tfdp_fl.make_private(_model(), **plan, **target)


def _schedule(kinds: int) -> Work:
    account = accounting.PrivacyAccount("central", 10**4)
    cohorts = accounting.charge.Participation(
        sampling="poisson", num_clients=10**4, clients_per_round=50
    )
    budget = accounting.PrivacyBudget(1e4, _DELTA, "rdp")
    noise = iter(np.geomspace(1, 2, kinds + 10**4).tolist())

    def work() -> float:
        event = accounting.charge.dp_accounting.GaussianDpEvent(next(noise))
        account.charge(cohorts.cost(event), budgets=[budget])
        return account.epsilon(_DELTA)

    for _ in range(kinds):
        work()
    return work


def _evaluated(clients: int) -> Work:
    fed, data = _federated(), _clients(clients)
    fed.evaluate_clients(data, verbose=0)
    return lambda: fed.evaluate_clients(data, verbose=0)


def _secure(group: int) -> Work:
    from tfdp_fl import secure_aggregation

    protocol, updates = secure_aggregation.AdditiveSecretSharing(), np.ones([12, 10**5])
    return lambda: secure_aggregation.sum_in_groups(updates, protocol, group)


# What grows, from and to what, and what makes the work.
WORK: dict[str, tuple[str, int, int, Callable[[int], Work]]] = {
    "round": ("clients", 10**3, 10**6, lambda n: _fit(_federated(), _clients(n))),
    "round of two clients": ("weights", 10**6, 10**7, _wide),
    "start": ("clients in memory", 10**5, 10**6, _start),
    "Parquet": ("rows of a sorted file", 10**5, 10**6, _parquet),
    "save": ("clients", 10**3, 10**6, _save),
    "20 rounds, each saved": ("rounds before", 10, 300, lambda t: _save(1000, t, 20)),
    "start, ledger": ("rounds in the ledger", 10, 1000, lambda t: _save(1000, t)),
    "local round, budget": ("clients", 10**4, 10**6, _local),
    "start, budget": ("rounds planned", 10**2, 10**5, _planned),
    "start, budget, shuffled": (
        *("rounds planned", 10**2, 10**5),
        lambda t: _planned(t, "shuffled"),
    ),
    "make_private": ("rounds planned", 10**2, 10**5, _target),
    "make_private, PLD": (
        *("rounds planned", 10**2, 10**5),
        lambda t: _target(t, "pld"),
    ),
    "charge and epsilon": ("kinds of noise before", 10**2, 3000, _schedule),
    "evaluate_clients": ("clients", 10**3, 10**4, _evaluated),
    "secure sum of 12 clients": ("clients in a group", 3, 12, _secure),
}


class GrowthSide:
    """Small and large work in one process, that is measured in turns."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], Work] = {}

    def measure(self, name: str, size: int, seconds: float) -> list[float]:
        """Does the work for about so long; returns the seconds of each time."""
        if (name, size) not in self._made:
            self._made[name, size] = WORK[name][3](size)
        times: list[float] = []
        while len(times) < 3 or (sum(times) < seconds and len(times) < 50):
            start = time.perf_counter()
            self._made[name, size]()
            times.append(time.perf_counter() - start)
        return times

    def copies(self, weights: int, threads: int, strategy: str | None) -> float:
        """Returns how many more copies of a large model a `fit` needs at its peak.

        The model has eight equal layers, and its clients train one by one. For one
        model in each process.

        Args:
          weights: the size of the model.
          threads: how many clients train at a time.
          strategy: the strategy of correlated noise; None for independent noise.
        """
        layers = tf.keras.layers
        width = round((weights / 8) ** 0.5)
        stack = [layers.Dense(width, use_bias=False) for _ in range(8)]
        model = tf.keras.Sequential(
            [layers.Input([width]), *stack, layers.Dropout(0.1), layers.Dense(3)]
        )
        common = {"clip_norm": 0.5, "noise_multiplier": 1.0}
        if strategy is None:
            mechanism, sampling = tfdp_fl.FixedClipping(**common), "fixed_size"
        else:  # Two groups of clients.
            mechanism, sampling = (
                tfdp_fl.CorrelatedNoise(
                    **common, strategy=strategy, rounds=4, min_separation=2
                ),
                "cyclic",
            )
        fed = tfdp_fl.DPFederatedModel(
            model, mechanism, 4, sampling, max_parallel_clients=threads
        )
        fed.compile("sgd", "mse")
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(100, width)).astype("f4"), np.zeros([100, 3], "f4")
        rows = rng.integers(0, 100, (8, 10), np.int32)
        clients = tfdp_fl.FederatedDataset.from_indices(x, y, rows)
        before = machine.memory_bytes()
        fed.fit(clients, rounds=3, batch_size=_BATCH, verbose=0)
        peak = machine.memory_bytes(field="VmHWM")
        return (peak - before) / (4 * model.count_params())

    def forget(self) -> None:
        """Lets go of what was made."""
        self._made.clear()
