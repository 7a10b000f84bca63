"""The statement says what holds, and only that."""

import json
import math
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdp_fl import accounting, mechanisms  # noqa: F401 - it adds caveats.
from tfdp_fl.accounting import rounding, statement

_FACTS = {"trust_model": "central", "mechanism": "FixedClipping", "sampling": "poisson"}
_FACTS |= {"mechanism_description": "updates are clipped and their sum is noised"}
_FACTS |= {"mechanism_parameters": {"clip_norm": 0.1, "noise_multiplier": 1.0}}
_FACTS |= {"num_clients": 1000, "clients_per_round": 100, "cohort_sizes": [97, 103, 88]}
_FACTS |= {"rounds": 3, "epsilon_rdp": 2.12341, "epsilon_pld": 1.99995}
_NO_CENTRAL = {"epsilon_rdp": None, "epsilon_pld": None}
_RECORD = {"trust_model": "local", "mechanism": "NbAFL", "privacy_unit": "record"}
_LOCAL = {"trust_model": "local", "mechanism": "LocalDP", "caveats": ("layers_joint",)}
_LOCAL |= {"epsilon_local": 9.5, "central_epsilon": 1.25, "max_participations": 4}
_IMPLIED = {"epsilon_local": 30.0, "implied_epsilon": 10.0, "implied_delta": 0.1691}


def _text(delta=1e-5, format="text", **changes):
    facts = accounting.StatementFacts(**{**_FACTS, **changes})
    found = accounting.privacy_statement(facts, delta, format)
    if format == "dict":
        return found
    assert max(map(len, found.splitlines())) <= 80
    return " ".join(found.split())


def _content(delta=1e-5, **changes):
    return _text(delta, "dict", **changes)


@pytest.mark.parametrize(
    "changes, words, keys",
    [
        (
            {},
            (
                *("per client", "3 rounds", "one client is added or removed"),
                *("delta = 1e-05", "N = 1000 and m = 100", "88 to 103 clients"),
                *("by Renyi accounting 2.124", "by privacy loss distributions 2"),
                *("FixedClipping", "clip_norm = 0.1"),
            ),
            # The stated population is not protected.
            ("population_stated", "start_and_callbacks_trusted", "!cyclic_zero_out"),
        ),
        (
            {"sampling": "fixed_size"},
            ("one client is replaced by another",),
            ("fixed_size_population_known", "!population_stated"),
        ),
        (
            {"sampling": "cyclic"},
            (
                "client is counted as zero in its place",
                "No amplification by sampling is",
            ),
            ("cyclic_zero_out",),
        ),
        ({"sampling": "shuffled"}, ("number of clients N",), ()),
        (
            {**_LOCAL, **_NO_CENTRAL},
            (
                *("Local differential privacy per client", "it took part in 4 rounds"),
                *("(9.5, 1e-05)-differentially private", "a central epsilon of 1.25"),
            ),
            ("local_not_central", "layers_joint", "start_and_callbacks_trusted"),
        ),
        (
            {**_RECORD, **_NO_CENTRAL, **_IMPLIED},
            ("per record", "epsilon = 10 and a constant that implies delta = 0.1691"),
            ("per_record", "epsilon_large"),
        ),
        ({"rounds_of_others": 4}, ("3 rounds of training and 4 of other runs",), ()),
        ({"populations": [1000, 500]}, ("N = 1000, then 500 and m = 100",), ()),
        # Every caveat is a sentence of the statement.
        ({"caveats": tuple(statement.CAVEATS)}, (), tuple(statement.CAVEATS)),
    ],
)
def test_what_holds_is_said(changes, words, keys):
    text = _text(**changes)
    json.dumps(_content(**changes), allow_nan=False)
    assert [each for each in words if each not in text] == []
    for key in keys:
        sentence = statement.CAVEATS.get(key.strip("!"), key)
        assert (sentence in text) == (not key.startswith("!")), key


def test_an_epsilon_is_never_rounded_down():
    written = {2.0: "2", 1.99995: "2", 1.2341: "1.235", 0.012341: "0.01235"}
    written |= {2.0000000001: "2.001", 0.9999999: "0.9999999"}
    for epsilon, said in (written | {83.936917: "83.94", 12345.1: "12350"}).items():
        text = _text(epsilon_pld=None, epsilon_rdp=epsilon)
        assert f"epsilon = {said} at" in text
        (factor,) = re.findall(r"exp\(epsilon\) = ([0-9.e+]*\d)", text) or ["inf"]
        assert float(factor) >= math.exp(min(epsilon, 700))


@settings(max_examples=500, deadline=None)
@given(st.floats(1e-300, 1e300), st.integers(3, 7))
def test_a_figure_is_printed_upwards_and_near(value, digits):
    printed = accounting.format_up(value, digits)
    assert value <= float(printed) <= value * (1 + 1.01 * 10.0 ** (1 - digits))
    assert (printed == "1") <= (value == 1)
    # So is what a progress bar of Keras makes of it.
    shown = rounding.round_up_for_bar(value)
    assert value <= float(f"{shown:.4f}" if shown > 1e-3 else f"{shown:.4e}")
    # Of a delta that somebody gave nothing is added.
    assert accounting.format_up(float(f"{value:.3g}")) == f"{value:.3g}" or value > 999


def test_nothing_else_formats_an_epsilon_a_delta_or_their_factor():
    found = []
    for folder in ("tfdp_fl", "scripts"):
        for path in pathlib.Path(folder).rglob("*"):
            if path.suffix in (".py", ".html", ".txt") and "mechanisms" not in str(
                path
            ):
                text = path.read_text("utf-8")
                found += re.findall(
                    r"\{[^{}]*(?:epsilon|delta)[^{}]*:\.?\d*[gfe]\}"
                    r'|"%\.?\d?[gfe]" ?\| ?format\([^)]*(?:epsilon|delta)',
                    text,
                )
    assert found == []


@pytest.mark.parametrize(
    "changes",
    [
        {"trust_model": "none", "mechanism": "NoPrivacy"},
        {"epsilon_rdp": math.inf, "epsilon_pld": math.inf},
        _NO_CENTRAL,
    ],
)
def test_an_infinite_epsilon_is_no_guarantee(changes):
    text = _text(**changes)
    assert "no differential-privacy guarantee" in text
    assert "differentially private" not in text
    assert "inf" not in text.replace("information", "")
    # The dictionary is JSON.
    content = _content(1e-3, **{**changes, "epsilon_rdp": lambda _: math.inf})
    assert json.loads(json.dumps(content, allow_nan=False))["rounds"] == 3


def test_a_large_delta_is_pointed_out():
    sentence = statement.CAVEATS["delta_not_below_one_over_n"]
    assert sentence in _text(1e-3)
    assert sentence not in _text(1e-4)
    # Held against the largest population.
    assert sentence in _text(1 / 700, populations=[1000, 500])
    assert sentence not in _text(1 / 1500, populations=[1000])
    # Delta per record is not held against clients.
    facts = {**_RECORD, "epsilon_local": 3.0}
    content = _content(1e-3, **facts)
    assert not [key for key in content["caveats"] if key.startswith("delta")]
    content = _content(1e-3, num_records=2000, **facts)
    assert "delta_not_below_one_over_records" in content["caveats"]


def test_errors_name_the_argument():
    wrong = {"trust_model": "strong", "caveats": ("no_such",), "delta": 0.0}
    for name, value in (wrong | {"format": "html"}).items():
        with pytest.raises(ValueError, match=name):
            _text(**{name: value})


@pytest.mark.parametrize(
    "sampling, given, stated, words",
    [
        ("poisson", 14.24, 14.24, "stays secret"),
        ("fixed_size", 14.24, 14.24, "stays secret"),
        ("poisson", None, None, "No figure"),
        ("poisson", math.inf, None, "no finite epsilon"),
        # Without amplification the figure is the same.
        *(
            (sampling, None, 1.99995, "need not be secret")
            for sampling in ("shuffled", "cyclic", "min_separation")
        ),
    ],
)
def test_sampled_cohorts_must_stay_secret(sampling, given, stated, words):
    facts = {"sampling": sampling, "epsilon_if_participation_is_known": given}
    content = _content(**facts)
    assert content["epsilon_if_participation_is_known"] == stated
    assert words in content["secrecy"]
    assert content["secrecy"] in _text(**facts)
    assert ("14.24" in content["secrecy"]) == (stated == 14.24)
