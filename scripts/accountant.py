r"""Plans the privacy of a run, or reads a ledger.

Give five of the six quantities; the sixth is solved for, under every sampling
and by both accountants, side by side:

    python scripts/accountant.py --num_clients=1000 --clients_per_round=100 \
        --rounds=100 --epsilon=8 --delta=1e-5

Draw epsilon against rounds:

    python scripts/accountant.py --num_clients=1000 --clients_per_round=100 \
        --noise_multiplier=1 --rounds=100 --delta=1e-5 --plot=epsilon.png

Read a ledger, without the model:

    python scripts/accountant.py --ledger=ledger.jsonl --delta=1e-5
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Sequence

from tfdp_fl import _console

_console.load_tensorflow()

from absl import app, flags

from tfdp_fl import accounting
from tfdp_fl.accounting import charge, planning
from tfdp_fl.experiments import plots

# Those that are compared unless told otherwise.
_SAMPLINGS = ("poisson", "fixed_size", "shuffled")
_ACCOUNTANTS = ("rdp", "pld")

# The plan: five of these.
_NUM_CLIENTS = flags.DEFINE_integer(
    "num_clients", None, "N, the number of clients in the population."
)
_CLIENTS_PER_ROUND = flags.DEFINE_integer(
    "clients_per_round", None, "m, the (expected) number of clients per round."
)
_NOISE_MULTIPLIER = flags.DEFINE_float(
    "noise_multiplier",
    None,
    "z, noise stddev on the sum of clipped updates over the clip norm.",
)
_ROUNDS = flags.DEFINE_integer("rounds", None, "T, the number of rounds.")
_EPSILON = flags.DEFINE_float("epsilon", None, "The guarantee at delta.")
_DELTA = flags.DEFINE_float("delta", None, "Between 0 and 1.")

# What is compared.
_SAMPLING = flags.DEFINE_multi_enum(
    "sampling",
    _SAMPLINGS,
    charge.SAMPLINGS,
    "The samplings to compare (the cyclic ones with independent noise, charged "
    "as if every client were in every round).",
)
_ACCOUNTANT = flags.DEFINE_multi_enum(
    "accountant", _ACCOUNTANTS, _ACCOUNTANTS, "The accountants to compare."
)

# What is shown besides.
_PLOT = flags.DEFINE_string(
    "plot", None, "Draw epsilon against rounds into this .png or .pdf file."
)

# Reading a ledger instead.
_LEDGER = flags.DEFINE_string(
    "ledger", None, "Read the epsilon of this ledger at --delta."
)
_GROUPS = {
    "The plan; five of these, and the sixth is solved for": (
        *("num_clients", "clients_per_round", "rounds", "noise_multiplier"),
        *("epsilon", "delta"),
    ),
    "What is compared": ("sampling", "accountant"),
    "What is shown besides": ("plot",),
    "A ledger instead of a plan": ("ledger",),
}


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} is not a flag.")
    plan = planning.Plan(
        num_clients=_NUM_CLIENTS.value,
        clients_per_round=_CLIENTS_PER_ROUND.value,
        noise_multiplier=_NOISE_MULTIPLIER.value,
        rounds=_ROUNDS.value,
        epsilon=_EPSILON.value,
        delta=_DELTA.value,
    )
    try:
        _check_flags(plan)
        if _LEDGER.value:
            _print_ledger(plan.delta)
            return
        solved = _compare(plan)
    except (ImportError, ValueError, accounting.LedgerError) as error:
        raise SystemExit(f"{_console.name()}: {error}") from error
    if _PLOT.value:
        _draw(solved[_SAMPLING.value[0]], _PLOT.value)


def _check_flags(plan: planning.Plan) -> None:
    plan.check()
    if _LEDGER.value:
        others = [
            name
            for name in (
                *planning.QUANTITIES,
                "plot",
            )
            if name != "delta" and flags.FLAGS[name].value not in (None, False)
        ]
        if others:
            raise ValueError(f"--ledger goes with --delta only, not {others}.")
        if plan.delta is None:
            raise ValueError("--ledger needs --delta.")
        if not pathlib.Path(_LEDGER.value).is_file():
            raise ValueError(f"there is no file {_LEDGER.value}.")
        return
    plan.missing  # noqa: B018 - it raises.
    if _PLOT.value:
        plots.pyplot()  # Missed before anything is computed.
        path = pathlib.Path(_PLOT.value)
        if path.suffix not in (".png", ".pdf"):
            raise ValueError(f"--plot must end in .png or .pdf, got {path}.")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--plot's folder {path.parent} does not exist.")


def _compare(plan: planning.Plan) -> dict[str, planning.Plan]:
    """Prints the solved quantity; returns the first accountant's plans."""
    missing = plan.missing
    given = ", ".join(
        f"{name} = {getattr(plan, name):g}"
        for name in planning.QUANTITIES
        if name != missing
    )
    print(f"Given {given}:\n")
    rows, plans, reasons = [], {}, []
    for sampling in _SAMPLING.value:
        row = [sampling]
        for accountant in _ACCOUNTANT.value:
            try:
                solved = planning.solve(plan, sampling, accountant)
                row.append(_show(getattr(solved, missing), missing))
                plans.setdefault(sampling, solved)
            except ValueError as error:
                row.append("-")
                reasons.append(f"{sampling}, {accountant}: {error}")
        rows.append(row)
    header = [missing, *(f"by {a.upper()}" for a in _ACCOUNTANT.value)]
    _print_table([header, *rows])
    for reason in reasons:
        print(f"  {reason}")
    if not plans:
        raise ValueError("none of the samplings has a solution.")
    print(
        "\nPoisson and shuffled: a client is added or removed. Fixed size: a "
        "client is\nreplaced by another, which moves the clipped sum twice as "
        "far."
    )
    for sampling in _SAMPLING.value:
        plans.setdefault(sampling, next(iter(plans.values())))
    return plans


def _print_ledger(delta: float) -> None:
    contents = accounting.PrivacyLedger.read(_LEDGER.value)
    sizes = [entry.cohort_size for entry in contents.entries]
    mechanism = contents.header.get("mechanism", {})
    table = [
        ["ledger", _LEDGER.value[-66:]],
        ["mechanism", mechanism.get("name", "-")],
        ["guarantee", mechanism.get("guarantee", "-")],
        ["runs", str(len(contents.by_run()))],
        ["rounds", str(len(sizes))],
        ["cohort sizes", f"{min(sizes)} to {max(sizes)}" if sizes else "-"],
        ["cut short by a crash", "yes" if contents.truncated else "no"],
        ["head", contents.head],
    ]
    if any(entry.charge is not None for entry in contents.entries):
        for name in _ACCOUNTANT.value:
            try:
                value = _show(contents.accountant().epsilon(delta, name))
            except ValueError as error:
                value = f"- ({error})"
            label = f"epsilon by {name.upper()} at delta = {delta:g}"
            table.append([label, value])
    if any(entry.local is not None for entry in contents.entries):
        table.append(
            [
                f"local epsilon at delta = {delta:g}",
                _show(contents.local_epsilon(delta)),
            ]
        )
    _print_table(table)


def _draw(plan: planning.Plan, path: str) -> None:
    pyplot = plots.pyplot()
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for sampling in _SAMPLING.value:
        for accountant in _ACCOUNTANT.value:
            points = 200 if accountant == "rdp" else 12
            try:
                curve = list(planning.epsilon_curve(plan, sampling, accountant, points))
            except ValueError:
                continue  # The table above says why.
            curve = [(t, e) for t, e in curve if math.isfinite(e)]
            if curve:
                axes.plot(
                    *zip(*curve, strict=True),
                    "-" if accountant == "rdp" else "o--",
                    markersize=3,
                    label=f"{sampling}, {accountant.upper()}",
                )
    if plan.epsilon:
        axes.axhline(plan.epsilon, color="gray", linewidth=0.8)
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"epsilon at delta = {plan.delta:g}")
    axes.set_title(
        f"N = {plan.num_clients}, m = {_show(plan.clients_per_round)}, "
        f"z = {_show(plan.noise_multiplier)}"
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    print(f"\nepsilon against rounds: {path}")


def _show(value: float | int | None, name: str = "") -> str:
    if isinstance(value, float):
        if name == "delta":
            return f"{value:.4g}"
        if name == "noise_multiplier":  # Never less than was solved for.
            return f"{math.ceil(value * 1e5) / 1e5:.5f}"
        return f"{value:.4f}" if 0.1 <= abs(value) < 1e6 else f"{value:.4g}"
    return str(value)


def _print_table(rows: Iterable[Sequence[str]]) -> None:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        print("  " + "  ".join(cells).rstrip())


def run() -> None:
    """Entry point of the installed command."""
    _console.run(main, __doc__, _GROUPS)


if __name__ == "__main__":
    run()
