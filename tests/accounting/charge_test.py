"""What one round costs, by the table of samplings."""

import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accounting.charges import charge as _charge
from tfdp_fl.accounting import charge as charge_lib

_G = dp_accounting.GaussianDpEvent
_NOTHING = dp_accounting.NonPrivateDpEvent()
_LAPLACE = dp_accounting.LaplaceDpEvent(1.0)
_SAMPLED = dp_accounting.PoissonSampledDpEvent(0.1, _G(1.0))
# Twice the sensitivity, which PLD's event doubles itself.
_OF_RDP = dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, _G(0.5))
_OF_PLD = dp_accounting.TruncatedSubsampledGaussianDpEvent(1000, 1.0, 100, 1.0)


@pytest.mark.parametrize(
    "charge, relation, by_rdp, by_pld",
    [
        (_charge(), "ADD_OR_REMOVE_ONE", _SAMPLED, _SAMPLED),
        (_charge(m=1000), "ADD_OR_REMOVE_ONE", _G(1.0), _G(1.0)),
        (_charge(m=2000.5), "ADD_OR_REMOVE_ONE", _G(1.0), _G(1.0)),
        (_charge("fixed_size"), "REPLACE_ONE", _OF_RDP, _OF_PLD),
        (_charge("shuffled"), "REPLACE_SPECIAL", _G(1.0), _G(1.0)),
        (_charge(z=0.0), "ADD_OR_REMOVE_ONE", _NOTHING, _NOTHING),
        (_charge("fixed_size", event=_NOTHING), "REPLACE_ONE", _NOTHING, _NOTHING),
    ],
)
def test_what_each_sampling_costs(charge, relation, by_rdp, by_pld):
    assert charge.relation.name == relation
    assert (charge.dp_event("rdp"), charge.dp_event("pld")) == (by_rdp, by_pld)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(charge_lib.SAMPLINGS),
    st.integers(2, 10**9),
    st.floats(0, 1),
    st.floats(0, 1e6),
    st.one_of(st.none(), st.integers(0, 10**6)),
)
def test_json_round_trip_is_exact(sampling, n, share, z, index):
    m = max(0.5, n * share) if sampling == "poisson" else max(1, int(n * share))
    place = {}
    if sampling == "shuffled" and index is not None:
        place = {"pass_index": index, "pass_offset": n - m, "partition": "ab"}
    if sampling == "fixed_size":
        place = {"known_selection": bool(index)}
    charge = _charge(sampling, n, m, z, **place)
    again = charge_lib.RoundCharge.from_json(charge.to_json())
    assert (again, hash(again)) == (charge, hash(charge))
    assert again.to_json() == charge.to_json()
    assert "\n" not in charge.to_json()
    assert ("known_selection" in charge.to_json()) == charge.known_selection
    # It is who could have been there, and the event.
    fields = {k: v for k, v in vars(charge).items() if k not in ("event", "_json")}
    fields.pop("noise_multiplier")
    who = charge_lib.Participation(**fields)
    assert who.cost(charge.event) == charge
    assert charge_lib.Participation.from_json(who.to_json()) == who


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"sampling": "bernoulli"}, "sampling"),
        ({"n": 0}, "num_clients"),
        *(({"sampling": "fixed_size", "m": m}, "clients_p") for m in (0, 1001, 10.5)),
        ({"event": _G(-1.0)}, "noise multiplier"),
        ({"event": "Gaussian"}, "event"),
        ({"event": _G(math.nan)}, "NaN"),
        ({"pass_index": 1}, "pass_index"),
        ({"sampling": "shuffled", "pass_index": 1}, "together"),
        ({"sampling": "fixed_size", "event": _LAPLACE}, "GaussianDpEvent"),
    ],
)
def test_errors_name_the_argument(arguments, name):
    with pytest.raises((TypeError, ValueError), match=name):
        _charge(**arguments)


_TWO_KINDS = [_G(2.0), dp_accounting.SelfComposedDpEvent(_G(3.0), 4)]


# The PLD accountant refuses a composition under sampling.
@pytest.mark.parametrize(
    "event, expected",
    [
        (dp_accounting.ComposedDpEvent(_TWO_KINDS), (2**-2 + 4 * 3**-2) ** -0.5),
        (_NOTHING, 0.0),
        (dp_accounting.ComposedDpEvent([_G(1.0), _G(0.0)]), 0.0),
        (dp_accounting.LaplaceDpEvent(0.0), 0.0),
        (dp_accounting.NoOpDpEvent(), math.inf),
        (dp_accounting.ComposedDpEvent([]), math.inf),
        (_LAPLACE, None),
        (dp_accounting.ComposedDpEvent([_G(1.0), _LAPLACE]), None),
    ],
)
def test_the_one_gaussian_that_an_event_is(event, expected):
    found = charge_lib.noise_multiplier_of(event)
    assert found == (expected and pytest.approx(expected, rel=1e-14))
    if expected not in (None, 0.0, math.inf):
        assert _charge(event=event).dp_event("pld").event == _G(found)


def test_an_event_in_json_is_exact_and_hashable():
    mixture = dp_accounting.dp_event.MixtureOfGaussiansDpEvent(
        np.float32(1.5), [0.0, 1.0], [0.25, 0.75]
    )
    event = dp_accounting.ComposedDpEvent([_G(np.float64(0.1) + 0.2), mixture])
    event = charge_lib.normalise(event)
    again = charge_lib.event_from_json(charge_lib.event_to_json(event))
    assert (again, hash(again)) == (event, hash(event))
    assert again.events[0].noise_multiplier == 0.1 + 0.2
    # Nothing but dp-accounting's events is made.
    for name in ("os", "NeighboringRelation", "NoSuchDpEvent"):
        with pytest.raises(ValueError, match=name):
            charge_lib.event_from_json({"type": name})
