"""Makes the rivals' environments, and runs their programs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TAIL_CHARACTERS = 1500


class RivalError(RuntimeError):
    """A rival could not be installed, or its program failed."""


@dataclasses.dataclass(frozen=True)
class Rival:
    """A framework.

    Attributes:
      title: Its name.
      module: Its program.
      packages: Whose versions are told.
      settings: The ways of it that are tried; the fastest one counts.
    """

    title: str
    module: str
    packages: Sequence[str]
    settings: Sequence[str]


RIVALS = {
    "fedjax": Rival("FedJAX", "fedjax_program", ("fedjax", "jax"), ("jit", "pmap")),
    "pfl": Rival("pfl-research", "pfl_program", ("pfl", "torch"), ("1", "2")),
    "flower": Rival("Flower", "flower_program", ("flwr", "ray", "torch"), ("1",)),
}


def python(name: str, say: Callable[[str], None]) -> str:
    """Returns the interpreter of a rival's environment, made if need be.

    Raises:
      RivalError: It could not be made.
    """
    requirements = _ROOT / "requirements" / f"rival-{name}.in"
    folder = _ROOT / f".venv-rival-{name}"
    made = folder / ".installed"
    interpreter = str(folder / "bin" / "python")
    if made.exists() and made.read_bytes() == requirements.read_bytes():
        return interpreter
    say(f"installing {RIVALS[name].title} into {folder.name}")
    # Of TFF's environment: FedJAX and pfl-research are for Python 3.10 and 3.11.
    maker = _ROOT / ".venv" / "bin" / "python"
    for command in (
        [str(maker), "-m", "venv", "--clear", str(folder)],
        [interpreter, "-m", "pip", "install", "--quiet", "-r", str(requirements)],
    ):
        _output(command, timeout=1800)
    made.write_bytes(requirements.read_bytes())
    return interpreter


def versions(name: str, interpreter: str) -> dict[str, str]:
    """Returns the versions of what the rival is made of."""
    code = (
        "import importlib.metadata as m, json, sys; "
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )
    command = [interpreter, "-c", code, *RIVALS[name].packages]
    return json.loads(_output(command, timeout=60))


def seconds(name: str, interpreter: str, setting: str, **work: Any) -> list[float]:
    """Returns the seconds of rounds.

    Args:
      name: A key of `RIVALS`.
      interpreter: Of its environment.
      setting: One of its settings.
      **work: The rest of `work.Work`.

    Raises:
      RivalError: The program failed.
    """
    start, environment = [interpreter], {}
    if setting == "pmap":
        environment["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={os.cpu_count()}"
        )
    if name == "pfl" and setting != "1":
        start += [
            *("-m", "torch.distributed.run", "--standalone"),
            f"--nproc_per_node={setting}",
        ]
    asked = json.dumps({**work, "setting": setting})
    module = f"research.rivals.{RIVALS[name].module}"
    command = [*start, "-m", module, asked]
    output = _output(command, timeout=600, environment=environment)
    return json.loads(output.splitlines()[-1])


def _output(
    command: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> str:
    """Returns what a program prints; ends it with all that it started."""
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RivalError(f"{command} took more than {timeout:.0f} s.") from None
    finally:
        _end_group(process)
    if process.returncode:
        raise RivalError(f"{command} failed:\n{errors[-_TAIL_CHARACTERS:]}")
    return output


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
