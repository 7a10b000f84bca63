"""The message API of the real Flower: its strategies, mods and ClientApps."""

import logging
from unittest import mock

import numpy as np
import pytest

from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.flower import private_mod

pytestmark = fm.NEEDS_FLOWER


def _strategy(name="FedAvg", m=3):
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


@pytest.mark.parametrize(
    "name", ["FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedProx", "FedYogi"]
)
def test_what_averages_makes_the_same_of_the_mean(name):
    updates = [[1.0, 0, 0], [0, 0.25, 0], [0, 0, -4.0]]
    mean = np.array([0.5, 0.25, -0.5]) / 3
    private = fm.private(strategy=_strategy(name))
    # The reference is the same strategy by itself, with one client that
    # sends the mean.
    alone, one = _strategy(name, 1), fm.Grid({10: fm.adds([mean], 1)}, mod=None)
    got = wanted = fm.model(np.ones(3))
    for number in range(1, 4):
        got, _ = fm.a_round(private, _grid(updates), got, number)
        wanted, _ = fm.a_round(alone, one, wanted, number)
    np.testing.assert_allclose(fm.arrays(got)[0], fm.arrays(wanted)[0], rtol=1e-6)
    assert private.rejected_replies == 0


def test_what_does_not_average_is_refused_and_start_ends_on_the_budget():
    robust = ("FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan")
    for name in (*robust, "QFedAvg"):
        with pytest.raises(ValueError, match="must be one that averages"):
            fm.private(strategy=_strategy(name))
    target = accounting.epsilon(1.0, "fixed_size", 12, 3, 4, 1e-5)
    budget = {"target_epsilon": target, "target_delta": 1e-5}
    private = fm.private(fm.NOISY, 3, 12, _strategy(), **budget)
    start = {"initial_arrays": fm.model(np.zeros(2)), "num_rounds": 7}
    result = private.start(grid=_grid([[1.0, 0]] * 12), **start)
    assert len(private.released_rounds) == 4
    assert result.arrays is not None


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
