"""Fills the tables of docs/benchmarks.md; the words around them are kept."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from research.benchmarking import profiling, verdicts, workloads
from research.benchmarking.results import Results
from research.benchmarking.verdicts import milliseconds

HEADINGS = {
    "claim": "In a sentence",
    "run": "The run",
    "tff": "Against TensorFlow Federated",
    "rivals": "Other frameworks",
    "bars": "The other bars",
    "misses": "What does not hold, and why",
    "jit": "XLA",
    "machine": "What the machine can do",
    "settings": "TFF's settings",
    "curves": "Growth",
    "profile": "Where the time goes",
}
_NOT_MEASURED = "*Not measured yet.*"
_SHOWN_OPERATIONS = 6


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others figures.

    Raises:
      ValueError: A row has another number of cells than the heading.
    """
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    if any(len(line) != len(heading) for line in lines):
        raise ValueError(f"rows must have {len(heading)} cells each.")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def _spread(times: Mapping[str, Any]) -> str:
    return milliseconds(times["median"])


def _of_runs(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.1f} to {max(ratios):.1f}" if ratios else "–"


def _claim(results: Results) -> str:
    """Returns what a reader wants to know first, in two sentences."""
    ratios = [
        result["ratio"]
        for name in workloads.WORKLOADS
        if (result := results.result(name)) is not None
    ]
    bars = verdicts.all_verdicts(results)
    held = sum(each.holds for each in bars)
    return (
        f"**A round of {workloads.CLIENTS_PER_ROUND} clients is "
        f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as in "
        "TensorFlow Federated at its best settings**, side by side on the "
        f"same machine. Of the {len(bars)} bars that are set here, {held} "
        "hold; those that do not are listed below, each with its reason."
    )


def _run(results: Results) -> str:
    rows = results.rows
    newest = max(rows.values(), key=lambda row: row["date"])
    taken = sum(row["seconds"] for row in rows.values())
    dates = sorted(row["date"] for row in rows.values())
    revisions = sorted({row["revision"] for row in rows.values()})
    lines = [
        f"Measured {dates[0]} to {dates[-1]}, in {taken / 60:.0f} minutes, at "
        f"commit {', '.join(revisions)}"
        + (" (+: with changes that were not committed)" * ("+" in str(revisions)))
        + ".",
        "",
        table(
            ("machine", ""),
            [(name, value) for name, value in newest["machine"].items()],
        ),
        "",
        "Load average before a row was measured: "
        f"{min(row['load'] for row in rows.values()):.1f} to "
        f"{max(row['load'] for row in rows.values()):.1f}.",
    ]
    if any(row["quick"] for row in rows.values()):
        lines += ["", "**Some rows were measured with `--quick`: not final.**"]
    if any(row["machine"] != newest["machine"] for row in rows.values()):
        lines += ["", "**Some rows were measured on another machine.**"]
    failed = [name for name, row in rows.items() if "error" in row]
    if failed:
        lines += ["", f"**Failed: {', '.join(failed)}.**"]
    return "\n".join(lines)


def _memory(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _tff(results: Results) -> str:
    rows = []
    for work in workloads.WORKLOADS.values():
        result = results.result(work.name)
        verdict = verdicts.of_tff(results, work)
        if result is None:
            continue
        least = verdicts.floors(results, work)
        rows.append(
            (
                work.title,
                _spread(result["tff"]),
                _spread(result["engine"]),
                f"**{result['ratio']:.1f}**",
                # Not in figures of before there were three.
                _of_runs(result.get("ratios", [])),
                f"{work.target:g}",
                _yes(verdict.holds),
                " / ".join(map(milliseconds, least)) if least else "–",
                f"{_memory(result['tff_peak_bytes'])} / "
                f"{_memory(result['engine_peak_bytes'])}",
            )
        )
    return table(
        (
            f"a round of {workloads.CLIENTS_PER_ROUND} clients",
            "TFF 0.87 at its best",
            "tfdp_fl",
            "times faster",
            "three runs",
            "at least",
            "holds",
            "floor",
            "peak memory, TFF / tfdp_fl",
        ),
        rows,
    )


def _rivals(results: Results) -> str:
    result = results.result("rivals")
    if result is None:
        return ""
    rows = [
        (
            "tfdp_fl",
            "–",
            milliseconds(statistics.median(result["ours"])),
            "1",
            "–",
        )
    ]
    for each in result["rivals"].values():
        versions = ", ".join(
            f"{name} {version}" for name, version in each.get("versions", {}).items()
        )
        if "ratios" not in each:
            rows.append((each["title"], versions, "not measured", "–", "–"))
            continue
        rows.append(
            (
                f"{each['title']} ({versions})",
                ", ".join(
                    f"{'**' * (setting == each['setting'])}{setting}: "
                    f"{milliseconds(seconds)}"
                    f"{'**' * (setting == each['setting'])}"
                    for setting, seconds in each["tried"].items()
                ),
                milliseconds(statistics.median(each["runs"])),
                f"**{statistics.median(each['ratios']):.1f}**",
                _of_runs(each["ratios"]),
            )
        )
    return table(
        ("framework", "settings tried", "a round", "times ours", "three runs"),
        rows,
    )


def _bars(results: Results) -> str:
    shown = [
        *verdicts.of_products(results),
        verdicts.of_python(results),
        *verdicts.of_replicas(results),
        *verdicts.of_sharded(results),
        *verdicts.of_growth(results),
    ]
    return table(
        ("what", "measured", "bar", "holds"),
        [
            (each.what, each.figure, each.bar, _yes(each.holds))
            for each in shown
            if each is not None
        ],
    )


def _misses(results: Results) -> str:
    missed = [v for v in verdicts.all_verdicts(results) if not v.holds]
    if not missed:
        return "Every bar that was measured holds."
    return "\n".join(
        f"- **{each.what}**: {each.figure}, asked for {each.bar}. {each.reason}"
        for each in missed
    )


def _jit(results: Results) -> str:
    rows = []
    for work in workloads.WORKLOADS.values():
        result = results.result(f"jit_{work.name}")
        if result is None:
            continue
        verdict = verdicts.of_jit(results, work)
        xla, first = "failed", "–"
        if "xla" in result:
            xla = _spread(result["xla"])
            first = f"{result['xla_first_seconds']:.1f} s"
        rows.append(
            (
                work.title,
                _spread(result["plain"]),
                xla,
                first,
                f"{_spread(result['auto'])} ({result['chosen']})",
                f"{result['ratio']:.2f}",
                _yes(verdict.holds),
            )
        )
    return table(
        (
            "a round",
            "False",
            "True",
            "first round with True",
            "None (its choice)",
            "None over False",
            f"at most {verdicts.JIT_FACTOR}",
        ),
        rows,
    )


def _machine(results: Results) -> str:
    measured = (results.result("machine") or {}).get("rates", {})
    titles = {"large": "2048 x 2048 x 2048"} | {
        name: work.title for name, work in workloads.WORKLOADS.items()
    }
    rates = table(
        (
            "bare products and convolutions of",
            "an operation on each core",
            "operations split over the cores",
            "of a round",
        ),
        [
            (
                titles[name],
                f"{each['beside']['median'] / 1e9:.0f} GFLOP/s",
                f"{each['split']['median'] / 1e9:.0f} GFLOP/s",
                "–"
                if name == "large"
                else f"{workloads.WORKLOADS[name].flops_per_round / 1e9:.2f} GFLOP",
            )
            for name, each in measured.items()
        ],
    )
    return "\n\n".join(filter(None, [rates, _symmetric(results)]))


def _symmetric(results: Results) -> str:
    """Returns what half of a Gram matrix would save."""
    found = results.result("gram")
    if found is None:
        return ""
    seconds = {name: milliseconds(s) for name, s in found["seconds"].items()}
    return (
        f"A Gram matrix X X^T of {found['rows']} rows of {found['columns']}, "
        f"by one thread: {seconds['whole']} all of it; {seconds['halves']} "
        "without the upper right quarter, 3/4 of the arithmetic; "
        f"{seconds['steps']} with what is needed of {found['steps']} blocks of "
        f"rows, {(found['steps'] + 1) / (2 * found['steps']):.0%} of it. "
        "Smaller products reach lower rates; the engine computes the whole."
    )


def _settings(results: Results) -> str:
    tried: dict[tuple[str, int], dict[str, float]] = collections.defaultdict(dict)
    for name in workloads.WORKLOADS:
        for each in (results.result(name) or {}).get("tried", ()):
            setting = each["loop"], each["concurrent_calls"]
            tried[setting][name] = each["seconds"]
    names = [n for n in workloads.WORKLOADS if results.result(n)]
    best = {
        name: min(times[name] for times in tried.values() if name in times)
        for name in names
    }

    def cell(seconds: float, is_best: bool) -> str:
        text = milliseconds(seconds)
        return f"**{text}**" if is_best else text

    return table(
        ("loop, `max_concurrent_computation_calls`", *names),
        [
            (
                f"`{loop}`, {calls}",
                *[
                    cell(times[name], times[name] == best[name])
                    if name in times
                    else "–"
                    for name in names
                ],
            )
            for (loop, calls), times in tried.items()
        ],
    )


def _curves(results: Results) -> str:
    parts = []
    cohort = results.result("cohort")
    if cohort is not None:
        times = cohort["times"]
        parts.append(
            table(
                ("cohort", *[str(c) for c in cohort["cohorts"]]),
                [
                    ("a round", *[_spread(each) for each in times.values()]),
                    (
                        "a client",
                        *[
                            milliseconds(each["median"] / int(size))
                            for size, each in times.items()
                        ],
                    ),
                ],
            )
        )
    population = results.result("population")
    if population is not None:
        parts.append(
            table(
                ("population", *[f"{n:,}" for n in population["populations"]]),
                [
                    (name, *[_spread(t) for t in curve["times"].values()])
                    for name, curve in population["curves"].items()
                ],
            )
        )
    sizes = results.result("model_size")
    if sizes is not None:
        parts.append(
            table(
                ("parameters", *[f"{size:.0e}" for size in sizes["sizes"]]),
                [
                    ("a round", *[_spread(t) for t in sizes["times"].values()]),
                    (
                        "GFLOP/s",
                        *[f"{r / 1e9:.0f}" for r in sizes["rates"].values()],
                    ),
                ],
            )
        )
    memory = results.result("memory")
    if memory is not None:
        parts.append(
            table(
                (
                    "mechanism, how clients train",
                    "cohort",
                    "model",
                    "copies",
                    "copies per replica",
                ),
                [
                    (
                        f"{point['mechanism']}, {point['way']}",
                        str(point["cohort"]),
                        f"{point['model_bytes'] / 2**20:.1f} MiB",
                        f"{point['copies']:.1f}",
                        f"{point['copies_per_replica']:.2f}",
                    )
                    for point in memory["points"]
                ],
            )
        )
    return "\n\n".join(parts)


def by_category(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the share of the cores' time that each kind of work takes.

    What is left of a round in which all cores were busy to the end is
    "waiting and dispatch": nothing to do, or starting operations.
    """
    shares = {name: 0.0 for name, _ in profiling.CATEGORIES}
    whole = result["cores"] * result["profiled_seconds"]
    for each in result["operations"]:
        shares[each["category"]] += each["seconds"] / whole
    shares["waiting and dispatch"] = max(0.0, 1 - sum(shares.values()))
    return shares


def _profile(results: Results) -> str:
    works = [
        work
        for work in workloads.WORKLOADS.values()
        if results.result(f"profile_{work.name}") is not None
    ]
    if not works:
        return _NOT_MEASURED
    found = {w.name: results.result(f"profile_{w.name}") for w in works}
    shares = {name: by_category(result) for name, result in found.items()}
    kinds = next(iter(shares.values()))
    parts = [
        table(
            (
                "share of the cores' time",
                *shares,
            ),
            [
                (
                    "round, with the profiler (without)",
                    *[
                        f"{milliseconds(each['profiled_seconds'])} "
                        f"({milliseconds(each['seconds'])})"
                        for each in found.values()
                    ],
                ),
                *[
                    (
                        kind,
                        *[f"{100 * each[kind]:.0f} %" for each in shares.values()],
                    )
                    for kind in kinds
                    if any(each[kind] >= 0.005 for each in shares.values())
                ],
                (
                    "of the round: in Python, between compiled functions",
                    *[
                        f"{100 * (1 - each['inside_functions']):.0f} %"
                        for each in found.values()
                    ],
                ),
            ],
        )
    ]
    for work in works:
        result = found[work.name]
        whole = result["cores"] * result["profiled_seconds"]
        parts.append(
            f"{work.title}, the longest operations:\n\n"
            + table(
                ("operation", "calls a round", "each", "share"),
                [
                    (
                        f"`{each['name']}`",
                        f"{each['count']:.0f}",
                        f"{1e6 * each['seconds'] / each['count']:.1f} µs",
                        f"{100 * each['seconds'] / whole:.0f} %",
                    )
                    for each in result["operations"][:_SHOWN_OPERATIONS]
                ],
            )
        )
    return "\n\n".join(parts)


_NEEDED = {
    "claim": list(workloads.WORKLOADS),
    "tff": list(workloads.WORKLOADS),
    "machine": ["machine"],
    "rivals": ["rivals"],
    "settings": list(workloads.WORKLOADS),
    "jit": [f"jit_{name}" for name in workloads.WORKLOADS],
}


def blocks(results: Results) -> dict[str, str]:
    """Returns the text of every block by name."""
    makers = {
        "claim": _claim,
        "run": _run,
        "tff": _tff,
        "rivals": _rivals,
        "bars": _bars,
        "misses": _misses,
        "jit": _jit,
        "machine": _machine,
        "settings": _settings,
        "curves": _curves,
        "profile": _profile,
    }
    found = {}
    for name, make in makers.items():
        needed = _NEEDED.get(name)
        measured = (
            any(results.result(row) for row in needed) if needed else bool(results.rows)
        )
        text = make(results) if measured else ""
        found[name] = text or _NOT_MEASURED
    return found


def fill(page: str, texts: Mapping[str, str]) -> str:
    """Returns a page with its blocks replaced.

    A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; one
    that the page does not have is added at its end.
    """
    for name, text in texts.items():
        block = f"<!-- begin {name} -->\n{text}\n<!-- end {name} -->"
        pattern = rf"<!-- begin {name} -->.*?<!-- end {name} -->"
        page, count = re.subn(
            pattern, lambda _, block=block: block, page, flags=re.DOTALL
        )
        if not count:
            page += f"\n## {HEADINGS[name]}\n\n{block}\n"
    return page
