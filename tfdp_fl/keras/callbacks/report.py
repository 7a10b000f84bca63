"""A run as one page that can be looked at."""

from __future__ import annotations

import html
import io
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp_fl import _files, _optional
from tfdp_fl.keras import resuming
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback

# Colour-blind safe (Okabe and Ito 2008).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

# Title, unit of the vertical axis, and what is drawn of a round's values.
_CHARTS = (
    ("Accuracy", "fraction of examples", ("val_accuracy", "accuracy")),
    ("Loss", "mean over examples", ("val_loss", "loss")),
    ("Epsilon spent", "epsilon", ("epsilon",)),
    ("Clip and norms", "L2 norm", ("clip_norm", "mean_update_norm")),
    ("Clipped clients", "fraction of the cohort", ("clipped_fraction",)),
    ("Cohorts", "clients", ("cohort_size", "failed_clients")),
)
_RARELY_ALL_ZERO = ("failed_clients",)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem;
  margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.figures { display: flex; flex-wrap: wrap; gap: 0.5rem 2rem; padding: 0; }
.figures li { list-style: none; } .figures b { display: block;
  font-size: 1.6rem; }
.charts { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.charts svg { width: 100%; height: auto; }
table { border-collapse: collapse; } td { padding: 0.2rem 1rem 0.2rem 0;
  vertical-align: top; overflow-wrap: anywhere; }
td:first-child { color: #555; }
"""


class Report(FederatedCallback):
    """Writes a page of a training: one HTML file, with nothing outside it.

    It has the privacy statement, what was trained how, and charts of accuracy,
    loss, epsilon against the target, clip, norms and cohorts. It is written
    when `fit` ends, also where an error or the user ended it, and replaced as
    a whole. Most of what is drawn was computed from clients' data without
    noise, and the page says so; publish it only where that may be seen.

    With a `log_dir` TensorBoard has the same values, while they come: a scalar
    for each line of a chart ("Clip and norms/clip_norm"), at the rounds counted
    from 1, and the statement as text when `fit` ends.

    Attributes:
      path: The file; its folder is made when training begins.
      delta: At which the statement is made; None: what the model knows.
      log_dir: Where TensorBoard looks; None: nothing is written for it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        delta: float | None = None,
        *,
        log_dir: str | os.PathLike[str] | None = None,
    ):
        """Nothing is written yet.

        Args:
          path: The file.
          delta: See above.
          log_dir: See above.

        Raises:
          ImportError: matplotlib is not installed; or, with a `log_dir`,
            tensorboard.
          ValueError: There is a folder in the file's place, or a file in that
            of the folder `log_dir`.
        """
        super().__init__()
        with _optional.needed("matplotlib", "A report"):
            import matplotlib  # noqa: F401
        self.path = pathlib.Path(path)
        if self.path.is_dir():
            raise ValueError(
                "path must name a file, such as report.html, got the folder "
                f"{os.fspath(path)!r}."
            )
        self.delta = delta
        self.log_dir = None if log_dir is None else pathlib.Path(log_dir)
        if self.log_dir is not None:
            check_log_dir(self.log_dir)
        self._scalars: Scalars | None = None
        self._rounds: list[tuple[int, dict[str, float]]] = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Makes the folder: better an error now than after the training."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.log_dir is not None:
            self._scalars = Scalars(self.log_dir)

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Keeps a round's values."""
        self._rounds.append((round_index + 1, dict(logs)))
        if self._scalars is not None:
            self._scalars.write(round_index + 1, logs)

    def on_fit_end(self) -> None:
        """Writes the page."""
        ended_by_error = sys.exc_info()[0] is not None
        scalars, self._scalars = self._scalars, None
        try:
            if scalars is not None:
                scalars.close(self.federated_model.privacy_statement(self.delta))
            _files.write_text(self.path, self.page(ended_by_error))
        except Exception:
            if not ended_by_error:
                raise  # Else that error is the one to report.

    def page(self, ended_early: bool = False) -> str:
        """Returns the page as HTML.

        Args:
          ended_early: Whether an error or the user ended the training.
        """
        fed = self.federated_model
        charts = [
            self._chart(title, unit, self._series(names))
            for title, unit, names in _CHARTS
        ]
        paragraphs = fed.privacy_statement(self.delta).split("\n\n")
        return "".join(
            [
                '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                f"<title>{_text(fed.model.name)}: training with differential "
                f"privacy</title><style>{_STYLE}</style></head><body>\n",
                f"<h1>{_text(fed.model.name)}</h1>\n",
                "<p><strong>The training was broken off.</strong></p>"
                if ended_early
                else "",
                f'<ul class="figures">{self._headline()}</ul>\n',
                "<h2>What is guaranteed</h2>\n",
                *(f"<p>{_text(each)}</p>\n" for each in paragraphs),
                "<h2>The rounds</h2>\n<p>All but epsilon was computed from "
                "clients' data, most of it without noise.</p>\n",
                f'<div class="charts">{"".join(charts)}</div>\n',
                "<h2>Settings</h2>\n<table>",
                *(
                    f"<tr><td>{_text(name)}</td><td>{_text(value)}</td></tr>\n"
                    for name, value in self.settings().items()
                    if value is not None
                ),
                "</table></body></html>\n",
            ]
        )

    def settings(self) -> dict[str, Any]:
        """Returns what the page says of how the training was set."""
        fed = self.federated_model
        return resuming.settings(
            fed.setup, fed.compiled, fed.run.sampler.num_clients, fed.run.plan
        )

    def _headline(self) -> str:
        fed = self.federated_model
        facts = fed.privacy_statement(self.delta, "dict")
        figures = [("rounds", f"{fed.rounds}")]
        for name, word in (
            ("val_accuracy", "accuracy on validation data"),
            ("accuracy", "accuracy in training"),
        ):
            values = self._series([name])
            if values:
                figures.append((word, f"{values[0][2][-1]:.3f}"))
                break
        epsilon = facts["epsilon"]
        figures.append(
            (
                f"epsilon at delta = {facts['delta']:g}, for one {facts['unit']}",
                "none" if epsilon is None else f"{_rounded_up(epsilon)}",
            )
        )
        return "".join(
            f"<li><b>{_text(value)}</b>{_text(word)}</li>" for word, value in figures
        )

    def _series(self, names: Sequence[str]) -> list[tuple[str, list[int], list[float]]]:
        """Returns the finite values of each name that has any."""
        found = []
        for name in names:
            points = [
                (t, float(logs[name]))
                for t, logs in self._rounds
                if name in logs and math.isfinite(logs[name])
            ]
            if name in _RARELY_ALL_ZERO and not any(v for _, v in points):
                continue
            if points:
                rounds, values = zip(*points, strict=True)
                found.append((name, list(rounds), list(values)))
        return found

    def _chart(
        self,
        title: str,
        unit: str,
        series: list[tuple[str, list[int], list[float]]],
    ) -> str:
        """Returns an SVG drawing; "" if there is nothing to draw."""
        if not series:
            return ""
        # Without pyplot: a notebook's own charts stay as they were.
        from matplotlib import figure

        drawn = figure.Figure(figsize=(5, 3.2), layout="constrained")
        axes = drawn.add_subplot()
        for place, (name, rounds, values) in enumerate(series):
            style: dict[str, Any] = {
                "color": _COLORS[place],
                "label": name,
                "linewidth": 1.8,
            }
            if len(rounds) == 1:
                style["marker"] = "o"
            axes.plot(rounds, values, **style)
        target = self.federated_model.target
        if series[0][0] == "epsilon" and target is not None:
            axes.axhline(target.epsilon, color="#555", linestyle="--", label="target")
        axes.set_title(title, fontsize=11, loc="left")
        axes.set_xlabel("round")
        axes.set_ylabel(unit)
        locator: Any = axes.xaxis.get_major_locator()  # Takes `integer`.
        locator.set_params(integer=True)
        if unit.startswith("fraction"):
            axes.set_ylim(0, 1.02)
        elif min(min(values) for _, _, values in series) >= 0:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        handles = axes.get_legend_handles_labels()[0]
        if len(handles) > 1:
            drawn.legend(loc="outside lower center", ncols=3, fontsize=8)
        stream = io.StringIO()
        drawn.savefig(stream, format="svg", metadata={"Date": None})
        svg = stream.getvalue()
        return f"<div>{svg[svg.index('<svg') :]}</div>"


def check_log_dir(log_dir: str | os.PathLike[str]) -> None:
    """Raises unless scalars for TensorBoard can be written to a folder.

    Raises:
      ImportError: tensorboard is not installed.
      ValueError: There is a file in the folder's place.
    """
    with _optional.needed("tensorboard", "A log for TensorBoard"):
        import tensorboard  # noqa: F401
    if pathlib.Path(log_dir).is_file():
        raise ValueError(
            f"log_dir must name a folder, got the file {os.fspath(log_dir)!r}."
        )


class Scalars:
    """What a page's charts show, as scalars for TensorBoard."""

    def __init__(self, log_dir: str | os.PathLike[str]):
        """Makes the folder, and a file of events in it.

        Args:
          log_dir: The folder.
        """
        self._writer = tf.summary.create_file_writer(os.fspath(log_dir))
        self._last = 0

    def write(self, number: int, logs: Mapping[str, float]) -> None:
        """Writes a round's values, those that are numbers.

        Args:
          number: The round, from 1.
          logs: Its values by name.
        """
        self._last = number
        with self._writer.as_default(step=number):
            for title, _, names in _CHARTS:
                for name in names:
                    if name in logs and math.isfinite(logs[name]):
                        tf.summary.scalar(f"{title}/{name}", logs[name])
        self._writer.flush()

    def close(self, statement: str) -> None:
        """Writes the privacy statement, and ends the file."""
        with self._writer.as_default(step=self._last):
            tf.summary.text("Privacy statement", statement)
        self._writer.close()


def _text(value: Any) -> str:
    return html.escape(str(value))


def _rounded_up(epsilon: float) -> str:
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 2) if epsilon else 1.0
    return f"{math.ceil(epsilon / unit - 1e-9) * unit:.3g}"
