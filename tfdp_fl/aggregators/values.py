"""What clients hand in: any structure of float tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff


def check_value_type(value_type: tff.types.Type) -> int:
    """Returns how many tensors a value has, or raises TypeError.

    Args:
      value_type: Type of one client's value.

    Raises:
      TypeError: It is not a tensor or a (nested) structure of tensors, has no
        tensor at all, or has a tensor that is not of a float type.
    """
    if not isinstance(value_type, (tff.TensorType, tff.StructType)):
        raise TypeError(
            "value_type must be a tff.TensorType or a tff.StructType, got "
            f"{value_type!r}."
        )
    leaves = _leaf_types(value_type, "value")
    if not leaves:
        raise TypeError(f"value_type must have at least one tensor, got {value_type}.")
    for path, leaf in leaves:
        if not isinstance(leaf, tff.TensorType):
            raise TypeError(
                f"value_type must be a structure of tensors, got {path} of type {leaf}."
            )
        if tf.as_dtype(leaf.dtype) in (tf.float16, tf.bfloat16):
            raise TypeError(
                "value_type must not have tensors of float16 or bfloat16, in "
                "which a clip is rounded by more than it may be and noise is "
                f"lost, got {path} of type {leaf}; cast them to float32 first."
            )
        if not tf.as_dtype(leaf.dtype).is_floating:
            raise TypeError(
                "value_type must have float tensors only, because a mechanism "
                f"scales and noises them, got {path} of type {leaf}; leave "
                "it out of the value, or aggregate it with a factory of its "
                "own."
            )
    return len(leaves)


def shapes(value_type: tff.types.Type) -> tuple[tuple[int, ...], ...] | None:
    """Returns the shapes of a value's tensors; None where one is not known.

    Args:
      value_type: Type of one client's value, checked.
    """
    leaves = [tf.TensorShape(leaf.shape) for _, leaf in _leaf_types(value_type, "")]
    if not all(leaf.is_fully_defined() for leaf in leaves):
        return None
    return tuple(tuple(leaf.as_list()) for leaf in leaves)


def _leaf_types(type_: tff.types.Type, path: str) -> list[tuple[str, tff.types.Type]]:
    if not isinstance(type_, tff.StructType):
        return [(path, type_)]
    leaves = []
    for index, (name, element) in enumerate(tff.structure.iter_elements(type_)):
        step = f"[{index}]" if name is None else f"[{name!r}]"
        leaves += _leaf_types(element, path + step)
    return leaves


def to_list(value: Any) -> list[tf.Tensor]:
    """Returns the tensors of a value, in the order of its TFF type."""
    if tf.is_tensor(value) or isinstance(value, np.ndarray):
        return [value]
    return tff.structure.flatten(tff.structure.from_container(value, recursive=True))


def from_list(tensors: list[tf.Tensor], value_type: tff.types.Type) -> Any:
    """Returns tensors, in the order of `to_list`, as a value of a type."""
    remaining = iter(tensors)

    def build(type_):
        if isinstance(type_, tff.TensorType):
            return next(remaining)
        struct = tff.structure.Struct(
            [
                (name, build(element))
                for name, element in tff.structure.iter_elements(type_)
            ]
        )
        if isinstance(type_, tff.types.StructWithPythonType):
            return tff.types.type_to_py_container(struct, type_)
        return struct

    return build(value_type)
