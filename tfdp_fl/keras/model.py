"""The Keras front end: a model that is trained on clients with a privacy guarantee.

This module has the class that users see and documents its arguments. The work is done
in `example_spec` (what an example looks like), `preparation` (checks; makes the
engine), `round_loop` (the rounds), `run` (the state between rounds) and `facts` (the
facts for the privacy statement).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import tensorflow as tf

from tfdp_fl import (
    _signals,
    _validate,
    accounting,
    auditing,
    datasets,
    keras_versions,
    schedules,
)
from tfdp_fl.datasets import adapters, nests, tables
from tfdp_fl.engine import Training, trainer
from tfdp_fl.keras import callbacks as callbacks_lib
from tfdp_fl.keras import (
    evaluation,
    example_spec,
    facts,
    federated_training,
    preparation,
    private_metrics,
    round_loop,
    training_setup,
)
from tfdp_fl.keras.checkpoint import InterruptedRun
from tfdp_fl.keras.evaluation import Validation
from tfdp_fl.keras.private_metrics import PrivateMetrics
from tfdp_fl.keras.run import FitPlan
from tfdp_fl.keras.training_setup import PrivacyTarget, TrainingSetup
from tfdp_fl.mechanisms import ClientWeighting, Mechanism, noise
from tfdp_fl.secure_aggregation import AdditiveSecretSharing
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from tfdp_fl.engine.ray_workers import RayWorkers

# Attributes forwarded to the Keras model: those that read it or set its weights. Others
# could train it without clipping and noise, or change what was compiled.
_FORWARDED_NAMES = (
    "built compute_dtype compute_output_shape count_params dtype dtype_policy export "
    "get_build_config get_compile_config get_config get_layer get_state_tree "
    "get_weight_paths get_weights history input input_dtype input_names input_shape "
    "input_spec inputs jit_compile layers load_weights loss losses metrics "
    "metrics_names metrics_variables name non_trainable_variables "
    "non_trainable_weights operations optimizer output output_names output_shape "
    "outputs path quantization_mode reset_metrics run_eagerly save_weights set_weights "
    "steps_per_execution stop_training submodules summary supports_jit "
    "supports_masking to_json trainable_variables trainable_weights variable_dtype "
    "variables weights"
)
FORWARDED_ATTRIBUTES = frozenset(_FORWARDED_NAMES.split())


class DPFederatedModel(federated_training.FederatedTraining):
    """Trains a Keras model on the data of many clients.

    Every round draws a cohort, trains each of its clients from the current weights,
    clips their updates and adds them up, adds the mechanism's noise, and updates the
    model with the mean. The cost is computed from the rounds that actually ran.

    Non-trainable state that training changes (the moving statistics of batch
    normalization) is part of a client's update by default: it is clipped together
    with the weights and gets noise. With `non_trainable_state="keep"`, clients do not
    upload it, and it keeps the model's initial value. It is never released without
    noise.
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
        secure_aggregation: AdditiveSecretSharing | None = None,
        max_parallel_clients: int | None = None,
        noise_generator: str = "philox",
        target: PrivacyTarget | None = None,
        client_weighting: ClientWeighting | None = None,
    ):
        """Wraps a Keras model, which `fit` trains in place.

        Args:
          model: A built Keras model (Sequential, functional or subclassed).
          mechanism: A `tfdp_fl` mechanism.
          clients_per_round: The expected cohort size m: a constant, a sequence with
            one value per round, or a callable of the round (from 0). A callable,
            here or in the mechanism, is called once for each round; its result is
            both used and charged.
          sampling: "poisson": every client takes part with probability m / N;
            "fixed_size": m of N without replacement; "random_allocation": every
            client, independently, in one of the floor(N / m) rounds of each pass;
            "shuffled": every client once per pass; "cyclic": fixed groups take turns,
            with m clients of the group (see `sampling.CyclicSampler`).
          delta: If given, `History` reports epsilon at this delta.
          accountant: The default accountant for epsilon, "rdp" or "pld". PLD is
            tighter, and takes about 0.1 s per round if `History` reports epsilon; RDP
            takes next to no time.
          on_client_failure: What happens to a round in which a client's data cannot
            be read. "exclude" continues without the client. "abort" abandons the
            round: nothing is released, but it is still charged with local
            mechanisms, and with fixed-size cohorts of m < N clients (where every
            round then costs more). The default is "abort" with
            `noise_site="client"`, whose noise would fall short, and otherwise
            "exclude".
          non_trainable_state: "aggregate" or "keep".
          secure_aggregation: An `AdditiveSecretSharing`, through which the
            clients' contributions are summed; None sums them in the engine.
          max_parallel_clients: How many clients train at once; None: one per core. It
            changes the results of some layers by rounding.
          noise_generator: The source of the noise: "philox", which is fast, or
            "exact", for `FixedClipping` with noise from the server. With "exact",
            updates are summed on a grid, and the noise is an ideal Gaussian rounded
            to that grid, from the operating system's random bits and without
            floating-point errors. It allows no `seed` and is several times slower.
          target: The target that the noise was calibrated for, which every `fit`
            enforces. `make_private` sets it.
          client_weighting: The clients' weights in the mean, such as
            `tfdp_fl.ClientWeighting.num_examples(cap=100)`; None: 1 each. The noise
            and its cost do not change. Only for mechanisms that clip whole updates
            and protect their sum, and without secure aggregation.

        Raises:
          ValueError: An argument is not allowed; the message names it.
          TypeError: An argument has the wrong type.
        """
        training_setup.check_model(model)
        setup = TrainingSetup(
            mechanism=mechanism,
            clients_per_round=clients_per_round,
            sampling=sampling,
            delta=delta,
            accountant=accountant,
            on_client_failure=on_client_failure,
            non_trainable_state=non_trainable_state,
            secure_aggregation=secure_aggregation,
            max_parallel_clients=max_parallel_clients,
            noise_generator=noise_generator,
            target=target,
            client_weighting=client_weighting,
        )
        super().__init__(model, setup)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuses copying and pickling, as a copy would count only its own rounds."""
        raise TypeError(
            "A DPFederatedModel cannot be copied or pickled: both would draw the same "
            "noise, and each would count only its own rounds. To continue elsewhere, "
            "train with a tfdp_fl.callbacks.RoundCheckpoint and give its directory "
            "to fit(resume_from=...). The Keras model is fed.model."
        )

    # Keras's own methods.

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the Keras model, if it is forwarded."""
        if name not in FORWARDED_ATTRIBUTES:
            raise AttributeError(
                f"DPFederatedModel has no {name!r}: it trains by fit(clients, "
                "rounds=...), where clip and noise are accounted for. The Keras model "
                "is fed.model."
            )
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Sets `stop_training` of the Keras model; refuses other new attributes."""
        if name == "stop_training":
            self.model.stop_training = value
        elif name.startswith("_") or name == "federated_callbacks":
            super().__setattr__(name, value)
        else:
            raise AttributeError(
                f"{name} cannot be set: it belongs to the Keras model, or the cost of "
                "the weights depends on it. To change it, wrap a newly built Keras "
                "model."
            )

    def __dir__(self) -> list[str]:
        """Returns all names, including those forwarded to the Keras model."""
        forwarded = set(dir(self.model)) & FORWARDED_ATTRIBUTES
        return sorted({*super().__dir__(), *forwarded})

    @federated_training.exclusive
    def compile(
        self,
        optimizer: tf.keras.optimizers.Optimizer = "sgd",
        loss: keras_versions.CompileArgument = None,
        metrics: keras_versions.CompileArgument = None,
        server_optimizer: tf.keras.optimizers.Optimizer | None = None,
        jit_compile: bool | None = None,
        *,
        weighted_metrics: keras_versions.CompileArgument = None,
        loss_weights: keras_versions.CompileArgument = None,
        grad_clip: float = -1.0,
        upload_hook: trainer.UploadHook | None = None,
        broadcast_hook: trainer.BroadcastHook | None = None,
        **others: object,
    ) -> None:
        """Sets how clients train and how the server updates the model.

        Args:
          optimizer: The clients' Keras optimizer. Every client starts with a new one
            in every round, so momentum and Adam's averages start at zero each time.
            With few local steps, plain SGD is usually better, and Adam belongs in
            `server_optimizer`. `LearningRateScheduler` changes its rate by round.
          loss: As in Keras's `compile`; None for a model with losses of its own (from
            `add_loss` or `compute_loss`).
          metrics: As in Keras's `compile`; training metrics get no noise.
          server_optimizer: A Keras optimizer that takes the negated mean update as
            its gradient (SGD with momentum: FedAvgM; Adam: FedAdam). None adds the
            mean update (FedAvg). With `use_ema`, the model has the averaged weights
            when `fit` ends, as in Keras.
          jit_compile: Whether XLA compiles the clients' training; None: no. It
            compiles up to four programs, for about a second each; on a CPU, the
            steps of small models then take longer.
          weighted_metrics: As in Keras's `compile`: metrics that use the examples'
            weights.
          loss_weights: As in Keras's `compile`.
          grad_clip: Each local gradient is scaled down to this L2 norm; 0 or less:
            no gradient clipping.
          upload_hook: `f(tensors) -> tensors`, for example to add noise after local
            training. The compiled code calls it on a client's upload (a list of
            tensors) before the mechanism clips it.
          broadcast_hook: `f(weights, seed) -> weights`, for example to add noise
            before the broadcast. It is called on the list of weights that a round's
            clients start from, with an int64 seed of shape [2].
          **others: Refused; the error says what to use instead.
        """
        training_setup.refuse_arguments("compile", others)
        for name, hook in (
            ("upload_hook", upload_hook),
            ("broadcast_hook", broadcast_hook),
        ):
            if hook is not None and not callable(hook):
                raise TypeError(f"{name} must be callable, got {hook!r}.")
        optimizer = training_setup.resolve_argument(optimizer=optimizer)
        keras_versions.check_optimizer(optimizer)
        if keras_versions.learning_rate(optimizer) is None:
            warnings.warn(
                "optimizer has a schedule over its own steps, which starts again with "
                "every client in every round, so it never gets beyond a client's last "
                "step. keras.callbacks.LearningRateScheduler sets the rate by round.",
                RuntimeWarning,
                stacklevel=3,
            )
        training_setup.check_names(
            loss=loss, metrics=metrics, weighted_metrics=weighted_metrics
        )
        if server_optimizer is not None:
            if self.mechanism.releases_weights:
                raise ValueError(
                    f"server_optimizer must be None with {self.mechanism.name}, which "
                    f"releases weights and no update, got {server_optimizer!r}."
                )
            server_optimizer = training_setup.resolve_argument(
                server_optimizer=server_optimizer
            )
        compile_arguments = {
            "optimizer": optimizer,
            "loss": loss,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "loss_weights": loss_weights,
        }
        # The next fit makes a new engine; until then, the old one describes the run.
        self._compiled = Training(
            **compile_arguments,
            proximal_weight=self.mechanism.proximal_weight,
            grad_clip=_validate.finite(grad_clip=grad_clip),
            upload_hook=upload_hook,
            server_optimizer=server_optimizer,
            broadcast_hook=broadcast_hook,
            jit_compile=jit_compile,
        )
        self.model.compile(**compile_arguments)

    def evaluate(
        self,
        x: nests.Nest = None,
        y: nests.Nest = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Evaluates like Keras's `evaluate`; accepts tables as `fit` does."""
        self.require_compiled("evaluate")
        x, y = adapters.to_keras_inputs(x, "x"), adapters.to_keras_inputs(y, "y")
        with keras_versions.weights_kept(self.model):
            return self.model.evaluate(x, y, *args, **kwargs)

    def evaluate_clients(
        self,
        clients: adapters.Clients,
        batch_size: int = 1024,
        verbose: str | int = "auto",
        *,
        private: PrivateMetrics | None = None,
    ) -> Json:
        """Returns the model's metrics on each client's own data.

        Without `private`, these are exact numbers about single clients, only for
        people who may see the clients' data: they have no noise and are not charged.

        Args:
          clients: Clients' data, as for `fit`.
          batch_size: Examples in one batch.
          verbose: 0 silent, 1 or "auto" a progress bar.
          private: Release noisy means over clients instead. Before anyone sees them,
            they are charged to this model's epsilon and to the ledgers and checkpoints
            of its last `fit`. Budgets and targets refuse a release that exceeds them.

        Returns:
          "num_examples", int64 [N], and "loss" and each compiled metric by name,
          float64 [N], in the order of the clients. They are NaN for a client without
          examples, or whose data cannot be read or evaluated (for example, because of
          an invalid class label). With `private`: "num_clients" (noisy, with
          "num_clients_stddev"), and for each bounded metric "mean" and "noise_stddev"
          (roughly, the standard deviation of the mean due to the noise alone).

        Raises:
          ValueError: An argument is not allowed; or `private` is given before `fit`,
            or with a guarantee that is not central, or would exceed the target.
        """
        training = self.require_compiled("evaluate_clients")
        _validate.number_of_rows(batch_size=batch_size)
        dataset = example_spec.conform(
            self.model, training, datasets.as_federated(clients)
        )
        verbose = _resolve_verbose(verbose)
        if private is not None:
            return private_metrics.release(self, private, dataset, batch_size, verbose)
        federated_training.showed_client_metrics.add(self.model)
        if self.run is not None:  # For checkpoints, too.
            self.run.caveats.add("client_metrics_shown")
        counts, metrics = evaluation.evaluate(
            self.model, training, dataset, batch_size, verbose
        )
        return {"num_examples": counts, **metrics}

    def predict(self, x: nests.Nest, *args: object, **kwargs: object) -> np.ndarray:
        """Predicts like Keras's `predict`; accepts tables as `fit` does."""
        x = adapters.to_keras_inputs(x, "x")
        with keras_versions.weights_kept(self.model):
            return self.model.predict(x, *args, **kwargs)

    def predict_on_batch(self, *args: object, **kwargs: object) -> np.ndarray:
        """Predicts like Keras's `predict_on_batch`."""
        with keras_versions.weights_kept(self.model):
            return self.model.predict_on_batch(*args, **kwargs)

    def test_on_batch(self, *args: object, **kwargs: object) -> Any:
        """Evaluates like Keras's `test_on_batch`."""
        with keras_versions.weights_kept(self.model):
            return self.model.test_on_batch(*args, **kwargs)

    def __call__(self, *args: object, **kwargs: object) -> nests.Nest:
        """Calls the model; all of its weights are kept, even with `training=True`.

        Otherwise, its moving statistics would contain the data that it is called on.
        """
        # (Keras 2 also takes `training` as a positional argument.)
        may_train = kwargs.get("training") is not None or len(args) > 1
        with keras_versions.weights_kept(self.model, may_train):
            return self.model(*args, **kwargs)

    def save(self, path: str | os.PathLike[str], **kwargs: object) -> None:
        """Saves the trained Keras model, which can be loaded without this package."""
        self.model.save(path, **kwargs)

    # Training.

    @_signals.handled()
    @federated_training.exclusive
    def fit(
        self,
        clients: adapters.Clients = None,
        y: nests.Nest = None,
        *,
        rounds: int = 1,
        batch_size: int = 32,
        local_epochs: int = 1,
        validation_data: nests.Nest = None,
        validation_freq: int = 1,
        callbacks: Iterable[tf.keras.callbacks.Callback] | None = None,
        verbose: str | int = "auto",
        seed: int | None = None,
        runtime: RayWorkers | None = None,
        x: nests.Nest = None,
        client_ids: tables.Ids = None,
        sample_weight: nests.Nest = None,
        shuffle: bool = False,
        validation_split: float = 0.0,
        resume_from: str | os.PathLike[str] | None = None,
        between_client_variance: bool = False,
        validation_batch_size: int = 1024,
        audit: auditing.CanaryAudit | None = None,
        **others: object,
    ) -> tf.keras.callbacks.History:
        """Trains for a number of rounds.

        A second call continues with the same model, clip, server optimizer and spent
        budget; rounds are counted over all calls. A model from `make_private` enforces
        its target over all calls: training ends before the round that would exceed it
        (with an empty history, if that is the first round).

        Args:
          clients: The clients' data: a `FederatedDataset`, a mapping or list
            of `(x, y)`, of `(x, y, sample_weight)` or of `tf.data.Dataset`s,
            or a TFF `ClientData` (see `tfdp_fl.datasets.as_federated`). Each client's
            data is cast to what the model's inputs and the loss expect, or to a
            declared `element_spec`; if that is impossible, only that client fails.
            For local and per-record guarantees, and within a pass over the clients,
            they must be the same clients in the same order as before. Otherwise they
            may change, and the statement lists every N. With `client_ids`: the
            features of all rows of one table, [n, ...], as arrays or a pandas frame.
          y: With `client_ids`: the labels of all rows.
          rounds: How many rounds to run (with `resume_from`: the total that the
            interrupted call was asked for).
          batch_size: Examples in one local batch; a client's last batch may be shorter.
          local_epochs: How often a client goes through its examples in one round. A
            client with more than 2^27 examples, counted once an epoch, fails.
          validation_data: `(x, y)`, `(x, y, sample_weight)`, a
            `tf.data.Dataset` of batches, or the `FederatedDataset` of other
            clients.
          validation_freq: The number of rounds between validations.
          callbacks: Keras callbacks (to which a round is an epoch) and
            `tfdp_fl.callbacks`.
          verbose: 0 silent, 1 or "auto" a progress bar, 2 a line per round.
          seed: Makes the cohorts, order and noise of a whole training reproducible bit
            for bit. A resumed training uses fresh noise, and so does the repetition of
            an interrupted round. Anyone with the seed can remove the noise, and the
            statement says so. None: fresh entropy from the operating system.
          runtime: Where cohorts are trained: None for this process, or a
            `tfdp_fl.runtimes.RayWorkers`.
          x: Another name for `clients`, as in Keras's `fit`.
          client_ids: For `fit(x, y, client_ids=ids)`: the client of each row, [n]
            numbers, strings, dates, or other values that Python can hash. All rows of
            one id are one client, protected as a whole.
          sample_weight: With `client_ids`: each row's weight in the loss, [n].
          shuffle: Whether clients shuffle their examples for every epoch.
          validation_split: The fraction of whole clients held out as validation data;
            they are in no cohort. A client's id alone decides whether it is held out,
            in every `fit` and whatever the other clients (so the fraction is
            approximate). The metrics on held-out clients are exact, and epsilon does
            not cover them.
          resume_from: A directory that `RoundCheckpoint` wrote.
          between_client_variance: Whether to report Geyer's V_c and U_s, at the cost
            of a pass over each update.
          validation_batch_size: Examples in one validation batch.
          audit: A new `tfdp_fl.auditing.CanaryAudit`, whose canary clients take part
            along with the clients. The statement then includes its estimate.
          **others: Refused; the error says what to use instead.

        Returns:
          A Keras `History`: the compiled metrics, `val_*`, and for each round
          `cohort_size`, `clip_norm`, `noise_stddev` (of the noise on the sum of
          updates; if correlated, of its fresh part), `clipped_fraction`,
          `mean_update_norm`, `discarded_clients`, `failed_clients`,
          `abandoned_rounds`, `epsilon` if a delta is given, and
          `between_client_variance` and `update_scale` if requested.
        """
        training_setup.refuse_arguments("fit", others)
        training = self.require_compiled("fit")
        if resume_from is None:  # Otherwise weights and their cost come from there.
            federated_training.check_owner(self)
        if client_ids is None and isinstance(y, int | np.integer):
            raise TypeError(
                f"y must be the labels of a table's rows, got {y!r}: give the number "
                f"of rounds by its name, fit(clients, rounds={y})."
            )
        if clients is not None and x is not None:
            raise TypeError("x must be None if clients is given: both are the data.")
        clients = adapters.resolve_fit_data(
            clients if x is None else x, y, client_ids, sample_weight
        )
        clients = example_spec.conform_all(self.model, training, clients)
        clients, validation = Validation(
            data=validation_data,
            every=validation_freq,
            batch_size=validation_batch_size,
        ).hold_out_clients(clients, validation_split)
        # Convert to plain Python numbers, which a checkpoint can store.
        rounds = _validate.positive_integer(rounds=rounds)
        batch_size = _validate.number_of_rows(batch_size=batch_size)
        local_epochs = _validate.positive_integer(local_epochs=local_epochs)
        if seed is not None:
            seed = _validate.non_negative_integer(seed=seed)
            if self.setup.noise_generator != noise.PHILOX:
                raise ValueError(
                    f"seed must be None with {self.setup.noise_generator!r} noise, "
                    f"whose keys come from the operating system, got {seed!r}."
                )
        if runtime is not None and not hasattr(runtime, "collector"):
            raise TypeError(
                "runtime must be None or a tfdp_fl.runtimes.RayWorkers, got "
                f"{runtime!r}."
            )
        if audit is not None:
            _validate.instance_of(auditing.CanaryAudit, audit=audit)
            if resume_from is not None:
                raise ValueError(
                    "audit must be None with resume_from: the earlier rounds had no "
                    "canaries, or other ones, which checkpoints do not store."
                )
        self._verbose = _resolve_verbose(verbose)
        callbacks = callbacks_lib.check_callbacks(callbacks)
        saves = any(isinstance(c, callbacks_lib.RoundCheckpoint) for c in callbacks)
        if saves or resume_from is not None:
            preparation.require_names(self, clients)
        validation = validation.conform(self.model, training)
        if self.run is not None:
            # A second Ctrl-C may have kept the last `fit` from it.
            self.run.end_interrupted_round()
        plan = FitPlan(
            first_round=self.rounds,
            last_round=self.rounds + rounds,
            batch_size=batch_size,
            local_epochs=local_epochs,
            shuffle=shuffle,
            seed=seed,
        )
        interrupted = calibration = None
        if resume_from is not None:
            interrupted = InterruptedRun.read(resume_from, self, clients, plan)
            plan = FitPlan(**interrupted.state["plan"])
            calibration = interrupted.state["calibration"]
        callbacks += callbacks_lib.missing_ledgers(self.run, interrupted, callbacks)
        run, engine = preparation.prepare(
            self, clients, plan, calibration, between_client_variance
        )
        clients = engine.check_labels(clients)
        validation = validation.check_labels(engine)
        validation.try_one_batch(self.model)
        with _signals.defer_signals():
            # So that engine and run are those of one `fit`.
            if interrupted is not None:
                run = interrupted.restore(self, engine, run)
            if audit is not None:
                audit.begin(engine)
                run.audits = [*run.audits, audit]
            run.begin_fit(
                validates=validation.data is not None, held_out=validation.held_out
            )
            if self.model in federated_training.showed_client_metrics:
                run.caveats.add("client_metrics_shown")
            # Together, as nothing raises an error any more.
            self._engine, self._run = engine, run
            if interrupted is not None:  # Last, as the weights' cost is known now.
                federated_training.mark_owner(self, engine.server.variables, self.model)
        collector = engine if runtime is None else runtime.collector(engine, clients)
        return round_loop.RoundLoop(
            self, clients, callbacks, validation, collector, audit, self._verbose
        ).train()

    def with_setup(self, **changes: object) -> DPFederatedModel:
        """Returns a new wrapper of the same model, compiled in the same way.

        Args:
          **changes: Constructor arguments to change.
        """
        wrapper = DPFederatedModel(self.model, **{**vars(self.setup), **changes})
        wrapper._compiled = self._compiled
        return wrapper

    # Privacy.

    def epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns epsilon at delta for the rounds that ran.

        For a central guarantee, it is composed under the sampling that was used. For a
        local or per-record one, it is for the client that took part most often. It is
        infinite without a guarantee and 0 before the first round.

        Args:
          delta: Strictly between 0 and 1.
          accountant: "rdp" or "pld"; None: the model's own.
        """
        delta = _validate.inside_unit_interval(delta=delta)
        federated_training.check_owner(self)
        if self.account is None:
            return 0.0
        return self.account.epsilon(delta, accountant or self.setup.accountant)

    def central_epsilon(self, delta: float, accountant: str | None = None) -> float:
        """Returns epsilon against anyone who sees only the model.

        With a local mechanism, it is that of the clients' combined noise. If nothing
        can be claimed (a Poisson cohort has no fixed number of noise terms), it is
        infinite, and the local epsilon is the bound.
        """
        delta = _validate.inside_unit_interval(delta=delta)
        federated_training.check_owner(self)
        if self.account is None:
            return 0.0
        return self.account.central.epsilon(delta, accountant or self.setup.accountant)

    def privacy_statement(
        self, delta: float | None = None, format: str = "text"
    ) -> str | Json:
        """Returns a statement of what was guaranteed, to whom, and what was not.

        Args:
          delta: The delta at which epsilon is stated; None: the `delta` of this model,
            or that of the last `PrivacyBudget`, or else 0.1 / N, where N is the number
            of clients (or of records, if those are protected).
          format: "text" or "dict".

        Raises:
          ValueError: Nothing has been trained yet, or an argument is not allowed.
        """
        run, cohort_engine = self.require_trained("privacy_statement")
        # Perhaps by another wrapper of the model.
        if self.model in federated_training.showed_client_metrics:
            run.caveats.add("client_metrics_shown")
        if delta is None:
            delta = self.setup.delta or run.budget_delta
        if delta is None:
            sizes = [size for size, _ in run.populations]
            sizes.append(run.account.per_client.num_clients)
            units = run.num_records or max(sizes)
            delta = 0.1 / units
        return accounting.privacy_statement(
            facts.statement_facts(run, cohort_engine), delta, format
        )


def _resolve_verbose(verbose: str | int) -> int:
    return int(_validate.one_of((0, 1, 2), verbose=1 if verbose == "auto" else verbose))
