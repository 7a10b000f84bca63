r"""What noise a search takes that is counted, beside one run and an honest grid.

    python research/private_search.py                 # the noise, in a minute
    python research/private_search.py digits mnist    # accuracies, in an hour
    python research/private_search.py 100x5x3 1000x5x3 10000x5x1  # Geyer's table

24 candidates at epsilon 2 and 8: the noise for digits and for the cohorts of Geyer's
table, and the accuracy that it leaves; and at epsilon 8 Geyer's table with its search
inside (K clients x expected trials x seeds). MNIST is read from $TFDP_FL_DATA. Prints
what it writes into research/private_search.json, and draws its picture.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import dp_accounting
import keras
import numpy as np

import tfdp_fl
from research import reproduce_geyer
from tfdp_fl import accounting
from tfdp_fl.accounting import private_selection
from tfdp_fl.experiments import tasks, training
from tfdp_fl.experiments.settings import Settings

# N, m, rounds, delta.
_RUNS = [(500, 100, 60, 2e-4), (100, 100, 120, 1e-3), (1_000, 200, 150, 1e-5)]
_RUNS.append((10_000, 400, 300, 1e-6))


def _of_search(plan: tuple, epsilon: float, rounds: int, delta: float, law: str):
    """Returns the noise multiplier of a search of 24 expected trials."""
    count = private_selection.TrialCount.from_arguments(24, law)

    def charge(event: dp_accounting.DpEvent, plan=plan) -> accounting.RoundCharge:
        names = ("sampling", "num_clients", "clients_per_round")
        return accounting.RoundCharge(
            **dict(zip(names, plan, strict=True)), event=event
        )

    def charges(z: float) -> list[accounting.RoundCharge]:
        one_round = charge(dp_accounting.GaussianDpEvent(z)).dp_event()
        trial = dp_accounting.SelfComposedDpEvent(one_round, rounds)
        best = private_selection.BestOfTrialsDpEvent((trial,), count.mean, count.shape)
        return [charge(best, ("poisson", plan[1], plan[1]))]

    return accounting.calibrate(charges, epsilon, delta, "pld")


def costs() -> list[dict]:
    """Returns the noise that a search takes, beside one run and a grid of 24."""
    rows = []
    for n, m, rounds, delta in _RUNS:
        for epsilon in (2.0, 8.0):
            plan = ("poisson", n, m)
            row = {"n": n, "m": m, "rounds": rounds, "epsilon": epsilon}
            for name, times in (("one", 1), ("grid", 24)):
                row[name] = accounting.calibrate_noise_multiplier(
                    epsilon, *plan, rounds * times, delta, "pld"
                )
            for law in ("poisson", "geometric", "logarithmic"):
                row[law] = _of_search(plan, epsilon, rounds, delta, law)
            rows.append(row)
    return rows


@dataclasses.dataclass(frozen=True)
class Data:
    """Clients, of which candidates train models, and two halves of a test set.

    Attributes:
      clients: The clients.
      public: `(x, y)` by which settings are chosen, as if they were public.
      unseen: `(x, y)` of which the accuracies are.
      layers: Widths of the hidden layers.
      m: Clients expected in a round.
      rounds: How many.
      delta: At which epsilon is.
      batch_size: Of the clients' steps.
    """

    clients: tfdp_fl.FederatedDataset
    public: tuple[np.ndarray, np.ndarray]
    unseen: tuple[np.ndarray, np.ndarray]
    layers: tuple[int, ...]
    m: int
    rounds: int
    delta: float
    batch_size: int

    @property
    def plan(self) -> tuple[str, int, int]:
        """Sampling, N and m."""
        return "poisson", self.clients.num_clients, self.m

    def build(self, rate, clip_norm, momentum, noise_multiplier=1.0):
        """Returns a new compiled model."""
        layers = keras.layers
        hidden = [layers.Dense(width, "relu") for width in self.layers]
        inputs = layers.Input(self.unseen[0].shape[1:])
        fed = tfdp_fl.DPFederatedModel(
            keras.Sequential([inputs, *hidden, layers.Dense(10)]),
            tfdp_fl.FixedClipping(
                clip_norm=clip_norm, noise_multiplier=noise_multiplier
            ),
            clients_per_round=self.m,
        )
        # The same step in the end, whatever the momentum.
        server = keras.optimizers.SGD(1.0 - momentum, momentum)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        client = keras.optimizers.SGD(rate)
        fed.compile(client, loss, ["accuracy"], server_optimizer=server)
        return fed


_CANDIDATES = [
    {"rate": rate, "clip_norm": clip, "momentum": momentum}
    for rate, clip, momentum in itertools.product(
        (0.05, 0.1, 0.2, 0.5), (0.1, 0.3, 1.0), (0.0, 0.9)
    )
]


def load(name: str) -> Data:
    """Returns digits; or oriented gradients of MNIST, for a linear model."""
    chosen = {"dataset": "digits", "num_clients": 500}
    if name == "mnist":
        features = "oriented_gradients"
        chosen = {"dataset": name, "num_clients": 1000, "input_features": features}
        chosen["data_path"] = os.environ["TFDP_FL_DATA"] + "/mnist.npz"
    task = tasks.load_task(Settings(**chosen).resolve())
    x, y = task.test
    halves = (x[::2], y[::2]), (x[1::2], y[1::2])
    if name == "mnist":
        return Data(task.clients, *halves, (), 100, 60, 1e-5, 60)
    return Data(task.clients, *halves, (128,), 100, 60, 2e-4, 10)


def accuracies(data: Data, seeds: int = 3):
    """Yields, for each seed and epsilon, the accuracies on examples nobody chose by."""

    def best_of_all(noise_multiplier):
        found = []
        for candidate in _CANDIDATES:
            fed = data.build(**candidate, noise_multiplier=noise_multiplier)
            fed.fit(
                data.clients, rounds=data.rounds, batch_size=data.batch_size, verbose=0
            )
            both = (data.public, data.unseen)
            scores = [fed.evaluate(*half, verbose=0)[1] for half in both]
            found.append((*scores, candidate))
        return max(found, key=lambda each: each[0])

    for seed, epsilon in itertools.product(range(seeds), (2.0, 8.0)):
        keras.utils.set_random_seed(seed)
        row = {"seed": seed, "epsilon": epsilon}
        for name, times in (("uncounted", 1), ("grid", len(_CANDIDATES))):
            z = accounting.calibrate_noise_multiplier(
                epsilon, *data.plan, data.rounds * times, data.delta, "pld"
            )
            _, row[name], row[f"{name}_settings"] = best_of_all(z)
        for law, trials in (("logarithmic", 10), ("poisson", 10)):
            found, row[f"{law}_settings"] = searched(
                data, data.build, _CANDIDATES, law, trials, epsilon
            )
            row[law] = accuracy(found, data.unseen)
        yield row


def searched(data, build, candidates, law, trials, epsilon, shuffle=False):
    """Returns the model of a search, and the candidate that it chose."""
    search = tfdp_fl.PrivateSearch(
        build,
        candidates,
        expected_trials=trials,
        target_epsilon=epsilon,
        target_delta=data.delta,
        score=tfdp_fl.PublicScore(*data.public, "accuracy"),
        distribution=law,
    )
    model = search.fit(data.clients, data.rounds, data.batch_size, shuffle=shuffle)
    return model, search.best


def accuracy(model, examples) -> float:
    """Returns the share of examples whose label a model finds."""
    x, y = examples
    return float(np.mean(model.predict(x, batch_size=1000, verbose=0).argmax(1) == y))


def geyer(k: int, trials: float, seeds: int):
    """Yields the accuracies of Geyer's table with the search inside epsilon 8.

    Candidates are scored on 6000 images that no client holds, as if they were public.
    """
    config = reproduce_geyer.read_config(
        f"k{k}_public_features", os.environ["TFDP_FL_DATA"] + "/mnist.npz"
    )
    base = {**config["base"], "noise_multiplier": 1.0}
    base.pop("target_epsilon")
    settings = Settings(**base)
    unseen = tasks.load_task(settings.resolve()).test
    held_out = {"validation_examples": 6000}
    if k == 100:  # All other images are the clients'.
        held_out["examples_per_client"] = 540
    settings = dataclasses.replace(settings, **held_out)
    task = tasks.load_task(settings.resolve())
    data = Data(
        task.clients,
        task.test,
        unseen,
        layers=(),  # The settings tell.
        m=settings.clients_per_round,
        rounds=settings.rounds,
        delta=settings.target_delta,
        batch_size=settings.batch_size,
    )

    def build(clip_norm, rate, step, smoothing):
        chosen = dataclasses.replace(
            settings,
            clip_norm=clip_norm,
            client_learning_rate=rate,
            server_learning_rate=step / clip_norm,
            prior_smoothing=smoothing,
        )
        return training.prepare(chosen).federated_model

    names = ("clip_norm", "rate", "step", "smoothing")
    steps = (0.06, 0.12) if k == 100 else (0.1, 0.2)  # Of the server, in clips.
    values = itertools.product((0.03, 0.05, 0.12), (0.1, 0.3), steps, (5e-3, 2e-2))
    candidates = [dict(zip(names, each, strict=True)) for each in values]
    for seed in range(seeds):
        keras.utils.set_random_seed(seed)
        model, best = searched(
            data, build, candidates, "logarithmic", trials, 8.0, settings.shuffle
        )
        found = {"k": k, "trials": trials, "seed": seed, "settings": best}
        yield {**found, "accuracy": accuracy(model, data.unseen)}


def draw(kept: dict[str, list[dict]], path: pathlib.Path) -> None:
    """Draws the accuracies: a dot for each seed, and a line for their mean."""
    from matplotlib import figure

    names = {
        "uncounted": "24 settings tried,\nnot counted",
        "poisson": "PrivateSearch,\nPoisson(10) trials",
        "logarithmic": "PrivateSearch,\nlogarithmic, mean 10",
        "grid": "24 settings tried,\nall charged",
    }
    drawn = figure.Figure(figsize=(7.2, 5.6), layout="constrained")
    every = drawn.subplots(2, 2, sharey=True, sharex=True)
    cells = itertools.product(("digits", "mnist"), (2.0, 8.0))
    for axes, (data, epsilon) in zip(every.flat, cells, strict=True):
        for place, name in enumerate(names):
            rows = kept.get(data, [])
            values = [row[name] for row in rows if row["epsilon"] == epsilon]
            if not values:
                continue
            color = "#999999" if name == "uncounted" else "#0072B2"
            axes.plot(values, [place] * len(values), "o", color=color, ms=4)
            axes.plot(np.mean(values), place, "|", color=color, ms=22, mew=3)
        axes.set_yticks(range(len(names)), names.values(), fontsize=8)
        axes.grid(alpha=0.3)
        axes.margins(y=0.15)
        axes.set_title(f"{data}, epsilon = {epsilon:g}", fontsize=10)
        axes.set_xlim(0.65, 1)
    for axes in every[1]:
        axes.set_xlabel("accuracy on unseen examples")
    every[0, 0].invert_yaxis()
    drawn.savefig(path, dpi=150)


def main(asked: list[str]) -> None:
    """Computes what is asked for, keeps it beside the rest, and draws it."""
    path = pathlib.Path(__file__).with_suffix(".json")
    kept = json.loads(path.read_text("utf-8"))
    images = path.parents[1] / "docs" / "images"
    for name in asked or ["costs"]:
        if name == "costs":
            rows = costs()
        elif name in ("digits", "mnist"):
            rows = accuracies(load(name))
        else:
            k, trials, seeds = map(int, name.split("x"))
            rows, name = geyer(k, trials, seeds), f"geyer {k}"
        kept[name] = []
        for row in rows:
            kept[name].append(row)
            print(json.dumps(row), flush=True)
            path.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        if name in ("digits", "mnist"):
            draw(kept, images / "private_search.png")


if __name__ == "__main__":
    main(sys.argv[1:])
