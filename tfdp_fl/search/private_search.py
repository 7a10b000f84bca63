"""A hyperparameter search that is charged as a whole.

The settings of private training are often found by trials on clients' data whose cost
is not counted. Here, a secret, random number of trials is run, each with a candidate
drawn at random, and only the best trial's model is released. Each trial gets enough
noise for the whole search to meet the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _files, _validate, accounting, datasets
from tfdp_fl.accounting.account import PrivacyAccount
from tfdp_fl.accounting.ledger import new_id
from tfdp_fl.accounting.private_selection import TrialCount
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import DPFederatedModel, checkpoint, federated_training
from tfdp_fl.search.trial import PrivateScore, PublicScore, Split, Trial, calibrate
from tfdp_fl.terms import Json, PrivacyUnit, TrustModel

# The files in a search's directory.
_LEDGER, _STATE = "ledger.jsonl", "search.npz"


class PrivateSearch:
    """Finds settings and trains with them, within one epsilon.

    It runs a random number of trials, each of which trains with a candidate drawn at
    random with replacement, and returns the best trial's model. The target covers
    everything that is released: the candidate and its model. The number of trials and
    the other trials' results stay secret: trials are silent, no callback is called, and
    a failed trial counts as the worst. The running time is not hidden. During a trial,
    the whole process is silent, also the prints and logs of other threads; run a server
    in another process.

    Trials use Poisson cohorts and mechanisms whose noise the server adds. Papernot &
    Steinke (2022), https://arxiv.org/abs/2110.03620; Koskela, Redberg & Wang (2024),
    https://arxiv.org/abs/2402.06701.

    Attributes:
      candidates: The settings to choose from.
      best: The chosen candidate of the last `fit`; None if no trial had a score, in
        which case the returned model is untrained.
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
        """Declares a search; `fit` runs it.

        Args:
          build: Takes a candidate's settings as arguments and returns a new, compiled
            `DPFederatedModel`, whose noise multiplier is replaced. It must not look at
            the clients. It is called once for each candidate when `fit` starts.
          candidates: Settings, each a mapping of arguments of `build`. They must be
            chosen without looking at the clients.
          expected_trials: The expected number of trials, at least 1.
          target_epsilon: The largest epsilon that one `fit` may cost.
          target_delta: The delta of that cost.
          score: How trials are compared: on public data, or on clients that do not
            train.
          distribution: The distribution of the number of trials. With "poisson", there
            may be no trial, and an untrained model is then returned. With "geometric",
            "logarithmic" or a number (the shape of a truncated negative binomial
            distribution), there is at least one trial. Which distribution costs least
            depends on the target and the rounds.

        Raises:
          TypeError, ValueError: An argument is not allowed; the message names it.
        """
        if not callable(build):
            raise TypeError(f"build must be callable, got {build!r}.")
        _validate.instance_of((list, tuple), candidates=candidates)
        self.candidates: list[Json] = []
        for candidate in candidates:
            _validate.instance_of(Mapping, candidates=candidate)
            self.candidates.append(dict(candidate))
        if not self.candidates:
            raise ValueError("candidates must have at least one, got none.")
        self.best: Json | None = None
        self._build = build
        self._trials = TrialCount.from_arguments(expected_trials, distribution)
        self._target = (
            _validate.positive(target_epsilon=target_epsilon),
            _validate.inside_unit_interval(target_delta=target_delta),
        )
        self._score = _validate.instance_of((PublicScore, PrivateScore), score=score)
        if isinstance(score, PrivateScore):
            _validate.exactly(PrivateScore, score=score)
        # Each search is a separate run, like the other runs in its ledger.
        self._account = PrivacyAccount(TrustModel.CENTRAL, num_clients=1)
        self._charged_run_ids: set[str] = set()
        # By run id, the digest of the search's result.
        self._result_digests: dict[str, str] = {}
        self._last_search: tuple[Split, list[Trial]] | None = None

    def fit(
        self,
        clients: Any,
        rounds: int = 1,
        batch_size: int = 32,
        local_epochs: int = 1,
        *,
        shuffle: bool = False,
        directory: str | os.PathLike[str] | None = None,
        resume_from: str | os.PathLike[str] | None = None,
        verbose: str | int = 0,
    ) -> tf.keras.Model:
        """Runs a search and returns the Keras model of its best trial.

        The search is charged before its first trial. A second call is a second search,
        and epsilon then covers both.

        Args:
          clients: As in `DPFederatedModel.fit`.
          rounds: The rounds of each trial.
          batch_size: As in `DPFederatedModel.fit`.
          local_epochs: Passes over a client's examples, as in `fit`.
          shuffle: Whether clients shuffle their examples.
          directory: The directory of `ledger.jsonl`, which records the search as one
            line; other runs in it count as well. The directory also contains the
            search's state, and later its result. Keep it secret permanently: its files'
            change times reveal how long the search took. None: nothing is stored.
          resume_from: The `directory` of an interrupted search. The search continues
            with the remaining trials; an interrupted trial counts as failed. A search
            that has ended returns the same model again, at no cost. All other arguments
            must be the same. Never finish a copy of the directory, too: another
            process would not count its second result.
          verbose: Accepted as in `DPFederatedModel.fit`, but without effect, as
            progress output would reveal the trials.

        Returns:
          The model. It cannot be trained further, as its cost is counted here. It is
          untrained if no trial had a score, in which case `best` is None.

        Raises:
          ValueError, TypeError: An argument is not allowed; the message names it.
            Nothing is charged.
          LedgerError: The ledger could not be written. Nothing was trained.
        """
        if verbose not in (0, 1, 2, "auto"):
            raise TypeError(f"verbose must be 0, 1, 2 or 'auto', got {verbose!r}.")
        with federated_training.fit_lock(self, "fit", "search"):
            options = {
                "rounds": _validate.positive_integer(rounds=rounds),
                "batch_size": _validate.number_of_rows(batch_size=batch_size),
                "local_epochs": _validate.positive_integer(local_epochs=local_epochs),
                "shuffle": bool(shuffle),
            }
            if None not in (directory, resume_from):
                raise ValueError(
                    "directory must be None with resume_from, which names it."
                )
            dataset = datasets.as_federated(clients)
            split = self._score.split(dataset)
            trials = self._build_trials(split, options)
            charge = calibrate(trials, split, self._trials, self._target)
            for trial in trials:
                trial.prepare()
            resumes = resume_from is not None
            files = SearchDirectory(resume_from if resumes else directory)
            plan = {**self._plan(dataset, options), "build": charge.to_json()}
            with files.lock_ledger(resumes, self._target):
                state = self._begin_or_resume(files if resumes else None, plan, trials)
                paid = self._charge(files, state, charge)
                self._last_search = split, trials
                self._run_trials(files, state, trials, paid)
                files.end(state)
                self._result_digests[state.run_id] = state.digest()
            best = state.best
            self.best = None if best is None else dict(self.candidates[best])
            winner = trials[best or 0]
            winner.assign(state.weights)
            return winner.model

    def epsilon(self, delta: float) -> float:
        """Returns epsilon at delta for all searches so far; 0 before the first.

        Args:
          delta: Strictly between 0 and 1.
        """
        composition = self._account.central
        return composition.epsilon(delta, "pld" if composition.is_one_search else "rdp")

    def privacy_statement(
        self, delta: float | None = None, format: str = "text"
    ) -> str | Json:
        """Returns a statement of what was guaranteed, to whom, and what was not.

        Args:
          delta: The delta at which epsilon is stated; None: the target's.
          format: "text" or "dict".

        Raises:
          ValueError: There was no search yet, or an argument is not allowed.
        """
        if self._last_search is None:
            raise ValueError("fit must be called before privacy_statement.")
        delta = self._target[1] if delta is None else delta
        composition, (split, trials) = self._account.central, self._last_search
        caveats = set().union(*(trial.caveats() for trial in trials))
        score_source = "public data"
        if split.held_out is not None:
            score_source = (
                f"{split.held_out.num_clients} clients (held out by their ids, or by "
                "their positions in a list), with noise, and charged"
            )
        theorem = self._trials.theorem
        if composition.is_one_search:
            theorem += (
                " and by privacy profiles (Koskela, Redberg & Wang 2024, arXiv "
                "2402.06701)"
            )
        num_searches = len(self._charged_run_ids)
        times = "" if num_searches == 1 else f"{num_searches} times, "
        facts = accounting.StatementFacts(
            trust_model=TrustModel.CENTRAL,
            mechanism="PrivateSearch",
            mechanism_description=(
                f"{times}the best of a secret number of trials "
                f"({self._trials.describe()}) over {len(self.candidates)} candidates, "
                f"scored on {score_source}, accounted for by {theorem}; the "
                "mechanism of the first one's trials: "
                f"{trials[0].mechanism.describe()}"
            ),
            sampling="poisson",
            other_samplings=[s for s in composition.samplings if s != "poisson"],
            num_clients=split.training.num_clients,
            clients_per_round=sorted({trial.clients_per_round for trial in trials}),
            search=f"after {times}a search over {len(self.candidates)} candidates",
            epsilon_rdp=composition.epsilon,
            epsilon_pld=self.epsilon if composition.is_one_search else None,
            epsilon_if_participation_is_known=composition.epsilon_if_participation_is_known,
            caveats=(
                *sorted(caveats),
                "search_counted",
                *(() if split.is_disjoint else ("search_places_are_ids",)),
                "search_time_not_hidden",
                "only_runs_in_ledgers_counted",
                "floating_point_noise",
                "pseudorandom_noise",
            ),
        )
        return accounting.privacy_statement(facts, delta, format)

    def _plan(self, clients: FederatedDataset, options: Json) -> Json:
        """Returns the settings that a resumed search must repeat, as JSON values."""
        return _files.to_plain(
            {
                "candidates": self.candidates,
                "expected_trials": self._trials.mean,
                "distribution": str(self._trials.shape),
                "target_epsilon": self._target[0],
                "target_delta": self._target[1],
                "score": self._score.digest(),
                "clients": clients.clients_digest,
                **options,
            }
        )

    def _build_trials(self, split: Split, options: Json) -> list[Trial]:
        """Calls `build` for all candidates and checks the results."""
        trials: list[Trial] = []
        used_variables: set[int] = set()
        for candidate in self.candidates:
            trial = Trial(candidate, self._build(**candidate), split, options)
            variables = {id(variable) for variable in trial.variables}
            if used_variables & variables:
                raise ValueError(
                    "build must return a new model and a new server_optimizer for each "
                    "candidate, got one that shares variables with another: a trial "
                    "would begin where another one ended."
                )
            used_variables |= variables
            trial.check(self._score.metric)
            trials.append(trial)
        return trials

    def _begin_or_resume(
        self, interrupted: SearchDirectory | None, plan: Json, trials: list[Trial]
    ) -> SearchState:
        """Returns the state of a new search, or of the interrupted one."""
        if interrupted is None:
            return SearchState(
                plan=plan,
                trials=self._trials.draw(np.random.default_rng()),
                initial=[trial.initial for trial in trials],
                weights=trials[0].initial,
            )
        state = interrupted.read()
        # A second result would not be covered by the charge.
        interrupted.check_end(state, self._result_digests.get(state.run_id))
        for name, value in plan.items():
            if state.plan.get(name) != value:
                raise ValueError(
                    f"{name} must be as in the interrupted search, got another value."
                )
        if not state.ended:
            for trial, initial in zip(trials, state.initial, strict=True):
                trial.initial = initial
                trial.reset()
        return state

    def _run_trials(
        self,
        directory: SearchDirectory,
        state: SearchState,
        trials: list[Trial],
        paid: accounting.Receipt,
    ) -> None:
        """Runs the remaining trials; the state then has the best one of all."""
        try:
            while state.begun < state.trials:
                # Recorded first, so that an interrupted trial is not run again.
                state.begun += 1
                directory.write(state)
                index = secrets.randbelow(len(trials))
                score = trials[index].run(self._score, paid)
                if score > state.score:
                    state.best, state.score = index, score
                    state.weights = trials[index].values()
        finally:
            for trial in trials:
                trial.reset()
                federated_training.mark_owner(self, trial.variables, trial.model)

    def _charge(
        self,
        directory: SearchDirectory,
        state: SearchState,
        charge: accounting.RoundCharge,
    ) -> accounting.Receipt:
        """Charges the search before any trial; returns the receipt."""
        account, ledger = self._account, directory.ledger
        try:
            if ledger is not None:
                account.attach_ledger(directory.name, ledger, run="a search's ledger")
                account.central.check(charge)
                directory.write(state)  # Every charged search must be resumable.
            paid = account.charge(
                charge,
                name=state.run_id,
                resumes=True,  # From a state that says which trials were released.
                cohort_size=charge.num_clients,
                details={"search": self._trials.describe()},
                # For each trial, one for its training and one for its score on clients.
                uses=2 * (state.trials - state.begun),
            )
        finally:
            with account.pause_charges():
                account.detach_ledger(directory.name)
        self._charged_run_ids.add(state.run_id)
        return paid


@dataclasses.dataclass(kw_only=True)
class SearchState:
    """The state of a search between two trials. All of it is secret.

    Attributes:
      plan: The search's arguments, by name.
      run_id: The search's name in its ledger.
      ledger_head: The hash of the last ledger line that the search has seen.
      trials: The secret number of trials.
      begun: The number of started trials. An interrupted trial is not run again.
      initial: The initial weights of each candidate.
      best: The index of the best candidate so far, or None.
      score: The score of the best candidate.
      weights: The best candidate's weights; until there is one, the first's.
      ended: Whether the search has ended, and the secrets of its trials are deleted.
    """

    plan: Json
    trials: int
    initial: list[list[np.ndarray]]
    weights: list[np.ndarray]
    run_id: str = dataclasses.field(default_factory=new_id)
    ledger_head: str = ""
    begun: int = 0
    best: int | None = None
    score: float = -np.inf
    ended: bool = False

    def end(self) -> None:
        """Deletes the secrets: the number of trials and the best score."""
        self.trials = self.begun = 0
        self.score, self.initial, self.ended = -np.inf, [], True

    def digest(self) -> str:
        """Returns a digest that identifies the result."""
        digest = hashlib.sha256(f"{self.run_id} {self.best}".encode())
        for array in self.weights:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


class SearchDirectory:
    """Stores a ledger of searches, and the state or the result of the last one.

    Only its owner can read it. When a search ends, its result replaces its state, and
    then the ledger records the end: from then on, the search can have no other result.
    All files get the time at which the ledger was created, because later times would
    reveal how long the trials took. (A file's ctime cannot be set, so the
    directory must stay secret.) Without a path, nothing is stored.

    Attributes:
      ledger: The ledger while it is locked; None without a path.
    """

    def __init__(self, path: str | os.PathLike[str] | None):
        """Makes an object for a directory, which need not exist yet."""
        self._path = None if path is None else pathlib.Path(path).absolute()
        self.ledger: accounting.PrivacyLedger | None = None

    @property
    def name(self) -> str:
        """The ledger's name in the account; a copy elsewhere has another name."""
        return "" if self._path is None else os.path.realpath(self._path / _LEDGER)

    @contextlib.contextmanager
    def lock_ledger(self, resumes: bool, target: tuple[float, float]) -> Iterator[None]:
        """Holds the ledger's lock; a new ledger records the target.

        Raises:
          ValueError: There is an interrupted search here that is not being resumed, or
            there is none to resume.
        """
        if self._path is None:
            yield
            return
        self._check(resumes)
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with accounting.PrivacyLedger(
            self._path / _LEDGER,
            mode="append",
            target_epsilon=target[0],
            target_delta=target[1],
            mechanism={"name": "PrivateSearch", "trust_model": TrustModel.CENTRAL},
            privacy_unit=PrivacyUnit.CLIENT,
        ) as self.ledger:
            self._check(resumes)  # Another process may have changed it meanwhile.
            try:
                yield
            finally:
                self._hide_times()

    def _check(self, resumes: bool) -> None:
        assert self._path is not None
        is_unfinished = (self._path / _STATE).exists()
        if is_unfinished and not resumes:
            is_unfinished = not self._read_state().ended
        if is_unfinished != resumes:
            argument = "resume_from" if resumes else "directory"
            raise ValueError(
                f"{argument} must have {'an' if resumes else 'no'} interrupted search, "
                "which fit(resume_from=directory) continues, but "
                f"{self._path} has {'one' if is_unfinished else 'none'}."
            )

    def read(self) -> SearchState:
        """Returns the state of an interrupted search, whose ledger must be present."""
        assert self._path is not None
        state = self._read_state()
        ledger = self._path / _LEDGER
        accounting.PrivacyLedger.read(ledger, expected_head=state.ledger_head)
        return state

    def _read_state(self) -> SearchState:
        assert self._path is not None
        data = (self._path / _STATE).read_bytes()
        return SearchState(**checkpoint.from_bytes(data))

    def check_end(self, state: SearchState, digest: str | None) -> None:
        """Raises ValueError for an older state of a search that has ended.

        Args:
          state: The state.
          digest: The digest of that search's result, if this process knows it.
        """
        known = {digest}
        if self.ledger is not None:
            known.add(self.ledger.contents().ended.get(state.run_id))
        known.discard(None)
        if known and not (state.ended and known == {state.digest()}):
            raise ValueError(
                "resume_from must have a search that has not ended, or its result, "
                "got an older state of one that has: its trials would give a second "
                "result, which is not charged."
            )

    def write(self, state: SearchState) -> None:
        """Replaces the state on disk."""
        if self._path is not None and self.ledger is not None:
            self.ledger.require_in_place()  # Else, this is another search's directory.
            state.ledger_head = self.ledger.head
            data = checkpoint.to_bytes(vars(state), level=0)
            checkpoint.write_atomically(self._path / _STATE, data)

    def end(self, state: SearchState) -> None:
        """Replaces the state by the result, and then records the end in the ledger.

        After an interrupt in between, the line is written when the search is resumed.
        """
        state.end()
        if self.ledger is None or state.run_id in self.ledger.contents().ended:
            return
        self.write(state)
        self.ledger.record_end(state.run_id, state.digest())

    def _hide_times(self) -> None:
        assert self._path is not None and self.ledger is not None
        created = self.ledger.contents().header["created"]
        time = datetime.datetime.fromisoformat(created).timestamp()
        for path in (self._path / _STATE, self._path / _LEDGER, self._path):
            with contextlib.suppress(OSError):
                os.utime(path, (time, time))
