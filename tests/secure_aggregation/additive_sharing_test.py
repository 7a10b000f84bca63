"""Additive shares: what they reveal, and what comes back from them."""

from __future__ import annotations

import itertools

import numpy as np
from absl.testing import absltest, parameterized
from scipy import stats

from tfdp_fl.secure_aggregation import AdditiveSecretSharing

# One false alarm in 1e8 runs for each of the fewer than 50 comparisons below.
_FALSE_ALARM = 1e-8
_SIZE = 1_000_000


def _chi_square_is_alarming(cells: np.ndarray, num_cells: int) -> bool:
    """Whether cell numbers are too far from uniform over all cells."""
    counts = np.bincount(cells.reshape(-1), minlength=num_cells)
    expected = cells.size / num_cells
    statistic = np.sum((counts - expected) ** 2) / expected
    return statistic > stats.chi2.isf(_FALSE_ALARM, num_cells - 1)


def _just_above_halves(size: int, norm: float, step: float) -> np.ndarray:
    """Returns what gets longest by rounding, of at most a given norm."""
    each = norm / (size**0.5 * step)
    low = max(np.floor(each - 0.5), 0.0) + 0.500001
    if each <= low:  # Not all coordinates can be as large as a half.
        value = np.zeros(size)
        value[: int(0.999 * size * (each / low) ** 2)] = low
    else:
        value = np.full(size, low)
        share = (each**2 - low**2) / ((low + 1) ** 2 - low**2)
        value[: int(0.999 * size * share)] += 1
    return value * step


def _top_bits(shares: np.ndarray, bits: int) -> np.ndarray:
    return (shares >> (shares.dtype.itemsize * 8 - bits)).astype(np.int64)


class ConfigurationTest(parameterized.TestCase):
    def test_two_members_are_refused_because_each_reads_the_other(self):
        with self.assertRaisesRegex(ValueError, "min_participants.*3.*got 2"):
            AdditiveSecretSharing(min_participants=2)

    @parameterized.parameters(
        ({"min_participants": 2.5}, TypeError, "min_participants"),
        ({"mode": "field"}, ValueError, "mode"),
        ({"bits": 16}, ValueError, "bits"),
        ({"max_share_value": 0.0}, ValueError, "max_share_value"),
        ({"max_share_value": float("inf")}, ValueError, "max_share_value"),
        ({"max_participants": 2}, ValueError, "max_participants"),
        ({"max_participants": 2**21}, ValueError, "max_participants"),
        ({"deadline_seconds": -1.0}, ValueError, "deadline_seconds"),
    )
    def test_bad_arguments_are_named(self, kwargs, error, name):
        with self.assertRaisesRegex(error, name):
            AdditiveSecretSharing(**kwargs)

    @parameterized.product(
        bits=(32, 64),
        max_participants=(3, 7, 100, 1000),
        max_share_value=(1e-6, 0.37, 1.0, 100.0, 21474836.475, 1e12),
    )
    def test_the_largest_sum_fits_and_the_grid_is_not_wasted(
        self, bits, max_participants, max_share_value
    ):
        protocol = AdditiveSecretSharing(
            bits=bits,
            max_participants=max_participants,
            max_share_value=max_share_value,
        )
        largest = int(np.rint(max_share_value / protocol.resolution))
        capacity = min(2 ** (bits - 1), 2**53)
        self.assertLess(max_participants * largest, capacity)
        twice = int(np.rint(2 * max_share_value / protocol.resolution))
        self.assertGreater(max_participants * (twice + 1), 0.99 * capacity)


class SecrecyTest(parameterized.TestCase):
    @parameterized.product(bits=(32, 64), secret=(0.0, -100.0))
    def test_any_strict_subset_of_ring_shares_is_uniform(self, bits, secret):
        # The worst case for the shares: a million times the same secret. All
        # shares but one determine all smaller subsets' distributions; each
        # is tested as one joint draw, the left-over share included.
        protocol = AdditiveSecretSharing(bits=bits)
        encoded = protocol.encode(np.full(_SIZE, secret))
        for participants, bits_each in ((3, 5), (4, 3)):
            shares = protocol.split(encoded, participants)
            for subset in itertools.combinations(shares, participants - 1):
                cells = np.zeros(_SIZE, np.int64)
                for share in subset:
                    cells = (cells << bits_each) | _top_bits(share, bits_each)
                num_cells = 2 ** (bits_each * (participants - 1))
                self.assertFalse(_chi_square_is_alarming(cells, num_cells))
            # All together they are anything but uniform.
            np.testing.assert_array_equal(protocol.add(shares), encoded)

    def _difference_is_revealed(self, protocol, **kwargs) -> bool:
        """Whether shares of two tensors differ by the tensors' difference."""
        first = protocol.encode(np.zeros(_SIZE))
        second = protocol.encode(np.full(_SIZE, 3.0))
        shares = zip(
            protocol.split(first, 3, **kwargs),
            protocol.split(second, 3, **kwargs),
            strict=True,
        )
        return any(_chi_square_is_alarming(_top_bits(b - a, 8), 256) for a, b in shares)

    def test_two_tensors_shares_reveal_nothing_of_their_difference(self):
        self.assertFalse(self._difference_is_revealed(AdditiveSecretSharing()))

    def test_one_seed_for_every_tensor_is_caught(self):
        # The published fault: the generator is seeded anew for each tensor.
        class OneSeed:
            def __init__(self):
                self.calls = 0

            def __call__(self, size):
                self.calls += 1
                seed = self.calls % 2  # Each tensor draws twice.
                return np.random.default_rng(seed).bytes(size)

        self.assertTrue(
            self._difference_is_revealed(
                AdditiveSecretSharing(), _random_bytes=OneSeed()
            )
        )

    def test_float_shares_are_uniform_in_the_interval_and_uncorrelated(self):
        protocol = AdditiveSecretSharing(mode="float")
        first = protocol.split(np.zeros(_SIZE), 3)
        second = protocol.split(np.full(_SIZE, 3.0), 3)
        drawn = [*first[:2], *second[:2]]
        for share in drawn:
            self.assertGreaterEqual(share.min(), -100.0)
            self.assertLess(share.max(), 100.0)
            cells = np.floor((share + 100.0) * 1.28).astype(np.int64)
            self.assertFalse(_chi_square_is_alarming(cells, 256))
        # Neither within a tensor nor between two is anything used again: a
        # joint draw of any two shares is uniform too.
        for a, b in itertools.combinations(drawn, 2):
            a, b = (np.floor((s + 100) * 0.16).astype(np.int64) for s in (a, b))
            self.assertFalse(_chi_square_is_alarming(a * 32 + b, 1024))


class ReconstructionTest(parameterized.TestCase):
    @parameterized.product(bits=(32, 64), participants=(3, 4, 10, 33, 99, 100))
    def test_exact_on_the_grid(self, bits, participants):
        protocol = AdditiveSecretSharing(bits=bits)
        rng = np.random.default_rng(participants)
        largest = int(protocol.max_share_value / protocol.resolution)
        integers = rng.integers(
            -largest, largest, size=(participants, 50), endpoint=True
        )
        integers[:, 0] = largest  # The sum that comes nearest to wrapping.
        integers[:, 1] = -largest
        encoded = [protocol.encode(row * protocol.resolution) for row in integers]
        shares = [protocol.split(row, participants) for row in encoded]
        partial_sums = [protocol.add(column) for column in zip(*shares, strict=True)]
        total = protocol.decode(protocol.add(partial_sums))
        self.assertEqual(total.dtype, np.float64)
        np.testing.assert_array_equal(total, integers.sum(axis=0) * protocol.resolution)

    @parameterized.product(
        bits=(32, 64),
        size_and_bound=((100_000, 0.01), (1_000_000, 0.01), (3, 1e-4)),
        kind=("random", "halves", "one", "zeros"),
    )
    def test_what_is_sent_is_within_the_bound(self, bits, size_and_bound, kind):
        size, bound = size_and_bound
        protocol = AdditiveSecretSharing(bits=bits)
        value = {
            "random": np.random.default_rng(1).normal(size=size),
            "halves": _just_above_halves(size, bound, protocol.resolution),
            "one": np.eye(1, size)[0],
            "zeros": np.zeros(size),
        }[kind].astype(np.float32)
        norm = np.linalg.norm(value.astype(np.float64))
        if kind in ("random", "one") or norm > bound:
            value *= np.float32(bound / norm)
        sent = protocol.encode(protocol.within(value, bound))
        decoded = protocol.decode(sent)
        self.assertLessEqual(np.linalg.norm(decoded), bound)
        np.testing.assert_array_equal(decoded, protocol.within(value, bound))
        np.testing.assert_allclose(
            decoded, value, atol=1.01 * protocol.resolution + 1e-7 * bound
        )

    @parameterized.parameters((100_000, 1.11), (10_000_000, 1.99))
    def test_rounding_to_the_nearest_would_exceed_the_clip(self, size, factor):
        protocol = AdditiveSecretSharing(bits=32)
        value = _just_above_halves(size, 0.01, protocol.resolution)
        self.assertLessEqual(np.linalg.norm(value), 0.01)
        nearest = protocol.decode(protocol.encode(value))
        self.assertGreater(np.linalg.norm(nearest), factor * 0.01)
        sent = protocol.decode(protocol.encode(protocol.within(value, 0.01)))
        self.assertLessEqual(np.linalg.norm(sent), 0.01)

    def test_without_rounding_up_nothing_is_lost(self):
        # The nearest value, where that is within the bound.
        protocol = AdditiveSecretSharing(bits=32)
        value = 0.7 * protocol.resolution * np.ones(5)
        np.testing.assert_array_equal(
            protocol.within(value, 1.0), protocol.resolution * np.ones(5)
        )
        # Towards zero where no bound is known, whatever norm is meant.
        np.testing.assert_array_equal(protocol.within(-value, np.inf), np.zeros(5))

    @parameterized.parameters((32, 7.7), (64, 7.3))
    def test_the_largest_value_is_sent_where_it_is_not_on_the_grid(self, bits, most):
        protocol = AdditiveSecretSharing(
            bits=bits, max_share_value=most, max_participants=1000
        )
        step = protocol.resolution
        self.assertGreater(np.rint(most / step) * step, most)
        value = np.array([most, -most, 0.1])
        sent = protocol.within(value, 50.0)
        self.assertLessEqual(np.abs(sent).max(), most)
        np.testing.assert_allclose(sent, value, atol=step)
        protocol.encode(sent)

    def test_float_shares_are_of_a_value_within_the_bound(self):
        protocol = AdditiveSecretSharing(mode="float")
        value = np.full(1000, 0.1, np.float32)  # Norm 3.1622777 > sqrt(10).
        sent = protocol.within(value, 3.0)
        self.assertLessEqual(np.linalg.norm(sent), 3.0)
        np.testing.assert_allclose(sent, value * 3 / 10**0.5, rtol=1e-6)

    @parameterized.parameters(3, 10, 100)
    def test_float_error_is_within_1e_6(self, participants):
        protocol = AdditiveSecretSharing(mode="float", max_share_value=100.0)
        rng = np.random.default_rng(2)
        values = rng.uniform(-100, 100, size=(participants, 2000))
        shares = [protocol.split(protocol.encode(row), participants) for row in values]
        total = protocol.add(
            [protocol.add(column) for column in zip(*shares, strict=True)]
        )
        error = np.abs(total - values.sum(axis=0)).max()
        self.assertLess(error, 1e-6)
        self.assertLess(error, 1e-14 * participants**1.5 * 100.0)
        self.assertGreater(error, 0)  # It is not exact, as the ring is.

    @parameterized.product(
        kind=({"bits": 32}, {"bits": 64}, {"mode": "float"}),
        bad=(100.001, -1e9, np.nan, np.inf, -np.inf),
    )
    def test_overflow_is_an_error_that_names_tensor_and_value(self, kind, bad):
        protocol = AdditiveSecretSharing(**kind)
        value = np.zeros((2, 3))
        value[1, 2] = bad
        with self.assertRaisesRegex(
            ValueError, rf"tensor 7 holds .*{bad}.*\(1, 2\).*max_share_value"
        ):
            protocol.encode(value, "tensor 7")

    @parameterized.parameters("complex64", "object", "U3", "bool")
    def test_only_real_numbers_are_shared(self, dtype):
        with self.assertRaisesRegex(TypeError, "real numbers"):
            AdditiveSecretSharing().encode(np.zeros(3, dtype))


if __name__ == "__main__":
    absltest.main()
