"""Directories that cannot be written, for tests."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import tempfile
import unittest
from collections.abc import Iterator

_NOBODY = 65534


def directory(test: unittest.TestCase) -> pathlib.Path:
    """Returns a new directory, removed after the test, that all may read."""
    temporary = tempfile.TemporaryDirectory()
    test.addCleanup(temporary.cleanup)
    path = pathlib.Path(temporary.name)
    path.chmod(0o755)
    return path


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


@contextlib.contextmanager
def read_only(directory: pathlib.Path) -> Iterator[None]:
    """Takes away the right to write to a directory, also from root."""
    mode = directory.stat().st_mode
    directory.chmod(0o555)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if as_root:
            os.seteuid(0)
        directory.chmod(mode)
