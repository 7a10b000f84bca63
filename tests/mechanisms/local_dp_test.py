import math
import warnings

import dp_accounting
import pytest

import tfdp_fl
from tests.mechanisms import references
from tfdp_fl.accounting import gaussian
from tfdp_fl.mechanisms import Deployment, Round

_DEPLOYMENT = Deployment(
    clients_per_round=4, num_clients=20, sampling="fixed_size", rounds=10
)


def _noise(deployment, **arguments):
    """Returns what one client adds, divided by S: its sensitivity is 2 S."""
    mechanism = tfdp_fl.LocalDP(clip_norm=1.0, **arguments)
    return mechanism.client_noise_multiplier(deployment)


@pytest.mark.parametrize("epsilon, delta", [(0.3, 1e-3), (8.0, 1e-6), (50.0, 1e-3)])
@pytest.mark.parametrize("rounds", [1, 10])
def test_basic_splits_epsilon_and_delta_by_the_rounds(epsilon, delta, rounds):
    deployment = Deployment(clients_per_round=4, rounds=rounds)
    for calibration, sigma in (
        ("analytic", references.analytic_sigma),
        ("classic", references.classic_sigma),
    ):
        options = {"calibration": calibration, "composition": "basic"}
        actual = _noise(deployment, epsilon=epsilon, delta=delta, **options)
        expected = sigma(2.0, epsilon / rounds, delta / rounds)
        assert actual / expected == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 16.0])
@pytest.mark.parametrize("participations", [1, 7, None])
def test_rdp_composes_a_clients_own_participations(epsilon, participations):
    deployment = Deployment(
        clients_per_round=4, rounds=50, max_participations=participations
    )
    actual = _noise(deployment, epsilon=epsilon, delta=1e-5)
    # k releases of sensitivity 2 and noise sigma are one of sigma/sqrt(k). Not
    # knowing k assumes every round.
    root_k = math.sqrt(participations or 50)
    expected = references.analytic_sigma(2.0, epsilon, 1e-5) * root_k
    assert actual / expected == pytest.approx(1, abs=1e-6)
    delta = references.gaussian_delta(actual / root_k, 2.0, epsilon)
    assert delta / 1e-5 == pytest.approx(1, abs=1e-5)


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
    stddevs = mechanism.noise_stddevs(Round(7.0, 0.0, 4.0), _DEPLOYMENT)
    assert stddevs == {"update": pytest.approx(2 * z * 7.0)}
    quiet = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=0.0)
    assert quiet.mu_squared(_DEPLOYMENT) == math.inf
    # The whole budget is spent at the last participation.
    mechanism = tfdp_fl.LocalDP(clip_norm=1.0, epsilon=8.0, delta=1e-5)
    mu_squared = 10 * mechanism.mu_squared(_DEPLOYMENT)
    spent = gaussian.gaussian_epsilon(mu_squared**-0.5, 1e-5)
    assert spent == pytest.approx(8.0, abs=1e-4)
    with pytest.raises(ValueError, match="rounds"):
        mechanism.bind(Deployment(clients_per_round=4))


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
    deployment = Deployment(clients_per_round=4, sampling=sampling)
    assert mechanism.round_event(0, deployment) == event
    assert mechanism.guarantee == "local"
    assert "local_not_central" in mechanism.caveats()
