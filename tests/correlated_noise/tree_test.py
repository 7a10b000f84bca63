import numpy as np
import pytest

from tests.correlated_noise import references
from tfdp_fl.correlated_noise import participation, tree, workload


@pytest.mark.parametrize("rounds", range(1, 13))
def test_no_pattern_is_worse_than_the_sensitivity(rounds):
    for every in range(1, rounds + 1):
        matrix = references.tree_matrix(rounds, every)
        for gap in range(1, rounds + 1):
            worst = references.worst_by_count(matrix, gap)
            for most in range(1, rounds + 1):
                promised = participation.Participation(
                    rounds=rounds, min_separation=gap, max_participations=most
                )
                found = np.sum(tree.charges(promised, every) ** 2)
                assert found >= worst[most] - 1e-9


def test_the_sensitivity_is_no_larger_than_it_has_to_be():
    for rounds in (1, 2, 4, 8):
        matrix = references.tree_matrix(rounds, rounds)
        for gap in (1, 2, 4):
            worst = references.worst_by_count(matrix, gap)
            promised = participation.Participation(rounds=rounds, min_separation=gap)
            found = np.sum(tree.charges(promised, rounds) ** 2)
            assert found == pytest.approx(worst[-1])


@pytest.mark.parametrize("every", [3, 4, 12])
@pytest.mark.parametrize("gap", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [1, 2, 12])
def test_first_rounds_are_charged_what_they_release(every, gap, most):
    promised = participation.Participation(
        rounds=12, min_separation=gap, max_participations=most
    )
    squares = np.cumsum(tree.charges(promised, every) ** 2)
    for rounds in range(1, 13):
        matrix = references.tree_matrix(rounds, every)
        worst = references.worst_by_count(matrix, gap)
        assert squares[rounds - 1] >= worst[: most + 1][-1] - 1e-9


def test_restarts_within_the_min_separation_cost_one_path_each():
    promised = participation.Participation(rounds=64, min_separation=16)
    found = np.sum(tree.charges(promised, 16) ** 2)
    assert found == pytest.approx(4 * (4 + 1))


def best_estimates(rounds, every):
    """Returns B = A C+ row by row, from the nodes finished so far."""
    matrix = references.tree_matrix(rounds, every)
    ends = np.array([np.flatnonzero(row)[-1] for row in matrix])
    errors = []
    for t in range(rounds):
        known = matrix[ends <= t][:, : t + 1]
        solution = np.ones(t + 1) @ np.linalg.pinv(known)
        errors.append(solution @ solution)
    return np.array(errors)


@pytest.mark.parametrize(("rounds", "every"), [(12, 12), (12, 5), (16, 16)])
def test_prefix_sums_are_the_best_estimates_there_are(rounds, every):
    np.testing.assert_allclose(
        tree.stack_variances(rounds, every), best_estimates(rounds, every)
    )


@pytest.mark.parametrize(("rounds", "every"), [(12, 12), (12, 5), (16, 16)])
def test_rows_are_the_noise_whose_variance_is_said(rounds, every):
    rows = tree.noise_rows(rounds, every)
    np.testing.assert_allclose(
        np.sum(np.cumsum(rows, axis=0) ** 2, axis=1),
        tree.squared_errors(rounds, every, workload.Workload()),
    )


def test_other_workloads_go_by_the_rows():
    momentum = workload.Workload(momentum=0.9)
    almost_none = workload.Workload(momentum=1e-12)
    np.testing.assert_allclose(
        tree.squared_errors(12, 12, almost_none),
        tree.stack_variances(12, 12),
    )
    rows = momentum.applied(np.eye(12)) @ tree.noise_rows(12, 12)
    np.testing.assert_allclose(
        tree.squared_errors(12, 12, momentum), np.sum(rows**2, axis=1)
    )
