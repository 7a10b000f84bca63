"""Charts of runs: accuracy and epsilon against rounds, and each other."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl import _on_use
from tfdp_fl.experiments.run_directory import Run

# Colour-blind safe (Okabe and Ito 2008): accuracy, epsilon, and more.
COLORS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000"),
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


def plot_run(run: Run, path: str | os.PathLike[str]) -> None:
    """Draws accuracy (left axis) and epsilon (right) against rounds."""
    figure, left = pyplot().subplots(figsize=(7, 4))
    left.plot(*accuracy_of(run), color=COLORS[0])
    _label(left)
    left.yaxis.label.set_color(COLORS[0])
    history = run.history.get("epsilon", ([], []))
    finite = [pair for pair in zip(*history, strict=True) if math.isfinite(pair[1])]
    if finite:
        rounds, epsilons = zip(*finite, strict=True)
        right = left.twinx()
        right.plot(rounds, epsilons, color=COLORS[1], linestyle="--")
        delta = run.result.get("delta")
        at = "" if delta is None else f" at delta = {delta:.2g}"
        right.set_ylabel(f"epsilon{at}", color=COLORS[1])
        right.set_ylim(0, 1.05 * max(epsilons))
    words = [run.settings.dataset, run.settings.model, run.settings.mechanism]
    left.set_title(", ".join(map(str, words)), fontsize=10)
    save(figure, path)


def _label(axes: Any, against: str = "rounds") -> None:
    """Labels axes that were drawn on."""
    if against == "rounds":
        axes.set_xlabel("round")
        axes.set_xlim(left=0)
    else:
        axes.set_xlabel("epsilon (of what each run's guarantee is about)")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)


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
      against: "rounds"; or "tradeoff", the final accuracy against the final
        epsilon, a line a group, of means and standard deviations over the seeds.
    """
    figure, axes = pyplot().subplots(figsize=(7, 4.5))
    for place, (name, runs) in enumerate(groups.items()):
        style = {
            "color": COLORS[place % len(COLORS)],
            "linestyle": ("-", "--", ":", "-.")[place // len(COLORS) % 4],
        }
        if against == "tradeoff":
            _add_tradeoff(axes, name, runs, style)
            continue
        curves: list[Any] = [c for c in map(accuracy_of, runs) if c[0]]
        for x, y in curves if len(curves) > 1 else ():
            axes.plot(x, y, alpha=0.3, linewidth=0.8, **style)
        if curves:
            axes.plot(*mean_curve(curves), label=name, **style)
    _label(axes, against)
    figure.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    save(figure, path)


def _add_tradeoff(axes: Any, name: str, runs: Sequence[Run], style: Any) -> None:
    """Draws the line of a group; one without any epsilon is a level to reach."""
    points = tradeoff_of(runs)
    if points:
        x, y, spread = zip(*points, strict=True)
        axes.errorbar(x, y, spread, label=name, marker="o", capsize=3, **style)
    elif runs:
        level = statistics.fmean(r.result["accuracy"] for r in runs)
        axes.axhline(level, label=name, **{**style, "linestyle": ":"})


def mean_curve(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean over the first points that all curves have."""
    length = min(len(x) for x, _ in curves)
    x, y = np.mean([[x[:length], y[:length]] for x, y in curves], axis=0)
    return x, y


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
        spread = statistics.stdev(accuracies) if len(seeds) > 1 else 0.0
        epsilon = max(run.result["epsilon"] for run in seeds)
        points.append((epsilon, statistics.fmean(accuracies), spread))
    return sorted(points)
