"""What a test may say of noise, and how often it says it wrongly."""

import math

import numpy as np
from scipy import stats

# Two-sided, for each assertion below; a suite with some hundreds of them
# raises a false alarm less than once in 1e6 runs of any one test.
FALSE_ALARM = 1e-8


def assert_gaussian(values, stddev: float) -> None:
    """Asserts that values are independent draws of N(0, stddev^2).

    By their mean, their mean square, and their fourth moment. From 2e4 values on, a
    stddev that is wrong by a factor 1.1 is always noticed (the bounds are within 4.1
    %).
    """
    scaled = np.asarray(values, float).ravel() / stddev
    count = len(scaled)
    assert count >= 20_000, f"{count} values are too few to tell"
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], count)
    square = float(np.sum(scaled**2))
    found = math.sqrt(square / count) * stddev
    assert low <= square <= high, f"stddev {found:.6g}, expected {stddev:.6g}"
    quantile = stats.norm.ppf(1 - FALSE_ALARM / 2)
    assert abs(np.mean(scaled)) <= quantile / math.sqrt(count)
    bound = 1.5 * quantile * math.sqrt(96 / count)
    assert abs(np.mean(scaled**4) - 3) <= bound


def assert_uncorrelated(first, second) -> None:
    """Asserts that two equally long samples have nothing in common."""
    first, second = (np.ravel(each).astype(float) for each in (first, second))
    assert len(first) == len(second) >= 1_000
    correlation = float(np.corrcoef(first, second)[0, 1])
    bound = stats.norm.ppf(1 - FALSE_ALARM / 2) / math.sqrt(len(first))
    assert abs(correlation) <= bound, f"correlation {correlation:.4g}"


def are_uniform(cells, num_cells: int) -> bool:
    """Returns whether cell numbers look uniform over all cells."""
    counts = np.bincount(np.ravel(cells), minlength=num_cells)
    return stats.chisquare(counts).pvalue > FALSE_ALARM
