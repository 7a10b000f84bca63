"""The coordinator lists those who are ready, once they are enough."""

from __future__ import annotations

from absl.testing import absltest, parameterized

from tfdp_fl.secure_aggregation import (
    COORDINATOR,
    AdditiveSecretSharing,
    Coordinator,
    Message,
    RejectedMessageError,
)


def _ready(sender, **changes) -> Message:
    fields = {
        "kind": "ready",
        "session": "",
        "sender": sender,
        "recipient": COORDINATOR,
    }
    return Message(**{**fields, **changes})


class CoordinatorTest(parameterized.TestCase):
    def test_the_list_is_sent_to_each_when_enough_are_ready(self):
        coordinator = Coordinator(AdditiveSecretSharing())
        self.assertEqual(coordinator.receive(_ready("a"), 0.0), [])
        self.assertEqual(coordinator.receive(_ready("b"), 1.0), [])
        self.assertEqual(coordinator.ready, ("a", "b"))
        lists = coordinator.receive(_ready("c"), 2.0)
        self.assertEqual([m.recipient for m in lists], ["a", "b", "c"])
        self.assertEqual({m.members for m in lists}, {("a", "b", "c")})
        self.assertEqual({m.kind for m in lists}, {"peers"})
        self.assertLen({m.session for m in lists}, 1)
        self.assertEqual(coordinator.ready, ())

    def test_a_member_is_in_one_group_of_a_round(self):
        coordinator = Coordinator(AdditiveSecretSharing())
        for member in "abc":
            first = coordinator.receive(_ready(member), 0.0)
        with self.assertRaisesRegex(RejectedMessageError, "in a group of this round"):
            coordinator.receive(_ready("a"), 1.0)
        for member in "def":
            lists = coordinator.receive(_ready(member), 1.0)
        self.assertEqual(lists[0].members, ("d", "e", "f"))
        self.assertNotEqual(lists[0].session, first[0].session)

    def test_two_members_who_would_read_each_other_are_no_group(self):
        with self.assertRaisesRegex(ValueError, "got 2"):
            Coordinator(AdditiveSecretSharing(), 2)

    def test_who_has_waited_too_long_is_not_listed(self):
        coordinator = Coordinator(AdditiveSecretSharing(deadline_seconds=10.0))
        coordinator.receive(_ready("a"), 0.0)
        coordinator.receive(_ready("b"), 5.0)
        self.assertEqual(coordinator.receive(_ready("c"), 11.0), [])
        lists = coordinator.receive(_ready("d"), 12.0)
        self.assertEqual(lists[0].members, ("b", "c", "d"))

    @parameterized.parameters(
        {"kind": "share"},
        {"recipient": "b"},
        {"sender": COORDINATOR},
        {"sender": "a"},  # For the second time.
    )
    def test_what_does_not_belong_is_rejected(self, **changes):
        coordinator = Coordinator(AdditiveSecretSharing())
        coordinator.receive(_ready("a"), 0.0)
        with self.assertRaises(RejectedMessageError):
            coordinator.receive(_ready(**{"sender": "b", **changes}), 1.0)
        self.assertEqual(coordinator.ready, ("a",))


if __name__ == "__main__":
    absltest.main()
