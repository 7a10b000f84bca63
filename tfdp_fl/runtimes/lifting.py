"""A traced `tf.function` as a TFF computation, variables and all."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


def _tff_type(spec: Any) -> Any:
    """Returns the TFF type of a nest of `tf.TensorSpec`s."""
    import tensorflow_federated as tff

    def of_tensor(tensor: tf.TensorSpec) -> Any:
        dtype = tensor.dtype.as_numpy_dtype
        return tff.TensorType(
            np.str_ if tensor.dtype == tf.string else dtype,
            None if tensor.shape.rank is None else tensor.shape.as_list(),
        )

    return tff.to_type(_ordered(tf.nest.map_structure(of_tensor, spec)))


def _ordered(nest: Any) -> Any:
    """Returns the nest with its dictionaries in the order of `tf.nest`."""
    if isinstance(nest, dict):
        return collections.OrderedDict(
            (key, _ordered(nest[key])) for key in sorted(nest)
        )
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*map(_ordered, nest))
    if isinstance(nest, (list, tuple)):
        return type(nest)(map(_ordered, nest))
    return nest


def _without_op_seeds(graph_def: tf.compat.v1.GraphDef) -> None:
    """Makes random operations draw afresh on every worker.

    An operation that was traced under `tf.random.set_seed`, or with a seed of
    its own, would start the same sequence in every worker and client.
    """
    nodes = list(graph_def.node)
    for function in graph_def.library.function:
        nodes.extend(function.node_def)
    for node in nodes:
        if node.op.startswith("Stateless"):
            continue
        if "seed" in node.attr and "seed2" in node.attr:
            node.attr["seed"].i = 0
            node.attr["seed2"].i = 0


_VARIABLE_DTYPES = (
    tf.float32,
    tf.int64,
    tf.int32,
    tf.bool,
    tf.float64,
    tf.float16,
    tf.bfloat16,
    tf.uint8,
)


def _read_variable(handle: tf.Tensor) -> tf.Tensor | None:
    """Returns the value of the variable behind a handle, None if it is none."""
    for dtype in _VARIABLE_DTYPES:
        with contextlib.suppress(tf.errors.OpError):
            return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
    return None


def _captured_value(
    external: tf.Tensor, assigned: set[int], generators: set[int]
) -> np.ndarray | tf.TensorSpec:
    """Returns what stands for a captured tensor on the workers."""
    if external.dtype != tf.resource:
        return external.numpy()
    value = _read_variable(external)
    if value is None:
        raise ValueError(
            f"function captures a resource that is no variable: {external!r}. "
            "Tables and iterators cannot go to workers."
        )
    if id(external) in assigned:
        return tf.TensorSpec(value.shape, value.dtype)
    if id(external) in generators:
        raise ValueError(
            "function captures the state of a tf.random.Generator, which "
            "would repeat the same numbers on every worker and in every "
            "round. Assign its state from a seed that is an argument (and "
            "name it in assigned), or use operations without a seed."
        )
    return value.numpy()


def computation_from_function(
    function: Any,
    broadcast_spec: Any,
    shard_spec: Any,
    assigned: Iterable[tf.Variable] = (),
) -> Any:
    """Returns a `tff.tensorflow.computation` that does what `function` does.

    `function(broadcast, shard)` is traced where it is, in eager TensorFlow,
    with the variables it captures (a Keras model's, an optimizer's). Its graph
    is then imported into the computation, with fresh variables in their
    places. So any Keras model can be trained on workers, and by the very graph
    that is run in process. (To build the model inside the computation instead
    is no way out: Keras makes layers of TensorFlow 1 there, which takes the
    gradients of LSTMs and invalidates the models outside.)

    Every call starts from the variables' values at the time of this call:
    what a call assigns is gone with it, and what is assigned here later does
    not reach the workers. What changes between rounds is an argument.

    `jit_compile` has no effect: TFF's workers have no XLA.

    Random operations lose their seeds: they would draw the same on each worker
    and in each call. A captured `tf.random.Generator` is refused for the same
    reason, unless its state is `assigned`, from a seed that is an argument.
    That is the reproducible way.

    Args:
        function: A `tf.function` (or a Python function of tensors) of
            `(broadcast, shard)` that returns a nest of tensors.
        broadcast_spec: A nest of `tf.TensorSpec`s.
        shard_spec: A nest of `tf.TensorSpec`s.
        assigned: Variables that `function` assigns before it reads them. Their
            values are then left out of what is sent to the workers.

    Returns:
        The computation, of type `(broadcast, shard) -> result`.

    Raises:
        ValueError: If `function` captures what cannot go to another process.
    """
    import tensorflow_federated as tff

    if not hasattr(function, "get_concrete_function"):
        function = tf.function(function)
    concrete = function.get_concrete_function(broadcast_spec, shard_spec)
    graph_def = concrete.graph.as_graph_def()
    _without_op_seeds(graph_def)

    captures = list(concrete.graph.captures)
    # Not every captured variable is among the graph's: one that is only
    # written is not.
    generators = {
        id(variable.handle)
        for variable in concrete.graph.variables
        if variable.name.startswith("StateVar")
    }
    handles = {id(variable.handle) for variable in assigned}
    values = [
        _captured_value(external, handles, generators)
        for external, _ in captures
    ]
    inner_names = [inner.name for _, inner in captures]
    argument_names = [
        tensor.name
        for tensor in concrete.inputs[: len(concrete.inputs) - len(captures)]
    ]
    output_names = [tensor.name for tensor in concrete.outputs]
    result_structure = _ordered(concrete.structured_outputs)
    is_resource = [external.dtype == tf.resource for external, _ in captures]

    def stand_in(value: np.ndarray | tf.TensorSpec) -> tf.Variable:
        if isinstance(value, tf.TensorSpec):
            value = tf.zeros(value.shape, value.dtype)
        return tf.Variable(value, trainable=False)

    @tf.function(autograph=False)
    def imported(arguments: list[Any], captured: list[Any]) -> list[Any]:
        names = [*argument_names, *inner_names]
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map=dict(zip(names, [*arguments, *captured], strict=True)),
            return_elements=output_names,
            name="cohort",
        )

    @tff.tensorflow.computation(
        _tff_type(broadcast_spec), _tff_type(shard_spec)
    )
    def computation(broadcast, shard):
        stand_ins = [
            stand_in(value) if resource else tf.constant(value)
            for value, resource in zip(values, is_resource, strict=True)
        ]
        captured = [
            item.handle if resource else item
            for item, resource in zip(stand_ins, is_resource, strict=True)
        ]
        outputs = imported(tf.nest.flatten((broadcast, shard)), captured)
        return tf.nest.pack_sequence_as(result_structure, outputs)

    return computation
