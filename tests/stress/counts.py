"""What a stress run tried, kept in a file, and the table of it.

    python -m tests.stress.counts            # the table, in Markdown

`make stress` appends a line for each promise that held, and for nothing else:
what was not run, or failed, has no line. Pieces are run at different times and
on different stacks: a row of the page stays until the same promise is counted
again on the same Python.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

# Before any test goes to another directory.
_FILE = pathlib.Path(os.environ.get("TFDP_FL_STRESS", "runs/stress.jsonl")).absolute()


def path() -> pathlib.Path:
    """Returns the file: TFDP_FL_STRESS, or runs/stress.jsonl."""
    return _FILE


def held(promise: str, tries: int, of_what: str, seconds: float) -> None:
    """Writes down that a promise held.

    Args:
      promise: A sentence.
      tries: How often it was tried.
      of_what: What was counted, as in "kills".
      seconds: How long that took.
    """
    if tries < 1:
        raise ValueError(f"tries must be positive, got {tries!r}: {promise}")
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True)
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    line = {
        "promise": promise,
        "test": test.replace("tests/stress/", ""),
        "tries": tries,
        "of_what": of_what,
        "seconds": round(seconds, 1),
        "python": ".".join(map(str, sys.version_info[:2])),
        "day": datetime.date.today().isoformat(),
    }
    with file.open("a") as opened:
        opened.write(json.dumps(line) + "\n")


def lines(file: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the last line of each promise, test and Python."""
    last = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        last[line["promise"], line["test"], line["python"]] = line
    yield from last.values()


def table(file: pathlib.Path) -> str:
    """Returns the table of a file, in Markdown.

    Promises that differ in what stands in brackets at their end are one row.
    """
    rows: dict[Any, list[dict[str, Any]]] = {}
    for line in lines(file):
        promise = line["promise"].rpartition(" (")[0] or line["promise"]
        test = line["test"].partition("::")[0]
        key = promise, test, line["of_what"], line["python"]
        rows.setdefault(key, []).append(line)
    text = [
        "| promise | test | tried | Python | seconds |",
        "|---|---|---|---|---|",
    ]
    for (promise, test, of_what, python), members in rows.items():
        kinds = [line["promise"][len(promise) + 2 : -1] for line in members]
        among = ", ".join(dict.fromkeys(kind for kind in kinds if kind))
        tries = sum(line["tries"] for line in members)
        seconds = sum(line["seconds"] for line in members)
        text.append(
            f"| {promise}{f' ({among})' if among else ''} | `{test}` | "
            f"{tries} {of_what} | {python} | {seconds:.0f} |"
        )
    return "\n".join(text)


if __name__ == "__main__":
    print(table(path()))
