"""Messages survive the way through bytes, and bad bytes are refused."""

import json
import re
import struct

import numpy as np
from absl.testing import parameterized

from tfdp_fl.secure_aggregation import (
    AdditiveSecretSharing,
    Member,
    Message,
    RejectedMessageError,
)


def _message() -> Message:
    return Message(
        kind="share",
        session="s1",
        sender=3,
        recipient="ann",
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
        for name in ("kind", "session", "sender", "recipient"):
            self.assertEqual(getattr(got, name), getattr(sent, name))
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
        *({"tensors": [["<u8", shape]]} for shape in ([-1], [2**62, 4], "x", [1.9])),
        *({"tensors": [["<u8", shape]]} for shape in ([True], [0, 2**70], [0] * 33)),
        *({"sender": True}, {"kind": "shrug"}, {"session": 7}, {"recipient": [1]}),
        {"tensors": [["|O", [1]]]},
        {"kind": None, "tensors": 3},
    )
    def test_bad_headers_are_refused(self, **changes):
        header = {
            "kind": "share",
            "session": "s",
            "sender": 1,
            "recipient": 2,
            "tensors": [],
        }
        text = json.dumps({**header, **changes}).encode()
        magic = _message().to_bytes()[:16]
        with self.assertRaises(RejectedMessageError):
            Message.from_bytes(magic + struct.pack("<I", len(text)) + text)

    def test_mutated_messages_are_read_or_refused(self):
        # Whatever the bytes, nothing but the documented error comes out, and
        # what is read can be handed to a member.
        rng = np.random.default_rng(1)
        data = _message().to_bytes()
        (length,) = struct.unpack_from("<I", data, 16)
        header = data[20 : 20 + length].decode()
        spans = [each.span() for each in re.finditer(r"[^][{}:, ]+", header)]
        junk = (
            "1.9", "-1", "1e999", "NaN", "null", "true", '"x"', "[]", "{}",
            "18446744073709551616", "9" * 5000, "[" * 3000, "\\ud800",
        )  # fmt: skip
        refused = 0
        for attempt in range(6000):
            if attempt % 2:
                changed = bytearray(data)
                for _ in range(rng.integers(1, 4)):
                    changed[rng.integers(len(data))] = rng.integers(256)
            else:
                start, end = spans[rng.integers(len(spans))]
                part = junk[rng.integers(len(junk))]
                text = (header[:start] + part + header[end:]).encode()
                changed = data[:16] + struct.pack("<I", len(text))
                changed += text + data[20 + length :]
            member = Member(
                AdditiveSecretSharing(),
                "ann",
                np.zeros([2, 3]),
                members=[3, "ann", "bob"],
                session="s1",
            )
            member.begin(0.0)
            try:
                member.receive(Message.from_bytes(bytes(changed)), 0.0)
            except RejectedMessageError:
                refused += 1
        self.assertGreater(refused, 4000)
