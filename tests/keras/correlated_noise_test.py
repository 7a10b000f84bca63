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
from tfdp_fl.engine import engine as engine_lib
from tfdp_fl.keras import callbacks, checkpoint, randomness

_DELTA = 1e-3
_T, _B = 8, 4


def _mechanism(strategy="banded", **options):
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


def _federated(mechanism=None, sampling="cyclic", m=10, **options):
    return toy.federated(
        _mechanism() if mechanism is None else mechanism,
        clients_per_round=m,
        sampling=sampling,
        **options,
    )


def _fit(fed, rounds, **options):
    return fed.fit(
        **{"clients": toy.clients(), "verbose": 0, "rounds": rounds, **options}
    )


def _position(fed):
    return int(fed.run.mechanism_state.memory.position)


def _buffers(fed):
    return [b.numpy() for b in fed.run.mechanism_state.memory.buffers]


def _is_zero(buffers):
    return not any(np.any(b) for b in buffers)


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
    """Ends a run as if it was killed after a round was released."""

    def __init__(self, after: int):
        super().__init__()
        self._after = after
        self._seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self._seen += 1
        if self._seen == self._after:
            raise KeyboardInterrupt


class TrainingTest(parameterized.TestCase):
    @parameterized.parameters("banded", "blt:2")
    def test_a_run_costs_one_gaussian(self, strategy):
        mechanism = _mechanism(strategy)
        fed = _federated(mechanism, accountant="pld")
        history = _fit(fed, _T)
        whole = (mechanism.generator.sensitivity / 2.0) ** 2
        self.assertAlmostEqual(_spent(fed), whole)
        self.assertAlmostEqual(fed.epsilon(_DELTA), _epsilon(whole), places=6)
        self.assertEqual(_position(fed), _T)
        for name in history.history:
            self.assertNotIn("buffer", name)
            self.assertNotIn("memory", name)
        text = fed.privacy_statement(_DELTA)
        for words in ("at least the min separation apart", "as secret as the data"):
            self.assertIn(words, text)

    def test_later_rounds_are_a_segment_of_their_own(self):
        fed = _federated()
        _fit(fed, _T)
        once = _spent(fed)
        _fit(fed, 3)
        self.assertEqual(_position(fed), 3)
        squares = (_mechanism().generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(fed), once + squares[:3].sum())

    def test_two_fits_are_one_run(self):
        fed = _federated()
        _fit(fed, 3)
        before = _buffers(fed)
        self.assertFalse(_is_zero(before))
        with (
            mock.patch.object(
                engine_lib.CohortEngine,
                "collect",
                side_effect=KeyboardInterrupt,
            ),
            self.assertRaises(KeyboardInterrupt),
        ):
            _fit(fed, 1)
        toy.assert_same(before, _buffers(fed))
        _fit(fed, 2)
        self.assertEqual(_position(fed), 5)

    def test_models_of_a_seed_are_the_noise_of_the_dense_matrices(self):
        # Without updates and with a server that adds, the model is the noise.
        fed = _federated(compile_options={"optimizer": tf.keras.optimizers.SGD(0.0)})
        weights = [np.ravel(fed.get_weights()[0])]
        for _ in range(_T):
            _fit(fed, 1)
            weights.append(np.ravel(fed.get_weights()[0]))
        noise = np.diff(weights, axis=0) * 10 / (2.0 * 0.5)
        dense = references.dense(fed.mechanism.generator.coefficients, _T)
        fresh = dense @ noise
        # 8 * 24 values of stddev 1: their mean square is within .3 of 1 for
        # all but 1 in 1e8 runs (chi-square of 192).
        self.assertBetween(np.mean(fresh**2), 0.5, 1.75)

    def test_a_client_sits_out_after_its_last_round(self):
        fed = _federated(_mechanism(max_participations=1))
        _fit(fed, 6)
        self.assertEqual(fed.run.cohort_sizes, [10, 10, 10, 10, 0, 0])
        self.assertAlmostEqual(
            _spent(fed), (fed.mechanism.generator.sensitivity / 2.0) ** 2
        )


class SegmentTest(parameterized.TestCase):
    """Where rounds may have been seen that the buffers know nothing of."""

    def test_an_abandoned_round_moves_nothing(self):
        fed = _federated(on_client_failure="abort")
        _fit(fed, 2)
        before, group = _buffers(fed), fed.run.sampler.cohort(0)
        spent = _spent(fed)
        clients = toy.clients()
        failure = mock.Mock(position=3, error=OSError("lost"))
        collect = fed.engine.collect

        def failing(dataset, inputs):
            pending = collect(dataset, inputs)
            pending.failures.append(failure)
            return pending

        with mock.patch.object(fed.engine, "collect", failing):
            history = _fit(fed, 2, clients=clients)
        self.assertEqual(history.history["abandoned_rounds"], [1.0, 1.0])
        self.assertEqual((_position(fed), fed.rounds), (2, 4))
        self.assertEqual(_spent(fed), spent)
        toy.assert_same(before, _buffers(fed))
        np.testing.assert_array_equal(fed.run.sampler.cohort(4), group)
        _fit(fed, 2)
        squares = (fed.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(fed), squares[:4].sum())

    def test_a_broken_release_ends_the_segment(self):
        fed = _federated()
        _fit(fed, 3)
        with (
            mock.patch.object(fed.engine, "release", side_effect=KeyboardInterrupt),
            self.assertRaises(KeyboardInterrupt),
        ):
            _fit(fed, 1)
        _fit(fed, 1)
        self.assertEqual(_position(fed), 1)
        squares = (fed.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(fed), squares[:4].sum() + squares[0])

    @parameterized.parameters("correlated", "fixed")
    def test_no_noise_is_released_twice(self, kind):
        # With a seed, a round that was broken off after its release is run
        # again with other noise: also by who resumes, and if what broke it
        # off was the audit, which looks at the model last.
        def quiet():
            options = {"optimizer": tf.keras.optimizers.SGD(0.0)}
            if kind == "correlated":
                return _federated(compile_options=options)
            return toy.federated(clients_per_round=10, compile_options=options)

        released = []
        release = engine_lib.CohortEngine.release

        def recorded(engine, pending):
            before = engine.server.variables[0].numpy()
            values = release(engine, pending)
            released.append(engine.server.variables[0].numpy() - before)
            if len(released) == 2:
                raise KeyboardInterrupt
            return values

        path = files.directory(self) / "run"
        fed = quiet()
        with mock.patch.object(engine_lib.CohortEngine, "release", recorded):
            with self.assertRaises(KeyboardInterrupt):
                _fit(fed, 2, seed=3)
            with (
                mock.patch.object(
                    engine_lib.CohortEngine,
                    "collect",
                    side_effect=KeyboardInterrupt,
                ),
                self.assertRaises(KeyboardInterrupt),
            ):
                checkpoints = _Killed(path, delta=_DELTA)
                _fit(fed, 1, seed=3, callbacks=[checkpoints])
            fed = quiet()
            _fit(fed, 1, seed=3, resume_from=path)
            audit = auditing.CanaryAudit(2)
            with (
                mock.patch.object(audit, "join"),
                mock.patch.object(audit, "released", side_effect=KeyboardInterrupt),
                self.assertRaises(KeyboardInterrupt),
            ):
                _fit(fed, 1, seed=3, audit=audit)
            _fit(fed, 1, seed=3)
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
        release = engine_lib.CohortEngine.release

        def recorded(engine, pending):
            drawn.append(pending.inputs.positions.tolist())
            values = release(engine, pending)
            if len(drawn) == 2:
                raise KeyboardInterrupt
            return values

        fed = toy.federated(clients_per_round=20, sampling="poisson")
        with mock.patch.object(engine_lib.CohortEngine, "release", recorded):
            with self.assertRaises(KeyboardInterrupt):
                _fit(fed, 2, seed=3)
            _fit(fed, 1, seed=3)
        self.assertLen(drawn, 3)
        self.assertNotEqual(drawn[1], drawn[2])

    def test_other_groups_end_the_segment(self):
        fed = _federated()
        _fit(fed, 3)
        _fit(fed, 1, seed=5)  # A sampler of its own.
        self.assertEqual(_position(fed), 1)

    def test_other_clients_end_the_segment(self):
        fed = _federated()
        _fit(fed, 3)
        x, y = toy.arrays(400)
        rows = np.arange(400).reshape(40, 10)
        others = tfdp_fl.datasets.FederatedDataset.from_client_arrays(
            {f"other-{i:02}": (x[r], y[r]) for i, r in enumerate(rows)}
        )
        _fit(fed, 1, clients=others)
        self.assertEqual(_position(fed), 1)
        _fit(fed, 1, clients=others)
        self.assertEqual(_position(fed), 2)

    def test_nameless_clients_in_another_order_end_the_segment(self):
        x, y = toy.arrays(toy.NUM_CLIENTS * 10)
        rows = np.arange(len(y)).reshape(toy.NUM_CLIENTS, 10)
        fed = _federated()
        for fit in range(4):
            order = rows if fit % 2 == 0 else rows[::-1]
            _fit(
                fed,
                1,
                clients=tfdp_fl.datasets.FederatedDataset.from_indices(x, y, order),
            )
            self.assertEqual(_position(fed), 1)
        # A client may have been in every one of the four.
        self.assertGreaterEqual(_spent(fed), 4 * 2.0**-2 * (1 - 1e-6))


class ResumeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"

    def _checkpoint(self, every=1):
        return _Killed(self.path, every=every, delta=_DELTA)

    def _as_of_ledger_round(self, rounds):
        """Copies the run with a ledger of so many rounds."""
        copy = self.path.with_name("clean")
        shutil.copytree(self.path, copy)
        ledger = copy / "ledger.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        ledger.write_text("".join(lines[: 1 + rounds]))
        return copy

    @toy.same_draws_when_resumed()
    def test_seeded_runs_are_resumed_bit_for_bit(self):
        whole = _federated(_mechanism("blt:2"))
        _fit(whole, 6, seed=1)
        half = _federated(_mechanism("blt:2"))
        with self.assertRaises(KeyboardInterrupt):
            _fit(half, 6, seed=1, callbacks=[_Crash(4), self._checkpoint()])
        kept = self._as_of_ledger_round(3)
        other = _federated(_mechanism("blt:2"))
        _fit(other, 6, seed=1, resume_from=kept)
        toy.assert_same(whole, other)
        toy.assert_same(_buffers(whole), _buffers(other))
        squares = (other.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(other), squares[:6].sum())

    @parameterized.parameters(None, 1)
    def test_rounds_that_were_lost_end_the_segment(self, seed):
        fed = _federated()
        with self.assertRaises(KeyboardInterrupt):
            _fit(
                fed,
                _T,
                seed=seed,
                callbacks=[_Crash(4), self._checkpoint(every=2)],
            )
        # Rounds 1 to 4 are in the ledger, the checkpoint is after round 2.
        newest = checkpoint.CheckpointDirectory(self.path).newest()
        self.assertEqual(newest.round_index, 2)
        other = _federated()
        with mock.patch.object(
            engine_lib.CohortEngine,
            "collect",
            autospec=True,
            side_effect=engine_lib.CohortEngine.collect,
        ) as collect:
            _fit(
                other,
                _T,
                seed=seed,
                resume_from=self.path,
                callbacks=[self._checkpoint(every=2)],
            )
        self.assertEqual(_position(other), 6)
        squares = (other.mechanism.generator.charges / 2.0) ** 2
        self.assertAlmostEqual(_spent(other), squares[:4].sum() + squares[:6].sum())
        # No round has noise that a lost one had.
        drawn = {tuple(call.args[2].seed) for call in collect.mock_calls}
        if seed is not None:
            before = {tuple(randomness.round_seed(seed, (t,))) for t in range(4)}
            self.assertEmpty(drawn & before)

    def test_coefficients_that_were_chosen_otherwise_end_the_segment(self):
        _fit(_federated(_mechanism("blt:2")), 3, callbacks=[self._checkpoint()])
        other = _federated(_mechanism("blt:2"))
        generator = type(other.mechanism.generator)
        numbers = tuple(n + 1e-7 for n in other.mechanism.generator.numbers)
        with mock.patch.object(generator, "numbers", numbers):
            _fit(other, 3, resume_from=self.path)
        self.assertEqual(_position(other), 0)
        again = _federated(_mechanism("blt:2"))
        _fit(again, 3, resume_from=self.path)
        self.assertEqual(_position(again), 3)

    @parameterized.parameters(
        {"strategy": "blt:2"}, {"noise_multiplier": 3.0}, {"max_participations": 2}
    )
    def test_other_noise_is_refused(self, **changed):
        _fit(_federated(), 2, callbacks=[self._checkpoint()])
        other = _federated(_mechanism(**changed))
        with self.assertRaisesRegex(ValueError, next(iter(changed))):
            _fit(other, 2, resume_from=self.path)


class ServerOptimizerTest(parameterized.TestCase):
    """Coefficients by the optimizer that runs."""

    def _optimizer(self, momentum=0.9, rate=0.5):
        if rate is None:
            rate = tf.keras.optimizers.schedules.PolynomialDecay(0.5, _T, 0.0)
        return tf.keras.optimizers.SGD(rate, momentum)

    def test_what_was_told_stays_and_a_run_is_not_changed(self):
        told = _mechanism("blt:2", server_momentum=0.3)
        options = {"server_optimizer": self._optimizer()}
        fed = _federated(told, compile_options=options)
        self.assertEqual(fed.mechanism, told)
        plain = _mechanism("blt:2")
        fed = _federated(plain)
        self.assertEqual(fed.mechanism, plain)
        fed.compile("sgd", toy.loss(), jit_compile=False, **options)
        self.assertEqual(fed.mechanism.server_momentum, 0.9)
        _fit(fed, 2)
        before = fed.mechanism
        fed.compile("sgd", toy.loss(), jit_compile=False)
        self.assertEqual(fed.mechanism, before)
        _fit(fed, 1)
        self.assertEqual(_position(fed), 3)

    def test_make_private_keeps_the_target_with_any_optimizer(self):
        fed = tfdp_fl.make_private(
            toy.dense(),
            target_epsilon=3.0,
            target_delta=_DELTA,
            num_clients=40,
            clients_per_round=10,
            rounds=_T,
            mechanism="correlated",
            strategy="blt:2",
            sampling="cyclic",
            accountant="pld",
            clip_norm=0.5,
            num_replicas=1,
        )
        before = fed.mechanism.noise_multiplier
        fed.compile(
            "sgd",
            toy.loss(),
            server_optimizer=self._optimizer(rate=None),
            jit_compile=False,
        )
        self.assertNotEqual(fed.mechanism.noise_multiplier, before)
        _fit(fed, _T)
        self.assertEqual(fed.rounds, _T)
        self.assertLessEqual(fed.epsilon(_DELTA), 3.0)
        self.assertGreater(fed.epsilon(_DELTA), 2.99)


class BudgetTest(parameterized.TestCase):
    def test_a_budget_ends_before_the_round_that_would_pass_it(self):
        mechanism = _mechanism("blt:2")
        squares = np.cumsum((mechanism.generator.charges / 2.0) ** 2)
        limit = (_epsilon(squares[4]) + _epsilon(squares[5])) / 2
        fed = _federated(mechanism, accountant="pld")
        budget = callbacks.PrivacyBudget(epsilon=limit, delta=_DELTA)
        _fit(fed, _T, callbacks=[budget])
        self.assertEqual(fed.rounds, 5)


if __name__ == "__main__":
    absltest.main()
