"""Gaussian noise that is never the same twice.

By default every call draws from a fresh seed of the operating system's entropy
(`entropy`), also inside a `tf.function` or a TFF computation that is traced
once and run many times, on every client. A runtime that has to repeat itself
bit for bit (or that brings the entropy) wraps the calls in `use_seed` with a
seed tensor that is new for every client of every round.

A seed is uint64 [2], 128 bits, of the operating system or of a user's number. Noise
is made by `_box_muller` of the bits of Philox4x32-10, and so are other seeds
(`fold_in`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import pathlib
import threading
from collections.abc import Iterator

import numpy as np

from tfdp_fl._lazy_tf import tf

# TensorFlow's number of the generator Philox, and the key under which it turns a
# seed into a key and a counter (`stateless_random_ops.cc`).
_PHILOX, _SCRAMBLE = 1, 0x02461E293EC8F720

# What noise is drawn from: here, or exactly (`grid`), where Philox is for the rest.
PHILOX, EXACT = GENERATORS = ("philox", "exact")

# First words of a seed: what is made of it.
_CHILD, _DRAW = 1, 2

# How a long draw is cut up: no chunk shorter than this, no more of them than
# that, so that a graph stays small and chunks amortise their overhead.
_SMALLEST_CHUNK = 2**16
_MOST_CHUNKS = 32

_UUIDS = "/proc/sys/kernel/random/uuid"
# Where the hexadecimal digits of one are that are random throughout.
_DIGITS = [
    place
    for place, form in enumerate("xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx")
    if form == "x"
]
_DIGITS_A_WORD = 8

# Of each thread: a seed, and the numbers of the draws that are taken from it.
_active = threading.local()


@contextlib.contextmanager
def use_seed(seed: tf.Tensor) -> Iterator[None]:
    """Draws the noise inside the block from a given seed.

    Two draws inside one block differ. It is in force while the code is traced,
    so one traced function uses it for every later run.

    Args:
      seed: Uint64 [2] (or int64, of the same bits); a value may be used only once.
    """
    outer = getattr(_active, "source", None)
    _active.source = (seed, itertools.count(1))
    try:
        yield
    finally:
        _active.source = outer


def entropy(count: int) -> tf.Tensor:
    """Returns uint32 [count] of the operating system, new in every run of a graph.

    TensorFlow has no operation for that. Its own unseeded ones, and
    `NonDeterministicInts`, hand out a 64-bit Mersenne Twister that each process
    seeds once, with 32 bits (`tsl/platform/random.cc`): anyone who tries 2^32
    seeds knows all of it, and after a fork two processes have the same. So a graph
    reads Linux's generator where it is a file that ends: each time it is read,
    /proc/sys/kernel/random/uuid holds a new random UUID (RFC 9562, version 4; see
    `man 4 random`), 122 bits of which are random.

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


def fresh_seed() -> np.ndarray:
    """Returns a seed (uint64 [2]) of the operating system's entropy, now."""
    return np.frombuffer(os.urandom(16), np.uint64)


def next_seed() -> tf.Tensor:
    """Returns a seed that no other draw uses."""
    source = getattr(_active, "source", None)
    if source is None:
        return tf.bitcast(tf.reshape(entropy(4), [2, 2]), tf.uint64)
    seed, numbers = source
    return fold_in(seed, next(numbers))


def fold_in(seed: tf.Tensor, data: tf.Tensor | int) -> tf.Tensor:
    """Returns a new seed from a seed and an integer.

    Args:
      seed: Uint64 or int64 [2].
      data: An integer of 64 bits, with a sign.
    """
    # TensorFlow's own fold_in puts the data beside 64 fresh bits. Philox is
    # one-to-one for each key, so other data are another block.
    data = tf.cast(data, tf.int64)
    words = tf.bitwise.bitwise_xor(
        as_integers(seed), tf.stack([tf.constant(_CHILD, tf.int64), data])
    )
    return _uniform([2], words, tf.uint64)


def _uniform(
    shape: list[int | tf.Tensor], seed: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Draws integers of all bits, from a seed that is int64 [2].

    They are those of `tf.random.stateless_uniform(..., alg="philox")`, which takes
    three times as many operations, and that is noticed before a first round.
    """
    draw = functools.partial(tf.raw_ops.StatelessRandomUniformFullIntV2, alg=_PHILOX)
    key = tf.constant([_SCRAMBLE], tf.uint64)
    counter = tf.bitcast(seed, tf.uint64)
    key, low = tf.split(draw(shape=[2], key=key, counter=counter, dtype=tf.uint64), 2)
    counter = tf.concat([tf.zeros([1], tf.uint64), low], 0)
    return draw(shape=shape, key=key, counter=counter, dtype=dtype)


def for_clients(seed: np.ndarray) -> np.ndarray:
    """Returns the part of a round's seed that clients and workers may know: uint64 [2].

    From a seed that Philox makes of it a way might lead back to the server's noise.
    """
    digest = hashlib.sha256(seed.astype(np.uint64).tobytes()).digest()
    return np.frombuffer(digest, np.uint64)[:2]


def as_integers(seed: tf.Tensor) -> tf.Tensor:
    """Returns a seed as int64 [2], for draws of one's own."""
    return tf.bitcast(seed, tf.int64)


def integer(seed: tf.Tensor, data: int) -> tf.Tensor:
    """Returns an int64 scalar of 64 bits, uniform; from a seed and an integer.

    For random numbers that are no noise, such as those of a dropout.
    """
    return as_integers(fold_in(seed, data))[0]


def normal(shape: tf.Tensor | list[int], stddev: tf.Tensor) -> tf.Tensor:
    """Draws float32 N(0, stddev^2) of the given shape."""
    return add_normal([tf.zeros(shape)], stddev)[0]


def _draws(lengths: list[int | tf.Tensor], seed: tf.Tensor) -> list[tf.Tensor]:
    """Draws vectors of N(0, 1) of some lengths, from a seed."""
    # Not what `fold_in` makes other seeds of.
    own = tf.bitwise.bitwise_xor(as_integers(seed), tf.constant([_DRAW, 0], tf.int64))
    seeds = [own]
    if len(lengths) > 1:
        seeds = tf.unstack(_uniform([len(lengths), 2], own, tf.int64))
    return [
        _box_muller(length, seed) for length, seed in zip(lengths, seeds, strict=True)
    ]


def _box_muller(length: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws float32 N(0, 1) [length], two of each 96 bits of Philox.

    As Box & Muller (1958): sqrt(-2 ln u) (cos t, sin t) for u in (0, 1] and a
    direction t. Of u there are 62 bits, fine where it is small, so that draws
    end at 9.42, with less than 2^-62 of a pair's mass beyond. TensorFlow's u
    has 23 bits and ends at 5.68. An update that is spread over D coordinates
    crosses such an end in a round with a probability of about
    sqrt(D) phi(end) / z, and that gives the client away: for
    D = 5e5 and z = 1 that is 3e-5 at 5.68, more than many a delta, and 2e-17
    at 9.42.
    """
    half = -(-length // 32) * 16  # Slices of which are not copied.
    high, low, direction = tf.unstack(_uniform([3, half], seed, tf.int32))
    whole = tf.cast(tf.bitwise.bitwise_and(high, 2**31 - 1), tf.float32)
    rest = tf.abs(tf.cast(low, tf.float32)) * 2.0**-31 + 2.0**-33
    u = (whole + rest) * 2.0**-31
    radius = tf.sqrt(-2.0 * tf.math.log(u))
    angle = tf.cast(direction, tf.float32) * (math.pi * 2.0**-31)
    pairs = [radius * tf.cos(angle), radius * tf.sin(angle)]
    return tf.concat(pairs, 0)[:length]


def standard_normals(tensors: list[tf.Tensor], seed: tf.Tensor) -> list[tf.Tensor]:
    """Draws float32 N(0, 1) of the shapes of some tensors.

    They are what `add_normal` adds with a stddev of 1 and the same seed. A drawing
    operation runs on one thread; several can run side by side. Into how many a draw
    is cut, and so what is drawn, does not depend on the machine.

    Args:
      tensors: Of any dtype.
      seed: No other draw uses it.
    """
    static = [tensor.shape.num_elements() for tensor in tensors]
    sizes = [
        tf.size(tensor) if size is None else size
        for tensor, size in zip(tensors, static, strict=True)
    ]
    size = sum(sizes)
    lengths = [size]
    if None not in static and size > _SMALLEST_CHUNK:
        chunk = max(_SMALLEST_CHUNK, -(-size // (16 * _MOST_CHUNKS)) * 16)
        lengths = [min(chunk, size - start) for start in range(0, size, chunk)]
    parts = tf.split(tf.concat(_draws(lengths, seed), 0), sizes)
    return [
        tf.reshape(part, tf.shape(tensor))
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def add_normal(
    tensors: list[tf.Tensor], stddev: tf.Tensor | list[tf.Tensor]
) -> list[tf.Tensor]:
    """Adds independent N(0, stddev^2) to every element of every tensor.

    Args:
      tensors: Float tensors of any shapes.
      stddev: One scalar, or one scalar for each tensor.

    Returns:
      New tensors of the same shapes and dtypes, but float32 for float64.
    """
    if not tensors:
        return []
    stddevs = stddev if isinstance(stddev, list) else [stddev] * len(tensors)
    return [
        add_scaled_noise(tensor, draw, tf.cast(scale, tf.float32))
        for tensor, draw, scale in zip(
            tensors, standard_normals(tensors, next_seed()), stddevs, strict=True
        )
    ]


def add_scaled_noise(
    tensor: tf.Tensor, draw: tf.Tensor, stddev: tf.Tensor
) -> tf.Tensor:
    """Returns tensor + stddev draw; of a float64 sum as float32, rounded once.

    A float64 sum has digits below those of float32 noise, which would show without
    any noise what was added up. They are rounded away after the noise is added:
    rounding the sum first would move it by more than a client does.

    Args:
      tensor: Of any float dtype.
      draw: Float32, of the same shape.
      stddev: Float32 scalar.
    """
    if tensor.dtype != tf.float64:
        return tensor + tf.cast(draw * stddev, tensor.dtype)
    scaled = tf.cast(draw, tf.float64) * tf.cast(stddev, tf.float64)
    return tf.cast(tensor + scaled, tf.float32)
