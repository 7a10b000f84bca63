"""Calling compiled functions: without ceremony, and perhaps on one thread.

Small operations one after the other cost more to hand from thread to thread
than to compute: what one core has just written, the other has to fetch, and
a thread that waits has to be woken up. TensorFlow's single-threaded executor
runs a function's operations on the thread that it starts on. Such a function is
called as one operation, which costs TensorFlow less than a function does.

It runs a conditional or a loop as a call that waits for another thread, so
functions that have any are left to the default executor: all threads could
be waiting.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from tfdp_fl import _interrupts
from tfdp_fl.engine import devices

# Numbers at most in what one thread computes with where it is one pass over it.
FEW_NUMBERS = 2**16

_ONE_THREAD = "SINGLE_THREADED_EXECUTOR"
_MARK = "_tfdp_fl_one_thread"

# Told of a call by its start and end.
OnCall = Callable[[float, float], None]

_in_use = True
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


def concrete_function(function: Any, one_thread: bool, *arguments: Any) -> Any:
    """Traces a function, to be called by `Call`.

    Args:
      function: A `tf.function` that was not traced yet.
      one_thread: Whether one thread is wanted.
      *arguments: Its arguments, or their specs.

    Returns:
      A `ConcreteFunction`.
    """
    concrete = traced(function, *arguments)
    if (
        one_thread
        and devices.are_all_cpus()
        and not _calls_functions(concrete.graph)
        and all(map(tf.is_tensor, tf.nest.flatten(concrete.structured_outputs)))
    ):
        setattr(concrete, _MARK, _Operation(concrete))
    return concrete


def called_on_one_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function inside of another one that is being traced.

    Wherever that runs, this part of it runs on one thread, unless it has any
    conditional or loop.

    Args:
      function: A Python function of nests of tensors.
      *arguments: Its arguments.

    Returns:
      Its result, a nest of tensors.
    """
    compiled = tf.function(
        function,
        autograph=False,
        # In its caller's midst it would run as that does.
        experimental_attributes={"_noinline": True},
    )
    concrete = traced(
        compiled,
        *tf.nest.map_structure(
            lambda each: tf.TensorSpec(each.shape, each.dtype), arguments
        ),
    )
    if _calls_functions(concrete.graph):
        return function(*arguments)
    results = tf.raw_ops.StatefulPartitionedCall(
        args=[*tf.nest.flatten(arguments), *concrete.captured_inputs],
        Tout=[each.dtype for each in concrete.outputs],
        f=concrete,
        executor_type=_ONE_THREAD,
    )
    return tf.nest.pack_sequence_as(concrete.structured_outputs, results)


class _Operation:
    """Calls a function as an operation, on the calling thread.

    TensorFlow keeps what it has made of an operation, and does not know that
    this one is its function's: it is told to forget when the function goes.
    """

    def __init__(self, concrete: Any):
        """Prepares it.

        Args:
          concrete: A `ConcreteFunction`.
        """
        self._captured = list(concrete.captured_inputs)
        self._packed = _packing(concrete.structured_outputs)
        self._dtypes = [each.dtype for each in concrete.outputs]
        end = weakref.finalize(concrete, _forget_operations)
        end.atexit = False  # TensorFlow may be gone before.

    def __call__(self, concrete: Any, arguments: list[tf.Tensor]) -> Any:
        """Calls the function; returns its structured result."""
        options = context.context().function_call_options
        results = tf.raw_ops.StatefulPartitionedCall(
            args=arguments + self._captured,
            Tout=self._dtypes,
            f=concrete,
            config_proto=options.config_proto_serialized,
            executor_type=_ONE_THREAD,
        )
        return self._packed(iter(results))


def _packing(structure: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """Returns what makes such a nest of tensors.

    In a small part of the time that `tf.nest` takes, to which all containers
    but tuples, named or not, and lists are left.
    """
    if isinstance(structure, tf.Tensor):
        return next
    kind = type(structure)
    if kind not in (list, tuple) and not hasattr(kind, "_make"):
        return functools.partial(_packed_by_tensorflow, structure)
    parts = [_packing(each) for each in structure]
    make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)
    return lambda leaves: make([part(leaves) for part in parts])


def _packed_by_tensorflow(structure: Any, leaves: Iterator[tf.Tensor]) -> Any:
    count = len(tf.nest.flatten(structure, expand_composites=True))
    own = list(itertools.islice(leaves, count))
    return tf.nest.pack_sequence_as(structure, own, expand_composites=True)


def _forget_operations() -> None:
    context.context().clear_kernel_cache()


class Call:
    """A traced function with its arguments, called without ceremony."""

    def __init__(self, function: Any, arguments: Any):
        """Prepares a call.

        Args:
          function: What `concrete_function` returned.
          arguments: Its arguments, a nest of tensors and NumPy arrays.
        """
        self._function = function
        self._arguments = [
            each if isinstance(each, tf.Tensor) else tf.convert_to_tensor(each)
            for each in tf.nest.flatten(arguments)
        ]

    def __call__(self) -> Any:
        """Runs the function; returns its structured result.

        The arguments' types were fixed when the function was traced, so the
        check that `function(...)` makes of each, which takes longer than a
        small round, is left out.
        """
        with contextlib.nullcontext() if _on_call is None else _timed(_on_call):
            operation = getattr(self._function, _MARK, None)
            if operation is not None and _in_use:
                return operation(self._function, self._arguments)
            return self._function._call_flat(
                self._arguments, self._function.captured_inputs
            )


class Compiled:
    """A function of nests of tensors, traced once for each kind of call."""

    def __init__(self, function: Callable[..., Any], one_thread: bool = False):
        """Prepares the function; nothing is traced yet.

        Args:
          function: A Python function of tensors.
          one_thread: See `concrete_function`.
        """
        self._function = function
        self._one_thread = one_thread
        self._traced: dict[Any, Any] = {}

    def __call__(self, *arguments: Any, kind: Any = None) -> Any:
        """Calls it.

        Args:
          *arguments: Nests of tensors and NumPy arrays, of the shapes and
            dtypes of every call of this kind.
          kind: What the shapes, dtypes or structure hang on; None: nothing.
        """
        if kind not in self._traced:
            specs = tf.nest.map_structure(
                lambda each: tf.TensorSpec(each.shape, each.dtype), arguments
            )
            self._traced[kind] = concrete_function(
                tf.function(self._function, autograph=False),
                self._one_thread,
                *specs,
            )
        return Call(self._traced[kind], arguments)()


@contextlib.contextmanager
def _timed(on_call: OnCall) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        on_call(start, time.perf_counter())


@contextlib.contextmanager
def by_default_executor() -> Iterator[None]:
    """Has all functions run by the default executor, which profilers see."""
    global _in_use
    _in_use = False
    try:
        yield
    finally:
        _in_use = True


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


def _calls_functions(graph: Any) -> bool:
    """Returns True for conditionals, loops and calls of other functions."""
    return any(
        attribute.HasField("func") or attribute.list.func
        for operation in graph.get_operations()
        for attribute in operation.node_def.attr.values()
    )
