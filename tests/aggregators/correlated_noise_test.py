"""Correlated noise as a TFF aggregation factory."""

import json
import math

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdp_fl
from tfdp_fl import aggregators, learning

_ZEROS = [np.zeros(shape, np.float32) for shape in ([10, 12], [10])]
_TYPE = tff.to_type([tff.TensorType(np.float32, zeros.shape) for zeros in _ZEROS])
_ROUNDS = 5


def _mechanism(strategy="banded", noise_multiplier=2.0, **options):
    return tfdp_fl.CorrelatedNoise(
        clip_norm=0.5,
        noise_multiplier=noise_multiplier,
        strategy=strategy,
        **{"rounds": _ROUNDS, "min_separation": 2, **options},
    )


def _process(mechanism, **options):
    return aggregators.from_mechanism(mechanism, 2, **options).create(_TYPE)


def _run(process, rounds):
    state = process.initialize()
    for _ in range(rounds):
        state = process.next(state, [_ZEROS] * 2).state
    return state


def _epsilon(state, mechanism, sampling="cyclic", **options):
    sizes = {"num_clients": 4, "clients_per_round": 2}
    options = {"sampling": sampling, **sizes, "delta": 1e-5, **options}
    return learning.epsilon(state, mechanism, **options)


@pytest.mark.parametrize("strategy", ["blt:2", "banded"])
def test_every_round_is_written_down_with_its_own_charge(strategy):
    mechanism = _mechanism(strategy, max_participations=2)
    process = _process(mechanism)
    state = _run(process, _ROUNDS)
    events = [json.loads(line)["event"] for line in state.history.lines]
    costs = [event.get("noise_multiplier", math.inf) for event in events]
    with np.errstate(divide="ignore"):
        expected = 2.0 / mechanism.generator.charges
    np.testing.assert_allclose(costs, expected, rtol=1e-12)
    spent = _epsilon(state, mechanism, accountant="pld")
    whole = tfdp_fl.accounting.gaussian_epsilon(
        2.0 / mechanism.generator.sensitivity, 1e-5
    )
    assert float(spent) == pytest.approx(whole, abs=5e-7)
    assert "correlated_noise_secret" in spent.facts.caveats
    # Past the last round nothing comes out.
    with pytest.raises(Exception, match="lies past its end"):
        process.next(state, [_ZEROS] * 2)


def test_what_is_not_as_declared_is_refused():
    mechanism = _mechanism()
    state = _run(_process(mechanism), 1)
    for sampling in ("poisson", "fixed_size", "shuffled"):
        with pytest.raises(ValueError, match="sampling must be 'cyclic'"):
            _process(mechanism, sampling=sampling)
        with pytest.raises(ValueError, match="sampling must be 'cyclic'"):
            _epsilon(state, mechanism, sampling)
    # A state of other noise.
    for changed in (
        {"noise_multiplier": 3.0},
        {"strategy": "blt:2"},
        {"rounds": _ROUNDS + 1},
        {"min_separation": 3},
        {"max_participations": 1},
    ):
        with pytest.raises(ValueError):
            _epsilon(state, _mechanism(**changed))
    # Clients that take part too often.
    mechanism = _mechanism(max_participations=1)
    state = _run(_process(mechanism), 1)
    _epsilon(state, mechanism, max_participations=1)
    with pytest.raises(ValueError, match="max_participations"):
        _epsilon(state, mechanism, max_participations=2)
    # Values of unknown shape.
    factory = aggregators.from_mechanism(mechanism, 2)
    with pytest.raises(ValueError, match="shapes"):
        factory.create(tff.TensorType(np.float32, [None]))


def test_clients_that_come_as_they_like():
    mechanism = _mechanism()
    state = _run(_process(mechanism, sampling="separated"), 2)
    declared = _epsilon(state, mechanism, "separated")
    plain = _run(_process(mechanism), 2)
    assert float(declared) == float(_epsilon(plain, mechanism))
    assert "nobody checked it" in declared.statement
    assert "fixed groups" not in declared.statement
    assert "Clients came as they liked" in declared.statement
    with pytest.raises(ValueError, match="min_separation"):
        _process(mechanism, sampling="separated", num_clients=3)
