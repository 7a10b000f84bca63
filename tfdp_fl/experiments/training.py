"""Runs a training from its settings: prepares it, trains, and writes its directory.

config.json   the settings, with every open choice filled in
history.csv   one row per round
model.keras   the trained Keras model
privacy.txt   the privacy statement
privacy.json  the same, for programs
report.html   everything on one page
accuracy.png  accuracy and epsilon by round, if matplotlib is installed
result.json   the numbers that a sweep compares
"""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import io
import json
import math
import os
import pathlib
import shutil
import time
from typing import Any

import tensorflow as tf

from tfdp_fl import _files, losses, mechanisms
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.accounting import format_up
from tfdp_fl.experiments import settings as settings_lib
from tfdp_fl.experiments import tasks
from tfdp_fl.experiments.settings import Settings
from tfdp_fl.keras import DPFederatedModel, callbacks, make_private
from tfdp_fl.keras.make_private import plan_parameters
from tfdp_fl.terms import Json, TrustModel

CONFIG = "config.json"
HISTORY = "history.csv"
MODEL = "model.keras"
STATEMENT = "privacy.txt"
STATEMENT_JSON = "privacy.json"
REPORT = "report.html"
CHART = "accuracy.png"
RESULT = "result.json"
INTERRUPTED = "interrupted"  # A result's "stopped" if the run can be continued.
LEDGER = "ledger.jsonl"
CHECKPOINT = "checkpoint"

_OWN_FILES = (
    *(CONFIG, HISTORY, MODEL, STATEMENT, STATEMENT_JSON),
    *(REPORT, CHART, RESULT, LEDGER, CHECKPOINT),
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A run that has been checked, but not started.

    Attributes:
      settings: The settings, with every open choice filled in.
      task: The data.
      federated_model: The compiled model.
      delta: The delta at which epsilon is reported.
    """

    settings: Settings
    task: tasks.Task
    federated_model: DPFederatedModel
    delta: float


def prepare(settings: Settings) -> Prepared:
    """Loads the data, and makes the model and the mechanism.

    Raises:
      ValueError, TypeError: A setting is not allowed, or contradicts another; the
        message names it.
      OSError: The data is missing.
    """
    settings = settings.resolve()
    task = tasks.load_task(settings)
    num_clients = task.clients.num_clients
    # Checks m against N, which nothing else does before the first round.
    sampling_lib.make_sampler(
        settings.sampling, num_clients, settings.schedule("clients_per_round")
    )
    if settings.seed is not None:
        tf.keras.utils.set_random_seed(settings.seed)
    delta = settings.delta(num_clients)
    federated_model = _make_federated_model(
        settings, tasks.build_model(settings, task), num_clients, delta
    )
    loss: tf.keras.losses.Loss = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True
    )
    if settings.prior_smoothing is not None:
        loss = losses.BalancedSoftmaxCrossentropy(settings.prior_smoothing)
    federated_model.compile(
        optimizer=tf.keras.optimizers.SGD(settings.client_learning_rate),
        loss=loss,
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy("accuracy")],
        server_optimizer=_make_server_optimizer(settings),
    )
    return Prepared(settings, task, federated_model, delta)


def _make_federated_model(
    settings: Settings, model: tf.keras.Model, num_clients: int, delta: float
) -> DPFederatedModel:
    kind: Any = settings_lib.MECHANISMS[settings.mechanism]
    size = settings.schedule("clients_per_round")
    smallest = min(size) if isinstance(size, tuple) else size
    options = {
        **plan_parameters(kind, settings.rounds, num_clients, smallest),
        **settings.mechanism_options(),
    }
    noise = settings.schedule("noise_multiplier")
    # If an option is None (an exact median), no default may replace it.
    may_use_defaults = None not in options.values()
    if noise is None and kind.trust_model == TrustModel.CENTRAL:
        mechanism: Any = settings.mechanism
        if not may_use_defaults:
            mechanism, options = kind(noise_multiplier=1.0, **options), {}
        return make_private(
            model,
            target_epsilon=settings.target_epsilon,
            target_delta=delta,
            num_clients=num_clients,
            clients_per_round=size,
            sampling=settings.sampling,
            mechanism=mechanism,
            accountant=settings.accountant,
            **{**options, "rounds": settings.rounds},
        )
    if noise is None:
        budget = {"epsilon": settings.target_epsilon, "delta": delta}
        parameter_names = {field.name for field in dataclasses.fields(kind)}
        options |= {name: budget[name] for name in parameter_names & budget.keys()}
        mechanism = kind(**options)
    elif kind.trust_model == TrustModel.CENTRAL and may_use_defaults:
        target = mechanisms.CalibrationTarget(noise, math.inf, delta, smallest)
        mechanism = kind.from_budget(target, **options)
    else:
        mechanism = kind(noise_multiplier=noise, **options)
    return DPFederatedModel(
        model,
        mechanism,
        clients_per_round=size,
        sampling=settings.sampling,
        delta=delta,
        accountant=settings.accountant or "rdp",
    )


def _make_server_optimizer(settings: Settings) -> tf.keras.optimizers.Optimizer | None:
    if not any(v for name, v in vars(settings).items() if name.startswith("server_")):
        return None
    rate: Any = float(settings.server_learning_rate or 1.0)
    if settings.server_schedule == "linear":
        decay = tf.keras.optimizers.schedules.PolynomialDecay
        rate = decay(rate, settings.rounds, 0.0)
    average: Json = {}
    if settings.server_ema:
        average = {"use_ema": True, "ema_momentum": settings.server_ema}
    return tf.keras.optimizers.SGD(rate, settings.server_momentum or 0.0, **average)


def run(
    prepared: Prepared,
    output_dir: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    resume: bool = False,
    verbose: str | int = "auto",
) -> Json:
    """Trains, and writes the files listed above to `output_dir`.

    An interrupt (Ctrl-C) ends the training. The rounds until then are charged and
    saved, and `resume` continues from there.

    Args:
      prepared: The run.
      output_dir: A directory that is empty or does not exist, unless `overwrite` or
        `resume` is set.
      overwrite: Whether to replace an earlier run.
      resume: Whether to resume an interrupted run, which must have been prepared from
        the same settings.
      verbose: As in `fit`.

    Returns:
      The contents of `result.json`.

    Raises:
      ValueError: The directory must not be written to.
    """
    path = pathlib.Path(output_dir)
    check_directory(path, overwrite, resume)
    settings, task = prepared.settings, prepared.task
    if not resume:
        path.mkdir(parents=True, exist_ok=True)
        clear_directory(path)
        write_json(path / CONFIG, dataclasses.asdict(settings))
    federated_model, delta = prepared.federated_model, prepared.delta
    fit_callbacks: list[tf.keras.callbacks.Callback] = [
        HistoryFile(path / HISTORY),
        callbacks.Report(path / REPORT, delta, settings.dataset),
        callbacks.RoundCheckpoint(
            path / CHECKPOINT,
            # By default only at the end or at an interrupt, which can be resumed.
            every=settings.checkpoint_every or settings.rounds,
        ),
    ]
    budget = None
    if settings.noise_multiplier is not None and settings.target_epsilon:
        budget = callbacks.PrivacyBudget(
            settings.target_epsilon, delta, federated_model.setup.accountant
        )
        fit_callbacks.insert(0, budget)
    stopped = None
    started = time.perf_counter()
    try:
        federated_model.fit(
            task.clients,
            rounds=settings.rounds,
            batch_size=settings.batch_size,
            local_epochs=settings.local_epochs,
            validation_data=task.test,
            validation_freq=settings.validation_freq,
            callbacks=fit_callbacks,
            verbose=verbose,
            seed=settings.seed,
            shuffle=settings.shuffle,
            resume_from=path / CHECKPOINT if resume else None,
        )
    except KeyboardInterrupt:
        stopped = INTERRUPTED
    if budget is not None and budget.stopped_before_round is not None:
        stopped = "budget"
    seconds = time.perf_counter() - started
    # An interrupt while TensorFlow traces can leave this thread inside a graph, where
    # no model can be saved or evaluated. A new thread is outside.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(_write_files, prepared, path, stopped, seconds)
        result = future.result()
    if stopped != INTERRUPTED and not settings.checkpoint_every:
        # This comes last, so that a run that is interrupted before can be resumed.
        (path / CHECKPOINT / LEDGER).replace(path / LEDGER)
        shutil.rmtree(path / CHECKPOINT)
    return result


def _write_files(
    prepared: Prepared, path: pathlib.Path, stopped: str | None, seconds: float
) -> Json:
    settings, federated_model = prepared.settings, prepared.federated_model
    model = federated_model.model
    tasks.with_feature_layers(prepared.task, model).save(path / MODEL)
    _files.write_text(
        path / STATEMENT, f"{federated_model.privacy_statement(prepared.delta)}\n"
    )
    statement: Any = federated_model.privacy_statement(prepared.delta, format="dict")
    write_json(path / STATEMENT_JSON, statement)
    scores = federated_model.evaluate(
        *prepared.task.test, batch_size=1024, verbose=0, return_dict=True
    )
    mechanism = federated_model.mechanism
    accountant = federated_model.setup.accountant
    result = {
        "accuracy": scores["accuracy"],
        "loss": scores["loss"],
        "trust_model": mechanism.trust_model,
        "privacy_unit": mechanism.privacy_unit,
        "epsilon": federated_model.epsilon(prepared.delta, accountant),
        "delta": prepared.delta,
        "accountant": accountant,
        "rounds": federated_model.rounds,
        "stopped": stopped,
        "mechanism": mechanism.name,
        "mechanism_parameters": statement["mechanism_parameters"],
        "seconds": round(seconds, 2),
    }
    if settings.mechanism in settings_lib.CENTRAL_MECHANISMS:
        for name in ("rdp", "pld"):
            result[f"epsilon_{name}"] = federated_model.epsilon(prepared.delta, name)
    if result["trust_model"] == "local" and result["privacy_unit"] == "client":
        result["central_epsilon"] = federated_model.central_epsilon(
            prepared.delta, accountant
        )
    write_json(path / RESULT, result)
    if mechanism.trust_model != TrustModel.NONE and federated_model.rounds:
        _draw_chart(path, f"{settings.dataset}, {mechanism.name}")
    return result


# The directory.


def check_directory(
    path: str | os.PathLike[str], overwrite: bool = False, resume: bool = False
) -> None:
    """Raises ValueError if a run must not write to a directory."""
    path = pathlib.Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--output_dir={path} is a file.")
    if overwrite and resume:
        raise ValueError("--overwrite and --resume exclude each other.")
    if resume and not (path / CHECKPOINT).is_dir():
        raise ValueError(f"--resume: there is no interrupted run in {path}.")
    if path.is_dir() and any(path.iterdir()) and not (overwrite or resume):
        raise ValueError(
            f"--output_dir={path} is not empty; choose another, or add "
            "--overwrite or --resume."
        )


def clear_directory(path: pathlib.Path) -> None:
    """Removes the files of an earlier run, and no others."""
    for name in _OWN_FILES:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes JSON; numbers that are not finite become null."""
    value = _files.to_finite(_files.to_plain(value))
    _files.write_text(path, json.dumps(value, indent=2) + "\n")


class HistoryFile(callbacks.FederatedCallback):
    """Writes `history.csv`, one row per round, after each round.

    (Keras's `CSVLogger` fixes its columns in the first round. If `validation_freq` is
    more than 1, it would omit the validation metrics.) A resumed run keeps the rows of
    the rounds before it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__()
        self._path = pathlib.Path(path)
        self._rows: list[dict[str, str]] = []

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Keeps the rows of earlier rounds."""
        del last_round
        rows = _read_rows(self._path)
        self._rows = [row for row in rows if int(row["round"]) <= first_round]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds a round's row; rounds are counted from 1, as in the printed output."""
        row = {"round": epoch + 1, **(logs or {})}
        self._rows.append(
            {
                name: format_up(value, 7) if name == "epsilon" else f"{value:.7g}"
                for name, value in row.items()
            }
        )
        columns = dict.fromkeys(name for row in self._rows for name in row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        _files.write_text(self._path, text.getvalue())


def _draw_chart(path: pathlib.Path, title: str) -> None:
    """Draws accuracy (left axis) and epsilon (right axis) by round."""
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        return  # The report says how to get charts.
    chart = figure.Figure(figsize=(7, 4), layout="constrained")
    left = chart.add_subplot(title=title, xlabel="round", ylabel="accuracy")
    right = left.twinx()
    rows = _read_rows(path / HISTORY)
    for axes, name, line in ((left, "val_accuracy", "C0-"), (right, "epsilon", "C1--")):
        points = [(int(row["round"]), float(row[name])) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), line)
    left.set_ylim(0, 1)
    left.grid(alpha=0.3)
    right.set(ylabel="epsilon (dashed)", ylim=(0, None))
    chart.savefig(path / CHART, dpi=100)


def _read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Returns the rows of a `history.csv` as text, without empty cells."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: cell for name, cell in row.items() if cell != ""}
            for row in csv.DictReader(file)
        ]
