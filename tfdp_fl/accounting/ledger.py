"""An append-only file that records releases and outlives the process.

A line is written and synced to disk before the round's result can be seen, so a crash
can only make the ledger overstate the spending, never understate it. Each line carries
the hash of the line before it, so a removed, changed or reordered line is detected. The
file alone cannot reveal that whole lines were cut off at its end, but a reader that
knows an earlier hash can detect it (`head`, `expected_head`). Anyone who can rewrite
the whole file can make new hashes.

A crash during a write leaves a last line without its end. Its round's result was never
shown, as `record` had not returned, so the round is not charged. (If only the newline
is missing or damaged, the line counts all the same.) A round that is repeated after a
crash has two lines and is charged twice.

Several runs on the same clients may share a ledger, one after another, and a run may
write to several. Each line names its run, and has the id of its charge: the lines of
one charge in several ledgers count once, and two charges always count twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
import json
import math
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import tfdp_fl
from tfdp_fl import _files, _signals, _validate
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import gaussian
from tfdp_fl.accounting.accountant import (
    BudgetExceededError,
    PrivacyAccountant,
    PrivacyBudget,
)
from tfdp_fl.accounting.rounding import format_up
from tfdp_fl.terms import Json, PrivacyUnit, TrustModel

FORMAT = "tfdp_fl privacy ledger 5"
_GENESIS = "0" * 64
# The detail with a round's place in correlated noise: the ids of the segment and the
# session (a process that continues one noise state), and the round index in it.
PLACE = "place_in_correlated_noise"
# The detail of a line whose local total covers its run's lines up to that one.
COVERS_ALL = "total_covers_all_lines"


class LedgerError(RuntimeError):
    """A ledger file cannot be used."""


class LedgerTamperedError(LedgerError):
    """A line was removed, changed or moved."""


class LedgerInUseError(LedgerError):
    """Another run is writing this ledger."""


class LedgerWriteError(LedgerError):
    """A line could not be written; the earlier lines are unchanged."""


class LedgerMovedError(LedgerError):
    """The file was deleted, moved or replaced while it was open."""


class LedgerForkedError(LedgerError):
    """A process other than the one that opened the ledger uses it."""


class LedgerEntryError(LedgerError, ValueError):
    """A line would state a cost that no round can have."""


class LedgerLineError(LedgerTamperedError, LedgerEntryError):
    """A line of a file states a cost that is impossible or cannot be computed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One round of a ledger.

    Attributes:
      round_index: The round, from 0.
      cohort_size: The number of clients drawn.
      charge: The round's central cost; None if there is only a local guarantee.
      local: For noise added by clients, the largest spending of a single client:
        {"mu_squared": in this round, "max_mu_squared": so far}.
      time: When the line was written, UTC, ISO 8601; "" for a search, whose time would
        reveal the number of its trials.
      details: The mechanism's parameters in the round, and further facts.
      run: The id of the run that released the round.
      charge_id: The random id of its charge, the same in every ledger.
      line_hash: The hash of its line, which was once the ledger's `head`.
    """

    round_index: int
    cohort_size: int
    charge: charge_lib.RoundCharge | None
    local: dict[str, float] | None
    time: str
    details: Json
    run: str = ""
    charge_id: str = dataclasses.field(default_factory=lambda: new_charge_id())
    line_hash: str = ""

    @property
    def is_central(self) -> bool:
        """Whether it has only a central cost."""
        return self.charge is not None and self.local is None

    @property
    def adds_its_own(self) -> bool:
        """Whether it adds its own central cost only, and repeats no earlier round's."""
        return self.is_central and PLACE not in self.details


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """The contents of a ledger.

    Attributes:
      header: The facts known at the start; empty if not even they were written.
      entries: The rounds, in the order of release.
      truncated: Whether a crash cut the last line short.
      head: The hash of the last complete line.
      ended: By run, the digest of the result of each search that has ended.
    """

    header: Json
    entries: tuple[LedgerEntry, ...]
    truncated: bool
    head: str
    ended: dict[str, str] = dataclasses.field(default_factory=dict)

    def with_entry(self, entry: LedgerEntry) -> LedgerContents:
        """Returns the contents with one more round at the end."""
        return dataclasses.replace(
            self, entries=(*self.entries, entry), head=entry.line_hash
        )

    def by_run(self) -> dict[str, list[LedgerEntry]]:
        """Returns the rounds of each run, by the run's id."""
        runs: dict[str, list[LedgerEntry]] = collections.defaultdict(list)
        for entry in self.entries:
            runs[entry.run].append(entry)
        return dict(runs)

    def up_to(self, head: str) -> LedgerContents:
        """Returns the contents when `head` was the hash of the last line.

        If it is not the hash of a round's line, there are no rounds.
        """
        hashes = [entry.line_hash for entry in self.entries]
        count = hashes.index(head) + 1 if head in hashes else 0
        return dataclasses.replace(self, entries=self.entries[:count], head=head)

    def accountant(self) -> PrivacyAccountant:
        """Returns an accountant with all rounds.

        Raises:
          ValueError: A round has no central charge, or the relations differ.
        """
        charges = collections.Counter(entry.charge for entry in self.entries)
        by_id = {entry.charge_id: entry for entry in self.entries}
        places = {key: place_of(entry.details) for key, entry in by_id.items()}
        for charge_id in repeated_by_branches(places).values():
            charges[by_id[charge_id].charge] += 1
        if num_missing := charges.pop(None, 0):
            raise ValueError(
                "A ledger must have a central charge for each round to have a central "
                f"epsilon, got {num_missing} of {len(self.entries)} rounds without."
            )
        return PrivacyAccountant(
            (charge, count) for charge, count in charges.items() if charge is not None
        )

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns the epsilon of all rounds at delta.

        It is for the guarantee that the header names. If the header names none, it is
        the central epsilon, or the local one if no round has a central charge. It is
        infinite if a round has no such guarantee.
        """
        trust_model = self.header.get("mechanism", {}).get("trust_model")
        charges = [entry.charge for entry in self.entries]
        if trust_model == TrustModel.LOCAL or set(charges) == {None}:
            return self.local_epsilon(delta)
        if None in charges:
            return math.inf
        return self.accountant().epsilon(delta, accountant)

    def local_epsilon(self, delta: float) -> float:
        """Returns the local epsilon at delta of the client that spent most.

        For each run, it takes the total spending in the run's last line. If rounds were
        repeated after the run was resumed, it adds the most that a client can have
        spent in the lost rounds. Runs add up, as if the same client had spent most in
        every run. It is infinite if a round has no local guarantee.
        """
        if any(entry.local is None for entry in self.entries):
            return math.inf
        spent = math.fsum(
            largest_mu_squared(entries) for entries in self.by_run().values()
        )
        return gaussian.epsilon_of_mu_squared(spent, delta)


# A round's place in a segment of correlated noise (see `PLACE`).
Place = tuple[str, str, int]


def place_of(details: Mapping[str, Any]) -> Place | None:
    """Returns a round's place, or None; raises ValueError if it is malformed."""
    if PLACE not in details:
        return None
    segment, session, round_index = details[PLACE]
    if not (_is_text(segment) and _is_text(session) and _is_count(round_index)):
        raise ValueError(f"{PLACE} must be a segment, a session and a round index.")
    return segment, session, round_index


def repeated_by_branches(places: Mapping[str, Place | None]) -> dict[str, str]:
    """Returns the charges that a branch of correlated noise costs once more.

    If two processes continue from one noise state, as from a checkpoint and its backup,
    the noise of each is correlated with the noise before the branch. Each is charged as
    a separate segment, so the second one pays for the rounds before it again.

    Args:
      places: The place of each charge of a run, by the charge's id.

    Returns:
      For each charge that is missing, an id for it, and the id of the equal one.
    """
    segments: dict[str, dict[str, dict[int, str]]] = {}
    for charge_id, place in places.items():
        if place is not None:
            segment, session, round_index = place
            sessions = segments.setdefault(segment, {})
            sessions.setdefault(session, {}).setdefault(round_index, charge_id)
    repeated: dict[str, str] = {}
    for sessions in segments.values():
        taken: dict[int, str] = {}
        for first, session in sorted((min(sessions[each]), each) for each in sessions):
            rounds = sessions[session]
            if rounds.keys() & taken.keys():
                before = [key for index, key in taken.items() if index < first]
                repeated |= {f"{key} again in {session}": key for key in before}
            taken = {**rounds, **taken}
    return {name: key for name, key in repeated.items() if name not in places}


def largest_mu_squared(entries: Sequence[LedgerEntry]) -> float:
    """Returns the most that one client can have spent in one run's rounds.

    The lines of a `PrivacyAccount` say the most for all charges in the file before
    them. Other lines may not know of each other, if the run was resumed in between.
    """
    total, num_covered = 0.0, 0
    for number, entry in enumerate(entries, start=1):
        if COVERS_ALL in entry.details and entry.local is not None:
            total, num_covered = max(total, *entry.local.values()), number
    return total + _spent_and_lost(entries[num_covered:])


def _spent_and_lost(entries: Sequence[LedgerEntry]) -> float:
    """Returns the same of lines of which each states its total by its own memory.

    A round that a later line repeats was lost, and is not in that line's total.
    """
    spent, lost, earliest_later = 0.0, 0.0, math.inf
    for entry in reversed(entries):
        if entry.local is not None:
            if entry.round_index >= earliest_later:
                lost += entry.local["mu_squared"]
            else:
                spent = max(spent, *entry.local.values())
        # (A line that costs nothing belongs to its round, and repeats none.)
        if entry.local is None or entry.local["mu_squared"]:
            earliest_later = min(earliest_later, entry.round_index)
    return spent + lost


class PrivacyLedger:
    """Writes a ledger, from one process and one thread at a time.

    Use as a context manager, or `close`.

    Attributes:
      path: The ledger's file.
      run: The id of the run whose rounds are recorded.
      lock: Held while a line is written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "create",
        *,
        privacy_unit: str | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        mechanism: Json | None = None,
        expected_head: str | None = None,
        run: str | None = None,
    ):
        """Opens a ledger for writing and takes its lock.

        Args:
          path: The file. Its folder must exist.
          mode: "create": the file must not exist. "append": continue an existing
            ledger, which is first verified; its last line is removed if a crash cut it
            short. A missing ledger is created.
          privacy_unit: "client" or "record", as in the header; None: "client" for a
            new ledger.
          target_epsilon: The budget, if known, for the header.
          target_delta: Its delta, for the header.
          mechanism: Describes the mechanism, for the header of a new ledger. Runs with
            a local `trust_model` have ledgers of their own.
          expected_head: With "append": a `head` seen before, which the file
            must still contain.
          run: The id of the run whose rounds will be recorded; None: a new, random
            one. A resumed run passes its previous id.

        Raises:
          FileExistsError: mode "create" and the file exists.
          LedgerInUseError: Another run has it open.
          LedgerTamperedError: The existing lines do not verify.
          LedgerError: It has an unknown format.
          LedgerWriteError: It cannot be created or written.
          TypeError, ValueError: An argument is not allowed, or `path` is a ledger of
            another privacy unit or trust model.
        """
        _validate.one_of(("create", "append"), mode=mode)
        if expected_head is not None:
            _validate.instance_of(str, expected_head=expected_head)
        mechanism = {} if mechanism is None else mechanism
        _validate.instance_of(dict, mechanism=mechanism)
        self.path = pathlib.Path(path)
        # The absolute path, in case the working directory changes.
        self._absolute_path = os.path.abspath(self.path)
        # A fork inherits the file, its lock and the position of the next line.
        self._process = os.getpid()
        self.run = new_id() if run is None else _check_run(run)
        # Accounts may share an open ledger, but only one at a time asks and records.
        self.lock = threading.RLock()
        self._descriptor: int | None = None
        # The cost of all lines, cached for budgets, if all costs are central.
        self._central: PrivacyAccountant | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if mode == "create":
            flags |= os.O_EXCL
        elif expected_head is not None and not os.path.exists(self._absolute_path):
            raise LedgerTamperedError(
                f"The ledger {self.path} is missing, and it held the line with the "
                f"hash {expected_head}."
            )
        try:
            with _signals.defer_signals():  # So that an open file can be closed.
                self._descriptor = os.open(self._absolute_path, flags, 0o600)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST,
                "The ledger exists already; open it with mode='append' to continue it",
                str(self.path),
            ) from None
        except OSError as error:
            raise LedgerWriteError(
                f"The ledger {self.path} cannot be opened for writing: "
                f"{error.strerror}."
            ) from error
        is_ours = False
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = mode == "create" and not os.fstat(self._file).st_size
            if mode == "create" and not is_ours:  # Between opening and locking it.
                raise LedgerInUseError(
                    f"Another run has just created the ledger {self.path}; give "
                    "this one its own ledger (or output directory)."
                )
            contents = self._recover(expected_head)
            self._header, self._head = contents.header, contents.head
            self._entries, self._ended = [*contents.entries], dict(contents.ended)
            self._rounds_of = collections.Counter(e.run for e in self._entries)
            self._charge_ids = {e.charge_id for e in self._entries}
            self._is_central = all(e.is_central for e in self._entries)
            if not self._header:
                header = {
                    "format": FORMAT,
                    "version": tfdp_fl.__version__,
                    "dp_accounting": charge_lib.dp_accounting_version(),
                    "created": _now(),
                    "privacy_unit": privacy_unit or PrivacyUnit.CLIENT,
                    "target_epsilon": target_epsilon,
                    "target_delta": target_delta,
                    "mechanism": mechanism,
                }
                self._head = self._append({"kind": "header", **header})
                self._header = header
                # The folder may be writable but not readable.
                with contextlib.suppress(PermissionError):
                    _files.sync_folder(os.path.dirname(self._absolute_path))
            self._check_kind(privacy_unit, mechanism.get("trust_model"))
        except BlockingIOError:
            self.close()
            raise LedgerInUseError(
                f"Another run is writing to the ledger {self.path}; give this one "
                "its own ledger (or output directory)."
            ) from None
        except BaseException:
            if is_ours:
                os.unlink(self._absolute_path)  # Made here, and empty.
            self.close()
            raise

    def _check_kind(self, privacy_unit: str | None, trust_model: str | None) -> None:
        """Raises ValueError if this ledger's rounds cannot be counted with a run's."""
        found = self._header["privacy_unit"]
        mechanism = self._header.get("mechanism") or {}
        written = mechanism.get("trust_model", trust_model)
        is_other_model = TrustModel.LOCAL in (written, trust_model)
        if found != (privacy_unit or found) or (
            trust_model is not None and written != trust_model and is_other_model
        ):
            raise ValueError(
                f"path must be a ledger of runs with a {trust_model} guarantee per "
                f"{privacy_unit or found}, so that they can be counted together, but "
                f"{self.path} has a {written} guarantee per {found}."
            )

    @property
    def head(self) -> str:
        """The hash of the last line; store it elsewhere to detect removed lines."""
        return self._head

    @property
    def rounds(self) -> int:
        """The number of rounds in the ledger."""
        return len(self._entries)

    def rounds_of(self, run: str) -> int:
        """Returns the number of a run's rounds in the ledger."""
        return self._rounds_of[run]

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The rounds in the ledger."""
        return tuple(self._entries)

    def record(
        self,
        round_index: int,
        charge: charge_lib.RoundCharge | None,
        cohort_size: int,
        *,
        local: dict[str, float] | None = None,
        run: str | None = None,
        charge_id: str | None = None,
        budget: PrivacyBudget | None = None,
        **details: object,
    ) -> None:
        """Writes one round's line, and returns when it is on disk.

        Call it before showing anything of the round's result. Checking the budget and
        writing the line are one atomic operation.

        Args:
          round_index: The round, from 0.
          charge: Its central cost; None if it has only a local one.
          cohort_size: The number of clients drawn.
          local: See `LedgerEntry`.
          run: The id of the run that released it, if it differs from the ledger's.
          charge_id: The id of a charge that other ledgers list as well; None: a new,
            random one.
          budget: The most that all rounds of the ledger may cost, including this one
            and those of other runs. With `local`, or if the ledger has a guarantee
            composed client by client, it limits the local epsilon.
          **details: The mechanism's parameters in this round and further facts, as
            JSON values or NumPy numbers.

        Raises:
          BudgetExceededError: If the round would exceed the budget, or if the spending
            cannot be determined. Nothing is written.
          LedgerWriteError: If the line could not be written and synced (for instance,
            because the disk is full). The ledger is unchanged; the round must not be
            released.
          LedgerMovedError: If the file was deleted, moved or replaced.
          LedgerForkedError: If this is not the process that opened it.
          LedgerTamperedError: If something else was written to the file.
          LedgerEntryError: If `local` is negative or NaN, or is infinite although the
            charge includes noise, or if the ledger already has the charge.
        """
        if charge is None and local is None:
            raise ValueError(
                "charge or local must be given, got None for both: a round "
                "that costs nothing does not belong in the ledger."
            )
        if charge is not None:
            _validate.instance_of(charge_lib.RoundCharge, charge=charge)
        if budget is not None:
            _validate.instance_of(PrivacyBudget, budget=budget)
        body: Json = {
            "kind": "round",
            "run": self.run if run is None else _check_run(run),
            "charge_id": new_charge_id() if charge_id is None else charge_id,
            "round": _validate.non_negative_integer(round_index=round_index),
            "cohort_size": _validate.non_negative_integer(cohort_size=cohort_size),
            "charge": charge and json.loads(charge.to_json()),
            "local": local and check_local(local, charge),
            "time": "" if "search" in details else _now(),
            "details": _files.to_plain(details, _refuse),
        }
        entry = _entry(body)
        with self.lock:
            _check_new(entry, self._charge_ids)
            if budget is not None:
                self._require_affordable(budget, entry)
            with _signals.defer_signals():
                # Otherwise, the disk could hold a line that this object lacks.
                self._head = self._append(body)
                self._entries.append(dataclasses.replace(entry, line_hash=self._head))
                self._charge_ids.add(entry.charge_id)
                self._is_central &= entry.is_central
                self._rounds_of[entry.run] += 1
                accountant, self._central = self._central, None
                if accountant and budget and charge is not None and entry.adds_its_own:
                    accountant.add(charge)  # Its relation was checked with the budget.
                    self._central = accountant

    def record_end(self, run: str, digest: str) -> None:
        """Records that a search has ended, without the time, which is secret.

        Args:
          run: The id of the search.
          digest: The digest of its result; no other result is accepted afterwards.

        Raises:
          LedgerError: As in `record`.
        """
        body = {"kind": "ended", "run": _check_run(run), "digest": digest}
        with self.lock, _signals.defer_signals():
            self._head = self._append(body)
            self._ended[run] = digest

    def _require_affordable(self, budget: PrivacyBudget, entry: LedgerEntry) -> None:
        """Raises BudgetExceededError if one more round would exceed the budget."""
        trust_model = self._header.get("mechanism", {}).get("trust_model")
        if (
            trust_model != TrustModel.LOCAL
            and self._is_central
            and entry.adds_its_own
            and entry.charge
        ):
            if self._central is None:
                self._central = self._read().accountant()
            after = self._central.with_charges(entry.charge)
            epsilon = after.epsilon(budget.delta, budget.accountant)
        else:
            contents = self._read().with_entry(entry)
            epsilon = contents.epsilon(budget.delta, budget.accountant)
            if entry.local is not None:  # Even if the header names no trust model.
                epsilon = max(epsilon, contents.local_epsilon(budget.delta))
        if not epsilon <= budget.epsilon:
            raise BudgetExceededError(
                f"Round {entry.round_index} would bring epsilon to "
                f"{format_up(epsilon)} at delta={format_up(budget.delta)} over all "
                f"{self.rounds + 1} rounds of the ledger {self.path}, and the budget "
                f"is {format_up(budget.epsilon)}. Nothing was written; the round must "
                "not be released."
            )

    def contents(self) -> LedgerContents:
        """Returns the current contents; others may write to a closed ledger."""
        if self._descriptor is None:
            return PrivacyLedger.read(self._absolute_path)
        return self._read()

    def _read(self) -> LedgerContents:
        return LedgerContents(
            header=self._header,
            entries=tuple(self._entries),
            truncated=False,
            head=self._head,
            ended=dict(self._ended),
        )

    def close(self) -> None:
        """Releases the file and its lock."""
        if self._descriptor is not None:
            if self._process == os.getpid():
                # Forks that still have the file open would keep the lock, too.
                fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        """Releases the lock if the code that opened the ledger was interrupted."""
        # (As Python ends, `os` may be gone; the file is then closed with the process.)
        if getattr(self, "_descriptor", None) is not None and os is not None:
            self.close()

    def __enter__(self) -> PrivacyLedger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def read(
        path: str | os.PathLike[str],
        *,
        expected_head: str | None = None,
    ) -> LedgerContents:
        """Reads and verifies a ledger, without a lock.

        Args:
          path: The ledger's file.
          expected_head: A `head` seen before; the ledger must contain it.

        Raises:
          FileNotFoundError: There is no such file.
          LedgerTamperedError: A line does not verify; the error names it.
          LedgerError: It has another format; the error names the version that can
            read it.
        """
        return _parse(pathlib.Path(path).read_bytes(), str(path), expected_head)[0]

    @property
    def _file(self) -> int:
        """The descriptor of the open file."""
        if self._descriptor is None:
            raise LedgerError(f"The ledger {self.path} is closed.")
        return self._descriptor

    def _recover(self, expected_head: str | None) -> LedgerContents:
        """Verifies the existing lines and removes a line that was cut short."""
        data = os.pread(self._file, os.fstat(self._file).st_size, 0)
        self._end = len(data)
        self._check_file()
        contents, complete_length = _parse(data, str(self.path), expected_head)
        if complete_length < len(data):
            os.ftruncate(self._file, complete_length)
            os.fsync(self._file)
        self._end = complete_length
        if complete_length and not data[:complete_length].endswith(b"\n"):
            self._write(b"\n")
        return dataclasses.replace(contents, truncated=False)

    def _append(self, body: Json) -> str:
        """Writes a line; returns its hash."""
        line, digest = line_after(self.head, body)
        self._write(line + b"\n")
        return digest

    def _write(self, data: bytes) -> None:
        self._check_file()
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fsync(self._file)
        except BaseException as error:
            # If this fails, `_check_file` will find the rest of the line.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
                os.fsync(self._file)
            if not isinstance(error, OSError):
                raise
            raise LedgerWriteError(
                f"The ledger {self.path} cannot be written: "
                f"{error.strerror}. Its earlier lines are unchanged; the round "
                "must not be released."
            ) from error
        self._end += len(data)

    def require_in_place(self) -> None:
        """Raises LedgerMovedError if the path has come to mean another file."""
        opened, on_disk = os.fstat(self._file), None
        with contextlib.suppress(OSError):
            on_disk = os.stat(self._absolute_path)
        if on_disk is None or not os.path.samestat(opened, on_disk):
            raise LedgerMovedError(
                f"The ledger {self.path} was deleted, moved or replaced while "
                "it was open: what is written now would not be found there. "
                "Put it back; nothing must be released or saved."
            )

    def _check_file(self) -> None:
        """Raises an error unless the next reader would find a line written now.

        A fork shares the lock and the position of the next line.
        """
        if os.getpid() != self._process:
            raise LedgerForkedError(
                f"The ledger {self.path} was opened by process {self._process}; its "
                f"fork {os.getpid()} would overwrite its lines. Open one in each."
            )
        self.require_in_place()
        opened = os.fstat(self._file)
        if opened.st_size != self._end:
            raise LedgerTamperedError(
                f"The ledger {self.path} has {opened.st_size} bytes where "
                f"{self._end} were written: something else changed it while "
                "it was open. The round must not be released."
            )


def epsilon_from_ledger(
    path: str | os.PathLike[str],
    delta: float,
    accountant: str = "rdp",
    *,
    expected_head: str | None = None,
) -> float:
    """Returns the epsilon of a ledger's rounds, without the model.

    Args:
      path: The ledger's file.
      delta: Between 0 and 1.
      accountant: "rdp" or "pld".
      expected_head: A `head` seen before, which the ledger must contain; None: any.
    """
    contents = PrivacyLedger.read(path, expected_head=expected_head)
    return contents.epsilon(delta, accountant)


def new_id() -> str:
    """Returns the id of a new run, random hexadecimal digits."""
    return secrets.token_hex(16)


def new_charge_id() -> str:
    """Returns the id of a new charge, random hexadecimal digits."""
    return secrets.token_hex(16)


def _check_run(run: object) -> str:
    if not isinstance(run, str) or not run:
        raise ValueError(f"run must be a non-empty string, got {run!r}.")
    return run


def _now() -> str:
    now = datetime.datetime.now(datetime.timezone.utc)
    return now.isoformat(timespec="milliseconds")


def _refuse(value: object) -> None:
    raise TypeError(f"details must hold JSON values, got {value!r}.")


def _parse(
    data: bytes, name: str, expected_head: str | None
) -> tuple[LedgerContents, int]:
    """Verifies a file; returns its contents and the length of its complete lines."""
    _validate.instance_of((str, type(None)), expected_head=expected_head)
    *lines, tail = data.split(b"\n")  # The last one is empty or incomplete.
    header: Json = {}
    entries: list[LedgerEntry] = []
    charge_ids: set[str] = set()
    ended: dict[str, str] = {}
    head, hashes, complete_length = _GENESIS, {_GENESIS}, 0
    for number, line in enumerate([*lines, _strip_after_json(tail)], start=1):
        has_end = number <= len(lines)
        try:
            body, digest = _read_line(line, head, number == 1, name)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not has_end:
                break
            raise LedgerTamperedError(
                f"Line {number} of the ledger {name} does not verify: {error}. "
                "A line was removed, changed or moved."
            ) from error
        try:
            if number == 1:
                header = body
            elif body["kind"] == "ended":
                _check_fields(body, _END_FIELDS)
                ended[body["run"]] = body["digest"]
            else:
                entries.append(entry := _entry(body, digest))
                _check_new(entry, charge_ids)
                charge_ids.add(entry.charge_id)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LedgerLineError(
                f"Line {number} of the ledger {name} cannot be read: {error}"
            ) from error
        head = digest
        hashes.add(head)
        complete_length += len(line) + has_end
    if expected_head is not None and expected_head not in hashes:
        raise LedgerTamperedError(
            f"The ledger {name} does not contain the line with the hash "
            f"{expected_head}: lines at its end were removed, or it is another ledger."
        )
    header.pop("kind", None)
    contents = LedgerContents(
        header=header,
        entries=tuple(entries),
        truncated=complete_length < len(data) or not data,
        head=head,
        ended=ended,
    )
    return contents, complete_length


def _strip_after_json(line: bytes) -> bytes:
    """Returns a last line up to the end of its JSON object.

    If the byte after it is no longer a newline, the line is still valid: a crash leaves
    less than a line, never more.
    """
    text = line.decode("utf-8", "surrogateescape")
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return line
    return text[:end].encode("utf-8", "surrogateescape")


def _read_line(
    line: bytes, head: str, is_first: bool, ledger_name: str
) -> tuple[Json, str]:
    """Returns a line's content and hash; `head` is the hash of the previous line."""
    body = dict(json.loads(line.decode()))
    for key in ("previous", "hash"):
        del body[key]
    written, digest = line_after(head, body)
    if written != line:
        raise ValueError("it does not follow from the line before it")
    if is_first != (body["kind"] == "header"):
        raise ValueError("it is not what belongs there")
    if is_first and body["format"] != FORMAT:
        raise LedgerError(
            f"The ledger {ledger_name} has the format {body['format']!r}, which "
            f"version {body.get('version', '(unknown)')} reads; this version reads "
            f"{FORMAT!r}."
        )
    return body, digest


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) < 1000


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


# The fields of a line and their checks; events have a schema of their own.
_END_FIELDS = {"run": _is_text, "digest": _is_text}
_ROUND_FIELDS = {
    "run": lambda value: _is_text(value) and bool(value),
    "charge_id": lambda value: _is_text(value) and bool(value),
    "time": _is_text,
    "round": _is_count,
    "cohort_size": _is_count,
    "details": _is_object,
    "charge": lambda value: value is None or isinstance(value, dict),
    "local": lambda value: value is None or isinstance(value, dict),
}


def _check_fields(body: Json, checks: Mapping[str, Callable[[object], bool]]) -> None:
    for name, check in checks.items():
        if not check(body[name]):
            raise ValueError(f"{name} must not be {body[name]!r:.80}.")


def _entry(body: Json, line_hash: str = "") -> LedgerEntry:
    _check_fields(body, _ROUND_FIELDS)
    local, charge = body["local"], body["charge"]
    if charge is not None:
        charge = charge_lib.RoundCharge.from_json(charge)
    place_of(body["details"])  # Raises an error if it is none.
    return LedgerEntry(
        round_index=body["round"],
        cohort_size=body["cohort_size"],
        charge=charge,
        local=None if local is None else check_local(local, charge),
        time=body["time"],
        details=body["details"],
        run=body["run"],
        charge_id=body["charge_id"],
        line_hash=line_hash,
    )


def _check_new(entry: LedgerEntry, charge_ids: Set[str]) -> None:
    """Raises LedgerEntryError if a ledger already has an entry's charge.

    By its id, both lines would count as one.
    """
    if entry.charge_id in charge_ids:
        raise LedgerEntryError(
            f"charge_id must be new in the ledger, got {entry.charge_id!r:.80}, which "
            "an earlier line has."
        )


def check_local(local: Json, charge: charge_lib.RoundCharge | None) -> dict[str, float]:
    """Returns a round's local spending, or raises LedgerEntryError.

    A release without noise has an infinite cost, so infinity is allowed, but not
    together with a charge that has noise.
    """
    for name in ("mu_squared", "max_mu_squared"):
        if isinstance(local[name], str | bool):
            raise LedgerEntryError(f"{name} must be a number, got {local[name]!r:.80}.")
    checked = {name: float(local[name]) for name in ("mu_squared", "max_mu_squared")}
    for name, value in checked.items():
        if not value >= 0:
            raise LedgerEntryError(
                f"{name} must be a number of at least 0, got {value!r}."
            )
    noise = None if charge is None else charge.noise_multiplier
    if noise and math.isinf(checked["mu_squared"]):
        raise LedgerEntryError(
            "mu_squared must be finite in a round with noise, got inf next to "
            f"a noise multiplier of {noise!r}."
        )
    return checked


def line_after(previous_hash: str, body: Json) -> tuple[bytes, str]:
    """Returns the line of a body after the one with a given hash, and its own hash."""
    body = {**body, "previous": previous_hash}
    digest = hashlib.sha256(_files.to_canonical_json(body).encode()).hexdigest()
    return _files.to_canonical_json({**body, "hash": digest}).encode(), digest
