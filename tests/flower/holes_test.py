"""What was found wrong once: budgets shared, noise used twice, replies, cohorts."""

from __future__ import annotations

import copy
import dataclasses
import pathlib
import pickle
import random
import tempfile
import threading

import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import PrivateStrategy

_DELTA = 1e-5
_NOISY = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
_SHARES = tfdp_fl.FixedClipping(
    clip_norm=0.5, noise_multiplier=1.0, noise_site="client"
)


def _private(mechanism=_NOISY, m=4, n=8, strategy=None, **options):
    return PrivateStrategy(
        fm.Strategy(m) if strategy is None else strategy,
        mechanism,
        num_clients=n,
        clients_per_round=m,
        **options,
    )


def _grid(n=8, change=None, **options):
    return fm.Grid({i: fm.adds([np.zeros(3)]) for i in range(n)}, change, **options)


def _round(strategy, grid, number=1):
    return fm.a_round(strategy, grid, fm.model(np.zeros(3)), number)


class LedgerTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = self.enter_context(tempfile.TemporaryDirectory())
        self.path = pathlib.Path(folder) / "ledger.jsonl"


class SharedBudgetTest(LedgerTestCase):
    def test_strategies_that_ask_before_any_of_them_writes(self):
        # Two rounds, and five are configured.
        target = accounting.epsilon(1.0, "fixed_size", 8, 4, 2, _DELTA) + 1e-6
        with accounting.PrivacyLedger(self.path) as ledger:
            strategies = [
                _private(ledger=ledger, target_epsilon=target, target_delta=_DELTA)
                for _ in range(5)
            ]
            grid, model = _grid(), fm.model(np.zeros(3))
            told = [
                s.configure_train(1, model, fm.ConfigRecord(), grid) for s in strategies
            ]
            for strategy, messages in zip(strategies, told, strict=True):
                strategy.aggregate_train(1, grid.send_and_receive(messages))
            spent = strategies[0].privacy_epsilon(delta=_DELTA)
        self.assertLessEqual(spent, target)
        self.assertLessEqual(accounting.epsilon_from_ledger(self.path, _DELTA), target)
        self.assertEqual(sum(len(s.strategy.handed) for s in strategies), 2)

    def test_threads_share_a_budget(self):
        target = accounting.epsilon(1.0, "fixed_size", 8, 4, 3, _DELTA) + 1e-6
        with accounting.PrivacyLedger(self.path) as ledger:
            strategies = [
                _private(ledger=ledger, target_epsilon=target, target_delta=_DELTA)
                for _ in range(4)
            ]

            def run(strategy):
                for number in range(1, 4):
                    _round(strategy, _grid(), number)

            threads = [threading.Thread(target=run, args=[s]) for s in strategies]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(sum(len(s.strategy.handed) for s in strategies), 3)
        self.assertLessEqual(accounting.epsilon_from_ledger(self.path, _DELTA), target)


class PlanTest(LedgerTestCase):
    def test_a_restart_without_state_begins_no_plan_anew(self):
        for _ in range(2):
            strategy = _private(rounds=3, ledger=self.path)
            for number in range(1, 6):
                _round(strategy, _grid(), number)
            strategy.close()
        self.assertLen(ledger_lib.PrivacyLedger.read(self.path).entries, 3)

    def test_a_strategy_is_not_copied_with_its_history(self):
        for twin in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(TypeError, "cannot be copied"):
                twin(_private())


class WithoutTheModTest(parameterized.TestCase):
    """A client started without `mods=[private_mod]` sends its plain model."""

    def test_nothing_of_it_is_released(self):
        strategy = _private(_SHARES)
        self.assertEqual(_round(strategy, _grid(mod=None)), (None, None))
        self.assertEqual(strategy.rejected_replies, 4)
        self.assertEmpty(strategy.strategy.handed)

    def test_one_client_without_it_is_not_in_the_mean(self):
        def mod(message, context, call_next):
            bare = message.metadata.dst_node_id == grid.sent[0].metadata.dst_node_id
            apply = call_next if bare else tfdp_fl.flower.private_mod
            return apply(message, context, *([] if bare else [call_next]))

        strategy, grid = _private(_SHARES), _grid(mod=mod)
        with self.assertLogs("tfdp_fl.flower", "WARNING") as logs:
            new, _ = _round(strategy, grid)
        self.assertIsNotNone(new)
        self.assertIn("applied", "".join(logs.output))
        self.assertEqual(strategy.rejected_replies, 1)

    @parameterized.product(
        name=("dpfedavg_applied_clip_norm", "dpfedavg_applied_noise_stddev"),
        value=(0.0, 0.4999, float("nan"), "0.5", [0.5]),
    )
    def test_another_clip_or_noise_than_was_asked(self, name, value):
        def changed(replies):
            for reply in replies:
                dict.__setitem__(reply.content["metrics"], name, value) if (
                    not fm.INSTALLED
                ) else reply.content["metrics"].__dict__["_data"].__setitem__(
                    name, value
                )
            return replies

        strategy = _private(_SHARES)
        self.assertEqual(_round(strategy, _grid(change=changed)), (None, None))
        self.assertEqual(strategy.rejected_replies, 4)


class OtherModsTest(parameterized.TestCase):
    """Mods around `private_mod`, and a client that forgets all between rounds."""

    @parameterized.product(outside=(True, False), mechanism=(_NOISY, _SHARES))
    def test_a_mod_that_makes_updates_longer(self, outside, mechanism):
        def longer(message, context, call_next):
            reply = call_next(message, context)
            reply.content["arrays"] = fm.model(np.full(3, 1e6))
            return reply

        def mod(message, context, call_next):
            order = [longer, tfdp_fl.flower.private_mod]
            outer, inner = order if outside else order[::-1]
            return outer(message, context, lambda m, c: inner(m, c, call_next))

        quiet = dataclasses.replace(mechanism, noise_multiplier=1e-9)
        grid = _grid(mod=mod)
        # The context of a `ClientApp`, where state would be, is None here.
        got, _ = _round(_private(quiet), grid)
        self.assertLessEqual(np.linalg.norm(fm.arrays(got)[0]), 0.5 * (1 + 1e-6))


class RepliesTest(parameterized.TestCase):
    """What one client may not end, for itself or for the others."""

    _ABORT = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0)

    def _done(self, change, mechanism=None, grid=None, **options):
        strategy = _private(mechanism or self._ABORT, **options)
        got, _ = _round(strategy, grid or _grid(change=change))
        self.assertIsNotNone(got)
        self.assertLen(strategy.released_rounds, 1)
        return strategy

    def test_a_metric_record_of_the_models_name(self):
        # For each client, as nobody knows of which reply names are taken.
        def changed(replies):
            for reply in replies:
                metrics = reply.content.pop("metrics")
                model = reply.content.pop("arrays")
                reply.content["arrays "] = model
                reply.content["arrays"] = metrics
            return replies

        self._done(changed)

    @parameterized.parameters("exclude", "abort")
    def test_a_reply_twice_beside_all_others(self, on_client_failure):
        strategy = self._done(
            lambda replies: [*replies, replies[0], replies[0]],
            on_client_failure=on_client_failure,
        )
        self.assertEqual(strategy.rejected_replies, 2)
        self.assertEqual(strategy.released_rounds[0].num_replies, 4)

    @parameterized.product(mechanism=(_ABORT, _SHARES), late=(True, False))
    def test_a_late_or_unasked_reply_beside_all_others(self, mechanism, late):
        def changed(replies):
            more = copy.deepcopy(replies[0])
            if late:
                more.metadata.__dict__.update(
                    _reply_to_message_id="old", reply_to_message_id="old"
                )
            else:
                more.metadata.__dict__.update(_src_node_id=99, src_node_id=99)
            return [more, *replies]

        strategy = self._done(changed, mechanism, on_client_failure="abort")
        self.assertEqual(strategy.released_rounds[0].clients_per_round, 4)

    def test_the_strategy_is_handed_the_mean_alone(self):
        trains = {
            i: fm.adds([np.full(3, float(i))], 10**i, loss=float(i), secret=9.0 * i)
            for i in range(8)
        }
        strategy = _private()
        got, _ = _round(strategy, fm.Grid(trains))
        ((handed,),) = strategy.strategy.handed
        self.assertEqual(dict(handed.content["metrics"]), {"num-examples": 1})
        np.testing.assert_allclose(
            fm.arrays(handed.content["arrays"])[0], fm.arrays(got)[0]
        )
        self.assertLen(dict(handed.content), 2)

    def test_a_function_for_the_clients_metrics_is_refused(self):
        inner = fm.Strategy(4)
        inner.train_metrics_aggr_fn = lambda contents, key: contents[0]
        with self.assertRaisesRegex(ValueError, "train_metrics_aggr_fn"):
            _private(strategy=inner)


class CohortTest(parameterized.TestCase):
    def _cohorts(self, rounds, n=8):
        random.seed(42)
        strategy, grid, cohorts = _private(n=n), _grid(n), []
        for number in range(1, rounds + 1):
            _round(strategy, grid, number)
            cohorts.append(sorted(m.metadata.dst_node_id for m in grid.sent))
        return cohorts

    def test_pythons_seed_foretells_no_cohort(self):
        # The same 9 cohorts of 70 by chance: 70^-9, less than 3e-17.
        self.assertNotEqual(self._cohorts(9), self._cohorts(9))

    def test_cohorts_are_uniform(self):
        # 4 of 6: 15 cohorts, 1500 rounds, chi squared with 14 degrees of freedom
        # is above 90 with a probability below 1e-12.
        counts: dict[tuple[int, ...], int] = {}
        for cohort in self._cohorts(1500, 6):
            counts[tuple(cohort)] = counts.get(tuple(cohort), 0) + 1
        self.assertLen(counts, 15)
        self.assertLess(sum((c - 100) ** 2 / 100 for c in counts.values()), 90)

    def test_a_strategy_that_prefers_some_nodes_has_no_say(self):
        class Stubborn(fm.Strategy):
            def configure_train(self, server_round, arrays, config, grid):
                content = fm.RecordDict({"arrays": arrays, "config": config})
                return [fm.Message(content, node, "train") for node in (0, 1)]

        strategy, grid, seen = _private(strategy=Stubborn(2)), _grid(), set()
        for number in range(1, 40):
            _round(strategy, grid, number)
            cohort = {m.metadata.dst_node_id for m in grid.sent}
            self.assertLen(cohort, 4)
            seen |= cohort
        self.assertEqual(seen, set(range(8)))

    def test_fewer_nodes_than_declared(self):
        strategy = _private(n=9, max_abandoned_rounds=2)
        with self.assertRaisesRegex(ValueError, "num_clients .* 8, got 9"):
            _round(strategy, _grid(8))
        _round(strategy, _grid(9), 2)
        few = _grid(8)
        self.assertEqual(_round(strategy, few, 3), (None, None))
        self.assertEmpty(few.sent)
        with self.assertRaisesRegex(tfdp_fl.flower.RoundsAbandonedError, "8, got 9"):
            _round(strategy, few, 4)
        self.assertLen(strategy.released_rounds, 1)

    def test_who_knows_the_cohorts_is_told_another_epsilon(self):
        strategy = _private()
        for number in range(1, 4):
            _round(strategy, _grid(), number)
        report = strategy.privacy_report(_DELTA)
        self.assertAlmostEqual(
            report["epsilon"], accounting.epsilon(1.0, "fixed_size", 8, 4, 3, _DELTA)
        )
        self.assertAlmostEqual(
            report["epsilon_if_cohorts_are_known"],
            accounting.epsilon(1.0, "fixed_size", 4, 4, 3, _DELTA),
        )
        self.assertIn("must stay secret", " ".join(report["caveats"]))
