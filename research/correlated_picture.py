r"""The picture that decides: accuracy against epsilon, by the kind of noise.

    python research/correlated_picture.py --output_dir=runs/correlated
    python research/correlated_picture.py --quick --output_dir=/tmp/quick

MNIST in means of 4 x 4 pixels, softmax regression (500 weights), 1024 clients
of 30 examples, T = 128 rounds, clip 0.5, delta = 1e-5, for clients in one of b
rounds (b = 32: cohorts of 32; b = 8: cohorts of 128). Noise is calibrated to
each epsilon by PLD, with what the sampling allows:

    sampled       independent noise, Poisson cohorts: what a draw is worth
    sampled bands 4 bands, secret Poisson draws within groups in turn
    independent   nothing claimed for who takes part, at least b rounds apart
    tree, blt, banded   the same, correlated noise (3 buffers, b bands)
    no noise      clipped only: where all of them would end

The server's learning rate is chosen for each method, epsilon and b on clients
that are held out (their examples come from MNIST's training set, too), with
seeds of its own; what is drawn is the mean over five other seeds on the test
set, and their standard deviation. The search is not counted in epsilon.

Every run is a line of runs.csv as soon as it is done, and is not run again:
interrupt it when you like. Without --data_path, the folder that TFDP_FL_DATA
names is looked in.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np
import tensorflow as tf

import tfdp_fl
from tfdp_fl import datasets
from tfdp_fl.experiments import plots, training

DELTA, CLIP = 1e-5, 0.5
CLIENT_RATE = 2.0
RUNS, SUMMARY, PICTURE = "runs.csv", "summary.csv", "correlated.png"
_FIELDS = (
    "stage",
    "groups",
    "method",
    "epsilon",
    "rate",
    "seed",
    "accuracy",
    "spent",
    "noise_multiplier",
    "seconds",
)
_KEY = _FIELDS[:6]
NO_NOISE = "no noise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How noise is made and cohorts are drawn.

    Attributes:
      sampling: As in `DPFederatedModel`.
      strategy: Of `CorrelatedNoise`; None for `FixedClipping`.
    """

    sampling: str
    strategy: str | None = None


METHODS: Mapping[str, Method] = {
    "sampled": Method(sampling="poisson"),
    "sampled bands": Method(sampling="cyclic_poisson", strategy="banded:4"),
    "independent": Method(sampling="cyclic", strategy="banded:1"),
    "tree": Method(sampling="cyclic", strategy="tree"),
    "banded": Method(sampling="cyclic", strategy="banded"),
    "blt": Method(sampling="cyclic", strategy="blt:3"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run.

    Attributes:
      clients: N.
      examples: Of each client.
      held_out: How many examples rates are chosen by.
      rounds: T.
      groups: Values of b; cohorts have N / b clients.
      epsilons: The targets, without 0, which stands for no noise.
      rates: Server learning rates to choose from.
      tuning_seeds: By which they are chosen.
      seeds: For the picture.
      methods: Names in `METHODS`.
      mnist: Whether the images are MNIST's, or scikit-learn's digits.
    """

    clients: int = 1024
    examples: int = 30
    held_out: int = 6000
    rounds: int = 128
    groups: tuple[int, ...] = (32, 8)
    epsilons: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0)
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    tuning_seeds: tuple[int, ...] = (101, 102)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    methods: tuple[str, ...] = tuple(METHODS)
    mnist: bool = True


QUICK = Plan(
    clients=64,
    examples=10,
    held_out=300,
    rounds=16,
    groups=(4,),
    epsilons=(8.0,),
    rates=(0.5, 1.0),
    tuning_seeds=(101,),
    seeds=(1, 2),
    methods=("sampled", "independent", "blt"),
    mnist=False,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Pixels from 0 to 1 and labels, of clients and of who judges them."""

    clients: datasets.FederatedDataset
    held_out: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]


def load(plan: Plan, path: str | None) -> Data:
    """Returns the data, dealt at random but always alike."""
    if plan.mnist:
        with np.load(path) as file:
            x, y = file["x_train"], file["y_train"]
            test = _pooled(file["x_test"]), file["y_test"].astype(np.int32)
        x, y = _pooled(x), y.astype(np.int32)
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x, y = (x / 16).astype(np.float32), y.astype(np.int32)
        test = x[-500:], y[-500:]
        x, y = x[:-500], y[:-500]
    order = np.random.default_rng(0).permutation(len(x))
    count = plan.clients * plan.examples
    rows = order[:count].reshape(plan.clients, plan.examples)
    others = order[count:][: plan.held_out]
    return Data(
        clients=datasets.FederatedDataset.from_indices(x, y, rows),
        held_out=(x[others], y[others]),
        test=test,
    )


def _pooled(images: np.ndarray) -> np.ndarray:
    """Returns means of 4 x 4 pixels, float32 [count, 49]."""
    squares = images.reshape(-1, 7, 4, 7, 4).astype(np.float32) / 255
    return squares.mean(axis=(2, 4)).reshape(-1, 49)


def _model(features: int) -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((features,)),
            tf.keras.layers.Dense(10, kernel_initializer="zeros"),
        ]
    )


class Runner:
    """Trains with one kind of noise at a time."""

    def __init__(self, plan: Plan, data: Data):
        self.plan = plan
        self.data = data

    @functools.cache  # noqa: B019
    def mechanism(self, groups: int, method: str, epsilon: float) -> Any:
        """Returns the mechanism with the least noise for a target."""
        if method == NO_NOISE:
            return tfdp_fl.FixedClipping(clip_norm=CLIP, noise_multiplier=0.0)
        how = METHODS[method]
        options: dict[str, Any] = {"clip_norm": CLIP}
        if how.strategy is not None:
            options.update(strategy=how.strategy, min_separation=groups)
        return tfdp_fl.make_private(
            _model(2),
            target_epsilon=epsilon,
            target_delta=DELTA,
            num_clients=self.plan.clients,
            clients_per_round=self.plan.clients // groups,
            rounds=self.plan.rounds,
            mechanism="fixed" if how.strategy is None else "correlated",
            sampling=how.sampling,
            accountant="pld",
            **options,
        ).mechanism

    def run(
        self,
        stage: str,
        groups: int,
        method: str,
        epsilon: float,
        rate: float,
        seed: int,
    ) -> dict[str, Any]:
        """Trains once; returns a line of `runs.csv`."""
        started = time.perf_counter()
        tf.keras.backend.clear_session()
        mechanism = self.mechanism(groups, method, epsilon)
        features = self.data.test[0].shape[1]
        fed = tfdp_fl.DPFederatedModel(
            _model(features),
            mechanism,
            self.plan.clients // groups,
            METHODS[method].sampling if method in METHODS else "cyclic",
        )
        fed.compile(
            optimizer=tf.keras.optimizers.SGD(CLIENT_RATE),
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            # Only adds: the server's rate times the mean.
            server_optimizer=tf.keras.optimizers.SGD(rate),
        )
        fed.fit(
            self.data.clients,
            rounds=self.plan.rounds,
            batch_size=10,
            verbose=0,
            seed=seed,
        )
        x, y = self.data.held_out if stage == "choose" else self.data.test
        weights, bias = fed.get_weights()
        accuracy = float(np.mean(np.argmax(x @ weights + bias, axis=1) == y))
        spent = 0.0 if method == NO_NOISE else fed.epsilon(DELTA, "pld")
        if method != NO_NOISE and not spent <= epsilon * (1 + 1e-6):
            raise RuntimeError(f"{method} spent {spent}, not {epsilon}.")
        return {
            "stage": stage,
            "groups": groups,
            "method": method,
            "epsilon": epsilon,
            "rate": rate,
            "seed": seed,
            "accuracy": accuracy,
            "spent": spent,
            "noise_multiplier": mechanism.noise_multiplier,
            "seconds": round(time.perf_counter() - started, 2),
        }


class Table:
    """The lines of `runs.csv`, on the disk as soon as they are there."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                # A line that an interrupt cut off is run again.
                self.lines = [line for line in csv.DictReader(file) if line["seconds"]]
        self._write()

    def _write(self) -> None:
        with self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, _FIELDS)
            writer.writeheader()
            writer.writerows(self.lines)

    @staticmethod
    def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(
            float(line[name]) if name in ("epsilon", "rate") else str(line[name])
            for name in _KEY
        )

    def has(self, **key: Any) -> bool:
        """Whether a run is there."""
        return self._key(key) in {self._key(line) for line in self.lines}

    def add(self, line: Mapping[str, Any]) -> None:
        """Keeps a run."""
        self.lines.append({name: str(line[name]) for name in _FIELDS})
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, _FIELDS).writerow(line)

    def accuracies(self, **key: Any) -> list[float]:
        """Returns those of the runs that a part of a key names."""
        return [
            float(line["accuracy"])
            for line in self.lines
            if all(
                float(line[name]) == value
                if isinstance(value, float)
                else line[name] == str(value)
                for name, value in key.items()
            )
        ]


def cells(plan: Plan) -> Iterator[tuple[int, str, float]]:
    """Yields b, method and epsilon; no noise has an epsilon of 0."""
    for groups in plan.groups:
        yield groups, NO_NOISE, 0.0
        for epsilon in plan.epsilons:
            for method in plan.methods:
                yield groups, method, epsilon


def best_rate(
    plan: Plan, table: Table, groups: int, method: str, epsilon: float
) -> float:
    """Returns the rate that held-out clients like best, in the mean."""
    return max(
        plan.rates,
        key=lambda rate: statistics.fmean(
            table.accuracies(
                stage="choose",
                groups=groups,
                method=method,
                epsilon=epsilon,
                rate=rate,
            )
        ),
    )


def run_all(plan: Plan, runner: Runner, table: Table) -> None:
    """Runs what is not there yet: rates first, then the picture's seeds."""

    def run(**key: Any) -> None:
        if not table.has(**key):
            table.add(runner.run(**key))

    everything = list(cells(plan))
    for done, (groups, method, epsilon) in enumerate(everything, start=1):
        where: dict[str, Any] = {
            "groups": groups,
            "method": method,
            "epsilon": epsilon,
        }
        for rate in plan.rates:
            for seed in plan.tuning_seeds:
                run(stage="choose", rate=rate, seed=seed, **where)
        rate = best_rate(plan, table, **where)
        for seed in plan.seeds:
            run(stage="picture", rate=rate, seed=seed, **where)
        found = table.accuracies(stage="picture", **where)
        print(
            f"{done}/{len(everything)} b = {groups}, {method}, epsilon "
            f"= {epsilon:g}: rate {rate:g}, accuracy "
            f"{statistics.fmean(found):.4f}",
            flush=True,
        )


def summary(plan: Plan, table: Table) -> list[dict[str, Any]]:
    """Returns mean and deviation of every cell that is there."""
    lines = []
    for groups, method, epsilon in cells(plan):
        where: dict[str, Any] = {
            "groups": groups,
            "method": method,
            "epsilon": epsilon,
        }
        found = table.accuracies(stage="picture", **where)
        if not found:
            continue
        lines.append(
            {
                **where,
                "rate": best_rate(plan, table, **where),
                "seeds": len(found),
                "accuracy": round(statistics.fmean(found), 4),
                "deviation": round(
                    statistics.stdev(found) if len(found) > 1 else 0.0, 4
                ),
            }
        )
    return lines


def draw(plan: Plan, lines: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws accuracy against epsilon, a panel for each b."""
    figure, all_axes = plots.pyplot().subplots(
        1, len(plan.groups), figsize=(5 * len(plan.groups), 3.8), squeeze=False
    )
    for axes, groups in zip(all_axes[0], plan.groups, strict=True):
        for place, method in enumerate(plan.methods):
            points = [
                line
                for line in lines
                if line["groups"] == groups and line["method"] == method
            ]
            axes.errorbar(
                [line["epsilon"] for line in points],
                [line["accuracy"] for line in points],
                [line["deviation"] for line in points],
                fmt="o--" if method.startswith("sampled") else "o-",
                markersize=3,
                capsize=2,
                color=plots.COLORS[place % len(plots.COLORS)],
                label=method,
            )
        for line in lines:
            if line["groups"] == groups and line["method"] == NO_NOISE:
                axes.axhline(line["accuracy"], color="gray", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(plan.epsilons, [f"{e:g}" for e in plan.epsilons])
        axes.set_xlabel(f"epsilon at delta = {DELTA:g}")
        axes.set_title(
            f"b = {groups}: cohorts of {plan.clients // groups}", fontsize=10
        )
        axes.grid(alpha=0.3)
    all_axes[0][0].set_ylabel("test accuracy")
    all_axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plots.pyplot().close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, tabulates and draws."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--data_path", help="Keras's mnist.npz.")
    parser.add_argument("--quick", action="store_true", help="Digits, minutes.")
    parser.add_argument(
        "--groups",
        type=int,
        nargs="+",
        help="Values of b; by default 32 and 8.",
    )
    parser.add_argument("--epsilons", type=float, nargs="+", help="By default 1 to 16.")
    chosen = parser.parse_args(arguments)
    plan = QUICK if chosen.quick else Plan()
    if chosen.groups:
        plan = dataclasses.replace(plan, groups=tuple(chosen.groups))
    if chosen.epsilons:
        plan = dataclasses.replace(plan, epsilons=tuple(chosen.epsilons))
    path = chosen.data_path
    if plan.mnist and path is None:
        path = os.path.join(os.environ.get("TFDP_FL_DATA", "."), "mnist.npz")
    if plan.mnist and not os.path.isfile(path):
        print(f"--data_path must be Keras's mnist.npz, got {path}.")
        return 2
    training.use_one_thread_per_operation()
    folder = pathlib.Path(chosen.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    table = Table(folder / RUNS)
    run_all(plan, Runner(plan, load(plan, path)), table)
    lines = summary(plan, table)
    with (folder / SUMMARY).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    draw(plan, lines, folder / PICTURE)
    print(f"Files in {folder}: {RUNS}, {SUMMARY}, {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
