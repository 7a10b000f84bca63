"""Who trains where: everybody once, on their own rows, by few programs."""

from __future__ import annotations

from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.engine import cohorts
from tfdp_fl.engine import chunks, dense_models, layout

_KERNELS = dense_models.Kernels(parameters=10_000, largest=9_000, sides=200, widths=300)


def _passes(table, place):
    """Returns the rows of each pass of one client."""
    length, first = int(table.num_examples[place]), int(table.first_row[place])
    rows = table.rows[first : first + length * int(table.epochs)]
    return rows.reshape(int(table.epochs), length).tolist()


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(
    *(st.lists(st.integers(0, 23), max_size=9), st.integers(1, 12)),
    *(st.integers(1, 3), st.sampled_from([None, 0, 7])),
)
def test_every_pass_is_over_the_clients_own_rows(lengths, batch_size, epochs, seed):
    rows = np.random.default_rng(0).permutation(1000)[: sum(lengths)]
    shuffle = None if seed is None else np.random.default_rng(seed)
    lengths = np.array(lengths, int)
    table = layout.client_table(rows, lengths, batch_size, epochs, shuffle)
    for place, own in enumerate(np.split(rows, np.cumsum(lengths))[:-1]):
        for seen in _passes(table, place):
            assert sorted(seen) == sorted(own)
            if seed is None:
                assert seen == own.tolist()
    assert table.batch.tolist() == list(range(batch_size))
    assert table.num_examples.tolist() == lengths.tolist()
    assert table.steps.tolist() == [-(-n // batch_size) * epochs for n in lengths]
    full = any(lengths) and not any(lengths % batch_size)
    assert table.has_full_batches_only == full


@pytest.mark.parametrize("lengths", [[], [8] * 7, [7, 0, 3, 12, 5, 5], [4]])
@pytest.mark.parametrize("num_groups", [1, 2, 5])
@pytest.mark.parametrize("how", ["side by side", "one by one", "batched"])
@pytest.mark.parametrize("for_workers", [False, True])
@pytest.mark.parametrize("collected_bytes", [None, 2**25])
def test_everybody_trains_once_on_their_own_rows(
    lengths, num_groups, how, for_workers, collected_bytes
):
    made = layout.Layout(
        kernels=_KERNELS,
        collected_bytes=collected_bytes,
        xla=True,
        at_once=3 if how == "batched" else None,
    )
    beside = how == "side by side" and bool(lengths)
    ends, seen = np.cumsum(lengths), []
    chunk = chunks.CohortChunk(
        x=(),
        y=np.zeros(sum(lengths)),
        rows=np.arange(sum(lengths)),
        lengths=np.array(lengths, np.int64),
        members=3 * np.arange(len(lengths)),  # Not all of the cohort.
    )
    inputs = cohorts.inputs(mock.Mock(num_clients=100), batch_size=4, local_epochs=2)
    with cohorts.side_by_side(beside):
        groups = made.lay_out(chunk, inputs, num_groups, for_workers=for_workers)
    if for_workers:  # One program serves them all.
        assert len({part.strategy for group in groups for part in group}) == 1
    assert 1 <= len(groups) <= num_groups
    for part in (part for group in groups for part in group):
        if beside:
            assert part.strategy.kind == layout.SIDE_BY_SIDE
        if part.strategy.kind == layout.BATCHED:
            assert len({(n - 1) % 4 for n in part.table.num_examples if n}) <= 1
            assert len(part.members) <= 3
        if part.strategy.full_batches:
            assert part.table.has_full_batches_only
        for place, member in enumerate(part.members.tolist()):
            seen.append(member)
            end = ends[member // 3]
            own = list(range(end - lengths[member // 3], end))
            assert _passes(part.table, place) == [own] * 2
        assert len(part.members) == part.table.num_clients
    assert sorted(seen) == [3 * k for k in range(len(lengths))]
