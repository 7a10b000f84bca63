"""Training with noise that is correlated across rounds."""

from __future__ import annotations

import shutil
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.correlated_noise import references
from tests.keras import files, toy
from tfdp_fl import accounting, auditing
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import CohortEngine
from tfdp_fl.keras import callbacks, checkpoint, randomness

_DELTA = 1e-3
_T, _B = 8, 4


def _mechanism(strategy="banded", **options):
    usual = {"clip_norm": 0.5, "noise_multiplier": 2.0, "rounds": _T}
    return tfdp_fl.CorrelatedNoise(
        **{**usual, "strategy": strategy, "min_separation": _B, **options}
    )


def _federated(mechanism=None, **options):
    return toy.federated(
        _mechanism() if mechanism is None else mechanism,
        clients_per_round=10,
        sampling="cyclic",
        **options,
    )


def _learns_nothing():
    return {"optimizer": tf.keras.optimizers.SGD(0.0)}


def _position(fed):
    return int(fed.run.mechanism_state.memory.position)


def _buffers(fed):
    return [b.numpy() for b in fed.run.mechanism_state.memory.buffers]


def _squares(fed):
    """Returns the mu^2 of each round of a segment."""
    return (fed.mechanism.generator.charges / fed.mechanism.noise_multiplier) ** 2


def _spent(fed):
    """Returns the mu^2 of all charges."""
    return sum(
        count * charge.noise_multiplier**-2 for charge, count in fed.spending.charges
    )


def _epsilon(mu_squared):
    return accounting.gaussian_epsilon(mu_squared**-0.5, _DELTA)


class _Killed(callbacks.RoundCheckpoint):
    """Saves nothing at the end, as where the process is killed."""

    _is_between_rounds = False


class _Crash(tf.keras.callbacks.Callback):
    """Ends a run as if it was killed after its fourth round was released."""

    def on_train_batch_end(self, batch, logs=None):
        self._seen = getattr(self, "_seen", 0) + 1
        if self._seen == 4:
            raise KeyboardInterrupt


def _breaks(owner, name):
    """Has a method raise what Ctrl-C raises."""
    return mock.patch.object(owner, name, side_effect=KeyboardInterrupt)


class TrainingTest(parameterized.TestCase):
    @parameterized.parameters("banded", "blt:2")
    def test_a_run_costs_one_gaussian(self, strategy):
        fed = _federated(_mechanism(strategy), accountant="pld")
        history = toy.fit(fed, _T)
        whole = (fed.mechanism.generator.sensitivity / 2.0) ** 2
        self.assertAlmostEqual(_spent(fed), whole)
        self.assertAlmostEqual(fed.epsilon(_DELTA), _epsilon(whole), places=6)
        self.assertEqual(_position(fed), _T)
        for name in history.history:
            self.assertNotIn("buffer", name)
            self.assertNotIn("memory", name)
        text = fed.privacy_statement(_DELTA)
        for words in ("at least the min separation apart", "as secret as the data"):
            self.assertIn(words, text)
        with self.subTest("later rounds are a segment of their own"):
            toy.fit(fed, 3)
            self.assertEqual(_position(fed), 3)
            self.assertAlmostEqual(_spent(fed), whole + _squares(fed)[:3].sum())

    def test_models_of_a_seed_are_the_noise_of_the_dense_matrices(self):
        # Without updates and with a server that adds, the model is the noise.
        fed = _federated(compile_options=_learns_nothing())
        weights = [np.ravel(fed.get_weights()[0])]
        for _ in range(_T):
            toy.fit(fed)
            weights.append(np.ravel(fed.get_weights()[0]))
        noise = np.diff(weights, axis=0) * 10 / (2.0 * 0.5)
        dense = references.dense(fed.mechanism.generator.coefficients, _T)
        fresh = dense @ noise
        # 8 * 24 values of stddev 1: their mean square is within .3 of 1 for
        # all but 1 in 1e8 runs (chi-square of 192).
        self.assertBetween(np.mean(fresh**2), 0.5, 1.75)

    def test_a_client_sits_out_after_its_last_round(self):
        fed = _federated(_mechanism(max_participations=1))
        toy.fit(fed, 6)
        self.assertEqual(fed.run.cohort_sizes, [10, 10, 10, 10, 0, 0])
        self.assertAlmostEqual(
            _spent(fed), (fed.mechanism.generator.sensitivity / 2.0) ** 2
        )

    def test_a_budget_ends_before_the_round_that_would_pass_it(self):
        fed = _federated(_mechanism("blt:2"), accountant="pld")
        squares = np.cumsum(_squares(fed))
        limit = (_epsilon(squares[4]) + _epsilon(squares[5])) / 2
        toy.fit(fed, _T, [callbacks.PrivacyBudget(epsilon=limit, delta=_DELTA)])
        self.assertEqual(fed.rounds, 5)


class SegmentTest(parameterized.TestCase):
    """Where rounds may have been seen that the buffers know nothing of."""

    def test_an_abandoned_round_moves_nothing(self):
        fed = _federated(on_client_failure="abort")
        toy.fit(fed, 2)
        before, group = _buffers(fed), fed.run.sampler.cohort(0)
        spent = _spent(fed)
        self.assertTrue(any(np.any(b) for b in before))
        failure = mock.Mock(position=3, error=OSError("lost"))
        collect = fed.engine.collect

        def failing(dataset, inputs):
            pending = collect(dataset, inputs)
            pending.failures.append(failure)
            return pending

        with mock.patch.object(fed.engine, "collect", failing):
            history = toy.fit(fed, 2)
        self.assertEqual(history.history["abandoned_rounds"], [1.0, 1.0])
        # Nor does one that is broken off.
        with _breaks(CohortEngine, "collect"), self.assertRaises(KeyboardInterrupt):
            toy.fit(fed)
        self.assertEqual((_position(fed), fed.rounds), (2, 4))
        self.assertEqual(_spent(fed), spent)
        toy.assert_same(before, _buffers(fed))
        np.testing.assert_array_equal(fed.run.sampler.cohort(4), group)
        toy.fit(fed, 2)
        self.assertAlmostEqual(_spent(fed), _squares(fed)[:4].sum())

    def test_a_broken_release_ends_the_segment(self):
        fed = _federated()
        toy.fit(fed, 3)
        with _breaks(fed.engine, "release"), self.assertRaises(KeyboardInterrupt):
            toy.fit(fed)
        toy.fit(fed)
        self.assertEqual(_position(fed), 1)
        squares = _squares(fed)
        self.assertAlmostEqual(_spent(fed), squares[:4].sum() + squares[0])

    @parameterized.parameters("correlated", "fixed")
    def test_no_noise_is_released_twice(self, kind):
        # With a seed, a round that was broken off after its release is run
        # again with other noise: also by who resumes, and if what broke it
        # off was the audit, which looks at the model last.
        def quiet():
            if kind == "correlated":
                return _federated(compile_options=_learns_nothing())
            return toy.federated(
                clients_per_round=10, compile_options=_learns_nothing()
            )

        released = []
        release = CohortEngine.release

        def recorded(engine, pending):
            before = engine.server.variables[0].numpy()
            values = release(engine, pending)
            released.append(engine.server.variables[0].numpy() - before)
            if len(released) == 2:
                raise KeyboardInterrupt
            return values

        path = files.directory(self) / "run"
        fed = quiet()
        with mock.patch.object(CohortEngine, "release", recorded):
            with self.assertRaises(KeyboardInterrupt):
                toy.fit(fed, 2, seed=3)
            with _breaks(CohortEngine, "collect"), self.assertRaises(KeyboardInterrupt):
                toy.fit(fed, 1, [_Killed(path, delta=_DELTA)], seed=3)
            fed = quiet()
            toy.fit(fed, 1, seed=3, resume_from=path)
            audit = auditing.CanaryAudit(2)
            with (
                mock.patch.object(audit, "join"),
                _breaks(audit, "released"),
                self.assertRaises(KeyboardInterrupt),
            ):
                toy.fit(fed, 1, seed=3, audit=audit)
            toy.fit(fed, 1, seed=3)
        self.assertEqual(fed.spending.rounds, 5)
        self.assertLen(released, 5)
        flat = np.reshape(released, [5, -1])
        # None is a combination of others: as little as this at random in less
        # than 1 of 1e8 runs (5 vectors of 24 values), and the seed is fixed.
        self.assertGreater(
            np.linalg.svd(flat / np.linalg.norm(flat, axis=1)[:, None])[1][-1],
            1e-2,
        )

    def test_no_draw_is_released_twice_with_other_noise(self):
        # Two draws are charged; the same clients twice would be one draw with
        # less noise, which costs more.
        drawn = []
        release = CohortEngine.release

        def recorded(engine, pending):
            drawn.append(pending.inputs.positions.tolist())
            values = release(engine, pending)
            if len(drawn) == 2:
                raise KeyboardInterrupt
            return values

        fed = toy.federated(clients_per_round=20, sampling="poisson")
        with mock.patch.object(CohortEngine, "release", recorded):
            with self.assertRaises(KeyboardInterrupt):
                toy.fit(fed, 2, seed=3)
            toy.fit(fed, 1, seed=3)
        self.assertLen(drawn, 3)
        self.assertNotEqual(drawn[1], drawn[2])

    def test_other_groups_or_clients_end_the_segment(self):
        fed = _federated()
        toy.fit(fed, 3)
        toy.fit(fed, 1, seed=5)  # A sampler of its own.
        self.assertEqual(_position(fed), 1)
        others = toy.clients().with_ids([f"other-{i:02}" for i in range(40)])
        for position in (1, 2):
            toy.fit(fed, 1, data=others, seed=5)
            self.assertEqual(_position(fed), position)

    def test_nameless_clients_in_another_order_end_the_segment(self):
        x, y = toy.arrays(toy.NUM_CLIENTS * 10)
        rows = np.arange(len(y)).reshape(toy.NUM_CLIENTS, 10)
        fed = _federated()
        for fit in range(4):
            order = rows if fit % 2 == 0 else rows[::-1]
            toy.fit(fed, 1, data=FederatedDataset.from_indices(x, y, order))
            self.assertEqual(_position(fed), 1)
        # A client may have been in every one of the four.
        self.assertGreaterEqual(_spent(fed), 4 * 2.0**-2 * (1 - 1e-6))


class ResumeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"

    @toy.same_draws_when_resumed()
    def test_seeded_runs_are_resumed_bit_for_bit(self):
        whole, half, other = (_federated(_mechanism("blt:2")) for _ in range(3))
        toy.fit(whole, 6, seed=1)
        with self.assertRaises(KeyboardInterrupt):
            toy.fit(half, 6, [_Crash(), _Killed(self.path, delta=_DELTA)], seed=1)
        # With a ledger of three rounds, as many as the checkpoint knows of.
        ledger = shutil.copytree(self.path, self.path.with_name("clean")) / (
            "ledger.jsonl"
        )
        lines = ledger.read_text().splitlines(keepends=True)
        ledger.write_text("".join(lines[: 1 + 3]))
        toy.fit(other, 6, seed=1, resume_from=ledger.parent)
        toy.assert_same(whole, other)
        toy.assert_same(_buffers(whole), _buffers(other))
        self.assertAlmostEqual(_spent(other), _squares(other)[:6].sum())

    @parameterized.parameters(None, 1)
    def test_rounds_that_were_lost_end_the_segment(self, seed):
        fed, other = _federated(), _federated()
        keepers = [_Killed(self.path, every=2, delta=_DELTA) for _ in range(2)]
        with self.assertRaises(KeyboardInterrupt):
            toy.fit(fed, _T, [_Crash(), keepers[0]], seed=seed)
        # Rounds 1 to 4 are in the ledger, the checkpoint is after round 2.
        newest = checkpoint.CheckpointDirectory(self.path).newest()
        self.assertEqual(newest.round_index, 2)
        collect = CohortEngine.collect
        with mock.patch.object(
            CohortEngine, "collect", autospec=True, side_effect=collect
        ) as collected:
            toy.fit(other, _T, keepers[1:], seed=seed, resume_from=self.path)
        self.assertEqual(_position(other), 6)
        squares = _squares(other)
        self.assertAlmostEqual(_spent(other), squares[:4].sum() + squares[:6].sum())
        # No round has noise that a lost one had.
        drawn = {tuple(call.args[2].seed) for call in collected.mock_calls}
        if seed is not None:
            before = {tuple(randomness.round_seed(seed, (t,))) for t in range(4)}
            self.assertEmpty(drawn & before)

    def test_coefficients_that_were_chosen_otherwise_end_the_segment(self):
        made = [_federated(_mechanism("blt:2")) for _ in range(3)]
        toy.fit(made[0], 3, [_Killed(self.path, delta=_DELTA)])
        generator = made[1].mechanism.generator
        numbers = tuple(n + 1e-7 for n in generator.numbers)
        with mock.patch.object(type(generator), "numbers", numbers):
            toy.fit(made[1], 3, resume_from=self.path)
        self.assertEqual(_position(made[1]), 0)
        toy.fit(made[2], 3, resume_from=self.path)
        self.assertEqual(_position(made[2]), 3)

    @parameterized.parameters(
        {"strategy": "blt:2"}, {"noise_multiplier": 3.0}, {"max_participations": 2}
    )
    def test_other_noise_is_refused(self, **changed):
        toy.fit(_federated(), 2, [_Killed(self.path, delta=_DELTA)])
        other = _federated(_mechanism(**changed))
        with self.assertRaisesRegex(ValueError, next(iter(changed))):
            toy.fit(other, 2, resume_from=self.path)


class ServerOptimizerTest(absltest.TestCase):
    """Coefficients by the optimizer that runs."""

    def test_what_was_told_stays_and_a_run_is_not_changed(self):
        options = {"server_optimizer": tf.keras.optimizers.SGD(0.5, 0.9)}
        told = _mechanism("blt:2", server_momentum=0.3)
        fed = _federated(told, compile_options=options)
        self.assertEqual(fed.mechanism, told)
        plain = _mechanism("blt:2")
        fed = _federated(plain)
        self.assertEqual(fed.mechanism, plain)
        fed.compile("sgd", toy.loss(), jit_compile=False, **options)
        self.assertEqual(fed.mechanism.server_momentum, 0.9)
        toy.fit(fed, 2)
        before = fed.mechanism
        fed.compile("sgd", toy.loss(), jit_compile=False)
        self.assertEqual(fed.mechanism, before)
        toy.fit(fed)
        self.assertEqual(_position(fed), 3)

    def test_make_private_keeps_the_target_with_any_optimizer(self):
        fed = toy.private(
            *(3.0, _T),
            clients_per_round=10,
            mechanism="correlated",
            strategy="blt:2",
            sampling="cyclic",
            accountant="pld",
            clip_norm=0.5,
        )
        before = fed.mechanism.noise_multiplier
        rate = tf.keras.optimizers.schedules.PolynomialDecay(0.5, _T, 0.0)
        server = tf.keras.optimizers.SGD(rate, 0.9)
        fed.compile("sgd", toy.loss(), server_optimizer=server, jit_compile=False)
        self.assertNotEqual(fed.mechanism.noise_multiplier, before)
        toy.fit(fed, _T)
        self.assertEqual(fed.rounds, _T)
        self.assertLessEqual(fed.epsilon(_DELTA), 3.0)
        self.assertGreater(fed.epsilon(_DELTA), 2.99)
