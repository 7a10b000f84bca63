"""What the benchmark measures, row by row; each returns JSON values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from research.benchmarking import machine, workloads
from research.benchmarking.processes import Side
from research.rivals import programs

Result = dict[str, Any]

# A setting of TFF that takes more than so many times the best is not pursued.
_NEAR = 1.3
# How often the sides take turns in each of several runs.
_BLOCKS_OF_A_RUN = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """How thoroughly to measure, and whom to tell.

    Attributes:
      quick: Few repetitions and short curves: to see that all of it works.
      tff_python: The interpreter of TFF's environment.
      say: Prints a line of progress.
    """

    quick: bool = False
    tff_python: str = sys.executable
    say: Callable[[str], None] = lambda line: None

    @property
    def blocks(self) -> int:
        """How often the sides take turns."""
        return 2 if self.quick else 5

    @property
    def runs(self) -> int:
        """How often the sides of a comparison are started anew."""
        return 1 if self.quick else 3

    def seconds(self, full: float) -> float:
        """Returns how long a side measures when it is its turn."""
        return full / 4 if self.quick else full


@dataclasses.dataclass(frozen=True)
class Row:
    """A unit that is measured, stored and repeated as a whole.

    Attributes:
      name: As in `--rows`.
      group: Also a name that `--rows` takes.
      title: For the progress.
      measure: Does it.
    """

    name: str
    group: str
    title: str
    measure: Callable[[Context], Result]


def summary(values: Iterable[float]) -> Result:
    """Returns the median, the quartiles and the number of repetitions."""
    values = list(values)
    low, median, high = np.percentile(values, [25, 50, 75])
    return {
        "median": float(median),
        "low": float(low),
        "high": float(high),
        "count": len(values),
    }


def alternate(
    blocks: int, sides: dict[str, Callable[[], list[float]]]
) -> dict[str, Result]:
    """Lets the sides measure in turns; returns the summary of each."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(blocks):
        for name, measure in sides.items():
            values[name] += measure()
    return {name: summary(each) for name, each in values.items()}


def in_runs(context: Context, measure: Callable[[], Result]) -> Result:
    """Measures in several runs, in each of which all sides are started anew.

    Args:
      context: What a row is measured in.
      measure: Does a run; returns a result with a "ratio".

    Returns:
      The run of the median ratio, with the "ratios" of all.
    """
    runs = [measure() for _ in range(context.runs)]
    ratios = [run["ratio"] for run in runs]
    median = runs[ratios.index(statistics.median_low(ratios))]
    return {**median, "ratios": ratios}


def _measure(side: Side, run: str, seconds: float) -> Callable[[], list[float]]:
    return lambda: side.call("measure", run=run, seconds=seconds)


def _compared(
    context: Context,
    runs: dict[str, Result],
    seconds: float,
    *,
    blocks: int = _BLOCKS_OF_A_RUN,
    apart: bool = False,
) -> Result:
    """Times two runs of ours in turns.

    Args:
      context: What a row is measured in.
      runs: By its name, what `EngineSide.add` takes for each.
      seconds: For which each measures when it is its turn.
      blocks: How often they take turns.
      apart: Whether each has a process of its own.

    Returns:
      The summary of each, the "ratio" of the second to the first, and what memory each
      took at its peak.
    """
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(Side("engine")) for _ in (runs if apart else [0])]
        sides = dict(zip(runs, opened if apart else 2 * opened, strict=True))
        peaks = {
            f"{name}_peak_bytes": sides[name].call("add", run=name, **run)["peak_bytes"]
            for name, run in runs.items()
        }
        times = alternate(
            blocks,
            {
                name: _measure(side, name, context.seconds(seconds))
                for name, side in sides.items()
            },
        )
    first, second = (times[name]["median"] for name in runs)
    context.say(f"{', '.join(runs)}: {second / first:.3f} times")
    return {**times, **peaks, "ratio": second / first}


def _tff_settings(tff: Side, context: Context) -> list[Result]:
    """Tries TFF's settings; returns each with its seconds a round.

    The second loop implementation is tried at the number of concurrent calls
    that was best for the first one, and at the others too if it comes near.
    """
    cores = machine.cores()
    calls = sorted({1, cores, 2 * cores})
    tried: list[Result] = []

    def best() -> Result:
        return min(tried, key=lambda each: each["seconds"])

    def attempt(loop: str, concurrent: int) -> float:
        setting = {"loop": loop, "concurrent_calls": concurrent}
        second = tff.call("use", **setting)["seconds"]
        more = tff.call("measure", seconds=context.seconds(1.0))
        seconds = min([second, *more])
        tried.append({**setting, "seconds": seconds})
        context.say(f"TFF {loop}, {concurrent} at once: {1e3 * seconds:.0f} ms")
        return seconds

    for concurrent in calls:
        attempt("DATASET_ITERATOR", concurrent)
    first = best()
    loop, concurrent = "DATASET_REDUCE", first["concurrent_calls"]
    if attempt(loop, concurrent) < _NEAR * first["seconds"]:
        for other in calls:
            if other != concurrent:
                attempt(loop, other)
    return tried


def _run_against_tff(
    workload: workloads.Workload, setting: Result, context: Context
) -> Result:
    """Starts both sides anew, and times them in turns."""
    with (
        Side("tff", {"workload": workload.name}, python=context.tff_python) as tff,
        Side("engine") as ours,
    ):
        first = tff.call("use", **setting)["first_seconds"]
        made = ours.call("add", run="run", workload=workload.name)
        both = alternate(
            _BLOCKS_OF_A_RUN,
            {
                "engine": _measure(ours, "run", context.seconds(2.0)),
                "tff": lambda: tff.call("measure", seconds=context.seconds(3)),
            },
        )
        return {
            **both,
            "ratio": both["tff"]["median"] / both["engine"]["median"],
            "engine_first_seconds": made["first_seconds"],
            "tff_first_seconds": first,
            "engine_peak_bytes": made["peak_bytes"],
            "tff_peak_bytes": tff.call("peak_bytes"),
        }


def compare_with_tff(workload: workloads.Workload, context: Context) -> Result:
    """Times a workload here and in TFF, at the settings that suit TFF best."""
    with Side("tff", {"workload": workload.name}, python=context.tff_python) as tff:
        tried = _tff_settings(tff, context)
    chosen = min(tried, key=lambda each: each["seconds"])
    setting = {k: v for k, v in chosen.items() if k != "seconds"}
    found = in_runs(context, partial(_run_against_tff, workload, setting, context))
    context.say(
        f"tfdp_fl {1e3 * found['engine']['median']:.1f} ms, TFF "
        f"{1e3 * found['tff']['median']:.0f} ms: {found['ratio']:.1f} times"
    )
    return {**found, "tried": tried, "chosen": setting}


def sharded(context: Context) -> Result:
    """Compares a cohort on Ray workers, which read the data, with one here."""
    workers, found = max(2, machine.cores()), {}
    for name in ("mlp_small", "mlp", "mlp_batch60"):
        here = {"workload": name}
        runs = {"here": here, "there": {**here, "workers": workers}}
        found[name] = in_runs(
            context, partial(_compared, context, runs, 1.5, apart=True)
        )
    return {"workers": workers, "workloads": found}


def small_and_large(context: Context) -> Result:
    """Compares work that is small by what else there is with such that is large."""
    from research.benchmarking import growth

    found: Result = {}
    with Side("growth") as side:
        for name, (what, small, large, _) in growth.WORK.items():
            seconds = context.seconds(1.0)
            both = alternate(
                context.blocks,
                {
                    size: partial(
                        side.call, "measure", name=name, size=size, seconds=seconds
                    )
                    for size in (small, large)
                },
            )
            side.call("forget")
            ratio = both[large]["median"] / both[small]["median"]
            found[name] = {"what": what, "ratio": ratio, "sizes": [small, large]}
            found[name] |= {"small": both[small], "large": both[large]}
            context.say(f"{name}: {small} -> {large} {what}: {ratio:.2f} times")
    return {"work": found}


def large_models(context: Context) -> Result:
    """Measures how many copies of a large model `fit` needs beside the model."""
    found: Result = {}
    for strategy in (None, "blt:3"):
        for threads, weights in itertools.product((1, 2), (10**7, 10**8)):
            with Side("growth") as side:
                copies = side.call(
                    "copies", weights=weights, threads=threads, strategy=strategy
                )
            name = f"{strategy or 'independent'}, {threads} threads, {weights} weights"
            context.say(f"{name}: {copies:.1f} copies")
            found[name] = copies
    return found


def correlated_noise(context: Context) -> Result:
    """Compares noise that goes by three buffers with independent noise."""
    # Eight groups, see engine_side.GROUPS.
    common = {"workload": "mlp", "sampling": "cyclic"}
    common["population"] = 8 * workloads.CLIENTS_PER_ROUND
    runs = {name: {**common, "mechanism": name} for name in ("fixed", "correlated")}
    return in_runs(context, partial(_compared, context, runs, 2.0))


def embeddings(context: Context) -> Result:
    """Compares clients that train the rows that they need with whole tables."""
    found: Result = {}
    for name in workloads.EMBEDDINGS:
        runs = {
            way: {"workload": name, "whole_tables": way == "whole"}
            for way in ("rows", "whole")
        }
        found[name] = _compared(context, runs, 2.0, blocks=context.blocks, apart=True)
    return found


def rivals(context: Context) -> Result:
    """Compares the MLP's rounds with other frameworks', in turns.

    Every program is started anew each time it is its turn; settings are tried
    first, and the fastest one is measured.
    """
    work = workloads.WORKLOADS["mlp"]
    asked = {
        "units": [784, 600, 100, 10],
        "clients": work.clients,
        "examples": work.examples,
        "batch_size": work.batch_size,
        "learning_rate": workloads.LEARNING_RATE,
        "clip_norm": workloads.CLIP_NORM,
        "noise_multiplier": workloads.NOISE_MULTIPLIER,
    }
    found: Result = {}
    for name, rival in programs.RIVALS.items():
        try:
            python = programs.python(name, context.say)
            tried = {
                setting: statistics.median(
                    programs.seconds(name, python, setting, rounds=3, **asked)
                )
                for setting in rival.settings
            }
        except programs.RivalError as error:
            found[name] = {"title": rival.title, "unavailable": str(error)}
            context.say(f"{rival.title}: {error}")
            continue
        found[name] = {
            "title": rival.title,
            "python": python,
            "versions": programs.versions(name, python),
            "tried": tried,
            "setting": min(tried, key=lambda setting: tried[setting]),
            "runs": [],
        }
    here = {name: each for name, each in found.items() if "runs" in each}
    ours: list[float] = []
    with Side("engine") as side:
        side.call("add", run="run", workload=work.name)
        for _ in range(context.runs):
            ours.append(statistics.median(_measure(side, "run", context.seconds(3))()))
            for name, each in here.items():
                setting = each["setting"]
                rounds = max(3, int(context.seconds(8) / each["tried"][setting]))
                times = programs.seconds(
                    name, each["python"], setting, rounds=rounds, **asked
                )
                each["runs"].append(statistics.median(times))
    for each in here.values():
        del each["python"]
        each["ratios"] = [
            rival / own for rival, own in zip(each["runs"], ours, strict=True)
        ]
        context.say(
            f"{each['title']}: {1e3 * statistics.median(each['runs']):.0f} ms, "
            f"{statistics.median(each['ratios']):.1f} times ours"
        )
    return {"ours": ours, "rivals": found}


def _rows() -> list[Row]:
    works = workloads.WORKLOADS.values()
    return [
        *[
            Row(
                work.name,
                "tff",
                f"{work.title}: against TFF",
                partial(compare_with_tff, work),
            )
            for work in works
        ],
        Row("sharded_ray", "ray", "on Ray workers", sharded),
        Row("small_and_large", "growth", "small against large", small_and_large),
        Row("large_models", "growth", "memory of large models", large_models),
        Row(
            "correlated", "growth", "correlated noise, three buffers", correlated_noise
        ),
        Row("embeddings", "growth", "embeddings of many items", embeddings),
        Row("rivals", "rivals", "other frameworks", rivals),
    ]


ROWS: tuple[Row, ...] = tuple(_rows())


def select(names: Iterable[str]) -> list[Row]:
    """Returns the rows of these names or groups, in the benchmark's order.

    Raises:
      ValueError: There is no such row or group.
    """
    names = {name.strip() for name in names} - {""}
    known = {row.name for row in ROWS} | {row.group for row in ROWS}
    unknown = names - known - {"all"}
    if unknown:
        raise ValueError(
            f"rows must be of {', '.join(sorted(known | {'all'}))}; got "
            f"{', '.join(sorted(unknown))}."
        )
    return [
        row for row in ROWS if "all" in names or row.name in names or row.group in names
    ]
