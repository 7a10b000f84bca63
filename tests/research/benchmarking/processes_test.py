"""Tests that a side answers, says what went wrong, and leaves nothing."""

import os

from absl.testing import absltest

from research.benchmarking import machine, processes


class ProcessesTest(absltest.TestCase):
    def test_a_side_answers_until_it_is_closed(self):
        with processes.Side("products") as side:
            side.call("add", name="mlp_small")
            rates = side.call("measure", name="mlp_small", seconds=0.01, repeats=2)
            self.assertLen(rates, 2)
            self.assertGreater(min(rates), 0)
            with self.assertRaisesRegex(processes.SideError, "KeyError: .mlp_huge"):
                side.call("add", name="mlp_huge")
            # An error does not end it.
            side.call("measure", name="mlp_small", seconds=0.01)
            pid = side._process.pid
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)
        self.assertNotIn(pid, machine.children())

    def test_a_side_that_cannot_be_made_says_why(self):
        with (
            processes.Side("nothing") as side,
            self.assertRaisesRegex(processes.SideError, "kind must be"),
        ):
            side.call("add")


if __name__ == "__main__":
    absltest.main()
