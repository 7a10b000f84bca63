"""Sensitivity and error of binary-tree aggregation.

Kairouz et al. (2021), "Practical and Private (Deep) Learning without Sampling
or Shuffling" (https://arxiv.org/abs/2103.00039), with the estimates of Honaker
(2015), "Efficient Use of Differentially Private Binary Trees", from below: a
node at height h is the sum of 2^h consecutive rounds with noise of its own, and
a finished subtree is estimated from all of its nodes.
"""

from __future__ import annotations

import numpy as np

from tfdp_fl.correlated_noise.participation import Participation
from tfdp_fl.correlated_noise.workload import Workload


def squared_sensitivity(
    rounds: int, participation: Participation, restart_every: int
) -> int:
    """Returns the squared sensitivity of the nodes of the first rounds.

    A client's g = ceil(2^h / b) or fewer rounds lie in one node of height h;
    k of them weigh the most when they fill nodes:
    sum over h of floor(k/g) g^2 + (k mod g)^2. That holds for the nodes of any
    number of trees, so also with restarts.

    Args:
      rounds: How many rounds, at most T.
      participation: (k, b) and T.
      restart_every: A new tree begins after so many rounds.
    """
    gap = participation.min_separation
    most = min(participation.most, -(-rounds // gap))
    total, size = 0, 1
    while size <= min(rounds, restart_every):
        group = -(-size // gap)
        full, rest = divmod(most, group)
        total += full * group**2 + rest**2
        size *= 2
    return total


def charges(participation: Participation, restart_every: int) -> np.ndarray:
    """Returns col: square roots of the rises of `squared_sensitivity`.

    Float64 [T]; 0 for a round that adds nothing to what the worst client has
    spent.
    """
    squares = [
        squared_sensitivity(rounds, participation, restart_every)
        for rounds in range(participation.rounds + 1)
    ]
    return np.sqrt(np.diff(np.array(squares, np.float64)))


def height_count(rounds: int) -> int:
    """Returns how many heights the nodes of so many rounds have."""
    return rounds.bit_length()


def merged_weight(height: int) -> float:
    """Returns the inverse variance of the estimate of a node, 2 - 2^-h."""
    return 2.0 - 0.5**height


def stack_variances(rounds: int, restart_every: int) -> np.ndarray:
    """Returns the variance of every prefix sum's noise, float64 [rounds].

    After t rounds it is the sum of the estimates of the finished subtrees,
    one for each bit of t.
    """

    def of_one_tree(count: int) -> float:
        return sum(
            1 / merged_weight(height)
            for height in range(count.bit_length())
            if count >> height & 1
        )

    whole = of_one_tree(restart_every)
    variances = []
    for count in range(1, rounds + 1):
        trees, rest = divmod(count, restart_every)
        variances.append(trees * whole + of_one_tree(rest))
    return np.array(variances)


def squared_errors(rounds: int, restart_every: int, workload: Workload) -> np.ndarray:
    """Returns the variance of each model's noise for z of variance 1.

    Args:
      rounds: T.
      restart_every: A new tree begins after so many rounds.
      workload: A.

    Returns:
      Float64 [T].
    """
    if workload.rates is None and not workload.momentum:
        return stack_variances(rounds, restart_every)
    rows = noise_rows(rounds, restart_every)
    return np.sum(workload.applied(rows) ** 2, axis=1)


def noise_rows(rounds: int, restart_every: int) -> np.ndarray:
    """Returns the noise of every round in terms of the fresh draws.

    Args:
      rounds: T.
      restart_every: A new tree begins after so many rounds.

    Returns:
      Float64 [T, draws]: n is this matrix times draws of variance 1. Draws are
      in the order in which they are made: round by round, a round's leaf, then
      the nodes that it finishes, upwards.
    """
    draws = sum(node_count(t % restart_every + 1) for t in range(rounds))
    result = np.zeros((rounds, draws))
    stack = np.zeros((height_count(rounds), draws))
    before, drawn = np.zeros(draws), 0
    for t in range(rounds):
        place = t % restart_every
        if place == 0:
            stack[:], before = 0, np.zeros(draws)
        estimate = np.zeros(draws)
        estimate[drawn] = 1
        drawn += 1
        for height in range(node_count(place + 1) - 1):
            weight = merged_weight(height) / 2
            estimate = weight * (estimate + stack[height])
            estimate[drawn] += 1
            estimate /= weight + 1
            drawn += 1
            stack[height] = 0
        stack[node_count(place + 1) - 1] = estimate
        total = stack.sum(axis=0)
        result[t] = total - before
        before = total
    return result


def node_count(count: int) -> int:
    """Returns how many nodes are finished by round `count`, from 1."""
    return (count & -count).bit_length()
