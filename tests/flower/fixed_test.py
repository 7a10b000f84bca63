"""The server wrapper with a fixed clip norm."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import accounting
from tfdp_fl.flower import (
    DPFedAvgFixed,
    DPFedAvgNumPyClient,
    RoundNotConfiguredError,
    RoundsAbandonedError,
    updates,
)


@dataclasses.dataclass
class _FitIns:
    parameters: Any
    config: dict


@dataclasses.dataclass
class _FitRes:
    parameters: Any
    num_examples: int
    metrics: dict


class _Strategy:
    """Weighted averaging over all clients there are; remembers its input."""

    def __init__(self):
        self.results = []

    def configure_fit(self, server_round, parameters, client_manager):
        fit_ins = _FitIns(parameters, {"lr": 0.1, "round": server_round})
        self.instructions = [(name, fit_ins) for name in client_manager]
        return self.instructions

    def aggregate_fit(self, server_round, results, failures):
        self.results.append(results)
        total = sum(res.num_examples for _, res in results)
        mean = [
            sum(
                res.num_examples / total * np.asarray(res.parameters[i])
                for _, res in results
            )
            for i in range(len(results[0][1].parameters))
        ]
        return mean, {"seen": len(results)}

    def evaluate(self, server_round, parameters):
        return 0.5, {"round": server_round}


class _Trainer:
    def __init__(self, update, num_examples):
        self.update = update
        self.num_examples = num_examples

    def fit(self, parameters, config):
        new = [p + u for p, u in zip(parameters, self.update, strict=True)]
        return new, self.num_examples, {"loss": 1.0}


def _trainers(size, num_params=50, scale=1.0):
    rng = np.random.default_rng(5)
    return {
        f"client {i}": _Trainer(
            [rng.normal(scale=scale, size=num_params), rng.normal(size=())],
            num_examples=10 * i + 1,
        )
        for i in range(size)
    }


def _fit(instructions, trainers):
    """Lets every instructed client train, through the client wrapper."""
    results = []
    for name, ins in instructions:
        parameters, num_examples, metrics = DPFedAvgNumPyClient(trainers[name]).fit(
            ins.parameters, ins.config
        )
        results.append((name, _FitRes(parameters, num_examples, metrics)))
    return results


def _clipped_mean(trainers, clip_norm, model):
    """The reference: McMahan et al. (2018), without noise."""
    deltas = [
        np.concatenate([np.ravel(part) for part in t.update]) for t in trainers.values()
    ]
    deltas = [d * min(1, clip_norm / np.linalg.norm(d)) for d in deltas]
    flat = np.concatenate([np.ravel(part) for part in model])
    return flat + np.mean(deltas, axis=0)


def _flat(parameters):
    return np.concatenate([np.ravel(part) for part in parameters])


_MODEL = [np.linspace(-1, 1, 50), np.array(0.25)]


class ConfigureTest(parameterized.TestCase):
    def test_the_noise_stddev_is_sent_only_if_clients_are_to_add_noise(self):
        for server_side in (True, False):
            strategy = DPFedAvgFixed(_Strategy(), 4, 0.5, 2.0, server_side)
            instructions = strategy.configure_fit(3, _MODEL, "abcd")
            for name, (client, ins) in zip("abcd", instructions, strict=True):
                self.assertEqual(client, name)
                self.assertIs(ins.parameters, _MODEL)
                wanted = {"lr": 0.1, "round": 3, "dpfedavg_clip_norm": 0.5}
                if not server_side:  # z S / sqrt(m)
                    wanted["dpfedavg_noise_stddev"] = 0.5
                self.assertEqual(ins.config, wanted)
                self.assertIsInstance(ins.config["dpfedavg_clip_norm"], float)

    def test_the_wrapped_strategys_instructions_are_not_changed(self):
        inner = _Strategy()
        DPFedAvgFixed(inner, 3, 0.5).configure_fit(1, _MODEL, "abc")
        for _, ins in inner.instructions:
            self.assertEqual(ins.config, {"lr": 0.1, "round": 1})

    @parameterized.parameters("ab", "abcd")
    def test_another_number_of_clients_is_an_error(self, names):
        strategy = DPFedAvgFixed(_Strategy(), 3, 0.5)
        with self.assertRaisesRegex(
            ValueError, f"{len(names)} clients.*num_sampled_clients=3"
        ):
            strategy.configure_fit(1, _MODEL, names)

    def test_nobody_sampled_is_no_round(self):
        strategy = DPFedAvgFixed(_Strategy(), 3, 0.5)
        self.assertEqual(strategy.configure_fit(1, _MODEL, ""), [])

    def test_different_models_are_an_error(self):
        class Personal(_Strategy):
            def configure_fit(self, server_round, parameters, client_manager):
                return [
                    (name, _FitIns([np.full(2, float(i))], {}))
                    for i, name in enumerate(client_manager)
                ]

        with self.assertRaisesRegex(ValueError, "different models"):
            DPFedAvgFixed(Personal(), 3, 0.5).configure_fit(1, _MODEL, "abc")


class AggregateTest(parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_without_noise_it_is_the_mean_of_clipped_updates(self, server_side):
        trainers = _trainers(5)
        strategy = DPFedAvgFixed(_Strategy(), 5, 1.5, 0.0, server_side)
        instructions = strategy.configure_fit(1, _MODEL, trainers)
        got, metrics = strategy.aggregate_fit(1, _fit(instructions, trainers), [])
        np.testing.assert_allclose(
            _flat(got), _clipped_mean(trainers, 1.5, _MODEL), rtol=1e-12
        )
        self.assertEqual(metrics, {"seen": 5})

    @parameterized.parameters(True, False)
    def test_the_noise_on_the_sum_is_z_times_s(self, server_side):
        # Once, wherever it is added (one framework adds it in both places).
        # 200 001 coordinates: the sample stddev varies by 0.16 %; 1.5 % is
        # more than 9 of these, a false alarm below 1e-19.
        trainers = _trainers(4, num_params=200_000)
        model = [np.zeros(200_000), np.array(0.0)]
        strategy = DPFedAvgFixed(_Strategy(), 4, 0.7, 1.3, server_side)
        instructions = strategy.configure_fit(1, model, trainers)
        got, _ = strategy.aggregate_fit(1, _fit(instructions, trainers), [])
        noise = _flat(got) - _clipped_mean(trainers, 0.7, model)
        np.testing.assert_allclose(np.std(4 * noise), 1.3 * 0.7, rtol=0.015)
        self.assertLess(abs(np.mean(4 * noise)), 8 * 1.3 * 0.7 / np.sqrt(200_001))

    def test_what_clients_have_noised_gets_no_more_noise(self):
        trainers = _trainers(3)
        inner = _Strategy()
        strategy = DPFedAvgFixed(inner, 3, 0.5, 1.0, server_side_noising=False)
        results = _fit(strategy.configure_fit(1, _MODEL, trainers), trainers)
        strategy.aggregate_fit(1, results, [])
        mean = np.mean([_flat(res.parameters) for _, res in results], axis=0)
        for _, handed in inner.results[0]:
            np.testing.assert_allclose(
                _flat(handed.parameters), mean, rtol=1e-12, atol=1e-12
            )

    def test_the_strategy_sees_nothing_but_the_noised_mean(self):
        # Whatever it does then is post-processing; and with each reply noised
        # and rounded by itself, a model in float16 would show what rounding
        # did to each of them.
        trainers = _trainers(4)
        inner = _Strategy()
        strategy = DPFedAvgFixed(inner, 4, 0.5)
        results = _fit(strategy.configure_fit(1, _MODEL, trainers), trainers)
        got, _ = strategy.aggregate_fit(1, results, [])
        first = inner.results[0][0][1].parameters
        self.assertLen(inner.results[0], 4)
        for _, handed in inner.results[0]:
            self.assertIs(handed.parameters, first)
        np.testing.assert_allclose(_flat(got), _flat(first), rtol=1e-12)

    def test_the_noise_of_two_rounds_is_independent(self):
        size = 20_000
        trainers = {
            name: _Trainer([np.zeros(size), np.array(0.0)], 1) for name in "abc"
        }
        strategy = DPFedAvgFixed(_Strategy(), 3, 1.0)
        noises = []
        for server_round in (1, 2, 3):
            instructions = strategy.configure_fit(
                server_round, [np.zeros(size), np.array(0.0)], trainers
            )
            np.random.seed(0)
            got, _ = strategy.aggregate_fit(
                server_round, _fit(instructions, trainers), []
            )
            noises.append(got[0])
        correlations = np.corrcoef(noises) - np.eye(3)
        # stddev 0.007 each: a false alarm at 0.06 has probability < 1e-15.
        self.assertLess(np.abs(correlations).max(), 0.06)

    def test_equal_weights_and_the_results_are_not_changed(self):
        trainers = _trainers(3)
        inner = _Strategy()
        strategy = DPFedAvgFixed(inner, 3, 0.5)
        results = _fit(strategy.configure_fit(1, _MODEL, trainers), trainers)
        before = copy.deepcopy(results)
        strategy.aggregate_fit(1, results, [])
        self.assertEqual([res.num_examples for _, res in inner.results[0]], [1, 1, 1])
        for (_, old), (_, new) in zip(before, results, strict=True):
            self.assertEqual(new.num_examples, old.num_examples)
            self.assertEqual(new.metrics, old.metrics)
            np.testing.assert_array_equal(_flat(new.parameters), _flat(old.parameters))

    def test_clients_that_do_not_clip_are_clipped_by_the_server(self):
        trainers = _trainers(3, scale=100.0)
        strategy = DPFedAvgFixed(_Strategy(), 3, 0.5, 0.0)
        instructions = strategy.configure_fit(1, _MODEL, trainers)
        results = [
            (name, _FitRes(*trainers[name].fit(ins.parameters, ins.config)))
            for name, ins in instructions
        ]
        got, _ = strategy.aggregate_fit(1, results, [])
        np.testing.assert_allclose(
            _flat(got), _clipped_mean(trainers, 0.5, _MODEL), rtol=1e-9
        )

    @parameterized.product(server_side=(True, False), bad=(np.nan, np.inf))
    def test_an_update_that_is_not_finite_counts_as_zero(self, server_side, bad):
        size = 50_000
        trainers = {
            name: _Trainer([np.zeros(size), np.array(0.0)], 1) for name in "abcd"
        }
        model = [np.zeros(size), np.array(0.0)]
        strategy = DPFedAvgFixed(_Strategy(), 4, 1.0, 1.0, server_side)
        results = _fit(strategy.configure_fit(1, model, trainers), trainers)
        results[2][1].parameters[0][7] = bad
        got, _ = strategy.aggregate_fit(1, results, [])
        # Its share of the noise is there all the same: 4 noises of 1/2 (stddev
        # of the sample stddev 0.3 %; 3 % is 9 of these).
        np.testing.assert_allclose(np.std(4 * _flat(got)), 1.0, rtol=0.03)
        self.assertEqual(strategy.discarded_updates, 1)

    def test_other_methods_are_the_wrapped_strategys(self):
        strategy = DPFedAvgFixed(_Strategy(), 3, 0.5)
        self.assertEqual(strategy.evaluate(4, None), (0.5, {"round": 4}))
        self.assertFalse(hasattr(strategy, "configure_evaluate"))
        self.assertIn("clip_norm=0.5", repr(strategy))
        copy.deepcopy(strategy)


class AbandonedRoundTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.trainers = _trainers(3)
        self.inner = _Strategy()
        self.strategy = DPFedAvgFixed(self.inner, 3, 0.5, on_client_failure="abort")
        self.results = _fit(
            self.strategy.configure_fit(1, _MODEL, self.trainers), self.trainers
        )

    def _assert_abandoned(self, results, failures):
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            self.assertEqual(
                self.strategy.aggregate_fit(1, results, failures), (None, {})
            )
        self.assertIn("Round 1 is abandoned", logs.output[-1])
        self.assertEqual(self.inner.results, [])
        self.assertEqual(self.strategy.released_rounds, ())
        self.assertEqual(self.strategy.privacy_epsilon(1000, 1e-5), 0.0)

    def test_a_failure(self):
        self._assert_abandoned(self.results[:2], [RuntimeError("gone")])

    def test_a_failure_beside_enough_results(self):
        self._assert_abandoned(self.results, [RuntimeError("gone")])

    def test_too_few_results_without_a_failure(self):
        self._assert_abandoned(self.results[:2], [])

    def test_too_many_results(self):
        self._assert_abandoned([*self.results, self.results[0]], [])

    def test_no_results(self):
        self._assert_abandoned([], [])

    def test_other_shapes(self):
        self.results[1][1].parameters = [np.zeros(3)]
        self._assert_abandoned(self.results, [])

    def test_the_next_round_goes_on(self):
        self._assert_abandoned(self.results[:2], [])
        instructions = self.strategy.configure_fit(2, _MODEL, self.trainers)
        got, _ = self.strategy.aggregate_fit(2, _fit(instructions, self.trainers), [])
        self.assertIsNotNone(got)
        self.assertEqual([r.server_round for r in self.strategy.released_rounds], [2])

    def test_it_is_not_for_ever(self):
        strategy = DPFedAvgFixed(self.inner, 3, 0.5, 1.0, False, max_abandoned_rounds=3)
        for server_round in (1, 2):
            strategy.configure_fit(server_round, _MODEL, self.trainers)
            self.assertEqual(strategy.aggregate_fit(server_round, [], []), (None, {}))
        strategy.configure_fit(3, _MODEL, self.trainers)
        with self.assertRaisesRegex(
            RoundsAbandonedError, "3 rounds in a row.*round 3: 1 results and 1"
        ):
            strategy.aggregate_fit(3, self.results[:1], [OSError()])
        self.assertEqual(strategy.released_rounds, ())

    def test_a_released_round_begins_the_count_anew(self):
        strategy = DPFedAvgFixed(self.inner, 3, 0.5, max_abandoned_rounds=2)
        for server_round in range(1, 9):
            instructions = strategy.configure_fit(server_round, _MODEL, self.trainers)
            results = []
            if server_round % 2:
                results = _fit(instructions, self.trainers)
            strategy.aggregate_fit(server_round, results, [])
        self.assertLen(strategy.released_rounds, 4)

    def test_with_the_clients_noise_all_of_them_are_needed(self):
        strategy = DPFedAvgFixed(self.inner, 3, 0.5, 1.0, False)
        self.assertEqual(strategy.on_client_failure, "abort")
        with self.assertRaisesRegex(ValueError, "on_client_failure"):
            DPFedAvgFixed(self.inner, 3, 0.5, 1.0, False, on_client_failure="exclude")

    def test_a_strategy_that_accepts_no_failures_gets_no_such_round(self):
        self.inner.accept_failures = False
        strategy = DPFedAvgFixed(self.inner, 3, 0.5)
        strategy.configure_fit(1, _MODEL, self.trainers)
        self.assertEqual(strategy.aggregate_fit(1, self.results[:2], []), (None, {}))
        self.assertEqual(strategy.released_rounds, ())

    @parameterized.parameters((0.9, 3, 0), (0.75, 3, 1), (0.9, 4, 1))
    def test_a_strategy_that_needs_more_replies_gets_no_such_round(
        self, needed, replied, released
    ):
        # Flower's FaultTolerantFedAvg makes nothing of fewer.
        self.inner.completion_rate_fit = needed
        strategy = DPFedAvgFixed(self.inner, 4, 0.5)
        trainers = _trainers(4)
        results = _fit(strategy.configure_fit(1, _MODEL, trainers), trainers)
        got, _ = strategy.aggregate_fit(
            1, results[:replied], [OSError()] * (4 - replied)
        )
        self.assertEqual(got is not None, bool(released))
        self.assertLen(strategy.released_rounds, released)


class ExcludedClientTest(parameterized.TestCase):
    """Noise of the server: who failed is left out of the sum."""

    def _round(self, z, num_replies, num_params=50, failures=()):
        trainers = _trainers(10, num_params=num_params)
        model = [np.zeros(num_params), np.array(0.0)]
        self.inner = _Strategy()
        self.strategy = DPFedAvgFixed(self.inner, 10, 0.5, z)
        instructions = self.strategy.configure_fit(1, model, trainers)
        results = _fit(instructions, trainers)[:num_replies]
        some = dict(list(trainers.items())[:num_replies])
        wanted = _clipped_mean(some, 0.5, model) * num_replies / 10
        got, _ = self.strategy.aggregate_fit(1, results, failures)
        return _flat(got), wanted

    @parameterized.parameters(1, 5, 9, 10)
    def test_the_divisor_is_the_planned_one(self, num_replies):
        got, wanted = self._round(0.0, num_replies)
        np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-15)
        self.assertLen(self.inner.results[0], num_replies)

    def test_more_results_than_clients_are_no_round(self):
        # Somebody would be in the sum twice, where clients have no names.
        strategy = DPFedAvgFixed(_Strategy(), 3, 0.5)
        trainers = _trainers(3)
        results = _fit(strategy.configure_fit(1, _MODEL, trainers), trainers)
        self.assertEqual(
            strategy.aggregate_fit(1, [*results, results[0]], []), (None, {})
        )
        self.assertEqual(strategy.released_rounds, ())

    def test_the_noise_is_the_planned_one(self):
        # 200 001 coordinates: the sample stddev varies by 0.16 %; 1.5 % is
        # more than 9 of these, a false alarm below 1e-19.
        got, wanted = self._round(1.0, 5, 200_000, [OSError()] * 5)
        np.testing.assert_allclose(np.std(10 * (got - wanted)), 0.5, rtol=0.015)

    def test_it_costs_as_much_as_a_full_round(self):
        self._round(1.0, 5)
        (released,) = self.strategy.released_rounds
        self.assertEqual((released.num_replies, released.clients_per_round), (5, 10))
        excluded = self.strategy.privacy_epsilon(100, 1e-5)
        self._round(1.0, 10)
        self.assertEqual(excluded, self.strategy.privacy_epsilon(100, 1e-5))
        self._round(1.0, 5)
        caveats = " ".join(self.strategy.privacy_report(1e-5, 100)["caveats"])
        self.assertIn("left out of their round's sum", caveats)


class ClientsNoiseTest(parameterized.TestCase):
    """Noise of the clients: a reply of no use has none in it."""

    def _round(self, strategy, server_round, size, garbled, failures=()):
        trainers = {
            name: _Trainer([np.zeros(size), np.array(0.0)], 1) for name in "abcd"
        }
        model = [np.zeros(size), np.array(0.0)]
        results = _fit(strategy.configure_fit(server_round, model, trainers), trainers)
        for _, result in results[:garbled]:
            result.parameters = [np.zeros(3)]
        results = results[: 4 - len(failures)]
        return strategy.aggregate_fit(server_round, results, failures)[0]

    @parameterized.parameters(1, 3)
    def test_the_server_adds_the_share_that_is_missing(self, garbled):
        strategy = DPFedAvgFixed(_Strategy(), 4, 1.0, 1.0, False)
        got = self._round(strategy, 1, 50_000, garbled)
        # 4 noises of 1/2 (stddev of the sample stddev 0.3 %; 3 % is 9 of
        # these).
        np.testing.assert_allclose(np.std(4 * _flat(got)), 1.0, rtol=0.03)
        self.assertEqual(strategy.rejected_replies, garbled)
        (released,) = strategy.released_rounds
        self.assertEqual(released.num_replies, 4 - garbled)
        self.assertLen(strategy.strategy.results[0], 4 - garbled)

    def test_one_client_does_not_end_the_run_by_what_it_sends(self):
        strategy = DPFedAvgFixed(_Strategy(), 4, 1.0, 1.0, False)
        for server_round in range(1, 13):
            self.assertIsNotNone(self._round(strategy, server_round, 2, 1))
        self.assertLen(strategy.released_rounds, 12)

    @parameterized.parameters((4, ()), (0, (OSError(),)), (1, (OSError(),)))
    def test_without_a_reply_of_use_or_with_silence_there_is_no_round(
        self, garbled, failures
    ):
        strategy = DPFedAvgFixed(_Strategy(), 4, 1.0, 1.0, False)
        self.assertIsNone(self._round(strategy, 1, 2, garbled, failures))
        self.assertEqual(strategy.released_rounds, ())

    def test_a_strategy_that_accepts_no_failures_gets_no_such_round(self):
        inner = _Strategy()
        inner.accept_failures = False
        strategy = DPFedAvgFixed(inner, 4, 1.0, 1.0, False)
        self.assertIsNone(self._round(strategy, 1, 2, 1))
        self.assertEqual(strategy.released_rounds, ())


class UnknownRoundTest(parameterized.TestCase):
    """Without the model that was sent there is nothing to clip against."""

    def setUp(self):
        super().setUp()
        self.trainers = _trainers(3)
        self.inner = _Strategy()
        self.strategy = DPFedAvgFixed(self.inner, 3, 0.5)

    def _assert_refused(self, server_round):
        huge = [
            (name, _FitRes([np.full(50, 1e3), np.array(0.0)], 1, {}))
            for name in self.trainers
        ]
        before = self.strategy.released_rounds
        handed = len(self.inner.results)
        with self.assertRaisesRegex(
            RoundNotConfiguredError,
            f"Round {server_round} has no configure_fit",
        ):
            self.strategy.aggregate_fit(server_round, huge, [])
        self.assertEqual(self.strategy.released_rounds, before)
        self.assertLen(self.inner.results, handed)

    def test_results_without_configure_fit(self):
        self._assert_refused(1)

    def test_results_that_come_twice(self):
        instructions = self.strategy.configure_fit(1, _MODEL, self.trainers)
        self.strategy.aggregate_fit(1, _fit(instructions, self.trainers), [])
        self._assert_refused(1)

    def test_results_of_another_round(self):
        self.strategy.configure_fit(2, _MODEL, self.trainers)
        self._assert_refused(1)


class HonestNoiseTest(parameterized.TestCase):
    """With noise at the clients, replies are bounded by S and a tail."""

    def test_an_unwrapped_client_moves_the_model_by_no_more_than_noise(self):
        trainers = _trainers(5)
        strategy = DPFedAvgFixed(_Strategy(), 5, 0.5, 1.0, False)
        results = _fit(strategy.configure_fit(1, _MODEL, trainers), trainers)
        results[0][1].parameters = [np.full(50, 1e30), np.array(0.0)]
        got, _ = strategy.aggregate_fit(1, results, [])
        stddev = 0.5 / math.sqrt(5)
        bound = updates.largest_honest_norm(0.5, stddev, 51)
        self.assertLess(bound, 0.5 + stddev * (math.sqrt(51) + 9))
        moved = np.linalg.norm(_flat(got) - _flat(_MODEL))
        self.assertLessEqual(moved, bound)
        self.assertLen(strategy.released_rounds, 1)

    @parameterized.parameters(1, 50, 5000)
    def test_honest_clients_are_not_cut_short(self, size):
        # Each exceeds the bound with a probability below 5e-18.
        rng = np.random.default_rng()
        bound = updates.largest_honest_norm(0.5, 0.3, size)
        for _ in range(200):
            update = rng.normal(scale=0.3, size=size)
            update[0] += 0.5
            self.assertLess(np.linalg.norm(update), bound)


class AccountingTest(parameterized.TestCase):
    def _after(self, rounds, noise_multiplier=1.0, m=10):
        trainers = _trainers(m, num_params=2)
        strategy = DPFedAvgFixed(_Strategy(), m, 0.5, noise_multiplier)
        model = [np.zeros(2), np.array(0.0)]
        for server_round in range(1, rounds + 1):
            instructions = strategy.configure_fit(server_round, model, trainers)
            strategy.aggregate_fit(server_round, _fit(instructions, trainers), [])
        return strategy

    @parameterized.parameters("rdp", "pld")
    def test_epsilon_is_that_of_the_rounds_released(self, accountant):
        self.assertAlmostEqual(
            self._after(20).privacy_epsilon(100, 1e-5, accountant=accountant),
            accounting.epsilon(
                noise_multiplier=1.0,
                sampling="fixed_size",
                num_clients=100,
                clients_per_round=10,
                rounds=20,
                delta=1e-5,
                accountant=accountant,
            ),
        )

    def test_without_noise_there_is_no_guarantee(self):
        self.assertEqual(self._after(1, 0.0).privacy_epsilon(100, 1e-5), math.inf)
        self.assertEqual(self._after(0).privacy_epsilon(100, 1e-5), 0.0)

    def test_claiming_nothing_for_the_sampling(self):
        # 20 bare Gaussians of z=1 are one of 1/sqrt(20).
        self.assertAlmostEqual(
            self._after(20).privacy_epsilon(
                100, 1e-5, sampling="shuffled", accountant="pld"
            ),
            accounting.gaussian_epsilon(20**-0.5, 1e-5),
            places=6,
        )

    def test_a_sampling_that_was_not_done_is_refused(self):
        with self.assertRaisesRegex(ValueError, "sampling"):
            self._after(1).privacy_epsilon(100, 1e-5, sampling="poisson")

    def test_the_documented_figure(self):
        # Flower's own snippet passes z where z / 2 belongs, and says 14.05.
        epsilon = self._after(100, m=100).privacy_epsilon(1000, 1e-5)
        self.assertAlmostEqual(epsilon, 83.9369, delta=0.05)


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_sampled_clients": 0}, ValueError),
        ({"num_sampled_clients": 2.5}, TypeError),
        ({"clip_norm": 0.0}, ValueError),
        ({"clip_norm": float("nan")}, ValueError),
        ({"noise_multiplier": -1.0}, ValueError),
        ({"server_side_noising": 1}, TypeError),
        ({"strategy": object()}, TypeError),
        ({"on_client_failure": "ignore"}, ValueError),
        ({"max_abandoned_rounds": 0}, ValueError),
        ({"averages": 1}, TypeError),
        ({"target_epsilon": 1.0}, ValueError),
        ({"target_delta": 1e-5}, ValueError),
        ({"target_epsilon": -1.0, "target_delta": 1e-5}, ValueError),
        ({"accountant": "moments"}, ValueError),
    )
    def test_bad_arguments_are_named(self, changes, error):
        arguments = {
            "strategy": _Strategy(),
            "num_sampled_clients": 3,
            "clip_norm": 1.0,
        }
        with self.assertRaisesRegex(error, next(iter(changes))):
            DPFedAvgFixed(**{**arguments, **changes})


if __name__ == "__main__":
    absltest.main()
