"""Captures a run in a checkpoint file, checks it, and restores it.

A checkpoint contains everything that a later round depends on: the run, the weights,
the server optimizer's variables, and the arguments of `fit`.

It is a NumPy `.npz` file without pickle, followed by the SHA-256 of all its bytes. It
is written to a temporary file, synced, and renamed, so a crash at any moment leaves
existing checkpoints intact. If a checkpoint is damaged, the one before is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import warnings
import zlib
from collections.abc import Hashable, Iterator, Sequence
from reprlib import repr as short
from typing import Any, BinaryIO

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _files, accounting, engine, keras_versions, schedules
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras.federated_training import FederatedTraining, mark_owner
from tfdp_fl.keras.run import FitPlan, Population, Run
from tfdp_fl.mechanisms import ClientWeighting
from tfdp_fl.terms import Json

FORMAT = "tfdp_fl checkpoint 12"
_NAME = re.compile(r"round-(\d{8})\.npz")
# The key that stands for an array in the JSON text.
_ARRAY_KEY = "place of an array"
_DIGEST_BYTES = hashlib.sha256().digest_size
# How many bytes of a file are read at a time.
_CHUNK_BYTES = 2**24

LEDGER = "ledger.jsonl"
# Longer schedules are stored as a digest, so that saves do not grow with the rounds.
_LONG_SCHEDULE = 100
CLIENTS_DIGEST = "clients' ids (their digest, in order)"
# Fields of `FitPlan` that must be the same when a run is resumed.
_PLAN_FIELDS = ("batch_size", "local_epochs", "shuffle", "seed")
# Fields of `TrainingSetup`, likewise.
_SETUP_FIELDS = (
    "sampling",
    "clients_per_round",
    "non_trainable_state",
    "on_client_failure",
    "secure_aggregation",
    "client_weighting",
    "noise_generator",
)


class CheckpointError(RuntimeError):
    """A directory of checkpoints cannot be used."""


class CheckpointWriteError(CheckpointError):
    """A file could not be written; its previous content is unchanged."""


class _HashingStream(io.BufferedIOBase):
    """Writes to a stream and computes the digest of all bytes so far."""

    def __init__(self, stream: BinaryIO):
        self._stream, self.digest = stream, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Writes bytes."""
        self.digest.update(data)
        return self._stream.write(data)


def to_bytes(state: Json, level: int = 1) -> bytes:
    """Returns the bytes that `write_state` writes."""
    stream = io.BytesIO()
    write_state(stream, state, level)
    return stream.getvalue()


def write_state(stream: BinaryIO, state: Json, level: int = 1) -> bytes:
    """Writes a state array by array, without a copy of the whole in memory.

    Args:
      stream: The stream to write to.
      state: Nested JSON values and arrays of any NumPy dtype except object. Short
        floats, such as bfloat16, are read back as float32.
      level: The compression level of the text; 0 if the file's size must not depend on
        its contents.

    Returns:
      The digest at the end of the file.
    """
    arrays: list[np.ndarray] = []

    def store_array(value: object) -> dict[str, int]:
        array = np.asarray(value)
        if array.dtype.hasobject:  # It could not be read back without pickle.
            raise TypeError(
                "state must hold JSON values and arrays, got one of type "
                f"{type(value).__name__}."
            )
        # NumPy's file format has no names for short floats.
        arrays.append(array if array.dtype.kind != "V" else array.astype("f4"))
        return {_ARRAY_KEY: len(arrays)}

    text = json.dumps({"format": FORMAT, "state": state}, default=store_array)
    if text.count(f'"{_ARRAY_KEY}": ') != len(arrays):
        raise ValueError(f"state must not have the key {_ARRAY_KEY!r}, got one.")
    # The text compresses well, as charges repeat from round to round.
    packed = np.frombuffer(zlib.compress(text.encode(), level), np.uint8)
    hashed = _HashingStream(stream)
    np.savez(hashed, packed, *arrays)
    digest = hashed.digest.digest()
    stream.write(digest)
    return digest


def from_bytes(data: bytes) -> Json:
    """Returns the saved state; raises ValueError if any bit has changed."""
    data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("its checksum is wrong, or an earlier version wrote it")
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        if "arr_0" not in file:
            raise ValueError("an earlier version wrote it")

        def load_array(value: Json) -> np.ndarray | Json:
            return file[f"arr_{value[_ARRAY_KEY]}"] if _ARRAY_KEY in value else value

        if file["arr_0"].dtype != np.uint8:
            raise ValueError("an earlier version wrote it")
        text = zlib.decompress(file["arr_0"].tobytes()).decode()
        body = json.loads(text, object_hook=load_array)
    if body["format"] != FORMAT:
        raise ValueError(f"it has the format {body['format']!r}")
    return body["state"]


class CheckpointDirectory:
    """Reads and writes the checkpoints of one run.

    Attributes:
      path: The directory.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Makes an object for a directory, which need not exist yet."""
        self.path = pathlib.Path(path)

    def rounds(self) -> list[int]:
        """Returns the rounds that have a checkpoint, the newest first."""
        if not self.path.is_dir():
            return []
        matches = [_NAME.fullmatch(file.name) for file in self.path.iterdir()]
        return sorted((int(m.group(1)) for m in matches if m), reverse=True)

    def file(self, round_index: int) -> pathlib.Path:
        """Returns the path of the checkpoint taken before a round."""
        return self.path / f"round-{round_index:08d}.npz"

    def newest(self) -> Json:
        """Returns the newest undamaged state; warns about damaged checkpoints."""
        rounds = self.rounds()
        if not rounds:
            raise FileNotFoundError(
                f"There is no checkpoint in {self.path} to resume from."
            )
        problems = []
        for round_index in rounds:
            file = self.file(round_index)
            try:
                data = file.read_bytes()
            except OSError as error:
                raise CheckpointError(
                    f"{file} cannot be read: {error.strerror or error}. It may be "
                    "intact: try again. To continue from the one before it, and "
                    "charge its rounds again, remove this file."
                ) from error
            try:
                return from_bytes(data)
            except ValueError as error:
                problems.append(f"The checkpoint {file} is damaged: {error}.")
                warnings.warn(
                    f"{problems[-1]} Trying the one before it.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        raise CheckpointError(
            f"No checkpoint in {self.path} is intact. {' '.join(problems)}"
        )

    def make(self) -> None:
        """Creates the directory if necessary."""
        with _explain_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)

    def clear_after(self, round_index: int) -> None:
        """Renames later checkpoints, which are damaged; removes temporary files."""
        for leftover in self.path.glob(f"{_files.TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        for later in self.rounds():
            if later > round_index:
                file = self.file(later)
                file.replace(file.with_suffix(".damaged"))

    def holds(self, round_index: int, state: Json) -> bool:
        """Returns whether the checkpoint before a round has exactly this state."""
        digest = hashlib.sha256()
        try:
            size = self.file(round_index).stat().st_size - _DIGEST_BYTES
            with self.file(round_index).open("rb") as file:
                while piece := file.read(min(size, _CHUNK_BYTES)):
                    digest.update(piece)
                    size -= len(piece)
                if file.read() != digest.digest():  # It is damaged.
                    return False
        except (OSError, ValueError):
            return False
        with open(os.devnull, "wb") as null_stream:
            return write_state(null_stream, state) == digest.digest()

    def write(self, round_index: int, state: Json, keep: int) -> None:
        """Writes the state before a round; then removes all but the newest `keep`."""
        with _open_replacement(self.file(round_index)) as stream:
            write_state(stream, state)
        for old in self.rounds()[keep:]:
            self.file(old).unlink(missing_ok=True)


def write_atomically(file: pathlib.Path, data: bytes) -> None:
    """Replaces a file atomically: after a crash, it is either the old or the new one.

    Only the owner can read it, as checkpoints allow one to predict cohorts (from the
    seed or the key of the passes). Raises CheckpointWriteError on failure.
    """
    with _open_replacement(file) as stream:
        stream.write(data)


@contextlib.contextmanager
def _open_replacement(file: pathlib.Path) -> Iterator[BinaryIO]:
    with (
        _explain_errors(file),
        _files.replace_file(file, mode=0o600, sync=True) as stream,
    ):
        yield stream


@contextlib.contextmanager
def _explain_errors(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(
            f"{path} cannot be written: {error.strerror or error}. What was "
            "there before is unchanged."
        ) from error


def ledger_path(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a checkpoint directory's ledger."""
    return pathlib.Path(directory) / LEDGER


def ledger_key(path: str | os.PathLike[str]) -> str:
    """Returns the key under which a model stores a ledger."""
    return os.path.realpath(path)


def capture(
    fed: FederatedTraining, key: str, ledger: accounting.PrivacyLedger | None = None
) -> Json:
    """Returns a training's state between two rounds, to be stored beside a ledger.

    Args:
      fed: The training.
      key: The ledger's `ledger_key`.
      ledger: The open ledger (see `PrivacyAccount.state`).
    """
    run, cohort_engine = fed.require_trained("checkpoint")
    return {
        **run.state(ledger),
        "weights": [
            np.asarray(v) for v in keras_versions.settled_values(fed.model.weights)
        ],
        "trainable": _trainable_indices(fed.model),
        "server_optimizer": [v.numpy() for v in cohort_engine.server.state],
        "settings": settings(fed, run.population, run.plan),
        "learning_rate": fed.require_compiled("checkpoint").learning_rate,
        "ledger": key,
        "ledger_head": run.known_ledgers.get(key),
        "noise_state_of": fed.mechanism.state_fingerprint(),
    }


def settings(fed: FederatedTraining, population: Population, plan: FitPlan) -> Json:
    """Returns, by argument, the settings that must be the same in a resumed run."""
    setup, training = fed.setup, fed.require_compiled("fit")

    def describe(value: Any) -> Any:
        if isinstance(value, (dp_accounting.DpEvent, ClientWeighting)):
            return repr(value)
        if isinstance(value, Hashable) and callable(value):
            return _describe_schedule(value, plan.first_round, plan.last_round)
        return type(value).__name__

    of_mechanism = setup.mechanism.parameters().items()
    values = {
        "rounds": plan.last_round - plan.first_round,
        **{name: getattr(plan, name) for name in _PLAN_FIELDS},
        **{name: getattr(setup, name) for name in _SETUP_FIELDS},
        "mechanism": setup.mechanism.name,
        **{f"mechanism's {name}": value for name, value in of_mechanism},
        "clients (their number)": population[0],
        CLIENTS_DIGEST: population[1],
        "optimizer": _optimizer_config(training.optimizer),
        "server_optimizer": _optimizer_config(training.server_optimizer),
        "grad_clip": training.grad_clip,
        "keras": keras_versions.name(),
    }
    for name, value in values.items():
        is_long = isinstance(value, list | tuple) and len(value) > _LONG_SCHEDULE
        if is_long and all(isinstance(each, int | float) for each in value):
            values[name] = _abbreviate(value)
    return _files.to_plain(values, describe)


@functools.lru_cache(maxsize=8)  # Every checkpoint of a fit calls it.
def _describe_schedule(
    schedule: schedules.Schedule, first_round: int, last_round: int
) -> str:
    """Returns a short description of a schedule over rounds, with a digest."""
    rounds = range(first_round, last_round)
    return _abbreviate([schedules.value_at(schedule, t, "a schedule") for t in rounds])


def _abbreviate(values: Sequence[float]) -> str:
    digest = hashlib.sha256(np.array(values, "<f8").tobytes()).hexdigest()
    return f"a schedule of {short(list(values))} ({digest})"


def _optimizer_config(optimizer: tf.keras.optimizers.Optimizer | None) -> object:
    """Returns an optimizer's settings, without the rate, which callbacks change."""
    if optimizer is None:
        return None
    config = {
        # Values that were stored in a variable have only float32 precision.
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in optimizer.get_config().items()
        if name not in ("learning_rate", "name", "jit_compile")
    }
    return [type(optimizer).__name__, config]


def _trainable_indices(model: tf.keras.Model) -> list[int]:
    """Returns the indices of a model's trainable weights."""
    trainable = set(map(id, model.trainable_weights))
    return [n for n, weight in enumerate(model.weights) if id(weight) in trainable]


def _describe_weights(
    weights: Sequence[np.ndarray | tf.Variable], trainable: list[int]
) -> Json:
    return {
        "model's weights (their shapes)": [list(each.shape) for each in weights],
        "model's trainable weights (their indices)": trainable,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class InterruptedRun:
    """A run that is about to be resumed.

    Attributes:
      directory: The directory of its checkpoints and ledger.
      state: The state in the newest undamaged checkpoint.
      ledger: The contents of its ledger.
    """

    directory: pathlib.Path
    state: Json
    ledger: accounting.LedgerContents

    @property
    def other_ledgers(self) -> list[str]:
        """The paths of the run's ledgers outside its directory.

        If the directory is a copy, and the original is still there, the original's
        ledger is one of them: the run may go on in either.
        """
        known = [*self.state["known_ledgers"], *self._facts_of_lines("ledgers")]
        own = ledger_key(ledger_path(self.directory))
        left = () if self.has_original else (self.state["ledger"],)
        return [
            path
            for path in dict.fromkeys(known)
            if path not in left and ledger_key(path) != own
        ]

    @functools.cached_property
    def has_original(self) -> bool:
        """Whether the ledger named by the checkpoint exists and is this run's."""
        path = self.state["ledger"]
        if not os.path.exists(path):
            return False
        with contextlib.suppress(accounting.LedgerError, OSError):
            # Another run's ledger may have taken its place.
            return accounting.PrivacyLedger.read(path).header == self.ledger.header
        return True

    def _facts_of_lines(self, name: str) -> list[Any]:
        """Returns one kind of `Run.facts_of_line` from all of the run's lines, once."""
        details = [
            entry.details.get(name, ())
            for entry in self.ledger.entries
            if entry.run == self.state["run_id"]
        ]
        return [*dict.fromkeys(itertools.chain.from_iterable(details))]

    @classmethod
    def read(
        cls,
        directory: str | os.PathLike[str],
        fed: FederatedTraining,
        clients: FederatedDataset,
        requested: FitPlan,
    ) -> InterruptedRun:
        """Reads the newest checkpoint and checks it against the arguments of `fit`.

        The model does not change.
        """
        state = CheckpointDirectory(directory).newest()
        plan = FitPlan(**state["plan"])
        last = plan.first_round + requested.last_round - requested.first_round
        requested = dataclasses.replace(
            requested, first_round=plan.first_round, last_round=last
        )
        population = clients.num_clients, clients.clients_digest
        saved = {
            **state["settings"],
            **_describe_weights(state["weights"], state["trainable"]),
        }
        now = {
            **settings(fed, population, requested),
            **_describe_weights(fed.model.weights, _trainable_indices(fed.model)),
        }
        for name in now | saved:  # First the rounds, which also affect schedules.
            if saved.get(name) != now.get(name):
                raise ValueError(
                    f"{name} must be {short(saved.get(name))}, as in the interrupted "
                    f"run, to resume it from {directory}, got {short(now.get(name))}."
                )
        path = ledger_path(directory)
        if not path.exists():
            raise accounting.LedgerError(
                f"The ledger {path} is missing, which records the cost of the rounds "
                "in the checkpoint beside it."
            )
        ledger = accounting.PrivacyLedger.read(path, expected_head=state["ledger_head"])
        run = fed.run
        # (Releases outside the rounds are kept.)
        if run is not None and run.account.lacks_rounds(ledger, run.run_id):
            raise ValueError(
                "resume_from must be given to a model that was not trained yet, or "
                "only by the same run: its earlier rounds would be forgotten. It "
                f"was trained for {run.rounds} rounds."
            )
        return cls(directory=pathlib.Path(directory), state=state, ledger=ledger)

    def restore(
        self, fed: FederatedTraining, cohort_engine: engine.CohortEngine, prepared: Run
    ) -> Run:
        """Restores model and engine from the checkpoint; returns the run.

        The spending comes from the ledger. It includes the rounds that were charged
        after the checkpoint, as their results may have been seen.

        Before a weight changes, the model is marked as this object's, so that no `fit`
        accepts it and no epsilon is told of it. The caller marks it as `fed`'s once
        `fed` has the run. So an error or a signal in between leaves no weights whose
        cost nobody counts.
        """
        state = self.state
        variables = [*fed.model.weights, *cohort_engine.server.state]
        values = [*state["weights"], *state["server_optimizer"]]
        pairs = list(zip(variables, values, strict=True))
        run = Run.from_state(state, prepared)
        # Attempts after the checkpoint, here or from a copy of it, are unknown.
        run.attempts.renew()
        query, account = cohort_engine.query, run.account
        key = ledger_key(ledger_path(self.directory))
        before = self.ledger.up_to(state["ledger_head"])
        account.merge_ledger(before, run.run_id, key, clients_known=True)
        ledgers = {key: self.ledger}
        was_copied = state["ledger"] != key
        if was_copied and not self.has_original:
            run.known_ledgers.pop(state["ledger"], None)
        for other in dict.fromkeys((*run.known_ledgers, *self.other_ledgers)):
            # These ledgers, too, may have rounds from after the checkpoint.
            if other != key and os.path.exists(other):
                head = run.known_ledgers.get(other)
                ledgers[other] = accounting.PrivacyLedger.read(
                    other, expected_head=head
                )
        for name, contents in ledgers.items():
            # All charges are counted. If more appear later, another process made them.
            account.merge_ledger(contents, run.run_id, name)
        account.merge_others(prepared.account, run.run_id)
        run.caveats |= {*self._facts_of_lines("caveats")} & {*accounting.CAVEATS}
        planned = map(int, self._facts_of_lines("planned"))
        run.planned_rounds = max([run.planned_rounds, *planned])
        is_same = state["noise_state_of"] == query.mechanism.state_fingerprint()
        if account.has_unseen_rounds:
            run.begin_segment(query)
        elif was_copied or not is_same:
            # The original may continue from the same noise state, which is also invalid
            # if this machine computes other coefficients.
            run.mechanism_state = query.restart_noise(run.mechanism_state)
            run.segment = ledger_lib.new_id()
        mark_owner(self, cohort_engine.server.variables, fed.model)
        for variable, value in pairs:
            variable.assign(tf.cast(value, variable.dtype))
        fed.require_compiled("fit").set_learning_rate(state["learning_rate"])
        return run
