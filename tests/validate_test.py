from __future__ import annotations

import math

import numpy as np
from absl.testing import parameterized

from tfdp_fl import _validate


class NumbersTest(parameterized.TestCase):
    @parameterized.parameters(
        (_validate.positive, (1e-300, 1, 2.5), (0, -1e-300, math.inf)),
        (_validate.non_negative, (0, 0.0, 3), (-1e-300, -1, math.inf)),
        (_validate.finite, (0, -5.5, 1e308), (math.inf, -math.inf)),
        (_validate.inside_unit_interval, (1e-300, 0.5), (0, 1, -0.1, 1.1)),
        (_validate.probability, (0, 1, 0.5), (-1e-9, 1.0001)),
    )
    def test_what_is_allowed(self, check, good, bad):
        for value in good:
            result = check(clip_norm=value)
            self.assertIs(type(result), float)
            self.assertEqual(result, value)
        for value in (*bad, math.nan, -(10**400)):
            with self.assertRaisesRegex(
                ValueError, f"^clip_norm must be .* got {value!r}"
            ):
                check(clip_norm=value)
        for value in ("1", None, True, [1], 1j):
            with self.assertRaisesRegex(TypeError, "^clip_norm must be .* got"):
                check(clip_norm=value)

    @parameterized.parameters(
        (_validate.positive_integer, (1, 2**63 - 1, np.int64(3)), (0, -1)),
        (_validate.non_negative_integer, (0, 2**127, np.uint8(3)), (-1,)),
    )
    def test_integers(self, check, good, bad):
        for value in good:
            result = check(rounds=value)
            self.assertIs(type(result), int)
            self.assertEqual(result, value)
        for value in bad:
            with self.assertRaisesRegex(ValueError, "^rounds must be .* got"):
                check(rounds=value)
        for value in (1.0, "1", None, True):
            with self.assertRaisesRegex(TypeError, "^rounds must be .* got"):
                check(rounds=value)

    def test_a_number_of_things_fits_into_64_bits(self):
        with self.assertRaisesRegex(ValueError, r"^rounds must be below 2\*\*63"):
            _validate.positive_integer(rounds=2**63)
