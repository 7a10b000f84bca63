"""What a client's program may do, so that nothing passes from client to client.

A client is bounded by the clip only if its data moves its own update alone. So
the traced program, with all functions that it calls, holds only operations that
depend on their arguments, control flow, and reads and writes of variables that
are reset for every client. All else is refused: queues, tables that are written,
files, Python, generators that are not seeded for each client, and operations
that draw random numbers from a stream of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdp_fl import keras_versions

# Of the operations that TensorFlow calls stateful.
_ALLOWED = re.compile(
    # Control flow. The functions that these call are looked at as well.
    r"If|While|Case|StatefulPartitionedCall|Assert|CheckNumerics(V2)?"
    # Variables, which `assigned` finds.
    r"|(Read|Assign|AssignAdd|AssignSub)VariableOp|VarIsInitializedOp|VariableShape"
    r"|Resource(Sparse)?Apply\w+|ResourceScatter\w+|ResourceGather(Nd)?"
    r"|ResourceStridedSliceAssign"
    # The state of a `tf.random.Generator` is a variable.
    r"|RngReadAndSkip|RngSkip"
    # Reads of tables. What writes one is not here.
    r"|LookupTable(Find|Size)V2"
    # Recurrent layers on a GPU.
    r"|CudnnRNN\w*"
)
# Of the others, those that are no functions of their arguments: they read files,
# call Python, write into their arguments (into constants, for good), or meet in a
# variable or a batch that is found by the operation's name.
_STATELESS_BUT_NOT_ALLOWED = re.compile(
    r"PyFuncStateless|ReadFile|MatchingFiles|ImmutableConst|AccumulateNV2"
    r"|InitializeTable\w*|Debug\w+|\w*Dataset\w*|TPU\w+|Tpu\w+|Risc\w+"
    r"|Inplace\w+|Batch|BatchFunction|Unbatch(Grad)?|(De|En)codeProto\w*"
)


def check(function: Any, model: tf.keras.Model) -> None:
    """Raises ValueError for a program with an operation that is not allowed.

    Args:
      function: A `ConcreteFunction`.
      model: The names of its layers tell where the operation is.
    """
    definition = function.graph.as_graph_def()
    library = {each.signature.name: each for each in definition.library.function}
    for path, kind in _operations(definition.node, library, "", set()):
        if _is_allowed(kind):
            continue
        # The scope of a layer bears its name, and perhaps a number.
        scopes = {re.sub(r"_\d+$", "", scope) for scope in path.split("/")}
        layer = next(
            (
                f"layer {each.name!r}"
                for each in reversed(keras_versions.layers_of(model))
                if re.sub(r"_\d+$", "", each.name) in scopes
            ),
            "the program",
        )
        raise ValueError(
            "model, loss, metrics and hooks must compute with operations that "
            "keep nothing for the next client and reach nothing outside, got "
            f"{kind} in {layer} ({path}). Queues, tables, files and "
            "tf.py_function are not for them. Random numbers are to be drawn by "
            "Keras's layers, or by a keras.random.SeedGenerator that a layer "
            "holds and gives as seed=. State is to be in the model's weights."
        )
    for handle, _ in function.graph.captures:
        if handle.dtype == tf.resource and not (
            _is_variable(handle) or _is_table(handle)
        ):
            raise ValueError(
                "model, loss, metrics and hooks must keep their state in variables, "
                "got a resource that is no tf.Variable."
            )


def assigned(function: Any) -> dict[int, tf.Tensor]:
    """Returns the captured handles of variables that a function may assign.

    Args:
      function: A `ConcreteFunction`.

    Returns:
      The handles by their `id`.
    """
    from tensorflow.python.framework import auto_control_deps_utils as utils

    graph = function.graph
    read_only = {
        id(graph.inputs[index])
        for index in utils.get_read_only_resource_input_indices_graph(graph)
    }
    return {
        id(external): external
        for external, internal in graph.captures
        if external.dtype == tf.resource
        and id(internal) not in read_only
        and _is_variable(external)
    }


def read(handle: tf.Tensor) -> tf.Tensor:
    """Returns the value of a variable, by a handle of `assigned`."""
    (found,) = handle._handle_data.shape_and_type
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.as_dtype(found.dtype))


def _is_variable(handle: tf.Tensor) -> bool:
    data = getattr(handle, "_handle_data", None)
    return data is not None and data.is_set


def _is_table(handle: tf.Tensor) -> bool:
    try:
        tf.raw_ops.LookupTableSizeV2(table_handle=handle)
    except tf.errors.OpError:
        return False
    return True


def _is_allowed(kind: str) -> bool:
    definition = op_def_registry.get(kind)
    if definition is None:
        return False
    if definition.is_stateful:
        return _ALLOWED.fullmatch(kind) is not None
    return _STATELESS_BUT_NOT_ALLOWED.fullmatch(kind) is None


def _operations(
    nodes: Any, library: dict[str, Any], path: str, seen: set[str]
) -> Iterator[tuple[str, str]]:
    """Yields where each operation is, and its kind; in called functions, too."""
    for node in nodes:
        place = f"{path}/{node.name}" if path else node.name
        called = [
            function.name
            for attribute in node.attr.values()
            for function in (attribute.func, *attribute.list.func)
            if function.name
        ]
        if node.op in library:  # A call by the function's name.
            called.append(node.op)
        else:
            yield place, node.op
        for name in called:
            if name not in seen:
                seen.add(name)
                if name not in library:
                    yield place, name  # Nobody can look at it.
                    continue
                yield from _operations(library[name].node_def, library, place, seen)
