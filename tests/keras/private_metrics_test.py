"""The private means of clients' metrics: bound, noise, and charged first."""

from __future__ import annotations

import math
import os
import pathlib
import shutil
import signal
import tempfile
import warnings
from unittest import mock

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.keras import client_metrics
from tfdp_fl.keras.private_metrics import PrivateMetrics

_BOUNDS = {"loss": (0.0, 3.0), "accuracy": (0.0, 1.0)}
_DELTA = 1e-3


def _private(**changes) -> PrivateMetrics:
    return PrivateMetrics(**{"bounds": _BOUNDS, "noise_multiplier": 4.0, **changes})


def _trained(sampling="fixed_size", rounds=1, clients=None, callbacks=(), **options):
    fed = toy.federated(
        sampling=sampling, compile_options={"metrics": ["accuracy"]}, **options
    )
    if rounds:
        clients = clients or toy.clients()
        toy.fit(fed, rounds, list(callbacks), data=clients)
    return fed


def _evaluated(fed, private=None, clients=None):
    clients = toy.clients() if clients is None else clients
    private = _private() if private is None else private
    return fed.evaluate_clients(clients, private=private, verbose=0)


def _uniform(count, seed=0):
    generator = np.random.default_rng(seed)
    return {
        "loss": generator.uniform(0, 3, count),
        "accuracy": generator.uniform(0, 1, count),
    }


class SensitivityTest(parameterized.TestCase):
    """What the noise is measured against, for values of an adversary's."""

    def test_a_client_contributes_at_most_one(self):
        ends = [0.0, 1.0, 3.0, -1e308, 1e308, np.nan, np.inf, -np.inf]
        ends += [5e-324, np.nextafter(3.0, 4), np.nextafter(1.0, 0), 0.5, 1.5]
        loss, accuracy = map(np.ravel, np.meshgrid(ends, ends))
        private = _private()
        each = private.contributions({"loss": loss, "accuracy": accuracy})
        norms = np.linalg.norm(each, axis=1)
        self.assertLessEqual(norms.max(), 1 + 1e-12)
        # The bound is met: the noise is not measured against too much.
        self.assertGreater(norms.max(), 1 - 1e-12)
        unusable = ~(np.isfinite(loss) & np.isfinite(accuracy))
        self.assertEqual(norms[unusable].max(), 0.0)
        # One client replaced by any other moves the sum by at most two.
        apart = each[:, None] - each[None]
        self.assertLessEqual(np.linalg.norm(apart, axis=2).max(), 2 + 1e-12)
        private = _private(bounds={"loss": (-8e307, 8e307)})
        each = private.contributions({"loss": np.array([-1e308, 0.0, 1e308])})
        self.assertLessEqual(np.linalg.norm(each, axis=1).max(), 1 + 1e-12)

    def test_the_sum_is_all_that_is_used(self):
        private, values = _private(), _uniform(50)
        total = private.contributions(values).sum(axis=0)
        with mock.patch.object(PrivateMetrics, "contributions", lambda *_: total[None]):
            one = private.released({}, np.random.default_rng(1))
        self.assertEqual(one, private.released(values, np.random.default_rng(1)))


class NoiseTest(absltest.TestCase):
    def test_its_standard_deviation(self):
        # 20,000 normal numbers: their variance is off by more than 0.06 of
        # itself with a probability below 1e-8 (6 standard deviations), and a
        # factor 1.1 in the noise makes it 0.21.
        private = _private(noise_multiplier=2.5)
        generator = np.random.Generator(np.random.Philox(7))
        nobody = {name: np.zeros(0) for name in _BOUNDS}
        counts = [
            private.released(nobody, generator)["num_clients"] for _ in range(20_000)
        ]
        values = np.array(counts) / math.sqrt(1 + 2)
        self.assertAlmostEqual(np.var(values) / 2.5**2, 1.0, delta=0.06)

    def test_noise_that_is_said_is_the_noise(self):
        private, values = _private(noise_multiplier=3.0), _uniform(2000)
        generator = np.random.default_rng(3)
        # 2,000 repetitions: 10 % are more than 6 standard deviations.
        results = [private.released(values, generator) for _ in range(2000)]
        for name in _BOUNDS:
            means = [each[name]["mean"] for each in results]
            said = results[0][name]["noise_stddev"]
            self.assertAlmostEqual(np.std(means) / said, 1.0, delta=0.1)
        counts = [each["num_clients"] for each in results]
        said = results[0]["num_clients_stddev"]
        self.assertAlmostEqual(np.std(counts) / said, 1.0, delta=0.1)

    def test_each_release_has_noise_of_its_own(self):
        fed = _trained()
        one, other = (_evaluated(fed) for _ in range(2))
        self.assertNotEqual(one["num_clients"], other["num_clients"])


class ResultTest(parameterized.TestCase):
    def test_without_noise_it_is_the_clients_own(self):
        fed = _trained()
        exact = fed.evaluate_clients(toy.clients(), verbose=0)
        released = _evaluated(fed, _private(noise_multiplier=0.0))
        self.assertAlmostEqual(released["num_clients"], toy.NUM_CLIENTS)
        for name in _BOUNDS:
            held = released[name]
            self.assertAlmostEqual(held["mean"], exact[name].mean(), places=6)
            self.assertEqual(held["noise_stddev"], 0.0)
        self.assertEqual(fed.epsilon(_DELTA), math.inf)

    @parameterized.parameters(toy.NUM_CLASSES, -1)
    def test_a_label_that_is_no_class_ends_nothing(self, label):
        # An error would tell of one client's data, and cost nothing.
        clients = {k: toy.clients().client(k) for k in range(toy.NUM_CLIENTS)}
        x, y = (np.array(each) for each in clients[3])
        fed = _trained(clients=clients)
        y[2] = label
        clients[3] = (x, y)
        result = _evaluated(fed, _private(noise_multiplier=1e-3), clients)
        # Kernels of a GPU say NaN, those of a CPU raise.
        self.assertAlmostEqual(result["num_clients"], toy.NUM_CLIENTS - 1, delta=0.1)
        # Nor do clients of whom not one can be evaluated on.
        for each in ({3: (x, y)}, {3: (x[:0], y[:0])}):
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # It would name one.
                result = _evaluated(fed, _private(noise_multiplier=1e-3), each)
            self.assertAlmostEqual(result["num_clients"], 0, delta=0.1)
        self.assertEqual(fed.spending.evaluations, 3)


class ChargeTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "fixed_size", "shuffled")
    def test_it_is_in_epsilon(self, sampling):
        fed = _trained(sampling, 2)
        before = fed.epsilon(_DELTA)
        own = accounting.PrivacyAccountant()
        for charge, count in fed.spending.charges:
            own.add(charge, count)
        self.assertAlmostEqual(own.epsilon(_DELTA), before)
        for _ in range(2):
            _evaluated(fed)
        own.add(
            charge_lib.RoundCharge(
                sampling="fixed_size" if sampling == "fixed_size" else "poisson",
                num_clients=toy.NUM_CLIENTS,
                clients_per_round=toy.NUM_CLIENTS,
                event=dp_accounting.GaussianDpEvent(4.0),
            ),
            2,
        )
        self.assertGreater(fed.epsilon(_DELTA), before + 1e-3)
        # PLD takes seconds for cohorts of a fixed size.
        for by in ("rdp",) if sampling == "fixed_size" else ("rdp", "pld"):
            self.assertAlmostEqual(
                fed.epsilon(_DELTA, by), own.epsilon(_DELTA, by), places=6
            )
        if sampling == "shuffled":
            statement = fed.privacy_statement(_DELTA)
            self.assertIn("What evaluate_clients released", statement)
            # Also where the rounds' noise is exact.
            self.assertIn("Philox4x64-10", statement)
        self.assertEqual(fed.rounds, 2)
        # And training goes on with it.
        toy.fit(fed, 1)
        self.assertGreater(fed.epsilon(_DELTA), own.epsilon(_DELTA))

    def test_the_target_is_kept(self):
        fed = toy.private(3.0, 3, ["accuracy"])
        toy.fit(fed, 3)
        before = fed.epsilon(_DELTA)
        with (
            mock.patch.object(client_metrics, "evaluate") as called,
            self.assertRaisesRegex(
                ValueError, r"epsilon to \d.*epsilon=3 of the target of make_private"
            ),
        ):
            _evaluated(fed)
        called.assert_not_called()
        self.assertEqual(fed.epsilon(_DELTA), before)


class LedgerTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.path = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.ledger = tfdp_fl.callbacks.Ledger(self.path / "a.jsonl")

    def _told(self, path):
        return accounting.PrivacyLedger.read(path).epsilon(_DELTA)

    def test_the_line_comes_first_and_the_run_goes_on(self):
        also = tfdp_fl.callbacks.Ledger(self.path / "b.jsonl")
        fed = _trained(rounds=2, callbacks=[self.ledger, also])
        order = []
        with mock.patch.object(
            PrivateMetrics,
            "released",
            lambda *_: order.append(self._told(self.ledger.path)),
        ):
            _evaluated(fed)
        self.assertAlmostEqual(order[0], fed.epsilon(_DELTA), places=9)
        after = fed.epsilon(_DELTA)
        # In two files, and counted once.
        toy.fit(fed, 1, [self.ledger, also])
        self.assertAlmostEqual(self._told(also.path), fed.epsilon(_DELTA), places=9)
        self.assertGreater(fed.epsilon(_DELTA), after)
        self.assertEqual(fed.spending.evaluations, 1)

    def test_a_ledger_that_is_begun_later_tells_of_it(self):
        fed = _trained("shuffled")
        _evaluated(fed)
        second = tfdp_fl.callbacks.Ledger(self.path / "b.jsonl")
        checkpoint = tfdp_fl.callbacks.RoundCheckpoint(self.path / "run")
        # One of before every ledger; then one that is in the first one only.
        for released, callbacks in enumerate(
            ([self.ledger], [self.ledger, second], [checkpoint]), 1
        ):
            toy.fit(fed, 1, callbacks)
            self.assertEqual(fed.spending.evaluations, released)
            for each in callbacks:
                told = self._told(each.path)
                self.assertAlmostEqual(told, fed.epsilon(_DELTA), places=9)
            _evaluated(fed)

    def test_what_cannot_be_written_is_not_released(self):
        fed = _trained(callbacks=[self.ledger])
        os.unlink(self.ledger.path)
        self.ledger.path.mkdir()
        with (
            mock.patch.object(PrivateMetrics, "released") as released,
            self.assertRaises((accounting.LedgerError, OSError)),
        ):
            _evaluated(fed)
        released.assert_not_called()

    def test_an_interrupt_leaves_no_line_that_the_run_knows_not_of(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        fed = _trained(callbacks=[self.ledger])
        record = accounting.PrivacyLedger.record

        def interrupted(*args, **kwargs):
            record(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGINT)

        with (
            mock.patch.object(accounting.PrivacyLedger, "record", interrupted),
            self.assertRaises(KeyboardInterrupt),
        ):
            _evaluated(fed)
        self.assertEqual(fed.spending.evaluations, 1)
        toy.fit(fed, 1, [self.ledger])
        told = self._told(self.ledger.path)
        self.assertAlmostEqual(told, fed.epsilon(_DELTA), places=9)

    def test_within_a_fit_the_directory_stays_locked(self):
        keep = tfdp_fl.callbacks.RoundCheckpoint(self.path / "run")
        other = tfdp_fl.keras.checkpoint.CheckpointDirectory(self.path / "run")
        fed = _trained(rounds=0)

        def evaluate(*_):
            _evaluated(fed)
            with self.assertRaises(tfdp_fl.keras.checkpoint.CheckpointInUseError):
                other.acquire()

        notes = tf.keras.callbacks.LambdaCallback(on_epoch_end=evaluate)
        toy.fit(fed, 1, [keep, notes])
        self.assertEqual(fed.spending.evaluations, 1)

    def test_a_resumed_run_knows_of_it(self):
        fed = _trained(rounds=0)
        checkpoint = tfdp_fl.callbacks.RoundCheckpoint(self.path / "run")
        stop = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, _: setattr(fed, "stop_training", epoch == 1)
        )
        toy.fit(fed, 3, [checkpoint, stop], seed=1)
        _evaluated(fed)
        wanted = fed.epsilon(_DELTA)
        self.assertIn(
            "What evaluate_clients released",
            (self.path / "run" / "privacy.txt").read_text("utf-8"),
        )
        other = _trained(rounds=0)
        cut = shutil.copytree(self.path / "run", self.path / "cut") / "ledger.jsonl"
        cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:-1]))
        with self.assertRaises(accounting.LedgerTamperedError):
            toy.fit(other, 3, seed=1, resume_from=cut.parent)
        toy.fit(other, 3, seed=1, resume_from=self.path / "run")
        self.assertEqual(other.spending.evaluations, 1)
        self.assertNotIn("rounds_charged_twice", other.run.caveats)
        rounds = accounting.PrivacyAccountant()
        for charge, count in other.spending.charges:
            rounds.add(charge, count)
        self.assertEqual(rounds.rounds, 3)
        rounds.add(_private().charge("fixed_size", toy.NUM_CLIENTS))
        self.assertAlmostEqual(other.epsilon(_DELTA), rounds.epsilon(_DELTA), places=6)
        self.assertGreater(other.epsilon(_DELTA), wanted)


class RefusedTest(parameterized.TestCase):
    def test_when_it_is_made(self):
        for options, error, message in (
            ({"bounds": {}}, ValueError, "bounds must name a metric"),
            ({"bounds": [("loss", 1)]}, TypeError, "bounds must be a Mapping"),
            ({"bounds": {"loss": 3}}, TypeError, "'loss': 3"),
            ({"bounds": {"loss": (1, 1)}}, ValueError, r"'loss': \(1, 1\)"),
            ({"bounds": {"loss": (0, np.inf)}}, ValueError, "finite number"),
            ({"noise_multiplier": -1}, ValueError, "noise_multiplier.*-1"),
        ):
            with self.assertRaisesRegex(error, message):
                _private(**options)

    def test_when_it_is_asked_for(self):
        fed = _trained(rounds=0)
        with self.assertRaisesRegex(ValueError, "before the first fit"):
            _evaluated(fed)
        toy.fit(fed)
        before = fed.epsilon(_DELTA)
        unknown = _private(bounds={"f1": (0, 1)})
        for private, error, message in (
            (3, TypeError, "private must be a PrivateMetrics"),
            (unknown, ValueError, r"compiled \(.*'accuracy'.*got 'f1'"),
        ):
            with self.assertRaisesRegex(error, message):
                _evaluated(fed, private)
        self.assertEqual(fed.epsilon(_DELTA), before)

    def test_a_local_guarantee(self):
        local = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=1.0)
        with self.assertRaisesRegex(ValueError, "guarantee is local"):
            _evaluated(_trained(mechanism=local))
