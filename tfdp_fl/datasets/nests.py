"""Nests of arrays: the features or labels of many examples, as Keras accepts them.

A nest is an array, or a dict, tuple or list of nests. Every array of a nest has the
same leading dimension: the number of examples. 64-bit floats become 32-bit, with which
Keras trains; every other dtype is kept, including `uint8` images and `int64` labels.

Weights of examples are stored with the labels, as a `Weighted` nest, so they are passed
on wherever labels are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

# An array, or a dict, tuple or list of nests.
Nest = Any
# The specs of an example's features, and of its labels.
ElementSpec = tuple[Nest, Nest]
# Changes any number of examples `(x, y)`; may return weights as a third result.
MapFn = Callable[[Nest, Nest], tuple[Nest, ...]]
# The names of a model's inputs and of its outputs.
Names = tuple[Sequence[str], Sequence[str]]

_NUMBERS = (bool, int, float, np.number, np.bool_)
PADDING = "keras.utils.pad_sequences pads sequences of unequal length"
_STRINGS = "tf.keras.layers.StringLookup turns strings into integers"
_BATCHES = (
    "with batch(..., drop_remainder=True), each batch looks like one example: batch "
    "without it, or unbatch()"
)
NO_CAST = (
    "x, y and sample_weight must hold whole numbers where those are expected, got a "
    "fraction, a NaN or a number that is too large"
)


class ExamplesTypeError(TypeError):
    """Examples have the wrong type; the message quotes none of them."""


class ExamplesValueError(ValueError):
    """Examples do not fit; the message quotes none of them."""


# Errors whose messages may be shown to people who must not see the examples.
SAFE_ERRORS = (ExamplesTypeError, ExamplesValueError)


class Weighted(NamedTuple):
    """Labels, and each example's weight in the loss.

    Attributes:
      y: A nest of labels.
      sample_weight: A nest of float32 weights: one number per example, or anything else
        that Keras accepts as `sample_weight`.
    """

    y: Nest
    sample_weight: Nest


def pair(examples: object, requirement: str = "examples must be") -> tuple[Nest, Nest]:
    """Returns `(x, y)`; y is `Weighted` if there are weights.

    Args:
      examples: `(x, y)` or `(x, y, sample_weight)`; None as weights means no weights.
      requirement: The beginning of an error message.

    Raises:
      TypeError: The examples are something else.
    """
    if not (isinstance(examples, tuple) and len(examples) in (2, 3)):
        kind = type(examples).__name__
        got = f"tuple of {len(examples)}" if isinstance(examples, tuple) else kind
        raise ExamplesTypeError(
            f"{requirement} (x, y) or (x, y, sample_weight), got a {got}."
        )
    x, y, *weight = examples
    if isinstance(y, Weighted) or not weight or weight[0] is None:
        return x, y
    return x, Weighted(y, weight[0])


def unpair(x: Nest, y: Nest) -> tuple[Nest, ...]:
    """Inverse of `pair`: returns `(x, y)` or `(x, y, sample_weight)`."""
    return (x, *y) if isinstance(y, Weighted) else (x, y)


def labels_of(y: Nest) -> Nest:
    """Returns labels without their weights."""
    return y.y if isinstance(y, Weighted) else y


def weights_of(y: Nest) -> Nest | None:
    """Returns the weights stored with labels, or None."""
    return y.sample_weight if isinstance(y, Weighted) else None


def labels_and_weights(y: Nest) -> tuple[Nest, Nest | None]:
    """Returns labels and the examples' weights; None: all equal."""
    return labels_of(y), weights_of(y)


def as_tensor(leaf: Nest, name: str) -> tf.Tensor:
    """Returns an immutable CPU tensor that owns its numbers.

    A tensor on the CPU is returned unchanged. Anything else is copied once, so that
    later changes by the caller have no effect.

    Args:
      leaf: An array, a tensor, or anything that `np.asarray` accepts, of shape
        [n, ...].
      name: The name of the argument that it came from, for errors.

    Raises:
      TypeError: If it is not an array of numbers, booleans or strings.
      ValueError: If it has no leading dimension.
    """
    if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.float64:
        _check_rank(leaf.shape.rank, name)
        if "CPU" in leaf.device:
            return leaf
    with tf.device("/CPU:0"):
        tensor = tf.convert_to_tensor(as_array(leaf, name))
        # TensorFlow copies via a NumPy array, which it keeps until it gets the next
        # array. So this small one frees the large one.
        tf.convert_to_tensor(np.zeros(1, np.float32))
    return tensor


def as_array(leaf: Nest, name: str) -> np.ndarray:
    """Returns what `as_tensor` would hold, as a NumPy array."""
    if np.ma.is_masked(leaf):
        raise ExamplesValueError(f"{name} must have no masked values, got some.")
    try:
        array = view(leaf) if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
    except ValueError:  # Unequal lengths. (NumPy's message may quote data.)
        array = np.array([None])
    if array.dtype in (np.float64, np.longdouble):
        array = cast(array, np.float32)
    strings = array.dtype.kind in "SU" or (
        array.dtype.kind == "O"
        and all(isinstance(item, str | bytes) for item in array.flat)
    )
    # The bfloat16 of ml_dtypes has the kind "V".
    numbers = array.dtype.kind in "biuf" or array.dtype.name == "bfloat16"
    if not (strings or numbers):
        raise ExamplesTypeError(
            f"{name} must be made of dense arrays of numbers, booleans or strings, "
            f"got a {type(leaf).__name__} of dtype {array.dtype}; {PADDING}."
        )
    _check_rank(array.ndim, name)
    return array


@np.errstate(all="ignore")
def cast(array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns clients' numbers in another dtype, without a word if they do not fit.

    A warning would tell of one client, and `np.seterr(all="raise")` would let it end
    the round for all.
    """
    return array.astype(dtype)


def _check_rank(rank: int | None, name: str) -> None:
    if rank == 0:
        raise ExamplesValueError(
            f"{name} must have a leading dimension of examples, got a scalar."
        )


def view(tensor: tf.Tensor) -> np.ndarray:
    """Returns a read-only array over a tensor's own memory, without a copy.

    (`tensor.numpy()` copies. Strings and bfloat16 have no buffer that NumPy can use, so
    they are copied.)
    """
    if tensor.dtype in (tf.string, tf.bfloat16) or "CPU" not in tensor.device:
        return tensor.numpy()
    return np.asarray(memoryview(tensor))


def copy_array(array: np.ndarray) -> np.ndarray:
    """Returns a copy in tensor format; raises ValueError if no tensor can hold it."""
    if array.dtype.kind in "SUO":
        return tf.constant(array, tf.string).numpy()
    return np.array(array)


def pack(structure: Nest, leaves: Iterable[Nest]) -> Nest:
    """Arranges leaves as `tf.nest.pack_sequence_as` does, in less time."""
    return _pack_from(structure, iter(leaves))


# (A function that calls itself from within another would keep the leaves in memory.)
def _pack_from(nest: Nest, leaves: Iterator[Nest]) -> Nest:
    kind = type(nest)
    if kind is dict:
        arranged = {key: _pack_from(nest[key], leaves) for key in sorted(nest)}
        return {key: arranged[key] for key in nest}
    if kind is list or kind is tuple:
        return kind(_pack_from(part, leaves) for part in nest)
    if isinstance(nest, tuple) and hasattr(nest, "_make"):
        return nest._make(_pack_from(part, leaves) for part in nest)
    if tf.nest.is_nested(nest):  # Of a kind that only TensorFlow knows.
        count = len(tf.nest.flatten(nest))
        return tf.nest.pack_sequence_as(nest, list(itertools.islice(leaves, count)))
    return next(leaves)


def map_leaves(fn: Callable[[Nest], Nest], nest: Nest) -> Nest:
    """`tf.nest.map_structure`; for the usual (array, array), without its overhead."""
    if isinstance(nest, np.ndarray | tf.Tensor):
        return fn(nest)
    if type(nest) is tuple:
        return tuple(map_leaves(fn, part) for part in nest)
    return tf.nest.map_structure(fn, nest)


def leaves_of(nest: Nest) -> list[Nest]:
    """`tf.nest.flatten`; see `map_leaves`."""
    return [nest] if isinstance(nest, np.ndarray) else tf.nest.flatten(nest)


def as_tensors(nest: Nest, name: str) -> Nest:
    """Maps `as_tensor` over a nest."""
    return map_leaves(lambda leaf: as_tensor(leaf, name), with_array_leaves(nest, name))


def as_arrays(nest: Nest, name: str) -> Nest:
    """Maps `as_array` over a nest."""
    return map_leaves(lambda leaf: as_array(leaf, name), with_array_leaves(nest, name))


def with_array_leaves(nest: Nest, name: str) -> Nest:
    """Turns lists of plain numbers, such as `[[1, 2], [3, 4]]`, into arrays."""
    if isinstance(nest, dict):
        return {key: with_array_leaves(part, name) for key, part in nest.items()}
    is_list = isinstance(nest, list) and bool(nest)
    first = tf.nest.flatten(nest)[:1] if is_list else []
    is_plain = first and isinstance(first[0], (*_NUMBERS, str, bytes))
    return as_array(nest, name) if is_plain else nest


def views(nest: Nest) -> Nest:
    """Maps `view` over a nest."""
    return map_leaves(view, nest)


def take(nest: Nest, rows: slice | np.ndarray) -> Nest:
    """Takes the same rows (a slice or an integer array) from every array."""
    return map_leaves(lambda array: array[rows], nest)


def common_length(x: Nest, y: Nest) -> int:
    """Returns the common leading dimension of all arrays in `x` and `y`.

    Raises:
      ValueError: If the dimensions differ, or if there is no array.
    """
    parts = {"x": x, "y": labels_of(y), "sample_weight": weights_of(y)}
    lengths = {
        name: sorted({int(leaf.shape[0]) for leaf in leaves_of(part)})
        for name, part in parts.items()
        if part is not None
    }
    distinct = {length for sizes in lengths.values() for length in sizes}
    if not distinct:
        raise ExamplesValueError("x and y must hold at least one array, got none.")
    if len(distinct) > 1:
        got = [f"{n} in {name}" for name, sizes in lengths.items() for n in sizes]
        raise ExamplesValueError(
            f"{', '.join(lengths)} must have the same number of examples in every "
            f"array, got {' and '.join(got)}."
        )
    return distinct.pop()


def spec_of(nest: Nest) -> Nest:
    """Returns the `tf.TensorSpec`s of one example."""
    return map_leaves(lambda leaf: tf.TensorSpec(leaf.shape[1:], _dtype(leaf)), nest)


def _dtype(leaf: Nest) -> tf.DType:
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "SUO":
        return tf.string
    return tf.as_dtype(leaf.dtype)


def conform(
    x: Nest, y: Nest, spec: Nest, names: Names | None = None
) -> tuple[Nest, Nest, np.ndarray]:
    """Casts one client's examples (or many clients') to a spec.

    The spec is public and the same for all clients; no other client's data is read.
    Numbers are cast to the spec's dtype, and examples without weights get weight 1. As
    in Keras, a model's inputs and outputs may be given in order or by name, and with or
    without trailing dimensions of size 1.

    Args:
      x: Features, a nest of arrays or CPU tensors.
      y: Labels, likewise.
      spec: The `tf.TensorSpec`s (x, y) of one example.
      names: The names of the model's inputs and outputs, if the spec comes from a
        model; None if it was declared.

    Returns:
      (x, y) of the spec, with leaves that already fit unchanged; and bool [n], whether
      an example's numbers are the same after the cast.

    Raises:
      ExamplesValueError: Their names, shapes or types do not match.
    """
    data, wanted_spec = unpair(x, y), unpair(*spec)
    if len(data) > len(wanted_spec):
        raise ExamplesValueError(
            "sample_weight must be declared as the third part of an element_spec, got "
            "a client with weights."
        )
    fits, parts = np.ones(common_length(x, y), bool), []
    if len(data) < len(wanted_spec):
        data = (*data, _ones(wanted_spec[2], len(fits)))
    order = ("x", "y", "sample_weight")
    for index, (name, nest, part_spec) in enumerate(
        zip(order, data, wanted_spec, strict=False)
    ):
        part_names = None if names is None else names[min(index, 1)]
        specs = tf.nest.flatten(part_spec)
        if index == 2 and isinstance(nest, np.ndarray | tf.Tensor):
            # As in Keras, a single weight applies to all outputs.
            nest = tf.nest.pack_sequence_as(part_spec, [nest] * len(specs))
        leaves = _arrange(nest, part_spec, part_names)
        wrong = ""
        if leaves is None:
            wrong = "others"  # Not quoted: a client may have chosen the names.
        elif not all(map(functools.partial(_fits_spec, names is None), leaves, specs)):
            wrong = describe_spec(spec_of(nest))
        if wrong:
            hint = _STRINGS if "string" in wrong else PADDING
            if leaves and all(map(_is_batch, leaves, specs)):
                hint = _BATCHES
            raise ExamplesValueError(
                f"{name} must be {describe_spec(part_spec)} for each example, got "
                f"{wrong}; {hint}."
            )
        cast = list(map(_cast, leaves or (), specs))
        fits = np.all([fits, *(unchanged for _, unchanged in cast)], axis=0)
        parts.append(tf.nest.pack_sequence_as(part_spec, [leaf for leaf, _ in cast]))
    return *pair(tuple(parts)), fits


def _ones(spec: Nest, number: int) -> Nest:
    """Returns ones with the shapes of a spec for a number of examples."""
    return tf.nest.map_structure(
        lambda leaf: np.ones([number, *leaf.shape], leaf.dtype.as_numpy_dtype), spec
    )


def _arrange(nest: Nest, spec: Nest, names: Sequence[str] | None) -> list[Nest] | None:
    """Returns the leaves of a nest in a spec's order; None if the structures differ."""
    leaves, count = tf.nest.flatten(nest), len(tf.nest.flatten(spec))
    try:
        tf.nest.assert_same_structure(nest, spec)
    except (TypeError, ValueError):
        if names is None:
            return None
        if isinstance(nest, dict):
            if not nest.keys() >= set(names) > set():
                return None
            leaves = [nest[name] for name in names]
        elif (
            not isinstance(nest, list | tuple) or not len(leaves) == len(nest) == count
        ):
            return None
    is_array = [isinstance(leaf, np.ndarray | tf.Tensor) for leaf in leaves]
    return leaves if all(is_array) else None


def _without_trailing_ones(shape: tf.TensorShape) -> list[int]:
    sizes = list(shape)
    while sizes and sizes[-1] == 1:
        sizes.pop()
    return sizes


def _fits_spec(exactly: bool, leaf: Nest, spec: tf.TensorSpec) -> bool:
    """Returns whether an array [n, ...] can be cast to a spec of one example."""
    same_kind = (_dtype(leaf) == tf.string) == (spec.dtype == tf.string)
    sizes = list if exactly else _without_trailing_ones
    return same_kind and sizes(leaf.shape[1:]) == sizes(spec.shape)


def _is_batch(leaf: Nest, spec: tf.TensorSpec) -> bool:
    """Returns whether each example of an array looks like a batch of a spec."""
    sizes = _without_trailing_ones
    return leaf.ndim > 1 and sizes(leaf.shape[2:]) == sizes(spec.shape)


def _cast(leaf: Nest, spec: tf.TensorSpec) -> tuple[Nest, np.ndarray]:
    """Casts an array to a spec; also returns whether each example is unchanged.

    Rounding to a floating-point dtype is no change, as Keras does it, too.
    """
    unchanged, dtype = np.ones(leaf.shape[0], bool), spec.dtype
    if _dtype(leaf) != dtype:
        array = view(leaf) if isinstance(leaf, tf.Tensor) else leaf
        with np.errstate(all="ignore"):
            leaf = cast(array, dtype.as_numpy_dtype)
            if not (dtype.is_floating or dtype == tf.string):
                is_equal = (leaf.astype(array.dtype) == array) & (
                    (leaf < 0) == (array < 0)
                )
                unchanged = is_equal.reshape(len(is_equal), -1).all(axis=1)
    shape = [leaf.shape[0], *spec.shape]
    if list(leaf.shape) != shape:
        leaf = (tf.reshape if isinstance(leaf, tf.Tensor) else np.reshape)(leaf, shape)
    return leaf, unchanged


def no_examples(spec: Nest) -> Nest:
    """Returns arrays with zero examples of the given spec."""
    return _ones(spec, 0)


def describe_spec(spec: Nest) -> str:
    """Returns the specs of a nest as text, such as `float32[64]`."""
    descriptions = tf.nest.map_structure(
        lambda leaf: f"{leaf.dtype.name}{leaf.shape.as_list()}", spec
    )
    return str(descriptions).replace("'", "")


def concatenate(nests: Sequence[Nest]) -> Nest:
    """Concatenates nests of equal structure along the dimension of examples."""
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *nests)
