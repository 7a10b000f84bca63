"""Where clients train, and a batch of them as one program: what one by one gives."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tests.scripts.programs import ROOT
from tfdp_fl import mechanisms
from tfdp_fl.engine import devices

_layers = tf.keras.layers
_SIZES = (5, 7, 5, 0, 3, 5, 12, 2)
_MECHANISMS = {
    "fixed": mechanisms.FixedClipping(clip_norm=0.1, noise_multiplier=0.0),
    "median": mechanisms.MedianClipping(noise_multiplier=0.0),
    "windows": mechanisms.AdaptiveLocalDP(epsilon=5, delta=1e-5),
}


def _with_state():
    stack = _layers.Dense(5), _layers.BatchNormalization(), _layers.Dropout(0.3)
    return cohorts.sequential([cohorts.FEATURES], *stack, _layers.Dense(3))


def _convolutions():
    stack = _layers.Conv2D(4, 3, activation="relu"), _layers.BatchNormalization()
    more = _layers.MaxPool2D(), _layers.Flatten(), _layers.Dense(3)
    return cohorts.sequential([6, 6, 2], *stack, *more)


def _engine(dataset, at_once, model, **options):
    with mock.patch.object(devices, "clients_at_once", lambda *_: at_once):
        return cohorts.make_engine(model, dataset, **options)


def _images(*sizes):
    rng = np.random.default_rng(0)
    return {
        k: (rng.normal(size=[n, 6, 6, 2]).astype("f4"), rng.integers(0, 3, n))
        for k, n in enumerate(sizes)
    }


@pytest.mark.parametrize(
    ("make_model", "name", "clients"),
    [
        # Of every size: no example, short and full batches, two epochs.
        (_with_state, "fixed", cohorts.client_arrays(_SIZES)),
        (cohorts.mlp, "windows", cohorts.client_arrays(_SIZES)),
        (_convolutions, "fixed", _images(5, 8, 10, 3)),
        (_convolutions, "fixed", _images(3)),  # A client without company.
    ],
)
def test_it_is_one_by_one_to_rounding(make_model, name, clients):
    dataset, found, windows = cohorts.from_arrays(clients), [], None
    options = {"mechanism": _MECHANISMS[name], "moments": name == "fixed"}
    options["training"] = {"metrics": ["accuracy"]}
    for at_once in (None, 3):
        tf.keras.utils.set_random_seed(2)
        model = make_model()
        engine = _engine(dataset, at_once, model, **options)
        if name == "windows":
            windows = np.full([len(_SIZES), 3, engine.num_variables], np.nan)
        logs = cohorts.run_round(engine, dataset, windows=windows)
        batched = at_once == 3 and len(clients) > 1
        assert ("batches of 3" in engine.executor) == batched
        found.append((model.get_weights(), logs))
    (one, logs), (batched, logs_batched) = found
    cohorts.assert_close(one, batched, atol=3e-6)
    cohorts.assert_close(logs, logs_batched, rtol=1e-5)


def test_a_batch_without_room_is_halved():
    dataset = cohorts.dataset((5,) * 9)
    whole, halved = (_engine(dataset, 8, cohorts.mlp()) for _ in range(2))
    expected = cohorts.run_round(whole, dataset)
    train = halved._train
    sizes = []

    def with_little_room(pending, chunk, part, thread):
        sizes.append(len(part.members))
        if sizes[-1] > 2:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        train(pending, chunk, part, thread)

    halved._train = with_little_room
    cohorts.assert_close(cohorts.run_round(halved, dataset), expected, rtol=1e-5)
    assert halved.layout.at_once == 2
    assert sum(size for size in sizes if size <= 2) == 9


def _words(*stack, **options):
    """Returns a model of two words, and four clients."""
    embedding = _layers.Embedding(4, 3, **options)
    model = cohorts.sequential([2], embedding, *stack, _layers.Dense(3), dtype="int32")
    x, y = np.array([[0, 1], [2, 3]], np.int32), np.array([0, 1])
    return model, dict.fromkeys(range(4), (x, y))


def test_who_raises_has_failed_alone():
    model, clients = _words(_layers.Flatten())
    clients[2] = (np.array([[0, 99], [1, 1]], np.int32), clients[2][1])
    dataset = cohorts.from_arrays(clients)
    pending = cohorts.collect(_engine(dataset, 4, model), dataset)
    assert [each.position for each in pending.failures] == [2]
    assert float(pending.sums[0].contribution.weight) == 3.0


class _Segments(_layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight(shape=[4], name="kernel")

    def call(self, x):
        ids = tf.reshape(tf.cast(x[:, :, 0], tf.int32), [-1])
        sums = tf.math.unsorted_segment_sum(tf.reshape(x[:, :, 1], [-1]), ids, 4)
        return tf.ones_like(x[:, 0, :1]) * (sums * self.kernel)


def test_nobody_writes_into_the_segments_of_another_client():
    updates = []
    for ids, size in (([[0, 1], [2, 3]], 1.0), ([[4, 5], [6, 7]], -1e3)):
        x = np.ones([3, 2, 2, 2], np.float32)
        x[:, :, :, 0] = [[0, 1], [2, 3]]
        x[0, :, :, 0], x[0, :, :, 1] = ids, size
        dataset = cohorts.from_arrays({k: (x[k], np.array([0, 1])) for k in range(3)})
        tf.keras.utils.set_random_seed(2)
        model = cohorts.sequential([2, 2], _Segments(), _layers.Dense(3))
        engine = _engine(dataset, 3, model, mechanism=_MECHANISMS["fixed"])
        # Vectorized, an index out of range would be another client's.
        assert engine.layout.at_once is None
        assert "UnsortedSegmentSum cannot be batched" in engine.executor
        update = cohorts.update_of(cohorts.collect(engine, dataset))
        updates.append(np.concatenate([part.ravel() for part in update]))
    assert np.linalg.norm(updates[1] - updates[0]) <= 2 * 0.1 * (1 + 1e-5)


def test_what_cannot_be_batched_trains_one_by_one():
    # TensorFlow cannot vectorize the gradient of a recurrent layer's mask.
    model, clients = _words(_layers.LSTM(2), mask_zero=True)
    dataset = cohorts.from_arrays(clients)
    engine = _engine(dataset, 3, model)
    for _ in range(2):
        pending = cohorts.collect(engine, dataset)
        assert float(pending.sums[0].contribution.weight) == 4.0
    assert "one by one" in engine.executor
    assert "not in batches: TensorFlow cannot vectorize" in engine.executor


# Two logical CPUs have to be asked for before TensorFlow starts.
_PROGRAM = """
import sys
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
from tests.engine import batched_test
batched_test.write_what_is_found_on_two_devices(sys.argv[1])
"""


def write_what_is_found_on_two_devices(path):
    dataset, found = cohorts.dataset((5, 3, 7, 5)), []
    for device, beside in itertools.product(("/CPU:0", "/CPU:1"), (True, False)):
        seen = set()
        with tf.device(device):
            net = cohorts.mlp()
        # Where the cohort sets the clip, all are clipped on one device.
        mechanism = _MECHANISMS["fixed" if beside else "median"]
        options = {"jit_compile": None, "num_replicas": 2}
        engine = cohorts.make_engine(net, dataset, mechanism=mechanism, **options)
        with cohorts.side_by_side(beside):
            for _ in range(2):
                pending = cohorts.collect(engine, dataset, noise_multiplier=0.5)
                leaves = tf.nest.flatten((pending.sums, pending.sent))
                seen.update(leaf.device for leaf in leaves)
                engine.release(pending)
        assert engine.has_trained_side_by_side == beside
        found.append([[each.tolist() for each in net.get_weights()], sorted(seen)])
    pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


def test_everything_is_computed_where_the_model_is(tmp_path):
    path = tmp_path / "found.json"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROGRAM, str(path)]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)
    found = json.loads(path.read_text(encoding="utf-8"))
    for (weights, first), (others, second) in zip(found[:2], found[2:], strict=True):
        assert weights == others
        assert [len(first), len(second)] == [1, 1]
        assert first[0].endswith("CPU:0")
        assert second[0].endswith("CPU:1")


def test_anything_else_than_a_cpu_batches():
    gpu, small = "/device:GPU:0", cohorts.mlp()
    assert devices.default_num_replicas(gpu) == 1
    assert devices.prefers_xla(small, 8)
    with mock.patch.object(devices, "home_of", return_value=gpu):
        assert not devices.prefers_xla(small, 8)
    assert devices.clients_at_once("/device:CPU:0", small, 63, 5) is None
    with mock.patch.object(devices, "_device_bytes", lambda _: 2.0**20):
        assert devices.clients_at_once(gpu, small, 63, 5) > 50
        assert devices.clients_at_once(gpu, small, 10**9, 5) == 1
