"""What every test run has to tidy up."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import signal
import sys

import pytest

# In CI two suites share the cores. Threads of OpenBLAS wait for each other
# without letting go of the core: 5 s of work took 200 s so. NumPy comes later.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_ROOT = pathlib.Path(__file__).resolve().parent
# What only the TFF stack can run: whole folders, and files.
_OF_TFF = ("aggregators", "learning", "engine/tff_")
_TFF, _FLOWER = "tensorflow_federated", "flwr"


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _is_tff_stack() -> bool:
    """Returns True on TensorFlow 2.14, which TFF 0.87 pins."""
    return importlib.metadata.version("tensorflow").startswith("2.14.")


class _SkippedModule(pytest.Module):
    """A module of tests that this stack has no TFF for, skipped by name."""

    def collect(self):
        pytest.skip(
            f"{self.path.relative_to(_ROOT)}: TensorFlow Federated is not "
            "installed; it runs on TensorFlow 2.14, with Python 3.10 or 3.11 "
            "(make STACK=tff pytest)",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path, parent):
    """Skips, with the reason, what is about TFF where there can be none."""
    if _is_tff_stack() or _is_there(_TFF):
        return None
    name = module_path.relative_to(_ROOT).as_posix()
    if not name.startswith(_OF_TFF):
        return None
    return _SkippedModule.from_parent(parent, path=module_path)


def pytest_configure(config):
    """Sees to it that the TFF stack skips nothing for want of a package."""
    missing = [each for each in (_TFF, _FLOWER) if not _is_there(each)]
    if missing and _is_tff_stack():
        raise pytest.UsageError(
            "TensorFlow 2.14 is the stack of TFF, whose tests all run, and "
            f"{' and '.join(missing)} is not installed: make STACK=tff install"
        )


def pytest_sessionstart(session):
    """Lets TFF end its workers although the run is in the background.

    A shell starts background jobs with SIGINT ignored, and children inherit
    that. TFF ends its worker with SIGINT and then waits for it: for ever.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session, exitstatus):
    """Ends TFF's worker process, which would outlive the test run otherwise.

    TFF's default context starts a `worker_binary`. It ends with the context;
    left alone it becomes an orphan that keeps the run's output open, and a
    pipe behind pytest waits for it for ever.
    """
    tff = sys.modules.get("tensorflow_federated")
    if tff is None:
        return
    with contextlib.suppress(Exception):
        tff.backends.test.set_sync_test_cpp_execution_context()
    gc.collect()
