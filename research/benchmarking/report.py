"""The tables of what was measured, in Markdown, and their picture."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Iterable, Sequence

from research.benchmarking import workloads
from research.benchmarking.results import Results


def milliseconds(seconds: float) -> str:
    """Returns "4.3 ms", three digits."""
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others figures."""
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(results: Results) -> str:
    """Returns a table for each kind of row that was measured."""
    makers = (_tff, _rivals, _ratios, _growth)
    return "\n\n".join(filter(None, (make(results) for make in makers)))


def draw(results: Results, path: pathlib.Path) -> None:
    """Draws the rounds and the memory beside TFF's."""
    from matplotlib import figure

    measured = [
        (work.name.replace("_", " "), result)
        for work in reversed(workloads.WORKLOADS.values())
        if (result := results.result(work.name)) is not None
    ]
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
    time.set_yticks(range(len(measured)), [name for name, _ in measured])
    time.legend(fontsize=8)
    drawn.savefig(path, dpi=150)


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _tff(results: Results) -> str:
    rows = [
        (
            work.title,
            milliseconds(result["tff"]["median"]),
            milliseconds(result["engine"]["median"]),
            f"**{result['ratio']:.1f}**",
            _spread(result["ratios"]),
        )
        for work in workloads.WORKLOADS.values()
        if (result := results.result(work.name)) is not None
    ]
    heading = ("a round of 50 clients", "TFF at its best", "tfdp_fl")
    return table((*heading, "times faster", "three runs"), rows) if rows else ""


def _rivals(results: Results) -> str:
    result = results.result("rivals")
    if result is None:
        return ""
    rows = [("tfdp_fl", "–", milliseconds(statistics.median(result["ours"])), "1", "–")]
    for rival in result["rivals"].values():
        versions = ", ".join(
            " ".join(pair) for pair in rival.get("versions", {}).items()
        )
        if "ratios" not in rival:
            rows.append((rival["title"], versions, "not measured", "–", "–"))
            continue
        rows.append(
            (
                f"{rival['title']} ({versions})",
                rival["setting"],
                milliseconds(statistics.median(rival["runs"])),
                f"**{statistics.median(rival['ratios']):.1f}**",
                _spread(rival["ratios"]),
            )
        )
    heading = ("framework", "fastest setting", "a round", "times ours", "three runs")
    return table(heading, rows)


def _ratios(results: Results) -> str:
    """Returns the rows that are one ratio each."""
    found = {
        f"{row}: {name}": result
        for row in ("sharded_ray",)
        for name, result in (results.result(row) or {}).get("workloads", {}).items()
    }
    for row in ("population", "correlated"):
        if "ratio" in (results.result(row) or {}):
            found[row] = results.result(row)
    rows = [
        (name, f"{result['ratio']:.2f}", _spread(result["ratios"]))
        for name, result in found.items()
    ]
    return table(("what", "ratio", "three runs"), rows) if rows else ""


def _growth(results: Results) -> str:
    """Returns the work that was measured small and large."""
    rows = [
        (
            f"{name}: {result['what']}",
            *(f"{size:,}".replace(",", " ") for size in result["sizes"]),
            *(milliseconds(result[size]["median"]) for size in ("small", "large")),
            f"{result['ratio']:.2f}",
        )
        for name, result in (results.result("small_and_large") or {})
        .get("work", {})
        .items()
    ]
    heading = ("what grows", "from", "to", "small", "large", "ratio")
    return table(heading, rows) if rows else ""
