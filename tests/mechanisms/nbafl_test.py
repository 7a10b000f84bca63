import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl import algorithm
from tfdp_fl.mechanisms import PrivacyContext

_WIDE = [[150, 150], [150, 150], [5000]]
# T = 10 is below sqrt(N) L = 40: no noise before broadcast. T = 100 is above.
_SHORT = PrivacyContext(clients_per_round=4, num_clients=100, rounds=10)
_LONG = PrivacyContext(clients_per_round=4, num_clients=100, rounds=100, min_examples=7)


def _mechanism(epsilon=10.0, constant=1.0, weight_clip=0.5):
    return tfdp_fl.NbAFL(epsilon=epsilon, constant=constant, weight_clip=weight_clip)


def _bound(context=_SHORT, **arguments):
    query = _mechanism(**arguments).bind(context)
    return query, query.initial_global_state()


def test_without_noise_weights_are_clipped_and_averaged_by_examples():
    query, state = _bound(epsilon=1e9)
    weights = rounds.updates_with_norms([0.1, 0.4, 2.0, 1e4])
    examples = [1, 10, 30, 5]
    done = rounds.run_round(query, state, weights, num_examples=examples)
    clipped = [references.clipped(each, 0.5) for each in weights]
    total = np.array(examples) @ [rounds.flat(each) for each in clipped]
    wanted = np.clip(total / sum(examples), -0.5, 0.5)
    rounds.assert_close(done.mean, [wanted], rtol=1e-4, atol=1e-6)
    assert float(done.total.clipped) == 2


@pytest.mark.parametrize("examples", [0.5, 0.99999994, 600, 2**32])
def test_whoever_weighs_anything_has_noise_by_its_own_examples(examples):
    query, state = _bound(constant=1.3)
    updates = rounds.zero_updates(1, _WIDE)
    done = rounds.run_round(query, state, updates, num_examples=[examples])
    assert float(done.total.weight) == np.float32(examples)
    # A record is weighted by n, and its noise goes by 1/n.
    sent = rounds.flat(done.records[0].update)
    sigma = examples * references.nbafl_uplink_sigma(0.5, 1.3, 10, examples, 10.0)
    statistics.assert_gaussian(sent, sigma)
    statistics.assert_uncorrelated(*done.records[0].update[:2])


@pytest.mark.parametrize("examples", [np.nan, np.inf, -np.inf, 3e38, -5, 0.0])
def test_what_is_no_number_of_examples_weighs_nothing(examples):
    query, state = _bound(epsilon=1e9)
    weights = rounds.updates_with_norms([0.1, 0.2, 0.3])
    weights[2][0][0, 0] = np.nan
    done = rounds.run_round(query, state, weights, num_examples=[6.0, examples, 9.0])
    # A record with a NaN does not change the weight of its client, which has no noise.
    assert float(done.total.weight) == 6 + 9
    assert float(done.total.discarded) == 1
    rounds.assert_close(done.mean, [rounds.flat(weights[0]) * 6 / 15], atol=1e-6)


def _released(context, value=0.0):
    query, state = _bound(context)
    total = query.initial_sample_state([tf.zeros(shape) for shape in _WIDE])
    update = [v + 5 * value for v in total.update]
    total = total._replace(update=update, weight=tf.constant(5.0))
    return algorithm.release(query, total, state, np.inf)[0]


def test_noise_before_broadcast_when_it_is_due():
    weights = _released(_LONG)
    sigma = references.nbafl_downlink_sigma(0.5, 1.0, 100, 4, 100, 7, 10.0)
    statistics.assert_gaussian(rounds.flat(weights), sigma)
    statistics.assert_uncorrelated(weights[0], weights[1])
    statistics.assert_uncorrelated(weights[0], _released(_LONG)[0])


@pytest.mark.parametrize("value", [0.0, 0.3, -0.7, -1e6])
def test_else_the_mean_is_only_clipped_element_by_element(value):
    weights = rounds.flat(_released(_SHORT, value))
    expected = np.full(50_000, np.clip(value, -0.5, 0.5))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["rounds", "num_clients", "min_examples"])
def test_what_the_noise_depends_on_must_be_known(name):
    known = {"rounds": 100, "num_clients": 100, "min_examples": 3, name: None}
    with pytest.raises(ValueError, match=name):
        _mechanism().bind(PrivacyContext(clients_per_round=4, **known))
    _mechanism().bind(_SHORT)  # Where no noise is due.


@pytest.mark.parametrize("examples", [1, 50])
def test_is_per_record_and_one_upload_costs_its_sensitivity_over_sigma(examples):
    for constant, delta in ((0.1, 1.0), (1, 0.76), (2, 0.17), (3, 0.014)):
        implied = _mechanism(constant=constant).implied_delta
        assert implied / delta == pytest.approx(1, abs=0.05)
    mechanism = _mechanism(constant=2.0, weight_clip=0.3)
    sigma = references.nbafl_uplink_sigma(0.3, 2.0, 10, examples, 10.0)
    expected = (2 * 0.3 / examples / sigma) ** 2
    assert mechanism.mu_squared(_SHORT) == pytest.approx(expected)
    assert (mechanism.trust_model, mechanism.privacy_unit) == ("local", "record")
    assert "per_record" in mechanism.caveats()
    event = mechanism.round_event(0, _SHORT)
    assert event == dp_accounting.NonPrivateDpEvent()
