from __future__ import annotations

import math
import warnings

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.accounting import gaussian
from tfdp_fl.mechanisms import Client, Deployment

_NAN = float("nan")
_WIDE = [[150, 150], [150, 150], [20000]]
_DISCO = {
    "calibration": "classic",
    "composition": "basic",
    "layers": "separate",
}


def _bound(num_layers, rounds=5, epsilon=8.0, delta=1e-5, **arguments):
    mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=epsilon, delta=delta, **arguments)
    deployment = Deployment(
        clients_per_round=2, rounds=rounds, num_variables=num_layers
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        query = mechanism.bind(deployment)
    return query, query.initial_global_state()


def _radii(query, window=None):
    if window is not None:
        window = tf.constant(window)
    return query.mechanism.radii(Client(window=window), query.deployment)


class RadiiTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([],),
        ([0.3],),
        ([0.3, 0.6],),
        ([0.3, 0.6, 0.1],),
        ([5.0, 0.1, 0.1],),
        ([0.0, 0.0, 0.0],),
    )
    def test_is_the_mean_of_the_last_norms_below_the_bound(self, norms):
        query, _ = _bound(2)
        window = np.full([3, 2], _NAN, np.float32)
        for row, norm in enumerate(norms):
            window[3 - len(norms) + row] = [norm, 2 * norm]
        expected = [
            references.disco_radius(norms, 1.0),
            references.disco_radius([2 * norm for norm in norms], 1.0),
        ]
        self.assertAllClose(_radii(query, window), expected)

    def test_norms_are_taken_before_clipping_and_noise(self):
        query, _ = _bound(4)
        (update,) = rounds.updates_with_norms([50.0])
        self.assertAllClose(
            query.mechanism.window_norms([tf.constant(v) for v in update]),
            [np.linalg.norm(v) for v in update],
            rtol=1e-5,
        )


class ReleaseTest(tf.test.TestCase, parameterized.TestCase):
    def test_every_layer_is_clipped_to_its_own_radius(self):
        query, state = _bound(4, epsilon=1e9)  # Practically no noise.
        updates = rounds.updates_with_norms([0.2, 5.0])
        windows = np.full([2, 3, 4], _NAN, np.float32)
        windows[0, 2] = [0.01, 0.5, 2.0, 0.3]
        done = rounds.run_round(query, state, updates, windows=windows)
        expected = []
        for k, update in enumerate(updates):
            radii = [
                references.disco_radius(
                    windows[k, ~np.isnan(windows[k, :, layer]), layer].tolist(),
                    1.0,
                )
                for layer in range(4)
            ]
            expected.append(
                [
                    v / max(1.0, np.linalg.norm(v) / r)
                    for v, r in zip(update, radii, strict=True)
                ]
            )
        for layer in range(4):
            wanted = (expected[0][layer] + expected[1][layer]) / 2
            self.assertAllClose(done.mean[layer], wanted, atol=1e-3)
        self.assertEqual(float(done.total.clipped), 2)

    def _layer_noise(self, query, state, radii):
        window = np.tile(np.float32(radii), [3, 1])[None]
        done = rounds.run_round(
            query, state, rounds.zero_updates(1, _WIDE), windows=window
        )
        return done.mean

    def test_published_noise_of_disco(self):
        query, state = _bound(3, rounds=5, **_DISCO)
        radii = [0.2, 1.0, 0.05]
        for part, radius in zip(
            self._layer_noise(query, state, radii), radii, strict=True
        ):
            statistics.assert_gaussian(
                part, references.disco_sigma(radius, 8.0, 1e-5, 5)
            )

    def test_layers_of_one_release_share_the_budget(self):
        query, state = _bound(3, rounds=5)
        radii = [0.2, 1.0, 0.05]
        # One release of L layers: sum_l (2 r_l / sigma_l)^2 is what a single
        # Gaussian at (epsilon, delta), five times, may have.
        zeta = references.analytic_sigma(1.0, 8.0, 1e-5) * math.sqrt(5)
        for part, radius in zip(
            self._layer_noise(query, state, radii), radii, strict=True
        ):
            statistics.assert_gaussian(part, 2 * radius * zeta * math.sqrt(3))

    def test_noise_is_independent_over_clients_layers_and_rounds(self):
        query, state = _bound(3)
        updates = rounds.zero_updates(2, _WIDE)
        windows = np.full([2, 3, 3], _NAN, np.float32)
        first, second = (
            rounds.run_round(query, state, updates, windows=windows) for _ in range(2)
        )
        one, other = (rounds.flat(each.update) for each in first.records)
        statistics.assert_uncorrelated(one, other)
        statistics.assert_uncorrelated(first.mean[0], first.mean[1])
        statistics.assert_uncorrelated(
            rounds.flat(first.mean), rounds.flat(second.mean)
        )

    def test_one_bad_layer_zeroes_the_whole_update(self):
        query, state = _bound(3)
        updates = rounds.zero_updates(1, _WIDE)
        updates[0][0][:] = 1e6
        updates[0][1][0, 0] = np.nan
        done = rounds.run_round(query, state, updates)
        self.assertEqual(float(done.total.discarded), 1)
        self.assertEqual(float(done.total.norm), 0)
        zeta = references.analytic_sigma(1.0, 8.0, 1e-5) * math.sqrt(5)
        statistics.assert_gaussian(rounds.flat(done.mean), 2 * zeta * math.sqrt(3))


class CostTest(parameterized.TestCase):
    def _mu_squared(self, **arguments):
        mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5, **arguments)
        return mechanism.mu_squared(
            Deployment(clients_per_round=2, rounds=5, num_variables=4)
        )

    def test_joint_layers_spend_the_budget_once(self):
        epsilon = gaussian.gaussian_epsilon((5 * self._mu_squared()) ** -0.5, 1e-5)
        self.assertAlmostEqual(epsilon, 8.0, 4)

    def test_separate_layers_are_charged_one_by_one(self):
        self.assertAlmostEqual(
            self._mu_squared(layers="separate") / self._mu_squared(), 4
        )

    def test_no_central_guarantee_is_claimed(self):
        mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5)
        self.assertIsInstance(
            mechanism.round_event(
                0, Deployment(clients_per_round=2, sampling="fixed_size")
            ),
            dp_accounting.NonPrivateDpEvent,
        )

    def test_the_statement_says_what_leaks_and_how_layers_count(self):
        joint = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5)
        separate = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5, layers="separate")
        for mechanism in (joint, separate):
            self.assertIn("radius_from_unnoised_norms", mechanism.caveats())
            self.assertEqual(mechanism.guarantee, "local")
        self.assertIn("one release", joint.describe())
        self.assertIn("charged as a release", separate.describe())


class ArgumentsTest(parameterized.TestCase):
    def test_needs_to_know_rounds_and_layers(self):
        mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=1.0, delta=1e-5)
        with self.assertRaisesRegex(ValueError, "rounds"):
            mechanism.bind(Deployment(clients_per_round=2, num_variables=2))
        with self.assertRaisesRegex(ValueError, "num_variables"):
            mechanism.bind(Deployment(clients_per_round=2, rounds=2))


if __name__ == "__main__":
    tf.test.main()
