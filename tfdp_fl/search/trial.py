"""The trials of a search: their cost, their training, and their scores."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import (
    _signals,
    _validate,
    accounting,
    engine,
    keras_versions,
    sampling,
    schedules,
)
from tfdp_fl.accounting import schema
from tfdp_fl.accounting.private_selection import BestOfTrialsDpEvent, TrialCount
from tfdp_fl.datasets import FederatedDataset, nests
from tfdp_fl.engine import trainer
from tfdp_fl.keras import (
    DPFederatedModel,
    evaluation,
    example_spec,
    facts,
    federated_training,
    preparation,
)
from tfdp_fl.keras.make_private import charge_plan, largest_noise
from tfdp_fl.keras.private_metrics import PrivateMetrics
from tfdp_fl.keras.run import Charges, FitPlan
from tfdp_fl.mechanisms import Mechanism, PrivacyContext
from tfdp_fl.terms import Json, PrivacyUnit, Sampling, TrustModel

_MODES = ("auto", "max", "min")
# The names of metrics of which less, or more, is better.
_IS_ERROR = re.compile(
    "loss|error|entropy|divergence|perplexity|mse|mae|mape|msle|hinge|huber|cosh"
    "|poisson|nll|negative_log|false_|brier"
)
_IS_SCORE = re.compile(
    "acc|auc|precision|recall|f1|f_?beta|f_score|iou|dice|r2|kappa|cosine|sensitivity"
    "|specificity|bleu|rouge|top_|true_|correct"
)
# If this many different "public" examples are all clients' own, it is no coincidence.
_MIN_COPIED_EXAMPLES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The clients of a search, by their use.

    Attributes:
      training: The clients that train.
      held_out: The clients that score, or None.
      event: What scoring one trial costs the clients that score, or None.
      is_disjoint: Whether no client is on both sides, and adding or removing a client
        on one side does not change the other.
    """

    training: FederatedDataset
    held_out: FederatedDataset | None = None
    event: dp_accounting.DpEvent | None = None
    is_disjoint: bool = True


class PublicScore:
    """A metric of a trial's model on public data, which costs no privacy.

    Attributes:
      metric: "loss", or the name of a compiled metric.
      mode: "max" if higher is better, "min" if lower is better.
    """

    def __init__(
        self, x: nests.Nest, y: nests.Nest, metric: str, *, mode: str = "auto"
    ):
        """Stores the data.

        Args:
          x: Features [n, ...] of public examples, or a nest of such arrays.
          y: Labels [n, ...].
          metric: "loss", or the name of a metric that every candidate compiles.
          mode: "max" or "min"; "auto" decides by the metric's name: lower is better
            for losses and errors.

        Raises:
          ValueError: `mode` is "auto", and the name does not tell.
          TypeError: `x` is clients' data, which is not public.
        """
        if isinstance(x, FederatedDataset) or hasattr(x, "client_ids"):
            raise TypeError(
                "x must be the features of public examples, got clients' data: "
                "PrivateScore(metric, noise_multiplier=...) scores on clients."
            )
        self.metric, self.mode = _resolve_mode(metric, mode)
        self._x, self._y = x, y

    def split(self, clients: FederatedDataset) -> Split:
        """Returns all clients for training; warns if the data is their own."""
        examples = _example_hashes(self._x, self._y)
        if len(examples) >= _MIN_COPIED_EXAMPLES and clients.is_indexed:
            rows, _ = clients.client_rows(np.arange(clients.num_clients))
            x, y = tf.nest.map_structure(
                lambda leaf: leaf.numpy()[np.unique(rows)], clients.flat()
            )
            if examples <= _example_hashes(x, nests.labels_of(y)):
                # Only a warning: an error before the charge would reveal who is there.
                _signals.warn(
                    "PublicScore's examples are all the training clients' own, and "
                    "epsilon does not cover it. PrivateScore(metric, "
                    "noise_multiplier=...) scores on held-out clients, and is charged. "
                    "(Keep this warning secret, as no epsilon covers it.)"
                )
        return Split(training=clients)

    def __call__(
        self,
        model: tf.keras.Model,
        training: engine.Training,
        held_out: Any,
        paid: accounting.Receipt,
    ) -> float:
        """Returns the metric of a model, negated if lower is better."""
        del training, held_out, paid
        values = model.evaluate(
            self._x, self._y, batch_size=1024, verbose=0, return_dict=True
        )
        return _to_score(values[self.metric], self.mode)

    def digest(self) -> str:
        """Returns what distinguishes this score from others."""
        digest = hashlib.sha256()
        for example_hash in sorted(_example_hashes(self._x, self._y)):
            digest.update(example_hash)
        return f"PublicScore {self.metric} {self.mode} {digest.hexdigest()}"


class PrivateScore:
    """The noisy mean of a metric over clients that do not train.

    Each client counts once, whatever its number of examples; its metric is clipped to
    `bounds`. The mean is one Gaussian release (see `PrivateMetrics`) per trial.

    Attributes:
      metric: "loss", or the name of a compiled metric.
      mode: "max" if higher is better, "min" if lower is better.
    """

    def __init__(
        self,
        metric: str,
        *,
        noise_multiplier: float,
        bounds: tuple[float, float] = (0.0, 1.0),
        held_out: float = 0.2,
        mode: str = "auto",
    ):
        """Checks the arguments.

        Args:
          metric: "loss", or the name of a metric that every candidate compiles.
          noise_multiplier: The noise's standard deviation divided by the largest
            contribution of a client to the sum; above 0.
          bounds: The metric's range (low, high), chosen without the clients' data.
          held_out: The fraction of the search's clients that score and do not train. A
            client's id alone decides whether it is one of them. Clients with only
            positions and no names are charged for both training and scoring.
          mode: "max" or "min"; "auto" decides by the metric's name.
        """
        self.metric, self.mode = _resolve_mode(metric, mode)
        _validate.positive(noise_multiplier=noise_multiplier)
        self._release = PrivateMetrics(
            bounds={metric: bounds}, noise_multiplier=noise_multiplier
        )
        self._held_out_fraction = _validate.inside_unit_interval(held_out=held_out)

    def split(self, clients: FederatedDataset) -> Split:
        """Returns the clients that train, those that score, and the cost of a score."""
        training, held_out = clients.split_by_id(self._held_out_fraction)
        return Split(
            training=training,
            held_out=held_out,
            event=dp_accounting.GaussianDpEvent(self._release.noise_multiplier),
            is_disjoint=clients.has_names,
        )

    def __call__(
        self,
        model: tf.keras.Model,
        training: engine.Training,
        held_out: Any,
        paid: accounting.Receipt,
    ) -> float:
        """Returns the noisy mean for a model, negated if lower is better."""
        held_out = example_spec.conform(model, training, held_out)
        _, values = evaluation.evaluate(model, training, held_out, 1024, 0, silent=True)
        generator = np.random.Generator(np.random.Philox())
        released = self._release.release(values, generator, paid)
        return _to_score(released[self.metric]["mean"], self.mode)

    def digest(self) -> str:
        """Returns what distinguishes this score from others."""
        return f"PrivateScore {self._release!r} {self._held_out_fraction} {self.mode}"


def _resolve_mode(metric: str, mode: str) -> tuple[str, str]:
    _validate.instance_of(str, metric=metric)
    _validate.one_of(_MODES, mode=mode)
    if mode == "auto":
        name = metric.lower()
        mode = "min" if _IS_ERROR.search(name) else "max"
        if mode == "max" and not _IS_SCORE.search(name):
            raise ValueError(
                f"mode must be 'max' or 'min' for the metric {metric!r}, whose name "
                "does not tell which is better, got 'auto'."
            )
    return metric, mode


def _to_score(value: float, mode: str) -> float:
    return -float(value) if mode == "min" else float(value)


def _example_hashes(x: nests.Nest, y: nests.Nest) -> set[bytes]:
    """Returns the hashes of the distinct examples."""
    leaves = map(_to_stored_form, tf.nest.flatten((x, y)))
    return {
        hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest()
        for rows in zip(*leaves, strict=False)
    }


def _to_stored_form(values: Any) -> np.ndarray:
    """Returns an array in a form that is the same before and after it is stored."""
    array = np.asarray(values)
    if array.dtype.kind in "SUO":
        digest = np.vectorize(lambda s: hashlib.sha256(s).hexdigest(), otypes=["U64"])
        return digest(nests.copy_array(array))
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


class Trial:
    """A candidate's model from `build`, and its training.

    Attributes:
      model: Its Keras model, with its initial weights between trials.
      mechanism: Its mechanism, with the noise of the search once that is known.
      clients_per_round: The expected cohort size, m.
      initial: The initial values of its variables.
    """

    def __init__(self, candidate: Json, built: Any, split: Split, options: Json):
        """Checks the result of `build`; `options` are those of `fit`, with `rounds`."""
        if not isinstance(built, DPFederatedModel):
            raise TypeError(
                "build must return a compiled tfdp_fl.DPFederatedModel, got a "
                f"{type(built).__name__} for {candidate!r}."
            )
        training = built.require_compiled(f"build returns {candidate!r}")
        federated_training.check_owner(built)
        if built.run is not None:
            raise ValueError(
                f"build must return a new model, got one for {candidate!r} that was "
                "already trained."
            )
        _check_mechanism(built, candidate)
        self.model: tf.keras.Model = built.model
        self.mechanism: Mechanism = built.mechanism
        sizes = built.setup.clients_per_round
        self.clients_per_round = schedules.value_at(sizes, 0, "clients_per_round")
        server = training.server_optimizer
        self._server: list[tf.Variable] = []
        if server is not None:
            trainable = self.model.trainable_variables
            self._server = keras_versions.build_optimizer(server, trainable)
        self.initial = self.values()
        self._built, self._training = built, training
        conformed = example_spec.conform_all(built.model, training, split.training)
        self._split = dataclasses.replace(split, training=conformed)
        self._options = options
        self._context = PrivacyContext(
            clients_per_round=self.clients_per_round,
            num_clients=split.training.num_clients,
            sampling="poisson",
            rounds=options["rounds"],
        )
        self._planned = Charges()
        # The model that trains with the noise of the search.
        self._fed: DPFederatedModel | None = None

    @property
    def variables(self) -> list[tf.Variable]:
        """The weights, the states of random layers, and the server optimizer's."""
        return [*keras_versions.tf_variables(self.model.variables), *self._server]

    def values(self) -> list[np.ndarray]:
        """Returns the values of all variables."""
        return [variable.numpy() for variable in self.variables]

    def assign(self, values: list[np.ndarray]) -> None:
        """Sets all variables."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def reset(self) -> None:
        """Removes all traces of a trial from the model and its wrapper."""
        self.assign(self.initial)
        self.model.reset_metrics()
        self.model.history = None
        if self._fed is not None:
            self._fed._run = None  # The search accounts for its cost.

    def check(self, metric: str) -> None:
        """Raises ValueError if the model cannot accept the clients' examples.

        The model is called on zeros, so the outcome does not depend on the clients.
        """
        x_spec, y_spec = self._split.training.element_spec
        example_spec.check_features(self.model, x_spec, "clients")
        x, y, *weight = nests.unpair(*map(trainer.zeros_like_batch, (x_spec, y_spec)))
        metrics = self.model.test_on_batch(x, y, *weight, return_dict=True)
        self.reset()
        if metric not in metrics:
            raise ValueError(
                "score must have a metric that every candidate compiles "
                f"({', '.join(map(repr, metrics))}), got {metric!r}."
            )

    def event(self, noise: float) -> dp_accounting.DpEvent:
        """Sets a noise multiplier, and returns the cost of training with it."""
        self.mechanism = self.mechanism.with_noise_multiplier(noise)
        sampler = sampling.make_sampler(
            "poisson", self._split.training.num_clients, self.clients_per_round
        )
        self._planned = charge_plan(self.mechanism, sampler, self._context)
        return dp_accounting.ComposedDpEvent(
            tuple(
                dp_accounting.SelfComposedDpEvent(charge.dp_event("rdp"), count)
                for charge, count in self._planned.items()
            )
        )

    def noise_multiplier_limit(self) -> float | None:
        """Returns the largest noise multiplier that the mechanism accepts."""
        return largest_noise(self.mechanism.with_noise_multiplier, self._context)

    def caveats(self) -> set[str]:
        """Returns the caveats of its trainings; call it after `prepare`."""
        caveats = set(self.mechanism.all_caveats())
        if self._fed is not None and self._fed.engine is not None:
            applies = facts.caveats_of_setup(self._fed.setup, self._fed.engine)
            caveats |= {name for name, is_true in applies.items() if is_true}
        return caveats

    def prepare(self) -> None:
        """Prepares the training; raises any error that would make every trial fail.

        It runs before the charge. Within a trial, errors are silent, and a client with
        an invalid label could decide how the search ends.
        """
        # All trials of this candidate share its compiled programs.
        self._fed = self._built.with_setup(
            mechanism=self.mechanism, delta=None, target=None
        )
        options = dict(self._options)
        last_round = options.pop("rounds")
        plan = FitPlan(first_round=0, last_round=last_round, seed=None, **options)
        run, cohort_engine = preparation.prepare(self._fed, self._split.training, plan)
        cohort_engine.check_labels(self._split.training)
        cohort_engine.prepare(
            run.next_inputs(self._training.learning_rate, run.attempts.take())
        )
        self._fed._engine = cohort_engine

    def run(self, score: PublicScore | PrivateScore, paid: accounting.Receipt) -> float:
        """Trains and scores once; returns -infinity for a failed trial.

        `paid` is the search's receipt, which counts its trials.
        """
        paid.redeem()
        self.reset()
        try:
            with _one_at_a_time, _silence():
                self._train()
                value = score(self.model, self._training, self._split.held_out, paid)
        except Exception:  # Both the error and the fact that there was one are secret.
            return -math.inf
        return value if math.isfinite(value) else -math.inf

    def _train(self) -> None:
        assert self._fed is not None  # `prepare` made it.
        # The model was reset, so it belongs to this trial alone.
        federated_training.mark_owner(self._fed, self.variables, self.model)
        self._fed.fit(self._split.training, verbose=0, **self._options)
        run, _ = self._fed.require_trained("a trial")
        if not run.account.own <= self._planned:
            raise RuntimeError("A trial was charged more than was planned.")


# Two trials in parallel threads would each restore the other's silenced output.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Silences the process's prints, logs and warnings, which would reveal a trial.

    Those of other threads, too: a trial reads clients in threads of TensorFlow and of
    the user's own code, which nothing tells from others, and TensorFlow's C++ code
    writes to the process's descriptors.
    """
    disabled, saved = logging.root.manager.disable, {}
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w") as devnull,
            warnings.catch_warnings(),
            contextlib.redirect_stdout(devnull),
            contextlib.redirect_stderr(devnull),
        ):
            for descriptor in (1, 2):  # Where TensorFlow's own code writes.
                with contextlib.suppress(OSError):  # The process may not have it.
                    saved[descriptor] = os.dup(descriptor)
                    os.dup2(devnull.fileno(), descriptor)
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        for descriptor, saved_descriptor in saved.items():
            os.dup2(saved_descriptor, descriptor)
            os.close(saved_descriptor)


def _check_mechanism(built: DPFederatedModel, candidate: Json) -> None:
    """Raises ValueError unless the noise of a candidate can be replaced."""
    mechanism, problem = built.mechanism, None
    noise = mechanism.parameters().get("noise_multiplier")
    if built.setup.sampling != Sampling.POISSON:
        problem = f"sampling='poisson', got {built.setup.sampling!r}"
    elif built.setup.abandons_on_failure:
        problem = (
            "on_client_failure='exclude', got 'abort': an unchanged model would reveal "
            "that a client failed, without noise"
        )
    elif not schedules.is_constant(built.setup.clients_per_round):
        problem = "a constant clients_per_round, got a schedule"
    elif (
        mechanism.trust_model != TrustModel.CENTRAL
        or mechanism.privacy_unit != PrivacyUnit.CLIENT
        or not isinstance(noise, int | float)
    ):
        problem = (
            "a central mechanism that protects clients, with a constant "
            "noise_multiplier (FixedClipping, AdaptiveClipping, MedianClipping), got "
            f"{mechanism.describe()!r}"
        )
    elif not mechanism.all_releases_are_noisy:
        problem = (
            "a median_noise_multiplier and the package's own clip_to_cohort, got an "
            "exact median or norms, which are not private"
        )
    if problem is not None:
        raise ValueError(
            f"build must return a model with {problem}, for {candidate!r}."
        )


def calibrate(
    trials: list[Trial], split: Split, count: TrialCount, target: tuple[float, float]
) -> accounting.RoundCharge:
    """Gives all trials the smallest noise with which the search meets the target.

    Returns the most that the search costs any client, whichever candidates are drawn.
    """
    epsilon, delta = target
    clients = split.training.num_clients

    def charge(events: Sequence[dp_accounting.DpEvent]) -> accounting.RoundCharge:
        if split.event is not None and split.is_disjoint:
            events = (*events, split.event)
        elif split.event is not None:
            events = [
                dp_accounting.ComposedDpEvent((event, split.event)) for event in events
            ]
        return accounting.RoundCharge(
            sampling="poisson",
            num_clients=clients,
            clients_per_round=clients,
            event=BestOfTrialsDpEvent(
                tuple(dict.fromkeys(events)), count.mean, count.shape
            ),
        )

    def calibrate_trial(trial: Trial, target: float, limit: float | None) -> float:
        return accounting.calibrate(
            lambda z: [charge([trial.event(z)])], target, delta, "pld", upper=limit
        )

    limits = [trial.noise_multiplier_limit() for trial in trials]
    # A trial's cost at a reference noise, to calibrate equal trials only once.
    references = [
        trial.event(min(1.0, limit or 1.0))
        for trial, limit in zip(trials, limits, strict=True)
    ]
    if (num_costs := len({*references})) >= schema.MAX_TRIAL_COSTS:
        raise ValueError(
            f"candidates must have fewer than {schema.MAX_TRIAL_COSTS} different "
            f"costs, got {num_costs}: give fewer that differ in their cohorts, rounds "
            "or mechanism."
        )
    # The epsilon of a search with only one candidate.
    single_epsilon = epsilon
    while True:
        events: list[dp_accounting.DpEvent] = []
        calibrated: dict[dp_accounting.DpEvent, float] = {}
        for trial, limit, reference in zip(trials, limits, references, strict=True):
            if reference not in calibrated:
                calibrated[reference] = calibrate_trial(trial, single_epsilon, limit)
            events.append(trial.event(calibrated[reference]))
        search_charge = charge(events)
        total = accounting.PrivacyAccountant([search_charge]).epsilon(delta, "pld")
        if total <= epsilon:
            return search_charge
        # If candidates differ, the maximum of their costs exceeds each single cost.
        single_epsilon *= 0.999 * epsilon / total
