"""Where clients train, and a batch of them as one program: what one by one gives."""

import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tests.keras import toy
from tests.scripts.programs import ROOT
from tfdp_fl import mechanisms
from tfdp_fl.engine import client_programs, devices, layout
from tfdp_fl.engine import engine as engine_lib

_layers = tf.keras.layers
_SIZES = (5, 7, 5, 0, 3, 5, 12, 2)
_MECHANISMS = {
    "fixed": mechanisms.FixedClipping(clip_norm=0.1, noise_multiplier=0.0),
    "median": mechanisms.MedianClipping(noise_multiplier=0.0),
    "windows": mechanisms.AdaptiveLocalDP(epsilon=5, delta=1e-5),
}


def _convolutions():
    stack = _layers.Conv2D(4, 2, activation="relu", padding="same"), _layers.MaxPool2D()
    more = _layers.BatchNormalization(), _layers.Flatten(), _layers.Dropout(0.3)
    image = _layers.Reshape([2, 2, 1])
    return cohorts.sequential([4], image, *stack, *more, _layers.Dense(3))


@pytest.mark.parametrize(
    ("make_model", "name"), [(cohorts.mlp, "windows"), (_convolutions, "fixed")]
)
def test_it_is_one_by_one_to_rounding(make_model, name):
    # Of every size: no example, short and full batches, two epochs.
    dataset, engines, windows = cohorts.dataset(_SIZES), [], None
    options = {"mechanism": _MECHANISMS[name], "training": {"metrics": ["accuracy"]}}
    options["between_client_variance"] = name == "fixed"
    for at_once in (None, 3):
        toy.seed(2)
        model = make_model()
        engine = cohorts.make_engine(model, dataset, at_once=at_once, **options)
        engines.append((model, engine))
    start = model.get_weights()
    for data in (dataset, cohorts.dataset((3,))):  # The last one without company.
        found = []
        for model, engine in engines:
            if name == "windows":
                windows = np.full([data.num_clients, 3, engine.num_variables], np.nan)
            model.set_weights(start)
            logs = cohorts.run_round(engine, data, windows=windows)
            batches = "batches of 3" in engine.executor
            assert batches == (model is engines[1][0])
            found.append((model.get_weights(), logs))
        (one, logs), (batched, logs_batched) = found
        cohorts.assert_close(one, batched, atol=3e-6)
        cohorts.assert_close(logs, logs_batched, rtol=1e-5)


def test_a_batch_without_room_is_halved():
    dataset = cohorts.dataset((5,) * 9)
    one_by_one, halved = (
        cohorts.make_engine(cohorts.mlp(), dataset, at_once=k) for k in (None, 8)
    )
    expected = cohorts.run_round(one_by_one, dataset)
    train = halved._train
    sizes = []

    def with_little_room(pending, chunk, part):
        sizes.append(len(part.members))
        if sizes[-1] > 2:
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        return train(pending, chunk, part)

    halved._train = with_little_room
    cohorts.assert_close(cohorts.run_round(halved, dataset), expected, rtol=1e-5)
    assert halved.layout.batched_clients == 2
    assert sum(size for size in sizes if size <= 2) == 9


class _Segments(_layers.Layer):
    def build(self, _):
        self.kernel = self.add_weight(shape=[4], name="kernel")

    def call(self, x):
        ids = tf.reshape(tf.cast(x[:, :, 0], tf.int32), [-1])
        sums = tf.math.unsorted_segment_sum(tf.reshape(x[:, :, 1], [-1]), ids, 4)
        return tf.ones_like(x[:, 0, :1]) * (sums * self.kernel)


def test_nobody_writes_into_the_segments_of_another_client():
    updates, datasets = [], []
    for ids, size in (([[0, 1], [2, 3]], 1.0), ([[4, 5], [6, 7]], -1e3)):
        x = np.ones([3, 2, 2, 2], np.float32)
        x[:, :, :, 0] = [[0, 1], [2, 3]]
        x[0, :, :, 0], x[0, :, :, 1] = ids, size
        clients = {k: (x[k], np.array([0, 1])) for k in range(3)}
        datasets.append(cohorts.from_arrays(clients))
    toy.seed(2)
    model = cohorts.sequential([2, 2], _Segments(), _layers.Dense(3))
    options = {"mechanism": _MECHANISMS["fixed"], "at_once": 3}
    engine = cohorts.make_engine(model, datasets[0], **options)
    # Vectorized, an index out of range would be another client's.
    assert engine.layout.batched_clients is None
    assert "UnsortedSegmentSum cannot be batched" in engine.executor
    for dataset in datasets:
        update = cohorts.update_of(cohorts.collect(engine, dataset))
        updates.append(np.concatenate([part.ravel() for part in update]))
    assert np.linalg.norm(updates[1] - updates[0]) <= 2 * 0.1 * (1 + 1e-5)


# Two logical CPUs have to be asked for before TensorFlow starts.
_PROGRAM = """
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
from tests.engine import batched_test
batched_test.compute_on_the_second_device()
"""


def compute_on_the_second_device():
    dataset = cohorts.dataset((5, 3, 4, 5))
    # The widths that bits allow are no matter of devices.
    engine_lib._COMPARED = 4
    for beside in (True, False):
        seen = set()
        with tf.device("/CPU:1"):
            net = cohorts.mlp()
        # Where the cohort sets the clip, all are clipped on one device.
        mechanism = _MECHANISMS["fixed" if beside else "median"]
        options = {"jit_compile": None, "max_parallel_clients": 2}
        engine = cohorts.make_engine(net, dataset, mechanism=mechanism, **options)
        with cohorts.side_by_side(beside, steps=(2,)):
            for _ in range(2):
                pending = cohorts.collect(engine, dataset, noise_multiplier=0.5)
                leaves = tf.nest.flatten((pending.sums, pending.broadcast[:2]))
                seen.update(leaf.device[-5:] for leaf in leaves)
                engine.release(pending, cohorts.paid())
        assert engine.has_trained_side_by_side == beside
        assert seen == {"CPU:1"}


def test_everything_is_computed_where_the_model_is():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROGRAM]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)


def test_anything_else_than_a_cpu_batches():
    gpu, small = "/device:GPU:0", cohorts.mlp()
    assert devices.default_parallel_clients(gpu) == 1
    assert devices.clients_per_call("/device:CPU:0", small, 63, 5) is None
    with mock.patch.object(devices, "_device_bytes", lambda _: 2.0**20):
        assert devices.clients_per_call(gpu, small, 63, 5) > 50
        assert devices.clients_per_call(gpu, small, 10**9, 5) == 1


def test_where_batches_cannot_be_traced_what_takes_their_place_is():
    dataset = cohorts.dataset((4, 70, 5))
    engine = cohorts.make_engine(
        cohorts.mlp(), dataset, at_once=2, jit_compile=None, max_parallel_clients=2
    )
    assert engine.layout.kernels is not None
    failing = mock.Mock(side_effect=ValueError("no rule"))
    with (
        cohorts.side_by_side(steps=(2,)),
        mock.patch.object(client_programs.CohortPrograms, "_train_batched", failing),
    ):
        cohorts.run_round(engine, dataset)
    assert "cannot vectorize" in engine.executor
    assert {used.kind for used in engine.used_strategies} == {
        layout.ONE_BY_ONE,
        layout.SIDE_BY_SIDE,
    }


def test_batches_take_the_place_of_what_xla_would_compile():
    dataset = cohorts.dataset(_SIZES)
    options = {"mechanism": _MECHANISMS["fixed"], "at_once": 3}
    engine = cohorts.make_engine(cohorts.mlp(), dataset, jit_compile=True, **options)
    cohorts.collect(engine, dataset)
    assert {used.kind for used in engine.used_strategies} == {layout.BATCHED}
