r"""Reproduces Table 1 of Geyer et al. (2017) on MNIST.

    python research/reproduce_geyer.py --data_path=mnist.npz

Runs the sweeps in research/configs/geyer, one after the other: for K = 100, 1000 and
10000 clients of two label shards each, at epsilon 8, the algorithm as published, with a
private median, and the best that this package does. Runs that have a result are skipped
and long ones continue from their checkpoint, so the same command goes on after an
interrupt. The output directory receives a directory a sweep, table1.md and runs.csv.

The settings were chosen on training points held out from the clients, as in

    python scripts/sweep.py --config=research/configs/geyer/search_k100.json \
        --data_path=mnist.npz
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import pandas as pd
from absl import app, flags

from tfdp_fl import _files
from tfdp_fl.experiments import sweeps, training

ROWS = (
    "non_private",
    "as_published",
    "private_median",
    "best_honest",
    "public_features",
)
CLIENTS = (100, 1000, 10000)
CONFIGS = pathlib.Path(__file__).parent / "configs" / "geyer"

# (ACC, CR, CC) of the paper's Table 1.
PAPER = {
    (100, "non private"): (0.97, 380, 38000),
    (100, "as published"): (0.78, 11, 550),
    (1000, "as published"): (0.92, 54, 11880),
    (10000, "as published"): (0.96, 412, 209500),
}


def names(clients: Sequence[int] = CLIENTS, rows: Sequence[str] = ROWS) -> list[str]:
    """Returns the sweeps' names; the baseline is there for K = 100 only."""
    return [
        f"k{k}_{row}"
        for k in clients
        for row in ROWS
        if row in rows and (k == 100 or row != "non_private")
    ]


def read_config(
    name: str, data_path: str, seeds: int | None = None, rounds: int | None = None
) -> dict[str, Any]:
    """Returns a sweep's configuration, checked.

    Args:
      name: Of `names`.
      data_path: MNIST, as Keras stores it.
      seeds: How many seeds at most; None: all that are written there.
      rounds: How many rounds at most, all of them evaluated; None likewise.

    Raises:
      ValueError: The configuration is refused.
    """
    config = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    config["base"]["data_path"] = str(data_path)
    config["seeds"] = config["seeds"][:seeds]
    if rounds is not None:
        config["base"].update(rounds=rounds, validation_freq=1)
    sweeps.expand(config)
    return config


def read_runs(root: pathlib.Path) -> pd.DataFrame:
    """Returns the finished runs in the table's order; CC counts models sent."""
    found = []
    for name in names():
        for path in sorted((root / name).rglob(training.RESULT)):
            result, chosen, statement = (
                json.loads((path.parent / each).read_text("utf-8"))
                for each in ("result.json", "config.json", "privacy.json")
            )
            history = pd.read_csv(path.parent / training.HISTORY)
            k, row = name[1:].split("_", 1)
            known = {"K": int(k), "row": row.replace("_", " ")}
            private = chosen["mechanism"] != "none"
            epsilons = ("delta", "epsilon_rdp", "epsilon_pld")
            found.append(
                {
                    **known,
                    "seed": chosen["seed"],
                    "accuracy": result["accuracy"],
                    "rounds": result["rounds"],
                    "models_sent": history["cohort_size"].sum(),
                    **{each: result[each] for each in epsilons if private},
                    "minutes": result["seconds"] / 60,
                    "caveats": " ".join(statement["caveats"] if private else ()),
                }
            )
    return pd.DataFrame(found)


def write_results(root: pathlib.Path) -> str:
    """Writes runs.csv and table1.md; returns the latter."""
    runs = read_runs(root)
    _files.write_text(root / "runs.csv", runs.to_csv(index=False, float_format="%.7g"))
    table = markdown(runs)
    _files.write_text(root / "table1.md", table)
    return table


def markdown(runs: pd.DataFrame) -> str:
    """Returns the means over seeds and the largest epsilons, the paper's in brackets.

    The caveats that the privacy statements of all private rows have stand below the
    table, once; the column has what else a row's statements have.
    """
    rows = {
        key: group.dropna(axis="columns", how="all")
        for key, group in runs.groupby(["K", "row"], sort=False)
    }
    caveats = {
        key: set().union(*group["caveats"].str.split())
        for key, group in rows.items()
        if "delta" in group
    }
    common = set.intersection(*caveats.values()) if caveats else set()
    lines = [
        "| K | row | ACC | CR | CC | δ | ε by RDP | ε by PLD | further caveats | "
        "seeds | minutes a run |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, group in rows.items():
        accuracy = f"{group['accuracy'].mean():.4f}"
        if len(group) > 1:
            accuracy += f" ± {group['accuracy'].std():.4f}"
        figures = [accuracy, *(f"{group[c].mean():.0f}" for c in _COUNTS)]
        if key in PAPER:
            pairs = zip(figures, PAPER[key], strict=True)
            figures = [f"{ours} ({theirs})" for ours, theirs in pairs]
        cells = [*key, *figures]
        if key in caveats:
            cells.append(f"{group['delta'].iloc[0]:g}")
            for accountant in ("epsilon_rdp", "epsilon_pld"):
                cells.append(_rounded_up(group[accountant].max()))
            cells.append(_listed(caveats[key] - common))
        else:
            cells += ["–", "–", "–", "no guarantee"]
        cells += [len(group), f"{group['minutes'].mean():.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if caveats:
        lines += ["", f"Caveats of every private row: {_listed(common)}."]
    return "\n".join(lines) + "\n"


_COUNTS = ("rounds", "models_sent")


def _listed(caveats: set[str]) -> str:
    return ", ".join(sorted(caveats)).replace("_", " ") or "–"


def _rounded_up(epsilon: float) -> str:
    """Returns an epsilon with three decimals, rounded up."""
    # A calibrated epsilon of 8 - 1e-12, read back as 8, is no more than 8.
    return f"{math.ceil(round(1000 * epsilon, 6)) / 1000:.3f}"


def run_all(configs: Mapping[str, Any], root: pathlib.Path) -> None:
    """Runs what is not there yet."""
    for name, config in configs.items():
        print(f"{name}: {config['description']}", flush=True)
        sweeps.run_sweep(config, root / name)
        write_results(root)


def main(argv: Sequence[str]) -> None:
    """Runs what the flags ask for, and writes the tables."""
    if len(argv) > 1:
        sys.exit(f"reproduce_geyer.py: {argv[1]!r} is not a flag.")
    chosen = flags.FLAGS
    if not chosen.data_path:
        sys.exit("reproduce_geyer.py: --data_path must be given.")
    seeds, rounds = (1, 3) if chosen.quick else (chosen.seeds, None)
    root = pathlib.Path(chosen.output_dir)
    try:
        configs = {
            name: read_config(name, chosen.data_path, seeds, rounds)
            for name in names(list(map(int, chosen.clients)), chosen.rows)
        }
        run_all(configs, root)
        print(write_results(root))
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"reproduce_geyer.py: {error}")


if __name__ == "__main__":
    flags.DEFINE_string("data_path", None, "MNIST as Keras stores it, mnist.npz.")
    flags.DEFINE_string("output_dir", "runs/geyer", "Where the runs and the table go.")
    flags.DEFINE_multi_enum(
        "clients", list(map(str, CLIENTS)), list(map(str, CLIENTS)), "Which K."
    )
    flags.DEFINE_multi_enum(
        "rows", list(ROWS), list(ROWS), "Which rows; non_private is for K=100 only."
    )
    flags.DEFINE_integer(
        "seeds", None, "At most so many seeds a row; by default all.", lower_bound=1
    )
    flags.DEFINE_bool(
        "quick",
        False,
        "Three rounds of one seed a row, under ten minutes: to see that everything "
        "works. Give it an output_dir of its own.",
    )
    app.run(main)
