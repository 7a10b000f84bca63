"""A traced `tf.function` as a TFF computation, variables and all."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl.runtimes import program


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

    Every call starts from the variables' values at the time of this call, and
    random operations lose their seeds; see `Program.of`, whose arguments and
    errors these are.

    `jit_compile` has no effect: TFF's workers have no XLA.

    Returns:
        The computation, of type `(broadcast, shard) -> result`.
    """
    import tensorflow_federated as tff

    made = program.Program.of(function, broadcast_spec, shard_spec, assigned)
    graph_def = tf.compat.v1.GraphDef.FromString(made.graph)
    result_structure = _ordered(made.structure)

    @tf.function(autograph=False)
    def imported(arguments: list[Any], captured: list[Any]) -> list[Any]:
        values = [*arguments, *captured]
        return tf.graph_util.import_graph_def(
            graph_def,
            input_map=dict(zip(made.inputs, values, strict=True)),
            return_elements=list(made.outputs),
            name="cohort",
        )

    @tff.tensorflow.computation(_tff_type(broadcast_spec), _tff_type(shard_spec))
    def computation(broadcast, shard):
        stand_ins = made.stand_ins()
        captured = [getattr(each, "handle", each) for each in stand_ins]
        outputs = imported(tf.nest.flatten((broadcast, shard)), captured)
        return tf.nest.pack_sequence_as(result_structure, outputs)

    return computation
