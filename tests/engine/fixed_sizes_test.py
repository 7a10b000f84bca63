"""XLA compiles once for all rounds, and what is padded for it does nothing."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import calls, chunks, fixed_sizes

_BATCH = 5


def _distribution(values, chance):
    """Returns P(T = t) for t = 0, 1, ..., where each takes part by chance."""
    found = np.ones(1)
    for value in values:
        with_it = np.concatenate([np.zeros(value), chance * found])
        found = with_it + np.pad((1 - chance) * found, (0, value))
    return found


class LargestSumTest(parameterized.TestCase):
    @parameterized.parameters(
        ([1] * 400, 3.0),
        ([1] * 400, 40.0),
        ([1] * 350 + [60], 30.0),
        (list(range(100)), 10.0),
        ([0, 0, 7] * 40, 20.0),
    )
    def test_is_passed_with_chance_1e_15(self, values, expected):
        bound = fixed_sizes.largest_sum(np.array(values), expected, len(values))
        chances = _distribution(values, expected / len(values))
        self.assertLess(chances[bound:].sum(), 1e-15)
        # And not much larger than it has to be.
        self.assertGreater(chances[math.ceil(0.9 * bound) :].sum(), 1e-15)

    @parameterized.parameters((400, 100, 30), (60, 50, 40))
    def test_holds_of_cohorts_of_a_fixed_size(self, clients, ones, cohort):
        values = np.array([1] * ones + [0] * (clients - ones))
        bound = fixed_sizes.largest_sum(values, cohort, clients)
        ways = sum(
            math.comb(ones, k) * math.comb(clients - ones, cohort - k)
            for k in range(bound, min(ones, cohort) + 1)
        )
        self.assertLessEqual(ways * 10**15, math.comb(clients, cohort))

    def test_of_nothing_is_nothing(self):
        self.assertEqual(fixed_sizes.largest_sum(np.zeros(0, int), 5, 9), 0)
        self.assertEqual(fixed_sizes.largest_sum(np.zeros(9, int), 5, 9), 0)


class FixedSizesTest(absltest.TestCase):
    def test_cohorts_of_a_fixed_size_are_bounded_by_it(self):
        self.assertEqual(fixed_sizes.FixedSizes("fixed_size").cohort(7.0), 7)
        poisson = fixed_sizes.FixedSizes("poisson", 1000)
        self.assertBetween(poisson.cohort(7.0), 30, 45)
        self.assertEqual(fixed_sizes.FixedSizes("poisson", 9).cohort(7.0), 9)
        poisson.clients_per_round = 50.0  # In a later round.
        self.assertBetween(poisson.cohort(7.0), 100, 120)

    def test_sizes_grow_seldom(self):
        sizes = fixed_sizes.FixedSizes()
        found = [sizes.of("a", n, lambda: 10) for n in (3, 10, 0, 11, 15, 16)]
        self.assertEqual(found, [10, 10, 10, 15, 15, 22])

    def test_rows_are_no_more_than_a_chunk_has(self):
        sizes = fixed_sizes.FixedSizes("poisson")
        lengths = np.full(50, 20)
        for count in (20, 30, 1, 0, 32):
            found = sizes.rows(lengths[:count], "a", 100.0, 60_000)
            self.assertEqual(found, 640)
        self.assertBetween(sizes.rows(lengths, "b", 1.0, 2**26), 2000, 2500)


def _arrays(sizes, bad=()):
    """Returns clients of some sizes; those that are bad have a NaN each."""
    arrays = cohorts.client_arrays(sizes)
    for client in bad:
        arrays[client][0][0, 0] = np.nan
    return arrays


def _dataset(arrays, streamed):
    if streamed:
        return FederatedDataset.from_client_fn(list(arrays), arrays.__getitem__)
    return FederatedDataset.from_client_arrays(arrays)


class EngineTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((False, False), (True, True))
    def test_xla_compiles_once_for_each_replica(self, streamed, collects):
        rng = np.random.default_rng(0)
        arrays = _arrays((_BATCH * rng.integers(0, 5, 60)).tolist())
        dataset = _dataset(arrays, streamed)
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=0.0)
        if collects:
            mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.0)
        engine = cohorts.make_engine(
            cohorts.mlp(),
            dataset,
            mechanism=mechanism,
            jit_compile=True,
            num_replicas=2,
            sampling="poisson",
        )
        engine.expect(12.0)
        shapes = set()

        class Noted(calls.Call):
            def __init__(self, function, arguments):
                super().__init__(function, arguments)
                if any(function is each for each in traced.values()):
                    own = [tuple(each.shape) for each in self._arguments]
                    shapes.add((id(function), tuple(own)))

        traced = engine.functions.traced
        with mock.patch.object(calls, "Call", Noted):
            for size in (12, 3, 20, 1, 30, 0, 17, 2):
                positions = rng.choice(60, size, replace=False)
                cohorts.run_round(
                    engine,
                    dataset,
                    positions=positions,
                    clients_per_round=12.0,
                    batch_size=_BATCH,
                )
        self.assertTrue(all(way.xla for _, way, _ in traced))
        self.assertLen(traced, 2)
        self.assertLen(shapes, 2)

    @parameterized.parameters(
        *(("adaptive", False), ("median", True), ("local", True)),
        *(("nbafl", False), ("weighted", True), ("weighted", False)),
    )
    def test_what_is_padded_does_nothing(self, name, streamed):
        """Whatever the first client, whose rows a table is padded with, has."""
        mechanism = {
            "adaptive": tfdp_fl.AdaptiveClipping(
                noise_multiplier=0.1, count_noise_stddev=1.0
            ),
            "median": tfdp_fl.MedianClipping(noise_multiplier=1.0),
            "local": tfdp_fl.LocalDP(clip_norm=0.1, noise_multiplier=0.5),
            "weighted": tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=0.1),
            "nbafl": tfdp_fl.NbAFL(epsilon=50.0, constant=1.0, weight_clip=1.0),
        }[name]
        dataset = _dataset(_arrays((5, 10, 5, 0, 15), bad=(0, 4)), streamed)
        found = []
        for padding in (0, 7):
            with mock.patch.object(
                fixed_sizes.FixedSizes,
                "of",
                lambda self, name, needed, bound, more=padding: needed + more,
            ):
                model = cohorts.mlp()
                engine = cohorts.make_engine(
                    model,
                    dataset,
                    mechanism=mechanism,
                    jit_compile=True,
                    moments=name == "adaptive",
                    client_weighting=tfdp_fl.ClientWeighting.num_examples(20)
                    if name == "weighted"
                    else None,
                )
                logs = cohorts.run_round(engine, dataset, batch_size=_BATCH)
            ((_, way, _),) = engine.functions.traced
            self.assertTrue(way.xla)
            weights = np.concatenate([w.ravel() for w in model.get_weights()])
            found.append([*weights, *logs.values()])
        self.assertAllEqual(*found)  # To the last bit.


class ColumnTest(parameterized.TestCase):
    @parameterized.product(
        dtype=["float32", "float16", "int64", "uint8", "bool"],
        room=[0, 3, 7, 11, 10**6],
    )
    def test_examples_stand_as_they_were_before_zeros(self, dtype, room):
        rng = np.random.default_rng(0)
        parts = [rng.integers(0, 2, (n, 3)).astype(dtype) for n in (2, 0, 5)]
        column = chunks._Column(tf.as_dtype(dtype), (3,), room)
        for part in parts:
            column.append(part)
        tensor = column.tensor(11)
        self.assertEqual(tensor.dtype, dtype)
        self.assertEqual(tensor.shape, [11, 3])
        np.testing.assert_array_equal(tensor[:7], np.concatenate(parts))
        self.assertFalse(np.any(tensor[7:]))
        parts[0][:] = 1 - parts[0]  # Nobody else's memory.
        self.assertTrue((tensor[:2].numpy() != parts[0]).all())

    def test_strings(self):
        column = chunks._Column(tf.string, (), 0)
        column.append(np.array([b"a", b"bc"], object))
        self.assertEqual(column.tensor(3).numpy().tolist(), [b"a", b"bc", b""])


if __name__ == "__main__":
    absltest.main()
