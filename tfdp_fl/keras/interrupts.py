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

    A second one is heard at once: whoever asks twice cannot wait. In other
    threads than the main one, which hear no signals, nothing changes.
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

    def wait(number: int, frame: Any) -> None:
        if waiting:
            handlers[number](number, frame)
        waiting.append((number, frame))

    try:
        for number in handlers:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in waiting[:1]:
        handlers[number](number, frame)
