"""How many clients train at once, where rounds are timed to tell.

No test here hangs on time: the clock, or what it said, is made up.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import replica_choice
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_MECHANISMS = {
    "none": tfdp_fl.NoPrivacy(),
    "fixed": tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0),
    "median": tfdp_fl.MedianClipping(noise_multiplier=1.0),
    "local": tfdp_fl.AdaptiveLocalDP(epsilon=50.0, delta=1e-5, window=2),
}


def _round(dataset: FederatedDataset, **changes):
    return cohorts.inputs(dataset, **{"positions": np.zeros(0, np.int64), **changes})


class ReplicaChoiceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(tempfile.mkdtemp())
        self.enter_context(mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder)))
        self.file = self.folder / "tfdp_fl" / "num_replicas.json"
        self.dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())

    def _engine(self, mechanism=None, **options):
        return cohorts.make_engine(
            cohorts.mlp(),
            self.dataset,
            mechanism=mechanism,
            **{"num_replicas": 2, **options},
        )

    def _choose(self, engine, says=None, **changes):
        """Chooses, where rounds take what is given; None: none is timed."""

        def timed(engine, run, numbers):
            self.assertIsNotNone(says, "It was timed again.")
            return {number: [says[number]] for number in numbers}

        with mock.patch.object(replica_choice, "_alternate", timed):
            return replica_choice.choose(
                engine,
                _round(self.dataset, **changes),
                self.dataset.client_sizes(),
                self.dataset.element_spec,
            )

    def test_the_fastest_is_used_and_kept(self):
        first, second = self._engine(), self._engine()
        choice = self._choose(first, {2: 1.0, 1: 0.5})
        self.assertFalse(choice.was_kept)
        self.assertEqual(choice.seconds, {2: 1.0, 1: 0.5})
        self.assertIn(str(self.file), choice.describe())
        again = self._choose(second)
        self.assertTrue(again.was_kept)
        for engine, found in ((first, choice), (second, again)):
            self.assertEqual(found.num_replicas, 1)
            self.assertEqual(engine.num_replicas, 1)
            self.assertEmpty(engine.functions.variables)
            self.assertLessEqual({key[0] for key in engine.functions.traced}, {0})

    @parameterized.parameters(
        ({2: 1.0, 1: 0.5}, 1),
        ({2: 0.5, 1: 1.0}, 2),
        ({2: 1.0, 1: 1.0}, 2),
        ({2: 1.0, 1: 0.96}, 2),  # Not clearly.
        ({2: 1.0, 1: 0.94}, 1),
        ({4: 1.0, 2: 0.3, 1: 0.5}, 2),
    )
    def test_which_is_the_fastest(self, seconds, expected):
        self.assertEqual(replica_choice._fastest(seconds), expected)

    def test_candidates_are_halved(self):
        seen = {}

        def timed(engine, run, numbers):
            for number in numbers:
                engine.num_replicas = number
                seen[number] = len(run().sums)
            return {number: [1.0 / number] for number in numbers}

        engine = self._engine(num_replicas=5)
        with mock.patch.object(replica_choice, "_alternate", timed):
            replica_choice.choose(
                engine,
                _round(self.dataset),
                np.full(9, 3),
                self.dataset.element_spec,
            )
        # As many train at once as were asked for.
        self.assertEqual(seen, {5: 4, 2: 2, 1: 1})
        self.assertEqual(engine.num_replicas, 5)

    def test_a_huge_cohort_is_timed_in_part(self):
        engine = self._engine()
        seen = []

        def timed(engine, run, numbers):
            seen.append(run().cohort_size)
            return {number: [1.0] for number in numbers}

        with mock.patch.object(replica_choice, "_alternate", timed):
            replica_choice.choose(
                engine,
                _round(self.dataset, clients_per_round=1e6),
                np.zeros(7, np.int64),  # And nobody has any examples.
                self.dataset.element_spec,
            )
        self.assertEqual(seen, [replica_choice._MOST_CLIENTS])

    def test_rounds_are_timed_in_turns(self):
        engine = self._engine()
        clock = itertools.accumulate(itertools.repeat(0.001))
        order = []

        def run():
            order.append(engine.num_replicas)

        with mock.patch.object(
            replica_choice.time, "perf_counter", lambda: next(clock)
        ):
            taken = replica_choice._alternate(engine, run, [2, 1])
        rounds = replica_choice._MOST_ROUNDS
        self.assertEqual(order, [2, 1] * rounds)
        for seconds in taken.values():
            np.testing.assert_allclose(seconds, [0.001] * rounds)

        slow = itertools.accumulate(itertools.repeat(10.0))
        with mock.patch.object(replica_choice.time, "perf_counter", lambda: next(slow)):
            taken = replica_choice._alternate(engine, run, [2, 1])
        self.assertLen(taken[2], replica_choice._LEAST_ROUNDS)

    @parameterized.named_parameters(*_MECHANISMS.items())
    def test_a_round_afterwards_is_that_of_the_number(self, mechanism):
        """Nothing that was timed is left in the model or the state."""
        windows = None
        if isinstance(mechanism, tfdp_fl.AdaptiveLocalDP):
            windows = np.full((self.dataset.num_clients, 2, 4), 0.1, np.float32)
        changes = {"noise_multiplier": 1.0, "windows": windows}
        results = []
        for measured in (True, False):
            engine = self._engine(mechanism, num_replicas=2 if measured else 1)
            before = [each.numpy() for each in engine.server.variables]
            if measured:
                self._choose(engine, {2: 1.0, 1: 0.1}, noise_multiplier=1.0)
                self.assertFalse(engine.has_trained)
                for variable, old in zip(engine.server.variables, before, strict=True):
                    np.testing.assert_array_equal(variable.numpy(), old)
            cohorts.run_round(engine, self.dataset, **changes)
            results.append([each.numpy() for each in engine.server.variables])
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_xla_compiles_for_the_clients_and_not_for_the_zeros(self):
        engine = self._engine(jit_compile=True)
        sizes = engine.layout.sizes
        with mock.patch.object(sizes, "forget", wraps=sizes.forget) as forget:
            self._choose(engine, {2: 1.0, 1: 0.1}, batch_size=1)
        forget.assert_called_once_with()
        self.assertEmpty(sizes._known)
        cohorts.run_round(engine, self.dataset, batch_size=1)
        self.assertNotEmpty(sizes._known)

    def test_what_it_hangs_on_is_in_the_key(self):
        self._choose(self._engine(), {2: 1.0, 1: 0.1})
        self.assertLen(json.loads(self.file.read_text()), 1)
        self._choose(self._engine(), {2: 1.0, 1: 2.0}, batch_size=3)
        self._choose(self._engine(), {2: 1.0, 1: 2.0}, clients_per_round=2.0)
        self._choose(self._engine(_MECHANISMS["median"]), {2: 1.0, 1: 2.0})
        with mock.patch.object(replica_choice, "_processor", return_value="another"):
            self._choose(self._engine(), {2: 1.0, 1: 2.0})
        kept = json.loads(self.file.read_text())
        self.assertCountEqual(
            [each["num_replicas"] for each in kept.values()], [1, 2, 2, 2, 2]
        )
        # And the first is still what it was.
        self.assertEqual(self._choose(self._engine()).num_replicas, 1)

    @parameterized.parameters(
        "",
        "[1, 2]",
        "not JSON",
        '{"KEY": 1}',
        '{"KEY": {"num_replicas": 1, "seconds": {"2": 1.0}}}',
        '{"KEY": {"num_replicas": 1, "seconds": 4}}',
        '{"KEY": {"num_replicas": [1], "seconds": {"1": 1}}}',
    )
    def test_a_file_of_something_else_has_no_choice(self, text):
        self.file.parent.mkdir()
        good = {"num_replicas": 1, "seconds": {"1": 1.0, "2": 2.0}}
        self.file.write_text(json.dumps({"KEY": good}))
        self.assertEqual(replica_choice._kept(self.file), {"KEY": good})
        self.file.write_text(text)
        self.assertEqual(replica_choice._kept(self.file), {})

    def test_what_cannot_be_read_is_written_over(self):
        self.file.parent.mkdir()
        self.file.write_text("not JSON")
        engine = self._engine()
        self.assertFalse(self._choose(engine, {2: 1.0, 1: 0.1}).was_kept)
        self.assertLen(json.loads(self.file.read_text()), 1)

    def test_a_folder_that_cannot_be_is_no_error(self):
        (self.folder / "tfdp_fl").write_text("A file.")
        engine = self._engine()
        self.assertFalse(self._choose(engine, {2: 1.0, 1: 0.1}).was_kept)
        self.assertEqual(engine.num_replicas, 1)

    def test_a_model_that_cannot_train_on_zeros_stays_as_it_is(self):
        def loss(y, predicted):
            # The engine is made with batches of one.
            alone = tf.debugging.assert_less(tf.shape(predicted)[0], 2)
            with tf.control_dependencies([alone]):
                return tf.reduce_mean(tf.square(predicted), axis=-1)

        engine = self._engine(loss=loss)
        self.assertIsNone(self._choose(engine, {2: 1.0, 1: 0.1}))
        self.assertEqual(engine.num_replicas, 2)
        self.assertFalse(self.file.exists())

    def test_one_replica_is_no_choice(self):
        self.assertIsNone(self._choose(self._engine(num_replicas=1)))

    def test_a_typical_cohort(self):
        typical = replica_choice._typical
        sizes = np.array([0, 1, 2, 1234, 98765])
        self.assertEqual(typical(sizes, 5).tolist(), [0, 1, 2, 1200, 99000])
        self.assertEqual(typical(sizes, 1).tolist(), [2])
        self.assertEqual(typical(np.zeros(0), 3).tolist(), [1, 1, 1])
        self.assertLen(typical(sizes, 7), 7)


class FitTest(parameterized.TestCase):
    """`num_replicas="measured"`, as users ask for it."""

    def setUp(self):
        super().setUp()
        self.enter_context(
            mock.patch.dict(os.environ, XDG_CACHE_HOME=tempfile.mkdtemp())
        )
        self.enter_context(
            mock.patch.object(
                replica_choice.engine_lib.devices,
                "default_num_replicas",
                return_value=2,
            )
        )
        self.timed = self.enter_context(
            mock.patch.object(
                replica_choice,
                "_alternate",
                side_effect=lambda engine, run, numbers: {
                    number: [float(number)] for number in numbers
                },
            )
        )

    @parameterized.named_parameters(
        ("in memory", {}, False),
        ("streamed", {}, True),
        (
            "secret shares",
            {"secure_aggregation": AdditiveSecretSharing()},
            False,
        ),
        ("poisson", {"sampling": "poisson"}, False),
        ("not seeded", {"noise_generator": "exact"}, False),
    )
    def test_fit(self, options, streamed):
        clients = toy.clients()
        if streamed:
            held = clients
            clients = FederatedDataset.from_client_fn(
                range(held.num_clients), lambda k: held.client(k)
            )
        seed = None if "noise_generator" in options else 3
        weights = []
        for number in ("measured", 1):
            fed = toy.federated(num_replicas=number, **options)
            with mock.patch("builtins.print") as said:
                fed.fit(clients, 1, batch_size=5, seed=seed, verbose=2)
            told = [str(call) for call in said.mock_calls]
            self.assertEqual(
                any("num_replicas is 1" in each for each in told),
                number == "measured",
            )
            self.assertEqual(fed.engine.num_replicas, 1)
            fed.fit(clients, 1, batch_size=5, seed=seed, verbose=0)
            weights.append(fed.get_weights())
        self.assertEqual(self.timed.call_count, 1)
        if seed is not None:
            for one, other in zip(*weights, strict=True):
                np.testing.assert_array_equal(one, other)

    def test_words_are_checked(self):
        with self.assertRaisesRegex(ValueError, "num_replicas must be .*mea"):
            toy.federated(num_replicas="fastest")


if __name__ == "__main__":
    absltest.main()
