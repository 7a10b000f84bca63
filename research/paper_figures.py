r"""Draws figures of NbAFL's paper and of the adaptive clip's from runs.

    python research/paper_figures.py --figure=nbafl --data_path=mnist.npz
    python research/paper_figures.py --figure=clipping --data_path=mnist.npz

nbafl (Wei et al. 2020, https://arxiv.org/abs/1911.00222): loss over rounds for
three epsilons, over K of the 50 clients a round, and over T. clipping (Andrew
et al. 2021, https://arxiv.org/abs/1905.03871): the accuracy of fixed clips, and
of clips that follow a quantile. Runs the sweeps in research/configs/figures;
those that have a result are skipped, so the same command goes on after an
interrupt. --quick runs three rounds of one seed, to see that all of it works.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags

from tfdp_fl.experiments import plots, sweeps, training
from tfdp_fl.experiments.run_directory import Run

CONFIGS = pathlib.Path(__file__).parent / "configs" / "figures"
_QUICK_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Panel:
    """Axes, and which runs of which sweep are drawn on them.

    Attributes:
      sweep: The name of its configuration.
      title: Above it.
      x: The setting on the x axis; None: rounds.
      lines: The setting that sets the lines apart; None: one line.
      y: The column of the history on the y axis, its last value unless x is
        None.
      log: Whether x is drawn in decades.
    """

    sweep: str
    title: str
    x: str | None = None
    lines: str | None = None
    y: str = "val_loss"
    log: bool = False


def _clips(sweep: str, title: str) -> list[Panel]:
    accuracy: dict[str, Any] = {"y": "val_accuracy"}
    return [
        Panel(sweep, f"{title}: fixed clip", "clip_norm", log=True, **accuracy),
        Panel(sweep, f"{title}: adaptive", "target_quantile", **accuracy),
    ]


FIGURES: dict[str, list[Panel]] = {
    "nbafl": [
        Panel(
            "nbafl_loss", "25 rounds, all 50 clients", None, "target_epsilon"
        ),
        Panel(
            "nbafl_scheduling",
            "25 rounds, K clients each",
            "clients_per_round",
            "target_epsilon",
        ),
        Panel(
            "nbafl_rounds",
            "one budget over T rounds",
            "rounds",
            "target_epsilon",
            log=True,
        ),
    ],
    "clipping": [
        *_clips("clipping_digits", "digits"),
        *_clips("clipping_mnist", "MNIST"),
    ],
}
_LABELS = {
    "clients_per_round": "K",
    "rounds": "T",
    "clip_norm": "clip norm",
    "target_quantile": "target quantile",
    "target_epsilon": "epsilon",
    "val_loss": "test loss",
    "val_accuracy": "test accuracy",
}

_FIGURE = flags.DEFINE_enum("figure", None, list(FIGURES), "Which one.")
_DATA_PATH = flags.DEFINE_string(
    "data_path", None, "MNIST as Keras stores it, mnist.npz."
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/figures", "Receives the runs and the figure."
)
_QUICK = flags.DEFINE_bool(
    "quick", False, "Few rounds of one seed: to see that everything works."
)


def read_config(
    name: str, data_path: str | None, quick: bool
) -> dict[str, Any]:
    """Returns a sweep's configuration.

    Raises:
      ValueError: It is refused, or needs a data_path.
    """
    config = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    if config["base"]["dataset"] == "mnist":
        if not data_path:
            raise ValueError("data_path must be given: mnist.npz.")
        config["base"]["data_path"] = data_path
    if quick:
        config["seeds"] = config["seeds"][:1]
        config["base"]["rounds"] = config["base"]["validation_freq"] = (
            _QUICK_ROUNDS
        )
        grid = config.get("grid", {})
        if "rounds" in grid:
            grid["rounds"] = [_QUICK_ROUNDS, 2 * _QUICK_ROUNDS]
    sweeps.expand(config)
    return config


def points(panel: Panel, runs: Sequence[Run]) -> dict[Any, dict[Any, list]]:
    """Returns the values to draw: by line, by x, one a seed.

    Without an x the last value is replaced by the round's.
    """
    found: dict[Any, dict[Any, list]] = {}
    for run in runs:
        rounds, values = run.history.get(panel.y, ([], []))
        line = panel.lines and getattr(run.settings, panel.lines)
        at = found.setdefault(line, {})
        if panel.x is None:
            for place, value in zip(rounds, values, strict=True):
                at.setdefault(place, []).append(value)
        elif getattr(run.settings, panel.x) is not None and values:
            at.setdefault(getattr(run.settings, panel.x), []).append(values[-1])
    return {line: at for line, at in found.items() if at}


def draw(
    panels: Sequence[Panel],
    runs: Mapping[str, Sequence[Run]],
    path: str | os.PathLike[str],
) -> None:
    """Draws means over seeds, with their standard deviations."""
    figure, all_axes = plots.pyplot().subplots(
        1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True
    )
    for panel, axes in zip(panels, all_axes, strict=True):
        for number, (line, at) in enumerate(
            sorted(points(panel, runs[panel.sweep]).items(), key=str)
        ):
            x = sorted(at)
            axes.errorbar(
                x,
                [statistics.fmean(at[each]) for each in x],
                [
                    statistics.stdev(at[each]) if len(at[each]) > 1 else 0
                    for each in x
                ],
                marker=None if panel.x is None else "o",
                capsize=2,
                color=plots.COLORS[number],
                label=None
                if line is None
                else f"{_LABELS[panel.lines or '']} {line:g}",
            )
        if panel.log:
            axes.set_xscale("log")
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel("round" if panel.x is None else _LABELS[panel.x])
        axes.grid(alpha=0.3)
        if panel.lines:
            axes.legend(fontsize=8)
    all_axes[0].set_ylabel(_LABELS[panels[0].y])
    plots.save(figure, path)


def reproduce(
    panels: Sequence[Panel],
    configs: Mapping[str, Mapping[str, Any]],
    output_dir: str | os.PathLike[str],
) -> tuple[pathlib.Path, list[str]]:
    """Runs what is not there yet, and draws.

    Returns:
      The image file, and the runs that failed.
    """
    root = pathlib.Path(output_dir)
    failed = []
    for name, config in configs.items():
        print(f"{name}: {config['description']}", flush=True)
        failed += sweeps.run_sweep(config, root / name)
    runs = {name: sweeps.read_runs([root / name]) for name in configs}
    path = root / "figure.png"
    draw(panels, runs, path)
    return path, failed


def main(argv: Sequence[str]) -> None:
    """Runs what the flags ask for."""
    if len(argv) > 1:
        sys.exit(f"paper_figures.py: {argv[1]!r} is not a flag.")
    if not _FIGURE.value:
        sys.exit("paper_figures.py: --figure must be given.")
    training.use_one_thread_per_operation()
    try:
        plots.pyplot()  # Missed before hours have passed.
        panels = FIGURES[_FIGURE.value]
        configs = {
            panel.sweep: read_config(
                panel.sweep, _DATA_PATH.value, _QUICK.value
            )
            for panel in panels
        }
        path, failed = reproduce(
            panels, configs, pathlib.Path(_OUTPUT_DIR.value) / _FIGURE.value
        )
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"paper_figures.py: {error}")
    print(f"Written: {path}, and {sweeps.SUMMARY_TABLE} beside its runs")
    if failed:
        sys.exit(f"paper_figures.py: {len(failed)} runs failed.")


if __name__ == "__main__":
    app.run(main)
