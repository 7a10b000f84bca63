"""The rounds of one call of `fit`, and everything around them.

The round itself is in `tfdp_fl.algorithm`. This module adds callbacks, progress, logs,
audits, and the handling of failed clients and interrupts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, algorithm, auditing, keras_versions, sampling
from tfdp_fl.accounting import BudgetExceededError, Receipt, RoundCharge, format_up
from tfdp_fl.accounting.rounding import round_up_for_bar
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import Executor, PendingRound, release, secure_sum
from tfdp_fl.keras import facts, federated_training
from tfdp_fl.keras.callbacks import (
    FederatedCallback,
    PrivacyBudget,
    TargetBudget,
    callback_session,
)
from tfdp_fl.keras.evaluation import Validation
from tfdp_fl.keras.federated_training import FederatedTraining
from tfdp_fl.terms import Json, TrustModel

# Values shown only if they are not zero.
_SHOWN_IF_NONZERO = ("abandoned_rounds", "discarded_clients", "failed_clients")
# Not shown in the progress, which has the model's quality and cost; see `History`.
_HIDDEN = (
    *("between_client_variance", "client_noise_stddev", "clip_norm", "cohort_size"),
    *("clipped_fraction", "mean_update_norm", "noise_stddev", "update_scale"),
)


@dataclasses.dataclass
class RoundLoop:
    """Runs the rounds of one call of `fit` and advances the run.

    It also sets `federated_model` of the callbacks.
    """

    fed: FederatedTraining
    clients: FederatedDataset
    callbacks: list[tf.keras.callbacks.Callback]
    validation: Validation
    collector: Executor
    audit: auditing.CanaryAudit | None
    verbose: int

    def __post_init__(self) -> None:
        fed = self.fed
        self.run, self.engine = fed.require_trained("fit")
        self.setup = fed.setup
        # The model before any callback was called; None after the first round.
        self._initial_weights: bytes | None = _hash_weights(fed.model)
        self.federated = [
            callback
            for callback in self.callbacks
            if isinstance(callback, FederatedCallback)
        ]
        if self.setup.target is not None:
            self.federated.append(TargetBudget(self.setup.target))
        for callback in self.federated:
            previous_model = callback.federated_model
            if previous_model not in (None, fed) and federated_training.is_fitting(
                previous_model.model
            ):
                raise RuntimeError(
                    f"callbacks must not have the {type(callback).__name__} of a fit "
                    "that is running: give each model its own callbacks."
                )
            callback.federated_model = fed
        fed.federated_callbacks = self.federated
        self.delta = self.setup.delta
        for callback in self.federated:
            if self.delta is None and isinstance(callback, PrivacyBudget):
                self.delta = self.run.budget_delta = callback.delta
        self.keras_callbacks = tf.keras.callbacks.CallbackList(
            self.callbacks,
            add_history=True,
            model=fed.model,
            verbose=0,
            epochs=self.run.plan.last_round,
            steps=1,
        )

    def train(self) -> tf.keras.callbacks.History:
        """Runs the rounds and calls the callbacks."""
        run, plan, model = self.run, self.run.plan, self.fed.model
        model.stop_training = False
        show = _make_progress(self.verbose, run.rounds, plan.last_round)
        with (
            callback_session(self.federated, run.rounds, plan.last_round),
            contextlib.ExitStack() as stack,
        ):
            # Before callbacks save the run.
            stack.callback(run.end_interrupted_round)
            run.mechanism_state = release.with_variables(run.mechanism_state)
            if run.rounds < plan.last_round:  # Before anybody trains.
                run.account.central.check(run.cost(run.rounds))
            if run.account.rounds_of_others:
                # The other run has the same clients, and perhaps the same seed.
                run.attempts.renew()
            self._note_plan()
            self.keras_callbacks.on_train_begin()
            logs: dict[str, float] = {}
            while run.rounds < plan.last_round and not model.stop_training:
                if not self._is_allowed(run.rounds):
                    break
                started = time.perf_counter()
                try:
                    logs = self._round_with_callbacks(run.rounds)
                except _BudgetSpentError:
                    break
                if self.verbose and run.executor != self.collector.executor:
                    print(f"Trained {self.collector.executor}.", flush=True)
                run.executor = self.collector.executor
                show(run.rounds, logs, time.perf_counter() - started)
            if run.rounds > plan.first_round:
                # As in Keras, this comes after the last validation.
                self.engine.server.finalize()
            if self.audit is not None:
                self.audit.end()
            self.keras_callbacks.on_train_end(logs)
        return model.history

    def _note_plan(self) -> None:
        """Records after how many rounds this `fit` ends, whatever its models show."""
        budgets = [c for c in self.federated if isinstance(c, PrivacyBudget)]
        allowed = [budget.last_allowed_round for budget in budgets]
        planned = min([self.run.plan.last_round, *allowed])
        self.run.planned_rounds = max(self.run.planned_rounds, planned)

    def _is_allowed(self, round_index: int) -> bool:
        return all(callback.allow_round(round_index) for callback in self.federated)

    def _round_with_callbacks(self, round_index: int) -> dict[str, float]:
        self.keras_callbacks.on_epoch_begin(round_index)
        self.keras_callbacks.on_train_batch_begin(0)
        initial, self._initial_weights = self._initial_weights, None
        if initial is not None and _hash_weights(self.fed.model) != initial:
            raise ValueError(
                "callbacks must not change the model's weights before the first round "
                "of a fit: the cost of those weights is unknown. Set public weights "
                "before fit; to continue an interrupted run, use "
                "tfdp_fl.callbacks.RoundCheckpoint and fit(resume_from=directory)."
            )
        with contextlib.ExitStack() as round_stack:
            logs = self._run_round(round_stack)
            self._validate_and_call(round_index, logs)
        return logs

    def _validate_and_call(self, round_index: int, logs: dict[str, float]) -> None:
        """Calls the callbacks; adds the validation metrics to the round's logs."""
        run, validation = self.run, self.validation
        is_last = run.rounds == run.plan.last_round
        if self.delta is not None:
            # During training, use a slightly looser bound, which takes no time.
            logs["epsilon"] = run.account.epsilon(
                self.delta, self.setup.accountant, coarse=not is_last
            )
        self.keras_callbacks.on_train_batch_end(0, logs)
        num_done = run.rounds - run.plan.first_round
        if validation.data is not None and (
            is_last or num_done % validation.every == 0
        ):
            logs.update(validation.evaluate(self.fed.model))
        for callback in self.federated:
            callback.on_round_released(round_index, logs)
        self.keras_callbacks.on_epoch_end(round_index, logs)

    # The round itself: `algorithm.FrontEnd`.

    def _run_round(self, round_stack: contextlib.ExitStack) -> dict[str, float]:
        """Runs a round; returns its logs.

        `round_stack` is closed once the round's callbacks have been called.
        """
        self._round_stack = round_stack
        released = algorithm.run_round(self)
        is_abandoned = released is None
        if released is None:
            released = dict.fromkeys(self.run.log_names, math.nan)
        return {  # The metrics come first, as in Keras.
            **released,
            "cohort_size": float(len(self._inputs.positions)),
            "failed_clients": float(self._num_failed),
            "abandoned_rounds": float(is_abandoned),
        }

    def draw(self) -> sampling.Cohort:
        """See `algorithm.FrontEnd`; also sets the round's inputs."""
        run = self.run
        if run.account.has_unseen_rounds:  # `begin_segment` was interrupted before.
            run.begin_segment(self.engine.query)
        run.sampler.attempt = attempt = run.attempts.take()
        rate = self.fed.require_compiled("fit").learning_rate
        inputs = run.next_inputs(rate, attempt)
        self.engine.prepare(inputs)
        if self.setup.secure_aggregation is not None:
            secure_sum.check_round(self.engine, inputs, self.setup.secure_aggregation)
        cohort = run.draw()
        positions = run.eligible(cohort.positions)
        windows = None if run.windows is None else run.windows[positions]
        self._inputs = dataclasses.replace(inputs, positions=positions, windows=windows)
        return cohort

    def charges_first(self, cohort: sampling.Cohort) -> bool:
        """See `algorithm.FrontEnd`."""
        is_charged = cohort.participation.is_charged_if_abandoned
        # A user's code that computes a clip from the cohort may raise an error, and
        # such a clip may make a secure sum raise one.
        mechanism, tells = self.setup.mechanism, False
        if self.engine.query.two_phase:
            is_own = mechanism.overrides("clip_to_cohort")
            tells = is_own or self.setup.secure_aggregation is not None
        return bool(is_charged or tells or self.run.account.by_client)

    def collect(self, cohort: sampling.Cohort) -> PendingRound:
        """See `algorithm.FrontEnd`."""
        pending = self.collector.collect(self.clients, self._inputs)
        num_left_out = self._sum_securely(pending)
        self._num_failed = len(pending.failures) + num_left_out
        self._report_failures(pending, num_left_out)
        if self.audit is not None and not self.abandons(pending):
            self.audit.join(pending, self._cost(cohort, pending))
        return pending

    def abandons(self, pending: PendingRound) -> bool:
        """See `algorithm.FrontEnd`: with "abort", one failed client is enough."""
        del pending
        return self._num_failed > 0 and self.setup.abandons_on_failure

    def abandon(self, cohort: sampling.Cohort) -> None:
        """See `algorithm.FrontEnd`."""
        run = self.run
        self._round_stack.enter_context(_signals.defer_signals())
        run.sampler.abandon(cohort)
        if run.account.by_client:
            run.caveats.add("rounds_abandoned_charged")
        elif not self.charges_first(cohort):
            run.caveats.add("rounds_abandoned")
            for callback in self.federated:
                if isinstance(callback, PrivacyBudget):
                    callback.allow_one_more(run.plan.last_round)
            self._note_plan()
        run.rounds += 1

    def _cost(
        self, cohort: sampling.Cohort, pending: PendingRound | None
    ) -> RoundCharge:
        """Returns a cohort's cost with the noise of the clients in `pending`.

        None: with the noise of all of its clients.
        """
        num_with_noise = len(self._inputs.positions)
        if pending is not None:
            num_with_noise -= self._num_failed + pending.without_noise
        return self.run.cost(self._inputs.round_index, num_with_noise, cohort)

    def charge(
        self, cohort: sampling.Cohort, pending: PendingRound | None = None
    ) -> Receipt:
        """See `algorithm.FrontEnd`."""
        run, account, inputs = self.run, self.run.account, self._inputs
        if pending is not None:
            # An interrupted round could be charged but not released, or released but
            # not in the history.
            self._round_stack.enter_context(_signals.defer_signals())
        cost = self._cost(cohort, pending)
        facts.record_round(run, self.engine)
        details: Json = {
            "noise_multiplier": inputs.noise_multiplier,
            "noise_generator": self.setup.noise_generator,
            **run.facts_of_line(),
            **run.next_place(),
        }

        def ask(request: Receipt) -> None:
            federated_training.mark_owner(self.fed, self.engine.server.variables)
            if not self._is_allowed(inputs.round_index):
                raise BudgetExceededError
            all_details = {
                "cohort_size": request.cohort_size,
                "local": request.local,
                **details,
            }
            for callback in self.federated:
                callback.on_round_charged(inputs.round_index, cost, all_details)

        budgets = [c.budget for c in self.federated if isinstance(c, PrivacyBudget)]
        options: Json = {
            "budgets": budgets,
            "ask": ask,
            "positions": inputs.positions,
            "mu_squared": run.mu_squared,
        }
        if pending is not None and account.by_client:
            options = {}  # The clients were charged before they trained.
        rounds_before = account.rounds
        try:
            paid = account.charge(
                cost,
                **options,
                round_index=inputs.round_index,
                cohort_size=len(inputs.positions),
                details=details,
            )
        except BudgetExceededError as error:
            raise _BudgetSpentError from error
        except BaseException:
            # One ledger may already have the charge when another one fails.
            if account.rounds > rounds_before:
                run.caveats.add("rounds_charged_twice")
            raise
        finally:
            if account.rounds > rounds_before:
                if pending is None:
                    if run.prepaid_round == inputs.round_index:
                        run.caveats.add("rounds_charged_twice")
                    run.prepaid_round = inputs.round_index
                if run.populations[-1:] != [run.population]:
                    run.populations.append(run.population)
        return paid

    def release(
        self, cohort: sampling.Cohort, pending: PendingRound, paid: Receipt
    ) -> dict[str, float]:
        """See `algorithm.FrontEnd`: updates the model with the paid release."""
        run = self.run
        self._round_stack.enter_context(_signals.defer_signals())
        if self.charges_first(cohort) and paid.cost != self._cost(cohort, pending):
            # Without the failed clients' noise, the model reveals more.
            paid = self.charge(cohort, pending)
            run.caveats.add("local_rounds_counted_twice")
        run.releasing = True
        run.sampler.release(cohort)
        run.mechanism_state, released = self.engine.release(pending, paid)
        run.cohort_sizes[len(pending.inputs.positions)] += 1
        run.log_names = list(released)
        run.update_windows(pending.inputs.positions, pending.window_norms)
        run.rounds += 1
        run.releasing = False
        if self.audit is not None:
            self.audit.observe_release()
        if self._num_failed and run.account.trust_model != TrustModel.CENTRAL:
            run.caveats.add("local_clients_excluded")
        return released

    def _sum_securely(self, pending: PendingRound) -> int:
        """Runs secure aggregation, if set; returns how many clients it left out."""
        protocol = self.setup.secure_aggregation
        if protocol is None:
            return 0
        return len(secure_sum.sum_securely(self.engine, pending, protocol))

    def _report_failures(self, pending: PendingRound, num_left_out: int) -> None:
        """Tells the user which clients failed, and what that means for the round."""
        prefix = f"Round {pending.inputs.round_index + 1}:"
        aborts = self.setup.abandons_on_failure
        consequence = (
            "the round is abandoned" if aborts else "the round goes on without them"
        )
        if pending.failures:
            first = pending.failures[0]
            name = self.clients.client_ids[first.position]
            self.fed.say(
                f"{prefix} the data of {_count_text(len(pending.failures))} could not "
                f"be read; {consequence}. Client {name!r}: {first.reason}"
            )
        if num_left_out:
            self.fed.say(
                f"{prefix} secure aggregation failed for {_count_text(num_left_out)}; "
                f"their updates were not sent, and {consequence}."
            )


def _count_text(number: int) -> str:
    return "1 client" if number == 1 else f"{number} clients"


class _BudgetSpentError(Exception):
    """While a cohort trained, something else spent the budget for its round."""


def _hash_weights(model: tf.keras.Model) -> bytes:
    """Returns a digest of all bits of a model's weights."""
    digest = hashlib.sha256()
    for value in keras_versions.settled_values(model.weights):
        digest.update(np.ravel(np.asarray(value)).view(np.uint8))
    return digest.digest()


def _make_progress(verbose: int, first_round: int, last_round: int) -> Any:
    """Returns a function that shows rounds as a bar (`verbose` 1), lines (2) or not."""
    bar: Any = None
    if verbose == 1:
        bar = tf.keras.utils.Progbar(last_round - first_round, unit_name="round")

    def show(num_done: int, logs: dict[str, float], seconds: float) -> None:
        visible = {
            name: value
            for name, value in logs.items()
            if name not in _HIDDEN
            and not math.isnan(value)
            and (value or name not in _SHOWN_IF_NONZERO)
        }
        if bar is not None:
            bar.stateful_metrics = {*visible}
            if "epsilon" in visible:
                visible["epsilon"] = round_up_for_bar(visible["epsilon"])
            bar.update(num_done - first_round, visible.items())
        elif verbose:
            values = "".join(
                f" - {name}: {format_up(v) if name == 'epsilon' else f'{v:.4g}'}"
                for name, v in visible.items()
            )
            print(f"Round {num_done}/{last_round} - {seconds:.2f}s{values}", flush=True)

    return show
