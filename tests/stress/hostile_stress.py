"""Every mechanism, on every way to train, attacked in every way by one client.

`tests/keras/hostile.py` says how far that client may get, and why. Where updates
arrive (TFF's factories, Flower) the client's data is its own affair, and the server
gets an update that may be anything. Without noise (or with noise too small to see), a
client that sends an update and one that sends zeros leave models at most c / m apart,
up to float32 roundings, here 1e-5 of it.
"""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.keras import hostile, hostile_test
from tests.outside.loading import smooth_clipping

_with_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed."
)
_with_tff = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_federated") is None,
    reason="TensorFlow Federated is not installed.",
)


def _attack(way, runtime=None):
    for case in hostile.CASES.values():
        trainer = hostile.Trainer(case, way, runtime)
        without = trainer.without()
        for attack in hostile.ATTACKS:
            hostile_test.check_attack(trainer, without, attack)
        if not way.startswith("streamed"):
            continue
        for failure in hostile.FAILURES:
            hostile_test.check_failure(trainer, without, failure)


@pytest.mark.parametrize("way", hostile.WAYS)
def test_in_this_process(way):
    _attack(way)


@_with_ray
def test_on_ray_workers():
    from tfdp_fl import runtimes

    with runtimes.RayWorkers(num_workers=2) as workers:
        _attack("ray_workers", workers)


@_with_tff
@pytest.mark.parametrize("name", ["fixed", "adaptive", "median", "correlated"])
def test_by_tff_learning(name):
    """`build_dp_fed_avg`, without noise that could be seen beside."""
    import tensorflow_federated as tff

    from tfdp_fl import learning

    exact = {"median_noise_multiplier": None} if name == "median" else {}
    mechanism = hostile.CASES[name].make()
    mechanism = dataclasses.replace(mechanism, noise_multiplier=1e-6, **exact)

    def batches(client):
        x, y = client
        slices = (x.astype(np.float32), y.astype(np.int32))
        rows = tf.data.Dataset.from_tensor_slices(slices)
        return rows.batch(hostile.EXAMPLES // 2)

    spec = batches(hostile.clients()[0]).element_spec
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    process = learning.build_dp_fed_avg(
        lambda: tff.learning.models.from_keras_model(
            hostile.model(), loss=loss, input_spec=spec
        ),
        mechanism,
        clients_per_round=hostile.CLIENTS,
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5),
    )
    state = process.initialize()

    def run(change):
        data = hostile.clients()
        data[hostile.HOSTILE] = change(data[hostile.HOSTILE])
        output = process.next(state, [batches(c) for c in data.values()])
        weights = process.get_model_weights(output.state).trainable
        flat = np.concatenate([np.ravel(w) for w in weights])
        return flat, output.metrics["aggregator"]

    without, seen = run(hostile.without_examples)
    bound = seen["clip_norm"] / hostile.CLIENTS * (1 + 1e-5) + 1e-5
    for attack, change in hostile.ATTACKS.items():
        result, seen = run(change)
        assert np.isfinite(result).all(), attack
        assert np.linalg.norm(result - without) <= bound, attack
        if attack in hostile_test.DISCARDED:
            assert seen["discarded_clients"] == 1, attack
    for failure in ("label_too_large", "wrong_shape"):
        with pytest.raises(Exception):  # noqa: B017 (TFF's own)
            run(hostile.FAILURES[failure])
    run(hostile.without_examples)  # The old state is still good.


# Updates that arrive.

_CLIP, _CLIENTS, _SIZE = 0.4, 4, 40
_TINY = 1e-6
_ALTERNATING = np.where(np.arange(_SIZE) % 2, 1e7, -1e7).astype(np.float32)
# An update, as a function of an honest one; whether it counts as zero.
_ATTACKS = {
    "nan": (lambda u: np.full_like(u, np.nan), True),
    "one_nan": (lambda u: np.where(np.arange(_SIZE) == 3, np.nan, u), True),
    "inf": (lambda u: np.full_like(u, np.inf), True),
    "minus_inf": (lambda u: np.full_like(u, -np.inf), True),
    "both_inf": (lambda u: np.where(u > 0, np.inf, -np.inf), True),
    "1e38": (lambda u: np.full_like(u, 1e38), None),
    "minus_1e38": (lambda u: np.full_like(u, -1e38), None),
    "1e19": (lambda u: np.full_like(u, 1e19), None),
    "denormal": (lambda u: np.full_like(u, 1e-42), False),
    "zero": (np.zeros_like, False),
    "a_million_times": (lambda u: u * np.float32(1e6), False),
    "cancelling": (lambda u: _ALTERNATING, False),
    "opposite": (lambda u: -3 * u, False),
}
_FIXED = {"clip_norm": _CLIP, "noise_multiplier": _TINY}
_CORRELATED = {"strategy": "blt:2", "rounds": 3, "min_separation": 1}
_LOCAL = {"epsilon": 1e12, "delta": 1e-3, "clipping_radius": _CLIP}
# Each mechanism nearly without noise, and its reach c.
_MECHANISMS = {
    "fixed": (tfdp_fl.FixedClipping(clip_norm=_CLIP, noise_multiplier=0.0), _CLIP),
    "fixed_client": (tfdp_fl.FixedClipping(**_FIXED, noise_site="client"), _CLIP),
    "adaptive": (
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=_CLIP),
        _CLIP,
    ),
    # All others have norm 1.
    "median": (tfdp_fl.MedianClipping(noise_multiplier=0.0), 1.0),
    "correlated": (tfdp_fl.CorrelatedNoise(**_FIXED, **_CORRELATED), _CLIP),
    "local": (tfdp_fl.LocalDP(**_FIXED), _CLIP),
    "adaptive_local": (tfdp_fl.AdaptiveLocalDP(**_LOCAL), 2**0.5 * _CLIP),
    "somebodys_own": (None, _CLIP),
}


def _mechanism(name):
    mechanism, reach = _MECHANISMS[name]
    if mechanism is None:
        mechanism = smooth_clipping()(start_norm=_CLIP, noise_multiplier=0.0)
    return mechanism, reach


def _updates():
    """Returns honest updates of norm 1, those of the others alike."""
    made = np.random.default_rng(0).normal(size=(2, _SIZE)).astype(np.float32)
    own, alike = made / np.linalg.norm(made, axis=1, keepdims=True)
    return [own] + [alike] * (_CLIENTS - 1)


def _check(run, without, reach, dtype=np.float32):
    """Attacks; yields what each left besides the result."""
    noise = (2 * _SIZE) ** 0.5 * 10 * _TINY * _CLIP
    bound = reach / _CLIENTS * (1 + 2e-5) + 1e-6 + noise
    for attack, (change, discarded) in _ATTACKS.items():
        with np.errstate(all="ignore"):
            result, seen = run(np.asarray(change(_updates()[0]), dtype))
        assert np.isfinite(result).all(), attack
        assert np.linalg.norm(result - without) <= bound, attack
        if seen is not None:
            assert seen["cohort_size"] == _CLIENTS
            if discarded is not None:
                assert seen["discarded_clients"] == discarded, attack


@_with_tff
@pytest.mark.parametrize("name", _MECHANISMS)
def test_updates_to_tff_factories(name):
    import tensorflow_federated as tff

    from tfdp_fl import aggregators

    mechanism, reach = _mechanism(name)
    options = {"rounds": 3} if name.endswith("local") else {}
    process = aggregators.from_mechanism(mechanism, _CLIENTS, **options).create(
        tff.to_type([(np.float32, [_SIZE // 2])] * 2)
    )
    state = process.initialize()

    def run(own):
        values = [np.split(u, 2) for u in [own, *_updates()[1:]]]
        output = process.next(state, values)
        return np.concatenate(output.result), output.measurements

    _check(run, run(np.zeros(_SIZE, np.float32))[0], reach)
    # Another shape or dtype is no value of a client of this process.
    few, double = np.zeros(_SIZE // 4, np.float32), np.zeros(_SIZE // 2, np.float64)
    for value in (few, double, "text"):
        with pytest.raises((TypeError, ValueError)):
            process.next(state, [[value, value]] * _CLIENTS)


@_with_tff
def test_weights_to_tff_factories():
    import tensorflow_federated as tff

    from tfdp_fl import aggregators

    process = aggregators.NbAFLFactory(
        epsilon=1e9,
        constant=1.0,
        weight_clip=_CLIP,
        clients_per_round=_CLIENTS,
        num_clients=_CLIENTS,
        rounds=3,
    ).create(tff.TensorType(np.float32, [_SIZE]), tff.TensorType(np.float32))
    state = process.initialize()

    def run(own):
        values = [own, *_updates()[1:]]
        return process.next(state, values, [5.0] * _CLIENTS).result, None

    # Whichever way its weights turn, or if they are left out.
    _check(run, run(_updates()[0])[0], 2 * _CLIP)


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize(
    "name", ["fixed", "fixed_client", "adaptive", "median", "somebodys_own"]
)
def test_replies_to_flower(name, clips):
    """With a client that clips, as it is told, and one that does not."""
    mechanism, reach = _mechanism(name)
    sizes = {"num_clients": _CLIENTS, "clients_per_round": _CLIENTS}

    def run(own):
        def change(replies):
            (one,) = [r for r in replies if r.metadata.src_node_id == 0]
            one.content["arrays"]["0"] = fm.Array(np.asarray(own))
            return replies

        strategy = tfdp_fl.flower.PrivateStrategy(
            fm.Strategy(_CLIENTS), mechanism, **sizes
        )
        grid = fm.Grid({i: fm.adds([u]) for i, u in enumerate([own, *_updates()[1:]])})
        if not clips:
            grid.change = change
        got, _ = fm.a_round(strategy, grid, fm.model(np.zeros(_SIZE)))
        return fm.arrays(got)[0], None

    if name == "fixed_client":
        # It keeps S + sigma (sqrt(D) + 9) of a client that should noise.
        reach += _TINY * _CLIP * (_SIZE**0.5 + 9)
    _check(run, run(np.zeros(_SIZE))[0], reach, np.float64)
