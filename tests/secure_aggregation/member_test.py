"""One member's side: what it sends, what it takes, what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tfdp_fl.secure_aggregation import (
    COORDINATOR,
    AdditiveSecretSharing,
    Member,
    Message,
    RejectedMessageError,
)

_NAMES = ("ann", "bob", "cat")
_PAIRS = sorted((a, b) for a in _NAMES for b in _NAMES if a != b)


def _updates() -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: [rng.normal(size=(3, 2)).astype(np.float32), rng.normal(size=())]
        for name in _NAMES
    }


def _members(protocol, updates) -> dict[str, Member]:
    return {
        name: Member(protocol, name, update, members=_NAMES, session="s")
        for name, update in updates.items()
    }


def _alone(update=(0.0, 0.0), **protocol) -> Member:
    return Member(AdditiveSecretSharing(**protocol), "ann", np.array(update))


def _peers(members=_NAMES) -> Message:
    return Message(
        kind="peers", session="s", sender=COORDINATOR, recipient="ann", members=members
    )


@pytest.mark.parametrize("mode", ["ring", "float"])
@pytest.mark.parametrize("seed", range(5))
def test_the_sum_over_any_transport_in_any_order(mode, seed):
    updates, rng = _updates(), np.random.default_rng(seed)
    members = _members(AdditiveSecretSharing(mode=mode), updates)
    waiting = [m.to_bytes() for one in members.values() for m in one.begin(0.0)]
    while waiting:
        message = Message.from_bytes(waiting.pop(rng.integers(len(waiting))))
        answer = members[message.recipient].receive(message, 0.0)
        waiting += [one.to_bytes() for one in answer]
    for member in members.values():
        assert (member.outcome.succeeded, member.outcome.reason) == (True, "")
        assert member.outcome.members == _NAMES
        assert member.deadline is None
    values = [member.outcome.value for member in members.values()]
    for i in range(2):
        wanted = sum(update[i].astype(np.float64) for update in updates.values())
        np.testing.assert_allclose(values[0][i], wanted, rtol=0, atol=1e-11)
        # All hold the same number to the last bit.
        np.testing.assert_array_equal(values[0][i], values[1][i])
        np.testing.assert_array_equal(values[0][i], values[2][i])


def test_each_of_two_messages_goes_to_each_other_member():
    members = _members(AdditiveSecretSharing(), _updates())
    shares = [m for one in members.values() for m in one.begin(0.0)]
    sums = [m for s in shares for m in members[s.recipient].receive(s, 0.0)]
    for sent, kind in ((shares, "share"), (sums, "partial_sum")):
        assert {m.kind for m in sent} == {kind}
        assert sorted((m.sender, m.recipient) for m in sent) == _PAIRS


def test_shares_and_partial_sums_before_the_list_are_kept():
    updates = _updates()
    members = _members(AdditiveSecretSharing(), updates)
    members["ann"] = Member(AdditiveSecretSharing(), "ann", updates["ann"])
    members["ann"].begin(0.0)
    sent = [m for name in ("bob", "cat") for m in members[name].begin(0.0)]
    to_ann = [message for message in sent if message.recipient == "ann"]
    stranger = dataclasses.replace(to_ann[0], sender="eve")
    for message in [*to_ann, stranger]:
        assert members["ann"].receive(message, 0.0) == []
    answer = members["ann"].receive(_peers(), 1.0)
    kinds = [message.kind for message in answer]
    assert kinds == ["share", "share", "partial_sum", "partial_sum"]
    waiting = answer + [message for message in sent if message not in to_ann]
    while waiting:
        message = waiting.pop(0)
        waiting += members[message.recipient].receive(message, 1.0)
    assert members["ann"].outcome.succeeded


def test_early_messages_are_bounded():
    member = _alone(max_participants=3)
    member.begin(0.0)
    junk = Message(kind="share", session="x", sender="eve", recipient="ann")
    for _ in range(6):
        member.receive(junk, 0.0)
    with pytest.raises(RejectedMessageError, match="Too many"):
        member.receive(junk, 0.0)


def _share_for_ann() -> tuple[dict[str, Member], Message]:
    members = _members(AdditiveSecretSharing(), _updates())
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
        ({"kind": "peers", "sender": COORDINATOR}, "are known"),
        ({"kind": "peers"}, "Only the coordinator"),
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
    members, share = _share_for_ann()
    message = dataclasses.replace(share, kind=kind)
    members["ann"].receive(message, 0.0)
    with pytest.raises(RejectedMessageError, match="second"):
        members["ann"].receive(message, 0.0)


def test_float_tensors_must_be_finite():
    protocol = AdditiveSecretSharing(mode="float")
    member = Member(protocol, "ann", np.zeros(2), members=_NAMES, session="s")
    member.begin(0.0)
    message = Message(
        kind="share",
        session="s",
        sender="bob",
        recipient="ann",
        tensors=(np.array([0.0, np.nan]),),
    )
    with pytest.raises(RejectedMessageError, match="not finite"):
        member.receive(message, 0.0)


@pytest.mark.parametrize(
    "names, pattern",
    [
        (("ann", "bob"), "from 3"),
        (("bob", "cat", "dan"), "'ann'"),
        (("ann", "bob", "bob"), "once"),
    ],
)
def test_bad_lists_are_rejected(names, pattern):
    member = _alone()
    member.begin(0.0)
    with pytest.raises(RejectedMessageError, match=pattern):
        member.receive(_peers(names), 0.0)
    known = {"members": names, "session": "s"}
    with pytest.raises(ValueError, match=pattern):
        Member(AdditiveSecretSharing(), "ann", np.zeros(2), **known)


def test_after_the_deadline_the_own_update_is_the_outcome():
    update = np.array([1.0, 2.0], np.float32)
    member = Member(AdditiveSecretSharing(deadline_seconds=5.0), "ann", update)
    member.begin(100.0)
    assert member.deadline == 105.0
    member.check_deadline(105.0)
    assert member.outcome is None
    with pytest.raises(RejectedMessageError, match="over"):
        member.receive(_peers(), 105.1)
    assert not member.outcome.succeeded
    assert member.outcome.value is update
    assert member.outcome.members == ("ann",)
    assert "list of members" in member.outcome.reason


def test_a_member_takes_part_once_and_not_before_it_begins():
    member = _alone()
    with pytest.raises(RejectedMessageError, match="not begun"):
        member.receive(_peers(), 0.0)
    member.begin(0.0)
    with pytest.raises(ValueError, match="once"):
        member.begin(0.0)


@pytest.mark.parametrize(
    "name, update, options, pattern",
    [
        (
            "ann",
            [np.zeros(2), np.array([0.0, 200.0])],
            {},
            r"tensor 1 of member 'ann' holds 200.0 at index \(1,\)",
        ),
        (COORDINATOR, np.zeros(2), {}, "coordinator"),
        ("ann", np.zeros(2), {"members": _NAMES}, "go together"),
        ("ann", [], {}, "at least one tensor"),
    ],
)
def test_errors_at_construction(name, update, options, pattern):
    with pytest.raises(ValueError, match=pattern):
        Member(AdditiveSecretSharing(), name, update, **options)
