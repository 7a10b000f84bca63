"""A silo: what it promises its people, against the server and against accidents."""

import dataclasses
import errno
import fcntl
import functools
import itertools
import os
import shutil
import sys
import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tests.silo import hospital
from tfdp_fl import _files, accounting, keras_versions, silo
from tfdp_fl.accounting import ledger
from tfdp_fl.keras import checkpoint
from tfdp_fl.silo import directory as directory_lib

pytestmark = pytest.mark.usefixtures("wide_cells")

_MEANS = tfdp_fl.PrivateMetrics(bounds={"accuracy": (0, 1)}, noise_multiplier=30.0)


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory):
    """A directory that has answered one message, to be copied."""
    path = tmp_path_factory.mktemp("silo") / "trained"
    one = hospital.silo(path)
    one.train(one.get_weights(), "first")
    # Else its copies would write to its ledger, too.
    return path.rename(path.with_name("away"))


def _copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def _exact(values):
    return [np.asarray(value).tobytes() for value in values]


def test_each_answer_is_charged_and_the_same_message_costs_nothing(tmp_path):
    one = hospital.silo(tmp_path, rounds=2)
    start = one.get_weights()
    assert one.epsilon(hospital.DELTA) == 0.0
    update = one.train(start, message_id="first")
    assert (update.rounds, update.spent, hospital.charged(tmp_path)) == (2, False, 2)
    assert [w.shape for w in update.weights] == [w.shape for w in start]
    assert _exact(update.weights) != _exact(start)
    assert update.epsilon == one.epsilon(hospital.DELTA) > 0
    # Again, late, from another process, after others.
    one.train(update.weights, message_id="second")
    for again in one, hospital.silo(tmp_path, rounds=2):
        assert hospital.is_same(again.train(start, message_id="first"), update)
    assert hospital.charged(tmp_path) == 4
    with pytest.raises(silo.SiloMessageError, match="answered before, for other"):
        one.train(update.weights, message_id="first")
    assert hospital.charged(tmp_path) == 4
    # Without an id each is another; so is another kind of message with the same id.
    one.evaluate(start, private=_MEANS, message_id="first")
    assert hospital.charged(tmp_path) == 5
    assert not hospital.is_same(one.train(start), update)
    for folder, _, files in os.walk(tmp_path):
        assert os.stat(folder).st_mode & 0o077 == 0 or folder == str(tmp_path)
        for name in files:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0


def test_a_server_learns_nothing_from_indexes_that_its_weights_decide(tmp_path):
    # Its moving mean shifted the indexes, and an error said if one was out of range.
    def build():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input((hospital.NUM_FEATURES,)),
                tf.keras.layers.BatchNormalization(center=False, scale=False),
                tf.keras.layers.Embedding(100, 2),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(1, activation="sigmoid"),
            ]
        )
        return hospital.build(model=model)

    one = hospital.silo(tmp_path, build, x=50 + hospital.table()["x"])
    weights = one.get_weights()
    shapes = [w.shape for w in weights]
    is_moving = [shape == (hospital.NUM_FEATURES,) for shape in shapes]
    for mean in (50.0, 0.0, -60.0):  # Near 0, near 50, out of range.
        moved = [
            np.full_like(w, mean if n == is_moving.index(True) else 1.0) if own else w
            for n, (w, own) in enumerate(zip(weights, is_moving, strict=True))
        ]
        with warnings.catch_warnings():  # That statistics fill the clip.
            warnings.simplefilter("ignore")
            assert one.train(moved).rounds == 1
    assert hospital.charged(tmp_path) == 3


def test_old_answers_lose_their_weights_and_are_never_trained_again(
    tmp_path, monkeypatch
):
    one = hospital.silo(tmp_path)
    start = one.get_weights()

    def weights():
        return sorted((tmp_path / "weights").iterdir())

    one.train(start, 0)
    size = weights()[0].stat().st_size
    monkeypatch.setattr(directory_lib, "KEPT_BYTES", 2 * size + size // 2)
    (tmp_path / "weights" / f"{_files.TEMPORARY}of-a-killed-process").touch()
    shown = one.evaluate(start, private=_MEANS, message_id=0)
    updates = [one.train(start, number) for number in range(1, 4)]
    assert len(weights()) == 2
    monkeypatch.setattr(directory_lib, "KEPT_BYTES", 0)
    last = one.train(start, 4)
    assert len(weights()) == 1
    before, late = hospital.charged(tmp_path), hospital.silo(tmp_path)
    assert before == 6
    # Also where the owner removes more, or a backup leaves all of them out.
    for number in range(4):
        with pytest.raises(silo.SiloMessageError, match="weights are no longer kept"):
            late.train(start, number)
        with pytest.raises(silo.SiloMessageError, match="for other weights"):
            late.train(updates[0].weights, number)
    assert hospital.is_same(late.train(start, 4), last)
    assert late.evaluate(start, private=_MEANS, message_id=0) == shown
    weights()[0].unlink()
    with pytest.raises(silo.SiloMessageError, match="weights are no longer kept"):
        late.train(start, 4)
    assert hospital.charged(tmp_path) == before


def test_a_spent_silo_returns_what_came_and_never_passes_its_target(tmp_path):
    one = hospital.silo(tmp_path, rounds=4)
    weights = one.get_weights()
    with pytest.warns(RuntimeWarning, match="allows 2 of the 4 rounds"):
        answers = [one.train(weights), one.train(weights)]
    assert [(a.rounds, a.spent) for a in answers] == [(4, False), (2, True)]
    before, came = hospital.charged(tmp_path), [w + 1 for w in weights]
    with pytest.warns(RuntimeWarning, match="allows 0"):
        update = one.train(came, message_id=7)
        again = hospital.silo(tmp_path, rounds=4).train(came, message_id=7)
    assert (update.rounds, update.spent) == (0, True)
    assert _exact(update.weights) == _exact(came)
    assert hospital.is_same(again, update)
    assert hospital.charged(tmp_path) == before
    # So nobody can fill its disk.
    assert len(list((tmp_path / "weights").iterdir())) == len(answers)
    assert update.epsilon == one.epsilon(hospital.DELTA) <= 4.0
    # Nor is there anything left for metrics.
    with pytest.raises(ValueError, match="private would bring epsilon to"):
        one.evaluate(
            came,
            private=tfdp_fl.PrivateMetrics(
                bounds={"loss": (0, 1)}, noise_multiplier=1.0
            ),
        )
    assert hospital.charged(tmp_path) == before


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "adaptive", "sampling": "poisson"},
        {"mechanism": "fixed", "clip_norm": 0.5, "sampling": "fixed_size"},
        {"mechanism": "median", "sampling": "shuffled"},
        {"mechanism": "correlated", "clip_norm": 0.5, "sampling": "cyclic"},
    ],
    ids=lambda options: options["sampling"],
)
def test_a_new_process_goes_on_where_the_last_one_was(tmp_path, options):
    of = functools.partial(hospital.build, **options)
    first = hospital.silo(tmp_path, of)
    weights = first.get_weights()
    for _ in range(2):
        weights = first.train(weights).weights
    second = hospital.silo(tmp_path, of)
    first.privacy_statement(), second.privacy_statement()
    left, right = (checkpoint.capture(each._fed, "") for each in (first, second))
    for name in ("mechanism_state", "server_optimizer"):
        assert _exact(left[name]) == _exact(right[name]), name
    for name in ("rounds", "sampler", "run_id"):
        assert str(left[name]) == str(right[name]), name
    assert first._fed.account.own == second._fed.account.own
    # In turns, with neither knowing of the other but by the directory.
    for each in first, second, first:
        weights = each.train(weights).weights
    assert hospital.charged(tmp_path) == 5
    facts = second.privacy_statement(format="dict")
    assert facts["rounds"] == 5
    assert "rounds_charged_twice" not in facts["caveats"]
    assert facts["epsilon"] <= second.epsilon(hospital.DELTA) <= 4.0


def test_useless_weights_are_refused_and_cost_nothing(tmp_path):
    # (TFF, which trains on TensorFlow 2.14, takes no normalization.)
    normalized = keras_versions.IS_KERAS_3
    of = functools.partial(hospital.build, normalized=normalized)
    one = hospital.silo(tmp_path, of)
    start = one.get_weights()
    shapes, finite = "must be numbers with the shapes", "must be finite"
    useless = [
        (start[:-1], shapes),
        ([*start[:-1], start[-1][None]], shapes),
        ([w.astype(str) for w in start], shapes),
        ([w.astype(complex) for w in start], shapes),
        ([np.full_like(w, np.nan) for w in start], finite),
        ([*start[:-1], np.array([np.inf])], finite),
        ([*start[:-1], np.array([1e300])], finite),
        ([*start[:-1], np.array([-1e30])], "at most 100000 in magnitude"),
    ]
    if normalized:  # A negative variance.
        spoilt = [*start[:3], start[3] - 2.0, *start[4:]]
        useless.append((spoilt, "whose output is finite"))
    evaluate = functools.partial(one.evaluate, private=_MEANS)
    for (weights, why), act in itertools.product(useless, (one.train, evaluate)):
        with pytest.raises(ValueError, match=why):
            act(weights, message_id="bad")
    assert hospital.charged(tmp_path) == 0
    # The id is still free for a better one.
    assert one.train([w.astype(np.float64) for w in start], "bad").rounds == 1


def test_weights_made_to_draw_one_person_out_move_no_bound(tmp_path):
    # With next to no noise the answer moves by the clip over m, whatever was sent.
    of = functools.partial(
        hospital.build,
        **{"mechanism": "fixed", "clip_norm": 0.1, "sampling": "cyclic"},
        **{"clients_per_round": 30, "target_epsilon": 1e9, "loss": "mse"},
        learning_rate=1e4,
    )
    data = hospital.table()
    data["x"][:2] = 1e3  # One person answers to weights that no other feels.
    one = hospital.silo(tmp_path, of, **data)
    start = [np.where(w == 0, 0.0, 300 * w) for w in one.get_weights()]
    update = one.train(start)
    moved = np.concatenate(
        [(a - b).ravel() for a, b in zip(update.weights, start, strict=True)]
    )
    noise = one._fed.mechanism.noise_multiplier * 0.1 / 30
    assert noise < 1e-4
    # 8 standard deviations of each of 19 coordinates, and float32's steps.
    assert np.linalg.norm(moved) <= 0.1 + 8 * 19 * noise + 1e-3
    charges = {
        str(entry.charge)
        for sent in (start, one.get_weights(), [0 * w for w in start])
        for entry in _entries(one, sent, tmp_path)
    }
    assert len(charges) == 1


def _entries(one, weights, path):
    one.train(weights)
    return accounting.PrivacyLedger.read(checkpoint.ledger_path(path)).entries


def test_one_at_a_time(tmp_path):
    one, other = hospital.silo(tmp_path), hospital.silo(tmp_path)
    start = one.get_weights()
    one.train(start, "first")
    inside, errors = [], []

    def locked():
        # As another process would: a file description of its own.
        with open(tmp_path / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for act in (
                lambda: one.train(start, "second"),
                lambda: other.train(start, "first"),
                lambda: other.evaluate(start, private=_MEANS),
                other.privacy_statement,
            ):
                with pytest.raises(silo.SiloInUseError, match="working on another"):
                    act()
                errors.append(act)
            inside.append(hospital.charged(tmp_path))

    thread = threading.Thread(target=locked)
    thread.start()
    thread.join()
    assert (len(errors), inside) == (4, [1])
    assert one.train(start, "second").rounds == 1


def test_a_copied_or_restored_directory_is_refused(tmp_path):
    there, copy = tmp_path / "there", tmp_path / "copy"
    one = hospital.silo(there)
    start = one.get_weights()
    one.train(start, 1)
    shutil.copytree(there, copy)
    with pytest.raises(silo.SiloMovedError, match="moved=True"):
        hospital.silo(copy).train(start, 2)
    with pytest.raises(silo.SiloMovedError):
        hospital.silo(copy).train(start, 1)
    one.train(start, 2)
    # Yesterday's, put back: whole, and the ledger alone.
    shutil.copytree(copy, there, dirs_exist_ok=True)
    with pytest.raises(silo.SiloMovedError, match="restored from a backup"):
        one.train(start, 3)
    shutil.rmtree(there)
    shutil.copytree(copy, there)
    with pytest.raises(silo.SiloMovedError):
        hospital.silo(there).train(start, 3)
    # Moved on purpose.
    moved = hospital.silo(copy, moved=True)
    moved.train(start, 2)
    assert hospital.silo(copy).train(start, 3).rounds == 1
    os.replace(copy, tmp_path / "elsewhere")
    assert hospital.silo(tmp_path / "elsewhere").train(start, 4).rounds == 1


def test_a_silo_whose_directory_is_gone_does_not_begin_again(tmp_path, monkeypatch):
    # Its epsilon fell to 0, and it had the whole target to spend again.
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    one = hospital.silo("state")
    start = one.get_weights()
    one.train(start, 1)
    spent = one.epsilon(hospital.DELTA)
    monkeypatch.chdir(tmp_path / "b")
    assert one.epsilon(hospital.DELTA) == spent > 0
    os.replace(tmp_path / "a" / "state", tmp_path / "elsewhere")
    for ask in (
        lambda: one.epsilon(hospital.DELTA),
        one.privacy_statement,
        lambda: one.train(start, 2),
    ):
        with pytest.raises(silo.SiloError, match="was there before and is missing"):
            ask()
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]
    os.replace(tmp_path / "elsewhere", tmp_path / "a" / "state")
    assert one.train(start, 2).rounds == 1


def test_an_interrupted_message_never_goes_on_with_the_weights_of_another(
    tmp_path, monkeypatch
):
    # Both began after the same round, by which its checkpoint was recognised.
    start = hospital.silo(tmp_path).get_weights()
    first, second = ([w + shift for w in start] for shift in (1.0, -5.0))

    def dies(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tfdp_fl.engine.CohortEngine.collect", dies)
        patch.setattr(directory_lib.SiloDirectory, "settle", lambda own: None)
        hospital.silo(tmp_path).train(first, "first")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(directory_lib.SiloDirectory, "begin", dies)
        patch.setattr(directory_lib.SiloDirectory, "settle", lambda own: None)
        hospital.silo(tmp_path).train(second, "second")
    answer = hospital.silo(tmp_path).train(first, "first")
    # (A step is far shorter than the distance of the two.)
    for sent, answered in zip(first, answer.weights, strict=True):
        assert np.max(np.abs(answered - sent)) < 3.0


@pytest.mark.parametrize(
    ("name", "error", "match"),
    [
        ("ledger.jsonl", accounting.LedgerError, "missing"),
        ("silo.npz", silo.SiloError, "missing"),
        ("round-*.npz", ValueError, "ledger of another run"),
    ],
)
def test_a_directory_that_lost_a_file_is_refused(tmp_path, trained, name, error, match):
    path = _copied(trained, tmp_path)
    for file in path.glob(name):
        file.unlink()
    one = hospital.silo(path, moved=True)
    with pytest.raises(error, match=match):
        one.train(one.get_weights())
    if name == "ledger.jsonl":  # Another process said 0.
        with pytest.raises(error, match=match):
            hospital.silo(path).epsilon(hospital.DELTA)


def test_a_ledger_that_was_cut_is_refused(tmp_path):
    one = hospital.silo(tmp_path, rounds=2)
    one.train(one.get_weights())
    file = tmp_path / "ledger.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]))
    for each in one, hospital.silo(tmp_path, rounds=2, moved=True):
        with pytest.raises(accounting.LedgerTamperedError, match="were removed"):
            each.train(one.get_weights())


def test_other_people_are_refused_and_other_rows_are_charged(tmp_path, trained):
    path = _copied(trained, tmp_path)
    start = hospital.silo(path).get_weights()
    fewer = hospital.table(hospital.NUM_PEOPLE - 1)
    others = {**hospital.table(), "client_ids": 100 + hospital.table()["client_ids"]}
    for changed in fewer, others:
        with pytest.raises(silo.SiloChangedError, match="the people and the settings"):
            hospital.silo(path, moved=True, **changed).train(start)
    assert hospital.charged(path) == 1
    # The same people with other rows: each round is bounded for each of them.
    order = np.random.default_rng(1).permutation(2 * hospital.NUM_PEOPLE)[:-1]
    newer = {name: part[order] for name, part in hospital.table(seed=5).items()}
    assert hospital.silo(path, moved=True, **newer).train(start).rounds == 1
    assert hospital.charged(path) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "relu"},
        {"loss": "mse"},
        {"learning_rate": 0.1},
        {"normalized": True},
        {"target_epsilon": 5.0},
        {"rounds": 7},
        {"mechanism": "fixed", "clip_norm": 0.5},
        {"initial_clip_norm": 0.2},
        {"sampling": "fixed_size"},
        {"clients_per_round": 11},
        {"num_clients": 31},
        {"target_delta": 1e-4},
        {"accountant": "pld"},
    ],
    ids=str,
)
def test_a_build_that_changed_is_refused(tmp_path, trained, change):
    path = _copied(trained, tmp_path)
    of = functools.partial(hospital.build, **change)
    changed = hospital.silo(path, of, moved=True)
    with pytest.raises(silo.SiloChangedError, match="Restore them"):
        changed.train(changed.get_weights())
    assert hospital.charged(path) == 1


def test_how_it_trains_stays_as_well(tmp_path, trained):
    path = _copied(trained, tmp_path)
    for change in {"batch_size": 3}, {"local_epochs": 2}, {"rounds": 2}:
        one = hospital.silo(path, moved=True, **change)
        with pytest.raises(silo.SiloChangedError, match=next(iter(change))):
            one.train(one.get_weights())
    assert hospital.charged(path) == 1


def test_what_cannot_be_a_silo_is_refused_when_it_is_made(tmp_path):
    for of, error, match in (
        (None, TypeError, "build must be callable"),
        (lambda: None, TypeError, "must return a compiled DPFederatedModel"),
        (
            lambda: hospital.build(mechanism="none"),
            ValueError,
            "has a central guarantee",
        ),
        (
            lambda: hospital.build(mechanism="local", clip_norm=1.0),
            ValueError,
            "has a central guarantee",
        ),
        (lambda: hospital.build(on_client_failure="abort"), ValueError, '"exclude"'),
        (
            # One patient decided the size of the answer: 1e-4 without, 2.7 with them.
            lambda: hospital.build(
                mechanism=tfdp_fl.MedianClipping(noise_multiplier=1.0)
            ),
            ValueError,
            "exact median would tell",
        ),
        (
            lambda: hospital.build(noise_site="client", sampling="fixed_size"),
            ValueError,
            '"exclude"',
        ),
        (_used, ValueError, "must return a new model"),
        (lambda: hospital.build().with_setup()._compiled, TypeError, "must return"),
    ):
        with pytest.raises(error, match=match):
            hospital.silo(tmp_path / "new", of)
    for change in {"rounds": 0}, {"batch_size": 0}, {"local_epochs": -1}:
        with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
            hospital.silo(tmp_path / "new", **change)
    with pytest.raises(ValueError, match="client_ids"):
        hospital.silo(tmp_path / "new", client_ids=[1, 2])
    one = hospital.silo(tmp_path / "new")
    with pytest.raises(TypeError, match="message_id must be"):
        one.train(one.get_weights(), message_id=b"x")
    with pytest.raises(TypeError, match="private"):
        one.evaluate(one.get_weights())
    assert not (tmp_path / "new").exists()


def _used():
    fed, data = hospital.build(), hospital.table()
    fed.fit(data["x"], data["y"], client_ids=data["client_ids"], verbose=0)
    return fed


def test_metrics_leave_noised_and_charged_only(tmp_path):
    one = hospital.silo(tmp_path)
    start = one.get_weights()
    first = one.evaluate(start, private=_MEANS, message_id=1)
    assert set(first) == {"num_clients", "num_clients_stddev", "accuracy"}
    assert hospital.charged(tmp_path) == 1
    assert one.epsilon(hospital.DELTA) > 0
    again = hospital.silo(tmp_path)
    assert again.evaluate(start, private=_MEANS, message_id=1) == first
    other = tfdp_fl.PrivateMetrics(bounds={"loss": (0, 1)}, noise_multiplier=30.0)
    with pytest.raises(silo.SiloMessageError):
        again.evaluate(start, private=other, message_id=1)
    # Noise that earlier answers decided would have more histories than delta counts.
    louder = dataclasses.replace(_MEANS, noise_multiplier=40.0)
    for one in again, hospital.silo(tmp_path):
        with pytest.raises(ValueError, match="private must have the noise_multiplier"):
            one.evaluate(start, private=louder, message_id=2)
    assert hospital.charged(tmp_path) == 1
    update = again.train(start)
    assert update.epsilon == again.epsilon(hospital.DELTA)
    assert hospital.charged(tmp_path) == 2


@pytest.mark.parametrize("for_good", [False, True])
def test_a_disk_that_is_full_loses_nothing(tmp_path, monkeypatch, for_good):
    one = hospital.silo(tmp_path)
    start = one.get_weights()
    one.train(start)
    left, real, charged = [0], os.fsync, 1

    def failing(descriptor):
        left[0] -= 1
        if left[0] == 0 or (for_good and left[0] < 0):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    for number in itertools.count(1):
        left[0] = number  # The first so many writes succeed.
        try:
            update = one.train(start, message_id="m")
        except (accounting.LedgerError, checkpoint.CheckpointError) as error:
            assert "No space left" in str(error)
            # What was charged may have been lost, never the other way round.
            assert hospital.charged(tmp_path) >= charged
            charged = hospital.charged(tmp_path)
            continue
        break
    left[0] = 1000
    assert number > 5
    assert update.rounds == 1
    again = one.train(start, message_id="m")
    assert hospital.is_same(again, update)
    assert one.epsilon(hospital.DELTA) == update.epsilon


def test_a_disk_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    one = hospital.silo(tmp_path)

    def read_only(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(directory_lib.os, "open", read_only)
    with pytest.raises(silo.SiloError, match="must be writable"):
        one.train(one.get_weights())


def _states(one, act, path, into):
    """Runs `act`; copies each state that the directory is in at a line of the code."""
    modules = (silo.silo, directory_lib, checkpoint, ledger)
    files = {module.__file__ for module in modules}
    seen, copies = [None], []

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        listing = sorted(
            (str(each), each.stat().st_size, each.stat().st_mtime_ns)
            for each in path.rglob("*")
            # (One that is not whole yet is nothing to whoever comes next.)
            if not each.name.startswith(_files.TEMPORARY)
        )
        if listing != seen[0]:
            seen[0] = listing
            copies.append(into / str(len(copies)))
            shutil.copytree(path, copies[-1])
        return trace

    sys.settrace(trace)
    try:
        answer = act()
    finally:
        sys.settrace(None)
    return answer, copies


def test_a_kill_at_any_line_loses_nothing_that_is_not_said(tmp_path, monkeypatch):
    # What was answered before goes as soon as this message has its answer.
    monkeypatch.setattr(directory_lib, "KEPT_BYTES", 0)
    path = tmp_path / "one"
    one = hospital.silo(path, rounds=2)
    start = one.get_weights()
    first, gone = one.train(start, "before"), []
    came = [w + 0.1 for w in start]
    update, states = _states(
        one, lambda: one.train(came, "m"), path, tmp_path / "states"
    )
    assert len(states) > 7
    shutil.rmtree(path)  # Its ledger would count as well, where it can be read.
    answers, ledgers, build = [], [], toy.lent(hospital.build)
    for number, state in enumerate(states):
        killed = hospital.charged(state)
        ledgers.append(killed)
        file = (
            state
            / "answers"
            / (directory_lib.Message.of("train", "m", came).key + ".npz")
        )
        answered = file.exists()
        assert killed == 4 or not answered
        other = state.with_name(f"{state.name}-other")
        shutil.copytree(state, other)
        # The same message again: the same answer, or the rest of the work.
        again = hospital.silo(state, build, rounds=2, moved=True)
        try:
            assert hospital.is_same(again.train(start, "before"), first)
        except silo.SiloMessageError:
            gone.append(number)
            assert answered
        assert hospital.charged(state) == killed
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer = again.train(came, "m")
        assert not any("was interrupted" in str(each.message) for each in caught)
        assert answer.rounds == 2
        answers.append(hospital.is_same(answer, update))
        assert answers[-1] or not answered
        # One round may be run twice, and both are charged and told of.
        repeated = hospital.charged(state) - 4
        assert repeated in (0, 1)
        facts = again.privacy_statement(format="dict")
        assert ("rounds_charged_twice" in facts["caveats"]) == bool(repeated)
        assert answer.epsilon == again.epsilon(hospital.DELTA)
        assert len({w.tobytes() for w in answer.weights}) > 1
        if number % 2:
            continue
        # Another message instead: what is lost is said, and stays charged.
        another = hospital.silo(other, build, rounds=2, moved=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            another.train(start, "n")
        lost = 0 if answered else killed - 2
        said = [str(c.message) for c in caught if "was interrupted" in str(c.message)]
        assert bool(said) == bool(lost)
        text = " ".join(another.privacy_statement().split())
        assert (f"for interrupted messages: {lost}. Their answers" in text) == bool(
            lost
        )
        assert hospital.charged(other) == killed + 2
    assert any(answers)
    assert not all(answers)
    assert gone
    assert ledgers == sorted(ledgers)
    assert set(ledgers) == {2, 3, 4}


@pytest.mark.parametrize("wrong", [False, True])
def test_what_another_process_spent_is_never_forgotten(tmp_path, wrong):
    one, other = hospital.silo(tmp_path), hospital.silo(tmp_path)
    start = one.get_weights()
    one.train(start, 1)
    for number in (2, 3):
        answer = other.train(start, number)
    # Neither a free answer nor an error may hide that the state is another's.
    if wrong:
        with pytest.raises(silo.SiloMessageError, match="for other weights"):
            one.train(answer.weights, 3)
    else:
        assert hospital.is_same(one.train(start, 3), answer)
    facts = one.privacy_statement(format="dict")
    assert facts["rounds"] == hospital.charged(tmp_path) == 3
    told = one.epsilon(hospital.DELTA)
    assert facts["epsilon_rdp"] == pytest.approx(told, rel=1e-9)
    assert one.train(start, 4).rounds == 1
    assert "interrupted" not in one.privacy_statement()


def test_a_message_that_is_killed_twice_goes_on(tmp_path, monkeypatch):
    start, record = hospital.silo(tmp_path).get_weights(), ledger.PrivacyLedger.record

    def killed_after(number):
        def dies(own, *arguments, **options):
            record(own, *arguments, **options)
            if hospital.charged(tmp_path) == number:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ledger.PrivacyLedger, "record", dies)
            # A process that is killed writes nothing more of the silo's own.
            patch.setattr(directory_lib.SiloDirectory, "settle", lambda own: None)
            hospital.silo(tmp_path, rounds=4).train(start, "m")

    killed_after(2)
    # A call that needs no charge, in between, looks at the ledger.
    hospital.silo(tmp_path, rounds=4).privacy_statement()
    killed_after(4)
    answer = hospital.silo(tmp_path, rounds=4).train(start, "m")
    assert answer.rounds == 4


def test_a_damaged_checkpoint_costs_a_round_and_says_so(tmp_path):
    one = hospital.silo(tmp_path)
    start = one.get_weights()
    for number in range(2):
        one.train(start, number)
    newest = max(tmp_path.glob("round-*.npz"))
    newest.write_bytes(newest.read_bytes()[:-9])
    again = hospital.silo(tmp_path)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        update = again.train(start, 2)
    assert update.epsilon == again.epsilon(hospital.DELTA)
    facts = again.privacy_statement(format="dict")
    assert "rounds_charged_twice" in facts["caveats"]
    assert facts["rounds"] == hospital.charged(tmp_path) == 3


def test_the_statement_answers_a_privacy_officer(tmp_path):
    one = hospital.silo(tmp_path / "state")
    one.train(one.get_weights())
    assert max(map(len, one.privacy_statement().splitlines())) <= 80
    text = " ".join(one.privacy_statement().split())
    epsilon = one.privacy_statement(format="dict")["epsilon"]
    double = accounting.format_up(2 * epsilon)
    for said in (
        "with 30 people (a number that is declared and public)",
        "one person of this silo, with all of their rows",
        "a client is such a person, and the server that draws clients and adds noise "
        "is this silo itself",
        "namely the federation's server, the other silos, and anyone who gets a model",
        "They may send any weights, send them again, or collude",
        "the promise for all that this silo has sent so far is epsilon = "
        f"{accounting.format_up(epsilon)} at delta = 0.001",
        "If they stop because of what it sent, the promise is its target, epsilon = 4 "
        "at delta = 0.001, which it never exceeds",
        f"another silo that has spent as much has epsilon = {double} at delta = 0.002",
        "There is no protection against this silo's own staff",
        "has only the sum of the silos' epsilons",
    ):
        assert said in text, said
    assert "asked for an evaluation" not in text
    for _ in range(2):
        one.evaluate(one.get_weights(), private=_MEANS)
    assert (
        "If that also decided when they asked for an evaluation (2 so far), delta "
        "counts once more for each: epsilon = 4 at delta = 0.003."
    ) in " ".join(one.privacy_statement().split())
    page = tmp_path / "report.html"
    one.report(page)
    html = page.read_text()
    assert "own staff and machines" in html
    preface = one.privacy_statement(format="dict")["silo"]
    assert preface.replace("'", "&#39;") in html
    assert "<h1>state: " in html
    assert "The rounds" not in html
    assert "interrupted messages" not in text


def test_a_model_without_a_config_is_known_by_its_class():
    class Own(tf.keras.Model):
        def get_config(self):
            raise NotImplementedError

    assert silo.silo._architecture(Own()).endswith("Own")
    twice = [silo.silo._architecture(hospital.build().model) for _ in range(2)]
    assert twice[0] == twice[1]


@pytest.mark.parametrize("sampling", ["poisson", "random_allocation"])
def test_an_answer_does_not_tell_how_many_people_there_are(tmp_path, sampling):
    def build():
        return hospital.build(sampling=sampling, accountant="pld")

    answers = []
    for people in (hospital.NUM_PEOPLE, hospital.NUM_PEOPLE - 1):
        # Nor does somebody whose id is that of an empty place.
        table = hospital.table(people)
        ids = table.pop("client_ids").astype(object)
        ids[-2:] = "(nobody 0)"
        one = tfdp_fl.Silo(
            build,
            **table,
            client_ids=ids,
            directory=tmp_path / str(people),
            rounds=6,
            batch_size=2,
        )
        answers.append(one.train(one.get_weights())[1:])
    assert answers[0] == answers[1]
    assert answers[0][0] == 6
    more = hospital.table(hospital.NUM_PEOPLE + 1)
    with pytest.raises(ValueError, match="at most 30 people"):
        tfdp_fl.Silo(build, **more, directory=tmp_path / "more")


def test_a_label_that_is_no_class_is_said_to_the_silos_owner_alone(tmp_path):
    table = hospital.table()
    table["y"][3] = 7

    def build():
        fed = hospital.build()
        fed.compile(
            tf.keras.optimizers.SGD(0.5),
            tf.keras.losses.SparseCategoricalCrossentropy(),
        )
        return fed

    with pytest.raises(ValueError, match="labels must be"):
        tfdp_fl.Silo(build, **table, directory=tmp_path / "state")
    assert not (tmp_path / "state" / "ledger.jsonl").exists()


def test_a_cohort_that_fails_as_a_whole_gets_an_answer_like_any_other(tmp_path):
    # Else weights that make training raise above a threshold ask for the lowest value.
    class Checked(tf.keras.layers.Layer):
        def call(self, x):
            return tf.debugging.check_numerics(tf.exp(x), "diverged")

    def build():
        layers = tf.keras.layers
        model = tf.keras.Sequential(
            [layers.Input((hospital.NUM_FEATURES,)), layers.Dense(1), Checked()]
        )
        fed = tfdp_fl.make_private(
            model,
            target_epsilon=4.0,
            target_delta=hospital.DELTA,
            num_clients=hospital.NUM_PEOPLE,
            clients_per_round=10,
            rounds=6,
        )
        fed.compile(tf.keras.optimizers.SGD(0.1), "mse")
        return fed

    x = hospital.table()["x"]
    made = hospital.silo(tmp_path / "silo", of=build, x=np.full_like(x, -1))
    weights = [np.full((hospital.NUM_FEATURES, 1), -100.0, "f"), np.zeros(1, "f")]
    answer = made.train(weights)
    assert answer.rounds and hospital.charged(tmp_path / "silo") == answer.rounds
    assert not np.array_equal(answer.weights[0], weights[0])
    assert "whether this silo answers" in made.privacy_statement().replace("\n", " ")
