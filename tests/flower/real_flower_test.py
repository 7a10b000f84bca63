"""The real Flower: SecAgg+, its older API, and where it is there the message API."""

import logging
from unittest import mock

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.flower import older_api
from tfdp_fl import accounting
from tfdp_fl.flower import DPFedAvg, DPFedAvgAdaptive, DPFedAvgFixed, private_mod

pytestmark = older_api.NEEDS_FLOWER
# Half a step of SecAgg+'s fixed point: 2 * 8 / 2^22.
_STEP = 16 / 2**22
_WRAPPED = {"wrapped": True}
_WITH_MOD = {"wrapped": False, "mods": [private_mod]}
_BOTH = pytest.mark.parametrize(
    "how", [_WRAPPED, pytest.param(_WITH_MOD, marks=fm.NEEDS_FLOWER)]
)
_START = older_api.parameters(np.zeros(8))
_ONE_OF_FIVE = [[5.0, 0, 0, 0]] + 4 * [[0.0] * 4]


def _moved(strategy, updates, num_examples=1, wrapped=True, **arguments):
    """Runs a round of clients from zeros; returns the new model."""
    updates = np.asarray(updates)
    numbers = np.broadcast_to(num_examples, len(updates)).tolist()
    wrapped = np.broadcast_to(wrapped, len(updates)).tolist()
    clients = [
        older_api.client([update], *how)
        for update, *how in zip(updates, numbers, wrapped, strict=True)
    ]
    model = older_api.parameters(np.zeros(updates.shape[1]))
    (moved,) = older_api.secagg_round(strategy, clients, model, **arguments)
    return moved


def _fixed(m, z=0.0, by_server=True, step=2 * _STEP):
    inner = older_api.strategy("FedAvg", m)
    return DPFedAvgFixed(inner, m, 1.0, z, by_server, secagg_step=step)


@_BOTH
@pytest.mark.parametrize("max_weight", [1000.0, 1.0])
def test_a_client_of_many_examples_moves_w_by_no_more_than_s_over_m(max_weight, how):
    # With its number of examples as its weight: by 0.996.
    strategy = _fixed(5)
    numbers = [1000, 1, 1, 1, 1]
    moved = _moved(strategy, _ONE_OF_FIVE, numbers, max_weight=max_weight, **how)
    np.testing.assert_allclose(moved, [0.2, 0, 0, 0], rtol=0, atol=max_weight * _STEP)
    assert len(strategy.charged_rounds) == 1


def test_a_client_that_falls_silent_is_left_out():
    strategy = _fixed(5)
    moved = _moved(strategy, [[0.5, 0, 0, 0]] * 5, gone=[2, 3], max_weight=1.0)
    np.testing.assert_allclose(moved, [0.3, 0, 0, 0], rtol=0, atol=2 * _STEP)
    (released,) = strategy.charged_rounds
    assert released.num_replies == 3
    assert "SecAgg+ added up" in str(strategy.privacy_report(1e-5)["caveats"])


def test_the_noise_is_the_planned_one():
    moved = _moved(_fixed(4, 1.0), np.zeros((4, 100_000)))
    # The sample stddev varies by 0.22 %; 2 % is 9 of these.
    np.testing.assert_allclose(np.std(4 * moved), 1.0, rtol=0.02)


def test_an_average_of_what_is_not_clipped_is_not_released():
    for number in (0, 1):  # Three that weigh nothing: the fourth would move it by S.
        strategy = _fixed(4)
        how = {"num_examples": [1] + 3 * [number], "wrapped": [True] + 3 * [False]}
        moved = _moved(strategy, _ONE_OF_FIVE[:4], **how, max_weight=1.0)
        assert not moved.any()
        assert (strategy.charged_rounds, strategy.rejected_replies) == ((), 3)
    # Nor where the server was to clip: the fourth would move it by 1, and S is 0.001.
    median = tfdp_fl.MedianClipping(noise_multiplier=0.0)
    strategy = DPFedAvg(older_api.strategy("FedAvg", 4), 4, median, secagg_step=1e-6)
    with pytest.raises(ValueError, match=r"mechanism must be .* with SecAgg"):
        _moved(strategy, [[4.0], *3 * [[0.001]]], max_weight=1.0)
    assert strategy.charged_rounds == ()


def test_what_secagg_rounds_is_charged():
    strategy = _fixed(4, 1.0, step=1e-3)
    _moved(strategy, np.zeros((4, 10_000)))
    (released,) = strategy.charged_rounds  # A client adds up to 1 + 100 * 1e-3.
    assert released.charge.noise_multiplier == pytest.approx(1 / 1.1)
    with pytest.raises(ValueError, match=r"secagg_step must be given .* got None"):
        _moved(_fixed(4, 1.0, step=None), np.zeros((4, 10)))


@_BOTH
def test_adaptive_clipping_gets_its_bits(how):
    inner = older_api.strategy("FedAvg", 3)
    strategy = DPFedAvgAdaptive(inner, 3, 2.0, 0.0, secagg_step=1e-6)
    _moved(strategy, [[1.0, 0], [3.0, 0], [4.0, 0]], **how)
    assert strategy.clip_norm == pytest.approx(2 * np.exp(0.2 / 6))


@fm.NEEDS_FLOWER
def test_without_the_mod_in_its_place_nothing_is_released():
    # Around SecAgg+'s it sees messages in which there is no model.
    strategy = _fixed(3)
    with pytest.raises(Exception, match="dpfedavg_clip_norm"):
        _moved(strategy, [[5.0, 0]] * 3, wrapped=False, before=[private_mod])
    assert strategy.charged_rounds == ()
    # Shares of noise are said to be applied.
    zeros = np.zeros((4, 1000))
    for how, released in ((_WITH_MOD, 1), ({"wrapped": False}, 0)):
        strategy = _fixed(4, 1.0, by_server=False)
        moved = _moved(strategy, zeros, **how)
        assert len(strategy.charged_rounds) == released
        assert moved.any() == bool(released)


# Rounds through the older API without it: strategies, a server, no network.


def test_flowers_own_server_ends_on_a_budget_and_silence_releases_nothing():
    import flwr

    def server(strategy):
        strategy.strategy.initial_parameters = _START
        clients = [older_api.client([np.ones(8)]) for _ in range(12)]
        manager = older_api.manager(clients)
        return flwr.server.Server(client_manager=manager, strategy=strategy)

    inner = older_api.strategy("FedAvg", 6)
    budget = {"target_epsilon": 40.0, "target_delta": 1e-5}
    strategy = DPFedAvgFixed(inner, 6, 0.5, num_clients=12, **budget)
    server(strategy).fit(num_rounds=30, timeout=None)
    assert 30.0 < strategy.privacy_epsilon() <= 40.0
    assert len(strategy.charged_rounds) < 30
    assert strategy.stopped_before_round == 30

    strategy = DPFedAvgFixed(inner, 6, 0.5)
    silent = server(strategy)
    for proxy in silent.client_manager().all().values():
        proxy.client = None  # All of them raise.
    silent.fit(num_rounds=3, timeout=None)
    assert strategy.charged_rounds == ()


def test_what_does_not_average_is_refused_by_name():
    import flwr

    for name in ("FedAvg", "FedProx", "FaultTolerantFedAvg", "FedAdam"):
        own = {"proximal_mu": 0.1} if name == "FedProx" else {}
        own |= {"initial_parameters": _START} if name == "FedAdam" else {}
        DPFedAvgFixed(older_api.strategy(name, 4, **own), 4, 1.0)
    for name in ("FedMedian", "FedTrimmedAvg", "Krum", "Bulyan", "QFedAvg"):
        with pytest.raises(ValueError, match=f"one that averages .*{name}"):
            DPFedAvgFixed(older_api.strategy(name, 40), 40, 1.0)

    class Median(flwr.server.strategy.FedMedian):
        def evaluate(self, server_round, parameters):
            return None

    with pytest.raises(ValueError, match="aggregate_fit of FedMedian"):
        DPFedAvgFixed(Median(), 2, 1.0)


def _of_messages(name="FedAvg", m=3):
    from flwr.serverapp import strategy

    logging.getLogger("flwr").setLevel("ERROR")
    options = {"QFedAvg": {"client_learning_rate": 0.1}}.get(name, {})
    if name in ("Krum", "MultiKrum", "Bulyan"):
        options = {"num_malicious_nodes": 0}
    usual = {"fraction_train": 1e-9, "fraction_evaluate": 0.0}
    usual |= {"min_train_nodes": m, "min_available_nodes": m}
    return getattr(strategy, name)(**usual, **options)


def _grid(updates):
    return fm.Grid({10 + i: fm.adds([u], 10**i) for i, u in enumerate(updates)})


@fm.NEEDS_FLOWER
@pytest.mark.parametrize(
    "name", ["FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedProx", "FedYogi"]
)
def test_what_averages_makes_the_same_of_the_mean(name):
    updates = [[1.0, 0, 0], [0, 0.25, 0], [0, 0, -4.0]]
    mean = np.array([0.5, 0.25, -0.5]) / 3
    private = fm.private(strategy=_of_messages(name))
    # The reference is the same strategy by itself, with one client that
    # sends the mean.
    alone, one = _of_messages(name, 1), fm.Grid({10: fm.adds([mean], 1)}, mod=None)
    got = wanted = fm.model(np.ones(3))
    for number in range(1, 4):
        got, _ = fm.a_round(private, _grid(updates), got, number)
        wanted, _ = fm.a_round(alone, one, wanted, number)
    np.testing.assert_allclose(fm.arrays(got)[0], fm.arrays(wanted)[0], rtol=1e-6)
    assert private.rejected_replies == 0


@fm.NEEDS_FLOWER
def test_what_does_not_average_is_refused_and_start_ends_on_the_budget():
    robust = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")
    for name in (*robust, "QFedAvg"):
        with pytest.raises(ValueError, match="must be one that averages"):
            fm.private(strategy=_of_messages(name))
    target = accounting.epsilon(1.0, "fixed_size", 12, 3, 4, 1e-5, "pld")
    budget = {"target_epsilon": target, "target_delta": 1e-5}
    private = fm.private(fm.NOISY, 3, 12, _of_messages(), **budget)
    start = {"initial_arrays": fm.model(np.zeros(2)), "num_rounds": 7}
    result = private.start(grid=_grid([[1.0, 0]] * 12), **start)
    assert len(private.charged_rounds) == 4
    assert result.arrays is not None


@fm.NEEDS_FLOWER
def test_the_mod_works_where_flower_takes_mods():
    from flwr.clientapp import ClientApp

    for of_app, of_train in (([private_mod], []), ([], [private_mod])):
        app = ClientApp(mods=of_app)
        app.train(mods=of_train)(fm.app(fm.adds([np.full(2, 9.0)])))
        config = fm.ConfigRecord({"dpfedavg_clip_norm": 0.5})
        content = fm.RecordDict({"arrays": fm.model(np.zeros(2)), "config": config})
        reply = app(fm.Message(content, 7, "train"), mock.Mock())
        (sent,) = fm.arrays(reply.content["arrays"])
        assert np.linalg.norm(sent) == pytest.approx(0.5)
        assert reply.content["metrics"]["num-examples"] == 1
