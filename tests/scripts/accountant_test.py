"""The planning from the command line."""

from __future__ import annotations

import contextlib
import io
import pathlib
import tempfile

import dp_accounting
from absl import flags
from absl.testing import flagsaver, parameterized

from scripts import accountant
from tfdp_fl import accounting

_PLAN = {
    "num_clients": 1000,
    "clients_per_round": 100,
    "noise_multiplier": 1.0,
    "rounds": 100,
    "delta": 1e-5,
}


def _run(**values):
    """Runs the program with these flags and returns what it printed."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    values = {"accountant": ["rdp"], **values}
    output = io.StringIO()
    with flagsaver.flagsaver(**values), contextlib.redirect_stdout(output):
        accountant.main(["accountant"])
    return output.getvalue()


class AccountantTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_the_table_compares_samplings(self):
        text = _run(**_PLAN)
        for sampling, epsilon in (
            ("poisson", "7.8992"),
            ("fixed_size", "83.9369"),
            ("shuffled", "19.0512"),
        ):
            self.assertRegex(text, rf"{sampling} +{epsilon}\n")

    @parameterized.parameters(*accountant._SOLVED)
    def test_any_one_quantity_may_be_missing(self, missing):
        values = {**_PLAN, "epsilon": 20.0, missing: None}
        text = _run(**values, sampling=["poisson"])
        self.assertRegex(text, rf"{missing} +by RDP\n +poisson +[0-9.e-]+\n")

    def test_noise_is_written_rounded_up(self):
        text = _run(
            **{**_PLAN, "noise_multiplier": None, "epsilon": 8.0},
            sampling=["poisson"],
        )
        (row,) = [line for line in text.splitlines() if "poisson  " in line]
        written = float(row.split()[1])
        self.assertLessEqual(
            accounting.epsilon(written, "poisson", 1000, 100, 100, 1e-5), 8.0
        )

    def test_a_sampling_without_solution_says_why(self):
        text = _run(
            **{**_PLAN, "rounds": None, "epsilon": 5.0, "noise_multiplier": 1.0}
        )
        self.assertRegex(text, r"fixed_size +-\n")
        self.assertIn("fixed_size, rdp: not even one round", text)

    def test_a_ledger_is_read(self):
        path = self.folder / "ledger.jsonl"
        charge = accounting.RoundCharge(
            sampling="poisson",
            num_clients=1000,
            clients_per_round=100,
            event=dp_accounting.GaussianDpEvent(1.0),
        )
        mechanism = {"name": "Fixed", "guarantee": "central", "description": "d" * 300}
        with accounting.PrivacyLedger(path, mechanism=mechanism) as ledger:
            for t in range(20):
                ledger.record(t, charge, 95 + t % 10)
        epsilon = accounting.epsilon(1.0, "poisson", 1000, 100, 20, 1e-5)
        text = _run(ledger=str(path), delta=1e-5)
        self.assertRegex(text, rf"by RDP at delta = 1e-05 +{epsilon:.4f}\n")
        self.assertRegex(text, r"cohort sizes +95 to 104\n")
        self.assertIn(ledger.head, text)
        self.assertLessEqual(max(map(len, text.splitlines())), 100)
        path.write_bytes(
            path.read_bytes().replace(b'multiplier":1.0', b'multiplier":2.0')
        )
        with self.assertRaisesRegex(SystemExit, "Line 2"):
            _run(ledger=str(path), delta=1e-5)

    @parameterized.parameters(
        ({}, "exactly three"),
        ({**_PLAN, "epsilon": 8.0}, "exactly three"),
        ({**_PLAN, "num_clients": None, "epsilon": 8.0}, "exactly three"),
        ({**_PLAN, "clients_per_round": 1001}, "clients_per_round"),
        ({**_PLAN, "noise_multiplier": -1.0}, "noise_multiplier"),
        ({**_PLAN, "delta": 1.0}, "delta"),
        ({**_PLAN, "ledger": "ledger.jsonl"}, "--ledger"),
        ({"ledger": "ledger.jsonl"}, "needs --delta"),
        ({"ledger": "missing.jsonl", "delta": 1e-5}, "missing.jsonl"),
    )
    def test_bad_combinations_are_refused_before_anything(self, values, words):
        with self.assertRaisesRegex(SystemExit, words):
            _run(**values)
