"""Who trains where: everybody once, and by as few functions as can be."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl.engine import chunks, dense_models, layout, rounds, tables

_KERNELS = dense_models.Kernels(parameters=10_000, largest=9_000, sides=200, widths=300)
_PLAIN = layout.Layout(kernels=None, collected_bytes=None, xla=False)


def _chunk(lengths):
    lengths = np.array(lengths, np.int64)
    members = 3 * np.arange(len(lengths))  # Not all of the cohort.
    return chunks.CohortChunk(
        (),
        np.zeros(lengths.sum()),
        np.arange(lengths.sum()),
        lengths,
        members,
    )


def _inputs(**changes):
    return rounds.RoundInputs(
        **{
            "round_index": 0,
            "positions": np.arange(100),
            "clients_per_round": 10.0,
            "noise_multiplier": 1.0,
            "batch_size": 4,
            "local_epochs": 2,
            "learning_rate": 0.1,
            "seed": np.zeros(2, np.uint64),
            **changes,
        }
    )


def _lay_out(made, lengths, num_groups=2, worthwhile=False, **options):
    with mock.patch.object(dense_models, "is_worthwhile", lambda *_: worthwhile):
        return made.lay_out(_chunk(lengths), _inputs(), num_groups, **options)


def _rows_of_client(table, place):
    """Returns the rows that one client reads, step by step."""
    if isinstance(table, tables.SideBySideTable):
        steps = zip(table.rows[:, place], table.sizes[:, place], strict=True)
    else:
        own = slice(table.first_step[place], table.first_step[place + 1])
        steps = zip(table.rows[own], table.batch_sizes[own], strict=True)
    return [row for rows, size in steps for row in rows[:size].tolist()]


class LayOutTest(parameterized.TestCase):
    @parameterized.product(
        lengths=([8] * 7, [7, 0, 3, 12, 5, 5], [4]),
        num_groups=(1, 2, 5),
        side_by_side=(False, True),
        for_workers=(False, True),
        collected_bytes=(None, 2**25),
    )
    def test_everybody_trains_once_on_their_own_rows(
        self, lengths, num_groups, side_by_side, for_workers, collected_bytes
    ):
        made = layout.Layout(
            kernels=_KERNELS, collected_bytes=collected_bytes, xla=True
        )
        groups = _lay_out(
            made,
            lengths,
            num_groups,
            worthwhile=side_by_side,
            for_workers=for_workers,
        )
        self.assertBetween(len(groups), 1, num_groups)
        ends = np.cumsum(lengths)
        seen = []
        for part in (part for group in groups for part in group):
            self.assertEqual(part.way.kind == layout.SIDE_BY_SIDE, side_by_side)
            for place, member in enumerate(part.clients.members.tolist()):
                seen.append(member)
                end = ends[member // 3]
                own = list(range(end - lengths[member // 3], end))
                self.assertEqual(_rows_of_client(part.tables[0], place), own * 2)
        self.assertCountEqual(seen, [3 * k for k in range(len(lengths))])

    @parameterized.product(
        lengths=([8, 8, 5, 12, 3, 16], [8] * 6),
        worthwhile=(False, True),
        small=(False, True),
    )
    def test_workers_are_served_by_one_function(self, lengths, worthwhile, small):
        made = layout.Layout(kernels=_KERNELS, collected_bytes=None, xla=True)
        with mock.patch.object(dense_models, "is_small", lambda *_: small):
            groups = _lay_out(made, lengths, 3, worthwhile, for_workers=True)
        small &= worthwhile
        self.assertLen(groups, 1 if small else 3)
        (way,) = {part.way for group in groups for part in group}
        self.assertFalse(way.xla)
        self.assertEqual(way.full_batches, worthwhile and lengths == [8] * 6)
        self.assertEqual(way.kind == layout.SIDE_BY_SIDE, worthwhile)

    @parameterized.parameters(
        (7, 3, [3, 3, 1]), (4, 3, [2, 2]), (25, 20, [13, 12]), (5, 1, [1] * 5)
    )
    def test_no_more_at_once_than_fit_and_no_few_at_the_end(self, clients, most, sizes):
        made = dataclasses.replace(_PLAIN, kernels=_KERNELS)
        for for_workers in (False, True):
            with mock.patch.multiple(
                dense_models,
                clients_at_once=lambda *_: most,
                is_small=lambda *_: False,
            ):
                (group,) = _lay_out(
                    made, [8] * clients, 1, worthwhile=True, for_workers=for_workers
                )
            self.assertEqual([part.clients.num_clients for part in group], sizes)
            self.assertLen({part.way for part in group}, 1)

    def test_updates_that_wait_are_bounded_in_memory(self):
        three = chunks.CHUNK_BYTES // 3
        made = dataclasses.replace(_PLAIN, collected_bytes=three)
        groups = _lay_out(made, [8] * 20, 2)
        for group in groups:
            self.assertEqual([part.clients.num_clients for part in group], [3, 3, 3, 1])

    def test_a_few_small_clients_are_one_part(self):
        made = dataclasses.replace(_PLAIN, kernels=_KERNELS)
        ((part,),) = _lay_out(made, [8] * 4, 2, worthwhile=True)
        self.assertEqual(part.clients.num_clients, 4)

    def test_xla_compiles_full_batches_only(self):
        made = dataclasses.replace(_PLAIN, xla=True)
        ((full,), (short,)) = _lay_out(made, [8, 7], 2)
        self.assertTrue(full.way.xla)
        self.assertEqual(full.tables[1], 1)
        self.assertFalse(short.way.xla)

    def test_nobody_is_a_part_too(self):
        ((part,),) = _lay_out(_PLAIN, [])
        self.assertEqual(part.clients.num_clients, 0)

    def test_every_client_has_its_own_window(self):
        windows = np.arange(100 * 2, dtype=np.float32).reshape(100, 2, 1)
        chunk = _chunk([8, 7, 16])
        for xla in (False, True):
            made = dataclasses.replace(_PLAIN, xla=xla)
            groups = made.lay_out(chunk, _inputs(windows=windows), 2)
            for part in (part for group in groups for part in group):
                members = part.clients.members
                table = part.tables[0]
                np.testing.assert_array_equal(
                    table.windows[: len(members)], windows[members]
                )
                self.assertTrue(np.isnan(table.windows[len(members) :]).all())


if __name__ == "__main__":
    absltest.main()
