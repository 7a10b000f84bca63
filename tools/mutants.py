"""Plants faults in copies of the tree; the tests that a fault names must go red.

    make mutants                          # Every fault of tools/mutants.txt.
    python tools/mutants.py flower ledger # Those with such a word.

A fault is a block of lines: its name, the file, the old text after "- " (it must be
there once), the new text after "+ ", and the arguments of pytest. First the tests run
on the tree as it is, where they must pass. Those that this stack cannot run (of TFF,
on the newest one) are said to be left out.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_GREEN, _RED, _NOTHING_RAN, _HANGS = 0, 1, 77, 78
_PATIENCE = 300.0  # Seconds: far more than the tests of any fault take.
# Forked from one process that has imported what takes time, and nothing of ours.
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One change that makes a guarantee false, and who has to notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


def faults(words: list[str]) -> list[Fault]:
    """Returns the faults with one of the words in a line, or all."""
    found = []
    text = (_ROOT / "tools" / "mutants.txt").read_text("utf-8")
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if not lines:
            continue
        old, new = (
            "\n".join(line[2:] for line in lines if line.startswith(sign))
            for sign in ("- ", "+ ")
        )
        if not words or any(word in block for word in words):
            found.append(Fault(lines[0], lines[1], old, new, lines[-1]))
    return found


def _pytest(folder: str, arguments: str) -> None:
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import pytest

    class Passed:
        count = 0

        def pytest_runtest_logreport(self, report):
            self.count += report.when == "call" and report.passed

    passed = Passed()
    options = ["-x", "-q", "-p", "no:cacheprovider", *shlex.split(arguments)]
    code = int(pytest.main(options, plugins=[passed]))
    nothing = code in (0, 5) and not passed.count
    os._exit(_NOTHING_RAN if nothing else code)


@functools.cache
def _outcome(folder: str, arguments: str, fault: str = "") -> int:
    """Returns how the tests end; `fault` names what is planted."""
    del fault
    process = _CONTEXT.Process(target=_pytest, args=(folder, arguments))
    process.start()
    process.join(_PATIENCE)
    if process.is_alive():
        process.kill()
        return _HANGS
    assert process.exitcode is not None  # It has ended.
    return process.exitcode


def verdict(fault: Fault, folder: str) -> str:
    """Returns "caught", or what else came of it."""
    before = _outcome(folder, fault.tests)
    if before == _NOTHING_RAN:
        return "left out: its tests do not run on this stack"
    if before != _GREEN:
        return f"BROKEN: its tests end with {before} without it"
    path = pathlib.Path(folder) / fault.file
    text = path.read_text("utf-8")
    if not fault.old or text.count(fault.old) != 1:
        return f"BROKEN: its old text is there {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new), "utf-8")
    try:
        after = _outcome(folder, fault.tests, fault.name)
    finally:
        path.write_text(text, "utf-8")
    if after in (_RED, _HANGS):
        return "caught"
    return "NOT CAUGHT" if after == _GREEN else f"BROKEN: its tests end with {after}"


def main() -> None:
    """Plants the faults that the command line names."""
    _CONTEXT.set_forkserver_preload(["tensorflow", "pytest", "hypothesis"])
    names = subprocess.check_output(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=_ROOT, text=True
    )
    paths = [name for name in names.splitlines() if os.path.isfile(name)]
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def said(fault: Fault) -> str:
        folder = folders.get()
        try:
            return verdict(fault, folder)
        finally:
            folders.put(folder)

    verdicts = []
    jobs = os.cpu_count() or 1
    with (
        tempfile.TemporaryDirectory() as parent,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        for job in range(jobs):
            folder = pathlib.Path(parent, str(job))
            for name in paths:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(_ROOT / name, folder / name)
            folders.put(str(folder))
        planted = faults(sys.argv[1:])
        for fault, each in zip(planted, pool.map(said, planted), strict=True):
            verdicts.append(each)
            print(f"{each:12} {fault.name}", flush=True)
    left_out = sum(each.startswith("left out") for each in verdicts)
    caught = verdicts.count("caught")
    print(f"{caught} of {len(verdicts)} caught, {left_out} left out")
    sys.exit(caught + left_out < len(verdicts))


if __name__ == "__main__":
    os.chdir(_ROOT)
    main()
