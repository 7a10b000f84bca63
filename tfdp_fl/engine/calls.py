"""Calling compiled functions: without ceremony, and perhaps on one thread.

Small operations one after the other cost more to hand from thread to thread
than to compute: what one core has just written, the other has to fetch, and
a thread that waits has to be woken up. TensorFlow's single-threaded executor
runs a function's operations on the thread that it starts on. Such a function is
called as one operation, which costs TensorFlow less than a function does.

It runs a conditional or a loop as a call that waits for another thread, so
functions that have any are left to the default executor: all threads could
be waiting. It cannot run operations that have temporary variables.

A function may run several times at once, each on variables of its own. So
TensorFlow's memory optimizer is left out: where a sum is large, it has it made
in a temporary variable, which is found by the operation's name, in one place
for all that runs. A function that asks for such a variable itself runs alone.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.eager import cancellation, context, execute

from tfdp_fl import _interrupts
from tfdp_fl.engine import devices, graphs

# Numbers at most in what one thread computes with where it is one pass over it.
FEW_NUMBERS = 2**16

_ONE_THREAD = "SINGLE_THREADED_EXECUTOR"

# Told of a call by its start and end.
OnCall = Callable[[float, float], None]

# Held by a call of a function that has temporary variables.
_alone = threading.Lock()

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


class TracedFunction:
    """A function that was traced, and the variables that it runs on."""

    def __init__(self, function: Any, one_thread: bool, *arguments: Any):
        """Traces the function, on the variables that it reads and writes.

        Args:
          function: A `tf.function` that was not traced yet.
          one_thread: Whether one thread is wanted.
          *arguments: Its arguments, or their specs.
        """
        self.concrete = traced(function, *arguments)
        self._others: Mapping[int, tf.Tensor] = {}
        self._preparation: _Preparation | None = None
        self._runs_alone = graphs.has_temporary_variables(self.concrete.graph)
        self._operation = None
        structure = self.concrete.structured_outputs
        if (
            one_thread
            and devices.are_all_cpus()
            and suits_one_thread(self.concrete)
            and all(map(tf.is_tensor, tf.nest.flatten(structure)))
        ):
            self._operation = _Operation(self.concrete)

    def can_run_on_others(self, exchanged: Set[int]) -> bool:
        """Returns whether it may run several times at once, without a trace.

        It may not if it changes what is not exchanged, or if its operations
        keep state themselves, as those do that draw random numbers by no seed.

        Args:
          exchanged: The `id`s of the handles of the variables that each run
            has of its own.
        """
        return not graphs.keeps_state(self.concrete.graph) and (
            graphs.assigned_resources(self.concrete) <= exchanged
        )

    def on_others(self, others: Mapping[int, tf.Tensor]) -> TracedFunction:
        """Returns the same function on other variables.

        Args:
          others: Their handles, each by the `id` of the handle that it stands
            for. Any other variable stays.
        """
        if (
            self._preparation is None
            and self._operation is None
            # XLA keeps what it has compiled for all who call it.
            and not _is_compiled_by_xla(self.concrete)
        ):
            self._preparation = _Preparation(self.concrete)
        function = copy.copy(self)
        function._others = others
        if self._operation is not None:
            function._operation = copy.copy(self._operation)
            function._operation.captured = function._captured
        return function

    @property
    def _captured(self) -> list[tf.Tensor]:
        captured = self.concrete.captured_inputs
        return [self._others.get(id(each), each) for each in captured]

    def __call__(self, arguments: list[tf.Tensor]) -> Any:
        """Runs it on flat arguments; returns its structured result."""
        with _alone if self._runs_alone else contextlib.nullcontext():
            return self._run(arguments)

    def _run(self, arguments: list[tf.Tensor]) -> Any:
        if self._operation is not None and _in_use:
            return self._operation(arguments)
        captured = self._captured
        if self._preparation is not None:
            self._preparation([*arguments, *captured])
        with _with_options():
            return self.concrete._call_flat(arguments, captured)


def called_on_one_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function inside of another one that is being traced.

    Wherever that runs, this part of it runs on one thread, if it can.

    Args:
      function: A Python function of nests of tensors.
      *arguments: Its arguments.

    Returns:
      Its result, a nest of tensors.
    """
    if not _in_use:
        return function(*arguments)
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
    if not suits_one_thread(concrete):
        return function(*arguments)
    results = tf.raw_ops.StatefulPartitionedCall(
        args=[*tf.nest.flatten(arguments), *concrete.captured_inputs],
        Tout=[each.dtype for each in concrete.outputs],
        f=concrete,
        config_proto=_options().config_proto_serialized,
        executor_type=_ONE_THREAD,
    )
    if results:
        graphs.note_what_is_only_read(results[0].op, concrete)
    return tf.nest.pack_sequence_as(concrete.structured_outputs, results)


class _Operation:
    """Calls a function as an operation, on the calling thread.

    TensorFlow keeps what it has made of an operation, and does not know that
    this one is its function's: it is told to forget when the function goes.

    Attributes:
      captured: The variables' handles, and what else the function captured.
    """

    def __init__(self, concrete: Any):
        """Prepares it.

        Args:
          concrete: A `ConcreteFunction`.
        """
        self.captured = list(concrete.captured_inputs)
        self._concrete = concrete
        self._packed = _packing(concrete.structured_outputs)
        self._dtypes = [each.dtype for each in concrete.outputs]
        end = weakref.finalize(concrete, _forget_operations)
        end.atexit = False  # TensorFlow may be gone before.

    def __call__(self, arguments: list[tf.Tensor]) -> Any:
        """Calls the function; returns its structured result."""
        results = tf.raw_ops.StatefulPartitionedCall(
            args=arguments + self.captured,
            Tout=self._dtypes,
            f=self._concrete,
            config_proto=_options().config_proto_serialized,
            executor_type=_ONE_THREAD,
        )
        return self._packed(iter(results))


def suits_one_thread(concrete: Any) -> bool:
    """Returns whether one thread can run all of a `ConcreteFunction`."""
    return not (
        graphs.calls_functions(concrete.graph)
        or graphs.has_temporary_variables(concrete.graph)
    )


def _is_compiled_by_xla(concrete: Any) -> bool:
    attributes = concrete.function_def.attr
    name = "_XlaMustCompile"
    return name in attributes and attributes[name].b


class _Preparation:
    """Has TensorFlow prepare a function that several threads will call.

    Each that calls it first would have it prepared (placed, optimised) for
    itself, which takes memory, and longer than a small function runs.
    """

    def __init__(self, concrete: Any):
        """Remembers the function; nothing is prepared yet.

        Args:
          concrete: A `ConcreteFunction`.
        """
        self._concrete = concrete
        self._lock = threading.Lock()
        self._is_prepared = False

    def __call__(self, inputs: list[tf.Tensor]) -> None:
        """Returns once it is prepared, by this thread or by another one.

        Args:
          inputs: Any arguments of it, and what it captured.
        """
        with self._lock:
            if self._is_prepared:
                return
            # Cancelled before it starts: TensorFlow prepares it, and no more.
            cancelled = cancellation.CancellationManager()
            cancelled.start_cancel()
            with contextlib.suppress(tf.errors.CancelledError):
                execute.execute_with_cancellation(
                    self._concrete.name.decode(),
                    len(self._concrete.outputs),
                    inputs,
                    tuple(itertools.chain(*_options().as_attrs().items())),
                    context.context(),
                    cancelled,
                )
            self._is_prepared = True


@functools.cache
def _without_memory_optimizer(
    executor_type: str, config: bytes
) -> context.FunctionCallOptions:
    """Returns options that are otherwise the same."""
    changed = tf.compat.v1.ConfigProto.FromString(config)
    changed.graph_options.rewrite_options.memory_optimization = (
        rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    )
    return context.FunctionCallOptions(executor_type, changed)


def _options() -> context.FunctionCallOptions:
    """Returns the options of this thread's calls."""
    here = context.context().function_call_options
    return _without_memory_optimizer(
        here.executor_type or "", here.config_proto_serialized
    )


@contextlib.contextmanager
def _with_options() -> Iterator[None]:
    here = context.context()
    before = here.function_call_options
    here.function_call_options = _options()
    try:
        yield
    finally:
        here.function_call_options = before


def _packing(structure: Any) -> Callable[[Iterator[tf.Tensor]], Any]:
    """Returns what makes such a nest of tensors.

    In a small part of the time that `tf.nest` takes, to which all containers
    but tuples, named or not, lists and dictionaries in order are left.
    """
    if isinstance(structure, tf.Tensor):
        return next
    kind = type(structure)
    if kind is dict and list(structure) == sorted(structure):
        values = _packing(list(structure.values()))
        return lambda leaves: dict(zip(structure, values(leaves), strict=True))
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

    def __init__(self, function: TracedFunction, arguments: Any):
        """Prepares a call.

        Args:
          function: What is called.
          arguments: Its arguments, a nest of tensors and NumPy arrays.
        """
        self._function = function
        self._arguments = [
            each if isinstance(each, tf.Tensor) else tf.constant(each)
            for each in tf.nest.flatten(arguments)
        ]

    def __call__(self) -> Any:
        """Runs the function; returns its structured result.

        The arguments' types were fixed when the function was traced, so the
        check that `function(...)` makes of each, which takes longer than a
        small round, is left out.
        """
        with contextlib.nullcontext() if _on_call is None else _timed(_on_call):
            return self._function(self._arguments)


class Compiled:
    """A function of nests of tensors, traced once for each kind of call."""

    def __init__(self, function: Callable[..., Any], one_thread: bool = False):
        """Prepares the function; nothing is traced yet.

        Args:
          function: A Python function of tensors.
          one_thread: See `TracedFunction`.
        """
        self._function = function
        self._one_thread = one_thread
        self._traced: dict[Any, TracedFunction] = {}

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
            self._traced[kind] = TracedFunction(
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
    """Has all functions run by the default executor, which profilers see.

    And all parts of those that are traced meanwhile.
    """
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
