"""One member's side: what it sends, what it takes, what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.secure_aggregation import (
    COORDINATOR,
    AdditiveSecretSharing,
    Member,
    Message,
    RejectedMessageError,
)

_NAMES = ("ann", "bob", "cat")


def _updates() -> dict[str, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return {
        name: [
            rng.normal(size=(3, 2)).astype(np.float32),
            rng.normal(size=()),
        ]
        for name in _NAMES
    }


def _members(protocol, updates, **kwargs) -> dict[str, Member]:
    return {
        name: Member(protocol, name, update, members=_NAMES, session="s", **kwargs)
        for name, update in updates.items()
    }


def _peers(members=_NAMES, session="s", **changes) -> Message:
    fields = {
        "kind": "peers",
        "session": session,
        "sender": COORDINATOR,
        "recipient": "ann",
        "members": members,
    }
    return Message(**{**fields, **changes})


class MemberTest(parameterized.TestCase):
    @parameterized.parameters("ring", "float")
    def test_the_sum_over_any_transport_in_any_order(self, mode):
        protocol = AdditiveSecretSharing(mode=mode)
        updates = _updates()
        wanted = [
            sum(update[i].astype(np.float64) for update in updates.values())
            for i in range(2)
        ]
        for seed in range(10):
            rng = np.random.default_rng(seed)
            members = _members(protocol, updates)
            waiting = [
                message.to_bytes()
                for member in members.values()
                for message in member.begin(0.0)
            ]
            while waiting:
                data = waiting.pop(rng.integers(len(waiting)))
                message = Message.from_bytes(data)
                answer = members[message.recipient].receive(message, 0.0)
                waiting += [one.to_bytes() for one in answer]
            values = [member.outcome.value for member in members.values()]
            for member in members.values():
                self.assertTrue(member.outcome.succeeded)
                self.assertEqual(member.outcome.members, _NAMES)
                self.assertEqual(member.outcome.reason, "")
                self.assertIsNone(member.deadline)
            for i in range(2):
                np.testing.assert_allclose(values[0][i], wanted[i], rtol=0, atol=1e-11)
                # All hold the same number to the last bit.
                np.testing.assert_array_equal(values[0][i], values[1][i])
                np.testing.assert_array_equal(values[0][i], values[2][i])

    def test_each_of_two_messages_goes_to_each_other_member(self):
        members = _members(AdditiveSecretSharing(), _updates())
        shares = [m for one in members.values() for m in one.begin(0.0)]
        self.assertEqual({m.kind for m in shares}, {"share"})
        self.assertCountEqual(
            [(m.sender, m.recipient) for m in shares],
            [(a, b) for a in _NAMES for b in _NAMES if a != b],
        )
        sums = [m for s in shares for m in members[s.recipient].receive(s, 0.0)]
        self.assertEqual({m.kind for m in sums}, {"partial_sum"})
        self.assertCountEqual(
            [(m.sender, m.recipient) for m in sums],
            [(a, b) for a in _NAMES for b in _NAMES if a != b],
        )

    def test_shares_and_partial_sums_before_the_list_are_kept(self):
        protocol = AdditiveSecretSharing()
        updates = _updates()
        members = _members(protocol, updates)
        members["ann"] = Member(protocol, "ann", updates["ann"])
        members["ann"].begin(0.0)
        to_ann, rest = [], []
        for name in ("bob", "cat"):
            for message in members[name].begin(0.0):
                (to_ann if message.recipient == "ann" else rest).append(message)
        stranger = dataclasses.replace(to_ann[0], sender="eve")
        for message in [*to_ann, stranger]:
            self.assertEqual(members["ann"].receive(message, 0.0), [])
        answer = members["ann"].receive(_peers(), 1.0)
        self.assertEqual(
            [message.kind for message in answer],
            ["share", "share", "partial_sum", "partial_sum"],
        )
        waiting = answer + rest
        while waiting:
            message = waiting.pop(0)
            waiting += members[message.recipient].receive(message, 1.0)
        self.assertTrue(members["ann"].outcome.succeeded)

    def test_early_messages_are_bounded(self):
        protocol = AdditiveSecretSharing(max_participants=3)
        member = Member(protocol, "ann", np.zeros(2))
        member.begin(0.0)
        junk = Message(kind="share", session="x", sender="eve", recipient="ann")
        for _ in range(6):
            member.receive(junk, 0.0)
        with self.assertRaisesRegex(RejectedMessageError, "Too many"):
            member.receive(junk, 0.0)

    def _share_for_ann(self) -> tuple[dict[str, Member], Message]:
        members = _members(AdditiveSecretSharing(), _updates())
        members["ann"].begin(0.0)
        (share,) = (m for m in members["bob"].begin(0.0) if m.recipient == "ann")
        return members, share

    @parameterized.named_parameters(
        ("wrong_session", {"session": "other"}, "session 'other'"),
        ("stranger", {"sender": "eve"}, "'eve' is not another member"),
        ("oneself", {"sender": "ann"}, "'ann' is not another member"),
        ("somebody_elses", {"recipient": "cat"}, "for 'cat' reached 'ann'"),
        ("too_few_tensors", {"tensors": ()}, "expected"),
        (
            "wrong_shape",
            {"tensors": (np.zeros((2, 3), "<u8"), np.zeros((), "<u8"))},
            "expected",
        ),
        (
            "wrong_dtype",
            {"tensors": (np.zeros((3, 2), "<u4"), np.zeros((), "<u8"))},
            "expected",
        ),
        ("wrong_kind", {"kind": "ready"}, "'ready'"),
        ("second_list", {"kind": "peers", "sender": COORDINATOR}, "are known"),
        ("list_of_a_member", {"kind": "peers"}, "Only the coordinator"),
    )
    def test_rejected_and_nothing_changes(self, changes, pattern):
        members, share = self._share_for_ann()
        bad = dataclasses.replace(share, **changes)
        with self.assertRaisesRegex(RejectedMessageError, pattern):
            members["ann"].receive(bad, 0.0)
        # The true ones still lead to the end.
        waiting = [share, *members["cat"].begin(0.0)]
        for message in waiting:
            if message.recipient == "ann":
                answer = members["ann"].receive(message, 0.0)
        self.assertEqual([m.kind for m in answer], ["partial_sum"] * 2)

    @parameterized.parameters("share", "partial_sum")
    def test_duplicates_are_rejected(self, kind):
        members, share = self._share_for_ann()
        message = dataclasses.replace(share, kind=kind)
        members["ann"].receive(message, 0.0)
        with self.assertRaisesRegex(RejectedMessageError, "second"):
            members["ann"].receive(message, 0.0)

    def test_float_tensors_must_be_finite(self):
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
        with self.assertRaisesRegex(RejectedMessageError, "not finite"):
            member.receive(message, 0.0)

    @parameterized.named_parameters(
        ("two", ("ann", "bob"), "from 3"),
        ("without_oneself", ("bob", "cat", "dan"), "'ann'"),
        ("named_twice", ("ann", "bob", "bob"), "once"),
    )
    def test_bad_lists_are_rejected(self, names, pattern):
        member = Member(AdditiveSecretSharing(), "ann", np.zeros(2))
        member.begin(0.0)
        with self.assertRaisesRegex(RejectedMessageError, pattern):
            member.receive(_peers(names), 0.0)
        with self.assertRaisesRegex(ValueError, pattern):
            Member(
                AdditiveSecretSharing(),
                "ann",
                np.zeros(2),
                members=names,
                session="s",
            )

    def test_after_the_deadline_the_own_update_is_the_outcome(self):
        update = np.array([1.0, 2.0], np.float32)
        protocol = AdditiveSecretSharing(deadline_seconds=5.0)
        member = Member(protocol, "ann", update)
        member.begin(100.0)
        self.assertEqual(member.deadline, 105.0)
        member.check_deadline(105.0)
        self.assertIsNone(member.outcome)
        with self.assertRaisesRegex(RejectedMessageError, "over"):
            member.receive(_peers(), 105.1)
        self.assertFalse(member.outcome.succeeded)
        self.assertIs(member.outcome.value, update)
        self.assertEqual(member.outcome.members, ("ann",))
        self.assertIn("list of members", member.outcome.reason)

    def test_a_member_takes_part_once_and_not_before_it_begins(self):
        member = Member(AdditiveSecretSharing(), "ann", np.zeros(2))
        with self.assertRaisesRegex(RejectedMessageError, "not begun"):
            member.receive(_peers(), 0.0)
        member.begin(0.0)
        with self.assertRaisesRegex(ValueError, "once"):
            member.begin(0.0)

    def test_errors_at_construction(self):
        protocol = AdditiveSecretSharing()
        with self.assertRaisesRegex(
            ValueError, "tensor 1 of member 'ann' holds 200.0 at index \\(1,\\)"
        ):
            Member(protocol, "ann", [np.zeros(2), np.array([0.0, 200.0])])
        with self.assertRaisesRegex(ValueError, "coordinator"):
            Member(protocol, COORDINATOR, np.zeros(2))
        with self.assertRaisesRegex(ValueError, "go together"):
            Member(protocol, "ann", np.zeros(2), members=_NAMES)
        with self.assertRaisesRegex(ValueError, "at least one tensor"):
            Member(protocol, "ann", [])


if __name__ == "__main__":
    absltest.main()
