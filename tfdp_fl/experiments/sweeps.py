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
import os
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.experiments import run_directory, training
from tfdp_fl.experiments.run_directory import Run
from tfdp_fl.experiments.settings import Settings

_PARTS = ("description", "base", "grid", "runs", "seeds")
# What may differ between the seeds, and is given as their mean.
_MEANS = ("rounds", "seconds")
# What a table of runs says of each, by its name in `result.json`.
FIGURES = ("accuracy", "loss", "epsilon", "delta", "central_epsilon", *_MEANS)
RUNS_TABLE = "runs.csv"
SUMMARY_TABLE = "summary.csv"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
      name: What sets it apart, such as `mechanism=fixed,target_epsilon=2`.
      varied: The settings that set it apart.
      settings: All its settings, resolved, the seed included.
    """

    name: str
    varied: dict[str, Any]
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
                settings = Settings.from_dict(values).resolved()
            except ValueError as error:
                raise ValueError(f"Run {name!r}: {error}") from error
            trials.append(Trial(name, varied, settings))
    names = [trial.directory for trial in trials]
    if len({*names}) < len(names):
        raise ValueError("Two runs of the configuration are the same.")
    return trials


def run_sweep(
    config: Mapping[str, Any],
    output_dir: str | os.PathLike[str],
    *,
    say: Callable[[str], None] = print,
    verbose: int = 0,
) -> list[str]:
    """Runs what is not there yet, one after the other, in this process.

    Each run leaves its files in a directory of its own, and after each the
    tables are written anew: `runs.csv` (a row a run) and `summary.csv` (mean
    and standard deviation over the seeds). A sweep that was cut short goes on with
    the first run that has no result (and inside it, if it saved checkpoints).

    Args:
      config: See this module.
      output_dir: Where the runs are kept; may hold earlier ones of this sweep.
      say: Called with a line for each run.
      verbose: As in `fit`.

    Returns:
      The runs that failed, with their errors; empty if all went well.

    Raises:
      ValueError: The configuration is refused, or the directory holds a run
        of the same name with other settings.
    """
    root = pathlib.Path(output_dir)
    trials = expand(config)
    for trial in trials:
        _check_unchanged(root, trial)
    failed = []
    for number, trial in enumerate(trials, 1):
        path = root / trial.directory
        head = f"[{number}/{len(trials)}] {trial.directory}"
        if (path / run_directory.RESULT).is_file():
            say(f"{head}: there already")
            continue
        try:
            result = _run(trial, path, verbose)
        except Exception as error:
            # One bad corner of a search must not lose the rest of it.
            failed.append(f"{trial.directory}: {error}")
            say(f"{head}: failed: {error}")
            continue
        say(
            f"{head}: accuracy {result['accuracy']:.4f}, epsilon "
            f"{result['epsilon']:.4g}, {result['rounds']} rounds, "
            f"{result['seconds']:.0f} s"
        )
        write_tables(root, trials)
    write_tables(root, trials)
    return failed


def _check_unchanged(root: pathlib.Path, trial: Trial) -> None:
    path = root / trial.directory
    if not (path / run_directory.CONFIG).is_file():
        return
    num_clients = Run.read(path).result.get("num_clients")
    settings = trial.settings
    if num_clients is not None:
        settings = settings.for_population(num_clients)
    before = Settings.read(path / run_directory.CONFIG)
    for name, value in settings.to_dict().items():
        if value != "all" and getattr(before, name) != value:
            raise ValueError(
                f"{path} holds a run with {name}={getattr(before, name)!r}, "
                f"where the configuration has {value!r}; give the sweep "
                "another output_dir."
            )


def _run(trial: Trial, path: pathlib.Path, verbose: int) -> dict[str, Any]:
    tf.keras.backend.clear_session()
    resume = trial.settings.checkpoint_every > 0 and any(
        (path / run_directory.CHECKPOINT).glob("*.npz")
    )
    prepared = training.prepare(trial.settings)
    result = training.run(
        prepared,
        path,
        overwrite=path.exists() and not resume,
        resume=resume,
        verbose=verbose,
    )
    if result["stopped"] == "interrupted":
        (path / run_directory.RESULT).unlink()
        raise KeyboardInterrupt
    return result


def write_tables(root: pathlib.Path, trials: Sequence[Trial]) -> None:
    """Writes `runs.csv` and `summary.csv` from the results there are."""
    varied = list(dict.fromkeys(k for t in trials for k in t.varied))
    rows: list[dict[str, Any]] = []
    groups: dict[str, tuple[Trial, list[dict[str, Any]]]] = {}
    for trial in trials:
        path = root / trial.directory / run_directory.RESULT
        if path.is_file():
            result = json.loads(path.read_text("utf-8"))
            figures = {name: result[name] for name in FIGURES if name in result}
            seed = {"seed": "" if trial.settings.seed is None else trial.settings.seed}
            rows.append({**trial.varied, **seed, **figures})
            groups.setdefault(trial.name, (trial, []))[1].append(result)
    root.mkdir(parents=True, exist_ok=True)
    run_directory.write_csv(root / RUNS_TABLE, rows, [*varied, "seed", *FIGURES])
    summary = []
    for trial, results in groups.values():
        accuracies = [result["accuracy"] for result in results]
        row = {
            **trial.varied,
            "runs": len(results),
            "accuracy": statistics.fmean(accuracies),
            "delta": results[0]["delta"],
        }
        if len(results) > 1:
            row["stddev"] = statistics.stdev(accuracies)
        for name in ("epsilon", "central_epsilon"):  # The worst of the seeds.
            found = [result[name] for result in results if name in result]
            if found:
                row[name] = None if None in found else max(found)
        for name in _MEANS:
            row[name] = statistics.fmean(result[name] for result in results)
        summary.append(row)
    columns = [*varied, "runs", "accuracy", "stddev"]
    columns += ["epsilon", "delta", "central_epsilon", *_MEANS]
    run_directory.write_csv(root / SUMMARY_TABLE, summary, columns)
