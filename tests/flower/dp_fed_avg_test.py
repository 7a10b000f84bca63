"""The names of Flower's older API: what they ask, hand on, and translate."""

import copy
import itertools
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.flower import older_api
from tfdp_fl import accounting
from tfdp_fl.flower import DPFedAvg, DPFedAvgAdaptive, DPFedAvgFixed
from tfdp_fl.mechanisms import noise

_MODEL = [np.linspace(-1, 1, 50), np.array(0.25)]
_SENT = older_api.parameters(*_MODEL)


def _updates(m):
    rng = np.random.default_rng(5)
    return [[rng.normal(size=50), rng.normal(size=())] for _ in range(m)]


def _flat(parameters):
    return np.concatenate([np.ravel(part) for part in parameters])


@pytest.mark.parametrize("by_server", [True, False])
def test_what_the_clients_are_told(by_server):
    inner = older_api.Strategy({"lr": 0.1})
    strategy = DPFedAvgFixed(inner, 4, 0.5, 2.0, by_server)
    told = strategy.configure_fit(3, _SENT, older_api.Manager("abcd"))
    assert sorted(client for client, _ in told) == list("abcd")
    wanted = {"lr": 0.1, "dpfedavg_clip_norm": 0.5}
    if not by_server:  # z S / sqrt(m)
        wanted["dpfedavg_noise_stddev"] = 0.5
    for _, ins in told:
        assert ins.parameters is _SENT
        assert ins.config == wanted
    assert inner.config == {"lr": 0.1}

    clip = {"init_clip_norm": 0.2, "clip_count_stddev": 1.0}
    noise = {"noise_multiplier": 1.0, "server_side_noising": by_server}
    strategy = DPFedAvgAdaptive(older_api.Strategy(), 50, **clip, **noise)
    ((_, ins), *_) = strategy.configure_fit(1, _SENT, older_api.Manager(range(50)))
    wanted = {"dpfedavg_clip_norm": 0.2, "dpfedavg_adaptive_clip_enabled": True}
    if not by_server:
        stddev = 0.2 / math.sqrt(0.75) / math.sqrt(50)
        wanted["dpfedavg_noise_stddev"] = pytest.approx(stddev)
    assert ins.config == wanted


def test_m_of_those_connected_are_asked_with_one_model():
    strategy = DPFedAvgFixed(older_api.Strategy(), 3, 0.5, num_clients=8)
    with pytest.raises(ValueError, match=r"num_clients .* 7, got 8"):
        strategy.configure_fit(1, _SENT, older_api.Manager("abcdefg"))
    told = strategy.configure_fit(1, _SENT, older_api.Manager("abcdefghij"))
    assert len({client for client, _ in told}) == 3

    class Personal(older_api.Strategy):
        def configure_fit(self, *arguments):
            told = super().configure_fit(*arguments)
            for i, (_, ins) in enumerate(told):
                told[i] = "a", copy.copy(ins)
                told[i][1].parameters = older_api.parameters(float(i))
            return told

    strategy = DPFedAvgFixed(Personal(), 3, 0.5)
    with pytest.raises(ValueError, match="different models"):
        strategy.configure_fit(1, _SENT, older_api.Manager("abc"))


@pytest.mark.parametrize("by_server", [True, False])
def test_without_noise_it_is_the_mean_of_clipped_updates(by_server):
    inner, changes = older_api.Strategy(), _updates(5)
    strategy = DPFedAvgFixed(inner, 5, 1.5, 0.0, by_server)
    got = older_api.a_round(strategy, _MODEL, changes)
    # McMahan et al. (2018).
    deltas = [_flat(change) for change in changes]
    mean = sum(d * min(1, 1.5 / np.linalg.norm(d)) for d in deltas) / 5
    np.testing.assert_allclose(_flat(got), _flat(_MODEL) + mean, rtol=1e-6, atol=1e-6)
    # The strategy is handed nothing else; not the proxy of anybody who was drawn.
    (((proxy, handed),),) = inner.handed
    assert (proxy.cid, handed.num_examples, handed.metrics) == ("", 1, {})
    assert strategy.evaluate(4, None) == (0.5, {"round": 4})
    assert not hasattr(strategy, "configure_evaluate")


def test_the_count_is_noised():
    # b = 1/2 = gamma: every move of log S is -eta / m times what is added to the count.
    strategy = DPFedAvgAdaptive(
        older_api.Strategy(), 4, 1.0, 0.0, clip_norm_lr=0.01, clip_count_stddev=0.4
    )
    number, updates = itertools.count(1), [[norm] for norm in (1e-9, 1e-9, 1e9, 1e9)]

    def move():
        before = strategy.clip_norm
        older_api.a_round(strategy, [0.0], updates, next(number))
        return math.log(strategy.clip_norm / before)

    def add(tensors, stddev):
        return [t + tf.cast(stddev, t.dtype) for t in tensors]

    # One stddev in the place of the draw, whose law is `mechanisms/noise_test`'s.
    with mock.patch.object(noise, "add_normal", add):
        assert move() == pytest.approx(-0.001, rel=1e-3)
    # Each round has a draw of its own, even of one seed. |N| > 8 once in 10^15; six
    # draws differ by a hundredth of their stddev once in 10^9 (chi^2 of 5).
    moves = []
    for _ in range(6):
        np.random.seed(0)
        moves.append(move())
    assert max(map(abs, moves)) < 8 * 0.001
    assert np.std(moves) > 0.01 * 0.001


def test_clients_that_hand_back_what_they_were_sent_moved_nothing():
    # In the server's own process, it is one object, as the average of SecAgg+ is.
    strategy = DPFedAvgFixed(older_api.Strategy(), 3, 1.0, 0.0)
    manager = older_api.Manager("abc")
    told = strategy.configure_fit(1, _SENT, manager)
    done = {"num_examples": 1, "metrics": {}}
    replies = [(c, SimpleNamespace(parameters=i.parameters, **done)) for c, i in told]
    got, _ = strategy.aggregate_fit(1, replies, [])
    np.testing.assert_array_equal(_flat(older_api.arrays(got)), _flat(_MODEL))


def test_arguments_are_translated():
    strategy = DPFedAvgAdaptive(older_api.Strategy(), 50)
    assert strategy.mechanism == tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)
    with pytest.raises(ValueError, match=r"less than 2 . count_noise_stddev"):
        DPFedAvgAdaptive(older_api.Strategy(), 10)
    noise = {"clip_norm": 1.0, "noise_multiplier": 1.0}
    correlated = tfdp_fl.CorrelatedNoise(**noise, rounds=8, min_separation=2)
    with pytest.raises(ValueError, match="mechanism must be a central"):
        DPFedAvg(older_api.Strategy(), 2, correlated)


def test_nothing_is_claimed_for_sampling_unless_n_is_declared():
    for said, charged in ((None, 5), (50, 50)):
        strategy = DPFedAvgFixed(older_api.Strategy(), 5, 0.5, num_clients=said)
        for number in range(1, 4):
            older_api.a_round(strategy, [np.zeros(2)], [[np.zeros(2)]] * 50, number)
        expected = accounting.epsilon(
            1.0, "fixed_size", charged, 5, 3, 1e-5, accountant="pld"
        )
        assert strategy.privacy_epsilon(1e-5) == pytest.approx(expected)
