import dataclasses
import json

import dp_accounting
import numpy as np
import pytest
import tensorflow_federated as tff

from tfdp_fl import accounting, learning, mechanisms, sampling
from tfdp_fl.aggregators import AggregatorState, RoundHistory, with_cohort
from tfdp_fl.mechanisms import mechanism as mechanism_lib
from tfdp_fl.tff.state import history_line

DELTA = 1e-5
DECLARED = {"sampling": "poisson", "num_clients": 1000, "clients_per_round": 100}


def state_after(mechanism, rounds, clients_per_round=100, sampler="poisson", **facts):
    """Returns what an aggregator's state says after a number of rounds.

    Their cohorts are of a sampler, or of a new one of that name; None: nobody said.
    """
    context = mechanism_lib.PrivacyContext(
        clients_per_round=clients_per_round, **{"rounds": 10, **facts}
    )
    sizes = np.array([context.cohort_size(k) for k in range(rounds)])
    lines = [history_line(mechanism, context, k).encode() for k in range(rounds)]
    state = AggregatorState((), rounds, (), RoundHistory((), ()))
    if isinstance(sampler, str):
        sampler = sampling.make_sampler(sampler, 1000, clients_per_round)
    for index in range(rounds if sampler else 0):
        cohort = sampler.draw()
        state = with_cohort(state, cohort)
        sampler.release(cohort)
        ended = state.history._replace(attempted=np.arange(index + 1) + 1)
        state = state._replace(history=ended)
    history = state.history._replace(lines=np.array(lines, object), answered=sizes)
    return state._replace(history=history)


def one_after_the_other(*states):
    """Returns the state that one process after the other made."""
    done = np.cumsum([0, *(each.rounds for each in states)])
    histories = [
        each.history._replace(attempted=np.asarray(each.history.attempted) + before)
        for each, before in zip(states, done[:-1], strict=True)
    ]
    columns = map(np.concatenate, zip(*histories, strict=True))
    return states[-1]._replace(rounds=done[-1], history=RoundHistory(*columns))


def fixed(noise_multiplier, **options):
    return mechanisms.FixedClipping(
        clip_norm=1.0, noise_multiplier=noise_multiplier, **options
    )


def spent(state, mechanism, **changes):
    return learning.epsilon(state, mechanism, **{**DECLARED, "delta": DELTA, **changes})


# Ten shuffled cohorts of 100 are one pass: every client once, no more.
@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled"])
def test_each_sampling_costs_what_it_is_planned_to(name):
    state = state_after(fixed(2.0), 10, sampler=name)
    unsaid = state_after(fixed(2.0), 10, sampler=None)
    for by in ("rdp", "pld"):
        value = spent(state, fixed(2.0), sampling=name, accountant=by)
        expected = accounting.epsilon(2.0, name, 1000, 100, 10, DELTA, by)
        assert value == pytest.approx(expected)
        assert "did not say" not in value.statement
        # Where nobody says which cohort it was for, everybody may have been in it;
        # of Poisson sampling each draw is for itself.
        value = spent(unsaid, fixed(2.0), sampling=name, accountant=by)
        expected = accounting.epsilon(
            2.0,
            "fixed_size" if name == "fixed_size" else "poisson",
            *((1000, 100) if name == "poisson" else (9, 9)),
            10,
            DELTA,
            by,
        )
        assert value == pytest.approx(expected)
        assert "did not say which cohort" in value.statement
    nothing = mechanisms.NoPrivacy()
    assert spent(state_after(nothing, 1), nothing) == float("inf")


def test_a_local_guarantee_is_that_of_one_client():
    mechanism = mechanisms.LocalDP(clip_norm=1.0, epsilon=8.0, delta=DELTA)

    def after(rounds, **options):
        return spent(state_after(mechanism, rounds), mechanism, rounds=10, **options)

    assert after(0) == 0.0
    assert after(5) < 8.0
    # Nobody was in more than 10 rounds, which is what it was made for.
    assert after(10) == pytest.approx(8.0, abs=1e-4)
    # It had noise for ten, and was in three.
    three = after(10, max_participations=3)
    assert three < 5.0
    assert "Local differential privacy" in three.statement
    assert "3 rounds" in three.statement
    for wrong in (-1, 0, 2.5):
        with pytest.raises((TypeError, ValueError), match="max_participations"):
            after(10, max_participations=wrong)


def test_a_client_took_part_as_often_as_the_state_proves():
    mechanism = mechanisms.LocalDP(
        clip_norm=1.0, epsilon=4.0, delta=DELTA, max_participations=2
    )
    # Six rounds of half the clients: 4.0 was said, after three rounds of all.
    built, way = {"max_participations": 2}, {"sampling": "shuffled"}
    state = state_after(mechanism, 6, 500, "shuffled", **built)
    way |= {"clients_per_round": 500, "rounds": 10}
    with pytest.raises(ValueError, match=r"at least 3, .* 3000 times .*learning\.eps"):
        spent(state, mechanism, **way, max_participations=2)
    context = mechanism_lib.PrivacyContext(clients_per_round=500, rounds=10, **built)
    for most in (3, 5, None):
        value = spent(state, mechanism, **way, max_participations=most)
        mu_squared = (most or 6) * mechanism.mu_squared(context)
        assert value == pytest.approx(
            accounting.epsilon_of_mu_squared(mu_squared, DELTA)
        )
        # That it was not in all of them is declared.
        assert ("participations_declared" in value.facts.caveats) == (most is not None)
    # What an abandoned cohort sent counts, too; of a Poisson cohort, nobody knows.
    drawn = with_cohort(state, sampling.make_sampler("shuffled", 1000, 500).draw())
    with pytest.raises(ValueError, match="max_participations must be at least 4"):
        spent(drawn, mechanism, **way, max_participations=3)
    poisson = {**way, "sampling": "poisson"}
    state = state_after(mechanism, 6, 500, **built)
    drawn = with_cohort(state, sampling.make_sampler("poisson", 1000, 500).draw())
    spent(drawn, mechanism, **poisson, max_participations=3)
    # Of more clients than there are, fewer would have to answer twice.
    with pytest.raises(ValueError, match="those of the cohorts"):
        spent(state, mechanism, **poisson, num_clients=2000)
    unsaid = state_after(mechanism, 6, 500, None, **built)
    with pytest.raises(ValueError, match="num_clients must be at least 500"):
        spent(unsaid, mechanism, **way, num_clients=499)


def test_noise_for_few_rounds_is_not_more_because_more_are_declared():
    mechanism = mechanisms.LocalDP(
        clip_norm=1.0, epsilon=4.0, delta=DELTA, max_participations=2
    )
    sampler, state = (
        sampling.make_sampler("shuffled", 1000, 500),
        state_after(fixed(1), 0),
    )
    for _ in range(12):
        cohort = sampler.draw()
        state = with_cohort(state, cohort)
        sampler.abandon(cohort)
    built = {"clients_per_round": 500, "rounds": 12}
    context = mechanism_lib.PrivacyContext(**built, max_participations=2)
    mu_squared = 6 * mechanism.mu_squared(context)
    expected = accounting.epsilon_of_mu_squared(mu_squared, DELTA)
    way = {"sampling": "shuffled", **built, "max_participations": 6}
    assert spent(state, mechanism, **way) == pytest.approx(expected)


def test_each_round_costs_what_it_cost_when_it_was_run():
    # Four rounds nearly without noise, and one with much.
    state = one_after_the_other(state_after(fixed(0.1), 4), state_after(fixed(5.0), 1))
    value = spent(state, fixed(5.0))
    noise = (0.1,) * 4 + (5.0,)
    expected = accounting.epsilon(noise, "poisson", 1000, 100, 5, DELTA)
    assert value == pytest.approx(expected)
    assert value > 100
    assert "0.1 to 5" in value.statement
    # So do rounds of another cohort size.
    before, after = state_after(fixed(1.0), 9, 500), state_after(fixed(1.0), 1, 10)
    value = spent(one_after_the_other(before, after), fixed(1.0), clients_per_round=10)
    sizes = (500,) * 9 + (10,)
    expected = accounting.epsilon(1.0, "poisson", 1000, sizes, 10, DELTA)
    assert value == pytest.approx(expected)


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled"])
def test_a_training_that_ended_early_states_its_plan(name):
    state = state_after(fixed(1.0), 3, sampler=name)
    said = spent(state, fixed(1.0), sampling=name, rounds=10)
    assert said.facts.planned_rounds == 10
    # The pass that was begun counts as one, and those ahead are others.
    passes = 2 if name == "shuffled" else 1
    expected = accounting.epsilon(1.0, name, 1000, 100, 10 * passes, DELTA)
    assert said.facts.epsilon_of_planned_rounds(DELTA) == pytest.approx(expected)
    assert "The plan was 10 rounds" in " ".join(said.statement.split())
    for planned in (3, None):
        ended = spent(state, fixed(1.0), sampling=name, rounds=planned)
        assert ended.facts.planned_rounds is None


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled", "cyclic"])
@pytest.mark.parametrize("sampler", ["said", None, "may_abandon"])
def test_a_plan_costs_no_less_than_its_rounds_will(name, sampler):
    if sampler == "may_abandon" and name != "fixed_size":
        pytest.skip("only cohorts of a fixed size tell by being abandoned")
    for done in (1, 5, 9):
        samplers = {"said": lambda: name, None: lambda: None}
        make = samplers.get(
            sampler, lambda: sampling.FixedSizeSampler(1000, 100, may_abandon=True)
        )
        options = {"sampling": name, "rounds": 10}
        state = state_after(fixed(4.0), done, sampler=make())
        planned = spent(state, fixed(4.0), **options).facts.epsilon_of_planned_rounds
        whole = spent(
            state_after(fixed(4.0), 10, sampler=make()), fixed(4.0), **options
        )
        assert planned(DELTA) >= whole * (1 - 1e-9)
        if sampler is None:
            assert planned(DELTA) == pytest.approx(whole)


class _LessAndLess(mechanisms.FixedClipping):
    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(self.noise_multiplier / (1 + round_index))


def test_a_plan_of_rounds_with_a_cost_of_their_own_is_not_known():
    mechanism = _LessAndLess(clip_norm=1.0, noise_multiplier=4.0)
    state = state_after(mechanism, 2)
    assert spent(state, mechanism, rounds=10).facts.epsilon_of_planned_rounds is None
    built_in = spent(state_after(fixed(4.0), 2), fixed(4.0), rounds=10)
    assert built_in.facts.epsilon_of_planned_rounds(DELTA) > built_in


def test_a_plan_of_clients_that_come_when_they_like():
    state = state_after(fixed(4.0), 3, sampler=None)
    options = {"sampling": "min_separation", "rounds": 10}
    said = spent(state, fixed(4.0), **options).facts.epsilon_of_planned_rounds(DELTA)
    whole = spent(state_after(fixed(4.0), 10, sampler=None), fixed(4.0), **options)
    assert said == pytest.approx(whole)


def test_so_do_local_releases():
    weak, strong = (
        mechanisms.LocalDP(clip_norm=1.0, noise_multiplier=z) for z in (1.0, 100.0)
    )
    state = one_after_the_other(state_after(weak, 2), state_after(strong, 3))
    # Of the rounds that it may have been in, the most costly ones.
    for most, mu_squared in ((None, 2 * 4.0 + 3 * 4e-4), (1, 4.0)):
        expected = accounting.epsilon_of_mu_squared(mu_squared, DELTA)
        value = spent(state, strong, max_participations=most)
        assert value == pytest.approx(expected)
    # Nobody knows to which of the two processes a cohort sent that was abandoned.
    state = with_cohort(state, sampling.make_sampler("poisson", 1000, 100).draw())
    expected = accounting.epsilon_of_mu_squared(3 * 4.0 + 3 * 4e-4, DELTA)
    assert spent(state, strong) == pytest.approx(expected)


@pytest.mark.parametrize(
    "earlier, message",
    [
        (state_after(mechanisms.MedianClipping(noise_multiplier=1.0), 2), "another ki"),
        (
            state_after(fixed(1.0, noise_site="client"), 2),
            "round 1 of 3.*kind",
        ),
        (state_after(fixed(1.0), 2, sampling="fixed_size"), "another kind"),
        (
            state_after(fixed(1.0), 2, sampler="fixed_size"),
            "those of the cohorts",
        ),
        (state_after(fixed(1.0), 2, num_clients=100), "num_clients must be the 100"),
    ],
)
def test_rounds_that_cannot_be_priced_here(earlier, message):
    state = one_after_the_other(earlier, state_after(fixed(1.0), 1))
    with pytest.raises(ValueError, match=message):
        spent(state, fixed(1.0))


@pytest.mark.parametrize("sampling", ["poisson", "random_allocation", "shuffled"])
def test_cohorts_that_were_refused_for_their_size_change_the_others(sampling):
    # Of Poisson cohorts, those of exactly m that were released are of a fixed size:
    # 6.3 was said, and at least 18.7 true.
    mechanism = fixed(1.0, noise_site="client")
    state = state_after(mechanism, 2, sampler=sampling)
    declared = {**DECLARED, "sampling": sampling}
    with pytest.raises(ValueError, match="needs sampling='fixed_size'"):
        spent(state, mechanism, sampling=sampling)
    with pytest.raises(ValueError, match="needs sampling='fixed_size'"):
        learning.privacy_charges(state, mechanism, **declared)
    of_one_size = state_after(mechanism, 2, sampler="fixed_size")
    assert spent(of_one_size, mechanism, sampling="fixed_size") > 0


@pytest.mark.parametrize(
    "sampling, possible, impossible",
    [("fixed_size", 100, 101), ("poisson", 160, 190), ("shuffled", 100, 120)],
)
def test_cohorts_larger_than_declared(sampling, possible, impossible):
    # N = 1000, m = 100: Poisson cohorts above 172 have probability 1e-12.
    def cost(size):
        state = state_after(fixed(1.0), 3, sampler=sampling)
        answered = np.array([90.0, size, 100.0])
        state = state._replace(history=state.history._replace(answered=answered))
        return spent(state, fixed(1.0), sampling=sampling)

    assert cost(possible) > 0
    with pytest.raises(ValueError, match=f"{impossible} answered in round 2"):
        cost(impossible)


def test_a_cohort_that_begins_the_next_pass():
    # Of 250, 100 and 100 leave 50: some of 100 took part before.
    way = {"sampling": "shuffled", "num_clients": 250}
    sampler = sampling.make_sampler("shuffled", 250, 100)
    state = state_after(fixed(1.0), 3, sampler=sampler)
    with pytest.raises(ValueError, match=r"left of a pass.* 100 answered in round 3"):
        spent(state, fixed(1.0), **way)
    state.history.answered[2] = 50.0
    once = accounting.epsilon(1.0, "shuffled", 250, 100, 3, DELTA)
    assert spent(state, fixed(1.0), **way) == pytest.approx(once)


def test_the_statement_says_what_the_number_is():
    state = state_after(fixed(1.0), 100)
    value = spent(state, fixed(1.0))
    assert json.loads(json.dumps(value)) == float(value)
    for words in ("epsilon = 7.9", "was declared by the caller", "the server's state"):
        assert words in value.statement
    facts = value.to_statement("dict")
    assert facts["epsilon"] == value
    assert {"tff_cohorts_declared", "tff_other_releases"} <= set(facts["caveats"])


def test_what_is_learned_need_not_be_a_model():
    # As the centres of `build_fed_kmeans`.
    aggregator = state_after(fixed(1.0), 3)
    whole = tff.learning.templates.LearningAlgorithmState(
        global_model_weights=np.ones((3, 4)),
        distributor=(),
        client_work=(),
        aggregator=aggregator,
        finalizer=(),
    )
    assert spent(whole, fixed(1.0)) == spent(aggregator, fixed(1.0)) > 0


def test_declarations_that_the_state_contradicts():
    state = state_after(fixed(1.0), 3)
    for mechanism, clients_per_round, message in (
        (fixed(2.0), 100, "noise multiplier of 1.0"),
        (mechanisms.NoPrivacy(), 99, "another kind"),
        (fixed(1.0), 50, "clients_per_round"),
    ):
        with pytest.raises(ValueError, match=message):
            spent(state, mechanism, clients_per_round=clients_per_round)
    with pytest.raises(ValueError, match="history"):
        spent(state._replace(rounds=4), fixed(1.0))


@pytest.mark.parametrize("sampling, z", [("fixed_size", 20.0), ("poisson", None)])
def test_what_local_noise_is_worth_centrally(sampling, z):
    mechanism = mechanisms.LocalDP(clip_norm=1.0, noise_multiplier=2.0)
    state = state_after(mechanism, 1, sampler=sampling, sampling=sampling)
    declared = {**DECLARED, "sampling": sampling}
    (charge,) = learning.privacy_charges(state, mechanism, **declared)
    nothing = dp_accounting.NonPrivateDpEvent()
    assert charge.event == (dp_accounting.GaussianDpEvent(z) if z else nothing)
    # Nothing where other clients, or other noise, or another sum were in it.
    history, weak = state.history, dataclasses.replace(mechanism, noise_multiplier=1.0)
    changed = history.lines[0].replace(b'changed":false', b'changed":true')
    for asked, wrong in (
        (mechanism, history._replace(answered=np.array([1.0]))),
        (mechanism, history._replace(answered=np.array([150.0]))),
        (mechanism, history._replace(lines=np.array([changed], object))),
        (weak, history),
    ):
        other = state._replace(history=wrong)
        (charge,) = learning.privacy_charges(other, asked, **declared)
        assert charge.event == nothing


def test_passes_of_a_random_allocation_are_charged_by_their_tokens():
    way, allocation = {"sampling": "random_allocation"}, "random_allocation"

    def cost(rounds, by="pld"):
        return accounting.epsilon(1.0, allocation, 1000, 100, rounds, DELTA, by)

    sampler = sampling.make_sampler(allocation, 1000, 100)
    first = state_after(fixed(1.0), 4, sampler=sampler)
    assert spent(first, fixed(1.0), **way, accountant="pld") == cost(1)
    saved = sampler.state()
    rest = state_after(fixed(1.0), 6, sampler=sampler)
    whole = one_after_the_other(first, rest)
    assert spent(whole, fixed(1.0), **way, accountant="pld") == cost(10)
    # From a state of the sampler, as with another sampler, it is another pass.
    again = sampling.make_sampler(allocation, 1000, 100)
    again.restore(saved)
    twice = state_after(fixed(1.0), 6, sampler=again)
    anew = state_after(fixed(1.0), 6, sampler=allocation)
    for more in twice, anew:
        state = one_after_the_other(first, rest, more)
        found = spent(state, fixed(1.0), **way, accountant="pld")
        assert found == pytest.approx(cost(20))
    # Of whom nobody says who they were, all may have been in every round.
    unsaid = state_after(fixed(1.0), 2, sampler=None)
    expected = accounting.gaussian_epsilon(1 / np.sqrt(2), DELTA)
    found = spent(unsaid, fixed(1.0), **way, accountant="pld")
    assert found == pytest.approx(expected)
    # m need not divide N: the process is made with N / t.
    sampler = sampling.make_sampler(allocation, 1000, 300)
    state = state_after(fixed(1.0), 3, clients_per_round=1000 / 3, sampler=sampler)
    spent(state, fixed(1.0), **way, clients_per_round=300)
