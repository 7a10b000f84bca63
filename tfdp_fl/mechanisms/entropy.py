"""Secret random bits from the operating system, also inside a graph.

TensorFlow has no operation for that. Its own unseeded ones, and
`NonDeterministicInts`, hand out a 64-bit Mersenne Twister that each process
seeds once, with 32 bits (`tsl/platform/random.cc`): anyone who tries 2^32
seeds knows all of it, and after a fork two processes have the same. So a graph
reads Linux's generator where it is a file that ends: each time it is read,
/proc/sys/kernel/random/uuid holds a new random UUID (RFC 9562, version 4; see
`man 4 random`), 122 bits of which are random.
"""

from __future__ import annotations

import os
import pathlib

import numpy as np

from tfdp_fl._on_use import tf

_UUIDS = "/proc/sys/kernel/random/uuid"
# Where the hexadecimal digits of one are that are random throughout.
_DIGITS = [
    place
    for place, form in enumerate("xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx")
    if form == "x"
]
_DIGITS_A_WORD = 8


def words(count: int) -> tf.Tensor:
    """Returns uint32 [count] of fresh entropy, in every run of a graph.

    Raises:
      NotImplementedError: A graph is built, and the operating system is not
        Linux. (In a graph that runs on another machine that is not Linux,
        `tf.errors.NotFoundError`.)
    """
    if tf.executing_eagerly():
        return tf.constant(np.frombuffer(os.urandom(4 * count), np.uint32))
    if not pathlib.Path(_UUIDS).exists():
        raise NotImplementedError(
            "Noise in a TensorFlow graph without a seed needs Linux, whose "
            f"entropy is read from {_UUIDS}; there is no such file here."
        )
    reads = -(-count * _DIGITS_A_WORD // len(_DIGITS))
    # Reading a file is no stateful operation: what is read must be an argument
    # that nobody can fold into a constant, and another one for every read.
    salt = tf.raw_ops.NonDeterministicInts(shape=[reads], dtype=tf.int64)
    digits = []
    for one in tf.unstack(salt):
        nothing = tf.strings.substr(tf.strings.as_string(one), 0, 0)
        uuid = tf.io.read_file(tf.strings.join([_UUIDS, nothing]))
        letters = tf.gather(
            tf.io.decode_raw(tf.strings.substr(uuid, 0, 36), tf.uint8), _DIGITS
        )
        letters = tf.cast(letters, tf.int64)
        # "0" to "9" are 48 to 57, "a" to "f" 97 to 102.
        digits.append(letters % 16 + 9 * (letters // 64))
    used = tf.concat(digits, 0)[: count * _DIGITS_A_WORD]
    powers = tf.constant([16**place for place in range(_DIGITS_A_WORD)], tf.int64)
    rows = tf.reshape(used, [count, _DIGITS_A_WORD])
    return tf.cast(tf.reduce_sum(rows * powers, axis=1), tf.uint32)
