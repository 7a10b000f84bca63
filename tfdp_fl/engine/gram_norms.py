"""The norm of an update that was never computed, with a proof that it holds.

A dense kernel's update is a product X^T D over a client's examples, and its
norm follows from two Gram matrices (the "ghost norm" of per-example clipping):
||X^T D||^2 = sum((X X^T) * (D D^T)) (Goodfellow 2015, "Efficient per-example
gradient computations").
"""

from __future__ import annotations

import tensorflow as tf

# Float32's unit roundoff, and the most that it may come to in a sum of which
# the bound of a norm is made: n terms are off by n times as much.
ROUNDOFF = 2.0**-24
_LARGEST_ERROR = 0.01


def is_within_bound(rows: int, columns: int) -> bool:
    """Returns whether `norm_bound` holds for a kernel of this shape."""
    return (rows + columns) * ROUNDOFF < _LARGEST_ERROR


def norm_bound(
    grams_x: list[tf.Tensor],
    grams_d: list[tf.Tensor],
    columns_x: list[int],
    columns_d: list[int],
    rows: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the joint norms of L products X^T D, and what bounds them.

    ||X^T D||^2 = sum_ij (X X^T)_ij (D D^T)_ij, of Gram matrices that were
    rounded to float32. A client may choose rows that are large and cancel, so
    that the sum is little more than rounding; hence a bound by proof. A float32
    product of n terms, added up in whatever order, is off by at most gamma_n
    sum |terms|, gamma_n = n u / (1 - n u) (Higham 2002, "Accuracy and Stability
    of Numerical Algorithms", section 3.1), plus n 2^-126 where terms underflow.
    With Cauchy and Schwarz, for rows x_i of a columns,

        |fl(X X^T)_ij - (X X^T)_ij| <= gamma_a ||x_i|| ||x_j|| + a 2^-126,

    and likewise for D. Summed over i and j, with q = sum_i ||x_i|| ||d_i||,

        ||X^T D||^2 <= sum_ij fl(X X^T)_ij fl(D D^T)_ij
            + (gamma_a + gamma_b) q^2
            + a 2^-126 (sum_i ||d_i||)^2 + b 2^-126 (sum_i ||x_i||)^2

    and terms of second order. Here ||x_i||^2 counts for 2^-102 more than the
    diagonal says, and so for ||d_i||: then gamma_a q^2 is at least each of the
    terms of underflow, and they are in twice the first. What is of second
    order is less than a tenth of that, as (a + b) u is below `_LARGEST_ERROR`.

    q also bounds what rounding does to the products themselves: computed over
    N rows they are off by at most gamma_N q in Frobenius norm.

    Args:
      grams_x: L float32 [K, n, n], each X X^T.
      grams_d: L float32 [K, n, n], each D D^T.
      columns_x: The a of each X, one more where there is a bias.
      columns_d: The b of each D.
      rows: N, integer scalar.

    Returns:
      `(norm, bound)`, float64 [K]: the norm as computed, and an upper bound of
      the norm of the products as they will be computed. The bound is not finite
      where an element is not.
    """
    # In one piece, as every operation costs a small model more than its sums.
    gram_x = tf.cast(tf.stack(grams_x), tf.float64)
    gram_d = tf.cast(tf.stack(grams_d), tf.float64)
    of_x, of_d = (
        # Squares cannot cancel: these are the lengths, but for gamma.
        tf.sqrt(tf.linalg.diag_part(gram) + 2.0**-102)
        for gram in (gram_x, gram_d)
    )
    q = tf.reduce_sum(of_x * of_d, axis=2)
    q_squared = tf.reduce_sum(q * q, axis=0)
    square = tf.maximum(tf.reduce_sum(gram_x * gram_d, axis=[0, 2, 3]), 0.0)
    columns = max(a + b for a, b in zip(columns_x, columns_d, strict=True))
    of_norm = 2.2 * ROUNDOFF * columns
    share = ROUNDOFF * tf.cast(rows, tf.float64)
    of_product = 1.05 * share / (1 - share)
    bound = tf.sqrt(square + of_norm * q_squared) + of_product * tf.sqrt(q_squared)
    return tf.sqrt(square), bound
