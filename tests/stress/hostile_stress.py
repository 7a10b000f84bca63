"""Every mechanism, on every way to train, attacked in every way by one client.

`tests/keras/hostile.py` says how far that client may get, and why. Updates that
arrive, in TFF or at Flower, may be anything: `tests/conformance` and
`tests/flower/private_strategy_test.py` attack by those.
"""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.keras import hostile, hostile_test, toy
from tfdp_fl import runtimes


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


def test_on_ray_workers():
    pytest.importorskip("ray")
    with runtimes.RayWorkers(num_workers=2) as workers:
        _attack("ray_workers", workers)


@pytest.mark.parametrize("name", ["fixed", "adaptive", "median", "correlated"])
def test_by_tff_learning(name):
    """`build_dp_fed_avg`, without noise that could be seen beside."""
    tff = pytest.importorskip("tensorflow_federated")
    from tfdp_fl import learning

    exact = {"median_noise_multiplier": None} if name == "median" else {}
    mechanism = hostile.CASES[name].make()
    mechanism = dataclasses.replace(mechanism, noise_multiplier=1e-6, **exact)

    def batches(client):
        x, y = client
        slices = x.astype(np.float32), y.astype(np.int32)
        return tf.data.Dataset.from_tensor_slices(slices).batch(hostile.EXAMPLES // 2)

    spec = batches(hostile.clients()[0]).element_spec
    process = learning.build_dp_fed_avg(
        lambda: tff.learning.models.from_keras_model(
            hostile.model(), loss=toy.loss(), input_spec=spec
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
        return toy.flat([*weights]), output.metrics["aggregator"]

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
