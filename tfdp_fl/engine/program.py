"""A pure function of tensors: traced, checked and frozen.

The clients' training is traced once into a `GraphDef`. This same graph is
checked, run by every thread, and sent to the workers. It captures no variable. So
nothing can pass from one client or thread to another, except through its arguments
and results.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import allowed_operations

if TYPE_CHECKING:
    from tensorflow.core.framework.attr_value_pb2 import AttrValue

    from tfdp_fl.datasets.nests import Nest
    from tfdp_fl.terms import Json

# Errors that one client's data can make a traced program raise: any of TensorFlow's (an
# index outside an embedding's table, say), and one that says that the message, which
# quotes a client's text, is not UTF-8.
CLIENT_ERRORS = (tf.errors.OpError, UnicodeDecodeError)


@contextlib.contextmanager
def numpy_memory_errors_as_tensorflows() -> Iterator[None]:
    """Within the block, too little memory for NumPy raises one of `CLIENT_ERRORS`."""
    try:
        yield
    except MemoryError as error:
        raise tf.errors.ResourceExhaustedError(None, None, str(error)) from None


def as_tensor(value: tf.Tensor | np.ndarray | float) -> tf.Tensor:
    """Returns a tensor unchanged, faster than TensorFlow does; converts the rest."""
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


class Program:
    """A pure function of nests of tensors.

    Attributes:
      graph_def: The `GraphDef` that it runs.
      inputs: The names there of the flattened arguments, then of the constants.
      specs: The specs of these inputs.
      constants: Tensors captured when the function was traced, such as a table of
        numbers that a layer holds. No allowed operation writes to one.
      outputs: The names of the flattened results.
      structure: The results' structure, with None in place of each tensor.
      results: The results' specs.
      assertions: The names of further operations to run, which may raise.
      name: The program's own name.
      threads: How many threads each operation may use; None: as many as there are.
      has_run: Whether a call of it has ever finished.
    """

    def __init__(
        self,
        function: Callable[..., Nest],
        *specs: Nest,
        model: tf.keras.Model | None = None,
        xla: bool = False,
        threads: int | None = None,
    ):
        """Traces a function once.

        Args:
          function: Python function of tensors that returns a nest of tensors.
          *specs: A nest of `tf.TensorSpec` for each argument.
          model: The model in the function; errors name its layers.
          xla: Whether XLA compiles it.
          threads: How many threads each operation may use (on a CPU, without XLA).
            None: as many as there are.

        Raises:
          ValueError: It contains a forbidden operation or captures something mutable.
        """
        layers = [] if model is None else keras_versions.layers_of(model)
        names = [layer.name for layer in layers]
        with _signals.defer_signals():
            # An interrupt in here would leave this thread in the function's graph.
            graph, inputs, results = _trace(function, specs, model)
        graph_def = graph.as_graph_def()
        captures = list(getattr(graph, "captures", ()))
        _check_variables(graph, captures, names)
        allowed_operations.check(graph_def, names)
        _split_addn(graph_def)
        _rename_functions(graph_def)
        self.name = uuid.uuid4().hex
        self.has_run = False
        self.threads = None if xla else threads
        self.graph_def = graph_def
        self.inputs = [tensor.name for tensor in inputs]
        self.constants = [outer for outer, _ in captures]
        self.outputs = [tensor.name for tensor in tf.nest.flatten(results)]
        self.structure = tf.nest.map_structure(lambda _: None, results)
        self.results = tf.nest.map_structure(tf.TensorSpec.from_tensor, results)
        self.assertions = [
            operation.name for operation in getattr(graph, "control_outputs", ())
        ]
        self.specs = [tf.TensorSpec(v.shape, v.dtype) for v in inputs]
        with _signals.defer_signals():
            if self.threads is not None:
                self._run = self._with_few_threads(self.threads)
                return
            frozen = tf.compat.v1.wrap_function(self.import_into_graph, self.specs)
            if xla:
                self._run = tf.function(
                    lambda *tensors: frozen(*tensors), autograph=False, jit_compile=True
                ).get_concrete_function(*self.specs)
                return
            # The operation itself: a call through `frozen` takes longer.
            frozen.add_to_graph()
            outputs = [output.dtype for output in frozen.outputs]
            self._run = lambda *tensors: tf.raw_ops.StatefulPartitionedCall(
                args=tensors, Tout=outputs, f=frozen
            )

    def _with_few_threads(self, threads: int) -> Callable[..., list[tf.Tensor]]:
        """Returns a function whose operations use at most `threads` threads each.

        TensorFlow would split every operation among all cores. Where calls on several
        threads use them already, that only makes them wait for each other. `MapDefun`
        can limit it; it calls a function for each row of its arguments, here one.
        """
        row = tf.zeros([1])
        frozen = tf.compat.v1.wrap_function(
            lambda _, *tensors: self.import_into_graph(*tensors),
            [tf.TensorSpec([], row.dtype), *self.specs],
        )
        frozen.add_to_graph()

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            rows = tf.raw_ops.MapDefun(
                arguments=[row],
                captured_inputs=tensors,
                output_types=[output.dtype for output in frozen.outputs],
                output_shapes=[output.shape for output in frozen.outputs],
                f=frozen,
                max_intra_op_parallelism=threads,
            )
            return [tf.squeeze(each, 0) for each in rows]

        return run

    def __getstate__(self) -> Json:
        """Returns everything that another process needs to run it."""
        constants = [constant.numpy() for constant in self.constants]
        return {**vars(self), "_run": None, "constants": constants}

    def import_into_graph(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Adds the program's operations to the default graph.

        Args:
          *tensors: One for each of `inputs`.

        Returns:
          The flattened results.
        """
        results = tf.graph_util.import_graph_def(
            self.graph_def,
            input_map=dict(zip(self.inputs, tensors, strict=True)),
            return_elements=[*self.outputs, *self.assertions],
            name="",
        )
        count = len(self.outputs)
        with tf.control_dependencies(results[count:]):
            return [tf.identity(tensor) for tensor in results[:count]]

    def find_operation(self, error: Exception) -> str:
        """Returns the operation of this program that a TensorFlow error names, or "".

        Anything else that looks like a name could be a client's text.
        """
        names = {node.name for _, node in allowed_operations.nodes(self.graph_def)}
        mentioned = re.findall(r"node '?([\w./-]+)", str(error))
        return next((operation for operation in mentioned if operation in names), "")

    def __call__(self, *arguments: Nest) -> Nest:
        """Returns the nest of results; safe to call from several threads at once."""
        flat = map(as_tensor, tf.nest.flatten(arguments))
        results = self._run(*flat, *self.constants)
        self.has_run = True
        return nests.pack(self.structure, results)


def in_own_graph(
    function: Callable[..., Nest],
) -> tf.types.experimental.PolymorphicFunction:
    """Returns a `tf.function` that is not inlined into its callers.

    If a loop makes the graph cyclic, TensorFlow reaches a pooling layer's gradient
    before the layer itself, and then computes it ten times slower.
    """

    def in_scope(*arguments: Nest) -> Nest:
        # Some names from Keras are valid only within a name scope.
        with tf.name_scope("program"):
            return function(*arguments)

    return tf.function(
        in_scope, autograph=False, experimental_attributes={"_noinline": True}
    )


def _trace(
    function: Callable[..., Nest], specs: tuple[Nest, ...], model: tf.keras.Model | None
) -> tuple[tf.Graph, list[tf.Tensor], Nest]:
    """Returns a function's graph, and its inputs and results in that graph."""
    if keras_versions.IS_KERAS_3:
        traced = in_own_graph(function).get_concrete_function(*specs)
        results = tf.nest.pack_sequence_as(traced.structured_outputs, traced.outputs)
        return traced.graph, traced.inputs, results
    # TFF's functional models need a plain graph, not a function's.
    with tf.Graph().as_default() as graph:
        placeholders = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), specs
        )
        results = tf.nest.map_structure(tf.convert_to_tensor, function(*placeholders))
    if model is not None:
        keras_versions.restore_classes(model)
    return graph, tf.nest.flatten(placeholders), results


def _check_variables(
    graph: tf.Graph, captures: list[tuple[tf.Tensor, tf.Tensor]], layers: list[str]
) -> None:
    """Raises ValueError for a captured variable."""
    variables = getattr(graph, "variables", ())
    names = {id(variable.handle): variable.name for variable in variables}
    for outer, inner in captures:
        name = names.get(id(outer))
        if name is None:
            continue
        if "seed_generator" in name:
            raise ValueError(
                "model must draw its random numbers with a "
                "keras.random.SeedGenerator that a layer holds and gives "
                "as seed=, so that they follow from the seed of the round; "
                "it draws from Keras's global one, which all clients would "
                "share."
            )
        users = [consumer.name for consumer in inner.consumers()]
        layer = allowed_operations.layer_of(users[0] if users else "", layers)
        raise ValueError(
            "model, loss, metrics, optimizer and hooks must keep what training "
            "reads and changes in the model's weights (made by add_weight) or the "
            "optimizer's slots, where every client starts afresh. Training also "
            f"uses the variable {name!r}, in {layer}, and its value would pass from "
            "one client to the next."
        )


# TensorFlow's own mark on additions that its arithmetic optimizer leaves as they are.
_NEVER_JOINED = "_grappler_ArithmeticOptimizer_AddOpsRewriteStage"


def _split_addn(graph_def: tf.compat.v1.GraphDef) -> None:
    """Splits every `AddN` of numbers into two-term additions that are never merged.

    TensorFlow's memory optimizer computes a large `AddN` of more terms in a temporary
    variable, which threads look up by the operation's name. Threads that run the same
    function at the same time would collide there. TensorFlow's arithmetic optimizer
    merges consecutive additions into such an `AddN`.
    """
    functions = graph_def.library.function
    for nodes in (graph_def.node, *(function.node_def for function in functions)):
        port = "" if nodes is graph_def.node else ":sum:0"
        for node in list(nodes):
            if node.op not in ("Add", "AddV2", "AddN"):
                continue
            node.attr[_NEVER_JOINED].b = True
            terms = [name for name in node.input if not name.startswith("^")]
            controls = [name for name in node.input if name.startswith("^")]
            if len(terms) < 3 or node.attr["T"].type == tf.variant.as_datatype_enum:
                continue
            total = terms[0]
            for number, term in enumerate(terms[1:-1]):
                addition = nodes.add(op="AddN", name=f"{node.name}/sum_{number}")
                addition.input.extend([total, term])
                addition.attr["T"].CopyFrom(node.attr["T"])
                addition.attr["N"].i = 2
                addition.attr[_NEVER_JOINED].b = True
                total = addition.name + port
            node.input[:] = [total, terms[-1], *controls]
            node.attr["N"].i = 2


def _rename_functions(graph_def: tf.compat.v1.GraphDef) -> None:
    """Renames the functions, as TensorFlow already holds others with these names."""
    suffix = f"_{uuid.uuid4().hex}"
    names = {function.signature.name for function in graph_def.library.function}

    def rename_in(attributes: Iterable[AttrValue]) -> None:
        for call in allowed_operations.calls_in(attributes):
            if call.name in names:
                call.name += suffix

    for _, node in allowed_operations.nodes(graph_def):
        if node.op in names:
            node.op += suffix
        rename_in(node.attr.values())
    for function in graph_def.library.function:
        function.signature.name += suffix
        rename_in(function.attr.values())
    del graph_def.library.gradient[:]
