"""Small tensors do not take the beginning of a large one's place."""

import resource
import subprocess
import sys

from absl.testing import absltest

_SCRIPT = """
import resource, sys
import tensorflow as tf
from tfdp_fl.engine import allocation

if sys.argv[1] == "reserve":
    allocation.reserve_small_regions()
    allocation.reserve_small_regions()
touched = lambda mib: tf.raw_ops.Fill(dims=[mib << 18], value=1.0)
touched(120)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
activations = touched(10)
weight = touched(120)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def _kib_touched(how: str) -> int:
    return int(
        subprocess.check_output(
            [sys.executable, "-c", _SCRIPT, how], stderr=subprocess.DEVNULL
        )
    )


class AllocationTest(absltest.TestCase):
    def test_a_freed_weights_place_is_there_for_the_next(self):
        if _kib_touched("as it is") < 100 << 10:
            self.skipTest("This allocator gives memory back, or moves it.")
        # The ten of the small one, and what running takes.
        self.assertLess(_kib_touched("reserve"), 30 << 10)

    def test_what_is_reserved_is_not_touched(self):
        from tfdp_fl.engine import allocation

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        allocation.reserve_small_regions.__wrapped__()
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.assertLess(after - before, 16 << 10)


if __name__ == "__main__":
    absltest.main()
