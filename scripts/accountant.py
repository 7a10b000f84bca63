r"""Plans the privacy of a run, or reads a ledger.

Give the number of clients, the cohort size, and three of the other four quantities. The
fourth is computed for several samplings and both accountants:

    python scripts/accountant.py --num_clients=1000 --clients_per_round=100 \
        --rounds=100 --epsilon=8 --delta=1e-5

Read a ledger, without the model:

    python scripts/accountant.py --ledger=ledger.jsonl --delta=1e-5
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence

from absl import app, flags

from tfdp_fl import _progress, _validate, accounting

_SAMPLINGS = ("poisson", "random_allocation", "fixed_size", "shuffled")
_ACCOUNTANTS = ("rdp", "pld")
_CLIENTS = ("num_clients", "clients_per_round")
_SOLVED = ("rounds", "noise_multiplier", "epsilon", "delta")

flags.DEFINE_integer("num_clients", None, "N, the number of clients.")
flags.DEFINE_integer(
    "clients_per_round", None, "m, the (expected) number of clients per round."
)
flags.DEFINE_integer("rounds", None, "T, the number of rounds.")
flags.DEFINE_float(
    "noise_multiplier",
    None,
    "z, noise stddev on the sum of clipped updates over the clip norm.",
)
flags.DEFINE_float("epsilon", None, "The largest epsilon allowed, at --delta.")
flags.DEFINE_float("delta", None, "Between 0 and 1.")
_LEDGER = flags.DEFINE_string(
    "ledger", None, "Print the epsilon of this ledger at --delta."
)
_CHECKS = {
    "num_clients": _validate.positive_integer,
    "clients_per_round": _validate.positive,
    "rounds": _validate.positive_integer,
    "noise_multiplier": _validate.non_negative,
    "epsilon": _validate.positive,
    "delta": _validate.inside_unit_interval,
}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is not a flag.")
    given = {name: flags.FLAGS[name].value for name in _CHECKS}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        for name, value in given.items():
            _CHECKS[name](**{name: value})
        if _LEDGER.value:
            if given.keys() != {"delta"}:
                raise ValueError("--ledger needs --delta, and no other flag.")
            if not pathlib.Path(_LEDGER.value).is_file():
                raise ValueError(f"there is no file {_LEDGER.value}.")
            _print_ledger(given["delta"])
        else:
            _print_solutions(given)
    except (ValueError, accounting.LedgerError) as error:
        raise SystemExit(f"{_progress.name()}: {error}") from error


def _print_solutions(given: dict[str, float]) -> None:
    """Prints the missing quantity for each sampling and accountant."""
    missing = [name for name in _CHECKS if name not in given]
    if len(missing) != 1 or missing[0] in _CLIENTS:
        raise ValueError(
            f"{' and '.join(_CLIENTS)} must be given, and exactly three of "
            f"{', '.join(_SOLVED)}, got {', '.join(given) or 'none'}."
        )
    if given["clients_per_round"] > given["num_clients"]:
        raise ValueError("clients_per_round must be at most num_clients.")
    assignments = [f"{name} = {_format_given(value)}" for name, value in given.items()]
    print(f"Given {', '.join(assignments)}:\n")
    rows, reasons = [[missing[0], *(f"by {a.upper()}" for a in _ACCOUNTANTS)]], []
    for sampling in _SAMPLINGS:
        row = [sampling]
        for accountant in _ACCOUNTANTS:
            try:
                value = _solve(missing[0], sampling, accountant, **given)
                row.append(_format_result(value, missing[0]))
            except ValueError as error:
                row.append("-")
                reasons.append(f"{sampling}, {accountant}: {error}")
        rows.append(row)
    _print_table(rows)
    for reason in reasons:
        print(f"  {reason}")
    if len(reasons) == len(_SAMPLINGS) * len(_ACCOUNTANTS):
        raise ValueError("none of the samplings has a solution.")
    print(
        "\nNeighbours. Random allocation and Poisson: a client is added or removed.\n"
        "Shuffled: a client's update becomes zero. Fixed size: it is replaced by\n"
        "another client's, which moves the clipped sum twice as far."
    )


def _solve(missing: str, sampling: str, accountant: str, **given: float) -> float:
    if missing == "noise_multiplier":
        compute = accounting.calibrate_noise_multiplier
        given["target_epsilon"] = given.pop("epsilon")
    elif missing == "rounds":
        compute = accounting.max_rounds
        given["target_epsilon"] = given.pop("epsilon")
    else:
        compute = accounting.epsilon if missing == "epsilon" else accounting.delta
    value = compute(sampling=sampling, accountant=accountant, **given)
    if not value and missing == "rounds":
        raise ValueError("not even one round stays within epsilon at delta.")
    return value


def _print_ledger(delta: float) -> None:
    contents = accounting.PrivacyLedger.read(_LEDGER.value)
    sizes = [entry.cohort_size for entry in contents.entries]
    mechanism = contents.header.get("mechanism", {})
    table = [
        ["ledger", _LEDGER.value[-66:]],
        ["mechanism", mechanism.get("name", "-")],
        ["trust model", mechanism.get("trust_model", "-")],
        ["privacy unit", contents.header.get("privacy_unit", "-")],
        ["runs", str(len(contents.by_run()))],
        ["rounds", str(len(sizes))],
        ["cohort sizes", f"{min(sizes)} to {max(sizes)}" if sizes else "-"],
        ["cut short by a crash", "yes" if contents.truncated else "no"],
        ["head", contents.head],
    ]
    if any(entry.charge is not None for entry in contents.entries):
        # If some entries have none, print the reason instead.
        for name in _ACCOUNTANTS:
            try:
                value = _format_result(contents.accountant().epsilon(delta, name))
            except ValueError as error:
                value = f"- ({error})"
            label = f"epsilon by {name.upper()} at delta = {_format_given(delta)}"
            table.append([label, value])
    if any(entry.local is not None for entry in contents.entries):
        table.append(
            [
                f"local epsilon at delta = {_format_given(delta)}",
                _format_result(contents.local_epsilon(delta)),
            ]
        )
    _print_table(table)


def _format_result(value: float | int | None, name: str = "") -> str:
    if isinstance(value, float):
        # Never less than the computed value.
        return accounting.format_up(value, 4 if name == "delta" else 5)
    return str(value)


def _format_given(value: float) -> str:
    return str(value) if isinstance(value, int) else accounting.format_up(value, 6)


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        print("  " + "  ".join(cells).rstrip())


def run() -> None:
    """Entry point of the installed command."""
    _progress.run(main, __doc__)


if __name__ == "__main__":
    run()
