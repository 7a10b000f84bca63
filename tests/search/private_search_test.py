"""A search is charged as a whole, and tells of nothing but its best trial."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import tempfile
import warnings
from unittest import mock

import keras
import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.accounting.search import TrialCount
from tfdp_fl.search import private_search, trial
from tfdp_fl.search.directory import SearchDirectory

_DELTA = 1e-3
_CANDIDATES = [{"rate": 0.5}, {"rate": 0.1}, {"rate": 0.0}]


def _build(rate, mechanism=None, sampling="poisson"):
    return toy.federated(
        mechanism,
        clients_per_round=10,
        sampling=sampling,
        compile_options={
            "optimizer": keras.optimizers.SGD(rate),
            "metrics": ["accuracy"],
        },
    )


def _wrapped(model, mechanism=None, size=5):
    mechanism = mechanism or tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1)
    fed = tfdp_fl.DPFederatedModel(model, mechanism, size)
    fed.compile(loss=toy.loss(), metrics=["accuracy"])
    return fed


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
    clients = toy.clients(100) if clients is None else clients
    return search.fit(clients, rounds=2, batch_size=10, **options)


def _named_clients(num_clients=100):
    return {f"anna {k}": toy.arrays(10, seed=k) for k in range(num_clients)}


def _trials(number):
    """Has a search run so many trials."""
    return mock.patch.object(TrialCount, "draw", lambda self, generator: number)


def _places(*places):
    """Has the trials' candidates be these."""
    return mock.patch.object(private_search.secrets, "randbelow", side_effect=places)


def _trained(function=lambda trial: None):
    """Has a function, of a trial, stand for a training."""
    return mock.patch.object(trial.Trial, "_train", lambda self, *_: function(self))


def _first(model):
    """Returns the first number of a model."""
    return float(model.get_weights()[0][0, 0])


class TargetTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "geometric", "logarithmic", 0.5)
    def test_the_whole_search_keeps_the_target(self, distribution):
        search = _search(distribution=distribution)
        with _trained():
            _fit(search)
        self.assertLessEqual(search.epsilon(_DELTA), 4.0)
        self.assertGreater(search.epsilon(_DELTA), 3.95)

    def test_candidates_that_cost_differently_keep_it_together(self):
        search = _search(
            lambda size: _wrapped(toy.dense(), size=size),
            [{"size": 5}, {"size": 100}],
        )
        seen = {}
        remember = _trained(lambda trial: seen.update({trial.clients_per_round: trial}))
        with remember, _trials(2), _places(0, 1):
            _fit(search)
        self.assertLessEqual(search.epsilon(_DELTA), 4.0)
        noise = [seen[size].mechanism.noise_multiplier for size in (5, 100)]
        self.assertEqual(noise, sorted(noise))
        # What a trial may be charged is what the search was charged for.
        for each in seen.values():
            for charge in each._planned:
                self.assertEqual(
                    charge.noise_multiplier, each.mechanism.noise_multiplier
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
        with self.assertRaisesRegex(ValueError, "before privacy_statement"):
            search.privacy_statement()
        with _trained():
            _fit(search)
            once, text = search.epsilon(_DELTA), search.privacy_statement()
            facts = search.privacy_statement(format="dict")
            _fit(search)
        self.assertGreater(search.epsilon(_DELTA), 1.2 * once)
        self.assertIn("2 times", search.privacy_statement())
        for said in (
            "a search over 3 candidates",
            "epsilon = 4 at",
            "theorem 2 of Papernot & Steinke",
            "geometric with mean 3",
            "running time of a search is not hidden",
            "Who took part in which round must stay secret",
        ):
            self.assertIn(said, text)
        self.assertGreater(facts["epsilon_if_participation_is_known"], 4.0)
        self.assertNotIn("hyperparameter_search_not_counted", facts["caveats"])

    def test_a_whole_search_learns(self):
        search = _search(target_epsilon=50.0, candidates=[{"rate": 1.0}])
        with _trials(2):
            model = search.fit(toy.clients(200), rounds=10, batch_size=10)
        x, y = toy.arrays(100, seed=9)
        self.assertGreater(model.evaluate(x, y, verbose=0)[1], 0.6)
        self.assertEqual(search.best, {"rate": 1.0})


class ScoreTest(parameterized.TestCase):
    def _noise(self, all_clients, **options):
        """Returns the noise of a privately scored search, and the events charged."""
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0, **options)
        search, noise = _search(score=score), []
        train = _trained(lambda trial: noise.append(trial.mechanism.noise_multiplier))
        with train, _trials(1):
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
        # Wide bounds: a mean at their ends could be there twice.
        score = tfdp_fl.PrivateScore(
            "accuracy", noise_multiplier=4.0, bounds=(-100.0, 100.0)
        )
        search, seen = _search(score=score), []
        call = tfdp_fl.PrivateScore.__call__

        def scored(self, *arguments):
            seen.append(call(self, *arguments))
            return seen[-1]

        patched = mock.patch.object(tfdp_fl.PrivateScore, "__call__", scored)
        with patched, _trials(3), _trained():
            _fit(search, _named_clients())
        self.assertLen(set(seen), 3)

    def test_too_little_noise_for_the_target_is_refused_before_anything(self):
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=0.3)
        search = _search(score=score)
        with self.assertRaisesRegex(ValueError, "cannot be kept"):
            _fit(search, _named_clients())
        self.assertEqual(search.epsilon(_DELTA), 0.0)
        with self.assertRaisesRegex(ValueError, "noise_multiplier"):
            tfdp_fl.PrivateScore("accuracy", noise_multiplier=0.0)

    def test_clients_examples_are_not_public(self):
        with self.assertRaisesRegex(TypeError, "score"):
            _search(score=lambda model: 1.0)  # Of whatever it closes over.
        with self.assertRaisesRegex(TypeError, "PrivateScore"):
            tfdp_fl.PublicScore(toy.clients(), None, "accuracy")
        x, y = toy.arrays(400)
        score = tfdp_fl.PublicScore(x[50:150].astype(np.float64), y[50:150], "accuracy")
        with self.assertRaisesRegex(ValueError, "score must be computed on public"):
            _fit(_search(score=score), toy.clients(40))

    def test_less_is_better_for_a_loss(self):
        model = _build(0.1).model
        loss, accuracy = model.evaluate(*toy.arrays(100, seed=9), verbose=0)
        self.assertAlmostEqual(_public("loss")(model, None, None), -loss, places=5)
        self.assertAlmostEqual(_public()(model, None, None), accuracy, places=6)
        with self.assertRaisesRegex(ValueError, "every candidate compiles.*got 'auc'"):
            _fit(_search(score=_public("auc")))


class BuildTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("nothing", lambda rate: None, "build.*NoneType"),
        (
            "not_compiled",
            lambda rate: tfdp_fl.DPFederatedModel(
                toy.dense(), tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1), 5
            ),
            "compile must be called before build returns",
        ),
        (
            "no_privacy",
            lambda rate: _build(rate, tfdp_fl.NoPrivacy()),
            "central mechanism",
        ),
        (
            "local",
            lambda rate: _build(rate, tfdp_fl.LocalDP(clip_norm=1, noise_multiplier=1)),
            "central mechanism",
        ),
        (
            "exact_median",
            lambda rate: _build(rate, tfdp_fl.MedianClipping(noise_multiplier=1.0)),
            "exact median",
        ),
        (
            "schedule",
            lambda rate: _build(
                rate, tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=(1.0, 2.0))
            ),
            "constant noise_multiplier",
        ),
        (
            "fixed_size",
            lambda rate: _build(rate, sampling="fixed_size"),
            "sampling='poisson'",
        ),
    )
    def test_what_cannot_be_counted_is_refused(self, build, message):
        search = _search(build)
        with self.assertRaisesRegex((TypeError, ValueError), message):
            _fit(search)
        self.assertEqual(search.epsilon(_DELTA), 0.0)

    def test_a_model_that_knows_clients_already(self):
        fed = _build(0.1)
        fed.fit(toy.clients(20), rounds=1, batch_size=10, verbose=0)
        for build in (lambda rate: fed, lambda rate: _wrapped(fed.model)):
            with self.assertRaisesRegex(ValueError, "already trained"):
                _fit(_search(build, [{"rate": 1}]))
        model = toy.dense()
        with self.assertRaisesRegex(ValueError, "shares variables"):
            _fit(_search(lambda rate: _wrapped(model)))

    @parameterized.parameters(0, 5)
    def test_it_is_called_before_all_trials_and_learns_no_number(self, number):
        calls, begun = [], []

        def build(rate):
            self.assertEqual(begun, [])
            calls.append(rate)
            return _build(rate)

        with _trained(begun.append), _trials(number):
            _fit(_search(build))
        self.assertEqual(calls, [0.5, 0.1, 0.0])
        self.assertLen(begun, number)

    def test_a_trial_begins_as_its_candidate_began_and_traces_nothing_anew(self):
        def build(rate):
            fed = tfdp_fl.DPFederatedModel(
                toy.dense(dropout=0.5),
                tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, count_noise_stddev=5.0),
                10,
            )
            momentum = keras.optimizers.SGD(rate, momentum=0.9)
            options = {"server_optimizer": momentum, "jit_compile": False}
            fed.compile("sgd", toy.loss(), ["accuracy"], **options)
            return fed

        seen, engines, trained = [], set(), []
        fit = tfdp_fl.DPFederatedModel.fit

        def watched(self, *args, **kwargs):
            before = [v.numpy() for v in self.model.variables]
            trained_before = self.engine is not None and self.engine.has_trained
            history = fit(self, *args, **kwargs)
            engines.add(self.engine)
            slots = [v.numpy() for v in self.engine.server.state]
            seen.append((before, history.history["clip_norm"][0], slots))
            trained.append(trained_before)
            return history

        with mock.patch.object(tfdp_fl.DPFederatedModel, "fit", watched), _trials(3):
            _fit(_search(build, [{"rate": 0.1}]))
        self.assertLen(engines, 1)
        self.assertLen(seen, 3)
        self.assertEqual(trained, [False] * 3)
        for before, clip, slots in seen:
            toy.assert_same(before, seen[0][0])
            self.assertEqual(clip, seen[0][1])
            self.assertEqual(int(slots[0]), 2)  # Iterations: of this trial alone.


class SecrecyTest(parameterized.TestCase):
    def _everything_seen(self, number):
        """Returns all that a search of so many trials leaves to be seen."""
        printed, records = io.StringIO(), []
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

    def test_what_would_see_each_trial_is_not_taken(self):
        for option in ("callbacks", "seed", "validation_data", "verbose", "audit"):
            with self.assertRaisesRegex(TypeError, option):
                _fit(_search(), **{option: None})

    def test_nothing_of_another_trial_can_be_had(self):
        made = []

        def build(rate):
            made.append(_build(rate))
            return made[-1]

        search, run = _search(build), trial.Trial.run
        with (
            _trials(3),
            _places(0, 1, 2),
            mock.patch.object(
                trial.Trial, "run", autospec=True, side_effect=run
            ) as runs,
        ):
            model = _fit(search)
        self.assertEqual(runs.call_count, 3)
        untrained = _build(0.1)
        for fed in made:
            if fed.model is not model:
                toy.assert_same(fed, untrained)
            self.assertIsNone(fed.model.history)
            self.assertIsNone(fed.run)
            with self.assertRaisesRegex(ValueError, "already trained"):
                fed.epsilon(_DELTA)
            with self.assertRaisesRegex(ValueError, "already trained"):
                fed.fit(toy.clients(20), rounds=1, verbose=0)
        self.assertIs(model, made[_CANDIDATES.index(search.best)].model)
        with self.assertRaisesRegex(ValueError, "already trained"):
            _wrapped(model).fit(toy.clients(20), rounds=1, verbose=0)

    @parameterized.parameters((RuntimeError("x"), 3), (MemoryError(), 3), (None, 0))
    def test_trials_that_fail_or_none_are_the_untrained_model(self, error, number):
        def train(trial):
            raise error

        search = _search(distribution="poisson")
        with _trained(train), _trials(number):
            model = _fit(search)
        self.assertIsNone(search.best)
        toy.assert_same(model, _build(0.1))
        self.assertGreater(search.epsilon(_DELTA), 3.9)

    def test_a_score_of_nan_is_the_worst(self):
        values = iter([np.nan, 0.5])

        def train(trial):
            value = next(values)
            trial.model.set_weights([w * 0 + value for w in trial.model.get_weights()])

        search = _search(score=_public("loss"))
        with _trained(train), _trials(2), _places(0, 1):
            model = _fit(search)
        self.assertEqual(search.best, {"rate": 0.1})
        self.assertEqual(_first(model), 0.5)

    def test_the_best_is_returned_as_it_was_scored(self):
        scales = iter([0.1, 3.0, 0.2, 0.3])

        def train(trial):
            kernel = next(scales) * np.eye(8, 3, dtype=np.float32)
            trial.model.set_weights([kernel, np.zeros(3, np.float32)])

        search = _search(score=_public("loss"))
        with _trained(train), _trials(4), _places(0, 1, 2, 0):
            model = _fit(search)
        self.assertEqual(search.best, {"rate": 0.1})
        self.assertEqual(_first(model), 3.0)


class LedgerTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        self.ledger = pathlib.Path(self.folder, "ledger.jsonl")

    def _lines(self):
        return self.ledger.read_text("utf-8").splitlines()[1:]

    def test_one_line_before_the_first_trial(self):
        lines, search = [], _search()
        with _trained(lambda trial: lines.append(self._lines())), _trials(3):
            _fit(search, directory=self.folder)
        self.assertEqual([len(each) for each in lines], [1, 1, 1])
        self.assertEqual(self._lines(), lines[0])
        self.assertEqual(
            accounting.epsilon_from_ledger(self.ledger, _DELTA, "pld"),
            search.epsilon(_DELTA),
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

    def test_runs_before_and_after_count_together(self):
        ledger = tfdp_fl.callbacks.Ledger(self.ledger, append=True)
        _build(0.1).fit(toy.clients(100), rounds=2, verbose=0, callbacks=[ledger])
        search = _search()
        with _trained():
            _fit(search, directory=self.folder)
        self.assertGreater(search.epsilon(_DELTA), 4.01)
        self.assertEqual(
            accounting.epsilon_from_ledger(self.ledger, _DELTA), search.epsilon(_DELTA)
        )
        fed = _build(0.1)
        fed.fit(toy.clients(100), rounds=1, verbose=0, callbacks=[ledger])
        self.assertGreater(fed.epsilon(_DELTA), search.epsilon(_DELTA))


class ResumingTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        self.ledger = pathlib.Path(self.folder, "ledger.jsonl")
        self.trained = []

    def _broken(self, search, number, **options):
        """Runs a search until its training breaks; returns whether it did."""

        def train(trial):
            self.trained.append(trial.model.get_weights())
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
        self.assertLen(self.ledger.read_text("utf-8").splitlines(), 2)
        self.assertEqual(os.listdir(self.folder), ["ledger.jsonl"])

    def test_the_best_so_far_and_the_beginning_stay(self):
        def train(trial):
            self.trained.append(trial.model.get_weights())
            if len(self.trained) == 2:
                raise KeyboardInterrupt
            kernel = np.eye(8, 3, dtype=np.float32) * (6 - len(self.trained))
            trial.model.set_weights([kernel, np.zeros(3, np.float32)])

        def build(rate):  # Begins elsewhere in every process.
            fed = _build(rate)
            normal = np.random.default_rng().normal
            fed.set_weights([normal(size=w.shape) for w in fed.get_weights()])
            return fed

        with _trained(train), _trials(3):
            with self.assertRaises(KeyboardInterrupt):
                _fit(_search(build, [{"rate": 0.1}]), directory=self.folder)
            mode = os.stat(os.path.join(self.folder, "search.npz")).st_mode
            self.assertEqual(mode & 0o777, 0o600)
            model = _fit(_search(build, [{"rate": 0.1}]), resume_from=self.folder)
        self.assertLen(self.trained, 3)
        for weights in self.trained:
            toy.assert_same(weights, self.trained[0])
        self.assertEqual(_first(model), 5.0)

    def test_what_is_changed_on_resume_is_refused(self):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        for made, given, name in (
            ({"candidates": _CANDIDATES[::-1]}, {}, "candidates"),
            ({"expected_trials": 30}, {}, "expected_trials"),
            ({"distribution": "poisson"}, {}, "distribution"),
            ({"target_epsilon": 8.0}, {}, "target_epsilon"),
            ({"score": _public("loss")}, {}, "score"),
            ({}, {"clients": toy.clients(90)}, "clients"),
            ({}, {"shuffle": True}, "shuffle"),
            ({"build": lambda rate: _wrapped(toy.dense())}, {}, "build"),
        ):
            search = _search(**made)
            with self.assertRaisesRegex(ValueError, f"{name} must be as in the inter"):
                _fit(search, resume_from=self.folder, **given)
            self.assertEqual(search.epsilon(_DELTA), 0.0)
        # Nor does a new search take its place.
        with self.assertRaisesRegex(ValueError, "resume_from"):
            _fit(_search(), directory=self.folder)

    @parameterized.parameters("deleted", "cut")
    def test_a_ledger_without_the_search_is_found_out(self, how):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        lines = self.ledger.read_text("utf-8").splitlines(keepends=True)
        self.ledger.unlink()
        if how == "cut":
            self.ledger.write_text(lines[0])
        with self.assertRaises(accounting.LedgerTamperedError):
            _fit(_search(), resume_from=self.folder)

    def test_a_crash_before_the_charge_is_charged_on_resume(self):
        interrupted = mock.patch.object(
            SearchDirectory, "record", side_effect=KeyboardInterrupt
        )
        with interrupted, self.assertRaises(KeyboardInterrupt):
            _fit(_search(), directory=self.folder)
        search = _search()
        with _trained():
            _fit(search, resume_from=self.folder)
        self.assertEqual(
            accounting.epsilon_from_ledger(self.ledger, _DELTA, "pld"),
            search.epsilon(_DELTA),
        )
        self.assertGreater(search.epsilon(_DELTA), 3.9)

    def test_two_processes_at_once(self):
        self.assertTrue(self._broken(_search(), 3, directory=self.folder))
        with (
            accounting.PrivacyLedger(self.ledger, mode="append"),
            self.assertRaises(accounting.LedgerInUseError),
        ):
            _fit(_search(), resume_from=self.folder)

    def test_without_a_directory_an_interrupted_search_is_paid_for(self):
        search = _search()
        self.assertTrue(self._broken(search, 3))
        once = search.epsilon(_DELTA)
        self.assertGreater(once, 3.9)
        with _trained():
            _fit(search)
        self.assertGreater(search.epsilon(_DELTA), 1.2 * once)

    def test_a_fit_within_a_fit(self):
        search, caught = _search(), []

        def train(trial):
            with contextlib.suppress(RuntimeError):
                _fit(search)
                caught.append("ran")

        with _trained(train), _trials(1):
            _fit(search)
        self.assertEqual(caught, [])
