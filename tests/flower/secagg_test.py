"""Flower's SecAgg+: what one client can move where nobody sees a reply."""

from __future__ import annotations

import unittest

import numpy as np
from absl.testing import parameterized

from tests.flower import flower_messages, real_flower
from tfdp_fl.flower import DPFedAvgAdaptive, DPFedAvgFixed, private_mod

# Half a step of SecAgg+'s fixed point: 2 * 8 / 2^22.
_STEP = 16 / 2**22


@unittest.skipUnless(real_flower.INSTALLED, real_flower.WHY_NOT)
class SecAggTest(parameterized.TestCase):
    def _moved(
        self,
        updates,
        num_examples,
        z=0.0,
        size=4,
        wrapped=True,
        **arguments,
    ):
        clients = [
            real_flower.client([np.array(update)], n, wrapped)
            for update, n in zip(updates, num_examples, strict=True)
        ]
        m = len(clients)
        self.wrapper = DPFedAvgFixed(real_flower.strategy("FedAvg", m), m, 1.0, z)
        (model,) = real_flower.secagg_round(
            self.wrapper,
            clients,
            real_flower.parameters(np.zeros(size)),
            **arguments,
        )
        return model

    @parameterized.parameters(1000.0, 1.0)
    def test_one_client_of_many_examples_moves_w_by_no_more_than_s_over_m(
        self, max_weight
    ):
        # With its number of examples as its weight: by 0.996.
        updates = [[5.0, 0, 0, 0]] + 4 * [[0.0] * 4]
        moved = self._moved(updates, [1000, 1, 1, 1, 1], max_weight=max_weight)
        np.testing.assert_allclose(
            moved, [0.2, 0, 0, 0], rtol=0, atol=max_weight * _STEP
        )
        self.assertLen(self.wrapper.released_rounds, 1)

    @unittest.skipUnless(flower_messages.INSTALLED, flower_messages.WHY_NOT)
    def test_the_mod_stands_in_for_the_wrapped_client(self):
        updates = [[5.0, 0, 0, 0]] + 4 * [[0.0] * 4]
        moved = self._moved(
            updates,
            [1000, 1, 1, 1, 1],
            wrapped=False,
            mods=[private_mod],
            max_weight=1.0,
        )
        np.testing.assert_allclose(moved, [0.2, 0, 0, 0], rtol=0, atol=_STEP)

    def test_it_is_the_mean_of_clipped_updates(self):
        rng = np.random.default_rng(1)
        updates = rng.normal(size=(6, 4))
        norms = np.linalg.norm(updates, axis=1, keepdims=True)
        moved = self._moved(updates, range(1, 7), max_weight=1.0)
        np.testing.assert_allclose(
            moved,
            np.mean(updates * np.minimum(1, 1 / norms), axis=0),
            rtol=0,
            atol=2 * _STEP,
        )

    def test_who_falls_silent_is_left_out(self):
        updates = [[0.5, 0, 0, 0]] * 5
        moved = self._moved(updates, [1] * 5, gone=[2, 3], max_weight=1.0)
        np.testing.assert_allclose(moved, [0.3, 0, 0, 0], rtol=0, atol=2 * _STEP)
        (released,) = self.wrapper.released_rounds
        self.assertEqual(released.num_replies, 3)

    def test_the_noise_is_the_planned_one(self):
        size = 100_000
        moved = self._moved(np.zeros((4, size)), [1] * 4, 1.0, size)
        # The sample stddev varies by 0.22 %; 2 % is 9 of these.
        np.testing.assert_allclose(np.std(4 * moved), 1.0, rtol=0.02)

    @unittest.skipUnless(flower_messages.INSTALLED, flower_messages.WHY_NOT)
    def test_adaptive_clipping_gets_its_bits_from_the_mod(self):
        clients = [
            real_flower.client([np.array([norm, 0.0])], wrapped=False)
            for norm in (1.0, 3.0, 4)
        ]
        self._assert_bits(clients, mods=[private_mod])

    @unittest.skipUnless(flower_messages.INSTALLED, flower_messages.WHY_NOT)
    def test_mods_in_the_other_order_release_nothing(self):
        # `private_mod` then sees SecAgg+'s messages, in which there is no model.
        clients = [
            real_flower.client([np.array([5.0, 0])], wrapped=False) for _ in range(3)
        ]
        wrapper = DPFedAvgFixed(real_flower.strategy("FedAvg", 3), 3, 1.0, 0.0)
        with self.assertRaisesRegex(Exception, "dpfedavg_clip_norm"):
            real_flower.secagg_round(
                wrapper,
                clients,
                real_flower.parameters(np.zeros(2)),
                before=[private_mod],
            )
        self.assertEqual(wrapper.released_rounds, ())

    @unittest.skipUnless(flower_messages.INSTALLED, flower_messages.WHY_NOT)
    def test_shares_of_noise_are_said_to_be_applied(self):
        size = 100_000
        clients = [
            real_flower.client([np.zeros(size)], wrapped=False) for _ in range(4)
        ]
        for mods, released in (([private_mod], 1), ([], 0)):
            wrapper = DPFedAvgFixed(
                real_flower.strategy("FedAvg", 4), 4, 1.0, 1.0, False
            )
            (model,) = real_flower.secagg_round(
                wrapper, clients, real_flower.parameters(np.zeros(size)), mods=mods
            )
            self.assertLen(wrapper.released_rounds, released)
        np.testing.assert_array_equal(model, np.zeros(size))

    def _assert_bits(self, clients, **arguments):
        wrapper = DPFedAvgAdaptive(real_flower.strategy("FedAvg", 3), 3, 2.0, 0.0)
        real_flower.secagg_round(
            wrapper, clients, real_flower.parameters(np.zeros(2)), **arguments
        )
        self.assertAlmostEqual(wrapper.clip_norm, 2 * np.exp(0.2 / 6))

    def test_adaptive_clipping_gets_its_bits(self):
        clients = [
            real_flower.client([np.array([norm, 0.0])]) for norm in (1.0, 3.0, 4)
        ]
        self._assert_bits(clients)
