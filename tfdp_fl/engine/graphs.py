"""What the graph of a traced function tells: what it runs, writes and keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdp_fl.engine import devices

# Stateful, so that TensorFlow runs them whoever wants their result. What they
# keep is kept by those that they call.
_KEEP_NOTHING = frozenset(
    {"Assert", "Case", "If", "PrintV2", "StatefulPartitionedCall", "While"}
)

# What they keep is found by their names, in one place for all that runs.
_HAVE_TEMPORARY_VARIABLES = frozenset(
    {"AccumulateNV2", "DestroyTemporaryVariable", "TemporaryVariable"}
)


def operations(graph: Any) -> Iterator[Any]:
    """Yields the operations of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for inner in _functions_of(graph):
        if inner is not None:
            yield from inner.get_operations()


def calls_functions(graph: Any) -> bool:
    """Returns True for conditionals, loops and calls of other functions."""
    return any(
        attribute.HasField("func") or attribute.list.func
        for operation in graph.get_operations()
        for attribute in operation.node_def.attr.values()
    )


def keeps_state(graph: Any) -> bool:
    """Returns True unless what it keeps is in variables and their like.

    An operation such as `RandomUniform` keeps its place in its random numbers
    itself, one for all runs of the function.
    """
    kinds = {each.type for each in operations(graph)}
    if devices.are_all_cpus():
        # Keras 2 traces recurrent layers for GPUs as well.
        kinds = {kind for kind in kinds if not kind.startswith("Cudnn")}
    return None in _functions_of(graph) or any(map(_keeps_state, kinds))


def has_temporary_variables(graph: Any) -> bool:
    """Returns whether two runs at once would meet in a temporary variable."""
    return not _HAVE_TEMPORARY_VARIABLES.isdisjoint(
        operation.type for operation in operations(graph)
    )


def assigned_resources(function: Any) -> set[int]:
    """Returns the ids of the captured handles that a function may write.

    Args:
      function: A `ConcreteFunction`.
    """
    from tensorflow.python.framework import auto_control_deps_utils as utils

    graph = function.graph
    read_only = {
        id(graph.inputs[index])
        for index in utils.get_read_only_resource_input_indices_graph(graph)
    }
    return {
        id(external)
        for external, internal in graph.captures
        if external.dtype == tf.resource and id(internal) not in read_only
    }


def readers_of_variables(graph: Any) -> dict[int, list[str]]:
    """Returns the types of the operations that take each captured handle.

    Args:
      graph: Of a traced function.

    Returns:
      A list for each variable, by the id of its handle.
    """
    return {
        id(external): [each.type for each in internal.consumers()]
        for external, internal in graph.captures
        if external.dtype == tf.resource
    }


def note_what_is_only_read(operation: Any, function: Any) -> None:
    """Has an operation say which variables the function that it calls reads.

    Of all others that it is given, `assigned_resources` and TensorFlow's own
    order of operations take for granted that it writes them.

    Args:
      operation: A call of the function, with what it captured.
      function: A `ConcreteFunction`.
    """
    from tensorflow.python.framework import auto_control_deps_utils as utils
    from tensorflow.python.framework import ops

    ops.set_int_list_attr(
        operation,
        utils.READ_ONLY_RESOURCE_INPUTS_ATTR,
        utils.get_read_only_resource_input_indices_graph(function.graph),
    )


def _functions_of(graph: Any) -> list[Any]:
    """Returns the graphs of all functions; None: TensorFlow has none of it."""
    functions = graph._functions.values()
    return [getattr(function, "graph", None) for function in functions]


def _keeps_state(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    if definition is None:
        return True
    if not definition.is_stateful or kind in _KEEP_NOTHING:
        return False
    return tf.resource.as_datatype_enum not in {
        argument.type for argument in definition.input_arg
    }
