"""How a privacy statement is worded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import dp_accounting

if TYPE_CHECKING:
    from tfdp_fl.accounting.statement import StatementFacts

SAMPLING = {
    "poisson": (
        "each of the N clients took part in a round with probability m/N, "
        "independently of the others"
    ),
    "fixed_size": ("each round drew exactly m of the N clients without replacement"),
    "shuffled": "each pass went once through all N clients in shuffled order",
    "cyclic": (
        "the N clients were divided into fixed groups, which took part in "
        "turn, with m clients a round"
    ),
    "separated": (
        "of the N clients at most m a round took part, as they came, and the "
        "same one not too soon again"
    ),
}

_RELATION = {
    "ADD_OR_REMOVE_ONE": "one {unit} is added or removed",
    "REPLACE_ONE": "one {unit} is replaced by another",
    "REPLACE_SPECIAL": "one {unit} is replaced by nothing, in its place",
}

# Those that make epsilon smaller for a draw that nobody knows.
SECRET = ("poisson", "fixed_size")


def summary(
    facts: StatementFacts,
    values: dict[str, float | None],
    best: float,
    relation: dp_accounting.NeighboringRelation,
    delta: float,
) -> str:
    """Returns the paragraph that says what was guaranteed, and to whom."""
    after = facts.search or f"after {_count(facts.rounds, 'round')} of training"
    if facts.rounds_of_others:
        after += f" and {facts.rounds_of_others} of other runs on the same clients"
    if not math.isfinite(best):
        why = "no finite epsilon follows from the noise that was added"
        if facts.guarantee == "none":
            why = "the mechanism adds no noise"
        return (
            "This model was trained with no differential-privacy guarantee: "
            f"{after}, {why}."
        )
    neighbours = _RELATION[relation.name].format(unit=facts.unit)
    if facts.guarantee == "central":
        released = "the sequence of all models published"
        if facts.search:
            released = "what was chosen, with its model,"
        return (
            f"Central differential privacy per {facts.unit}: {after}, {released} is "
            f"(epsilon, delta)-differentially private with epsilon = {_up(best)} at "
            f"delta = {delta:g} ({_by_accountants(facts, values)}). Two data sets are "
            f"neighbours when {neighbours}; all data of a {facts.unit} count as one."
        )
    kind = "Local differential privacy per client"
    if facts.guarantee == "record":
        kind = "Differential privacy per record of a client"
    times = ""
    if facts.max_participations is not None:
        times = f"(it took part in {_count(facts.max_participations, 'round')}) "
    text = (
        f"{kind}: {after}, everything that the most exposed client sent {times}is "
        f"({_up(best)}, {delta:g})-differentially private, for data sets that are "
        f"neighbours when {neighbours}."
    )
    central = values["central_epsilon"]
    if central is not None:
        gives = "no finite central epsilon"
        if math.isfinite(central):
            gives = (
                f"a central epsilon of {_up(central)} at delta = {delta:g}, for the "
                "same neighbours"
            )
            if facts.sampling in SECRET:
                gives += ", as long as who took part in which round stays secret"
        text += (
            f" Against those who see only the averages, the same noise gives {gives}."
        )
    if facts.implied_delta is not None:
        given = ""
        if facts.implied_epsilon is not None:
            given = f"epsilon = {facts.implied_epsilon:g} and "
        text += (
            f" The mechanism's own formula was given {given}a constant that implies "
            f"delta = {facts.implied_delta:.3g}."
        )
    return text


def _by_accountants(facts: StatementFacts, values: dict[str, float | None]) -> str:
    rdp, pld = values["epsilon_rdp"], values["epsilon_pld"]
    if pld is None:
        return "by Renyi accounting, an upper bound"
    by_pld = f"by privacy loss distributions {_up(pld)}"
    if facts.pld_is_exact:
        by_pld = f"exactly, as one Gaussian, {_up(pld)}"
    if rdp is None:
        return f"{by_pld}, an upper bound"
    return f"{by_pld}, by Renyi accounting {_up(rdp)}; each is an upper bound"


def meaning(facts: StatementFacts, best: float, delta: float) -> str:
    """Returns the paragraph that says what epsilon means in plain words."""
    if not math.isfinite(best):
        return (
            f"In plain words: what a single {facts.unit} contributed may be "
            "recoverable from the model, and nothing here bounds how much."
        )
    factor = f"{math.exp(best):.3g}" if best < 700 else f"exp({_up(best)})"
    seen, unknown = "what a client sent", ""
    if facts.guarantee == "central":
        seen = "the models"
        if facts.sampling in SECRET:
            unknown = " and do not know who took part in which round"
    return (
        "In plain words: from one of two neighbouring data sets to the other, the "
        f"probability of anything that {seen} can show changes by a factor of at most "
        f"exp(epsilon) = {factor}, apart from delta = {delta:g}. This holds against "
        "observers with any other knowledge, as long as they cannot foretell the "
        f"noise{unknown}."
    )


def secrecy(facts: StatementFacts, known: float | None, delta: float) -> str:
    """Returns what a central guarantee needs to be kept secret, and without it."""
    if facts.sampling not in SECRET:
        return (
            "Who took part in which round need not be secret for this: no "
            "amplification by sampling is claimed, and against an observer who knows "
            "it epsilon is the same."
        )
    if known is None:
        without = "No figure that holds without this secrecy was computed."
    elif math.isinf(known):
        without = "Without this secrecy no finite epsilon holds."
    else:
        without = (
            "Against an observer who knows it, such as a server that samples the "
            f"clients, epsilon is {_up(known)} at delta = {delta:g}, which counts "
            "every round in which such a client could have been."
        )
    return (
        "Who took part in which round must stay secret for this epsilon, because it "
        "counts on the sampling. Keep secret with it all that says so: checkpoints, "
        "which hold how often each client took part, warnings and logs that name "
        "clients, a seed, and the records of a server that samples them. Progress "
        "lines, and the ledger of a run without a seed, hold only how many took part. "
        f"{without}"
    )


def how(facts: StatementFacts, content: dict[str, Any]) -> str:
    """Returns the paragraph on mechanism, sampling and accounting."""
    expected, drawn = content["clients_per_round"], content["cohort_sizes"]
    text = facts.mechanism
    if facts.mechanism_description:
        text += f": {facts.mechanism_description.rstrip('.')}"
    text += ". "
    if content["mechanism_parameters"]:
        given = content["mechanism_parameters"].items()
        parameters = ", ".join(f"{key} = {_short(value)}" for key, value in given)
        text += f"Parameters: {parameters}. "
    sizes = " to ".join(
        dict.fromkeys((_number(expected["min"]), _number(expected["max"])))
    )
    populations = ", then ".join(map(str, content["populations"]))
    text += (
        f"Sampling ({facts.sampling}): {SAMPLING[facts.sampling]}, with N = "
        f"{populations} and m = {sizes}"
    )
    if drawn["count"]:
        text += (
            f"; the {_count(drawn['count'], 'cohort')} really drawn had "
            f"{_number(drawn['min'])} to {_number(drawn['max'])} clients, "
            f"{drawn['mean']:.4g} on average"
        )
    if not content["has_guarantee"]:
        return f"{text}."
    if facts.guarantee != "central":
        return (
            f"{text}. Epsilon was computed exactly (analytic Gaussian) from what "
            "each client itself released; sampling does not make it smaller."
        )
    package = f"dp-accounting {content['dp_accounting']}"
    by = []
    if content["epsilon_pld"] is not None:
        by.append(
            "the exact conversion of one Gaussian (Balle & Wang 2018)"
            if facts.pld_is_exact
            else f"the privacy loss distributions of {package}"
        )
    if content["epsilon_rdp"] is not None:
        by.append(f"the Renyi accounting of {package}")
    return (
        f"{text}. Epsilon was computed for the sampling that was done, by "
        f"{'; and by '.join(by)}."
    )


def _up(value: float) -> str:
    """Writes an epsilon with four significant digits, rounded up."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    # A hair of tolerance, or 2.5 would become 2.501.
    rounded = math.ceil(value / unit - 1e-9) * unit
    return f"{rounded:.4g}" if rounded < 1e4 else f"{rounded:.0f}"


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
