"""The message API of the real Flower: its strategies, mods and ClientApps."""

from __future__ import annotations

import logging
import unittest
import unittest.mock

import numpy as np
from absl.testing import parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting
from tfdp_fl.flower import PrivateStrategy, private_mod

_FIXED = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0)
_NOISY = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
_AVERAGING = (
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedProx",
    "FedYogi",
)


def _strategy(name="FedAvg", m=3, **options):
    from flwr.serverapp import strategy

    logging.getLogger("flwr").setLevel("ERROR")
    return getattr(strategy, name)(
        **{
            "fraction_train": 1e-9,
            "fraction_evaluate": 0.0,
            "min_train_nodes": m,
            "min_available_nodes": m,
            **options,
        }
    )


def _grid(updates, change=None, **options):
    return fm.Grid(
        {10 + i: fm.adds([u], 10**i, loss=float(i)) for i, u in enumerate(updates)},
        change,
        **options,
    )


@unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
class StrategiesTest(parameterized.TestCase):
    @parameterized.parameters(*_AVERAGING)
    def test_what_averages_makes_the_same_of_the_mean(self, name):
        updates = [[1.0, 0, 0], [0, 0.25, 0], [0, 0, -4.0]]
        mean = np.array([0.5, 0.25, -0.5]) / 3
        private = PrivateStrategy(
            _strategy(name), _FIXED, num_clients=3, clients_per_round=3
        )
        # The reference is the same strategy by itself, with one client that
        # sends the mean.
        alone = _strategy(name, 1)
        got = wanted = fm.model(np.ones(3))
        for number in range(1, 4):
            got, _ = fm.a_round(private, _grid(updates), got, number)
            told = list(
                alone.configure_train(number, wanted, fm.ConfigRecord(), _grid([mean]))
            )
            reply = fm.app(fm.adds([mean]))(told[0], None)
            wanted, _ = alone.aggregate_train(number, [reply])
        np.testing.assert_allclose(fm.arrays(got)[0], fm.arrays(wanted)[0], rtol=1e-6)
        self.assertEqual(private.rejected_replies, 0)

    @parameterized.parameters(
        "FedMedian", "FedTrimmedAvg", "Krum", "MultiKrum", "Bulyan", "QFedAvg"
    )
    def test_what_does_not_is_refused_by_name(self, name):
        options = {}
        if name in ("Krum", "MultiKrum", "Bulyan"):
            options = {"num_malicious_nodes": 0}
        if name == "QFedAvg":
            options = {"client_learning_rate": 0.1}
        with self.assertRaisesRegex(ValueError, "must be one that averages"):
            PrivateStrategy(
                _strategy(name, **options), _FIXED, num_clients=3, clients_per_round=3
            )

    def test_start_ends_on_the_budget_with_its_result(self):
        private = PrivateStrategy(
            _strategy(),
            _NOISY,
            num_clients=12,
            clients_per_round=3,
            target_epsilon=accounting.epsilon(1.0, "fixed_size", 12, 3, 4, 1e-5),
            target_delta=1e-5,
        )
        result = private.start(
            grid=_grid([[1.0, 0]] * 12),
            initial_arrays=fm.model(np.zeros(2)),
            num_rounds=7,
        )
        self.assertLen(private.released_rounds, 4)
        self.assertIsNotNone(result.arrays)


@unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
class ClientAppTest(parameterized.TestCase):
    def _message(self):
        content = fm.RecordDict(
            {
                "arrays": fm.model(np.zeros(2)),
                "config": fm.ConfigRecord({"dpfedavg_clip_norm": 0.5}),
            }
        )
        return fm.Message(content, 7, "train")

    @parameterized.parameters("app", "function")
    def test_the_mod_works_where_flower_takes_mods(self, where):
        from flwr.clientapp import ClientApp

        app = ClientApp(mods=[private_mod] if where == "app" else [])
        train = fm.app(fm.adds([np.full(2, 9.0)]))
        app.train(mods=[private_mod] if where == "function" else [])(train)
        context = unittest.mock.Mock()
        reply = app(self._message(), context)
        np.testing.assert_allclose(
            np.linalg.norm(fm.arrays(reply.content["arrays"])[0]), 0.5
        )
        self.assertEqual(reply.content["metrics"]["num-examples"], 1)
