"""The rounds of one call of `fit`.

    draw a cohort -> collect its updates -> charge -> release

The charge stands between the two halves of a round: what was collected is seen
by nobody before it is paid for, and what was abandoned is not charged. (It is
where clients have to trust nobody: a server that abandons a round has received
what they sent.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _interrupts, auditing
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import (
    CohortEngine,
    PendingRound,
    RoundInputs,
    chunks,
    secure_sum,
)
from tfdp_fl.keras import callbacks as callbacks_lib
from tfdp_fl.keras import costs as costs_lib
from tfdp_fl.keras import model_history, progress, randomness
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras.compiled import Compiled
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.keras.validation_data import Validation
from tfdp_fl.mechanisms import noise


@dataclasses.dataclass(kw_only=True)
class RoundLoop:
    """Runs the rounds of one call of `fit`, and moves the run on.

    Attributes:
      model: The Keras model.
      setup: What the `DPFederatedModel` was made with.
      compiled: What `compile` was given.
      run: The run.
      clients: The clients.
      engine: Releases what was collected.
      collector: Collects; the engine, or a runtime's.
      validation: What is validated, and when.
      delta: At which `History` has epsilon; None: it has none.
      keras_callbacks: Those of `fit`, as Keras calls them.
      federated_model: What is trained: its callbacks are asked and told of rounds.
      audit: Joins canary clients to each round, or None.
      say: Tells the user something.
      begun_with: The `digest` of the model before any callback was called.
    """

    model: tf.keras.Model
    setup: TrainingSetup
    compiled: Compiled
    run: run_lib.Run
    clients: FederatedDataset
    engine: CohortEngine
    collector: Any
    validation: Validation
    delta: float | None
    keras_callbacks: tf.keras.callbacks.CallbackList
    federated_model: Any
    audit: auditing.CanaryAudit | None
    say: Callable[[str], None]
    begun_with: bytes
    # A round that was drawn ahead, with its index and the attempt.
    _ahead: tuple[tuple[int, randomness.Attempt], RoundInputs] | None = None

    @property
    def federated(self) -> list[callbacks_lib.FederatedCallback]:
        """The callbacks that hear of rounds before they run."""
        return self.federated_model.federated_callbacks

    def train(self, progress_bar: progress.RoundProgress) -> None:
        """Runs the rounds, with everything that callbacks hear of them."""
        run, plan = self.run, self.run.plan
        self.model.stop_training = False
        try:
            # What a ledger tells of counts against every budget.
            for each in sorted(self.federated, key=_opens_ledger):
                each.on_rounds_planned(run.rounds, plan.last_round)
            if run.spending.rounds_of_others:
                # On the same clients, and perhaps with the same seed.
                run.attempts.renew()
            begun_with: bytes | None = self.begun_with
            self.keras_callbacks.on_train_begin()
            logs: dict[str, float] = {}
            while run.rounds < plan.last_round and not self.model.stop_training:
                round_index = run.rounds
                if not all(each.allow_round(round_index) for each in self.federated):
                    break
                started = time.perf_counter()
                try:
                    logs = self._round_with_callbacks(round_index, begun_with)
                except _BudgetSpentError:
                    break
                begun_with = None
                progress_bar.end_of_round(
                    round_index, logs, time.perf_counter() - started
                )
            if run.rounds > plan.first_round:
                # Keras's own place for it: the last validation came before.
                self.engine.server.finalize()
            if self.audit is not None:
                self.audit.end()
            self.keras_callbacks.on_train_end(logs)
            for each in self.federated:
                each.on_train_ended()
        finally:
            # Else a ledger stays open, and locked, as long as the process.
            with _interrupts.after_the_block():
                self.engine.read_chunks.close()
                for each in self.federated:
                    each.on_fit_end()

    @property
    def _costs(self) -> costs_lib.RoundCosts:
        return costs_lib.RoundCosts.of(self.setup, self.run)

    def _round_with_callbacks(
        self, round_index: int, begun_with: bytes | None
    ) -> dict[str, float]:
        self.keras_callbacks.on_epoch_begin(round_index)
        self.keras_callbacks.on_train_batch_begin(0)
        if begun_with is not None and digest(self.model) != begun_with:
            raise ValueError(
                "callbacks must not change the model's weights before the first round "
                "of a fit: nobody can tell what those weights cost. Set public weights "
                "before fit; to go on with an interrupted run, use "
                "tfdp_fl.callbacks.RoundCheckpoint and fit(resume_from=directory)."
            )
        with contextlib.ExitStack() as whole:
            logs = self._round(round_index, whole)
            self._tell(round_index, logs)
        return logs

    def _tell(self, round_index: int, logs: dict[str, float]) -> None:
        """Validates, and calls the callbacks; adds to the round's logs."""
        run, validation = self.run, self.validation
        if self.delta is not None:
            logs["epsilon"] = run.spending.epsilon(
                self.delta,
                self.setup.accountant,
                # On the way, a bound a little larger, which takes no time.
                coarse=run.rounds < run.plan.last_round,
            )
        self.keras_callbacks.on_train_batch_end(0, logs)
        done = run.rounds - run.plan.first_round
        if validation.data is not None and (
            done % validation.every == 0 or run.rounds == run.plan.last_round
        ):
            logs.update(validation.evaluate(self.model))
        for each in self.federated:
            each.on_round_released(round_index, logs)
        self.keras_callbacks.on_epoch_end(round_index, logs)

    def _round(self, round_index: int, whole: contextlib.ExitStack) -> dict[str, float]:
        """Draws, collects, charges, releases; returns the round's logs.

        Args:
          round_index: The round.
          whole: Is closed when the round's callbacks were called.
        """
        inputs = self._draw(round_index)
        pending = self.collector.collect(self.clients, inputs)
        failed_groups: tuple[int, ...] = ()
        if self.setup.secure_aggregation is not None:
            failed_groups = secure_sum.sum_securely(
                self.engine, pending, self.setup.secure_aggregation
            )
        failed = len(pending.failures) + len(failed_groups)
        self._report_failures(pending, failed_groups)
        logs = {"cohort_size": float(len(inputs.positions))}
        report = {"failed_clients": float(failed), "abandoned_rounds": 0.0}
        if failed and self.setup.aborts_on_failure:
            if self.run.spending.by_client:
                # Their own noise is all that protects them from the server,
                # which has received what the others sent.
                whole.enter_context(_interrupts.after_the_block())
                self._charge(inputs)
            self.run.facts.rounds_abandoned += 1
            self.run.rounds += 1
            report["abandoned_rounds"] = 1.0
            empty = dict.fromkeys(self.run.log_names, math.nan)
            return {**empty, **logs, **report}
        if self.audit is not None:
            self.audit.join(pending, self._costs.charge(round_index))
        # Broken off later, a round would be charged and not released, or
        # released and not in the history.
        whole.enter_context(_interrupts.after_the_block())
        self._charge(inputs, failed + pending.without_noise)
        released = self._release(pending)
        self.run.facts.clients_excluded += failed
        # The metrics first, as Keras orders them.
        return {**released, **logs, **report}

    def _draw(self, round_index: int) -> RoundInputs:
        """Returns what is decided about a round before anybody trains."""
        run = self.run
        attempt = run.attempts.take()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (round_index, attempt):
            inputs = ahead[1]
        else:
            inputs = self._drawn(round_index, attempt)
        following = round_index + 1
        if (
            following < run.plan.last_round
            and not run.sampler.goes_by_releases
            and self.setup.mechanism.max_participations is None
        ):
            self._draw_following(following)
        return dataclasses.replace(
            inputs,
            learning_rate=self.compiled.learning_rate,
            windows=None if run.windows is None else run.windows[inputs.positions],
        )

    def _draw_following(self, following: int) -> None:
        """Has the round after this one drawn while this one trains.

        On another thread, which is done with it before this round's cohort is
        collected, so that nothing else uses the sampler meanwhile.
        """
        run, engine = self.run, self.engine
        attempt = run.attempts.coming

        def draw() -> RoundInputs:
            inputs = self._drawn(following, attempt)
            if in_memory:
                chunk = chunks.indexed(self.clients, inputs.positions)
                inputs = dataclasses.replace(
                    inputs, chunk=self.collector.lay_out(chunk, inputs)
                )
            self._ahead = (following, attempt), inputs
            return inputs

        in_memory = self.clients.is_indexed
        if not in_memory:
            engine.read_chunks.expect(draw)
        elif run.windows is None:
            engine.background.expect(draw)

    def _drawn(self, round_index: int, attempt: randomness.Attempt) -> RoundInputs:
        """Returns a round's inputs but for what only the last one decides."""
        run, plan = self.run, self.run.plan
        run.sampler.attempt = attempt
        return RoundInputs(
            round_index=round_index,
            positions=self._costs.draw(round_index),
            # The fixed m, also for the last, smaller cohort of a pass.
            clients_per_round=run.deployment.cohort_size(round_index),
            noise_multiplier=self.setup.mechanism.noise_multiplier_at(round_index),
            batch_size=plan.batch_size,
            local_epochs=plan.local_epochs,
            learning_rate=math.nan,
            seed=randomness.round_seed(plan.seed, attempt),
            shuffle=randomness.shuffle_generator(plan.seed, attempt)
            if plan.shuffle
            else None,
        )

    def _charge(self, inputs: RoundInputs, silent: int = 0) -> None:
        """Pays for a round: first in every ledger, then in memory.

        Args:
          inputs: The round.
          silent: How many of its clients added no noise of their own, where
            every client does.
        """
        run, costs, positions = self.run, self._costs, inputs.positions
        charge = costs.charge(inputs.round_index, len(positions) - silent)
        mu_squared = costs.mu_squared
        details: dict[str, Any] = {
            "cohort_size": len(positions),
            "noise_multiplier": inputs.noise_multiplier,
            "mu_squared": mu_squared,
            "max_mu_squared": run.spending.clients.max_mu_squared_after(
                positions, mu_squared
            )
            if run.spending.by_client
            else 0.0,
        }
        if self.run.plan.seed is not None:
            details["seeded"] = True
        if self.setup.noise_generator != noise.PHILOX:
            details["noise_generator"] = self.setup.noise_generator
        with model_history.charging:
            model_history.check_owner(self.federated_model)
            if not all(
                callback.allow_round(inputs.round_index) for callback in self.federated
            ):
                raise _BudgetSpentError
            for callback in self.federated:
                callback.on_round_charged(inputs.round_index, charge, details)
            run.spending.charge(charge, positions, mu_squared)
            model_history.claim(self.federated_model, self.engine.server.variables)
        if run.populations[-1:] != [run.population]:
            run.populations.append(run.population)

    def _release(self, pending: PendingRound) -> dict[str, float]:
        """Lets the model change by what was paid for."""
        run = self.run
        run.releasing = True
        run.sampler.released(pending.inputs.positions)
        released = self.engine.release(pending)
        run.mechanism_state = self.engine.state
        run.releasing = False
        run.cohort_sizes.append(len(pending.inputs.positions))
        run.log_names = list(released)
        run.remember_norms(pending.inputs.positions, pending.window_norms)
        run.rounds += 1
        if self.audit is not None:
            self.audit.released()
        return released

    def _report_failures(
        self, pending: PendingRound, failed_groups: tuple[int, ...]
    ) -> None:
        number = pending.inputs.round_index + 1
        what = (
            "the round is abandoned"
            if self.setup.aborts_on_failure
            else "the round goes on without them"
        )
        if pending.failures:
            first = pending.failures[0]
            name = self.clients.client_ids[first.position]
            self.say(
                f"Round {number}: the data of "
                f"{len(pending.failures)} client(s) could not be read; "
                f"{what}. Client {name!r}: {first.reason}"
            )
        if failed_groups:
            self.say(
                f"Round {number}: secure aggregation failed for "
                f"{len(failed_groups)} client(s), who keep their own updates; "
                f"{what}."
            )


class _BudgetSpentError(Exception):
    """A callback spent, while a cohort trained, what the round was to cost."""


def digest(model: tf.keras.Model) -> bytes:
    """Returns a hash of all weights of a model."""
    digest = hashlib.sha256()
    for weight in model.get_weights():
        digest.update(np.ascontiguousarray(weight).tobytes())
    return digest.digest()


def _opens_ledger(callback: callbacks_lib.FederatedCallback) -> int:
    """Sorts ledgers first, then checkpoints, which save what ledgers tell."""
    if isinstance(callback, callbacks_lib.Ledger):
        return 0
    return 1 if isinstance(callback, callbacks_lib.RoundCheckpoint) else 2
