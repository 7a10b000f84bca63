"""`make_private` finds the smallest noise that keeps a target."""

import warnings

import numpy as np
import pytest

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl import sampling as sampling_lib
from tfdp_fl.mechanisms import PrivacyContext, default_median_noise_multiplier

_DELTA = 1e-4
_CLIENTS = 1000


def _make(target=4.0, rounds=30, m=100, **options):
    """Makes it for many clients, by RDP; others have the default accountant."""
    usual = {"target_delta": _DELTA, "num_clients": _CLIENTS, "clients_per_round": m}
    return toy.private(target, rounds, **{**usual, **options})


def _cost(mechanism, sampling="poisson", rounds=30, m=100):
    """Returns epsilon of the rounds, computed anew."""
    planned = {"num_clients": _CLIENTS, "sampling": sampling, "rounds": rounds}
    context = PrivacyContext(clients_per_round=m, **planned)
    sampler = sampling_lib.make_sampler(sampling, _CLIENTS, m)
    history = accounting.PrivacyAccountant()
    for t in range(rounds):
        history.add(sampler.charge(t, mechanism.round_event(t, context)))
    return history.epsilon(_DELTA, "rdp")


def _assert_used_up(found, target=4.0):
    assert target * (1 - 1e-3) <= found <= target * (1 + 1e-9)


@pytest.mark.parametrize(
    "mechanism, sampling, target",
    [
        ("adaptive", "poisson", 4.0),
        ("fixed", "fixed_size", 40.0),
        ("median", "shuffled", 4.0),
    ],
)
def test_a_target_is_kept_and_used_up(mechanism, sampling, target):
    options = {"clip_norm": 0.5} if mechanism == "fixed" else {}
    fed = _make(target, mechanism=mechanism, sampling=sampling, **options)
    made = fed.mechanism
    _assert_used_up(_cost(made, sampling), target)
    if mechanism == "median":
        wanted = default_median_noise_multiplier(made.noise_multiplier, 100)
        assert made.median_noise_multiplier == pytest.approx(wanted)
    else:  # Less noise by 0.1 % would be too little.
        less = made.with_noise_multiplier(made.noise_multiplier * 0.999)
        assert _cost(less, sampling) > target


def test_schedules_are_scaled_as_a_whole_and_calibrated_as_they_will_run():
    sizes, noise = [50, 60, 70, 80], [2.0, 1.0, 1.0, 0.5]
    scheduled = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=noise)
    made = _make(mechanism=scheduled, rounds=4, m=sizes).mechanism
    values = [made.noise_multiplier_at(t) for t in range(4)]
    assert values[0] / values[3] == pytest.approx(4.0)
    _assert_used_up(_cost(made, rounds=4, m=sizes))
    rng = np.random.default_rng(0)
    impure = tfdp_fl.FixedClipping(
        clip_norm=1.0, noise_multiplier=lambda t: rng.uniform(0.5, 3)
    )
    fed = _make(mechanism=impure, rounds=5, m=lambda t: rng.uniform(20, 200))
    sizes = [fed.setup.clients_per_round(t) for t in range(5)]
    _assert_used_up(_cost(fed.mechanism, rounds=5, m=sizes))


@pytest.mark.parametrize(
    "mechanism, options", [("local", {"clip_norm": 0.5}), ("adaptive_local", {})]
)
def test_local_targets_hold_for_the_client_seen_most(mechanism, options):
    made = _make(8.0, mechanism=mechanism, **options).mechanism
    planned = {"rounds": 30, "max_participations": 30, "num_variables": 2}
    cohorts = {"clients_per_round": 100, "num_clients": _CLIENTS, "sampling": "poisson"}
    spent = 30 * made.mu_squared(PrivacyContext(**cohorts, **planned))
    _assert_used_up(accounting.epsilon_of_mu_squared(spent, _DELTA), 8.0)
    # Nor do clients get a fresh target for every fit.
    fed = toy.private(8.0, 6, mechanism=mechanism, sampling="shuffled", **options)
    # 6 rounds are 3 passes: 3 participations of every client.
    for _ in range(3):
        toy.fit(fed, 2)
    assert fed.rounds == 6
    _assert_used_up(fed.epsilon(1e-3), 8.0)
    with pytest.warns(RuntimeWarning, match="allows 0 of the 2"):
        toy.fit(fed, 2)
    assert fed.rounds == 6


def test_few_clients_a_round_get_as_much_count_noise_as_it_takes():
    few = {"target": 2.0, "num_clients": 12, "m": 4, "rounds": 10}
    mechanism = _make(**few).mechanism
    assert mechanism.noise_multiplier > 0.4
    assert mechanism.count_noise_stddev == mechanism.noise_multiplier
    # What is asked for by name stays, and may be too little.
    with pytest.raises(ValueError, match="count_noise_stddev"):
        _make(**few, count_noise_stddev=0.2)


def test_the_baseline_and_what_is_refused():
    fed = _make(mechanism="none")
    assert isinstance(fed.mechanism, tfdp_fl.NoPrivacy)
    assert fed.setup.target is None
    toy.fit(fed, 2, data=toy.clients(_CLIENTS))
    assert (fed.rounds, fed.epsilon(_DELTA)) == (2, np.inf)
    noise = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    fixed, chosen = tfdp_fl.FixedClipping(**noise), "noise_multiplier can be calibrated"
    little = {"m": 5, "target": 0.05, "count_noise_stddev": 0.25}
    for message, options in (
        (chosen, {"mechanism": tfdp_fl.NoPrivacy()}),
        (chosen, {"mechanism": tfdp_fl.LocalDP(**noise)}),
        ("needs sampling='fixed_size'", {"noise_site": "client"}),
        ("target_epsilon=0.05 .* cannot be met .*clients_per_round / 20", little),
        ("noise_multiplier is not an arg", {"noise_multiplier": 1.0}),
        (r"\['clip_norm'\] cannot be given", {"mechanism": fixed, "clip_norm": 2.0}),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            _make(**options)


def test_other_numbers_or_more_rounds_than_planned():
    fed = _make(m=20, rounds=2)
    with pytest.raises(ValueError, match=r"num_clients=1000 .* got 40"):
        toy.fit(fed, 2)
    assert fed.run is None
    with pytest.warns(RuntimeWarning, match="target_delta should .*got 0.002"):
        _make(3.0, 1, target_delta=2e-3)
    fed = toy.private(9.0, 4, mechanism="fixed", clip_norm=0.5)
    with warnings.catch_warnings():  # What was asked for runs without a word.
        warnings.simplefilter("error", RuntimeWarning)
        toy.fit(fed, 1)
    with pytest.warns(RuntimeWarning, match="epsilon=9 .* allows 3 of the 12 rounds"):
        assert len(toy.fit(fed, 12).epoch) == 3
    assert 9.0 * (1 - 1e-3) <= fed.epsilon(1e-3) <= 9.0
    with pytest.warns(RuntimeWarning, match="allows 0 of the 1 rounds"):
        assert toy.fit(fed, 1).epoch == []
    assert fed.rounds == 4
    fed = toy.private(9.0, 4, mechanism="fixed", clip_norm=0.5)
    with pytest.warns(
        RuntimeWarning, match="are 30 clients, fewer than the num_clients"
    ):
        assert len(toy.fit(fed, 4, data=toy.clients(30)).epoch) < 4
    # Cohorts that are not known may allow more, until somebody is drawn thrice.
    fed = toy.private(8.0, 3, mechanism="local", clip_norm=0.5)
    message = "at least 3 of the 40 rounds .* may end after those"
    with pytest.warns(RuntimeWarning, match=message):
        toy.fit(fed, 40)
    assert 3 <= fed.rounds <= 12
    assert fed.epsilon(1e-3) <= 8.0 * (1 + 1e-9)


def test_one_epsilon_everywhere():
    fed = toy.private(2.0, 4, accountant=None)
    told = toy.fit(fed, 4).history["epsilon"]
    epsilon = fed.epsilon(1e-3)
    assert told == sorted(told)
    assert told[-1] == epsilon == fed.epsilon(1e-3, "pld")
    assert 2.0 * (1 - 1e-3) <= epsilon <= 2.0
    assert fed.privacy_statement(1e-3, "dict")["epsilon"] == epsilon
    assert fed.epsilon(1e-3, "rdp") > 2.05
    fed = toy.private(2.0, 4, accountant=None, target_delta=1e-16)
    assert 1.0 < fed.mechanism.noise_multiplier < 100.0  # By PLD: 10 000.


def test_a_delta_that_is_not_given_is_a_tenth_of_one_client():
    fed = toy.private(2.0, 4, target_delta=None)
    assert fed.setup.target.delta == fed.setup.delta == 0.1 / toy.NUM_CLIENTS
    assert fed.mechanism == toy.private(2.0, 4, target_delta=2.5e-3).mechanism
    with pytest.raises(ValueError, match=r"num_clients must be .* got 0"):
        toy.private(2.0, 4, target_delta=None, num_clients=0)
