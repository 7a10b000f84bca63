"""A server that restarts, a ledger that cannot be written, a budget."""

from __future__ import annotations

import pathlib
import tempfile
from unittest import mock

import dp_accounting
import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import PrivateStrategy

_DELTA = 1e-5
_GRID = fm.Grid({i: fm.adds([np.ones(2)]) for i in range(6)})
_MODEL = fm.model(np.zeros(2))
_FIXED = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
_ADAPTIVE = tfdp_fl.AdaptiveClipping(
    noise_multiplier=1.0, initial_clip_norm=0.1, count_noise_stddev=1.0
)


def _private(mechanism=_FIXED, **options):
    return PrivateStrategy(
        fm.Strategy(3), mechanism, num_clients=6, clients_per_round=3, **options
    )


def _run(strategy, rounds, first=1):
    """Runs rounds; returns how many were released."""
    before = len(strategy.released_rounds)
    for server_round in range(first, first + rounds):
        fm.a_round(strategy, _GRID, _MODEL, server_round)
    return len(strategy.released_rounds) - before


def _central(rounds, z=1.0):
    return accounting.epsilon(z, "fixed_size", 6, 3, rounds, _DELTA)


class EpsilonTest(parameterized.TestCase):
    def test_epsilon_is_that_of_the_rounds_released(self):
        strategy = _private()
        self.assertEqual(strategy.privacy_epsilon(_DELTA), 0.0)
        _run(strategy, 5)
        self.assertAlmostEqual(strategy.privacy_epsilon(_DELTA), _central(5))
        bare = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0)
        strategy = _private(bare)
        _run(strategy, 1)
        for accountant in ("rdp", "pld"):
            self.assertEqual(strategy.privacy_epsilon(_DELTA, accountant), np.inf)
        with self.assertRaisesRegex(ValueError, "delta"):
            strategy.privacy_epsilon()


class LedgerTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = pathlib.Path(folder) / "ledger.jsonl"

    def _entries(self):
        return accounting.PrivacyLedger.read(self.path).entries


class BudgetTest(LedgerTestCase):
    def test_it_stops_before_the_round_that_would_overspend(self):
        strategy = _private(target_epsilon=_central(4) + 1e-6, target_delta=_DELTA)
        self.assertEqual(_run(strategy, 4), 4)
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            told = strategy.configure_train(5, _MODEL, fm.ConfigRecord(), _GRID)
        self.assertEqual(told, [])
        self.assertIn("Stopped before round 5", logs.output[0])
        self.assertEqual(strategy.stopped_before_round, 5)
        self.assertEqual(strategy.aggregate_train(5, []), (None, None))
        self.assertEqual(_run(strategy, 10, first=6), 0)
        self.assertLessEqual(strategy.privacy_epsilon(), _central(4) + 1e-6)

    def test_without_noise_nothing_is_affordable(self):
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0)
        strategy = _private(mechanism, target_epsilon=1e6, target_delta=_DELTA)
        self.assertEqual(_run(strategy, 3), 0)

    def test_the_same_script_started_again_counts_what_it_released(self):
        target = {
            "target_epsilon": _central(6) + 1e-6,
            "target_delta": _DELTA,
            "ledger": self.path,
        }
        first = _private(**target)
        self.assertEqual(_run(first, 4), 4)
        first.close()
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            again = _private(**target)
        self.assertIn("holds 4 rounds", logs.output[0])
        self.assertAlmostEqual(again.privacy_epsilon(), _central(4))
        self.assertEqual(_run(again, 10), 2)
        self.assertEqual(again.privacy_report()["rounds_from_ledger"], 4)
        self.assertLen(self._entries(), 6)

    def test_a_schedule_goes_on_after_a_restart(self):
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=(1.0, 3.0))
        for _ in range(2):
            strategy = _private(mechanism, ledger=self.path)
            _run(strategy, 1)
            strategy.close()
        charged = [entry.charge.noise_multiplier for entry in self._entries()]
        self.assertEqual(charged, [1, 3])

    def test_two_runs_with_one_ledger_have_one_budget(self):
        target = {"target_epsilon": _central(6) + 1e-6, "target_delta": _DELTA}
        with accounting.PrivacyLedger(self.path) as ledger:
            one = _private(ledger=ledger, **target)
            other = _private(_ADAPTIVE, ledger=ledger, **target)
            self.assertEqual(_run(one, 2), 2)
            self.assertEqual(_run(other, 2), 2)
            self.assertEqual(_run(one, 9), 2)
            self.assertEqual(_run(other, 9), 0)
            self.assertAlmostEqual(one.privacy_epsilon(), _central(6))
            self.assertAlmostEqual(other.privacy_epsilon(), _central(6))

    def test_results_of_a_stopped_round_are_not_released(self):
        strategy = _private(target_epsilon=1e-3, target_delta=_DELTA)
        strategy.configure_train(1, _MODEL, fm.ConfigRecord(), _GRID)
        told = _private().configure_train(1, _MODEL, fm.ConfigRecord(), _GRID)
        got = strategy.aggregate_train(1, _GRID.send_and_receive(told))
        self.assertEqual(got, (None, None))
        self.assertEmpty(strategy.strategy.handed)
        self.assertEqual(strategy.released_rounds, ())


class LedgerTest(LedgerTestCase):
    def test_a_line_of_others_without_a_charge_has_no_epsilon(self):
        with ledger_lib.PrivacyLedger(
            self.path, mode="append", mechanism={"guarantee": "central", "name": "mine"}
        ) as ledger:
            strategy = _private(ledger=ledger)
            _run(strategy, 1)
            ledger.record(1, None, 3, local={"mu_squared": 4.0, "max_mu_squared": 4.0})
            with self.assertRaisesRegex(ValueError, "with a central charge only"):
                strategy.privacy_epsilon(_DELTA)

    def test_each_round_is_on_the_disk_before_it_is_released(self):
        seen = []
        strategy = _private(_ADAPTIVE, ledger=self.path)
        strategy.strategy.aggregate_train = lambda *_: (
            seen.append(len(self._entries())) or (None, None)
        )
        _run(strategy, 3)
        self.assertEqual(seen, [1, 2, 3])
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertAlmostEqual(contents.epsilon(_DELTA), _central(3))
        self.assertEqual(
            [e.details["clip_norm"] for e in contents.entries],
            [r.clip_norm for r in strategy.released_rounds],
        )
        self.assertEqual([e.round_index for e in contents.entries], [0, 1, 2])
        self.assertEqual([e.cohort_size for e in contents.entries], [3] * 3)

    def test_what_cannot_be_written_is_not_released(self):
        strategy = _private(_ADAPTIVE, ledger=self.path)
        _run(strategy, 1)
        before = strategy.released_rounds, strategy.clip_norm
        with (
            mock.patch.object(
                ledger_lib.PrivacyLedger,
                "record",
                side_effect=ledger_lib.LedgerWriteError("disk full"),
            ),
            self.assertRaisesRegex(ledger_lib.LedgerWriteError, "disk full"),
        ):
            _run(strategy, 1, 2)
        self.assertLen(strategy.strategy.handed, 1)
        self.assertEqual((strategy.released_rounds, strategy.clip_norm), before)
        self.assertLen(self._entries(), 1)

    def test_abandoned_rounds_are_not_in_it(self):
        strategy = _private(ledger=self.path)
        strategy.configure_train(1, _MODEL, fm.ConfigRecord(), _GRID)
        strategy.aggregate_train(1, [])
        self.assertEqual(self._entries(), ())

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
            _private(ledger=self.path)
        accounting.PrivacyLedger(self.path, mode="append").close()

    def test_wrong_arguments_leave_no_file(self):
        with self.assertRaises(ValueError):
            _private(ledger=self.path, max_abandoned_rounds=0)
        self.assertFalse(self.path.exists())
