"""What the conformance suite (`tests/conformance`) does not run in TFF.

A false alarm of all of this file together has a probability below 1e-6.
"""

import dp_accounting
import numpy as np
import pytest
import tensorflow_federated as tff
import tensorflow_privacy as tfp

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tests.outside.loading import smooth_clipping
from tfdp_fl import aggregators, learning

SIZE, M = 40_000, 4
VALUE = tff.types.to_type([(np.float32, [SIZE // 2]), (np.float32, [SIZE // 2])])
VECTOR = tff.TensorType(np.float32, [4])
EXAMPLES = tff.TensorType(np.float32)
NORMS = (0.5, 1.0, 2.0, 8.0)
# A client's own axis shows what is left of its update in the mean.
VALUES = [norm * np.eye(4, dtype=np.float32)[row] for row, norm in enumerate(NORMS)]
FREE = dp_accounting.NonPrivateDpEvent()
_NBAFL = {"num_clients": 4, "rounds": 3}


ADAPTIVE_QUERY = tfp.QuantileAdaptiveClipSumQuery(
    initial_l2_norm_clip=1.0,
    noise_multiplier=0.0,
    target_unclipped_quantile=0.5,
    learning_rate=0.2,
    clipped_count_stddev=0.0,
    expected_num_records=3.0,
)
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
        factory = aggregators.NbAFLFactory(mechanism, clients_per_round=M, **facts)
        process = factory.create(VECTOR, EXAMPLES)
    else:
        process = aggregators.from_mechanism(mechanism, M).create(VECTOR)
    query, query_state = rounds.bound(mechanism, M, num_variables=1, **facts)
    state = process.initialize()
    bad = np.full(4, np.nan, np.float32)
    for values in (VALUES, [3 * value for value in VALUES], [bad, *VALUES[1:]]):
        weights = [examples] if examples else []
        output = process.next(state, values, *weights)
        done = rounds.run_round(
            query,
            query_state,
            [[value] for value in values],
            clients_per_round=M,
            num_examples=examples,
        )
        np.testing.assert_allclose(output.result, done.mean[0], rtol=1e-5, atol=1e-6)
        measured = output.measurements
        if "clip_norm" in measured:
            wanted = query.derive_metrics(done.state)["clip_norm"]
            np.testing.assert_allclose(measured["clip_norm"], wanted, rtol=1e-5)
        assert measured["cohort_size"] == M
        assert measured["discarded_clients"] == (values[0] is bad)
        state, query_state = output.state, done.next_state


def test_a_round_without_anything_usable_fails():
    factory = aggregators.NbAFLFactory(QUIET["nbafl"], clients_per_round=2, **_NBAFL)
    process = factory.create(VECTOR, EXAMPLES)
    state = process.initialize()
    for values, examples in (
        ([], []),
        ([np.ones(4, np.float32)], [0.0]),
        ([np.full(4, np.nan, np.float32)], [10.0]),
    ):
        with pytest.raises(Exception, match="nothing usable"):
            process.next(state, values, examples)


def test_an_event_that_is_no_gaussian_stays_what_it_is():
    event = dp_accounting.LaplaceDpEvent(0.125)
    query = tfp.GaussianSumQuery(1.0, 1.0)
    factory = aggregators.QueryFactory(
        query=query, dp_event=event, clients_per_round=[3, 2]
    )
    process = factory.create(VECTOR)
    state = process.next(process.initialize(), VALUES[:3]).state
    declared = {"num_clients": 10, "clients_per_round": [3, 2]}
    (charge,) = learning.privacy_charges(
        state, factory.mechanism, sampling="poisson", **declared
    )
    assert charge.event == event


def test_scale_and_independence():
    mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=5.0, delta=1e-5, clipping_radius=0.5)
    # Two layers that are released together: sqrt(2) times the noise of ten.
    stddev = references.analytic_sigma(1.0, 5.0, 1e-5) * (10 * 2) ** 0.5 / M**0.5
    factory = aggregators.from_mechanism(mechanism, M, rounds=10)
    process, again = factory.create(VALUE), factory.create(VALUE)
    zeros = [[np.zeros(SIZE // 2, np.float32)] * 2] * M
    first = process.next(process.initialize(), zeros)
    outputs = [
        first,
        process.next(first.state, zeros),
        process.next(first.state, zeros),  # The same round once more.
        again.next(again.initialize(), zeros),
    ]
    draws = [np.concatenate(one.result).astype(np.float64) for one in outputs]
    for place, draw in enumerate(draws):
        statistics.assert_gaussian(draw, stddev)
        statistics.assert_uncorrelated(*np.split(draw, 2))  # The two tensors.
        for other in draws[:place]:
            statistics.assert_uncorrelated(draw, other)


def test_noise_of_both_channels():
    mechanism = tfdp_fl.NbAFL(epsilon=10.0, constant=1.5, weight_clip=200.0)
    facts = {"num_clients": 4, "rounds": 30, "min_examples": 10}
    factory = aggregators.NbAFLFactory(mechanism, clients_per_round=2, **facts)
    # Two clients with 20 examples each: the mean has 1/sqrt(2) of it.
    uplink = references.nbafl_uplink_sigma(200.0, 1.5, 30, 20, 10.0) / 2**0.5
    downlink = references.nbafl_downlink_sigma(200.0, 1.5, 30, 2, 4, 10, 10.0)
    process = factory.create(tff.TensorType(np.float32, [SIZE]), EXAMPLES)
    zeros = [np.zeros(SIZE, np.float32)] * 2
    result = process.next(process.initialize(), zeros, [20.0, 20.0]).result
    # The mean's elements are cut at +-200, some 4 sigma away.
    statistics.assert_gaussian(result, np.hypot(uplink, downlink))


@pytest.fixture(name="secure_sums")
def _secure_sums():
    # TFF 0.87 runs its secure sums only there.
    context = tff.framework.get_context_stack().current
    tff.backends.test.set_sync_test_cpp_execution_context()
    yield
    tff.framework.set_default_context(context)


@pytest.mark.usefixtures("secure_sums")
def test_sums_records_securely():
    process = aggregators.AdaptiveClippingFactory(
        noise_multiplier=0.0,
        clients_per_round=2,
        initial_clip_norm=1.0,
        noise_site="client",
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
