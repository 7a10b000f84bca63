"""Whose replies are in a round's sum."""

from __future__ import annotations

import types

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.flower import answers, replies


def _client(cid):
    return types.SimpleNamespace(cid=cid)


def _read(reply):
    if reply == "garbled":
        raise replies.ReplyError("it is garbled")
    return reply


def _collected(results, asked, failures=()):
    return answers.collect(1, results, failures, frozenset(asked), _read)


class NamesTest(parameterized.TestCase):
    @parameterized.parameters("7", 7, np.int64(7))
    def test_a_client_goes_by_its_cid(self, cid):
        self.assertEqual(answers.name_of(_client(cid)), "7")

    def test_a_node_goes_by_its_id(self):
        self.assertEqual(answers.name_of(answers.Node(7)), "7")

    @parameterized.parameters(None, 7.5, object())
    def test_others_have_no_name(self, cid):
        self.assertIsNone(answers.name_of(_client(cid)))
        self.assertIsNone(answers.name_of(cid))


class CollectTest(parameterized.TestCase):
    @parameterized.parameters(1, "1", None)
    def test_who_was_drawn_twice_counts_once(self, cid):
        twice, other = _client(cid), _client(2)
        asked = {"2"} if cid is None else {"1", "2"}
        got = _collected([(twice, "one"), (twice, "two"), (other, "three")], asked)
        self.assertEqual([each for *_, each in got.valid], ["one", "three"])
        self.assertIn("replied before", got.reasons[0])
        self.assertFalse(got.everybody_replied(3))

    def test_another_object_of_the_same_name_is_the_same_client(self):
        got = _collected([(_client(1), "one"), (_client("1"), "two")], {"1"})
        self.assertEqual([each for *_, each in got.valid], ["one"])

    def test_clients_without_a_name_are_told_apart(self):
        got = _collected([(_client(None), "same"), (object(), "same")], "")
        self.assertLen(got.valid, 2)

    def test_a_reply_of_no_use_is_a_reply(self):
        got = _collected([(_client(1), "garbled"), (_client(2), "good")], "12")
        self.assertFalse(got.complete(2))
        self.assertTrue(got.everybody_replied(2))

    def test_it_may_be_followed_by_one_of_use(self):
        results = [(_client(1), "garbled"), (_client(1), "good")]
        got = _collected(results, "12")
        self.assertLen(got.valid, 1)
        self.assertFalse(got.everybody_replied(2))

    @parameterized.parameters(
        ([(3, "good")], ()),  # Who was not asked.
        ([(1, "good")], ()),
        ([(1, "garbled")], ()),
        ([], (OSError(),)),
        ([(2, "good")], (OSError(),)),
    )
    def test_silence_and_a_failure_are_none(self, more, failures):
        results = [(_client(cid), reply) for cid, reply in [(1, "good"), *more]]
        self.assertFalse(_collected(results, "12", failures).everybody_replied(2))


if __name__ == "__main__":
    absltest.main()
