"""What a run has spent, centrally and client by client."""

import collections
import copy
import dataclasses
import itertools
import json
import math
import os
import pickle
import shutil
import signal
import threading
from concurrent import futures
from unittest import mock

import numpy as np
import pytest

from tests.accounting import charges
from tfdp_fl import accounting
from tfdp_fl.accounting import account as account_lib
from tfdp_fl.accounting import ledger as ledger_lib

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


def test_a_local_one_is_that_of_the_most_seen_client():
    spending = _spending("local", ([1, 2], 0.5), ([2, 3], 0.5))
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


def _part(contents, *numbers):
    """Returns contents with only some lines."""
    entries = tuple(contents.entries[n] for n in numbers)
    return dataclasses.replace(contents, entries=entries)


def test_what_a_ledger_tells_of_is_counted_once():
    spending = _spending("central", *[([1], 0.0)] * 2)
    assert (spending.epsilon(_DELTA), spending.rounds) == (_central(2), 2)
    # Two more rounds of our own, two of others.
    runs = (("own", 2.0), ("own", 3.0), ("other", 2.0), ("third", 2.0))
    contents = _ledger(*((*run, None) for run in runs))
    for name in ("a.jsonl", "a.jsonl", "copy of a.jsonl"):
        spending.merge_ledger(contents, "own", name)
        assert (spending.rounds, spending.rounds_of_others) == (4, 2)
        assert spending.epsilon(_DELTA) == _central(6, [2.0] * 5 + [3.0])
    again = account_lib.PrivacyAccount.from_state(spending.state())
    assert again.epsilon(_DELTA) == spending.epsilon(_DELTA)
    assert again.others == spending.others
    again.merge_ledger(contents, "own", "a.jsonl")
    assert again.central.rounds == 6
    # A run in two files may have gone on from one checkpoint in two places.
    spending.merge_ledger(_ledger(("other", 2.0, None)), "own", "copy of a.jsonl")
    assert spending.rounds_of_others == 3


@pytest.mark.parametrize("run", ["own", "other"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_ledgers_of_a_run_in_two_places_add_up(run, order):
    # Two rounds, then three here and two in a copy, all at the same cost.
    contents = _ledger(*[(run, 2.0, None)] * 7)
    parts = [_part(contents, *numbers) for numbers in ((0, 1), range(5), (0, 1, 5, 6))]
    spending = _spending("central")
    for part in order:
        spending.merge_ledger(parts[part], "own", str(part))
    assert spending.central.rounds == 7
    assert spending.epsilon(_DELTA) == _central(7)
    assert (spending.rounds, spending.rounds_of_others) == (
        (7, 0) if run == "own" else (0, 7)
    )


@pytest.mark.parametrize("run", ["own", "other"])
def test_local_spending_in_two_places_adds_up(run):
    # (The lines of both places say at most what their own place spent.)
    contents = _ledger(*[(run, 2.0, 0.25)] * 4)
    here, copy = _part(contents, 0, 1, 2), _part(contents, 0, 1, 3)
    for first, second in ((here, copy), (copy, here)):
        spending = _spending("local")
        for _ in range(2):
            spending.merge_ledger(first, "own", "first")
            spending.merge_ledger(second, "own", "second")
            # (Line 3 says that another round came before: 1.0 in all.)
            assert 1.0 <= spending.max_mu_squared <= 1.25
    # Which rounds a checkpoint knows is known from its ledger's lines then.
    spending = _spending("local", *[([1], 0.25)] * 3)
    spending.merge_ledger(here, run, "here", clients_known=True)
    spending.merge_ledger(contents, run, "all")
    assert spending.max_mu_squared == 0.75 + 0.25


def test_local_spending_of_others_counts_against_every_client():
    spending = _spending("local", ([1, 2], 0.5))
    spending.merge_ledger(_ledger(*[("other", 2.0, 0.25)] * 2), "own", "a.jsonl")
    assert spending.max_mu_squared == 0.5 + 0.5
    with pytest.raises(ValueError, match="all have a local guarantee"):
        spending.merge_ledger(_ledger(("third", 2.0, None)), "own", "b.jsonl")
    assert spending.max_mu_squared == 0.5 + 0.5


def test_a_local_release_with_a_name_counts_for_every_client(tmp_path):
    path = tmp_path / "ledger.jsonl"
    account = account_lib.PrivacyAccount("local", 3)
    ledger = accounting.PrivacyLedger(path, run="own")
    account.attach_ledger(str(path), ledger, "own")
    account.charge(_charge(), positions=np.array([0, 1]), mu_squared=1.0)
    budget = accounting.PrivacyBudget(accounting.gaussian_epsilon(0.5, _DELTA), _DELTA)
    three = {"name": "march", "mu_squared": 3.0}
    account.charge(_charge(), budgets=[budget], **three)
    with pytest.raises(accounting.BudgetExceededError):
        account.charge(_charge(), budgets=[budget], name="april", mu_squared=0.01)
    with pytest.raises(ValueError, match="positions must be"):  # A round of whom?
        account.charge(_charge(), mu_squared=3.0)
    spent = accounting.gaussian_epsilon(0.5, _DELTA)
    assert account.epsilon(_DELTA) == pytest.approx(spent)
    assert ledger.contents().local_epsilon(_DELTA) == pytest.approx(spent)
    # A line's own cost counts, whatever total it states.
    low = {"mu_squared": 4.0, "max_mu_squared": 0.0}
    ledger.record(1, None, 3, local=low, **{ledger_lib.COVERS_ALL: True})
    assert ledger.contents().local_epsilon(_DELTA) > 1.3 * spent


def test_a_charge_has_one_cost():
    spending = _spending("central")
    entry = _ledger(("other", 2.0, None)).entries[0]
    other = dataclasses.replace(entry, charge=_charge(0.5))
    for run in ("other", "own"):
        contents = [
            dataclasses.replace(_ledger(), entries=(dataclasses.replace(e, run=run),))
            for e in (entry, other)
        ]
        spending.merge_ledger(contents[0], "own", "a")
        before = spending.epsilon(_DELTA)
        with pytest.raises(ValueError, match="costs what it costs in other"):
            spending.merge_ledger(contents[1], "own", "b")
        assert spending.epsilon(_DELTA) == before


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


# The one act that spends.


def _kept(tmp_path, *names):
    account = account_lib.PrivacyAccount("central", 10)
    ledgers = [accounting.PrivacyLedger(tmp_path / name, run="own") for name in names]
    for ledger in ledgers:
        account.attach_ledger(str(ledger.path), ledger, "own")
    return account, ledgers


def _told(tmp_path, name):
    return accounting.epsilon_from_ledger(tmp_path / name, _DELTA)


def test_a_charge_within_a_charge_is_refused_and_nothing_waits():
    account, refused = account_lib.PrivacyAccount("central", 10), []

    def again(asked):
        with pytest.raises(accounting.ChargeError, match="while another one of the"):
            account.charge(_charge())
        refused.append(asked)
        with pytest.raises(accounting.ChargeError, match="not paid"):
            asked.redeem()

    paid = account.charge(_charge(), ask=again)
    assert (account.rounds, refused) == (1, [paid])
    paid.redeem()
    with pytest.raises(accounting.ChargeError, match="already been used"):
        paid.redeem()
    # Its copies are the same receipt.
    paid = account.charge(_charge())
    copies = [copy.copy(paid), dataclasses.replace(paid)]
    copies[0].redeem()
    for each in (paid, *copies):
        with pytest.raises(accounting.ChargeError, match="already been used"):
            each.redeem()
    for cannot in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            cannot(paid)
    # A charge that was refused leaves the lock free, and nothing charged.
    with pytest.raises(KeyError):
        account.charge(_charge(), ask={}.__getitem__)
    assert account.charge(_charge()) and account.rounds == 3


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("fails", [0, 1])
def test_memory_has_what_a_ledger_has(tmp_path, error, fails):
    account, ledgers = _kept(tmp_path, "a", "b")
    record = accounting.PrivacyLedger.record

    def full(ledger, *args, **kwargs):
        if ledger is ledgers[fails]:
            raise error
        record(ledger, *args, **kwargs)

    account.charge(_charge())
    patch = mock.patch.object(accounting.PrivacyLedger, "record", full)
    with patch, pytest.raises(error):
        account.charge(_charge())
    assert account.rounds == 1 + fails == account.central.rounds
    assert account.epsilon(_DELTA) == _told(tmp_path, "a")
    account.charge(_charge(3.0))
    assert account.epsilon(_DELTA) == pytest.approx(_told(tmp_path, "a"))


def test_a_signal_within_a_charge_waits_until_it_is_whole(tmp_path):
    account, _ = _kept(tmp_path, "a")
    with pytest.raises(KeyboardInterrupt):
        account.charge(_charge(), ask=lambda _: signal.raise_signal(signal.SIGINT))
    assert (account.rounds, account.epsilon(_DELTA)) == (1, _told(tmp_path, "a"))
    account.charge(_charge())


def test_threads_and_accounts_that_share_a_ledger_spend_one_budget(tmp_path):
    ledger = accounting.PrivacyLedger(tmp_path / "a")
    accounts = [account_lib.PrivacyAccount("central", 10) for _ in range(2)]
    for account in accounts:
        account.attach_ledger("a", ledger, ledger.run)
    most = accounting.epsilon(2.0, "poisson", 10, 4, 6, _DELTA)
    budget = accounting.PrivacyBudget(most * 1.0001, _DELTA)

    def charge(account):
        try:
            return bool(account.charge(_charge(), budgets=[budget]))
        except accounting.BudgetExceededError:
            return False

    with futures.ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(charge, accounts * 8)) == 6
    for account in accounts:
        account.refresh()
        assert account.epsilon(_DELTA) == _told(tmp_path, "a") <= budget.epsilon


def test_what_a_budget_was_said_to_allow_is_forgotten_when_something_else_is_charged():
    account = account_lib.PrivacyAccount("central", 10)
    most = accounting.epsilon(2.0, "poisson", 10, 4, 6, _DELTA)
    budget, six = accounting.PrivacyBudget(most * 1.0001, _DELTA), {_charge(): 6}
    account.note_allowed(budget, account.version, collections.Counter(six))
    for _ in range(5):
        account.charge(_charge(), budgets=[budget])
    account.charge(_charge(), name="evaluation 1")
    with pytest.raises(accounting.BudgetExceededError, match="epsilon to"):
        account.charge(_charge(), budgets=[budget])
    # Neither is what was said before that, nor another kind of round.
    account.note_allowed(budget, 0, collections.Counter(six))
    assert not account.allows(budget, _charge())
    assert account.rounds == 5
    # What goes on under an id is charged once, and pays for the same alone.
    account.charge(_charge(), name="evaluation 1", resumes=True)
    assert account.central.rounds == 6
    with pytest.raises(ValueError, match="name must be new"):
        account.charge(_charge(3.0), name="evaluation 1", resumes=True)


def test_a_fork_within_another_thread_s_charge_is_not_stuck():
    account = account_lib.PrivacyAccount("central", 10)
    within, over = threading.Event(), threading.Event()

    def slow(_):
        within.set()
        over.wait(60)

    thread = threading.Thread(
        target=account.charge, args=[_charge()], kwargs={"ask": slow}
    )
    thread.start()
    assert within.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(60)
        account.charge(_charge())
        os._exit(0)
    over.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert account.rounds == 1


def test_a_charge_while_another_thread_merges_is_counted():
    account, name = (
        account_lib.PrivacyAccount("central", 10),
        account_lib.new_evaluation_id(),
    )

    class Slow(dict):
        charges = None

        def keys(self):
            if self.charges is None:
                self.charges = threading.Thread(
                    target=account.charge, args=(_charge(),), kwargs={"name": name}
                )
                self.charges.start()
                self.charges.join(1.0)  # It waits until all is merged.
            return super().keys()

    other = account_lib.PrivacyAccount("central", 10)
    costs = Slow({"id": account_lib.Cost(_charge(), 0.0)})
    one = account_lib.OtherRun(costs=costs, mu_squared=0.0)
    other.others = {"other": one}
    account.merge_others(other, "own")
    costs.charges.join()
    assert account.evaluations == 1
    assert account.central.rounds == 2


def test_a_line_that_comes_while_a_ledger_is_counted_is_counted_next(tmp_path):
    account, (ledger,) = _kept(tmp_path, "a")
    account.charge(_charge())
    read = accounting.PrivacyLedger.contents
    ledger.record(5, _charge(), 3, run="another")

    def then_another_line(own):
        contents = read(own)
        own.record(6, _charge(), 3, run="another")
        return contents

    with mock.patch.object(accounting.PrivacyLedger, "contents", then_another_line):
        account.refresh()
    assert account.rounds_of_others == 1
    account.refresh()
    assert account.rounds_of_others == 2


def test_a_name_pays_for_one_release(tmp_path):
    account, (ledger,) = _kept(tmp_path, "a")
    account.charge(_charge(), name="march").redeem()
    with pytest.raises(ValueError, match="name must be new, got 'march'"):
        account.charge(_charge(), name="march")
    again = account_lib.PrivacyAccount("central", 10)
    again.attach_ledger(str(ledger.path), ledger, "own")
    with pytest.raises(ValueError, match="name must be new"):
        again.charge(_charge(), name="march")
    # A search goes on with trials that it has not released.
    again.charge(_charge(), name="march", resumes=True).redeem()
    assert len(ledger.entries) == account.central.rounds == again.central.rounds == 1


def test_a_search_that_was_copied_counts_for_every_copy(tmp_path):
    def charge(account, *names):
        for name in names:
            account.attach_ledger(name, ledgers[name], "own")
        paid = account.charge(
            _charge(), name="may", resumes=True, details={"search": "trials"}
        )
        for name in names:
            account.detach_ledger(name)
        return paid

    account = account_lib.PrivacyAccount("central", 10)
    accounting.PrivacyLedger(tmp_path / "empty").close()
    shutil.copy(tmp_path / "empty", tmp_path / "a")
    ledgers = {"a": accounting.PrivacyLedger(tmp_path / "a", "append")}
    charge(account, "a")
    charge(account, "a")
    assert account.central.rounds == ledgers["a"].rounds == 1
    # Each copy of the search's state can release a result of its own.
    shutil.copy(tmp_path / "a", tmp_path / "copy")
    ledgers["copy"] = accounting.PrivacyLedger(tmp_path / "copy", "append")
    charge(account, "copy")
    assert account.central.rounds == 2
    assert ledgers["copy"].rounds == 1
    # A copy from before the charge pays.
    ledgers["empty"] = accounting.PrivacyLedger(tmp_path / "empty", "append")
    charge(account, "empty")
    charge(account, "a")
    assert account.central.rounds == 3
    assert ledgers["empty"].rounds == 1
    # And so does one that counts them by the files alone.
    again = account_lib.PrivacyAccount("central", 10)
    for name, ledger in ledgers.items():
        again.merge_ledger(ledger.contents(), "own", name)
    assert again.central.rounds == 3


def test_what_a_ledger_holds_counts_as_soon_as_it_is_attached(tmp_path):
    account, (ledger,) = _kept(tmp_path, "a")
    account.charge(_charge())
    again = account_lib.PrivacyAccount("central", 10)
    again.attach_ledger("a", ledger, ledger.run)
    assert again.epsilon(_DELTA) == _central(1)
    assert not again.allows(accounting.PrivacyBudget(0.01, _DELTA, "rdp"), _charge())
    # One that is refused takes nobody's place.
    with accounting.PrivacyLedger(tmp_path / "local") as local:
        mu = {"mu_squared": 1.0, "max_mu_squared": 1.0}
        local.record(0, None, 3, local=mu, run="another")
        with pytest.raises(ValueError, match="central guarantee"):
            again.attach_ledger("a", local, local.run)
    again.charge(_charge())
    assert ledger.rounds == 2


def test_a_ledger_is_counted_before_it_is_completed(tmp_path):
    account, (one, other) = _kept(tmp_path, "a", "b")
    account.charge(_charge())
    account.detach_ledger(str(other.path))
    account.charge(_charge())
    account.attach_ledger(str(other.path), other, "own")
    other.record(5, _charge(), 3, run="another")  # As another account would.
    account.write_missing(1, {})
    assert (account.rounds, account.rounds_of_others) == (2, 1)
    assert (one.rounds, other.rounds) == (2, 3)
    account.write_missing(1, {})
    assert (one.rounds, other.rounds) == (2, 3)
