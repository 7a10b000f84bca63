"""Nests of arrays: what Keras takes as features or labels of many examples.

A nest is an array, or a dict, tuple or list of nests. Every array of a nest
has the same leading dimension: the number of examples. Numbers of 64-bit
floating point become 32-bit, because that is what Keras trains with; every
other dtype is kept, `uint8` images and `int64` labels among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# An array, or a dict, tuple or list of nests.
Nest = Any

_NUMBERS = (bool, int, float, np.number, np.bool_)


def as_tensor(leaf: Any, name: str) -> tf.Tensor:
    """Returns an immutable CPU tensor that owns its numbers.

    A tensor that already lies on the CPU is kept as it is. Anything else is
    copied once, so that what the caller does to it later changes nothing.

    Args:
      leaf: An array, a tensor, or what `np.asarray` takes; of shape [n, ...].
      name: The name of the argument that it came from, for errors.

    Raises:
      TypeError: If it is no array of numbers, booleans or strings.
      ValueError: If it has no leading dimension.
    """
    if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.float64:
        _check_rank(leaf.shape.rank, name)
        if "CPU" in leaf.device:
            return leaf
    with tf.device("/CPU:0"):
        tensor = tf.convert_to_tensor(as_array(leaf, name))
        # TensorFlow copies by way of a NumPy array, which it lets go of when
        # the next small array comes: without one, there would be two copies.
        tf.convert_to_tensor(np.zeros(1, np.float32))
    return tensor


def as_array(leaf: Any, name: str) -> np.ndarray:
    """Returns what `as_tensor` would hold, as a NumPy array."""
    if isinstance(leaf, tf.Tensor):
        array = view(leaf)
    elif isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            f"{name} must be made of dense arrays, got a {type(leaf).__name__}."
        )
    else:
        array = np.asarray(leaf)
    if array.dtype in (np.float64, np.longdouble):
        array = array.astype(np.float32)
    strings = array.dtype.kind in "SU" or (
        array.dtype.kind == "O"
        and all(isinstance(item, str | bytes) for item in array.flat)
    )
    # ml_dtypes' bfloat16 calls itself of kind "V".
    numbers = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    if not (strings or numbers):
        raise TypeError(
            f"{name} must be made of arrays of numbers, booleans or strings, "
            f"got dtype {array.dtype}."
        )
    _check_rank(array.ndim, name)
    return array


def _check_rank(rank: int | None, name: str) -> None:
    if rank == 0:
        raise ValueError(
            f"{name} must have a leading dimension of examples, got a scalar."
        )


def view(tensor: tf.Tensor) -> np.ndarray:
    """Returns a read-only array over a tensor's own memory, without a copy.

    (`tensor.numpy()` copies. Strings and bfloat16 have no buffer that NumPy
    could look at, and are copied.)
    """
    if tensor.dtype in (tf.string, tf.bfloat16) or "CPU" not in tensor.device:
        return tensor.numpy()
    return np.asarray(memoryview(tensor))


def as_tensors(nest: Nest, name: str) -> Nest:
    """Maps `as_tensor` over a nest."""
    return tf.nest.map_structure(
        lambda leaf: as_tensor(leaf, name), _with_array_leaves(nest)
    )


def as_arrays(nest: Nest, name: str) -> Nest:
    """Maps `as_array` over a nest."""
    return tf.nest.map_structure(
        lambda leaf: as_array(leaf, name), _with_array_leaves(nest)
    )


def _with_array_leaves(nest: Nest) -> Nest:
    """Turns lists of plain numbers, such as `[[1, 2], [3, 4]]`, into arrays."""
    leaf = nest
    while isinstance(leaf, list) and leaf:
        leaf = leaf[0]
    if isinstance(nest, list) and isinstance(leaf, (*_NUMBERS, str, bytes)):
        return np.asarray(nest)
    return nest


def views(nest: Nest) -> Nest:
    """Maps `view` over a nest."""
    return tf.nest.map_structure(view, nest)


def take(nest: Nest, rows: Any) -> Nest:
    """Takes the same rows (a slice or an integer array) of every array."""
    return tf.nest.map_structure(lambda array: array[rows], nest)


def common_length(x: Nest, y: Nest) -> int:
    """Returns the one leading dimension of all arrays of `x` and `y`.

    Raises:
      ValueError: If they differ, or if there is no array.
    """
    lengths = [int(leaf.shape[0]) for leaf in tf.nest.flatten((x, y))]
    if not lengths:
        raise ValueError("x and y must hold at least one array, got none.")
    if len(set(lengths)) > 1:
        x_lengths = sorted({int(leaf.shape[0]) for leaf in tf.nest.flatten(x)})
        y_lengths = sorted({int(leaf.shape[0]) for leaf in tf.nest.flatten(y)})
        raise ValueError(
            "x and y must have the same number of examples in every array, "
            f"got {_listed(x_lengths)} in x and {_listed(y_lengths)} in y."
        )
    return lengths[0]


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(str(number) for number in numbers) or "nothing"


def spec_of(nest: Nest) -> Nest:
    """Returns the `tf.TensorSpec`s of one example."""
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape[1:], _dtype(leaf)), nest
    )


def _dtype(leaf: Any) -> tf.DType:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "SUO":
        return tf.string
    return tf.as_dtype(leaf.dtype)


def check_matches(x: Nest, y: Nest, element_spec: Nest) -> None:
    """Raises ValueError unless examples `(x, y)` are of the given spec."""
    for name, nest, expected in zip(
        ("x", "y"), (x, y), element_spec, strict=True
    ):
        try:
            tf.nest.assert_same_structure(nest, expected)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} must be the same nest for every client, "
                f"{structure(expected)}, got {structure(nest)}."
            ) from error
        for spec, leaf in zip(
            tf.nest.flatten(expected), tf.nest.flatten(nest), strict=True
        ):
            if spec.dtype != _dtype(leaf) or not spec.shape.is_compatible_with(
                leaf.shape[1:]
            ):
                raise ValueError(
                    f"{name} must have the same dtype and example shape for "
                    f"every client, {_short(spec)}, got "
                    f"{_short(spec_of(leaf))}."
                )


def no_examples(spec: Nest) -> Nest:
    """Returns arrays of zero examples of the given spec."""
    return tf.nest.map_structure(
        lambda leaf: np.zeros(
            [0, *(size or 0 for size in leaf.shape)],
            leaf.dtype.as_numpy_dtype,
        ),
        spec,
    )


def structure(nest: Nest) -> str:
    """Returns a nest's structure in words, such as `{'a': ., 'b': (., .)}`."""
    dots = tf.nest.map_structure(lambda _: ".", nest)
    return str(dots).replace("'.'", ".")


def describe_spec(spec: Nest) -> str:
    """Returns the specs of a nest in words, such as `float32[64]`."""
    words = tf.nest.map_structure(_short, spec)
    return str(words).replace("'", "") if not isinstance(words, str) else words


def _short(spec: tf.TensorSpec) -> str:
    shape = ", ".join(
        "?" if size is None else str(size) for size in spec.shape.as_list()
    )
    return f"{spec.dtype.name}[{shape}]"


def concatenate(nests: Sequence[Nest]) -> Nest:
    """Concatenates equal nests along the dimension of examples."""
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *nests)


def num_bytes(nest: Nest) -> int:
    """Returns the bytes that a nest of tensors holds (strings: unknown, 0)."""
    return sum(
        leaf.shape.num_elements() * leaf.dtype.size
        for leaf in tf.nest.flatten(nest)
        if leaf.dtype != tf.string
    )
