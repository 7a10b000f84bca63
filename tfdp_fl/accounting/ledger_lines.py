"""The lines of a ledger: how one is written, chained to the last, verified."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
from typing import Any

from tfdp_fl import _json
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting.ledger_contents import (
    LedgerContents,
    LedgerEntry,
    LedgerEntryError,
    LedgerError,
    LedgerTamperedError,
)

FORMAT = "tfdp_fl privacy ledger 2"
# In the first format no line names its run.
_WITHOUT_RUNS = "tfdp_fl privacy ledger 1"
GENESIS = "0" * 64


def parse(
    data: bytes, name: str, key: bytes | None, expected_head: str | None
) -> tuple[LedgerContents, int]:
    """Verifies a whole file.

    Args:
      data: What is in the file.
      name: Its name, for errors.
      key: See `PrivacyLedger.read`.
      expected_head: See `PrivacyLedger.read`.

    Returns:
      The contents, and how many bytes of the file are whole lines.

    Raises:
      LedgerTamperedError: A line does not verify; the error names it.
      LedgerError: The format is not known here.
    """
    lines = data.split(b"\n")
    tail = lines.pop()  # Empty, unless the last line has no end.
    header: dict[str, Any] = {}
    entries: list[LedgerEntry] = []
    head, seen = GENESIS, {GENESIS}
    identity = GENESIS
    whole, truncated = len(data) - len(tail), not data
    for number, line in enumerate([*lines, tail], start=1):
        unfinished = number == len(lines) + 1
        if unfinished and not line:
            break
        if unfinished:
            line = _without_rest(line)
        try:
            body = _verified(line, head, key)
            if (number == 1) != (body["kind"] == "header"):
                raise ValueError("it is not what belongs there")
            if number == 1:
                header, identity = body, body["hash"]
                _check_authentication(header, key, name)
                _check_format(header, name)
            else:
                entries.append(
                    dataclasses.replace(
                        _entry(body, header["format"]), line_hash=body["hash"]
                    )
                )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if unfinished:
                truncated = True
                break
            raise LedgerTamperedError(
                f"Line {number} of the ledger {name} does not verify: {error}. "
                "A line was removed, changed or moved"
                + (", or the key is another one." if key else ".")
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
        identity=identity,
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


def _check_authentication(header: dict[str, Any], key: bytes | None, name: str) -> None:
    if header["authentication"] != scheme(key):
        raise LedgerTamperedError(
            f"The ledger {name} says it is authenticated by "
            f"{header['authentication']}, which needs "
            + ("no key, and one was given." if key else "its key.")
        )


def _check_format(header: dict[str, Any], name: str) -> None:
    if header["format"] not in (FORMAT, _WITHOUT_RUNS):
        raise LedgerError(
            f"The ledger {name} has the format {header['format']!r}; this "
            f"version reads {FORMAT!r} and {_WITHOUT_RUNS!r}."
        )


def _verified(line: bytes, head: str, key: bytes | None) -> dict[str, Any]:
    body = json.loads(line.decode())
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if _json.canonical(body).encode() != line:
        raise ValueError("it is not written as the ledger writes")
    digest = body.pop("hash")
    if body.get("previous") != head:
        raise ValueError("it does not follow the line before it")
    if body["kind"] == "header" and body["authentication"] != scheme(key):
        return {**body, "hash": digest}  # The caller says what is missing.
    if not hmac.compare_digest(digest, digest_of(body, key)):
        raise ValueError("its hash is wrong")
    return {**body, "hash": digest}


def _entry(body: dict[str, Any], format: str) -> LedgerEntry:
    charge, local = body["charge"], body["local"]
    if charge is not None:
        charge = charge_lib.RoundCharge.from_json(charge)
    # In the first format, only lines that were written later name a run.
    run = body.get("run") if format == _WITHOUT_RUNS else body["run"]
    return LedgerEntry(
        round_index=body["round"],
        cohort_size=body["cohort_size"],
        charge=charge,
        local=None if local is None else checked_local(local, charge),
        time=body["time"],
        details=body["details"],
        run=run,
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


def digest_of(body: dict[str, Any], key: bytes | None) -> str:
    """Returns a line's hash, of all that it says and of the hash before it."""
    data = _json.canonical(body).encode()
    if key is None:
        return hashlib.sha256(data).hexdigest()
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def check_secrets(key: Any, expected_head: Any) -> None:
    """Raises, without telling it, of a key that is none; and of a head."""
    if key is not None and not isinstance(key, bytes):
        raise TypeError(f"key must be bytes or None, got a {_kind(key)}.")
    if expected_head is not None and not isinstance(expected_head, str):
        raise TypeError(
            f"expected_head must be a str or None, got a {_kind(expected_head)}."
        )


def _kind(value: Any) -> str:
    return type(value).__name__


def scheme(key: bytes | None) -> str:
    """Returns the name by which a header says how lines are authenticated."""
    return "sha256" if key is None else "hmac-sha256"
