r"""Times the engine side by side with TensorFlow Federated.

    python research/benchmark.py                     # everything, an hour
    python research/benchmark.py --rows=tff,machine  # some rows, others kept
    python research/benchmark.py --profile=cnn       # where a round's time goes
    python research/benchmark.py --resume            # go on after a break

Each side runs in a process of its own, the sides take turns, and what counts
are medians after warm-up, as ratios. Nothing else should run on the machine.
Rows are stored in the JSON file as soon as they are measured; the tables in
the Markdown page, between its comments, and the images beside it are made of
that file. `--rows=` (nothing) makes them anew without measuring.
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

from research.benchmarking import machine, plots, report, results, verdicts
from research.benchmarking import rows as rows_lib
from tfdp_fl.experiments import plots as run_plots

_ROOT = pathlib.Path(__file__).resolve().parents[1]

_PAGE = _ROOT / "docs" / "benchmarks.md"
_DATA = os.environ.get("TFDP_FL_DATA", str(_ROOT.parent / "shared" / "data"))
_BUSY = 0.5  # Load per core above which figures are in doubt.


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
        "--profile",
        help="Only find out where the time of a round goes, of these workloads (all).",
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
        "--output", type=pathlib.Path, default=_PAGE, help="The Markdown page."
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        help="What was measured; the page's name with .json unless given.",
    )
    parser.add_argument(
        "--data",
        default=_DATA,
        help="The folder of mnist.npz; random images of that size without it.",
    )
    parser.add_argument(
        "--current_python",
        default=str(_ROOT / ".venv-current" / "bin" / "python"),
        help="The Python of the current stack, for the rows that compare it "
        "with this one (make STACK=current install makes it).",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what the arguments ask for, and writes the page."""
    arguments = _parser().parse_args(argv)
    names = arguments.rows.split(",")
    if arguments.profile is not None:
        names = [
            "profile" if name == "all" else f"profile_{name}"
            for name in arguments.profile.split(",")
        ]
    page = arguments.output
    store_path = arguments.json or page.with_suffix(".json")
    try:
        run_plots.pyplot()  # Missed before anything is measured.
        selected = rows_lib.select(names)
        store = results.Results(store_path)
    except (ImportError, ValueError) as error:
        sys.exit(f"benchmark.py: {error}")
    context = rows_lib.Context(
        quick=arguments.quick,
        data_folder=arguments.data,
        current_python=arguments.current_python,
        say=_say,
    )
    failed = _measure(selected, store, page, context, arguments.resume)
    _publish(store, page)
    for verdict in verdicts.all_verdicts(store):
        mark = "holds" if verdict.holds else "MISSED"
        print(f"{mark:7s} {verdict.what}: {verdict.figure} ({verdict.bar})")
    print(f"\nWritten: {page}, {store_path}")
    if failed:
        sys.exit(f"benchmark.py: failed: {', '.join(failed)}")


def _say(line: str) -> None:
    print(f"{'':10s}{line}", flush=True)


def _measure(
    selected: Sequence[rows_lib.Row],
    store: results.Results,
    page: pathlib.Path,
    context: rows_lib.Context,
    resume: bool = False,
) -> list[str]:
    """Measures the rows; returns the names of those that failed."""
    begin = time.monotonic()
    failed = []
    if selected and machine.load() > _BUSY * machine.cores():
        print(
            f"The load average is {machine.load():.1f}: something else runs "
            "here, and figures are in doubt.",
            flush=True,
        )
    for number, row in enumerate(selected, 1):
        place = f"[{number}/{len(selected)}]"
        if resume and store.is_current(row.name, context.quick):
            print(f"{place:9s} {row.name}: measured before", flush=True)
            continue
        minutes = (time.monotonic() - begin) / 60
        print(f"{place:9s} {row.title} ({minutes:.1f} min)", flush=True)
        start, load = time.monotonic(), machine.load()
        outcome: dict = {}
        try:
            outcome["result"] = row.measure(context)
        except Exception as error:
            traceback.print_exc()
            outcome["error"] = str(error)
            failed.append(row.name)
        outcome["seconds"] = time.monotonic() - start
        store.put(row.name, context.quick, load, **outcome)
        _publish(store, page)
    if selected:
        print(f"Measured in {(time.monotonic() - begin) / 60:.1f} minutes.\n")
    return failed


def _publish(store: results.Results, page: pathlib.Path) -> None:
    """Writes the page and its images."""
    if not store.rows:
        return
    plots.draw(store, page.parent / "images")
    text = "# Benchmarks\n"
    if page.exists():
        text = page.read_text(encoding="utf-8")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(report.fill(text, report.blocks(store)), encoding="utf-8")


if __name__ == "__main__":
    main()
