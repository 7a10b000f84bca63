from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.mechanisms import PrivacyContext, median_clipping, noise

_WIDE = [[100, 100], [100, 100], [5000]]


def _mechanism(z_median=None, z=1.0):
    return tfdp_fl.MedianClipping(noise_multiplier=z, median_noise_multiplier=z_median)


def _query(z_median=None):
    return rounds.bound(_mechanism(z_median), 4, sampling="fixed_size")


def test_an_empty_cohort_keeps_the_last_median():
    query, state = _query()
    # One of two clients is not to set it.
    for sizes in (2, (5, 2)):
        with pytest.raises(ValueError, match="clients_per_round must be at least 3"):
            query.mechanism.check(PrivacyContext(clients_per_round=sizes, rounds=2))
    state = rounds.run_round(query, state, rounds.updates_with_norms([3.0])).next_state
    (template,) = rounds.zero_updates(1, _WIDE)
    options = {"noise_multiplier": 1.0, "clients_per_round": 4, "template": template}
    done = rounds.run_round(query, state, [], **options)
    np.testing.assert_allclose(done.state.clip_norm, 3.0, rtol=1e-5)
    statistics.assert_gaussian(rounds.flat(done.mean), 3.0 / 4)


def _found_with(norms, z, draw):
    """Returns the median, with `draw(stddev)` in place of the noise."""
    with mock.patch.object(noise, "normal", lambda shape, stddev: draw(float(stddev))):
        return float(median_clipping.private_median(tf.constant(norms), z))


@pytest.mark.parametrize("norms", [[0.1] * 3 + [9.0], [0.1], [0.1] * 5 + [9.0] * 5])
def test_a_client_moves_every_question_by_one_half(norms):
    # The first: are more than half at most 1? The noise crosses minus the sum.
    def least_noise_for_yes(norms):
        for noise_on_sum in np.arange(-3.25, 4, 0.5):
            if _found_with(norms, 1.0, lambda _, n=noise_on_sum: n) < 1:
                return noise_on_sum
        raise AssertionError

    alone = least_noise_for_yes(norms)
    assert least_noise_for_yes([*norms, 0.1]) == alone - 0.5
    assert least_noise_for_yes([*norms, 9.0]) == alone + 0.5


@pytest.mark.parametrize("z", [0.1, 0.7, 4.0])
def test_all_answers_together_cost_one_gaussian(z):
    stddevs = []
    _found_with([1.0] * 3, z, lambda stddev: stddevs.append(stddev) or 0.0)
    together = sum((stddev / 0.5) ** -2 for stddev in stddevs) ** -0.5
    assert together == pytest.approx(z, abs=1e-5)


def test_every_answer_has_noise_of_its_own():
    seeds, original = [], noise.next_seed
    with mock.patch.object(
        noise, "next_seed", lambda: seeds.append(original()) or seeds[-1]
    ):
        # It stays on its grid, for an empty cohort too.
        for norms in ([], [0.0] * 50, [1e30] * 50):
            norms = tf.constant(norms, tf.float32)
            found = float(median_clipping.private_median(norms, 0.1))
            least, most = median_clipping.SMALLEST_NORM, median_clipping.LARGEST_NORM
            assert least <= found <= most
    different = {tuple(seed.numpy()) for seed in seeds}
    assert len(different) == 3 * median_clipping.SEARCH_STEPS


@pytest.mark.parametrize("z, z_median", [(1.0, 1.0), (0.7, 3.0), (5.0, 0.5)])
def test_a_private_median_is_composed_into_the_round(z, z_median):
    context = PrivacyContext(clients_per_round=5)
    event = _mechanism(z_median, z).round_event(0, context)
    assert event.noise_multiplier == pytest.approx((z**-2 + z_median**-2) ** -0.5)
    assert "exact_median" not in _mechanism(z_median, z).caveats()
    # The exact median is not covered, and says so.
    event = _mechanism(None, z).round_event(0, context)
    assert event == dp_accounting.GaussianDpEvent(z)
    assert "exact_median" in _mechanism(None, z).caveats()
    # A private median under an exact sum is not private.
    event = _mechanism(z_median, 0).round_event(0, context)
    assert event == dp_accounting.NonPrivateDpEvent()


def test_a_private_one_is_what_the_round_clips_with():
    query, state = _query(0.001)
    updates = rounds.updates_with_norms([0.5, 1, 1, 2, 8])
    done = rounds.run_round(query, state, updates)
    np.testing.assert_allclose(done.state.clip_norm, 1.0, rtol=0.01)
    wanted = references.fixed_clipping_mean(updates, float(done.state.clip_norm), 5)
    rounds.assert_close(done.mean, wanted, atol=1e-6)
