"""The statement says what holds, and only that."""

import json
import math

import pytest

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


def _text(delta=1e-5, format="text", **changes):
    facts = accounting.StatementFacts(**{**_FACTS, **changes})
    return accounting.privacy_statement(facts, delta, format)


def _content(delta=1e-5, **changes):
    return _text(delta, "dict", **changes)


def _said(text, *words):
    assert [each for each in words if each not in text] == []


def test_everything_a_reader_asks_for_is_there():
    _said(
        _text(),
        *("per client", "3 rounds", "one client is added or removed", "delta = 1e-05"),
        *("by Renyi accounting 2.124", "by privacy loss distributions 2"),
        *("FixedClipping", "clip_norm = 0.1", "N = 1000 and m = 100"),
        *("88 to 103 clients", "dp-accounting", "In plain words"),
        # The stated population is not protected.
        caveats.CAVEATS["population_stated"],
    )


@pytest.mark.parametrize(
    "epsilon, written",
    [
        (2.0, "2"),
        (1.99995, "2"),
        (1.2341, "1.235"),
        (0.012341, "0.01235"),
        (83.936917, "83.94"),
        (12345.1, "12350"),
    ],
)
def test_an_epsilon_is_never_rounded_down(epsilon, written):
    text = _text(epsilon_pld=None, epsilon_rdp=epsilon)
    assert f"epsilon = {written} at" in text


@pytest.mark.parametrize(
    "changes",
    [
        {"guarantee": "none", "mechanism": "NoPrivacy"},
        {"epsilon_rdp": math.inf, "epsilon_pld": math.inf},
        {"epsilon_rdp": None, "epsilon_pld": None},
    ],
)
def test_an_infinite_epsilon_is_no_guarantee(changes):
    text = _text(**changes)
    assert "no differential-privacy guarantee" in text
    assert "differentially private" not in text
    assert "inf" not in text.replace("information", "")


def test_the_dictionary_is_json():
    for epsilon in (1.0, math.inf):
        content = _content(1e-3, epsilon_rdp=lambda _, epsilon=epsilon: epsilon)
        assert json.loads(json.dumps(content, allow_nan=False))["rounds"] == 3


def test_what_each_sampling_has_said_of_it():
    text = _text(sampling="fixed_size")
    _said(text, "one client is replaced by another")
    _said(text, caveats.CAVEATS["fixed_size_population_known"])
    assert caveats.CAVEATS["population_stated"] not in text
    text = _text(sampling="cyclic")
    _said(text, "replaced by nothing, in its place")
    _said(text, "No amplification by sampling is claimed")
    assert "cyclic_zero_out" not in _content()["caveats"]
    _said(_text(sampling="shuffled"), "number of clients N")


_UNSAMPLED = ("shuffled", "cyclic", "separated")
_NO_CENTRAL = {"epsilon_rdp": None, "epsilon_pld": None}
_RECORD = {"guarantee": "record", "mechanism": "NbAFL", "unit": "record"}


def test_local_and_central_are_kept_apart():
    _said(
        _text(
            guarantee="local",
            mechanism="LocalDP",
            epsilon_local=9.5,
            central_epsilon=1.25,
            max_participations=4,
            caveats=("layers_joint",),
            **_NO_CENTRAL,
        ),
        "Local differential privacy per client",
        "it took part in 4 rounds",
        "(9.5, 1e-05)-differentially private",
        "a central epsilon of 1.25",
        caveats.CAVEATS["local_not_central"],
        caveats.CAVEATS["layers_joint"],
    )


def test_per_record():
    _said(
        _text(
            epsilon_local=30.0,
            implied_epsilon=10.0,
            implied_delta=0.1691,
            **_RECORD,
            **_NO_CENTRAL,
        ),
        "per record",
        "epsilon = 10 and a constant that implies delta = 0.169",
        caveats.CAVEATS["per_record"],
        caveats.CAVEATS["epsilon_large"],
    )


def test_every_caveat_is_a_sentence_of_the_statement():
    text = _text(caveats=tuple(caveats.CAVEATS))
    for sentence in caveats.CAVEATS.values():
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert sentence in text


def test_a_large_delta_is_pointed_out():
    sentence = caveats.CAVEATS["delta_not_below_one_over_n"]
    assert sentence in _text(1e-3)
    assert sentence not in _text(1e-4)
    # Held against the largest population.
    assert sentence in _text(1 / 700, populations=[1000, 500])
    assert sentence not in _text(1 / 1500, populations=[1000])


def test_delta_per_record_is_not_held_against_clients():
    facts = {**_RECORD, "epsilon_local": 3.0}
    content = _content(1e-3, **facts)
    assert not [key for key in content["caveats"] if key.startswith("delta")]
    content = _content(1e-3, num_records=2000, **facts)
    assert "delta_not_below_one_over_records" in content["caveats"]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"guarantee": "strong"}, "guarantee"),
        ({"caveats": ("no_such",)}, "caveats"),
        ({"delta": 0.0}, "delta"),
        ({"format": "html"}, "format"),
    ],
)
def test_errors_name_the_argument(changes, name):
    with pytest.raises(ValueError, match=name):
        _text(**changes)


@pytest.mark.parametrize(
    "sampling, given, stated, words",
    [
        ("poisson", 14.24, 14.24, "must stay secret"),
        ("fixed_size", 14.24, 14.24, "must stay secret"),
        ("poisson", None, None, "No figure"),
        ("poisson", math.inf, None, "no finite epsilon"),
        # Without amplification the figure is the same.
        *((each, None, 1.99995, "need not be secret") for each in _UNSAMPLED),
    ],
)
def test_sampled_cohorts_must_stay_secret(sampling, given, stated, words):
    facts = {"sampling": sampling, "epsilon_if_participation_is_known": given}
    content = _content(**facts)
    assert content["epsilon_if_participation_is_known"] == stated
    _said(content["secrecy"], words)
    _said(_text(**facts), content["secrecy"])
    if stated == 14.24:
        _said(content["secrecy"], "14.24")


@pytest.mark.parametrize("guarantee", ["central", "local"])
def test_start_and_callbacks_are_trusted(guarantee):
    content = _content(guarantee=guarantee, epsilon_local=1.0)
    assert "start_and_callbacks_trusted" in content["caveats"]


def test_populations_and_rounds_of_others_are_named():
    content = _content(populations=[1000, 500])
    _said(content["how"], "with N = 1000, then 500 and m = 100")
    assert content["populations"] == [1000, 500]
    text = _text(rounds_of_others=4)
    _said(text, "after 3 rounds of training and 4 of other runs")
