"""Runs one program and ends it as soon as the process that asked is gone.

Run as a script by `LocalWorker`, with the standard library alone:

    python supervisor.py PARENT_PID PROGRAM [ARGUMENT ...]

It writes the program's process id and a newline to its stdout, closes it, and
waits. The program is killed when the first of these happens:

*   the pipe that is this script's stdin is closed or written to. The parent
    holds the other end, and the kernel closes it however the parent ends;
*   this process is no longer the parent's child. That covers a parent whose
    end of the pipe is still open in a process that it forked;
*   SIGTERM;
*   this process itself is killed (`PR_SET_PDEATHSIG`).

`PR_SET_PDEATHSIG` alone, set by the parent, would not do: the signal is sent
when the *thread* that started the program ends, and setting it needs Python
code between fork and exec, which is unsafe in a process with threads. Here
there is one thread, and it lives as long as the process.

The exit status is the program's, or 128 + its signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_MILLISECONDS = 500


def _start(command: list[str]) -> int:
    """Forks and executes `command`, bound to this process; returns its pid."""
    supervisor = os.getpid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    pid = os.fork()
    if pid:
        return pid
    try:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == supervisor:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(2, 1)
            os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def main(parent: int, command: list[str]) -> int:
    """Runs `command` until it ends or `parent` does; returns its status."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    waker, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakeup)

    child = _start(command)
    # The reader may be gone already; then the pipe says so below.
    with contextlib.suppress(OSError):
        os.write(1, f"{child}\n".encode())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)

    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(waker, select.POLLIN)
    stopping = False
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if not stopping and os.getppid() != parent:
            stopping = True
        if stopping:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            return 128 + signal.SIGKILL
        for descriptor, _ in poll.poll(_PARENT_CHECK_MILLISECONDS):
            if descriptor == 0 or signal.SIGTERM in os.read(waker, 64):
                stopping = True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
