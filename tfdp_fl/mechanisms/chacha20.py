"""The ChaCha20 stream cipher, as TensorFlow operations.

Bernstein (2008), "ChaCha, a variant of Salsa20", in the form of RFC 8439
(https://www.rfc-editor.org/rfc/rfc8439, section 2.3): 20 rounds, a key of 256
bits, a nonce of 96 and a counter of 32. It is additions, exclusive ors and
rotations of 32-bit words, so a graph computes it like anything else: under
XLA, on workers, inside a TFF computation, and in constant time.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from tfdp_fl._on_use import tf

# Words of a key, and of the block that one counter gives.
KEY_WORDS, BLOCK_WORDS = 8, 16

_CONSTANTS = np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32)
_DOUBLE_ROUNDS = 10

# The four rows of a state: uint32 [4, n] each, or all of them, [16, n].
_Rows: TypeAlias = "tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]"


def key_stream(
    key: tf.Tensor,
    nonce: tuple[int | tf.Tensor, int | tf.Tensor, int | tf.Tensor],
    count: int | tf.Tensor,
    first: int = 0,
) -> tf.Tensor:
    """Returns blocks of the key stream, one in each column.

    Args:
      key: Uint32 [8]; the words are little-endian, as in the RFC.
      nonce: Three words of 32 bits: integers, or uint32 scalars. No two calls
        with one key may have the same nonce and overlapping counters.
      count: How many blocks, below 2^32.
      first: The counter of the first.

    Returns:
      Uint32 [16, count]: column i is block number `first + i`.
    """
    ones = tf.ones([1, count], tf.uint32)
    words = tf.stack([tf.cast(word, tf.uint32) for word in nonce])
    counters = tf.range(first, first + tf.cast(count, tf.int64))
    start = (
        tf.constant(_CONSTANTS)[:, None] * ones,
        key[:4, None] * ones,
        key[4:, None] * ones,
        tf.concat([tf.cast(counters, tf.uint32)[None], words[:, None] * ones], 0),
    )
    _, *rows = tf.while_loop(
        lambda done, *_: done < _DOUBLE_ROUNDS,
        lambda done, *rows: (done + 1, *_double_round(rows)),
        (tf.constant(0), *start),
        parallel_iterations=1,
    )
    return tf.concat([a + b for a, b in zip(rows, start, strict=True)], 0)


def _double_round(rows: _Rows) -> _Rows:
    """Mixes the columns of each state, and then its diagonals."""
    a, b, c, d = _quarter_rounds(rows)
    a, b, c, d = _quarter_rounds((a, _turned(b, 1), _turned(c, 2), _turned(d, 3)))
    return a, _turned(b, 3), _turned(c, 2), _turned(d, 1)


def _quarter_rounds(rows: _Rows) -> _Rows:
    """Mixes the four columns of each state, side by side."""
    a, b, c, d = rows
    a += b
    d = _rotated(tf.bitwise.bitwise_xor(d, a), 16)
    c += d
    b = _rotated(tf.bitwise.bitwise_xor(b, c), 12)
    a += b
    d = _rotated(tf.bitwise.bitwise_xor(d, a), 8)
    c += d
    b = _rotated(tf.bitwise.bitwise_xor(b, c), 7)
    return a, b, c, d


def _turned(row: tf.Tensor, places: int) -> tf.Tensor:
    """Moves a row's words to the left, around the end."""
    return tf.concat([row[places:], row[:places]], 0)


def _rotated(words: tf.Tensor, bits: int) -> tf.Tensor:
    """Rotates the bits of each word to the left."""
    return tf.bitwise.bitwise_or(
        tf.bitwise.left_shift(words, tf.constant(bits, tf.uint32)),
        tf.bitwise.right_shift(words, tf.constant(32 - bits, tf.uint32)),
    )
