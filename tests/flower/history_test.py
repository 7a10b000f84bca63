"""A server that restarts, a ledger that cannot be written, a budget."""

import concurrent.futures
import copy
import pickle
from unittest import mock

import dp_accounting
import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib

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
    before = len(strategy.released_rounds)
    for server_round in range(first, first + rounds):
        fm.a_round(strategy, _GRID, _MODEL, server_round)
    return len(strategy.released_rounds) - before


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


def test_epsilon_is_that_of_the_rounds_released():
    strategy = _private()
    for twin in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            twin(strategy)
    assert strategy.privacy_epsilon(_DELTA) == 0.0
    _run(strategy, 5)
    assert strategy.privacy_epsilon(_DELTA) == pytest.approx(_central(5))
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


def test_the_same_script_started_again_counts_what_it_released(path, caplog):
    first = _private(**_target(6), ledger=path)
    assert _run(first, 4) == 4
    first.close()
    again = _private(**_target(6), ledger=path)
    assert "holds 4 rounds" in caplog.text
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


def test_threads_share_a_budget(path):
    with accounting.PrivacyLedger(path) as ledger:
        strategies = [_private(ledger=ledger, **_target(3)) for _ in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(_run, strategies, [3] * 4))
    assert sum(len(s.strategy.handed) for s in strategies) == 3
    assert accounting.epsilon_from_ledger(path, _DELTA) <= _central(3) + 1e-6


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
    assert clips == [r.clip_norm for r in strategy.released_rounds]
    assert [e.round_index for e in contents.entries] == [0, 1, 2]
    assert [e.cohort_size for e in contents.entries] == [3] * 3


def test_what_cannot_be_written_is_not_released(path):
    strategy = _private(_ADAPTIVE, ledger=path)
    _run(strategy, 1)
    before = strategy.released_rounds, strategy.clip_norm
    full = ledger_lib.LedgerWriteError("disk full")
    with (
        mock.patch.object(ledger_lib.PrivacyLedger, "record", side_effect=full),
        pytest.raises(ledger_lib.LedgerWriteError, match="disk full"),
    ):
        _run(strategy, 1, 2)
    assert len(strategy.strategy.handed) == 1
    assert (strategy.released_rounds, strategy.clip_norm) == before
    # Nor are abandoned rounds written.
    fm.configured(strategy, _GRID, _MODEL, 3)
    strategy.aggregate_train(3, [])
    assert len(_entries(path)) == 1


def test_a_ledger_of_another_relation_is_refused_and_let_go(path):
    with pytest.raises(ValueError):
        _private(ledger=path, max_abandoned_rounds=0)
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
    central = {"guarantee": "central", "name": "mine"}
    with accounting.PrivacyLedger(path.with_name("b"), mechanism=central) as ledger:
        strategy = _private(ledger=ledger)
        _run(strategy, 1)
        ledger.record(1, None, 3, local={"mu_squared": 4.0, "max_mu_squared": 4.0})
        with pytest.raises(ValueError, match="with a central charge only"):
            strategy.privacy_epsilon(_DELTA)
