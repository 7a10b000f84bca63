"""A search is charged as a whole, and tells of nothing but its best trial."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pathlib
import tempfile
import warnings
from unittest import mock

import keras
import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.accounting.search import TrialCount
from tfdp_fl.search import private_search
from tfdp_fl.search.directory import SearchDirectory

_DELTA = 1e-3
_CANDIDATES = [{"rate": 0.5}, {"rate": 0.1}, {"rate": 0.0}]


def _build(rate, mechanism=None, **options):
    return toy.federated(
        mechanism,
        clients_per_round=10,
        sampling=options.pop("sampling", "poisson"),
        compile_options={
            "optimizer": keras.optimizers.SGD(rate),
            "metrics": ["accuracy"],
        },
        **options,
    )


def _public(metric="accuracy"):
    return tfdp_fl.PublicScore(*toy.arrays(100, seed=9), metric)


def _search(build=_build, candidates=None, **options):
    return tfdp_fl.PrivateSearch(
        build,
        _CANDIDATES if candidates is None else candidates,
        **{
            "expected_trials": 3,
            "target_epsilon": 4.0,
            "target_delta": _DELTA,
            "score": _public(),
            "distribution": "geometric",
            **options,
        },
    )


def _fit(search, clients=None, **options):
    return search.fit(
        toy.clients(100) if clients is None else clients,
        rounds=2,
        batch_size=10,
        **options,
    )


def _named_clients(num_clients=100):
    return {f"anna {k}": toy.arrays(10, seed=k) for k in range(num_clients)}


def _trials(number):
    """Has a search run so many trials."""
    return mock.patch.object(TrialCount, "draw", lambda self, generator: number)


def _places(*places):
    """Has the trials' candidates be these."""
    return mock.patch.object(private_search.secrets, "randbelow", side_effect=places)


def _trained(function):
    """Has a function, of a trial, stand for a training."""
    return mock.patch.object(
        private_search._Trial, "_train", lambda self, *_: function(self)
    )


def _weights(model):
    return [weight.copy() for weight in model.get_weights()]


class TargetTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "geometric", "logarithmic", 0.5)
    def test_the_whole_search_keeps_the_target(self, distribution):
        search = _search(distribution=distribution)
        with _trained(lambda trial: None):
            _fit(search)
        self.assertLessEqual(search.epsilon(_DELTA), 4.0)
        self.assertGreater(search.epsilon(_DELTA), 3.95)

    def test_candidates_that_cost_differently_keep_it_together(self):
        def build(size):
            fed = tfdp_fl.DPFederatedModel(
                toy.dense(),
                tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=9),
                size,
            )
            fed.compile(loss=toy.loss(), metrics=["accuracy"])
            return fed

        search = _search(build, [{"size": 5}, {"size": 20}, {"size": 100}])
        seen = {}
        remember = _trained(lambda trial: seen.update({trial.clients_per_round: trial}))
        with remember, _trials(3), _places(0, 1, 2):
            _fit(search)
        self.assertLessEqual(search.epsilon(_DELTA), 4.0)
        noise = [seen[size].mechanism.noise_multiplier for size in (5, 20, 100)]
        self.assertEqual(noise, sorted(noise))
        # What a trial may be charged is what the search was charged for.
        for trial in seen.values():
            for charge in trial._planned:
                self.assertEqual(
                    charge.noise_multiplier, trial.mechanism.noise_multiplier
                )

    def test_a_trial_trains_with_the_noise_that_was_charged(self):
        rounds = []
        ledger = accounting.spending.Spending.charge

        def charge(self, charge, positions, mu_squared):
            rounds.append(charge)
            ledger(self, charge, positions, mu_squared)

        search = _search()
        patched = mock.patch.object(accounting.spending.Spending, "charge", charge)
        with patched, _trials(2):
            _fit(search)
        self.assertLen(rounds, 4)
        ((said, _),) = search._spent.charges
        (trial,) = said.event.events
        self.assertEqual({each.dp_event() for each in rounds}, {trial.events[0].event})
        self.assertEqual(trial.events[0].count, 2)

    def test_two_searches_compose(self):
        search = _search()
        with _trained(lambda trial: None):
            _fit(search)
            once = search.epsilon(_DELTA)
            _fit(search)
        self.assertGreater(search.epsilon(_DELTA), 1.2 * once)
        self.assertIn("2 times", search.privacy_statement())

    def test_a_copy_of_the_noise_that_was_asked_for_counts_nothing(self):
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1e-3)
        search = _search(lambda rate: _build(rate, mechanism))
        with (
            _trained(
                lambda trial: self.assertGreater(trial.mechanism.noise_multiplier, 0.5)
            ),
            _trials(1),
        ):
            _fit(search)

    def test_statement(self):
        search = _search()
        with self.assertRaisesRegex(ValueError, "before privacy_statement"):
            search.privacy_statement()
        with _trained(lambda trial: None):
            _fit(search)
        text = search.privacy_statement()
        for said in (
            "a search over 3 candidates",
            "epsilon = 4 at",
            "theorem 2 of Papernot & Steinke",
            "geometric with mean 3",
            "running time of a search is not hidden",
            "Who took part in which round must stay secret",
        ):
            self.assertIn(said, text)
        facts = search.privacy_statement(format="dict")
        self.assertGreater(facts["epsilon_if_participation_is_known"], 4.0)
        self.assertNotIn("hyperparameter_search_not_counted", facts["caveats"])


class PrivateScoreTest(parameterized.TestCase):
    def _noise(self, all_clients, **options):
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0, **options)
        search = _search(score=score)
        noise = []
        with (
            _trained(lambda trial: noise.append(trial.mechanism.noise_multiplier)),
            _trials(1),
        ):
            _fit(search, all_clients)
        self.assertLessEqual(search.epsilon(_DELTA), 4.0)
        ((charge, _),) = search._spent.charges
        return noise[0], charge.event.events

    def test_clients_that_do_not_train_are_charged_beside_the_others(self):
        alone, events = self._noise(_named_clients())
        self.assertLen(events, 2)
        # The ids of these are places: a client more would move all after it.
        both, events = self._noise(toy.clients(100))
        self.assertLen(events, 1)
        self.assertGreater(both, alone)

    def test_clients_that_train_and_score_are_charged_twice(self):
        named = _named_clients()
        others = {f"ben {k}": named[f"anna {k}"] for k in range(30)}
        apart, events = self._noise(named, clients=others)
        self.assertLen(events, 2)
        overlapping = {**others, "anna 3": named["anna 3"]}
        together, events = self._noise(named, clients=overlapping)
        self.assertLen(events, 1)
        self.assertGreater(together, apart)

    def test_held_out_clients_are_in_no_cohort(self):
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0, held_out=0.3)
        split = score.split(tfdp_fl.datasets.as_federated(_named_clients()))
        self.assertFalse(
            set(split.training.client_ids) & set(split.held_out.client_ids)
        )
        self.assertEqual(split.training.num_clients + split.held_out.num_clients, 100)

    def test_it_runs_and_its_noise_is_fresh_in_every_trial(self):
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0)
        search, seen = _search(score=score), []
        call = tfdp_fl.PrivateScore.__call__

        def scored(self, *arguments):
            seen.append(call(self, *arguments))
            return seen[-1]

        patched = mock.patch.object(tfdp_fl.PrivateScore, "__call__", scored)
        with patched, _trials(3), _trained(lambda trial: None):
            _fit(search, _named_clients())
        self.assertLen(set(seen), 3)

    def test_a_score_without_noise_is_refused(self):
        with self.assertRaisesRegex(ValueError, "noise_multiplier"):
            tfdp_fl.PrivateScore("accuracy", noise_multiplier=0.0)

    def test_too_little_noise_for_the_target_is_refused_before_anything(self):
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=0.3)
        search = _search(score=score)
        with self.assertRaisesRegex(ValueError, "cannot be kept"):
            _fit(search, _named_clients())
        self.assertEqual(search.epsilon(_DELTA), 0.0)


class PublicScoreTest(parameterized.TestCase):
    def test_clients_data_is_refused(self):
        with self.assertRaisesRegex(TypeError, "PrivateScore"):
            tfdp_fl.PublicScore(toy.clients(), None, "accuracy")

    def test_the_training_clients_own_examples_are_refused(self):
        x, y = toy.arrays(400)
        score = tfdp_fl.PublicScore(x[50:150].astype(np.float64), y[50:150], "accuracy")
        with self.assertRaisesRegex(ValueError, "score must be computed on public"):
            _fit(_search(score=score), toy.clients(40))

    def test_less_is_better_for_a_loss(self):
        model = _build(0.1).model
        x, y = toy.arrays(100, seed=9)
        loss, accuracy = model.evaluate(x, y, verbose=0)
        self.assertAlmostEqual(_public("loss")(model, None, None), -loss, places=5)
        self.assertAlmostEqual(_public()(model, None, None), accuracy, places=6)

    def test_a_metric_that_nobody_compiled(self):
        with self.assertRaisesRegex(ValueError, "every candidate compiles.*got 'auc'"):
            _fit(_search(score=_public("auc")))

    def test_a_function_is_no_score(self):
        with self.assertRaisesRegex(TypeError, "score"):
            _search(score=lambda model: 1.0)


class BuildTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("nothing", lambda rate: None, TypeError, "build.*NoneType"),
        (
            "not_compiled",
            lambda rate: tfdp_fl.DPFederatedModel(
                toy.dense(), tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1), 5
            ),
            ValueError,
            "compile was not called",
        ),
        (
            "no_privacy",
            lambda rate: _build(rate, tfdp_fl.NoPrivacy()),
            ValueError,
            "central mechanism",
        ),
        (
            "local",
            lambda rate: _build(rate, tfdp_fl.LocalDP(clip_norm=1, noise_multiplier=1)),
            ValueError,
            "central mechanism",
        ),
        (
            "exact_median",
            lambda rate: _build(rate, tfdp_fl.MedianClipping(noise_multiplier=1.0)),
            ValueError,
            "exact median",
        ),
        (
            "schedule",
            lambda rate: _build(
                rate,
                tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=(1.0, 2.0)),
            ),
            ValueError,
            "constant noise_multiplier",
        ),
        (
            "fixed_size",
            lambda rate: _build(rate, sampling="fixed_size"),
            ValueError,
            "sampling='poisson'",
        ),
    )
    def test_what_cannot_be_counted_is_refused(self, build, error, message):
        search = _search(build)
        with self.assertRaisesRegex(error, message):
            _fit(search)
        self.assertEqual(search.epsilon(_DELTA), 0.0)

    def test_a_model_that_knows_clients_already(self):
        fed = _build(0.1)
        fed.fit(toy.clients(20), rounds=1, batch_size=10, verbose=0)
        search = _search(lambda rate: fed, [{"rate": 1}])
        with self.assertRaisesRegex(ValueError, "already trained"):
            _fit(search)
        wrapped = _search(lambda rate: _wrapped(fed.model), [{"rate": 1}])
        with self.assertRaisesRegex(ValueError, "already trained"):
            _fit(wrapped)

    def test_one_model_for_two_candidates(self):
        model = toy.dense()
        with self.assertRaisesRegex(ValueError, "shares variables"):
            _fit(_search(lambda rate: _wrapped(model)))

    @parameterized.parameters(0, 1, 5)
    def test_it_is_called_before_all_trials_and_learns_no_number(self, number):
        calls = []

        def build(rate):
            self.assertEqual(begun, [])
            calls.append(rate)
            return _build(rate)

        begun = []
        with _trained(begun.append), _trials(number):
            _fit(_search(build))
        self.assertEqual(calls, [0.5, 0.1, 0.0])
        self.assertLen(begun, number)

    def test_every_trial_begins_where_its_candidate_began(self):
        begun = []

        def train(trial):
            begun.append(_weights(trial.model))
            trial.model.set_weights([weight + 1 for weight in begun[-1]])

        with _trained(train), _trials(4):
            _fit(_search(candidates=[{"rate": 0.1}]))
        for weights in begun:
            np.testing.assert_array_equal(weights[0], begun[0][0])

    def test_a_server_optimizer_and_an_adaptive_clip_start_anew(self):
        def build(rate):
            fed = tfdp_fl.DPFederatedModel(
                toy.dense(),
                tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, count_noise_stddev=5.0),
                10,
            )
            fed.compile(
                "sgd",
                toy.loss(),
                ["accuracy"],
                keras.optimizers.SGD(rate, momentum=0.9),
                jit_compile=False,
            )
            return fed

        seen = []
        fit = tfdp_fl.DPFederatedModel.fit

        def watched(self, *args, **kwargs):
            history = fit(self, *args, **kwargs)
            iterations = self.compiled.server_optimizer.iterations
            seen.append((int(iterations), history.history["clip_norm"][0]))
            return history

        with mock.patch.object(tfdp_fl.DPFederatedModel, "fit", watched), _trials(2):
            _fit(_search(build, [{"rate": 0.1}]))
        self.assertLen(seen, 2)
        self.assertEqual(seen[0], seen[1])
        self.assertEqual(seen[0][0], 2)


def _wrapped(model):
    fed = tfdp_fl.DPFederatedModel(
        model, tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1), 5
    )
    fed.compile(loss=toy.loss(), metrics=["accuracy"])
    return fed


class SecrecyTest(parameterized.TestCase):
    def _everything_seen(self, number):
        """Returns all that a search of so many trials leaves to be seen."""
        printed = io.StringIO()
        records = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger().addHandler(handler)
        self.addCleanup(logging.getLogger().removeHandler, handler)

        def train(trial):
            print("trial")
            logging.getLogger("tensorflow").warning("trial")
            warnings.warn("trial", stacklevel=1)

        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            warnings.catch_warnings(record=True) as warned,
            _trained(train),
            _trials(number),
        ):
            warnings.simplefilter("always")
            model = _fit(_search(), directory=folder)
            files = {
                path.name: path.stat().st_size
                for path in pathlib.Path(folder).iterdir()
            }
        self.assertIsNone(getattr(model, "history", None))
        return printed.getvalue(), len(records), len(warned), files

    def test_the_number_of_trials_is_nowhere(self):
        one = self._everything_seen(1)
        self.assertEqual(one[:3], ("", 0, 0))
        self.assertEqual(list(one[3]), ["ledger.jsonl"])
        self.assertEqual(one, self._everything_seen(6))
        self.assertEqual(one, self._everything_seen(0))

    def test_callbacks_seeds_and_validation_are_not_taken(self):
        for option in ("callbacks", "seed", "validation_data", "verbose", "audit"):
            with self.assertRaisesRegex(TypeError, option):
                _fit(_search(), **{option: None})

    def test_nothing_of_another_trial_can_be_had(self):
        made = []

        def build(rate):
            made.append(_build(rate))
            return made[-1]

        search = _search(build)
        with (
            _trials(3),
            _places(0, 1, 2),
            mock.patch.object(
                private_search._Trial,
                "run",
                autospec=True,
                side_effect=private_search._Trial.run,
            ) as run,
        ):
            model = _fit(search)
        self.assertEqual(run.call_count, 3)
        untrained = _build(0.1).get_weights()
        for fed in made:
            if fed.model is not model:
                np.testing.assert_array_equal(fed.get_weights()[0], untrained[0])
            self.assertIsNone(fed.model.history)
            self.assertIsNone(fed.run)
            with self.assertRaisesRegex(ValueError, "already trained"):
                fed.epsilon(_DELTA)
            with self.assertRaisesRegex(ValueError, "already trained"):
                fed.fit(toy.clients(20), rounds=1, verbose=0)
        self.assertIs(model, made[_CANDIDATES.index(search.best)].model)
        with self.assertRaisesRegex(ValueError, "already trained"):
            _wrapped(model).fit(toy.clients(20), rounds=1, verbose=0)

    @parameterized.parameters(RuntimeError("x"), FloatingPointError("x"), MemoryError())
    def test_a_trial_that_fails_is_the_worst_and_says_nothing(self, error):
        def train(trial):
            raise error

        search = _search()
        with _trained(train), _trials(3):
            model = _fit(search)
        self.assertIsNone(search.best)
        untrained = _build(0.1).get_weights()
        np.testing.assert_array_equal(model.get_weights()[0], untrained[0])
        self.assertGreater(search.epsilon(_DELTA), 3.9)

    def test_no_trial_at_all_is_the_untrained_model(self):
        search = _search(distribution="poisson")
        with _trials(0):
            model = _fit(search)
        self.assertIsNone(search.best)
        np.testing.assert_array_equal(
            model.get_weights()[0], _build(0.1).get_weights()[0]
        )
        self.assertGreater(search.epsilon(_DELTA), 3.9)

    def test_a_score_of_nan_is_the_worst(self):
        def train(trial):
            first = not seen
            seen.append(trial)
            value = np.nan if first else 0.5
            trial.model.set_weights([w * 0 + value for w in _weights(trial.model)])

        seen = []
        search = _search(score=_public("loss"))
        with _trained(train), _trials(2), _places(0, 1):
            model = _fit(search)
        self.assertEqual(search.best, {"rate": 0.1})
        self.assertEqual(float(model.get_weights()[0][0, 0]), 0.5)

    def test_the_best_is_returned_as_it_was_scored(self):
        scales = iter([0.1, 3.0, 0.2, 0.3])
        x, y = toy.arrays(100, seed=9)

        def train(trial):
            kernel, bias = _weights(trial.model)
            kernel = next(scales) * np.eye(*kernel.shape, dtype=np.float32)
            trial.model.set_weights([kernel, 0 * bias])

        search = _search(score=_public("loss"))
        with _trained(train), _trials(4), _places(0, 1, 2, 0):
            model = _fit(search)
        self.assertEqual(search.best, {"rate": 0.1})
        self.assertEqual(float(model.get_weights()[0][0, 0]), 3.0)
        self.assertGreater(model.evaluate(x, y, verbose=0)[1], 0.9)


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        self.ledger = os.path.join(self.folder, "ledger.jsonl")

    def _lines(self):
        return pathlib.Path(self.ledger).read_text("utf-8").splitlines()[1:]

    def test_one_line_before_the_first_trial(self):
        lines = []
        search = _search()
        with _trained(lambda trial: lines.append(self._lines())), _trials(3):
            _fit(search, directory=self.folder)
        self.assertEqual([len(each) for each in lines], [1, 1, 1])
        self.assertEqual(self._lines(), lines[0])
        self.assertEqual(
            accounting.epsilon_from_ledger(self.ledger, _DELTA), search.epsilon(_DELTA)
        )

    def test_nothing_is_trained_that_could_not_be_written(self):
        search = _search()
        failing = mock.patch.object(
            accounting.PrivacyLedger, "record", side_effect=accounting.LedgerWriteError
        )
        with (
            failing,
            _trained(self.fail),
            self.assertRaises(accounting.LedgerWriteError),
        ):
            _fit(search, directory=self.folder)
        self.assertEqual(search.epsilon(_DELTA), 0.0)

    def test_what_other_runs_spent_counts(self):
        fed = _build(0.1)
        fed.fit(
            toy.clients(100),
            rounds=2,
            verbose=0,
            callbacks=[tfdp_fl.callbacks.Ledger(self.ledger)],
        )
        search = _search()
        with _trained(lambda trial: None):
            _fit(search, directory=self.folder)
        self.assertGreater(search.epsilon(_DELTA), 4.01)
        self.assertEqual(
            accounting.epsilon_from_ledger(self.ledger, _DELTA), search.epsilon(_DELTA)
        )

    def test_a_later_run_counts_the_search(self):
        with _trained(lambda trial: None):
            _fit(_search(), directory=self.folder)
        fed = _build(0.1)
        ledger = tfdp_fl.callbacks.Ledger(self.ledger, append=True)
        fed.fit(toy.clients(100), rounds=1, verbose=0, callbacks=[ledger])
        self.assertGreater(fed.epsilon(_DELTA), 4.0)


class ResumingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        self.trained = []

    def _broken(self, search, number, **options):
        """Runs a search until its training breaks; returns whether it did."""

        def train(trial):
            self.trained.append(_weights(trial.model))
            raise KeyboardInterrupt

        with _trained(train), _trials(number):
            try:
                _fit(search, **options)
            except KeyboardInterrupt:
                return True
        return False

    def test_a_search_that_is_resumed_until_it_likes_the_result(self):
        search = _search()
        self.assertTrue(self._broken(search, 3, directory=self.folder))
        for _ in range(2):  # Another process, with another number in mind.
            again = _search()
            self.assertTrue(self._broken(again, 50, resume_from=self.folder))
        last = _search()
        self.assertFalse(self._broken(last, 50, resume_from=self.folder))
        self.assertLen(self.trained, 3)  # Each was run once, and never again.
        self.assertIsNone(last.best)
        self.assertEqual(last.epsilon(_DELTA), search.epsilon(_DELTA))
        with self.assertRaisesRegex(ValueError, "interrupted search"):
            _fit(_search(), resume_from=self.folder)
        ledger = pathlib.Path(self.folder) / "ledger.jsonl"
        self.assertLen(ledger.read_text("utf-8").splitlines(), 2)
        self.assertEqual(os.listdir(self.folder), ["ledger.jsonl"])

    def test_the_best_so_far_and_the_beginning_stay(self):
        def train(trial):
            self.trained.append(_weights(trial.model))
            if len(self.trained) == 2:
                raise KeyboardInterrupt
            kernel = np.eye(8, 3, dtype=np.float32) * (6 - len(self.trained))
            trial.model.set_weights([kernel, np.zeros(3, np.float32)])

        def build(rate):  # Begins elsewhere in every process.
            fed = _build(rate)
            fed.set_weights(
                [
                    np.random.default_rng().normal(size=w.shape)
                    for w in fed.get_weights()
                ]
            )
            return fed

        with _trained(train), _trials(3):
            with self.assertRaises(KeyboardInterrupt):
                _fit(_search(build, [{"rate": 0.1}]), directory=self.folder)
            mode = os.stat(os.path.join(self.folder, "search.npz")).st_mode
            self.assertEqual(mode & 0o777, 0o600)
            search = _search(build, [{"rate": 0.1}], score=_public())
            model = _fit(search, resume_from=self.folder)
        self.assertLen(self.trained, 3)
        for weights in self.trained:
            np.testing.assert_array_equal(weights[0], self.trained[0][0])
        self.assertEqual(float(model.get_weights()[0][0, 0]), 5.0)

    @parameterized.named_parameters(
        ("candidates", {"candidates": [{"rate": 9.0}]}, {}, "candidates"),
        ("order", {"candidates": _CANDIDATES[::-1]}, {}, "candidates"),
        ("trials", {"expected_trials": 30}, {}, "expected_trials"),
        ("law", {"distribution": "poisson"}, {}, "distribution"),
        ("target", {"target_epsilon": 8.0}, {}, "target_epsilon"),
        ("score", {"score": _public("loss")}, {}, "score"),
        ("clients", {}, {"clients": toy.clients(90)}, "clients"),
        ("shuffle", {}, {"shuffle": True}, "shuffle"),
        (
            "build",
            {"build": lambda rate: _wrapped(toy.dense())},
            {},
            "build",
        ),
    )
    def test_what_is_changed_on_resume_is_refused(self, made, given, name):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        search = _search(**made)
        with self.assertRaisesRegex(ValueError, f"{name} must be as in the inter"):
            _fit(search, resume_from=self.folder, **given)
        self.assertEqual(search.epsilon(_DELTA), 0.0)

    def test_a_new_search_does_not_take_the_place_of_an_interrupted_one(self):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        with self.assertRaisesRegex(ValueError, "resume_from"):
            _fit(_search(), directory=self.folder)

    @parameterized.parameters("deleted", "cut")
    def test_a_ledger_without_the_search_is_found_out(self, how):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        ledger = pathlib.Path(self.folder) / "ledger.jsonl"
        lines = ledger.read_text("utf-8").splitlines(keepends=True)
        ledger.unlink()
        if how == "cut":
            ledger.write_text(lines[0])
        with self.assertRaises(accounting.LedgerTamperedError):
            _fit(_search(), resume_from=self.folder)

    def test_a_crash_before_the_charge_is_charged_on_resume(self):
        interrupted = mock.patch.object(
            SearchDirectory, "record", side_effect=KeyboardInterrupt
        )
        with interrupted, self.assertRaises(KeyboardInterrupt):
            _fit(_search(), directory=self.folder)
        search = _search()
        with _trained(lambda trial: None):
            _fit(search, resume_from=self.folder)
        ledger = os.path.join(self.folder, "ledger.jsonl")
        self.assertEqual(
            accounting.epsilon_from_ledger(ledger, _DELTA), search.epsilon(_DELTA)
        )
        self.assertGreater(search.epsilon(_DELTA), 3.9)

    def test_two_processes_at_once(self):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        ledger = os.path.join(self.folder, "ledger.jsonl")
        with (
            accounting.PrivacyLedger(ledger, mode="append"),
            self.assertRaises(accounting.LedgerInUseError),
        ):
            _fit(_search(), resume_from=self.folder)

    def test_without_a_directory_an_interrupted_search_is_paid_for(self):
        search = _search()
        self.assertTrue(self._broken(search, 3))
        once = search.epsilon(_DELTA)
        self.assertGreater(once, 3.9)
        with _trained(lambda trial: None):
            _fit(search)
        self.assertGreater(search.epsilon(_DELTA), 1.2 * once)

    def test_a_fit_within_a_fit(self):
        search = _search()
        caught = []

        def train(trial):
            with contextlib.suppress(RuntimeError):
                _fit(search)
                caught.append("ran")

        with _trained(train), _trials(1):
            _fit(search)
        self.assertEqual(caught, [])


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"candidates": []}, "candidates"),
        ({"expected_trials": 0.5}, "expected_trials"),
        ({"target_epsilon": 0}, "target_epsilon"),
        ({"target_delta": 1}, "target_delta"),
        ({"distribution": "normal"}, "distribution"),
        ({"build": None}, "build"),
        ({"candidates": {"rate": 1}}, "candidates"),
        ({"candidates": [3]}, "candidates"),
    )
    def test_what_is_refused(self, options, name):
        with self.assertRaisesRegex((ValueError, TypeError), name):
            _search(**options)

    def test_a_whole_search_learns(self):
        search = _search(target_epsilon=50.0, candidates=[{"rate": 1.0}])
        with _trials(2):
            model = search.fit(toy.clients(200), rounds=10, batch_size=10)
        x, y = toy.arrays(100, seed=9)
        self.assertGreater(model.evaluate(x, y, verbose=0)[1], 0.6)
        self.assertEqual(json.dumps(search.best), '{"rate": 1.0}')


if __name__ == "__main__":
    absltest.main()
