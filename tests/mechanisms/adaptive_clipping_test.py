import math
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl import algorithm
from tfdp_fl.mechanisms import PrivacyContext, RoundState, noise

_WIDE = [[100, 100], [100, 100], [5000]]


def _query(m=20, noise_multiplier=1.0, sampling="fixed_size", **arguments):
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=noise_multiplier, **arguments)
    return rounds.bound(mechanism, m, sampling=sampling)


@pytest.mark.parametrize("noise_site", ["server", "client"])
@pytest.mark.parametrize("bound, quantile", [(0.2, 0.3), (1.0, 0.5), (30.0, 1.0)])
def test_without_noise_is_algorithm_1(noise_site, bound, quantile):
    norms = [0.1, 0.2, 0.5, 0.9, 1.5, 4.0]
    query, state = _query(
        noise_site=noise_site,
        initial_clip_norm=bound,
        target_quantile=quantile,
        clip_learning_rate=0.3,
    )
    updates = rounds.updates_with_norms(norms)
    for _ in range(3):
        done = rounds.run_round(query, state, updates, clients_per_round=8)
        wanted = references.fixed_clipping_mean(updates, bound, 8)
        rounds.assert_close(done.mean, wanted, rtol=1e-4, atol=1e-7)
        # A client that is missing counts half: the bits are centred.
        bound = references.next_clip(bound, norms, quantile, 0.3, 8, 1.0)
        state = done.next_state
        np.testing.assert_allclose(state.clip_norm, bound, rtol=1e-5)


def test_updates_are_noised_with_z_delta_and_this_rounds_clip():
    z, m = 1.4, 16
    query, state = _query(m, z, initial_clip_norm=0.25, clip_learning_rate=3.0)
    done = rounds.run_round(
        query, state, rounds.zero_updates(m, _WIDE), noise_multiplier=z
    )
    z_delta = references.update_noise_multiplier(z, m / 20)
    # The clip moves by a factor of about exp(-1.5) after this round.
    assert float(done.next_state.clip_norm) < 0.25 * 0.5
    statistics.assert_gaussian(rounds.flat(done.mean), z_delta * 0.25 / m)


@pytest.mark.parametrize("sigma_b", [None, 1.5])
@pytest.mark.parametrize("noise_site", ["server", "client"])
def test_the_count_is_noised_with_sigma_b_in_all(noise_site, sigma_b):
    m, z = 16, 0.5
    query, state = _query(m, z, noise_site=noise_site, count_noise_stddev=sigma_b)
    begun = query.begin_round(state, z, m)
    params = query.derive_sample_params(begun)

    def add(tensors, stddev):
        return [t + tf.cast(stddev, t.dtype) * (not t.shape.rank) for t in tensors]

    # One stddev in the place of each draw; of what is added to an update, none.
    with mock.patch.object(noise, "add_normal", add):
        record = algorithm.make_contribution(query, params, [tf.zeros([1])])
        total = query.initial_sample_state([tf.zeros([1])])
        _, after = algorithm.release(query, total, begun, math.inf)
    # The clip moves by exp(-rate b), b = (what is added to the count) / m.
    by_server = -m * math.log(float(after.clip_norm) / 0.1) / 0.2
    by_client = float(record.sums["below_clip"]) - 0.5
    shares = {"server": (1.0, 0.0), "client": (0.0, 1 / math.sqrt(m))}[noise_site]
    expected = np.multiply(shares, sigma_b or m / 20)
    np.testing.assert_allclose([by_server, by_client], expected, atol=1e-5)


@pytest.mark.parametrize("sigma_b", [0.3, 1.0, 37.0])
def test_z_delta_of_what_is_allowed_is_right_in_float32(sigma_b):
    # Closer to 2 sigma_b the noise would be wrong, and infinite at last.
    given = {"noise_multiplier": 0.1, "count_noise_stddev": sigma_b}
    mechanism = tfdp_fl.AdaptiveClipping(**given)
    # m / 20 follows the schedule of m, where sigma_b is not given.
    context = PrivacyContext(clients_per_round=5)
    other = PrivacyContext(clients_per_round=lambda t: 10 * (t + 1))
    default = tfdp_fl.AdaptiveClipping(noise_multiplier=0.5)
    for m, z in ((10, 0.5), (40, 1.5)):
        stddevs = default.noise_stddevs(RoundState(2.0, z, float(m)), other)
        assert stddevs["below_clip"] == pytest.approx(m / 20)
        update = 2.0 * references.update_noise_multiplier(z, m / 20)
        assert stddevs["update"] == pytest.approx(update, rel=1e-5)
    z = mechanism.noise_multiplier_limit(0, context)
    with pytest.raises(ValueError, match="ten-thousandth"):
        mechanism.with_noise_multiplier(z * (1 + 1e-6))
    wanted = references.update_noise_multiplier(z, sigma_b)
    for number in (float, tf.constant):
        stddevs = mechanism.noise_stddevs(RoundState(1.0, number(z), 5.0), context)
        np.testing.assert_allclose(stddevs["update"], wanted, rtol=2e-3)
    stddevs = mechanism.noise_stddevs(RoundState(1.0, tf.constant(0.0), 5.0), context)
    assert float(stddevs["update"]) == 0.0


@pytest.mark.parametrize("z, sigma_b", [(1.0, 0.5), (1.0, 0.0), ([0.1, 1.0], 0.4)])
def test_z_of_two_sigma_b_or_more_is_an_error(z, sigma_b):
    with pytest.raises(ValueError, match=r"noise_multiplier.*count_noise"):
        tfdp_fl.AdaptiveClipping(noise_multiplier=z, count_noise_stddev=sigma_b)
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"noise_multiplier.*count_noise"):
        mechanism.bind(PrivacyContext(clients_per_round=10))
    mechanism.bind(PrivacyContext(clients_per_round=11))
    # In every round of a schedule; both releases together cost z.
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=lambda t: 0.4 * t)
    with pytest.raises(ValueError, match="noise_multiplier"):
        mechanism.check(PrivacyContext(clients_per_round=10, rounds=5))
    short = PrivacyContext(clients_per_round=10, rounds=3)
    assert mechanism.round_event(2, short) == dp_accounting.GaussianDpEvent(0.8)
    with pytest.raises(ValueError, match="noise_multiplier"):
        mechanism.round_event(3, short)
