"""A traced function that another process can run, variables and all."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf


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


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function that another process can run.

    Attributes:
        name: Its own.
        graph: The serialized GraphDef.
        inputs: The names of its arguments, and then of what it captured.
        captured: What stands for that: a value; or a variable's value, or its
            shape and dtype where it is assigned before it is read.
        is_variable: Which of them are variables.
        outputs: The names of its results.
        structure: Their nest.
    """

    name: str
    graph: bytes = dataclasses.field(repr=False)
    inputs: tuple[str, ...]
    captured: tuple[Any, ...]
    is_variable: tuple[bool, ...]
    outputs: tuple[str, ...]
    structure: Any = dataclasses.field(compare=False)

    @classmethod
    def of(
        cls,
        function: Any,
        broadcast_spec: Any,
        shard_spec: Any,
        assigned: Iterable[tf.Variable] = (),
    ) -> Program:
        """Traces a function, with the variables it captures.

        Every run starts from the variables' values at the time of this call:
        what a run assigns is gone with it, and what is assigned here later does
        not reach the workers. What changes between rounds is an argument.

        Random operations lose their seeds: they would draw the same on each
        worker and in each run. A captured `tf.random.Generator` is refused for
        the same reason, unless its state is `assigned`, from a seed that is an
        argument. That is the reproducible way.

        Args:
            function: A `tf.function` (or a Python function of tensors) of
                `(broadcast, shard)` that returns a nest of tensors.
            broadcast_spec: A nest of `tf.TensorSpec`s.
            shard_spec: A nest of `tf.TensorSpec`s.
            assigned: Variables that `function` assigns before it reads them.
                Their values are then left out of what is sent to the workers.

        Raises:
            ValueError: If `function` captures what cannot go to another
                process.
        """
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
        count = len(concrete.inputs) - len(captures)
        return cls(
            name=uuid.uuid4().hex,
            graph=graph_def.SerializeToString(),
            inputs=tuple(
                tensor.name
                for tensor in [
                    *concrete.inputs[:count],
                    *(inner for _, inner in captures),
                ]
            ),
            captured=tuple(
                _captured_value(external, handles, generators)
                for external, _ in captures
            ),
            is_variable=tuple(
                external.dtype == tf.resource for external, _ in captures
            ),
            outputs=tuple(tensor.name for tensor in concrete.outputs),
            structure=tf.nest.map_structure(
                lambda _: None, concrete.structured_outputs
            ),
        )

    def stand_ins(self) -> list[Any]:
        """Returns a variable or a constant in the place of each capture.

        A variable is gone with its last reference, so they are to be held; an
        imported graph gets the variables' handles.
        """

        def stand_in(value: Any, is_variable: bool) -> Any:
            if isinstance(value, tf.TensorSpec):
                value = tf.zeros(value.shape, value.dtype)
            if is_variable:
                return tf.Variable(value, trainable=False)
            return tf.constant(value)

        return list(map(stand_in, self.captured, self.is_variable))
