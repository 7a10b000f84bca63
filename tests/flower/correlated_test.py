"""Correlated noise in Flower: clients who come as they like."""

from __future__ import annotations

import pathlib
import tempfile
from unittest import mock

import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.mechanisms import statistics
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import PrivateStrategy

_T, _B, _N, _M = 8, 3, 12, 4
_DELTA = 1e-5


def _mechanism(strategy="blt:2", **options):
    return tfdp_fl.CorrelatedNoise(
        **{
            "clip_norm": 0.5,
            "noise_multiplier": 2.0,
            "strategy": strategy,
            "rounds": _T,
            "min_separation": _B,
            **options,
        }
    )


def _private(mechanism=None, strategy=None, **options):
    return PrivateStrategy(
        fm.Strategy(_M) if strategy is None else strategy,
        _mechanism() if mechanism is None else mechanism,
        **{"num_clients": _N, "clients_per_round": _M, **options},
    )


def _grid(nodes=range(_N), size=4, **changed):
    trains = {100 + i: fm.adds([np.zeros(size)]) for i in nodes}
    return fm.Grid({**trains, **changed})


def _asked(grid):
    return [message.metadata.dst_node_id for message in grid.sent]


def _spent(strategy):
    return sum(r.noise_multiplier**-2 for r in strategy.released_rounds)


def _memory(strategy):
    """Returns where the noise is, and its buffers."""
    kept = strategy._correlation
    return kept.position, [buffer.numpy().tolist() for buffer in kept.memory.buffers]


def _run(strategy, grid, rounds, first=1, record=None):
    """Returns the noise of rounds, and who was asked."""
    record = fm.model(np.zeros(4)) if record is None else record
    moved, asked = [], []
    for number in range(first, first + rounds):
        new, _ = fm.a_round(strategy, grid, record, number)
        moved.append(fm.arrays(new)[0] - fm.arrays(record)[0])
        asked.append(_asked(grid))
        record = new
    return np.array(moved), asked, record


class NoiseTest(parameterized.TestCase):
    @parameterized.parameters("blt:2", "banded:3")
    def test_noise_is_that_of_the_strategy(self, strategy):
        made = _private(_mechanism(strategy))
        size = 40_000
        moved, *_ = _run(made, _grid(size=size), 5, record=fm.model(np.zeros(size)))
        noise = moved / (2.0 * 0.5 / _M)
        c = made.mechanism.generator.coefficients
        for t in range(5):
            terms = [c[j] * noise[t - j] for j in range(min(t + 1, len(c)))]
            statistics.assert_gaussian(np.sum(terms, axis=0), 1.0)


class WhoTest(parameterized.TestCase):
    def _assert_apart(self, asked):
        for t, cohort in enumerate(asked):
            self.assertLen(set(cohort), _M)
            for other in asked[t + 1 : t + _B]:
                self.assertEmpty(set(cohort) & set(other))

    def test_nobody_comes_again_too_soon(self):
        made = _private(num_clients=20)
        _, asked, _ = _run(made, _grid(range(20)), 3 * _T)
        self._assert_apart(asked)
        whole = (made.mechanism.generator.sensitivity / 2.0) ** 2
        self.assertAlmostEqual(_spent(made), 3 * whole)
        self.assertAlmostEqual(
            made.privacy_epsilon(delta=_DELTA, accountant="pld"),
            accounting.gaussian_epsilon((3 * whole) ** -0.5, _DELTA),
            places=6,
        )

    def test_two_nodes_of_one_client_are_one(self):
        # 24 nodes of 12 clients.
        made = _private(client_of=lambda node: f"client {node % _N}")
        _, asked, _ = _run(made, _grid(range(24)), 6)
        self._assert_apart([[node % _N for node in each] for each in asked])

    def test_who_failed_was_not_in_it(self):
        # All 12 are needed every 3 rounds: the silent one may come at once.
        made, grid = _private(), _grid()
        grid.trains[100] = None
        _run(made, grid, 3)
        self.assertEqual(made._correlation.eligible([100]), ([100], 1))

    def test_nobody_comes_more_often_than_he_may(self):
        made = _private(_mechanism(max_participations=1))
        grid = _grid()
        _, asked, record = _run(made, grid, 3)
        self.assertLen({node for cohort in asked for node in cohort}, _N)
        got = made.configure_train(4, record, fm.ConfigRecord(), grid)
        self.assertEqual(got, [])
        self.assertEqual(made.aggregate_train(4, []), (None, None))
        self.assertLen(made.released_rounds, 3)
        squares = (made.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(made), squares[:3].sum())

    def test_it_says_what_was_checked(self):
        made = _private()
        _run(made, _grid(), 2)
        report = made.privacy_report(_DELTA)
        text = " ".join(report["caveats"])
        self.assertIn("was checked for every cohort", text)
        self.assertIn("by the ids of nodes", text)
        self.assertIn("as secret as the data", text)
        self.assertIn("in its place", report["relation"])
        named = _private(client_of=str)
        _run(named, _grid(), 1)
        text = " ".join(named.privacy_report(_DELTA)["caveats"])
        self.assertIn("names that the server gave", text)

    def test_a_model_of_other_shapes_is_refused_before_anybody_is_asked(self):
        made, grid = _private(), _grid()
        _run(made, grid, 1)
        grid.sent = []
        with self.assertRaisesRegex(ValueError, "same shapes"):
            fm.a_round(made, grid, fm.model(np.zeros(5)), 2)
        self.assertEmpty(grid.sent)
        self.assertLen(made.released_rounds, 1)

    def test_an_abandoned_round_counts_for_nobody(self):
        made = _private(on_client_failure="abort")
        grid = _grid()
        _run(made, grid, 1)
        before = _memory(made)
        first = set(_asked(grid))
        good = dict(grid.trains)
        grid.trains = dict.fromkeys(good)
        new, _ = fm.a_round(made, grid, fm.model(np.zeros(4)), 2)
        self.assertIsNone(new)
        self.assertEqual(_memory(made), before)
        grid.trains = good
        _, asked, _ = _run(made, grid, 2, 3)
        for cohort in asked:
            self.assertEmpty(first & set(cohort))
        squares = (made.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(made), squares[:3].sum())


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "ledger.jsonl"

    def test_a_round_that_cannot_be_written_moves_nothing(self):
        made = _private(ledger=self.path)
        _, _, record = _run(made, _grid(), 2)
        before = _memory(made)
        with (
            mock.patch.object(
                ledger_lib.PrivacyLedger,
                "record",
                side_effect=ledger_lib.LedgerWriteError("full"),
            ),
            self.assertRaises(ledger_lib.LedgerWriteError),
        ):
            fm.a_round(made, _grid(), record, 3)
        self.assertEqual(_memory(made), before)
        made.close()

    def test_a_budget_ends_before_the_round_that_would_pass_it(self):
        squares = np.cumsum((_mechanism().generator.charges / 2.0) ** 2)
        limit = accounting.gaussian_epsilon(
            ((squares[3] + squares[4]) / 2) ** -0.5, _DELTA
        )
        made = _private(target_epsilon=limit, target_delta=_DELTA, accountant="pld")
        grid = _grid()
        _, _, record = _run(made, grid, 4)
        self.assertEqual(made.configure_train(5, record, fm.ConfigRecord(), grid), [])
        self.assertEqual(made.stopped_before_round, 5)

    def test_a_server_that_restarts_begins_other_noise_charged_anew(self):
        record = fm.model(np.zeros(4))
        for _ in range(2):
            made = _private(ledger=self.path)
            _, _, record = _run(made, _grid(), 3, record=record)
            made.close()
        squares = (made.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(
            made.privacy_epsilon(delta=_DELTA, accountant="pld"),
            accounting.gaussian_epsilon((2 * squares[:3].sum()) ** -0.5, _DELTA),
            places=6,
        )

    def test_a_ledger_of_another_relation_is_refused(self):
        made = _private(
            tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0),
            ledger=self.path,
        )
        _run(made, _grid(), 1)
        made.close()
        with self.assertRaisesRegex(ValueError, "neighbouring relation"):
            _private(ledger=self.path)
