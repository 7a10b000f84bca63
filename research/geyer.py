"""Table 1 of Geyer et al. (2017), from runs on MNIST.

Each row of the table is a sweep of its own (`research/configs/geyer/`), over
its seeds; its name says how many clients and which row: `k100_best_honest`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfdp_fl import _files, _validate
from tfdp_fl.experiments import run_directory, sweeps
from tfdp_fl.experiments.run_directory import Run

ROWS = (
    "non_private",
    "as_published",
    "private_median",
    "best_honest",
    "public_features",
)
CLIENTS = (100, 1000, 10000)

# (ACC, CR, CC) of the paper's Table 1; None clients: without privacy, K=100.
PAPER = {
    (100, "non_private"): (0.97, 380, 38000),
    (100, "as_published"): (0.78, 11, 550),
    (1000, "as_published"): (0.92, 54, 11880),
    (10000, "as_published"): (0.96, 412, 209500),
}

TABLE = "table1.md"
TABLE_CSV = "table1.csv"
RUNS_CSV = "runs.csv"


def names(clients: Sequence[int] = CLIENTS, rows: Sequence[str] = ROWS) -> list[str]:
    """Returns the sweeps' names, the baseline first.

    Args:
      clients: Which K, of `CLIENTS`.
      rows: Which rows, of `ROWS`; the baseline is there for K = 100 only.

    Raises:
      ValueError: One of them is not there.
    """
    for each in clients:
        _validate.one_of(CLIENTS, clients=each)
    for each in rows:
        _validate.one_of(ROWS, rows=each)
    return [
        f"k{k}_{row}"
        for k in clients
        for row in ROWS
        if row in rows and (k == 100 or row != "non_private")
    ]


def read_configs(
    directory: str | os.PathLike[str],
    wanted: Sequence[str],
    data_path: str | os.PathLike[str],
    seeds: int | None = None,
    rounds: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns the sweeps' configurations by name, all of them checked.

    Args:
      directory: Holds `<name>.json` for each name.
      wanted: The names.
      data_path: MNIST, as Keras stores it.
      seeds: How many seeds at most; None: all that are written there.
      rounds: How many rounds at most, each of them evaluated; None: as many
        as are written there.

    Raises:
      ValueError: A configuration is refused.
      OSError: One is not there.
    """
    configs = {}
    for name in wanted:
        path = pathlib.Path(directory) / f"{name}.json"
        config = json.loads(path.read_text("utf-8"))
        config["base"] = {**config["base"], "data_path": str(data_path)}
        config["seeds"] = config["seeds"][:seeds]
        if rounds is not None and rounds < config["base"]["rounds"]:
            config["base"].update(rounds=rounds, validation_freq=1)
        sweeps.expand(config)
        configs[name] = config
    return configs


def run_all(
    configs: Mapping[str, Mapping[str, Any]],
    output_dir: str | os.PathLike[str],
    *,
    say: Callable[[str], None] = print,
    verbose: int = 0,
) -> list[str]:
    """Runs what is not there yet; the table grows with every sweep.

    Args:
      configs: By name, as `read_configs` returns them.
      output_dir: Receives a directory a sweep, and the tables.
      say: Called with a line for each run.
      verbose: As in `fit`.

    Returns:
      The runs that failed, with their errors; empty if all went well.
    """
    root = pathlib.Path(output_dir)
    failed = []
    for name, config in configs.items():
        say(f"{name}: {config['description']}")
        failed += sweeps.run_sweep(config, root / name, say=say, verbose=verbose)
        write_results(root)
    return failed


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      clients: K.
      row: Which of its rows.
      seeds: How many runs it is a mean of.
      accuracy: ACC, on MNIST's test set.
      spread: The standard deviation over the seeds; None with one.
      communication_rounds: CR, how many rounds ran.
      communication_cost: CC, how often a client sent a model: the sum of the
        sizes of the cohorts that ran.
      delta: At which the epsilons are; None without a guarantee.
      epsilon_rdp: By RDP, of the rounds that ran.
      epsilon_pld: By PLD.
      sampling: How cohorts were drawn.
      hidden_units: The widths of the model's hidden layers.
      caveats: The names of what its privacy statement says that epsilon does
        not cover.
      seconds: What a run took.
    """

    clients: int
    row: str
    seeds: int
    accuracy: float
    spread: float | None
    communication_rounds: float
    communication_cost: float
    delta: float | None
    epsilon_rdp: float | None
    epsilon_pld: float | None
    sampling: str
    hidden_units: str
    caveats: tuple[str, ...]
    seconds: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Row:
        """Returns the row of one setting's finished runs, a run a seed."""
        first = runs[0]
        mean = statistics.fmean
        accuracies = [run.result["accuracy"] for run in runs]
        private = first.settings.mechanism != "none"
        epsilons = {
            by: max(run.result[f"epsilon_{by}"] for run in runs) if private else None
            for by in ("rdp", "pld")
        }
        return cls(
            clients=first.result["num_clients"],
            row=_row_of(first),
            seeds=len(runs),
            accuracy=mean(accuracies),
            spread=statistics.stdev(accuracies) if len(runs) > 1 else None,
            communication_rounds=mean(r.result["rounds"] for r in runs),
            communication_cost=mean(sum(run.history["cohort_size"][1]) for run in runs),
            delta=first.result["delta"] if private else None,
            epsilon_rdp=epsilons["rdp"],
            epsilon_pld=epsilons["pld"],
            sampling=first.settings.sampling,
            hidden_units=first.settings.hidden_units or "none",
            caveats=tuple(dict.fromkeys(c for r in runs for c in r.caveats)),
            seconds=mean(run.result["seconds"] for run in runs),
        )

    @property
    def paper(self) -> tuple[float, int, int] | None:
        """Returns the paper's ACC, CR and CC for this K, if it has them."""
        row = "as_published" if self.delta is not None else self.row
        return PAPER.get((self.clients, row))


def _row_of(run: Run) -> str:
    return run.path.parent.parent.name.partition("_")[2]


def read_rows(output_dir: str | os.PathLike[str]) -> list[Row]:
    """Returns the rows whose runs are there, in the table's order."""
    return [Row.of(runs) for runs in _finished(output_dir).values()]


def _finished(output_dir: str | os.PathLike[str]) -> dict[str, list[Run]]:
    """Returns the finished runs of each sweep that has some, by its name."""
    finished = {}
    for name in names():
        results = (pathlib.Path(output_dir) / name).rglob(run_directory.RESULT)
        runs = [Run.read(path.parent) for path in sorted(results)]
        if runs:
            finished[name] = runs
    return finished


def write_results(output_dir: str | os.PathLike[str]) -> str:
    """Writes the tables (table1.md, table1.csv, runs.csv).

    Returns:
      The table as Markdown.
    """
    root = pathlib.Path(output_dir)
    rows = read_rows(root)
    table = markdown(rows)
    _files.write_text(root / TABLE, table)
    run_directory.write_csv(
        root / TABLE_CSV,
        [
            {name: _cell(value) for name, value in dataclasses.asdict(row).items()}
            for row in rows
        ],
        [field.name for field in dataclasses.fields(Row)],
    )
    finished = _finished(root)
    run_directory.write_csv(
        root / RUNS_CSV,
        [
            {
                "sweep": name,
                "seed": run.settings.seed,
                **{f: run.result[f] for f in sweeps.FIGURES if f in run.result},
            }
            for name, runs in finished.items()
            for run in runs
        ],
        ["sweep", "seed", *sweeps.FIGURES],
    )
    return table


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return " ".join(value)
    return "" if value is None else value


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table; the paper's figures stand in brackets.

    The caveats that the privacy statements of all private rows have stand
    below it, once; the column has what else a row's statements have.
    """
    private = [{*row.caveats} for row in rows if row.delta is not None]
    common = set.intersection(*private) if private else set()
    lines = [
        "| K | row | ACC | CR | CC | δ | ε by RDP | ε by PLD | sampling | "
        "hidden units | further caveats | seeds | minutes a run |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        spread = "" if row.spread is None else f" ± {row.spread:.4f}"
        published = row.row in ("as_published", "non_private")
        paper = row.paper if published else None
        accuracy, rounds, cost = (
            ("", "", "")
            if paper is None
            else (f" ({paper[0]})", f" ({paper[1]})", f" ({paper[2]})")
        )
        cells = [
            str(row.clients),
            row.row.replace("_", " "),
            f"{row.accuracy:.4f}{spread}{accuracy}",
            f"{row.communication_rounds:.0f}{rounds}",
            f"{row.communication_cost:.0f}{cost}",
            "–" if row.delta is None else f"{row.delta:g}",
            *(
                "–" if each is None else _rounded_up(each)
                for each in (row.epsilon_rdp, row.epsilon_pld)
            ),
            row.sampling,
            row.hidden_units,
            "no guarantee"
            if row.delta is None
            else _listed(c for c in row.caveats if c not in common),
            str(row.seeds),
            f"{row.seconds / 60:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if private:
        shared = dict.fromkeys(c for row in rows for c in row.caveats if c in common)
        lines += ["", f"Caveats of every private row: {_listed(shared)}."]
    return "\n".join(lines) + "\n"


def _listed(caveats: Iterable[str]) -> str:
    return ", ".join(each.replace("_", " ") for each in caveats) or "–"


def _rounded_up(epsilon: float) -> str:
    """Returns an epsilon with three decimals, rounded up."""
    # A calibrated epsilon of 8 - 1e-12, read back as 8, is no more than 8.
    return f"{math.ceil(round(1000 * epsilon, 6)) / 1000:.3f}"
