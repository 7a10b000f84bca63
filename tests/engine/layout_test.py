"""Who trains where: everybody once, on their own rows, by few programs."""

from __future__ import annotations

import dataclasses
from unittest import mock

import hypothesis
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

from tests.engine import cohorts
from tfdp_fl.engine import chunks, dense_models, layout

_KERNELS = dense_models.Kernels(parameters=10_000, largest=9_000, sides=200, widths=300)
_PLAIN = layout.Layout(kernels=None, collected_bytes=None, xla=False)
_LENGTHS = st.lists(st.integers(0, 23), max_size=9)
_SETTINGS = hypothesis.settings(deadline=None, max_examples=60, derandomize=True)


def _rows(lengths):
    return np.random.default_rng(0).permutation(1000)[: sum(lengths)]


def _passes(table, place):
    """Returns the rows of each pass of one client."""
    length, first = int(table.num_examples[place]), int(table.first_row[place])
    rows = table.rows[first : first + length * int(table.epochs)]
    return rows.reshape(int(table.epochs), length).tolist()


class ClientTableTest(absltest.TestCase):
    @_SETTINGS
    @hypothesis.given(
        _LENGTHS, st.integers(1, 12), st.integers(1, 3), st.sampled_from([None, 0, 7])
    )
    def test_every_pass_is_over_the_clients_own_rows(
        self, lengths, batch_size, epochs, seed
    ):
        rows, ends = _rows(lengths), np.cumsum(lengths)
        table = layout.client_table(
            rows,
            np.array(lengths, int),
            batch_size,
            epochs,
            None if seed is None else np.random.default_rng(seed),
        )
        for place, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            own = rows[end - length : end].tolist()
            for seen in _passes(table, place):
                self.assertCountEqual(seen, own)
                if seed is None:
                    self.assertEqual(seen, own)
        self.assertEqual(table.batch.tolist(), list(range(batch_size)))
        self.assertEqual(table.num_examples.tolist(), lengths)
        self.assertEqual(
            table.steps.tolist(), [-(-n // batch_size) * epochs for n in lengths]
        )
        full = any(lengths) and not any(n % batch_size for n in lengths)
        self.assertEqual(table.has_full_batches_only, full)

    def test_epochs_are_shuffled_differently_and_repeat_with_the_generator(self):
        def rows_of(seed):
            generator = np.random.default_rng(seed)
            lengths = np.array([20, 20])
            return layout.client_table(np.arange(40), lengths, 20, 2, generator).rows

        orders = {tuple(row % 20) for row in rows_of(0).reshape(4, 20)}
        self.assertLen(orders, 4)
        np.testing.assert_array_equal(rows_of(0), rows_of(0))
        self.assertFalse(np.array_equal(rows_of(0), rows_of(1)))


class ShareOutTest(absltest.TestCase):
    @_SETTINGS
    @hypothesis.given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 5))
    def test_everyone_is_in_one_group_and_groups_end_together(self, work, n):
        work = np.array(work, np.int64)
        groups = layout.share_out(work, n)
        self.assertLen(groups, n)
        self.assertEqual(
            sorted(np.concatenate(groups).tolist()), list(range(len(work)))
        )
        loads = [int(work[group].sum()) for group in groups]
        # Graham: no group ends later than a last job after a fair share.
        largest = int(work.max()) if len(work) else 0
        self.assertLessEqual(max(loads), sum(work) / n + largest)
        self.assertLessEqual(max(loads) - min(loads), largest)


def _lay_out(made, lengths, num_groups=2, worthwhile=False, windows=None, **options):
    lengths = np.array(lengths, np.int64)
    chunk = chunks.CohortChunk(
        x=(),
        y=np.zeros(lengths.sum()),
        rows=np.arange(lengths.sum()),
        lengths=lengths,
        members=3 * np.arange(len(lengths)),  # Not all of the cohort.
    )
    inputs = cohorts.inputs(
        mock.Mock(num_clients=100), batch_size=4, local_epochs=2, windows=windows
    )
    with mock.patch.object(dense_models, "is_worthwhile", lambda *_: worthwhile):
        return made.lay_out(chunk, inputs, num_groups, **options)


def _sizes(group):
    return [len(part.members) for part in group]


class LayOutTest(parameterized.TestCase):
    @parameterized.product(
        lengths=([8] * 7, [7, 0, 3, 12, 5, 5], [4]),
        num_groups=(1, 2, 5),
        how=("side by side", "one by one", "batched"),
        for_workers=(False, True),
        collected_bytes=(None, 2**25),
    )
    def test_everybody_trains_once_on_their_own_rows(
        self, lengths, num_groups, how, for_workers, collected_bytes
    ):
        made = layout.Layout(
            kernels=_KERNELS,
            collected_bytes=collected_bytes,
            xla=True,
            at_once=3 if how == "batched" else None,
        )
        groups = _lay_out(
            made,
            lengths,
            num_groups,
            worthwhile=how == "side by side",
            for_workers=for_workers,
        )
        self.assertBetween(len(groups), 1, num_groups)
        ends = np.cumsum(lengths)
        seen = []
        for part in (part for group in groups for part in group):
            if how == "side by side":
                self.assertEqual(part.strategy.kind, layout.SIDE_BY_SIDE)
            if part.strategy.kind == layout.BATCHED:
                last = {(n - 1) % 4 for n in part.table.num_examples if n}
                self.assertLessEqual(len(last), 1)
                self.assertLessEqual(len(part.members), 3)
            if part.strategy.full_batches:
                self.assertTrue(part.table.has_full_batches_only)
            for place, member in enumerate(part.members.tolist()):
                seen.append(member)
                end = ends[member // 3]
                own = list(range(end - lengths[member // 3], end))
                self.assertEqual(_passes(part.table, place), [own] * 2)
            self.assertLen(seen[-len(part.members) :], part.table.num_clients)
        self.assertCountEqual(seen, [3 * k for k in range(len(lengths))])

    @parameterized.product(
        lengths=([8, 8, 5, 12, 3, 16], [8] * 6),
        worthwhile=(False, True),
        small=(False, True),
    )
    def test_workers_are_served_by_one_program(self, lengths, worthwhile, small):
        made = layout.Layout(kernels=_KERNELS, collected_bytes=None, xla=True)
        with mock.patch.object(dense_models, "is_small", lambda *_: small):
            groups = _lay_out(made, lengths, 3, worthwhile, for_workers=True)
        small &= worthwhile
        self.assertLen(groups, 1 if small else 3)
        (strategy,) = {part.strategy for group in groups for part in group}
        self.assertFalse(strategy.xla)
        self.assertEqual(strategy.full_batches, worthwhile and lengths == [8] * 6)
        self.assertEqual(strategy.kind == layout.SIDE_BY_SIDE, worthwhile)

    @parameterized.parameters(
        (7, 3, [3, 3, 1]), (4, 3, [2, 2]), (25, 20, [13, 12]), (5, 1, [1] * 5)
    )
    def test_no_more_at_once_than_fit_and_no_few_at_the_end(self, clients, most, sizes):
        made = dataclasses.replace(_PLAIN, kernels=_KERNELS)
        with mock.patch.multiple(
            dense_models, clients_at_once=lambda *_: most, is_small=lambda *_: False
        ):
            (group,) = _lay_out(made, [8] * clients, 1, worthwhile=True)
        self.assertEqual(_sizes(group), sizes)

    def test_updates_that_wait_are_bounded_in_memory(self):
        made = dataclasses.replace(_PLAIN, collected_bytes=chunks.CHUNK_BYTES // 3)
        for group in _lay_out(made, [8] * 20, 2):
            self.assertEqual(_sizes(group), [3, 3, 3, 1])

    def test_xla_compiles_full_batches_only_and_of_few_sizes(self):
        made = dataclasses.replace(_PLAIN, xla=True)
        for lengths in ([8, 7], [8, 0]):  # Nor where there is nothing to slice.
            ((full,), (other,)) = _lay_out(made, lengths, 2)
            self.assertTrue(full.strategy.xla)
            self.assertFalse(other.strategy.xla)
        ((full,),) = _lay_out(made, [8, 8, 8], 1)
        self.assertTrue(full.strategy.xla)
        self.assertEqual(full.table.num_clients, 3)
        for name, size in {"members": 4, "first_row": 4, "rows": 64}.items():
            self.assertLen(getattr(full.table, name), size)

    def test_nobody_is_a_part_too(self):
        for made in (_PLAIN, dataclasses.replace(_PLAIN, at_once=3)):
            for group in _lay_out(made, []):
                self.assertEqual(_sizes(group), [0])

    def test_every_client_has_its_own_window(self):
        windows = np.arange(100 * 2, dtype=np.float32).reshape(100, 2, 1)
        for xla in (False, True):
            made = dataclasses.replace(_PLAIN, xla=xla)
            groups = _lay_out(made, [8, 7, 16], windows=windows)
            for part in (part for group in groups for part in group):
                members = part.members
                np.testing.assert_array_equal(
                    part.table.windows[: len(members)], windows[members]
                )
