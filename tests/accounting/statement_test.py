"""The statement says what holds, and only that."""

from __future__ import annotations

import json
import math

from absl.testing import absltest, parameterized

from tfdp_fl import accounting
from tfdp_fl.accounting import statement

_FACTS = {
    "guarantee": "central",
    "mechanism": "FixedClipping",
    "mechanism_description": "updates are clipped and their sum is noised",
    "mechanism_parameters": {"clip_norm": 0.1, "noise_multiplier": 1.0},
    "sampling": "poisson",
    "num_clients": 1000,
    "clients_per_round": 100,
    "cohort_sizes": [97, 103, 88],
    "rounds": 3,
    "epsilon_rdp": 2.12341,
    "epsilon_pld": 1.99995,
}


def _facts(**changes):
    return accounting.StatementFacts(**{**_FACTS, **changes})


def _text(delta=1e-5, format="text", **changes):
    return accounting.privacy_statement(_facts(**changes), delta, format)


class StatementTest(parameterized.TestCase):
    def test_everything_a_reader_asks_for_is_there(self):
        text = _text()
        for words in (
            "per client",
            "3 rounds",
            "one client is added or removed",
            "delta = 1e-05",
            "by Renyi accounting 2.124",
            "by privacy loss distributions 2",
            "FixedClipping",
            "clip_norm = 0.1",
            "N = 1000 and m = 100",
            "88 to 103 clients",
            "dp-accounting",
            "In plain words",
        ):
            self.assertIn(words, text)

    @parameterized.parameters(
        (2.0, "2"),
        (1.99995, "2"),
        (1.2341, "1.235"),
        (0.012341, "0.01235"),
        (83.936917, "83.94"),
        (12345.1, "12350"),
    )
    def test_an_epsilon_is_never_rounded_down(self, epsilon, written):
        text = _text(epsilon_pld=None, epsilon_rdp=epsilon)
        self.assertIn(f"epsilon = {written} at", text)

    def test_the_tighter_accountant_leads(self):
        content = _text(format="dict")
        self.assertEqual(content["epsilon"], 1.99995)
        self.assertIn("epsilon = 2 at", content["summary"])

    def test_epsilons_may_be_functions_of_delta(self):
        content = _text(
            1e-3, "dict", epsilon_rdp=lambda delta: -math.log10(delta)
        )
        self.assertAlmostEqual(content["epsilon_rdp"], 3.0)

    @parameterized.parameters("text", "markdown")
    def test_an_infinite_epsilon_is_no_guarantee(self, format):
        for changes in (
            {"guarantee": "none", "mechanism": "NoPrivacy"},
            {"epsilon_rdp": math.inf, "epsilon_pld": math.inf},
            {"epsilon_rdp": None, "epsilon_pld": None},
        ):
            text = _text(format=format, **changes)
            self.assertIn("no differential-privacy guarantee", text)
            self.assertNotIn("differentially private", text)
            self.assertNotIn("inf", text.replace("information", ""))

    def test_the_dictionary_is_json(self):
        for epsilon in (1.0, math.inf):
            content = _text(format="dict", epsilon_rdp=epsilon)
            again = json.loads(json.dumps(content, allow_nan=False))
            self.assertEqual(again["rounds"], 3)

    def test_replaced_clients_are_said(self):
        text = _text(sampling="fixed_size")
        self.assertIn("one client is replaced by another", text)
        self.assertIn(statement.CAVEATS["fixed_size_population_known"], text)

    def test_shuffled_says_zero_out(self):
        text = _text(sampling="shuffled")
        self.assertIn("no amplification", text)

    def test_local_and_central_are_kept_apart(self):
        text = _text(
            guarantee="local",
            mechanism="LocalDP",
            epsilon_rdp=None,
            epsilon_pld=None,
            epsilon_local=9.5,
            central_epsilon=1.25,
            max_participations=4,
            caveats=("layers_joint",),
        )
        for words in (
            "Local differential privacy per client",
            "it took part in 4 rounds",
            "(9.5, 1e-05)-differentially private",
            "a central epsilon of 1.25",
            statement.CAVEATS["local_not_central"],
            statement.CAVEATS["layers_joint"],
        ):
            self.assertIn(words, text)

    def test_per_record(self):
        text = _text(
            guarantee="record",
            mechanism="NbAFL",
            unit="record",
            epsilon_rdp=None,
            epsilon_pld=None,
            epsilon_local=30.0,
            implied_epsilon=10.0,
            implied_delta=0.1691,
        )
        for words in (
            "per record",
            "epsilon = 10 and a constant that implies delta = 0.169",
            statement.CAVEATS["per_record"],
            statement.CAVEATS["epsilon_large"],
        ):
            self.assertIn(words, text)

    @parameterized.parameters(*statement.CAVEATS)
    def test_each_caveat_is_one_whole_sentence(self, caveat):
        sentence = statement.CAVEATS[caveat]
        self.assertRegex(sentence, r"^[A-Z].*\.$")
        for format in ("text", "markdown"):
            self.assertIn(sentence, _text(format=format, caveats=(caveat,)))
        content = _text(format="dict", caveats=(caveat,))
        self.assertEqual(content["caveats"][caveat], sentence)

    def test_a_large_delta_is_pointed_out(self):
        sentence = statement.CAVEATS["delta_not_below_one_over_n"]
        self.assertIn(sentence, _text(1e-3))
        self.assertNotIn(sentence, _text(1e-4))

    def test_markdown_is_a_table(self):
        text = _text(format="markdown", mechanism_parameters={"a|b": "x|y\nz"})
        self.assertStartsWith(text, "# Privacy statement\n")
        self.assertIn("| Rounds | 3 |", text)
        self.assertIn("| epsilon (RDP) | 2.124 |", text)
        self.assertIn("x\\|y z", text)

    def test_errors_name_the_argument(self):
        with self.assertRaisesRegex(ValueError, "guarantee"):
            _facts(guarantee="strong")
        with self.assertRaisesRegex(ValueError, "caveats"):
            _facts(caveats=("no_such",))
        with self.assertRaisesRegex(ValueError, "delta"):
            _text(0.0)
        with self.assertRaisesRegex(ValueError, "format"):
            _text(format="html")


if __name__ == "__main__":
    absltest.main()
