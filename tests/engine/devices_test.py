from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import tensorflow as tf
from absl.testing import absltest

from tfdp_fl.engine import devices

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# Two logical CPUs have to be asked for before TensorFlow starts.
_PROGRAM = """
import json, sys
import numpy as np
import tensorflow as tf

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
import tfdp_fl
from tfdp_fl.engine import engine

rng = np.random.default_rng(0)
clients = {
    f"c{k}": (rng.normal(size=[12, 6, 1]).astype("f4"), rng.integers(0, 3, 12))
    for k in range(8)
}
layers = tf.keras.layers
seen = set()
collect = engine.CohortEngine.collect


def noting(self, *args):
    pending = collect(self, *args)
    leaves = tf.nest.flatten((pending.sums, pending.sent))
    seen.update(leaf.device for leaf in leaves)
    return pending


engine.CohortEngine.collect = noting


def train(device, side_by_side):
    tf.keras.utils.set_random_seed(1)
    seen.clear()
    with tf.device(device):
        first = [] if side_by_side else [layers.Conv1D(4, 3)]
        net = tf.keras.Sequential(
            [tf.keras.Input([6, 1]), *first, layers.Flatten(), layers.Dense(3)]
        )
    mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.5)
    if side_by_side:
        mechanism = tfdp_fl.AdaptiveClipping(
            noise_multiplier=0.5, count_noise_stddev=1.0
        )
    fed = tfdp_fl.DPFederatedModel(net, mechanism, 4, sampling="fixed_size")
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(0.1), loss)
    fed.fit(clients, rounds=2, batch_size=4, seed=5, verbose=0)
    return [each.tolist() for each in fed.model.get_weights()], sorted(seen)


found = {
    name: [train(device, name == "side by side") for device in ("/CPU:0", "/CPU:1")]
    for name in ("side by side", "one by one")
}
json.dump(found, open(sys.argv[1], "w"))
"""


class DevicesTest(tf.test.TestCase):
    def test_everything_is_computed_where_the_model_is(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "found.json"
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, str(path)],
                check=True,
                cwd=_ROOT,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                timeout=300,
            )
            found = json.loads(path.read_text(encoding="utf-8"))
        self.assertLen(found, 2)
        for name, (first, second) in found.items():
            with self.subTest(name):
                self.assertEqual(first[0], second[0])
                self.assertLen(first[1], 1)
                self.assertLen(second[1], 1)
                self.assertEndsWith(first[1][0], "CPU:0")
                self.assertEndsWith(second[1][0], "CPU:1")

    def test_what_was_measured_on_cpus_is_chosen_there_only(self):
        gpu = "/job:localhost/replica:0/task:0/device:GPU:0"
        self.assertFalse(devices.is_cpu(gpu))
        self.assertEqual(devices.default_num_replicas(gpu), 1)
        self.assertTrue(devices.is_cpu(gpu.replace("GPU", "CPU")))
        small = tf.keras.Sequential([tf.keras.Input([4]), tf.keras.layers.Dense(2)])
        self.assertTrue(devices.prefers_xla(small, 8))
        with absltest.mock.patch.object(devices, "home_of", return_value=gpu):
            self.assertFalse(devices.prefers_xla(small, 8))
