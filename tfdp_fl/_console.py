"""What the programs share: a quiet start, and help that is grouped.

Imports nothing of TensorFlow, so that it can be used before that is loaded.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags

_HELP = ("-h", "-help", "--help", "-?", "--?", "-helpshort", "--helpshort")
_FULL_HELP = ("--helpfull", "-helpfull")
# Lines that TensorFlow writes as it is loaded, on what it is built with and on
# GPUs that are not there. All other lines are shown.
_OF_TENSORFLOW = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\)"
    r"|[IWE]\d{4} [\d:. ]+(port|cudart_stub|cuda_\w+|cpu_feature_guard"
    r"|computation_placer)\.cc:\d+\]"
    r"|\d{4}-\d\d-\d\d [\d:.]+: [IWE] (tensorflow|external/\w+)/"
    r"|To enable the following instructions:"
)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Keeps from stderr what TensorFlow says as it is imported.

    The rest of what is written there meanwhile comes out at the end.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # There is no stderr.
        yield
        return
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            for line in held.read().decode(errors="replace").splitlines(True):
                if not _OF_TENSORFLOW.match(line):
                    sys.stderr.write(line)


def load_tensorflow() -> None:
    """Imports TensorFlow, and lets it look for GPUs, in silence."""
    with quiet_start():
        import tensorflow as tf

        tf.config.list_physical_devices("GPU")


def name() -> str:
    """Returns what the program was called by: "train.py", "tfdp-fl-train"."""
    return pathlib.Path(sys.argv[0]).name


def run(
    main: Callable[[Sequence[str]], Any],
    doc: str,
    groups: Mapping[str, Sequence[str]],
    first: Sequence[str] = (),
) -> None:
    """Runs a program, or prints its help, which is no error.

    Args:
      main: Takes what is left of the command line.
      doc: What the program does.
      groups: Names of flags under each heading.
      first: The flags that `--help` shows, where `--helpfull` shows all.
    """
    asked = sys.argv[1:]
    asked = asked[: asked.index("--")] if "--" in asked else asked
    full = any(word in _FULL_HELP for word in asked)
    if full or any(word in _HELP for word in asked):
        # A reader such as `head` may close the pipe early.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if first and not full:
            groups = {"First (--helpfull shows all flags)": first}
        print(help_text(doc, groups))
        sys.exit(0)
    app.run(main)


def help_text(doc: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Returns a program's help: what it does, and its flags by group."""
    if not name().endswith(".py"):  # Installed: it has no folder scripts/.
        doc = re.sub(r"python scripts/(\w+)\.py", r"tfdp-fl-\1", doc)
    lines = [doc.strip()]
    for title, names in groups.items():
        lines += ["", f"{title}:"]
        for flag in names:
            lines += _flag_lines(flags.FLAGS[flag])
    return "\n".join(lines)


def _flag_lines(flag: Any) -> list[str]:
    kind = ""
    values = getattr(flag.parser, "enum_values", None)
    if values:
        kind = f"={'|'.join(values)}"
    elif not flag.boolean:
        word = flag.parser.syntactic_help
        kind = {"an integer": "=N", "a number": "=X"}.get(word, "=...")
    default = flag.default
    if default is None or default == [] or default == "" or default is False:
        shown = ""
    else:
        if isinstance(default, list | tuple):
            default = ",".join(map(str, default))
        shown = f" [{default}]"
    # absl puts the words before the help of some.
    text = flag.help.removeprefix(f"<{'|'.join(values or ())}>: ")
    head = f"  --{'[no]' if flag.boolean else ''}{flag.name}{kind}"
    return [
        *textwrap.wrap(head, 79, subsequent_indent=" " * 6, break_long_words=False),
        *textwrap.wrap(
            f"{text}{shown}",
            79,
            initial_indent=" " * 6,
            subsequent_indent=" " * 6,
        ),
    ]
