import dataclasses
import math
import warnings

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl import accounting, algorithm
from tfdp_fl.mechanisms import ClientContext, PrivacyContext, RoundState, declaration

_DEPLOYMENT = PrivacyContext(
    clients_per_round=4, num_clients=20, sampling="fixed_size", rounds=10
)


def _noise(context, **arguments):
    """Returns what one client adds, divided by S: its sensitivity is 2 S."""
    mechanism = tfdp_fl.LocalDP(clip_norm=1.0, **arguments)
    return mechanism.client_noise_multiplier(context)


@pytest.mark.parametrize("epsilon, delta", [(0.3, 1e-3), (8.0, 1e-6), (50.0, 1e-3)])
@pytest.mark.parametrize("count", [1, 10])
def test_basic_splits_epsilon_and_delta_by_the_rounds(epsilon, delta, count):
    context = PrivacyContext(clients_per_round=4, rounds=count)
    for calibration in ("analytic", "classic"):
        options = {"calibration": calibration, "composition": "basic"}
        actual = _noise(context, epsilon=epsilon, delta=delta, **options)
        sigma = getattr(references, f"{calibration}_sigma")
        expected = sigma(2.0, epsilon / count, delta / count)
        assert actual / expected == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 16.0])
@pytest.mark.parametrize("participations", [1, 7, None])
def test_rdp_composes_a_clients_own_participations(epsilon, participations):
    where = {"rounds": 50, "max_participations": participations}
    context = PrivacyContext(clients_per_round=4, **where)
    actual = _noise(context, epsilon=epsilon, delta=1e-5)
    # k releases are one of sigma/sqrt(k). Not knowing k assumes every round.
    root_k = math.sqrt(participations or 50)
    expected = references.analytic_sigma(2.0, epsilon, 1e-5) * root_k
    assert actual / expected == pytest.approx(1, abs=1e-6)


def test_classic_is_warned_of_from_one_on():
    # Where it breaks its promise.
    z = references.classic_sigma(1.0, 20.0, 1e-5)
    assert references.gaussian_delta(z, 1.0, 20.0) > 1e-5
    budget = {"clip_norm": 1.0, "epsilon": 8.0, "delta": 1e-5, "calibration": "classic"}
    mechanism = tfdp_fl.LocalDP(**budget)
    with pytest.warns(UserWarning, match=r"classic.*epsilon < 1"):
        mechanism.bind(_DEPLOYMENT)
    assert "classic_above_one" in mechanism.caveats()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tfdp_fl.LocalDP(**budget, composition="basic").bind(_DEPLOYMENT)


@pytest.mark.parametrize("z", [0.5, 3.0])
def test_one_round_costs_a_client_its_sensitivity_over_sigma(z):
    mechanism = tfdp_fl.LocalDP(clip_norm=7.0, noise_multiplier=z)
    assert mechanism.mu_squared(_DEPLOYMENT) == pytest.approx((2 / z) ** 2)
    # On the sum of m = 4: sqrt(m) times what one client adds.
    stddevs = mechanism.noise_stddevs(RoundState(7.0, 0.0, 4.0), _DEPLOYMENT)
    assert stddevs == {"update": pytest.approx(2 * z * 7.0)}
    quiet = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=0.0)
    assert quiet.mu_squared(_DEPLOYMENT) == math.inf
    # The whole budget is spent at the last participation.
    mechanism = tfdp_fl.LocalDP(clip_norm=1.0, epsilon=8.0, delta=1e-5)
    mu_squared = 10 * mechanism.mu_squared(_DEPLOYMENT)
    spent = accounting.gaussian_epsilon(mu_squared**-0.5, 1e-5)
    assert spent == pytest.approx(8.0, abs=1e-4)
    with pytest.raises(ValueError, match="rounds"):
        mechanism.bind(PrivacyContext(clients_per_round=4))


@pytest.mark.parametrize(
    "sampling, event",
    [
        ("fixed_size", dp_accounting.GaussianDpEvent(3.0)),
        ("shuffled", dp_accounting.GaussianDpEvent(1.5)),
        ("poisson", dp_accounting.NonPrivateDpEvent()),
        (None, dp_accounting.NonPrivateDpEvent()),
    ],
)
def test_the_mean_gives_a_central_guarantee_where_m_answer_for_sure(sampling, event):
    mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.5)
    context = PrivacyContext(clients_per_round=4, sampling=sampling)
    assert mechanism.round_event(0, context) == event
    assert mechanism.trust_model == "local"
    assert "local_not_central" in mechanism.caveats()


_NAN = float("nan")
_WIDE = [[150, 150], [150, 150], [20000]]
_RADII = [0.2, 1.0, 0.05]
# Sum_l (2 r_l / sigma_l)^2 of one of five releases at (8, 1e-5) is at most _ZETA^-2.
_ZETA = references.analytic_sigma(1.0, 8.0, 1e-5) * math.sqrt(5)


def _bound(num_layers, **arguments):
    mechanism = tfdp_fl.AdaptiveLocalDP(**{"epsilon": 8.0, "delta": 1e-5, **arguments})
    return rounds.bound(mechanism, 2, rounds=5, num_variables=num_layers)


def _radii(query, window=None):
    if window is not None:
        window = tf.constant(window)
    return query.mechanism.radii(ClientContext(window=window), query.context)


@pytest.mark.parametrize("norms", [[], [0.3, 0.6, 0.1], [5.0, 0.1, 0.1], [0.0] * 3])
def test_a_radius_is_the_mean_of_the_last_norms_below_the_bound(norms):
    query, _ = _bound(2)
    window = np.full([3, 2], _NAN, np.float32)
    for row, norm in enumerate(norms):
        window[3 - len(norms) + row] = [norm, 2 * norm]
    mean = np.mean(norms) if norms else 1.0
    expected = np.clip([mean, 2 * mean], 1e-3, 1.0)  # Noise does not vanish.
    np.testing.assert_allclose(_radii(query, window), expected, rtol=1e-6)
    query, _ = _bound(4, clipping_radius=0.7)
    np.testing.assert_allclose(_radii(query), [0.7] * 4, rtol=1e-6)


def test_every_layer_is_clipped_to_its_own_radius():
    query, state = _bound(4, epsilon=1e14)  # Practically no noise.
    updates = rounds.updates_with_norms([0.2, 5.0])
    # The norms of the window are taken before clipping.
    found = query.mechanism.window_norms([tf.constant(v) for v in updates[1]])
    norms = [np.linalg.norm(v) for v in updates[1]]
    np.testing.assert_allclose(found, norms, rtol=1e-5)
    windows = np.full([2, 3, 4], _NAN, np.float32)
    windows[0, 2] = [0.01, 0.5, 2.0, 0.3]
    done = rounds.run_round(query, state, updates, windows=list(windows))
    for layer, radius in enumerate((0.01, 0.5, 1.0, 0.3)):
        parts = [[update[layer]] for update in updates]
        wanted = references.clipped(parts[0], radius) + references.clipped(parts[1], 1)
        np.testing.assert_allclose(done.mean[layer], sum(wanted) / 2, atol=1e-5)
    assert float(done.total.clipped) == 2


_DISCO = {"calibration": "classic", "composition": "basic", "layers": "separate"}


@pytest.mark.parametrize(
    "options, sigma",
    [
        ({}, lambda radius: 2 * radius * _ZETA * math.sqrt(3)),
        # 2 r sqrt(2 ln(1.25 / delta_r)) / epsilon_r.
        (_DISCO, lambda radius: references.classic_sigma(2 * radius, 8 / 5, 2e-6)),
    ],
)
def test_layers_share_the_budget_or_have_the_noise_that_disco_published(options, sigma):
    query, state = _bound(3, **options)
    updates = rounds.zero_updates(1, _WIDE)
    window = np.tile(np.float32(_RADII), [3, 1])
    done = rounds.run_round(query, state, updates, windows=[window])
    for part, radius in zip(done.mean, _RADII, strict=True):
        statistics.assert_gaussian(part, sigma(radius))
    # One bad layer zeroes the whole update.
    updates[0][0][:] = 1e6
    updates[0][1][0, 0] = np.nan
    done = rounds.run_round(query, state, updates)
    assert float(done.total.discarded) == 1
    assert float(done.total.norm) == 0
    statistics.assert_gaussian(rounds.flat(done.mean), sigma(1.0))


def test_joint_layers_spend_the_budget_once_and_separate_ones_each():
    # Of whom LocalDP's mean would have a central guarantee.
    context = PrivacyContext(
        clients_per_round=2, sampling="fixed_size", rounds=5, num_variables=4
    )
    for layers, caveat, releases in (
        ("joint", "layers_joint", 1),
        ("separate", "layers_charged_separately", 4),
    ):
        made = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5, layers=layers)
        one = made.mu_squared(context) / releases
        spent = accounting.gaussian_epsilon((5 * one) ** -0.5, 1e-5)
        assert spent == pytest.approx(8.0, abs=1e-4)
        assert {"radius_from_unnoised_norms", caveat} <= set(made.caveats())
        assert made.trust_model == "local"
        event = made.round_event(0, context)
        assert event == dp_accounting.NonPrivateDpEvent()


class _CountsTheUsable(tfdp_fl.LocalDP):
    """Would tell by a weight without noise whether an update is usable."""

    def contribution(self, update, round, client, context):
        record = super().contribution(update, round, client, context)
        return record._replace(weight=1.0 - record.discarded)

    def mu_squared(self, context):
        return super().mu_squared(context)

    def round_event(self, round_index, context):
        return super().round_event(round_index, context)


_LOCAL = [
    kind
    for kind in [*map(declaration.by_name, declaration.names()), _CountsTheUsable]
    if kind.trust_model == "local"
]


@pytest.mark.parametrize("kind", _LOCAL)
@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e18, 1e-42])
def test_a_clients_weight_in_the_mean_does_not_depend_on_its_update(kind, value):
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {"epsilon": 1.0, "delta": 1e-5, "clip_norm": 1.0}
    given |= {"constant": 1.0, "weight_clip": 1.0}
    mechanism = kind(**{name: given[name] for name in fields & given.keys()})
    query, state = rounds.bound(
        mechanism, 1, num_clients=9, rounds=3, num_variables=1, shapes=((8,),)
    )
    params = query.derive_sample_params(query.begin_round(state, 0.0, 1.0))
    client = ClientContext(num_examples=tf.constant(5))
    hostile, zero = (
        algorithm.make_contribution(
            query, params, [tf.fill([8], np.float32(each))], client
        )
        for each in (value, 0.0)
    )
    assert float(hostile.weight) == float(zero.weight) > 0
    assert np.all(hostile.update[0])  # It has noise.


@pytest.mark.parametrize(
    "mechanism",
    [
        tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=1.0),
        tfdp_fl.AdaptiveLocalDP(epsilon=1.0, delta=1e-5, clipping_radius=0.5),
        tfdp_fl.NbAFL(epsilon=1.0, constant=2.0, weight_clip=0.5),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_a_state_of_a_larger_clip_comes_with_its_noise(mechanism):
    # In TFF, a state may be of a process with another clip. (NbAFL went on by its own
    # noise, with a thousandth of what that clip needs.)
    where = dataclasses.replace(
        _DEPLOYMENT, min_examples=6, num_variables=1, num_clients=4
    )
    query, client = mechanism.bind(where), ClientContext(tf.constant(6.0))
    state = query.initial_global_state()
    ratios = []
    for enlarged in (1.0, 1000.0):
        params = query.derive_sample_params(
            query.begin_round(
                state._replace(clip_norm=enlarged * state.clip_norm), 1.0, 4.0
            )
        )
        record = query.clip(params, [tf.constant([1e6, 0.0])], client)
        stddev = mechanism.client_noise(params, client, where)
        ratios.append(float(tf.norm(record.update[0]) / tf.reshape(stddev, [])))
    assert ratios[1] == pytest.approx(ratios[0])
