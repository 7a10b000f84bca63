"""The tables of what was measured, in Markdown, and their picture."""

from __future__ import annotations

import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from research.benchmarking import workloads
from research.benchmarking.results import Results


def milliseconds(seconds: float) -> str:
    """Returns "4.3 ms", three digits."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others figures."""
    head, *lines = (f"| {' | '.join(line)} |" for line in (heading, *rows))
    return "\n".join([head, f"|---|{'---:|' * (len(heading) - 1)}", *lines])


def written(page: str, results: Results) -> str:
    """Returns a page whose blocks say what was measured.

    A block lies between `<!--measured:NAME-->` and `<!--end-->`, and NAME
    is one of `BLOCKS`.
    """

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}\n\n{BLOCKS[name](results)}\n\n{end}"

    return _BLOCK.sub(block, page)


def draw(results: Results, path: pathlib.Path) -> None:
    """Draws the rounds and the memory beside TFF's."""
    from matplotlib import figure

    measured = _beside_tff(results)[::-1]
    drawn = figure.Figure(figsize=(7.2, 2.6), layout="constrained")
    time, memory = drawn.subplots(1, 2, sharey=True)
    for side, label, offset in (("tff", "TFF 0.87", 0.2), ("engine", "tfdp_fl", -0.2)):
        places = [place + offset for place in range(len(measured))]
        color = {"tff": "#9aa5b1", "engine": "#2563eb"}[side]
        times = [1e3 * result[side]["median"] for _, result in measured]
        peaks = [result[f"{side}_peak_bytes"] / 1e6 for _, result in measured]
        time.barh(places, times, 0.38, color=color, label=label)
        memory.barh(places, peaks, 0.38, color=color)
    time.set(xscale="log", xlim=(1, None), xlabel="a round, ms (logarithmic)")
    memory.set(xlabel="memory at the peak, MB")
    names = [work.name.replace("_", " ") for work, _ in measured]
    time.set_yticks(range(len(measured)), names)
    time.legend(fontsize=8)
    drawn.savefig(path, dpi=150)


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.1f}–{max(ratios):.1f}"


def _size(size: int) -> str:
    """Returns a power of ten as one, and other numbers as they are."""
    power = len(str(size)) - 1
    return f"10{str(power).translate(_RAISED)}" if size == 10**power else str(size)


def _when(results: Results, *names: str) -> str:
    """Returns the days, commits and processors of some rows."""
    rows = [results.rows[name] for name in names if name in results.rows]

    def all_of(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    days = all_of(row["date"].split()[0] for row in rows)
    commits = all_of(row["revision"][:7] for row in rows)
    processors = all_of(row["machine"]["processor"] for row in rows)
    return f"{days}, commit {commits}, {processors}:"


def _headline(results: Results) -> str:
    ratios = [result["ratio"] for _, result in _beside_tff(results)]
    return (
        f"**A round of {workloads.CLIENTS_PER_ROUND} clients is {min(ratios):.1f} to "
        f"{max(ratios):.1f} times as fast as in TensorFlow Federated at its\n"
        "best settings**, side by side on one machine with two cores and no GPU."
    )


def _beside_tff(results: Results) -> list[tuple[workloads.Workload, dict[str, Any]]]:
    return [
        (work, result)
        for work in workloads.WORKLOADS.values()
        if (result := results.result(work.name)) is not None
    ]


def _tff(results: Results) -> str:
    rows = [
        (
            work.title.replace(" examples, batch", ","),
            milliseconds(result["tff"]["median"]),
            milliseconds(result["engine"]["median"]),
            f"**{result['ratio']:.1f}** ({_spread(result['ratios'])})",
        )
        for work, result in _beside_tff(results)
    ]
    sides = ("TFF 0.87", "tfdp_fl", "times faster (3 runs)")
    heading = ("model, examples of a client, batch", *sides)
    return f"{_when(results, *workloads.WORKLOADS)}\n\n{table(heading, rows)}"


def _rivals(results: Results) -> str:
    result = results.rows["rivals"]["result"]
    rows = [("tfdp_fl", milliseconds(statistics.median(result["ours"])), "1")]
    for rival in result["rivals"].values():
        versions = ", ".join(map(" ".join, rival.get("versions", {}).items()))
        title = f"{rival['title']} ({versions})"
        if "ratios" not in rival:
            rows.append((title, "not measured", "–"))
            continue
        ratio = f"**{statistics.median(rival['ratios']):.1f}**"
        median = milliseconds(statistics.median(rival["runs"]))
        rows.append((title, median, f"{ratio} ({_spread(rival['ratios'])})"))
    heading = ("framework", "a round", "times ours (3 runs)")
    return f"{_when(results, 'rivals')}\n\n{table(heading, rows)}"


def _ratios(results: Results) -> str:
    """Returns the rows that are one comparison each."""
    rows = [
        (f"two Ray workers / two threads: {name}", f"{result['ratio']:.2f}")
        for name, result in results.rows["sharded_ray"]["result"]["workloads"].items()
    ]
    ratio = results.rows["correlated"]["result"]["ratio"]
    rows.append(("correlated noise of three buffers / independent", f"{ratio:.2f}"))
    for name, result in results.rows["embeddings"]["result"].items():
        items = _size(int(name.removeprefix("embedding_")))
        what = f"embedding of {items} items: the rows a client needs / the whole table"
        both = (milliseconds(result[way]["median"]) for way in ("rows", "whole"))
        rows.append((what, " / ".join(both)))
    for name, copies in results.rows["large_models"]["result"].items():
        noise, threads, weights = name.split(", ")
        if weights == f"{10**8} weights":
            what = f"memory beside 10⁸ weights: {noise} noise, {threads}"
            rows.append((what.replace("1 threads", "1 thread"), f"{copies:.1f} copies"))
    when = _when(results, "sharded_ray", "correlated", "embeddings", "large_models")
    return f"{when}\n\n{table(('what', 'measured'), rows)}"


def _growth(results: Results) -> str:
    """Returns the work that was measured small and large."""
    rows = [
        (
            f"{name}: {result['what']}",
            " to ".join(map(_size, result["sizes"])),
            ", ".join(
                milliseconds(result[size]["median"]).removesuffix(" ms")
                for size in ("small", "large")
            ),
        )
        for name, result in results.rows["small_and_large"]["result"]["work"].items()
    ]
    when = _when(results, "small_and_large")
    return f"{when}\n\n{table(('what, and what grows', 'size', 'ms'), rows)}"


_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_BLOCK = re.compile(r"(<!--measured:(\w+)-->).*?(<!--end-->)", re.DOTALL)
BLOCKS: dict[str, Callable[[Results], str]] = {
    "headline": _headline,
    "tff": _tff,
    "rivals": _rivals,
    "others": _ratios,
    "growth": _growth,
}
