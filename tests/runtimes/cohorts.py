"""Cohorts that are trained here and on workers, and what must hold of both."""

import dataclasses
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdp_fl
from tfdp_fl import secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

_FEATURES, _CLASSES, _NUM_CLIENTS, _ROUNDS = 40, 3, 14, 2

_layers = tf.keras.layers


def _arrays(count, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, _FEATURES)).astype(np.float32)
    return x, np.argmax(x[:, :_CLASSES], axis=1).astype(np.int32)


def _alike():
    """Clients with two full batches each."""
    x, y = _arrays(8 * _NUM_CLIENTS)
    return FederatedDataset.from_indices(
        x, y, np.arange(len(x)).reshape(_NUM_CLIENTS, 8)
    )


def _uneven():
    """Clients of 0 to 9 examples, some of which are of several clients."""
    x, y = _arrays(60)
    rng = np.random.default_rng(1)
    return FederatedDataset.from_indices(
        x, y, [rng.integers(0, 60, size) for size in [0, 9, 1, 4, 8, 3, 6] * 2]
    )


def _streamed():
    """Clients that are read one by one, of which two cannot be."""

    def read(client):
        if client in (3, 8):
            raise OSError("gone")
        return _arrays(5 + client % 3, seed=client)

    return FederatedDataset.from_client_fn(range(_NUM_CLIENTS), read)


def _nested():
    """Features of two names and dtypes."""
    x, y = _arrays(8 * _NUM_CLIENTS)
    return FederatedDataset.from_indices(
        {"z": x, "a": np.arange(len(x), dtype=np.uint8)[:, None]},
        y,
        np.arange(len(x)).reshape(_NUM_CLIENTS, 8),
    )


def _weighted():
    x, y = _arrays(8 * _NUM_CLIENTS)
    weight = np.random.default_rng(2).exponential(size=len(x))
    rows = np.arange(len(x)).reshape(_NUM_CLIENTS, 8)
    return FederatedDataset.from_indices(x, y, rows, sample_weight=weight)


def _sequential(*layers):
    return tf.keras.Sequential(
        [_layers.Input((_FEATURES,)), *layers, _layers.Dense(_CLASSES)]
    )


def _mlp():
    # Wide enough for clients to be trained side by side.
    return _sequential(_layers.Dense(60, activation="relu"))


def _with_state_and_noise():
    return _sequential(
        _layers.Dense(5), _layers.BatchNormalization(), _layers.Dropout(0.4)
    )


def _two_inputs():
    a, z = _layers.Input((1,), name="a"), _layers.Input((_FEATURES,), name="z")
    return tf.keras.Model(
        {"z": z, "a": a},
        _layers.Dense(_CLASSES)(_layers.concatenate([_layers.Rescaling(0.01)(a), z])),
    )


def _fixed(**changes):
    values = {"clip_norm": 0.05, "noise_multiplier": 0.0, **changes}
    return tfdp_fl.FixedClipping(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Case:
    """Settings; `side_by_side` is what is to come of them.

    `small` is whether a cohort of them is not worth a second worker.
    """

    clients: object = _alike
    model: object = _mlp
    mechanism: object = _fixed
    sampling: str = "fixed_size"
    options: dict = dataclasses.field(default_factory=dict)
    compiled: dict = dataclasses.field(default_factory=dict)
    fit: dict = dataclasses.field(default_factory=dict)
    side_by_side: bool = False
    small: bool = False


_CASES = {
    "side_by_side": _Case(side_by_side=True),
    "small": _Case(side_by_side=True, small=True),
    "adaptive": _Case(
        mechanism=lambda: tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.0, initial_clip_norm=0.05
        ),
        side_by_side=True,
    ),
    "one_by_one": _Case(
        clients=_uneven,
        sampling="poisson",
        fit={"shuffle": True, "local_epochs": 2},
    ),
    "batch_normalization_and_dropout": _Case(model=_with_state_and_noise),
    "nested_features": _Case(clients=_nested, model=_two_inputs),
    "streamed": _Case(clients=_streamed),
    "weights": _Case(
        clients=_weighted,
        fit={"class_weight": {0: 0.1, 1: 4.0}},
        side_by_side=True,
    ),
    # With a seed, each client's own noise is the same wherever it trains.
    "client_noise": _Case(
        mechanism=lambda: _fixed(noise_multiplier=0.5, noise_site="client"),
    ),
    "windows": _Case(
        mechanism=lambda: tfdp_fl.AdaptiveLocalDP(
            epsilon=100.0, delta=1e-5, clipping_radius=0.05
        ),
    ),
    "median": _Case(
        mechanism=lambda: tfdp_fl.MedianClipping(noise_multiplier=0.5),
        clients=_uneven,
    ),
    "secure_aggregation": _Case(
        options={"secure_aggregation": secure_aggregation.AdditiveSecretSharing()}
    ),
    "variance_and_xla_here": _Case(
        fit={"between_client_variance": True}, compiled={"jit_compile": True}
    ),
    "hooks": _Case(
        compiled={
            "broadcast_hook": lambda weights, seed: [
                w + 0.01 * tf.random.stateless_normal(w.shape, seed) for w in weights
            ],
            "upload_hook": lambda tensors: [2.0 * each for each in tensors],
        }
    ),
}


def _federated(case):
    tf.keras.utils.set_random_seed(1)
    federated = tfdp_fl.DPFederatedModel(
        case.model(),
        case.mechanism(),
        clients_per_round=7,
        sampling=case.sampling,
        num_replicas=1,
        **case.options,
    )
    federated.compile(
        optimizer=tf.keras.optimizers.SGD(0.2),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **{
            "jit_compile": None if case.side_by_side else False,
            **case.compiled,
        },
    )
    return federated


def _fit(federated, case, clients, **arguments):
    with mock.patch.object(dense_models, "is_small", lambda *_: case.small):
        return federated.fit(
            clients,
            **{
                "rounds": _ROUNDS,
                "batch_size": 4,
                "seed": 5,
                "verbose": 0,
                **case.fit,
                **arguments,
            },
        )


def assert_clip_holds(test, runtime, policy):
    """Fails if a client moves a model by more than its clip, on workers."""
    mixed_precision = tf.keras.mixed_precision
    mixed_precision.set_global_policy(policy)
    test.addCleanup(mixed_precision.set_global_policy, "float32")
    # Large features that cancel in the logits, small ones that add up.
    size, clip = 3000.0, 0.01
    sign = np.where(np.arange(10) % 2, 1.0, -1.0)
    x = np.full([10, 400], size * 2.0**-12 * 0.99) * sign[:, None]
    x[:, :2] = size
    clients = FederatedDataset.from_client_arrays(
        {0: (x.astype(np.float32), (sign > 0).astype(np.float32))}
    )
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [_layers.Input([400]), _layers.Dense(128), _layers.Dense(1)]
    )
    rows = model.layers[0].kernel.numpy()
    rows[1] = -rows[0]
    model.layers[0].kernel.assign(rows)
    federated = tfdp_fl.DPFederatedModel(
        model,
        _fixed(clip_norm=clip),
        clients_per_round=1,
        sampling="fixed_size",
        num_replicas=1,
    )
    federated.compile(
        tf.keras.optimizers.SGD(50.0),
        tf.keras.losses.BinaryCrossentropy(from_logits=True),
    )
    before = [w.astype(np.float64) for w in model.get_weights()]
    federated.fit(clients, batch_size=10, verbose=0, runtime=runtime)
    moved = [new - old for old, new in zip(before, model.get_weights(), strict=True)]
    made = federated.engine.programs.traced
    test.assertNotEmpty(made)
    test.assertTrue(all((strategy.kind == "side by side") for strategy in made))
    # Up to how a weight of 0.1 is rounded.
    norm = np.sqrt(sum(np.sum(part**2) for part in moved))
    test.assertBetween(norm, 0.01 * clip, clip * 1.001)


def assert_bounds_hold_history(test, runtime, loss, batch_size):
    """Whoever passes all bounds leaves the history in them."""
    x, _ = _arrays(7 * 7)
    y = np.full([len(x), _CLASSES], 2.0, np.float32)
    kernel = "glorot_uniform" if "error" in loss else "zeros"
    clients = {}
    for name, size, weight in (("usual", 1.0, 1.0), ("high", 1e18, 1e8)):
        own = np.where(np.arange(len(x))[:, None] // 7 == 3, size, x)
        clients[name] = FederatedDataset.from_indices(
            own.astype(np.float32),
            y,
            np.arange(len(x)).reshape(7, 7),
            sample_weight=np.where(own[:, 0] == size, weight, 1.0),
        )
    found = {}
    for name, each in clients.items():
        tf.keras.utils.set_random_seed(1)
        federated = tfdp_fl.DPFederatedModel(
            tf.keras.Sequential(
                [
                    _layers.Input((_FEATURES,)),
                    _layers.Dense(
                        _CLASSES,
                        kernel_initializer=kernel,
                        bias_initializer=tf.keras.initializers.Constant(0.5),
                    ),
                ]
            ),
            _fixed(),
            clients_per_round=7,
            sampling="fixed_size",
            num_replicas=1,
        )
        federated.compile(
            tf.keras.optimizers.SGD(0.2),
            loss,
            [tf.keras.metrics.CosineSimilarity(name="cosine")],
        )
        with mock.patch.multiple(dense_models, is_worthwhile=lambda *_: True):
            found[name] = federated.fit(
                each,
                batch_size=batch_size,
                verbose=0,
                seed=3,
                runtime=runtime,
            ).history
    high = found["high"]
    test.assertEqual(high["discarded_clients"], [0.0])
    test.assertLessEqual(abs(high["cosine"][0]), 1.0 + 1e-6)
    test.assertBetween(high["loss"][0], 1e6, 1e25)
    test.assertBetween(found["usual"]["loss"][0], 0.1, 10.0)
