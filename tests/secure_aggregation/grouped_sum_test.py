"""A cohort summed in groups, and what each party sees of it."""

import itertools
import tracemalloc
from unittest import mock

import numpy as np
import pytest

from tests.mechanisms.statistics import are_uniform
from tests.secure_aggregation.network import Network
from tfdp_fl.secure_aggregation import (
    AdditiveSecretSharing,
    split_into_groups,
    sum_in_groups,
)

_RING = AdditiveSecretSharing()


@pytest.mark.parametrize("size", [3, 4, 5, 7, 50, 100, 101])
@pytest.mark.parametrize("group", [3, 5, 10])
def test_no_group_is_too_small_and_all_are_in_one(size, group):
    groups = split_into_groups(size, _RING, group)
    assert [i for g in groups for i in g] == list(range(size))
    sizes = [len(g) for g in groups]
    assert min(size, group) <= min(sizes) <= max(sizes) < 2 * group
    assert max(sizes) - min(sizes) <= 1
    # Limits that cannot be kept.
    protocol = AdditiveSecretSharing(min_participants=5, max_participants=6)
    with pytest.raises(ValueError, match="cohort of 7 "):
        split_into_groups(7, protocol)
    for group_size in (2, 101):  # Of two each reads the other; 101 may wrap.
        with pytest.raises(ValueError, match=f"got {group_size}"):
            split_into_groups(202, _RING, group_size)


def _updates(dtype=np.float32):
    return np.random.default_rng(0).normal(size=(17, 40)).astype(dtype)


@pytest.mark.parametrize("kind", [{"bits": 32}, {"bits": 64}, {"mode": "float"}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_total_and_groups(kind, dtype):
    protocol, updates = AdditiveSecretSharing(**kind), _updates(dtype)
    update_of = mock.Mock(side_effect=updates.__getitem__)
    result = sum_in_groups(update_of, protocol, group_size=5, num_members=17)
    assert update_of.mock_calls == [mock.call(index) for index in range(17)]
    assert result.failed_members == ()
    assert result.succeeded_members == tuple(range(17))
    tolerance = 17 * protocol.resolution / 2 if kind == {"bits": 32} else 1e-11
    assert len(result.groups) == 3
    sums = [(slice(None), result.total)]
    for indices, outcome in result.groups:
        assert (outcome.succeeded, outcome.members) == (True, indices)
        sums.append((list(indices), outcome.value))
    for rows, value in sums:
        expected = updates[rows].sum(axis=0, dtype=np.float64)
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)


def test_memory_does_not_grow_with_the_group():
    updates, peaks = np.ones([12, 50_000]), []
    for size in (3, 12):
        tracemalloc.start()
        sum_in_groups(updates[:size], _RING, group_size=size)
        peaks.append(tracemalloc.get_traced_memory()[1] / updates[0].nbytes)
        tracemalloc.stop()
    assert max(peaks) < 1.1 * min(peaks) < 9


def test_what_cannot_be_summed():
    updates = list(_updates())
    # A cohort below the minimum fails whole.
    for size in (1, 2):
        result = sum_in_groups(updates[:size], _RING)
        assert result.total is None
        assert result.failed_members == tuple(range(size))
        ((_, outcome),) = result.groups
        assert not outcome.succeeded
        assert "min_participants=3" in outcome.reason
    with pytest.raises(TypeError, match="num_members"):
        sum_in_groups(lambda i: updates[i], _RING)
    with pytest.raises(ValueError, match=r"the shape \(40,\), got \(1,\) of member 1"):
        sum_in_groups([updates[0], updates[1][:1], updates[2]], _RING)


def test_what_a_member_sees_depends_on_the_others_sum_only():
    # Members 1 and 2 hold +a and -a, then -a and +a; member 0 sees four messages, three
    # of which determine the fourth. Every three are jointly uniform in either half.
    size, a = 2_000_000, 50.0
    first = np.where(np.arange(size) < size // 2, a, -a)
    network = Network()
    outcomes = network.run({0: np.zeros(size), 1: first, 2: -first}, _RING)
    np.testing.assert_array_equal(outcomes[0].value, np.zeros(size))
    view = {
        (message.kind, message.sender): message.tensors[0]
        for message in network.delivered
        if message.recipient == 0
    }
    seen = itertools.product(("share", "partial_sum"), (1, 2))
    assert set(view) == set(seen)
    top = [(value >> np.uint64(61)).astype(np.int64) for value in view.values()]
    for three in itertools.combinations(top, 3):
        cells = three[0] * 64 + three[1] * 8 + three[2]
        for half in (cells[: size // 2], cells[size // 2 :]):
            assert are_uniform(half, 512)
