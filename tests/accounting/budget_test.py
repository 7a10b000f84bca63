"""The budget is asked in the act of charging."""

from __future__ import annotations

import threading

import dp_accounting
import pytest

from tfdp_fl import accounting

_DELTA = 1e-5


def _charge(z=1.0, sampling="poisson"):
    return accounting.RoundCharge(
        sampling=sampling,
        num_clients=1000,
        clients_per_round=100,
        event=dp_accounting.GaussianDpEvent(z),
    )


def _of_rounds(rounds):
    return accounting.epsilon(1.0, "poisson", 1000, 100, rounds, _DELTA)


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "ledger.jsonl"


def test_the_round_that_would_pass_the_budget_is_not_written(path):
    budget = accounting.Budget(_of_rounds(3) * 1.0001, _DELTA)
    with accounting.PrivacyLedger(path) as ledger:
        for t in range(3):
            ledger.record(t, _charge(), 100, budget=budget)
        before = path.read_bytes()
        with pytest.raises(accounting.BudgetExceededError, match="must not be rel"):
            ledger.record(3, _charge(), 100, budget=budget)
        assert path.read_bytes() == before
        assert ledger.rounds == 3
        ledger.record(3, _charge(1e3), 100, budget=budget)  # A cheaper one fits.


def test_rounds_of_other_runs_and_without_a_budget_count(path):
    budget = accounting.Budget(_of_rounds(3) * 1.0001, _DELTA)
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, _charge(), 100)
    with accounting.PrivacyLedger(path, "append") as ledger:
        ledger.record(0, _charge(), 100, budget=budget)
        ledger.record(0, _charge(), 100, run="evaluation 1")
        with pytest.raises(accounting.BudgetExceededError):
            ledger.record(1, _charge(), 100, budget=budget)


def test_threads_of_one_ledger_spend_one_budget(path):
    budget = accounting.Budget(_of_rounds(5) * 1.0001, _DELTA)
    refused = []
    with accounting.PrivacyLedger(path) as ledger:

        def train(run):
            for t in range(5):
                try:
                    ledger.record(t, _charge(), 100, run=run, budget=budget)
                except accounting.BudgetExceededError:
                    refused.append(run)

        threads = [threading.Thread(target=train, args=(f"{k}",)) for k in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(refused) == 20
    assert len(accounting.PrivacyLedger.read(path).entries) == 5
    assert accounting.epsilon_from_ledger(path, _DELTA) <= budget.epsilon


def test_a_local_amount_is_composed_for_the_client_that_spent_most(path):
    budget = accounting.Budget(accounting.epsilon_of_mu_squared(1.0, _DELTA), _DELTA)
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, None, 5, local={"mu_squared": 0.5, "max_mu_squared": 0.5})
        one = {"mu_squared": 0.5, "max_mu_squared": 0.5}
        ledger.record(0, None, 5, local=one, run="other", budget=budget)
        with pytest.raises(accounting.BudgetExceededError):
            ledger.record(0, None, 5, local=one, run="third", budget=budget)


@pytest.mark.parametrize(
    ("charge", "local"),
    [
        (_charge(), None),
        (None, {"mu_squared": 0.1, "max_mu_squared": 0.1}),
        (_charge(0.0), None),
    ],
)
def test_what_cannot_be_known_is_refused(path, charge, local):
    amount = {"mu_squared": 0.1, "max_mu_squared": 0.1}
    with accounting.PrivacyLedger(path) as ledger:
        if local is None:
            ledger.record(0, None, 5, local=amount)
        else:
            ledger.record(0, _charge(), 5)
        with pytest.raises(accounting.BudgetExceededError, match="epsilon to inf"):
            budget = accounting.Budget(50.0, _DELTA)
            ledger.record(1, charge, 5, local=local, budget=budget)


def test_a_central_charge_does_not_buy_a_local_guarantee(path):
    mechanism = {"guarantee": "local"}
    with accounting.PrivacyLedger(path, mechanism=mechanism) as ledger:
        ledger.record(0, _charge(), 5, local={"mu_squared": 0.1, "max_mu_squared": 0.1})
        with pytest.raises(accounting.BudgetExceededError):
            ledger.record(1, _charge(), 5, budget=accounting.Budget(50.0, _DELTA))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0.0, _DELTA), "epsilon"),
        ((float("nan"), _DELTA), "epsilon"),  # No epsilon is above it.
        ((1.0, 0.0), "delta"),
        ((1.0, 1.0), "delta"),
        ((1.0, _DELTA, "moments"), "accountant"),
    ],
)
def test_a_budget_is_checked_when_it_is_made(arguments, named):
    with pytest.raises(ValueError, match=named):
        accounting.Budget(*arguments)


def test_anything_but_a_budget_is_refused(path):
    with accounting.PrivacyLedger(path) as ledger:
        with pytest.raises(TypeError, match="budget"):
            ledger.record(0, _charge(), 5, budget=8.0)
        assert not ledger.contents().entries
