"""Many runs from one configuration, such as a grid of settings with several seeds.

A configuration is a JSON object:

    {
      "base":   {"dataset": "digits", "rounds": 60},
      "grid":   {"mechanism": ["fixed", "adaptive"], "target_epsilon": [2, 8]},
      "runs":   [{"mechanism": "none"}, {"mechanism": "local", "rounds": 10}],
      "seeds":  [0, 1, 2]
    }

Each part is optional. Every combination in `grid` and every item of `runs` is run with
every seed. The names are those of `tfdp_fl.experiments.Settings`.
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
from tfdp_fl.experiments import training
from tfdp_fl.experiments.settings import Settings
from tfdp_fl.terms import Json

_PARTS = ("description", "base", "grid", "runs", "seeds")
# The tables' columns for results, by their names in `result.json`.
_RESULT_COLUMNS = (
    *("accuracy", "loss", "epsilon", "delta", "central_epsilon"),
    *("rounds", "seconds"),
)
_ROUNDED_UP = ("epsilon", "delta", "central_epsilon")


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
      name: Its varied settings as text, such as `mechanism=fixed,target_epsilon=2`.
      varied: The settings in which it differs from `base`, without the seed.
      settings: All its settings, resolved, including the seed.
    """

    name: str
    varied: Json
    settings: Settings

    @property
    def directory(self) -> str:
        """Its directory, relative to the sweep's."""
        folder = re.sub(r"[^\w.=,+-]", "_", self.name)
        return os.path.join(folder, f"seed={self.settings.seed}")


def expand(config: Mapping[str, Any]) -> list[SweepRun]:
    """Returns the runs of a configuration, after checking all of them.

    Raises:
      ValueError: The configuration or one of its runs is not allowed.
    """
    for part in config:
        _validate.one_of(_PARTS, part=part)
    variations = list(config.get("runs", []))
    grid = config.get("grid", {})
    if grid or not variations:
        combinations = itertools.product(*grid.values())
        variations += [dict(zip(grid, values, strict=True)) for values in combinations]
    sweep_runs = []
    for varied in variations:
        name = ",".join(f"{k}={v}" for k, v in varied.items()) or "base"
        for seed in config.get("seeds", [None]):
            values = {**config.get("base", {}), **varied, "seed": seed}
            try:
                settings = Settings(**values).resolve()
            except (TypeError, ValueError) as error:
                raise ValueError(f"Run {name!r}: {error}") from error
            sweep_runs.append(SweepRun(name, varied, settings))
    names = [sweep_run.directory for sweep_run in sweep_runs]
    if len({*names}) < len(names):
        raise ValueError("Two runs of the configuration are the same.")
    return sweep_runs


def run_sweep(config: Mapping[str, Any], output_dir: str | os.PathLike[str]) -> None:
    """Runs a sweep in this process, one run after another.

    Each run writes its files to its own directory. After each run, two tables are
    rewritten: `runs.csv` (one row per run) and `summary.csv` (mean and standard
    deviation over the seeds). Runs that have a result are skipped, and an interrupted
    run is resumed, so a repeated call continues an interrupted sweep.

    Args:
      config: The configuration, as described at the top of this module.
      output_dir: The directory of the runs; may contain earlier runs of this sweep.

    Raises:
      ValueError: The configuration is not allowed, or the directory contains a run of
        the same name with other settings.
      ImportError: pandas is not installed.
    """
    root = pathlib.Path(output_dir)
    sweep_runs = expand(config)
    for sweep_run in sweep_runs:
        _check_unchanged(root / sweep_run.directory, sweep_run)
    write_tables(root, sweep_runs)
    for number, sweep_run in enumerate(sweep_runs, 1):
        path = root / sweep_run.directory
        prefix = f"[{number}/{len(sweep_runs)}] {sweep_run.directory}"
        if _result(path) is not None:
            print(f"{prefix}: has a result already", flush=True)
            continue
        result = _run_or_resume(sweep_run, path)
        print(
            f"{prefix}: accuracy {result['accuracy']:.4f}, epsilon "
            f"{format_up(result['epsilon'])}, {result['rounds']} rounds, "
            f"{result['seconds']:.0f} s",
            flush=True,
        )
        write_tables(root, sweep_runs)


def _check_unchanged(path: pathlib.Path, sweep_run: SweepRun) -> None:
    if not (path / training.CONFIG).is_file():
        return
    stored = Settings.read(path / training.CONFIG)
    for name, value in dataclasses.asdict(sweep_run.settings).items():
        if getattr(stored, name) != value:
            raise ValueError(
                f"{path} has a run with {name}={getattr(stored, name)!r}, but the "
                f"configuration has {value!r}; give the sweep another output_dir."
            )


def _run_or_resume(sweep_run: SweepRun, path: pathlib.Path) -> Json:
    tf.keras.backend.clear_session()
    # A run with checkpoints is resumed, so that its ledger counts everything.
    resume = any((path / training.CHECKPOINT).glob("*.npz"))
    prepared = training.prepare(sweep_run.settings)
    result = training.run(
        prepared, path, overwrite=path.exists() and not resume, resume=resume, verbose=0
    )
    if _is_interrupted(result):
        raise KeyboardInterrupt
    return result


def _result(path: pathlib.Path) -> Json | None:
    """Returns the result of a run that has ended; None if it must continue."""
    file = path / training.RESULT
    result = json.loads(file.read_text("utf-8")) if file.is_file() else None
    return None if _is_interrupted(result or {}) else result


def _is_interrupted(result: Json) -> bool:
    return result.get("stopped") == training.INTERRUPTED


def write_tables(root: pathlib.Path, sweep_runs: Sequence[SweepRun]) -> None:
    """Writes `runs.csv` and `summary.csv` from the available results."""
    with _lazy_tf.explain_missing("pandas", "A sweep"):
        import pandas as pd

    rows: list[Json] = []
    for sweep_run in sweep_runs:
        result = _result(root / sweep_run.directory)
        if result is not None:
            figures = {
                # JSON's null stands for an infinite epsilon.
                name: math.inf if result[name] is None else result[name]
                for name in _RESULT_COLUMNS
                if name in result
            }
            seed = {"run": sweep_run.name, "seed": sweep_run.settings.seed}
            rows.append({**sweep_run.varied, **seed, **figures})
    varied = list(
        dict.fromkeys(name for sweep_run in sweep_runs for name in sweep_run.varied)
    )
    runs = pd.DataFrame(rows, columns=[*varied, "run", "seed", *_RESULT_COLUMNS])
    by_run = runs.groupby("run", sort=False)
    summary = by_run[varied].first()
    summary["runs"] = by_run.size()
    summary["accuracy"] = by_run["accuracy"].mean()
    summary["stddev"] = by_run["accuracy"].std()
    # The largest over the seeds.
    summary[[*_ROUNDED_UP]] = by_run[[*_ROUNDED_UP]].max()
    summary[["rounds", "seconds"]] = by_run[["rounds", "seconds"]].mean()
    root.mkdir(parents=True, exist_ok=True)
    for name, table in (("runs", runs.drop(columns="run")), ("summary", summary)):
        for figure in _ROUNDED_UP:
            table[figure] = table[figure].map(lambda v: format_up(v, 7), "ignore")
        text = table.to_csv(index=False, float_format="%.7g")
        _files.write_text(root / f"{name}.csv", text)
