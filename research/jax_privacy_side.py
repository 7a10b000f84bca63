r"""Correlated noise side by side with Google's jax-privacy.

    make jax-privacy        # an environment of its own, and this program in it

For every strategy and every (T, k, b): our coefficients against those that
jax-privacy makes of the same parameters, its sensitivity and its error of them
against ours, and its own optimum against ours. TensorFlow is not needed.
`--optima=128` bounds the T for which it is asked for its own optimum: that of
a large T takes it minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tfdp_fl import correlated_noise
from tfdp_fl.correlated_noise import Participation, Workload

# T, k, b, and the numbers of bands.
RUNS = (
    (16, 1, 16, (8,)),
    (16, 2, 8, (8,)),
    (64, 1, 64, (8, 32)),
    (64, 8, 8, (8,)),
    (128, 4, 32, (8, 32)),
    (512, 16, 32, (8, 32)),
    (2048, 8, 256, (32, 256)),
)
BUFFERS = (2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy in one run; differences are relative.

    Attributes:
      run: T, k, b.
      strategy: Its name.
      coefficients: The largest difference of c_0, ..., c_(T-1); None where
        both are given the same.
      sensitivity: The difference.
      error: The largest difference of the models' errors.
      ours: Error of the last model times sensitivity.
      theirs: That of jax-privacy's own optimum; None if it was not asked.
      our_seconds: What the optimum took.
      their_seconds: Likewise.
    """

    run: tuple[int, int, int]
    strategy: str
    coefficients: float | None
    sensitivity: float
    error: float
    ours: float
    theirs: float | None
    our_seconds: float
    their_seconds: float | None

    def cells(self) -> list[str]:
        """Returns it as a table has it."""
        return [
            ", ".join(map(str, self.run)),
            self.strategy,
            _small(self.coefficients),
            _small(self.sensitivity),
            _small(self.error),
            f"{self.ours:.4f}",
            "–" if self.theirs is None else f"{self.theirs:.4f}",
            f"{self.our_seconds:.2f}",
            "–" if self.their_seconds is None else f"{self.their_seconds:.1f}",
        ]


HEADER = (
    "T, k, b",
    "strategy",
    "coefficients",
    "sensitivity",
    "error",
    "optimum here",
    "jax-privacy's",
    "seconds",
    "its seconds",
)


def _small(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def _distance(one: Any, other: Any) -> float:
    one, other = np.asarray(one, float), np.asarray(other, float)
    return float(np.max(np.abs(one - other) / np.maximum(np.abs(one), 1e-300)))


def _compared(
    run: tuple[int, int, int],
    strategy: correlated_noise.Strategy,
    name: str,
    asked: bool,
) -> Row:
    """Returns one row; `asked`: whether for its own optimum."""
    from jax_privacy.matrix_factorization import toeplitz

    rounds, most, gap = run
    started = time.perf_counter()
    where = Participation(rounds=rounds, min_separation=gap, max_participations=most)
    made = strategy.make(where, Workload())
    our_seconds = time.perf_counter() - started
    c = np.zeros(rounds)
    c[: len(made.coefficients)] = made.coefficients
    sensitivity = np.sqrt(
        toeplitz.minsep_sensitivity_squared(
            c, min_sep=gap, max_participations=most, n=rounds
        )
    )
    errors = toeplitz.per_query_error(strategy_coef=c, n=rounds)
    coefficients = None
    if isinstance(strategy, correlated_noise.BLT):
        coefficients = _distance(c, _blt_coefficients(made, rounds))
    theirs = seconds = None
    if asked:
        started = time.perf_counter()
        theirs = _optimum(run, strategy)
        seconds = time.perf_counter() - started
    return Row(
        run=run,
        strategy=name,
        coefficients=coefficients,
        sensitivity=_distance(made.sensitivity, sensitivity),
        error=_distance(made.squared_errors(Workload()), errors),
        ours=made.max_error(Workload()) * made.sensitivity,
        theirs=theirs,
        our_seconds=our_seconds,
        their_seconds=seconds,
    )


def _blt_coefficients(made: Any, rounds: int) -> Any:
    from jax_privacy.matrix_factorization import buffered_toeplitz

    return buffered_toeplitz.BufferedToeplitz.build(
        buf_decay=made.theta, output_scale=made.weights
    ).toeplitz_coefs(rounds)


def _optimum(run: tuple[int, int, int], strategy: correlated_noise.Strategy) -> float:
    """Returns error of the last model times sensitivity, by jax-privacy."""
    from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

    rounds, most, gap = run
    if isinstance(strategy, correlated_noise.BLT):
        loss = buffered_toeplitz.LossFn.build_min_sep(
            n=rounds, error="max", min_sep=gap, max_participations=most
        )
        blt, _ = buffered_toeplitz.optimize_loss(loss, num_buffers=strategy.num_buffers)
        c = blt.toeplitz_coefs(rounds)
    else:
        c = toeplitz.optimize_banded_toeplitz(
            rounds, strategy.bands, reduction_fn=lambda errors: errors[-1]
        )
        c = toeplitz.pad_coefs_to_n(c, rounds)
    square = toeplitz.minsep_sensitivity_squared(
        c, min_sep=gap, max_participations=most, n=rounds, skip_checks=True
    )
    errors = toeplitz.per_query_error(strategy_coef=c, n=rounds)
    return float(np.sqrt(square * errors[-1]))


def rows(largest: int, optima: int) -> Iterator[Row]:
    """Yields the rows.

    Args:
      largest: Runs of more rounds than that are left out.
      optima: For runs of so many rounds jax-privacy's optimum is asked for.
    """
    for rounds, most, gap, bands in RUNS:
        if rounds > largest:
            continue
        run = (rounds, most, gap)
        strategies: dict[str, correlated_noise.Strategy] = {
            f"{count} bands": correlated_noise.BandedToeplitz(count) for count in bands
        }
        for count in BUFFERS:
            strategies[f"{count} buffers"] = correlated_noise.BLT(count)
        for name, strategy in strategies.items():
            yield _compared(run, strategy, name, rounds <= optima)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--largest", type=int, default=2048)
    parser.add_argument("--optima", type=int, default=128)
    chosen = parser.parse_args(arguments)
    try:
        import jax
        import jax_privacy
    except ImportError:
        print("jax-privacy is not installed here; run: make jax-privacy")
        return 2
    jax.config.update("jax_enable_x64", True)
    warnings.filterwarnings("ignore")
    del jax_privacy
    _line(HEADER)
    _line(["---"] * len(HEADER))
    worst = lost = 0.0
    for row in rows(chosen.largest, chosen.optima):
        _line(row.cells())
        worst = max(worst, row.sensitivity, row.error, row.coefficients or 0.0)
        if row.theirs is not None:
            lost = max(lost, row.ours / row.theirs - 1)
    print(
        f"\nThe same numbers differ by at most {worst:.0e}; our optimum is at "
        f"most {100 * lost:.2f} % above jax-privacy's."
    )
    return int(worst > 1e-9 or lost > 5e-3)


def _line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
