"""The Keras front: a model that is trained on clients, with a guarantee."""

from __future__ import annotations

import dataclasses
import math
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, accounting, engine, keras_versions, schedules
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import secure_sum
from tfdp_fl.keras import callbacks as callbacks_lib
from tfdp_fl.keras import progress, randomness, run_state, statement
from tfdp_fl.keras.fit_plan import FitPlan
from tfdp_fl.keras.privacy_target import PrivacyTarget
from tfdp_fl.mechanisms import Deployment, Mechanism

SAMPLINGS = ("poisson", "fixed_size", "shuffled")
FAILURE_RULES = ("abort", "exclude")
NON_TRAINABLE_STATES = ("aggregate", "keep")


class NotCompiledError(RuntimeError, ValueError):
    """`fit` was called before `compile`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Compiled:
    """What `compile` was given."""

    training: engine.LocalTraining
    server_optimizer: tf.keras.optimizers.Optimizer | None
    broadcast_hook: Any
    jit_compile: bool | None


class DPFederatedModel:
    """Trains a Keras model on the data of many clients.

    Every round draws a cohort, trains each of its clients from the current
    weights, clips and adds up their updates as the mechanism says, adds its
    noise, and moves the model by the mean. What that cost is accounted for
    from what really ran.

    Non-trainable state that training changes (the moving statistics of batch
    normalization) is part of a client's update by default: clipped and noised
    together with the weights. With `non_trainable_state="keep"` it is not
    taken from clients at all, and keeps the value that the model came with.
    It is never released as it is.

    Attributes:
      model: The Keras model; it holds the trained weights at any time.
      mechanism: What is released about a cohort.
      delta: The delta at which `History` reports epsilon, or None.
      accountant: "rdp" or "pld".
      target: What the noise was calibrated for (`make_private`), or None.
      run_id: Names this training in ledgers; a resumed one has the same.
      known_ledgers: The hash of the last line that this model knows of each
        ledger, by the ledger's path.
      ledgers_ahead: Those which may hold rounds that came after the checkpoint
        from which this model was resumed.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        mechanism: Mechanism,
        clients_per_round: schedules.Schedule,
        sampling: str = "poisson",
        *,
        delta: float | None = None,
        accountant: str = "rdp",
        on_client_failure: str | None = None,
        non_trainable_state: str = "aggregate",
        secure_aggregation: Any = None,
        num_replicas: int | None = None,
        target: PrivacyTarget | None = None,
    ):
        """Wraps a model; nothing is copied or traced yet.

        Args:
          model: A built Keras model (Sequential, functional or subclassed).
          mechanism: A `tfdp_fl` mechanism.
          clients_per_round: The expected cohort size m, constant, a sequence
            with one value a round, or a callable of the round (from 0). A
            callable, here or in the mechanism, is asked once for each round:
            what it says then is what is used and what is charged.
          sampling: "poisson": every client takes part with probability m/N;
            "fixed_size": m of N without replacement; "shuffled": every client
            once per pass.
          delta: Where given, `History` has epsilon at this delta.
          accountant: "rdp" or "pld", by which epsilon is computed unless told
            otherwise. PLD is tighter, and costs about 0.1 s a round where
            `History` has epsilon; RDP costs next to nothing.
          on_client_failure: What happens to a round in which a client's data
            cannot be read: "exclude" goes on without the client, "abort"
            abandons the round (nothing released, nothing charged). The default
            is "abort" if clients add the noise, which would then fall short,
            and "exclude" otherwise.
          non_trainable_state: "aggregate" or "keep".
          secure_aggregation: An `AdditiveSecretSharing`, through which the
            clients' records are summed; None sums them in the engine.
          num_replicas: How many clients train at once; None: one a core.
          target: What the noise was calibrated for; kept in every `fit`, as
            its `on_overspend` says. `make_private` gives it.

        Raises:
          ValueError: An argument is not allowed; the message names it.
          TypeError: An argument has the wrong type.
        """
        keras_versions.check_installed()
        _validate.instance_of(tf.keras.Model, model=model)
        _validate.instance_of(Mechanism, mechanism=mechanism)
        _validate.one_of(SAMPLINGS, sampling=sampling)
        if not model.built:
            raise ValueError(
                "model must be built: give its first layer an input shape or "
                f"call it on a batch, got {model.name!r} without weights."
            )
        if not model.trainable_variables:
            raise ValueError(
                "model must have trainable variables, got "
                f"{model.name!r} with none."
            )
        if num_replicas is not None:
            _validate.positive_integer(num_replicas=num_replicas)
        if delta is not None:
            delta = _validate.inside_unit_interval(delta=delta)
        if target is not None:
            _validate.instance_of(PrivacyTarget, target=target)
        if callable(mechanism.noise_multiplier):
            mechanism = mechanism.with_noise_multiplier(
                schedules.fixed(mechanism.noise_multiplier)
            )
        self.model = model
        self._mechanism = mechanism
        self.delta = delta
        self.accountant = _validate.one_of(
            ("rdp", "pld"), accountant=accountant
        )
        self._clients_per_round = schedules.checked(
            schedules.fixed(clients_per_round),
            _validate.positive,
            "clients_per_round",
        )
        self._sampling = sampling
        self._non_trainable_state = _validate.one_of(
            NON_TRAINABLE_STATES, non_trainable_state=non_trainable_state
        )
        self._on_client_failure = self._failure_rule(on_client_failure)
        self._secure_aggregation = secure_aggregation
        self._num_replicas = num_replicas
        mechanism.check(
            Deployment(
                clients_per_round=self._clients_per_round, sampling=sampling
            )
        )
        self._compiled: _Compiled | None = None
        self._engine: engine.CohortEngine | None = None
        self._engine_key: Any = None
        self._sampler: sampling_lib.CohortSampler | None = None
        self._sampler_key: Any = None
        self._round = 0
        self._spending: spending_lib.Spending | None = None
        # The clients of the present fit, and of all fits that were charged:
        # how many, and a digest of who they are and in which order.
        self._population: tuple[int, str] | None = None
        self._populations: list[tuple[int, str]] = []
        self._num_records: int | None = None
        # The rounds that the clients' noise was calibrated for.
        self._calibration: dict[str, int] | None = None
        self._warned_of_more_rounds = False
        self._windows: np.ndarray | None = None
        self._plan: FitPlan | None = None
        self._deployment: Deployment | None = None
        self._cohort_sizes: list[int] = []
        self._interrupted_releases = 0
        self._last_logs: list[str] = ["loss"]
        # What the statement has to tell beside what was spent.
        self._facts = {
            "seed_given": False,
            "validated": False,
            "rounds_abandoned": 0,
            "clients_excluded": 0,
            "rounds_charged_twice": 0,
        }
        self._budget_delta: float | None = None
        self._target = target
        self._keep_target = target and callbacks_lib.KeepTarget(target)
        self.run_id = ledger_lib.new_run()
        self.known_ledgers: dict[str, str] = {}
        self.ledgers_ahead: set[str] = set()
        self._verbose = 0

    def _failure_rule(self, rule: str | None) -> str:
        at_clients = self.mechanism.needs_exact_cohort
        if rule is None:
            return "abort" if at_clients else "exclude"
        _validate.one_of(FAILURE_RULES, on_client_failure=rule)
        if rule == "exclude" and at_clients:
            raise ValueError(
                "on_client_failure must be 'abort' with noise_site='client', "
                "because without one client's share the noise falls short, "
                "got 'exclude'."
            )
        return rule

    # Keras's own methods.

    def compile(
        self,
        optimizer: Any = "sgd",
        loss: Any = None,
        metrics: Any = None,
        server_optimizer: tf.keras.optimizers.Optimizer | None = None,
        jit_compile: bool | None = None,
        *,
        loss_weights: Any = None,
        grad_clip: float = -1.0,
        upload_hook: Any = None,
        broadcast_hook: Any = None,
    ) -> None:
        """Sets how clients train and how the server moves the model.

        Args:
          optimizer: The clients' Keras optimizer; each client starts with
            fresh slots. `LearningRateScheduler` changes its rate by round.
          loss: As in Keras's `compile`.
          metrics: As in Keras's `compile`; training metrics are not noised.
          server_optimizer: A Keras optimizer that takes the negated mean
            update as its gradient (SGD with momentum: FedAvgM; Adam: FedAdam).
            None adds the mean update (FedAvg). With `use_ema` the model has
            the averaged weights when `fit` ends, as with Keras.
          jit_compile: Whether XLA compiles the clients' training; None decides
            by the model (see docs/benchmarks.md).
          loss_weights: As in Keras's `compile`.
          grad_clip: Each local gradient is scaled down to this L2 norm; off if
            it is 0 or less.
          upload_hook: `f(tensors) -> tensors`, a noise injector after local
            training; called inside the compiled code on what a client hands to
            the mechanism (a list of tensors), before the mechanism clips it.
          broadcast_hook: `f(weights, seed) -> weights`, a noise injector before
            broadcast; called on the list of weights that the clients of a
            round start from, with an int64 seed of shape [2].
        """
        if loss is None:
            raise ValueError("loss must be given, got None.")
        for name, hook in (
            ("upload_hook", upload_hook),
            ("broadcast_hook", broadcast_hook),
        ):
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} must be callable, got {hook!r}.")
        optimizer = tf.keras.optimizers.get(optimizer)
        keras_versions.check_optimizer(optimizer)
        if server_optimizer is not None:
            if self.mechanism.releases_weights:
                raise ValueError(
                    "server_optimizer must be None with "
                    f"{self.mechanism.name}, which releases weights and no "
                    f"update, got {server_optimizer!r}."
                )
            server_optimizer = tf.keras.optimizers.get(server_optimizer)
        self._compiled = _Compiled(
            training=engine.LocalTraining(
                optimizer=optimizer,
                loss=loss,
                metrics=metrics,
                loss_weights=loss_weights,
                proximal_weight=self.mechanism.proximal_weight,
                grad_clip=_validate.finite(grad_clip=grad_clip),
                upload_hook=upload_hook,
            ),
            server_optimizer=server_optimizer,
            broadcast_hook=broadcast_hook,
            jit_compile=jit_compile,
        )
        self._engine_key = None  # A new engine; its state goes on.
        self.model.compile(
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            loss_weights=loss_weights,
        )

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the model, as Keras's `evaluate` does."""
        self._require_compiled("evaluate")
        return self.model.evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Predicts, as Keras's `predict` does."""
        return self.model.predict(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return self.model(*args, **kwargs)

    def save(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the trained Keras model, which loads without this package."""
        self.model.save(path, **kwargs)

    def get_weights(self) -> list[np.ndarray]:
        """Returns the model's weights."""
        return self.model.get_weights()

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the model's weights."""
        self.model.set_weights(weights)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints the model's layers, and how it is trained."""
        print_fn = kwargs.get("print_fn") or print
        self.model.summary(*args, **kwargs)
        size = self._clients_per_round
        size = f"{size:g}" if schedules.is_constant(size) else "scheduled"
        print_fn(f"Mechanism: {self.mechanism.describe()}")
        print_fn(f"Cohorts: {self._sampling}, {size} clients per round")
        print_fn(f"Rounds so far: {self._round}")

    # Training.

    def fit(
        self,
        clients: FederatedDataset,
        rounds: int = 1,
        batch_size: int = 32,
        local_epochs: int = 1,
        validation_data: Any = None,
        validation_freq: int = 1,
        callbacks: Iterable[tf.keras.callbacks.Callback] | None = None,
        verbose: str | int = "auto",
        seed: int | None = None,
        runtime: Any = None,
        *,
        shuffle: bool = False,
        resume_from: str | os.PathLike[str] | None = None,
        between_client_variance: bool = False,
        validation_batch_size: int = 1024,
    ) -> tf.keras.callbacks.History:
        """Trains for a number of rounds.

        A second call goes on with the same model, clip, server optimizer and
        spent budget; rounds are counted over all calls. A model of
        `make_private` keeps its target over all of them: it ends before the
        round that would pass it (with an empty history, if that is the first),
        unless it was made with `on_overspend="warn"`.

        Args:
          clients: The clients' data. Where what was spent is kept for each
            client (local and per-record guarantees), and within a pass over
            shuffled clients, they are the same clients in the same order as
            before; elsewhere they may be others, and the statement names all
            their numbers.
          rounds: How many rounds to run (with `resume_from`: how many the
            interrupted call was to run in all).
          batch_size: Examples in one local batch; a client's last may be short.
          local_epochs: How often a client goes over its examples in one round.
          validation_data: `(x, y)` or a `tf.data.Dataset` of batches.
          validation_freq: Validate every so many rounds.
          callbacks: Keras callbacks (a round is an epoch to them) and
            `tfdp_fl.callbacks`.
          verbose: 0 silent, 1 or "auto" a progress bar, 2 a line a round.
          seed: Makes cohorts, order and noise repeat bit for bit; whoever
            knows it can undo the noise, and the statement says so. None: fresh
            entropy from the operating system.
          runtime: Where cohorts are trained: None for this process, or a
            `tfdp_fl.runtimes.TFFWorkers`.
          shuffle: Whether clients shuffle their examples for every epoch.
          resume_from: A directory that `RoundCheckpoint` wrote.
          between_client_variance: Whether to report Geyer's V_c and U_s; costs
            a pass over each update.
          validation_batch_size: Examples in one validation batch.

        Returns:
          A Keras `History`: the compiled metrics, `val_*`, and for each round
          `cohort_size`, `clip_norm`, `noise_stddev` (of the noise on the sum
          of updates), `clipped_fraction`, `mean_update_norm`,
          `discarded_clients`, `failed_clients`, `abandoned_rounds`, `epsilon`
          where a delta is known, and `between_client_variance` and
          `update_scale` if asked for.
        """
        self._require_compiled("fit")
        _validate.instance_of(FederatedDataset, clients=clients)
        _validate.positive_integer(rounds=rounds)
        _validate.positive_integer(batch_size=batch_size)
        _validate.positive_integer(local_epochs=local_epochs)
        _validate.positive_integer(validation_freq=validation_freq)
        if seed is not None:
            _validate.non_negative_integer(seed=seed)
        if runtime is not None and not hasattr(runtime, "collector"):
            raise TypeError(
                "runtime must be None or a tfdp_fl.runtimes.TFFWorkers, got "
                f"{runtime!r}."
            )
        verbose = 1 if verbose == "auto" else int(verbose)
        self._verbose = verbose
        callbacks = list(callbacks or [])
        plan = FitPlan(
            first_round=self._round,
            last_round=self._round + rounds,
            batch_size=batch_size,
            local_epochs=local_epochs,
            shuffle=shuffle,
            seed=seed,
        )
        interrupted = None
        if resume_from is not None:
            interrupted = run_state.InterruptedRun.read(
                resume_from, self, clients, plan
            )
            plan = interrupted.plan
            callbacks += callbacks_lib.ledger_of_resumed(resume_from, callbacks)
        self._prepare(
            clients,
            plan,
            between_client_variance,
            None if interrupted is None else interrupted.calibration,
        )
        self._engine.check_labels(clients)
        if interrupted is not None:
            interrupted.restore(self)
        self._plan = plan
        self._facts["seed_given"] |= seed is not None
        self._facts["validated"] |= validation_data is not None
        federated = [
            each
            for each in callbacks
            if isinstance(each, callbacks_lib.FederatedCallback)
        ]
        if self._keep_target is not None:
            federated.append(self._keep_target)
        for each in federated:
            each.set_federated_model(self)
        history = self.model.history = tf.keras.callbacks.History()
        keras_callbacks = tf.keras.callbacks.CallbackList(
            [*callbacks, history],
            model=self.model,
            verbose=0,
            epochs=plan.last_round,
            steps=1,
        )
        collector = self._engine
        if runtime is not None:
            collector = runtime.collector(self._engine, clients, plan)
        delta = self._history_delta(callbacks)
        progress_bar = progress.RoundProgress(
            verbose, self._round, plan.last_round
        )
        self.model.stop_training = False
        try:
            # What a ledger tells of counts against every budget.
            for each in sorted(federated, key=_opens_ledger):
                each.on_rounds_planned(self._round, plan.last_round)
            keras_callbacks.on_train_begin()
            logs: dict[str, float] = {}
            while (
                self._round < plan.last_round and not self.model.stop_training
            ):
                round_index = self._round
                if not all(each.allow_round(round_index) for each in federated):
                    break
                started = time.perf_counter()
                keras_callbacks.on_epoch_begin(round_index)
                keras_callbacks.on_train_batch_begin(0)
                logs = self._run_round(clients, plan, collector, federated)
                self._round += 1
                if delta is not None:
                    logs["epsilon"] = self.epsilon(delta)
                keras_callbacks.on_train_batch_end(0, logs)
                done = self._round - plan.first_round
                if validation_data is not None and (
                    done % validation_freq == 0
                    or self._round == plan.last_round
                ):
                    logs.update(
                        self._validate(validation_data, validation_batch_size)
                    )
                for each in federated:
                    each.on_round_released(round_index, logs)
                keras_callbacks.on_epoch_end(round_index, logs)
                progress_bar.end_of_round(
                    round_index, logs, time.perf_counter() - started
                )
            if self._round > plan.first_round:
                # Keras's own place for it: the last validation came before.
                self._engine.server.finalize()
            keras_callbacks.on_train_end(logs)
            for each in federated:
                each.on_train_ended()
        finally:
            for each in federated:
                each.on_fit_end()
        return history

    def _prepare(
        self,
        clients: FederatedDataset,
        plan: FitPlan,
        variance: bool,
        calibration: dict[str, int] | None,
    ) -> None:
        """Checks the data against everything else, and makes the engine."""
        self._check_population(clients)
        self._warn_of_delta(clients.num_clients)
        key = (clients.num_clients, plan.seed)
        if self._sampler is None or self._sampler_key != key:
            self._sampler = sampling_lib.make_sampler(
                self._sampling,
                clients.num_clients,
                self._clients_per_round,
                plan.seed,
            )
            self._sampler_key = key
        for round_index in range(plan.first_round, plan.last_round):
            self.mechanism.noise_multiplier_at(round_index)
            self._sampler.expected_cohort_size(round_index)
        deployment = Deployment(
            clients_per_round=self._clients_per_round,
            num_clients=clients.num_clients,
            sampling=self._sampling,
            min_examples=self._min_examples(clients),
            **self._calibrated_for(plan, calibration),
        )
        self.mechanism.check(deployment)
        bound_to = deployment
        if self.mechanism.guarantee in (
            spending_lib.CENTRAL,
            spending_lib.NONE,
        ):  # No other mechanism's noise depends on how long a `fit` is.
            bound_to = dataclasses.replace(
                deployment, rounds=None, max_participations=None
            )
        engine_key = (bound_to, clients.element_spec, variance)
        if self._engine is None or self._engine_key != repr(engine_key):
            self._make_engine(deployment, clients, plan, variance)
            self._engine_key = repr(engine_key)
        self._deployment = dataclasses.replace(
            deployment, num_variables=self._engine.num_variables
        )
        if self._spending is None:
            self._spending = spending_lib.Spending(
                self.mechanism.guarantee, clients.num_clients
            )
        if self._spending.clients.num_clients != clients.num_clients:
            # Central spending does not depend on who the clients are.
            self._spending.clients = accounting.LocalAccount(
                clients.num_clients
            )
            self._windows = None
        if self._engine.query.keeps_window and self._windows is None:
            self._windows = np.full(
                [
                    clients.num_clients,
                    self.mechanism.window,
                    self._engine.num_variables,
                ],
                np.nan,
                np.float32,
            )

    def _check_population(self, clients: FederatedDataset) -> None:
        """Refuses other clients where spending hangs on who they are."""
        population = (clients.num_clients, clients.client_ids_digest)
        if self._populations and population != self._populations[-1]:
            why = None
            if self._spending.by_client:
                why = "what was spent is kept for each client"
            elif not self._sampler.begins_pass(self._round):
                why = (
                    f"round {self._round + 1} goes on with a pass over the "
                    "clients, in which each takes part once"
                )
            if why is not None:
                before = self._populations[-1][0]
                got = (
                    "other ids or another order"
                    if before == clients.num_clients
                    else f"{clients.num_clients}"
                )
                raise ValueError(
                    f"clients must be the same {before} clients in the same "
                    f"order as in the rounds before, because {why}, got {got}."
                )
        self._population = population

    def _warn_of_delta(self, num_clients: int) -> None:
        if self.delta is None or self._spending is not None:
            return
        warned = self._target is not None and (
            self._target.delta * self._target.num_clients >= 1
        )
        if not warned and self.mechanism.guarantee != spending_lib.RECORD:
            warn_of_large_delta("delta", self.delta, num_clients)

    def _calibrated_for(
        self, plan: FitPlan, resumed: dict[str, int] | None
    ) -> dict[str, int]:
        """Returns for how many rounds clients set their noise.

        `rounds` and `max_participations` of a `Deployment`: those of the
        target, or else of the first `fit`. They stay, once a round was
        charged: a later `fit` has no fresh budget to calibrate to. A resumed
        one goes on with what the interrupted one had.
        """
        asked = plan.last_round - plan.first_round
        by_client = self.mechanism.guarantee not in (
            spending_lib.CENTRAL,
            spending_lib.NONE,
        )
        if by_client and resumed is not None:
            self._calibration = resumed
            return resumed
        if by_client and self._calibration is not None and self._populations:
            if (
                self._target is None
                and self.mechanism.epsilon is not None
                and plan.last_round > self._calibration["rounds"]
                and not self._warned_of_more_rounds
            ):
                self._warned_of_more_rounds = True
                warnings.warn(
                    f"rounds={asked} goes beyond the "
                    f"{self._calibration['rounds']} rounds for which "
                    f"{self.mechanism.name} set its noise to keep epsilon="
                    f"{self.mechanism.epsilon:g}. The noise stays as it was, "
                    "and epsilon will be larger.",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return self._calibration
        rounds = asked
        if by_client and self._target is not None:
            rounds = self._target.rounds
        participations = self._sampler.max_participations(
            rounds, plan.first_round
        )
        if self._participation_limit is not None:
            participations = min(participations, self._participation_limit)
        self._calibration = {
            "rounds": rounds,
            "max_participations": participations,
        }
        return self._calibration

    def _make_engine(
        self,
        deployment: Deployment,
        clients: FederatedDataset,
        plan: FitPlan,
        variance: bool,
    ) -> None:
        before = self._engine
        self._engine = engine.CohortEngine(
            model=self.model,
            training=self._compiled.training,
            mechanism=self.mechanism,
            deployment=deployment,
            element_spec=clients.element_spec,
            server_optimizer=self._compiled.server_optimizer,
            broadcast_hook=self._compiled.broadcast_hook,
            aggregate_non_trainable=self._non_trainable_state == "aggregate",
            moments=variance,
            collect_records=self._secure_aggregation is not None,
            num_replicas=self._num_replicas,
            jit_compile=self._compiled.jit_compile,
            batch_size=plan.batch_size,
        )
        if before is not None:
            self._engine.state = before.state

    def _min_examples(self, clients: FederatedDataset) -> int | None:
        if self.mechanism.guarantee != spending_lib.RECORD:
            return None
        try:
            sizes = clients.client_sizes()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"clients must know their sizes for {self.mechanism.name}: "
                f"{error}"
            ) from error
        self._num_records = int(sizes.sum())
        sizes = sizes[sizes > 0]
        return int(sizes.min()) if len(sizes) else None

    def _run_round(
        self,
        clients: FederatedDataset,
        plan: FitPlan,
        collector: Any,
        federated: list[callbacks_lib.FederatedCallback],
    ) -> dict[str, float]:
        """Draws, collects, charges, releases; returns the round's logs."""
        round_index = self._round
        positions = self._drawn(round_index, self._spending.clients)
        inputs = engine.RoundInputs(
            round_index=round_index,
            positions=positions,
            # The fixed m, also for the last, smaller cohort of a pass.
            clients_per_round=self._deployment.cohort_size(round_index),
            noise_multiplier=self.mechanism.noise_multiplier_at(round_index),
            batch_size=plan.batch_size,
            local_epochs=plan.local_epochs,
            learning_rate=self._client_learning_rate(),
            seed=randomness.round_seed(
                plan.seed, round_index, self._interrupted_releases
            ),
            shuffle=randomness.shuffle_generator(plan.seed, round_index)
            if plan.shuffle
            else None,
            windows=None if self._windows is None else self._windows[positions],
        )
        pending = collector.collect(clients, inputs)
        failed_groups: tuple[int, ...] = ()
        if self._secure_aggregation is not None:
            failed_groups = secure_sum.sum_securely(
                self._engine, pending, self._secure_aggregation
            )
        failed = len(pending.failures) + len(failed_groups)
        logs = {"cohort_size": float(len(positions))}
        report = {"failed_clients": float(failed)}
        if failed:
            self._report_failures(round_index, pending, failed_groups)
        if failed and self._on_client_failure == "abort":
            report["abandoned_rounds"] = 1.0
            self._facts["rounds_abandoned"] += 1
            return {**self._empty_logs(), **logs, **report}
        report["abandoned_rounds"] = 0.0
        answered = len(positions) - failed
        charge = self._charge(round_index, answered)
        mu_squared = self._mu_squared()
        details = {
            "cohort_size": len(positions),
            "noise_multiplier": inputs.noise_multiplier,
            "mu_squared": mu_squared,
            "max_mu_squared": self._spending.clients.max_mu_squared_after(
                positions, mu_squared
            )
            if self._spending.by_client
            else 0.0,
        }
        if plan.seed is not None:
            details["seeded"] = True
        for each in federated:
            each.on_round_charged(round_index, charge, details)
        self._spending.charge(charge, positions, mu_squared)
        if self._populations[-1:] != [self._population]:
            self._populations.append(self._population)
        try:
            released = self._engine.release(pending)
        except BaseException:
            self._interrupted_releases += 1
            raise
        self._cohort_sizes.append(len(positions))
        self._last_logs = list(released)
        self._facts["clients_excluded"] += failed
        self._remember_norms(positions, pending.window_norms)
        # The metrics first, as Keras orders them.
        return {**released, **logs, **report}

    @property
    def _participation_limit(self) -> int | None:
        return self.mechanism.max_participations

    def _drawn(
        self, round_index: int, account: accounting.LocalAccount
    ) -> np.ndarray:
        positions = self._sampler.cohort(round_index)
        limit = self._participation_limit
        if limit is None:
            return positions
        return positions[account.participations[positions] < limit]

    def _charge(self, round_index: int, answered: int | None = None):
        """Returns what a round costs that so many clients answered."""
        event = self.mechanism.round_event(round_index, self._deployment)
        if answered is None:
            answered = self._sampler.expected_cohort_size(round_index)
        if (
            self.mechanism.guarantee == spending_lib.LOCAL
            and answered < self._deployment.cohort_size(round_index)
        ):  # The noise of those who are missing is missing too.
            event = dp_accounting.NonPrivateDpEvent()
        return self._sampler.charge(round_index, event)

    def _mu_squared_after(self, rounds: int) -> Iterator[float]:
        """Yields the most that one client can have spent after each round.

        The cohorts of a shuffled order are known beforehand. Of others it is
        not known which clients they will draw: any that may still take part.
        """
        mu_squared, limit = self._mu_squared(), self._participation_limit
        clients = self._spending.clients
        elsewhere = self._spending.mu_squared_elsewhere
        if self._sampling != "shuffled":
            for draws in range(1, rounds + 1):
                yield elsewhere + clients.max_mu_squared_after_draws(
                    draws, mu_squared, limit
                )
            return
        trial = accounting.LocalAccount(clients.num_clients)
        trial.set_state(clients.get_state())
        for round_index in range(self._round, self._round + rounds):
            positions = self._drawn(round_index, trial)
            trial.add(positions, mu_squared)
            yield elsewhere + trial.max_mu_squared

    def _mu_squared(self) -> float:
        if not self._spending.by_client:
            return 0.0
        return self.mechanism.mu_squared(self._deployment)

    def _client_learning_rate(self) -> float:
        rate = keras_versions.learning_rate(self._compiled.training.optimizer)
        if rate is None:
            return 0.0  # The optimizer follows its own steps.
        if isinstance(rate, tf.Variable):
            # A tenth of the time that `numpy()` takes, in every round.
            rate = tf.raw_ops.ReadVariableOp(
                resource=rate.handle, dtype=rate.dtype
            )
        return float(rate)

    def _set_client_learning_rate(self, value: float) -> None:
        optimizer = self._compiled.training.optimizer
        if keras_versions.learning_rate(optimizer) is not None:
            optimizer.learning_rate = value

    def _remember_norms(
        self, positions: np.ndarray, norms: np.ndarray | None
    ) -> None:
        """Moves each client's window on by this round's norms."""
        if norms is None:
            return
        usable = np.isfinite(norms).all(axis=1)
        positions, norms = positions[usable], norms[usable]
        self._windows[positions] = np.concatenate(
            [self._windows[positions, 1:], norms[:, None]], axis=1
        )

    def _empty_logs(self) -> dict[str, float]:
        return dict.fromkeys(self._last_logs, math.nan)

    def _report_failures(
        self,
        round_index: int,
        pending: engine.PendingRound,
        failed_groups: tuple[int, ...],
    ) -> None:
        what = (
            "the round is abandoned"
            if self._on_client_failure == "abort"
            else "the round goes on without them"
        )
        if pending.failures:
            first = pending.failures[0]
            self.say(
                f"Round {round_index + 1}: the data of "
                f"{len(pending.failures)} client(s) could not be read; "
                f"{what}. Client {first.position}: {first.error!r}"
            )
        if failed_groups:
            self.say(
                f"Round {round_index + 1}: secure aggregation failed for "
                f"{len(failed_groups)} client(s), who keep their own updates; "
                f"{what}."
            )

    def _validate(self, data: Any, batch_size: int) -> dict[str, float]:
        options = {"verbose": 0, "return_dict": True}
        if isinstance(data, tf.data.Dataset):
            results = self.model.evaluate(data, **options)
        else:
            results = self.model.evaluate(
                *data, batch_size=batch_size, **options
            )
        return {f"val_{name}": value for name, value in results.items()}

    def _history_delta(self, callbacks: list[Any]) -> float | None:
        if self.delta is not None:
            return self.delta
        for each in callbacks:
            if isinstance(each, callbacks_lib.PrivacyBudget):
                self._budget_delta = each.delta
                return each.delta
        return None

    def _require_compiled(self, what: str) -> None:
        if self._compiled is None:
            raise NotCompiledError(
                f"compile must be called before {what}, with an optimizer and "
                "a loss."
            )

    def say(self, message: str) -> None:
        """Tells the user something about the training, unless silent."""
        if self._verbose:
            print(f"\n{message}", flush=True)

    # Privacy.

    @property
    def mechanism(self) -> Mechanism:
        """What is released about a cohort; what was charged hangs on it."""
        return self._mechanism

    @property
    def sampling(self) -> str:
        """How cohorts are drawn: "poisson", "fixed_size" or "shuffled"."""
        return self._sampling

    @property
    def target(self) -> PrivacyTarget | None:
        """What the noise was calibrated for, if `make_private` did it."""
        return self._target

    @property
    def seed_given(self) -> bool:
        """Returns whether any `fit` was given a seed."""
        return self._facts["seed_given"]

    @property
    def rounds(self) -> int:
        """Returns how many rounds were run (abandoned ones included)."""
        return self._round

    @property
    def spending(self) -> spending_lib.Spending | None:
        """Returns what the rounds have cost; None before the first `fit`."""
        return self._spending

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns the epsilon at delta of the rounds that ran.

        For a central guarantee it is composed under the sampling that ran; for
        a local one (and one per record) it is that of the client that was seen
        most. Infinite without a guarantee, 0 before the first round.

        Args:
          delta: Strictly between 0 and 1.
          accountant: "rdp" or "pld"; None: the model's own.
        """
        delta = _validate.inside_unit_interval(delta=delta)
        if self._spending is None:
            return 0.0
        return self._spending.epsilon(delta, accountant or self.accountant)

    def central_epsilon(
        self, delta: float, accountant: str | None = None
    ) -> float:
        """Returns the epsilon against those who see the model only.

        For a local mechanism it is what the clients' noise adds up to; where
        nothing is claimed (a Poisson cohort has no fixed number of noises) it
        is infinite, and the local epsilon is the bound.
        """
        delta = _validate.inside_unit_interval(delta=delta)
        if self._spending is None:
            return 0.0
        return self._spending.central_epsilon(
            delta, accountant or self.accountant
        )

    def epsilon_after_round(
        self, round_index: int, delta: float, accountant: str | None = None
    ) -> float:
        """Returns what epsilon would be after the coming round."""
        if self._spending.by_client:
            (spent,) = self._mu_squared_after(1)
            return spending_lib.epsilon_of_mu_squared(spent, delta)
        return self._spending.epsilon_after(
            self._charge(round_index),
            self._mu_squared(),
            delta,
            accountant or self.accountant,
        )

    def affordable_rounds(
        self,
        epsilon: float,
        delta: float,
        rounds: int,
        accountant: str | None = None,
    ) -> int:
        """Returns how many of the next rounds a budget allows."""
        if self._spending.by_client:
            for done, spent in enumerate(self._mu_squared_after(rounds)):
                if spending_lib.epsilon_of_mu_squared(spent, delta) > epsilon:
                    return done
            return rounds

        charges = [self._charge(self._round + ahead) for ahead in range(rounds)]

        def cost(count: int) -> float:
            trial = self._spending.central.copy()
            for charge in charges[:count]:
                trial.add(charge)
            return trial.epsilon(delta, accountant or self.accountant)

        if cost(rounds) <= epsilon:
            return rounds
        low, high = 0, rounds
        while high - low > 1:
            middle = (low + high) // 2
            if cost(middle) <= epsilon:
                low = middle
            else:
                high = middle
        return low

    def privacy_statement(
        self, delta: float | None = None, format: str = "text"
    ) -> str | dict[str, Any]:
        """Returns what was guaranteed, to whom, and what was not.

        Args:
          delta: Where epsilon is stated; None: the `delta` of this model, or
            that of the last `PrivacyBudget`, or else N^-1.1 for N clients
            (McMahan et al. 2018), or records where those are protected.
          format: "text", "markdown" or "dict".

        Raises:
          ValueError: Nothing was trained yet, or an argument is not allowed.
        """
        if self._spending is None:
            raise ValueError(
                "fit must be called before privacy_statement: there is nothing "
                "to state yet."
            )
        if delta is None:
            delta = self.delta or self._budget_delta
        if delta is None:
            units = [size for size, _ in self._populations]
            units.append(self._spending.clients.num_clients)
            if self._spending.guarantee == spending_lib.RECORD:
                units = [self._num_records]
            delta = min(0.5, max(units) ** -1.1)
        return accounting.privacy_statement(
            statement.facts(self), delta, format
        )


def warn_of_large_delta(name: str, delta: float, num_clients: int) -> None:
    """Warns of a delta that publishing one client outright could have."""
    if delta * num_clients >= 1:
        warnings.warn(
            f"{name} should be below 1 / num_clients = {1 / num_clients:.3g}, "
            f"got {delta:g}: a mechanism that publishes one of the "
            f"{num_clients} clients outright could have that delta.",
            RuntimeWarning,
            stacklevel=3,
        )


def _opens_ledger(callback: callbacks_lib.FederatedCallback) -> int:
    """Sorts ledgers first, then checkpoints, which save what ledgers tell."""
    if isinstance(callback, callbacks_lib.Ledger):
        return 0
    return 1 if isinstance(callback, callbacks_lib.RoundCheckpoint) else 2
