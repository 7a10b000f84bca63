"""Budget, ledger, checkpoints and report as callbacks of a training."""

import contextlib
import functools
import html
import re
import shutil
import signal
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import _signals, accounting
from tfdp_fl.keras import callbacks, checkpoint
from tfdp_fl.keras.callbacks import (
    FederatedCallback,
    Ledger,
    PrivacyBudget,
    Report,
    RoundCheckpoint,
)

_DELTA = 1e-3
_LOCAL = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=2.0)


def _raises(place, error):
    """Returns a callback that raises in one of the places where it is asked."""
    callback = FederatedCallback()
    setattr(callback, place, mock.Mock(side_effect=error))
    return callback


def test_a_round_is_charged_before_the_model_changes():
    fed, seen, lines = toy.federated(), [], FederatedCallback()

    def note(name, *_):
        seen.append((name, fed.get_weights()[0].copy()))

    for name in ("rounds_planned", "round_charged", "round_released", "fit_end"):
        setattr(lines, f"on_{name}", functools.partial(note, name))
    toy.fit(fed, 2, [lines])
    kinds = [kind for kind, _ in seen]
    rounds = ["round_charged", "round_released"] * 2
    assert kinds == ["rounds_planned", *rounds, "fit_end"]
    start, charged, released, again, *_ = (weights for _, weights in seen)
    np.testing.assert_array_equal(charged, start)
    assert np.abs(released - start).max() > 1e-6
    np.testing.assert_array_equal(again, released)
    # A round that is not written does not happen.
    before, spent = fed.get_weights(), fed.epsilon(_DELTA)
    refuses = _raises("on_round_charged", OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        toy.fit(fed, 2, [refuses, lines])
    toy.assert_same(before, fed)
    assert (fed.epsilon(_DELTA), fed.rounds) == (spent, 2)
    assert seen[-1][0] == "fit_end"


def test_a_budget_stops_before_the_round_that_would_overspend():
    noise, size = (lambda t: 1.5 - t / 10), (lambda t: 10 + t)
    make = functools.partial(tfdp_fl.FixedClipping, clip_norm=0.5)
    fed = toy.federated(make(noise_multiplier=noise), None, size, "poisson")
    # The rounds' costs, computed by hand.
    sampler = tfdp_fl.sampling.make_sampler("poisson", 40, size)
    history, after = accounting.PrivacyAccountant(), []
    for t in range(12):
        event = make(noise_multiplier=noise(t)).round_event(0, None)
        history.add(sampler.charge(t, event))
        after.append(history.epsilon(_DELTA))
    budget = PrivacyBudget(0.5 * (after[4] + after[5]), _DELTA)
    with mock.patch.object(type(fed), "say") as say:
        toy.fit(fed, 12, [budget])
    assert (fed.rounds, budget.stopped_before_round) == (5, 5)
    assert fed.epsilon(_DELTA) == pytest.approx(after[4])
    assert "allows 5 of the 12 rounds asked for" in say.call_args_list[0].args[0]
    # A second fit goes on with what was spent; a larger budget allows more.
    assert toy.fit(fed, 2, [budget]).epoch == []
    history = toy.fit(fed, 7, [PrivacyBudget(after[6], _DELTA)])
    assert history.epoch == [5, 6]
    assert len(history.history["epsilon"]) == 2
    assert fed.epsilon(_DELTA) <= after[6]
    # A local one counts the client seen most; without noise there is none.
    fed = toy.federated(_LOCAL, clients_per_round=40)
    once = fed.mechanism.mu_squared(None)
    epsilon = accounting.epsilon_of_mu_squared(3.5 * once, _DELTA)
    toy.fit(fed, 9, [PrivacyBudget(epsilon, _DELTA)])
    assert fed.rounds == 3
    quiet = toy.federated(tfdp_fl.NoPrivacy())
    assert toy.fit(quiet, 3, [PrivacyBudget(100.0, _DELTA)]).epoch == []


_read = accounting.PrivacyLedger.read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_error_at_the_end_of_fit_leaves_no_ledger_locked(path, error):
    fed, ledger, at_end = toy.federated(), Ledger(path), _raises("on_fit_end", error)
    if error is KeyboardInterrupt:
        at_end.on_fit_end = lambda *_: signal.raise_signal(signal.SIGINT)
    with pytest.raises(error):
        toy.fit(fed, 1, [at_end, ledger])
    with accounting.PrivacyLedger(path, "append") as opened:
        assert opened.rounds == 1
    toy.fit(fed, 1, [ledger])


def test_a_ledger_holds_every_round_of_several_fits(path):
    fed, ledger = toy.federated(), Ledger(path)
    toy.fit(fed, 2, [ledger])
    toy.fit(fed, 1, [ledger])
    contents = _read(path)
    assert [e.round_index for e in contents.entries] == [0, 1, 2]
    assert {e.cohort_size for e in contents.entries} == {20}
    details = {"noise_multiplier": 1.0, "noise_generator": "philox"}
    assert contents.entries[0].details == details | {"planned": [2]}
    assert contents.entries[1].details == details  # It was the last one.
    assert contents.epsilon(_DELTA) == fed.epsilon(_DELTA)
    # Another run is refused, unless told to append.
    new = toy.federated()
    with pytest.raises(ValueError, match="ledger of another run"):
        toy.fit(new, 1, [ledger])
    assert new.rounds == 0


@pytest.mark.parametrize(
    "options, known",
    [((None, None, 4, "poisson"), 4.847), ((_LOCAL, None, 40, "shuffled"), 37.62)],
)
def test_a_ledger_of_two_runs_tells_what_all_rounds_cost(path, options, known):
    delta, make = 1e-5, functools.partial(toy.federated, *options)
    first, second, resumed = make(), make(), make()
    toy.fit(first, 10, [Ledger(path, append=True)])
    # Rounds that nobody wrote down, and then as many with the ledger, and a new one.
    toy.fit(second, 10)
    assert second.epsilon(delta) == first.epsilon(delta)
    new = Ledger(path.with_name("new"))
    toy.fit(second, 10, [Ledger(path, append=True), new])
    assert len(_read(new.path).entries) == 20
    spent, contents = second.epsilon(delta), _read(path)
    assert spent == pytest.approx(known, abs=0.005)
    assert contents.epsilon(delta) == pytest.approx(spent, abs=1e-9)
    lines = {run: len(own) for run, own in contents.by_run().items()}
    assert lines == {first.run.run_id: 10, second.run.run_id: 20}
    # To read it again adds nothing.
    toy.fit(second, 1, [Ledger(path, append=True)])
    told = _read(path).epsilon(delta)
    assert second.epsilon(delta) == pytest.approx(told, abs=1e-9)
    facts = second.privacy_statement(delta, "dict")
    assert (facts["rounds"], facts["rounds_of_others"]) == (21, 10)
    assert "21 rounds of training and 10 of" in facts["summary"]
    assert "only_runs_in_ledgers_counted" in facts["caveats"]
    assert "hyperparameter_search_not_counted" not in facts["caveats"]
    # What came from the ledger survives a resume.
    directory = path.with_name("run")
    toy.fit(second, 1, [RoundCheckpoint(directory)])
    toy.fit(resumed, 1, resume_from=directory)
    assert resumed.run.run_id == second.run.run_id
    assert resumed.epsilon(delta) == pytest.approx(second.epsilon(delta), abs=1e-9)


def test_a_budget_counts_a_ledger_wherever_it_stands_and_both_can_be_added(path):
    first, second = (toy.federated(sampling="poisson") for _ in range(2))
    toy.fit(first, 3, [Ledger(path, append=True)])
    spent = accounting.epsilon(1.0, "poisson", 40, 20, 4, _DELTA)
    budget = PrivacyBudget(spent * 1.001, _DELTA)
    toy.fit(second, 3, [budget, Ledger(path, append=True)])
    assert second.rounds == 1
    assert second.epsilon(_DELTA) <= budget.epsilon
    before = path.read_bytes()
    for other, message in (
        (toy.federated(_LOCAL), "path must be a ledger of runs with a local guarantee"),
        (toy.federated(), "one guarantee cannot cover both"),
    ):
        with pytest.raises(ValueError, match=message):
            toy.fit(other, 1, [Ledger(path, append=True)])
        assert other.rounds == 0
        assert path.read_bytes() == before


def test_a_ledger_is_of_one_kind_before_its_first_line(path):
    # Epsilons per record were added up as if they were per client.
    accounting.PrivacyLedger(path).close()
    before = path.read_bytes()
    nbafl = tfdp_fl.NbAFL(epsilon=10.0, constant=2.0, weight_clip=5.0)
    per_record = toy.federated(nbafl, clients_per_round=40)
    with pytest.raises(ValueError, match="with a local guarantee per record"):
        toy.fit(per_record, 1, [Ledger(path, append=True)])
    assert per_record.rounds == 0 and path.read_bytes() == before
    fed = toy.federated(_LOCAL, clients_per_round=40)
    toy.fit(fed, 1, [Ledger(path, append=True)])
    assert fed.rounds == 1


def test_a_full_disk_abandons_the_round(path):
    fed, ledger = toy.federated(), Ledger(path)
    toy.fit(fed, 1, [ledger])
    before, weights = path.read_bytes(), fed.get_weights()
    fails = pytest.raises(accounting.LedgerWriteError, match="must not be released")
    for room in (0, 40):
        with toy.full_disk(len(before) + room), fails:
            toy.fit(fed, 1, [ledger])
        assert path.read_bytes() == before
        assert fed.rounds == 1
        toy.assert_same(weights, fed)
    toy.fit(fed, 1, [ledger])
    assert len(_read(path).entries) == 2
    # A ledger that is deleted stops the training.
    with pytest.raises(accounting.LedgerMovedError):
        toy.fit(fed, 3, [ledger, toy.at_end(path.unlink)])
    assert fed.rounds == fed.account.rounds == 3


def test_what_a_directory_of_checkpoints_holds(tmp_path):
    path = tmp_path / "run"

    def contents():
        return {file.name: file.read_bytes() for file in path.iterdir()}

    fed = toy.federated(sampling="shuffled", delta=_DELTA)
    keeper = RoundCheckpoint(path, every=2, keep=2)
    toy.fit(fed, 5, [keeper])
    saved = ["round-00000004.npz", "round-00000005.npz"]
    assert sorted(contents()) == ["ledger.jsonl", *saved]
    # A second fit of the same model goes on.
    toy.fit(fed, 1, [keeper])
    toy.fit(fed, 1, [RoundCheckpoint(path)])
    assert "round-00000007.npz" in contents()
    told = accounting.epsilon_from_ledger(path / "ledger.jsonl", _DELTA)
    assert told == fed.epsilon(_DELTA)
    before, new = contents(), toy.federated(sampling="shuffled")
    with pytest.raises(ValueError, match="not hold the checkpoints of another run"):
        toy.fit(new, 1, [keeper])
    error = checkpoint.CheckpointWriteError
    with toy.full_disk(100), pytest.raises(error, match="cannot be written"):
        toy.fit(fed, 1, [keeper])
    assert (fed.rounds, new.rounds) == (7, 0)
    assert before == contents()
    # At the end of a training it is raised, also where another error was handled.
    writes = mock.patch.object(
        checkpoint.CheckpointDirectory, "write", side_effect=[None, error]
    )
    with writes, pytest.raises(error), contextlib.ExitStack() as handled:
        handled.callback(toy.fit, new, 2, [RoundCheckpoint(tmp_path, every=100)])
        raise RuntimeError("the first try")


def _page(path, fed, callbacks=(), title=None, **options):
    written = Report(path / "new" / "report.html", delta=1e-2, title=title)
    with contextlib.suppress(KeyboardInterrupt):
        toy.fit(fed, callbacks=[written, *callbacks], **options)
    return written.path.read_text("utf-8")


class _MovesTheLink(tf.keras.callbacks.Callback):
    """After a round, `link` leads to another folder, where another run begins."""

    def __init__(self, link, there, begin=lambda: None, round_index=0):
        super().__init__()
        self._link, self._there, self._begin = link, there, begin
        self._round_index = round_index

    def on_epoch_end(self, epoch, logs=None):
        if epoch != self._round_index:
            return
        self._link.unlink()
        self._link.symlink_to(self._there)
        self._begin()


def _linked(path):
    for name in ("one", "two"):
        (path / name).mkdir()
    (path / "latest").symlink_to(path / "one")
    return path / "latest", path / "two"


def test_a_run_writes_no_checkpoint_into_the_directory_of_another(tmp_path):
    link, there = _linked(tmp_path)
    other = toy.federated()
    begin = functools.partial(toy.fit, other, 2, [RoundCheckpoint(link, keep=1)])
    fed = toy.federated(clients_per_round=21)
    with pytest.raises(accounting.LedgerMovedError):
        toy.fit(
            fed,
            5,
            [RoundCheckpoint(link, keep=1), _MovesTheLink(link, there, begin, 3)],
        )
    assert [file.name for file in there.glob("round-*")] == ["round-00000002.npz"]
    again = toy.federated()
    toy.fit(again, 2, [RoundCheckpoint(link, keep=1)], resume_from=link)
    assert again.rounds == 2


def test_a_ledger_whose_link_moved_is_closed_when_fit_ends(tmp_path):
    # It stayed attached under its old name, and every later fit raised.
    link, there = _linked(tmp_path)
    fed = toy.federated()
    with pytest.raises(accounting.LedgerMovedError):
        toy.fit(fed, 2, [Ledger(link / "ledger"), _MovesTheLink(link, there)])
    shutil.rmtree(tmp_path / "one")
    with pytest.warns(RuntimeWarning, match="is missing: other runs"):
        toy.fit(fed, 1)
    assert fed.rounds == 2


def test_a_report_of_another_model_has_only_its_rounds(tmp_path):
    report = Report(tmp_path / "report.html", delta=1e-2)
    for model, rounds in ((None, 3), (toy.two_layers, 1)):
        toy.fit(toy.federated(model=model, delta=1e-2), rounds, [report])
        assert [number for number, _ in report._series("epsilon")] == [
            *range(1, rounds + 1)
        ]


def test_a_report_is_one_file_with_everything(tmp_path):
    fed = toy.federated(sampling="shuffled", delta=1e-2)
    options = {"validation_data": toy.arrays(20), "seed": 4242, "title": "Toys & <b>"}
    page = _page(tmp_path, fed, rounds=2, **options)
    assert fed.run.population[1] not in page
    assert "4242" not in re.sub("(?s)<svg.*?</svg>", "", page)
    assert not re.search(r"(src|href)=.(?!#)", page)
    text = " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())
    facts = fed.privacy_statement(1e-2, "dict")
    parts = [facts[name] for name in ("summary", "meaning", "secrecy", "how")]
    for part in (*parts, *facts["caveats"].values()):
        assert " ".join(part.split()) in text
    assert "<td>SGD</td>" in page
    assert text.startswith("Toys & <b>: training with differential privacy")
    assert re.search(
        rf"Written on 20\d\d-\d\d-\d\d by tfdp_fl {tfdp_fl.__version__}", text
    )
    for row in ("Clients 40", "Clients' learning rate 0.1", "Batch size 32"):
        assert f" {row} " in text
    assert "was interrupted" not in text
    assert page.count("<svg") >= 3
    shown = float(re.search(r"<b>([0-9.]+)</b>epsilon", page)[1])
    assert facts["epsilon"] <= shown <= facts["epsilon"] + 0.001
    # Also where the user ends the training; names are text; charts need matplotlib.
    settings = {"optimizer": "<script>alert(1)</script>"}
    fed, stop = toy.federated(), _raises("on_round_released", KeyboardInterrupt)
    with (
        mock.patch.object(checkpoint, "settings", lambda *_: settings),
        mock.patch.dict("sys.modules", {"matplotlib": None}),
    ):
        page = _page(tmp_path, fed, [stop])
    for part in ("was interrupted", "&lt;script&gt;", 'pip install "tfdp_fl[plots]"'):
        assert part in page
    assert not re.search("<script>|<svg", page)
    with pytest.raises(ValueError, match="path must name a file"):
        Report(tmp_path)


def test_a_signal_just_before_signals_are_held_back_leaves_nobody_untold():
    ends, held = [FederatedCallback() for _ in range(2)], [KeyboardInterrupt]
    for each in ends:
        each.on_fit_end = mock.Mock()
    block = _signals.defer_signals

    def late():
        if held:
            raise held.pop()
        return block()

    patch = mock.patch.object(_signals, "defer_signals", late)
    told = callbacks.callback_session(ends, 0, 1)
    with patch, pytest.raises(KeyboardInterrupt), told:
        pass
    for each in ends:
        each.on_fit_end.assert_called_once_with()
