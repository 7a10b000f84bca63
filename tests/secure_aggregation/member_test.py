"""One member's side: what it sends, what it takes, what it refuses."""

import dataclasses
import itertools
import re
import struct

import numpy as np
import pytest

from tests.secure_aggregation.network import Fault, Network
from tfdp_fl.secure_aggregation import (
    AdditiveSecretSharing,
    Member,
    Message,
    RejectedMessageError,
)

_NAMES = ("ann", "bob", "cat")
_UPDATES = {
    name: [np.full([3, 2], 1.1**n, np.float32), np.array(-0.3 * n)]
    for n, name in enumerate(_NAMES)
}
_NOTHING = np.zeros(2)


def _member(name="ann", update=_NOTHING, members=_NAMES, **protocol):
    sharing = AdditiveSecretSharing(**protocol)
    return Member(sharing, name, update, members=members, session="s")


def _members(**protocol) -> dict[str, Member]:
    return {name: _member(name, each, **protocol) for name, each in _UPDATES.items()}


@pytest.mark.parametrize("mode", ["ring", "float"])
@pytest.mark.parametrize("seed", range(3))
def test_the_sum_over_any_transport_in_any_order(mode, seed):
    members, rng = _members(mode=mode), np.random.default_rng(seed)
    waiting = [m.to_bytes() for one in members.values() for m in one.begin(0.0)]
    while waiting:
        message = Message.from_bytes(waiting.pop(rng.integers(len(waiting))))
        answer = members[message.recipient].receive(message, 0.0)
        waiting += [one.to_bytes() for one in answer]
    for member in members.values():
        outcome = member.outcome
        assert (outcome.succeeded, outcome.reason) == (True, "")
        assert (outcome.members, member.deadline) == (_NAMES, None)
        for i, value in enumerate(outcome.value):
            wanted = sum(update[i].astype(np.float64) for update in _UPDATES.values())
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-11)
            # All hold the same number to the last bit.
            np.testing.assert_array_equal(value, members["ann"].outcome.value[i])


def _share_for_ann() -> tuple[dict[str, Member], Message]:
    members = _members()
    members["ann"].begin(0.0)
    (share,) = (m for m in members["bob"].begin(0.0) if m.recipient == "ann")
    return members, share


_SCALAR = np.zeros((), "<u8")


@pytest.mark.parametrize(
    "changes, pattern",
    [
        ({"session": "other"}, "session 'other'"),
        ({"sender": "eve"}, "'eve' is not another member"),
        ({"sender": "ann"}, "'ann' is not another member"),
        ({"recipient": "cat"}, "for 'cat' reached 'ann'"),
        ({"tensors": ()}, "expected"),
        ({"tensors": (np.zeros((2, 3), "<u8"), _SCALAR)}, "expected"),
        ({"tensors": (np.zeros((3, 2), "<u4"), _SCALAR)}, "expected"),
        ({"kind": "ready"}, "'ready'"),
    ],
)
def test_rejected_and_nothing_changes(changes, pattern):
    members, share = _share_for_ann()
    with pytest.raises(RejectedMessageError, match=pattern):
        members["ann"].receive(dataclasses.replace(share, **changes), 0.0)
    # The true ones still lead to the end.
    for message in [share, *members["cat"].begin(0.0)]:
        if message.recipient == "ann":
            answer = members["ann"].receive(message, 0.0)
    assert [m.kind for m in answer] == ["partial_sum"] * 2


@pytest.mark.parametrize("kind", ["share", "partial_sum"])
def test_duplicates_are_rejected(kind):
    # On the way they do no harm.
    network = Network(*(Fault("duplicate", kind, sender) for sender in _GROUP))
    for outcome in network.run(_FOUR, _PROTOCOL).values():
        np.testing.assert_allclose(outcome.value, _TOTAL, rtol=0, atol=1e-11)
    assert network.rejected
    members, share = _share_for_ann()
    message = dataclasses.replace(share, kind=kind)
    members["ann"].receive(message, 0.0)
    with pytest.raises(RejectedMessageError, match="second"):
        members["ann"].receive(message, 0.0)


def test_after_the_deadline_the_own_update_is_the_outcome():
    update = np.array([1.0, 2.0], np.float32)
    member = _member(update=update, deadline_seconds=5.0)
    (to_bob, _) = member.begin(100.0)
    assert member.deadline == 105.0
    member.check_deadline(105.0)
    assert member.outcome is None
    with pytest.raises(RejectedMessageError, match="over"):
        member.receive(dataclasses.replace(to_bob, sender="bob"), 105.1)
    assert not member.outcome.succeeded
    np.testing.assert_array_equal(member.outcome.value, update)
    assert member.outcome.members == ("ann",)
    assert "shares from 'bob', 'cat'" in member.outcome.reason


@pytest.mark.parametrize(
    "update, members, pattern",
    [
        ([np.zeros(2), np.array([0.0, 200.0])], _NAMES, r"tensor 1 .*'ann' has 200"),
        ([], _NAMES, "at least one tensor"),
        ([np.zeros(2)], _NAMES[:2], "from 3"),
        ([np.zeros(2)], ("bob", "cat", "dan"), "'ann'"),
        ([np.zeros(2)], ("ann", "bob", "bob"), "once"),
    ],
)
def test_errors_at_construction(update, members, pattern):
    with pytest.raises(ValueError, match=pattern):
        _member(update=update, members=members)


def test_a_member_takes_part_once_and_not_before_it_begins():
    members, share = _share_for_ann()
    with pytest.raises(ValueError, match="once"):
        members["ann"].begin(0.0)
    with pytest.raises(RejectedMessageError, match="not begun"):
        _member().receive(share, 0.0)
    # Members with other shapes fail.
    outcomes = Network().run({**_FOUR, "eve": np.zeros(6)}, _PROTOCOL)
    assert not any(one.succeeded for one in outcomes.values())
    # Float tensors must be finite.
    member = _member(mode="float")
    message, _ = member.begin(0.0)
    bad = {"tensors": (np.array([0.0, np.nan]),), "recipient": "ann", "sender": "bob"}
    with pytest.raises(RejectedMessageError, match="not finite"):
        member.receive(dataclasses.replace(message, **bad), 0.0)


_PROTOCOL = AdditiveSecretSharing(deadline_seconds=10.0)
_GROUP = ("ann", "bob", "cat", "dan")
_FOUR = {
    name: np.random.default_rng(i).normal(size=5).astype(np.float32)
    for i, name in enumerate(_GROUP)
}
_TOTAL = sum(update.astype(np.float64) for update in _FOUR.values())
_SHARES, _SUMS = "shares from", "sums from"


@pytest.mark.parametrize(
    "fault, reasons",
    [
        # A member that crashes fails the others at that step.
        (Fault("crash", "share", "bob"), (f"{_SHARES} 'bob'", None, _SHARES, _SHARES)),
        (Fault("crash", "partial_sum", "bob"), (f"{_SUMS} 'bob'", None, _SUMS, _SUMS)),
        (Fault("delay", "share", "ann", seconds=10.1), (_SUMS, *[_SHARES] * 3)),
        # bob lacks ann's share; without it he has no partial sum for the rest.
        (Fault("drop", "share", "ann", "bob"), (_SUMS, _SHARES, _SUMS, _SUMS)),
        # Only the one who misses a sum fails: nobody can tell the others.
        (Fault("drop", "partial_sum", "ann", "bob"), ("", f"{_SUMS} 'ann'", "", "")),
        (Fault("delay", "partial_sum", "ann", "bob", 10.1), ("", _SUMS, "", "")),
        # A delay within the deadline does no harm.
        (Fault("delay", "share", "ann", "bob", 9.9), ("",) * 4),
        (Fault("delay", "partial_sum", "ann", "bob", 9.9), ("",) * 4),
    ],
)
def test_a_fault_fails_those_who_miss_something(fault, reasons):
    outcomes = Network(fault).run(_FOUR, _PROTOCOL)
    for (name, outcome), reason in zip(outcomes.items(), reasons, strict=True):
        if reason is None:
            continue
        assert reason in outcome.reason
        assert outcome.succeeded == (not reason) == (not outcome.reason)
        if outcome.succeeded:
            np.testing.assert_allclose(outcome.value, _TOTAL, rtol=0, atol=1e-11)
            assert outcome.members == _GROUP
        else:
            assert outcome.value is _FOUR[name]
            assert outcome.members == (name,)


_FIELDS = {"kind": "share", "session": "s", "sender": 7, "recipient": "ann"}
_TENSORS = (np.ones((2, 3), "<u8"), np.zeros((0, 5), "<u4"), np.array(-1.5))
_SENT = Message(**_FIELDS, tensors=_TENSORS)


def test_messages_in_bytes_and_every_truncation_and_extension():
    sent, data = _SENT, _SENT.to_bytes()
    got = Message.from_bytes(data)
    for name in ("kind", "session", "sender", "recipient"):
        assert getattr(got, name) == getattr(sent, name)
    for a, b in zip(got.tensors, sent.tensors, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    text = data.replace(b'["<f8", []]', b'["<f8", ""]')  # No list is no shape.
    assert len(text) == len(data) and text != data
    for wrong in (*(data[:length] for length in range(len(data))), data + b"\0", text):
        with pytest.raises(RejectedMessageError):
            Message.from_bytes(wrong)


def test_of_a_changed_header_only_names_are_taken():
    # Nothing else than the documented error. (Of any bytes: `stress/fuzz_stress.py`.)
    data = _SENT.to_bytes()
    (length,) = struct.unpack_from("<I", data, 16)
    header, rest = data[20 : 20 + length].decode(), data[20 + length :]
    names = ('"x"', "-1", "18446744073709551616")
    junk = (
        *(*names, "1.9", "1e999", "NaN", "null", "true", "[]", "{}", "9" * 5000),
        *("[" * 3000, "\\ud800", f"0, {2**70}", "0, " * 64 + "0"),
    )
    taken = {'"s"': ('"x"',), "7": names, '"ann"': names}
    member = _member()
    member.begin(0.0)
    for token, part in itertools.product(re.finditer(r"[^][{}:, ]+", header), junk):
        text = (header[: token.start()] + part + header[token.end() :]).encode()
        changed = data[:16] + struct.pack("<I", len(text)) + text + rest
        with pytest.raises(RejectedMessageError) as refusal:
            member.receive(Message.from_bytes(changed), 0.0)
        is_read = "receive" in [entry.name for entry in refusal.traceback]
        assert is_read == (part in taken.get(token[0], ())), (token[0], part)
