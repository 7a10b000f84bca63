"""A search over settings that is charged as a whole.

Every figure of private training is reached by trying settings on clients' data, and
hardly anybody counts the tries. Here a secret, random number of trials is run, each
with a candidate drawn at random; the best one's model is all that is released. Each
trial gets so much noise that the whole search keeps the target.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _interrupts, _validate, accounting, datasets
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.accounting.search import TrialCount
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import DPFederatedModel, model_history
from tfdp_fl.search.scores import PrivateScore, PublicScore, Split
from tfdp_fl.search.trial import Candidate, Trial, calibrated, charge_of


class PrivateSearch:
    """Finds settings and trains with them, within one epsilon.

    Runs a random number of trials, each a training with a candidate that is drawn
    at random, with replacement, and returns the model of the best. The target holds
    for all that is released: the candidate and its model. How many trials there were,
    and how the others did, stays secret: trials are silent, no callback hears of
    them, and one that fails counts as the worst. The running time is not hidden.

    Trials are by Poisson cohorts and mechanisms of the server's noise. Papernot &
    Steinke (2022), https://arxiv.org/abs/2110.03620.

    Attributes:
      candidates: The settings to choose from.
      best: The chosen candidate of the last `fit`; None if no trial had a score, and
        the model that was returned is untrained.
    """

    def __init__(
        self,
        build: Callable[..., DPFederatedModel],
        candidates: Sequence[Mapping[str, Any]],
        *,
        expected_trials: float,
        target_epsilon: float,
        target_delta: float,
        score: PublicScore | PrivateScore,
        distribution: str | float = "poisson",
    ):
        """Builds and trains nothing yet.

        Args:
          build: Called with a candidate's settings, returns a new, compiled
            `DPFederatedModel`. Its noise multiplier is replaced. It must not look at
            the clients; it is called once for each candidate when `fit` begins.
          candidates: Settings, each a mapping of arguments of `build`. They must be
            chosen without looking at the clients.
          expected_trials: The expected number of trials, at least 1.
          target_epsilon: The most that one `fit` may cost.
          target_delta: At this delta.
          score: By what trials are compared: on public data, or on clients that do
            not train.
          distribution: Of the number of trials. "poisson": there may be none, and
            then the untrained model is returned; "geometric", "logarithmic" or a
            number, the shape of a truncated negative binomial distribution: there is
            at least one. Which costs least depends on the target and on the rounds.

        Raises:
          TypeError, ValueError: An argument is not allowed; the message names it.
        """
        if not callable(build):
            raise TypeError(f"build must be callable, got {build!r}.")
        _validate.instance_of((list, tuple), candidates=candidates)
        self.candidates: list[Candidate] = []
        for candidate in candidates:
            _validate.instance_of(Mapping, candidates=candidate)
            self.candidates.append(dict(candidate))
        if not self.candidates:
            raise ValueError("candidates must hold at least one, got none.")
        self.best: Candidate | None = None
        self._build = build
        self._trials = TrialCount.named(expected_trials, distribution)
        self._target = (
            _validate.positive(target_epsilon=target_epsilon),
            _validate.inside_unit_interval(target_delta=target_delta),
        )
        self._score = _validate.instance_of((PublicScore, PrivateScore), score=score)
        self._spent = accounting.PrivacyAccountant()
        self._counted: set[str] = set()
        self._searches = 0
        self._last: tuple[Split, list[Trial]] | None = None
        self._fitting = threading.Lock()

    def fit(
        self,
        clients: Any,
        rounds: int = 1,
        batch_size: int = 32,
        local_epochs: int = 1,
        *,
        shuffle: bool = False,
        class_weight: Mapping[int, float] | None = None,
        ledger: str | os.PathLike[str] | None = None,
    ) -> tf.keras.Model:
        """Runs a search, and returns the Keras model of its best trial.

        It is charged before the first trial. A second call is a second search, and
        epsilon is that of both.

        Args:
          clients: As in `DPFederatedModel.fit`.
          rounds: The rounds of each trial.
          batch_size: As in `DPFederatedModel.fit`.
          local_epochs: Likewise.
          shuffle: Likewise.
          class_weight: Likewise.
          ledger: The file of a `PrivacyLedger`, in which the search is one line; what
            other runs in it spent counts as well. None: nothing is kept.

        Returns:
          The model; it is trained no further, as its cost is counted here. Untrained
          if no trial had a score: `best` is None then.

        Raises:
          ValueError, TypeError: An argument is not allowed; the message names it.
            Nothing is charged.
          LedgerError: The ledger could not be written. Nothing was trained.
        """
        if not self._fitting.acquire(blocking=False):
            raise RuntimeError("fit was called while a fit of this search is running.")
        try:
            _validate.positive_integer(rounds=rounds)
            options = {
                "batch_size": _validate.positive_integer(batch_size=batch_size),
                "local_epochs": _validate.positive_integer(local_epochs=local_epochs),
                "shuffle": bool(shuffle),
                "class_weight": class_weight,
            }
            split = self._score.split(datasets.as_federated(clients))
            trials = self._built(split.training)
            event = calibrated(trials, split, rounds, self._trials, self._target)
            with self._charged(charge_of(split, event), ledger):
                self._last = split, trials
                best, weights = self._run_trials(
                    self._trials.draw(np.random.default_rng()),
                    trials,
                    lambda trial: trial.run(split, rounds, options, self._score),
                )
            self.best = None if best is None else dict(self.candidates[best])
            winner = trials[best or 0]
            winner.assign(weights)
            return winner.model
        finally:
            self._fitting.release()

    def epsilon(self, delta: float) -> float:
        """Returns the epsilon at delta of all searches so far; 0 before the first.

        Args:
          delta: Strictly between 0 and 1.
        """
        return self._spent.epsilon(_validate.inside_unit_interval(delta=delta))

    def privacy_statement(
        self, delta: float | None = None, format: str = "text"
    ) -> str | dict[str, Any]:
        """Returns what was guaranteed, to whom, and what was not.

        Args:
          delta: Where epsilon is stated; None: the target's.
          format: "text" or "dict".

        Raises:
          ValueError: Nothing was searched yet, or an argument is not allowed.
        """
        if self._last is None or not self._searches:
            raise ValueError("fit must be called before privacy_statement.")
        split, trials = self._last
        caveats = {name for trial in trials for name in trial.mechanism.caveats()}
        scored = "public data"
        if split.held_out is not None:
            scored = f"{split.held_out.num_clients} clients, with noise, and charged"
        times = "" if self._searches == 1 else f"{self._searches} times, "
        facts = accounting.StatementFacts(
            guarantee="central",
            mechanism="PrivateSearch",
            mechanism_description=(
                f"{times}the best of a secret number of trials "
                f"({self._trials.describe()}) over {len(self.candidates)} candidates, "
                f"scored on {scored}, accounted for by {self._trials.theorem}; the "
                "mechanism of the first one's trials: "
                f"{trials[0].mechanism.describe()}"
            ),
            sampling="poisson",
            num_clients=split.training.num_clients,
            clients_per_round=sorted({trial.clients_per_round for trial in trials}),
            search=f"after {times}a search over {len(self.candidates)} candidates",
            epsilon_rdp=self._spent.epsilon,
            epsilon_if_participation_is_known=(
                self._spent.epsilon_if_participation_is_known
            ),
            caveats=(
                *sorted(caveats),
                "search_counted",
                "search_time_not_hidden",
                "only_runs_in_ledgers_counted",
                "floating_point_noise",
                "pseudorandom_noise",
            ),
        )
        return accounting.privacy_statement(facts, delta or self._target[1], format)

    def _built(self, clients: FederatedDataset) -> list[Trial]:
        """Calls `build` for all candidates, and checks what it made."""
        trials: list[Trial] = []
        seen: set[int] = set()
        for candidate in self.candidates:
            trial = Trial(candidate, self._build(**candidate))
            own = {id(variable) for variable in trial.variables}
            if seen & own:
                raise ValueError(
                    "build must return a model of its own for each candidate, got "
                    "one that shares variables with another: a trial would begin "
                    "where another one ended."
                )
            seen |= own
            trial.check(clients, self._score.metric)
            trials.append(trial)
        return trials

    @contextlib.contextmanager
    def _charged(
        self, charge: accounting.RoundCharge, path: str | os.PathLike[str] | None
    ) -> Iterator[None]:
        """Charges the search, on the disk and in memory, before the block."""
        spent, counted = self._spent.copy(), set(self._counted)
        with contextlib.ExitStack() as stack:
            ledger = None
            if path is not None:
                run = ledger_lib.new_run()
                ledger = stack.enter_context(
                    accounting.PrivacyLedger(
                        path,
                        mode="append",
                        target_epsilon=self._target[0],
                        target_delta=self._target[1],
                        mechanism={"name": "PrivateSearch", "guarantee": "central"},
                        run=run,
                    )
                )
                runs = ledger.contents().by_run()
                for other in runs.keys() - counted:
                    for entry in runs[other]:
                        if entry.charge is None:
                            raise ValueError(
                                "ledger must be of central guarantees alone, got one "
                                f"with a round of run {other} that has none."
                            )
                        spent.add(entry.charge)
                counted |= {*runs, run}
            spent.add(charge)
            with _interrupts.after_the_block():
                if ledger is not None:
                    words = self._trials.describe()
                    ledger.record(0, charge, charge.num_clients, search=words)
                self._spent, self._counted = spent, counted
                self._searches += 1
            yield

    def _run_trials(
        self,
        number: int,
        trials: list[Trial],
        run: Callable[[Trial], float],
    ) -> tuple[int | None, list[np.ndarray]]:
        """Returns the place of the best candidate, if any, and its weights."""
        best, highest, weights = None, -math.inf, trials[0].initial
        try:
            for _ in range(number):
                place = secrets.randbelow(len(trials))
                score = run(trials[place])
                if score > highest:
                    best, highest, weights = place, score, trials[place].values()
                trials[place].reset()
        finally:
            for trial in trials:
                trial.reset()
                model_history.claim(self, trial.variables)
        return best, weights
