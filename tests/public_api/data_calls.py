"""Calls of data sets, workers, secure aggregation and Flower's wrappers."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.keras import toy
from tests.public_api import calling, names
from tfdp_fl import accounting, datasets
from tfdp_fl import secure_aggregation as secure


class _ClientData:
    """As TFF's `ClientData`."""

    client_ids = ("ann", "bob")

    def create_tf_dataset_for_client(self, client_id):
        return tf.data.Dataset.from_tensor_slices(toy.arrays(4))


def _files() -> pathlib.Path:
    """Writes small files in the formats that are read; returns where."""
    here = pathlib.Path("written")
    if not here.exists():
        here.mkdir()
        rng = np.random.default_rng(0)
        images = rng.integers(0, 255, [600, 28, 28], np.uint8)
        labels = np.repeat(np.arange(10), 60).astype(np.uint8)
        np.savez(
            here / "mnist.npz",
            x_train=images,
            y_train=labels,
            x_test=images[:20],
            y_test=labels[:20],
        )
        said = "ROMEO:\nO she doth teach the torches to burn bright.\n\n"
        (here / "plays.txt").write_text(said * 4 + said.replace("ROMEO", "NURSE") * 4)
        np.save(here / "array.npy", images[:3])
    return here


def _frame() -> pd.DataFrame:
    return pd.DataFrame(
        {"who": ["a", "a", "b"], "size": [1.0, 2.0, 3.0], "label": [0, 1, 0]}
    )


def _mnist(path: Any, **options: Any) -> Any:
    """Loads it; without a path it would be downloaded."""
    if path is None:
        raise ValueError("not here")
    return datasets.load_mnist(path=path, **options)


def _datasets() -> calling.Calls:
    d, made = datasets, datasets.FederatedDataset
    x, y = toy.arrays(20)
    ways: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "from_indices": ({"x": x, "y": y, "indices": [[0, 1], [2]]}, ()),
        "from_client_arrays": ({"clients": {0: (x, y)}}, ()),
        "from_dataframe": ({"frame": _frame(), "client": "who"}, ()),
        "from_client_data": ({"client_data": _ClientData()}, ()),
        "from_client_fn": (
            {"client_ids": ["ann", "bob"], "fn": lambda name: (x, y)},
            (),
        ),
    }
    for name, (given, paths) in ways.items():
        way = getattr(made, name)
        yield (
            f"datasets.FederatedDataset.{name}",
            lambda w=way, g=given, p=paths: calling.usual(w, **g, paths=p),
        )
    yield (
        "datasets.FederatedDataset.from_tf_datasets",
        lambda: calling.usual(
            made.from_tf_datasets,
            clients={0: tf.data.Dataset.from_tensor_slices((x, y))},
        ),
    )
    yield (
        "datasets.as_federated",
        lambda: calling.usual(d.as_federated, clients=[(x, y)]),
    )
    yield (
        "datasets.load_digits",
        lambda: calling.usual(d.load_digits, num_clients=10),
    )
    yield (
        "datasets.load_mnist",
        lambda: calling.usual(
            _mnist,
            path=_files() / "mnist.npz",
            num_clients=5,
            examples_per_client=20,
            shards_per_client=2,
            iid=False,
            flatten=True,
            validation_examples=0,
            seed=0,
            paths=("path",),
        ),
    )
    yield (
        "datasets.load_shakespeare",
        lambda: calling.usual(
            d.load_shakespeare,
            path=_files() / "plays.txt",
            sequence_length=10,
            paths=("path",),
        ),
    )
    yield (
        "datasets.partition",
        lambda: calling.usual(
            d.partition,
            labels=np.arange(40) % 4,
            num_clients=4,
            examples_per_client=4,
        ),
    )


class _Trained:
    """A strategy and a client of Flower's older API."""

    def configure_fit(self, server_round, parameters, client_manager):
        return []

    def aggregate_fit(self, server_round, results, failures):
        return None, {}

    def fit(self, parameters, config):
        return parameters, 1, {}


def _flower() -> calling.Calls:
    f = tfdp_fl.flower
    legacy = {"strategy": _Trained(), "num_sampled_clients": 3}
    options = calling.defaults(f.DPFedAvgFixed)
    yield (
        "flower.PrivateStrategy",
        lambda: calling.usual(
            f.PrivateStrategy,
            strategy=fm.Strategy(3),
            mechanism=calling.fixed(),
            num_clients=10,
            clients_per_round=3,
            errors=(accounting.LedgerError,),
            paths=("ledger",),
        ),
    )
    yield (
        "flower.DPFedAvg",
        lambda: calling.usual(f.DPFedAvg, **legacy, mechanism=calling.fixed()),
    )
    yield (
        "flower.DPFedAvgFixed",
        lambda: calling.Call(
            function=f.DPFedAvgFixed,
            arguments={**options, **legacy, "clip_norm": 1.0},
            errors=(accounting.LedgerError,),
            paths=("ledger",),
        ),
    )
    yield (
        "flower.DPFedAvgAdaptive",
        lambda: calling.usual(f.DPFedAvgAdaptive, **legacy, clip_count_stddev=3.0),
    )
    yield (
        "flower.DPFedAvgNumPyClient",
        lambda: calling.usual(f.DPFedAvgNumPyClient, client=_Trained()),
    )
    yield (
        "flower.DPFedAvgNumPyClient and fit",
        lambda: calling.Call(
            function=lambda client, parameters, **config: f.DPFedAvgNumPyClient(
                client
            ).fit(parameters, config),
            arguments={
                "client": _Trained(),
                "parameters": [np.zeros(3)],
                "dpfedavg_clip_norm": 1.0,
                "dpfedavg_noise_stddev": 0.1,
                "dpfedavg_adaptive_clip_enabled": True,
            },
        ),
    )


def _secure() -> calling.Calls:
    s = secure
    protocol = s.AdditiveSecretSharing()
    update = np.ones([3])
    yield (
        "secure_aggregation.AdditiveSecretSharing",
        lambda: calling.usual(s.AdditiveSecretSharing),
    )
    yield (
        "secure_aggregation.Coordinator",
        lambda: calling.usual(s.Coordinator, protocol=protocol, group_size=3),
    )
    yield (
        "secure_aggregation.Member",
        lambda: calling.usual(
            s.Member,
            protocol=protocol,
            member_id="ann",
            update=update,
            members=("ann", "bob", "cat"),
            session="s",
        ),
    )
    yield (
        "secure_aggregation.Message",
        lambda: calling.usual(
            s.Message, kind="share", session="s", sender="ann", recipient="bob"
        ),
    )
    yield (
        "secure_aggregation.split_into_groups",
        lambda: calling.usual(
            s.split_into_groups, num_members=9, protocol=protocol, group_size=3
        ),
    )
    yield (
        "secure_aggregation.sum_in_groups",
        lambda: calling.usual(
            s.sum_in_groups,
            updates=[update] * 6,
            protocol=protocol,
            group_size=3,
        ),
    )


def _runtimes() -> calling.Calls:
    r = tfdp_fl.runtimes
    if names.can_be_made("runtimes.RayWorkers"):
        yield (
            "runtimes.RayWorkers",
            lambda: calling.usual(r.RayWorkers, num_workers=2),
        )


def calls() -> calling.Calls:
    """Yields them."""
    yield from _datasets()
    yield from _flower()
    yield from _secure()
    yield from _runtimes()
