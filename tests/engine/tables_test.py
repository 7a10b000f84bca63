from __future__ import annotations

import math

import hypothesis
import numpy as np
from absl.testing import absltest
from hypothesis import strategies as st

from tfdp_fl.engine import tables

_LENGTHS = st.lists(st.integers(0, 23), max_size=9)
_SETTINGS = hypothesis.settings(deadline=None, max_examples=60, derandomize=True)


def _rows(lengths):
    return np.random.default_rng(0).permutation(1000)[: sum(lengths)]


def _batches_of(table):
    """Returns each client's batches, without what fills up short ones."""
    return [
        [
            table.rows[step, : table.batch_sizes[step]].tolist()
            for step in range(table.first_step[k], table.first_step[k + 1])
        ]
        for k in range(table.num_clients)
    ]


def _plain_batches(rows, lengths, batch_size, local_epochs):
    clients, start = [], 0
    for length in lengths:
        own = rows[start : start + length].tolist()
        start += length
        clients.append(
            [
                own[first : first + batch_size]
                for _ in range(local_epochs)
                for first in range(0, length, batch_size)
            ]
        )
    return clients


class ClientTableTest(absltest.TestCase):
    @_SETTINGS
    @hypothesis.given(_LENGTHS, st.integers(1, 12), st.integers(1, 3))
    def test_is_what_a_plain_loop_does(self, lengths, batch_size, epochs):
        rows = _rows(lengths)
        table = tables.client_table(rows, np.array(lengths), batch_size, epochs)
        self.assertEqual(
            _batches_of(table),
            _plain_batches(rows, lengths, batch_size, epochs),
        )
        self.assertEqual(table.rows.shape[1], batch_size)
        self.assertEqual(table.num_examples.tolist(), lengths)
        self.assertEqual(
            np.diff(table.first_step).tolist(),
            tables.steps_per_client(
                np.array(lengths, int), batch_size, epochs
            ).tolist(),
        )
        self.assertEqual(
            table.has_short_batches,
            any(length % batch_size for length in lengths),
        )

    @_SETTINGS
    @hypothesis.given(*[st.integers(1, 4)] * 4)
    def test_equal_clients_too(self, clients, batches, batch_size, epochs):
        lengths = [batches * batch_size] * clients
        rows = _rows(lengths)
        table = tables.client_table(rows, np.array(lengths), batch_size, epochs)
        self.assertEqual(
            _batches_of(table),
            _plain_batches(rows, lengths, batch_size, epochs),
        )
        self.assertEqual(
            np.diff(table.first_step).tolist(), [batches * epochs] * clients
        )
        for array in table[:-2]:  # Then windows and what is measured.
            self.assertEqual(array.dtype, np.int32)

    @_SETTINGS
    @hypothesis.given(_LENGTHS, st.integers(1, 12), st.integers(1, 3))
    def test_short_batches_repeat_a_row_of_their_own_client(
        self, lengths, batch_size, epochs
    ):
        rows = _rows(lengths)
        table = tables.client_table(rows, np.array(lengths), batch_size, epochs)
        for step, size in enumerate(table.batch_sizes):
            self.assertLessEqual(
                set(table.rows[step, size:]), set(table.rows[step, :size])
            )

    @_SETTINGS
    @hypothesis.given(
        _LENGTHS, st.integers(1, 12), st.integers(1, 3), st.integers(0, 99)
    )
    def test_shuffling_keeps_each_epoch_a_permutation_of_the_clients_rows(
        self, lengths, batch_size, epochs, seed
    ):
        rows = _rows(lengths)
        table = tables.client_table(
            rows,
            np.array(lengths),
            batch_size,
            epochs,
            np.random.default_rng(seed),
        )
        start = 0
        for length, batches in zip(lengths, _batches_of(table), strict=True):
            own = sorted(rows[start : start + length].tolist())
            start += length
            steps = math.ceil(length / batch_size)
            for epoch in range(epochs):
                part = batches[epoch * steps : (epoch + 1) * steps]
                seen = [row for batch in part for row in batch]
                self.assertEqual(sorted(seen), own)

    def test_epochs_are_shuffled_differently_and_repeat_with_the_generator(
        self,
    ):
        def rows_of(seed):
            return tables.client_table(
                np.arange(40),
                np.array([20, 20]),
                20,
                2,
                np.random.default_rng(seed),
            ).rows

        orders = {tuple(row % 20) for row in rows_of(0)}
        self.assertLen(orders, 4)
        np.testing.assert_array_equal(rows_of(0), rows_of(0))
        self.assertFalse(np.array_equal(rows_of(0), rows_of(1)))

    def test_no_clients_and_only_empty_clients(self):
        for lengths in ([], [0, 0]):
            table = tables.client_table(np.zeros(0, int), np.array(lengths, int), 5, 2)
            self.assertEqual(table.rows.shape, (0, 5))
            self.assertEqual(table.first_step.tolist(), [0] * (len(lengths) + 1))
            self.assertFalse(table.has_short_batches)


class ShareOutTest(absltest.TestCase):
    @_SETTINGS
    @hypothesis.given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 5))
    def test_everyone_is_in_one_group_and_groups_end_together(self, work, n):
        work = np.array(work, np.int64)
        groups = tables.share_out(work, n)
        self.assertLen(groups, n)
        self.assertEqual(
            sorted(np.concatenate(groups).tolist()), list(range(len(work)))
        )
        loads = [int(work[group].sum()) for group in groups]
        # Graham: no group ends later than a last job after a fair share.
        largest = int(work.max()) if len(work) else 0
        self.assertLessEqual(max(loads), sum(work) / n + largest)
        self.assertLessEqual(max(loads) - min(loads), largest)

    def test_uneven_clients_waste_less_than_a_quarter(self):
        sizes = np.random.default_rng(0).integers(1, 1000, size=50)
        loads = [sizes[g].sum() for g in tables.share_out(sizes, 2)]
        self.assertLess(2 * max(loads), 1.02 * sizes.sum())

    def test_is_the_same_every_time(self):
        work = np.array([3, 9, 9, 1, 4, 4, 4])
        first, second = (tables.share_out(work, 3) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            np.testing.assert_array_equal(one, other)


class PaddedTest(absltest.TestCase):
    @_SETTINGS
    @hypothesis.given(_LENGTHS, st.integers(1, 12))
    def test_adds_nothing_that_runs(self, lengths, batch_size):
        table = tables.client_table(_rows(lengths), np.array(lengths), batch_size, 1)
        n, steps = table.num_clients, len(table.rows)
        padded = tables.padded(table)
        self.assertEqual(padded.first_step[: n + 1].tolist(), table.first_step.tolist())
        self.assertTrue((np.diff(padded.first_step[n:]) == 0).all())
        np.testing.assert_array_equal(padded.rows[:steps], table.rows)
        np.testing.assert_array_equal(padded.members[:n], table.members)
        self.assertLen(padded.first_step, padded.num_clients + 1)
        for size, least in ((padded.num_clients, n), (len(padded.rows), steps)):
            self.assertBetween(size, max(1, least), max(1, 2 * least - 1))
            self.assertEqual(size & (size - 1), 0)


if __name__ == "__main__":
    absltest.main()
