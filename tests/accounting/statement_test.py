"""The statement says what holds, and only that."""

from __future__ import annotations

import json
import math

from absl.testing import absltest, parameterized

from tfdp_fl import accounting, mechanisms  # noqa: F401 - it adds caveats.
from tfdp_fl.accounting import caveats

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

    def test_epsilons_may_be_functions_of_delta(self):
        content = _text(1e-3, "dict", epsilon_rdp=lambda delta: -math.log10(delta))
        self.assertAlmostEqual(content["epsilon_rdp"], 3.0)

    def test_an_infinite_epsilon_is_no_guarantee(self):
        for changes in (
            {"guarantee": "none", "mechanism": "NoPrivacy"},
            {"epsilon_rdp": math.inf, "epsilon_pld": math.inf},
            {"epsilon_rdp": None, "epsilon_pld": None},
        ):
            text = _text(**changes)
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
        self.assertIn(caveats.CAVEATS["fixed_size_population_known"], text)

    def test_cyclic_says_zero_out_and_what_is_counted_on(self):
        text = _text(sampling="cyclic")
        self.assertIn("replaced by nothing, in its place", text)
        self.assertIn("No amplification by sampling is claimed", text)
        self.assertNotIn("cyclic_zero_out", _text(format="dict")["caveats"])

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
            caveats.CAVEATS["local_not_central"],
            caveats.CAVEATS["layers_joint"],
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
            caveats.CAVEATS["per_record"],
            caveats.CAVEATS["epsilon_large"],
        ):
            self.assertIn(words, text)

    @parameterized.parameters(*caveats.CAVEATS)
    def test_each_caveat_is_one_whole_sentence(self, caveat):
        sentence = caveats.CAVEATS[caveat]
        self.assertRegex(sentence, r"^[A-Z].*\.$")
        self.assertIn(sentence, _text(caveats=(caveat,)))
        content = _text(format="dict", caveats=(caveat,))
        self.assertEqual(content["caveats"][caveat], sentence)

    def test_a_large_delta_is_pointed_out(self):
        sentence = caveats.CAVEATS["delta_not_below_one_over_n"]
        self.assertIn(sentence, _text(1e-3))
        self.assertNotIn(sentence, _text(1e-4))

    def test_errors_name_the_argument(self):
        with self.assertRaisesRegex(ValueError, "guarantee"):
            _facts(guarantee="strong")
        with self.assertRaisesRegex(ValueError, "caveats"):
            _facts(caveats=("no_such",))
        with self.assertRaisesRegex(ValueError, "delta"):
            _text(0.0)
        with self.assertRaisesRegex(ValueError, "format"):
            _text(format="html")


class SecrecyTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "fixed_size")
    def test_sampled_cohorts_must_stay_secret(self, sampling):
        facts = {"sampling": sampling, "epsilon_if_participation_is_known": 14.24}
        content = _text(format="dict", **facts)
        self.assertEqual(content["epsilon_if_participation_is_known"], 14.24)
        self.assertIn("must stay secret", content["secrecy"])
        text = _text(**facts)
        self.assertIn(content["secrecy"], text)
        self.assertIn("14.24", text)
        self.assertNotIn("odds", text)

    @parameterized.parameters("shuffled", "cyclic", "separated")
    def test_without_amplification_the_figure_is_the_same(self, sampling):
        content = _text(format="dict", sampling=sampling)
        self.assertEqual(
            content["epsilon_if_participation_is_known"], content["epsilon"]
        )
        self.assertIn("need not be secret", content["secrecy"])

    def test_what_is_not_known_is_not_answered(self):
        content = _text(format="dict")
        self.assertIsNone(content["epsilon_if_participation_is_known"])
        self.assertIn("No figure", content["secrecy"])
        content = _text(format="dict", epsilon_if_participation_is_known=math.inf)
        self.assertIn("no finite epsilon", content["secrecy"])

    def test_start_and_callbacks_are_trusted(self):
        for guarantee in ("central", "local"):
            content = _text(format="dict", guarantee=guarantee, epsilon_local=1.0)
            self.assertIn("start_and_callbacks_trusted", content["caveats"])


class WordingTest(parameterized.TestCase):
    """What is promised is no more than what is charged."""

    def test_the_stated_population_is_not_protected(self):
        sentence = caveats.CAVEATS["population_stated"]
        self.assertIn(sentence, _text())
        self.assertNotIn(sentence, _text(sampling="fixed_size"))
        self.assertIn("number of clients N", _text(sampling="shuffled"))

    def test_all_populations_are_named(self):
        content = _text(format="dict", populations=[1000, 500])
        self.assertIn("with N = 1000, then 500 and m = 100", content["how"])
        self.assertEqual(content["populations"], [1000, 500])
        with self.subTest("delta is held against the largest"):
            sentence = caveats.CAVEATS["delta_not_below_one_over_n"]
            self.assertIn(sentence, _text(1 / 700, populations=[1000, 500]))
            self.assertNotIn(sentence, _text(1 / 1500, populations=[1000]))

    def test_rounds_of_other_runs_are_counted_apart(self):
        text = _text(rounds_of_others=4)
        self.assertIn("after 3 rounds of training and 4 of other runs", text)

    def test_delta_per_record_is_not_held_against_clients(self):
        record = {
            "guarantee": "record",
            "unit": "record",
            "epsilon_local": 3.0,
            "caveats": ("record_sensitivity_assumed",),
        }
        content = _text(1e-3, "dict", **record)
        self.assertNotIn("delta_not_below_one_over_n", content["caveats"])
        self.assertNotIn("delta_not_below_one_over_records", content["caveats"])
        content = _text(1e-3, "dict", num_records=2000, **record)
        self.assertIn("delta_not_below_one_over_records", content["caveats"])


if __name__ == "__main__":
    absltest.main()
