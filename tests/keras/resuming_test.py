"""An interrupted and resumed run goes on where it was, bit for bit.

But for the draws of seeded rounds, which a resumed run makes anew; see
`toy.same_draws_when_resumed`. Checkpoints are whole or not there.
"""

import contextlib
import errno
import hashlib
import io
import os
import pathlib
import shutil
import stat
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting, engine
from tfdp_fl.keras import checkpoint, federated_training, round_loop
from tfdp_fl.keras import model as model_lib
from tfdp_fl.keras.callbacks import (
    Ledger,
    PrivacyBudget,
    RoundCheckpoint,
)

_DELTA = 1e-3
_ROUNDS = 6
_TRAINED = "already trained on clients"
# Of the files that put a checkpoint into a model, the functions that do it.
_RESTORING = ("restore", "fit", "mark_owner")
_SGD, _ADAM = tf.keras.optimizers.SGD, tf.keras.optimizers.Adam


_FIT = {"batch_size": 4, "shuffle": True}


def _fit(fed, rounds=_ROUNDS, callbacks=(), **options):
    return toy.fit(fed, rounds, callbacks, **_FIT, **options)


def _adaptive():
    averaging = _SGD(1.0, momentum=0.9, use_ema=True, ema_momentum=0.6)
    return toy.federated(
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.8),
        *(toy.dropout, 15, "poisson"),
        max_parallel_clients=2,
        compile_options={"server_optimizer": averaging},
    )


def _local():
    return toy.federated(
        tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=_DELTA, max_participations=4),
        compile_options={"optimizer": _ADAM(0.01)},
    )


def _median():
    noise = (0.5, 0.7, 0.5) * 2
    return toy.federated(
        tfdp_fl.MedianClipping(noise_multiplier=noise, median_noise_multiplier=2.0),
        *(toy.normalized, 20, "shuffled"),
        compile_options={"server_optimizer": _ADAM(0.05)},
    )


def _shuffled():
    return toy.federated(clients_per_round=10, sampling="shuffled")


def _correlated(min_separation=2):
    groups = {
        "strategy": "banded:1",
        "rounds": 12,
        "min_separation": min_separation,
    }
    mechanism = tfdp_fl.CorrelatedNoise(clip_norm=1, noise_multiplier=1, **groups)
    return toy.federated(mechanism, None, 10, "cyclic")


def _copy_as_of(directory, round_index):
    """Copies a finished run as if it had been killed after a round."""
    copy = shutil.copytree(directory, directory.with_name(f"killed-{round_index}"))
    for later in range(round_index + 1, 10):
        (copy / f"round-{later:08}.npz").unlink(missing_ok=True)
    return copy


@pytest.mark.parametrize("make", [_adaptive, _local, _median])
@toy.same_draws_when_resumed()
def test_a_resumed_run_ends_in_the_same_weights(tmp_path, make):
    whole = make()
    keeper = RoundCheckpoint(tmp_path / "run", keep=99)
    falling = tf.keras.callbacks.LearningRateScheduler(lambda _, rate: rate * 0.9)
    _fit(whole, callbacks=[keeper, falling], seed=5)
    copy = _copy_as_of(tmp_path / "run", 3)
    weights, spent = whole.get_weights(), whole.epsilon(_DELTA)
    resumed = make()
    history = _fit(resumed, callbacks=[falling], seed=5, resume_from=copy)
    assert history.epoch == [3, 4, 5]
    assert resumed.rounds == _ROUNDS
    toy.assert_same(weights, resumed)
    # Rounds 3 to 5 may have been seen before the crash: charged twice.
    contents = accounting.PrivacyLedger.read(copy / "ledger.jsonl")
    charged = [entry.round_index for entry in contents.entries]
    assert charged == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert resumed.epsilon(_DELTA) > spent
    assert resumed.epsilon(_DELTA) == pytest.approx(contents.epsilon(_DELTA), rel=1e-9)
    caveats = resumed.privacy_statement(_DELTA, format="dict")["caveats"]
    assert caveats.keys() >= {"rounds_charged_twice", "seed_given"}


def test_a_resumed_run_knows_the_plan_that_its_checkpoint_does_not(tmp_path):
    # Killed before the second checkpoint, it was said to have planned what it ran.
    directory, copy = tmp_path / "run", tmp_path / "killed"

    class Reader(tfdp_fl.callbacks.FederatedCallback):
        def allow_round(self, round_index):
            if round_index == 2 and not copy.exists():
                shutil.copytree(directory, copy)
            return not copy.exists()

    whole, resumed = toy.federated(), toy.federated()
    _fit(whole, callbacks=[RoundCheckpoint(directory, every=100), Reader()])
    assert [path.name for path in copy.glob("*.npz")] == ["round-00000000.npz"]
    budget = PrivacyBudget(whole.epsilon(_DELTA), _DELTA)  # Allows no round more.
    _fit(resumed, callbacks=[budget], resume_from=copy)
    said = [fed.privacy_statement(_DELTA, "dict") for fed in (whole, resumed)]
    assert [facts["rounds"] for facts in said] == [2, 2]
    assert {facts["planned_rounds"] for facts in said} == {_ROUNDS}

    # Whether one did, before anything was charged, no file can tell.
    for sampling in ("fixed_size", "poisson"):
        fed = toy.federated(sampling=sampling)
        _fit(fed)
        caveats = fed.privacy_statement(_DELTA, format="dict")["caveats"]
        assert ("cohort_redrawn" in caveats) == (sampling == "fixed_size")


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_a_cohort_that_an_ended_process_drew_is_never_released_by_others(
    tmp_path, sampling
):
    # Each would be charged as a draw of its own, and all be releases of one.
    drawn = []

    def seen(own, clients, inputs):
        drawn.append(tuple(inputs.positions))
        if len(drawn) == 1:
            raise KeyboardInterrupt

    with toy.around(engine.CohortEngine, "collect", seen):
        first = toy.federated(sampling=sampling)
        with pytest.raises(KeyboardInterrupt):
            _fit(first, callbacks=[RoundCheckpoint(tmp_path / "run")])
        copies = [
            shutil.copytree(tmp_path / "run", tmp_path / f"copy {k}") for k in (1, 2)
        ]
        for copy in copies:
            _fit(toy.federated(sampling=sampling), resume_from=copy)
    assert len(drawn) == len(set(drawn)) == 1 + 2 * _ROUNDS


def _put_back(directory, rounds):
    """Cuts the ledger of a directory off after some rounds."""
    ledger = directory / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[: 1 + rounds]))
    return directory


def _decay(rate):
    return tf.keras.optimizers.schedules.ExponentialDecay(rate, 100, 0.9)


@pytest.mark.parametrize("before, after", [(0.1, 0.1), (_decay(0.1), _decay(0.5))])
def test_a_lost_round_never_has_its_noise_or_cohort_again(tmp_path, before, after):
    # Else the difference of the two releases would have no noise.
    drawn = []

    def seen(own, clients, inputs):
        drawn.append((tuple(inputs.seed), tuple(inputs.positions)))

    def trained(rate, path=None, callbacks=()):
        compiled = {"optimizer": _SGD(rate)}
        # (Poisson: the statement of fixed sizes takes seconds.)
        fed = toy.federated(sampling="poisson", compile_options=compiled)
        with toy.around(engine.CohortEngine, "collect", seen):
            _fit(fed, callbacks=callbacks, seed=5, resume_from=path)

    trained(before, callbacks=[RoundCheckpoint(tmp_path / "run", keep=99)])
    killed = _copy_as_of(tmp_path / "run", 3)
    # A copy of which the ledger was put back knows of no lost rounds.
    put_back = _put_back(shutil.copytree(killed, tmp_path / "put back"), 3)
    trained(after, killed)
    trained(after, put_back)
    assert len(drawn) == _ROUNDS + 2 * (_ROUNDS - 3)
    for each in zip(*drawn, strict=True):
        assert len(set(each)) == len(drawn)


@pytest.mark.parametrize("make", [toy.federated, _local])
def test_rounds_that_only_another_ledger_tells_of_are_counted(tmp_path, make):
    fed, resumed = make(), make()
    other = Ledger(tmp_path / "other.jsonl")
    toy.fit(fed, 4, [RoundCheckpoint(tmp_path / "run", keep=99), other])
    copy = _put_back(_copy_as_of(tmp_path / "run", 2), 2)
    toy.fit(resumed, 4, resume_from=copy)
    assert (resumed.rounds, resumed.account.rounds) == (4, 6)
    toy.fit(resumed, 1, [other])
    known = accounting.PrivacyLedger.read(other.path)
    assert len(known.entries) == 7
    # Of a local guarantee it may tell of more, and never of less.
    assert fed.epsilon(_DELTA) < resumed.epsilon(_DELTA) - 1e-3
    assert resumed.epsilon(_DELTA) <= known.epsilon(_DELTA) + 1e-9


def test_every_later_round_is_in_all_ledgers_of_the_run(tmp_path):
    shared, both = Ledger(tmp_path / "shared", append=True), toy.federated()
    toy.fit(both, 2, [shared])
    fed, path = toy.federated(), tmp_path / "run"
    toy.interrupted(fed, 1, 4, [RoundCheckpoint(path), Ledger(shared.path, True)])
    resumed = toy.federated()
    for rounds, resumes in ((4, {"resume_from": path}), (2, {})):
        toy.fit(resumed, rounds, [RoundCheckpoint(path)] if resumes else [], **resumes)
        for known in (shared.path, path / "ledger.jsonl"):
            read = accounting.PrivacyLedger.read(known)
            assert len(read.by_run()[resumed.run.run_id]) == resumed.rounds
    told = accounting.epsilon_from_ledger(shared.path, _DELTA)
    assert told == pytest.approx(resumed.epsilon(_DELTA), rel=1e-9)
    assert told > both.epsilon(_DELTA) + 1.0


@pytest.mark.parametrize("make", [toy.federated, _local, _correlated])
def test_a_directory_and_its_copy_add_up_as_soon_as_both_are_seen(tmp_path, make):
    path, copies = tmp_path / "run", [tmp_path / "copy 1", tmp_path / "copy 2"]
    toy.interrupted(make(), 1, 6, [RoundCheckpoint(path)])
    for copy in copies:
        shutil.copytree(path, copy)
    original, hidden, seeing = make(), make(), make()
    toy.fit(original, 6, [RoundCheckpoint(path)], resume_from=path)
    path.rename(tmp_path / "away")
    toy.fit(hidden, 6, [RoundCheckpoint(copies[0])], resume_from=copies[0])
    assert hidden.account.rounds == 6
    (tmp_path / "away").rename(path)
    ledger = Ledger(path / "ledger.jsonl", append=True)
    toy.fit(hidden, 1, [ledger])
    assert hidden.account.rounds == 2 + 4 + 4 + 1
    toy.fit(original, 1, [ledger])
    assert original.account.rounds == 12
    toy.fit(seeing, 6, resume_from=copies[1])
    assert seeing.account.rounds == 16
    for fed in (hidden, original, seeing):
        assert "rounds_charged_twice" in fed.run.caveats
    told = accounting.PrivacyLedger.read(ledger.path)
    assert len(told.entries) == 16
    assert told.epsilon(_DELTA) >= seeing.epsilon(_DELTA) - 1e-9
    assert seeing.epsilon(_DELTA) > original.epsilon(_DELTA) > hidden.epsilon(_DELTA)


def test_a_copy_goes_on_with_noise_of_its_own(tmp_path):
    path, fed, copied = tmp_path / "run", _correlated(), _correlated()
    toy.fit(fed, 3, [RoundCheckpoint(path)])
    copy = shutil.copytree(path, tmp_path / "copy")
    shutil.rmtree(path)
    shutil.copytree(copy, path)
    position = int(fed.run.mechanism_state.noise_state.round_index)
    assert position == 3
    # Nothing tells whether the original goes on.
    toy.fit(copied, 3, resume_from=copy)
    assert int(copied.run.mechanism_state.noise_state.round_index) == 0
    toy.fit(copied, 1)
    # The original learns from its ledger that the copy went on.
    with pytest.raises(ValueError, match="does not know of"):
        toy.fit(fed, 1, [RoundCheckpoint(path)])
    toy.fit(fed, 1)
    assert int(fed.run.mechanism_state.noise_state.round_index) == 1
    assert fed.account.rounds == 5


def test_branches_of_one_noise_memory_are_charged_from_its_beginning(tmp_path):
    # A backup that is put back at the same path looks like the run itself.
    path, ends = tmp_path / "run", [tmp_path / f"end {k}" for k in range(3)]
    toy.interrupted(_correlated(4), 0, 4, [RoundCheckpoint(path)])
    backup = shutil.copytree(path, tmp_path / "backup")
    for end in ends:
        shutil.rmtree(path)
        shutil.copytree(backup, path)
        toy.fit(fed := _correlated(4), 4, resume_from=path)
        assert int(fed.run.mechanism_state.noise_state.round_index) == 4
        shutil.copytree(path, end)
    alone = fed.epsilon(_DELTA, "pld")
    joined = [Ledger(end / "ledger.jsonl", append=True) for end in ends]
    toy.fit(fed, 1, [PrivacyBudget(1e-6, _DELTA), *joined])
    # The noise is independent (C = I), so a client was in three rounds at z = 1.
    expected = accounting.epsilon_of_mu_squared(3.0, _DELTA)
    assert alone < expected - 1.0
    assert fed.epsilon(_DELTA, "pld") == pytest.approx(expected, rel=1e-3)
    for end in ends:
        told = accounting.epsilon_from_ledger(end / "ledger.jsonl", _DELTA, "pld")
        assert told == pytest.approx(expected, rel=1e-3)


def test_noise_memory_is_let_go_after_an_interrupt_in_between(tmp_path):
    path, fed = tmp_path / "run", _correlated()
    toy.fit(fed, 1, [RoundCheckpoint(path)])
    toy.fit(resumed := _correlated(), 1, resume_from=path)
    toy.fit(resumed, 1)
    with (
        toy.around(accounting.PrivacyAccount, "_count", after=toy.ctrl_c),
        pytest.raises(KeyboardInterrupt),
    ):
        toy.fit(fed, 1)
    toy.fit(fed, 1)
    assert int(fed.run.mechanism_state.noise_state.round_index) == 1
    assert "rounds_charged_twice" in fed.run.caveats
    toy.fit(fed, 1)
    assert int(fed.run.mechanism_state.noise_state.round_index) == 2
    fed.account.has_unseen_rounds = True  # And nobody took notice yet.
    path.rename(tmp_path / "away")
    with pytest.warns(RuntimeWarning, match="is missing"):
        toy.fit(fed, 1)
    assert int(fed.run.mechanism_state.noise_state.round_index) == 1


def _kept_rounds(path, run):
    return len(accounting.PrivacyLedger.read(path).by_run()[run])


def test_all_ledgers_of_a_fit_have_what_any_of_them_tells(tmp_path):
    path, copy = tmp_path / "run", tmp_path / "copy"
    first = Ledger(tmp_path / "first", append=True)
    fed = toy.interrupted(toy.federated(), 1, 6, [RoundCheckpoint(path)])
    shutil.copytree(path, copy)
    path.rename(tmp_path / "away")
    toy.fit(toy.federated(), 6, [RoundCheckpoint(copy)], resume_from=copy)
    (tmp_path / "away").rename(path)
    last = Ledger(copy / "ledger.jsonl", append=True)
    toy.fit(fed, 1, [first, last])
    for ledger in (first.path, last.path, path / "ledger.jsonl"):
        assert _kept_rounds(ledger, fed.run.run_id) == fed.account.rounds == 7
    # What only this process knows of is written, too, by a fit that is resumed.
    new, model = tmp_path / "new", toy.federated()
    toy.interrupted(model, 1, 3, [RoundCheckpoint(new)])
    own, stops = Ledger(tmp_path / "own", append=True), PrivacyBudget(1e-6, _DELTA)
    toy.fit(model, 1, [own, stops])
    toy.fit(model, 3, resume_from=new)
    assert _kept_rounds(own.path, model.run.run_id) == model.account.rounds == 3


def test_a_ledger_says_no_less_than_the_charges_that_it_lists(tmp_path):
    path, shared = tmp_path / "run", Ledger(tmp_path / "shared", append=True)
    first = toy.interrupted(_local(), 0, 6, [RoundCheckpoint(path)])
    toy.interrupted(_local(), 2, 6, resume_from=path)
    toy.fit(first, 2, [shared])
    # One that is stopped before its first round.
    stops = PrivacyBudget(1e-6, _DELTA)
    toy.fit(
        last := _local(), 6, [stops, RoundCheckpoint(path), shared], resume_from=path
    )
    for ledger in (shared.path, path / "ledger.jsonl"):
        contents = accounting.PrivacyLedger.read(ledger)
        assert len(contents.entries) == 1 + 2 + 2
        # `first`, which wrote the last lines, knows who took part in three of the five
        # rounds; `last` knows that of one only.
        assert contents.epsilon(_DELTA) == pytest.approx(first.epsilon(_DELTA))
        assert contents.epsilon(_DELTA) <= last.epsilon(_DELTA) * (1 + 1e-9)
    each = last.run.mu_squared
    assert last.account.max_mu_squared == pytest.approx(5 * each)
    # In how many of them the most exposed client took part is not known.
    assert last.privacy_statement(_DELTA, "dict")["max_participations"] is None
    assert "it took part" not in toy.said(last, _DELTA)


def test_two_populations_have_no_pass_in_common(tmp_path):
    noise = (2.0,) * 4 + (1.0, 0.5, 2.0, 2.0) * 2
    x, y = toy.arrays(400)
    names = {
        f"c{k}": (x[10 * k : 10 * k + 10], y[10 * k : 10 * k + 10]) for k in range(40)
    }
    some = tfdp_fl.datasets.as_federated(names)
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=noise)
    fed = toy.federated(mechanism, clients_per_round=10, sampling="shuffled")
    fed.fit(some, rounds=4, verbose=0)
    before = fed.run.sampler
    fed.fit(some.take(np.arange(40)[::-1]), rounds=2, verbose=0)
    assert fed.run.sampler is not before
    partitions = {charge.partition for charge in fed.account.own}
    assert len(partitions) == 2


def test_a_renamed_directory_is_no_copy_of_what_took_its_name(tmp_path):
    path, monday = tmp_path / "run", tmp_path / "monday"
    toy.fit(toy.federated(), 2, [RoundCheckpoint(path)])
    path.rename(monday)
    toy.fit(other := toy.federated(), 3, [RoundCheckpoint(path)])
    toy.fit(resumed := toy.federated(), 2, resume_from=monday)
    toy.fit(resumed, 1)
    assert resumed.account.rounds == other.account.rounds == 3
    assert len(accounting.PrivacyLedger.read(path / "ledger.jsonl").entries) == 3
    # Nor is a link that leads to it.
    monday.rename(tmp_path / "tuesday")
    monday.symlink_to(tmp_path / "tuesday")
    toy.fit(linked := toy.federated(), 2, resume_from=tmp_path / "tuesday")
    assert linked.account.rounds == 3


def test_a_lost_ledger_is_missed(tmp_path):
    fed = toy.federated()
    toy.fit(fed, 1, [Ledger(tmp_path / "one.jsonl")])
    (tmp_path / "one.jsonl").rename(tmp_path / "two.jsonl")
    with pytest.warns(RuntimeWarning, match=r"one.jsonl.*is missing"):
        toy.fit(fed, 1, [Ledger(tmp_path / "two.jsonl", append=True)])
    told = accounting.PrivacyLedger.read(tmp_path / "two.jsonl")
    assert len(told.entries) == fed.account.rounds == 2


def test_lost_rounds_tell_how_many_clients_there_were(tmp_path):
    fed, path = toy.federated(), tmp_path / "run"
    ledger = Ledger(tmp_path / "all.jsonl", append=True)
    toy.fit(fed, 2, [RoundCheckpoint(path), ledger])
    copy = shutil.copytree(path, tmp_path / "copy")
    fed.fit(toy.clients(20), rounds=1, callbacks=[ledger], verbose=0)
    resumed = toy.federated()
    toy.fit(resumed, 2, resume_from=copy)
    facts = resumed.privacy_statement(_DELTA, format="dict")
    assert facts["populations"] == [20, 40]


def test_what_came_after_the_checkpoint_is_known_from_its_ledger(tmp_path):
    path, shared = tmp_path / "run", Ledger(tmp_path / "shared", append=True)
    fed = toy.federated()
    toy.fit(fed, 3, [RoundCheckpoint(path)])
    toy.fit(fed, 2, [shared], seed=7)  # Not saved, but charged.
    resumed = toy.federated()
    toy.fit(resumed, 3, resume_from=path)
    assert "seed_given" in resumed.privacy_statement(_DELTA, "dict")["caveats"]
    toy.fit(resumed, 2)
    assert resumed.account.rounds == 7
    for known in (shared.path, path / "ledger.jsonl"):
        read = accounting.PrivacyLedger.read(known)
        assert len(read.by_run()[resumed.run.run_id]) == 7


def test_files_stay_where_they_were_named(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "there")
    toy.fit(toy.federated(), 4, [RoundCheckpoint("run")])
    others = sorted((tmp_path / "there" / "run").iterdir())
    monkeypatch.chdir(tmp_path / "here")
    fed, moves = toy.federated(), toy.at_end(lambda: os.chdir(tmp_path / "there"), 0)
    toy.fit(fed, 3, [RoundCheckpoint("run"), Ledger("own.jsonl"), moves])
    assert sorted((tmp_path / "there" / "run").iterdir()) == others
    assert (tmp_path / "here" / "run" / "round-00000003.npz").exists()
    (tmp_path / "here" / "own.jsonl").unlink()
    toy.fit(fed, 1, [Ledger(tmp_path / "new.jsonl")])
    assert fed.account.rounds == 4


def test_a_resume_that_ends_anywhere_leaves_no_weights_without_their_cost(tmp_path):
    # Two Ctrl-C in time, or too little memory: 2.2 was said of a model that cost 8.8.
    path, data = tmp_path / "run", toy.clients()
    trained = toy.federated(clients_per_round=20)
    toy.fit(trained, 3, [RoundCheckpoint(path)], data)
    cost, initial = trained.epsilon(_DELTA), toy.flat(toy.dense())
    files = {checkpoint.__file__, model_lib.__file__, federated_training.__file__}
    restore, last, lines = checkpoint.InterruptedRun.restore, 0, [0]

    def trace(frame, event, _):
        code = frame.f_code
        if code.co_filename not in files or code.co_name not in _RESTORING:
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == last:
                raise KeyboardInterrupt
        return trace

    def restore_traced(*arguments):  # And what `fit`, which calls it, does then.
        sys._getframe(1).f_trace = trace
        sys.settrace(trace)
        return restore(*arguments)

    def untouched():
        return toy.federated(model=lambda: toy.dense(), clients_per_round=20)

    no_rounds = mock.patch.object(round_loop.RoundLoop, "train")
    interrupts = mock.patch.object(checkpoint.InterruptedRun, "restore", restore_traced)
    outcomes, fed = set(), untouched()
    while lines[0] == last:
        last, lines[0] = last + 1, 0
        with no_rounds, interrupts, contextlib.suppress(KeyboardInterrupt):
            try:
                toy.fit(fed, 3, data=data, resume_from=path)
            finally:
                sys.settrace(None)
        is_private = bool(np.any(toy.flat(fed.model) != initial))
        try:
            outcomes.add((is_private, fed.epsilon(_DELTA)))
        except ValueError as refused:
            assert _TRAINED in str(refused)
            with pytest.raises(ValueError, match=_TRAINED):
                toy.fit(fed, 1, data=data)
            outcomes.add((is_private, None))
            interrupted, fed = fed, untouched()
    assert outcomes == {(False, 0.0), (False, None), (True, None), (True, cost)}
    with no_rounds:
        toy.fit(interrupted, 3, data=data, resume_from=path)
    assert interrupted.epsilon(_DELTA) == cost
    toy.assert_same(interrupted.model, trained.model)


def test_a_resume_that_fails_leaves_the_run_where_it_was(tmp_path):
    fed = _correlated()
    _fit(fed, 3, [RoundCheckpoint(tmp_path, every=2, keep=9)])
    (tmp_path / "round-00000003.npz").unlink()
    before, spending = fed.run.sampler.state(), accounting.account.PrivacyAccount
    patch = mock.patch.object(spending, "from_state", side_effect=OSError)
    with patch, pytest.raises(OSError):
        _fit(fed, 3, [RoundCheckpoint(tmp_path)], resume_from=tmp_path)
    # Else the same clients would be drawn again, closer than the noise allows.
    assert fed.run.sampler.state() == before
    assert before["released"] == 3


@pytest.mark.parametrize("make", [_shuffled, _local])
@toy.same_draws_when_resumed()
def test_a_second_fit_is_resumed_as_such(tmp_path, make):
    # Of the local one, the noise stays what the first fit set.
    whole, resumed, keeper = make(), make(), RoundCheckpoint(tmp_path / "run", keep=99)
    for rounds in (2, 3):
        _fit(whole, rounds, [keeper], seed=2)
    copy, three = _copy_as_of(tmp_path / "run", 3), np.int64(3)  # As good as Python's.
    assert _fit(resumed, three, seed=np.int64(2), resume_from=copy).epoch == [3, 4]
    toy.assert_same(whole, resumed)


def test_without_a_seed_it_goes_on_too(tmp_path):
    first, resumed = _shuffled(), _shuffled()
    keeper = RoundCheckpoint(tmp_path, every=2)
    toy.interrupted(first, 3, _ROUNDS, [keeper], **_FIT)
    assert first.rounds == 4
    cohorts = [first.run.sampler.plan_cohort(t) for t in range(_ROUNDS)]
    _fit(resumed, callbacks=[keeper], resume_from=tmp_path)
    for t, cohort in enumerate(cohorts):  # The pass goes on in its order.
        np.testing.assert_array_equal(cohort, resumed.run.sampler.plan_cohort(t))
    # The same model object resumes as well; a finished run has nothing left to do.
    _fit(first, resume_from=tmp_path)
    assert first.rounds == resumed.rounds == _ROUNDS
    assert first.epsilon(_DELTA) == resumed.epsilon(_DELTA)
    assert _fit(resumed, resume_from=tmp_path).epoch == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was trained for two rounds, and the directory of its run."""
    path = tmp_path_factory.mktemp("trained") / "run"
    fed = toy.federated(model=toy.dense())  # Not lent to one test.
    _resume(fed, None, callbacks=[RoundCheckpoint(path)])
    # Else its copies would write to its ledger, too.
    return fed, path.rename(path.with_name("away"))


def _frozen():
    model = toy.dense()
    model.layers[0].bias.trainable = False
    return model


def _resume(fed, path, **fit):
    usual = {"rounds": 2, "batch_size": 5, "seed": 1, "resume_from": path}
    return toy.fit(fed, **{**usual, **fit})


def _refused(fed, path, message, error=ValueError, **fit):
    before = fed.get_weights()
    with pytest.raises(error, match=message):
        _resume(fed, path, **fit)
    toy.assert_same(before, fed)
    assert fed.epsilon(_DELTA) == 0.0


_LESS = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.9)
_OTHER = tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)
_BY_SIZE = tfdp_fl.ClientWeighting.num_examples(cap=6)
_ADAM_SERVER = {"server_optimizer": "adam"}


@pytest.mark.parametrize(
    "options, fit, message",
    [
        ({}, {"rounds": 3}, "rounds must be 2"),
        ({}, {"batch_size": 4}, "batch_size must be 5"),
        ({}, {"seed": None}, "seed must be 1, .* got None"),
        ({}, {"data": toy.clients(39)}, "clients .* must be 40"),
        ({}, {"data": toy.clients().take(np.arange(40)[::-1])}, "clients' ids .* must"),
        ({"model": toy.two_layers}, {}, r"model's weights \(their shapes\) must be"),
        ({"clients_per_round": 10}, {}, "clients_per_round must be 20"),
        ({"sampling": "poisson"}, {}, "sampling must be 'fixed_size'"),
        ({"mechanism": _OTHER}, {}, "mechanism must be 'FixedClipping'"),
        ({"mechanism": _LESS}, {}, "mechanism's noise_multiplier must be 1.0"),
        ({"compile_options": _ADAM_SERVER}, {}, "server_optimizer must be None"),
        ({"client_weighting": _BY_SIZE}, {}, "client_weighting must be None"),
        (
            {"model": _frozen},
            {},
            r"trainable weights .* be \[0, 1\], .* got \[0\]",
        ),
    ],
)
def test_other_arguments_are_refused_by_name(trained, options, fit, message):
    _refused(toy.federated(**options), trained[1], message, **fit)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained[1], tmp_path / "run")


def test_missing_checkpoints_and_ledger_are_named(copy, tmp_path):
    fed, other, ledger = toy.federated(), toy.federated(), copy / "ledger.jsonl"
    toy.fit(other, 1)
    with pytest.raises(ValueError, match="was not trained yet, or"):
        _resume(other, copy)
    _refused(fed, tmp_path, "no checkpoint in", FileNotFoundError)
    _put_back(copy, 1)
    _refused(fed, copy, "lines at its end were removed", accounting.LedgerTamperedError)
    ledger.unlink()
    _refused(fed, copy, "ledger .* is missing", accounting.LedgerError)


def test_what_another_ledger_failed_to_write_once_it_was_written_is_charged(tmp_path):
    fed, resumed, record = _shuffled(), _shuffled(), accounting.PrivacyLedger.record

    def full(ledger, round_index, *args, **kwargs):
        if ledger.path.parent.name == "other" and round_index:
            raise accounting.LedgerWriteError("the disk is full")
        record(ledger, round_index, *args, **kwargs)

    keep = [RoundCheckpoint(tmp_path), RoundCheckpoint(tmp_path / "other")]
    patch = mock.patch.object(accounting.PrivacyLedger, "record", full)
    with patch, pytest.raises(accounting.LedgerWriteError):
        toy.fit(fed, 3, keep)
    # Not released, and in memory as on the disk.
    assert (fed.rounds, fed.account.rounds) == (1, 2)
    assert fed.epsilon(_DELTA) == pytest.approx(
        accounting.epsilon_from_ledger(tmp_path / "ledger.jsonl", _DELTA)
    )
    shutil.rmtree(tmp_path / "other")
    toy.fit(resumed, 3, resume_from=tmp_path)
    assert (resumed.rounds, resumed.account.rounds) == (3, 4)
    assert "rounds_charged_twice" in resumed.run.caveats


def _flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_the_end_is_saved_again_only_if_it_changed(tmp_path):
    fed, written = toy.federated(), []

    def count(self, round_index, state, keep):
        written.append(round_index)

    def change():
        fed.model.set_weights([part + 1 for part in fed.model.get_weights()])

    saves = RoundCheckpoint(tmp_path)
    with toy.around(checkpoint.CheckpointDirectory, "write", count):
        _fit(fed, 1, [saves])
        assert written == [0, 1]
        _fit(fed, 1, [saves, toy.at_end(change, when="on_train_end")])
        assert written == [0, 1, 1, 2, 2]
        damage = toy.at_end(lambda: _flip(tmp_path / "round-00000003.npz"))
        _fit(fed, 1, [saves, damage])
    assert written[5:] == [2, 3, 3]
    toy.assert_same(checkpoint.CheckpointDirectory(tmp_path).newest()["weights"], fed)


def test_a_checkpoint_leaves_to_its_ledger_what_that_tells(tmp_path):
    whole = _median()
    _fit(whole, 2)  # Before there is a ledger.
    callback = RoundCheckpoint(tmp_path / "run", keep=10)
    with (
        mock.patch.object(
            accounting.PrivacyAccount,
            "write_missing",
            side_effect=RuntimeError("a crash"),
        ),
        pytest.raises(RuntimeError, match="a crash"),
    ):
        _fit(whole, 2, [callback])
    first = checkpoint.CheckpointDirectory(tmp_path / "run").newest()
    assert len(first["spending"]["charges"]) == 2  # No line has them.
    _fit(whole, 4, [RoundCheckpoint(tmp_path / "other")])
    states = checkpoint.CheckpointDirectory(tmp_path / "other")
    spent = states.newest()["spending"]
    assert (spent["rounds"], spent["charges"]) == (6, [])
    resumed = _median()
    _fit(resumed, 4, resume_from=tmp_path / "other")
    assert resumed.run.account.own == whole.run.account.own
    assert resumed.run.account.own.total() == 6
    assert "rounds_charged_twice" not in resumed.run.caveats


def test_a_budget_counts_what_was_charged_and_lost(copy, trained):
    resumed = toy.federated()
    (copy / "round-00000002.npz").unlink()
    spent = trained[0].epsilon(_DELTA)
    budget = PrivacyBudget(1.01 * spent, _DELTA)
    assert _resume(resumed, copy, callbacks=[budget]).epoch == []
    assert budget.stopped_before_round == 1
    assert resumed.epsilon(_DELTA) == pytest.approx(spent, abs=1e-9)


def test_a_checkpoint_that_cannot_be_read_now_is_not_taken_for_damaged(copy):
    # Its rounds were charged again, and a whole file renamed.
    before = sorted(file.name for file in copy.iterdir())
    failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    with (
        mock.patch.object(pathlib.Path, "read_bytes", failing),
        pytest.raises(checkpoint.CheckpointError, match="try again"),
    ):
        checkpoint.CheckpointDirectory(copy).newest()
    assert sorted(file.name for file in copy.iterdir()) == before


@toy.same_draws_when_resumed()
def test_a_damaged_newest_goes_on_from_the_one_before(copy, trained):
    resumed, newest = toy.federated(), copy / "round-00000002.npz"
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.warns(RuntimeWarning, match=r"00000002.npz is damaged"):
        history = _resume(resumed, copy, callbacks=[RoundCheckpoint(copy)])
    assert history.epoch == [1]
    toy.assert_same(trained[0], resumed)
    assert (copy / "round-00000002.damaged").exists()
    assert newest.exists()


def test_a_run_that_went_on_elsewhere_is_not_gone_back_to(tmp_path):
    path, fed = tmp_path / "run", toy.federated()
    toy.interrupted(fed, 1, 4, [RoundCheckpoint(path)])
    path.rename(tmp_path / "away")
    toy.fit(fed, 2, [Ledger(tmp_path / "other.jsonl")])
    (tmp_path / "away").rename(path)
    # Meanwhile another process resumes, and its ledger is as long.
    toy.fit(toy.federated(), 4, resume_from=path)
    with pytest.raises(ValueError, match="would be forgotten"):
        toy.fit(fed, 4, resume_from=path)


def _state(round_index):
    rng = np.random.default_rng(round_index)
    return {
        "plan": {"seed": round_index, "rate": 0.1},
        "none": None,
        "text": 'the "place of an array": 1',
        "weights": [rng.normal(size=(4, 3)).astype("f4"), np.float32(round_index)],
        "inside": {"windows": np.full((2, 0), np.nan, np.float32)},
        "counts": np.arange(5),
    }


@pytest.fixture
def directory(tmp_path):
    made = checkpoint.CheckpointDirectory(tmp_path / "run")
    made.path.mkdir()
    return made


def _write(directory, *rounds, keep=3):
    for round_index in rounds:
        directory.write(round_index, _state(round_index), keep)


def _same(found, expected):
    np.testing.assert_array_equal(found, expected)
    assert np.asarray(found).dtype == np.asarray(expected).dtype


def _assert_is(found, round_index):
    assert found["plan"]["seed"] == round_index
    tf.nest.map_structure(_same, found, _state(round_index))


def test_what_is_read_is_what_was_written(directory):
    _write(directory, 7)
    _assert_is(directory.newest(), 7)
    mode = directory.file(7).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600  # For its owner alone.
    _write(directory, 8, 9, 10, keep=2)
    assert directory.rounds() == [10, 9]
    half = {"half": tf.constant([1.5, -2.0], tf.bfloat16).numpy()}
    found = checkpoint.from_bytes(checkpoint.to_bytes(half))
    _same(found["half"], np.float32([1.5, -2.0]))


def test_it_is_on_the_disk_before_it_takes_its_place(directory):
    done = mock.Mock()
    with (
        mock.patch.object(os, "fsync", done.sync),
        toy.around(pathlib.Path, "replace", lambda *_: done.replace()),
    ):
        _write(directory, 1)
    # The file before, and the folder after.
    assert [name for name, *_ in done.mock_calls] == ["sync", "replace", "sync"]


def test_a_truncated_one_or_a_flipped_bit_is_never_read_as_data(directory):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        directory.newest()
    _write(directory, 1, 2)
    data = directory.file(2).read_bytes()
    damaged = [data[:length] for length in range(0, len(data), 97)]
    for place in range(0, len(data), 13):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        damaged.append(bytes(flipped))
    for broken in damaged:
        directory.file(2).write_bytes(broken)
        with pytest.warns(RuntimeWarning, match=r"00000002\.npz is damaged"):
            _assert_is(directory.newest(), 1)
    # One of an earlier version is passed over.
    stream = io.BytesIO()
    np.savez(stream, json=np.array('{"format": "tfdp_fl checkpoint 3"}'))
    data = stream.getvalue()
    directory.file(2).write_bytes(data + hashlib.sha256(data).digest())
    with pytest.warns(RuntimeWarning, match="an earlier version wrote it"):
        _assert_is(directory.newest(), 1)
    directory.file(1).write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(checkpoint.CheckpointError, match="No checkpoint"),
    ):
        directory.newest()


def test_two_writers_are_refused_and_leftovers_of_a_killed_one_removed(tmp_path):
    leftover = tmp_path / ".writing-round-00000003.npz-1"
    leftover.write_bytes(b"half")
    first, second = (toy.federated() for _ in range(2))

    def begins():
        assert not leftover.exists()
        files = mock.patch.object(checkpoint.CheckpointDirectory, "rounds", list)
        # As where both find an empty directory.
        with files, pytest.raises(accounting.LedgerInUseError):
            toy.fit(second, 1, [RoundCheckpoint(tmp_path)])

    toy.fit(first, 1, [RoundCheckpoint(tmp_path), toy.at_end(begins)])
    assert second.rounds == 0


def test_a_full_disk_leaves_what_was_there(directory):
    _write(directory, 1, 2)
    error = checkpoint.CheckpointWriteError
    for limit in (0, 500):
        full = pytest.raises(error, match="cannot be written: File too")
        with toy.full_disk(limit), full:
            _write(directory, 3, keep=1)
        assert directory.rounds() == [2, 1]
        _assert_is(directory.newest(), 2)
        assert not [*directory.path.glob(".writing*")]
    _write(directory, 3)
    _assert_is(directory.newest(), 3)
    # Nor can a directory be made in the place of a file.
    (directory.path / "file").touch()
    with pytest.raises(error, match="new cannot be written"):
        checkpoint.CheckpointDirectory(directory.path / "file" / "new").make()


@pytest.mark.parametrize("make", [_local, _shuffled, _correlated])
def test_clients_whose_order_a_resumed_run_cannot_check_are_not_saved(tmp_path, make):
    def read(position):
        return toy.arrays(5, seed=position)

    unnamed = tfdp_fl.FederatedDataset.from_client_fn(range(toy.NUM_CLIENTS), read)
    names = list(range(toy.NUM_CLIENTS))
    named = tfdp_fl.FederatedDataset.from_client_fn(names, read)
    fed = make()
    with pytest.raises(ValueError, match="clients must have names with RoundCheck"):
        _fit(fed, callbacks=[RoundCheckpoint(tmp_path)], data=unnamed)
    assert fed.run is None
    assert not any(tmp_path.iterdir())
    _fit(fed, 2, callbacks=[RoundCheckpoint(tmp_path)], data=named)
    with pytest.raises(ValueError, match="clients must have names with RoundCheck"):
        _fit(make(), data=unnamed, resume_from=tmp_path)
    # A Poisson cohort depends on no other.
    fed = toy.federated(clients_per_round=10)
    _fit(fed, 1, callbacks=[RoundCheckpoint(tmp_path / "poisson")], data=unnamed)
