"""The child's end of `processes.Side`: makes an object, calls its methods."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from research.benchmarking import machine


def make(kind: str, options: dict[str, Any]) -> Any:
    """Returns the object of a side; imports what this one needs, no more."""
    if kind == "engine":
        from research.benchmarking import engine_side

        return engine_side.EngineSide(**options)
    if kind == "tff":
        from research.benchmarking import tff_side

        return tff_side.TFFSide(**options)
    if kind == "growth":
        from research.benchmarking import growth

        return growth.GrowthSide(**options)
    raise ValueError(f"kind must be 'engine', 'tff' or 'growth', got {kind!r}.")


def serve(kind: str, options: dict[str, Any]) -> None:
    """Answers questions from standard input until it ends."""
    # What is started from here must neither hold nor write to these.
    answers = os.fdopen(os.dup(1), "w")
    questions = os.fdopen(os.dup(0))
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    target = failure = None
    try:
        target = make(kind, options)
    except Exception:
        failure = traceback.format_exc()
    for line in questions:
        question = json.loads(line)
        answer: dict[str, Any] = {"error": failure}
        if target is not None:
            try:
                method = getattr(target, question["method"])
                answer = {"result": method(**question["arguments"])}
            except Exception:
                answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Serves, and leaves nothing running."""
    try:
        serve(sys.argv[1], json.loads(sys.argv[2]))
    finally:
        machine.end(machine.children())
    # TFF's threads wait for a worker that is gone.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
