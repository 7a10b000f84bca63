"""What the supervisor starts ends with its parent, however that ends."""

import contextlib
import importlib.util
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

from absl.testing import absltest, parameterized

from tfdp_fl.runtimes import supervisor

_LIMIT_SECONDS = 5.0
_REPOSITORY = pathlib.Path(__file__).parents[2]


def _alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _ends(pids, seconds=_LIMIT_SECONDS) -> bool:
    """Whether all of the processes have ended within the time."""
    deadline = time.monotonic() + seconds
    while any(map(_alive, pids)):
        if time.monotonic() > deadline:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.05)
    return True


def _supervise(*command) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            supervisor.__file__,
            str(os.getpid()),
            *command,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


class SupervisorTest(parameterized.TestCase):
    def _start(self, *command):
        process = _supervise(*command)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.addCleanup(process.stdin.close)
        with process.stdout as pipe:
            return process, int(pipe.readline())

    @parameterized.named_parameters(
        ("status", "exit 3", 3), ("signal", "kill -TERM $$", 143)
    )
    def test_its_status_is_the_programs(self, script, status):
        process, _ = self._start("/bin/sh", "-c", script)
        self.assertEqual(process.wait(_LIMIT_SECONDS), status)

    @parameterized.named_parameters(
        ("closed_pipe", lambda process: process.stdin.close()),
        (
            "written_pipe",
            lambda process: os.write(process.stdin.fileno(), b"x"),
        ),
        ("sigterm", lambda process: process.terminate()),
        ("sigkill", lambda process: process.kill()),
    )
    def test_the_program_ends_by(self, end):
        process, pid = self._start("/bin/sleep", "100")
        time.sleep(0.2)
        self.assertTrue(_alive(pid))
        end(process)
        self.assertTrue(_ends([pid]))
        process.wait(_LIMIT_SECONDS)

    def test_the_thread_that_started_it_may_end(self):
        started = []
        thread = threading.Thread(
            target=lambda: started.append(self._start("/bin/sleep", "100"))
        )
        thread.start()
        thread.join()
        time.sleep(1.0)
        self.assertTrue(_alive(started[0][1]))

    def test_a_forked_child_of_the_parent_does_not_keep_it(self):
        script = f"""
            import os, subprocess, sys, time
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", {supervisor.__file__!r},
                 str(os.getpid()), "/bin/sleep", "100"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            print(int(process.stdout.readline()), flush=True)
            child = os.fork()
            if not child:
                os.close(1)
                time.sleep(100)
            print(child, flush=True)
            os.kill(os.getpid(), 9)
        """
        process = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            check=False,
        )
        pid, forked = map(int, process.stdout.split())
        self.assertTrue(_alive(forked))
        self.assertTrue(_ends([pid]))
        self.assertTrue(_alive(forked))
        os.kill(forked, signal.SIGKILL)


# One process imports TensorFlow (that takes long), and forks the parents. Each
# has a pipe as its stdout, on which it says its own and its workers' pids.
_PARENTS = """
import os, sys, time
import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from tfdp_fl.runtimes import TFFWorkers

def parent(how):
    @tff.tensorflow.computation(np.float64, np.float32)
    def until(end, shard):
        spun = tf.while_loop(
            lambda n: tf.timestamp() < end, lambda n: [n + 1], [0])
        with tf.control_dependencies(spun):
            return tf.identity(shard)

    workers = TFFWorkers(num_workers=2)
    workers.open()
    print(os.getpid(), *workers.pids, flush=True)
    if how == "exception":
        raise RuntimeError("as asked")
    workers.run_sharded(
        until,
        [np.float32(1), np.float32(2)],
        0.0 if how == "return" else time.time() + 60.0)

parents = {}
pipes = list(map(int, sys.argv[1].split(",")))
for how, pipe in zip(sys.argv[2:], pipes):
    pid = os.fork()
    if not pid:
        os.dup2(pipe, 1)
        for each in pipes:
            os.close(each)
        parent(how)
        sys.exit()
    parents[pid] = how
for pipe in pipes:
    os.close(pipe)
while parents:
    pid, status = os.wait()
    print(parents.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
"""


class OrphanTest(absltest.TestCase):
    def test_no_worker_is_left_whatever_ends_the_parent(self):
        if importlib.util.find_spec("tensorflow_federated") is None:
            self.skipTest("TensorFlow Federated is not installed.")
        # The ones whose workers are busy come first.
        statuses = {
            "SIGTERM": -signal.SIGTERM,
            "SIGKILL": -signal.SIGKILL,
            "exception": 1,
            "return": 0,
        }
        pipes = {how: os.pipe() for how in statuses}
        ends = [end for _, end in pipes.values()]
        log = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        launcher = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PARENTS,
                ",".join(map(str, ends)),
                *statuses,
            ],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=_REPOSITORY,
            pass_fds=ends,
        )
        self.addCleanup(launcher.stdout.close)
        for end in ends:
            os.close(end)
        workers = {}
        for how, (start, _) in pipes.items():
            pipe = self.enter_context(open(start))  # noqa: SIM115
            parent, *workers[how] = map(int, pipe.readline().split())
            self.assertLen(workers[how], 2)
            if how.startswith("SIG"):
                time.sleep(0.5)  # By now it is in the round.
                self.assertTrue(all(map(_alive, workers[how])))
                os.kill(parent, getattr(signal, how))
            # The end of the pipe: neither parent nor worker holds it.
            readable, _, _ = select.select([pipe], [], [], 60.0)
            self.assertTrue(readable, how)
            self.assertEmpty(pipe.read())
            self.assertTrue(_ends(workers[how]), how)
        reported = dict(line.split() for line in launcher.stdout)
        launcher.wait()
        self.assertEqual(
            {how.decode(): int(status) for how, status in reported.items()},
            statuses,
        )


if __name__ == "__main__":
    absltest.main()
