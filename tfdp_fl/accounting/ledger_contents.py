"""What a ledger says: its lines are read, verified, and what they cost is added up.

Each line is a JSON object with the hash of the line before it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

from tfdp_fl import _json
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import gaussian

FORMAT = "tfdp_fl privacy ledger 3"
GENESIS = "0" * 64


class LedgerError(RuntimeError):
    """Something is wrong with a ledger file."""


class LedgerTamperedError(LedgerError):
    """A line was removed, changed or moved."""


class LedgerInUseError(LedgerError):
    """Another run writes this ledger."""


class LedgerWriteError(LedgerError):
    """A line could not be written; what stood before is as it was."""


class LedgerMovedError(LedgerError):
    """The file was deleted, moved or replaced while it was open."""


class LedgerForkedError(LedgerError):
    """Another process than the one that opened the ledger uses it."""


class LedgerEntryError(LedgerError, ValueError):
    """A line would say what no round can have cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One round of a ledger.

    Attributes:
      round_index: The round, from 0.
      cohort_size: How many clients were drawn.
      charge: What the round costs centrally; None where only a local
        guarantee is given.
      local: For noise added by clients, the largest spending of a single
        client: {"mu_squared": of this round, "max_mu_squared": so far}.
      time: When the line was written, UTC, ISO 8601.
      details: The mechanism's parameters of the round, and anything else.
      run: The id of the run that released the round.
      line_hash: The hash of its line: a `head` that the ledger once had.
    """

    round_index: int
    cohort_size: int
    charge: charge_lib.RoundCharge | None
    local: dict[str, float] | None
    time: str
    details: dict[str, Any]
    run: str = ""
    line_hash: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """A ledger that was read.

    Attributes:
      header: What was known at the start; empty if not even that was written.
      entries: The rounds, in the order in which they were released.
      truncated: Whether the last line was cut short by a crash.
      head: The hash of the last whole line.
    """

    header: dict[str, Any]
    entries: tuple[LedgerEntry, ...]
    truncated: bool
    head: str

    def by_run(self) -> dict[str, tuple[LedgerEntry, ...]]:
        """Returns the rounds of each run, by the run's id."""
        runs: dict[str, list[LedgerEntry]] = {}
        for entry in self.entries:
            runs.setdefault(entry.run, []).append(entry)
        return {run: tuple(entries) for run, entries in runs.items()}

    def rounds_known(self, run: str, head: str) -> int:
        """Returns how many rounds of a run were written by the time of a head.

        Args:
          run: The run's id.
          head: A `head` that the ledger had; 0 for one that is none of a round.
        """
        count = 0
        for entry in self.entries:
            count += entry.run == run
            if entry.line_hash == head:
                return count
        return 0

    def accountant(self) -> accountant_lib.PrivacyAccountant:
        """Returns an accountant to which all rounds were added."""
        history = accountant_lib.PrivacyAccountant()
        for entry in self.entries:
            if entry.charge is not None:
                history.add(entry.charge)
        return history

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns the epsilon of all rounds at delta.

        That of the guarantee which the header names; without a name the
        central one, or, where no round has one, the local one. Infinite if a
        round has no guarantee of that kind.
        """
        guarantee = self.header.get("mechanism", {}).get("guarantee")
        if guarantee in ("local", "record"):
            return self.local_epsilon(delta)
        central = [entry.charge is not None for entry in self.entries]
        if self.entries and not any(central):
            return self.local_epsilon(delta)
        if not all(central):
            return math.inf
        return self.accountant().epsilon(delta, accountant)

    def local_epsilon(self, delta: float) -> float:
        """Returns the local epsilon of the client that spent most, at delta.

        The spending so far that a run's last line tells, plus, for rounds that
        it did again after it was resumed, the most a client can have spent in
        what was lost. Runs add up, as if the client that spent most in one had
        spent most in every other. Infinite if a round has no local guarantee.
        """
        if any(entry.local is None for entry in self.entries):
            return math.inf
        spent = math.fsum(
            largest_mu_squared(entries) for entries in self.by_run().values()
        )
        return gaussian.epsilon_of_mu_squared(spent, delta)

    def lost_mu_squared(self, next_round: int, run: str) -> float:
        """Returns what one client may have spent in rounds that were lost.

        Args:
          next_round: The round that the run goes on with; its lines of this
            round and later ones belong to what was lost.
          run: The run's id.
        """
        return _spent_and_lost(self.by_run().get(run, ()), next_round)[1]


def largest_mu_squared(entries: tuple[LedgerEntry, ...]) -> float:
    """Returns the most that one client can have spent in one run's rounds."""
    return math.fsum(_spent_and_lost(entries, math.inf))


def _spent_and_lost(
    entries: tuple[LedgerEntry, ...], earliest_later: float
) -> tuple[float, float]:
    spent, lost = 0.0, 0.0
    for entry in reversed(entries):
        if entry.local is not None:
            if entry.round_index >= earliest_later:
                lost += entry.local["mu_squared"]
            else:
                spent = max(spent, entry.local["max_mu_squared"])
        earliest_later = min(earliest_later, entry.round_index)
    return spent, lost


def parse(
    data: bytes, name: str, expected_head: str | None
) -> tuple[LedgerContents, int]:
    """Verifies a whole file.

    Args:
      data: What is in the file.
      name: Its name, for errors.
      expected_head: See `PrivacyLedger.read`.

    Returns:
      The contents, and how many bytes of the file are whole lines.

    Raises:
      LedgerTamperedError: A line does not verify; the error names it.
      LedgerError: The format is another one.
    """
    lines = data.split(b"\n")
    tail = lines.pop()  # Empty, unless the last line has no end.
    header: dict[str, Any] = {}
    entries: list[LedgerEntry] = []
    head, seen = GENESIS, {GENESIS}
    whole, truncated = len(data) - len(tail), not data
    for number, line in enumerate([*lines, tail], start=1):
        unfinished = number == len(lines) + 1
        if unfinished and not line:
            break
        if unfinished:
            line = _without_rest(line)
        try:
            body = _verified(line, head, number == 1, name)
            if number == 1:
                header = body
            else:
                entries.append(_entry(body))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if unfinished:
                truncated = True
                break
            raise LedgerTamperedError(
                f"Line {number} of the ledger {name} does not verify: {error}. "
                "A line was removed, changed or moved."
            ) from error
        head = body["hash"]
        seen.add(head)
        whole = whole + len(line) if unfinished else whole
    if expected_head is not None and expected_head not in seen:
        raise LedgerTamperedError(
            f"The ledger {name} does not contain the line with the hash "
            f"{expected_head}: lines at its end were removed."
        )
    for field in ("kind", "hash", "previous"):
        header.pop(field, None)
    contents = LedgerContents(
        header=header,
        entries=tuple(entries),
        truncated=truncated,
        head=head,
    )
    return contents, whole


def _without_rest(line: bytes) -> bytes:
    """Returns a last line up to the end of its object.

    Where the byte after it is no newline any more, what the line says still
    holds: a crash leaves less than a line, never more.
    """
    text = line.decode("utf-8", "surrogateescape")
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except (ValueError, RecursionError):
        return line
    return text[:end].encode("utf-8", "surrogateescape")


def _verified(line: bytes, head: str, first: bool, name: str) -> dict[str, Any]:
    body = json.loads(line.decode())
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if _json.canonical(body).encode() != line:
        raise ValueError("it is not written as the ledger writes")
    digest = body.pop("hash")
    if body.get("previous") != head:
        raise ValueError("it does not follow the line before it")
    if digest != digest_of(body):
        raise ValueError("its hash is wrong")
    if first != (body["kind"] == "header"):
        raise ValueError("it is not what belongs there")
    if first and body["format"] != FORMAT:
        raise LedgerError(
            f"The ledger {name} has the format {body['format']!r}, which version "
            f"{body.get('version', '(unknown)')} reads; this version reads {FORMAT!r}."
        )
    return {**body, "hash": digest}


def _entry(body: dict[str, Any]) -> LedgerEntry:
    charge, local = body["charge"], body["local"]
    if charge is not None:
        charge = charge_lib.RoundCharge.from_json(charge)
    return LedgerEntry(
        round_index=body["round"],
        cohort_size=body["cohort_size"],
        charge=charge,
        local=None if local is None else checked_local(local, charge),
        time=body["time"],
        details=body["details"],
        run=body["run"],
        line_hash=body["hash"],
    )


def checked_local(
    local: dict[str, Any], charge: charge_lib.RoundCharge | None
) -> dict[str, float]:
    """Returns a round's local spending, or raises LedgerEntryError.

    Infinity is what a release without noise costs, so a round may say it, but
    not next to a charge that has noise.
    """
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


def digest_of(body: dict[str, Any]) -> str:
    """Returns a line's hash, of all that it says and of the hash before it."""
    return hashlib.sha256(_json.canonical(body).encode()).hexdigest()
