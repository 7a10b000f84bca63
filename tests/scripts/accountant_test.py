"""The planning from the command line."""

import contextlib
import io
import pathlib
import re

import pytest
from absl import flags
from absl.testing import flagsaver

from scripts import accountant
from tests.accounting.charges import charge
from tfdp_fl import accounting

_SIZES = {"num_clients": 1000, "clients_per_round": 100}
_PLAN = {**_SIZES, "noise_multiplier": 1.0, "rounds": 100, "delta": 1e-5}


@pytest.fixture(autouse=True)
def _by_rdp(monkeypatch):
    """Which is quick."""
    monkeypatch.setattr(accountant, "_ACCOUNTANTS", ("rdp",))


def _run(**values):
    """Runs the program with these flags and returns what it printed."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    output = io.StringIO()
    with flagsaver.flagsaver(**values), contextlib.redirect_stdout(output):
        accountant.main(["accountant"])
    return output.getvalue()


@pytest.mark.parametrize("missing", accountant._SOLVED)
def test_any_one_quantity_may_be_missing(missing):
    values = {**_PLAN, "epsilon": 20.0, missing: None}
    text = _run(**values)
    (written,) = re.findall(rf"{missing} +by RDP\n +poisson +([0-9.e-]+)\n", text)
    if missing == "noise_multiplier":  # It is rounded up.
        z = float(written)
        assert accounting.epsilon(z, "poisson", 1000, 100, 100, 1e-5) <= 20.0


def test_the_table_compares_samplings():
    text = _run(**_PLAN)
    figures = {"poisson": "7.8992", "fixed_size": "83.937", "shuffled": "19.052"}
    for sampling, epsilon in figures.items():
        assert re.search(rf"{sampling} +{epsilon}\n", text)
    # One without a solution says why.
    text = _run(**{**_PLAN, "rounds": None, "epsilon": 5.0})
    assert re.search(r"fixed_size +-\n", text)
    assert "fixed_size, rdp: not even one round" in text


def test_a_ledger_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("ledger.jsonl")
    mechanism = {"name": "Fixed", "trust_model": "central", "description": "d" * 300}
    with accounting.PrivacyLedger(path, mechanism=mechanism) as ledger:
        for t in range(20):
            ledger.record(t, charge(), 95 + t % 10)
    epsilon = accounting.epsilon(1.0, "poisson", 1000, 100, 20, 1e-5)
    text = _run(ledger=str(path), delta=1e-5)
    assert re.search(
        rf"by RDP at delta = 1e-05 +{accounting.format_up(epsilon, 5)}\n", text
    )
    assert re.search(r"cohort sizes +95 to 104\n", text)
    assert ledger.head in text
    assert max(map(len, text.splitlines())) <= 100
    path.write_bytes(path.read_bytes().replace(b'multiplier":1.0', b'multiplier":2.0'))
    with pytest.raises(SystemExit, match="Line 2"):
        _run(ledger=str(path), delta=1e-5)


@pytest.mark.parametrize(
    "values, words",
    [
        ({**_PLAN, "epsilon": 8.0}, "exactly three"),
        ({**_PLAN, "num_clients": None, "epsilon": 8.0}, "exactly three"),
        ({**_PLAN, "ledger": "ledger.jsonl"}, "--ledger"),
        ({"ledger": "ledger.jsonl"}, "needs --delta"),
        ({"ledger": "missing.jsonl", "delta": 1e-5}, "missing.jsonl"),
    ],
)
def test_bad_combinations_are_refused_before_anything(values, words):
    with pytest.raises(SystemExit, match=words):
        _run(**values)


def test_a_ledger_of_two_guarantees_has_no_central_epsilon(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, charge(z=9.0), 100)
        ledger.record(1, None, 100, local={"mu_squared": 9.0, "max_mu_squared": 9.0})
    text = _run(ledger=str(path), delta=1e-5)
    assert re.search(r"by RDP at delta = 1e-05 +- \(.*1 of 2 rounds without", text)


def test_what_was_given_is_printed_as_it_is():
    assert "num_clients = 1234567," in _run(**{**_PLAN, "num_clients": 1234567})
