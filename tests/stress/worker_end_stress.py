"""A program that used an aggregator leaves no worker of TFF behind.

TFF's worker listens on all interfaces and runs whatever graph it is sent.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys
import time

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PROGRAM = """
import os, pathlib
import numpy as np, tensorflow_federated as tff
from tfdp_fl import aggregators

process = aggregators.FixedClippingFactory(
    clip_norm=1.0, noise_multiplier=1.0, clients_per_round=1
).create(tff.TensorType(np.float32, [3]))
process.next(process.initialize(), [np.ones(3, np.float32)])
for each in pathlib.Path("/proc").glob("[0-9]*/stat"):
    stat = each.read_text() if each.exists() else ""
    if "(worker_binary)" in stat and stat.split()[3] == str(os.getpid()):
        print(each.parent)
"""


@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_federated") is None,
    reason="TensorFlow Federated is not installed.",
)
def test_it_ends_with_the_program(tmp_path):
    with (tmp_path / "out").open("w") as out:  # The worker would hold a pipe open.
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            check=True,
        )
    (worker,) = (tmp_path / "out").read_text().split()  # Else this says nothing.
    until = time.monotonic() + 10
    while os.path.exists(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(worker)
