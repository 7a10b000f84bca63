"""What the conformance suite (`tests/conformance`) does not run in TFF.

A false alarm of all of this file together has a probability below 1e-6.
"""

import contextlib
import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp
from scipy import linalg

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tests.outside.loading import smooth_clipping
from tfdp_fl import accounting, aggregators, learning
from tfdp_fl.sampling import make_sampler

SIZE, M = 40_000, 4
VALUE = tff.types.to_type([(np.float32, [SIZE // 2]), (np.float32, [SIZE // 2])])
VECTOR = tff.TensorType(np.float32, [4])
EXAMPLES = tff.TensorType(np.float32)
NORMS = (0.5, 1.0, 2.0, 8.0)
# A client's own axis shows what is left of its update in the mean.
VALUES = [norm * np.eye(4, dtype=np.float32)[row] for row, norm in enumerate(NORMS)]
FREE = dp_accounting.NonPrivateDpEvent()
_NBAFL = {"num_clients": 4, "rounds": 3}


# Clip, noise multiplier, quantile, learning rate, noise on the count, records.
ADAPTIVE_QUERY = tfp.QuantileAdaptiveClipSumQuery(1.0, 0.0, 0.5, 0.2, 0.0, 3.0)
QUIET = {
    "adaptive": tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=0.4),
    "nbafl": tfdp_fl.NbAFL(epsilon=1e14, constant=1.0, weight_clip=2.0),
    "query": tfdp_fl.QueryMechanism(
        query=tfp.NormalizedQuery(ADAPTIVE_QUERY, 3.0), dp_event=FREE
    ),
    "own": smooth_clipping()(noise_multiplier=0.0),
}


@pytest.mark.parametrize("name", QUIET)
def test_is_what_its_query_computes(name):
    mechanism, facts, examples = QUIET[name], {}, None
    if name == "nbafl":
        facts, examples = _NBAFL, [10.0, 30.0, 5.0, 1.0]
        factory = aggregators.WeightsFactory(mechanism, M, **facts)
        process = factory.create(VECTOR, EXAMPLES)
    else:
        process = aggregators.from_mechanism(mechanism, M).create(VECTOR)
    query, query_state = rounds.bound(mechanism, M, num_variables=1, **facts)
    state = process.initialize()
    bad = np.full(4, np.nan, np.float32)
    for values in (VALUES, [3 * value for value in VALUES], [bad, *VALUES[1:]]):
        weights = [examples] if examples else []
        output = process.next(state, values, *weights)
        records = [[value] for value in values]
        done = rounds.run_round(query, query_state, records, num_examples=examples)
        np.testing.assert_allclose(output.result, done.mean[0], rtol=1e-5, atol=1e-6)
        measured = output.measurements
        if "clip_norm" in measured:
            wanted = query.derive_metrics(done.state)["clip_norm"]
            np.testing.assert_allclose(measured["clip_norm"], wanted, rtol=1e-5)
        assert measured["cohort_size"] == M
        assert measured["discarded_clients"] == (values[0] is bad)
        state, query_state = output.state, done.next_state


def test_a_round_without_anything_usable_fails():
    factory = aggregators.WeightsFactory(QUIET["nbafl"], 2, **_NBAFL)
    process = factory.create(VECTOR, EXAMPLES)
    state = process.initialize()
    for values, examples in (
        ([], []),
        ([np.ones(4, np.float32)], [0.0]),
    ):
        with pytest.raises(Exception, match="nothing usable"):
            process.next(state, values, examples)
    # Whether there is a release depends on no record: it is zero, and noise.
    output = process.next(state, [np.full(4, np.nan, np.float32)], [10.0])
    assert output.measurements["discarded_clients"] == 1
    assert output.result.any() and np.abs(output.result).max() < 1e-6


def test_an_event_that_is_no_gaussian_stays_what_it_is():
    event = dp_accounting.LaplaceDpEvent(0.125)
    given = {"query": tfp.GaussianSumQuery(1.0, 1.0), "dp_event": event}
    factory = aggregators.QueryFactory(**given, clients_per_round=[3, 2])
    process = factory.create(VECTOR)
    state = process.next(process.initialize(), VALUES[:3]).state
    declared = {"sampling": "poisson", "num_clients": 10, "clients_per_round": [3, 2]}
    (charge,) = learning.privacy_charges(state, factory.mechanism, **declared)
    assert charge.event == event


class _Shrinking(tfp.GaussianSumQuery):
    """Its noise is smaller each round from the third on."""

    def initial_global_state(self):
        return super().initial_global_state(), tf.constant(0.0)

    def derive_sample_params(self, state):
        return super().derive_sample_params(state[0])

    def get_noised_result(self, total, state):
        z = 4.0 * 0.8 ** tf.maximum(state[1] - 1.0, 0.0)
        noised = [part + tf.random.normal(part.shape, stddev=z) for part in total]
        return noised, (state[0], state[1] + 1.0), dp_accounting.GaussianDpEvent(z)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Growing(tfdp_fl.mechanisms.Mechanism):
    """Its clip grows, and its noise does not."""

    clip_norm: float = 1.0
    noise_multiplier: float = 2.0

    def noise_stddevs(self, round, context):
        return {"update": round.noise_multiplier}

    def next_clip_norm(self, sums, round):
        return 3 * round.clip_norm

    def describe(self):
        return "Growing."


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Quieter(tfdp_fl.mechanisms.Mechanism):
    """The noise that it adds is a thousandth of the noise that it is charged for."""

    clip_norm: float = 1.0
    noise_multiplier: float = 10.0

    def noise_stddevs(self, round, context):
        share = 1e-3 if tf.is_tensor(round.noise_multiplier) else 1.0
        return {"update": share * round.noise_multiplier * round.clip_norm}

    def describe(self):
        return "Quieter."


def _of_query(stddev, kind=tfp.GaussianSumQuery):
    event = dp_accounting.GaussianDpEvent(4.0 if kind is _Shrinking else stddev)
    query = kind(1.0, stddev)
    return aggregators.QueryFactory(query=query, dp_event=event, clients_per_round=4)


@pytest.mark.parametrize(
    "first, then, rounds_run, message",
    [
        (_of_query(4.0, _Shrinking), None, 2, "reports less noise in this round"),
        # A state of a process with a thirtieth of the noise.
        (_of_query(0.3), _of_query(10.0), 0, "reports less noise in this round"),
        (_of_query(10.0), _of_query(0.3), 1, None),
        (aggregators.from_mechanism(_Growing(), 4), None, 1, "adds less noise"),
        (aggregators.from_mechanism(_Quieter(), 4), None, 0, "adds less noise"),
        # With a line for each round.
        (aggregators.from_mechanism(_Quieter(), [4, 4]), None, 0, "adds less noise"),
    ],
)
def test_a_round_with_less_noise_than_is_written_down_fails(
    first, then, rounds_run, message
):
    state = first.create(VECTOR).initialize()
    process = (then or first).create(VECTOR)
    for _ in range(rounds_run):
        state = process.next(state, VALUES).state
    if message:
        with pytest.raises(Exception, match=message):
            process.next(state, VALUES)


@pytest.mark.parametrize("inner", [None, tff.aggregators.SumFactory()])
def test_a_plain_sum_is_exact_however_it_is_named(inner):
    given = {"clip_norm": 1.0, "noise_multiplier": 0.0, "clients_per_round": 1}
    factory = aggregators.FixedClippingFactory(**given, inner_factory=inner)
    process, part = factory.create(tff.TensorType(np.float32)), np.float32(0.7)
    total = process.next(process.initialize(), [part] * 300).result
    assert total == np.float32(300 * np.float64(part))


def test_what_a_secure_sum_may_add_is_charged():
    plain, secure = (
        aggregators.from_mechanism(
            tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0), M, inner
        )
        for inner in (None, tff.aggregators.SecureSumFactory(4.0))
    )
    state = plain.create(VECTOR).initialize()
    state = plain.create(VECTOR).next(state, VALUES).state
    line = json.loads(state.history.lines[0])
    assert line["enlarged"] == 1.0
    line["enlarged"] = secure._enlargement(None)
    assert line["enlarged"] == 1 + 2e-3 + M * 2.0**-23
    history = state.history._replace(lines=np.array([json.dumps(line)], object))
    sizes = {"sampling": "poisson", "num_clients": 8, "clients_per_round": M}
    (charge,) = learning.privacy_charges(
        state._replace(history=history), plain.mechanism, **sizes
    )
    assert charge.noise_multiplier == 1 / line["enlarged"]


def test_scale_and_independence():
    mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=5.0, delta=1e-5, clipping_radius=0.5)
    # Two layers that are released together: sqrt(2) times the noise of ten.
    stddev = references.analytic_sigma(1.0, 5.0, 1e-5) * (10 * 2) ** 0.5 / M**0.5
    factory = aggregators.from_mechanism(mechanism, M, rounds=10)
    process, again = factory.create(VALUE), factory.create(VALUE)
    zeros = [[np.zeros(SIZE // 2, np.float32)] * 2] * M
    first = process.next(process.initialize(), zeros)
    outputs = [first, again.next(again.initialize(), zeros)]
    # The second one is run twice.
    outputs += [process.next(first.state, zeros) for _ in range(2)]
    draws = [np.concatenate(one.result).astype(np.float64) for one in outputs]
    for place, draw in enumerate(draws):
        statistics.assert_gaussian(draw, stddev)
        statistics.assert_uncorrelated(*np.split(draw, 2))  # The two tensors.
        for other in draws[:place]:
            statistics.assert_uncorrelated(draw, other)


@pytest.fixture(name="secure_sums")
def _secure_sums():
    # TFF 0.87 runs its secure sums only there.
    context = tff.framework.get_context_stack().current
    tff.backends.test.set_sync_test_cpp_execution_context()
    yield
    tff.framework.set_default_context(context)


@pytest.mark.usefixtures("secure_sums")
@pytest.mark.parametrize(
    "site, bound, z",
    [("client", 5.0, 2.0), ("client", 5.0, 1e-3), ("server", 60.0, 2.0)],
)
def test_no_clip_of_a_cohort_fails_its_round(site, bound, z):
    # Whether it fails would tell about the clients, and nothing would be charged.
    median = tfdp_fl.MedianClipping(
        noise_multiplier=z, median_noise_multiplier=0.01, noise_site=site
    )
    process = aggregators.from_mechanism(
        median,
        9,
        tff.aggregators.SecureSumFactory(bound),
        sampling="fixed_size",
        num_clients=9,
    ).create(tff.TensorType(np.float32, [10]))
    clips = []
    for size in (1e-6, 0.1, 1e3):
        values = [np.full(10, size, np.float32)] * 9
        output = process.next(process.initialize(), values)
        clips.append(float(output.measurements["clip_norm"]))
    least, middle, most = clips
    assert 1e-6 * 10**0.5 < least < middle
    assert middle == pytest.approx(0.1 * 10**0.5, rel=0.01)
    if site == "client":  # With 9.5 deviations of its noise, z S / 3, it can be sent.
        assert most == pytest.approx(bound / (1 + 9.5 * z / 3), rel=1e-4)
        # The noise spans two steps of 2^-23 of the bound, and more than rounding does.
        for_noise, for_clip = 2 * 3 / z, 1e3 * 10**0.5
        step = bound * 2.0**-23
        assert least == pytest.approx(max(for_noise, for_clip) * step, rel=1e-4)


@pytest.mark.usefixtures("secure_sums")
def test_a_later_round_of_a_secure_sum_is_checked():
    # One of two clients adds noise of 0.7 clips, then 7.
    mechanism = tfdp_fl.FixedClipping(
        clip_norm=1.0, noise_multiplier=[1.0, 10.0], noise_site="client"
    )
    secure = tff.aggregators.SecureSumFactory(8.0)
    process = aggregators.from_mechanism(mechanism, 2, secure).create(VECTOR)
    state = process.next(process.initialize(), VALUES[:2]).state
    with pytest.raises(Exception, match=r"bounds of.*cut off"):
        process.next(state, VALUES[:2])


@pytest.mark.usefixtures("secure_sums")
def test_sums_records_securely():
    given = {"noise_multiplier": 0.0, "clients_per_round": 2, "noise_site": "client"}
    process = aggregators.AdaptiveClippingFactory(
        **given,
        initial_clip_norm=1.0,
        inner_factory=tff.aggregators.SecureSumFactory(4.0, -4.0),
        scalars_factory=tff.aggregators.SecureSumFactory(64.0, -64.0),
    ).create(VECTOR)
    values = [np.array(v, np.float32) for v in ([3, 0, 0, 0], [0, 0.5, 0, 0])]
    output = process.next(process.initialize(), values)
    np.testing.assert_allclose(output.result, [0.5, 0.25, 0, 0], atol=1e-5)
    assert output.measurements["cohort_size"] == 2
    assert output.measurements["mean_update_norm"] == pytest.approx(1.75, abs=1e-4)
    # One of two was not clipped, which is the target: the clip stays.
    assert output.state.query_state.clip_norm == pytest.approx(1.0, abs=1e-5)
    assert "inner" in output.measurements


_ZEROS = [np.zeros(shape, np.float32) for shape in ([10, 12], [10])]
_TYPE = tff.to_type([tff.TensorType(np.float32, zeros.shape) for zeros in _ZEROS])
_ROUNDS = 5


def _correlated(strategy="banded", noise_multiplier=2.0, **options):
    return tfdp_fl.CorrelatedNoise(
        clip_norm=0.5,
        noise_multiplier=noise_multiplier,
        strategy=strategy,
        **{"rounds": _ROUNDS, "min_separation": 2, **options},
    )


def _process(mechanism, **options):
    return aggregators.from_mechanism(mechanism, 2, **options).create(_TYPE)


def _run(process, rounds, restarts=(), sampler="cyclic", answers=2):
    """Returns the state after rounds of two of four clients; and who was in which."""
    state, seen = process.initialize(), np.zeros([4, rounds])
    for t in range(rounds):
        if sampler and (not t or t in restarts):
            draws = make_sampler(sampler, 4, 2)
        if sampler:
            cohort = draws.draw()
            state = aggregators.with_cohort(state, cohort)
            draws.release(cohort)
            seen[cohort.positions, t] = 1
        state = process.next(state, [_ZEROS] * answers).state
    return (state, seen) if restarts else state


def _epsilon(state, mechanism, sampling="cyclic", **options):
    sizes = {"num_clients": 4, "clients_per_round": 2}
    options = {"sampling": sampling, **sizes, "delta": 1e-5, **options}
    return learning.epsilon(state, mechanism, **options)


@pytest.mark.parametrize("strategy", ["blt:2", "banded"])
def test_every_round_is_written_down_with_its_own_charge(strategy):
    mechanism = _correlated(strategy, max_participations=2)
    process = _process(mechanism)
    state = _run(process, _ROUNDS, answers=1)
    events = [json.loads(line)["event"] for line in state.history.lines]
    costs = [event.get("noise_multiplier", math.inf) for event in events]
    with np.errstate(divide="ignore"):
        expected = 2.0 / mechanism.generator.round_sensitivities
    np.testing.assert_allclose(costs, expected, rtol=1e-12)
    spent = _epsilon(state, mechanism, accountant="pld", max_participations=2)
    # A group has three turns: that its clients sit one of them out is declared.
    assert spent < _epsilon(state, mechanism, accountant="pld")
    whole = tfdp_fl.accounting.gaussian_epsilon(
        2.0 / mechanism.generator.sensitivity, 1e-5
    )
    assert float(spent) == pytest.approx(whole, abs=5e-7)
    assert "correlated_noise_secret" in spent.facts.caveats
    # If both clients of a group answer each time, they cannot have sat one out.
    with pytest.raises(ValueError, match="max_participations must be at least 3"):
        _epsilon(_run(process, _ROUNDS), mechanism, max_participations=2)
    # Rounds that do not say so may all have had the same clients.
    unsaid = _epsilon(_run(process, _ROUNDS, sampler=None), mechanism)
    assert unsaid > 2 * spent
    # Past the last round nothing comes out.
    with pytest.raises(Exception, match="lies past its end"):
        process.next(state, [_ZEROS] * 2)


@pytest.mark.parametrize("restarts", [(2,), (1, 3), (1, 2, 3, 4)])
def test_groups_that_are_divided_anew_cost_more(restarts):
    mechanism = _correlated("blt:2")
    state, seen = _run(_process(mechanism), _ROUNDS, restarts)
    matrix = linalg.toeplitz(mechanism.generator.coefficients, np.eye(_ROUNDS)[0])
    worst = np.linalg.norm(matrix @ seen.T, axis=0).max()
    true = tfdp_fl.accounting.gaussian_epsilon(2.0 / worst, 1e-5)
    assert _epsilon(state, mechanism, accountant="pld") >= true


def test_a_cohort_whose_round_failed_has_had_its_turn():
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    way = {"sampling": "shuffled", "num_clients": 8}
    process = _process(mechanism, **way)
    state, sampler, met = process.initialize(), make_sampler("shuffled", 8, 2), []
    for t in range(6):
        cohort = sampler.draw()
        state = aggregators.with_cohort(state, cohort)
        assert aggregators.with_cohort(state, cohort) is state
        fails = t in (2, 3)
        with pytest.raises(Exception) if fails else contextlib.nullcontext():
            state = process.next(state, [_ZEROS] * (3 if fails else 2)).state
            met.extend(cohort.positions)
        (sampler.abandon if fails else sampler.release)(cohort)
    # Four rounds are not a pass: two of its cohorts failed, and the next one began.
    spent = _epsilon(state, mechanism, **way, accountant="pld")
    assert spent == pytest.approx(tfdp_fl.accounting.gaussian_epsilon(0.5**0.5, 1e-5))
    assert max(np.bincount(met)) <= 2
    with pytest.raises(RuntimeError, match="in a round of this state already"):
        aggregators.with_cohort(state, cohort)
    with pytest.raises(ValueError, match="those of the cohorts"):
        fewer = make_sampler("shuffled", 7, 2).draw()
        _epsilon(aggregators.with_cohort(state, fewer), mechanism, **way)


def test_a_pass_of_a_random_allocation_is_charged_once_and_divided_by_its_size():
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    way = {"sampling": "random_allocation", "num_clients": 7}
    process = aggregators.from_mechanism(mechanism, 3, **way).create(_TYPE)
    state, sampler = process.initialize(), make_sampler(way["sampling"], 7, 3, seed=1)
    for _ in range(2):
        cohort = sampler.draw()
        state = aggregators.with_cohort(state, cohort)
        state = process.next(state, [_ZEROS] * len(cohort.positions)).state
        sampler.release(cohort)
    sizes = [json.loads(line)["clients_per_round"] for line in state.history.lines]
    assert sizes == pytest.approx([3.5, 3.5])
    spent = _epsilon(state, mechanism, **way, clients_per_round=3, accountant="pld")
    given = (1.0, way["sampling"], 7, 3, 2, 1e-5, "pld")
    assert spent == tfdp_fl.accounting.epsilon(*given)
    assert "plan_assumes_none_abandoned" in spent.facts.caveats


@pytest.mark.parametrize("name", ["poisson", "fixed_size", "shuffled", "cyclic"])
def test_a_seed_does_not_draw_the_same_clients_for_one_state_again(name):
    state = aggregators.AggregatorState((), 0, (), aggregators.RoundHistory((), ()))
    sampler = make_sampler(name, 20, 5, seed=7)
    for _ in range(3):
        cohort = sampler.draw()
        state = aggregators.with_cohort(state, cohort)
        sampler.release(cohort)
        done = np.arange(cohort.round_index + 1) + 1
        state = state._replace(history=state.history._replace(attempted=done))
        # The process ends here: the script is started again.
        again = make_sampler(name, 20, 5, seed=7)
        with pytest.raises(RuntimeError, match="Restore the sampler"):
            aggregators.with_cohort(state, again.draw())
        again = make_sampler(name, 20, 5, seed=7)
        again.restore(sampler.state())
        sampler = again


def test_a_statement_says_that_cohorts_follow_from_a_seed():
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    way = {"sampling": "poisson", "num_clients": 8}
    for seed in (None, 3):
        cohort = make_sampler("poisson", 8, 2, seed).draw()
        state = aggregators.with_cohort(_process(mechanism, **way).initialize(), cohort)
        said = _epsilon(state, mechanism, **way, clients_per_round=2).statement
        assert ("follow from a random seed" in said) == (seed is not None)


def test_a_cohort_of_a_fixed_size_is_not_thrown_away():
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    way = {"sampling": "fixed_size", "num_clients": 8}
    start = _process(mechanism, **way).initialize()
    state = aggregators.with_cohort(start, make_sampler("fixed_size", 8, 2).draw())
    with pytest.raises(RuntimeError, match="may_abandon=True"):
        aggregators.with_cohort(state, make_sampler("fixed_size", 8, 2).draw())
    # Where it may be, each attempt is charged, whatever became of it.
    sampler, state = make_sampler("fixed_size", 8, 2, may_abandon=True), start
    for _ in range(3):
        cohort = sampler.draw()
        state = aggregators.with_cohort(state, cohort)
        sampler.abandon(cohort)
    costs = learning.privacy_charges(state, mechanism, **way, clients_per_round=2)
    assert [each.known_selection for each in costs] == [True] * 3
    assert "whether a client was in it" in _epsilon(state, mechanism, **way).statement


def test_local_clients_of_an_abandoned_round_have_spent_what_they_sent():
    mechanism = tfdp_fl.LocalDP(epsilon=8.0, delta=1e-5, clip_norm=1.0)
    way = {"sampling": "fixed_size", "num_clients": 8, "rounds": 10}
    state = _process(mechanism, **way).initialize()
    sampler = make_sampler("fixed_size", 8, 2, may_abandon=True)
    for rounds_of_one in (1, 2, 3):
        cohort = sampler.draw()
        state = aggregators.with_cohort(state, cohort)
        sampler.abandon(cohort)
        context = tfdp_fl.mechanisms.PrivacyContext(**way, clients_per_round=2)
        mu_squared = rounds_of_one * float(mechanism.mu_squared(context))
        expected = accounting.gaussian_epsilon(mu_squared**-0.5, 1e-5)
        assert _epsilon(state, mechanism, **way) == pytest.approx(expected)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Writes(tfdp_fl.FixedClipping):
    """Leaves a file for the clients after it."""

    path: str = "seen"

    def scale(self, norm, round):
        with tf.control_dependencies([tf.io.write_file(self.path, "seen")]):
            return super().scale(norm, round)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draws(tfdp_fl.FixedClipping):
    """Draws from a stream that all clients share."""

    def scale(self, norm, round):
        return super().scale(norm, round) * tf.random.uniform([], seed=1)


@pytest.mark.parametrize("kind, found", [(_Writes, "WriteFile"), (_Draws, "RandomUni")])
def test_a_mechanism_keeps_nothing_of_a_client_for_the_next(kind, found):
    mechanism = kind(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match=f"mechanism.*{found}"):
        _process(mechanism, sampling="poisson", num_clients=8)


def test_what_is_not_as_declared_is_refused():
    mechanism = _correlated()
    state = _run(_process(mechanism), 1)
    for sampling in ("poisson", "fixed_size", "shuffled"):
        with pytest.raises(ValueError, match="sampling must be 'cyclic'"):
            _process(mechanism, sampling=sampling)
        with pytest.raises(ValueError, match="sampling must be 'cyclic'"):
            _epsilon(state, mechanism, sampling)
    # A state of other noise.
    changes = {"noise_multiplier": 3.0, "strategy": "blt:2", "rounds": _ROUNDS + 1}
    changes |= {"min_separation": 3, "max_participations": 1}
    for name, value in changes.items():
        with pytest.raises(ValueError):
            _epsilon(state, _correlated(**{name: value}))
    # Clients that take part too often.
    mechanism = _correlated(max_participations=1)
    state = _run(_process(mechanism), 1)
    _epsilon(state, mechanism, max_participations=1)
    with pytest.raises(ValueError, match="max_participations"):
        _epsilon(state, mechanism, max_participations=2)
    # Values of unknown shape.
    factory = aggregators.from_mechanism(mechanism, 2)
    with pytest.raises(ValueError, match="shapes"):
        factory.create(tff.TensorType(np.float32, [None]))


def test_clients_that_come_as_they_like():
    mechanism = _correlated()
    state = _run(_process(mechanism, sampling="min_separation"), 2, sampler=None)
    declared = _epsilon(state, mechanism, "min_separation")
    plain = _run(_process(mechanism), 2)
    assert float(declared) == float(_epsilon(plain, mechanism))
    said = " ".join(declared.statement.split())
    assert "It was declared, but not checked" in said
    assert "fixed groups" not in said
    assert "Clients took part whenever they liked" in said
    with pytest.raises(ValueError, match="min_separation"):
        _process(mechanism, sampling="min_separation", num_clients=3)
