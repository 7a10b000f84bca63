"""Interrupts that wait for the end of what must not be broken off."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def after_the_block() -> Iterator[None]:
    """Lets SIGINT and SIGTERM, where Python handles them, wait for the end.

    A second one is heard at once: whoever asks twice cannot wait. None is lost
    where the block ends by an error. In other threads than the main one, which
    hear no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Callable[..., Any]] = {}
    for each in _SIGNALS:
        handler = signal.getsignal(each)
        if callable(handler):
            handlers[each] = handler
    waiting: list[tuple[int, Any]] = []
    is_over = False

    def wait(number: int, frame: Any) -> None:
        waiting.append((number, frame))
        if is_over or len(waiting) > 1:
            handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    except BaseException:
        if len(waiting) > 1:
            waiting.clear()  # The second one was heard, and may be this.
        raise
    finally:
        heard = waiting[:1]
        # A signal from here on, with some handlers not yet in their place, is
        # heard at once by whichever it finds.
        is_over = True
        for number, handler in handlers.items():
            if signal.getsignal(number) is wait:  # Nobody set another.
                signal.signal(number, handler)
        for number, frame in heard:
            handlers[number](number, frame)
