"""What a run has spent, centrally and client by client."""

import json
import math

import numpy as np
import pytest

from tests.accounting import charges
from tfdp_fl import accounting
from tfdp_fl.accounting import account as account_lib

_DELTA = 1e-3
exact = accounting.epsilon_of_mu_squared


def _charge(z=2.0):
    return charges.charge(n=10, m=4, z=z)


def _spending(guarantee, *rounds):
    """Returns the spending of rounds of (clients, mu^2)."""
    spending = account_lib.PrivacyAccount(guarantee, 10)
    for clients, mu_squared in rounds:
        spending.charge(_charge(), positions=np.array(clients), mu_squared=mu_squared)
    return spending


def _central(rounds, z=2.0):
    expected = accounting.epsilon(z, "poisson", 10, 4, rounds, _DELTA)
    return pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("guarantee", ["local", "record"])
def test_a_local_one_is_that_of_the_most_seen_client(guarantee):
    spending = _spending(guarantee, ([1, 2], 0.5), ([2, 3], 0.5))
    assert spending.epsilon(_DELTA) == exact(1.0, _DELTA)
    # What a crash may have lost counts against everybody.
    spending.lost_mu_squared = 0.25
    state = spending.state()
    state["charges"] = json.loads(json.dumps(state["charges"]))
    for each in (spending, again := account_lib.PrivacyAccount.from_state(state)):
        assert each.epsilon(_DELTA) == exact(1.25, _DELTA)
        assert each.central.epsilon(_DELTA) == _central(2)
        assert each.rounds == 2
    again.charge(_charge(), positions=np.array([2]), mu_squared=math.inf)
    assert again.epsilon(_DELTA) == math.inf > spending.epsilon(_DELTA)


def _ledger(*lines):
    """Returns contents with lines of (run, noise, local spending)."""
    facts, entries = {"cohort_size": 4, "time": "", "details": {}}, []
    for t, (run, z, one) in enumerate(lines):
        local = one and {"mu_squared": one, "max_mu_squared": one * (t + 1)}
        facts |= {"round_index": t, "run": run, "charge": _charge(z), "local": local}
        entries.append(accounting.LedgerEntry(**facts))
    facts = {"header": {}, "truncated": False, "head": "head"}
    return accounting.LedgerContents(entries=tuple(entries), **facts)


def test_what_a_ledger_tells_of_is_counted_once():
    spending = _spending("central", *[([1], 0.0)] * 2)
    assert (spending.epsilon(_DELTA), spending.rounds) == (_central(2), 2)
    # A round of our own that is known, one that is not, two of others.
    runs = (("own", 2.0), ("own", 3.0), ("other", 2.0), ("third", 2.0))
    contents = _ledger(*((*run, None) for run in runs))
    for _ in range(2):
        spending.merge_ledger(contents, "own", "a.jsonl")
        assert (spending.rounds, spending.rounds_of_others) == (3, 2)
        assert spending.epsilon(_DELTA) == _central(5, [2.0, 2.0, 2.0, 2.0, 3.0])
    again = account_lib.PrivacyAccount.from_state(spending.state())
    assert again.epsilon(_DELTA) == spending.epsilon(_DELTA)
    assert again.others == spending.others
    # A run in two files may have gone on from one checkpoint in two places.
    spending.merge_ledger(_ledger(("other", 2.0, None)), "own", "copy of a.jsonl")
    assert spending.rounds_of_others == 3


def test_local_spending_of_others_counts_against_every_client():
    spending = _spending("local", ([1, 2], 0.5))
    spending.merge_ledger(_ledger(*[("other", 2.0, 0.25)] * 2), "own", "a.jsonl")
    assert spending.max_mu_squared == 0.5 + 0.5
    with pytest.raises(ValueError, match="all have a local guarantee"):
        spending.merge_ledger(_ledger(("third", 2.0, None)), "own", "b.jsonl")
    assert spending.max_mu_squared == 0.5 + 0.5


def test_the_client_that_spent_most_counts():
    account = account_lib.LocalAccount(5)
    for positions, mu_squared in ([0, 3], 0.25), ([3, 4], 0.5), ([3], 0.75):
        account.add(np.array(positions), mu_squared)
    np.testing.assert_array_equal(account.participations, [1, 0, 0, 3, 1])
    assert (account.max_participations, account.max_mu_squared) == (3, 1.5)
    for mu_squared in (-1.0, math.nan):
        with pytest.raises(ValueError, match="mu_squared"):
            account.add(np.array([0]), mu_squared)
    # A client twice in a cohort is charged twice.
    account.add(np.array([0, 0]), 1.0)
    assert account.max_mu_squared == 2.25


def test_the_client_that_may_spend_most_is_in_every_round():
    account = account_lib.LocalAccount(4)
    account.add(np.array([0, 1]), 0.5)
    account.add(np.array([0]), 0.5)
    after = account.max_mu_squared_after_draws
    assert after(0, 0.5) == 1.0
    assert after(3, 0.5) == 2.5
    # Client 0 sits out; the others have two or three rounds left.
    assert after(1, 0.25, 2) == 1.0
    assert after(9, 0.75, 2) == 1.5
    assert after(9, np.inf, 2) == np.inf
    assert after(0, np.inf) == 1.0
