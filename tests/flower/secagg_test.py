"""Flower's SecAgg+: what one client can move where nobody sees a reply."""

from __future__ import annotations

import numpy as np
import pytest

from tests.flower import flower_messages, real_flower
from tfdp_fl.flower import DPFedAvgAdaptive, DPFedAvgFixed, private_mod

pytestmark = real_flower.NEEDS_FLOWER
# Half a step of SecAgg+'s fixed point: 2 * 8 / 2^22.
_STEP = 16 / 2**22
# Clients that clip: wrapped, or with the mod.
_WRAPPED = {"wrapped": True}
_WITH_MOD = {"wrapped": False, "mods": [private_mod]}
_BOTH = pytest.mark.parametrize(
    "how", [_WRAPPED, pytest.param(_WITH_MOD, marks=flower_messages.NEEDS_FLOWER)]
)
_ONE_OF_FIVE = [[5.0, 0, 0, 0]] + 4 * [[0.0] * 4]


def _moved(strategy, updates, num_examples=1, wrapped=True, **arguments):
    """Runs a round of clients from zeros; returns the new model."""
    updates = np.asarray(updates)
    numbers = np.broadcast_to(num_examples, len(updates)).tolist()
    clients = [
        real_flower.client([update], n, wrapped)
        for update, n in zip(updates, numbers, strict=True)
    ]
    model = real_flower.parameters(np.zeros(updates.shape[1]))
    (moved,) = real_flower.secagg_round(strategy, clients, model, **arguments)
    return moved


def _fixed(m, z=0.0, by_server=True):
    return DPFedAvgFixed(real_flower.strategy("FedAvg", m), m, 1.0, z, by_server)


@_BOTH
@pytest.mark.parametrize("max_weight", [1000.0, 1.0])
def test_a_client_of_many_examples_moves_w_by_no_more_than_s_over_m(max_weight, how):
    # With its number of examples as its weight: by 0.996.
    strategy = _fixed(5)
    numbers = [1000, 1, 1, 1, 1]
    moved = _moved(strategy, _ONE_OF_FIVE, numbers, max_weight=max_weight, **how)
    np.testing.assert_allclose(moved, [0.2, 0, 0, 0], rtol=0, atol=max_weight * _STEP)
    assert len(strategy.released_rounds) == 1


def test_a_client_that_falls_silent_is_left_out():
    strategy = _fixed(5)
    moved = _moved(strategy, [[0.5, 0, 0, 0]] * 5, gone=[2, 3], max_weight=1.0)
    np.testing.assert_allclose(moved, [0.3, 0, 0, 0], rtol=0, atol=2 * _STEP)
    (released,) = strategy.released_rounds
    assert released.num_replies == 3


def test_the_noise_is_the_planned_one():
    moved = _moved(_fixed(4, 1.0), np.zeros((4, 100_000)))
    # The sample stddev varies by 0.22 %; 2 % is 9 of these.
    np.testing.assert_allclose(np.std(4 * moved), 1.0, rtol=0.02)


@_BOTH
def test_adaptive_clipping_gets_its_bits(how):
    strategy = DPFedAvgAdaptive(real_flower.strategy("FedAvg", 3), 3, 2.0, 0.0)
    _moved(strategy, [[1.0, 0], [3.0, 0], [4.0, 0]], **how)
    assert strategy.clip_norm == pytest.approx(2 * np.exp(0.2 / 6))


@flower_messages.NEEDS_FLOWER
def test_without_the_mod_in_its_place_nothing_is_released():
    # Around SecAgg+'s it sees messages in which there is no model.
    strategy = _fixed(3)
    with pytest.raises(Exception, match="dpfedavg_clip_norm"):
        _moved(strategy, [[5.0, 0]] * 3, wrapped=False, before=[private_mod])
    assert strategy.released_rounds == ()
    # Shares of noise are said to be applied.
    zeros = np.zeros((4, 1000))
    for how, released in ((_WITH_MOD, 1), ({"wrapped": False}, 0)):
        strategy = _fixed(4, 1.0, by_server=False)
        moved = _moved(strategy, zeros, **how)
        assert len(strategy.released_rounds) == released
        assert moved.any() == bool(released)
