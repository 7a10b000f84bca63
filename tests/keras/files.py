"""Directories for tests, and disks that are full."""

from __future__ import annotations

import contextlib
import pathlib
import resource
import signal
import tempfile
from collections.abc import Iterator

from absl.testing import absltest


def directory(test: absltest.TestCase) -> pathlib.Path:
    """Returns a new directory, removed after the test."""
    return pathlib.Path(test.enter_context(tempfile.TemporaryDirectory()))


@contextlib.contextmanager
def full_disk(limit: int = 0) -> Iterator[None]:
    """Makes every write beyond `limit` bytes of a file fail, as a full disk.

    The kernel refuses the write (EFBIG), also in the middle of a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
