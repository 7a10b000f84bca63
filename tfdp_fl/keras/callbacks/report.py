"""A page about a run: what is guaranteed, how it went, how it was set."""

from __future__ import annotations

import io
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tfdp_fl import _files
from tfdp_fl.keras import resuming
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback

# Colour-blind safe (Okabe and Ito 2008).
_COLORS = ("#0072B2", "#D55E00")
# Title, unit of the vertical axis, and what is drawn of a round's values.
_CHARTS = (
    ("Accuracy", "fraction of examples", ("val_accuracy", "accuracy")),
    ("Loss", "mean over examples", ("val_loss", "loss")),
    ("Epsilon spent", "epsilon", ("epsilon",)),
    ("Clip and norms", "L2 norm", ("clip_norm", "mean_update_norm")),
    ("Clipped clients", "fraction of the cohort", ("clipped_fraction",)),
    ("Cohorts", "clients", ("cohort_size", "failed_clients")),
)

# The values of each round, counted from 1, by name.
Rounds = Sequence[tuple[int, Mapping[str, float]]]


class Report(FederatedCallback):
    """Writes a page of a training: one HTML file, with nothing outside it.

    It has the privacy statement, what was trained how, and charts of accuracy,
    loss, epsilon against the target, clip, norms and cohorts; without
    matplotlib it says how to get the charts. It is written when `fit` ends,
    also where an error or the user ended it, and replaced as a whole. Most of
    what is drawn was computed from clients' data without noise, and the page
    says so; publish it only where that may be seen.

    Attributes:
      path: The file; its folder is made when training begins.
      delta: At which the statement is made; None: what the model knows.
    """

    def __init__(self, path: str | os.PathLike[str], delta: float | None = None):
        """Makes a callback that has not written anything.

        Args:
          path: The file.
          delta: See above.

        Raises:
          ValueError: There is a folder in the file's place.
        """
        super().__init__()
        self.path = pathlib.Path(path)
        if self.path.is_dir():
            raise ValueError(
                "path must name a file, such as report.html, got the folder "
                f"{os.fspath(path)!r}."
            )
        self.delta = delta
        self._rounds: list[tuple[int, dict[str, float]]] = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Makes the folder: better an error now than after the training."""
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Keeps a round's values."""
        self._rounds.append((round_index + 1, dict(logs)))

    def on_fit_end(self) -> None:
        """Writes the page."""
        ended_by_error = sys.exc_info()[0] is not None
        fed = self.federated_model
        try:
            text = page(
                fed.model.name,
                fed.privacy_statement(self.delta, "dict"),
                self._rounds,
                {
                    **resuming.settings(fed, fed.run.population, fed.run.plan),
                    "trained": fed.executor,
                },
                target=None if fed.target is None else fed.target.epsilon,
                ended_early=ended_by_error,
            )
            _files.write_text(self.path, text)
        except Exception:
            if not ended_by_error:
                raise  # Else that error is the one to report.


def page(
    name: str,
    facts: Mapping[str, Any],
    rounds: Rounds,
    settings: Mapping[str, Any],
    target: float | None = None,
    ended_early: bool = False,
) -> str:
    """Returns a run as an HTML page.

    Args:
      name: The heading.
      facts: What `privacy_statement(format="dict")` says.
      rounds: The values of each round, counted from 1, by name.
      settings: How the training was set; those that are None are left out.
      target: The epsilon that was to be kept.
      ended_early: Whether an error or the user ended the training.
    """
    import jinja2

    template = pathlib.Path(__file__).with_name("report.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = (facts.get(part) for part in ("summary", "meaning", "secrecy", "how"))
    return environment.from_string(template).render(
        name=name,
        ended_early=ended_early,
        headline=_headline(facts, rounds),
        paragraphs=[part for part in parts if part],
        caveats=list(facts["caveats"].values()),
        charts=_charts(rounds, target),
        settings=[
            (setting, _shown(value))
            for setting, value in settings.items()
            if value is not None
        ],
    )


def _headline(facts: Mapping[str, Any], rounds: Rounds) -> list[tuple[str, str]]:
    figures = [("rounds", str(facts["rounds"]))]
    for name, word in (
        ("val_accuracy", "accuracy on validation data"),
        ("accuracy", "accuracy in training"),
    ):
        values = _series(rounds, name)
        if values:
            figures.append((word, f"{values[-1][1]:.3f}"))
            break
    epsilon = facts["epsilon"]
    word = f"epsilon at delta = {facts['delta']:g}, for one {facts['unit']}"
    figures.append((word, "none" if epsilon is None else _rounded_up(epsilon)))
    return figures


def _series(rounds: Rounds, name: str) -> list[tuple[int, float]]:
    """Returns the rounds in which a value is finite, with it."""
    return [
        (number, logs[name])
        for number, logs in rounds
        if math.isfinite(logs.get(name, math.nan))
    ]


def _charts(rounds: Rounds, target: float | None) -> list[str] | None:
    """Returns SVG drawings; None without matplotlib."""
    try:
        from matplotlib import figure  # Without pyplot, which a notebook may use.
    except ModuleNotFoundError:
        return None
    charts = []
    for title, unit, names in _CHARTS:
        drawn = figure.Figure(figsize=(5, 3.2), layout="constrained")
        axes = drawn.add_subplot()
        for name, color in zip(names, _COLORS, strict=False):
            points = _series(rounds, name)
            if name == "failed_clients" and not any(value for _, value in points):
                continue
            if points:
                marker = "o" if len(points) == 1 else None
                axes.plot(
                    *zip(*points, strict=True), label=name, color=color, marker=marker
                )
        if not axes.lines:
            continue
        if names == ("epsilon",) and target is not None:
            axes.axhline(target, color="#555", linestyle="--", label="target")
        axes.set_title(title, fontsize=11, loc="left")
        axes.set(xlabel="round", ylabel=unit)
        if unit.startswith("fraction"):
            axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            drawn.legend(loc="outside lower center", ncols=3, fontsize=8)
        stream = io.StringIO()
        drawn.savefig(stream, format="svg", metadata={"Date": None})
        svg = stream.getvalue()
        charts.append(svg[svg.index("<svg") :])
    return charts


def _shown(value: Any) -> str:
    """Returns a setting in words; of a Keras object, its name."""
    if isinstance(value, list | tuple):
        return ", ".join(_shown(part) for part in value if not isinstance(part, dict))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rounded_up(epsilon: float) -> str:
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2) if epsilon else 1.0
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:.3g}"
