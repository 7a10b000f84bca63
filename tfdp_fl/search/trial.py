"""A candidate of a search: what its training costs, and one training of it."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import accounting, keras_versions, sampling, schedules
from tfdp_fl.accounting.search import BestOfTrialsDpEvent, TrialCount
from tfdp_fl.datasets import nests
from tfdp_fl.engine import trainer
from tfdp_fl.keras import DPFederatedModel, preparation, statement
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras.make_private import charged, largest_noise
from tfdp_fl.keras.run import FitPlan
from tfdp_fl.mechanisms import Deployment, Mechanism
from tfdp_fl.search.scores import PrivateScore, PublicScore, Split

Candidate = dict[str, Any]


class Trial:
    """A candidate, as `build` made it, and how it is trained.

    Attributes:
      model: Its Keras model. Between trials it has the weights it came with.
      mechanism: Its mechanism, with the noise of the search once that is known.
      clients_per_round: The expected cohort size, m.
      initial: The values that its variables begin with.
    """

    def __init__(
        self, candidate: Candidate, made: Any, split: Split, options: dict[str, Any]
    ):
        """Checks what `build` made; `options` are those of `fit`, and its rounds."""
        if not isinstance(made, DPFederatedModel):
            raise TypeError(
                "build must return a compiled tfdp_fl.DPFederatedModel, got a "
                f"{type(made).__name__} for {candidate!r}."
            )
        compiled = made.require_compiled(f"build returns {candidate!r}")
        run_lib.check_owner(made)
        if made.run is not None:
            raise ValueError(
                f"build must return a new model, got one for {candidate!r} that was "
                "already trained."
            )
        _check_mechanism(made, candidate)
        self.model: tf.keras.Model = made.model
        self.mechanism: Mechanism = made.mechanism
        sizes = made.setup.clients_per_round
        self.clients_per_round = schedules.value_at(sizes, 0, "clients_per_round")
        server = compiled.server_optimizer
        self._server: list[tf.Variable] = []
        if server is not None:
            trainable = self.model.trainable_variables
            self._server = keras_versions.build_optimizer(server, trainable)
        self.initial = self.values()
        self._made, self._training = made, compiled.training
        self._split, self._options = split, options
        self._deployment = Deployment(
            clients_per_round=self.clients_per_round,
            num_clients=split.training.num_clients,
            sampling="poisson",
            rounds=options["rounds"],
        )
        self._planned: collections.Counter[accounting.RoundCharge] = (
            collections.Counter()
        )
        # What trains, with the noise of the search.
        self._fed: DPFederatedModel | None = None

    @property
    def variables(self) -> list[tf.Variable]:
        """Weights, states of random layers, and those of the server's optimizer."""
        return [*keras_versions.tf_variables(self.model.variables), *self._server]

    def values(self) -> list[np.ndarray]:
        """Returns the values of all variables."""
        return [variable.numpy() for variable in self.variables]

    def assign(self, values: list[np.ndarray]) -> None:
        """Sets all variables."""
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def reset(self) -> None:
        """Leaves nothing of a trial in the model, nor in what trains it."""
        self.assign(self.initial)
        self.model.reset_metrics()
        self.model.history = None
        if self._fed is not None:
            self._fed._run = None  # What it cost is counted by the search.

    def check(self, metric: str) -> None:
        """Raises ValueError if the model cannot take the clients' examples.

        On zeros: what is found does not depend on the clients.
        """
        x_spec, y_spec = self._split.training.element_spec
        preparation.check_features(self.model, x_spec, "clients")
        x, y, *weight = nests.unpaired(*map(trainer.zeros_like_batch, (x_spec, y_spec)))
        found = self.model.test_on_batch(x, y, *weight, return_dict=True)
        self.reset()
        if metric not in found:
            raise ValueError(
                "score must have a metric that every candidate compiles "
                f"({', '.join(map(repr, found))}), got {metric!r}."
            )

    def event(self, noise: float) -> dp_accounting.DpEvent:
        """Returns what training costs with a noise multiplier, which it takes."""
        self.mechanism = self.mechanism.with_noise_multiplier(noise)
        sampler = sampling.make_sampler(
            "poisson", self._split.training.num_clients, self.clients_per_round
        )
        self._planned = charged(self.mechanism, sampler, self._deployment)
        return dp_accounting.ComposedDpEvent(
            tuple(
                dp_accounting.SelfComposedDpEvent(charge.dp_event("rdp"), count)
                for charge, count in self._planned.items()
            )
        )

    def noise_limit(self) -> float | None:
        """Returns the largest noise multiplier that the mechanism takes."""
        return largest_noise(self.mechanism.with_noise_multiplier, self._deployment)

    def caveats(self) -> set[str]:
        """Returns the caveats that hold of its trainings; after `prepare`."""
        caveats = set(self.mechanism.caveats())
        if self._fed is not None and self._fed.engine is not None:
            holds = statement.caveats_of_setup(self._fed.setup, self._fed.engine)
            caveats |= {name for name, true in holds.items() if true}
        return caveats

    def prepare(self) -> None:
        """Makes what trains; raises what would make every trial fail.

        Before the charge, and aloud: within a trial nobody would be told, and a
        client with a label that no class has would decide how the search ends.
        """
        # Its programs serve all trials of this candidate.
        self._fed = self._made.with_setup(
            mechanism=self.mechanism, delta=None, target=None
        )
        options = dict(self._options)
        last_round = options.pop("rounds")
        _, self._fed._prepared = preparation.prepare(
            self._fed,
            self._split.training,
            FitPlan(first_round=0, last_round=last_round, seed=None, **options),
            before=None,
            calibration=None,
            moments=False,
        )
        # A cohort of failures alone ends no trial: that it did would tell of a client.
        self._fed._prepared.engine.has_trained = True

    def run(self, score: PublicScore | PrivateScore) -> float:
        """Trains and scores once; returns -infinity for a trial that failed."""
        self.reset()
        try:
            with _silence():
                self._train()
                value = score(self.model, self._training, self._split.held_out)
        except Exception:  # What happened is as secret as that it happened.
            return -math.inf
        return value if math.isfinite(value) else -math.inf

    def _train(self) -> None:
        assert self._fed is not None  # `prepare` made it.
        # The model is this trial's alone: it was reset.
        run_lib.claim(self._fed, self.variables)
        self._fed.fit(self._split.training, verbose=0, **self._options)
        run, _ = self._fed.require_trained("a trial")
        if not run.spending.own <= self._planned:
            raise RuntimeError("A trial was charged more than was planned.")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Lets nothing be printed, logged or warned of: it would tell of a trial."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _check_mechanism(made: DPFederatedModel, candidate: Candidate) -> None:
    """Raises ValueError unless the noise of a candidate can be replaced."""
    mechanism, problem = made.mechanism, None
    noise = mechanism.parameters().get("noise_multiplier")
    if made.setup.sampling != "poisson":
        problem = f"sampling='poisson', got {made.setup.sampling!r}"
    elif made.setup.aborts_on_failure:
        problem = (
            "on_client_failure='exclude', got 'abort': a model that did not move would "
            "tell of a client, without noise"
        )
    elif not schedules.is_constant(made.setup.clients_per_round):
        problem = "a constant clients_per_round, got a schedule"
    elif mechanism.guarantee != "central" or not isinstance(noise, int | float):
        problem = (
            "a central mechanism with a constant noise_multiplier (FixedClipping, "
            f"AdaptiveClipping, MedianClipping), got {mechanism.describe()!r}"
        )
    elif "exact_median" in mechanism.caveats():
        problem = "a median_noise_multiplier, got an exact median, which is not private"
    if problem is not None:
        raise ValueError(
            f"build must return a model with {problem}, for {candidate!r}."
        )


def calibrated(
    trials: list[Trial], split: Split, count: TrialCount, target: tuple[float, float]
) -> accounting.RoundCharge:
    """Gives all trials the smallest noise that keeps the target.

    Returns what the search costs each client at most, whichever candidates are drawn.
    """
    epsilon, delta = target
    clients = split.training.num_clients

    def charge(events: Sequence[dp_accounting.DpEvent]) -> accounting.RoundCharge:
        if split.event is not None and split.is_disjoint:
            events = (*events, split.event)
        elif split.event is not None:
            events = [
                dp_accounting.ComposedDpEvent((one, split.event)) for one in events
            ]
        return accounting.RoundCharge(
            sampling="poisson",
            num_clients=clients,
            clients_per_round=clients,
            event=BestOfTrialsDpEvent(
                tuple(dict.fromkeys(events)), count.mean, count.shape
            ),
        )

    def noise_of(trial: Trial, aim: float, limit: float | None) -> float:
        return accounting.calibrate(
            lambda z: [charge([trial.event(z)])], aim, delta, "pld", upper=limit
        )

    aim = epsilon
    while True:
        events: list[dp_accounting.DpEvent] = []
        # By what a trial costs with some noise: alike, it is calibrated once.
        known: dict[dp_accounting.DpEvent, float] = {}
        for trial in trials:
            limit = trial.noise_limit()
            kind = trial.event(min(1.0, limit or 1.0))
            if kind not in known:
                known[kind] = noise_of(trial, aim, limit)
            events.append(trial.event(known[kind]))
        whole = charge(events)
        total = accounting.PrivacyAccountant([whole]).epsilon(delta, "pld")
        if total <= epsilon:
            return whole
        # Candidates of several costs: the largest at each epsilon costs more than any.
        aim *= 0.999 * epsilon / total
