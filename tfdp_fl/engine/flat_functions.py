"""Compiled functions that run on one thread, where that is the faster way.

Small operations one after the other cost more to hand from thread to thread
than to compute: what one core has just written, the other has to fetch, and
a thread that waits has to be woken up. TensorFlow's single-threaded executor
runs a function's operations on the thread that it starts on.

It runs a conditional or a loop as a call that waits for another thread, so
functions that have any are left to the default executor: all threads could
be waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context

_ONE_THREAD = "SINGLE_THREADED_EXECUTOR"
_MARK = "_tfdp_fl_one_thread"

_in_use = True


def concrete_function(function: Any, one_thread: bool, *arguments: Any) -> Any:
    """Traces a function, to be called inside `executor`.

    Args:
      function: A `tf.function` that was not traced yet.
      one_thread: Whether one thread is wanted.
      *arguments: Its arguments, or their specs.

    Returns:
      A `ConcreteFunction`.
    """
    traced = function.get_concrete_function(*arguments)
    if one_thread and not _calls_functions(traced.graph):
        setattr(traced, _MARK, True)
    return traced


def executor(function: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a traced function runs as it was meant to."""
    if _in_use and getattr(function, _MARK, False):
        return context.function_executor_type(_ONE_THREAD)
    return contextlib.nullcontext()


@contextlib.contextmanager
def by_default_executor() -> Iterator[None]:
    """Has all functions run by the default executor, which profilers see."""
    global _in_use
    _in_use = False
    try:
        yield
    finally:
        _in_use = True


def _calls_functions(graph: Any) -> bool:
    """Returns True for conditionals, loops and calls of other functions."""
    return any(
        attribute.HasField("func") or attribute.list.func
        for operation in graph.get_operations()
        for attribute in operation.node_def.attr.values()
    )
