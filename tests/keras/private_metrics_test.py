"""The private means of clients' metrics: bound, noise, and charged first."""

from __future__ import annotations

import math
import os
import shutil
import signal
import warnings
from unittest import mock

import dp_accounting
import numpy as np
import pytest

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.keras import checkpoint, client_metrics
from tfdp_fl.keras.client_metrics import PrivateMetrics

_BOUNDS = {"loss": (0.0, 3.0), "accuracy": (0.0, 1.0)}
_DELTA = 1e-3
_Ledger = tfdp_fl.callbacks.Ledger


def _private(**changes):
    return PrivateMetrics(**{"bounds": _BOUNDS, "noise_multiplier": 4.0, **changes})


def _trained(sampling="fixed_size", rounds=1, callbacks=(), data=None, **options):
    compiled = {"metrics": ["accuracy"]}
    fed = toy.federated(sampling=sampling, compile_options=compiled, **options)
    if rounds:
        toy.fit(fed, rounds, callbacks, data)
    return fed


def _evaluated(fed, private=None, clients=None):
    clients = toy.clients() if clients is None else clients
    private = _private() if private is None else private
    return fed.evaluate_clients(clients, private=private, verbose=0)


def test_a_client_contributes_at_most_one():
    ends = [0.0, 1.0, 3.0, -1e308, 1e308, np.nan, np.inf, -np.inf]
    ends += [5e-324, np.nextafter(3.0, 4), np.nextafter(1.0, 0), 0.5, 1.5]
    loss, accuracy = map(np.ravel, np.meshgrid(ends, ends))
    each = _private().contributions({"loss": loss, "accuracy": accuracy})
    norms = np.linalg.norm(each, axis=1)
    # The bound is met: the noise is not measured against too much.
    assert 1 - 1e-12 < norms.max() <= 1 + 1e-12
    unusable = ~(np.isfinite(loss) & np.isfinite(accuracy))
    assert norms[unusable].max() == 0.0
    # One client replaced by any other moves the sum by at most two.
    apart = each[:, None] - each[None]
    assert np.linalg.norm(apart, axis=2).max() <= 2 + 1e-12
    wide = _private(bounds={"loss": (-8e307, 8e307)})
    each = wide.contributions({"loss": np.array([-1e308, 0.0, 1e308])})
    assert np.linalg.norm(each, axis=1).max() <= 1 + 1e-12


def test_noise_has_its_standard_deviation_and_the_sum_is_all_that_is_used():
    # 20,000 normal numbers: their variance is off by more than 0.06 of itself with
    # a probability below 1e-8 (6 standard deviations), and a factor 1.1 in the
    # noise makes it 0.21.
    private, generator = _private(noise_multiplier=2.5), np.random.default_rng(7)
    nobody = {name: np.zeros(0) for name in _BOUNDS}
    counts = [private.released(nobody, generator)["num_clients"] for _ in range(20_000)]
    assert abs(np.var(counts) / 3 / 2.5**2 - 1) < 0.06
    # What is said of it is so: 10 % of 2,000 are more than 6 standard deviations.
    values = {n: generator.uniform(*bounds, 2000) for n, bounds in _BOUNDS.items()}
    results = [private.released(values, generator) for _ in range(2000)]
    for name in _BOUNDS:
        means = [each[name]["mean"] for each in results]
        assert abs(np.std(means) / results[0][name]["noise_stddev"] - 1) < 0.1
    counts = [each["num_clients"] for each in results]
    assert abs(np.std(counts) / results[0]["num_clients_stddev"] - 1) < 0.1
    total = private.contributions(values).sum(axis=0)
    with mock.patch.object(PrivateMetrics, "contributions", lambda *_: total[None]):
        one = private.released({}, np.random.default_rng(1))
    assert one == private.released(values, np.random.default_rng(1))


def test_without_noise_it_is_the_clients_own_and_with_it_each_time_another():
    fed = _trained()
    exact = fed.evaluate_clients(toy.clients(), verbose=0)
    one, other = (_evaluated(fed) for _ in range(2))
    assert one["num_clients"] != other["num_clients"]
    released = _evaluated(fed, _private(noise_multiplier=0.0))
    assert released["num_clients"] == pytest.approx(toy.NUM_CLIENTS)
    for name in _BOUNDS:
        assert released[name]["mean"] == pytest.approx(exact[name].mean(), abs=1e-6)
        assert released[name]["noise_stddev"] == 0.0
    assert fed.epsilon(_DELTA) == math.inf


def test_a_label_that_is_no_class_ends_nothing():
    # An error would tell of one client's data, and cost nothing.
    clients = {k: toy.clients().client(k) for k in range(toy.NUM_CLIENTS)}
    fed, quiet = _trained(data=clients), _private(noise_multiplier=1e-3)
    for label in (toy.NUM_CLASSES, -1):
        x, y = (np.array(leaf) for leaf in clients[3])
        y[2] = label
        bad = {**clients, 3: (x, y)}
        # Kernels of a GPU say NaN, those of a CPU raise.
        found = _evaluated(fed, quiet, bad)["num_clients"]
        assert abs(found - (toy.NUM_CLIENTS - 1)) < 0.1
        # Nor do clients of which not one can be evaluated on.
        for each in ({3: (x, y)}, {3: (x[:0], y[:0])}):
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # It would name one.
                assert abs(_evaluated(fed, quiet, each)["num_clients"]) < 0.1
    assert fed.spending.evaluations == 6


def _rounds(fed):
    """Returns what the rounds alone cost."""
    account = accounting.PrivacyAccountant()
    for charge, count in fed.spending.charges:
        account.add(charge, count)
    return account


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
def test_it_is_in_epsilon(sampling):
    fed = _trained(sampling, 2)
    before, own = fed.epsilon(_DELTA), _rounds(fed)
    assert own.epsilon(_DELTA) == pytest.approx(before)
    for _ in range(2):
        _evaluated(fed)
    charge = charge_lib.RoundCharge(
        sampling="fixed_size" if sampling == "fixed_size" else "poisson",
        num_clients=toy.NUM_CLIENTS,
        clients_per_round=toy.NUM_CLIENTS,
        event=dp_accounting.GaussianDpEvent(4.0),
    )
    own.add(charge, 2)
    assert fed.epsilon(_DELTA) > before + 1e-3
    # PLD takes seconds for cohorts of a fixed size.
    for by in ("rdp",) if sampling == "fixed_size" else ("rdp", "pld"):
        assert fed.epsilon(_DELTA, by) == pytest.approx(own.epsilon(_DELTA, by))
    if sampling == "shuffled":
        statement = fed.privacy_statement(_DELTA)
        assert "What evaluate_clients released" in statement
        assert "Philox4x64-10" in statement  # Also where the rounds' noise is exact.
    assert fed.rounds == 2
    # And training goes on with it.
    toy.fit(fed, 1)
    assert fed.epsilon(_DELTA) > own.epsilon(_DELTA)


@pytest.fixture
def ledger(tmp_path):
    return _Ledger(tmp_path / "a.jsonl")


def _told(ledger):
    """Returns the epsilon of a ledger's file, to compare."""
    told = accounting.PrivacyLedger.read(ledger.path).epsilon(_DELTA)
    return pytest.approx(told, abs=1e-9)


def test_the_line_comes_first_and_the_run_goes_on(tmp_path, ledger):
    also, saved = _Ledger(tmp_path / "b.jsonl"), tmp_path / "run"
    fed, order = _trained("shuffled", rounds=0), []
    toy.fit(fed, 2, [ledger])
    released = lambda *_: order.append(_told(ledger))  # noqa: E731
    with mock.patch.object(PrivateMetrics, "released", released):
        _evaluated(fed)
    after = fed.epsilon(_DELTA)
    assert order == [after]
    # One that is in the first ledger only; then one of before the checkpoints.
    keeps = [[ledger, also], [tfdp_fl.callbacks.RoundCheckpoint(saved)]]
    for released, callbacks in enumerate(keeps, 1):
        toy.fit(fed, 1, callbacks)
        # In two files, and counted once.
        assert fed.spending.evaluations == released
        for each in callbacks:
            assert fed.epsilon(_DELTA) == _told(each)
        _evaluated(fed)
    assert fed.epsilon(_DELTA) > after


def test_what_cannot_be_written_or_afforded_is_not_released(ledger):
    fed = _trained(callbacks=[ledger])
    os.unlink(ledger.path)
    ledger.path.mkdir()
    unwritten = pytest.raises((accounting.LedgerError, OSError))
    with mock.patch.object(PrivateMetrics, "released") as released, unwritten:
        _evaluated(fed)
    released.assert_not_called()
    fed = toy.private(3.0, 3, ["accuracy"])
    toy.fit(fed, 3)
    before = fed.epsilon(_DELTA)
    message = r"epsilon to \d.*epsilon=3 of the target of make_private"
    unpaid = pytest.raises(ValueError, match=message)
    with mock.patch.object(client_metrics, "evaluate") as called, unpaid:
        _evaluated(fed)
    called.assert_not_called()
    assert fed.epsilon(_DELTA) == before


def test_what_other_runs_wrote_meanwhile_counts_before_a_release(tmp_path):
    path, budget = tmp_path / "all.jsonl", tfdp_fl.callbacks.PrivacyBudget
    first, second = _trained(rounds=0), _trained(rounds=0)
    toy.fit(first, 1, [budget(1e3, _DELTA), _Ledger(path, append=True)])
    alone = first.epsilon(_DELTA)
    toy.fit(second, 2, [_Ledger(path, append=True)])
    _evaluated(first)
    told = accounting.epsilon_from_ledger(path, _DELTA)
    assert first.epsilon(_DELTA) == pytest.approx(told, abs=1e-9)
    first.federated_callbacks[0].epsilon = told  # It is spent, if all are counted.
    with pytest.raises(ValueError, match="of the PrivacyBudget"):
        _evaluated(first)
    assert accounting.epsilon_from_ledger(path, _DELTA) == told > alone


def test_an_interrupt_leaves_no_line_that_the_run_knows_not_of(ledger):
    fed, record = _trained(callbacks=[ledger]), accounting.PrivacyLedger.record

    def interrupted(*args, **kwargs):
        record(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)

    patch = mock.patch.object(accounting.PrivacyLedger, "record", interrupted)
    with patch, pytest.raises(KeyboardInterrupt):
        _evaluated(fed)
    assert fed.spending.evaluations == 1
    toy.fit(fed, 1, [ledger])
    assert fed.epsilon(_DELTA) == _told(ledger)


def test_within_a_fit_the_directory_stays_locked_and_a_resumed_run_knows(tmp_path):
    path, fed, other = tmp_path / "run", _trained(rounds=0), _trained(rounds=0)
    saved = tfdp_fl.callbacks.RoundCheckpoint(path)

    def evaluate():
        _evaluated(fed)
        with pytest.raises(checkpoint.CheckpointInUseError):
            checkpoint.CheckpointDirectory(path).acquire()

    toy.fit(fed, 3, [saved, toy.at_end(evaluate, 1), toy.stop(fed, 1)], seed=1)
    _evaluated(fed)
    statement = (path / "privacy.txt").read_text("utf-8")
    assert "What evaluate_clients released" in statement
    cut = shutil.copytree(path, tmp_path / "cut") / "ledger.jsonl"
    cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(accounting.LedgerTamperedError):
        toy.fit(other, 3, seed=1, resume_from=cut.parent)
    toy.fit(other, 3, seed=1, resume_from=path)
    assert other.spending.evaluations == 2
    assert "rounds_charged_twice" not in other.run.caveats
    rounds = _rounds(other)
    assert rounds.rounds == 3
    rounds.add(_private().charge("fixed_size", toy.NUM_CLIENTS), 2)
    assert other.epsilon(_DELTA) == pytest.approx(rounds.epsilon(_DELTA), abs=1e-6)
    assert other.epsilon(_DELTA) > fed.epsilon(_DELTA)


def test_what_is_refused():
    fed = _trained(rounds=0)
    with pytest.raises(ValueError, match="before the first fit"):
        _evaluated(fed)
    toy.fit(fed)
    before, unknown = fed.epsilon(_DELTA), _private(bounds={"f1": (0, 1)})
    with pytest.raises(TypeError, match="private must be a PrivateMetrics"):
        _evaluated(fed, 3)
    with pytest.raises(ValueError, match=r"compiled \(.*'accuracy'.*got 'f1'"):
        _evaluated(fed, unknown)
    assert fed.epsilon(_DELTA) == before
    local = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="guarantee is local"):
        _evaluated(_trained(mechanism=local))
