"""A search is charged as a whole, and tells of nothing but its best trial."""

import contextlib
import datetime
import io
import json
import logging
import os
import shutil
import threading
import warnings
from unittest import mock

import dp_accounting
import keras
import numpy as np
import pytest

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.accounting import schema
from tfdp_fl.accounting.private_selection import TrialCount
from tfdp_fl.search import private_search, trial
from tfdp_fl.search.private_search import SearchDirectory

_DELTA = 1e-3
_CANDIDATES = [{"rate": 0.5}, {"rate": 0.1}, {"rate": 0.0}]
_FIXED = {"clip_norm": 1, "noise_multiplier": 1}


def _build(rate, mechanism=None, sampling="poisson", **options):
    compiled = {"optimizer": keras.optimizers.SGD(rate), "metrics": ["accuracy"]}
    return toy.federated(mechanism, None, 10, sampling, compiled, **options)


def _wrapped(model, size=5, **options):
    fed = tfdp_fl.DPFederatedModel(model, tfdp_fl.FixedClipping(**_FIXED), size)
    fed.compile(loss=toy.loss(), metrics=["accuracy"], **options)
    return fed


def _public(metric="accuracy"):
    return tfdp_fl.PublicScore(*toy.arrays(100, seed=9), metric)


def _search(build=_build, candidates=_CANDIDATES[1:2], **options):
    usual = {"expected_trials": 3, "target_epsilon": 4.0, "target_delta": _DELTA}
    usual |= {"score": _public(), "distribution": "geometric"}
    return tfdp_fl.PrivateSearch(build, candidates, **{**usual, **options})


def _fit(search, clients=None, **options):
    clients = toy.clients(100) if clients is None else clients
    return search.fit(clients, rounds=2, batch_size=10, **options)


def _named_clients():
    return {f"anna {k}": toy.arrays(10, seed=k) for k in range(100)}


def _trials(number):
    """Has a search run so many trials."""
    return mock.patch.object(TrialCount, "draw", lambda self, generator: number)


def _places(*places):
    """Has the trials' candidates be these."""
    return mock.patch.object(private_search.secrets, "randbelow", side_effect=places)


def _trained(function=lambda trial: None):
    """Has a function, of a trial, stand for a training."""
    return mock.patch.multiple(
        trial.Trial, _train=lambda self, *_: function(self), prepare=mock.DEFAULT
    )


_NOISE, _calibrate = {}, accounting.calibrate


@pytest.fixture(autouse=True)
def _calibrated_once(monkeypatch, wide_cells):
    """Has no noise looked for twice: it takes seconds."""

    def calibrate(make_charges, *target, upper):
        key = tuple(make_charges(1.0)), target, upper
        if key not in _NOISE:
            _NOISE[key] = _calibrate(make_charges, *target, upper=upper)
        return _NOISE[key]

    monkeypatch.setattr(accounting, "calibrate", calibrate)


def _set(trial, kernel):
    trial.model.set_weights([np.float32(kernel), np.zeros(3, np.float32)])


def _first(model):
    """Returns the first number of a model."""
    return float(model.get_weights()[0][0, 0])


@pytest.mark.parametrize("distribution", ["poisson", "geometric", "logarithmic", 0.5])
def test_the_whole_search_keeps_the_target(distribution):
    search = _search(distribution=distribution)
    with _trained():
        _fit(search)
    assert 3.95 < search.epsilon(_DELTA) <= 4.0


def test_too_many_costs_are_refused_before_any_is_calibrated(monkeypatch):
    monkeypatch.setattr(accounting, "calibrate", None)
    monkeypatch.setattr(schema, "MAX_TRIAL_COSTS", 4)
    sizes = [{"size": size} for size in range(5, 5 + 4)]
    search = _search(lambda size: _wrapped(toy.dense(), size), sizes)
    with _trained(), pytest.raises(ValueError, match=r"candidates .* got 4"):
        _fit(search)
    assert search.epsilon(_DELTA) == 0.0


def test_candidates_that_cost_differently_keep_it_together():
    sizes = [{"size": 5}, {"size": 100}]
    search = _search(lambda size: _wrapped(toy.dense(), size), sizes)
    seen = {}
    remember = _trained(lambda trial: seen.update({trial.clients_per_round: trial}))
    with remember, _trials(2), _places(0, 1):
        _fit(search)
    assert search.epsilon(_DELTA) <= 4.0
    assert seen[5].mechanism.noise_multiplier < seen[100].mechanism.noise_multiplier
    # What a trial may be charged is what the search was charged for.
    for each in seen.values():
        for charge in each._planned:
            assert charge.noise_multiplier == each.mechanism.noise_multiplier


def test_a_whole_search_learns_with_the_noise_that_was_charged():
    search = _search(target_epsilon=50.0, candidates=[{"rate": 1.0}])
    spending = accounting.account.PrivacyAccount
    spy = {"autospec": True, "side_effect": spending.charge}
    with mock.patch.object(spending, "charge", **spy) as charged, _trials(2):
        model = search.fit(toy.clients(100), rounds=8, batch_size=10)
    assert model.evaluate(*toy.arrays(100, seed=9), verbose=0)[1] > 0.6
    assert search.best == {"rate": 1.0}
    assert charged.call_count == 1 + 2 * 8  # The search, and its trials.
    ((said, _),) = search._account.central.charges
    (trained,) = said.event.events
    rounds = {call.args[1].dp_event() for call in charged.mock_calls[1:]}
    assert rounds == {trained.events[0].event}
    assert trained.events[0].count == 8


def test_the_statement_says_how_trials_are_set():
    def build(rate):
        weighting = tfdp_fl.ClientWeighting.num_examples(cap=5)
        mechanism = tfdp_fl.FixedClipping(**_FIXED)
        fed = tfdp_fl.DPFederatedModel(
            toy.normalized(), mechanism, 10, client_weighting=weighting
        )
        fed.compile(keras.optimizers.SGD(rate), toy.loss(), ["accuracy"])
        return fed

    search = _search(build, _CANDIDATES[:1])
    with _trials(0):
        _fit(search)
    said = search.privacy_statement(format="dict")["caveats"]
    assert said.keys() >= {"client_weighting_given", "non_trainable_released"}


def test_two_searches_compose_and_an_interrupted_one_is_paid_for():
    search = _search(candidates=_CANDIDATES)
    with pytest.raises(ValueError, match="before privacy_statement"):
        search.privacy_statement()
    with _trained():
        _fit(search)
    once, text = search.epsilon(_DELTA), toy.said(search)
    facts = search.privacy_statement(format="dict")
    assert _broken(search)
    assert search.epsilon(_DELTA) > 1.2 * once
    twice = toy.said(search)
    assert "2 times" in twice
    assert "Koskela" not in twice  # Several are accounted for by Renyi alone.
    for said in (
        "a search over 3 candidates",
        "epsilon = 4 at",
        "theorem 2 of Papernot & Steinke",
        "Koskela, Redberg & Wang",
        "geometric with mean 3",
        "running time of a search is not hidden",
        "who took part in which round stays secret",
    ):
        assert said in text
    assert facts["epsilon_if_participation_is_known"] > 4.0
    assert "hyperparameter_search_not_counted" not in facts["caveats"]


def test_clients_are_charged_for_what_they_do():
    named = _named_clients()
    score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0, held_out=0.3)
    split = score.split(tfdp_fl.datasets.as_federated(named))
    training, held_out = split.training.client_ids, split.held_out.client_ids
    assert len({*training, *held_out}) == len(training) + len(held_out) == 100
    noise, score = [], tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0)
    # The ids of the others are places: a client more would move all after it.
    for clients, events in ((named, 2), (toy.clients(100), 1)):
        search = _search(score=score)
        train = _trained(lambda trial: noise.append(trial.mechanism.noise_multiplier))
        with train, _trials(1):
            _fit(search, clients)
        assert search.epsilon(_DELTA) <= 4.0
        ((charge, _),) = search._account.central.charges
        assert len(charge.event.events) == events
        said = search.privacy_statement(format="dict")["caveats"]
        assert ("search_places_are_ids" in said) == (clients is not named)
    assert noise[1] > noise[0]


def test_a_private_score_runs_and_its_noise_is_fresh_in_every_trial():
    # Wide bounds: a mean at their ends could be there twice.
    score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0, bounds=(-1e2, 1e2))
    search, seen = _search(score=score), []
    scored = toy.around(tfdp_fl.PrivateScore, "__call__", after=seen.append)
    with scored, _trials(3), _trained():
        _fit(search, _named_clients())
    assert len(set(seen)) == 3


class _WithoutNoise(tfdp_fl.PrivateScore):
    def __call__(self, *_):
        return 0.0


def test_private_scores_that_are_refused_before_anything():
    with pytest.raises(ValueError, match="noise_multiplier"):
        tfdp_fl.PrivateScore("accuracy", noise_multiplier=0.0)
    with pytest.raises(TypeError, match="score must be a PrivateScore itself"):
        _search(score=_WithoutNoise("accuracy", noise_multiplier=5.0))
    # Too little noise for the target; nobody on one side, by their ids.
    few = dict(list(_named_clients().items())[:2])
    for noise, clients, message in (
        (0.3, _named_clients(), "cannot be met"),
        (5.0, few, "clients must be more"),
    ):
        score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=noise)
        search = _search(score=score)
        with pytest.raises(ValueError, match=message):
            _fit(search, clients)
        assert search.epsilon(_DELTA) == 0.0


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *(("Accuracy", "max"), ("top_5", "max"), ("cosine_similarity", "max")),
        *(("loss", "min"), ("hinge", "min"), ("huber", "min"), ("my_number", None)),
        *(("brier_score", "min"), ("anomaly_score", None), ("f1_score", "max")),
    ],
)
def test_a_metric_says_which_is_better_or_is_asked(metric, mode):
    # Losses whose names do not say "loss" were maximised.
    if mode is not None:
        assert _public(metric).mode == mode
        return
    with pytest.raises(ValueError, match="mode must be 'max' or 'min' for the metric"):
        _public(metric)


def test_clients_examples_are_not_public():
    with pytest.raises(TypeError, match="score"):
        _search(score=lambda model: 1.0)  # Of whatever it closes over.
    with pytest.raises(TypeError, match="PrivateScore"):
        tfdp_fl.PublicScore(toy.clients(), None, "accuracy")
    x, y = toy.arrays(400)
    theirs = tfdp_fl.PublicScore(x[50:150].astype(np.float64), y[50:150], "accuracy")
    # Whether it begins must not depend on who is there.
    with pytest.warns(RuntimeWarning, match="examples are all the training clients'"):
        _fit(_search(score=theirs), toy.clients(40))
    with pytest.raises(ValueError, match=r"every candidate compiles.*got 'auc'"):
        _fit(_search(score=_public("auc")), toy.clients(40))
    words = np.array([[f"é {10 ** (k % 5)}", str(k)] for k in range(60)])
    clients = {k: (words[k : k + 30], y[:30]) for k in (0, 30)}
    theirs = tfdp_fl.PublicScore(words[:25].astype(object), y[:25], "loss")
    with pytest.warns(RuntimeWarning, match="examples are all the training clients'"):
        split = theirs.split(tfdp_fl.datasets.as_federated(clients))
    assert split.training.num_clients == 2


_SCHEDULED = tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=(1.0, 2.0))


_MEDIAN = tfdp_fl.MedianClipping(noise_multiplier=1.0)


class _OwnClip(tfdp_fl.MedianClipping):
    """If it raises an error, that tells of exact norms."""

    def clip_to_cohort(self, norms, round):
        return super().clip_to_cohort(norms, round)

    def round_event(self, round_index, context):
        return super().round_event(round_index, context)


_OWN_CLIP = _OwnClip(noise_multiplier=1.0, median_noise_multiplier=1.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: None, "build.*NoneType"),
        (lambda: tfdp_fl.DPFederatedModel(toy.dense(), _MEDIAN, 5), "compile must be"),
        (lambda: _build(0.1, sampling="fixed_size"), "sampling='poisson'"),
        (lambda: _build(0.1, on_client_failure="abort"), "reveal that a client failed"),
        (lambda: _build(0.1, tfdp_fl.NoPrivacy()), "central mechanism"),
        (lambda: _build(0.1, tfdp_fl.LocalDP(**_FIXED)), "central mechanism"),
        (lambda: _build(0.1, _SCHEDULED), "constant noise_multiplier"),
        (lambda: _build(0.1, _MEDIAN), "exact median"),
        (lambda: _build(0.1, _OWN_CLIP), "package's own clip_to_cohort"),
    ],
)
def test_what_cannot_be_counted_is_refused(make, message):
    search = _search(lambda rate: make())
    with pytest.raises((TypeError, ValueError), match=message):
        _fit(search)
    assert search.epsilon(_DELTA) == 0.0


def test_a_model_that_knows_clients_already():
    fed = _build(0.1)
    toy.fit(fed)
    for build in (lambda rate: fed, lambda rate: _wrapped(fed.model)):
        with pytest.raises(ValueError, match="already trained"):
            _fit(_search(build, [{"rate": 1}]))
    model, server = toy.dense(), keras.optimizers.SGD(1.0)
    for build, message in (
        (lambda rate: _wrapped(model), "shares variables"),
        (lambda rate: _wrapped(toy.dense(), server_optimizer=server), "a new one, got"),
    ):
        with pytest.raises(ValueError, match=message):
            _fit(_search(build, _CANDIDATES))


def test_what_would_make_every_trial_fail_is_said_before_the_charge():
    # Else one client with such a label would decide that the model is untrained.
    clients, search = _named_clients(), _search(candidates=[{"rate": 0.1}])
    clients["anna 3"][1][0] = 99
    with pytest.raises(ValueError, match="labels must be"):
        _fit(search, clients)
    assert search.epsilon(_DELTA) == 0.0

    class FailsLate(tfdp_fl.FixedClipping):
        def add_noise(self, update, stddev, noise_state):
            raise RuntimeError("no noise")

        def round_event(self, round_index, context):
            return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    search = _search(lambda rate: _build(rate, FailsLate(**_FIXED)))
    with pytest.raises(RuntimeError, match="no noise"):
        _fit(search)
    assert search.epsilon(_DELTA) == 0.0


def test_a_cohort_that_fails_as_a_whole_ends_no_trial():
    # Else one client that does not fail would decide that a model is found.
    kind, inputs = keras.layers, keras.layers.Input((1,), dtype="int32")
    layers = [inputs, toy.Table(9, 3), kind.Flatten(), kind.Dense(3)]
    y = toy.arrays(10)[1]
    public = tfdp_fl.PublicScore(np.zeros([10, 1], np.int32), y, "accuracy")
    search = _search(lambda rate: _wrapped(keras.Sequential(layers)), score=public)
    with _trials(1):
        _fit(search, {k: (np.full([10, 1], 99, np.int32), y) for k in range(100)})
    assert search.best is not None


@pytest.mark.parametrize("number", [0, 5])
def test_build_is_called_before_all_trials_and_learns_no_number(number):
    calls, begun = [], []

    def build(rate):
        assert begun == []
        calls.append(rate)
        return _build(rate)

    with _trained(begun.append), _trials(number):
        _fit(_search(build, _CANDIDATES))
    assert calls == [0.5, 0.1, 0.0]
    assert len(begun) == number


def test_a_trial_begins_as_its_candidate_began_and_traces_nothing_anew():
    def build(rate):
        mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=1, count_noise_stddev=5)
        momentum = keras.optimizers.SGD(rate, momentum=0.9)
        compiled = {"optimizer": "sgd", "server_optimizer": momentum}
        compiled["metrics"] = ["accuracy"]
        return toy.federated(mechanism, toy.dropout, 10, "poisson", compiled)

    seen, fit = [], tfdp_fl.DPFederatedModel.fit

    def watched(self, *args, **kwargs):
        before = [v.numpy() for v in self.model.variables]
        history = fit(self, *args, **kwargs)
        iterations = int(self.engine.server.state[0].numpy())
        facts = history.history["clip_norm"][0], iterations, self.engine
        seen.append((before, facts))
        return history

    with mock.patch.object(tfdp_fl.DPFederatedModel, "fit", watched), _trials(3):
        _fit(_search(build))
    assert len(seen) == 3
    for before, facts in seen:
        toy.assert_same(before, seen[0][0])
        assert facts == seen[0][1]
    assert facts[1] == 2  # Iterations: of this trial alone.


def _everything_seen(number, folder):
    """Returns all that a search of so many trials leaves to be seen."""
    printed, handler = io.StringIO(), mock.Mock(level=0)

    def train(trial):
        print("trial")
        os.write(2, b"trial")  # As TensorFlow's own code does.
        logging.getLogger("tensorflow").warning("trial")
        warnings.warn("trial", stacklevel=1)

    logging.getLogger().addHandler(handler)
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True) as warned,
        _trained(train),
        _trials(number),
    ):
        warnings.simplefilter("always")
        model = _fit(_search(), directory=folder)
    logging.getLogger().removeHandler(handler)
    assert getattr(model, "history", None) is None
    made = datetime.datetime.fromisoformat(json.loads(_lines(folder)[0])["created"])
    for path in (folder, *folder.iterdir()):  # Nor when the trials were over.
        assert path.stat().st_mtime == pytest.approx(made.timestamp(), abs=1e-3)
    assert [json.loads(line).get("time", "") for line in _lines(folder)] == [""] * 3
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    return printed.getvalue(), handler.handle.call_count, len(warned), files


def test_the_number_of_trials_is_nowhere(tmp_path, capfd):
    one, six, none = (_everything_seen(n, tmp_path / str(n)) for n in (1, 6, 0))
    assert "trial" not in capfd.readouterr().err
    assert one[:3] == ("", 0, 0)
    assert sorted(one[3]) == ["ledger.jsonl", "search.npz"]
    assert one == six
    none[3]["search.npz"] = one[3]["search.npz"]  # "null" for the best's place.
    assert one == none
    for option in ("callbacks", "seed", "validation_data", "verbose", "audit"):
        with pytest.raises(TypeError, match=option):
            _fit(_search(), **{option: None})


def test_searches_in_threads_leave_the_process_as_it_was(capfd):
    meet, trained = threading.Barrier(2), []

    def waits(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(0.5)  # Never both inside, so it breaks.
        trained.append(self)

    searches = [_search(lambda rate: _wrapped(toy.dense())) for _ in range(2)]
    with _trials(2), mock.patch.object(trial.Trial, "_train", waits):
        threads = [threading.Thread(target=_fit, args=(s,)) for s in searches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(trained) == 4
    assert meet.broken
    assert logging.root.manager.disable == logging.NOTSET
    print("still here", flush=True)
    os.write(1, b"and here")
    said = capfd.readouterr().out
    assert "still here" in said
    assert "and here" in said


def test_nothing_of_another_trial_can_be_had():
    made = []

    def build(rate):
        made.append(_build(rate))
        return made[-1]

    search, run = _search(build, _CANDIDATES), trial.Trial.run
    runs = mock.patch.object(trial.Trial, "run", autospec=True, side_effect=run)
    with _trials(3), _places(0, 1, 2), runs as ran:
        model = _fit(search)
    assert ran.call_count == 3
    untrained = _build(0.1)
    for fed in made:
        if fed.model is not model:
            toy.assert_same(fed, untrained)
        assert fed.model.history is fed.run is None
        for use in (lambda fed=fed: fed.epsilon(_DELTA), lambda fed=fed: toy.fit(fed)):
            with pytest.raises(ValueError, match="already trained"):
                use()
    assert model is made[_CANDIDATES.index(search.best)].model
    with pytest.raises(ValueError, match="already trained"):
        toy.fit(_wrapped(model))


@pytest.mark.parametrize(
    "error, number", [(RuntimeError("x"), 3), (MemoryError(), 3), (None, 0)]
)
def test_trials_that_fail_or_none_are_the_untrained_model(error, number):
    search = _search(distribution="poisson")
    with _trained(mock.Mock(side_effect=error)), _trials(number):
        model = _fit(search)
    assert search.best is None
    toy.assert_same(model, _build(0.1))
    assert search.epsilon(_DELTA) > 3.9


@pytest.mark.parametrize(
    "kernels, places, first",
    [
        ([np.full((8, 3), np.nan), np.full((8, 3), 0.5)], (0, 1), 0.5),
        ([scale * np.eye(8, 3) for scale in (0.1, 3, 0.2, 0.3)], (0, 1, 2, 0), 3.0),
    ],
)
def test_the_best_is_returned_as_it_was_scored(kernels, places, first):
    coming = iter(kernels)
    search = _search(candidates=_CANDIDATES, score=_public("loss"))
    train = _trained(lambda trial: _set(trial, next(coming)))
    with train, _trials(len(kernels)), _places(*places):
        model = _fit(search)
    assert search.best == {"rate": 0.1}
    assert _first(model) == first


def _lines(folder):
    return (folder / "ledger.jsonl").read_text("utf-8").splitlines(keepends=True)


def _told(folder, accountant="pld"):
    path = folder / "ledger.jsonl"
    return accounting.epsilon_from_ledger(path, _DELTA, accountant)


def test_one_line_before_the_first_trial_or_nothing_is_trained(tmp_path):
    lines, search, error = [], _search(), accounting.LedgerWriteError
    failing = mock.patch.object(accounting.PrivacyLedger, "record", side_effect=error)
    with _trained(lambda trial: lines.append(_lines(tmp_path))), _trials(3):
        with failing, pytest.raises(error):
            _fit(search, directory=tmp_path / "full")
        assert (lines, search.epsilon(_DELTA)) == ([], 0.0)
        _fit(search, directory=tmp_path)
    assert [len(each) for each in lines] == [2, 2, 2]
    assert _lines(tmp_path)[:2] == lines[0]
    assert [json.loads(each)["kind"] for each in _lines(tmp_path)[2:]] == ["ended"]
    assert _told(tmp_path) == search.epsilon(_DELTA)


def test_runs_before_and_after_count_together(tmp_path):
    ledger = tfdp_fl.callbacks.Ledger(tmp_path / "ledger.jsonl", append=True)
    toy.fit(_build(0.1), 2, [ledger], toy.clients(100))
    search = _search()
    with _trained():
        _fit(search, directory=tmp_path)
    assert _told(tmp_path, "rdp") == search.epsilon(_DELTA) > 4.01
    fed = _build(0.1)
    toy.fit(fed, 1, [ledger], toy.clients(100))
    assert fed.epsilon(_DELTA) > search.epsilon(_DELTA)
    toy.fit(fed, 3, [ledger], toy.clients(100))  # The same run, between two searches.
    with _trained():
        _fit(search, directory=tmp_path)
    assert _told(tmp_path, "rdp") == search.epsilon(_DELTA) > fed.epsilon(_DELTA)
    # Nor does the statement take another delta than the one that is asked for.
    with pytest.raises(ValueError, match="delta"):
        search.privacy_statement(0.0)


def test_a_search_that_another_process_ended_meanwhile(tmp_path):
    assert _broken(_search(), directory=tmp_path)
    others, models = [_search()], []

    def last(_):
        while others:
            models.append(_fit(others.pop(), resume_from=tmp_path))

    meanwhile = toy.around(SearchDirectory, "_check", after=last)
    with _trained(lambda one: _set(one, np.random.normal(size=(8, 3)))), meanwhile:
        toy.assert_same(_fit(_search(), resume_from=tmp_path), models[0])


def _broken(search, number=3, trained=None, **options):
    """Runs a search until its training breaks; returns whether it did."""

    def train(trial):
        if trained is not None:
            trained.append(trial)
        raise KeyboardInterrupt

    with _trained(train), _trials(number):
        try:
            _fit(search, **options)
        except KeyboardInterrupt:
            return True
    return False


def test_a_search_that_is_resumed_until_it_likes_the_result(tmp_path):
    search, trained = _search(), []
    assert _broken(search, 3, trained, directory=tmp_path)
    for _ in range(2):  # Another process, with another number in mind.
        assert _broken(_search(), 50, trained, resume_from=tmp_path)
    last = _search()
    assert not _broken(last, 50, trained, resume_from=tmp_path)
    assert len(trained) == 3  # Each was run once, and never again.
    assert last.best is None
    assert last.epsilon(_DELTA) == search.epsilon(_DELTA)
    lines = _lines(tmp_path)
    assert [json.loads(line)["kind"] for line in lines[1:]] == ["round", "ended"]
    # It has ended: the same again, at no cost.
    for again in (_search(), last):
        with _trained(lambda _: trained.append(None)):
            _fit(again, resume_from=tmp_path)
        assert len(trained) == 3
        assert again.epsilon(_DELTA) == search.epsilon(_DELTA)
    assert _lines(tmp_path) == lines
    # Another search may follow it.
    with _trained():
        _fit(_search(), directory=tmp_path)
    assert len(_lines(tmp_path)) == 5


@pytest.mark.parametrize("killed", [None, "write", "record_end"])
def test_an_older_state_beside_the_line_of_the_end_is_refused(tmp_path, killed):
    state, kernel = tmp_path / "search.npz", lambda one: _set(one, next(coming))
    coming = iter(np.random.default_rng(0).normal(size=(50, 8, 3)))
    assert _broken(_search(), 3, directory=tmp_path)
    older = state.read_bytes()
    where = {"write": SearchDirectory, "record_end": accounting.PrivacyLedger}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_trained(kernel))
        if killed is not None:
            dies = mock.patch.object(where[killed], killed, side_effect=MemoryError)
            if killed == "write":  # The last one: two trials were left.
                write = SearchDirectory.write

                def last(*given):
                    if given[1].ended:
                        raise MemoryError
                    write(*given)

                dies = mock.patch.object(SearchDirectory, "write", last)
            with dies, pytest.raises(MemoryError):
                _fit(_search(), resume_from=tmp_path)
            # Nobody has the result: it is made, or read, once more.
        model = _fit(_search(), resume_from=tmp_path)
        toy.assert_same(model, _fit(_search(), resume_from=tmp_path))
    lines, result = _lines(tmp_path), state.read_bytes()
    assert [json.loads(line)["kind"] for line in lines[1:]] == ["round", "ended"]
    state.write_bytes(older)
    with _trained(kernel), pytest.raises(ValueError, match="an older state of one"):
        _fit(_search(), resume_from=tmp_path)
    assert _lines(tmp_path) == lines
    state.write_bytes(result)
    toy.assert_same(model, _fit(_search(), resume_from=tmp_path))


def test_a_copy_of_a_search_is_not_ended_twice_for_one_charge(tmp_path):
    search = _search()
    assert _broken(search, 3, directory=tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    with _trained(lambda one: _set(one, np.ones([8, 3]))):
        _fit(search, resume_from=tmp_path / "one")
    with pytest.raises(ValueError, match="an older state of one"):
        _broken(search, resume_from=tmp_path / "other")
    # Nor is one that another process has ended: its ledger names another result.
    coming = iter(np.random.default_rng(0).normal(size=(50, 8, 3)))
    with _trained(lambda one: _set(one, next(coming))):
        _fit(_search(), resume_from=tmp_path / "other")
    with pytest.raises(ValueError, match="an older state of one"):
        _fit(search, resume_from=tmp_path / "other")
    # Who has seen neither takes one of them.
    new = _search()
    _fit(new, resume_from=tmp_path / "one")
    with pytest.raises(ValueError, match="an older state of one"):
        _fit(new, resume_from=tmp_path / "other")


def test_the_best_so_far_and_the_beginning_stay(tmp_path):
    begun = []

    def train(trial):
        begun.append(trial.model.get_weights())
        if len(begun) == 2:
            raise KeyboardInterrupt
        _set(trial, np.eye(8, 3) * (6 - len(begun)))

    def build(rate):  # Begins elsewhere in every process.
        fed, normal = _build(rate), np.random.default_rng().normal
        fed.set_weights([normal(size=w.shape) for w in fed.get_weights()])
        return fed

    with _trained(train), _trials(3):
        with pytest.raises(KeyboardInterrupt):
            _fit(_search(build), directory=tmp_path)
        assert (tmp_path / "search.npz").stat().st_mode & 0o777 == 0o600
        model = _fit(_search(build), resume_from=tmp_path)
    assert len(begun) == 3
    for weights in begun:
        toy.assert_same(weights, begun[0])
    assert _first(model) == 5.0


def test_what_is_changed_on_resume_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(accounting, "calibrate", lambda *_, **__: 20.0)
    assert _broken(_search(), directory=tmp_path)
    for made, given, name in (
        ({"candidates": _CANDIDATES[:1]}, {}, "candidates"),
        ({"expected_trials": 30}, {}, "expected_trials"),
        ({"distribution": "poisson"}, {}, "distribution"),
        ({"target_epsilon": 8.0}, {}, "target_epsilon"),
        ({"score": _public("loss")}, {}, "score"),
        ({}, {"clients": toy.clients(90)}, "clients"),
        ({}, {"shuffle": True}, "shuffle"),
        ({"build": lambda rate: _wrapped(toy.dense())}, {}, "build"),
    ):
        search, message = _search(**made), f"{name} must be as in the inter"
        with _trained(), pytest.raises(ValueError, match=message):
            _fit(search, resume_from=tmp_path, **given)
        assert search.epsilon(_DELTA) == 0.0
    # Nor does a new search take its place.
    with _trained(), pytest.raises(ValueError, match="resume_from"):
        _fit(_search(), directory=tmp_path)


@pytest.mark.parametrize("how", ["deleted", "cut", "in use"])
def test_a_ledger_that_is_not_that_of_the_search_alone(tmp_path, how):
    assert _broken(_search(), directory=tmp_path)
    ledger, lines = tmp_path / "ledger.jsonl", _lines(tmp_path)
    held, error = contextlib.nullcontext(), accounting.LedgerTamperedError
    if how == "in use":  # By another process.
        held = accounting.PrivacyLedger(ledger, mode="append")
        error = accounting.LedgerInUseError
    elif how == "cut":
        ledger.write_text(lines[0])
    else:
        ledger.unlink()
    with held, _trained(), pytest.raises(error):
        _fit(_search(), resume_from=tmp_path)


def test_a_ledger_that_no_search_can_be_counted_with_stays_as_it_is(tmp_path):
    sizes = {"num_clients": 100, "clients_per_round": 10}
    event = dp_accounting.GaussianDpEvent(2.0)
    charge = accounting.RoundCharge(sampling="fixed_size", event=event, **sizes)
    with accounting.PrivacyLedger(tmp_path / "ledger.jsonl") as ledger:
        ledger.record(0, charge, 10)
    before, spent = _lines(tmp_path), _told(tmp_path, "rdp")
    with _trained(), pytest.raises(ValueError, match="relation"):
        _fit(_search(), directory=tmp_path)
    assert (_lines(tmp_path), _told(tmp_path, "rdp")) == (before, spent)
    assert os.listdir(tmp_path) == ["ledger.jsonl"]  # No search waits to be resumed.


def test_a_crash_before_the_charge_is_charged_on_resume(tmp_path):
    error, search = KeyboardInterrupt, _search()
    ledger = accounting.PrivacyLedger
    interrupted = mock.patch.object(ledger, "record", side_effect=error)
    with _trained():
        with interrupted, pytest.raises(error):
            _fit(_search(), directory=tmp_path)
        _fit(search, resume_from=tmp_path)
    assert _told(tmp_path) == search.epsilon(_DELTA) > 3.9


def test_a_fit_within_a_fit():
    search, refused = _search(), []

    def train(trial):
        with pytest.raises(RuntimeError, match="while a fit of the same search"):
            _fit(search)
        refused.append(trial)

    with _trained(train), _trials(1):
        _fit(search)
    assert len(refused) == 1


@pytest.mark.parametrize("readable", [0, 1])
def test_a_private_score_of_clients_that_nobody_can_read_is_a_number(readable):
    ids = [f"anna {k}" for k in range(100)]
    score = tfdp_fl.PrivateScore("accuracy", noise_multiplier=4.0)
    held_out = score.split(tfdp_fl.FederatedDataset.from_client_fn(ids, len)).held_out
    known = {*ids} - {*held_out.client_ids[readable:]}
    clients = tfdp_fl.FederatedDataset.from_client_fn(
        ids, lambda k: toy.arrays(10) if k in known else 1 / 0
    )
    search = _search(score=score)
    with _trials(1), _trained():
        _fit(search, clients, verbose=0)
    assert search.best == _CANDIDATES[1]


def test_a_search_writes_no_state_into_the_directory_of_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    state = private_search.SearchState(plan={}, trials=1, initial=[], weights=[])
    target = {"resumes": False, "target": (1.0, 1e-5)}
    files, other = SearchDirectory("search"), SearchDirectory(tmp_path / "search")
    with files.lock_ledger(**target):
        os.chdir(tmp_path / "elsewhere")
        files.write(state)
        os.rename(tmp_path / "search", tmp_path / "moved")
        with (
            other.lock_ledger(**target),
            pytest.raises(accounting.LedgerMovedError, match="or saved"),
        ):
            files.write(state)
    assert not [*(tmp_path / "search").glob("*.npz")]
    assert not [*(tmp_path / "elsewhere").iterdir()]
