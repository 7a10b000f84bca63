"""Who is drawn, how often, and whether anybody could have known."""

import copy
import itertools
import json

import dp_accounting
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import linalg, stats

import tfdp_fl
from tfdp_fl import accounting, matrix_factorization, sampling

_SAMPLINGS = ("poisson", "fixed_size", "random_allocation", "shuffled")
_EVENT = dp_accounting.GaussianDpEvent(1.0)
_make = sampling.make_sampler
_all = pytest.mark.parametrize("name", _SAMPLINGS)


# Each statistical check rejects a right sampler with this probability. The samplers
# have no seed: every run tests other cohorts.
_FALSE_ALARM = 1e-8


def _assert_expected(difference, variance):
    score = difference / np.sqrt(variance)
    assert 2 * stats.norm.sf(abs(score)) >= _FALSE_ALARM


def _assert_chi_squared(deviations, freedom):
    assert stats.chi2.sf(deviations.sum(), freedom) > _FALSE_ALARM


@pytest.mark.parametrize("name", ["poisson", "fixed_size"])
def test_every_client_is_drawn_equally_often_and_anew(name):
    n, m, rounds, fixed = 30, 6, 6000, name == "fixed_size"
    sampler, q = _make(name, n, m), m / n
    drawn = np.zeros((rounds, n), dtype=bool)
    for t, members in enumerate(drawn):
        cohort = sampler.cohort(t)
        assert len(np.unique(cohort)) == len(cohort)
        members[cohort] = True
    # Each count is Binomial(rounds, q). Under fixed size they sum to a
    # constant: one degree of freedom less, and n/(n-1) in the scale.
    deviations = (drawn.sum(0) - rounds * q) ** 2 / (rounds * q * (1 - q))
    _assert_chi_squared(deviations * (1 - fixed / n), n - fixed)
    # Rounds are independent.
    overlap = (drawn[1:] & drawn[:-1]).sum(1)
    if fixed:  # Hypergeometric; neighbouring ones are uncorrelated.
        variance = m * q * (1 - q) * (n - m) / (n - 1)
    else:  # Neighbouring overlaps share a round.
        variance = n * q**2 * (1 - q**2) + 2 * n * q**3 * (1 - q)
    _assert_expected(overlap.mean() - n * q**2, variance / len(overlap))
    if fixed:
        return
    # Clients are independent.
    pairs = sum((drawn[:, i] & drawn[:, (i + 1) % n]).sum() for i in range(n))
    variance = n * rounds * (q**2 * (1 - q**2) + 2 * q**3 * (1 - q))
    _assert_expected(pairs - n * rounds * q**2, variance)
    # Sizes are binomial.
    edges = np.arange(2, 12)
    cdf = stats.binom.cdf(edges - 1, n, q)
    expected = rounds * np.diff(np.concatenate([[0], cdf, [1]]))
    counts = np.bincount(np.digitize(drawn.sum(1), edges), minlength=len(expected))
    _assert_chi_squared((counts - expected) ** 2 / expected, len(expected) - 1)


@_all
def test_with_a_seed_a_round_s_cohort_is_its_own(name):
    one, other = (_make(name, 100, 20, seed=3) for _ in range(2))
    assert one.sampling == name
    forward = [one.cohort(t) for t in range(12)]
    other.next_round = 5  # One that begins later is in step.
    for t in range(5, 12):
        np.testing.assert_array_equal(other.cohort(t), forward[t])
    different = _make(name, 100, 20, seed=4)
    assert not all(np.array_equal(different.cohort(t), forward[t]) for t in range(12))
    for cohort in forward:  # Sorted positions.
        assert cohort.dtype == np.int64
        assert np.all(np.diff(cohort) > 0)
        assert np.all((cohort >= 0) & (cohort < 100))


@_all
def test_without_a_seed_nobody_can_tell(name):
    drawn = []
    for _ in range(2):
        np.random.seed(0)
        drawn.append(_make(name, 10_000, 50).cohort(0))
    assert not np.array_equal(*drawn)


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "cyclic"])
def test_a_round_that_is_run_again_has_a_draw_of_its_own(name):
    sampler = _make(name, 4000, 100, 7, 4 if name == "cyclic" else None)
    first = sampler.cohort(3)
    np.testing.assert_array_equal(sampler.cohort(3), first)
    sampler.release(sampler.unsettled)
    with pytest.raises(RuntimeError, match="must not go back"):
        sampler.next_round = 3
    sampler.attempt, sampler.next_round = (4,), 3
    if name == "cyclic":
        sampler._released -= 1
    again = sampler.cohort(3)
    # Some 3 or 10 in common, with one seed for good; the same would be 100.
    assert len(np.intersect1d(first, again)) < 30


def test_shuffled_meets_everybody_once_per_pass_in_a_uniform_place():
    sampler = _make("shuffled", 10, 4)
    cohorts = [sampler.cohort(t) for t in range(6)]
    assert [len(cohort) for cohort in cohorts] == [4, 4, 2] * 2
    first, second = np.concatenate(cohorts[:3]), np.concatenate(cohorts[3:])
    for one in (first, second):
        np.testing.assert_array_equal(np.sort(one), np.arange(10))
    assert not np.array_equal(first, second)
    assert sampler.expected_cohort_size(2) == 2
    # Only they come in passes.
    begins = [sampler.begins_pass(t) for t in range(4)]
    assert begins == [True, False, False, True]
    assert _make("poisson", 10, 4).begins_pass(1)
    # In which of the pass's cohorts each client is.
    n, m, passes = 12, 3, 3000
    sampler, counts = _make("shuffled", n, m), np.zeros((n, n // m))
    for t in range(passes * (n // m)):
        counts[sampler.cohort(t), t % (n // m)] += 1
    np.testing.assert_array_equal(counts.sum(1), passes)
    deviations = (counts - passes * m / n) ** 2 / (passes * m / (n - 1))
    _assert_chi_squared(deviations, (n - 1) * (n // m - 1))


@pytest.mark.parametrize(
    "name, groups, most",
    [
        ("poisson", None, {0: 0, 7: 7}),
        ("fixed_size", None, {0: 0, 7: 7}),
        ("shuffled", None, {0: 0, 3: 1, 4: 2}),
        ("cyclic", 2, {0: 0, 1: 1, 2: 1, 3: 2, 5: 3}),
    ],
)
def test_how_often_one_client_can_be_drawn(name, groups, most):
    sampler = _make(name, 10, 4, num_groups=groups)
    assert {rounds: sampler.max_participations(rounds) for rounds in most} == most
    if name == "shuffled":  # The last cohort of one pass and the first of the next.
        assert sampler.max_participations(2, 2) == 2


@pytest.mark.parametrize("n", [40, 43])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_client_s_released_rounds_are_far_enough_apart(seed, n):
    cohorts = []

    def run(sampler, rounds, abandoned=()):
        for t in rounds:
            cohort = sampler.draw()
            if t % 7 in abandoned:
                sampler.abandon(cohort)
            else:
                sampler.release(cohort)
                cohorts.append(cohort.positions)
        for client in range(n):
            drawn = [t for t, each in enumerate(cohorts) if client in each]
            assert len(drawn) <= -(-len(cohorts) // 5)
            assert all(np.diff(drawn) >= 5)

    sampler = _make("cyclic", n, 7, seed, num_groups=5)
    run(sampler, range(60), abandoned=(2, 3, 5))
    # A state goes on where it was; another fit is just later rounds.
    later = _make("cyclic", n, 7, seed, num_groups=5)
    later.restore(json.loads(json.dumps(sampler.state())))
    run(later, range(60, 90))


def test_an_abandoned_round_s_group_has_its_turn_again():
    sampler = _make("cyclic", 20, 5, num_groups=4)
    first = sampler.draw()
    sampler.abandon(first)
    again = sampler.draw()
    np.testing.assert_array_equal(again.positions, first.positions)
    assert again.participation == first.participation
    sampler.release(again)
    after = sampler.draw()
    assert not len(np.intersect1d(after.positions, first.positions))
    assert after.participation.group == first.participation.group + 1
    # Nothing is claimed for the draw.
    charge = sampler.charge(0, _EVENT)
    assert (charge.sampling, charge.is_amplified) == ("cyclic", False)
    assert (charge.dp_event(), charge.sensitivity) == (_EVENT, 1.0)
    with pytest.raises(ValueError, match="num_groups"):
        _make("cyclic", 20, 5, num_groups=3).restore(sampler.state())
    # Others know them by another name.
    other = _make("cyclic", 20, 5, num_groups=4).draw().participation
    assert other.partition != first.participation.partition
    # The groups do not depend on it: a `SeedSequence` of [a, b] is one of [a, b, 0].
    sampler = _make("cyclic", 40, 3, 7, 4)
    of_round = sampler._generator(0).permutation(40)
    assert sampler._group().tolist() != of_round[::4].tolist()


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled"])
def test_charges_are_the_plan_s_and_of_the_size_that_was_drawn(name):
    def sizes(t):
        return 20 + 10 * (t % 3)

    sampler = _make(name, 100, sizes)
    charges = [sampler.charge(t, _EVENT) for t in range(9)]
    history = accounting.PrivacyAccountant(charges).epsilon(1e-5)
    planned = accounting.epsilon(1.0, name, 100, sizes, 9, 1e-5)
    assert history == pytest.approx(planned, abs=1e-12)
    # Of a schedule that answers otherwise when it is asked again.
    draws = iter(range(10**6))
    sampler = _make(name, 100, lambda t: 3 + next(draws) % 13)
    for t in range(20):
        before = sampler.expected_cohort_size(t)
        cohort = sampler.cohort(t)
        charged = sampler.charge(t, _EVENT).clients_per_round
        assert charged == before
        assert name == "poisson" or len(cohort) == charged


def test_a_second_shuffled_sampler_s_pass_is_charged_again():
    samplers = [_make("shuffled", 100, 50, seed=1) for _ in range(2)]
    history = accounting.PrivacyAccountant(s.charge(0, _EVENT) for s in samplers)
    expected = accounting.epsilon(1.0, "shuffled", 100, 50, 4, 1e-5)
    assert history.epsilon(1e-5) == pytest.approx(expected)


@_all
@pytest.mark.parametrize("seed", [None, 5])
def test_the_state_is_json_and_resumes(name, seed):
    one, other = (_make(name, 40, 7, seed=seed) for _ in range(2))
    drawn = one.cohort(3)  # It is drawn, and what becomes of it is not known.
    state = json.loads(json.dumps(one.state()))
    other.restore(state)
    # Of draws by themselves, each process has its own.
    is_anew = name == "random_allocation"
    goes_on = seed is not None or name not in ("poisson", "fixed_size")
    assert np.array_equal(other.cohort(3), drawn) == goes_on or is_anew
    in_passes = name == "shuffled"
    if (seed is not None and not is_anew) or in_passes:
        for t in range(4, 11):
            np.testing.assert_array_equal(other.cohort(t), one.cohort(t))
    same = other.charge(3, _EVENT) == one.charge(3, _EVENT)
    assert same == (not is_anew)
    if in_passes and seed is None:
        # The partition, which ledgers hold, says nothing of the key.
        assert state["partition"] not in state["key"]
        assert len(bytes.fromhex(state["key"])) == 32
    for arguments, wrong in (
        (("cyclic", 40, 7, seed, 4), "sampling"),
        ((name, 41, 7, seed), "num_clients"),
        ((name, 40, 7, 6 if seed is None else None), "seed"),
    ):
        with pytest.raises(ValueError, match=wrong):
            _make(*arguments).restore(state)
    # Of a NumPy that draws other orders from the same key.
    with pytest.raises(ValueError, match="shuffle_fingerprint"):
        other.restore(
            {**state, "shuffle_fingerprint": state["shuffle_fingerprint"][::-1]}
        )


@pytest.mark.parametrize("name", [*_SAMPLINGS, "cyclic"])
def test_a_cohort_is_settled_once_before_the_next_is_drawn(name):
    sampler, other = (_make(name, 40, 5, may_abandon=True) for _ in range(2))
    cohort = sampler.draw()
    assert cohort.participation.cost(_EVENT) == sampler.charge(cohort, _EVENT)
    assert cohort.positions.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        cohort.positions[:] = 0
    with pytest.raises(RuntimeError, match="is not settled"):
        sampler.draw()
    with pytest.raises(RuntimeError, match="must be 0"):
        sampler.cohort(2)
    with pytest.raises(RuntimeError, match="this sampler drew last"):
        other.release(cohort)
    for settle in (sampler.abandon, sampler.release):
        assert sampler.unsettled is cohort
        settle(cohort)
        for twice in (sampler.abandon, sampler.release):
            with pytest.raises(RuntimeError, match="last"):
                twice(cohort)
        cohort = sampler.draw()
    # A loop over rounds, which never says what became of them.
    np.testing.assert_array_equal(sampler.cohort(2), cohort.positions)
    sampler.cohort(3)
    for t in (2, 5):
        with pytest.raises(RuntimeError, match="must be 3"):
            sampler.cohort(t)


def test_a_loop_over_rounds_goes_through_all_groups():
    sampler = _make("cyclic", 40, 5, num_groups=8)
    drawn = np.concatenate([sampler.cohort(t) for t in range(8)])
    np.testing.assert_array_equal(np.sort(drawn), np.arange(40))


def test_a_cohort_of_a_fixed_size_is_abandoned_only_at_its_price():
    sampler = _make("fixed_size", 40, 5)
    cohort = sampler.draw()
    with pytest.raises(RuntimeError, match="may_abandon=True"):
        sampler.abandon(cohort)
    assert sampler.unsettled is cohort
    assert not cohort.participation.is_charged_if_abandoned
    priced = _make("fixed_size", 40, 5, may_abandon=True)
    assert priced.draw().participation.is_charged_if_abandoned
    with pytest.raises(ValueError, match="may_abandon"):
        priced.restore(sampler.state())


@_all
def test_a_round_of_more_than_everybody_or_without_a_size(name):
    for sizes in (lambda t: 99 + t, [10, 10], lambda t: 0.0, lambda t: "1"):
        with pytest.raises((ValueError, TypeError), match="clients_per_round"):
            _make(name, 100, sizes).cohort(2)


@pytest.mark.parametrize(
    "arguments, name",
    [
        *(((each, 100, 101), r"clients_per_round.*100.*101") for each in _SAMPLINGS),
        *(((each, 100, [10, 101]), "clients_per_round") for each in _SAMPLINGS),
        (("bernoulli", 10, 5), "sampling"),
        (("poisson", 0, 5), "num_clients"),
        *(((each, 10, []), "clients_per_round.*none") for each in _SAMPLINGS),
        *((("poisson", 10, m), "clients_per_round") for m in (0, None, np.ones(0))),
        (("fixed_size", 10, 2.5), "clients_per_round"),
        (("shuffled", 10, 2.5), "clients_per_round"),
        (("poisson", 10, 5, -1), "seed"),
        (("poisson", 10, 5, 1.5), "seed"),
        (("cyclic", 20, 6, None, 4), "clients_per_round must be at most the 5"),
        (("cyclic", 20, [5, 5], None, 4), "clients_per_round must be one number"),
        (("cyclic", 20, 2.5, None, 4), "clients_per_round"),
        (("cyclic", 20, 5, None, 0), "num_groups"),
    ],
)
def test_errors_name_the_argument(arguments, name):
    with pytest.raises((ValueError, TypeError), match=name):
        _make(*arguments)


_STEPS = ("round", "round", "abandon", "broken off", "save", "restore", "copy", "new")


def _released(make, steps, most=None):
    """Returns the cohorts that are released by samplers that are used in any way."""
    sampler, saved, cohorts = make(), make().state(), []
    for step in steps:
        if step == "save":
            saved = json.loads(json.dumps(sampler.state()))
        elif step == "restore":
            sampler = make()
            sampler.restore(saved)
        elif step == "copy":
            sampler = copy.deepcopy(sampler)
        elif step == "new":
            before, sampler = sampler.next_round, make()
            sampler.next_round = before
        else:
            cohort = sampler.unsettled or sampler.draw()
            if step == "abandon":
                sampler.abandon(cohort)
            elif step == "round":
                sampler.release(cohort)
                cohorts.append(cohort)
    return cohorts[:most]


_all_steps = st.lists(st.sampled_from(_STEPS), max_size=40)


@settings(max_examples=150, deadline=None)
@given(_all_steps, st.integers(3, 20), st.integers(1, 3), st.sampled_from([None, 1]))
def test_shuffled_passes_cost_what_the_worst_client_met(steps, n, m, seed):
    cohorts = _released(lambda: _make("shuffled", n, m, seed), steps)
    met = np.zeros(n)
    for cohort in cohorts:
        met[cohort.positions] += 1
    spent = accounting.PrivacyAccountant(c.participation.cost(_EVENT) for c in cohorts)
    true = accounting.epsilon_of_mu_squared(float(met.max()), 1e-5)
    assert spent.epsilon(1e-5, "pld") >= true * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(_all_steps, st.integers(6, 20), st.integers(1, 3))
def test_allocated_passes_cost_what_the_worst_client_met(steps, n, m):
    cohorts = _released(lambda: _make("random_allocation", n, m), steps)
    places, met = {}, {}
    for cohort in cohorts:
        who = cohort.participation
        key = who.partition, who.pass_index
        counts = met.setdefault(key, np.zeros(n))
        counts[cohort.positions] += 1
        for client in cohort.positions:  # Of a pass, in one of its rounds alone.
            place = places.setdefault((*key, client), who.pass_offset)
            assert place == who.pass_offset
    spent = accounting.PrivacyAccountant(c.participation.cost(_EVENT) for c in cohorts)
    true = accounting.PrivacyAccountant(
        accounting.RoundCharge(
            sampling="random_allocation",
            num_clients=n,
            clients_per_round=n / (n // m),
            event=dp_accounting.GaussianDpEvent(counts.max() ** -0.5),
        )
        for counts in met.values()
        if counts.max()
    )
    assert spent.epsilon(1e-5) >= true.epsilon(1e-5) * (1 - 1e-9)


def _allocated(sampler, rounds):
    """Returns the round in which each client is, int64 [N], of consecutive ones."""
    where = np.full(sampler.num_clients, -1)
    for t in rounds:
        cohort = sampler.draw()
        assert np.all(where[cohort.positions] == -1)  # Nobody twice.
        where[cohort.positions] = t
        sampler.release(cohort)
    return where


def test_clients_draw_a_uniform_round_of_each_pass_by_themselves():
    n, t, passes = 12, 4, 3000
    sampler = _make("random_allocation", n, 3)
    assert sampler.expected_cohort_size(7) == 3
    where = np.array([_allocated(sampler, range(t)) for _ in range(passes)])
    assert where.min() == 0  # Everybody, in every pass.
    variance = passes / t * (1 - 1 / t)
    counts = np.array([(where == k).sum(0) for k in range(t)])
    deviations = (counts - passes / t) ** 2 / (passes / t)
    _assert_chi_squared(deviations, n * (t - 1))
    # Independently of each other, and of what they drew before: who knows all earlier
    # draws of all clients foretells the next one no better.
    neighbours = (where == np.roll(where, 1, axis=1)).sum()
    _assert_expected(neighbours - n * passes / t, n * variance)
    again = (where[1:] == where[:-1]).sum()
    _assert_expected(again - n * (passes - 1) / t, n * variance)
    # In passes that begin where the sampler does.
    late = _make("random_allocation", n, 3)
    late.next_round = 6
    assert [late.begins_pass(k) for k in range(6, 11)] == [1, 0, 0, 0, 1]
    assert [late.max_participations(k, 6) for k in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_client_more_or_less_changes_nobody_elses_round():
    sampler, key = _make("random_allocation", 100, 10), None
    where = []
    for n in (100, 101, 109, 99):  # Of ten rounds, all of them.
        sampler = _make("random_allocation", n, n / 10)
        key = sampler._key = key or sampler._key
        where.append(_allocated(sampler, range(10)))
    for other in where[1:]:
        both = min(len(other), 100)
        np.testing.assert_array_equal(other[:both], where[0][:both])
    # Passes of another length, or with another key, have nothing in common.
    other = _make("random_allocation", 1000, 200), _make("random_allocation", 1000, 100)
    one = _make("random_allocation", 1000, 100)
    one._key = other[0]._key
    where = _allocated(one, range(10))
    for each, rounds in zip(other, (5, 10), strict=True):
        same = (_allocated(each, range(rounds)) == where % rounds).sum()
        _assert_expected(same - 1000 / rounds, 1000 / rounds * (1 - 1 / rounds))


def test_a_pass_that_is_allocated_anew_under_a_seed_is_another_pass():
    # A crash between a round's release and its checkpoint; then others fail.
    event, charges = dp_accounting.GaussianDpEvent(0.6), []
    before = _make("random_allocation", 40, 20, 1).state()
    for word in (11, 22):
        sampler = _make("random_allocation", 40, 20, 1)
        sampler.restore(before)
        sampler.attempt = (0, word)
        if word == 22:
            sampler.abandon(sampler.draw())
        charges.append(sampler.charge(sampler.draw(), event))
    poisson = accounting.Participation(
        sampling="poisson", num_clients=40, clients_per_round=20
    ).cost(event)
    independent = accounting.PrivacyAccountant([(poisson, 2)])
    said = accounting.PrivacyAccountant(charges)
    for delta in (1e-3, 1e-6):
        assert said.epsilon(delta, "pld") >= independent.epsilon(delta, "pld")


@pytest.mark.parametrize("seed", [None, 5])
def test_the_rest_of_a_pass_that_was_interrupted_is_allocated_anew(seed):
    # A client whose data ended the process was known to be in the same cohort again.
    sampler = _make("random_allocation", 60, 10, seed)
    sampler.attempt = (0, 1, 2)
    first = _allocated(sampler, range(3))
    state = json.loads(json.dumps(sampler.state()))
    partitions, rests = [sampler.participation(3).partition], []
    for word in (8, 9):  # Twice, as by two forks, each with entropy of its own.
        resumed = _make("random_allocation", 60, 10, seed)
        if word == 9:  # In the same process.
            resumed = copy.deepcopy(sampler)
        resumed.restore(state)
        resumed.attempt = (3, word)
        rests.append(_allocated(resumed, range(3, 6)))
        # (None of 30 clients is drawn again: 2^-30.)
        assert np.any((first != -1) & (rests[-1] != -1))
        partitions.append(resumed.participation(5).partition)
        following = resumed.draw().participation
        assert (following.pass_index, following.pass_offset) == (6, 0)
    assert np.any(rests[0] != rests[1])
    assert len(set(partitions)) == 3
    # A sampler without the key draws and is charged anew.
    other = _make("random_allocation", 60, 10, seed)
    other.next_round = 3
    who = other.draw().participation
    assert (who.pass_index, who.pass_offset) == (3, 0)
    assert who.partition not in partitions


_CORRELATED = tfdp_fl.CorrelatedNoise(
    clip_norm=1.0, noise_multiplier=1.0, strategy="blt:2", rounds=12, min_separation=4
)


@settings(max_examples=150, deadline=None)
@given(_all_steps, st.lists(st.booleans(), min_size=12, max_size=12))
# The same group in each round, which the charge is told.
@example(["save", *["round", "restore"] * 12], [True] * 12)
def test_groups_cost_what_the_worst_client_met(steps, said):
    generator, promised = _CORRELATED.generator, _CORRELATED.pattern
    made = linalg.toeplitz(generator.coefficients, np.eye(12)[0])
    cohorts = _released(lambda: _make("cyclic", 12, 3, num_groups=4), steps, 12)
    met, places = np.zeros([12, 12]), []
    for t, cohort in enumerate(cohorts):
        met[t, cohort.positions] = 1
        who = cohort.participation
        places.append((who.partition, who.group) if said[t] else None)
    times = matrix_factorization.fold(promised, places)
    worst = np.linalg.norm(made @ met, axis=0).max()
    assert times * generator.sensitivity >= worst * (1 - 1e-9)
    # As promised it costs no more.
    if "abandon" not in steps and not {"restore", "copy", "new"} & {*steps}:
        assert times == 1 or not all(said[: len(cohorts)])


@pytest.mark.parametrize("kind", ["shuffled", "random_allocation", "cyclic"])
def test_rounds_planned_pass_by_pass_cost_what_they_cost_one_by_one(kind):
    event = dp_accounting.GaussianDpEvent(3.0)
    for (n, m), begin, rounds in itertools.product(
        [(10, 3), (12, 4), (7, 7), (23, 5)], range(1, 7), range(1, 12)
    ):
        planned = sampling.make_sampler(kind, n, m)
        planned.next_round = 1
        planned.cohort(1)
        # The rounds so far; of the pass in progress one was charged twice.
        before = [planned.charge(t, event) for t in (*range(1, begin + 1), begin)]
        ahead = range(begin + 1, begin + 1 + rounds)
        one_by_one = [*before, *(planned.charge(t, event) for t in ahead)]
        by_pass = [*before, *planned.costs(ahead, event)]
        costs = [
            accounting.PrivacyAccountant(charges).epsilon(1e-5)
            for charges in (one_by_one, by_pass)
        ]
        assert costs[0] == pytest.approx(costs[1], rel=1e-9)
        passes = {planned.participation(t).pass_index for t in ahead}
        if kind != "cyclic":
            assert planned.max_participations(rounds, begin + 1) == len(passes)


@pytest.mark.parametrize("name", [*_SAMPLINGS, "cyclic"])
def test_a_state_holds_no_cohort(name):
    # Whoever wrote it may have released that cohort since.
    before, after = _make(name, 1000, 50), _make(name, 1000, 50)
    cohort = before.draw()
    after.draw()
    after.restore(json.loads(json.dumps(before.state())))
    assert after.unsettled is None
    again = after.draw()
    assert again.draw_id != cohort.draw_id
    if cohort.participation.is_amplified and name != "random_allocation":
        # Another one, but for a chance of 1e-30.
        assert again.positions.tolist() != cohort.positions.tolist()
