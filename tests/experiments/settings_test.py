"""Settings: defaults that go together, schedules, refusals."""

from __future__ import annotations

import json
import pathlib
import tempfile

from absl.testing import parameterized

from tfdp_fl.experiments import settings as settings_lib
from tfdp_fl.experiments.settings import Settings


class SettingsTest(parameterized.TestCase):
    @parameterized.product(
        mechanism=[*settings_lib.MECHANISMS],
        dataset=["digits", "mnist", "shakespeare"],
    )
    def test_defaults_go_together_for_every_mechanism(self, mechanism, dataset):
        path = __file__ if dataset == "shakespeare" else None
        resolved = Settings(
            dataset=dataset, mechanism=mechanism, data_path=path
        ).resolved()
        for name in ("model", "clients_per_round", "rounds", "batch_size"):
            self.assertIsNotNone(getattr(resolved, name), msg=name)
        if mechanism == "none":
            self.assertIsNone(resolved.target_epsilon)
        else:
            self.assertGreater(resolved.target_epsilon, 0)
        self.assertEqual(resolved, resolved.resolved())

    def test_what_is_given_is_kept(self):
        given = Settings(mechanism="local", model="mlp", rounds=7, target_epsilon=3.0)
        resolved = given.resolved()
        for name in ("model", "rounds", "target_epsilon"):
            self.assertEqual(getattr(resolved, name), getattr(given, name))
        self.assertEqual(resolved.units(), (128,))

    def test_usual_units_belong_to_the_usual_model(self):
        self.assertIsNone(Settings(dataset="mnist", model="cnn").resolved().units())
        self.assertEqual(Settings(dataset="mnist").resolved().units(), (600, 100))

    @parameterized.parameters(
        ({}, "sgd", 0.9),
        ({"server_optimizer": "none"}, "none", 0.0),
        ({"mechanism": "fixed"}, "none", 0.0),
        ({"model": "linear"}, "none", 0.0),
        ({"dataset": "digits"}, "none", 0.0),
    )
    def test_what_was_tuned_together(self, values, optimizer, momentum):
        resolved = Settings(**{"dataset": "mnist", **values}).resolved()
        tuned_alike = values in ({}, {"server_optimizer": "none"})
        self.assertEqual(resolved.rounds, 100 if tuned_alike else 60)
        self.assertEqual(resolved.server_optimizer, optimizer)
        self.assertEqual(resolved.server_momentum, momentum)

    @parameterized.parameters(
        ({"server_schedule": "linear"}, "--server_schedule is for"),
        ({"server_learning_rate": 0.1}, "--server_learning_rate is for"),
        ({"server_momentum": 0.9}, "--server_momentum is for"),
        ({"server_ema": 0.9}, "--server_ema is for"),
        (
            {"server_ema": 1.0, "server_optimizer": "sgd"},
            "--server_ema must be at least 0 and less",
        ),
    )
    def test_a_servers_settings_without_its_optimizer(self, values, words):
        with self.assertRaisesRegex(ValueError, words):
            Settings(dataset="mnist", **values).resolved()

    def test_given_noise_is_not_calibrated(self):
        resolved = Settings(noise_multiplier="1.5").resolved()
        self.assertIsNone(resolved.target_epsilon)
        self.assertEqual(resolved.schedule("noise_multiplier"), 1.5)

    @parameterized.parameters(
        ("100", 100.0),
        (100, 100),
        ("10,20,30", (10.0, 20.0, 30.0)),
        ("2x10,1x30", (10.0, 10.0, 30.0)),
        ("2x1.5e1, 7", (15.0, 15.0, 7.0)),
        ("3x5", (5.0, 5.0, 5.0)),
    )
    def test_schedules(self, text, expected):
        read = Settings(clients_per_round=text, rounds=3).schedule("clients_per_round")
        self.assertEqual(read, expected)

    @parameterized.parameters("", "ten", "1,,2", "x5", "-x3", "1 2")
    def test_bad_schedule_is_named(self, text):
        with self.assertRaisesRegex(ValueError, "--clients_per_round"):
            Settings(clients_per_round=text, rounds=2).schedule("clients_per_round")

    def test_all_is_the_population(self):
        resolved = Settings(clients_per_round="all").resolved()
        self.assertEqual(resolved.for_population(37).clients_per_round, 37)

    def test_delta(self):
        self.assertAlmostEqual(Settings().delta(1000), 1000**-1.1)
        self.assertEqual(Settings(target_delta=1e-4).delta(1000), 1e-4)
        nbafl = Settings(mechanism="nbafl", constant=3.0)
        self.assertAlmostEqual(nbafl.delta(1000), 0.0139, places=4)

    @parameterized.parameters("exact", "4.5", 4.5, None)
    def test_median(self, value):
        options = Settings(
            mechanism="median", median_noise_multiplier=value
        ).mechanism_options()
        expected = {
            "exact": {"median_noise_multiplier": None},
            None: {},
        }.get(value, {"median_noise_multiplier": 4.5})
        self.assertEqual(options, expected)

    @parameterized.parameters(
        ({"mechanism": "magic"}, "--mechanism"),
        ({"rounds": 2.5}, "--rounds"),
        ({"rounds": -1}, "--rounds"),
        ({"clip_norm": "wide", "mechanism": "fixed"}, "--clip_norm"),
        ({"shuffle": "yes"}, "--shuffle"),
        ({"iid": True, "shards_per_client": 3}, "--iid"),
        ({"median_noise_multiplier": "some", "mechanism": "median"}, "exact"),
    )
    def test_what_a_flag_would_have_refused(self, values, word):
        with self.assertRaisesRegex((TypeError, ValueError), word):
            Settings(**values).resolved()

    def test_json_survives(self):
        settings = Settings(mechanism="local", hidden_units="3,4", model="mlp")
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "config.json"

            path.write_text(json.dumps(settings.to_dict()))
            self.assertEqual(Settings.read(path), settings)
        with self.assertRaisesRegex(ValueError, "setting must be one of"):
            Settings.from_dict({"learning_rate": 1})
