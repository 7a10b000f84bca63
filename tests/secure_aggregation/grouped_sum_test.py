"""A cohort summed in groups, and what each party sees of it."""

from __future__ import annotations

import numpy as np
from absl.testing import parameterized
from scipy import stats

from tests.secure_aggregation.network import Network
from tfdp_fl.secure_aggregation import (
    AdditiveSecretSharing,
    split_into_groups,
    sum_in_groups,
)


class SplitTest(parameterized.TestCase):
    @parameterized.product(size=(3, 4, 5, 7, 50, 100, 101), group=(3, 5, 10))
    def test_no_group_is_too_small_and_all_are_in_one(self, size, group):
        groups = split_into_groups(size, AdditiveSecretSharing(), group)
        self.assertEqual([i for g in groups for i in g], list(range(size)))
        sizes = [len(g) for g in groups]
        self.assertGreaterEqual(min(sizes), min(size, group))
        self.assertLess(max(sizes), 2 * group)
        self.assertLessEqual(max(sizes) - min(sizes), 1)

    def test_limits_that_can_not_be_kept(self):
        protocol = AdditiveSecretSharing(min_participants=5, max_participants=6)
        with self.assertRaisesRegex(ValueError, "cohort of 7 "):
            split_into_groups(7, protocol)
        for group_size in (2, 101):  # Of two each reads the other; 101 may wrap.
            with self.assertRaisesRegex(ValueError, f"got {group_size}"):
                split_into_groups(202, AdditiveSecretSharing(), group_size)


class SumInGroupsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.updates = list(rng.normal(size=(17, 40)).astype(np.float32))
        self.protocol = AdditiveSecretSharing()

    @parameterized.product(
        kind=({"bits": 32}, {"bits": 64}, {"mode": "float"}),
        dtype=(np.float32, np.float64),
    )
    def test_total_and_groups(self, kind, dtype):
        protocol = AdditiveSecretSharing(**kind)
        updates = [update.astype(dtype) for update in self.updates]
        result = sum_in_groups(updates, protocol, group_size=5)
        self.assertEqual(result.failed_members, ())
        self.assertEqual(result.succeeded_members, tuple(range(17)))
        tolerance = 1e-11
        if kind == {"bits": 32}:
            tolerance = 17 * protocol.resolution / 2
        self.assertLen(result.groups, 3)
        for indices, outcome in result.groups:
            self.assertTrue(outcome.succeeded)
            self.assertEqual(outcome.members, indices)
            np.testing.assert_allclose(
                outcome.value,
                sum(updates[i].astype(np.float64) for i in indices),
                rtol=0,
                atol=tolerance,
            )
        np.testing.assert_allclose(
            result.total,
            np.sum(updates, axis=0, dtype=np.float64),
            rtol=0,
            atol=tolerance,
        )

    def test_a_callable_is_asked_once_for_each(self):
        asked = []

        def update_of(index):
            asked.append(index)
            return self.updates[index]

        result = sum_in_groups(update_of, self.protocol, num_members=17)
        self.assertEqual(asked, list(range(17)))
        np.testing.assert_array_equal(
            result.total, sum_in_groups(self.updates, self.protocol).total
        )
        for arguments in ((update_of, None), (self.updates, 17)):
            with self.assertRaisesRegex(TypeError, "num_members"):
                sum_in_groups(arguments[0], self.protocol, num_members=arguments[1])

    @parameterized.parameters(1, 2)
    def test_a_cohort_below_the_minimum_fails_whole(self, size):
        result = sum_in_groups(self.updates[:size], self.protocol)
        self.assertIsNone(result.total)
        self.assertEqual(result.failed_members, tuple(range(size)))
        ((_, outcome),) = result.groups
        self.assertFalse(outcome.succeeded)
        self.assertIn("min_participants=3", outcome.reason)

    def test_overflow_names_the_member_and_the_value(self):
        self.updates[6][3] = 250.0
        with self.assertRaisesRegex(
            ValueError, r"member 6 holds 250.0 at index \(3,\)"
        ):
            sum_in_groups(self.updates, self.protocol)


class WhatEachPartySeesTest(parameterized.TestCase):
    """Noise at the clients and secure aggregation together."""

    def test_nobody_ever_holds_a_clean_sum(self):
        # m clients, each adds N(0, (z S)^2 / m) to its clipped update before
        # it enters the protocol. Every number that anybody can compute, the
        # server's totals, each group's sum, and what a member gets by taking
        # its own value out of its group's sum, carries noise of the scale
        # that belongs to it.
        size, num_params, group = 20, 20_000, 5
        clip_norm, z = 0.5, 1.2
        per_client = z * clip_norm / np.sqrt(size)
        rng = np.random.default_rng(3)
        clean = rng.normal(size=(size, num_params))
        clean *= clip_norm / np.linalg.norm(clean, axis=1, keepdims=True)
        noisy = clean + rng.normal(scale=per_client, size=clean.shape)
        result = sum_in_groups(noisy, AdditiveSecretSharing(), group)

        def assert_noise(seen, clean_value, num_noises):
            # stddev of a sample stddev of D normals: s / sqrt(2 D), here
            # 0.5 %. 4 % is 8 of them: a false alarm has probability 1e-15.
            stddev = np.std(seen - clean_value)
            np.testing.assert_allclose(
                stddev, per_client * np.sqrt(num_noises), rtol=0.04
            )

        assert_noise(result.total, clean.sum(axis=0), size)
        np.testing.assert_allclose(
            per_client * np.sqrt(size), z * clip_norm
        )  # The noise of the mechanism, on the total.
        for indices, outcome in result.groups:
            indices = list(indices)
            assert_noise(outcome.value, clean[indices].sum(axis=0), group)
            for own in indices:
                others = [i for i in indices if i != own]
                assert_noise(
                    outcome.value - noisy[own],
                    clean[others].sum(axis=0),
                    group - 1,
                )

    def _view(self, updates, keep):
        """The messages that reached member 0, by sender and kind."""
        network = Network()
        outcomes = network.run(updates, AdditiveSecretSharing())
        view = {
            (message.kind, message.sender): message.tensors[0]
            for message in network.delivered
            if message.recipient == 0 and message.kind in keep
        }
        return view, outcomes[0].value

    def test_what_a_member_sees_depends_on_the_others_sum_only(self):
        # Members 1 and 2 hold +a and -a in one half of a million
        # coordinates, and -a and +a in the other. Member 0 knows that their
        # sum is 0, and must not learn more. It sees two shares and two partial
        # sums; with its own share and update, three of them determine the
        # fourth. Every three are jointly uniform in either half.
        size, a = 2_000_000, 50.0
        first = np.where(np.arange(size) < size // 2, a, -a)
        updates = {0: np.zeros(size), 1: first, 2: -first}
        view, total = self._view(updates, ("share", "partial_sum"))
        self.assertCountEqual(
            view,
            [
                ("share", 1),
                ("share", 2),
                ("partial_sum", 1),
                ("partial_sum", 2),
            ],
        )
        np.testing.assert_array_equal(total, np.zeros(size))
        top = {
            key: (value >> np.uint64(61)).astype(np.int64)
            for key, value in view.items()
        }
        for left_out in view:
            three = [top[key] for key in view if key != left_out]
            cells = three[0] * 64 + three[1] * 8 + three[2]
            for half in (cells[: size // 2], cells[size // 2 :]):
                counts = np.bincount(half, minlength=512)
                expected = half.size / 512
                statistic = np.sum((counts - expected) ** 2) / expected
                # One false alarm in 1e8 for each of the eight.
                self.assertLess(statistic, stats.chi2.isf(1e-8, 511))
