"""Tests of the audit: what it finds, in sound training and in broken one.

The figures that are compared are epsilons at delta = 1e-5 of one or a few
Gaussian releases. A canary's score has a standard deviation of 1 in its own
unit, so the mean of 2000 is off by 0.022; bounds are five times that or more.
"""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tests.mechanisms.rounds import flat
from tfdp_fl.accounting import gaussian
from tfdp_fl.auditing import CanaryAudit, audit, estimate
from tfdp_fl.engine import cohort
from tfdp_fl.mechanisms import noise

_DELTA = 1e-5
_CANARIES = 2000
# By how much an audit's lower end may pass the claim. It is 0.89 of it in the
# mean where it spreads most (server momentum: standard deviation 0.047 in 38
# runs): this is more than six of these away, a chance below 1e-9.
_MARGIN = 1.2


def _model() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(1)
    dense = tf.keras.layers.Dense
    return tf.keras.Sequential([tf.keras.layers.Input((8,)), dense(1000), dense(3)])


def _audited(mechanism, audit, rounds=1, sampling="shuffled", **options):
    """Trains on eight clients, all of them in every round if shuffled."""
    m, server = options.pop("clients_per_round", 8), options.pop("server", None)
    fed = tfdp_fl.DPFederatedModel(_model(), mechanism, m, sampling, num_replicas=1)
    fed.compile(tf.keras.optimizers.SGD(0.01), toy.loss(), server_optimizer=server)
    fed.fit(toy.clients(8), rounds=rounds, verbose=0, audit=audit, **options)
    return fed


def _fixed(z=1.0):
    return tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=z)


def _trained(mechanism, *args, audit=None, **options):
    """Returns what an audit of a new run estimates, and the run."""
    audit = audit or CanaryAudit(_CANARIES)
    fed = _audited(mechanism, audit, *args, **options)
    return audit.estimate(_DELTA), fed


# What is made of the scores.


@pytest.mark.parametrize("z", [0.5, 2.0])
def test_one_release_is_found_within_fifteen_percent(z):
    # As a release is: 4000 canaries and noise, d = 20 000.
    rng, size, count = np.random.default_rng(1), 20_000, 4000
    drawn = audit.Canaries(count, size, seed=2)
    added = drawn.sum_of(np.arange(count))
    observed = audit.scores(
        drawn, added + rng.normal(0, z, size), added, np.ones(count)
    )
    scores = estimate.Scores(observed=observed, null_std=size**-0.5)
    found = estimate.estimate(scores, _DELTA)
    exact = gaussian.gaussian_epsilon(z, _DELTA)
    assert found.epsilon / exact == pytest.approx(1, abs=0.15)
    assert found.low <= found.epsilon <= found.high


def test_of_those_who_did_not_take_part_nothing_is_found():
    rng, size = np.random.default_rng(1), 20_000
    drawn = audit.Canaries(_CANARIES, size, seed=2)
    update, nothing = rng.normal(size=size), np.zeros(size)
    found = audit.scores(drawn, update, nothing, np.zeros(_CANARIES))
    assert found.mean() * size**0.5 == pytest.approx(0, abs=0.11)
    assert found.std() * size**0.5 == pytest.approx(1, abs=0.08)


def test_thresholds_too_are_no_surer_than_the_unit():
    # With d = 2 it is off by half of itself.
    scores = estimate.Scores(observed=np.full(1000, 2.8), null_std=2**-0.5)
    found = estimate.estimate(scores, _DELTA)
    assert found.low < 1.0
    assert found.epsilon > 10.0


def test_canaries_are_the_same_whenever_they_are_made():
    drawn = audit.Canaries(5, 300, seed=1)
    each = np.stack([drawn.sum_of(np.array([i])) for i in range(5)])
    close = {"rtol": 1e-4, "atol": 1e-6}
    np.testing.assert_allclose((each**2).sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(drawn.sum_of(np.arange(5)), each.sum(axis=0), **close)
    np.testing.assert_allclose(drawn.projections(each[2]), each @ each[2], **close)


# In training, and nothing is found above what is claimed.

_ADAPTIVE = tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, count_noise_stddev=5.0)
_MOMENTUM = tf.keras.optimizers.SGD(1.0, momentum=0.5)
_CORRELATED = tfdp_fl.CorrelatedNoise(
    clip_norm=0.1,
    noise_multiplier=2.0,
    strategy=tfdp_fl.BLT(2),
    rounds=8,
    min_separation=4,
)


@pytest.mark.parametrize(
    "mechanism, rounds, sampling, options",
    [
        (_ADAPTIVE, 1, "shuffled", {}),
        (_fixed(), 4, "fixed_size", {"clients_per_round": 4}),
        (_CORRELATED, 8, "cyclic", {"clients_per_round": 2}),
        (_fixed(3.0), 3, "shuffled", {"server": _MOMENTUM}),
    ],
    ids=["adaptive", "fixed_size", "correlated", "server_momentum"],
)
def test_estimate_is_not_above_the_claim(mechanism, rounds, sampling, options):
    found, fed = _trained(mechanism, rounds, sampling, **options)
    assert found.low < fed.epsilon(_DELTA, "pld") * _MARGIN


@pytest.mark.parametrize("iterates, off", [("final", 0.15), ("all", 0.2)])
def test_one_release_is_found_in_training(iterates, off):
    found, fed = _trained(_fixed(), audit=CanaryAudit(_CANARIES, iterates))
    assert found.epsilon / fed.epsilon(_DELTA) == pytest.approx(1, abs=off)
    assert found.num_canaries == _CANARIES
    fed.fit(toy.clients(8), rounds=2, verbose=0)
    text = fed.privacy_statement(_DELTA)
    assert f"audit with {_CANARIES} canary clients in 1 of the rounds" in text
    assert f"as {found.epsilon:.3g} " in text


@pytest.mark.parametrize(
    "mechanism",
    # All kinds of clip, without noise on what an adaptive one goes by.
    [
        _fixed(0.1),
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=0.022),
        tfdp_fl.MedianClipping(noise_multiplier=0.1),
    ],
    ids=["fixed", "adaptive", "median"],
)
def test_canaries_add_their_clipped_updates_and_nothing_else(mechanism):
    handed_in = []
    add = cohort.PendingRound.add_contribution

    def seen(pending, one):
        handed_in.append(one)
        add(pending, one)

    plain = _audited(mechanism, None, seed=3)
    with mock.patch.object(cohort.PendingRound, "add_contribution", seen):
        fed = _audited(mechanism, CanaryAudit(200), seed=3)
    (one,) = handed_in
    assert not np.any(one.scalars())
    added = flat(one.update)
    # A squared norm of 200 S^2 with a standard deviation of 2.6 S^2.
    clip = fed.model.history.history["clip_norm"][0]
    assert np.sum(added**2) / (200 * clip**2) == pytest.approx(1, abs=0.1)
    moved = flat(fed.model.weights) - flat(plain.model.weights)
    np.testing.assert_allclose(moved, added / 8, atol=1e-6)
    # The clip goes its way as without canaries. One client's bit is 2.5 % of it.
    # With bits of its own each canary would be that: 200 of them would divide it
    # by ten every round.
    for each, canaries in ((plain, None), (fed, CanaryAudit(200))):
        each.fit(toy.clients(8), rounds=6, verbose=0, audit=canaries, seed=3)
    plain, audited = (each.model.history.history for each in (plain, fed))
    assert len(audited["clip_norm"]) == 6
    for name in ("clip_norm", "noise_stddev"):
        np.testing.assert_allclose(audited[name], plain[name], rtol=0.15)


# What is broken looks larger than the epsilon that is claimed.


def _half_the_noise(add):
    return lambda update, stddev: add(update, stddev / 2)


def _one_variable_without_noise(add):
    return lambda update, stddev: [update[0], *add(update[1:], stddev)]


def _one_client_twice_in_the_sum(add):
    return lambda pending, one: (add(pending, one), add(pending, one))


def _a_layer_that_is_not_clipped(unflatten):
    def loose(spec, flat):
        first, *rest = unflatten(spec, flat)
        return [3.0 * first, *rest]

    return loose


@pytest.mark.parametrize(
    "owner, name, fault",
    [
        (noise, "add_normal", _half_the_noise),
        (noise, "add_normal", _one_variable_without_noise),
        (cohort.PendingRound, "add_contribution", _one_client_twice_in_the_sum),
        (cohort.UpdateSpec, "unflatten", _a_layer_that_is_not_clipped),
    ],
)
def test_a_planted_fault_is_found(owner, name, fault):
    with mock.patch.object(owner, name, fault(getattr(owner, name))):
        found, fed = _trained(_fixed())
    assert found.low > fed.epsilon(_DELTA, "pld") * 1.2


def test_the_same_noise_in_two_rounds_is_found():
    # Without the fault nothing is found: `tests/stress/audit_stress.py`.
    audit = CanaryAudit(num_canaries=6000, iterates="all")
    same = mock.Mock(return_value=np.array([1, 2], np.int64))
    with mock.patch("tfdp_fl.keras.run.round_seed", same):
        found, fed = _trained(_fixed(), 2, "poisson", audit=audit, clients_per_round=4)
    assert found.low > fed.epsilon(_DELTA)


# Arguments.


@pytest.mark.parametrize(
    "mechanism",
    [
        tfdp_fl.NoPrivacy(),
        tfdp_fl.LocalDP(clip_norm=1.0, epsilon=1.0, delta=1e-3),
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0, noise_site="client"),
    ],
)
def test_what_is_not_audited(mechanism):
    with pytest.raises(ValueError, match="audit must be None"):
        _audited(mechanism, CanaryAudit(10), sampling="fixed_size")


def test_once_only_and_after_the_run():
    with pytest.raises(TypeError, match="audit"):
        _audited(_fixed(), "yes")
    for number in (0, 1, -3):
        with pytest.raises(ValueError, match="num_canaries"):
            CanaryAudit(number)
    audit = CanaryAudit(10)
    with pytest.raises(ValueError, match="given to a fit"):
        audit.estimate(_DELTA)
    fed = _audited(_fixed(), audit)
    with pytest.raises(ValueError, match="a new CanaryAudit"):
        fed.fit(toy.clients(8), verbose=0, audit=audit)
    with pytest.raises(ValueError, match="delta"):
        audit.estimate(2.0)
