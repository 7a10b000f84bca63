"""The old snippet gives the right figure."""

from __future__ import annotations

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized
from dp_accounting import rdp as dp_accounting_rdp

from tfdp_fl import rdp_accountant

_ORDERS = range(2, 33)


class SnippetTest(parameterized.TestCase):
    @parameterized.parameters((1.0, 83.9369), (2.0, 14.0538))
    def test_the_source_document_s_lines(self, z, expected):
        q, n, delta = 0.1, 100, 1e-5
        tfp = rdp_accountant
        rdp = tfp.compute_rdp_sample_without_replacement(q, z, n, _ORDERS)
        eps, _, _ = tfp.get_privacy_spent(rdp, target_delta=delta)
        self.assertAlmostEqual(eps, expected, places=4)
        # With the orders, as the old function really wanted it.
        again, same_delta, order = tfp.get_privacy_spent(
            _ORDERS, rdp, target_delta=delta
        )
        self.assertEqual((again, same_delta), (eps, delta))
        self.assertIn(order, _ORDERS)

    def test_z_in_the_place_of_half_z_is_the_published_mistake(self):
        # 14.05 is what z = 1 costs if a replaced client moved the sum by S.
        rdp = rdp_accountant.compute_rdp_sample_without_replacement(
            0.1, 2.0, 100, _ORDERS
        )
        wrong, _, _ = rdp_accountant.get_privacy_spent(rdp, target_delta=1e-5)
        self.assertAlmostEqual(wrong, 14.05, places=2)

    def test_poisson(self):
        rdp = rdp_accountant.compute_rdp(0.1, 1.0, 100, _ORDERS)
        direct = dp_accounting_rdp.RdpAccountant(list(_ORDERS))
        direct.compose(
            dp_accounting.PoissonSampledDpEvent(
                0.1, dp_accounting.GaussianDpEvent(1.0)
            ),
            100,
        )
        eps, _, _ = rdp_accountant.get_privacy_spent(rdp, target_delta=1e-5)
        self.assertAlmostEqual(eps, direct.get_epsilon(1e-5), places=9)
        _, delta, _ = rdp_accountant.get_privacy_spent(rdp, target_eps=eps)
        self.assertAlmostEqual(delta, 1e-5, delta=1e-12)

    def test_curves_add_up(self):
        one = rdp_accountant.compute_rdp(0.1, 1.0, 40, _ORDERS)
        two = rdp_accountant.compute_rdp(0.1, 1.0, 60, _ORDERS)
        both = rdp_accountant.compute_rdp(0.1, 1.0, 100, _ORDERS)
        np.testing.assert_allclose(one + two, both)
        eps, _, _ = rdp_accountant.get_privacy_spent(
            one + two, target_delta=1e-5
        )
        expected, _, _ = rdp_accountant.get_privacy_spent(
            both, target_delta=1e-5
        )
        self.assertAlmostEqual(eps, expected, places=10)

    def test_no_steps_and_no_noise(self):
        rdp = rdp_accountant.compute_rdp(0.1, 1.0, 0, _ORDERS)
        self.assertEqual(
            rdp_accountant.get_privacy_spent(rdp, target_delta=1e-5)[0], 0.0
        )
        rdp = rdp_accountant.compute_rdp(0.1, 0.0, 1, _ORDERS)
        self.assertEqual(
            rdp_accountant.get_privacy_spent(rdp, target_delta=1e-5)[0], np.inf
        )

    def test_errors_name_the_argument(self):
        rdp = rdp_accountant.compute_rdp(0.1, 1.0, 10, _ORDERS)
        spent = rdp_accountant.get_privacy_spent
        for call, name in (
            (lambda: spent(rdp), "target_eps"),
            (lambda: spent(rdp, target_eps=1.0, target_delta=0.1), "exactly"),
            (lambda: spent(np.ones(3), target_delta=1e-5), "orders"),
            (lambda: spent([2, 3], rdp, target_delta=1e-5), "rdp"),
            (lambda: spent(rdp[:3], target_delta=1e-5), "rdp"),
            (lambda: rdp_accountant.compute_rdp(1.5, 1.0, 1, _ORDERS), "q"),
            (lambda: rdp_accountant.compute_rdp(0.1, 1.0, 1, [1]), "orders"),
            (lambda: rdp_accountant.compute_rdp(0.1, 1.0, 1, [3, 2]), "orders"),
        ):
            with self.assertRaisesRegex(ValueError, name):
                call()


if __name__ == "__main__":
    absltest.main()
