"""Faults and deadlines: every miss gives back the own update, and says so."""

from __future__ import annotations

import numpy as np
import pytest

from tests.secure_aggregation.network import (
    Fault,
    InMemoryNetwork,
    aggregate_in_memory,
)
from tfdp_fl.secure_aggregation import COORDINATOR, AdditiveSecretSharing

_PROTOCOL = AdditiveSecretSharing(deadline_seconds=10.0)
_NAMES = ("ann", "bob", "cat", "dan")
_UPDATES = {
    name: np.random.default_rng(i).normal(size=5).astype(np.float32)
    for i, name in enumerate(_NAMES)
}
_TOTAL = sum(update.astype(np.float64) for update in _UPDATES.values())
_LIST, _SHARES, _SUMS = "list of members", "shares from", "sums from"


@pytest.mark.parametrize(
    "fault, reasons",
    [
        # A member that crashes fails the others at that step.
        (Fault("crash", 1, "bob"), (_LIST, "crashed", _LIST, _LIST)),
        (Fault("crash", 2, "bob"), (f"{_SHARES} 'bob'", "crashed", _SHARES, _SHARES)),
        (Fault("crash", 3, "bob"), (f"{_SUMS} 'bob'", "crashed", _SUMS, _SUMS)),
        # ann never begins, so all others wait for her shares in vain.
        (Fault("drop", 1, COORDINATOR, "ann"), (_LIST, *[f"{_SHARES} 'ann'"] * 3)),
        (
            Fault("delay", 1, COORDINATOR, "ann", 10.1),
            (_LIST, *[f"{_SHARES} 'ann'"] * 3),
        ),
        (Fault("drop", 1, "ann"), (_LIST,) * 4),
        (Fault("delay", 1, "ann", seconds=10.1), (_LIST,) * 4),
        # bob lacks ann's share; without it he has no partial sum for the rest.
        (
            Fault("drop", 2, "ann", "bob"),
            (f"{_SUMS} 'bob'", f"{_SHARES} 'ann'", *[f"{_SUMS} 'bob'"] * 2),
        ),
        # Only the one who misses a sum fails: nobody can tell the others.
        (Fault("drop", 3, "ann", "bob"), ("", f"{_SUMS} 'ann'", "", "")),
        (Fault("delay", 3, "ann", "bob", 10.1), ("", f"{_SUMS} 'ann'", "", "")),
        # A delay within the deadline does no harm.
        (Fault("delay", 1, COORDINATOR, "bob", 9.5), ("",) * 4),
        (Fault("delay", 2, "ann", "bob", 9.9), ("",) * 4),
        (Fault("delay", 3, "ann", "bob", 9.9), ("",) * 4),
    ],
)
def test_a_fault_fails_those_who_miss_something(fault, reasons):
    outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, [fault])
    assert tuple(outcomes) == _NAMES
    for (name, outcome), reason in zip(outcomes.items(), reasons, strict=True):
        assert reason in outcome.reason
        assert outcome.succeeded == (not reason) == (not outcome.reason)
        if outcome.succeeded:
            np.testing.assert_allclose(outcome.value, _TOTAL, rtol=0, atol=1e-11)
            assert outcome.members == _NAMES
        else:
            assert outcome.value is _UPDATES[name]
            assert outcome.members == (name,)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_duplicates_do_no_harm(step):
    faults = [Fault("duplicate", step, sender) for sender in (*_NAMES, COORDINATOR)]
    network = InMemoryNetwork(faults)
    outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, network=network)
    for outcome in outcomes.values():
        np.testing.assert_allclose(outcome.value, _TOTAL, rtol=0, atol=1e-11)
    assert network.rejected


@pytest.mark.parametrize("latency, succeeded", [(5.1, False), (4.9, True)])
def test_a_slow_network_misses_deadlines(latency, succeeded):
    outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, latency_seconds=latency)
    assert {one.succeeded for one in outcomes.values()} == {succeeded}


def test_members_with_other_shapes_fail():
    outcomes = aggregate_in_memory({**_UPDATES, "eve": np.zeros(6)}, _PROTOCOL)
    assert not any(one.succeeded for one in outcomes.values())
