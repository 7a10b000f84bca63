from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import rounds, statistics
from tfdp_fl.mechanisms import Deployment, grid

_S, _M = 0.3, 4
_STEP = float(np.float32(_S)) / grid.STEPS
_LARGE = ((300, 200), (20_000,))


def _query(shapes=rounds.SHAPES, z=1.0):
    mechanism = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=z)
    return mechanism.bind(
        Deployment(
            clients_per_round=_M,
            num_variables=len(shapes),
            shapes=tuple(tuple(each) for each in shapes),
            noise_generator="exact",
        )
    )


def _round(updates, z=0.0, query=None, **options):
    query = query or _query([u.shape for u in updates[0]])
    return rounds.run_round(
        query,
        query.initial_global_state(),
        updates,
        noise_multiplier=z,
        clients_per_round=_M,
        **options,
    )


def _squares(record) -> int:
    """Returns the squared norm of a record, in whole numbers."""
    return sum(int(each) ** 2 for part in record.update for each in np.ravel(part))


class SumTest(parameterized.TestCase):
    def test_is_of_whole_numbers_in_any_order(self):
        updates = rounds.updates_with_norms([0.1, 7.0, 0.3, 0.2])
        totals = {
            rounds.flat(_round(list(order)).total.update).tobytes()
            for order in itertools.permutations(updates)
        }
        self.assertLen(totals, 1)
        (total,) = (np.frombuffer(each) for each in totals)
        np.testing.assert_array_equal(total, np.round(total))
        self.assertGreater(np.abs(total).max(), 1e4)

    @parameterized.parameters(1.0, 1e6, 1e19, 1e38, np.nan, np.inf, 1e-42)
    def test_no_client_moves_it_by_more_than_the_clip(self, size):
        rng = np.random.default_rng(1)
        for signs in (lambda size: np.ones(size), rng.normal):
            update = [signs(size=s) for s in _LARGE]
            with np.errstate(all="ignore"):
                update = [np.asarray(u * size, np.float32) for u in update]
            (record,) = _round([update]).records
            self.assertLessEqual(_squares(record), grid.STEPS**2)
            if 1 <= size < 1e10:  # And it is not left out for that.
                self.assertGreater(_squares(record), 0.998 * grid.STEPS**2)

    def test_what_rounding_would_lead_out_of_the_clip_is_zero(self):
        # Planted: clipped to S itself. Every coordinate is half a step above
        # a whole number, so that rounding enlarges all of them.
        count = 79_975  # sqrt(count) 3707.85 is 2^20.
        steps = math.floor(grid.STEPS / math.sqrt(count)) + 0.501
        update = [np.full([count], steps * _STEP, np.float32)]
        (record,) = _round([update]).records
        self.assertGreater(_squares(record), 0.99 * grid.STEPS**2)
        with mock.patch.object(grid.GridQuery, "clip_share", 1.0):
            (record,) = _round([update]).records
        self.assertEqual(_squares(record), 0)

    def test_too_many_parameters(self):
        with self.assertRaisesRegex(ValueError, "up to 10.11 parameters"):
            _ = _query([(10**6, 10**7)]).clip_share


class NoiseTest(parameterized.TestCase):
    def test_has_the_stddev_that_is_charged(self):
        done = _round(rounds.zero_updates(_M, _LARGE), z=1.7)
        noise = rounds.flat(done.mean)
        statistics.assert_gaussian(noise, 1.7 * _S / _M)
        first, second = (np.ravel(each)[:20_000] for each in done.mean)
        statistics.assert_uncorrelated(first, second)
        again = rounds.flat(_round(rounds.zero_updates(_M, _LARGE), z=1.7).mean)
        statistics.assert_uncorrelated(noise, again)

    def test_is_of_whole_numbers_and_at_least_as_charged(self):
        seen = []
        rounded = grid.rounded

        def noted(stddev, size):
            seen.append(stddev)
            return rounded(stddev, size)

        for z in (1 / 3, 1.1, 0.7):
            with mock.patch.object(grid, "rounded", noted):
                done = _round(rounds.zero_updates(_M), z=z)
            self.assertBetween(seen[-1] / grid.STEPS, z, z * (1 + 5e-7))
            steps = rounds.flat(done.mean) * _M / _STEP
            np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)

    def test_is_new_in_each_call_of_a_traced_function(self):
        query = _query(_LARGE)
        state = query.begin_round(query.initial_global_state(), 1.0, _M)
        zeros = query.initial_sample_state([tf.zeros(s) for s in _LARGE])
        traced = tf.function(lambda: query.get_noised_result(zeros, state)[0][0])
        statistics.assert_uncorrelated(traced(), traced())
