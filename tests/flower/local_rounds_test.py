"""What a ledger says of several strategies whose clients are private alone."""

from __future__ import annotations

import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import PrivateStrategy

_DELTA = 1e-5
_GRID = fm.Grid({i: fm.adds([np.ones(2)]) for i in range(6)})


def _run(strategy, rounds, first=1):
    for server_round in range(first, first + rounds):
        fm.a_round(strategy, _GRID, fm.model(np.zeros(2)), server_round)


def _epsilon(rounds):
    """The reference: mu of one release is 2 / 3, and mu^2 adds up."""
    return accounting.gaussian_epsilon(3 / (2 * rounds**0.5), _DELTA)


class OneLedgerTest(parameterized.TestCase):
    """The ledger says what the last strategy says: all that was sent."""

    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = pathlib.Path(folder) / "ledger.jsonl"

    def _opened(self, **options):
        return self.enter_context(
            accounting.PrivacyLedger(self.path, mode="append", **options)
        )

    def _strategy(self, ledger, **options):
        return PrivateStrategy(
            fm.Strategy(3),
            tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=3.0),
            num_clients=6,
            clients_per_round=3,
            ledger=ledger,
            **options,
        )

    def _again(self, state, ledger):
        return PrivateStrategy.from_state(
            json.loads(json.dumps(state)), fm.Strategy(3), ledger=ledger
        )

    def _assert_says(self, rounds, *strategies):
        contents = accounting.PrivacyLedger.read(self.path)
        self.assertLen(contents.entries, rounds)
        self.assertAlmostEqual(contents.epsilon(_DELTA), _epsilon(rounds))
        for strategy in strategies:
            self.assertAlmostEqual(
                strategy.privacy_epsilon(delta=_DELTA), _epsilon(rounds)
            )

    def test_one_after_the_other(self):
        ledger = self._opened()
        for done in (2, 4, 6):
            strategy = self._strategy(ledger)
            _run(strategy, 2)
            self._assert_says(done, strategy)

    def test_in_turn(self):
        ledger = self._opened()
        one, other = self._strategy(ledger), self._strategy(ledger)
        for server_round in range(1, 4):
            _run(one, 1, server_round)
            self._assert_says(2 * server_round - 1, one)
            _run(other, 1, server_round)
            self._assert_says(2 * server_round, other)

    def test_from_its_state(self):
        ledger = self._opened()
        first = self._strategy(ledger)
        _run(first, 2)
        again = self._again(first.state(), ledger)
        _run(again, 2, 3)
        self._assert_says(4, again)

    def test_from_a_state_that_misses_rounds(self):
        ledger = self._opened()
        first = self._strategy(ledger)
        _run(first, 2)
        state = first.state()
        _run(first, 2, 3)
        again = self._again(state, ledger)
        self._assert_says(4, again)
        _run(again, 1, 5)
        self._assert_says(5, again)

    def test_from_a_state_without_a_ledger(self):
        ledger = self._opened()
        _run(self._strategy(ledger), 2)
        alone = self._strategy(None)
        _run(alone, 2)
        again = self._again(alone.state(), ledger)
        self._assert_says(4, again)
        _run(again, 1, 3)
        self._assert_says(5, again)

    @parameterized.parameters(None, "a run that was resumed")
    def test_opened_again(self, run):
        for done in (2, 4):
            ledger = self._opened(run=run)
            strategy = self._strategy(ledger)
            _run(strategy, 2)
            self._assert_says(done, strategy)
            ledger.close()

    def test_by_its_path(self):
        for done in (2, 4):
            strategy = self._strategy(self.path)
            _run(strategy, 2)
            self._assert_says(done, strategy)
            strategy.close()
        again = self._again(strategy.state(), self.path)
        _run(again, 1)
        self._assert_says(5, again)
        again.close()

    def test_a_round_that_could_not_be_written_is_not_counted(self):
        ledger = self._opened()
        strategy = self._strategy(ledger)
        _run(strategy, 1)
        with (
            mock.patch.object(
                ledger_lib.PrivacyLedger,
                "_write",
                side_effect=ledger_lib.LedgerWriteError("disk full"),
            ),
            self.assertRaises(ledger_lib.LedgerWriteError),
        ):
            _run(strategy, 1, 2)
        _run(strategy, 1, 3)
        self._assert_says(2, strategy)


if __name__ == "__main__":
    absltest.main()
