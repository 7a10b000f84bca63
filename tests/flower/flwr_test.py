"""Rounds through the real Flower's older API: strategies, clients, no network."""

from __future__ import annotations

import importlib.util
import io
import logging
import random
import unittest

import numpy as np
from absl.testing import absltest, parameterized

from tests.flower import real_flower
from tfdp_fl.flower import (
    DPFedAvgAdaptive,
    DPFedAvgFixed,
    DPFedAvgNumPyClient,
    RoundsAbandonedError,
)

_NUM_CLIENTS = 12
_SAMPLED = 6


def _put(result, tensor):
    result.parameters.tensors[0] = tensor


def _npy_header(shape, descr="<f4"):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


@unittest.skipUnless(
    importlib.util.find_spec("flwr"), "flwr is not installed (tests only)"
)
class FlowerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        import flwr

        self.flwr = flwr
        logging.getLogger("flwr").setLevel("ERROR")

    def _clients(self, shapes):
        """Flower clients, each with an update of its own."""
        rng = np.random.default_rng(7)

        class Client(self.flwr.client.NumPyClient):
            def __init__(self, update, num_examples):
                self.update = update
                self.num_examples = num_examples

            def fit(self, parameters, config):
                new = [p + u for p, u in zip(parameters, self.update, strict=True)]
                return new, self.num_examples, {"lr": config["lr"]}

            def evaluate(self, parameters, config):
                return float(parameters[0].sum()), 5, {}

        return [
            Client(
                [rng.normal(size=s).astype(np.float32) for s in shapes],
                num_examples=1 + 100 * i,
            )
            for i in range(_NUM_CLIENTS)
        ]

    def _manager(self, clients):
        """A client manager with wrapped clients."""
        wrapped = [DPFedAvgNumPyClient(client).to_client() for client in clients]
        for client in wrapped:
            self.assertIsInstance(client, self.flwr.client.Client)
        return real_flower.manager(wrapped)

    def _fed_avg(self):
        return self.flwr.server.strategy.FedAvg(
            fraction_fit=0.0,
            min_fit_clients=_SAMPLED,
            min_available_clients=_NUM_CLIENTS,
            on_fit_config_fn=lambda server_round: {"lr": 0.1},
        )

    def _round(self, strategy, clients, model):
        """Runs a round; returns the new weights and who took part."""
        common = self.flwr.common
        instructions = strategy.configure_fit(
            server_round=1,
            parameters=common.ndarrays_to_parameters(model),
            client_manager=self._manager(clients),
        )
        self.assertLen(instructions, _SAMPLED)
        results = [
            (proxy, proxy.fit(ins, timeout=None, group_id=1))
            for proxy, ins in instructions
        ]
        parameters, metrics = strategy.aggregate_fit(1, results, [])
        self.assertEqual(metrics, {})
        chosen = [int(proxy.cid) for proxy, _ in instructions]
        return common.parameters_to_ndarrays(parameters), chosen

    def _reference(self, clients, chosen, clip_norm, model):
        """Mean of clipped updates in float64 (McMahan et al. 2018)."""
        flat = np.concatenate([np.ravel(w) for w in model]).astype(np.float64)
        deltas = []
        for i in chosen:
            delta = np.concatenate([np.ravel(u) for u in clients[i].update])
            delta = delta.astype(np.float64)
            deltas.append(delta * min(1, clip_norm / np.linalg.norm(delta)))
        return flat + np.mean(deltas, axis=0)

    def _strategy(self, kind, clip_norm, z, server_side):
        if kind is DPFedAvgFixed:
            return DPFedAvgFixed(self._fed_avg(), _SAMPLED, clip_norm, z, server_side)
        return DPFedAvgAdaptive(
            self._fed_avg(),
            _SAMPLED,
            clip_norm,
            z,
            server_side,
            clip_count_stddev=None if z == 0 else 2.0,
        )

    @parameterized.product(
        kind=(DPFedAvgFixed, DPFedAvgAdaptive),
        server_side=(True, False),
        clip_norm=(0.5, 1000.0),
    )
    def test_without_noise_the_weights_are_numpys(self, kind, server_side, clip_norm):
        shapes = [(5, 4), (4,), ()]
        clients = self._clients(shapes)
        model = [np.full(s, 0.5, np.float32) for s in shapes]
        strategy = self._strategy(kind, clip_norm, 0.0, server_side)
        weights, chosen = self._round(strategy, clients, model)
        self.assertEqual([w.shape for w in weights], shapes)
        np.testing.assert_allclose(
            np.concatenate([np.ravel(w) for w in weights]),
            self._reference(clients, chosen, clip_norm, model),
            rtol=0,
            atol=2e-6,
        )
        if kind is DPFedAvgAdaptive:
            within = 1.0 if clip_norm > 1 else 0.0
            self.assertAlmostEqual(
                strategy.clip_norm, clip_norm * np.exp(-0.2 * (within - 0.5))
            )

    @parameterized.product(
        kind=(DPFedAvgFixed, DPFedAvgAdaptive), server_side=(True, False)
    )
    def test_the_noise_is_z_times_s_on_the_sum(self, kind, server_side):
        size = 100_000
        clients = self._clients([(size,)])
        model = [np.zeros(size, np.float32)]
        strategy = self._strategy(kind, 0.8, 1.5, server_side)
        weights, chosen = self._round(strategy, clients, model)
        noise = _SAMPLED * (weights[0] - self._reference(clients, chosen, 0.8, model))
        z = 1.5
        if kind is DPFedAvgAdaptive:
            z = (1.5**-2 - (2 * 2.0) ** -2) ** -0.5
        # The sample stddev varies by 0.22 %; 2 % is 9 of these: a false alarm
        # has probability < 1e-18.
        np.testing.assert_allclose(np.std(noise), z * 0.8, rtol=0.02)
        self.assertLess(abs(np.mean(noise)), 8 * z * 0.8 / np.sqrt(size))
        self.assertGreater(strategy.privacy_epsilon(1e-5), 0)

    @parameterized.named_parameters(
        ("no_bit", lambda res: res.metrics.clear()),
        (
            "vector_bit",
            lambda res: res.metrics.update(dpfedavg_norm_bit=np.ones(3)),
        ),
        ("no_metrics", lambda res: setattr(res, "metrics", None)),
        ("no_parameters", lambda res: setattr(res, "parameters", None)),
        ("no_tensors", lambda res: res.parameters.tensors.clear()),
        ("zip", lambda res: _put(res, b"PK\x03\x04" + b"\0" * 99)),
        ("pickle", lambda res: _put(res, b"\x80\x04K\x01.")),
        ("text", lambda res: _put(res, "text")),
        ("huge", lambda res: _put(res, _npy_header((3 * 10**12, 2)))),
        ("complex", lambda res: _put(res, _npy_header((8,), "<c16"))),
    )
    def test_one_hostile_reply_ends_nothing(self, change):
        clients = self._clients([(8,)])
        strategy = self._strategy(DPFedAvgAdaptive, 1000.0, 0.0, True)
        instructions = strategy.configure_fit(
            1,
            self.flwr.common.ndarrays_to_parameters([np.zeros(8, np.float32)]),
            self._manager(clients),
        )
        results = [
            (proxy, proxy.fit(ins, timeout=None, group_id=1))
            for proxy, ins in instructions
        ]
        change(results[2][1])
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            parameters, metrics = strategy.aggregate_fit(1, results, [])
        hostile = results[2][0].cid
        self.assertIn(f"client {hostile!r}: ", logs.output[0])
        self.assertEqual(metrics, {})
        others = [clients[int(p.cid)].update[0] for p, _ in instructions]
        np.testing.assert_allclose(
            self.flwr.common.parameters_to_ndarrays(parameters)[0],
            np.sum(np.delete(others, 2, axis=0), axis=0) / _SAMPLED,
            rtol=0,
            atol=2e-6,
        )
        self.assertEqual(strategy.rejected_replies, 1)

    def test_nobody_is_in_the_sum_twice_or_unasked(self):
        clients = self._clients([(8,)])
        strategy = self._strategy(DPFedAvgFixed, 1000.0, 0.0, True)
        manager = self._manager(clients)
        instructions = strategy.configure_fit(
            1,
            self.flwr.common.ndarrays_to_parameters([np.zeros(8, np.float32)]),
            manager,
        )
        ins = instructions[0][1]
        asked = [proxy for proxy, _ in instructions]
        (other, *_) = [p for p in manager.all().values() if p not in asked]
        parameters, _ = strategy.aggregate_fit(
            1,
            [
                (proxy, proxy.fit(ins, timeout=None, group_id=1))
                for proxy in (asked[0], asked[0], other)
            ],
            [],
        )
        np.testing.assert_allclose(
            self.flwr.common.parameters_to_ndarrays(parameters)[0],
            clients[int(asked[0].cid)].update[0] / _SAMPLED,
            rtol=0,
            atol=2e-6,
        )

    def test_flowers_own_server_ends_on_a_budget_and_on_silence(self):
        def server(strategy):
            made = self.flwr.server.Server(
                client_manager=self._manager(self._clients([(8,)])),
                strategy=strategy,
            )
            made.strategy.strategy.initial_parameters = (
                self.flwr.common.ndarrays_to_parameters([np.zeros(8, np.float32)])
            )
            return made

        strategy = DPFedAvgFixed(
            self._fed_avg(),
            _SAMPLED,
            0.5,
            num_clients=_NUM_CLIENTS,
            target_epsilon=40.0,
            target_delta=1e-5,
        )
        server(strategy).fit(num_rounds=30, timeout=None)
        spent = strategy.privacy_epsilon()
        self.assertBetween(spent, 30.0, 40.0)
        self.assertLess(len(strategy.released_rounds), 30)
        self.assertEqual(strategy.stopped_before_round, 30)

        strategy = DPFedAvgFixed(self._fed_avg(), _SAMPLED, 0.5, max_abandoned_rounds=3)
        silent = server(strategy)
        for proxy in silent.client_manager().all().values():
            proxy.client = None  # All of them raise.
        with self.assertRaisesRegex(RoundsAbandonedError, "3 rounds in a row"):
            silent.fit(num_rounds=30, timeout=None)

    def test_flowers_own_server_runs_on_it(self):
        server = self.flwr.server.Server(
            client_manager=self._manager(self._clients([(8,)])),
            strategy=self._strategy(DPFedAvgAdaptive, 0.5, 1.0, True),
        )
        server.strategy.strategy.initial_parameters = (
            self.flwr.common.ndarrays_to_parameters([np.zeros(8, np.float32)])
        )
        history, _ = server.fit(num_rounds=2, timeout=None)
        self.assertLen(server.strategy.released_rounds, 2)
        self.assertLen(history.losses_distributed, 2)


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
        for averages in (False, True):
            with self.assertRaisesRegex(ValueError, f"{name}.*averages=True"):
                wrapper(strategy, 40, 1.0, averages=averages)

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
            self.assertTrue(DPFedAvgFixed(made, 2, 1.0, averages=True).averages)
        patched = Logged()
        patched.aggregate_fit = lambda *_: (None, {})
        with self.assertRaisesRegex(ValueError, "the object itself"):
            DPFedAvgFixed(patched, 2, 1.0)

    def test_a_function_for_the_clients_metrics_is_refused(self):
        strategy = real_flower.strategy(
            "FedAvg", 2, fit_metrics_aggregation_fn=lambda metrics: {}
        )
        with self.assertRaisesRegex(ValueError, "fit_metrics_aggregation_fn"):
            DPFedAvgFixed(strategy, 2, 1.0)

    def test_pythons_seed_foretells_no_cohort(self):
        def cohorts():
            random.seed(42)
            manager = real_flower.manager([None] * 12)
            wrapper = DPFedAvgFixed(
                real_flower.strategy("FedAvg", 6), 6, 1.0, num_clients=12
            )
            model = real_flower.parameters(np.zeros(2))
            return [
                sorted(p.cid for p, _ in wrapper.configure_fit(i, model, manager))
                for i in range(9)
            ]

        self.assertNotEqual(cohorts(), cohorts())  # But for 924^-9.


if __name__ == "__main__":
    absltest.main()
