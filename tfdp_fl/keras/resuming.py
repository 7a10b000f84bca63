"""From a run to a checkpoint, and back: taken, checked, put back.

Everything that a later round depends on is in a checkpoint: the run, weights,
the server optimizer's variables, and the arguments of `fit`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from reprlib import repr as short
from typing import TYPE_CHECKING, Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _storage, accounting, engine, keras_versions, schedules
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import checkpoint
from tfdp_fl.keras.run import FitPlan, Population, Run
from tfdp_fl.mechanisms import ClientWeighting

if TYPE_CHECKING:
    from tfdp_fl.keras.model import DPFederatedModel

LEDGER = "ledger.jsonl"
# What must be the same when a run is resumed.
_OF_PLAN = ("batch_size", "local_epochs", "shuffle", "seed")
_OF_SETUP = (
    *("sampling", "clients_per_round", "non_trainable_state", "on_client_failure"),
    *("secure_aggregation", "client_weighting"),
)


def ledger_path(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns where a directory of checkpoints has its ledger."""
    return pathlib.Path(directory) / LEDGER


def ledger_key(path: str | os.PathLike[str]) -> str:
    """Returns the name that a model knows a ledger by."""
    return os.path.realpath(path)


def capture(fed: DPFederatedModel, ledger_head: str | None) -> dict[str, Any]:
    """Returns the state of a training between two rounds."""
    run, cohort_engine = fed.require_trained("checkpoint")
    return {
        **run.state(),
        "weights": [v.numpy() for v in fed.model.weights],
        "server_optimizer": [v.numpy() for v in cohort_engine.server.state],
        "settings": settings(fed, run.population, run.plan),
        "learning_rate": fed.require_compiled("checkpoint").learning_rate,
        "ledger_head": ledger_head,
        "memory_of": fed.mechanism.memory_key(),
    }


def settings(
    fed: DPFederatedModel, population: Population, plan: FitPlan
) -> dict[str, Any]:
    """Returns, by argument, what must be the same when a run is resumed."""
    setup, compiled = fed.setup, fed.require_compiled("fit")

    def described(value: Any) -> Any:
        if isinstance(value, (dp_accounting.DpEvent, ClientWeighting)):
            return repr(value)
        if callable(value):  # A schedule: what it says of these rounds.
            rounds = range(plan.first_round, plan.last_round)
            return [schedules.value_at(value, t, "a schedule") for t in rounds]
        return type(value).__name__

    of_mechanism = setup.mechanism.parameters().items()
    values = {
        "rounds": plan.last_round - plan.first_round,
        **{name: getattr(plan, name) for name in _OF_PLAN},
        **{name: getattr(setup, name) for name in _OF_SETUP},
        "mechanism": setup.mechanism.name,
        **{f"mechanism's {name}": value for name, value in of_mechanism},
        "clients (their number)": population[0],
        "clients' ids (their digest, in order)": population[1],
        "optimizer": _config(compiled.training.optimizer),
        "server_optimizer": _config(compiled.server_optimizer),
        "grad_clip": compiled.training.grad_clip,
        "keras": keras_versions.name(),
    }
    return _storage.plain(values, described)


def _config(optimizer: Any) -> Any:
    """Returns an optimizer's settings, but for the rate that callbacks move."""
    if optimizer is None:
        return None
    config = {
        # What went through a variable has the digits of a float32.
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in optimizer.get_config().items()
        if name not in ("learning_rate", "name", "jit_compile")
    }
    return [type(optimizer).__name__, config]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptedRun:
    """A run that is about to be gone on with.

    Attributes:
      directory: Where its checkpoints and its ledger are.
      state: The newest whole checkpoint's.
      ledger: What its ledger says; None if there is none yet.
    """

    directory: pathlib.Path
    state: dict[str, Any]
    ledger: accounting.LedgerContents | None

    @classmethod
    def read(
        cls,
        directory: str | os.PathLike[str],
        fed: DPFederatedModel,
        clients: FederatedDataset,
        asked: FitPlan,
    ) -> InterruptedRun:
        """Reads the newest checkpoint, and checks it against the arguments.

        Nothing of the model changes.
        """
        state = checkpoint.CheckpointDirectory(directory).newest()
        plan = FitPlan(**state["plan"])
        last = plan.first_round + asked.last_round - asked.first_round
        asked = dataclasses.replace(
            asked, first_round=plan.first_round, last_round=last
        )
        saved = state["settings"]
        now = settings(fed, (clients.num_clients, clients.clients_digest), asked)
        for name in now | saved:  # The rounds first, by which schedules differ too.
            if saved.get(name) != now.get(name):
                raise ValueError(
                    f"{name} must be {short(saved.get(name))}, as in the interrupted "
                    f"run, to resume it from {directory}, got {short(now.get(name))}."
                )
        path = ledger_path(directory)
        head = state["ledger_head"]
        ledger = None
        if path.exists():
            ledger = accounting.PrivacyLedger.read(path, expected_head=head)
        elif head is not None:
            raise accounting.LedgerError(
                f"The ledger {path} is missing, and it held rounds that the "
                "checkpoint beside it knows of."
            )
        interrupted = cls(directory=pathlib.Path(directory), state=state, ledger=ledger)
        interrupted._check_shapes("weights", fed.model.weights)
        run, covered = fed.run, 0
        known = None if run is None else run.known_ledgers.get(ledger_key(path))
        if run is not None and ledger is not None and known is not None:
            # The same run may have gone on from here in another place, too.
            covered = ledger.rounds_known(run.run_id, known)
        if run is not None and run.spending.rounds > covered:
            raise ValueError(
                "resume_from must be given to a model that was not trained yet, or was "
                "trained by the same run, or its earlier rounds would be forgotten; it "
                f"was trained for {run.rounds} rounds."
            )
        return interrupted

    def _check_shapes(self, group: str, variables: Any) -> None:
        saved = [list(value.shape) for value in self.state[group]]
        own = [list(variable.shape) for variable in variables]
        if saved != own:
            raise ValueError(
                f"model must have the {group} of the interrupted run to resume it "
                f"from {self.directory}: shapes {short(saved)}, got {short(own)}."
            )

    def restore(
        self, fed: DPFederatedModel, cohort_engine: engine.CohortEngine, prepared: Run
    ) -> Run:
        """Puts model and engine in the state of the checkpoint; returns the run.

        What was spent is what the ledger says: it also has the rounds that
        were charged after the checkpoint, whose result may have been seen.
        """
        server = cohort_engine.server.state
        self._check_shapes("server_optimizer", server)
        state = self.state
        run = Run.from_state(state, prepared)
        # Nobody knows what was drawn after the checkpoint, here or from a copy.
        run.attempts.renew()
        query, spending = cohort_engine.query, run.spending
        key, before = ledger_key(ledger_path(self.directory)), spending.rounds
        ledgers = {} if self.ledger is None else {key: self.ledger}
        for other, head in run.known_ledgers.items():
            # They may hold rounds that came after the checkpoint, too.
            if other != key and os.path.exists(other):
                ledgers[other] = accounting.PrivacyLedger.read(
                    other, expected_head=head or None
                )
        run.known_ledgers[key] = ""
        for name, contents in ledgers.items():
            # All lines are counted. If more come, another process goes on as well.
            spending.absorb(contents, run.run_id, name)
            spending.lost_mu_squared = max(
                spending.lost_mu_squared,
                contents.lost_mu_squared(run.rounds, run.run_id),
            )
            run.known_ledgers[name] = contents.head
        lost = spending.rounds > before
        if lost:
            run.caveats.add("rounds_charged_twice")
        if lost or state["memory_of"] != query.mechanism.memory_key():
            # What lost rounds released, the memory knows nothing of; nor does
            # it go with coefficients that this machine chose otherwise.
            run.mechanism_state = query.new_segment(run.mechanism_state)
        spending.keep_others(prepared.spending.others)
        for variable, value in zip(
            [*fed.model.weights, *server],
            [*state["weights"], *state["server_optimizer"]],
            strict=True,
        ):
            variable.assign(tf.cast(value, variable.dtype))
        cohort_engine.state = run.mechanism_state
        fed.require_compiled("fit").set_learning_rate(state["learning_rate"])
        return run
