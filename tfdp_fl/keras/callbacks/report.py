"""A page about a training run: its guarantee, its rounds and its settings."""

from __future__ import annotations

import datetime
import io
import math
import os
import pathlib
from typing import Any

import tfdp_fl
from tfdp_fl import _files, accounting
from tfdp_fl.keras import checkpoint
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback

# By a chart's title, the plotted values and their labels.
_CHARTS = {
    "Accuracy": {"val_accuracy": "validation data", "accuracy": "clients in training"},
    "Loss": {"val_loss": "validation data", "loss": "clients in training"},
    "Epsilon spent": {"epsilon": "spent"},
    "Clip and norms": {
        "clip_norm": "clip norm",
        "mean_update_norm": "mean update norm",
    },
}

# Settings that only checkpoints may hold. If clients have no names, the digest covers
# their data: anyone who knows all others' data could use it to find one client's.
_SECRET_SETTINGS = ("seed", checkpoint.CLIENTS_DIGEST)

# Labels of settings whose name, without underscores, is not clear enough.
_LABELS = {
    "rounds": "rounds asked for",
    "clients (their number)": "clients",
    "clients_per_round": "clients expected in a round",
    "shuffle": "examples are shuffled",
    "non_trainable_state": "non-trainable state",
    "on_client_failure": "if a client fails",
    "optimizer": "clients' optimizer",
    "server_optimizer": "server's optimizer",
    "grad_clip": "clip of the clients' gradients",
    "keras": "library",
    "executor": "how clients were trained",
}


def _label(setting: str) -> str:
    return _LABELS.get(setting, setting.replace("_", " ")).capitalize()


class Report(FederatedCallback):
    """Writes a page about a training run, as one self-contained HTML file.

    It has the privacy statement, the settings, and charts of accuracy, loss, epsilon
    against the target, clip and norms. Without matplotlib, it explains how to get the
    charts. It is written when `fit` ends, even by an error or by the user, and replaces
    the whole file. Most charts were computed from clients' data without noise, and the
    page says so: show it only to people who may see that data.

    Attributes:
      path: The file; its folder is created when training begins.
      delta: The delta of the statement; None: the model's default.
      title: The headline, such as the name of the data set; None: the model's name.
      preface: A paragraph before the statement, for example about the silo.
    """

    preface = ""

    def __init__(
        self,
        path: str | os.PathLike[str],
        delta: float | None = None,
        title: str | None = None,
    ):
        """Makes a callback that writes the page when `fit` ends.

        Args:
          path: The file to write, such as "report.html".
          delta: The delta of the statement; None: the model's default.
          title: The headline, such as the name of the data set; None: the model's
            name.

        Raises:
          ValueError: The path is a folder.
        """
        super().__init__()
        self.path = pathlib.Path(path)
        if self.path.is_dir():
            raise ValueError(
                "path must name a file, such as report.html, got the folder "
                f"{os.fspath(path)!r}."
            )
        self.delta = delta
        self.title = title
        self._rounds: dict[int, dict[str, float]] = {}
        self._was_interrupted = True

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Makes the folder now, so that an error does not wait until the end."""
        self._was_interrupted = True
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Records that the training was not interrupted."""
        self._was_interrupted = False

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Stores a round's values."""
        self._rounds[round_index + 1] = dict(logs)

    def on_fit_end(self) -> None:
        """Writes the page."""
        _files.write_text(self.path, self._page())

    def _page(self) -> str:
        import jinja2

        fed = self.federated_model
        facts = fed.privacy_statement(self.delta, "dict")
        settings = checkpoint.settings(fed, fed.run.population, fed.run.plan)
        for name in _SECRET_SETTINGS:
            settings.pop(name, None)
        if settings.get("grad_clip", 0) < 0:
            del settings["grad_clip"]
        training = fed.require_compiled("a report")
        # (Zero if the optimizer has a schedule.)
        settings["clients' learning rate"] = training.learning_rate or "a schedule"
        settings["model"] = f"{fed.model.name}, {fed.model.count_params()} weights"
        settings["executor"] = fed.run.executor
        template = pathlib.Path(__file__).with_name("report.html").read_text("utf-8")
        environment = jinja2.Environment(
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"up": accounting.format_up, "label": _label}
        return environment.from_string(template).render(
            title=self.title or fed.model.name,
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            version=tfdp_fl.__version__,
            was_interrupted=self._was_interrupted,
            facts={**facts, "preface": self.preface},
            accuracies=self._series("val_accuracy"),
            charts=self._charts(fed.setup.target),
            settings=settings,
        )

    def _series(self, name: str) -> list[tuple[int, float]]:
        """Returns the rounds in which a value is finite, with the value."""
        return [
            (number, logs[name])
            for number, logs in self._rounds.items()
            if math.isfinite(logs.get(name, math.nan))
        ]

    def _charts(self, target: Any) -> list[str] | None:
        """Returns SVG drawings; None without matplotlib."""
        try:
            from matplotlib import figure  # Not pyplot, which a notebook may be using.
        except ModuleNotFoundError:
            return None
        charts = []
        for title, names in _CHARTS.items():
            chart = figure.Figure(figsize=(5, 3.2), layout="constrained")
            axes = chart.add_subplot(title=title, xlabel="round")
            for name, label in names.items():
                points = self._series(name)
                if points:
                    axes.plot(*zip(*points, strict=True), marker=".", label=label)
            if not axes.lines:
                continue
            if title == "Epsilon spent" and target is not None:
                axes.axhline(target.epsilon, color="#555", ls="--", label="target")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
            stream = io.StringIO()
            chart.savefig(stream, format="svg", metadata={"Date": None})
            svg = stream.getvalue()
            charts.append(svg[svg.index("<svg") :])
        return charts
