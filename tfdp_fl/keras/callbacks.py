"""Callbacks that know about rounds, next to Keras's own.

To Keras's callbacks, a federated round is an epoch, and the model is the trained
Keras model. A `FederatedCallback` also sees the `DPFederatedModel`, and is asked before
each round. `PrivacyBudget` uses this to stop before overspending, `Ledger` and
`RoundCheckpoint` to have each round on the disk before anyone sees its result.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import math
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

import tfdp_fl
from tfdp_fl import _files, _signals, _validate, accounting, sampling
from tfdp_fl.accounting import RoundCharge, format_up, planning
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.keras import checkpoint
from tfdp_fl.keras.run import Run
from tfdp_fl.keras.training_setup import PrivacyTarget
from tfdp_fl.terms import Json

__all__ = ["FederatedCallback", "Ledger", "PrivacyBudget", "Report", "RoundCheckpoint"]

# The number of rounds with which a search for a budget's limit starts.
_FIRST_GUESS = 2**12


class FederatedCallback(tf.keras.callbacks.Callback):
    """A Keras callback that is also called before rounds run.

    Attributes:
      federated_model: The `DPFederatedModel` that is being trained; `fit` sets it.
      order: `on_rounds_planned` calls callbacks in ascending order: ledgers, then
        checkpoints (which save what the ledgers contain), then all others.
    """

    federated_model: Any = None
    order = 2

    def set_model(self, model: tf.keras.Model) -> None:
        """Called by Keras, before a training.

        Raises:
          ValueError: It is inside another callback, so `fit` would not ask it.
        """
        if getattr(self.federated_model, "model", None) is not model:
            raise ValueError(
                f"callbacks must have each {type(self).__name__} itself, as those "
                "within another callback are not asked before rounds, got one that "
                "`fit` of a DPFederatedModel did not find."
            )
        super().set_model(model)

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Called before training with the rounds that `fit` was asked for.

        Args:
          first_round: The first round, counted from 0.
          last_round: One past the last round.
        """

    def allow_round(self, round_index: int) -> bool:
        """Called before a round is drawn, and again before it is charged.

        Returning False ends the training; the round is neither charged nor released.
        """
        del round_index
        return True

    def on_round_charged(
        self, round_index: int, charge: RoundCharge, details: Json
    ) -> None:
        """Called before anyone can see a cohort's result.

        If abandoned rounds are charged too, it is called before the clients train.

        Raising here abandons the round; nothing is released.

        Args:
          round_index: The round, counted from 0.
          charge: The cost of the round.
          details: `cohort_size`, `noise_multiplier`, `noise_generator` and `local`.
            `local` is None unless the guarantee is composed client by client. It then
            holds `mu_squared`, (sensitivity / sigma)^2 of one client's release, and
            `max_mu_squared`, the largest sum that any client has spent after the round.
        """

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Called after a round has changed the model, before `on_epoch_end`."""

    def on_fit_end(self) -> None:
        """Called last, even if an error or the user ended the training.

        An error raised here is reported unless another error ended the training.
        """

    def check_release(self, charge: RoundCharge) -> None:
        """Called before clients' metrics are released outside the rounds.

        Raising here refuses the release.

        Args:
          charge: The cost of the release.
        """

    def on_release_charged(self, name: str, charge: RoundCharge) -> None:
        """Called before anyone can see a release outside the rounds.

        Raising here refuses the release.

        Args:
          name: The run id under which ledgers list it, as if it were another run.
          charge: The cost of the release.
        """


@contextlib.contextmanager
def callback_session(
    callbacks: Sequence[FederatedCallback], first_round: int, last_round: int
) -> Iterator[None]:
    """Calls `on_rounds_planned` first, and `on_fit_end` however the block ends."""
    suppressed: tuple[type[Exception], ...] = (Exception,)
    remaining = [*reversed(callbacks)]
    try:
        # Everything that a ledger lists counts against every budget.
        for callback in sorted(callbacks, key=lambda c: c.order):
            callback.on_rounds_planned(first_round, last_round)
        yield
        suppressed = ()
    finally:
        # Every `on_fit_end` is called, even if one of them raises. Otherwise, a ledger
        # could stay open and locked until the process ends. `_end_all` is called twice,
        # as a signal may arrive before the first call defers signals. (It removes each
        # callback before it calls it.)
        try:
            _end_all(remaining, suppressed)
        finally:
            _end_all(remaining, suppressed)


def _end_all(
    remaining: list[FederatedCallback], suppressed: tuple[type[Exception], ...]
) -> None:
    with (
        _signals.defer_signals(),
        contextlib.suppress(*suppressed),
        contextlib.ExitStack() as stack,
    ):
        while remaining:
            stack.callback(remaining.pop().on_fit_end)


def check_callbacks(callbacks: Any) -> list[tf.keras.callbacks.Callback]:
    """Returns `fit`'s callbacks as a list; raises an error for unsuitable ones."""
    result = [callbacks]
    if callbacks is None or isinstance(callbacks, Iterable):
        result = list(callbacks or [])
    for callback in result:
        if not isinstance(callback, tf.keras.callbacks.Callback):
            raise TypeError(
                "callbacks must be a list of tf.keras.callbacks.Callback, got a "
                f"{type(callback).__name__} in it."
            )
        if isinstance(callback, tf.keras.callbacks.CallbackList):
            raise TypeError(
                "callbacks must be a list of single callbacks, as budgets and ledgers "
                "inside others are not asked, got a CallbackList: pass its .callbacks."
            )
        if isinstance(callback, tf.keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks must not have a BackupAndRestore: it restores weights "
                "without their cost, so epsilon would omit the rounds that made them. "
                "Use tfdp_fl.callbacks.RoundCheckpoint(directory), and "
                "fit(resume_from=directory) to continue."
            )
    return result


class PrivacyBudget(FederatedCallback):
    """Ends the training before the round that would overspend a budget.

    Whatever the schedules of noise and cohort size, a round is run only if the
    epsilon after it, at `delta`, is still within the budget. (This corrects Geyer et
    al. 2017, Algorithm 1, lines 4 and 5: here the check comes first.) A second or
    resumed `fit` of the same model continues from what has been spent.

    Attributes:
      epsilon: The largest epsilon allowed.
      delta: The delta at which epsilon is computed.
      accountant: "rdp", "pld", or None for the model's own.
      stopped_before_round: The round (from 0) that was not run, or None.
      last_allowed_round: The number of rounds after which this `fit` ends at the
        latest, by this budget or as requested.
    """

    _name = "PrivacyBudget"

    def __init__(self, epsilon: float, delta: float, accountant: str | None = None):
        super().__init__()
        self.epsilon = _validate.positive(epsilon=epsilon)
        self.delta = _validate.inside_unit_interval(delta=delta)
        self.accountant = _validate.one_of((None, "rdp", "pld"), accountant=accountant)
        self.stopped_before_round: int | None = None
        self.last_allowed_round = 0
        self._rounds_cost_the_same = False

    @property
    def budget(self) -> accounting.PrivacyBudget:
        """The limit that the model's account must stay within."""
        accountant = self.accountant or self.federated_model.setup.accountant
        return accounting.PrivacyBudget(self.epsilon, self.delta, accountant)

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Tells the user at the start if the budget will not last for all rounds."""
        fed, num_rounds = self.federated_model, last_round - first_round
        self.stopped_before_round = None
        # First, as another thread may charge an evaluation at any time.
        version = fed.run.account.version
        costs_ahead = fed.run.costs_ahead()
        cost = fed.run.epsilon_after(self.delta, self.accountant, costs_ahead)
        allowed = planning.largest_affordable(
            cost, self.budget.epsilon, num_rounds, _FIRST_GUESS
        )
        # Abandoned rounds cost nothing, so more rounds than this may be allowed.
        charges = costs_ahead(0, allowed)
        fed.run.account.note_allowed(self.budget, version, charges)
        # Only samplers that make passes know the clients of later cohorts.
        knows_cohorts = isinstance(fed.run.sampler, sampling.PassSampler)
        at_least = fed.run.account.by_client and not knows_cohorts
        self.last_allowed_round = last_round if at_least else first_round + allowed
        self._rounds_cost_the_same = len(charges) == 1
        if allowed < num_rounds:
            self._announce_allowed_rounds(
                f"{self._name}: epsilon={format_up(self.epsilon)} at delta="
                f"{format_up(self.delta)} "
                f"allows {'at least ' * at_least}{allowed} of the {num_rounds} rounds "
                f"asked for; training {'may' if at_least else 'will'} end after those."
            )

    def allow_one_more(self, last_round: int) -> None:
        """Notes that a round cost nothing: `fit` may end later, or at `last_round`."""
        if self._rounds_cost_the_same:
            last_round = min(last_round, self.last_allowed_round + 1)
        self.last_allowed_round = last_round

    def _announce_allowed_rounds(self, message: str) -> None:
        self.federated_model.say(message)

    def allow_round(self, round_index: int) -> bool:
        """Returns False if the round would overspend the budget."""
        fed = self.federated_model
        run, budget = fed.run, self.budget
        if run.account.by_client:
            epsilon = run.epsilon_after(self.delta)(1)
        elif run.account.allows(budget, cost := run.cost(round_index)):
            return True
        else:
            epsilon = run.account.epsilon_with(budget, cost)
        if epsilon <= budget.epsilon:
            return True
        self.stopped_before_round = round_index
        fed.say(
            f"{self._name}: stopped before round {round_index + 1}, which would bring "
            f"epsilon to {format_up(epsilon)} (budget {format_up(self.epsilon)} at "
            f"delta={format_up(self.delta)})."
        )
        return False

    def check_release(self, charge: RoundCharge) -> None:
        """Raises ValueError if a release would overspend the budget."""
        fed = self.federated_model
        epsilon = fed.run.account.epsilon_with(self.budget, charge)
        if epsilon > self.budget.epsilon:
            limit = format_up(self.epsilon)
            raise ValueError(
                f"private would bring epsilon to {format_up(epsilon)} at delta="
                f"{format_up(self.delta)}, above the epsilon={limit} of the "
                f"{self._name}: raise its noise_multiplier, or train fewer rounds. "
                "Nothing was evaluated."
            )


class TargetBudget(PrivacyBudget):
    """Enforces, in every `fit`, the target for which a model was calibrated.

    If the target allows fewer rounds than were asked for, it warns, even if the
    training is silent.
    """

    _name = "target of make_private"

    def __init__(self, target: PrivacyTarget):
        super().__init__(target.epsilon, target.delta, target.accountant)

    def _announce_allowed_rounds(self, message: str) -> None:
        fed = self.federated_model
        declared, (size, _) = fed.setup.target.num_clients, fed.run.population
        if size < declared:
            message += (
                f" There are {size} clients, fewer than the num_clients={declared} "
                "that make_private was given (validation_split holds some out)."
            )
        warnings.warn(message, RuntimeWarning, stacklevel=4)


class Ledger(FederatedCallback):
    """Keeps a `tfdp_fl.accounting.PrivacyLedger` of the training.

    Each round's line is on disk before anyone can see the round's result. If the line
    cannot be written, the round is not released. Rounds from before the ledger was
    opened are written first. All later `fit`s of the run, also resumed, continue the
    same file for as long as it is there, with or without the callback.

    Attributes:
      path: The file. If it is created here, only its owner can read it.
    """

    order = 0

    def __init__(self, path: str | os.PathLike[str], append: bool = False):
        """Makes a callback that opens the file when training starts.

        Args:
          path: The file; its folder must exist.
          append: Whether to append to another run's ledger. Ledger and model then
            count all runs on the same clients together: the other runs' spending is
            part of the model's epsilon from then on.
        """
        super().__init__()
        self.path = pathlib.Path(path).absolute()
        self._append = append
        self._ledger: accounting.PrivacyLedger | None = None
        self._account: accounting.PrivacyAccount | None = None
        self._attached = ""

    @property
    def _run(self) -> Run:
        return self.federated_model.run

    @property
    def _key(self) -> str:
        return checkpoint.ledger_key(self.path)

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Opens the ledger; refuses another run's unless `append` is set."""
        del first_round, last_round
        fed, run = self.federated_model, self._run
        target = fed.setup.target
        known = run.known_ledgers.get(self._key)
        with _signals.defer_signals():  # So that `on_fit_end` knows of an open file.
            self._ledger = ledger = accounting.PrivacyLedger(
                self.path,
                mode="append",
                target_epsilon=None if target is None else target.epsilon,
                target_delta=fed.setup.delta if target is None else target.delta,
                mechanism={
                    "name": fed.mechanism.name,
                    "trust_model": fed.mechanism.trust_model,
                    "description": fed.mechanism.describe(),
                },
                privacy_unit=fed.mechanism.privacy_unit,
                expected_head=known,
                run=run.run_id,
            )
            with run.account.pause_charges():
                with ledger.lock:
                    self._join(ledger, known)
                # (Any of the ledgers may have told of charges that others lack.)
                run.account.write_missing(max(0, run.rounds - 1), run.facts_of_line())

    def _join(self, ledger: accounting.PrivacyLedger, known: str | None) -> None:
        """Counts an open ledger's lines, and records all later charges in it."""
        run, contents = self._run, ledger.contents()
        if contents.entries and not self._append:
            if known is None:
                raise ValueError(
                    f"path must not be the ledger of another run, which {self.path} is "
                    f"({len(contents.entries)} rounds): continue that run with "
                    "fit(resume_from=...), choose another path, or count both together "
                    "with append=True."
                )
            if known != contents.head:
                raise ValueError(
                    f"path must be a ledger that no other run continued, but "
                    f"{self.path} has rounds that this model does not know of; resume "
                    "from its directory."
                )
        self._check_relation(contents)
        run.account.merge_ledger(contents, run.run_id, self._key)
        if run.account.has_unseen_rounds:
            _, cohort_engine = self.federated_model.require_trained("fit")
            run.begin_segment(cohort_engine.query)
        self._begin()
        self._account = run.account
        self._attached = self._key  # A link may lead elsewhere when `fit` ends.
        run.account.attach_ledger(self._attached, ledger, run.run_id)

    def _begin(self) -> None:
        """Called after the open ledger is counted, before this run's first line."""

    def _check_relation(self, contents: accounting.LedgerContents) -> None:
        """Refuses a ledger whose rounds cannot be counted together with this run's."""
        sampling = self.federated_model.setup.sampling
        relation = charge_lib.relation_of(sampling).neighboring_relation
        charges = (entry.charge for entry in contents.entries if entry.charge)
        found = next((charge.relation.neighboring_relation for charge in charges), None)
        if found not in (None, relation):
            raise ValueError(
                "path must be a ledger of rounds with the neighbouring relation "
                f"{relation.name}, as for {sampling} sampling, but {self.path} has "
                f"{found.name}; one guarantee cannot cover both."
            )

    def check_release(self, charge: RoundCharge) -> None:
        """Raises LedgerError if a `fit` in another thread has closed the file."""
        del charge
        if self._ledger is None:
            raise accounting.LedgerError(
                f"The ledger {self.path} was closed by a fit that ended while this "
                "release was prepared. Nothing was released: try again."
            )

    def on_fit_end(self) -> None:
        """Closes the file once no charge is in progress."""
        account, self._account = self._account, None
        with contextlib.nullcontext() if account is None else account.pause_charges():
            if account is not None:
                account.detach_ledger(self._attached)
            if self._ledger is not None:
                self._ledger.close()
                self._ledger = None


class RoundCheckpoint(Ledger):
    """Saves checkpoints of the training, so that it survives a crash.

    `fit(..., resume_from=directory)` continues exactly from the last checkpoint. The
    directory also has a `ledger.jsonl`, to which every round is written before its
    result can be seen. A directory belongs to one run: a new training refuses a
    directory with another run's checkpoints, and two trainings cannot use it at once.
    Only the owner can read the files, because with a seed, or with sampling in passes,
    they reveal who takes part.

    Attributes:
      directory: The directory of the files, created if necessary.
      every: The number of rounds between saves; the last round is always saved.
      keep: The number of checkpoints to keep.
      path: The directory's ledger.
    """

    order = 1

    def __init__(
        self, directory: str | os.PathLike[str], every: int = 1, keep: int = 3
    ):
        super().__init__(checkpoint.ledger_path(directory))
        self.directory = pathlib.Path(directory).absolute()
        self.every = _validate.positive_integer(every=every)
        self.keep = _validate.positive_integer(keep=keep)
        self._files = checkpoint.CheckpointDirectory(self.directory)
        self._begun = False

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Opens the ledger and saves the state before the first round."""
        rounds = self._files.rounds()
        if rounds and self._key not in self._run.known_ledgers:
            raise ValueError(
                "directory must not hold the checkpoints of another run, but "
                f"{self.directory} has one of round {rounds[0]}: continue that run "
                "with fit(resume_from=directory), or choose another directory."
            )
        if self._key not in self._run.known_ledgers:  # Otherwise, it must exist.
            self._files.make()
        super().on_rounds_planned(first_round, last_round)

    def _begin(self) -> None:
        # The ledger's lock also protects the directory.
        self._files.clear_after(self._run.rounds)
        # Before the first line, so that a run can be resumed after any charge.
        self._save()
        self._begun = True

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Saves a checkpoint if one is due."""
        del logs
        # (After the last round too: a kill before `on_fit_end` would lose it.)
        if (round_index + 1) % self.every == 0:
            self._save()

    def on_fit_end(self) -> None:
        """Saves the end of the training and releases the directory.

        Other callbacks may have changed the model (Keras's `EarlyStopping` restores the
        best weights); without a change, the last save is kept. After an interrupt
        during a round's release, nothing is saved: that round must be run, and charged,
        again.
        """
        try:
            # An interrupt during tracing can leave TensorFlow inside a graph.
            with tf.init_scope():
                if self._begun:
                    self._save(if_changed=True)
        finally:
            self._begun = False
            super().on_fit_end()

    def _save(self, if_changed: bool = False) -> None:
        fed, run, ledger = self.federated_model, self._run, self._ledger
        # The directory is this run's as long as it has the ledger that is held here.
        if ledger is None or run.releasing:
            return
        ledger.require_in_place()
        state = checkpoint.capture(fed, self._key, ledger)
        if not (if_changed and self._files.holds(run.rounds, state)):
            self._files.write(run.rounds, state, self.keep)


def missing_ledgers(
    run: Run | None, interrupted: checkpoint.InterruptedRun | None, callbacks: list[Any]
) -> list[FederatedCallback]:
    """Returns a `Ledger` for each file of a run that no callback writes.

    Whatever a run releases must be in all of its ledgers, by which others count.

    Args:
      run: The training before this `fit`, if any.
      interrupted: The run that is resumed instead, if any.
      callbacks: The callbacks given to `fit`.
    """
    needed: list[Ledger] = []
    paths = [] if run is None else list(run.known_ledgers)
    if interrupted is not None:
        needed = [Ledger(checkpoint.ledger_path(interrupted.directory))]
        paths += interrupted.other_ledgers
    written = {
        checkpoint.ledger_key(c.path) for c in callbacks if isinstance(c, Ledger)
    }
    keys = {checkpoint.ledger_key(path): path for path in paths}
    for key, path in keys.items():
        if os.path.exists(path):
            needed.append(Ledger(path, append=True))
        elif key not in written:
            warnings.warn(
                f"The ledger {path}, in which this run recorded rounds, is missing: "
                "other runs that count by it will not know of this fit's rounds. If it "
                "was moved, add tfdp_fl.callbacks.Ledger(its new path, append=True).",
                RuntimeWarning,
                stacklevel=3,
            )
    missing = {checkpoint.ledger_key(c.path): c for c in reversed(needed)}
    return [c for key, c in missing.items() if key not in written]


# The page about a run.

# By a chart's title, the plotted values and their labels.
_CHARTS = {
    "Accuracy": {"val_accuracy": "validation data", "accuracy": "clients in training"},
    "Loss": {"val_loss": "validation data", "loss": "clients in training"},
    "Epsilon spent": {"epsilon": "spent"},
    "Clip and norms": {
        "clip_norm": "clip norm",
        "mean_update_norm": "mean update norm",
    },
}

# Settings that only checkpoints may hold. If clients have no names, the digest covers
# their data: anyone who knows all others' data could use it to find one client's.
_SECRET_SETTINGS = ("seed", checkpoint.CLIENTS_DIGEST)

# Labels of settings whose name, without underscores, is not clear enough.
_LABELS = {
    "rounds": "rounds asked for",
    "clients (their number)": "clients",
    "clients_per_round": "clients expected in a round",
    "shuffle": "examples are shuffled",
    "non_trainable_state": "non-trainable state",
    "on_client_failure": "if a client fails",
    "optimizer": "clients' optimizer",
    "server_optimizer": "server's optimizer",
    "grad_clip": "clip of the clients' gradients",
    "keras": "library",
    "executor": "how clients were trained",
}


def _label(setting: str) -> str:
    return _LABELS.get(setting, setting.replace("_", " ")).capitalize()


class Report(FederatedCallback):
    """Writes a page about a training run, as one self-contained HTML file.

    It has the privacy statement, the settings, and charts of accuracy, loss, epsilon
    against the target, clip and norms. Without matplotlib, it explains how to get the
    charts. It is written when `fit` ends, even by an error or by the user, and replaces
    the whole file. Most charts were computed from clients' data without noise, and the
    page says so: show it only to people who may see that data.

    Attributes:
      path: The file; its folder is created when training begins.
      delta: The delta of the statement; None: the model's default.
      title: The headline, such as the name of the data set; None: the model's name.
      preface: A paragraph before the statement, for example about the silo.
    """

    preface = ""

    def __init__(
        self,
        path: str | os.PathLike[str],
        delta: float | None = None,
        title: str | None = None,
    ):
        """Makes a callback that writes the page when `fit` ends.

        Args:
          path: The file to write, such as "report.html".
          delta: The delta of the statement; None: the model's default.
          title: The headline, such as the name of the data set; None: the model's
            name.

        Raises:
          ValueError: The path is a folder.
        """
        super().__init__()
        self.path = pathlib.Path(path).absolute()
        if self.path.is_dir():
            raise ValueError(
                "path must name a file, such as report.html, got the folder "
                f"{os.fspath(path)!r}."
            )
        self.delta = delta
        self.title = title
        self._rounds: dict[int, dict[str, float]] = {}
        self._of: Any = None  # The model whose rounds they are.
        self._was_interrupted = True

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        """Makes the folder now, so that an error does not wait until the end."""
        if self._of is not self.federated_model:
            self._rounds, self._of = {}, self.federated_model
        self._was_interrupted = True
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        """Records that the training was not interrupted."""
        self._was_interrupted = False

    def on_round_released(self, round_index: int, logs: dict[str, float]) -> None:
        """Stores a round's values."""
        self._rounds[round_index + 1] = dict(logs)

    def on_fit_end(self) -> None:
        """Writes the page."""
        _files.write_text(self.path, self._page())

    def _page(self) -> str:
        import jinja2

        fed = self.federated_model
        facts = fed.privacy_statement(self.delta, "dict")
        settings = checkpoint.settings(fed, fed.run.population, fed.run.plan)
        for name in _SECRET_SETTINGS:
            settings.pop(name, None)
        if settings.get("grad_clip", 0) < 0:
            del settings["grad_clip"]
        training = fed.require_compiled("a report")
        # (`learning_rate` is 0 if the optimizer has a schedule.)
        settings["clients' learning rate"] = training.learning_rate or "a schedule"
        settings["model"] = f"{fed.model.name}, {fed.model.count_params()} weights"
        settings["executor"] = fed.run.executor
        template = pathlib.Path(__file__).with_name("report.html").read_text("utf-8")
        environment = jinja2.Environment(
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"up": format_up, "label": _label}
        return environment.from_string(template).render(
            title=self.title or fed.model.name,
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            version=tfdp_fl.__version__,
            was_interrupted=self._was_interrupted,
            facts={**facts, "preface": self.preface},
            accuracies=self._series("val_accuracy"),
            charts=self._charts(fed.setup.target),
            settings=settings,
        )

    def _series(self, name: str) -> list[tuple[int, float]]:
        """Returns the rounds in which a value is finite, with the value."""
        return [
            (number, logs[name])
            for number, logs in self._rounds.items()
            if math.isfinite(logs.get(name, math.nan))
        ]

    def _charts(self, target: Any) -> list[str] | None:
        """Returns SVG drawings; None without matplotlib."""
        try:
            from matplotlib import figure  # Not pyplot, which a notebook may be using.
        except ModuleNotFoundError:
            return None
        charts = []
        for title, names in _CHARTS.items():
            chart = figure.Figure(figsize=(5, 3.2), layout="constrained")
            axes = chart.add_subplot(title=title, xlabel="round")
            for name, label in names.items():
                points = self._series(name)
                if points:
                    axes.plot(*zip(*points, strict=True), marker=".", label=label)
            if not axes.lines:
                continue
            if title == "Epsilon spent" and target is not None:
                axes.axhline(target.epsilon, color="#555", ls="--", label="target")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
            stream = io.StringIO()
            chart.savefig(stream, format="svg", metadata={"Date": None})
            svg = stream.getvalue()
            charts.append(svg[svg.index("<svg") :])
        return charts
