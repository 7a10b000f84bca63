"""What a training run is between two rounds: taken, checked, put back.

Everything that a later round depends on is in a checkpoint: weights, the
server optimizer's variables, the mechanism's state, the sampler's, the clients'
windows of norms, what was spent, and the arguments of `fit`. The randomness of
a round follows from the seed and the round, so it needs no state.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _json, accounting, keras_versions, schedules
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import checkpoint as checkpoint_lib
from tfdp_fl.keras import fit_plan

LEDGER = "ledger.jsonl"
_CLIENT_IDS = "clients' ids (their digest, in order)"


def ledger_path(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns where a directory of checkpoints has its ledger."""
    return pathlib.Path(directory) / LEDGER


def ledger_key(path: str | os.PathLike[str]) -> str:
    """Returns the name that a model knows a ledger by."""
    return os.path.realpath(path)


def capture(
    federated_model: Any, ledger_head: str | None
) -> checkpoint_lib.Checkpoint:
    """Returns the state of a model between two rounds.

    Args:
      federated_model: A `DPFederatedModel` inside `fit`.
      ledger_head: The hash of the last line of the ledger beside the
        checkpoint; None if there is no ledger yet.
    """
    fed = federated_model
    arrays: dict[str, np.ndarray] = {}
    for index, variable in enumerate(fed.model.weights):
        arrays[f"weights/{index}"] = variable.numpy()
    for index, variable in enumerate(fed._engine.server.state):
        arrays[f"server_optimizer/{index}"] = variable.numpy()
    for index, value in enumerate(tf.nest.flatten(fed._engine.state)):
        arrays[f"query/{index}"] = tf.convert_to_tensor(value).numpy()
    if fed._windows is not None:
        arrays["windows"] = fed._windows
    spending = fed._spending.state()
    for name in ("mu_squared", "participations"):
        arrays[f"spending/{name}"] = spending.pop(name)
    arrays["cohort_sizes"] = np.asarray(fed._cohort_sizes, np.int64)
    return checkpoint_lib.Checkpoint(
        round_index=fed._round,
        metadata={
            "plan": dataclasses.asdict(fed._plan),
            "run": fed.run_id,
            "settings": {
                **settings(fed, fed._sampler.num_clients, fed._plan),
                _CLIENT_IDS: fed._population[1],
            },
            "populations": [list(each) for each in fed._populations],
            "calibration": fed._calibration,
            "sampler": fed._sampler.state(),
            "spending": spending,
            "learning_rate": fed._client_learning_rate(),
            "facts": dict(fed._facts),
            "ledger_head": ledger_head,
            "ledgers": dict(fed.known_ledgers),
            "log_names": list(fed._last_logs),
            "keras": keras_versions.name(),
            "weight_names": _weight_names(fed.model),
        },
        arrays=arrays,
    )


def settings(fed: Any, num_clients: int, plan: fit_plan.FitPlan) -> Any:
    """Returns, by argument, what must be the same when a run is resumed."""
    rounds = range(plan.first_round, plan.last_round)

    def described(name: str, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, dp_accounting.DpEvent):
            return repr(value)
        if callable(value):  # A schedule: what it says of these rounds.
            return [schedules.value_at(value, t, name) for t in rounds]
        if isinstance(value, (list, tuple)):
            return [described(name, each) for each in value]
        return type(value).__name__

    compiled = fed._compiled
    values = {
        "batch_size": plan.batch_size,
        "local_epochs": plan.local_epochs,
        "shuffle": plan.shuffle,
        "seed": plan.seed,
        "sampling": fed._sampling,
        "clients (their number)": num_clients,
        "clients_per_round": described(
            "clients_per_round", fed._clients_per_round
        ),
        "mechanism": fed.mechanism.name,
        **{
            f"mechanism's {name}": described(name, value)
            for name, value in fed.mechanism.parameters().items()
        },
        "non_trainable_state": fed._non_trainable_state,
        "on_client_failure": fed._on_client_failure,
        "secure_aggregation": fed._secure_aggregation is not None,
        "optimizer": _config(compiled.training.optimizer),
        "server_optimizer": _config(compiled.server_optimizer),
        "grad_clip": compiled.training.grad_clip,
    }
    return _json.plain(values)


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


def _comparable(setting: Any) -> Any:
    """Returns a setting without what only one version of Keras writes down."""
    if not isinstance(setting, list):
        return setting
    return [
        {
            name: value
            for name, value in each.items()
            if value is not None and name != "is_legacy_optimizer"
        }
        if isinstance(each, dict)
        else each
        for each in setting
    ]


def _weight_names(model: Any) -> list[str]:
    """Returns the last part of each weight's name; all Keras versions' own."""
    return [
        weight.name.split("/")[-1].split(":")[0] for weight in model.weights
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptedRun:
    """A run that is about to be gone on with.

    Attributes:
      directory: Where its checkpoints and its ledger are.
      checkpoint: The newest whole checkpoint.
      ledger: What its ledger says; None if there is none yet.
      plan: The interrupted call of `fit`.
    """

    directory: pathlib.Path
    checkpoint: checkpoint_lib.Checkpoint
    ledger: accounting.LedgerContents | None
    plan: fit_plan.FitPlan

    @classmethod
    def read(
        cls,
        directory: str | os.PathLike[str],
        federated_model: Any,
        clients: FederatedDataset,
        asked: fit_plan.FitPlan,
    ) -> InterruptedRun:
        """Reads the newest checkpoint, and checks it against the arguments.

        Nothing of the model changes.

        Args:
          directory: What `fit` was given as `resume_from`.
          federated_model: The `DPFederatedModel`.
          clients: What `fit` was given.
          asked: What `fit` was asked for, as if it were a new training.

        Raises:
          FileNotFoundError: There is no checkpoint.
          ValueError: An argument is not what the interrupted run had.
          LedgerError: The ledger lacks rounds that the checkpoint knows of.
        """
        checkpoint = checkpoint_lib.CheckpointDirectory(directory).newest()
        plan = fit_plan.FitPlan(**checkpoint.metadata["plan"])
        rounds, asked_rounds = (
            each.last_round - each.first_round for each in (plan, asked)
        )
        if rounds != asked_rounds:
            raise ValueError(
                f"rounds must be {rounds}, the total of the interrupted call, "
                f"to resume it from {directory}, got {asked_rounds}."
            )
        asked = dataclasses.replace(
            asked, first_round=plan.first_round, last_round=plan.last_round
        )
        saved = checkpoint.metadata["settings"]
        now = settings(federated_model, clients.num_clients, asked)
        if _CLIENT_IDS in saved:
            now[_CLIENT_IDS] = clients.client_ids_digest
        else:
            warnings.warn(
                f"The checkpoint in {directory} was written by a version that "
                "did not keep the clients' ids, so it is not checked that they "
                "are the same clients in the same order.",
                RuntimeWarning,
                stacklevel=3,
            )
        for name in sorted(saved.keys() | now.keys()):
            if _comparable(saved.get(name)) != _comparable(now.get(name)):
                raise ValueError(
                    f"{name} must be {_short(saved.get(name))}, as in the "
                    f"interrupted run, to resume it from {directory}, got "
                    f"{_short(now.get(name))}."
                )
        path = ledger_path(directory)
        head = checkpoint.metadata["ledger_head"]
        ledger = None
        if path.exists():
            ledger = accounting.PrivacyLedger.read(path, expected_head=head)
        elif head is not None:
            raise accounting.LedgerError(
                f"The ledger {path} is missing, and it held rounds that the "
                "checkpoint beside it knows of."
            )
        run = cls(
            directory=pathlib.Path(directory),
            checkpoint=checkpoint,
            ledger=ledger,
            plan=plan,
        )
        run._check_model(federated_model)
        return run

    def _check_model(self, fed: Any) -> None:
        covered = 0
        if self.ledger is not None and (
            ledger_key(ledger_path(self.directory)) in fed.known_ledgers
        ):
            covered = len(self.ledger.by_run().get(fed.run_id, ()))
        if fed._spending is not None and fed._spending.rounds > covered:
            raise ValueError(
                "resume_from must be given to a model that was not trained "
                "yet, or was trained by the same run, or its earlier rounds "
                f"would be forgotten; it was trained for {fed.rounds} rounds."
            )
        arrays = self.checkpoint.arrays
        shapes = [list(arrays[name].shape) for name in self._names("weights")]
        own = [list(weight.shape) for weight in fed.model.weights]
        if shapes != own:
            raise ValueError(
                "model must have the weights of the interrupted run to resume "
                f"it from {self.directory}: shapes {_short(shapes)}, got "
                f"{_short(own)}."
            )

        self._check_keras(fed)

    def _check_keras(self, fed: Any) -> None:
        """Raises ValueError for what cannot go from one Keras to another."""
        metadata = self.checkpoint.metadata
        began = metadata.get("keras", "Keras 2")
        if began == keras_versions.name():
            return
        names = metadata.get("weight_names")
        own = _weight_names(fed.model)
        if names is not None and names != own:
            raise ValueError(
                f"model must have its weights in the order of {began}, with "
                f"which the run began, to resume it from {self.directory} with "
                f"{keras_versions.name()}: {_short(names)}, got {_short(own)}."
            )
        if any(slot.ndim for slot in self._group("server_optimizer")):
            raise ValueError(
                "server_optimizer must keep no values for each weight (None, "
                "or SGD without momentum) to resume with "
                f"{keras_versions.name()} a run of {began}, which orders them "
                f"in another way, got {type(fed._compiled.server_optimizer)}; "
                f"resume it from {self.directory} with {began}."
            )

    def _names(self, group: str) -> list[str]:
        count = sum(
            name.startswith(f"{group}/") for name in self.checkpoint.arrays
        )
        return [f"{group}/{index}" for index in range(count)]

    def _group(self, group: str) -> list[np.ndarray]:
        return [self.checkpoint.arrays[name] for name in self._names(group)]

    @property
    def run_id(self) -> str | None:
        """The id of the run; None if neither it nor its ledger has one.

        In a ledger that names no runs, its rounds are those without a name.
        """
        identity = None if self.ledger is None else self.ledger.identity
        return self.checkpoint.metadata.get("run", identity)

    @property
    def calibration(self) -> dict[str, int] | None:
        """What the clients' noise was calibrated for, if it is kept."""
        return self.checkpoint.metadata.get("calibration")

    def restore(self, fed: Any) -> None:
        """Puts a prepared model in the state of the checkpoint.

        What was spent is what the ledger says: it also has the rounds that
        were charged after the checkpoint, whose result may have been seen.
        """
        arrays, metadata = self.checkpoint.arrays, self.checkpoint.metadata
        server = fed._engine.server.state
        slots = self._group("server_optimizer")
        query = tf.nest.flatten(fed._engine.state)
        values = self._group("query")
        if [s.shape for s in slots] != [tuple(v.shape) for v in server]:
            raise ValueError(
                "server_optimizer must have the variables of the interrupted "
                f"run, to resume it from {self.directory}."
            )
        if len(values) != len(query):
            raise ValueError(
                "mechanism must have the state of the interrupted run, to "
                f"resume it from {self.directory}."
            )
        fed._sampler.restore(metadata["sampler"])
        for variable, value in zip(
            fed.model.weights, self._group("weights"), strict=True
        ):
            variable.assign(value)
        for variable, value in zip(server, slots, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        fed._engine.state = tf.nest.pack_sequence_as(
            fed._engine.state, [tf.constant(value) for value in values]
        )
        if "windows" in arrays:
            fed._windows = arrays["windows"].copy()
        spending = spending_lib.Spending.from_state(
            {
                **metadata["spending"],
                "mu_squared": arrays["spending/mu_squared"],
                "participations": arrays["spending/participations"],
            }
        )
        fed._facts.update(metadata["facts"])
        if self.run_id is not None:
            fed.run_id = self.run_id
        if self.ledger is not None and self.ledger.entries:
            saved = spending.rounds
            spending.absorb(
                self.ledger,
                fed.run_id,
                ledger_key(ledger_path(self.directory)),
            )
            fed._facts["rounds_charged_twice"] += spending.rounds - saved
            spending.lost_mu_squared = max(
                spending.lost_mu_squared,
                self.ledger.lost_mu_squared(
                    self.checkpoint.round_index, fed.run_id
                ),
            )
        spending.keep_others(fed._spending.others)
        fed._spending = spending
        fed._populations = [
            (num_clients, digest)
            for num_clients, digest in metadata.get("populations", ())
        ]
        if not fed._populations and spending.rounds:
            # An earlier version kept none; then they were all the same.
            fed._populations = [fed._population]
        fed._cohort_sizes = arrays["cohort_sizes"].tolist()
        fed._last_logs = list(metadata["log_names"])
        fed._set_client_learning_rate(metadata["learning_rate"])
        fed._round = self.checkpoint.round_index
        # Others may hold rounds that were charged after the checkpoint.
        fed.known_ledgers.update(metadata["ledgers"])
        fed.ledgers_ahead.update(metadata["ledgers"])
        fed.known_ledgers[ledger_key(ledger_path(self.directory))] = (
            "" if self.ledger is None else self.ledger.head
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
