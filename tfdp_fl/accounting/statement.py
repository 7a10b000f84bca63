"""The paragraph that says what was guaranteed, to whom, and what was not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dp_accounting

from tfdp_fl import _json, _validate
from tfdp_fl.accounting import events
from tfdp_fl.accounting.caveats import CAVEATS

GUARANTEES = ("central", "local", "record", "none")
FORMATS = ("text", "dict", "markdown")

_SAMPLING = {
    "poisson": (
        "each of the N clients took part in a round with probability m/N, "
        "independently of the others"
    ),
    "fixed_size": (
        "each round drew exactly m of the N clients without replacement"
    ),
    "shuffled": "each pass went once through all N clients in shuffled order",
    "cyclic": (
        "the N clients were divided into fixed groups, which took part in "
        "turn, with m clients a round"
    ),
    "separated": (
        "of the N clients at most m a round took part, as they came, and the "
        "same one not too soon again"
    ),
    "cyclic_poisson": (
        "the N clients were divided into fixed groups, which took part in "
        "turn, each client of a group with the same probability, independently "
        "of the others"
    ),
}

_RELATION = {
    "ADD_OR_REMOVE_ONE": "one {unit} is added or removed",
    "REPLACE_ONE": "one {unit} is replaced by another",
    "REPLACE_SPECIAL": "one {unit} is replaced by nothing, in its place",
}

Epsilon = float | Callable[[float], float | None] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatementFacts:
    """What a statement is made of.

    Wherever an epsilon is asked for, a callable of delta does as well; None
    leaves it out.

    Attributes:
      guarantee: "central" (the server is trusted), "local" (it is not),
        "record" (per example, NbAFL) or "none".
      mechanism: The mechanism's name.
      mechanism_description: One sentence on what it does.
      mechanism_parameters: Its parameters, for the record.
      unit: What is protected as a whole; "client" or "record".
      relation: The neighbouring relation; default that of the sampling.
      sampling: One of `charge.SAMPLINGS`, or "separated".
      num_clients: N.
      populations: N of every population there were rounds on, in their order,
        where there were several.
      num_records: The number of records of all clients, if known; what delta
        is compared with where a record is protected.
      clients_per_round: m, or the expected sizes of all rounds.
      cohort_sizes: The sizes of the cohorts that were really drawn.
      rounds: How many rounds were released.
      rounds_of_others: How many rounds of other runs the epsilons count as
        well.
      epsilon_rdp: Central epsilon by Renyi accounting.
      epsilon_pld: Central epsilon by privacy loss distributions.
      rdp_computed_by: What computed `epsilon_rdp`, in words.
      pld_computed_by: What computed `epsilon_pld`, in words.
      epsilon_local: Local (or per-record) epsilon of the client that spent
        most.
      max_participations: In how many rounds the most-seen client took part.
      central_epsilon: For a local guarantee: what the same noise gives against
        those who see only the averages.
      implied_epsilon: For NbAFL: the epsilon its formula was given.
      implied_delta: For NbAFL: 1.25 exp(-c^2/2), implied by its constant.
      caveats: Keys of `CAVEATS` that hold.
      audit: Says at a delta what an audit of this run found, if there was one.
    """

    guarantee: str
    mechanism: str
    mechanism_description: str = ""
    mechanism_parameters: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )
    unit: str = "client"
    relation: dp_accounting.NeighboringRelation | None = None
    sampling: str = "poisson"
    num_clients: int = 1
    populations: Sequence[int] = ()
    num_records: int | None = None
    clients_per_round: float | Sequence[float] = 1
    cohort_sizes: Sequence[int] = ()
    rounds: int = 0
    rounds_of_others: int = 0
    epsilon_rdp: Epsilon = None
    epsilon_pld: Epsilon = None
    rdp_computed_by: str = "tfdp_fl's own Renyi accounting"
    pld_computed_by: str = "the privacy loss distributions of dp-accounting"
    epsilon_local: Epsilon = None
    max_participations: int | None = None
    central_epsilon: Epsilon = None
    implied_epsilon: float | None = None
    implied_delta: float | None = None
    caveats: tuple[str, ...] = ()
    audit: Callable[[float], str] | None = None

    def __post_init__(self):
        _validate.one_of(GUARANTEES, guarantee=self.guarantee)
        _validate.one_of(_SAMPLING, sampling=self.sampling)
        _validate.positive_integer(num_clients=self.num_clients)
        _validate.non_negative_integer(rounds=self.rounds)
        _validate.non_negative_integer(rounds_of_others=self.rounds_of_others)
        for caveat in self.caveats:
            _validate.one_of(CAVEATS, caveats=caveat)


def privacy_statement(
    facts: StatementFacts, delta: float, format: str = "text"
) -> str | dict[str, Any]:
    """Returns the privacy statement of a run.

    Every epsilon in the text is rounded up, never down.

    Args:
      facts: What ran.
      delta: At which the epsilons are stated.
      format: "text" (paragraphs), "markdown" (a heading, the paragraphs, a
        table of facts) or "dict" (the facts and sentences as JSON values;
        an infinite epsilon is None, with "has_guarantee" False).
    """
    delta = _validate.inside_unit_interval(delta=delta)
    _validate.one_of(FORMATS, format=format)
    content = _content(facts, delta)
    if format == "dict":
        return content
    if format == "markdown":
        return _markdown(content)
    paragraphs = [
        content["summary"],
        content["meaning"],
        content["how"],
    ]
    if content["caveats"]:
        paragraphs.append(
            "To be read with it: " + " ".join(content["caveats"].values())
        )
    return "\n\n".join(p for p in paragraphs if p)


def _content(facts: StatementFacts, delta: float) -> dict[str, Any]:
    values = {
        name: _value(getattr(facts, name), delta)
        for name in (
            "epsilon_rdp",
            "epsilon_pld",
            "epsilon_local",
            "central_epsilon",
        )
    }
    local = facts.guarantee in ("local", "record")
    stated = [
        value
        for name in (
            ("epsilon_local",) if local else ("epsilon_pld", "epsilon_rdp")
        )
        if (value := values[name]) is not None
    ]
    # Both accountants give upper bounds: the lower one holds.
    best = min(stated, default=math.inf)
    if facts.guarantee == "none":
        best = math.inf
    relation = facts.relation
    if relation is None:
        relation = (
            dp_accounting.NeighboringRelation.REPLACE_ONE
            if local or facts.sampling == "fixed_size"
            else dp_accounting.NeighboringRelation.REPLACE_SPECIAL
            if facts.sampling in ("cyclic", "cyclic_poisson", "separated")
            else dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        )
    populations = list(facts.populations) or [facts.num_clients]
    caveats = dict.fromkeys(facts.caveats)
    if math.isfinite(best):
        if facts.sampling == "shuffled" and not local:
            caveats.setdefault("shuffled_zero_out", None)
        if facts.sampling in ("cyclic", "cyclic_poisson") and not local:
            caveats.setdefault("cyclic_zero_out", None)
            caveats.setdefault(
                "cyclic_no_amplification"
                if facts.sampling == "cyclic"
                else "cyclic_poisson_secrecy",
                None,
            )
        if facts.sampling == "separated" and not local:
            caveats.setdefault("separated_zero_out", None)
        if facts.sampling == "fixed_size" and not local:
            caveats.setdefault("fixed_size_population_known", None)
        if facts.guarantee == "local":
            caveats.setdefault("local_not_central", None)
        if facts.guarantee == "record":
            caveats.setdefault("per_record", None)
        if facts.sampling == "poisson" and not local:
            caveats.setdefault("population_stated", None)
        if facts.guarantee == "record":
            if facts.num_records and delta * facts.num_records >= 1:
                caveats.setdefault("delta_not_below_one_over_records", None)
        elif delta * max(populations) >= 1:
            caveats.setdefault("delta_not_below_one_over_n", None)
        if best > 10:
            caveats.setdefault("epsilon_large", None)
    content: dict[str, Any] = {
        "guarantee": facts.guarantee,
        "has_guarantee": math.isfinite(best),
        "unit": facts.unit,
        "relation": relation.name,
        "delta": delta,
        "epsilon": _json.finite(best),
        **{name: _json.finite(value) for name, value in values.items()},
        "implied_epsilon": facts.implied_epsilon,
        "implied_delta": facts.implied_delta,
        "rounds": facts.rounds,
        "rounds_of_others": facts.rounds_of_others,
        "sampling": facts.sampling,
        "num_clients": facts.num_clients,
        "populations": populations,
        "num_records": facts.num_records,
        "clients_per_round": _range(facts.clients_per_round),
        "cohort_sizes": _range(facts.cohort_sizes),
        "max_participations": facts.max_participations,
        "mechanism": facts.mechanism,
        "mechanism_description": facts.mechanism_description,
        "mechanism_parameters": {
            key: _json.plain(value)
            for key, value in facts.mechanism_parameters.items()
        },
        "dp_accounting": events.dp_accounting_version(),
        "caveats": {key: CAVEATS[key] for key in caveats},
    }
    content["summary"] = _summary(facts, content, values, best, relation, delta)
    content["meaning"] = _meaning(facts, best, delta)
    content["how"] = _how(facts, content)
    if facts.audit is not None:
        content["caveats"]["audited"] = facts.audit(delta)
    return content


def _summary(facts, content, values, best, relation, delta) -> str:
    after = f"after {_count(facts.rounds, 'round')} of training"
    if facts.rounds_of_others:
        after += (
            f" and {facts.rounds_of_others} of other runs on the same clients"
        )
    if not math.isfinite(best):
        why = (
            "the mechanism adds no noise"
            if facts.guarantee == "none"
            else "no finite epsilon follows from the noise that was added"
        )
        return (
            "This model was trained with no differential-privacy guarantee: "
            f"{after}, {why}."
        )
    neighbours = _RELATION[relation.name].format(unit=facts.unit)
    if facts.guarantee == "central":
        by = _by_accountants(facts, values)
        return (
            f"Central differential privacy per {facts.unit}: {after}, "
            "the sequence of all models published is (epsilon, "
            f"delta)-differentially private with epsilon = {_up(best)} at "
            f"delta = {delta:g}{by}, for data sets that are neighbours when "
            f"{neighbours} (the whole of a {facts.unit}'s data counts as one)."
        )
    kind = {
        "local": "Local differential privacy per client",
        "record": "Differential privacy per record of a client",
    }[facts.guarantee]
    text = (
        f"{kind}: {after}, everything that the most exposed client sent "
        + (
            f"(it took part in {_count(facts.max_participations, 'round')}) "
            if facts.max_participations is not None
            else ""
        )
        + f"is ({_up(best)}, {delta:g})-differentially private, for data sets "
        f"that are neighbours when {neighbours}."
    )
    central = values["central_epsilon"]
    if central is not None:
        text += (
            " Against those who see only the averages, the same noise gives "
            + (
                f"a central epsilon of {_up(central)} at delta = {delta:g}, "
                "for the same neighbours."
                if math.isfinite(central)
                else "no finite central epsilon."
            )
        )
    if facts.implied_delta is not None:
        text += (
            " The mechanism's own formula was given "
            + (
                f"epsilon = {facts.implied_epsilon:g} and "
                if facts.implied_epsilon is not None
                else ""
            )
            + f"a constant that implies delta = {facts.implied_delta:.3g}."
        )
    return text


def _by_accountants(facts, values) -> str:
    rdp, pld = values["epsilon_rdp"], values["epsilon_pld"]
    exact = "exact" in facts.pld_computed_by
    by_pld = (
        f"exactly, as one Gaussian, {_up(pld)}"
        if exact and pld is not None
        else f"by privacy loss distributions {_up(pld)}"
        if pld is not None
        else ""
    )
    if rdp is not None and pld is not None:
        return (
            f" ({by_pld}, by Renyi accounting {_up(rdp)}; each is an upper "
            "bound)"
        )
    if pld is not None:
        return f" ({by_pld}, an upper bound)"
    return " (by Renyi accounting, an upper bound)"


def _meaning(facts, best, delta) -> str:
    if not math.isfinite(best):
        return (
            f"In plain words: what a single {facts.unit} contributed may be "
            "recoverable from the model, and nothing here bounds how much."
        )
    factor = f"{math.exp(best):.3g}" if best < 700 else f"exp({_up(best)})"
    seen = (
        "what a client sent"
        if facts.guarantee in ("local", "record")
        else "the models"
    )
    return (
        f"In plain words: whatever anyone concludes from {seen}, with any "
        "other knowledge, as long as they cannot foretell the noise, the odds "
        "they give it can differ by a factor of at most exp(epsilon) = "
        f"{factor} because of one "
        f"{facts.unit}'s data, except for events of probability about delta = "
        f"{delta:g}."
    )


def _how(facts, content) -> str:
    expected, drawn = content["clients_per_round"], content["cohort_sizes"]
    text = facts.mechanism
    if facts.mechanism_description:
        text += f": {facts.mechanism_description.rstrip('.')}"
    text += ". "
    if content["mechanism_parameters"]:
        parameters = ", ".join(
            f"{key} = {_short(value)}"
            for key, value in content["mechanism_parameters"].items()
        )
        text += f"Parameters: {parameters}. "
    sizes = (
        _number(expected["min"])
        if expected["min"] == expected["max"]
        else f"{_number(expected['min'])} to {_number(expected['max'])}"
    )
    text += (
        f"Sampling ({facts.sampling}): {_SAMPLING[facts.sampling]}, with N = "
        + ", then ".join(map(str, content["populations"]))
        + f" and m = {sizes}"
    )
    if drawn["count"]:
        text += (
            f"; the {_count(drawn['count'], 'cohort')} really drawn had "
            f"{_number(drawn['min'])} to {_number(drawn['max'])} clients, "
            f"{drawn['mean']:.4g} on average"
        )
    if not content["has_guarantee"]:
        return f"{text}."
    if facts.guarantee == "central":
        by = [
            computed_by
            for name, computed_by in (
                ("epsilon_pld", facts.pld_computed_by),
                ("epsilon_rdp", facts.rdp_computed_by),
            )
            if content[name] is not None
        ]
        return (
            f"{text}. Epsilon was computed for the sampling that was done, by "
            f"{'; and by '.join(by)}."
        )
    return (
        f"{text}. Epsilon was computed exactly (analytic Gaussian) from what "
        "each client itself released; sampling is not counted in its favour."
    )


def _markdown(content: dict[str, Any]) -> str:
    rows = {
        "Guarantee": content["guarantee"]
        if content["has_guarantee"]
        else "no differential-privacy guarantee",
        "Unit of privacy": content["unit"],
        "Neighbouring relation": content["relation"].lower().replace("_", " "),
        "delta": f"{content['delta']:g}",
        "epsilon (RDP)": content["epsilon_rdp"],
        "epsilon (PLD)": content["epsilon_pld"],
        "epsilon (local)": content["epsilon_local"],
        "epsilon (central, same noise)": content["central_epsilon"],
        "Rounds": content["rounds"],
        "Sampling": content["sampling"],
        "Clients (N)": ", then ".join(map(str, content["populations"])),
        "Rounds of other runs": content["rounds_of_others"] or None,
        "Clients per round, planned (m)": _range_text(
            content["clients_per_round"]
        ),
        "Cohort sizes drawn": _range_text(content["cohort_sizes"]),
        "Most participations of a client": content["max_participations"],
        "Mechanism": content["mechanism"],
        **{
            f"`{key}`": _short(value)
            for key, value in content["mechanism_parameters"].items()
        },
    }
    lines = ["# Privacy statement", "", content["summary"], ""]
    lines += [content["meaning"], "", content["how"], ""]
    lines += ["| Fact | Value |", "|---|---|"]
    for name, value in rows.items():
        if value is None or value == "":
            continue
        if name.startswith("epsilon"):
            value = _up(value)
        cell = str(value).replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {cell} |")
    if content["caveats"]:
        lines += ["", "## To be read with it", ""]
        lines += [f"- {sentence}" for sentence in content["caveats"].values()]
    return "\n".join(lines) + "\n"


def _value(epsilon: Epsilon, delta: float) -> float | None:
    value = epsilon(delta) if callable(epsilon) else epsilon
    return None if value is None else float(value)


def _range(sizes: float | Sequence[float]) -> dict[str, Any]:
    values = list(sizes) if isinstance(sizes, Sequence) else [sizes]
    if not values:
        return {"count": 0, "min": None, "max": None, "mean": None}
    return {
        "count": len(values),
        "min": float(min(values)),
        "max": float(max(values)),
        "mean": float(math.fsum(values) / len(values)),
    }


def _range_text(sizes: dict[str, Any]) -> str:
    if not sizes["count"]:
        return ""
    if sizes["min"] == sizes["max"]:
        return _number(sizes["min"])
    return (
        f"{_number(sizes['min'])} to {_number(sizes['max'])} "
        f"(mean {sizes['mean']:.4g})"
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
