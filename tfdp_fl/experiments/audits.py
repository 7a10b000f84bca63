"""An audit of a run from its settings: train with canaries, compare, draw."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from typing import Any

import numpy as np

from tfdp_fl import auditing
from tfdp_fl.experiments import plots, run_directory, training

RESULT, CHART = "audit.json", "audit.png"


def run(
    prepared: training.Prepared,
    audit: auditing.CanaryAudit,
    output_dir: str | os.PathLike[str],
    verbose: str | int = "auto",
) -> dict[str, Any]:
    """Trains with canaries, and leaves `audit.json` and `audit.png`.

    Args:
      prepared: The run.
      audit: A new audit.
      output_dir: Where the files go; it exists.
      verbose: As in `fit`.

    Returns:
      What `audit.json` holds: "claimed" (the smaller of the epsilons by RDP
      and by PLD, each of which is a bound), "estimate", "low" and "high" (95 %)
      at "delta", "above_the_claim" (whether "low" is above "claimed"), and what
      was run.

    Raises:
      ValueError: The mechanism is not one that is audited; it says why.
    """
    settings, fed = prepared.settings, prepared.federated_model
    started = time.perf_counter()
    fed.fit(
        prepared.task.clients,
        rounds=settings.rounds,
        batch_size=settings.batch_size,
        local_epochs=settings.local_epochs,
        verbose=verbose,
        seed=settings.seed,
        shuffle=settings.shuffle,
        audit=audit,
    )
    found = audit.estimate(prepared.delta)
    claimed = {by: fed.epsilon(prepared.delta, by) for by in ("rdp", "pld")}
    result = {
        **{f"claimed_{by}": value for by, value in claimed.items()},
        "claimed": min(claimed.values()),
        "estimate": found.epsilon,
        "low": found.low,
        "high": found.high,
        "delta": prepared.delta,
        "above_the_claim": bool(found.low > min(claimed.values())),
        "num_canaries": found.num_canaries,
        "iterates": audit.iterates,
        "mean_score": found.mean,
        "spread": found.spread,
        "rounds": fed.rounds,
        "mechanism": fed.mechanism.name,
        "sampling": fed.sampling,
        "num_parameters": fed.model.count_params(),
        "seconds": round(time.perf_counter() - started, 2),
        "settings": dataclasses.asdict(settings),
    }
    path = pathlib.Path(output_dir)
    run_directory.write_json(path / RESULT, result)
    plots.plot_audit(*standardized(audit.scores), result, path / CHART)
    return result


def standardized(
    scores: auditing.Scores,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the scores in standard deviations of those who were not there.

    Returns:
      Float64 [k] of those who took part, and float64 [k'] of the others; None
      for N(0, 1), where that is known.
    """
    observed = np.asarray(scores.observed, np.float64)
    if scores.unobserved is None:
        return observed / scores.null_std, None
    others = np.asarray(scores.unobserved, np.float64)
    mean, std = float(others.mean()), float(others.std(ddof=1))
    return (observed - mean) / std, (others - mean) / std
