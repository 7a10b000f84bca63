"""Charts of runs: accuracy and epsilon against rounds, and each other."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfdp_fl import _on_use
from tfdp_fl.experiments.run_directory import Run

# Colour-blind safe (Okabe and Ito 2008), the two that every chart uses first.
_ACCURACY_COLOR = "#0072B2"
_EPSILON_COLOR = "#D55E00"
COLORS = (
    _ACCURACY_COLOR,
    _EPSILON_COLOR,
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#000000",
)


def pyplot() -> Any:
    """Returns matplotlib's pyplot, made to draw into files.

    Raises:
      ImportError: matplotlib is not installed.
    """
    with _on_use.needed("matplotlib", "A chart"):
        import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure to a file, and forgets it."""
    figure.tight_layout()
    figure.savefig(path, dpi=100, bbox_inches="tight")  # With its legend.
    pyplot().close(figure)


def accuracy_of(run: Run) -> tuple[list[int], list[float]]:
    """Returns the rounds and accuracies at which a run was evaluated."""
    return run.history.get("val_accuracy", ([], []))


def epsilon_of(run: Run) -> tuple[list[int], list[float]]:
    """Returns the rounds and finite epsilons, by the run's accountant."""
    pairs = [
        (t, value)
        for t, value in zip(*run.history.get("epsilon", ([], [])), strict=True)
        if math.isfinite(value)
    ]
    return [t for t, _ in pairs], [value for _, value in pairs]


def plot_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Draws accuracy (left axis) and epsilon (right) against rounds."""
    figure, left = pyplot().subplots(figsize=(7, 4))
    left.plot(*accuracy_of(run), color=_ACCURACY_COLOR, label="accuracy")
    left.set_xlabel("round")
    left.set_ylabel("accuracy", color=_ACCURACY_COLOR)
    left.tick_params(axis="y", colors=_ACCURACY_COLOR)
    left.set_ylim(0, 1)
    left.set_xlim(left=0)
    left.grid(alpha=0.3)
    rounds, epsilons = epsilon_of(run)
    if rounds:
        right = left.twinx()
        right.plot(rounds, epsilons, color=_EPSILON_COLOR, linestyle="--")
        delta = run.result.get("delta")
        at = "" if delta is None else f" at delta = {delta:.2g}"
        right.set_ylabel(f"epsilon{at}", color=_EPSILON_COLOR)
        right.tick_params(axis="y", colors=_EPSILON_COLOR)
        right.set_ylim(0, 1.05 * max(epsilons))
    left.set_title(title_of(run), fontsize=10)
    save(figure, path)


def title_of(run: Run) -> str:
    """Returns a line that says what a run was."""
    settings, result = run.settings, run.result
    words = [f"{settings.dataset}, {settings.model}, {settings.mechanism}"]
    if "accuracy" in result:
        words.append(f"accuracy {result['accuracy']:.3f}")
    if result.get("epsilon") is not None:
        unit = {"local": "local ", "record": "per-record "}
        kind = unit.get(result["guarantee"], "")
        words.append(f"{kind}epsilon {result['epsilon']:.3g}")
    return " – ".join(words)


def plot_comparison(
    groups: Mapping[str, Sequence[Run]],
    path: str | os.PathLike[str],
    against: str = "rounds",
) -> None:
    """Draws the accuracy of several runs, those of a group in one colour.

    Args:
      groups: Runs by the name that they are shown under; several runs of a
        group (its seeds) are thin lines, and their mean a thick one.
      path: The image file.
      against: "rounds"; or "tradeoff",
        the final accuracy against the final epsilon, a line a group, of means
        and standard deviations over the seeds.
    """
    if against == "tradeoff":
        _plot_tradeoff(groups, path)
        return
    figure, axes = pyplot().subplots(figsize=(7, 4.5))
    for place, (name, runs) in enumerate(groups.items()):
        color = COLORS[place % len(COLORS)]
        style = ("-", "--", ":", "-.")[place // len(COLORS) % 4]
        curves: list[Any] = [c for c in map(accuracy_of, runs) if c[0]]
        if not curves:
            continue
        for x, y in curves if len(curves) > 1 else ():
            axes.plot(x, y, style, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(*mean_curve(curves), style, color=color, label=name)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    save(figure, path)


def mean_curve(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[list[float], list[float]]:
    """Returns the mean over the first points that all curves have."""
    length = min(len(x) for x, _ in curves)
    count = len(curves)
    mean_x, mean_y = (
        [sum(c[axis][i] for c in curves) / count for i in range(length)]
        for axis in (0, 1)
    )
    return mean_x, mean_y


def tradeoff_of(runs: Iterable[Run]) -> list[tuple[float, float, float]]:
    """Returns (epsilon, mean accuracy, stddev) of each setting, by epsilon.

    Runs in one directory are the seeds of one setting; its epsilon is the
    largest of theirs. Runs without a guarantee are left out, and the standard
    deviation of a single run is 0.
    """
    settings: dict[str, list[Run]] = {}
    for run in runs:
        if run.result.get("epsilon") is not None:
            settings.setdefault(str(run.path.parent), []).append(run)
    points = []
    for seeds in settings.values():
        accuracies = [run.result["accuracy"] for run in seeds]
        points.append(
            (
                max(run.result["epsilon"] for run in seeds),
                statistics.fmean(accuracies),
                statistics.stdev(accuracies) if len(seeds) > 1 else 0.0,
            )
        )
    return sorted(points)


def _plot_tradeoff(
    groups: Mapping[str, Sequence[Run]], path: str | os.PathLike[str]
) -> None:
    """Draws a line a group; one without any epsilon is a level to reach."""
    figure, axes = pyplot().subplots(figsize=(7, 4.5))
    for place, (name, runs) in enumerate(groups.items()):
        color = COLORS[place % len(COLORS)]
        points = tradeoff_of(runs)
        if points:
            x, y, spread = zip(*points, strict=True)
            style = {"marker": "os^Dv"[place % 5], "capsize": 3, "color": color}
            axes.errorbar(x, y, spread, label=name, **style)
        elif runs:
            level = statistics.fmean(r.result["accuracy"] for r in runs)
            axes.axhline(level, color=color, linestyle=":", label=name)
    axes.set_xlabel("epsilon (of what each run's guarantee is about)")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    figure.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    save(figure, path)
