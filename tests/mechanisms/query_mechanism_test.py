from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl.accounting import caveats
from tfdp_fl.mechanisms import Deployment
from tfdp_fl.mechanisms import tf_privacy as tfp

_WIDE = [[100, 100], [100, 100], [5000]]
_EVENT = dp_accounting.GaussianDpEvent(1.0)
_FREE = dp_accounting.NonPrivateDpEvent()


def _mechanism(query, event=_EVENT):
    return tfdp_fl.QueryMechanism(query=query, dp_event=event)


def _bound(query, event=_FREE):
    bound = _mechanism(query, event).bind(Deployment(clients_per_round=8))
    return bound, bound.initial_global_state()


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
        for actual, expected in zip(done.mean, wanted, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-7)
        if isinstance(query, tfp.QuantileAdaptiveClipSumQuery):
            metrics = bound.derive_metrics(state)
            np.testing.assert_allclose(metrics["clip_norm"], clip, rtol=1e-5)
            clip = references.next_clip(clip, norms, 0.4, 0.3, 8)
        state = done.next_state
    updates[1][3][1] = np.nan
    done = rounds.run_round(bound, bound.initial_global_state(), updates)
    others = references.fixed_clipping_mean(updates[:1] + updates[2:], 0.5, m)
    np.testing.assert_allclose(rounds.flat(done.mean), rounds.flat(others), atol=1e-6)
    assert float(done.total.discarded) == 1


@pytest.mark.parametrize(
    "query, stddev",
    [
        (tfp.GaussianSumQuery(0.5, 1.5), 1.5 / 8),
        (_normalized(1.5, 5.0), 1.5 / 5),
        (_adaptive(3.0, 0.4), 3.0 * 0.5 / 8),
    ],
)
def test_noise_is_the_querys_and_follows_tensorflows_seed(query, stddev):
    bound, state = _bound(query)

    def mean():
        return rounds.run_round(bound, state, rounds.zero_updates(8, _WIDE)).mean

    first, second = mean(), mean()
    statistics.assert_gaussian(rounds.flat(first), stddev)
    statistics.assert_uncorrelated(first[0], first[1])
    statistics.assert_uncorrelated(first[0], second[0])
    seeded = []
    for _ in range(2):
        tf.random.set_seed(3)
        seeded.append(rounds.flat(mean()))
    np.testing.assert_array_equal(*seeded)
    said = {"custom_query_event", "query_noise_from_tf_random"}
    assert said == set(bound.mechanism.caveats())
    assert said <= set(caveats.CAVEATS)


_ONE = tfp.GaussianSumQuery(1.0, 1.0)


@pytest.mark.parametrize(
    "query, event",
    [
        (tfp.GaussianSumQuery(1.0, 0.0), dp_accounting.GaussianDpEvent(10.0)),
        (tfp.GaussianSumQuery(1.0, 0.99), _EVENT),
        (_ONE, dp_accounting.PoissonSampledDpEvent(0.01, _EVENT)),
        (_ONE, dp_accounting.LaplaceDpEvent(2.0)),
        (_ONE, dp_accounting.UnsupportedDpEvent()),
        (tfp.NoPrivacySumQuery(), _EVENT),
        # The count is forgotten.
        (_adaptive(1.0, 1.0), _EVENT),
        (_normalized(0.5, 8.0, 1.0), _EVENT),
    ],
)
def test_an_event_that_costs_less_is_refused(query, event):
    with pytest.raises(ValueError, match="dp_event must"):
        _mechanism(query, event)


@pytest.mark.parametrize(
    "query, z",
    [
        (tfp.GaussianSumQuery(0.3, 0.3 * 1.1), 1.1),
        (tfp.GaussianSumQuery(1.0, 1.5), 1.0),
        (_normalized(1.0, 8.0, 1.0), 1.0),
        (_adaptive(1.0, 1.0), 0.8**0.5),
    ],
)
def test_an_event_that_costs_as_much_or_more_is_taken(query, z):
    mechanism = _mechanism(query, dp_accounting.GaussianDpEvent(z))
    event = mechanism.round_event(3, Deployment(clients_per_round=8))
    assert event == dp_accounting.GaussianDpEvent(z)


def test_a_query_for_several_variables_is_tried_when_it_is_bound():
    def nested(stddev):
        queries = [tfp.GaussianSumQuery(1.0, s) for s in (2.0, stddev)]
        parts = [dp_accounting.GaussianDpEvent(2.0)] * 2
        event = dp_accounting.ComposedDpEvent(parts)
        return _mechanism(tfp.NestedSumQuery(queries), event)

    deployment = Deployment(clients_per_round=8, num_variables=2)
    nested(2.0).bind(deployment)
    with pytest.raises(ValueError, match="dp_event must not cost less"):
        nested(1.0).bind(deployment)


def _tree():
    return tfp.TreeResidualSumQuery.build_l2_gaussian_query(
        1.0, 1.0, [tf.TensorSpec([4])]
    )


@pytest.mark.parametrize(
    "query",
    [
        _tree,
        lambda: tfp.NormalizedQuery(_tree(), 8.0),
        lambda: tfp.DiscreteGaussianSumQuery(1.0, 1.0),
        lambda: tfp.NoPrivacyAverageQuery(),
    ],
)
def test_queries_that_cannot_be_charged_are_refused(query):
    try:
        made = query()
    except ModuleNotFoundError as error:
        pytest.skip(f"TF-Privacy needs {error.name} for this query.")
    with pytest.raises(ValueError, match=r"query must.*FixedClipping"):
        _mechanism(made)


class _Own(tfp.SumAggregationDPQuery):
    def __init__(self, reported, stddev, grows):
        self.says = reported, stddev, grows

    def initial_global_state(self):
        return tf.zeros([1])

    def get_noised_result(self, sample_state, global_state):
        reported, stddev, grows = self.says
        noised = [part + stddev * tf.random.normal(part.shape) for part in sample_state]
        return noised, tf.concat([global_state] * (1 + grows), 0), reported


@pytest.mark.parametrize(
    "reported, stddev, grows",
    [
        (dp_accounting.UnsupportedDpEvent(), 1.0, False),
        (dp_accounting.GaussianDpEvent(0.5), 1.0, False),
        (_EVENT, 0.0, False),
        (_EVENT, 1.0, True),
    ],
)
def test_a_query_of_the_users_own_is_tried(reported, stddev, grows):
    with pytest.raises(ValueError):
        _mechanism(_Own(reported, stddev, grows))


@pytest.mark.parametrize(
    "cost, shapes, message",
    [
        (1.0, ((3, 2), (2,)), None),
        (1.0, ((3, 3), (3,)), "must take tensors of zeros of the model's shapes"),
        (0.05, ((3, 2), (2,)), "dp_event must not cost less"),
    ],
)
def test_a_query_that_takes_the_models_shapes_only(cost, shapes, message):
    """Such a query cannot be tried before the shapes are known."""

    class OfTheModel(tfp.GaussianSumQuery):
        def initial_sample_state(self, template=None):
            assert [part.shape for part in template] == [(3, 2), (2,)]
            return super().initial_sample_state(template)

        def get_noised_result(self, sample_state, global_state):
            result, state, _ = super().get_noised_result(sample_state, global_state)
            return result, state, dp_accounting.GaussianDpEvent(cost)

    mechanism = _mechanism(OfTheModel(0.5, 0.5))
    deployment = Deployment(clients_per_round=8, num_variables=2, shapes=shapes)
    if message is None:
        mechanism.bind(deployment)
    else:
        with pytest.raises(ValueError, match=message):
            mechanism.bind(deployment)
