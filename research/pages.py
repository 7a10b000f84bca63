r"""Writes the tables of the pages from the files of what was measured.

    python research/pages.py
    python research/pages.py measured hospitals local_dp   # at this commit, today

A block of a page, between `<!--results:NAME-->` and `<!--end-->`, is made from the
files that NAME stands for, and says at which commits they were measured
(`docs/results/commits.json`). So no page has a figure of a table that is not in a file.
The second form notes that a command has written its files anew; it takes the names of
files in research/ and of folders in docs/results.
"""

from __future__ import annotations

import datetime
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence

import pandas as pd

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "docs" / "results"
_COMMITS = _RESULTS / "commits.json"
PAGES = tuple(
    _ROOT / "docs" / f"{page}.md" for page in ("results", "model", "sampling")
)
_BLOCK = re.compile(r"(<!--results:(\w+)-->).*?(<!--end-->)", re.DOTALL)


def written(page: str) -> str:
    """Returns a page whose blocks say what was measured."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        sources, make = BLOCKS[name]
        return f"{begin}\n\n{make()}\n\n{_measured_at(sources)}\n\n{end}"

    return _BLOCK.sub(block, page)


def _measured_at(names: Sequence[str]) -> str:
    commits = json.loads(_COMMITS.read_text("utf-8"))
    stamps = dict.fromkeys("{1}, commit {0}".format(*commits[name]) for name in names)
    return f"(Measured {'; '.join(stamps)}.)"


def _note(names: Sequence[str]) -> None:
    """Notes that files were written at this commit, today."""
    commits = json.loads(_COMMITS.read_text("utf-8")) if _COMMITS.exists() else {}
    head = ["git", "-C", str(_ROOT), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout
    today = datetime.date.today().isoformat()
    commits |= {name: [commit.strip(), today] for name in names}
    _COMMITS.write_text(json.dumps(commits, indent=1, sort_keys=True) + "\n", "utf-8")


def _runs(name: str) -> pd.DataFrame:
    """Returns a sweep's runs, a row each."""
    return pd.read_csv(_RESULTS / name / "runs.csv")


def _rows(name: str) -> pd.DataFrame:
    """Returns the runs of a program of research/, a row each."""
    found = json.loads((_ROOT / "research" / f"{name}.json").read_text("utf-8"))
    return pd.json_normalize(found if isinstance(found, list) else found["rows"])


def _mean(values: pd.Series, digits: int = 3) -> str:
    """Returns "0.950 ± 0.003", or the mean alone of a single run; a dash of none."""
    if not len(values):
        return "–"
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std():.{digits}f}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |" for line in (heading, *rows))
    return "\n".join([head, f"|{'---|' * len(heading)}", *lines])


def _epsilon(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:g}"


def _geyer() -> str:
    runs, clients = _runs("geyer"), (100, 1000, 10000)
    names = {
        "as published": "as published, here",
        "private median": "private median",
        "best honest": "fixed clip, tuned",
        "public features": "**oriented gradients, smaller models**",
        "non private": "without privacy",
    }

    def cell(row: str, k: int) -> str:
        chosen = runs[(runs["row"] == row) & (runs["K"] == k)]
        mean = _mean(chosen["accuracy"])
        return f"**{mean}**" if row == "public features" else mean

    rows = [(name, *(cell(row, k) for k in clients)) for row, name in names.items()]
    published = ("**published**", "0.78", "0.92", "0.96")
    return _table(("row", *(f"K = {k}" for k in clients)), (published, *rows))


def _noise_of_searches() -> str:
    path = _ROOT / "research" / "private_search.json"
    columns = ("one", "logarithmic", "geometric", "poisson", "grid")
    rows = [
        (
            f"{row['n']}, {row['m']}, {row['rounds']}, {row['epsilon']:g}",
            *(f"{row[column]:.2f}" for column in columns),
        )
        for row in json.loads(path.read_text("utf-8"))["costs"]
        if row["epsilon"] == 8
    ]
    names = ("one run", "logarithmic", "geometric", "Poisson", "grid")
    return _table(("clients, cohort, rounds, epsilon", *names), rows)


def _searches_of_geyer() -> str:
    path = _ROOT / "research" / "private_search.json"
    found, runs = json.loads(path.read_text("utf-8")), _runs("geyer")
    clients = (100, 1000, 10000)
    counted = [_mean(pd.DataFrame(found[f"geyer {k}"])["accuracy"]) for k in clients]
    features = runs[runs["row"] == "public features"]
    free = [_mean(features["accuracy"][features["K"] == k]) for k in clients]
    rows = [("the search counted", *counted), ("the search not counted", *free)]
    return _table(("", *(f"K = {k}" for k in clients)), rows)


def _searches() -> str:
    path = _ROOT / "research" / "private_search.json"
    found = json.loads(path.read_text("utf-8"))
    ways = ("uncounted", "poisson", "logarithmic", "grid")
    rows = [
        (f"{name}, {epsilon:g}", *(f"{each[way].mean():.3f}" for way in ways))
        for data, name in (("digits", "digits"), ("mnist", "MNIST"))
        for epsilon, each in pd.DataFrame(found[data]).groupby("epsilon")
    ]
    names = ("tried and not counted", "Poisson", "logarithmic", "grid, all counted")
    return _table(("data, epsilon", *names), rows)


def _clips() -> str:
    def row(name: str, data: str, start: float) -> tuple[str, ...]:
        runs = _runs(f"clipping_{data}")
        fixed = runs[runs["mechanism"] == "fixed"].groupby("clip_norm")["accuracy"]
        means = fixed.mean()
        follows = (runs["target_quantile"] == 0.5) & (runs["mechanism"] == "adaptive")
        begins = runs["initial_clip_norm"] == start
        adaptive = runs[follows & begins]["accuracy"].mean()
        none = runs[runs["mechanism"] == "none"]["accuracy"].mean()
        return (
            name,
            f"{means.min():.3f} (clip {means.idxmin():g})",
            f"{means.max():.3f} (clip {means.idxmax():g})",
            f"{adaptive:.3f} (from {start:g})",
            f"{none:.3f}",
        )

    names = ("worst fixed", "best fixed of several", "median", "without DP")
    rows = [
        row("digits", "digits", 0.1),
        row("MNIST, oriented gradients", "mnist", 0.1),
        row("Shakespeare", "shakespeare", 0.5),
        row("Shakespeare", "shakespeare", 5),
    ]
    return _table(("", *names), rows)


def _nbafl() -> str:
    loss, rounds, cohorts = map(
        _runs, ("nbafl_loss", "nbafl_rounds", "nbafl_scheduling")
    )
    by_epsilon = loss.groupby("target_epsilon")["loss"].mean()
    by_epsilon = by_epsilon[
        by_epsilon.index.map(lambda epsilon: epsilon < float("inf"))
    ]
    by_rounds = rounds.groupby("rounds")["loss"].mean()
    by_rounds[25] = by_epsilon[50]
    by_cohort = cohorts.groupby("clients_per_round")["loss"].mean()
    by_cohort[50] = by_epsilon[50]

    def row(what: str, means: pd.Series) -> tuple[str, str, str]:
        means = means.sort_index()
        names = ("no noise" if key == 1e9 else f"{key:g}" for key in means.index)
        return what, ", ".join(names), ", ".join(f"{value:.2f}" for value in means)

    rows = [
        row("epsilon", by_epsilon),
        row("rounds, at epsilon 50", by_rounds),
        row("clients of a round, at epsilon 50", by_cohort),
    ]
    return _table(("", "from, to", "loss"), rows)


def _local() -> str:
    runs = _runs("local_dp")
    ways = ("local", "adaptive_local", "fixed")
    rows = [
        (
            f"{epsilon:g}",
            *(_mean(each["accuracy"][each["mechanism"] == w]) for w in ways),
        )
        for epsilon, each in runs.groupby("target_epsilon")
    ]
    free = _mean(runs["accuracy"][runs["mechanism"] == "none"])
    rows.append(("no privacy", "", "", free))
    return _table(
        ("epsilon", "local", "adaptive local", "central, trusted server"), rows
    )


def _people() -> str:
    runs = _rows("person_ratings")
    tables = {"InstEval": "2378 students", "MovieLens": "537 people"}
    most = runs.groupby("table")["people"].max()

    def cells(*ways: str) -> list[str]:
        found = []
        for table in tables:
            chosen = runs[(runs["table"] == table) & (runs["people"] == most[table])]
            groups = chosen[chosen["way"].isin(ways)].groupby("way")["rmse"]
            found.append(min(_mean(each) for _, each in groups))
        return found

    rows = [
        ("the mean rating alone", *cells("mean")),
        ("no privacy", *cells("no privacy")),
        *(
            (f"epsilon = {epsilon} for a person", *cells(f"people, {epsilon}"))
            for epsilon in (8, 4)
        ),
        *(
            (
                f"TF-Privacy's DP-SGD, {epsilon} for a person",
                *cells(*(f"ratings, {k} a person, {epsilon}" for k in (5, 20))),
            )
            for epsilon in (8, 4)
        ),
    ]
    return _table(("", *(f"{name}, {size}" for name, size in tables.items())), rows)


def _hospitals() -> str:
    runs = _rows("hospitals")
    places = {
        "cleveland": "Cleveland, 302",
        "hungarian": "Hungary, 292",
        "switzerland": "Switzerland, 118",
        "va": "Long Beach, 197",
    }
    settings = [(way, None) for way in ("alone", "pooled", "federated")]
    ways = ("federated", "alone", "whole hospitals")
    settings += [(way, epsilon) for way in ways for epsilon in (8, 2, 1)]
    rows = []
    for way, epsilon in settings:
        told = runs["epsilon"].isna() if epsilon is None else runs["epsilon"] == epsilon
        chosen = runs[(runs["way"] == way) & told]
        rows.append(
            (
                f"{way}, {'none' if epsilon is None else epsilon}",
                *(f"{chosen[f'auc.{place}'].mean():.3f}" for place in places),
                _mean(chosen["auc.all"]),
            )
        )
    return _table(("way, epsilon", *places.values(), "all"), rows)


def _shakespeare() -> str:
    runs = pd.concat([_runs("shakespeare_none"), _runs("shakespeare_roles")])
    rows = [
        (_epsilon(epsilon), f"{each['rounds'].max():g}", _mean(each["accuracy"]))
        for epsilon, each in runs.groupby("target_epsilon", dropna=False, sort=False)
    ]
    return _table(("epsilon", "rounds", "accuracy"), rows)


def _images() -> str:
    runs = _rows("images")
    names = {
        "head": "a head on frozen features",
        "everything": "everything, from public weights",
        "from scratch": "everything, from scratch",
    }

    def cell(what: str, epsilon: float | None) -> str:
        told = runs["epsilon"].isna() if epsilon is None else runs["epsilon"] == epsilon
        return _mean(runs[(runs["what"] == what) & told]["accuracy"])

    rows = [
        (name, *(cell(what, epsilon) for epsilon in (None, 8, 4, 2)))
        for what, name in names.items()
    ]
    return _table(("trained", "no privacy", "epsilon 8", "4", "2"), rows)


def _language_model() -> str:
    runs = _rows("pretrained").dropna(subset=["accuracy"])
    rows = [
        (what, _epsilon(epsilon), _mean(each["accuracy"]))
        for (what, epsilon), each in runs.groupby(
            ["what", "epsilon"], dropna=False, sort=False
        )
    ]
    return _table(("", "epsilon", "accuracy of the next letter"), rows)


def _samplings() -> str:
    runs = _rows("samplings")
    names = {"random_allocation": "random allocation", "poisson": "Poisson"}

    def cell(sampling: str, task: str) -> str:
        chosen = runs[(runs["sampling"] == sampling) & (runs["task"] == task)]
        return f"{chosen['noise_multiplier'].max():.2f}, {_mean(chosen['accuracy'])}"

    rows = [
        (name, cell(sampling, "digits"), cell(sampling, "mnist"))
        for sampling, name in {**names, "shuffled": "shuffled"}.items()
    ]
    heading = ("", "digits: noise, accuracy", "MNIST, oriented gradients")
    return _table(heading, rows)


# The files of each block, and what makes its text.
BLOCKS: dict[str, tuple[tuple[str, ...], Callable[[], str]]] = {
    "geyer": (("geyer",), _geyer),
    "noise_of_searches": (("search_costs",), _noise_of_searches),
    "searches_of_geyer": (("search_geyer", "geyer"), _searches_of_geyer),
    "searches": (("search_digits", "search_mnist"), _searches),
    "clips": (
        ("clipping_digits", "clipping_mnist", "clipping_shakespeare"),
        _clips,
    ),
    "nbafl": (("nbafl_loss", "nbafl_rounds", "nbafl_scheduling"), _nbafl),
    "local": (("local_dp",), _local),
    "people": (("person_ratings",), _people),
    "hospitals": (("hospitals",), _hospitals),
    "shakespeare": (("shakespeare_none", "shakespeare_roles"), _shakespeare),
    "images": (("images",), _images),
    "language_model": (("pretrained",), _language_model),
    "samplings": (("samplings",), _samplings),
}


def main(asked: Sequence[str]) -> None:
    """Writes the pages; with "measured" and names, notes these first."""
    if asked[:1] == ["measured"]:
        _note(asked[1:])
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
