"""Each client in one secret round of every pass: what a pass costs."""

import math

import dp_accounting
import numpy as np
import pytest
from scipy import stats

from tests.accounting.charges import charge, history
from tfdp_fl import accounting
from tfdp_fl.accounting import curves, random_allocation

_DELTA = 1e-5
_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_FALSE_ALARM = 1e-8  # Of each comparison with a simulation.


def _pass(t, z):
    return random_allocation.RandomAllocationDpEvent(
        t, dp_accounting.GaussianDpEvent(z)
    )


def _losses(t, passes, z, samples, rng):
    """Returns losses of removing and of adding a client, as the definition has them."""
    remove, add = np.zeros(samples), np.zeros(samples)
    for _ in range(passes):
        x = rng.normal(0, z, (samples, t))
        add -= np.log(np.mean(np.exp((2 * x - 1) / (2 * z * z)), axis=1))
        x[np.arange(samples), rng.integers(t, size=samples)] += 1
        remove += np.log(np.mean(np.exp((2 * x - 1) / (2 * z * z)), axis=1))
    return remove, add


_POINTS = [
    (t, passes, z, delta)
    for t, passes in ((1, 3), (2, 1), (2, 8), (5, 12), (10, 10))
    for z in (0.6, 0.8, 1.0, 2.3)
    for delta in (1e-3, 1e-2)
]


@pytest.mark.parametrize("t, passes, z, delta", _POINTS)
def test_epsilon_is_that_of_a_simulation_in_both_directions(t, passes, z, delta):
    # Of 40 points; the figure is above the truth, and near it.
    rng = np.random.default_rng([t, passes, round(10 * z), round(1 / delta)])
    simulated = _losses(t, passes, z, 60_000, rng)
    composed = dp_accounting.SelfComposedDpEvent(_pass(t, z), passes)
    loss = curves.loss_distribution(composed, _RELATION, 1e-3)
    epsilon = loss.epsilon(delta)
    by_direction = []
    for losses, bound in zip(simulated, 2 * loss.deltas(epsilon), strict=False):
        counted = np.maximum(-np.expm1(epsilon - losses), 0)
        error = stats.norm.isf(_FALSE_ALARM) * counted.std() / math.sqrt(len(counted))
        by_direction.append(bound)
        assert counted.mean() - error <= bound
        # What is seldom seen may not be seen at all.
        assert bound <= 1.01 * (counted.mean() + error) + 10 / len(counted)
    assert max(by_direction) == pytest.approx(delta, rel=1e-6)


def test_a_pass_of_one_round_is_a_gaussian():
    for z in (0.5, 1.0, 8.0):
        loss = curves.loss_distribution(_pass(1, z), _RELATION, 1e-4)
        exact = accounting.gaussian_epsilon(z, _DELTA)
        assert exact <= loss.epsilon(_DELTA) <= 1.001 * exact
        orders = np.concatenate(curves.PARTS[3:9])
        rdp = [curves.rdp_curve(_pass(1, z), _RELATION, k) for k in range(3, 9)]
        found, whole = np.concatenate(rdp), orders == np.floor(orders)
        np.testing.assert_allclose(found[whole], orders[whole] / (2 * z * z), rtol=1e-8)
        assert np.all(found >= orders / (2 * z * z) * (1 - 1e-12))


def _two_rounds(z):
    """Returns E_Q of functions of S = (Y_1 + Y_2) / 2, by quadrature."""
    u = np.linspace(-14, 14 + 1 / z, 4001)
    y, weight = np.exp(u / z - 1 / (2 * z * z)), stats.norm.pdf(u) * (u[1] - u[0])
    pairs = np.triu_indices(len(u))
    mean = (y[:, None] + y)[pairs] / 2
    weights = (weight[:, None] * weight * (2 - np.eye(len(u))))[pairs]
    return lambda of_mean: of_mean(mean) @ weights


@pytest.mark.parametrize("z", [0.7, 1.0, 3.0])
def test_a_pass_of_two_rounds_is_that_of_a_quadrature(z):
    loss, expected = (
        curves.loss_distribution(_pass(2, z), _RELATION, 1e-4),
        _two_rounds(z),
    )
    for epsilon in (0.0, 0.3, 1.0, 2.0):
        factor = math.exp(epsilon)
        remove = expected(lambda s, k=factor: np.maximum(s - k, 0))
        add = expected(lambda s, k=factor: np.maximum(1 - k * s, 0))
        for exact, bound in zip((remove, add), loss.deltas(epsilon), strict=True):
            # (The quadrature has an error of its own at the edge of the function.)
            assert exact * (1 - 1e-5) - 1e-14 <= bound <= 1.005 * exact + 1e-9
    for order in (2.0, 3.0, 5.0):
        up = math.log(expected(lambda s, a=order: s**a)) / (order - 1)
        down = math.log(expected(lambda s, a=order: s ** (1 - a))) / (order - 1)
        part = next(k for k, part in enumerate(curves.PARTS) if order in part)
        at = list(curves.PARTS[part]).index(order)
        found = curves.rdp_curve(_pass(2, z), _RELATION, part)[at]
        assert found == pytest.approx(max(up, down), rel=1e-7)
        by_transform = random_allocation._log_inverse_moments(z, 2, 8)
        at_order = by_transform[int(order) - 2] / (order - 1)
        assert at_order == pytest.approx(down, rel=1e-7)


@pytest.mark.parametrize(
    "t, z, epsilon", [(10, 1.0, 2.0), (5, 0.7, 4.0), (34, 0.8, 4.0), (100, 0.6, 5.0)]
)
def test_small_deltas_are_those_of_a_conditional_simulation(t, z, epsilon):
    # delta = E_Q (Y_1 + R - k)+ where Y_1 is the largest: exact given all others
    # (Asmussen & Kroese 2006). From 2e-4 to 7e-9.
    mu, k = -1 / (2 * z * z), t * math.exp(epsilon)
    others = np.exp(mu + np.random.default_rng(t).normal(0, 1 / z, (100_000, t - 1)))
    sums = others.sum(axis=1)
    u = (np.log(np.maximum(k - sums, others.max(axis=1))) - mu) * z
    each = stats.norm.sf(u - 1 / z) + (sums - k) * stats.norm.sf(u)
    error = stats.norm.isf(_FALSE_ALARM) * each.std() / math.sqrt(len(each))
    loss = curves.loss_distribution(_pass(t, z), _RELATION, 1e-4)
    bound = loss.deltas(epsilon)[0]  # Of removing the client.
    assert each.mean() - error <= bound <= 1.03 * (each.mean() + error)


@pytest.mark.parametrize(
    "n, m, rounds, z, delta, lower, upper",
    [
        (500, 100, 60, 2.3, 1e-3, 1.987, 2.076),
        (1000, 100, 100, 1.0, 1e-5, 6.074, 6.162),
        (10_000, 500, 400, 1.2, 1e-6, 4.934, 5.018),
        (3400, 100, 510, 0.8, 1e-5, 6.266, 6.367),
        (2000, 100, 200, 0.6, 1e-5, 13.350, 13.438),
    ],
)
def test_epsilon_is_between_the_bounds_of_the_papers_own_package(
    n, m, rounds, z, delta, lower, upper
):
    # PLD-accounting 2.0, `gaussian_allocation_pld`.
    given = (z, "random_allocation", n, m, rounds, delta)
    found = accounting.epsilon(*given, accountant="pld")
    assert lower <= found <= upper
    assert found <= accounting.epsilon(*given) <= 1.2 * found
    assert accounting.delta(*given[:-1], found, "pld") <= delta
    # Cheaper than Poisson sampling.
    assert found < accounting.epsilon(z, "poisson", n, m, rounds, delta, "pld")


@pytest.mark.parametrize("z", [1e-3, 0.05, 0.149, 0.2, 50.0, 1e5, 1e6])
def test_extreme_noise_is_bounded_too(z):
    one = charge("random_allocation", 60, 10, z)
    by_pld, by_rdp = (history(one).epsilon(1e-6, by, True) for by in ("pld", "rdp"))
    everybody = accounting.gaussian_epsilon(z, 1e-6)
    assert 0 <= by_pld <= 1.01 * everybody + 1e-3
    assert 0 <= by_rdp < math.inf
    assert history(charge("random_allocation", 60, 10, 0.0)).epsilon(_DELTA) == math.inf


def _rounds(offsets, z=1.0, begin=0, order="secret", n=50, m=10):
    return [
        charge(
            *("random_allocation", n, m, z),
            pass_index=begin,
            pass_offset=offset,
            partition=order,
        )
        for offset in offsets
    ]


def _epsilon(*charges, by="pld"):
    return history(*charges).epsilon(_DELTA, by)


@pytest.mark.parametrize("by", ["rdp", "pld"])
def test_a_pass_is_charged_whole_with_its_first_round(by):
    whole = accounting.epsilon(1.0, "random_allocation", 50, 10, 5, _DELTA, by)
    spent = history()
    for one in _rounds([2, 0, 1, 3, 4]):
        # The running figure is never below that of the rounds that ran.
        spent.add(one)
        assert spent.epsilon(_DELTA, by) == whole
    two = accounting.epsilon(1.0, "random_allocation", 50, 10, 6, _DELTA, by)
    for another in (_rounds([0], begin=5), _rounds([0], order="other")):
        assert spent.with_charges(*another).epsilon(_DELTA, by) == two > whole
    # Of a pass that nobody knows, each round may be in one of its own.
    unknown = charge("random_allocation", 50, 10)
    assert spent.with_charges(unknown).epsilon(_DELTA, by) == two
    assert spent.epsilon_if_participation_is_known(_DELTA) == (
        accounting.gaussian_epsilon(1.0, _DELTA)
    )


@pytest.mark.parametrize("by", ["rdp", "pld"])
def test_a_round_that_is_run_again_counts_twice_for_its_clients(by):
    twice = _epsilon(*_rounds([0, 1, 2, 3, 4], 1 / math.sqrt(2)), by=by)
    once = _epsilon(*_rounds([0, 1, 2, 3, 4]), by=by)
    assert _epsilon(*_rounds([0, 1, 1]), by=by) == pytest.approx(twice, rel=1e-9)
    assert _epsilon(*_rounds([0, 1, 1, 2, 3, 4, 4, 0]), by=by) == (
        pytest.approx(twice, rel=1e-9)
    )
    assert once < twice
    # Above what a simulation of the round's two releases has.
    rng = np.random.default_rng(7)
    samples, t = 100_000, 5
    noise = np.array([1, 1 / math.sqrt(2), 1, 1, 1])
    x = rng.normal(0, noise, (samples, t))
    x[np.arange(samples), rng.integers(t, size=samples)] += 1
    loss = np.log(np.mean(np.exp((2 * x - 1) / (2 * noise**2)), axis=1))
    epsilon = history(*_rounds([0, 1, 1])).epsilon(0.01, by)
    counted = np.maximum(-np.expm1(epsilon - loss), 0)
    error = stats.norm.isf(_FALSE_ALARM) * counted.std() / math.sqrt(samples)
    assert counted.mean() + error <= 0.01
    # A copy knows of what it was copied from, whatever was added to both.
    spent = history(*_rounds([0, 1]))
    spent.epsilon(_DELTA, by)
    copied = spent.with_charges(*_rounds([1]))
    assert copied.epsilon(_DELTA, by) == pytest.approx(twice, rel=1e-9)
    assert spent.epsilon(_DELTA, by) == once


def test_passes_of_another_number_of_rounds_are_others():
    # They draw anew, though they begin with the same round.
    both = [*_rounds([0]), *_rounds([0], m=25)]
    assert _epsilon(*both) > max(_epsilon(*both[:1]), _epsilon(*both[1:]))
    known = history(*both).epsilon_if_participation_is_known(_DELTA)
    expected = accounting.gaussian_epsilon(1 / math.sqrt(2), _DELTA)
    assert known == pytest.approx(expected, rel=1e-12)


def test_it_composes_with_other_releases_to_clients():
    one, poisson = _rounds([0])[0], charge("poisson", 50, 50, 4.0)
    for by in ("rdp", "pld"):
        both = _epsilon(one, poisson, charge("shuffled", 50, 10, 3.0), by=by)
        assert both > _epsilon(one, by=by)
    with pytest.raises(ValueError, match="neighbouring relation"):
        history(one, charge("fixed_size", 50, 10))
    assert one.relation is accounting.Relation.ADD_OR_REMOVE_ONE
    assert not one.is_charged_if_abandoned
    again = accounting.RoundCharge.from_json(one.to_json())
    assert again == one and again.rounds_per_pass == 5
    # m need not divide N; the rounds of a pass share all of its clients.
    assert charge("random_allocation", 10, 3).rounds_per_pass == 3
    assert charge("random_allocation", 10, 10 / 3).rounds_per_pass == 3
    assert not charge("random_allocation", 10, 6).is_amplified


@pytest.mark.parametrize(
    "given, name",
    [
        ({"pass_offset": 10, "pass_index": 0}, "pass_offset"),
        ({"pass_offset": 1}, "pass_index"),
        ({"event": dp_accounting.LaplaceDpEvent(1.0)}, "event"),
        ({"known_selection": True}, "known_selection"),
        ({"group": 1}, "group"),
    ],
)
def test_a_charge_that_cannot_be_is_refused(given, name):
    with pytest.raises(ValueError, match=name):
        charge("random_allocation", 100, 10, **given)


def test_schedules_change_from_pass_to_pass_only():
    allocation = "random_allocation"
    by_pass = [1.0] * 5 + [2.0] * 5
    found = accounting.epsilon(by_pass, allocation, 50, 10, 10, _DELTA, "pld")
    each = _rounds([0]) + _rounds([0], 2.0, begin=5)
    assert found == _epsilon(*each)
    sizes = [10] * 5 + [25] * 2 + [10] * 3
    accounting.epsilon(1.0, allocation, 50, sizes, 10, _DELTA)
    with pytest.raises(ValueError, match="noise_multiplier must be the same"):
        accounting.epsilon([1.0, 2.0], allocation, 50, 10, 2, _DELTA)
    with pytest.raises(ValueError, match="clients_per_round must give all rounds"):
        accounting.epsilon(1.0, allocation, 50, [10, 10, 25], 3, _DELTA)


@pytest.mark.usefixtures("wide_cells")
def test_plans_go_by_whole_passes():
    given = {
        "sampling": "random_allocation",
        "num_clients": 50,
        "clients_per_round": 10,
    }
    rounds = accounting.max_rounds(
        1.5, **given, target_epsilon=6.0, delta=_DELTA, accountant="pld"
    )
    assert rounds % 5 == 0 and rounds > 5
    z = accounting.calibrate_noise_multiplier(
        6.0, **given, rounds=rounds - 2, delta=_DELTA, accountant="pld"
    )
    assert z <= 1.5 * 1.001
    reached = accounting.epsilon(
        z, **given, rounds=rounds, delta=_DELTA, accountant="pld"
    )
    assert 6.0 * (1 - 1e-3) <= reached <= 6.0
    # Passes are one kind, however many.
    passes = [one for k in range(20) for one in _rounds([0], begin=5 * k)]
    assert accounting.select_accountant(passes) == "pld"
    assert history(*passes).has_few_kinds
