"""The budget is asked in the act of charging."""

from concurrent import futures

import pytest

from tests.accounting.charges import charge
from tfdp_fl import accounting

_DELTA = 1e-5
_epsilon = accounting.epsilon_of_mu_squared
_A_TENTH = {"mu_squared": 0.1, "max_mu_squared": 0.1}
_HALF = {"mu_squared": 0.5, "max_mu_squared": 0.5}


def _for_rounds(rounds):
    epsilon = accounting.epsilon(1.0, "poisson", 1000, 100, rounds, _DELTA)
    return accounting.PrivacyBudget(epsilon * 1.0001, _DELTA)


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "ledger.jsonl"


def _exceeded(ledger, *round, match="must not be rel", **options):
    with pytest.raises(accounting.BudgetExceededError, match=match):
        ledger.record(*round, **options)


def test_the_round_that_would_pass_the_budget_is_not_written(path):
    budget = _for_rounds(3)
    with accounting.PrivacyLedger(path) as ledger:
        for t in range(3):
            ledger.record(t, charge(), 100, budget=budget)
        before = path.read_bytes()
        _exceeded(ledger, 3, charge(), 100, budget=budget)
        assert path.read_bytes() == before
        assert ledger.rounds == 3
        ledger.record(3, charge(z=1e3), 100, budget=budget)  # A cheaper one fits.


def test_rounds_of_other_runs_and_without_a_budget_count(path):
    budget = _for_rounds(3)
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 100)
    with accounting.PrivacyLedger(path, "append") as ledger:
        ledger.record(0, charge(), 100, budget=budget)
        ledger.record(0, charge(), 100, run="evaluation 1")
        _exceeded(ledger, 1, charge(), 100, budget=budget)


def test_threads_of_one_ledger_spend_one_budget(path):
    budget = _for_rounds(5)
    with accounting.PrivacyLedger(path) as ledger:

        def refused(run):
            count = 0
            for t in range(5):
                try:
                    ledger.record(t, charge(), 100, run=run, budget=budget)
                except accounting.BudgetExceededError:
                    count += 1
            return count

        with futures.ThreadPoolExecutor(5) as threads:
            assert sum(threads.map(refused, "abcde")) == 20
    assert len(accounting.PrivacyLedger.read(path).entries) == 5
    assert accounting.epsilon_from_ledger(path, _DELTA) <= budget.epsilon


def test_a_local_amount_is_composed_for_the_client_that_spent_most(path):
    budget = accounting.PrivacyBudget(
        accounting.epsilon_of_mu_squared(1.0, _DELTA), _DELTA
    )
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, None, 5, local=_HALF)
        ledger.record(0, None, 5, local=_HALF, run="other", budget=budget)
        _exceeded(ledger, 0, None, 5, local=_HALF, run="third", budget=budget)


@pytest.mark.parametrize(
    "mechanism, first, second",
    [
        (None, (None, _A_TENTH), (charge(), None)),
        (None, (None, _A_TENTH), (charge(z=0.0), None)),
        (None, (charge(), None), (None, _A_TENTH)),
        # A central charge does not buy a local guarantee.
        ({"trust_model": "local"}, (charge(), _A_TENTH), (charge(), None)),
    ],
)
def test_what_cannot_be_known_is_refused(path, mechanism, first, second):
    with accounting.PrivacyLedger(path, mechanism=mechanism) as ledger:
        ledger.record(0, first[0], 5, local=first[1])
        options = {"local": second[1], "budget": accounting.PrivacyBudget(50.0, _DELTA)}
        _exceeded(ledger, 1, second[0], 5, match="epsilon to inf", **options)
        with pytest.raises(TypeError, match="budget"):
            ledger.record(1, charge(), 5, budget=50.0)


def test_a_budget_is_checked_when_it_is_made():
    # No epsilon is above NaN.
    wrong = {"epsilon": (0.0, float("nan")), "delta": (0.0, 1.0), "accountant": ("x",)}
    for name, value in [(key, each) for key in wrong for each in wrong[key]]:
        with pytest.raises(ValueError, match=name):
            accounting.PrivacyBudget(**{"epsilon": 1.0, "delta": _DELTA, name: value})
