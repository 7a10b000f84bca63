r"""Accuracy of a search inside epsilon, beside settings that nobody counted.

    python research/private_search.py --seeds=3

Digits (500 clients, two classes each): 24 candidates, at epsilon 2 and 8. The search is
beside the best candidate trained alone (found on the clients, uncounted) and beside a
grid of all 24 that is charged honestly. Also what noise Geyer's table would take with
its search inside epsilon 8. Prints JSON into research/private_search.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib

import dp_accounting
import keras
import numpy as np

import tfdp_fl
from tfdp_fl import accounting
from tfdp_fl.accounting import search

_DELTA, _ROUNDS, _SIZE = 1e-3, 60, 100
_CANDIDATES = [
    {"rate": rate, "clip": clip, "momentum": momentum}
    for rate, clip, momentum in itertools.product(
        (0.03, 0.1, 0.3, 1.0), (0.1, 0.3, 1.0), (0.0, 0.9)
    )
]
_OUT = pathlib.Path(__file__).with_suffix(".json")


def build(rate: float, clip: float, momentum: float) -> tfdp_fl.DPFederatedModel:
    """Returns a small model; the noise is set by whoever trains it."""
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    fed = tfdp_fl.DPFederatedModel(
        model, tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=1.0), _SIZE
    )
    fed.compile(
        keras.optimizers.SGD(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ["accuracy"],
        keras.optimizers.SGD(0.3 if momentum else 1.0, momentum=momentum),
    )
    return fed


def alone(candidate: dict, clients, test, noise: float) -> float:
    """Returns the accuracy of one candidate, trained with a given noise."""
    fed = build(**candidate)
    mechanism = fed.mechanism.with_noise_multiplier(noise)
    compiled = fed.compiled
    fed = tfdp_fl.DPFederatedModel(fed.model, mechanism, _SIZE)
    fed.compile(
        compiled.training.optimizer,
        compiled.training.loss,
        ["accuracy"],
        compiled.server_optimizer,
    )
    fed.fit(clients, rounds=_ROUNDS, batch_size=10, verbose=0)
    return float(fed.evaluate(*test, verbose=0)[1])


def digits(seeds: int) -> list[dict]:
    """Returns a row for each epsilon."""
    clients, (x, y) = tfdp_fl.datasets.load_digits(num_clients=500)
    half = len(x) // 2  # Public data chooses on one half, and is told on the other.
    public, test = (x[:half], y[:half]), (x[half:], y[half:])
    rows = []
    for epsilon in (2.0, 8.0):
        plan = ("poisson", 500, _SIZE)
        z = accounting.calibrate_noise_multiplier(epsilon, *plan, _ROUNDS, _DELTA)
        grid_z = accounting.calibrate_noise_multiplier(
            epsilon, *plan, _ROUNDS * len(_CANDIDATES), _DELTA
        )
        row = {"epsilon": epsilon, "z_alone": z, "z_grid": grid_z}
        for name, noise in (("uncounted", z), ("grid", grid_z)):
            on_public = [alone(each, clients, public, noise) for each in _CANDIDATES]
            best = _CANDIDATES[int(np.argmax(on_public))]
            row[f"best_{name}"] = best
            row[name] = [alone(best, clients, test, noise) for _ in range(seeds)]
        found = []
        for _ in range(seeds):
            tried = tfdp_fl.PrivateSearch(
                build,
                _CANDIDATES,
                expected_trials=24,
                target_epsilon=epsilon,
                target_delta=_DELTA,
                score=tfdp_fl.PublicScore(*public, "accuracy"),
                distribution="logarithmic",
            )
            model = tried.fit(clients, rounds=_ROUNDS, batch_size=10)
            found.append(float(model.evaluate(*test, verbose=0)[1]))
        row["search"] = found
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def noise_of_a_search(
    epsilon: float, n: int, m: int, rounds: int, delta: float, distribution: str
) -> float:
    """Returns the noise multiplier of a search of 24 expected trials."""
    count = search.TrialCount.named(24, distribution)

    def charge(z: float) -> accounting.RoundCharge:
        event = accounting.RoundCharge(
            sampling="poisson",
            num_clients=n,
            clients_per_round=m,
            event=dp_accounting.GaussianDpEvent(z),
        ).dp_event()
        trial = dp_accounting.SelfComposedDpEvent(event, rounds)
        best = search.BestOfTrialsDpEvent((trial,), count.mean, count.shape)
        return accounting.RoundCharge(
            sampling="poisson", num_clients=n, clients_per_round=n, event=best
        )

    return accounting.calibrate(lambda z: [charge(z)], epsilon, delta)


def costs() -> list[dict]:
    """Returns the noise that a search takes, beside one run and a grid of 24."""
    rows = []
    for n, m, rounds, delta in (
        (500, _SIZE, _ROUNDS, _DELTA),
        (100, 100, 120, 1e-3),
        (1_000, 200, 150, 1e-5),
        (10_000, 400, 300, 1e-6),
    ):
        for epsilon in (2.0, 8.0):
            one, grid = (
                accounting.calibrate_noise_multiplier(
                    epsilon, "poisson", n, m, rounds * times, delta
                )
                for times in (1, 24)
            )
            row = {"n": n, "m": m, "rounds": rounds, "epsilon": epsilon}
            row |= {"one": one, "grid": grid}
            for name in ("poisson", "geometric", "logarithmic"):
                row[name] = noise_of_a_search(epsilon, n, m, rounds, delta, name)
            rows.append(row)
    return rows


def main() -> None:
    """Prints and writes all rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--costs_only", action="store_true")
    flags = parser.parse_args()
    found = {"costs": costs()}
    print(json.dumps(found, indent=1), flush=True)
    if not flags.costs_only:
        found["digits"] = digits(flags.seeds)
    _OUT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
