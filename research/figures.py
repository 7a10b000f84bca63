"""The figures of Geyer et al. (2017), from runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tfdp_fl.experiments import plots
from tfdp_fl.experiments.run_directory import Run


def plot_stopping_points(
    panels: Mapping[str, Mapping[str, Sequence[Run]]],
    path: str | os.PathLike[str],
) -> None:
    """Draws accuracy from 0.5 on against rounds; a dot ends private runs.

    Args:
      panels: For each panel's title the runs by the name that they are shown
        under; of several runs (seeds) the mean is drawn.
      path: The image file.
    """
    names = list(dict.fromkeys(n for groups in panels.values() for n in groups))
    figure, all_axes = plots.pyplot().subplots(
        1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True
    )
    for axes, (title, groups) in zip(
        all_axes if len(panels) > 1 else [all_axes],
        panels.items(),
        strict=True,
    ):
        for name, runs in groups.items():
            curves = [c for c in map(plots.accuracy_of, runs) if c[0]]
            if not curves:
                continue
            x, y = plots.mean_curve(curves)
            place = names.index(name)
            color = plots.COLORS[place % len(plots.COLORS)]
            style = ("-", "--", ":", "-.")[place % 4]
            axes.plot(x, y, style, color=color, label=name)
            if runs[0].settings.mechanism != "none":
                axes.plot(x[-1], y[-1], "o", color=color)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("round")
        axes.set_xlim(left=0)
        axes.set_ylim(0.5, 1)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, loc="lower right")
    (all_axes if len(panels) == 1 else all_axes[0]).set_ylabel("accuracy")
    plots.save(figure, path)


def plot_update_variance(run: Run, path: str | os.PathLike[str]) -> None:
    """Draws accuracy, and below it Geyer's V_c and U_s, against rounds."""
    figure, (above, below) = plots.pyplot().subplots(
        2, 1, figsize=(7, 5.5), sharex=True
    )
    above.plot(*plots.accuracy_of(run), color=plots.COLORS[0])
    above.set_ylabel("accuracy")
    above.set_ylim(0, 1)
    for name, label, color in (
        ("between_client_variance", "V_c, variance between clients", 1),
        ("update_scale", "U_s, update scale", 2),
    ):
        below.plot(*run.history[name], color=plots.COLORS[color], label=label)
    below.set_yscale("log")
    below.set_xlabel("round")
    below.set_xlim(left=0)
    below.legend(fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    plots.save(figure, path)
