"""A program that used an aggregator leaves no worker of TFF behind."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

from absl.testing import absltest

_TFF = importlib.util.find_spec("tensorflow_federated")
_PROGRAM = """
import os, subprocess, sys
import numpy as np, tensorflow_federated as tff
from tfdp_fl import aggregators

process = aggregators.FixedClippingFactory(
    clip_norm=1.0, noise_multiplier=1.0, clients_per_round=1
).create(tff.TensorType(np.float32, [3]))
process.next(process.initialize(), [np.ones(3, np.float32)])
me = str(os.getpid())
for name in os.listdir("/proc"):
    if not name.isdigit():
        continue
    try:
        stat = open(f"/proc/{name}/stat").read()
    except OSError:
        continue
    if "(worker_binary)" in stat and stat.split()[3] == me:
        print(name)
"""


@unittest.skipIf(_TFF is None, "TensorFlow Federated is not installed.")
class WorkerEndTest(absltest.TestCase):
    def test_it_ends_with_the_program(self):
        root = pathlib.Path(__file__).resolve().parents[2]
        with tempfile.TemporaryFile("w+") as out:
            subprocess.run(
                [sys.executable, "-c", _PROGRAM],
                stdout=out,
                stderr=subprocess.DEVNULL,
                cwd=root,
                env={**os.environ, "PYTHONPATH": str(root)},
                check=True,
            )
            out.seek(0)
            workers = [line for line in out.read().split() if line.isdigit()]
        self.assertLen(workers, 1)  # Otherwise this test says nothing.
        until = time.monotonic() + 10
        path = pathlib.Path("/proc", workers[0])
        while path.exists() and time.monotonic() < until:
            time.sleep(0.05)
        self.assertFalse(path.exists())


if __name__ == "__main__":
    absltest.main()
