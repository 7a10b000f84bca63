"""A server that restarts, a ledger that cannot be written, a budget."""

from __future__ import annotations

import json
import pathlib
import random
import tempfile
import types
from unittest import mock

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import (
    DPFedAvgAdaptive,
    DPFedAvgFixed,
    DPFedAvgNumPyClient,
    RoundNotConfiguredError,
)


class _Manager:
    """100 clients, each with an update of norm 1."""

    def num_available(self):
        return 100

    def sample(self, num_clients, min_num_clients=None, criterion=None):
        return random.sample(range(100), num_clients)


class _Strategy:
    def __init__(self):
        self.aggregated = 0

    def configure_fit(self, server_round, parameters, client_manager):
        ins = types.SimpleNamespace(parameters=parameters, config={})
        return [(client, ins) for client in client_manager.sample(10)]

    def aggregate_fit(self, server_round, results, failures):
        self.aggregated += 1
        return results[0][1].parameters, {}


class _Trainer:
    def fit(self, parameters, config):
        return [parameters[0] + np.array([0.6, 0.8])], 1, {}


def _results(instructions):
    results = []
    for client, ins in instructions:
        trained = DPFedAvgNumPyClient(_Trainer()).fit(ins.parameters, ins.config)
        results.append(
            (
                client,
                types.SimpleNamespace(
                    parameters=trained[0],
                    num_examples=trained[1],
                    metrics=trained[2],
                ),
            )
        )
    return results


def _run(wrapper, rounds, first=1):
    """Runs rounds; returns how many were released."""
    before = len(wrapper.released_rounds)
    for server_round in range(first, first + rounds):
        instructions = wrapper.configure_fit(server_round, [np.zeros(2)], _Manager())
        if instructions:
            wrapper.aggregate_fit(server_round, _results(instructions), [])
    return len(wrapper.released_rounds) - before


def _epsilon(rounds, z=1.0):
    return accounting.epsilon(
        noise_multiplier=z,
        sampling="fixed_size",
        num_clients=100,
        clients_per_round=10,
        rounds=rounds,
        delta=1e-5,
    )


def _fixed(**arguments):
    return DPFedAvgFixed(_Strategy(), 10, 0.5, 1.0, **arguments)


def _adaptive(**arguments):
    return DPFedAvgAdaptive(
        _Strategy(), 10, 0.1, 1.0, clip_count_stddev=1.0, **arguments
    )


class StateTest(parameterized.TestCase):
    @parameterized.parameters(_fixed, _adaptive)
    def test_a_restarted_server_knows_its_rounds_and_its_clip_norm(self, make):
        first = make(max_abandoned_rounds=4, on_client_failure="abort")
        _run(first, 5)
        first.configure_fit(6, [np.zeros(2)], _Manager())
        first.aggregate_fit(6, [], [OSError()])
        state = json.loads(json.dumps(first.state()))
        again = type(first).from_state(state, _Strategy())
        self.assertEqual(again.released_rounds, first.released_rounds)
        self.assertEqual(again.clip_norm, first.clip_norm)
        self.assertEqual(again.state(), first.state())
        self.assertEqual(repr(again)[-60:], repr(first)[-60:])
        _run(again, 5)
        self.assertAlmostEqual(again.privacy_epsilon(delta=1e-5), _epsilon(10))

    def test_arguments_may_change(self):
        first = _fixed()
        _run(first, 5)
        again = DPFedAvgFixed.from_state(
            first.state(), _Strategy(), noise_multiplier=2.0, clip_norm=0.7
        )
        self.assertEqual((again.clip_norm, again.noise_multiplier), (0.7, 2.0))
        _run(again, 5)
        charged = again.privacy_epsilon(delta=1e-5)
        self.assertGreater(charged, _epsilon(5))
        self.assertLess(charged, _epsilon(10))

    def test_a_round_under_way_is_not_in_it(self):
        first = _fixed()
        instructions = first.configure_fit(1, [np.zeros(2)], _Manager())
        again = DPFedAvgFixed.from_state(first.state(), _Strategy())
        with self.assertRaises(RoundNotConfiguredError):
            again.aggregate_fit(1, _results(instructions), [])

    def test_a_state_of_something_else_is_refused(self):
        for state in ({}, _adaptive().state()):
            with self.assertRaisesRegex(ValueError, "state must be one of"):
                DPFedAvgFixed.from_state(state, _Strategy())


class BudgetTest(parameterized.TestCase):
    def test_it_stops_before_the_round_that_would_overspend(self):
        strategy = _fixed(target_epsilon=_epsilon(4) + 1e-6, target_delta=1e-5)
        self.assertEqual(_run(strategy, 4), 4)
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            instructions = strategy.configure_fit(5, [np.zeros(2)], _Manager())
        self.assertEqual(instructions, [])
        self.assertIn("Stopped before round 5", logs.output[0])
        self.assertEqual(strategy.stopped_before_round, 5)
        self.assertEqual(strategy.aggregate_fit(5, [], []), (None, {}))
        self.assertEqual(_run(strategy, 10, first=6), 0)
        self.assertLessEqual(
            strategy.privacy_epsilon(), strategy._history.target_epsilon
        )

    def test_results_of_a_stopped_round_are_not_released(self):
        strategy = _fixed(target_epsilon=1e-3, target_delta=1e-5)
        strategy.configure_fit(1, [np.zeros(2)], _Manager())
        instructions = _fixed().configure_fit(1, [np.zeros(2)], _Manager())
        self.assertEqual(
            strategy.aggregate_fit(1, _results(instructions), []), (None, {})
        )
        self.assertEqual(strategy.strategy.aggregated, 0)
        self.assertEqual(strategy.released_rounds, ())

    def test_a_restart_spends_no_second_budget(self):
        target = {"target_epsilon": _epsilon(6) + 1e-6, "target_delta": 1e-5}
        first = _fixed(**target)
        _run(first, 4)
        again = DPFedAvgFixed.from_state(first.state(), _Strategy())
        self.assertEqual(_run(again, 10), 2)

    def test_without_noise_nothing_is_affordable(self):
        strategy = DPFedAvgFixed(
            _Strategy(), 10, 0.5, 0.0, target_epsilon=1e6, target_delta=1e-5
        )
        self.assertEqual(_run(strategy, 3), 0)


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = (
            pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / "ledger"
        )

    def _entries(self):
        return accounting.PrivacyLedger.read(self.path).entries

    def test_each_round_is_on_the_disk_before_it_is_released(self):
        seen = []
        strategy = _adaptive(ledger=self.path)
        strategy.strategy.aggregate_fit = lambda *_: (
            seen.append(len(self._entries())) or (None, {})
        )
        _run(strategy, 3)
        self.assertEqual(seen, [1, 2, 3])
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertAlmostEqual(contents.epsilon(1e-5), _epsilon(3))
        self.assertEqual(
            [e.details["clip_norm"] for e in contents.entries],
            [r.clip_norm for r in strategy.released_rounds],
        )
        self.assertEqual([e.round_index for e in contents.entries], [0, 1, 2])
        self.assertEqual([e.cohort_size for e in contents.entries], [10] * 3)

    def test_what_cannot_be_written_is_not_released(self):
        strategy = _adaptive(ledger=self.path)
        _run(strategy, 1)
        before = strategy.state()
        instructions = strategy.configure_fit(2, [np.zeros(2)], _Manager())
        with (
            mock.patch.object(
                ledger_lib.PrivacyLedger,
                "record",
                side_effect=ledger_lib.LedgerWriteError("disk full"),
            ),
            self.assertRaisesRegex(ledger_lib.LedgerWriteError, "disk full"),
        ):
            strategy.aggregate_fit(2, _results(instructions), [])
        self.assertEqual(strategy.strategy.aggregated, 1)
        self.assertEqual(strategy.state(), before)
        self.assertLen(self._entries(), 1)

    def test_abandoned_rounds_are_not_in_it(self):
        strategy = _fixed(ledger=self.path)
        strategy.configure_fit(1, [np.zeros(2)], _Manager())
        strategy.aggregate_fit(1, [], [OSError()])
        self.assertEqual(self._entries(), ())

    def test_the_same_script_started_again_counts_what_it_released(self):
        target = {"target_epsilon": _epsilon(6) + 1e-6, "target_delta": 1e-5}
        first = _fixed(ledger=self.path, **target)
        self.assertEqual(_run(first, 4), 4)
        first.close()
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            again = _fixed(ledger=self.path, **target)
        self.assertIn("holds 4 rounds", logs.output[0])
        self.assertAlmostEqual(again.privacy_epsilon(), _epsilon(4))
        self.assertEqual(_run(again, 10), 2)
        self.assertEqual(again.privacy_report()["rounds_from_ledger"], 4)
        self.assertLen(self._entries(), 6)

    def test_rounds_that_the_state_missed_are_charged(self):
        first = _fixed(ledger=self.path)
        _run(first, 3)
        state = json.loads(json.dumps(first.state()))
        _run(first, 2)  # And then it crashed.
        first.close()
        again = DPFedAvgFixed.from_state(state, _Strategy(), ledger=self.path)
        self.assertLen(again.released_rounds, 3)
        self.assertAlmostEqual(again.privacy_epsilon(delta=1e-5), _epsilon(5))
        _run(again, 1)
        self.assertAlmostEqual(again.privacy_epsilon(delta=1e-5), _epsilon(6))
        self.assertLen(self._entries(), 6)
        again.close()
        third = DPFedAvgFixed.from_state(again.state(), _Strategy(), ledger=self.path)
        self.assertAlmostEqual(third.privacy_epsilon(delta=1e-5), _epsilon(6))

    def test_a_state_that_had_a_ledger_does_not_go_on_without(self):
        first = _fixed(ledger=self.path)
        _run(first, 3)
        first.close()
        with self.assertRaisesRegex(ValueError, "ledger must be given"):
            DPFedAvgFixed.from_state(first.state(), _Strategy())
        other = self.path.with_name("other")
        with self.assertRaises(ledger_lib.LedgerTamperedError):
            DPFedAvgFixed.from_state(first.state(), _Strategy(), ledger=other)
        with (
            accounting.PrivacyLedger(self.path.with_name("third")) as third,
            self.assertRaisesRegex(ValueError, "held 3 rounds"),
        ):
            DPFedAvgFixed.from_state(first.state(), _Strategy(), ledger=third)
        # Nor with that of another run, even if it holds as many rounds.
        fourth = self.path.with_name("fourth")
        others = _fixed(ledger=fourth)
        _run(others, 3)
        others.close()
        with (
            accounting.PrivacyLedger(fourth, "append") as opened,
            self.assertRaises(ledger_lib.LedgerTamperedError),
        ):
            DPFedAvgFixed.from_state(first.state(), _Strategy(), ledger=opened)
        with accounting.PrivacyLedger(self.path, "append") as opened:
            again = DPFedAvgFixed.from_state(first.state(), _Strategy(), ledger=opened)
            self.assertAlmostEqual(again.privacy_epsilon(delta=1e-5), _epsilon(3))

    def test_a_ledger_that_is_begun_later_holds_all_rounds(self):
        first = _fixed()
        _run(first, 3)
        again = DPFedAvgFixed.from_state(first.state(), _Strategy(), ledger=self.path)
        _run(again, 1)
        self.assertLen(self._entries(), 4)
        self.assertAlmostEqual(
            accounting.PrivacyLedger.read(self.path).epsilon(1e-5), _epsilon(4)
        )
        self.assertAlmostEqual(again.privacy_epsilon(delta=1e-5), _epsilon(4))

    def test_a_ledger_of_ones_own(self):
        with accounting.PrivacyLedger(self.path) as ledger:
            strategy = _fixed(ledger=ledger)
            _run(strategy, 2)
            self.assertEqual(ledger.rounds, 2)

    def test_two_runs_with_one_ledger_have_one_budget(self):
        target = {"target_epsilon": _epsilon(6) + 1e-6, "target_delta": 1e-5}
        with accounting.PrivacyLedger(self.path) as ledger:
            one = _fixed(ledger=ledger, **target)
            other = _adaptive(ledger=ledger, **target)
            self.assertEqual(_run(one, 2), 2)
            self.assertEqual(_run(other, 2), 2)
            self.assertEqual(_run(one, 9), 2)
            self.assertEqual(_run(other, 9), 0)
            self.assertAlmostEqual(one.privacy_epsilon(), _epsilon(6))
            self.assertAlmostEqual(other.privacy_epsilon(), _epsilon(6))

    def test_a_ledger_of_another_relation_is_refused_and_let_go(self):
        poisson = accounting.RoundCharge(
            sampling="poisson",
            num_clients=100,
            clients_per_round=10,
            event=dp_accounting.GaussianDpEvent(1.0),
        )
        with accounting.PrivacyLedger(self.path) as ledger:
            ledger.record(0, poisson, 10)
        with self.assertRaisesRegex(ValueError, "neighbouring relation"):
            _fixed(ledger=self.path)
        accounting.PrivacyLedger(self.path, mode="append").close()

    def test_wrong_arguments_leave_no_file(self):
        with self.assertRaises(ValueError):
            DPFedAvgAdaptive(_Strategy(), 10, clip_count_stddev=0.1, ledger=self.path)
        self.assertFalse(self.path.exists())


if __name__ == "__main__":
    absltest.main()
