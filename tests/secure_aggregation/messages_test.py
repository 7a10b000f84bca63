"""Messages survive the way through bytes, and bad bytes are refused."""

from __future__ import annotations

import json
import struct

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.secure_aggregation import Message, RejectedMessageError


def _message() -> Message:
    return Message(
        kind="share",
        session="s1",
        sender=3,
        recipient="ann",
        members=(3, "ann", "bob"),
        tensors=(
            np.arange(6, dtype="<u8").reshape(2, 3),
            np.zeros((0, 5), "<u4"),
            np.array(-1.5),
        ),
    )


class MessageTest(parameterized.TestCase):
    def test_round_trip(self):
        sent = _message()
        got = Message.from_bytes(sent.to_bytes())
        for name in ("kind", "session", "sender", "recipient", "members"):
            self.assertEqual(getattr(got, name), getattr(sent, name))
        self.assertLen(got.tensors, 3)
        for a, b in zip(got.tensors, sent.tensors, strict=True):
            np.testing.assert_array_equal(a, b)
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))

    def test_every_truncation_and_extension_is_refused(self):
        data = _message().to_bytes()
        for length in range(len(data)):
            with self.assertRaises(RejectedMessageError):
                Message.from_bytes(data[:length])
        with self.assertRaises(RejectedMessageError):
            Message.from_bytes(data + b"\0")

    @parameterized.parameters(
        {"tensors": [["|O", [1]]]},
        {"tensors": [["<u8", [-1]]]},
        {"tensors": [["<u8", [2**62, 4]]]},
        {"tensors": [["<u8", "x"]]},
        {"sender": True},
        {"sender": None},
        {"members": [[1]]},
        {"kind": None, "tensors": 3},
    )
    def test_bad_headers_are_refused(self, **changes):
        header = {
            "kind": "share",
            "session": "s",
            "sender": 1,
            "recipient": 2,
            "members": [],
            "tensors": [],
        }
        text = json.dumps({**header, **changes}).encode()
        magic = _message().to_bytes()[:16]
        with self.assertRaises(RejectedMessageError):
            Message.from_bytes(magic + struct.pack("<I", len(text)) + text)


if __name__ == "__main__":
    absltest.main()
