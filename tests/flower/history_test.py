"""Rounds of a server: its ledger, budget and restarts, its cohorts, strange mods."""

import collections
import copy
import dataclasses
import pickle
import random
from unittest import mock

import dp_accounting
import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib

pytestmark = pytest.mark.usefixtures("wide_cells")

_DELTA = 1e-5
_GRID = fm.Grid({i: fm.adds([np.ones(2)]) for i in range(8)})  # N is 6.
_MODEL = fm.model(np.zeros(2))
_ADAPTIVE = tfdp_fl.AdaptiveClipping(
    noise_multiplier=1.0, initial_clip_norm=0.1, count_noise_stddev=1.0
)


def _private(mechanism=fm.NOISY, **options):
    return fm.private(mechanism, 3, 6, **options)


def _run(strategy, rounds, first=1):
    """Runs rounds; returns how many were released."""
    before = len(strategy.charged_rounds)
    for server_round in range(first, first + rounds):
        fm.a_round(strategy, _GRID, _MODEL, server_round)
    return len(strategy.charged_rounds) - before


def _central(rounds, z=1.0):
    return accounting.epsilon(z, "fixed_size", 6, 3, rounds, _DELTA)


def _target(rounds):
    """Returns a budget for so many rounds."""
    return {"target_epsilon": _central(rounds) + 1e-6, "target_delta": _DELTA}


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "ledger.jsonl"


def _entries(path):
    return accounting.PrivacyLedger.read(path).entries


@pytest.mark.parametrize("sampling", ["fixed_size", "poisson", "random_allocation"])
def test_a_run_that_ends_early_has_the_epsilon_of_what_was_planned(sampling):
    strategy = _private(sampling=sampling, rounds=4)
    whole = accounting.epsilon(1.0, sampling, 6, 3, 4, _DELTA, "pld")
    for number in (1, 4):
        report = strategy.privacy_report(_DELTA, "pld")
        assert report["planned_rounds"] == 4
        planned = report["epsilon_of_planned_rounds"]
        # (A pass that a restarted server would begin is one more.)
        assert planned >= whole * (1 - 1e-9) and planned > report["epsilon"]
        if number == 1 or sampling != "random_allocation":
            assert planned == pytest.approx(whole)
        assert accounting.CAVEATS["plan_fixed_in_advance"] in report["caveats"]
        _run(strategy, 3 if number == 1 else 1, number)
    report = strategy.privacy_report(_DELTA, "pld")
    assert report["planned_rounds"] is report["epsilon_of_planned_rounds"] is None


class _LessAndLess(tfdp_fl.FixedClipping):
    """The noise of a pass of two rounds is below that of the pass before."""

    def noise_multiplier_at(self, round_index):
        return self.noise_multiplier / (1 + round_index // 2)

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(self.noise_multiplier_at(round_index))


def test_planned_passes_cost_what_their_own_rounds_do():
    # They were priced by the events of the next rounds: 2.1 planned, 5.5 charged.
    mechanism = _LessAndLess(clip_norm=1.0, noise_multiplier=4.0)
    strategy = _private(mechanism, sampling="random_allocation", rounds=6)
    planned = [strategy.privacy_report(_DELTA)["epsilon_of_planned_rounds"]]
    for number in range(1, 7):
        _run(strategy, 1, number)
        report = strategy.privacy_report(_DELTA)
        planned.append(report["epsilon_of_planned_rounds"] or np.inf)
    assert report["epsilon"] > 0
    assert min(planned) >= report["epsilon"] * (1 - 1e-9)


def test_epsilon_is_that_of_the_rounds_released():
    strategy = _private()
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            twin(strategy)
    assert strategy.privacy_epsilon(_DELTA) == 0.0
    _run(strategy, 5)
    assert strategy.privacy_epsilon(_DELTA) == pytest.approx(_central(5))
    # Somebody who knows the cohorts is told another one.
    report = strategy.privacy_report(_DELTA)
    known = accounting.epsilon(1.0, "fixed_size", 3, 3, 5, _DELTA)
    assert report["epsilon"] == pytest.approx(_central(5))
    assert report["epsilon_if_cohorts_are_known"] == pytest.approx(known)
    for words in ("Keep that secret", "names of clients were the ids of nodes"):
        assert words in " ".join(report["caveats"])
    # A private median: both of its releases.
    both = {"noise_multiplier": 2.0, "median_noise_multiplier": 2.0}
    strategy = _private(tfdp_fl.MedianClipping(**both))
    _run(strategy, 1)
    assert strategy.privacy_epsilon(_DELTA) == pytest.approx(_central(1, 2**0.5))
    strategy = _private(fm.FIXED)
    _run(strategy, 1)
    for accountant in ("rdp", "pld"):
        assert strategy.privacy_epsilon(_DELTA, accountant) == np.inf
    with pytest.raises(ValueError, match="delta"):
        strategy.privacy_epsilon()
    # Without noise nothing is affordable.
    strategy = _private(fm.FIXED, target_epsilon=1e6, target_delta=_DELTA)
    assert _run(strategy, 3) == 0


def test_the_tighter_accountant_is_the_default():
    def epsilon(accountant):
        settings = "fixed_size", 8, 2, 2, _DELTA, accountant
        return accounting.epsilon(4.0, *settings)

    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=4.0)
    budget = {"target_epsilon": epsilon("pld") + 1e-3, "target_delta": _DELTA}
    assert epsilon("rdp") > epsilon("pld") + 1e-3
    strategy = fm.private(mechanism, 2, 8, **budget)
    assert _run(strategy, 5) == 2
    assert strategy.privacy_epsilon() == pytest.approx(epsilon("pld"))
    assert strategy.privacy_epsilon(accountant="rdp") == pytest.approx(epsilon("rdp"))
    assert strategy.privacy_report()["accountant"] == "pld"
    by_rdp = fm.private(mechanism, 2, 8, **budget, accountant="rdp")
    assert _run(by_rdp, 5) < 2
    # From half of the clients on, RDP is tighter.
    assert _private().privacy_report(_DELTA)["accountant"] == "rdp"


def test_it_stops_before_the_round_that_would_overspend(caplog):
    strategy = _private(**_target(4))
    assert _run(strategy, 4) == 4
    assert fm.configured(strategy, _GRID, _MODEL, 5) == []
    assert "Stopped before round 5" in caplog.text
    assert strategy.stopped_before_round == 5
    # Results of a stopped round are not released.
    told = fm.configured(_private(), _GRID, _MODEL, 5)
    got = strategy.aggregate_train(5, _GRID.send_and_receive(told))
    assert got == (None, None)
    assert _run(strategy, 10, first=6) == 0
    assert len(strategy.strategy.handed) == 4
    assert strategy.privacy_epsilon() <= _central(4) + 1e-6


def test_where_all_rounds_are_charged_nobody_is_waited_for(caplog):
    strategy = _private(rounds=1)
    assert _run(strategy, 1) == 1
    waits = mock.patch.object(strategy.strategy, "configure_train")
    with waits as configure:
        assert _run(strategy, 2, first=2) == 0
    configure.assert_not_called()
    assert "Round 3 is not started: all rounds=1" in caplog.text


def test_the_same_script_started_again_counts_what_it_released(path):
    first = _private(**_target(6), ledger=path)
    assert _run(first, 4) == 4
    first.close()
    again = _private(**_target(6), ledger=path)
    assert again.privacy_report()["rounds_from_ledger"] == 4
    assert again.privacy_epsilon() == pytest.approx(_central(4))
    assert _run(again, 10) == 2
    assert again.privacy_report()["rounds_from_ledger"] == 4
    assert len(_entries(path)) == 6
    # Schedules and plans go on, too.
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=(1.0, 3.0, 5.0))
    other = path.with_name("other")
    for rounds in (1, 5):
        strategy = _private(mechanism, rounds=3, ledger=other)
        _run(strategy, rounds)
        strategy.close()
    charged = [entry.charge.noise_multiplier for entry in _entries(other)]
    assert charged == [1, 3, 5]


def test_runs_with_one_ledger_have_one_budget(path):
    with accounting.PrivacyLedger(path) as ledger:
        one, other = (
            _private(mechanism, ledger=ledger, **_target(6))
            for mechanism in (fm.NOISY, _ADAPTIVE)
        )
        ran = [_run(one, 2), _run(other, 2), _run(one, 9), _run(other, 9)]
        assert ran == [2, 2, 2, 0]
        for strategy in (one, other):
            assert strategy.privacy_epsilon() == pytest.approx(_central(6))
    # Five that ask before any of them writes: two rounds are affordable.
    path = path.with_name("other")
    with accounting.PrivacyLedger(path) as ledger:
        strategies = [_private(ledger=ledger, **_target(2)) for _ in range(5)]
        told = [fm.configured(strategy, _GRID, _MODEL) for strategy in strategies]
        for strategy, messages in zip(strategies, told, strict=True):
            strategy.aggregate_train(1, _GRID.send_and_receive(messages))
        spent = strategies[0].privacy_epsilon(delta=_DELTA)
    assert spent <= _target(2)["target_epsilon"]
    assert accounting.epsilon_from_ledger(path, _DELTA) == spent
    assert sum(len(s.strategy.handed) for s in strategies) == 2


def test_each_round_is_on_the_disk_before_it_is_released(path):
    seen = []
    strategy = _private(_ADAPTIVE, ledger=path)
    strategy.strategy.aggregate_train = lambda *_: (
        seen.append(len(_entries(path))) or (None, None)
    )
    _run(strategy, 3)
    assert seen == [1, 2, 3]
    contents = accounting.PrivacyLedger.read(path)
    assert contents.epsilon(_DELTA) == pytest.approx(_central(3))
    clips = [entry.details["clip_norm"] for entry in contents.entries]
    assert clips == [r.clip_norm for r in strategy.charged_rounds]
    assert [e.round_index for e in contents.entries] == [0, 1, 2]
    assert [e.cohort_size for e in contents.entries] == [3] * 3


def test_what_cannot_be_written_is_not_released(path):
    strategy = _private(_ADAPTIVE, ledger=path)
    _run(strategy, 1)
    before = strategy.charged_rounds, strategy.clip_norm
    full = ledger_lib.LedgerWriteError("disk full")
    with (
        mock.patch.object(ledger_lib.PrivacyLedger, "record", side_effect=full),
        pytest.raises(ledger_lib.LedgerWriteError, match="disk full"),
    ):
        _run(strategy, 1, 2)
    assert len(strategy.strategy.handed) == 1
    assert (strategy.charged_rounds, strategy.clip_norm) == before
    # A round in which all fail is noise: not to release it tells who was drawn.
    fm.configured(strategy, _GRID, _MODEL, 3)
    assert strategy.aggregate_train(3, [])[0] is not None
    assert len(_entries(path)) == 2


def test_a_ledger_of_records_is_refused_and_let_go(path):
    # Its epsilons were counted as if they were per client.
    for _ in range(2):
        accounting.PrivacyLedger(path, "append", privacy_unit="record").close()
        with pytest.raises(ValueError, match="with a central guarantee per client"):
            _private(ledger=path)


def test_a_ledger_of_another_relation_is_refused_and_let_go(path):
    for wrong in ({"on_client_failure": "never"}, {"accountant": "moments"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            _private(ledger=path, **wrong)
    with pytest.raises(TypeError, match="ledger must be a str"):
        _private(ledger=3)
    assert not path.exists()
    cohorts = {"sampling": "poisson", "num_clients": 100, "clients_per_round": 10}
    event = dp_accounting.GaussianDpEvent(1.0)
    poisson = accounting.RoundCharge(**cohorts, event=event)
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, poisson, 10)
    with pytest.raises(ValueError, match="neighbouring relation"):
        _private(ledger=path)
    accounting.PrivacyLedger(path, mode="append").close()
    # A line of others without a charge has no epsilon.
    central = {"trust_model": "central", "name": "mine"}
    with accounting.PrivacyLedger(path.with_name("b"), mechanism=central) as ledger:
        strategy = _private(ledger=ledger)
        _run(strategy, 1)
        ledger.record(1, None, 3, local={"mu_squared": 4.0, "max_mu_squared": 4.0})
        with pytest.raises(
            ValueError, match=r"must have only rounds of .* with a central charge"
        ):
            strategy.privacy_epsilon(_DELTA)


def _of_four(mechanism=fm.NOISY, n=8, **options):
    return fm.private(mechanism, 4, n, **options)


def _grid(n=8, change=None, **options):
    return fm.Grid({i: fm.adds([np.zeros(3)]) for i in range(n)}, change, **options)


def _round(strategy, grid, number=1):
    return fm.a_round(strategy, grid, fm.model(np.zeros(3)), number)


def test_of_clients_without_the_mod_nothing_is_released(caplog):
    strategy = _of_four(fm.SHARES)
    assert _round(strategy, _grid(mod=None)) == (None, None)
    assert strategy.rejected_replies == 4
    assert strategy.strategy.handed == []

    def mod(message, context, call_next):
        if message.metadata.dst_node_id == grid.sent[0].metadata.dst_node_id:
            return call_next(message, context)
        return tfdp_fl.flower.private_mod(message, context, call_next)

    # One client alone is not in the mean.
    strategy, grid = _of_four(fm.SHARES), _grid(mod=mod)
    new, _ = _round(strategy, grid)
    assert new is not None
    assert "applied" in caplog.text
    assert strategy.rejected_replies == 1


@pytest.mark.parametrize("value", [0.0, 0.4999, float("nan"), "0.5", [0.5]])
def test_without_the_mods_word_for_clip_and_noise(value):
    for name in ("dpfedavg_applied_clip_norm", "dpfedavg_applied_noise_stddev"):

        def changed(replies, name=name):
            for reply in replies:
                metrics = reply.content["metrics"]
                # Past Flower's own check of types.
                kept = metrics.__dict__["_data"] if fm.INSTALLED else metrics
                kept[name] = value
            return replies

        strategy = _of_four(fm.SHARES)
        assert _round(strategy, _grid(change=changed)) == (None, None)
        assert strategy.rejected_replies == 4


@pytest.mark.parametrize("mechanism", [fm.NOISY, fm.SHARES])
def test_a_mod_that_makes_updates_longer(mechanism):
    def longer(message, context, call_next):
        reply = call_next(message, context)
        reply.content["arrays"] = fm.model(np.full(3, 1e6))
        return reply

    quiet = dataclasses.replace(mechanism, noise_multiplier=1e-9)
    mods = longer, tfdp_fl.flower.private_mod
    for outer, inner in (mods, mods[::-1]):

        def mod(message, context, call_next, outer=outer, inner=inner):
            return outer(message, context, lambda m, c: inner(m, c, call_next))

        # The context of a `ClientApp`, where state would be, is None here.
        got, _ = _round(_of_four(quiet), _grid(mod=mod))
        assert np.linalg.norm(fm.arrays(got)[0]) <= 0.5 * (1 + 1e-6)


def _renamed(replies):
    # For each client, as nobody knows of which reply names are taken.
    for reply in replies:
        metrics, model = reply.content.pop("metrics"), reply.content.pop("arrays")
        reply.content["arrays "] = model
        reply.content["arrays"] = metrics
    return replies


def _one_more(**claims):
    return lambda replies: [fm.claim(copy.deepcopy(replies[0]), **claims), *replies]


@pytest.mark.parametrize(
    "change, rejected",
    [
        (_renamed, 0),
        (lambda replies: [*replies, replies[0], replies[0]], 2),
        (_one_more(reply_to_message_id="old"), 1),
        (_one_more(src_node_id=99), 1),
    ],
)
@pytest.mark.parametrize(
    "mechanism, on_client_failure",
    [(fm.FIXED, "exclude"), (fm.FIXED, "abort"), (fm.SHARES, "abort")],
)
def test_a_reply_beside_all_others(change, rejected, mechanism, on_client_failure):
    strategy = _of_four(mechanism, on_client_failure=on_client_failure)
    got, _ = _round(strategy, _grid(change=change))
    assert got is not None
    assert strategy.rejected_replies == rejected
    (released,) = strategy.charged_rounds
    assert (released.num_replies, released.charge.clients_per_round) == (4, 4)


def test_the_strategy_is_handed_the_mean_alone():
    def secret(i):
        return fm.adds([np.full(3, float(i))], 10**i, loss=float(i), secret=9.0 * i)

    strategy = _of_four()
    got, _ = _round(strategy, fm.Grid({i: secret(i) for i in range(8)}))
    ((handed,),) = strategy.strategy.handed
    assert dict(handed.content["metrics"]) == {"num-examples": 1}
    (mean,) = fm.arrays(handed.content["arrays"])
    np.testing.assert_allclose(mean, fm.arrays(got)[0])
    assert len(dict(handed.content)) == 2
    # A function for the clients' metrics would be handed theirs.
    inner = fm.Strategy(4)
    inner.train_metrics_aggr_fn = lambda contents, key: contents[0]
    with pytest.raises(ValueError, match="train_metrics_aggr_fn"):
        _of_four(strategy=inner)


def _cohorts(rounds, n=8, **options):
    random.seed(42)
    strategy, grid, model = _of_four(n=n, **options), _grid(n), fm.model(np.zeros(3))
    told = [fm.configured(strategy, grid, model, number) for number in range(rounds)]
    return [sorted(m.metadata.dst_node_id for m in messages) for messages in told]


def test_pythons_seed_or_a_strategy_that_prefers_some_nodes_foretells_no_cohort():
    # The same 9 cohorts of 70 by chance: 70^-9, less than 3e-17.
    assert _cohorts(9) != _cohorts(9)

    class Stubborn(fm.Strategy):
        def configure_train(self, server_round, arrays, config, grid):
            content = fm.RecordDict({"arrays": arrays, "config": config})
            return [fm.Message(content, node, "train") for node in (0, 1)]

    cohorts = _cohorts(40, strategy=Stubborn(2))
    assert {len(set(cohort)) for cohort in cohorts} == {4}
    assert set().union(*cohorts) == set(range(8))


def test_cohorts_are_uniform():
    # 4 of 6: 15 cohorts, 1500 rounds, chi squared with 14 degrees of freedom
    # is above 90 with a probability below 1e-12.
    counts = collections.Counter(map(tuple, _cohorts(1500, 6)))
    assert len(counts) == 15
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 90


def test_fewer_nodes_than_declared(caplog):
    strategy, few = _of_four(n=9), _grid(8)
    with pytest.raises(ValueError, match=r"num_clients .* 8, got 9"):
        _round(strategy, _grid(8))
    _round(strategy, _grid(9), 2)
    assert _round(strategy, few, 3) == (None, None)
    assert few.sent == []
    assert "8, got 9" in caplog.text
    assert len(strategy.charged_rounds) == 1


@pytest.mark.parametrize("rule", ["abort", "exclude"])
def test_that_somebody_fails_tells_nothing_that_is_not_charged(rule, path):
    strategy = _private(on_client_failure=rule, ledger=path)
    told = fm.configured(strategy, _GRID, _MODEL, 1)
    got, _ = strategy.aggregate_train(1, _GRID.send_and_receive(told)[1:])
    # Of another round no replies ever came.
    for number in (2, 3):
        fm.configured(strategy, _GRID, _MODEL, number)
    first, second, *begun = strategy.charged_rounds
    # The third is charged before anybody is asked: this process may end.
    assert len(begun) == (rule == "abort")
    assert (got is not None) == first.is_released == (rule == "exclude")
    assert first.charge.known_selection == (rule == "abort")
    assert (second.is_released, second.charge.known_selection) == (False, True)
    for entry in _entries(path):
        # A line that comes first does not say what becomes of the round.
        assert ("charged_first" in entry.details) == (rule == "abort")
        assert "num_replies" not in entry.details
    charged = [first.charge, second.charge, *(each.charge for each in begun)]
    assert [each.charge for each in _entries(path)] == charged
    words = " ".join(strategy.privacy_report(_DELTA)["caveats"])
    assert ("whether a client was in it" in words) == (rule == "abort")


def test_an_abandoned_round_is_charged_whatever_the_budget():
    # Of those who are drawn one has the network fail. Each round by itself is cheap.
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=4.0)
    budget = {"target_epsilon": 1.0, "target_delta": _DELTA}
    strategy = fm.private(mechanism, m=2, n=40, **budget)
    grid = fm.Grid({i: fm.adds([np.zeros(3)]) for i in range(40)})
    begun = [bool(fm.configured(strategy, grid, _MODEL, t)) for t in range(1, 4)]
    assert begun == [True, False, False]
    (abandoned,) = strategy.charged_rounds
    assert abandoned.charge.known_selection
    assert strategy.privacy_epsilon() > 1.0


@pytest.mark.parametrize(
    "mechanism",
    [
        fm.NOISY,
        tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, count_noise_stddev=2.0),
        tfdp_fl.MedianClipping(noise_multiplier=1.0),
        tfdp_fl.MedianClipping(noise_multiplier=2.0, median_noise_multiplier=2.0),
    ],
)
def test_a_round_in_which_all_fail_is_noise(mechanism):
    strategy = _private(mechanism)
    fm.configured(strategy, _GRID, _MODEL, 1)
    got, _ = strategy.aggregate_train(1, [])
    # (It started from zeros, and a round moves it by z S / m.)
    assert all(np.abs(array).max() < 1e6 for array in fm.arrays(got))
    (released,) = strategy.charged_rounds
    assert (released.num_replies, released.is_released) == (0, True)
    assert 0 <= strategy.clip_norm < 1e6
