"""The message API of the real Flower: its strategies, mods and ClientApps."""

from __future__ import annotations

import logging
import unittest
import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.flower import PrivateStrategy, private_mod

_FIXED = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0)
_NOISY = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
_AVERAGING = (
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedYogi",
)


def _strategy(name="FedAvg", m=3, **options):
    from flwr.serverapp import strategy

    logging.getLogger("flwr").setLevel("ERROR")
    return getattr(strategy, name)(
        **{
            "fraction_train": 1e-9,
            "fraction_evaluate": 0.0,
            "min_train_nodes": m,
            "min_available_nodes": m,
            **options,
        }
    )


def _grid(updates, change=None, **options):
    return fm.Grid(
        {10 + i: fm.adds([u], 10**i, loss=float(i)) for i, u in enumerate(updates)},
        change,
        **options,
    )


@unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
class StrategiesTest(parameterized.TestCase):
    def test_nobody_comes_again_too_soon_with_correlated_noise(self):
        mechanism = tfdp_fl.CorrelatedNoise(
            clip_norm=0.5,
            noise_multiplier=1.0,
            strategy="blt:2",
            rounds=8,
            min_separation=3,
        )
        # Just as many as three cohorts: Flower has to take who is left.
        private = PrivateStrategy(
            _strategy(m=4), mechanism, num_clients=12, clients_per_round=4
        )
        grid, asked = _grid(np.zeros([12, 3])), []
        send = grid.send_and_receive

        def watched(messages, **options):
            asked.append({m.metadata.dst_node_id for m in messages})
            return send(messages, **options)

        with unittest.mock.patch.object(grid, "send_and_receive", watched):
            private.start(grid=grid, initial_arrays=fm.model(np.ones(3)), num_rounds=8)
        asked = [cohort for cohort in asked if cohort]
        self.assertLen(asked, 8)
        for t, cohort in enumerate(asked):
            self.assertLen(cohort, 4)
            for other in asked[t + 1 : t + 3]:
                self.assertEmpty(cohort & other)
        self.assertLen(private.released_rounds, 8)

    @parameterized.parameters(*_AVERAGING)
    def test_what_averages_makes_the_same_of_the_mean(self, name):
        updates = [[1.0, 0, 0], [0, 0.25, 0], [0, 0, -4.0]]
        mean = np.array([0.5, 0.25, -0.5]) / 3
        private = PrivateStrategy(
            _strategy(name), _FIXED, num_clients=3, clients_per_round=3
        )
        # The reference is the same strategy by itself, with one client that
        # sends the mean.
        alone = _strategy(name, 1)
        got = wanted = fm.model(np.ones(3))
        for number in range(1, 4):
            got, _ = fm.a_round(private, _grid(updates), got, number)
            told = list(
                alone.configure_train(number, wanted, fm.ConfigRecord(), _grid([mean]))
            )
            reply = fm.app(fm.adds([mean]))(told[0], None)
            wanted, _ = alone.aggregate_train(number, [reply])
        np.testing.assert_allclose(fm.arrays(got)[0], fm.arrays(wanted)[0], rtol=1e-6)
        self.assertEqual(private.rejected_replies, 0)

    @parameterized.parameters(
        "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "QFedAvg"
    )
    def test_what_does_not_is_refused_by_name(self, name):
        options = {}
        if name in ("Krum", "MultiKrum", "Bulyan"):
            options = {"num_malicious_nodes": 0}
        if name == "QFedAvg":
            options = {"client_learning_rate": 0.1}
        for averages in (False, True):
            with self.assertRaisesRegex(ValueError, "must be one that averages"):
                PrivateStrategy(
                    _strategy(name, **options),
                    _FIXED,
                    num_clients=3,
                    clients_per_round=3,
                    averages=averages,
                )

    def test_flowers_own_wrappers_are_refused(self):
        from flwr.serverapp import strategy

        inner = strategy.DifferentialPrivacyServerSideFixedClipping(
            _strategy(), 1.0, 1.0, 3
        )
        with self.assertRaisesRegex(ValueError, "must be one that averages"):
            PrivateStrategy(inner, _FIXED, num_clients=3, clients_per_round=3)

    @parameterized.parameters(
        {}, {"fraction_train": 1.0}, {"fraction_train": 0.5, "min_available_nodes": 12}
    )
    def test_three_of_twelve_are_asked_however_many_it_would_ask(self, **options):
        private = PrivateStrategy(
            _strategy(**options), _NOISY, num_clients=12, clients_per_round=3
        )
        grid = _grid([[1.0]] * 12)
        for number in range(1, 5):
            fm.a_round(private, grid, fm.model(np.ones(1)), number)
            self.assertLen({m.metadata.dst_node_id for m in grid.sent}, 3)
        self.assertAlmostEqual(
            private.privacy_epsilon(delta=1e-5),
            accounting.epsilon(1.0, "fixed_size", 12, 3, 4, 1e-5),
        )

    def test_a_subclass_that_aggregates_itself_needs_the_users_word(self):
        from flwr.serverapp import strategy

        class Saving(strategy.FedAvg):
            def aggregate_train(self, server_round, replies):
                self.saved = super().aggregate_train(server_round, replies)
                return self.saved

        arguments = {"num_clients": 3, "clients_per_round": 3}
        with self.assertRaisesRegex(ValueError, "Saving.*averages=True"):
            PrivateStrategy(Saving(), _FIXED, **arguments)
        private = PrivateStrategy(Saving(), _FIXED, averages=True, **arguments)
        got = fm.a_round(private, _grid(np.eye(3)), fm.model(np.zeros(3)))
        self.assertIs(private.saved, got)

    def test_start_ends_on_the_budget_with_its_result(self):
        private = PrivateStrategy(
            _strategy(),
            _NOISY,
            num_clients=12,
            clients_per_round=3,
            target_epsilon=accounting.epsilon(1.0, "fixed_size", 12, 3, 4, 1e-5),
            target_delta=1e-5,
        )
        result = private.start(
            grid=_grid([[1.0, 0]] * 12),
            initial_arrays=fm.model(np.zeros(2)),
            num_rounds=7,
        )
        self.assertLen(private.released_rounds, 4)
        self.assertIsNotNone(result.arrays)


@unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
class ClientAppTest(parameterized.TestCase):
    def _message(self):
        content = fm.RecordDict(
            {
                "arrays": fm.model(np.zeros(2)),
                "config": fm.ConfigRecord({"dpfedavg_clip_norm": 0.5}),
            }
        )
        return fm.Message(content, 7, "train")

    @parameterized.parameters("app", "function")
    def test_the_mod_works_where_flower_takes_mods(self, where):
        from flwr.clientapp import ClientApp

        app = ClientApp(mods=[private_mod] if where == "app" else [])
        train = fm.app(fm.adds([np.full(2, 9.0)]))
        app.train(mods=[private_mod] if where == "function" else [])(train)
        context = unittest.mock.Mock()
        reply = app(self._message(), context)
        np.testing.assert_allclose(
            np.linalg.norm(fm.arrays(reply.content["arrays"])[0]), 0.5
        )
        self.assertEqual(reply.content["metrics"]["num-examples"], 1)


@unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
class BesideFlowersOwnTest(parameterized.TestCase):
    """What docs/flower.md says of Flower 1.42's own, once more."""

    def test_its_adaptive_bit_is_inverted(self):
        from flwr.serverapp import strategy

        own = strategy.DifferentialPrivacyServerSideAdaptiveClipping(
            _strategy(m=4), 0.0, 4
        )
        grid = _grid([[1.0, 0.0]] * 4, mod=None)
        for number in range(1, 41):
            fm.a_round(own, grid, fm.model(np.zeros(2)), number)
        # All norms are 1, far above S = 0.1, and S falls.
        self.assertAlmostEqual(own.clipping_norm, 0.1 * np.exp(-0.1 * 40))

    def test_its_noise_is_for_the_clip_that_follows(self):
        from flwr.serverapp import strategy

        own = strategy.DifferentialPrivacyServerSideAdaptiveClipping(
            _strategy(m=4),
            1.0,
            4,
            initial_clipping_norm=1.0,
            clip_norm_lr=3.0,
            clipped_count_stddev=1e-9 + 0.6,
        )
        seen = []
        own._add_noise_to_aggregated_arrays = lambda arrays: (
            seen.append(own.clipping_norm) or arrays
        )
        fm.a_round(own, _grid([[9.0, 0.0]] * 4, mod=None), fm.model(np.zeros(2)))
        self.assertNotEqual(seen, [1.0])
        self.assertEqual(seen, [own.clipping_norm])

    def test_its_accountant_claims_no_amplification_and_no_adaptive_clip(self):
        from flwr import serverapp
        from flwr.serverapp import strategy

        def accountant(sampling, relation):
            return serverapp.RdpAccountant(
                serverapp.PrivacyConfig(
                    target_delta=1e-5,
                    population_size=1000,
                    neighboring_relation=relation,
                    sampling_method=sampling,
                )
            )

        kinds = serverapp.SamplingMethod
        relations = serverapp.NeighboringRelation
        with self.assertRaisesRegex(ValueError, "no-amplification"):
            strategy.DifferentialPrivacyServerSideFixedClipping(
                _strategy(m=100),
                1.0,
                1.0,
                100,
                accountant=accountant(kinds.WITHOUT_REPLACEMENT, relations.REPLACE_ONE),
            )
        for name in ("ServerSide", "ClientSide"):
            with self.assertRaises(TypeError):
                getattr(strategy, f"DifferentialPrivacy{name}AdaptiveClipping")(
                    _strategy(), 1.0, 30, accountant=object()
                )
        # 100 rounds of 100 of 1000 at z = 1.
        event = serverapp.GaussianPrivacyEvent(1.0, 100, 1000)
        own = accountant(kinds.NO_AMPLIFICATION, relations.ADD_OR_REMOVE_ONE)
        own.compose(event, 100)
        self.assertAlmostEqual(own.get_epsilon(1e-5), 96.12, places=1)
        # Without replacement it takes z where a replaced client moves the sum
        # by 2 S.
        own = accountant(kinds.WITHOUT_REPLACEMENT, relations.REPLACE_ONE)
        own.compose(event, 100)
        self.assertAlmostEqual(own.get_epsilon(1e-5), 14.05, places=1)
        self.assertAlmostEqual(
            accounting.epsilon(1.0, "fixed_size", 1000, 100, 100, 1e-5),
            83.94,
            places=1,
        )

    def _own_round(self, *updates):
        from flwr.serverapp import strategy

        own = strategy.DifferentialPrivacyServerSideFixedClipping(
            _strategy(m=2), 0.0, 1.0, 2
        )
        got, _ = fm.a_round(own, _grid(updates, mod=None), fm.model(np.zeros(2)))
        return fm.arrays(got)[0]

    def test_a_nan_reaches_its_model(self):
        got = self._own_round([np.nan, 0.0], [1.0, 0.0])
        self.assertTrue(np.isnan(got).any())

    def test_an_update_of_zero_ends_its_run(self):
        with self.assertRaises(ZeroDivisionError):
            self._own_round([0.0, 0.0], [1.0, 0.0])

    def test_it_weights_by_the_examples_that_clients_claim(self):
        # 1 and 10 examples: the second client moves w by 10/11 and not by 1/2.
        got = self._own_round([1.0, 0.0], [0.0, 1.0])
        np.testing.assert_allclose(got, [1 / 11, 10 / 11], rtol=1e-6)


if __name__ == "__main__":
    absltest.main()
