"""Calling compiled functions, several of them at the same time."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.eager import context

from tfdp_fl import _interrupts

# Told of a call by its start and end.
OnCall = Callable[[float, float], None]

_on_call: OnCall | None = None


def traced(function: Any, *arguments: Any) -> Any:
    """Traces a function; an interrupt waits until that is done.

    Raised inside of it, it would leave this thread in the function's graph, or
    come out of TensorFlow as a RuntimeError: it asks operations for attributes
    by catching errors.

    Args:
      function: A `tf.function` that was not traced yet.
      *arguments: Its arguments, or their specs.

    Returns:
      A `ConcreteFunction`.
    """
    with _interrupts.after_the_block():
        return function.get_concrete_function(*arguments)


class TracedFunction:
    """A function that was traced, and may run while others do."""

    def __init__(self, function: Any, *arguments: Any):
        """Traces the function.

        Args:
          function: A `tf.function` that was not traced yet.
          *arguments: Its arguments, or their specs.
        """
        self._concrete = traced(function, *arguments)

    def __call__(self, *arguments: Any) -> Any:
        """Calls it with nests of tensors; returns its structured result."""
        start = time.perf_counter()
        with _without_memory_optimizer():
            result = self._concrete(*arguments)
        if _on_call is not None:
            _on_call(start, time.perf_counter())
        return result


class Compiled:
    """A function of nests of tensors, traced once for each kind of call."""

    def __init__(self, function: Callable[..., Any]):
        """Prepares the function; nothing is traced yet.

        Args:
          function: A Python function of tensors.
        """
        self._function = function
        self._traced: dict[Any, TracedFunction] = {}

    def __call__(self, *arguments: Any, kind: Any = None) -> Any:
        """Calls it.

        Args:
          *arguments: Nests of tensors and NumPy arrays, of the shapes and
            dtypes of every call of this kind.
          kind: What the shapes, dtypes or structure depend on; None: nothing.
        """
        arguments = tf.nest.map_structure(tf.convert_to_tensor, arguments)
        if kind not in self._traced:
            specs = tf.nest.map_structure(
                lambda each: tf.TensorSpec(each.shape, each.dtype), arguments
            )
            self._traced[kind] = TracedFunction(
                tf.function(self._function, autograph=False), *specs
            )
        return self._traced[kind](*arguments)


@functools.cache
def _with_options_of(executor_type: str, config: bytes) -> context.FunctionCallOptions:
    changed = tf.compat.v1.ConfigProto.FromString(config)
    changed.graph_options.rewrite_options.memory_optimization = (
        rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    )
    return context.FunctionCallOptions(executor_type, changed)


@contextlib.contextmanager
def _without_memory_optimizer() -> Iterator[None]:
    """Leaves TensorFlow's memory optimizer out of this thread's calls.

    Where a sum is large, it has it made in a temporary variable. That is found
    by the operation's name, in one place for all that runs: functions that run
    at the same time would add to each other's sums.
    """
    here = context.context()
    before = here.function_call_options
    here.function_call_options = _with_options_of(
        before.executor_type or "", before.config_proto_serialized
    )
    try:
        yield
    finally:
        here.function_call_options = before


@contextlib.contextmanager
def timed(on_call: OnCall) -> Iterator[None]:
    """Has `on_call` told of each call of a compiled function.

    Args:
      on_call: Called with a call's start and end, `time.perf_counter()`
        seconds, on the thread that made it; several may call at once.
    """
    global _on_call
    before, _on_call = _on_call, on_call
    try:
        yield
    finally:
        _on_call = before
