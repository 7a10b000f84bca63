"""Every mechanism, on every way to train, attacked in every way by one client.

`tests/keras/hostile.py` says how far that client may get, and why. Ways that
need a network or TFF are in files of their own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import unittest

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tests.keras import hostile, hostile_test

_TFF = importlib.util.find_spec("tensorflow_federated")
_RAY = importlib.util.find_spec("ray")


class HostileClientTest(parameterized.TestCase):
    def _attack(self, way, runtime=None):
        for case in hostile.CASES.values():
            trainer = hostile.Trainer(case, way, runtime)
            without = trainer.without()
            for attack in hostile.ATTACKS:
                hostile_test.check_attack(self, trainer, without, attack)
            if not way.startswith("streamed"):
                continue
            for failure in hostile.FAILURES:
                hostile_test.check_failure(self, trainer, without, failure)

    @parameterized.parameters(*hostile.WAYS)
    def test_in_this_process(self, way):
        self._attack(way)

    @unittest.skipIf(_RAY is None, "Ray is not installed.")
    def test_on_ray_workers(self):
        from tfdp_fl import runtimes

        with runtimes.RayWorkers(num_workers=2) as workers:
            self._attack("ray_workers", workers)

    @unittest.skipIf(_TFF is None, "TensorFlow Federated is not installed.")
    @parameterized.parameters("fixed", "adaptive", "median", "correlated")
    def test_by_tff_learning(self, name):
        """`build_dp_fed_avg`, without noise that could be seen beside."""
        import tensorflow_federated as tff

        from tfdp_fl import learning

        mechanism = dataclasses.replace(
            hostile.CASES[name].make(),
            noise_multiplier=1e-6,
            **({"median_noise_multiplier": None} if name == "median" else {}),
        )

        def batches(client):
            x, y = client
            return tf.data.Dataset.from_tensor_slices(
                (x.astype(np.float32), y.astype(np.int32))
            ).batch(hostile.EXAMPLES // 2)

        spec = batches(hostile.clients()[0]).element_spec
        process = learning.build_dp_fed_avg(
            lambda: tff.learning.models.from_keras_model(
                hostile.model(),
                loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                input_spec=spec,
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
            return (
                np.concatenate([np.ravel(w) for w in weights]),
                output.metrics["aggregator"],
            )

        without, seen = run(hostile.without_examples)
        reach = seen["clip_norm"]
        for attack, change in hostile.ATTACKS.items():
            result, seen = run(change)
            self.assertTrue(np.isfinite(result).all(), attack)
            self.assertLessEqual(
                np.linalg.norm(result - without),
                reach / hostile.CLIENTS * (1 + 1e-5) + 1e-5,
                attack,
            )
            if attack in hostile_test.DISCARDED:
                self.assertEqual(seen["discarded_clients"], 1, attack)
        for failure in ("label_too_large", "wrong_shape"):
            with self.assertRaises(Exception):  # noqa: B017 (TFF's own)
                run(hostile.FAILURES[failure])
        run(hostile.without_examples)  # The old state is still good.


if __name__ == "__main__":
    absltest.main()
