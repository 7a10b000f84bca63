"""What every test run has to tidy up."""

import contextlib
import gc
import signal
import sys


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
