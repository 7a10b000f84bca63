from __future__ import annotations

import json
import math

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tfdp_fl import _json


class PlainTest(absltest.TestCase):
    def test_is_what_a_round_trip_through_json_gives(self):
        value = {
            "numbers": (1, np.int64(2), np.float32(0.5), np.float64(0.1)),
            "flags": [True, np.bool_(False), None],
            "arrays": np.arange(6).reshape(2, 3),
            "tensor": tf.constant([1.0, 2.0]),
            "text": np.str_("text"),
            3: {"nested": ({},)},
        }
        plain = _json.plain(value)
        self.assertEqual(json.loads(json.dumps(plain)), plain)
        self.assertEqual(
            plain,
            {
                "numbers": [1, 2, 0.5, 0.1],
                "flags": [True, False, None],
                "arrays": [[0, 1, 2], [3, 4, 5]],
                "tensor": [1.0, 2.0],
                "text": "text",
                "3": {"nested": [{}]},
            },
        )
        self.assertIs(type(plain["numbers"][3]), float)
        self.assertIs(type(plain["text"]), str)

    def test_what_json_does_not_have_is_described_or_refused(self):
        self.assertEqual(_json.plain([1j]), ["1j"])

        def refuse(value):
            raise TypeError(f"{value!r} is refused")

        with self.assertRaisesRegex(TypeError, "1j is refused"):
            _json.plain({"deep": [np.complex64(1j)]}, refuse)

    def test_finite_has_null_for_what_json_cannot_write(self):
        value = {"a": [math.inf, -math.inf, 1.5], "b": math.nan, "c": None}
        finite = _json.finite(value)
        self.assertEqual(finite, {"a": [None, None, 1.5], "b": None, "c": None})
        self.assertNotIn("Inf", json.dumps(finite, allow_nan=False))

    def test_equal_values_have_one_text(self):
        one = _json.canonical({"b": [1, 2], "a": None})
        self.assertEqual(one, '{"a":null,"b":[1,2]}')
        self.assertEqual(one, _json.canonical({"a": None, "b": (1, 2)}))


if __name__ == "__main__":
    absltest.main()
