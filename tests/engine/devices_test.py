from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl.engine import devices

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# Two logical CPUs have to be asked for before TensorFlow starts.
_PROGRAM = """
import json, sys
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
import tfdp_fl
from tests.engine import cohorts

layers = tf.keras.layers
mechanisms = {
    "side by side": tfdp_fl.AdaptiveClipping(
        noise_multiplier=0.5, count_noise_stddev=1.0
    ),
    "one by one": tfdp_fl.MedianClipping(noise_multiplier=0.5),
}


def train(device, name):
    tf.keras.utils.set_random_seed(1)
    beside, dataset = name == "side by side", cohorts.dataset((5, 3, 7, 5))
    with tf.device(device):
        first = [] if beside else [layers.Reshape([4, 1]), layers.Conv1D(4, 3)]
        net = cohorts.sequential([4], *first, layers.Flatten(), layers.Dense(3))
    engine = cohorts.make_engine(
        net, dataset, mechanism=mechanisms[name], jit_compile=None, num_replicas=2
    )
    seen = set()
    with cohorts.side_by_side(beside):
        for _ in range(2):
            pending = cohorts.collect(engine, dataset, noise_multiplier=0.5)
            leaves = tf.nest.flatten((pending.sums, pending.sent))
            seen.update(leaf.device for leaf in leaves)
            engine.release(pending)
    assert engine.has_trained_side_by_side == beside
    return [each.tolist() for each in net.get_weights()], sorted(seen)


found = {
    name: [train(device, name) for device in ("/CPU:0", "/CPU:1")]
    for name in mechanisms
}
json.dump(found, open(sys.argv[1], "w"))
"""


def test_everything_is_computed_where_the_model_is(tmp_path):
    path = tmp_path / "found.json"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PROGRAM, str(path)]
    subprocess.run(command, check=True, cwd=_ROOT, env=environment, timeout=300)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert len(found) == 2
    for (weights, first), (others, second) in found.values():
        assert weights == others
        assert [len(first), len(second)] == [1, 1]
        assert first[0].endswith("CPU:0")
        assert second[0].endswith("CPU:1")


def test_what_was_measured_on_cpus_is_chosen_there_only():
    gpu = "/job:localhost/replica:0/task:0/device:GPU:0"
    assert not devices.is_cpu(gpu)
    assert devices.default_num_replicas(gpu) == 1
    assert devices.is_cpu(gpu.replace("GPU", "CPU"))
    small = cohorts.sequential([4], tf.keras.layers.Dense(2))
    assert devices.prefers_xla(small, 8)
    with mock.patch.object(devices, "home_of", return_value=gpu):
        assert not devices.prefers_xla(small, 8)
    # And anything else than a CPU batches.
    assert devices.clients_at_once("/device:CPU:0", small, 63, 5) is None
    with mock.patch.object(devices, "_device_bytes", lambda _: 2.0**20):
        assert devices.clients_at_once("/device:GPU:0", cohorts.mlp(), 63, 5) > 50
        assert devices.clients_at_once("/device:GPU:0", small, 10**9, 5) == 1
