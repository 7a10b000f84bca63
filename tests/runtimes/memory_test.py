"""Freed memory is kept, unless the user said what the allocator is to do."""

import os
import subprocess
import sys

from absl.testing import absltest

from tfdp_fl.runtimes import memory

_SCRIPT = """
import resource, runpy, sys
if sys.argv[2] == "keep":
    runpy.run_path(sys.argv[1])["keep_freed_memory"]()
def messages():
    for _ in range(20):
        blocks = [bytes(3 << 20) for _ in range(4)]
        del blocks
messages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
messages()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(how, **variables) -> int:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_")
    }
    return int(
        subprocess.check_output(
            [sys.executable, "-c", _SCRIPT, memory.__file__, how],
            env=environment | variables,
        )
    )


class MemoryTest(absltest.TestCase):
    def test_keeps_freed_memory(self):
        if _faults("default") < 1000:
            self.skipTest("This allocator keeps freed memory anyway.")
        self.assertLess(_faults("keep"), 1000)
        self.assertLess(_faults("default", **memory.ENVIRONMENT), 1000)

    def test_leaves_the_users_settings_alone(self):
        settings = {"MALLOC_TRIM_THRESHOLD_": "4096"}
        self.assertAlmostEqual(
            _faults("keep", **settings),
            _faults("default", **settings),
            delta=1000,
        )


if __name__ == "__main__":
    absltest.main()
