from __future__ import annotations

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import _validate, schedules


def _checked(schedule):
    return schedules.checked(schedule, _validate.positive, "clients_per_round")


class ValueAtTest(parameterized.TestCase):
    @parameterized.parameters(
        (5,),
        (5.0,),
        (np.float32(5),),
        (np.int64(5),),
        ([1, 2, 5],),
        ((1.0, 2.0, 5.0),),
        (lambda t: 2 * t + 1,),
    )
    def test_round_2(self, schedule):
        self.assertEqual(schedules.value_at(_checked(schedule), 2, "m"), 5)

    def test_a_sequence_that_ends_too_early(self):
        with self.assertRaisesRegex(ValueError, "m is a sequence of 2.*round 2"):
            schedules.value_at([1.0, 2.0], 2, "m")

    @parameterized.parameters(None, "3", True, ([1.0],))
    def test_a_callable_must_return_a_number(self, value):
        with self.assertRaisesRegex(TypeError, "m must give a number"):
            schedules.value_at(lambda t: value, 0, "m")


class CheckedTest(parameterized.TestCase):
    def test_sequences_cannot_change_afterwards(self):
        sizes = [1, 2]
        schedule = _checked(sizes)
        sizes.append(-1)
        self.assertEqual(schedule, (1.0, 2.0))

    @parameterized.parameters(
        0, -1.0, ([1, 0],), ([],), (lambda t: 0.0,), (np.array([1.0, -2.0]),)
    )
    def test_values_that_are_not_allowed(self, schedule):
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            _checked(schedule)

    @parameterized.parameters("many", None, True, (["1"],), (lambda t: "1",))
    def test_types_that_are_not_allowed(self, schedule):
        with self.assertRaisesRegex(TypeError, "clients_per_round"):
            _checked(schedule)


class FixedTest(absltest.TestCase):
    def test_a_callable_is_asked_once_for_each_round(self):
        asked = []

        def impure(t):
            asked.append(t)
            return float(len(asked))

        schedule = schedules.fixed(impure)
        self.assertEqual([schedule(t) for t in (0, 4, 0, 4)], [1, 2, 1, 2])
        self.assertEqual(asked, [0, 4])
        self.assertIs(schedules.fixed(schedule), schedule)
        self.assertEqual(schedules.value_at(schedule, 4, "m"), 2.0)
