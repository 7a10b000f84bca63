r"""Which sampling: what each costs, and how good models are at equal epsilon.

    python research/samplings.py $DATA/mnist.npz

Draws epsilon over rounds for five samplings (N = 1000, m = 100, z = 1, delta 1e-5), and
trains digits (N = 500, m = 100, 60 rounds, the model of the first page) and MNIST's
oriented gradients (N = 1000 of 60 images, m = 100, 100 rounds, one hidden layer of 64)
under three of them with the noise that keeps epsilon = 1, five seeds of the model (the
clients' draws and the noise are secret). Writes research/samplings.json; what is in it
is not computed again.
"""

from __future__ import annotations

import itertools
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import tensorflow as tf

import tfdp_fl
from research import fine_tuning
from tfdp_fl import accounting

_RESULTS = pathlib.Path(__file__).with_suffix(".json")
_PICTURE = pathlib.Path(__file__).parents[1] / "docs/images/samplings.png"
_TRAINED = ("random_allocation", "poisson", "shuffled")
_SEEDS, _ROUNDS = range(5), (1, 2, 5, *range(10, 201, 10))


def costs(sampling: str) -> list[float]:
    """Returns epsilon after so many rounds."""
    return [
        accounting.epsilon(1.0, sampling, 1000, 100, rounds, 1e-5, "pld")
        for rounds in _ROUNDS
    ]


def draw(found: list[fine_tuning.Row]) -> None:
    """Draws them, of the rows that have them."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = drawn.subplots()
    for row in found:
        sampling, epsilons = row["sampling"], row.get("epsilons", [])
        if not epsilons:
            continue
        steps = "steps-pre" if sampling in ("random_allocation", "shuffled") else None
        axes.plot(_ROUNDS, epsilons, drawstyle=steps, label=sampling)
    axes.set(yscale="log", xlabel="rounds", ylabel="epsilon, delta = 1e-5")
    axes.set_yticks(ticks := [1, 2, 5, 10, 20, 50, 100], map(str, ticks))
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    drawn.savefig(_PICTURE, dpi=150)


def _layers(inputs: int, hidden: int) -> list[Any]:
    layers = tf.keras.layers
    return [layers.Input((inputs,)), layers.Dense(hidden, "relu"), layers.Dense(10)]


def tasks(path: str) -> dict[str, Any]:
    """Returns clients, test data, and what else a task has, by its name."""
    digits, mnist = (
        tfdp_fl.datasets.load_digits(num_clients=500),
        tfdp_fl.datasets.load_mnist(1000, examples_per_client=60, path=path),
    )
    return {
        "digits": (*digits, 60, 2e-4, 0.2, lambda: _layers(64, 128)),
        "mnist": (*mnist, 100, 1e-5, 0.1, _oriented),
    }


def _oriented() -> list[Any]:
    layers = tf.keras.layers
    image = [layers.Input((784,)), layers.Reshape((28, 28))]
    return [*image, tfdp_fl.features.OrientedGradients(), *_layers(392, 64)[1:]]


def accuracy(task: Any, sampling: str, epsilon: float) -> tuple[float, float]:
    """Returns the accuracy on test data, and the noise multiplier."""
    clients, test, rounds, delta, rate, layers = task
    fed = tfdp_fl.make_private(
        tf.keras.Sequential(layers()),
        target_epsilon=epsilon,
        target_delta=delta,
        num_clients=clients.num_clients,
        clients_per_round=100,
        rounds=rounds,
        sampling=sampling,
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(rate), loss, ["accuracy"])
    fed.fit(clients, rounds=rounds, batch_size=10, verbose=0)
    found = fed.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
    return float(found), float(fed.mechanism.noise_multiplier)


def main() -> None:
    """Computes what is not there yet, draws the costs, and prints means."""
    given = tasks(sys.argv[1])
    plan: list[fine_tuning.Row] = [
        {"task": "costs", "sampling": sampling}
        for sampling in (*_TRAINED, "fixed_size", "cyclic")
    ]
    for seed, name, sampling in itertools.product(_SEEDS, given, _TRAINED):
        plan.append({"task": name, "sampling": sampling, "seed": seed})

    def run(row: fine_tuning.Row) -> fine_tuning.Row:
        if row["task"] == "costs":
            return {"epsilons": costs(row["sampling"])}
        tf.keras.utils.set_random_seed(row["seed"])
        score, z = accuracy(given[row["task"]], row["sampling"], epsilon=1.0)
        return {"accuracy": score, "noise_multiplier": z}

    draw(fine_tuning.fill(_RESULTS, plan, run, ("task", "sampling")))


if __name__ == "__main__":
    main()
