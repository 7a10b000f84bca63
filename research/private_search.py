r"""What noise a search takes that is counted, beside one run and an honest grid.

    python research/private_search.py             # the noise, in a minute
    python research/private_search.py accuracies  # digits, in half an hour

24 candidates at epsilon 2 and 8: the noise for digits and for the cohorts of Geyer's
table, and on digits the accuracy that it leaves. Prints what it writes into
research/private_search.json, and draws docs/images/private_search.png.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys

import dp_accounting
import keras
import numpy as np

import tfdp_fl
from tfdp_fl import accounting
from tfdp_fl.accounting import search

# N, m, rounds, delta.
_RUNS = [(500, 100, 60, 1e-3), (100, 100, 120, 1e-3), (1_000, 200, 150, 1e-5)]
_RUNS.append((10_000, 400, 300, 1e-6))


def _of_search(plan: tuple, epsilon: float, rounds: int, delta: float, law: str):
    """Returns the noise multiplier of a search of 24 expected trials."""
    count = search.TrialCount.named(24, law)

    def charge(event: dp_accounting.DpEvent, plan=plan) -> accounting.RoundCharge:
        names = ("sampling", "num_clients", "clients_per_round")
        return accounting.RoundCharge(
            **dict(zip(names, plan, strict=True)), event=event
        )

    def charges(z: float) -> list[accounting.RoundCharge]:
        one_round = charge(dp_accounting.GaussianDpEvent(z)).dp_event()
        trial = dp_accounting.SelfComposedDpEvent(one_round, rounds)
        best = search.BestOfTrialsDpEvent((trial,), count.mean, count.shape)
        return [charge(best, ("poisson", plan[1], plan[1]))]

    return accounting.calibrate(charges, epsilon, delta)


def costs() -> list[dict]:
    """Returns the noise that a search takes, beside one run and a grid of 24."""
    rows = []
    for n, m, rounds, delta in _RUNS:
        for epsilon in (2.0, 8.0):
            plan = ("poisson", n, m)
            row = {"n": n, "m": m, "rounds": rounds, "epsilon": epsilon}
            for name, times in (("one", 1), ("grid", 24)):
                row[name] = accounting.calibrate_noise_multiplier(
                    epsilon, *plan, rounds * times, delta
                )
            for law in ("poisson", "geometric", "logarithmic"):
                row[law] = _of_search(plan, epsilon, rounds, delta, law)
            rows.append(row)
    return rows


_CANDIDATES = [
    {"rate": rate, "clip_norm": clip, "momentum": momentum}
    for rate, clip, momentum in itertools.product(
        (0.05, 0.1, 0.2, 0.5), (0.1, 0.3, 1.0), (0.0, 0.9)
    )
]
_DIGITS = {"n": 500, "m": 100, "rounds": 60, "delta": 1e-3}


def _build(rate, clip_norm, momentum, noise_multiplier=1.0):
    layers = keras.layers
    model = keras.Sequential(
        [layers.Input((64,)), layers.Dense(128, "relu"), layers.Dense(10)]
    )
    fed = tfdp_fl.DPFederatedModel(
        model,
        tfdp_fl.FixedClipping(clip_norm=clip_norm, noise_multiplier=noise_multiplier),
        clients_per_round=_DIGITS["m"],
    )
    # The same step in the end, whatever the momentum.
    server = keras.optimizers.SGD(1.0 - momentum, momentum)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(keras.optimizers.SGD(rate), loss, ["accuracy"], server_optimizer=server)
    return fed


def accuracies(seeds: int = 3):
    """Yields, for each seed and epsilon, the accuracies on digits nobody has seen.

    Of the test set one half is public, and settings are chosen on it; accuracies
    are those of the other half.
    """
    clients, (x, y) = tfdp_fl.datasets.load_digits(num_clients=_DIGITS["n"])
    public, unseen = (x[::2], y[::2]), (x[1::2], y[1::2])
    plan = ("poisson", _DIGITS["n"], _DIGITS["m"])
    rounds, delta = _DIGITS["rounds"], _DIGITS["delta"]

    def best_of_all(noise_multiplier):
        found = []
        for candidate in _CANDIDATES:
            fed = _build(**candidate, noise_multiplier=noise_multiplier)
            fed.fit(clients, rounds=rounds, batch_size=10, verbose=0)
            scores = [fed.evaluate(*data, verbose=0)[1] for data in (public, unseen)]
            found.append((*scores, candidate))
        return max(found, key=lambda each: each[0])

    for seed, epsilon in itertools.product(range(seeds), (2.0, 8.0)):
        keras.utils.set_random_seed(seed)
        row = {"seed": seed, "epsilon": epsilon}
        for name, times in (("uncounted", 1), ("grid", len(_CANDIDATES))):
            z = accounting.calibrate_noise_multiplier(
                epsilon, *plan, rounds * times, delta
            )
            _, row[name], row[f"{name}_settings"] = best_of_all(z)
        for law, trials in (("logarithmic", 10), ("poisson", 10)):
            search = tfdp_fl.PrivateSearch(
                _build,
                _CANDIDATES,
                expected_trials=trials,
                target_epsilon=epsilon,
                target_delta=delta,
                score=tfdp_fl.PublicScore(*public, "accuracy"),
                distribution=law,
            )
            model = search.fit(clients, rounds=rounds, batch_size=10)
            right = model.predict(unseen[0], verbose=0).argmax(1) == unseen[1]
            row[law] = float(np.mean(right))
            row[f"{law}_settings"] = search.best
        yield row


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws the accuracies: a dot for each seed, and a line for their mean."""
    from matplotlib import figure

    names = {
        "uncounted": "24 settings tried,\nnot counted",
        "poisson": "PrivateSearch,\nPoisson(10) trials",
        "logarithmic": "PrivateSearch,\nlogarithmic, mean 10",
        "grid": "24 settings tried,\nall charged",
    }
    drawn = figure.Figure(figsize=(7.2, 3.2), layout="constrained")
    every = drawn.subplots(1, 2, sharey=True)
    for axes, epsilon in zip(every, (2.0, 8.0), strict=True):
        for place, name in enumerate(names):
            values = [row[name] for row in rows if row["epsilon"] == epsilon]
            color = "#999999" if name == "uncounted" else "#0072B2"
            axes.plot(values, [place] * len(values), "o", color=color, ms=4)
            axes.plot(np.mean(values), place, "|", color=color, ms=22, mew=3)
        axes.set_yticks(range(len(names)), names.values(), fontsize=8)
        axes.grid(alpha=0.3)
        axes.margins(y=0.15)
        axes.set_title(f"epsilon = {epsilon:g}", fontsize=10)
        axes.set_xlim(0.8, 1)
        axes.set_xlabel("accuracy on unseen digits")
    every[0].invert_yaxis()
    drawn.savefig(path, dpi=150)


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_suffix(".json")
    kept = json.loads(path.read_text("utf-8"))
    if "accuracies" in sys.argv[1:]:
        kept["accuracies"] = []
        for row in accuracies():
            kept["accuracies"].append(row)
            print(json.dumps(row), flush=True)
        images = pathlib.Path(__file__).resolve().parents[1] / "docs" / "images"
        draw(kept["accuracies"], images / "private_search.png")
    else:
        kept["costs"] = costs()
        print(json.dumps(kept["costs"], indent=1))
    path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
