import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl._lazy_tf import tfp
from tfdp_fl.mechanisms import ClientContext, PrivacyContext, noise

_WIDE = [[100, 100], [100, 100], [5000]]
_G = dp_accounting.GaussianDpEvent
_UNKNOWN = dp_accounting.UnsupportedDpEvent()
_CHEAP = "dp_event must not cost less"


def _mechanism(query, event=_G(1.0)):  # noqa: B008
    return tfdp_fl.QueryMechanism(query=query, dp_event=event)


def _bound(query):
    return rounds.bound(_mechanism(query, dp_accounting.NonPrivateDpEvent()))


def _adaptive(noise_multiplier=0.0, count_stddev=0.0):
    return tfp.QuantileAdaptiveClipSumQuery(
        initial_l2_norm_clip=0.5,
        noise_multiplier=noise_multiplier,
        target_unclipped_quantile=0.4,
        learning_rate=0.3,
        clipped_count_stddev=count_stddev,
        expected_num_records=8,
    )


def _normalized(stddev, denominator, clip=0.5):
    return tfp.NormalizedQuery(tfp.GaussianSumQuery(clip, stddev), denominator)


def test_what_the_querys_clip_makes_of_finite_numbers_is_finite():
    bound, state = _bound(tfp.GaussianSumQuery(0.5, 0.0))
    params = bound.derive_sample_params(state)
    # Four squares of 3e38 each: their float32 sum is infinite, ours is not.
    hostile = np.zeros(512, np.float32)
    hostile[::128] = 1.7e19
    assert 0 < bound.update_norm([tf.constant(hostile)]) < np.inf
    record = bound.clip(params, [tf.constant(hostile)], ClientContext())
    np.testing.assert_array_equal(tf.nest.flatten(record.update)[0], np.zeros(512))
    assert record.discarded == 1


@pytest.mark.parametrize("size", [1e-25, 1e-21, 1e-19, 3e-19, 1e-15, 1.0])
def test_a_tiny_clip_of_a_query_holds(size):
    bound, state = _bound(tfp.GaussianSumQuery(1e-24, 0.0))
    params = bound.derive_sample_params(state)
    update = [tf.fill([600], tf.constant(size, tf.float32))]
    record = bound.clip(params, update, ClientContext())
    sent = np.float64(tf.nest.flatten(record.update)[0])
    assert np.linalg.norm(sent) <= 1e-24 * (1 + 1e-5)


@pytest.mark.parametrize(
    "query, m",
    [
        (tfp.GaussianSumQuery(0.5, 0.0), 8),
        (_normalized(0.0, 5.0), 5),  # It keeps its own denominator.
        (_adaptive(), 8),
    ],
)
def test_a_sum_is_divided_by_the_fixed_m(query, m):
    bound, state = _bound(query)
    norms = [0.1, 0.2, 0.4, 1.0, 2.0, 3.0, 4.0, 5.0]
    updates, clip = rounds.updates_with_norms(norms), 0.5
    for _ in range(3):
        done = rounds.run_round(bound, state, updates, clients_per_round=8)
        wanted = references.fixed_clipping_mean(updates, clip, m)
        rounds.assert_close(done.mean, wanted, rtol=1e-4, atol=1e-7)
        if isinstance(query, tfp.QuantileAdaptiveClipSumQuery):
            metrics = bound.derive_metrics(state)
            np.testing.assert_allclose(metrics["clip_norm"], clip, rtol=1e-5)
            clip = references.next_clip(clip, norms, 0.4, 0.3, 8)
        state = done.next_state
    updates[1][3][1] = np.nan
    done = rounds.run_round(bound, bound.initial_global_state(), updates)
    others = references.fixed_clipping_mean(updates[:1] + updates[2:], 0.5, m)
    rounds.assert_close(done.mean, others, atol=1e-6)
    assert float(done.total.discarded) == 1


@pytest.mark.parametrize(
    "query, stddev",
    [
        (tfp.GaussianSumQuery(0.5, 1.5), 1.5 / 8),
        (_normalized(1.5, 5.0), 1.5 / 5),
        (_adaptive(3.0, 0.4), 3.0 * 0.5 / 8),
    ],
)
def test_noise_is_the_querys_and_never_that_of_tensorflows_seed(query, stddev):
    bound, state = _bound(query)

    def mean():
        return rounds.run_round(bound, state, rounds.zero_updates(8, _WIDE)).mean

    first, second = mean(), mean()
    statistics.assert_gaussian(rounds.flat(first), stddev)
    statistics.assert_uncorrelated(first[0], first[1])
    statistics.assert_uncorrelated(first[0], second[0])
    # A seed of TensorFlow's does not repeat it; the round's does, as an input.
    for same in (False, True):
        drawn = []
        for seed in ([5, 6], [5, 6] if same else [7, 8]):
            tf.random.set_seed(3)
            with noise.use_seed(tf.constant(seed, tf.uint64)):
                drawn.append(rounds.flat(mean()))
        assert np.array_equal(*drawn) == same
    for _ in range(2):  # As where a process begins anew.
        tf.random.set_seed(3)
        drawn.append(rounds.flat(mean()))
    statistics.assert_uncorrelated(*drawn[-2:])
    assert set(bound.mechanism.caveats()) == {"custom_query_event"}


def test_a_query_whose_noise_shrinks_is_charged_what_it_reports():
    class Shrinking(_Own):
        def initial_global_state(self):
            return tf.ones([])

        def get_noised_result(self, sample_state, global_state):
            scale = global_state
            event = dp_accounting.GaussianDpEvent(
                float(scale) if tf.executing_eagerly() else 1.0  # Traced.
            )
            noised = [x + scale * tf.random.normal(x.shape) for x in sample_state]
            return noised, tf.maximum(scale * 0.98, 0.5), event

    query = Shrinking(None)
    declared = dp_accounting.GaussianDpEvent(0.9)
    mechanism = tfdp_fl.QueryMechanism(query=query, dp_event=declared)
    where = PrivacyContext(clients_per_round=8, shapes=((1000,),), num_variables=1)
    bound = mechanism.bind(where)
    state = bound.initial_global_state()
    charged = []
    for t in range(12):
        charged.append(mechanism.event_at(t, where, state).noise_multiplier)
        updates = [[np.zeros(1000, np.float32)]] * 8
        state = rounds.run_round(bound, state, updates, charged=0.0).next_state
    expected = np.minimum(0.9, 0.98 ** np.arange(12.0))
    np.testing.assert_allclose(charged, expected, rtol=1e-5)


class _Own(tfp.SumAggregationDPQuery):
    def __init__(self, reported, stddev=1.0, grows=False):
        self.says = reported, stddev, grows

    def initial_global_state(self):
        return tf.zeros([1])

    def get_noised_result(self, sample_state, global_state):
        reported, stddev, grows = self.says
        noised = [part + stddev * tf.random.normal(part.shape) for part in sample_state]
        return noised, tf.concat([global_state] * (1 + grows), 0), reported


class _Largest(_Own):
    def accumulate_preprocessed_record(self, sample_state, preprocessed_record):
        pairs = zip(sample_state, preprocessed_record, strict=True)
        return [tf.maximum(*pair) for pair in pairs]


def _tree():
    return tfp.TreeResidualSumQuery.build_l2_gaussian_query(
        1.0, 1.0, [tf.TensorSpec([4])]
    )


_ONE = tfp.GaussianSumQuery(1.0, 1.0)
_NEVER = r"query must.*FixedClipping"


@pytest.mark.parametrize(
    "query, event, message",
    [
        # An event that costs less.
        (tfp.GaussianSumQuery(1.0, 0.0), _G(10.0), "dp_event must"),
        (tfp.GaussianSumQuery(1.0, 0.99), _G(1.0), "dp_event must"),
        (_ONE, dp_accounting.PoissonSampledDpEvent(0.01, _G(1.0)), "dp_event must"),
        (_ONE, dp_accounting.LaplaceDpEvent(2.0), "dp_event must"),
        (_ONE, _UNKNOWN, "dp_event must"),
        (tfp.NoPrivacySumQuery(), _G(1.0), "dp_event must"),
        # The count is forgotten.
        (_adaptive(1.0, 1.0), _G(1.0), "dp_event must"),
        (_normalized(0.5, 8.0, 1.0), _G(1.0), "dp_event must"),
        # A query of the user's own is tried.
        *((_Own(reported), _G(1.0), "") for reported in (_UNKNOWN, _G(0.5))),
        (_Own(_G(1.0), stddev=0.0), _G(1.0), ""),
        (_Own(_G(1.0), grows=True), _G(1.0), ""),
        (_Largest(_G(1.0)), _G(1.0), "add up"),
        # Queries that cannot be charged.
        (_tree, _G(1.0), _NEVER),
        (lambda: tfp.NormalizedQuery(_tree(), 8.0), _G(1.0), _NEVER),
        (lambda: tfp.DiscreteGaussianSumQuery(1.0, 1.0), _G(1.0), _NEVER),
        (lambda: tfp.NoPrivacyAverageQuery(), _G(1.0), _NEVER),
        (tfp.QuantileAdaptiveClipSumQuery(0.0, 1.0, 0.5, 0.2, 1.0, 8), _G(1.0), "NaN"),
        # As much or more is taken.
        (tfp.GaussianSumQuery(0.3, 0.3 * 1.1), _G(1.1), None),
        (tfp.GaussianSumQuery(1.0, 1.5), _G(1.0), None),
        (_normalized(1.0, 8.0, 1.0), _G(1.0), None),
        (_adaptive(1.0, 1.0), _G(0.8**0.5), None),
    ],
)
def test_an_event_that_costs_less_is_refused(query, event, message):
    if callable(query):
        try:
            query = query()
        except ModuleNotFoundError as error:
            pytest.skip(f"TF-Privacy needs {error.name} for this query.")
    if message is None:
        mechanism = _mechanism(query, event)
        assert mechanism.round_event(3, PrivacyContext(clients_per_round=8)) == event
    else:
        with pytest.raises(ValueError, match=message):
            _mechanism(query, event)


def _nested(stddev):
    queries = [tfp.GaussianSumQuery(1.0, s) for s in (2.0, stddev)]
    event = dp_accounting.ComposedDpEvent([_G(2.0)] * 2)
    return _mechanism(tfp.NestedSumQuery(queries), event)


class _OfTheModel(tfp.GaussianSumQuery):
    """It takes the shapes of one model only."""

    def initial_sample_state(self, template=None):
        assert [part.shape for part in template] == [(3, 2), (2,)]
        return super().initial_sample_state(template)


class _Dearer(_OfTheModel):
    def get_noised_result(self, sample_state, global_state):
        result, state, _ = super().get_noised_result(sample_state, global_state)
        return result, state, _G(0.05)


_SHAPES = ((3, 2), (2,))
_ZEROS = "must take tensors of zeros of the model's shapes"


@pytest.mark.parametrize(
    "mechanism, shapes, message",
    [
        (_nested(2.0), None, None),
        (_nested(1.0), None, _CHEAP),
        (_mechanism(_OfTheModel(0.5, 0.5)), _SHAPES, None),
        (_mechanism(_OfTheModel(0.5, 0.5)), ((3, 3), (3,)), _ZEROS),
        (_mechanism(_Dearer(0.5, 0.5)), _SHAPES, _CHEAP),
    ],
)
def test_what_cannot_be_tried_before_is_tried_when_it_is_bound(
    mechanism, shapes, message
):
    context = PrivacyContext(clients_per_round=8, num_variables=2, shapes=shapes)
    if message is None:
        mechanism.bind(context)
    else:
        with pytest.raises(ValueError, match=message):
            mechanism.bind(context)
