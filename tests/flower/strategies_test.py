"""What may be wrapped, and what a strategy gets to see."""

from __future__ import annotations

import unittest

import numpy as np
from absl.testing import absltest, parameterized

from tests.flower import real_flower
from tfdp_fl.flower import DPFedAvgAdaptive, DPFedAvgFixed


@unittest.skipUnless(real_flower.INSTALLED, real_flower.WHY_NOT)
class FlowersStrategiesTest(parameterized.TestCase):
    @parameterized.parameters(
        "FedAvg",
        "FedAvgM",
        "FedProx",
        "FaultTolerantFedAvg",
        "FedAdagrad",
        "FedAdam",
        "FedYogi",
        "FedOpt",
    )
    def test_what_averages_is_accepted_and_makes_the_same_of_the_mean(self, name):
        arguments = {}
        if name == "FedProx":
            arguments["proximal_mu"] = 0.1
        if name in ("FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedOpt"):
            arguments["initial_parameters"] = real_flower.parameters(np.zeros(2))
        updates = [[3.0, 0.0], [0.0, 0.3], [-0.1, 0.1], [0.2, 0.5]]
        clients = [real_flower.client([np.array(u)]) for u in updates]
        wrapper = DPFedAvgFixed(real_flower.strategy(name, 4, **arguments), 4, 1.0, 0.0)
        got, _ = real_flower.round_of(
            wrapper,
            real_flower.manager(clients),
            real_flower.parameters(np.zeros(2)),
        )
        clipped = [u / np.maximum(1, np.linalg.norm(u)) for u in updates]
        # The same strategy alone, with one client that sends the mean.
        alone = real_flower.strategy(name, 1, **arguments)
        mean = real_flower.client([np.mean(clipped, axis=0)], wrapped=False)
        wanted, _ = real_flower.round_of(
            alone,
            real_flower.manager([mean]),
            real_flower.parameters(np.zeros(2)),
        )
        np.testing.assert_allclose(
            real_flower.arrays(got)[0],
            real_flower.arrays(wanted)[0],
            rtol=1e-12,
        )

    @parameterized.parameters((0.9, 0), (0.5, 1))
    def test_nothing_is_charged_for_what_a_strategy_will_not_take(
        self, completion_rate, released
    ):
        wrapper = DPFedAvgFixed(
            real_flower.strategy(
                "FaultTolerantFedAvg",
                4,
                min_completion_rate_fit=completion_rate,
            ),
            4,
            1.0,
        )
        clients = [real_flower.client([np.zeros(2)]) for _ in range(4)]
        got, _ = real_flower.round_of(
            wrapper,
            real_flower.manager(clients),
            real_flower.parameters(np.zeros(2)),
            change=lambda results: setattr(results[0][1], "parameters", None),
        )
        self.assertEqual(got is not None, bool(released))
        self.assertLen(wrapper.released_rounds, released)

    @parameterized.product(
        name=("FedMedian", "FedTrimmedAvg", "Krum", "Bulyan", "QFedAvg"),
        wrapper=(DPFedAvgFixed, DPFedAvgAdaptive),
    )
    def test_what_does_not_is_refused_by_name(self, name, wrapper):
        strategy = real_flower.strategy(name, 40)
        with self.assertRaisesRegex(ValueError, f"{name}.*averages=True"):
            wrapper(strategy, 40, 1.0)
        self.assertTrue(wrapper(strategy, 40, 1.0, averages=True).averages)

    def test_flowers_own_wrappers_are_refused(self):
        import flwr

        inner = flwr.server.strategy.DifferentialPrivacyServerSideFixedClipping(
            real_flower.strategy("FedAvg", 2), 1.0, 1.0, 2
        )
        with self.assertRaisesRegex(ValueError, "averages=True"):
            DPFedAvgFixed(inner, 2, 1.0)

    def test_a_subclass_is_accepted_unless_it_aggregates_itself(self):
        import flwr

        class Logged(flwr.server.strategy.FedAvg):
            def evaluate(self, server_round, parameters):
                return None

        class Best(Logged):
            def aggregate_fit(self, server_round, results, failures):
                return results[0][1].parameters, {}

        class Below(Best):
            pass

        class Between(flwr.server.strategy.FedAdam, Best):
            """FedAdam's `super().aggregate_fit` is that of `Best`."""

        DPFedAvgFixed(Logged(), 2, 1.0)
        initial = real_flower.parameters(np.zeros(2))
        for made in (Best(), Below(), Between(initial_parameters=initial)):
            with self.assertRaisesRegex(ValueError, r"aggregate_fit of .*Best"):
                DPFedAvgFixed(made, 2, 1.0)
        patched = Logged()
        patched.aggregate_fit = lambda *_: (None, {})
        with self.assertRaisesRegex(ValueError, "the object itself"):
            DPFedAvgFixed(patched, 2, 1.0)

    @parameterized.parameters("FedMedian", "Krum", "FedTrimmedAvg")
    def test_who_vouches_gets_the_noised_mean_and_it_is_said(self, name):
        # A median over the clients would be one client's number, and would
        # move by far more than S / m when that client is replaced.
        updates = [[0.0], [0.0], [0.9], [0.9], [0.9]]
        clients = [real_flower.client([np.array(u)]) for u in updates]
        wrapper = DPFedAvgFixed(
            real_flower.strategy(name, 5), 5, 1.0, 0.0, averages=True
        )
        got, _ = real_flower.round_of(
            wrapper,
            real_flower.manager(clients),
            real_flower.parameters(np.zeros(1)),
        )
        np.testing.assert_allclose(real_flower.arrays(got)[0], [0.54])
        report = wrapper.privacy_report(1e-5)
        self.assertTrue(report["averages"])
        self.assertIn("vouched for by the user", " ".join(report["caveats"]))

    def test_metrics_of_clients_do_not_end_the_run(self):
        def mean_loss(metrics):
            return {"loss": np.mean([each["loss"] for _, each in metrics])}

        strategy = real_flower.strategy(
            "FedAvg", 2, fit_metrics_aggregation_fn=mean_loss
        )
        wrapper = DPFedAvgFixed(strategy, 2, 1.0)
        manager = real_flower.manager(
            [real_flower.client([np.ones(2)]) for _ in range(2)]
        )

        def loss(value):
            def change(results):
                results[0][1].metrics = {"loss": 1.0}
                results[1][1].metrics = value

            return change

        model = real_flower.parameters(np.zeros(2))
        for value in ({}, {"loss": "low"}, {"loss": [1.0, 2.0]}):
            with self.assertLogs("tfdp_fl.flower", "WARNING"):
                got, metrics = real_flower.round_of(
                    wrapper, manager, model, 1, loss(value)
                )
            self.assertIsNotNone(got)
            self.assertEqual(metrics, {})
        _, metrics = real_flower.round_of(
            wrapper, manager, model, 1, loss({"loss": 3.0})
        )
        self.assertEqual(metrics, {"loss": 2.0})
        self.assertIs(strategy.fit_metrics_aggregation_fn, mean_loss)


if __name__ == "__main__":
    absltest.main()
