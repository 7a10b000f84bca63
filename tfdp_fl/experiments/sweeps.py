"""Many runs from one configuration: a grid, over seeds.

A configuration is a JSON object:

    {
      "base":   {"dataset": "digits", "rounds": 60},
      "grid":   {"mechanism": ["fixed", "adaptive"], "target_epsilon": [2, 8]},
      "runs":   [{"mechanism": "none"}, {"mechanism": "local", "rounds": 10}],
      "seeds":  [0, 1, 2]
    }

Every part but `base` may be left out. The runs are those of `runs` and those
of the grid, each with every seed. Names are those of
`tfdp_fl.experiments.Settings`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp_fl import _files, _lazy_tf, _validate
from tfdp_fl.accounting import format_up
from tfdp_fl.experiments import run_directory, training
from tfdp_fl.experiments.settings import Settings
from tfdp_fl.terms import Json

_PARTS = ("description", "base", "grid", "runs", "seeds")
# What the tables say of a run, by its name in `result.json`.
_FIGURES = (
    *("accuracy", "loss", "epsilon", "delta", "central_epsilon"),
    *("rounds", "seconds"),
)
_ROUNDED_UP = ("epsilon", "delta", "central_epsilon")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
      name: What sets it apart, such as `mechanism=fixed,target_epsilon=2`.
      varied: The settings that set it apart.
      settings: All its settings, resolved, the seed included.
    """

    name: str
    varied: Json
    settings: Settings

    @property
    def directory(self) -> str:
        """Where it is kept, relative to the sweep's directory."""
        folder = re.sub(r"[^\w.=,+-]", "_", self.name)
        return os.path.join(folder, f"seed={self.settings.seed}")


def expand(config: Mapping[str, Any]) -> list[Trial]:
    """Returns the runs that a configuration asks for, all of them checked.

    Raises:
      ValueError: The configuration is not one, or a run of it is refused.
    """
    for part in config:
        _validate.one_of(_PARTS, part=part)
    variations = list(config.get("runs", []))
    grid = config.get("grid", {})
    if grid or not variations:
        combinations = itertools.product(*grid.values())
        variations += [dict(zip(grid, values, strict=True)) for values in combinations]
    trials = []
    for varied in variations:
        name = ",".join(f"{k}={v}" for k, v in varied.items()) or "base"
        for seed in config.get("seeds", [None]):
            values = {**config.get("base", {}), **varied, "seed": seed}
            try:
                settings = Settings(**values).resolve()
            except (TypeError, ValueError) as error:
                raise ValueError(f"Run {name!r}: {error}") from error
            trials.append(Trial(name, varied, settings))
    names = [trial.directory for trial in trials]
    if len({*names}) < len(names):
        raise ValueError("Two runs of the configuration are the same.")
    return trials


def run_sweep(
    config: Mapping[str, Any],
    output_dir: str | os.PathLike[str],
) -> None:
    """Runs what is not there yet, one after the other, in this process.

    Each run leaves its files in a directory of its own, and after each the
    tables are written anew: `runs.csv` (a row a run) and `summary.csv` (mean
    and standard deviation over the seeds). A sweep that was cut short goes on with
    the first run that has no result, where that was.

    Args:
      config: See this module.
      output_dir: Where the runs are kept; may hold earlier ones of this sweep.

    Raises:
      ValueError: The configuration is refused, or the directory holds a run
        of the same name with other settings.
      ImportError: pandas is not installed.
    """
    root = pathlib.Path(output_dir)
    trials = expand(config)
    for trial in trials:
        _check_unchanged(root / trial.directory, trial)
    write_tables(root, trials)
    for number, trial in enumerate(trials, 1):
        path = root / trial.directory
        prefix = f"[{number}/{len(trials)}] {trial.directory}"
        if (path / run_directory.RESULT).is_file():
            print(f"{prefix}: there already", flush=True)
            continue
        result = _run(trial, path)
        print(
            f"{prefix}: accuracy {result['accuracy']:.4f}, epsilon "
            f"{format_up(result['epsilon'])}, {result['rounds']} rounds, "
            f"{result['seconds']:.0f} s",
            flush=True,
        )
        write_tables(root, trials)


def _check_unchanged(path: pathlib.Path, trial: Trial) -> None:
    if not (path / run_directory.CONFIG).is_file():
        return
    stored = Settings.read(path / run_directory.CONFIG)
    for name, value in dataclasses.asdict(trial.settings).items():
        if getattr(stored, name) != value:
            raise ValueError(
                f"{path} holds a run with {name}={getattr(stored, name)!r}, "
                f"where the configuration has {value!r}; give the sweep "
                "another output_dir."
            )


def _run(trial: Trial, path: pathlib.Path) -> Json:
    tf.keras.backend.clear_session()
    # Its ledger has what was charged.
    resume = any((path / run_directory.CHECKPOINT).glob("*.npz"))
    prepared = training.prepare(trial.settings)
    result = training.run(
        prepared,
        path,
        overwrite=path.exists() and not resume,
        resume=resume,
        verbose=0,
    )
    if result["stopped"] == "interrupted":
        (path / run_directory.RESULT).unlink()
        raise KeyboardInterrupt
    return result


def write_tables(root: pathlib.Path, trials: Sequence[Trial]) -> None:
    """Writes `runs.csv` and `summary.csv` from the results there are."""
    with _lazy_tf.explain_missing("pandas", "A sweep"):
        import pandas as pd

    rows: list[Json] = []
    for trial in trials:
        path = root / trial.directory / run_directory.RESULT
        if path.is_file():
            result = json.loads(path.read_text("utf-8"))
            figures = {
                # JSON's null is an epsilon that is not finite.
                name: math.inf if result[name] is None else result[name]
                for name in _FIGURES
                if name in result
            }
            seed = {"run": trial.name, "seed": trial.settings.seed}
            rows.append({**trial.varied, **seed, **figures})
    varied = list(dict.fromkeys(name for trial in trials for name in trial.varied))
    runs = pd.DataFrame(rows, columns=[*varied, "run", "seed", *_FIGURES])
    by_run = runs.groupby("run", sort=False)
    summary = by_run[varied].first()
    summary["runs"] = by_run.size()
    summary["accuracy"] = by_run["accuracy"].mean()
    summary["stddev"] = by_run["accuracy"].std()
    # The worst of the seeds.
    summary[[*_ROUNDED_UP]] = by_run[[*_ROUNDED_UP]].max()
    summary[["rounds", "seconds"]] = by_run[["rounds", "seconds"]].mean()
    root.mkdir(parents=True, exist_ok=True)
    for name, table in (("runs", runs.drop(columns="run")), ("summary", summary)):
        for figure in _ROUNDED_UP:
            table[figure] = table[figure].map(lambda v: format_up(v, 7), "ignore")
        text = table.to_csv(index=False, float_format="%.7g")
        _files.write_text(root / f"{name}.csv", text)
