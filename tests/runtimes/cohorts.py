"""Cohorts that are trained here and on workers."""

import dataclasses
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.engine.cohorts import sequential
from tfdp_fl import secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

FEATURES, CLASSES, NUM_CLIENTS, ROUNDS = 40, 3, 14, 2

_layers = tf.keras.layers


def arrays(count=8 * NUM_CLIENTS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype(np.float32)
    return x, np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)


def in_rows(x, y, num_clients=NUM_CLIENTS, **options):
    """Returns clients with equally many of the examples."""
    rows = np.arange(len(y)).reshape(num_clients, -1)
    return FederatedDataset.from_indices(x, y, rows, **options)


def _alike():
    """Clients with two full batches each."""
    return in_rows(*arrays())


def _uneven():
    """Clients of 0 to 9 examples, some of which are of several clients."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 60, size) for size in [0, 9, 1, 4, 8, 3, 6] * 2]
    return FederatedDataset.from_indices(*arrays(60), rows)


def _streamed():
    """Clients that are read one by one, of which two cannot be."""

    def read(client):
        if client in (3, 8):
            raise OSError("gone")
        return arrays(5 + client % 3, seed=client)

    return FederatedDataset.from_client_fn(range(NUM_CLIENTS), read)


def _nested():
    """Features of two names and dtypes."""
    x, y = arrays()
    return in_rows({"z": x, "a": np.arange(len(x), dtype=np.uint8)[:, None]}, y)


def _weighted():
    weight = np.random.default_rng(2).exponential(size=8 * NUM_CLIENTS)
    return in_rows(*arrays(), sample_weight=weight)


def _mlp():
    # Wide enough for clients to be trained side by side.
    return sequential([FEATURES], _layers.Dense(60, "relu"), _layers.Dense(CLASSES))


def _with_state_and_noise():
    hidden = _layers.Dense(5), _layers.BatchNormalization(), _layers.Dropout(0.4)
    return sequential([FEATURES], *hidden, _layers.Dense(CLASSES))


def _two_inputs():
    a, z = _layers.Input((1,), name="a"), _layers.Input((FEATURES,), name="z")
    both = _layers.concatenate([_layers.Rescaling(0.01)(a), z])
    return tf.keras.Model({"z": z, "a": a}, _layers.Dense(CLASSES)(both))


def fixed(**changes):
    values = {"clip_norm": 0.05, "noise_multiplier": 0.0, **changes}
    return tfdp_fl.FixedClipping(**values)


def _local():
    return tfdp_fl.AdaptiveLocalDP(epsilon=100.0, delta=1e-5, clipping_radius=0.05)


def _noisy(weights, seed):
    return [w + 0.01 * tf.random.stateless_normal(w.shape, seed) for w in weights]


def _doubled(tensors):
    return [2.0 * each for each in tensors]


_HOOKS = {"broadcast_hook": _noisy, "upload_hook": _doubled}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Settings; `side_by_side` is what is to come of them.

    `small` is whether a cohort of them is not worth a second worker.
    """

    clients: object = _alike
    model: object = _mlp
    mechanism: object = fixed
    sampling: str = "fixed_size"
    options: dict = dataclasses.field(default_factory=dict)
    compiled: dict = dataclasses.field(default_factory=dict)
    fit: dict = dataclasses.field(default_factory=dict)
    side_by_side: bool = False
    small: bool = False

    def federated(self):
        tf.keras.utils.set_random_seed(1)
        how = (self.model(), self.mechanism(), 7, self.sampling)
        federated = tfdp_fl.DPFederatedModel(*how, num_replicas=1, **self.options)
        usual = {
            "optimizer": tf.keras.optimizers.SGD(0.2),
            "loss": tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "metrics": ["accuracy"],
            "jit_compile": None if self.side_by_side else False,
        }
        federated.compile(**{**usual, **self.compiled})
        return federated

    def train(self, federated, clients=None, **arguments):
        options = {"rounds": ROUNDS, "batch_size": 4, "seed": 5, "verbose": 0}
        with mock.patch.object(dense_models, "is_small", lambda *_: self.small):
            return federated.fit(
                self.clients() if clients is None else clients,
                **{**options, **self.fit, **arguments},
            )


CASES = {
    "side_by_side": Case(side_by_side=True),
    "small": Case(side_by_side=True, small=True),
    "one_by_one": Case(
        clients=_uneven,
        sampling="poisson",
        fit={"shuffle": True, "local_epochs": 2},
    ),
    "batch_normalization_and_dropout": Case(model=_with_state_and_noise),
    "nested_features": Case(clients=_nested, model=_two_inputs),
    "weights": Case(
        clients=_weighted, fit={"class_weight": {0: 0.1, 1: 4.0}}, side_by_side=True
    ),
    # With a seed, each client's own noise is the same wherever it trains.
    "windows": Case(mechanism=_local),
    "median": Case(
        mechanism=lambda: tfdp_fl.MedianClipping(noise_multiplier=0.5), clients=_uneven
    ),
    "secure_aggregation": Case(
        options={"secure_aggregation": secure_aggregation.AdditiveSecretSharing()}
    ),
    "hooks_variance_and_xla_here": Case(
        fit={"between_client_variance": True},
        compiled={"jit_compile": True, **_HOOKS},
    ),
}
ADAPTIVE = Case(
    mechanism=lambda: tfdp_fl.AdaptiveClipping(
        noise_multiplier=0.0, initial_clip_norm=0.05
    ),
    side_by_side=True,
)
STREAMED = Case(clients=_streamed)
