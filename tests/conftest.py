"""What every test run has to tidy up."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import signal
import sys

import hypothesis
import pytest

# No test depends on luck: the same examples each time.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None)
hypothesis.settings.load_profile("fixed")

# In CI two suites share the cores. Threads of OpenBLAS wait for each other
# without letting go of the core: 5 s of work took 200 s so. NumPy comes later.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

_ROOT = pathlib.Path(__file__).resolve().parent
# What only the TFF stack can run: whole folders, and files.
_OF_TFF = ("aggregators", "learning", "engine/tff_")
_TFF, _FLOWER = "tensorflow_federated", "flwr"
# Under xdist a file is one piece of work, but for the notebooks, each of which has a
# kernel of its own, and for those that share Ray.
_APART = "tests/colab/notebooks_test.py"
_WITH_RAY = (
    "tests/conformance/conformance_test.py",
    "tests/runtimes/ray_workers_test.py",
)
# What takes longest begins first, so that no core waits for it in the end.
_FIRST = (
    *_WITH_RAY,
    *("tests/colab", "tests/scripts", "tests/outside", "tests/search"),
    *("tests/keras", "tests/engine", "tests/setup_test.py", "tests/docs_test.py"),
)


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _is_tff_stack() -> bool:
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
    if _is_tff_stack() or _is_there(_TFF):
        return None
    name = module_path.relative_to(_ROOT).as_posix()
    if not name.startswith(_OF_TFF):
        return None
    return _SkippedModule.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items):
    def place(item):
        begins = (n for n, name in enumerate(_FIRST) if item.nodeid.startswith(name))
        return next(begins, len(_FIRST))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist import scheduler

    class ByFile(scheduler.LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            if file == _APART:
                return nodeid
            return "Ray" if file in _WITH_RAY else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture
def wide_cells(monkeypatch):
    """Has privacy loss distributions in wide cells: a higher epsilon, and quick."""
    from tfdp_fl.accounting import curves

    for name in ("_PLD_INTERVAL", "_PLD_COARSE_INTERVAL"):
        monkeypatch.setattr(curves, name, 1e-2)
    for name in ("_ALLOCATION_CELLS", "_ALLOCATION_COARSE_CELLS"):
        monkeypatch.setattr(curves, name, 200)


def pytest_configure(config):
    missing = [each for each in (_TFF, _FLOWER) if not _is_there(each)]
    if missing and _is_tff_stack():
        raise pytest.UsageError(
            "TensorFlow 2.14 is the stack of TFF, whose tests all run, and "
            f"{' and '.join(missing)} is not installed: make STACK=tff install"
        )


def pytest_sessionstart(session):
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    # TFF ends its worker with SIGINT and then waits for it: for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish(session, exitstatus):
    # TFF's default context starts a `worker_binary`. It ends with the context; left
    # alone it keeps the run's output open, and a pipe behind pytest waits for ever.
    tff = sys.modules.get("tensorflow_federated")
    if tff is None:
        return
    with contextlib.suppress(Exception):
        tff.backends.test.set_sync_test_cpp_execution_context()
    gc.collect()
