"""Keeps small tensors out of the room that a model's large ones need.

On a CPU with oneDNN, TensorFlow takes tensors of 256 KiB and more from regions
of memory, each twice as large as the one before, and never gives one back. A
large first weight makes a large first region. A batch's activations then take
the beginning of a place where a weight was, so that the next weight goes
elsewhere and touches memory that nothing had touched. How often depends on the
order in which the replicas ask: for two of a model of 76 MiB and a hundred
clients a round took 3.1 to 4.6 copies of the model for each replica.

Where there are smaller regions, the small tensors go there, as a request is
given the smallest place that is large enough: 2.9 copies, in every run (`make
benchmark BENCHMARK_FLAGS=--rows=memory`).
"""

from __future__ import annotations

import contextlib
import functools

import tensorflow as tf

_REGIONS_MIB = (16, 32, 64)


@functools.cache
def reserve_small_regions() -> None:
    """Makes TensorFlow's smaller regions, once a process, before it needs them.

    112 MiB of addresses, none of which is touched, so that they take no memory.
    A process whose regions have grown already, or whose allocator has none, is
    none the worse for it.
    """
    with contextlib.suppress(tf.errors.ResourceExhaustedError):
        with tf.device("CPU:0"):
            # All at once, as a region is made where no other has the room.
            held = [
                tf.raw_ops.Empty(shape=[mib << 18], dtype=tf.float32, init=False)
                for mib in _REGIONS_MIB
            ]
        del held
