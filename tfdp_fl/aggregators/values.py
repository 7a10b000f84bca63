"""What clients hand in: any structure of float tensors, and their sum."""

from __future__ import annotations

import collections
import math
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
        why = None
        if not isinstance(leaf, tff.TensorType):
            why = "be a structure of tensors"
        elif tf.as_dtype(leaf.dtype) in (tf.float16, tf.bfloat16):
            why = (
                "not have tensors of float16 or bfloat16, in which a clip is rounded "
                "by more than it may be and noise is lost (cast them to float32)"
            )
        elif not tf.as_dtype(leaf.dtype).is_floating:
            why = (
                "have float tensors only, because a mechanism scales and noises them "
                "(leave others out, or aggregate them with a factory of their own)"
            )
        if why:
            raise TypeError(f"value_type must {why}, got {path} of type {leaf}.")
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
        elements = tff.structure.iter_elements(type_)
        struct = tff.structure.Struct([(name, build(each)) for name, each in elements])
        if isinstance(type_, tff.types.StructWithPythonType):
            return tff.types.type_to_py_container(struct, type_)
        return struct

    return build(value_type)


def create_record_sum(
    record_type: tff.types.StructWithPythonType,
    inner_factory: tff.aggregators.UnweightedAggregationFactory | None,
    scalars_factory: tff.aggregators.UnweightedAggregationFactory | None,
) -> tff.templates.AggregationProcess:
    """Returns the process that sums records.

    Args:
      record_type: Type of an `OrderedDict` of `update` (what the mechanism
        made of a client's value) and `scalars` (its other numbers).
      inner_factory: Sums the updates; None for `tff.aggregators.SumFactory`.
      scalars_factory: Sums the scalars; None for the same.

    Returns:
      A process whose result has the keys `update` and `scalars`, and whose
      measurements are those of `inner_factory`.
    """
    if inner_factory is None and scalars_factory is None:
        # One aggregation for everything: half the calls for each client.
        return tff.aggregators.SumFactory().create(record_type)
    plain = tff.aggregators.SumFactory()
    updates = (inner_factory or plain).create(record_type.update)
    scalars = (scalars_factory or plain).create(record_type.scalars)

    @tff.federated_computation
    def init_fn():
        return tff.federated_zip((updates.initialize(), scalars.initialize()))

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(record_type, tff.CLIENTS),
    )
    def next_fn(state, record):
        update_sum = updates.next(state[0], record.update)
        scalar_sum = scalars.next(state[1], record.scalars)
        return tff.templates.MeasuredProcessOutput(
            state=tff.federated_zip((update_sum.state, scalar_sum.state)),
            result=tff.federated_zip(
                collections.OrderedDict(
                    update=update_sum.result, scalars=scalar_sum.result
                )
            ),
            measurements=update_sum.measurements,
        )

    return tff.templates.AggregationProcess(init_fn, next_fn)


# A secure sum rounds each number to a grid of so many steps between its bounds.
_STEPS = 2.0**24
# What rounding may add to a client's share, relative to the clip.
LARGEST_ROUNDING = 1e-3


def largest_rounding(factory: Any, num_elements: int) -> float:
    """Returns the most that a sum's rounding adds to the norm of a client's share.

    Args:
      factory: Sums the shares; None for a plain sum.
      num_elements: How many numbers a share has.
    """
    if type(factory) is not tff.aggregators.SecureSumFactory:
        return 0.0
    upper, lower = factory._upper_bound_threshold, factory._lower_bound_threshold
    if isinstance(upper, tff.templates.EstimationProcess):
        return 0.0  # No epsilon is given for bounds that follow the clients' values.
    lower = -upper if lower is None else lower
    return math.sqrt(num_elements) * (float(upper) - float(lower)) / _STEPS
