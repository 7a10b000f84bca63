"""Runs a training from its settings: prepares it, trains, and writes its files."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import pathlib
import time
from typing import Any

import tensorflow as tf

from tfdp_fl import _files, losses, mechanisms
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.experiments import run_directory, tasks
from tfdp_fl.experiments import settings as settings_lib
from tfdp_fl.experiments.settings import Settings
from tfdp_fl.keras import DPFederatedModel, callbacks, make_private
from tfdp_fl.keras.make_private import plan_parameters
from tfdp_fl.terms import Json, TrustModel


def use_one_thread_per_operation() -> bool:
    """Gives each TensorFlow operation one thread, so that all cores train clients.

    Several clients train in parallel, and operations that each use all cores would slow
    each other down. Call it before TensorFlow starts.

    Returns:
      Whether it is set; False if TensorFlow has already started with other threads.
    """
    threading = tf.config.threading
    try:
        threading.set_intra_op_parallelism_threads(1)
        threading.set_inter_op_parallelism_threads(os.cpu_count() or 1)
    except RuntimeError:
        return threading.get_intra_op_parallelism_threads() == 1
    return True


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
    if not any(getattr(settings, name) for name in settings_lib.SERVER_SETTINGS):
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
    """Trains, and writes the files of `run_directory` to `output_dir`.

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
    run_directory.check(path, overwrite, resume)
    settings, task = prepared.settings, prepared.task
    if not resume:
        path.mkdir(parents=True, exist_ok=True)
        run_directory.clear(path)
        run_directory.write_json(
            path / run_directory.CONFIG, dataclasses.asdict(settings)
        )
    federated_model, delta = prepared.federated_model, prepared.delta
    fit_callbacks: list[tf.keras.callbacks.Callback] = [
        run_directory.HistoryFile(path / run_directory.HISTORY),
        callbacks.Report(path / run_directory.REPORT, delta, settings.dataset),
        callbacks.RoundCheckpoint(
            path / run_directory.CHECKPOINT,
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
            resume_from=path / run_directory.CHECKPOINT if resume else None,
        )
    except KeyboardInterrupt:
        stopped = "interrupted"
    if budget is not None and budget.stopped_before_round is not None:
        stopped = "budget"
    seconds = time.perf_counter() - started
    # An interrupt while TensorFlow traces can leave this thread inside a graph, where
    # no model can be saved or evaluated. A new thread is outside.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(_write_files, prepared, path, stopped, seconds)
        result = future.result()
    if stopped != "interrupted" and not settings.checkpoint_every:
        # This comes last, so that a run that is interrupted before can be resumed.
        run_directory.delete_checkpoints(path)
    return result


def _write_files(
    prepared: Prepared, path: pathlib.Path, stopped: str | None, seconds: float
) -> Json:
    settings, federated_model = prepared.settings, prepared.federated_model
    model = federated_model.model
    tasks.with_feature_layers(prepared.task, model).save(path / run_directory.MODEL)
    _files.write_text(
        path / run_directory.STATEMENT,
        f"{federated_model.privacy_statement(prepared.delta)}\n",
    )
    statement: Any = federated_model.privacy_statement(prepared.delta, format="dict")
    run_directory.write_json(path / run_directory.STATEMENT_JSON, statement)
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
    run_directory.write_json(path / run_directory.RESULT, result)
    if mechanism.trust_model != TrustModel.NONE and federated_model.rounds:
        run_directory.draw_chart(path, f"{settings.dataset}, {mechanism.name}")
    return result
