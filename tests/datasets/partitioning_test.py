from __future__ import annotations

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.datasets import images


def _labels(n: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(3).permutation(np.arange(n) % classes)


def _labels_per_client(labels, clients) -> list[int]:
    return [len(np.unique(labels[rows])) for rows in clients]


class PartitionTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_one_pass_uses_every_example_once(self, iid):
        clients = images.partition(_labels(600), 30, 20, iid=iid)
        self.assertEqual(clients.shape, (30, 20))
        self.assertEqual(clients.dtype, np.int32)
        np.testing.assert_array_equal(np.sort(clients.ravel()), np.arange(600))

    @parameterized.parameters(True, False)
    def test_passes_repeat_examples_but_no_client_has_one_twice(self, iid):
        clients = images.partition(_labels(600), 95, 20, iid=iid)
        self.assertEqual(clients.shape, (95, 20))
        for rows in clients:
            self.assertLen(np.unique(rows), 20)
        uses = np.bincount(clients.ravel(), minlength=600)
        self.assertEqual(uses.min(), 3)
        self.assertEqual(uses.max(), 4)

    @parameterized.parameters(1, 2, 4)
    def test_shards_bound_the_labels_of_a_client(self, shards):
        labels = _labels(800)  # 80 of each: shards do not straddle labels.
        clients = images.partition(labels, 100, 20, shards)
        seen = _labels_per_client(labels, clients)
        self.assertEqual(max(seen), shards)

    def test_what_does_not_fill_a_client_is_left_out(self):
        clients = images.partition(_labels(65), 3, 20)
        self.assertLen(np.unique(clients), 60)

    def test_repeats_with_its_seed(self):
        first, again, other = (
            images.partition(_labels(600), 30, 20, seed=seed) for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(first, again)
        self.assertTrue(np.any(first != other))

    @parameterized.parameters(
        ({"num_clients": 0}, "num_clients must be"),
        ({"examples_per_client": 601}, "examples_per_client must be at most"),
        ({"examples_per_client": 21}, "multiple of shards_per_client"),
        ({"shards_per_client": 0}, "shards_per_client must be"),
        ({"seed": -1}, "seed must be"),
    )
    def test_refuses(self, wrong, message):
        arguments = {"num_clients": 3, "examples_per_client": 20, **wrong}
        with self.assertRaisesRegex(ValueError, message):
            images.partition(_labels(600), **arguments)


class StratifiedSplitTest(parameterized.TestCase):
    @parameterized.parameters(1, 50, 123, 599)
    def test_both_parts_have_labels_in_proportion(self, held_out):
        labels = np.repeat([0, 1, 2], [300, 200, 100])
        kept, held = images.stratified_split(labels, held_out)
        np.testing.assert_array_equal(
            np.sort(np.concatenate([kept, held])), np.arange(600)
        )
        self.assertLen(held, held_out)
        counts = np.bincount(labels[held], minlength=3)
        expected = held_out * np.array([3, 2, 1]) / 6
        self.assertLessEqual(np.abs(counts - expected).max(), 1)

    def test_is_random_within_a_label_and_always_the_same(self):
        labels = np.zeros(100, int)
        _, held = images.stratified_split(labels, 50)
        _, again = images.stratified_split(labels, 50)
        np.testing.assert_array_equal(held, again)
        self.assertGreater(len(np.unique(np.diff(held))), 1)


if __name__ == "__main__":
    absltest.main()
