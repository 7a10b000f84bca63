"""Gaussian noise that is never the same twice.

By default every call draws from a fresh, non-deterministic seed, also inside a
`tf.function` or a TFF computation that is traced once and run many times, on
every client. A runtime that has to repeat itself bit for bit (or that brings
entropy from the operating system) wraps the calls in `seeded` with a seed
tensor that is new for every client of every round.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tfdp_fl._on_use import tf

_PHILOX = "philox"

# How a long draw is cut up: no chunk shorter than this, no more of them than
# that, so that a graph stays small and no chunk is over before it has begun.
_SMALLEST_CHUNK = 2**16
_MOST_CHUNKS = 32


class _Source:
    """A seed, and how many draws were taken from it."""

    def __init__(self, seed: tf.Tensor):
        self.seed = seed
        self.draws = 0


_active = threading.local()


@contextlib.contextmanager
def seeded(seed: tf.Tensor) -> Iterator[None]:
    """Draws the noise inside the block from a given seed.

    Two draws inside one block differ. It is in force while the code is traced,
    so one traced function uses it for every later run.

    Args:
      seed: An int64 tensor of shape [2]; a value may be used only once.
    """
    outer = getattr(_active, "source", None)
    _active.source = _Source(seed)
    try:
        yield
    finally:
        _active.source = outer


def next_seed() -> tf.Tensor:
    """Returns a seed (int64, shape [2]) that no other draw uses."""
    source = getattr(_active, "source", None)
    if source is None:
        return tf.raw_ops.NonDeterministicInts(shape=[2], dtype=tf.int64)
    source.draws += 1
    return fold_in(source.seed, source.draws)


def fold_in(seed: tf.Tensor, data: tf.Tensor | int) -> tf.Tensor:
    """Returns a new seed (int64, shape [2]) from a seed and an integer."""
    return tf.random.experimental.stateless_fold_in(
        seed, tf.cast(data, tf.int64), alg=_PHILOX
    )


def normal(shape: tf.Tensor | list[int], stddev: tf.Tensor) -> tf.Tensor:
    """Draws float32 N(0, stddev^2) of the given shape."""
    draw = tf.random.stateless_normal(shape, next_seed(), alg=_PHILOX)
    return draw * tf.cast(stddev, tf.float32)


def _normals(
    size: int | tf.Tensor, seed: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """Draws `size` float32 N(0, 1) as some vectors, to be read as one.

    A drawing operation runs on one thread; several can run side by side. The
    vectors' lengths, and so what is drawn, do not depend on the machine.
    """
    seed = next_seed() if seed is None else seed
    if not isinstance(size, int) or size <= _SMALLEST_CHUNK:
        return [tf.random.stateless_normal([size], seed, alg=_PHILOX)]
    # A multiple of 16, so that slicing at the boundaries copies nothing.
    chunk = max(_SMALLEST_CHUNK, -(-size // (16 * _MOST_CHUNKS)) * 16)
    lengths = [min(chunk, size - start) for start in range(0, size, chunk)]
    seeds = tf.random.experimental.stateless_split(
        seed, len(lengths), alg=_PHILOX
    )
    return [
        tf.random.stateless_normal([length], seed, alg=_PHILOX)
        for length, seed in zip(lengths, tf.unstack(seeds), strict=True)
    ]


def standard_normals(
    tensors: list[tf.Tensor], seed: tf.Tensor
) -> list[tf.Tensor]:
    """Draws float32 N(0, 1) of the shapes of some tensors.

    They are what `add_normal` adds with a stddev of 1 and the same seed.

    Args:
      tensors: Of any dtype; their shapes must be known.
      seed: Int64, shape [2], that no other draw uses.
    """
    sizes = [_size(tensor) for tensor in tensors]
    draws = _normals(sum(sizes), seed)
    result, start = [], 0
    for tensor, size in zip(tensors, sizes, strict=True):
        zeros = tf.zeros([size])
        parts = [part for _, part in _pieces(zeros, size, draws, start)]
        flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        result.append(tf.reshape(flat, tf.shape(tensor)))
        start += size
    return result


def _size(tensor: tf.Tensor) -> int | tf.Tensor:
    static = tensor.shape.num_elements()
    return tf.size(tensor) if static is None else static


def add_normal(
    tensors: list[tf.Tensor], stddev: tf.Tensor | list[tf.Tensor]
) -> list[tf.Tensor]:
    """Adds independent N(0, stddev^2) to every element of every tensor.

    Args:
      tensors: Float tensors of any shapes.
      stddev: One scalar, or one scalar for each tensor.

    Returns:
      New tensors with the shapes and dtypes of the given ones.
    """
    if not tensors:
        return []
    stddevs = stddev if isinstance(stddev, list) else [stddev] * len(tensors)
    sizes = [_size(tensor) for tensor in tensors]
    draws = _normals(sum(sizes))
    noised, start = [], 0
    for tensor, size, scale in zip(tensors, sizes, stddevs, strict=True):
        scale = tf.cast(scale, tf.float32)
        flat = tf.reshape(tensor, [-1])
        parts = [
            part + tf.cast(draw * scale, tensor.dtype)
            for part, draw in _pieces(flat, size, draws, start)
        ]
        start += size
        flat = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        noised.append(tf.reshape(flat, tf.shape(tensor)))
    return noised


def _pieces(
    flat: tf.Tensor,
    size: int | tf.Tensor,
    draws: list[tf.Tensor],
    start: int | tf.Tensor,
) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Pairs parts of a vector with the draws from place `start` onwards."""
    if len(draws) == 1:
        return [(flat, draws[0][start : start + size])]
    pieces, first = [], 0
    for draw in draws:
        end = first + draw.shape[0]
        low, high = max(start, first), min(start + size, end)
        if low < high:
            pieces.append(
                (
                    flat[low - start : high - start],
                    draw[low - first : high - first],
                )
            )
        first = end
    return pieces or [(flat, tf.zeros([0]))]
