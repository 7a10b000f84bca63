"""Tests our side on tiny cases, and that TFF's side does the same work."""

import dataclasses
import importlib.util
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from research.benchmarking import engine_side, workloads

_TINY = dataclasses.replace(workloads.WORKLOADS["mlp_small"], clients=4)


class EngineSideTest(tf.test.TestCase, parameterized.TestCase):
    def _patched(self, patch):
        patch.start()
        self.addCleanup(patch.stop)

    def _side(self):
        self._patched(mock.patch.dict(workloads.WORKLOADS, mlp_small=_TINY))
        return engine_side.EngineSide(one_thread_per_operation=False)

    def test_every_round_is_timed_and_runs_are_equally_long(self):
        side = self._side()
        made = side.add("run", "mlp_small", warm_up=1)
        self.assertGreater(made["first_seconds"], 0)
        first = side.measure("run", 0.0, min_rounds=2)
        self.assertLen(first, 2)
        self.assertLen(side.measure("run", 100.0), 2)
        self.assertAllGreater(first, 0)

    def test_correlated_noise_has_three_buffers(self):
        side = self._side()
        side.add(
            "run",
            "mlp_small",
            mechanism="correlated",
            sampling="cyclic",
            population=8 * 4,
            warm_up=1,
        )
        state = side._runs["run"].federated_model.run.mechanism_state
        self.assertEqual(int(state.memory.position), 2)
        for buffer in state.memory.buffers:
            self.assertEqual(buffer.shape[0], 3)

    def test_tff_does_the_same_work(self):
        if importlib.util.find_spec("tensorflow_federated") is None:
            self.skipTest("TensorFlow Federated is not installed.")
        import tensorflow_federated as tff

        from research.benchmarking import tff_side

        self._patched(mock.patch.object(workloads, "NOISE_MULTIPLIER", 0.0))
        self._patched(mock.patch.object(workloads, "CLIP_NORM", 0.02))
        side = self._side()
        theirs = tff_side.TFFSide("mlp_small")
        tff.backends.native.set_sync_local_cpp_execution_context()
        process = tff_side.build_process(
            _TINY, "DATASET_ITERATOR", theirs._clients[0].element_spec
        )
        ours = engine_side._Run(
            _TINY,
            side._clients(_TINY, None),
            "fixed_size",
            "fixed",
            None,
        )
        weights = tff.learning.models.ModelWeights.from_model(
            ours.federated_model.model
        )
        weights = tf.nest.map_structure(
            lambda w: w.numpy(), [weights.trainable, weights.non_trainable]
        )
        state = process.set_model_weights(
            process.initialize(), tff.learning.models.ModelWeights(*weights)
        )
        state = process.next(state, theirs._clients).state
        ours.fit(1)
        moved = process.get_model_weights(state).trainable
        self.assertNotAllClose(moved[0], weights[0][0], atol=1e-7)
        for actual, expected in zip(
            ours.federated_model.get_weights(), moved, strict=True
        ):
            self.assertAllClose(actual, expected, atol=1e-6)
