"""Ends the worker of TFF's default context with the program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc


@functools.cache
def at_exit() -> None:
    """Sees to it that TFF's worker does not outlive this program.

    TFF 0.87's default context starts a `worker_binary` for its first
    computation. It listens on all interfaces, runs whatever graph it is sent
    (docs/threat_model.md), and ends when the context is deleted; while the
    interpreter goes down that fails, and the worker stays. Here the context is
    replaced before, by one without a worker.

    Called more than once it does nothing.
    """
    atexit.register(_replace_context)


def _replace_context() -> None:
    import tensorflow_federated as tff

    # Whatever goes wrong in TFF, the program is at its end.
    with contextlib.suppress(Exception):
        tff.backends.test.set_sync_test_cpp_execution_context()
        gc.collect()
