"""What the programs of scripts/ share: a quiet start, and their help."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

_HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull")


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Captures what is written to stderr; shows it only after an error."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(stderr, captured.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)


def load_tensorflow() -> None:
    """Imports TensorFlow, hiding its messages, and lets it look for GPUs."""
    with quiet_start():
        import tensorflow as tf

        tf.config.list_physical_devices("GPU")


def name() -> str:
    """Returns the program's name as it was called: "train.py", "tfdp-fl-train"."""
    return pathlib.Path(sys.argv[0]).name


def run(main: Callable[[Sequence[str]], Any], doc: str, *modules: str) -> None:
    """Runs a program, or prints its help and exits without an error.

    Args:
      main: Takes the remaining command-line arguments.
      doc: What the program does.
      *modules: Where its flags are defined; "__main__" is that of `main`.
    """
    if not any(word in _HELP for word in sys.argv[1:]):
        app.run(main)
    # A reader such as `head` may close the pipe early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if not name().endswith(".py"):  # Installed: it has no folder scripts/.
        doc = re.sub(r"python scripts/(\w+)\.py", r"tfdp-fl-\1", doc)
    flags_by_module = flags.FLAGS.flags_by_module_dict()
    for module in (main.__module__, sys.argv[0], *modules):
        if module in flags_by_module:
            doc += "\n" + flags.FLAGS.module_help(module)
    print(doc.strip())
    sys.exit(0)
