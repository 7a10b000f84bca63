from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl.engine import devices

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_layers = tf.keras.layers

# Two logical CPUs have to be asked for before TensorFlow starts.
_PROGRAM = """
import sys
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
from tests.engine import devices_test
devices_test.write_what_is_found_on_two_devices(sys.argv[1])
"""


def _trained(device, beside):
    """Returns the weights of a model on a device, and where results were."""
    tf.keras.utils.set_random_seed(1)
    dataset, seen = cohorts.dataset((5, 3, 7, 5)), set()
    mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.5)
    if beside:
        count = {"count_noise_stddev": 1.0}
        mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=0.5, **count)
    with tf.device(device):
        first = [] if beside else [_layers.Reshape([4, 1]), _layers.Conv1D(4, 3)]
        net = cohorts.sequential([4], *first, _layers.Flatten(), _layers.Dense(3))
    engine = cohorts.make_engine(
        net, dataset, mechanism=mechanism, jit_compile=None, num_replicas=2
    )
    with cohorts.side_by_side(beside):
        for _ in range(2):
            pending = cohorts.collect(engine, dataset, noise_multiplier=0.5)
            leaves = tf.nest.flatten((pending.sums, pending.sent))
            seen.update(leaf.device for leaf in leaves)
            engine.release(pending)
    assert engine.has_trained_side_by_side == beside
    return [each.tolist() for each in net.get_weights()], sorted(seen)


def write_what_is_found_on_two_devices(path):
    found = [
        [_trained(device, beside) for device in ("/CPU:0", "/CPU:1")]
        for beside in (True, False)
    ]
    pathlib.Path(path).write_text(json.dumps(found), encoding="utf-8")


def test_everything_is_computed_where_the_model_is(tmp_path):
    path = tmp_path / "found.json"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROGRAM, str(path)]
    subprocess.run(command, check=True, cwd=_ROOT, env=environment, timeout=300)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert len(found) == 2
    for (weights, first), (others, second) in found:
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
