"""Which of the bars hold, by how much, and why not where they do not."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from research.benchmarking import workloads
from research.benchmarking.results import Results

# Of performance.md.
FLOPS_SHARE = 0.85
# Times the bare products of their shapes.
OVER_PRODUCTS = {"mlp_batch60": 1.1, "cnn": 1.1, "lstm": 1.1}
PYTHON_SHARE = 0.15
# Times the round in process, and seconds on top for the smallest, whose rounds
# are as long as a message.
SHARDED_FACTOR = 1.5
SHARDED_SMALLEST = {"mlp_small": (2.0, 3e-3)}
SHARDED = {"sharded_ray": "Ray"}
POPULATION_FACTOR = 1.1
REPLICAS_FACTOR = 1.1
COPIES_PER_REPLICA = 4.0
# Of a model that is so large that what a process takes is little beside it.
LARGE_MODEL, COPIES_OF_A_LARGE_ONE = 2**26, 3.5
UNEVEN_WASTE = 0.25
IMPORT_SECONDS = 0.9
FIRST_ROUND_SECONDS = 3.0
JIT_FACTOR = 1.1
STREAMED_RATE = 0.8
CORRELATED_FACTOR = 1.15
STACK_FACTOR = 1.1
# Times as fast as in float32, where the processor has bfloat16.
BFLOAT16_TIMES = {"mlp": 1.0, "mlp_batch60": 1.8, "cnn": 1.8}
BFLOAT16_LOSS = 0.005
RIVAL_TIMES = {"fedjax": 3.0, "pfl": 10.0, "flower": 30.0}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One bar.

    Attributes:
      row: The row's name.
      what: What is asked for.
      figure: What was measured.
      bar: The bound.
      holds: Whether it does.
      reason: Why it does not, found by measurement.
    """

    row: str
    what: str
    figure: str
    bar: str
    holds: bool
    reason: str = ""


def milliseconds(seconds: float) -> str:
    """Returns "4.3 ms", three digits."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def rates(results: Results) -> dict[str, float]:
    """Returns the machine's rates by name, FLOP/s; empty if not measured."""
    found = (results.result("machine") or {}).get("rates", {})
    return {name: each["best"] for name, each in found.items()}


def floors(
    results: Results, workload: workloads.Workload
) -> tuple[float, float] | None:
    """Returns the seconds that a round's products take at the least.

    Returns:
      At the rate of a large matrix product, and at that of the workload's own
      bare products and convolutions; None if the machine was not measured.
    """
    measured = rates(results)
    if "large" not in measured or workload.name not in measured:
        return None
    flops = workload.flops_per_round
    return flops / measured["large"], flops / measured[workload.name]


def of_tff(results: Results, workload: workloads.Workload) -> Verdict | None:
    """Returns whether a round is so many times faster than TFF's."""
    result = results.result(workload.name)
    if result is None:
        return None
    holds = result["ratio"] >= workload.target
    return Verdict(
        workload.name,
        workload.title,
        f"{result['ratio']:.1f} times",
        f"at least {workload.target:g} times",
        holds,
        "" if holds else _why_not(results, workload, result),
    )


def _why_not(
    results: Results, workload: workloads.Workload, result: dict[str, Any]
) -> str:
    allowed = result["tff"]["median"] / workload.target
    taken = result["engine"]["median"]
    least = floors(results, workload)
    start = (
        f"TFF's {milliseconds(result['tff']['median'])} leave "
        f"{milliseconds(allowed)} for a round, which takes "
        f"{milliseconds(taken)}."
    )
    if least is None:
        return f"{start} The machine's own rate was not measured."
    by_large, by_own = least
    large = rates(results)["large"] / 1e9
    # Shared work can make an engine faster than its products one by one.
    own = (
        f" The bare products of its own shapes, one after another on all "
        f"cores, take {milliseconds(by_own)} by themselves."
        if by_own <= taken
        else ""
    )
    if by_large > allowed:
        most = result["tff"]["median"] / by_large
        return (
            f"{start} Out of reach on this machine: the round's "
            f"{workload.flops_per_round / 1e9:.1f} GFLOP of matrix products "
            f"take {milliseconds(by_large)} at the {large:.0f} GFLOP/s that a "
            "2048 x 2048 x 2048 product reaches on all cores. At that rate, "
            f"and with nothing else to do, it would be {most:.1f} times.{own}"
        )
    if by_own > taken:
        return (
            f"{start} The bare products of its own shapes, one after another "
            f"on all cores, took {milliseconds(by_own)}, no less than the "
            "round (clients that train side by side share some of them, and "
            "the two were not timed in turns); the "
            f"{milliseconds(by_large)} that a large product's rate would "
            "allow are what smaller products do not reach. See the profile."
        )
    rest = 100 * (1 - by_own / taken)
    return (
        f"{start}{own} The profile below says what the other {rest:.0f} % of "
        "the round are."
    )


def of_products(results: Results) -> list[Verdict]:
    """Returns whether rounds take little more than their bare products."""
    result = results.result("products")
    if result is None:
        return []
    reason = "What comes between the products, see the profile."
    rate = result["workloads"]["mlp_batch60"]
    found = [
        Verdict(
            "products",
            f"{workloads.WORKLOADS['mlp_batch60'].title}: floating-point rate",
            f"{100 / rate['ratio']:.0f} % ({rate['rate'] / 1e9:.0f} of "
            f"{rate['bare'] / 1e9:.0f} GFLOP/s)",
            f"at least {100 * FLOPS_SHARE:.0f} % of the bare products'",
            1 / rate["ratio"] >= FLOPS_SHARE,
            reason,
        )
    ]
    for name, most in OVER_PRODUCTS.items():
        work, each = workloads.WORKLOADS[name], result["workloads"][name]
        bare = work.flops_per_round / each["bare"]
        found.append(
            Verdict(
                "products",
                f"{work.title}: a round over the bare products and "
                "convolutions of its shapes",
                f"{each['ratio']:.2f} times "
                f"({milliseconds(each['engine']['median'])} against "
                f"{milliseconds(bare)}{_spread(each)})",
                f"at most {most:g} times",
                each["ratio"] <= most,
                reason,
            )
        )
    return found


def _spread(measured: Any) -> str:
    """Returns what stands behind a ratio's times: those of all runs."""
    ratios = measured.get("ratios", [])
    if len(ratios) < 2:
        return ""
    return f"; {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} runs"


def of_python(results: Results) -> Verdict | None:
    """Returns whether little of the smallest round is spent in Python."""
    result = results.result("profile_mlp_small")
    if result is None:
        return None
    share = 1 - result["inside_functions"]
    return Verdict(
        "profile_mlp_small",
        f"{workloads.WORKLOADS['mlp_small'].title}: of a round, in Python "
        "between compiled functions",
        f"{100 * share:.0f} %",
        f"at most {100 * PYTHON_SHARE:.0f} %",
        share <= PYTHON_SHARE,
        "What stands between release and training, see what is left on the "
        f"table.{_of_hooks(result)}",
    )


def _of_hooks(result: Any) -> str:
    """Returns what of a round is Keras's own Python."""
    if "hooks_seconds" not in result:
        return ""
    return (
        " Keras's hooks alone, with as many values, take "
        f"{milliseconds(result['hooks_seconds'])} of a round."
    )


def of_sharded(results: Results) -> list[Verdict]:
    """Returns whether workers keep up with the in-process engine."""
    return [
        verdict
        for row, of_whom in SHARDED.items()
        for verdict in _of_workers(row, of_whom, results.result(row))
    ]


def _of_workers(row: str, of_whom: str, result: Any) -> list[Verdict]:
    if result is None:
        return []
    if "unavailable" in result:
        return [
            Verdict(
                row,
                f"the same cohort through {of_whom} workers, data read there",
                "not measured",
                f"at most {SHARDED_FACTOR:g} times slower",
                False,
                f"Not available: {result['unavailable']}",
            )
        ]
    verdicts = []
    for name, each in result["workloads"].items():
        factor, more = SHARDED_SMALLEST.get(name, (SHARDED_FACTOR, 0.0))
        here, there = (each[side]["median"] for side in ("here", "there"))
        bar = f"at most {factor:g} times"
        if more:
            bar += f" and {milliseconds(more)}"
        verdicts.append(
            Verdict(
                row,
                f"{workloads.WORKLOADS[name].title}, through "
                f"{result['workers']} {of_whom} workers, data read there",
                f"{each['ratio']:.2f} times the in-process round "
                f"({milliseconds(there)} against {milliseconds(here)}"
                f"{_spread(each)})",
                bar,
                there <= factor * here + more,
                f"{milliseconds(there - here)} are what the messages (the "
                f"model to each worker, a sum of its size back), {of_whom}'s "
                "own part and the other processes cost a round." + _of_messages(each),
            )
        )
    return verdicts


def of_replicas(results: Results) -> list[Verdict]:
    """Returns whether a client on each core is what is fastest."""
    result = results.result("replicas")
    if result is None:
        return []
    verdicts = [
        Verdict(
            "replicas",
            f"{workloads.WORKLOADS[name].title}: a client on each of "
            f"{result['cores']} cores over one client at a time, whose "
            "operations are split over them",
            f"{each['ratio']:.2f} times "
            f"({milliseconds(each['beside']['median'])} against "
            f"{milliseconds(each['split']['median'])})",
            f"at most {REPLICAS_FACTOR:g} times",
            each["ratio"] <= REPLICAS_FACTOR,
            "`num_replicas=1` is faster on this machine.",
        )
        for name, each in result["workloads"].items()
    ]
    return verdicts


def _of_messages(measured: Any) -> str:
    if "messages" not in measured:
        return ""
    alone = milliseconds(measured["messages"]["median"])
    return f" {alone} is what the same messages take where the workers do nothing."


def of_growth(results: Results) -> list[Verdict]:
    """Returns whether rounds cost what their cohorts cost."""
    verdicts = []
    population = results.result("population")
    if population is not None:
        counts = population["populations"]
        for name, curve in population["curves"].items():
            times = [
                milliseconds(curve["times"][str(n)]["median"])
                for n in (counts[-1], counts[0])
            ]
            verdicts.append(
                Verdict(
                    "population",
                    f"{counts[-1]:,} clients against {counts[0]:,}, same "
                    f"cohort size ({name})",
                    f"{curve['ratio']:.3f} ({times[0]} against {times[1]})",
                    f"within {POPULATION_FACTOR}",
                    curve["ratio"] <= POPULATION_FACTOR,
                    "The difference is what drawing a cohort and finding its "
                    "rows in a table that no cache holds take.",
                )
            )
    memory = results.result("memory")
    if memory is not None:
        fixed = [p for p in memory["points"] if p["mechanism"] == "fixed"]
        for size in sorted({point["model_bytes"] for point in fixed}):
            points = [p for p in fixed if p["model_bytes"] == size]
            verdicts.append(_of_memory(points, size >= LARGE_MODEL))
    uneven = results.result("uneven")
    if uneven is not None:
        worst_kind = max(uneven, key=lambda kind: uneven[kind]["waste"])
        waste = uneven[worst_kind]["waste"]
        verdicts.append(
            Verdict(
                "uneven",
                "clients of 1 to 1000 examples in one cohort, over the same "
                "batches shared out evenly",
                f"{100 * waste:+.0f} % ({worst_kind} sizes)",
                f"less than {100 * UNEVEN_WASTE:.0f} %",
                waste < UNEVEN_WASTE,
                "A client who has no more steps leaves room in the products of "
                "those that train beside it.",
            )
        )
    verdicts += [
        each
        for each in (
            *_of_streaming(results),
            _of_correlated(results),
            *(_of_stack(results, work) for work in workloads.WORKLOADS.values()),
            *(_of_bfloat16(results, name) for name in BFLOAT16_TIMES),
            _of_bfloat16_accuracy(results),
            *_of_rivals(results),
            _of_import(results),
            _of_modules(results),
            _of_first_round(results),
            _of_mnist(results),
        )
        if each is not None
    ]
    return verdicts


_STREAMS = {
    "files": "a file for each client",
    "tf_data": "a `tf.data.Dataset` for each client",
}


def _of_memory(points: list[dict[str, Any]], large: bool) -> Verdict:
    """Returns the verdict on one model's memory, over cohorts."""
    most = COPIES_OF_A_LARGE_ONE if large else COPIES_PER_REPLICA
    cohorts = [point["cohort"] for point in points]
    worst = max(points, key=lambda p: p["copies_per_replica"])
    return Verdict(
        "memory",
        f"memory above the data, cohorts of {min(cohorts)} to {max(cohorts)}, "
        f"model of {worst['model_bytes'] / 2**20:.0f} MiB",
        f"{worst['copies_per_replica']:.2f} model copies per replica, the most "
        f"(cohort {worst['cohort']}, {worst['way']})",
        f"at most {most:g}",
        worst["copies_per_replica"] <= most,
        "It is bounded. By the code a replica holds its weights, its sum and a "
        "client's update; or its sum, a group's sum and the clients' factors "
        "(up to a copy); later its sum and half of what the release takes (the "
        "total and the noise): about three copies. The rest is what a process "
        "takes whatever the model (graphs, code that runs for the first time) "
        "and what TensorFlow's allocator loses between blocks, which differs "
        "from run to run.",
    )


# How a large population's file is read, by the result's name.
_POPULATIONS = {
    "population": "in a file that is opened for each",
    "population_mapped": "in a file that is mapped into memory",
}


def _of_streaming(results: Results) -> list[Verdict]:
    measured = dict(results.result("streaming") or {})
    large = {
        how: measured.pop(way) for way, how in _POPULATIONS.items() if way in measured
    }
    verdicts = [
        Verdict(
            "streaming",
            f"{workloads.WORKLOADS[name].title}, cohort of "
            f"{workloads.CLIENTS_PER_ROUND}: streamed from {_STREAMS[way]}, "
            "over in memory",
            f"{rate:.2f} of the rate ({milliseconds(each[way]['median'])} "
            f"against {milliseconds(each['memory']['median'])})",
            f"at least {STREAMED_RATE}",
            rate >= STREAMED_RATE,
            "Reading takes a core from training where every core trains.",
        )
        for name, each in measured.items()
        for way, rate in each["rates"].items()
    ]
    verdicts += [
        Verdict(
            "streaming",
            f"{each['population']} clients on disk, {how}, small MLP, cohort "
            f"of {workloads.CLIENTS_PER_ROUND}: a round over in memory, and "
            "the start with its first round",
            f"{each['ratio']:.2f} times "
            f"({milliseconds(each['disk']['median'])} against "
            f"{milliseconds(each['memory']['median'])}), "
            f"{each['start_seconds']:.1f} s",
            f"at most {1 / STREAMED_RATE:.2f} times and 5 s",
            each["ratio"] <= 1 / STREAMED_RATE and each["start_seconds"] <= 5,
            _of_reading(each),
        )
        for how, each in large.items()
    ]
    return verdicts


def _of_reading(measured: Any) -> str:
    if "reading" not in measured:  # A result of before that was measured.
        return ""
    alone = milliseconds(measured["reading"]["median"])
    return (
        f"{alone} is what the user's own function takes to read a cohort where "
        "nothing else runs, and Python's lock is its own meanwhile; the rest "
        "is packing what it returns."
    )


def _of_correlated(results: Results) -> Verdict | None:
    result = results.result("correlated")
    if result is None:
        return None
    times = [milliseconds(result[n]["median"]) for n in ("correlated", "fixed")]
    return Verdict(
        "correlated",
        f"{workloads.WORKLOADS['mlp'].title}, cohort of "
        f"{workloads.CLIENTS_PER_ROUND}: noise correlated by 3 buffers over "
        "independent noise",
        f"{result['ratio']:.3f} ({times[0]} against {times[1]}{_spread(result)})",
        f"at most {CORRELATED_FACTOR}",
        result["ratio"] <= CORRELATED_FACTOR,
        "Three more copies of the model are read and written in a round.",
    )


def _of_bfloat16(results: Results, name: str) -> Verdict | None:
    result = results.result(f"bfloat16_{name}")
    if result is None:
        return None
    times = [milliseconds(result[n]["median"]) for n in ("bfloat16", "float32")]
    bare = [result["bare"][n] / 1e9 for n in ("bfloat16", "float32")]
    wanted = BFLOAT16_TIMES[name]
    return Verdict(
        f"bfloat16_{name}",
        f"{workloads.WORKLOADS[name].title}: mixed_bfloat16 against float32",
        f"{result['ratio']:.2f} times as fast ({times[0]} against {times[1]}, "
        f"{result['ways']['bfloat16']}{_spread(result)})",
        f"at least {wanted:g} times",
        result["ratio"] >= wanted,
        f"The bare products of its shapes are {result['bare_ratio']:.2f} times "
        f"as fast ({bare[0]:.0f} against {bare[1]:.0f} GFLOP/s); what else a "
        "step does is in float32 in both, and the weights and gradients are "
        "converted in each.",
    )


def _of_bfloat16_accuracy(results: Results) -> Verdict | None:
    result = results.result("bfloat16_accuracy")
    if result is None:
        return None
    means = result["means"]
    lost = means["float32"] - means["bfloat16"]
    what = "MNIST" if result["real"] else "random images"
    return Verdict(
        "bfloat16_accuracy",
        f"{workloads.WORKLOADS['mlp_batch60'].title}: accuracy on {what} after "
        f"{result['rounds']} rounds, mixed_bfloat16 and float32 "
        f"({len(result['float32'])} seeds)",
        f"{means['bfloat16']:.4f} and {means['float32']:.4f}",
        f"within {BFLOAT16_LOSS}",
        lost <= BFLOAT16_LOSS,
        f"By seed: {_accuracies(result['bfloat16'])} and "
        f"{_accuracies(result['float32'])}.",
    )


def _accuracies(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _of_rivals(results: Results) -> list[Verdict]:
    result = results.result("rivals") or {"rivals": {}}
    verdicts = []
    for name, each in result["rivals"].items():
        figure, holds = "not measured", False
        if "ratios" in each:
            ratio = statistics.median(each["ratios"])
            figure = (
                f"{ratio:.1f} times "
                f"({milliseconds(statistics.median(each['runs']))} against "
                f"{milliseconds(statistics.median(result['ours']))})"
            )
            holds = ratio >= RIVAL_TIMES[name]
        verdicts.append(
            Verdict(
                "rivals",
                f"{workloads.WORKLOADS['mlp'].title}: {each['title']}'s round "
                "over ours",
                figure,
                f"at least {RIVAL_TIMES[name]:g} times",
                holds,
                each.get("unavailable") or _why_no_faster(results, name),
            )
        )
    return verdicts


def _why_no_faster(results: Results, rival: str) -> str:
    """Returns what stands between our round and the bar of a rival's."""
    result = results.result("rivals")
    taken = statistics.median(result["rivals"][rival]["runs"])
    allowed = milliseconds(taken / RIVAL_TIMES[rival])
    least = floors(results, workloads.WORKLOADS["mlp"])
    start = f"{milliseconds(taken)} leave {allowed} for our round."
    if least is None:
        return start
    return (
        f"{start} The bare products of its shapes take "
        f"{milliseconds(least[1])}, and {milliseconds(least[0])} at the rate "
        "of a large product."
    )


def _of_stack(results: Results, work: workloads.Workload) -> Verdict | None:
    result = results.result(f"stack_{work.name}")
    if result is None:
        return None
    times = [milliseconds(result[n]["median"]) for n in ("current", "tff")]
    versions = [result["versions"][n]["TensorFlow"] for n in ("current", "tff")]
    return Verdict(
        f"stack_{work.name}",
        f"{work.title}: TensorFlow {versions[0]} with Keras 3 over "
        f"TensorFlow {versions[1]}",
        f"{result['ratio']:.2f} ({times[0]} against {times[1]}{_spread(result)})",
        f"at most {STACK_FACTOR}",
        result["ratio"] <= STACK_FACTOR,
        "The operations are the same, of another version of TensorFlow.",
    )


def _of_import(results: Results) -> Verdict | None:
    result = results.result("import")
    if result is None:
        return None
    own, privacy = (
        result[name]["median"] for name in ("tfdp_fl", "tensorflow_privacy")
    )
    return Verdict(
        "import",
        "import tfdp_fl, over import tensorflow",
        f"{own:.2f} s (TF-Privacy alone: {privacy:.2f} s; TensorFlow: "
        f"{result['tensorflow']['median']:.2f} s)",
        f"less than {IMPORT_SECONDS} s",
        own < IMPORT_SECONDS,
        f"TF-Privacy alone takes {privacy:.2f} s here, and 0.6 s where the bar "
        f"was set; what is ours is {own - privacy:.2f} s.",
    )


def _of_modules(results: Results) -> Verdict | None:
    result = results.result("import")
    if result is None:
        return None
    return Verdict(
        "import",
        "modules of TFF, matplotlib, notebooks, Flower after import tfdp_fl",
        ", ".join(result["heavy"]) or "none",
        "none",
        not result["heavy"],
    )


def _of_first_round(results: Results) -> Verdict | None:
    found = {
        name: results.result(name)["engine_first_seconds"]
        for name in ("mlp_small", "mlp", "mlp_batch60")
        if results.result(name) is not None
    }
    if not found:
        return None
    return Verdict(
        "mlp",
        "first round of an MLP, engine made and traced",
        ", ".join(f"{seconds:.2f} s" for seconds in found.values()),
        f"less than {FIRST_ROUND_SECONDS:g} s",
        max(found.values()) < FIRST_ROUND_SECONDS,
        "Nearly all of it is tracing, in Python on one core, and TensorFlow's "
        "preparing of what was traced: it goes by the speed of one core.",
    )


def _of_mnist(results: Results) -> Verdict | None:
    result = results.result("mnist")
    if result is None:
        return None
    beside = result["index_bytes"] + result["test_bytes"]
    copies = (result["bytes"] - beside) / result["copy_bytes"]
    what = "MNIST" if result["real"] else "arrays of MNIST's size"
    return Verdict(
        "mnist",
        f"10 000 clients over {what}: copies held",
        f"{copies:.2f} ({result['bytes'] / 2**20:.0f} MiB, "
        f"{result['copy_bytes'] / 2**20:.0f} of them one copy of the training "
        f"images, {beside / 2**20:.0f} row numbers and test images)",
        "one",
        copies < 1.5,
    )


def of_jit(results: Results, workload: workloads.Workload) -> Verdict | None:
    """Returns whether jit_compile=None chose well enough."""
    result = results.result(f"jit_{workload.name}")
    if result is None:
        return None
    return Verdict(
        f"jit_{workload.name}",
        f"{workload.title}: jit_compile=None over plain",
        f"{result['ratio']:.2f}",
        f"at most {JIT_FACTOR}",
        result["ratio"] <= JIT_FACTOR,
        "It chose plain: the same program, timed twice; the difference is "
        "the machine's noise."
        if result["chosen"] == "plain"
        else f"It chose {result['chosen']}.",
    )


def all_verdicts(results: Results) -> list[Verdict]:
    """Returns every bar that was measured."""
    works = workloads.WORKLOADS.values()
    found = [
        *[of_tff(results, work) for work in works],
        *of_products(results),
        of_python(results),
        *of_replicas(results),
        *of_sharded(results),
        *of_growth(results),
        *[of_jit(results, work) for work in works],
    ]
    return [each for each in found if each is not None]
