"""Additive shares: what they reveal, and what comes back from them."""

import itertools

import numpy as np
import pytest

from tests.mechanisms.statistics import are_uniform
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_SIZE = 1_000_000


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


_BITS = pytest.mark.parametrize("bits", [32, 64])


def test_two_members_who_read_each_other_and_bad_arguments_are_refused():
    wrong = {"min_participants": (2, 2.5), "mode": ("field",), "bits": (16,)}
    wrong |= {"max_share_value": (0.0, np.inf), "max_participants": (2, 2**21)}
    wrong |= {"deadline_seconds": (-1.0,)}
    for name, value in [(key, each) for key in wrong for each in wrong[key]]:
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            AdditiveSecretSharing(**{name: value})


@_BITS
@pytest.mark.parametrize("secret", [0.0, -100.0])
def test_any_strict_subset_of_ring_shares_is_uniform(bits, secret):
    # A million times one secret; all shares but one, as one joint draw.
    protocol = AdditiveSecretSharing(bits=bits)
    encoded = protocol.encode(np.full(_SIZE, secret))
    for participants, bits_each in ((3, 5), (4, 3)):
        shares = protocol.split(encoded, participants)
        for subset in itertools.combinations(shares, participants - 1):
            cells = np.zeros(_SIZE, np.int64)
            for share in subset:
                cells = (cells << bits_each) | _top_bits(share, bits_each)
            assert are_uniform(cells, 2 ** (bits_each * (participants - 1)))
        # All together they are anything but uniform.
        np.testing.assert_array_equal(protocol.add(shares), encoded)
    for share in shares:
        for byte in share.view(np.uint8).reshape(_SIZE, bits // 8).T:
            assert are_uniform(byte, 256)


class _OneSeed:
    """The published fault: the generator is seeded anew for each tensor."""

    calls = 0

    def __call__(self, size):
        self.calls += 1
        return np.random.default_rng(self.calls % 2).bytes(size)  # Two a tensor.


@pytest.mark.parametrize(
    "options, is_revealed", [({}, False), ({"_random_bytes": _OneSeed()}, True)]
)
def test_the_difference_of_two_tensors_shares_reveals_nothing(options, is_revealed):
    protocol = AdditiveSecretSharing()
    first, second = (
        protocol.split(protocol.encode(np.full(_SIZE, value)), 3, **options)
        for value in (0.0, 3.0)
    )
    differences = [b - a for a, b in zip(first, second, strict=True)]
    found = [are_uniform(_top_bits(each, 8), 256) for each in differences]
    assert all(found) != is_revealed


def test_float_shares_are_uniform_in_the_interval_and_uncorrelated():
    protocol = AdditiveSecretSharing(mode="float")
    first = protocol.split(np.zeros(_SIZE), 3)
    second = protocol.split(np.full(_SIZE, 3.0), 3)
    drawn = [*first[:2], *second[:2]]
    for share in drawn:
        assert -100.0 <= share.min() < share.max() < 100.0
        assert are_uniform(np.floor((share + 100.0) * 1.28).astype(np.int64), 256)
    # A joint draw of any two, of one tensor or of two, is uniform too.
    for a, b in itertools.combinations(drawn, 2):
        a, b = (np.floor((s + 100) * 0.16).astype(np.int64) for s in (a, b))
        assert are_uniform(a * 32 + b, 1024)


def _sum_of(protocol, values):
    shares = [protocol.split(protocol.encode(row), len(values)) for row in values]
    partial_sums = [protocol.add(column) for column in zip(*shares, strict=True)]
    return protocol.decode(protocol.add(partial_sums))


@_BITS
@pytest.mark.parametrize("participants", [3, 4, 33, 100])
@pytest.mark.parametrize("most", [1e-6, 0.37, 100.0, 21474836.475, 1e12])
def test_exact_on_the_grid_and_the_grid_is_not_wasted(bits, participants, most):
    sizes = {"max_share_value": most, "max_participants": participants}
    protocol = AdditiveSecretSharing(bits=bits, **sizes)
    rng = np.random.default_rng(participants)
    largest = int(np.rint(most / protocol.resolution))
    integers = rng.integers(-largest, largest, size=(participants, 50), endpoint=True)
    integers[:, 0] = largest  # The sum that comes nearest to wrapping.
    integers[:, 1] = -largest
    capacity = min(2 ** (bits - 1), 2**53)
    assert participants * largest < capacity < 2.05 * participants * (largest + 1)
    values = np.clip(integers * protocol.resolution, -most, most)
    total = _sum_of(protocol, values)
    assert total.dtype == np.float64
    np.testing.assert_array_equal(total, integers.sum(axis=0) * protocol.resolution)


@_BITS
@pytest.mark.parametrize("size, bound", [(100_000, 0.01), (1_000_000, 0.01), (3, 1e-4)])
@pytest.mark.parametrize("kind", ["random", "halves", "one", "zeros"])
def test_what_is_sent_is_within_the_bound(bits, size, bound, kind):
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
    sent = protocol.nearest_within(value, bound)
    decoded = protocol.decode(protocol.encode(sent))
    assert np.linalg.norm(decoded) <= bound
    np.testing.assert_array_equal(decoded, sent)
    atol = 1.01 * protocol.resolution + 1e-7 * bound
    np.testing.assert_allclose(decoded, value, atol=atol)
    # The nearest value, where that is within the bound.
    step = protocol.resolution * np.ones(5)
    np.testing.assert_array_equal(protocol.nearest_within(0.7 * step, 1.0), step)
    # Towards zero where no bound is known, whatever norm is meant.
    np.testing.assert_array_equal(
        protocol.nearest_within(-0.7 * step, np.inf), 0 * step
    )


@pytest.mark.parametrize("bits, most", [(32, 7.7), (64, 7.3)])
def test_the_largest_value_is_sent_where_it_is_not_on_the_grid(bits, most):
    sizes = {"max_share_value": most, "max_participants": 1000}
    protocol = AdditiveSecretSharing(bits=bits, **sizes)
    step = protocol.resolution
    assert np.rint(most / step) * step > most
    value = np.array([most, -most, 0.1])
    sent = protocol.nearest_within(value, 50.0)
    assert np.abs(sent).max() <= most
    np.testing.assert_allclose(sent, value, atol=step)
    protocol.encode(sent)


@pytest.mark.parametrize("participants", [3, 10, 100])
def test_float_shares_are_within_the_bound_and_their_error_is_within_1e_6(participants):
    protocol = AdditiveSecretSharing(mode="float", max_share_value=100.0)
    value = np.full(1000, 0.1, np.float32)  # Norm 3.1622777 > sqrt(10).
    sent = protocol.nearest_within(value, 3.0)
    assert np.linalg.norm(sent) <= 3.0
    np.testing.assert_allclose(sent, value * 3 / 10**0.5, rtol=1e-6)
    rng = np.random.default_rng(2)
    values = rng.uniform(-100, 100, size=(participants, 500))
    error = np.abs(_sum_of(protocol, values) - values.sum(axis=0)).max()
    # It is not exact, as the ring is.
    assert 0 < error < min(1e-6, 1e-14 * participants**1.5 * 100.0)


@pytest.mark.parametrize("kind", [{"bits": 32}, {"bits": 64}, {"mode": "float"}])
@pytest.mark.parametrize("bad", [100.001, -1e9, np.nan, np.inf, -np.inf])
def test_overflow_is_an_error_that_names_tensor_and_value(kind, bad):
    value = np.zeros((2, 3))
    value[1, 2] = bad
    message = rf"tensor 7 has .*{bad}.*\(1, 2\).*max_share_value"
    with pytest.raises(ValueError, match=message):
        AdditiveSecretSharing(**kind).encode(value, "tensor 7")
    with pytest.raises(TypeError, match="real numbers"):
        AdditiveSecretSharing(**kind).encode(np.zeros(3, complex))
