"""Small tensors do not take the beginning of a large one's place."""

import pathlib
import subprocess
import sys

from absl.testing import absltest

# In a process of its own: a peak that was reached before hides what comes. The
# peak of `getrusage` begins with what the process had that started this one.
_SCRIPT = """
import pathlib, re, sys
import tensorflow as tf
from tfdp_fl.engine import allocation

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s*([0-9]+) kB", status)[1])

touched = lambda mib: tf.raw_ops.Fill(dims=[mib << 18], value=1.0)
touched(0)
begin = peak()
if sys.argv[1] == "reserve":
    allocation.reserve_small_regions()
    allocation.reserve_small_regions()
reserved = peak()
touched(120)
before = peak()
activations = touched(10)
weight = touched(120)
print(reserved - begin, before - reserved, peak() - before)
"""


def _mib_touched(how: str) -> list[int]:
    """Returns MiB: by reserving, by a weight, and by what comes after it."""
    printed = subprocess.check_output(
        [sys.executable, "-c", _SCRIPT, how], stderr=subprocess.DEVNULL
    )
    return [int(kib) >> 10 for kib in printed.split()]


@absltest.skipUnless(
    pathlib.Path("/proc/self/status").exists(), "Linux tells a process's peak."
)
class AllocationTest(absltest.TestCase):
    def test_a_freed_weights_place_is_there_for_the_next(self):
        *_, after = _mib_touched("as it is")
        if after < 100:
            self.skipTest("This allocator gives memory back, or moves it.")
        reserved, weight, after = _mib_touched("reserve")
        self.assertLess(reserved, 16)
        self.assertGreater(weight, 100)  # It is seen what is touched.
        # The ten of the small one, and what running takes.
        self.assertLess(after, 30)


if __name__ == "__main__":
    absltest.main()
