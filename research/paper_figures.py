r"""Draws figures of NbAFL's paper and of the adaptive clip's from runs.

    python research/paper_figures.py --figure=nbafl --data_path=mnist.npz
    python research/paper_figures.py --figure=clipping --data_path=folder
    python research/paper_figures.py --figure=shakespeare \
        --data_path=shakespeare.txt

nbafl (Wei et al. 2020, https://arxiv.org/abs/1911.00222): loss over rounds for
three epsilons, over K of the 50 clients a round, and over T. clipping (Andrew
et al. 2021, https://arxiv.org/abs/1905.03871): the accuracy of fixed clips, of
clips that follow the median from the same beginnings, and of other quantiles.
shakespeare: how well the next character is foretold, over rounds and over how
many clients each role is.
Runs the sweeps in research/configs/figures; those that have a result are
skipped, so the same command goes on after an interrupt. --quick runs three
rounds of one seed, to see that all of it works.
"""

from __future__ import annotations

import dataclasses
import json
import math
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
# What --data_path is of.
_FILES = {"mnist": "mnist.npz", "shakespeare": "shakespeare.txt"}

# What a line may be drawn over, besides a setting.
ROUND, LEVEL = "round", "level"


@dataclasses.dataclass(frozen=True)
class Line:
    """Points on a panel: which runs, and what of them goes where.

    Attributes:
      label: In the legend.
      x: The setting on the x axis, against the last value of a run; ROUND: all
        values of a run over its rounds; LEVEL: the last value, straight across.
      where: Settings that the runs must have.
      sweeps: The names of their configurations.
      best_of: With LEVEL: the setting of whose values the one with the highest
        mean is drawn; None: all the runs are alike.
    """

    label: str
    x: str
    where: Mapping[str, Any]
    sweeps: tuple[str, ...]
    best_of: str | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """Axes, and what is drawn on them.

    Attributes:
      title: Above it.
      x_label: Under it.
      y_label: Left of it.
      lines: What is drawn.
      y: The column of the history on the y axis.
      log: Whether x is drawn in decades.
      ticks: Where on the x axis; (): matplotlib decides.
      guessing: What guessing has, a gray line; None: none is drawn.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    y: str = "val_loss"
    log: bool = False
    ticks: Sequence[float] = ()
    guessing: float | None = None


@dataclasses.dataclass(frozen=True)
class Figure:
    """Panels, row by row.

    Attributes:
      panels: They.
      columns: How many are in a row.
      sharey: As in matplotlib's `subplots`: "row", or False.
    """

    panels: Sequence[Panel]
    columns: int
    sharey: Any

    @property
    def sweeps(self) -> list[str]:
        """The names of the configurations that are drawn, each once."""
        lines = [line for panel in self.panels for line in panel.lines]
        return list(dict.fromkeys(name for x in lines for name in x.sweeps))


def _clips(sweep: str, title: str) -> list[Panel]:
    adaptive = {"mechanism": "adaptive", "target_quantile": 0.5}
    started = {"mechanism": "adaptive", "initial_clip_norm": 0.5}
    fixed = {"mechanism": "fixed"}
    none = Line("without DP", LEVEL, {"mechanism": "none"}, (sweep,))
    axes: dict[str, Any] = {"y": "val_accuracy", "y_label": "test accuracy"}
    return [
        Panel(
            f"{title}: fixed, or where adaptive begins",
            x_label="clip norm (L2, of a client's update)",
            lines=(
                Line("fixed at this clip", "clip_norm", fixed, (sweep,)),
                Line(
                    "median, begun at this clip",
                    "initial_clip_norm",
                    adaptive,
                    (sweep,),
                ),
                none,
            ),
            log=True,
            **axes,
        ),
        Panel(
            f"{title}: other quantiles, y enlarged",
            x_label="target quantile of clients' norms",
            lines=(
                Line("best fixed clip", LEVEL, fixed, (sweep,), "clip_norm"),
                Line(
                    "adaptive, begun at 0.5",
                    "target_quantile",
                    started,
                    (sweep,),
                ),
                none,
            ),
            ticks=(0.1, 0.3, 0.5, 0.7, 0.9),
            **axes,
        ),
    ]


def _by_epsilon(
    x: str, sweeps: tuple[str, ...], epsilons: Sequence[float]
) -> list[Line]:
    return [
        Line(
            f"ε = {epsilon:g}",
            x,
            {"mechanism": "nbafl", "target_epsilon": epsilon},
            sweeps,
        )
        for epsilon in epsilons
    ]


_NO_NOISE = 1e9  # An epsilon at which the noise is nothing: the clip is left.


def _nbafl() -> list[Panel]:
    loss: dict[str, Any] = {
        "y_label": "test loss (cross-entropy, nats)",
        "guessing": math.log(10),
    }
    whole = ("nbafl_loss",)
    clip_alone = {"mechanism": "nbafl", "target_epsilon": _NO_NOISE}
    return [
        Panel(
            "all 50 clients in each of 25 rounds",
            x_label="round",
            lines=(
                *_by_epsilon(ROUND, whole, (50, 60, 100)),
                Line("no noise, clip only", ROUND, clip_alone, whole),
                Line("neither", ROUND, {"mechanism": "none"}, whole),
            ),
            **loss,
        ),
        Panel(
            "K of 50 clients in each of 25 rounds",
            x_label="K, clients a round",
            lines=(
                *_by_epsilon(
                    "clients_per_round",
                    (*whole, "nbafl_scheduling"),
                    (50,),
                ),
                Line("no noise, clip only", LEVEL, clip_alone, whole),
            ),
            ticks=(10, 20, 30, 40, 50),
            **loss,
        ),
        Panel(
            "one budget over T rounds of all 50",
            x_label="T, rounds",
            lines=_by_epsilon("rounds", (*whole, "nbafl_rounds"), (50,)),
            log=True,
            ticks=(5, 10, 25, 50),
            **loss,
        ),
    ]


# The accuracy of always saying the most frequent character, a space.
_SPACES = 0.16


def _shakespeare() -> list[Panel]:
    accuracy: dict[str, Any] = {
        "y": "val_accuracy",
        "y_label": "accuracy of the next character",
        "guessing": _SPACES,
    }
    none = ("shakespeare_none",)
    roles = ("shakespeare_roles",)
    return [
        Panel(
            "a client for each of 299 roles",
            x_label="round",
            lines=(
                Line("without DP", ROUND, {"mechanism": "none"}, none),
                Line("ε = 8", ROUND, {"target_epsilon": 8.0}, roles),
                Line("ε = 4", ROUND, {"target_epsilon": 4.0}, roles),
            ),
            log=True,
            ticks=(10, 20, 50, 100, 300),
            **accuracy,
        ),
        Panel(
            "roles as several clients each, 50 rounds",
            x_label="clients of a role, at most",
            lines=(
                Line("without DP", LEVEL, {"mechanism": "none"}, none),
                Line(
                    "ε = 8",
                    "clients_per_role",
                    {"target_epsilon": 8.0},
                    (*roles, "shakespeare_parts"),
                ),
            ),
            log=True,
            ticks=(1, 4, 16),
            **accuracy,
        ),
    ]


FIGURES = {
    "nbafl": Figure(_nbafl(), columns=3, sharey="row"),
    "shakespeare": Figure(_shakespeare(), columns=2, sharey="row"),
    "clipping": Figure(
        [
            *_clips("clipping_digits", "digits"),
            *_clips("clipping_mnist", "MNIST"),
            *_clips("clipping_shakespeare", "Shakespeare"),
        ],
        columns=2,
        sharey=False,
    ),
}

_FIGURE = flags.DEFINE_enum("figure", None, list(FIGURES), "Which one.")
_DATA_PATH = flags.DEFINE_string(
    "data_path",
    None,
    "MNIST as Keras stores it, mnist.npz; or the Shakespeare corpus, a text; "
    "or the folder of both.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/figures", "Receives the runs and the figure."
)
_QUICK = flags.DEFINE_bool(
    "quick", False, "Few rounds of one seed: to see that everything works."
)


def read_config(name: str, data_path: str | None, quick: bool) -> dict[str, Any]:
    """Returns a sweep's configuration.

    Raises:
      ValueError: It is refused, or needs a data_path.
    """
    config = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    dataset = config["base"]["dataset"]
    if dataset in _FILES:
        if not data_path:
            raise ValueError(f"data_path must be given: {_FILES[dataset]}.")
        if os.path.isdir(data_path):
            data_path = os.path.join(data_path, _FILES[dataset])
        config["base"]["data_path"] = data_path
    if quick:
        config["seeds"] = config["seeds"][:1]
        config["base"]["rounds"] = config["base"]["validation_freq"] = _QUICK_ROUNDS
        grid = config.get("grid", {})
        if "rounds" in grid:
            grid["rounds"] = [_QUICK_ROUNDS, 2 * _QUICK_ROUNDS]
    sweeps.expand(config)
    return config


def points(line: Line, runs: Sequence[Run], y: str) -> dict[Any, list[float]]:
    """Returns the values to draw: by x, one a run (seed)."""
    found: dict[Any, list[float]] = {}
    for run in runs:
        settings = run.settings
        rounds, values = run.history.get(y, ([], []))
        if not values or any(
            getattr(settings, name) != value for name, value in line.where.items()
        ):
            continue
        if line.x == ROUND:
            for place, value in zip(rounds, values, strict=True):
                found.setdefault(place, []).append(value)
        else:
            name = line.best_of if line.x == LEVEL else line.x
            place = getattr(settings, name) if name else None
            found.setdefault(place, []).append(values[-1])
    return found


def draw(
    figure: Figure,
    runs: Mapping[str, Sequence[Run]],
    path: str | os.PathLike[str],
) -> None:
    """Draws means over seeds, with their standard deviations.

    Args:
      figure: What is drawn.
      runs: By the name of their sweep.
      path: The image file.
    """
    rows = -(-len(figure.panels) // figure.columns)
    image, all_axes = plots.pyplot().subplots(
        rows,
        figure.columns,
        figsize=(4.2 * figure.columns, 4.1 * rows),
        sharey=figure.sharey,
        squeeze=False,
    )
    colors: dict[str, str] = {}  # A label has one in all the panels.
    for panel, axes in zip(figure.panels, all_axes.flat, strict=True):
        for line in panel.lines:
            there = [run for name in line.sweeps for run in runs[name]]
            color = colors.setdefault(line.label, plots.COLORS[len(colors)])
            _draw_line(axes, line, points(line, there, panel.y), color)
        if panel.guessing is not None:
            axes.axhline(panel.guessing, color="gray", linestyle="--", label="guessing")
        if panel.log:
            axes.set_xscale("log")
        if panel.ticks:
            axes.set_xticks(panel.ticks, [f"{each:g}" for each in panel.ticks])
            axes.minorticks_off()
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel(panel.y_label)
        axes.grid(alpha=0.3)
        # Below, where no curve is.
        axes.legend(
            fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16)
        )
        if figure.sharey:
            axes.label_outer()
    plots.save(image, path)


def _draw_line(
    axes: Any, line: Line, at: Mapping[Any, list[float]], color: str
) -> None:
    look = {"color": color, "label": line.label}
    x = sorted(at)
    if not x:
        return
    means = [statistics.fmean(at[each]) for each in x]
    if line.x == LEVEL:
        axes.axhline(max(means), linestyle=":", **look)
        return
    spread = [statistics.stdev(at[each]) if len(at[each]) > 1 else 0.0 for each in x]
    if line.x == ROUND:
        axes.plot(x, means, **look)
        low = [m - s for m, s in zip(means, spread, strict=True)]
        high = [m + s for m, s in zip(means, spread, strict=True)]
        axes.fill_between(x, low, high, color=color, alpha=0.2)
    else:
        axes.errorbar(x, means, spread, marker="o", capsize=2, **look)


def reproduce(
    figure: Figure,
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
    draw(figure, runs, path)
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
        figure = FIGURES[_FIGURE.value]
        configs = {
            name: read_config(name, _DATA_PATH.value, _QUICK.value)
            for name in figure.sweeps
        }
        path, failed = reproduce(
            figure, configs, pathlib.Path(_OUTPUT_DIR.value) / _FIGURE.value
        )
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"paper_figures.py: {error}")
    print(f"Written: {path}, and {sweeps.SUMMARY_TABLE} beside its runs")
    if failed:
        sys.exit(f"paper_figures.py: {len(failed)} runs failed.")


if __name__ == "__main__":
    app.run(main)
