from __future__ import annotations

import numpy as np
import pytest

import tfdp_fl
from tests.mechanisms import rounds
from tfdp_fl.mechanisms import Deployment


@pytest.mark.parametrize("answered", [0, 1, 6])
def test_divides_by_the_fixed_m_however_many_answer(answered):
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    query = mechanism.bind(Deployment(clients_per_round=4, num_clients=9))
    updates = rounds.updates_with_norms([0.2] * 6)
    done = rounds.run_round(
        query,
        query.initial_global_state(),
        updates[:answered],
        clients_per_round=4,
        template=updates[0],
    )
    expected = sum(rounds.flat(u) for u in updates[:answered]) / 4
    np.testing.assert_allclose(
        rounds.flat(done.mean), expected + np.zeros(26), atol=1e-7
    )


@pytest.mark.parametrize("clip", [1e-11, 1e31])
def test_a_clip_that_float32_cannot_keep_is_refused(clip):
    for make in (
        lambda: tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=1.0),
        lambda: tfdp_fl.AdaptiveClipping(initial_clip_norm=clip, noise_multiplier=1.0),
        lambda: tfdp_fl.LocalDP(clip_norm=clip, noise_multiplier=1.0),
    ):
        with pytest.raises(ValueError, match="clip_norm must be from"):
            make()


@pytest.mark.parametrize("clip, noise", [(1e-10, 1e-20), (1e18, 1e18), (1.0, 1e38)])
def test_noise_that_float32_cannot_keep_is_refused(clip, noise):
    for schedule in (noise, [noise], lambda _: noise):
        with pytest.raises(ValueError, match="noise_multiplier times the clip"):
            tfdp_fl.FixedClipping(
                clip_norm=clip, noise_multiplier=schedule
            ).noise_multiplier_at(0)


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_noise_at_the_clients_needs_cohorts_of_fixed_size(sampling):
    deployment = Deployment(clients_per_round=5, sampling=sampling)
    for mechanism in (
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.1, noise_site="client"),
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.1, noise_site="client"),
    ):
        for use in (mechanism.check, mechanism.bind):
            with pytest.raises(ValueError, match=r"noise_site.*fixed_size"):
                use(deployment)
