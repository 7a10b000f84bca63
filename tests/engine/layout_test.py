"""Who trains where: everybody once, on their own rows, by few programs."""

from __future__ import annotations

import dataclasses
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.engine import cohorts
from tfdp_fl.engine import chunks, dense_models, layout

_KERNELS = dense_models.Kernels(parameters=10_000, largest=9_000, sides=200, widths=300)
_PLAIN = layout.Layout(kernels=None, collected_bytes=None, xla=False)
_LENGTHS = st.lists(st.integers(0, 23), max_size=9)
_SETTINGS = hypothesis.settings(deadline=None, max_examples=60, derandomize=True)


def _passes(table, place):
    """Returns the rows of each pass of one client."""
    length, first = int(table.num_examples[place]), int(table.first_row[place])
    rows = table.rows[first : first + length * int(table.epochs)]
    return rows.reshape(int(table.epochs), length).tolist()


@_SETTINGS
@hypothesis.given(
    _LENGTHS, st.integers(1, 12), st.integers(1, 3), st.sampled_from([None, 0, 7])
)
def test_every_pass_is_over_the_clients_own_rows(lengths, batch_size, epochs, seed):
    rows = np.random.default_rng(0).permutation(1000)[: sum(lengths)]
    shuffle = None if seed is None else np.random.default_rng(seed)
    table = layout.client_table(
        rows, np.array(lengths, int), batch_size, epochs, shuffle
    )
    for place, (length, end) in enumerate(
        zip(lengths, np.cumsum(lengths), strict=True)
    ):
        own = rows[end - length : end].tolist()
        for seen in _passes(table, place):
            assert sorted(seen) == sorted(own)
            if seed is None:
                assert seen == own
    assert table.batch.tolist() == list(range(batch_size))
    assert table.num_examples.tolist() == lengths
    assert table.steps.tolist() == [-(-n // batch_size) * epochs for n in lengths]
    full = any(lengths) and not any(n % batch_size for n in lengths)
    assert table.has_full_batches_only == full


def _lay_out(made, lengths, num_groups=2, worthwhile=False, windows=None, **options):
    lengths = np.array(lengths, np.int64)
    chunk = chunks.CohortChunk(
        x=(),
        y=np.zeros(lengths.sum()),
        rows=np.arange(lengths.sum()),
        lengths=lengths,
        members=3 * np.arange(len(lengths)),  # Not all of the cohort.
    )
    dataset = mock.Mock(num_clients=100)
    inputs = cohorts.inputs(dataset, batch_size=4, local_epochs=2, windows=windows)
    with cohorts.side_by_side(worthwhile):
        return made.lay_out(chunk, inputs, num_groups, **options)


def _sizes(group):
    return [len(part.members) for part in group]


@pytest.mark.parametrize("lengths", [[8] * 7, [7, 0, 3, 12, 5, 5], [4]])
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
    beside = how == "side by side"
    groups = _lay_out(made, lengths, num_groups, beside, for_workers=for_workers)
    assert 1 <= len(groups) <= num_groups
    ends = np.cumsum(lengths)
    seen = []
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


@pytest.mark.parametrize("lengths", [[8, 8, 5, 12, 3, 16], [8] * 6])
@pytest.mark.parametrize("worthwhile", [False, True])
@pytest.mark.parametrize("small", [False, True])
def test_workers_are_served_by_one_program(lengths, worthwhile, small):
    made = layout.Layout(kernels=_KERNELS, collected_bytes=None, xla=True)
    with mock.patch.object(dense_models, "is_small", lambda *_: small):
        groups = _lay_out(made, lengths, 3, worthwhile, for_workers=True)
    assert len(groups) == (1 if small and worthwhile else 3)
    (strategy,) = {part.strategy for group in groups for part in group}
    assert not strategy.xla
    assert strategy.full_batches == (worthwhile and lengths == [8] * 6)
    assert (strategy.kind == layout.SIDE_BY_SIDE) == worthwhile


def test_updates_that_wait_are_bounded_in_memory():
    made = dataclasses.replace(_PLAIN, collected_bytes=chunks.CHUNK_BYTES // 3)
    for group in _lay_out(made, [8] * 20, 2):
        assert _sizes(group) == [3, 3, 3, 1]


def test_xla_compiles_full_batches_only_and_of_few_sizes():
    made = dataclasses.replace(_PLAIN, xla=True)
    for lengths in ([8, 7], [8, 0]):  # Nor where there is nothing to slice.
        ((full,), (other,)) = _lay_out(made, lengths, 2)
        assert full.strategy.xla
        assert not other.strategy.xla
    ((full,),) = _lay_out(made, [8, 8, 8], 1)
    assert full.strategy.xla
    table = full.table
    assert table.num_clients == 3
    assert [len(part) for part in (table.members, table.first_row)] == [4, 4]
    assert len(table.rows) == 64


def test_nobody_is_a_part_too():
    for made in (_PLAIN, dataclasses.replace(_PLAIN, at_once=3)):
        for group in _lay_out(made, []):
            assert _sizes(group) == [0]


def test_every_client_has_its_own_window():
    windows = np.arange(100 * 2, dtype=np.float32).reshape(100, 2, 1)
    for xla in (False, True):
        made = dataclasses.replace(_PLAIN, xla=xla)
        for (part,) in _lay_out(made, [8, 7, 16], windows=windows):
            own = part.table.windows[: len(part.members)]
            np.testing.assert_array_equal(own, windows[part.members])
