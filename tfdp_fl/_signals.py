"""Signals that wait for the end of a block, or come as another error; warnings."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# Those whose handlers raise errors: Ctrl-C, a scheduler's warnings, timers.
_NAMES = ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU", "ALRM", "VTALRM", "PROF")
_SIGNALS = [each for each in signal.Signals if each.name.removeprefix("SIG") in _NAMES]


@contextlib.contextmanager
def defer_signals(*, repeated: bool = False) -> Iterator[None]:
    """Lets signals that Python handles wait for the end.

    So nothing takes what a handler raises for an error of the block's own. A second
    one is heard at once: a user who asks twice cannot wait. None is lost where the
    block ends by an error. In other threads than the main one, which hear no signals,
    nothing changes.

    Args:
      repeated: Whether further signals wait, too; for a block that takes no time.
    """
    handlers = _handlers()
    deferred: list[tuple[int, Any]] = []
    is_over = False

    def defer(number: int, frame: Any) -> None:
        deferred.append((number, frame))
        if is_over or (len(deferred) > 1 and not repeated):
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, defer)
        yield
    except BaseException:
        if len(deferred) > 1 and not repeated:
            deferred.clear()  # The second one was heard, and may be this.
        raise
    finally:
        pending = deferred[:] if repeated else deferred[:1]
        # A signal from here on, with some handlers not yet in their place, is
        # heard at once by whichever it finds.
        is_over = True
        for number, handler in handlers.items():
            if signal.getsignal(number) is defer:  # Nobody set another.
                signal.signal(number, handler)
        for number, frame in pending:
            handlers[number](number, frame)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Raises KeyboardInterrupt where C code turned it into another error.

    Python raises it in whatever code is running. An extension that is handling its
    own error, or converting an array, may report a RuntimeError or a SystemError
    instead. Outside the main thread, which alone receives signals, it does nothing.
    """
    handlers = _handlers()
    raised: list[int] = []

    def record_interrupt(number: int, frame: Any) -> None:
        try:
            handlers[number](number, frame)
        except KeyboardInterrupt:
            raised.append(number)
            raise

    try:
        for number in handlers:
            signal.signal(number, record_interrupt)
        yield
    except (RuntimeError, SystemError) as error:
        if raised:
            raise KeyboardInterrupt from error
        raise
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is record_interrupt:  # Nobody set another.
                signal.signal(number, handler)


def _handlers() -> dict[int, Callable[..., Any]]:
    """Returns Python's handlers of signals that this thread hears."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {
        number: handler for number, handler in handlers.items() if callable(handler)
    }


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warns of what clients sent; prints the warning where warnings are errors.

    One client could otherwise end a round for all, before it is charged.
    """
    try:
        warnings.warn(message, category, stacklevel=3)
    except Warning:
        print(f"{category.__name__}: {message}", file=sys.stderr)
