"""What the benchmark measures, row by row; each returns JSON values."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from research.benchmarking import machine, verdicts, workloads
from research.benchmarking.processes import Side, SideError
from research.rivals import programs

Result = dict[str, Any]

# Nothing of these may be imported before it is used.
HEAVY_MODULES = (
    "tensorflow_federated",
    "matplotlib",
    "IPython",
    "notebook",
    "sklearn",
    "flwr",
    "jax",
)

COHORTS = (10, 20, 50, 100, 200, 500, 1000)
POPULATIONS = (10**3, 10**4, 10**5, 10**6)
MODEL_SIZES = (1e4, 1e5, 1e6, 1e7)
# What memory is measured of: the way that clients train, the mechanism, the
# model, and how many of the cohorts. What a process takes whatever the model
# (graphs, code) weighs less with the larger one.
MEMORY_CURVES = (
    ("side by side", "fixed", "mlp_4e+06", 5),
    ("side by side", "fixed", "mlp_2e+07", 5),
    ("one by one", "fixed", "mlp_2e+07", 4),
    ("one by one", "median", "mlp_1e+06", 3),
)

# A setting of TFF that takes more than so many times the best is not pursued.
_NEAR = 1.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """How thoroughly to measure, and whom to tell.

    Attributes:
      quick: Few repetitions and short curves: to see that all of it works.
      data_folder: Where `mnist.npz` may lie.
      current_python: The interpreter of the current stack.
      say: Prints a line of progress.
    """

    quick: bool = False
    data_folder: str | None = None
    current_python: str = sys.executable
    say: Callable[[str], None] = lambda line: None

    @property
    def blocks(self) -> int:
        """How often the sides take turns."""
        return 2 if self.quick else 5

    @property
    def runs(self) -> int:
        """How often the sides of a comparison are started anew."""
        return 1 if self.quick else 3

    @property
    def blocks_of_a_run(self) -> int:
        """How often the sides take turns in each of several runs."""
        return 2

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


Sides = dict[str, Callable[[], list[float]]]


def _in_turns(blocks: int, sides: Sides) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(blocks):
        for name, measure in sides.items():
            values[name] += measure()
    return values


def alternate(blocks: int, sides: Sides) -> dict[str, Result]:
    """Lets the sides measure in turns; returns the summary of each."""
    values = _in_turns(blocks, sides)
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


def _measure(side: Side, run: str, seconds: float, **more: Any):
    return lambda: side.call("measure", run=run, seconds=seconds, **more)


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
        Side("tff", {"workload": workload.name}) as tff,
        Side("engine") as ours,
    ):
        first = tff.call("use", **setting)["first_seconds"]
        made = ours.call("add", run="run", workload=workload.name)
        both = _in_turns(
            2,
            {
                "engine": _measure(ours, "run", context.seconds(2.0)),
                "tff": lambda: tff.call("measure", seconds=context.seconds(3)),
            },
        )
        return {
            **both,
            "ratio": float(np.median(both["tff"]) / np.median(both["engine"])),
            "engine_first_seconds": made["first_seconds"],
            "tff_first_seconds": first,
            "engine_peak_bytes": made["peak_bytes"],
            "engine_memory_bytes": made["memory_bytes"],
            "tff_peak_bytes": tff.call("peak_bytes"),
            "jit_compile": made["jit_compile"],
        }


def compare_with_tff(workload: workloads.Workload, context: Context) -> Result:
    """Times a workload here and in TFF, at the settings that suit TFF best."""
    with Side("tff", {"workload": workload.name}) as tff:
        tried = _tff_settings(tff, context)
    chosen = min(tried, key=lambda each: each["seconds"])
    setting = {k: v for k, v in chosen.items() if k != "seconds"}
    runs = [_run_against_tff(workload, setting, context) for _ in range(context.runs)]
    both = {
        side: summary(itertools.chain.from_iterable(run[side] for run in runs))
        for side in ("engine", "tff")
    }
    ratios = [run["ratio"] for run in runs]
    context.say(
        f"tfdp_fl {1e3 * both['engine']['median']:.1f} ms, TFF "
        f"{1e3 * both['tff']['median']:.0f} ms: "
        f"{statistics.median(ratios):.1f} times"
    )
    return {
        **both,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "tried": tried,
        "chosen": setting,
        **{
            name: statistics.median(run[name] for run in runs)
            for name in (
                "engine_first_seconds",
                "tff_first_seconds",
                "engine_peak_bytes",
                "engine_memory_bytes",
                "tff_peak_bytes",
            )
        },
        "jit_compile": runs[0]["jit_compile"],
    }


def machine_rates(context: Context) -> Result:
    """Measures bare products on all cores, split over them and side by side."""
    names = ["large", *workloads.WORKLOADS]
    with Side("products") as beside, Side("products", {"split": True}) as split:
        for name in names:
            beside.call("add", name=name)
            split.call("add", name=name)
        rates: dict[str, Result] = {}
        for name in names:
            seconds = context.seconds(0.6)
            both = alternate(
                min(context.blocks, 3),
                {
                    "beside": lambda name=name, seconds=seconds: beside.call(
                        "measure", name=name, seconds=seconds
                    ),
                    "split": lambda name=name, seconds=seconds: split.call(
                        "measure", name=name, seconds=seconds
                    ),
                },
            )
            best = max(both["beside"]["median"], both["split"]["median"])
            rates[name] = {**both, "best": best}
            context.say(f"bare products of {name}: {best / 1e9:.0f} GFLOP/s")
    return {"rates": rates, **machine.description()}


def symmetric_products(context: Context) -> Result:
    """Compares all of a Gram matrix with its half, in blocks of rows."""
    shape = {"rows": 60, "columns": 784, "steps": 6}
    with Side("products") as side:
        found = side.call("gram", **shape)
    context.say(
        ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in found.items())
    )
    return {**shape, "seconds": found}


def over_products(context: Context) -> Result:
    """Compares rounds with the bare products of their shapes, in turns."""
    return {
        "workloads": {
            name: in_runs(context, partial(_over, name, context))
            for name in verdicts.OVER_PRODUCTS
        }
    }


def _over(name: str, context: Context) -> Result:
    """Compares a workload's rounds with its bare products, in one run."""
    work = workloads.WORKLOADS[name]
    with (
        Side("engine") as ours,
        Side("products") as beside,
        Side("products", {"split": True}) as split,
    ):
        ours.call("add", run="run", workload=name)
        for side in (beside, split):
            side.call("add", name=name)
        seconds = context.seconds(1.5)
        each = alternate(
            context.blocks_of_a_run,
            {
                "engine": _measure(ours, "run", seconds),
                "beside": partial(beside.call, "measure", name=name, seconds=seconds),
                "split": partial(split.call, "measure", name=name, seconds=seconds),
            },
        )
    each["rate"] = work.flops_per_round / each["engine"]["median"]
    each["bare"] = max(each[side]["median"] for side in ("beside", "split"))
    each["ratio"] = each["bare"] / each["rate"]
    context.say(f"{name}: {each['ratio']:.2f} times its bare products")
    return each


def jit_choice(workload: workloads.Workload, context: Context) -> Result:
    """Times jit_compile None, False and True."""
    result: Result = {}
    with Side("engine") as plain, Side("engine") as compiled:
        names = {"auto": None, "plain": False}
        made = {
            name: plain.call("add", run=name, workload=workload.name, jit_compile=value)
            for name, value in names.items()
        }
        seconds = context.seconds(1.0)
        sides = {name: _measure(plain, name, seconds) for name in names}
        try:
            xla = compiled.call(
                "add",
                timeout=150.0,
                run="xla",
                workload=workload.name,
                jit_compile=True,
                warm_up=1,
            )
            result["xla_first_seconds"] = xla["first_seconds"]
            if xla["seconds"] < 3 * made["plain"]["seconds"]:
                sides["xla"] = _measure(compiled, "xla", seconds)
            else:  # Nobody needs to know it any better.
                result["xla"] = summary([xla["seconds"]])
        except SideError as error:
            result["xla_error"] = str(error).strip().splitlines()[-1]
        result.update(alternate(context.blocks, sides))
        result["chosen"] = made["auto"]["way"]
        result["first_seconds"] = made["auto"]["first_seconds"]
    result["ratio"] = result["auto"]["median"] / result["plain"]["median"]
    return result


def replicas(context: Context) -> Result:
    """Compares a client on each core with one whose operations are split."""
    result: Result = {}
    options = {"one_thread_per_operation": False}
    for name in workloads.WORKLOADS:
        with Side("engine") as beside, Side("engine", options) as split:
            beside.call("add", run="run", workload=name)
            split.call("add", run="run", workload=name, num_replicas=1)
            seconds = context.seconds(1.5)
            each = alternate(
                min(context.blocks, 3),
                {
                    "beside": _measure(beside, "run", seconds),
                    "split": _measure(split, "run", seconds),
                },
            )
        each["ratio"] = each["beside"]["median"] / each["split"]["median"]
        context.say(f"{name}: {each['ratio']:.2f} times the round of one")
        result[name] = each
    return {"cores": machine.cores(), "workloads": result}


def sharded(context: Context) -> Result:
    """Compares a cohort on workers, which read the data, with one here.

    Args:
      context: What a row is measured in.
    """
    workers = max(2, machine.cores())
    try:
        found = {
            name: in_runs(
                context,
                partial(_sharded, name, workers, context),
            )
            for name in ("mlp_small", "mlp", "mlp_batch60")
        }
    except _UnavailableError as error:
        return {"unavailable": str(error).strip().splitlines()[-1]}
    return {"workers": workers, "workloads": found}


class _UnavailableError(Exception):
    """Workers that cannot be started, with the reason."""


def _sharded(name: str, workers: int, context: Context) -> Result:
    """Compares a workload's rounds on workers with those here, in one run."""
    # On the current stack, as Ray is there for it.
    python = context.current_python
    with (
        tempfile.TemporaryDirectory() as folder,
        Side("engine", python=python) as here,
        Side("engine", python=python) as there,
    ):
        try:
            there.call(
                "add",
                run="run",
                workload=name,
                workers=workers,
                worker_data=folder,
            )
        except SideError as error:
            raise _UnavailableError(str(error)) from error
        here.call("add", run="run", workload=name)
        seconds = context.seconds(1.5)
        both = alternate(
            context.blocks_of_a_run,
            {
                "here": _measure(here, "run", seconds),
                "there": _measure(there, "run", seconds),
            },
        )
    both["ratio"] = both["there"]["median"] / both["here"]["median"]
    context.say(f"{name}: {both['ratio']:.2f} times the round here")
    return both


def _curve(
    side: Side, runs: list[str], context: Context, seconds: float
) -> dict[str, Result]:
    return alternate(
        min(context.blocks, 3),
        {
            run: _measure(side, run, context.seconds(seconds), min_rounds=2)
            for run in runs
        },
    )


def cohort_curve(context: Context) -> Result:
    """Times rounds of growing cohorts."""
    cohorts = COHORTS[::3] if context.quick else COHORTS
    with Side("engine") as side:
        for cohort in cohorts:
            side.call("add", run=str(cohort), workload="mlp", cohort=cohort)
        times = _curve(side, [str(c) for c in cohorts], context, 0.8)
    return {"cohorts": list(cohorts), "times": times}


def population_curve(context: Context) -> Result:
    """Times rounds of the same cohort out of growing populations."""
    populations = POPULATIONS[::3] if context.quick else POPULATIONS
    result: Result = {"populations": list(populations), "curves": {}}
    for workload, sampling in (
        ("mlp_small", "fixed_size"),
        ("mlp_small", "poisson"),
        ("mlp", "fixed_size"),
    ):
        with Side("engine") as side:
            for population in populations:
                side.call(
                    "add",
                    run=str(population),
                    workload=workload,
                    sampling=sampling,
                    population=population,
                )
            times = _curve(side, [str(p) for p in populations], context, 0.8)
        largest, smallest = str(populations[-1]), str(populations[0])
        ratio = times[largest]["median"] / times[smallest]["median"]
        name = f"{workload}, {sampling}"
        result["curves"][name] = {"times": times, "ratio": ratio}
        context.say(f"{name}: {ratio:.3f}")
    return result


def model_size_curve(context: Context) -> Result:
    """Times rounds of growing models."""
    sizes = MODEL_SIZES[:2] if context.quick else MODEL_SIZES
    names = [f"mlp_{size:.0e}" for size in sizes]
    with Side("engine") as side:
        for name in names:
            side.call("add", run=name, workload=name, warm_up=2)
        times = _curve(side, names, context, 0.8)
    flops = {name: workloads.by_name(name).flops_per_round for name in names}
    return {
        "sizes": list(sizes),
        "times": times,
        "rates": {name: flops[name] / times[name]["median"] for name in names},
    }


def memory_curve(context: Context) -> Result:
    """Measures the peak memory above the data, for growing cohorts."""
    cohorts = (10, 30) if context.quick else (10, 30, 100, 300, 1000)
    result: Result = {"points": []}
    for way, mechanism, model, count in MEMORY_CURVES:
        for cohort in cohorts[:count]:
            point = _memory_point(way, mechanism, model, cohort)
            context.say(
                f"{model}, {mechanism}, {way}, cohort {cohort}: "
                f"{point['copies_per_replica']:.2f} model copies per replica"
            )
            result["points"].append(point)
    return result


def _memory_point(way: str, mechanism: str, model: str, cohort: int) -> Result:
    with Side("engine") as side:
        point = side.call(
            "memory",
            timeout=600.0,
            workload=model,
            cohort=cohort,
            mechanism=mechanism,
            side_by_side=way == "side by side",
        )
    copies = point["bytes"] / point["model_bytes"]
    return {
        **point,
        "cohort": cohort,
        "mechanism": mechanism,
        "way": way,
        "copies": copies,
        "copies_per_replica": copies / point["replicas"],
    }


def uneven_clients(context: Context) -> Result:
    """Compares clients of 1 to 1000 examples with their batches shared out."""
    result: Result = {}
    for sizes in ("geometric", "linear"):
        with Side("engine") as side:
            for run, even in (("uneven", False), ("even", True)):
                side.call("add", run=run, workload="mlp", sizes=sizes, even=even)
            seconds = context.seconds(1.5)
            both = alternate(
                context.blocks,
                {run: _measure(side, run, seconds) for run in ("uneven", "even")},
            )
        both["waste"] = both["uneven"]["median"] / both["even"]["median"] - 1
        context.say(f"{sizes}: {100 * both['waste']:.0f} % more")
        result[sizes] = both
    return result


def streaming(context: Context) -> Result:
    """Compares clients that are read when they take part with memory.

    The files were just written, so they are in the system's cache: what is
    timed is opening, parsing and packing them.
    """
    result: Result = {}
    for name in ("mlp", "mlp_batch60"):
        with tempfile.TemporaryDirectory() as folder, Side("engine") as side:
            ways: dict[str, Result] = {
                "memory": {},
                "files": {"stream": "files", "stream_folder": folder},
                "tf_data": {"stream": "tf_data"},
            }
            for way, more in ways.items():
                side.call(
                    "add",
                    run=way,
                    workload=name,
                    population=2 * workloads.CLIENTS_PER_ROUND,
                    **more,
                )
            seconds = context.seconds(1.5)
            times = alternate(
                context.blocks,
                {way: _measure(side, way, seconds) for way in ways},
            )
        rates = {
            way: times["memory"]["median"] / times[way]["median"]
            for way in ways
            if way != "memory"
        }
        context.say(
            f"{name}: "
            + ", ".join(f"{way} {rate:.2f}" for way, rate in rates.items())
            + " of the rate in memory"
        )
        result[name] = {**times, "rates": rates}
    result.update(_streamed_population(context))
    return result


def _streamed_population(context: Context) -> Result:
    """Compares a million clients on disk (4 GB) with as many in memory.

    Read from a file that is opened for each client, or is mapped into memory.
    It is written by the first `add`; the others say how long a start takes: the
    dataset, the engine, and one round.
    """
    population = POPULATIONS[1] if context.quick else POPULATIONS[-1]
    with tempfile.TemporaryDirectory() as folder, Side("engine") as side:
        ways = {
            "written": {"stream": "population", "stream_folder": folder},
            "population": {"stream": "population", "stream_folder": folder},
            "population_mapped": {
                "stream": "population_mapped",
                "stream_folder": folder,
            },
            "memory": {},
        }
        made = {
            way: side.call(
                "add",
                timeout=600.0,
                run=way,
                workload="mlp_small",
                population=population,
                **more,
            )
            for way, more in ways.items()
        }
        seconds = context.seconds(1.0)
        times = alternate(
            context.blocks,
            {way: _measure(side, way, seconds) for way in ways if way != "written"},
        )
        reading = side.call(
            "reading",
            workload="mlp_small",
            population=population,
            folder=folder,
        )
    result = {}
    for way in ("population", "population_mapped"):
        start = made[way]["constructed_seconds"] + made[way]["first_seconds"]
        ratio = times[way]["median"] / times["memory"]["median"]
        context.say(
            f"{population} clients on disk ({way}): {ratio:.2f} times the "
            f"round in memory, ready and through the first round in "
            f"{start:.1f} s"
        )
        result[way] = {
            "disk": times[way],
            "memory": times["memory"],
            "population": population,
            "ratio": ratio,
            "start_seconds": start,
        }
    result["population"]["reading"] = summary(reading)
    return result


def correlated_noise(context: Context) -> Result:
    """Compares noise that goes by three buffers with independent noise."""
    return in_runs(context, partial(_correlated_noise, context))


def _correlated_noise(context: Context) -> Result:
    """Compares them in one run."""
    with Side("engine") as side:
        for mechanism in ("fixed", "correlated"):
            side.call(
                "add",
                run=mechanism,
                workload="mlp",
                sampling="cyclic",
                # Eight groups, see engine_side.GROUPS.
                population=8 * workloads.CLIENTS_PER_ROUND,
                mechanism=mechanism,
            )
        seconds = context.seconds(2.0)
        both = alternate(
            context.blocks_of_a_run,
            {
                mechanism: _measure(side, mechanism, seconds)
                for mechanism in ("fixed", "correlated")
            },
        )
    ratio = both["correlated"]["median"] / both["fixed"]["median"]
    context.say(f"{ratio:.3f} times the round with independent noise")
    return {**both, "ratio": ratio}


def bfloat16(workload: workloads.Workload, context: Context) -> Result:
    """Compares mixed_bfloat16 with float32: rounds, and bare products."""
    return in_runs(context, partial(_bfloat16, workload, context))


def _bfloat16(workload: workloads.Workload, context: Context) -> Result:
    """Compares them in one run."""
    policies = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
    seconds = context.seconds(1.5)
    with contextlib.ExitStack() as running:
        engine = running.enter_context(Side("engine"))
        sides, ways = {}, {}
        for name, policy in policies.items():
            ways[name] = engine.call(
                "add", run=name, workload=workload.name, policy=policy
            )["way"]
            sides[name] = _measure(engine, name, seconds)
        for name, split in itertools.product(policies, (False, True)):
            products = running.enter_context(
                Side("products", {"dtype": name, "split": split})
            )
            products.call("add", name=workload.name)
            sides[f"{name} {'split' if split else 'beside'}"] = partial(
                products.call, "measure", name=workload.name, seconds=seconds
            )
        measured = alternate(context.blocks_of_a_run, sides)
    bare = {
        name: max(measured[f"{name} {how}"]["median"] for how in ("beside", "split"))
        for name in policies
    }
    ratio, most = (
        measured["float32"]["median"] / measured["bfloat16"]["median"],
        bare["bfloat16"] / bare["float32"],
    )
    context.say(f"{ratio:.2f} times as fast as in float32, bare products {most:.2f}")
    return {
        **{name: measured[name] for name in policies},
        "ways": ways,
        "ratio": ratio,
        "bare": bare,
        "bare_ratio": most,
    }


def bfloat16_accuracy(context: Context) -> Result:
    """Trains on MNIST in float32 and in mixed_bfloat16, three seeds each."""
    policies = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
    accuracies: dict[str, list[float]] = {name: [] for name in policies}
    rounds = 2 if context.quick else 30
    with _mnist(context) as (path, real), Side("engine") as side:
        for seed, (name, policy) in itertools.product(range(3), policies.items()):
            accuracies[name].append(
                side.call(
                    "mnist_accuracy",
                    path=path,
                    policy=policy,
                    seed=seed,
                    rounds=rounds,
                )
            )
    means = {name: statistics.mean(each) for name, each in accuracies.items()}
    context.say(f"accuracy {means['bfloat16']:.4f}, in float32 {means['float32']:.4f}")
    return {**accuracies, "means": means, "rounds": rounds, "real": real}


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


def stacks(workload: workloads.Workload, context: Context) -> Result:
    """Compares rounds on the current stack with rounds on TFF's."""
    return in_runs(context, partial(_stacks, workload, context))


def _stacks(workload: workloads.Workload, context: Context) -> Result:
    """Compares them in one run."""
    pythons = {"tff": sys.executable, "current": context.current_python}
    with contextlib.ExitStack() as running:
        sides = {
            name: running.enter_context(Side("engine", python=python))
            for name, python in pythons.items()
        }
        ways = {
            name: side.call("add", run="run", workload=workload.name)["way"]
            for name, side in sides.items()
        }
        both = alternate(
            context.blocks_of_a_run,
            {
                name: _measure(side, "run", context.seconds(2.0))
                for name, side in sides.items()
            },
        )
        versions = {name: side.call("versions") for name, side in sides.items()}
    ratio = both["current"]["median"] / both["tff"]["median"]
    context.say(
        f"{1e3 * both['current']['median']:.1f} ms ({ways['current']}), on "
        f"TensorFlow 2.14 {1e3 * both['tff']['median']:.1f} ms "
        f"({ways['tff']}): {ratio:.2f}"
    )
    return {**both, "ratio": ratio, "ways": ways, "versions": versions}


_IMPORT = """
import json, sys, time
start = time.perf_counter()
import tensorflow
middle = time.perf_counter()
import {package}
end = time.perf_counter()
heavy = [name for name in {heavy!r} if name in sys.modules]
print(json.dumps([middle - start, end - middle, heavy]))
"""


def import_time(context: Context) -> Result:
    """Times imports over TensorFlow's, each in a new process."""
    packages = ("tfdp_fl", "tensorflow_privacy")
    found: dict[str, list[Any]] = {name: [] for name in packages}
    root = str(pathlib.Path(__file__).resolve().parents[2])
    for _ in range(context.blocks):
        for package in packages:
            code = _IMPORT.format(package=package, heavy=HEAVY_MODULES)
            output = subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                check=True,
                text=True,
                cwd=root,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            ).stdout
            found[package].append(json.loads(output.splitlines()[-1]))
    return {
        **{
            name: summary(seconds for _, seconds, _ in each)
            for name, each in found.items()
        },
        "tensorflow": summary(
            seconds for each in found.values() for seconds, _, _ in each
        ),
        # TF-Privacy brings some of them along by itself.
        "heavy": sorted(
            set(found["tfdp_fl"][0][2]) - set(found["tensorflow_privacy"][0][2])
        ),
    }


@contextlib.contextmanager
def _mnist(context: Context):
    """Yields the path of MNIST, or of a file like it, and which it is."""
    folder = pathlib.Path(context.data_folder or ".")
    if context.data_folder and (folder / "mnist.npz").is_file():
        yield str(folder / "mnist.npz"), True
        return
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(temporary, "mnist.npz")
        arrays = {}
        for part, count in (("train", 60000), ("test", 10000)):
            arrays[f"x_{part}"] = random.integers(0, 256, (count, 28, 28), np.uint8)
            arrays[f"y_{part}"] = np.arange(count, dtype=np.uint8) % 10
        np.savez(path, **arrays)
        yield path, False


def mnist_copies(context: Context) -> Result:
    """Measures what 10 000 clients over MNIST hold."""
    with _mnist(context) as (path, real), Side("engine") as side:
        result = side.call("mnist_memory", path=path, num_clients=10_000)
    return {**result, "real": real}


def profile(workload: workloads.Workload, context: Context) -> Result:
    """Finds out where the time of a round goes."""
    with Side("engine") as side:
        made = side.call("add", run="run", workload=workload.name)
        # More than a few rounds would overflow the profiler's buffers.
        times = side.call(
            "measure",
            run="run",
            seconds=context.seconds(2.0),
            min_rounds=2,
            max_rounds=10,
        )
        profiled = side.call("profile", run="run")
    return {
        "seconds": statistics.median(times),
        "cores": machine.cores(),
        "jit_compile": made["jit_compile"],
        **profiled,
    }


def _rows() -> list[Row]:
    works = list(workloads.WORKLOADS.values())

    def bound(function: Any, work: workloads.Workload) -> Any:
        return lambda context: function(work, context)

    return [
        Row("machine", "machine", "bare products", machine_rates),
        Row("gram", "machine", "symmetric products", symmetric_products),
        *[
            Row(
                work.name,
                "tff",
                f"{work.title}: against TFF",
                bound(compare_with_tff, work),
            )
            for work in works
        ],
        Row("products", "rate", "rounds over bare products", over_products),
        Row("sharded_ray", "sharded", "on Ray workers", sharded),
        Row("replicas", "replicas", "a client on each core", replicas),
        Row("cohort", "growth", "time by cohort", cohort_curve),
        Row("population", "growth", "time by population", population_curve),
        Row("model_size", "growth", "time by model size", model_size_curve),
        Row("memory", "growth", "memory by cohort", memory_curve),
        Row("uneven", "growth", "uneven clients", uneven_clients),
        Row(
            "streaming",
            "growth",
            "clients read when they take part",
            streaming,
        ),
        Row(
            "correlated",
            "growth",
            "correlated noise, three buffers",
            correlated_noise,
        ),
        *[
            Row(
                f"bfloat16_{name}",
                "bfloat16",
                f"{workloads.WORKLOADS[name].title}: mixed_bfloat16",
                bound(bfloat16, workloads.WORKLOADS[name]),
            )
            for name in verdicts.BFLOAT16_TIMES
        ],
        Row(
            "bfloat16_accuracy",
            "bfloat16",
            "mixed_bfloat16: accuracy on MNIST",
            bfloat16_accuracy,
        ),
        Row("rivals", "rivals", "other frameworks", rivals),
        Row("import", "growth", "import time", import_time),
        *[
            Row(
                f"stack_{work.name}",
                "stacks",
                f"{work.title}: the current stack",
                bound(stacks, work),
            )
            for work in works
        ],
        Row("mnist", "growth", "10 000 clients over MNIST", mnist_copies),
        *[
            Row(
                f"jit_{work.name}",
                "jit",
                f"{work.title}: jit_compile",
                bound(jit_choice, work),
            )
            for work in works
        ],
        *[
            Row(
                f"profile_{work.name}",
                "profile",
                f"{work.title}: profile",
                bound(profile, work),
            )
            for work in works
        ],
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
