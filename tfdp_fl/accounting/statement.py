"""The privacy statement: what was guaranteed, to whom, and what was not."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdp_fl import _files, _validate
from tfdp_fl.accounting import charge, rounding
from tfdp_fl.terms import Json, PrivacyUnit, Sampling, TrustModel

if TYPE_CHECKING:
    import jinja2

# Self-contained sentences by key.
_TEXT = pathlib.Path(__file__).with_name("caveats.txt").read_text("utf-8")

CAVEATS: dict[str, str] = {
    key: " ".join(sentence.split())
    for key, sentence in re.findall(r"^(\w+): (.*(?:\n .*)*)", _TEXT, re.MULTILINE)
}


def add_caveats(sentences: Mapping[str, str]) -> None:
    """Adds a mechanism's own caveats to `CAVEATS`.

    Args:
      sentences: Full sentences by key.

    Raises:
      ValueError: A key already has another sentence.
    """
    for key, sentence in sentences.items():
        if CAVEATS.setdefault(key, sentence) != sentence:
            raise ValueError(
                f"own_caveats must have new keys, got {key!r}, which stands "
                f"for: {CAVEATS[key]}"
            )


FORMATS = ("text", "dict")

# The caveats of each sampling, for central guarantees.
_CAVEATS_OF_SAMPLING = {
    "poisson": ("population_stated",),
    "fixed_size": ("fixed_size_population_known",),
    "random_allocation": ("population_stated", "allocation_charged_whole"),
    "shuffled": ("shuffled_zero_out",),
    "cyclic": ("cyclic_zero_out", "cyclic_no_amplification"),
    "min_separation": ("separated_zero_out",),
}

_EPSILONS = (
    *("epsilon_rdp", "epsilon_pld", "epsilon_local", "central_epsilon"),
    "epsilon_if_participation_is_known",
)

Epsilon = float | Callable[[float], float | None] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatementFacts:
    """The facts from which a statement is made.

    An epsilon may also be given as a callable of delta; None leaves it out.

    Attributes:
      trust_model: "central" (the server is trusted), "local" (it is not) or
        "none".
      mechanism: The mechanism's name.
      mechanism_description: One sentence about what it does.
      mechanism_parameters: Its parameters, for the record.
      privacy_unit: What is protected as a whole: a "client" or a "record" (NbAFL).
      sampling: One of `charge.SAMPLINGS`, or "min_separation".
      other_samplings: Those of other runs' rounds that are included in the epsilons
        (`PrivacyAccountant.samplings`). They may weaken the neighbouring relation, and
        need secrecy.
      num_clients: The number of clients, N.
      populations: If there were several populations, the N of each, in order.
      num_records: The number of records of all clients, if known; delta is compared
        with it if a record is protected.
      clients_per_round: m, or the expected cohort sizes of all rounds.
      cohort_sizes: The sizes of the cohorts that were actually drawn.
      rounds: The number of released rounds.
      planned_rounds: The number of rounds that might have run, if larger.
      epsilon_of_planned_rounds: The epsilon of all of them, which holds if training
        ended sooner because of what the models showed.
      rounds_of_others: The number of rounds of other runs included in the epsilons.
      evaluated: The N of each private release of clients' metrics that is included.
      epsilon_rdp: Central epsilon by Renyi accounting.
      epsilon_pld: Central epsilon by privacy loss distributions.
      pld_is_exact: Whether `epsilon_pld` is the exact one of a Gaussian.
      epsilon_if_participation_is_known: Central epsilon against an observer who
        knows who took part in which round; required if sampling amplifies.
      epsilon_local: Local (or per-record) epsilon of the client that spent
        most.
      max_participations: The number of rounds of the client that took part most often.
      central_epsilon: For a local guarantee: the epsilon against anyone who sees only
        the averages.
      implied_epsilon: For NbAFL: the epsilon given to its formula.
      implied_delta: For NbAFL: 1.25 exp(-c^2/2), implied by its constant.
      search: For the best of a search, a description of the search.
      caveats: Keys of `CAVEATS` that apply.
      audit: Describes, at a delta, the result of this run's audit, if there was one.
    """

    trust_model: str
    mechanism: str
    mechanism_description: str = ""
    mechanism_parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    privacy_unit: str = PrivacyUnit.CLIENT
    sampling: str = "poisson"
    other_samplings: Sequence[str] = ()
    num_clients: int = 1
    populations: Sequence[int] = ()
    num_records: int | None = None
    clients_per_round: float | Sequence[float] = 1
    cohort_sizes: Sequence[int] = ()
    rounds: int = 0
    planned_rounds: int | None = None
    epsilon_of_planned_rounds: Epsilon = None
    rounds_of_others: int = 0
    evaluated: Sequence[int] = ()
    epsilon_rdp: Epsilon = None
    epsilon_pld: Epsilon = None
    pld_is_exact: bool = False
    epsilon_if_participation_is_known: Epsilon = None
    epsilon_local: Epsilon = None
    max_participations: int | None = None
    central_epsilon: Epsilon = None
    implied_epsilon: float | None = None
    implied_delta: float | None = None
    search: str = ""
    caveats: tuple[str, ...] = ()
    audit: Callable[[float], str] | None = None

    def __post_init__(self):
        _validate.one_of(tuple(TrustModel), trust_model=self.trust_model)
        _validate.one_of(tuple(PrivacyUnit), privacy_unit=self.privacy_unit)
        _validate.one_of(_CAVEATS_OF_SAMPLING, sampling=self.sampling)
        for sampling in self.other_samplings:
            _validate.one_of(_CAVEATS_OF_SAMPLING, other_samplings=sampling)
        _validate.positive_integer(num_clients=self.num_clients)
        _validate.non_negative_integer(rounds=self.rounds)
        _validate.non_negative_integer(rounds_of_others=self.rounds_of_others)
        for caveat in self.caveats:
            _validate.one_of(CAVEATS, caveats=caveat)


def privacy_statement(
    facts: StatementFacts, delta: float, format: str = "text"
) -> str | Json:
    """Returns the privacy statement of a run.

    Every epsilon in the text is rounded up, never down.

    Args:
      facts: The facts about the run and its cost.
      delta: The delta at which the epsilons are stated.
      format: "text" (paragraphs, in lines of at most 80 characters) or "dict" (the
        facts and sentences as JSON values; an infinite epsilon is None, with
        "has_guarantee" False;
        "epsilon_if_participation_is_known" is the epsilon that holds without the
        secrecy of "secrecy").
    """
    _validate.instance_of(StatementFacts, facts=facts)
    delta = _validate.inside_unit_interval(delta=delta)
    _validate.one_of(FORMATS, format=format)
    content = _content(facts, delta)
    if format == "dict":
        return content
    paragraphs = [content[name] for name in ("summary", "meaning", "secrecy", "how")]
    if content["caveats"]:
        paragraphs.append(
            "To be read with it: " + " ".join(content["caveats"].values())
        )
    return "\n\n".join(wrap(paragraph) for paragraph in paragraphs if paragraph)


def wrap(paragraph: str) -> str:
    """Returns a paragraph in lines of at most 80 characters."""
    return textwrap.fill(
        paragraph, width=80, break_long_words=False, break_on_hyphens=False
    )


def _content(facts: StatementFacts, delta: float) -> Json:
    values = {name: _value(getattr(facts, name), delta) for name in _EPSILONS}
    local = facts.trust_model == TrustModel.LOCAL
    names = ("epsilon_local",) if local else ("epsilon_pld", "epsilon_rdp")
    epsilons = [value for name in names if (value := values[name]) is not None]
    # Both accountants give upper bounds, so the smaller one is valid.
    best = min(epsilons, default=math.inf)
    if facts.trust_model == TrustModel.NONE:
        best = math.inf
    central = facts.trust_model == TrustModel.CENTRAL and math.isfinite(best)
    epsilon_if_known = values["epsilon_if_participation_is_known"] if central else None
    samplings = dict.fromkeys([facts.sampling, *facts.other_samplings])
    secret = [each for each in samplings if each in charge.AMPLIFIED]
    if central and not secret:
        epsilon_if_known = best
    elif epsilon_if_known is not None:
        epsilon_if_known = max(epsilon_if_known, best)
    values["epsilon_if_participation_is_known"] = epsilon_if_known
    # For a local guarantee, any two data sets of a client are neighbours.
    relation = charge.relation_of(*(("fixed_size",) if local else samplings))
    populations = list(facts.populations) or [facts.num_clients]
    # Clients in an evaluation are protected too, so delta must also suit their number.
    protected = [*populations, *facts.evaluated]
    implied = _implied_caveats(facts, delta, best, protected)
    planned = None
    if facts.planned_rounds is not None and math.isfinite(best):
        planned = _value(facts.epsilon_of_planned_rounds, delta)
        planned = None if planned is None else max(planned, best)
    content: Json = {
        **vars(facts),
        "epsilon_of_planned_rounds": _files.to_finite(planned),
        "has_guarantee": math.isfinite(best),
        "relation": relation.name,
        "delta": delta,
        "epsilon": _files.to_finite(best),
        **{name: _files.to_finite(value) for name, value in values.items()},
        "populations": populations,
        "clients_per_round": _range(facts.clients_per_round),
        "cohort_sizes": _range(facts.cohort_sizes),
        "mechanism_parameters": {
            name: _show(name, value)
            for name, value in facts.mechanism_parameters.items()
            if value is not None
        },
        "audit": None if facts.audit is None else facts.audit(delta),
        "dp_accounting": charge.dp_accounting_version(),
        "caveats": {
            key: CAVEATS[key] for key in _merge_caveats([*facts.caveats, *implied])
        },
    }
    context = {
        **content,
        "facts": facts,
        "neighbours": relation.value,
        "secret": secret,
        "at_delta": f"delta = {rounding.format_up(delta, 6)}",
        "delta_text": rounding.format_up(delta, 6),
        "best": best,
        "known": epsilon_if_known,
        "planned": planned,
        "central_epsilon": values["central_epsilon"],
        "factor": rounding.format_factor_up(best),
    }
    template = _template()
    for name, block in template.blocks.items():
        content[name] = " ".join("".join(block(template.new_context(context))).split())
    if not central:
        content["secrecy"] = ""
    if facts.audit is not None:
        content["caveats"]["audited"] = content["audit"]
    return content


def _merge_caveats(keys: Iterable[str]) -> list[str]:
    """Returns each key once; one key for both of two that contradict each other."""
    merged = list(dict.fromkeys(keys))
    released, kept = "non_trainable_released", "non_trainable_kept"
    both = "non_trainable_partly_kept"
    if released in merged and kept in merged and both not in merged:
        merged[merged.index(released)] = both
        merged.remove(kept)
    return merged


def _implied_caveats(
    facts: StatementFacts, delta: float, best: float, populations: list[int]
) -> list[str]:
    """Returns the caveats that follow from the stated facts."""
    if not math.isfinite(best):
        return []
    keys = ["start_and_callbacks_trusted", "plan_fixed_in_advance"]
    if facts.privacy_unit == PrivacyUnit.RECORD:
        keys.append("per_record")
    elif facts.trust_model == TrustModel.LOCAL:
        keys.append("local_not_central")
    else:
        for sampling in dict.fromkeys([facts.sampling, *facts.other_samplings]):
            keys += _CAVEATS_OF_SAMPLING[sampling]
        smallest = _range(facts.clients_per_round)["min"]
        if facts.sampling == Sampling.FIXED_SIZE and smallest < max(populations):
            keys.append("cohort_redrawn")
    num_protected, key = max(populations), "delta_not_below_one_over_n"
    if facts.privacy_unit == PrivacyUnit.RECORD:
        num_protected = facts.num_records or 0
        key = "delta_not_below_one_over_records"
    if delta * num_protected >= 1:
        keys.append(key)
    if best > 10:
        keys.append("epsilon_large")
    return keys


def _show(name: str, value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__ if name == "query" else repr(value)


def _value(epsilon: Epsilon, delta: float) -> float | None:
    value = epsilon(delta) if callable(epsilon) else epsilon
    return None if value is None else float(value)


def _range(sizes: float | Sequence[float]) -> Json:
    values = list(sizes) if isinstance(sizes, Sequence) else [sizes]
    figures: Any = {"min": min, "max": max, "mean": statistics.fmean}
    for name, function in figures.items():
        figures[name] = float(function(values)) if values else None
    return {"count": len(values), **figures}


@functools.cache
def _template() -> jinja2.Template:
    """Returns the template of a statement, with a block for each paragraph."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters.update(
        up=rounding.format_up,
        counted=_count,
        is_finite=math.isfinite,
        number=_number,
        short=_short,
    )
    text = pathlib.Path(__file__).with_name("statement.txt").read_text("utf-8")
    return environment.from_string(text)


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.0f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
