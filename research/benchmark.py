r"""Times the engine side by side with TensorFlow Federated.

    python research/benchmark.py                     # everything, an hour
    python research/benchmark.py --rows=tff,ray      # some rows, others kept
    python research/benchmark.py --resume            # go on after a break

Each side runs in a process of its own, the sides take turns, and what counts
are medians after warm-up, as ratios. Nothing else should run on the machine.
Rows are stored in the JSON file as soon as they are measured; the tables of the
page beside it are written from that file at the end. `--rows=` (nothing) writes
them without measuring.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Sequence

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from research.benchmarking import report, results
from research.benchmarking import rows as rows_lib
from tfdp_fl import _files

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _parser() -> argparse.ArgumentParser:
    groups = ", ".join(dict.fromkeys(row.group for row in rows_lib.ROWS))
    names = ", ".join(row.name for row in rows_lib.ROWS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rows",
        default="all",
        help="What to measure: rows or groups of rows, with commas between.\n"
        f"Groups: all, {groups}.\nRows: {names}.",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Few repetitions: to see that everything works.",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="Skip rows that were measured on this machine, of this code.",
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        default=_ROOT / "docs" / "benchmarks.json",
        help="What was measured.",
    )
    parser.add_argument(
        "--tff_python",
        default=str(_ROOT / ".venv" / "bin" / "python"),
        help="The Python of TFF's environment (make STACK=tff install makes it).",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the arguments ask for, and prints the tables."""
    arguments = _parser().parse_args(argv)
    try:
        selected = rows_lib.select(arguments.rows.split(","))
        store = results.Results(arguments.json)
    except ValueError as error:
        sys.exit(f"benchmark.py: {error}")
    context = rows_lib.Context(
        quick=arguments.quick, tff_python=arguments.tff_python, say=_say
    )
    failed = _measure(selected, store, context, arguments.resume)
    page = arguments.json.with_suffix(".md")
    if page.exists():
        _files.write_text(page, report.written(page.read_text("utf-8"), store))
        report.draw(store, arguments.json.with_suffix(".png"))
    if failed:
        sys.exit(f"benchmark.py: failed: {', '.join(failed)}")


def _say(line: str) -> None:
    print(f"{'':10s}{line}", flush=True)


def _measure(
    selected: Sequence[rows_lib.Row],
    store: results.Results,
    context: rows_lib.Context,
    resume: bool = False,
) -> list[str]:
    """Measures the rows; returns the names of those that failed."""
    begin = time.monotonic()
    failed = []
    for number, row in enumerate(selected, 1):
        place = f"[{number}/{len(selected)}]"
        if resume and store.is_current(row.name, context.quick):
            print(f"{place:9s} {row.name}: measured before", flush=True)
            continue
        minutes = (time.monotonic() - begin) / 60
        print(f"{place:9s} {row.title} ({minutes:.1f} min)", flush=True)
        start, load = time.monotonic(), os.getloadavg()[0]
        outcome: dict = {}
        try:
            outcome["result"] = row.measure(context)
        except Exception as error:
            traceback.print_exc()
            outcome["error"] = str(error)
            failed.append(row.name)
        outcome["seconds"] = time.monotonic() - start
        store.put(row.name, context.quick, load, **outcome)
    return failed


if __name__ == "__main__":
    main()
