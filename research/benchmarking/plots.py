"""Draws the ratios and the growth curves."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from research.benchmarking import verdicts, workloads
from research.benchmarking.results import Results
from tfdp_fl.experiments import plots

# Colour-blind safe (Okabe and Ito 2008).
_BLUE, _ORANGE, _GREEN, _PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"

RATIOS, GROWTH = "benchmark_ratios.png", "benchmark_growth.png"


def _save(figure: Any, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plots.pyplot().close(figure)


def draw(results: Results, folder: str | os.PathLike[str]) -> list[str]:
    """Draws what was measured; returns the names of the files.

    Args:
      results: What was measured.
      folder: Where the images go.
    """
    folder = pathlib.Path(folder)
    drawn = []
    if any(results.result(name) for name in workloads.WORKLOADS):
        _draw_ratios(results, folder / RATIOS)
        drawn.append(RATIOS)
    if any(
        results.result(name)
        for name in ("cohort", "population", "model_size", "memory")
    ):
        _draw_growth(results, folder / GROWTH)
        drawn.append(GROWTH)
    return drawn


def _draw_ratios(results: Results, path: pathlib.Path) -> None:
    """Draws a round's time in TFF, here, and at the floor."""
    works = [w for w in workloads.WORKLOADS.values() if results.result(w.name)]
    figure, axes = plots.pyplot().subplots(figsize=(8.5, 4.2))
    width = 0.38
    for place, work in enumerate(works):
        result = results.result(work.name)
        for shift, side, color, name in (
            (-width / 2, "tff", _ORANGE, "TFF 0.87 at its best"),
            (width / 2, "engine", _BLUE, "tfdp_fl"),
        ):
            axes.bar(
                place + shift,
                1e3 * result[side]["median"],
                width,
                color=color,
                label=None if place else name,
            )
        axes.annotate(
            f"{result['ratio']:.1f} times",
            (place, 1e3 * result["tff"]["median"]),
            ha="center",
            va="bottom",
        )
        allowed = result["tff"]["median"] / work.target
        axes.hlines(
            1e3 * allowed,
            place,
            place + width,
            color="black",
            label=None if place else "allowed",
        )
        least = verdicts.floors(results, work)
        if least is not None:
            axes.hlines(
                1e3 * least[0],
                place,
                place + width,
                color=_GREEN,
                linestyle="--",
                label=None if place else "its products at the peak rate",
            )
    axes.set_yscale("log")
    axes.set_ylabel("milliseconds a round")
    axes.set_xticks(range(len(works)), [work.name for work in works])
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def _draw_growth(results: Results, path: pathlib.Path) -> None:
    figure, panels = plots.pyplot().subplots(2, 2, figsize=(9.5, 7))
    _draw_cohort(results.result("cohort"), panels[0][0])
    _draw_population(results.result("population"), panels[0][1])
    _draw_model_size(results.result("model_size"), panels[1][0])
    _draw_memory(results.result("memory"), panels[1][1])
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    _save(figure, path)


def _times(curve: dict[str, Any]) -> list[float]:
    return [1e3 * each["median"] for each in curve.values()]


def _draw_cohort(result: Any, axes: Any) -> None:
    axes.set(xlabel="clients in the cohort", ylabel="milliseconds a round")
    axes.set_title("time by cohort (mlp)", fontsize=10)
    if result is None:
        return
    cohorts, times = result["cohorts"], _times(result["times"])
    axes.loglog(cohorts, times, "o-", color=_BLUE, label="measured")
    last = times[-1] / cohorts[-1]
    axes.loglog(
        cohorts,
        [last * cohort for cohort in cohorts],
        ":",
        color="gray",
        label="proportional",
    )


def _draw_population(result: Any, axes: Any) -> None:
    axes.set(xlabel="clients in all", ylabel="milliseconds a round")
    axes.set_title("time by population (cohort of 50)", fontsize=10)
    if result is None:
        return
    for color, (name, curve) in zip(
        (_BLUE, _ORANGE, _GREEN, _PINK), result["curves"].items(), strict=False
    ):
        axes.loglog(
            result["populations"],
            _times(curve["times"]),
            "o-",
            color=color,
            label=name,
        )


def _draw_model_size(result: Any, axes: Any) -> None:
    axes.set(xlabel="parameters", ylabel="milliseconds a round")
    axes.set_title("time by model size (cohort of 50)", fontsize=10)
    if result is None:
        return
    axes.loglog(result["sizes"], _times(result["times"]), "o-", color=_BLUE)


def _draw_memory(result: Any, axes: Any) -> None:
    axes.set(xlabel="clients in the cohort", ylabel="model copies per replica")
    axes.set_title("memory above the data", fontsize=10)
    if result is None:
        return
    curves: dict[tuple[str, str, float], list[Any]] = {}
    for point in result["points"]:
        key = point["mechanism"], point["way"], point["model_bytes"]
        curves.setdefault(key, []).append(point)
    for (mechanism, way, size), points in curves.items():
        axes.loglog(
            [point["cohort"] for point in points],
            [max(point["copies_per_replica"], 0.01) for point in points],
            "o-",
            label=f"{mechanism}, {way}, {size / 2**20:.0f} MiB",
        )
    axes.axhline(verdicts.COPIES_PER_REPLICA, color="gray", linestyle=":", label="bar")
