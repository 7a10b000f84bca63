"""The thread that reads and draws for the coming rounds while one trains."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Iterator
from typing import Any


class BackgroundThread:
    """One thread, which works while others compute."""

    def __init__(self) -> None:
        """Starts nothing."""
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._expected: Callable[[], Any] | None = None

    def start(self) -> None:
        """Takes work from now on."""
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def submit(self, function: Callable[[], Any]) -> concurrent.futures.Future:
        """Has a function called, after all that was asked for before.

        Raises:
          RuntimeError: It was closed, or never started.
        """
        if self._pool is None:
            raise RuntimeError("The thread takes no work.")
        return self._pool.submit(function)

    def expect(self, function: Callable[[], Any]) -> None:
        """Has a function called beside the next `computing`.

        Args:
          function: Leaves nothing half done if it raises: nobody is told.
        """
        self._expected = function

    @contextlib.contextmanager
    def computing(self, at_once: bool = True) -> Iterator[Callable[[], None]]:
        """Calls what is expected while the block computes.

        Whatever runs after the block runs after it, too.

        Args:
          at_once: Whether from the block's beginning on.

        Yields:
          What has it called from then on, where it was not called before. It
          is not called at all if nobody calls this.
        """
        expected, self._expected = self._expected, None
        functions = [] if expected is None else [expected]
        futures = []

        def begin() -> None:
            while functions:
                self.start()
                futures.append(self.submit(functions.pop()))

        if at_once:
            begin()
        try:
            yield begin
        finally:
            functions.clear()  # An interrupt may have left who calls `begin`.
            concurrent.futures.wait(futures)

    def close(self) -> None:
        """Ends the thread, and forgets what was expected."""
        self._expected = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
