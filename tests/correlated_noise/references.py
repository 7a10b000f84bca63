"""The definitions, written down as dense matrices and tried out in full."""

import itertools

import numpy as np
from scipy import linalg


def dense(coefficients, rounds):
    """Returns C, lower-triangular Toeplitz."""
    column = np.zeros(rounds)
    column[: len(coefficients)] = coefficients[:rounds]
    return linalg.toeplitz(column, np.zeros(rounds))


def worst_by_count(strategy, min_separation):
    """Returns max over patterns of sum |(C'C)_ij|, by how many rounds.

    Entry k is for at most k participations, at least `min_separation` apart.
    """
    rounds = strategy.shape[1]
    products = np.abs(strategy.T @ strategy)
    worst = np.zeros(rounds + 1)
    for count in range(1, -(-rounds // min_separation) + 1):
        slack = rounds - (count - 1) * (min_separation - 1)
        for places in itertools.combinations(range(slack), count):
            pattern = np.array(places) + np.arange(count) * (min_separation - 1)
            value = products[np.ix_(pattern, pattern)].sum()
            worst[count] = max(worst[count], value)
    return np.maximum.accumulate(worst)
