r"""Four hospitals' heart patients: what a guarantee for each patient costs.

    python research/hospitals.py [DIRECTORY]    # of the four CSV files
    python research/hospitals.py nvflare [DIRECTORY]

UCI's heart disease data (CC BY 4.0): Cleveland, Hungary, Switzerland, Long Beach, 909
patients, a row each. A logistic regression is trained on 70 % of each hospital's
patients, five splits, and tested on the others: alone, pooled, federated, with and
without privacy, and with the privacy of a hospital as a whole. Each federated run is
four `tfdp_fl.Silo`s and an average by their declared sizes. Settings were chosen on
other splits, uncounted; features are scaled by public constants. Writes
research/hospitals.json, prints the table and draws it.

`nvflare` runs research/nvflare_silo.py in NVFlare's simulator, in an environment that
it builds under build/.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import venv
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_ROOT = pathlib.Path(__file__).parents[1]
_RESULTS = pathlib.Path(__file__).with_suffix(".json")
_PICTURE = _ROOT / "docs/images/hospitals.png"
_DATA = _ROOT.parent / "shared/data/heart"
HOSPITALS = {  # By their files.
    "cleveland": "Cleveland",
    "hungarian": "Hungary",
    "switzerland": "Switzerland",
    "va": "Long Beach",
}
_SEEDS, _EPSILONS, DELTA = range(5), (1.0, 2.0, 4.0, 8.0), 1e-4
_MESSAGES, _ROUNDS = 10, 2  # Of a federated run; and rounds for each message.
_LEARNING_RATE = _CLIP_NORM = 3.0

# Column, middle and scale; of public knowledge about adults, not of these patients.
_NUMBERS = {
    "Age": (55, 10),
    "RestingBP": (130, 20),
    "MaxHR": (140, 25),
    "OldPeak": (1, 1),
}
_CATEGORIES = {
    **{"Sex": (1,), "FastingBS": (1,), "ExerciseAngina": (1,)},
    **{"ChestPainType": (1, 2, 3, 4), "RestingECG": (0, 1, 2), "ST_Slope": (1, 2, 3)},
}


def table(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns a hospital's features [n, 19] and labels [n]; a row is a patient."""
    rows = np.genfromtxt(path, delimiter=",", names=True)
    columns = [(rows[name] - a) / b for name, (a, b) in _NUMBERS.items()]
    measured = rows["Cholesterol"] > 0  # It is 0 where nobody measured it.
    columns += [np.where(measured, (rows["Cholesterol"] - 240) / 60, 0.0)]
    columns += [measured.astype(float)]
    for name, values in _CATEGORIES.items():
        columns += [rows[name] == value for value in values]
    x = np.clip(np.stack(columns, axis=1), -3, 3).astype(np.float32)
    return x, rows["HeartDisease"].astype(np.int32)


def split(x: np.ndarray, y: np.ndarray, seed: int) -> tuple[Any, Any]:
    """Returns (x, y) of 70 % of the patients, and of the others, by their labels."""
    from sklearn import model_selection

    training, others = model_selection.train_test_split(
        np.arange(len(y)), test_size=0.3, stratify=y, random_state=seed
    )
    return (x[training], y[training]), (x[others], y[others])


def build(num_people: int, epsilon: float | None, features: int = 19) -> Any:
    """Returns a compiled model whose target is epsilon; None: without privacy."""
    import tensorflow as tf

    import tfdp_fl

    layers = tf.keras.layers
    dense = layers.Dense(1, activation="sigmoid", kernel_initializer="zeros")
    model = tf.keras.Sequential([layers.Input((features,)), dense])
    if epsilon is None:
        fed: Any = tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), num_people)
    else:
        fed = tfdp_fl.make_private(
            model,
            target_epsilon=epsilon,
            target_delta=DELTA,
            num_clients=num_people,
            clients_per_round=num_people,
            rounds=_MESSAGES * _ROUNDS,
            mechanism="fixed",
            clip_norm=_CLIP_NORM,
        )
    optimizer = tf.keras.optimizers.SGD(_LEARNING_RATE)
    fed.compile(optimizer=optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    return fed


def silo(
    x: np.ndarray, y: np.ndarray, epsilon: float, directory: str | os.PathLike[str]
) -> Any:
    """Returns a hospital's silo."""
    import tfdp_fl

    make = functools.partial(build, len(y), epsilon)
    ids = np.arange(len(y))
    options = {"rounds": _ROUNDS, "batch_size": 1, "directory": directory}
    return tfdp_fl.Silo(make, x, y, client_ids=ids, **options)


def average(answers: list[list[np.ndarray]], sizes: list[int]) -> list[np.ndarray]:
    """Returns the weights that a server makes of the hospitals' answers."""
    shares = np.array(sizes) / sum(sizes)
    parts = zip(*answers, strict=True)
    return [np.tensordot(shares, np.stack(each), 1).astype("f4") for each in parts]


def federated(
    trainers: list[Callable[[Any], Any]], sizes: list[int], messages: int = _MESSAGES
) -> list[np.ndarray]:
    """Returns the model after so many messages to each hospital."""
    weights = [np.zeros((19, 1), np.float32), np.zeros(1, np.float32)]
    for _ in range(messages):
        weights = average([train(weights) for train in trainers], sizes)
    return weights


def _fit(fed: Any, x: np.ndarray, y: np.ndarray, rounds: int) -> None:
    ids = np.arange(len(y))
    fed.fit(x, y, client_ids=ids, rounds=rounds, batch_size=1, verbose=0)


def _of_silos(tables: list[Any], epsilon: float) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        silos = [
            silo(x, y, epsilon, pathlib.Path(folder) / name)
            for name, (x, y) in zip(HOSPITALS, tables, strict=True)
        ]
        trainers = [lambda w, one=one: one.train(w).weights for one in silos]
        weights = federated(trainers, [len(y) for _, y in tables])
        spent = max(one.epsilon(DELTA) for one in silos)
        assert epsilon * 0.98 < spent <= epsilon * (1 + 1e-9), spent
        return weights


def _without_privacy(tables: list[Any]) -> list[np.ndarray]:
    def trainer(x: np.ndarray, y: np.ndarray) -> Callable[[Any], Any]:
        fed = build(len(y), None)

        def train(weights: Any) -> Any:
            fed.set_weights(weights)
            _fit(fed, x, y, _ROUNDS)
            return fed.get_weights()

        return train

    return federated([trainer(*each) for each in tables], [len(y) for _, y in tables])


def _of_whole_hospitals(tables: list[Any], epsilon: float) -> list[np.ndarray]:
    """Returns a model whose guarantee is for a hospital, one client of four."""
    fed = build(len(tables), epsilon)
    fed.fit(tables, rounds=_MESSAGES * _ROUNDS, batch_size=512, verbose=0)
    return fed.get_weights()


def _alone(x: np.ndarray, y: np.ndarray, epsilon: float) -> list[np.ndarray]:
    fed = build(len(y), epsilon)
    _fit(fed, x, y, _MESSAGES * _ROUNDS)
    return fed.get_weights()


def _auc(y: np.ndarray, scores: np.ndarray) -> float:
    from sklearn import metrics

    return float(metrics.roc_auc_score(y, scores))


def _by_sklearn(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    from sklearn import linear_model

    fitted = linear_model.LogisticRegression(max_iter=1000).fit(x, y)
    return [fitted.coef_.T, fitted.intercept_]


def rows(data: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields a row for each way, epsilon and split, with the AUC of each hospital."""
    tables = [table(data / f"{name}.csv") for name in HOSPITALS]
    for seed in _SEEDS:
        parts = [split(x, y, seed) for x, y in tables]
        training, others = [a for a, _ in parts], [b for _, b in parts]
        pooled = [np.concatenate(each) for each in zip(*training, strict=True)]

        def row(
            way: str, epsilon: float | None, models: list[Any], seed=seed, others=others
        ) -> dict[str, Any]:
            scores = [
                (x @ w + b)[:, 0] for (x, _), (w, b) in zip(others, models, strict=True)
            ]
            labels = [y for _, y in others]
            auc = {
                name: _auc(y, score)
                for name, y, score in zip(HOSPITALS, labels, scores, strict=True)
            }
            everybody = np.concatenate(labels), np.concatenate(scores)
            auc["all"] = _auc(*everybody)
            return {"way": way, "epsilon": epsilon, "seed": seed, "auc": auc}

        yield row("alone", None, [_by_sklearn(*each) for each in training])
        yield row("pooled", None, 4 * [_by_sklearn(*pooled)])
        yield row("federated", None, 4 * [_without_privacy(training)])
        for epsilon in _EPSILONS:
            yield row("federated", epsilon, 4 * [_of_silos(training, epsilon)])
            yield row("alone", epsilon, [_alone(x, y, epsilon) for x, y in training])
            whole = _of_whole_hospitals(training, epsilon)
            yield row("whole hospitals", epsilon, 4 * [whole])


def summary(found: list[dict[str, Any]]) -> dict[tuple, dict[str, tuple]]:
    """Returns mean and spread over splits, by way and epsilon, for each hospital."""
    groups: dict[tuple, list[dict[str, float]]] = {}
    for row in found:
        groups.setdefault((row["way"], row["epsilon"]), []).append(row["auc"])
    return {
        key: {
            name: (
                float(np.mean([auc[name] for auc in each])),
                float(np.std([auc[name] for auc in each], ddof=1)),
            )
            for name in (*HOSPITALS, "all")
        }
        for key, each in groups.items()
    }


def draw(found: list[dict[str, Any]]) -> None:
    """Draws the AUC over epsilon, for each hospital and for all."""
    from matplotlib import figure

    means = summary(found)
    drawn = figure.Figure(figsize=(9.6, 2.9), layout="constrained")
    names = (*HOSPITALS, "all")
    for axes, name in zip(drawn.subplots(1, 5, sharey=True), names, strict=True):
        for way, line in {"pooled": ":", "federated": "--", "alone": "-."}.items():
            level = means[way, None][name][0]
            axes.axhline(level, color="gray", ls=line, lw=1, label=f"{way}, no privacy")
        for way in ("federated", "alone", "whole hospitals"):
            values = [means[way, epsilon][name] for epsilon in _EPSILONS]
            axes.errorbar(_EPSILONS, *zip(*values, strict=True), marker="o", label=way)
        title = HOSPITALS.get(name, name)
        axes.set(title=title, xlabel="epsilon", xscale="log")
        axes.set_xticks(_EPSILONS, [f"{epsilon:g}" for epsilon in _EPSILONS])
        axes.set_xticks([], minor=True)
    drawn.axes[0].set_ylabel("AUC, new patients")
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8)
    drawn.savefig(_PICTURE, dpi=150)


def nvflare(data: pathlib.Path, epsilon: float = 4.0) -> None:
    """Runs nvflare_silo.py for each hospital, in NVFlare's simulator."""
    folder = _ROOT / "build/nvflare"
    if not (folder / "bin/python").exists():
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q"]
        wanted = ["-r", str(_ROOT / "requirements/nvflare.in")]
        subprocess.run([*pip, *wanted], check=True)
    if pathlib.Path(sys.prefix).resolve() != folder.resolve():
        again = map(str, (folder / "bin/python", __file__, "nvflare", data))
        environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
        subprocess.run([*again], check=True, env=environment)
        return
    from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
    from nvflare.recipe import SimEnv

    from tfdp_fl import accounting

    with tempfile.TemporaryDirectory() as silos:
        recipe = NumpyFedAvgRecipe(
            name="hospitals",
            model=20 * [0.0],
            min_clients=len(HOSPITALS),
            num_rounds=_MESSAGES,
            train_script=str(pathlib.Path(__file__).with_name("nvflare_silo.py")),
            train_args=f"{data} {silos} {epsilon}",
        )
        recipe.execute(SimEnv(clients=[*HOSPITALS], workspace_root=f"{silos}/run"))
        saved = next(pathlib.Path(silos).rglob("server.npy"))
        *kernel, bias = np.load(saved)
        for name in HOSPITALS:
            _, (x, y) = split(*table(data / f"{name}.csv"), 0)
            auc = _auc(y, x @ np.array(kernel) + bias)
            path = pathlib.Path(silos) / name / "ledger.jsonl"
            spent = accounting.epsilon_from_ledger(path, DELTA, "pld")
            print(f"{name}: AUC {auc:.3f}, epsilon {accounting.format_up(spent)}")


def main() -> None:
    """Trains, keeps the rows, prints their means and draws them."""
    arguments = [each for each in sys.argv[1:] if each != "nvflare"]
    data = pathlib.Path(arguments[0] if arguments else _DATA).resolve()
    if "nvflare" in sys.argv:
        nvflare(data)
        return
    warnings.filterwarnings("ignore", "target of make_private")
    found = []
    for row in rows(data):
        print(row["way"], row["epsilon"], row["seed"], row["auc"], flush=True)
        found.append(row)
        _RESULTS.write_text(json.dumps(found, indent=0) + "\n")
    for (way, epsilon), auc in summary(found).items():
        shown = " ".join(f"{n} {mean:.3f} ± {s:.3f}" for n, (mean, s) in auc.items())
        print(f"{way}, {epsilon}: {shown}")
    draw(found)


if __name__ == "__main__":
    main()
