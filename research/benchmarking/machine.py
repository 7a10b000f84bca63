"""What the machine is, and what its memory and processes say."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import platform
import re
import signal


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))


@functools.cache
def description() -> dict[str, str]:
    """Returns the processor, cores, memory and versions, in words."""
    from importlib import metadata

    model = "unknown processor"
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
        if found:
            model = found.group(1).strip()
        # Some names are those of several generations: "AMD EPYC" alone.
        numbers = [
            f"{what.split()[-1]} {number}"
            for what in ("cpu family", "model")
            for number in re.findall(rf"^{what}\s*:\s*(\d+)$", text, re.M)[:1]
        ]
        if numbers:
            model += f", {' '.join(numbers)}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = []
    for package in ("tensorflow", "tensorflow-federated", "keras"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return {
        "processor": model,
        "cores": str(cores()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "software": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


def memory_bytes(pid: int | str = "self", field: str = "VmRSS") -> int:
    """Returns a process's resident memory; "VmHWM" is its peak.

    Raises:
      OSError: There is no such process.
    """
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    return 1024 * int(found.group(1)) if found else 0


def children() -> set[int]:
    """Returns the ids of this process's living descendants."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = pathlib.Path(f"/proc/{entry}/stat").read_text()
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    ahead = [os.getpid()]
    while ahead:
        parent = ahead.pop()
        own = {child for child, p in parents.items() if p == parent} - found
        found |= own
        ahead += own
    return found


def end(pids: set[int]) -> None:
    """Ends processes by their ids."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
