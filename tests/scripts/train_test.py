"""The training program: what it leaves, what it refuses, every mechanism."""

from __future__ import annotations

import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest

from tests.scripts import programs
from tfdp_fl import datasets
from tfdp_fl.experiments import settings
from tfdp_fl.experiments.run_directory import Run

_CHANCE = 0.1
# Few rounds where the defaults have many; the rest is --mechanism's own.
_SHORT = {
    "adaptive": ["--rounds=12", "--accountant=rdp"],
    "local": ["--rounds=4"],
    "nbafl": ["--rounds=8"],
    "correlated": ["--rounds=12", "--model=linear"],
}
# A command line, and a word that its one sentence has to contain.
_REFUSED = (
    (["--dataset=cifar"], "dataset"),
    (["--mechanism=fixed", "--clip_norm=0"], "clip_norm"),
    (["--mechanism=fixed", "--noise_multiplier=1,x"], "noise_multiplier"),
    (["--mechanism=adaptive", "--clip_norm=1"], "--clip_norm"),
    (["--mechanism=none", "--target_epsilon=1"], "--target_epsilon"),
    (["--mechanism=correlated", "--sampling=poisson"], "sampling"),
    (["--mechanism=correlated", "--strategy=blt:x"], "strategy"),
    (["--mechanism=nbafl", "--target_delta=1e-3"], "--target_delta"),
    (["--mechanism=local", "--accountant=pld"], "--accountant"),
    (["--noise_site=client"], "noise_site"),
    (["--noise_multiplier=30", "--count_noise_stddev=3"], "noise_multiplier"),
    (["--target_delta=1.5"], "target_delta"),
    (["--target_epsilon=0"], "target_epsilon"),
    (["--clients_per_round=501"], "clients_per_round"),
    (["--clients_per_round=10,20", "--rounds=3"], "--clients_per_round"),
    (["--rounds=0"], "rounds"),
    (["--model=lstm"], "--model=lstm"),
    (["--model=linear", "--hidden_units=3"], "--hidden_units"),
    (["--hidden_units=3,a"], "--hidden_units"),
    (["--dataset=mnist", "--data_path=nowhere.npz"], "--data_path"),
    (["--dataset=shakespeare"], "--data_path"),
    (["--sequence_length=3"], "--sequence_length"),
    (["--mechanism=nbafl", "--server_optimizer=sgd"], "server_optimizer"),
    (["--overwrite", "--resume"], "--overwrite"),
    (["--resume"], "--resume"),
    (["surplus"], "surplus"),
)


class TrainTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = pathlib.Path(temporary.name)
        # absl prints its help in the first run of a process only.
        lines = {"help": ["--helpfull"]}
        lines |= {
            mechanism: [
                f"--mechanism={mechanism}",
                "--seed=1",
                "--validation_freq=2",
                f"--output_dir={cls.folder / mechanism}",
                *short,
            ]
            for mechanism, short in _SHORT.items()
        }
        small = ["--model=linear", "--num_clients=20", "--rounds=4"]
        lines["budget"] = [
            *small,
            "--noise_multiplier=1",
            "--clients_per_round=2x5,2x10",
            "--target_epsilon=1.5",
            "--count_noise_stddev=2",
            "--accountant=pld",
            f"--output_dir={cls.folder / 'budget'}",
        ]
        lines["checkpoints"] = [
            *small,
            "--clients_per_round=20",
            "--seed=3",
            "--checkpoint_every=2",
            f"--output_dir={cls.folder / 'checkpoints'}",
        ]
        again = f"--output_dir={cls.folder / 'checkpoints'}"
        lines["not empty"] = [again]
        lines["resumed with others"] = ["--resume", "--rounds=9", again]
        lines["resumed"] = ["--resume", again]
        others = ["--mechanism=none", "--rounds=1", "--clients_per_round=5"]
        lines["overwritten"] = [*small, *others, "--overwrite", again]
        for number, (line, _) in enumerate(_REFUSED):
            lines[number] = [*line, f"--output_dir={cls.folder / 'refused'}"]
        outcomes = programs.run_all([["train", *line] for line in lines.values()])
        cls.outcomes = dict(zip(lines, outcomes, strict=True))

    def _ended_well(self, name):
        outcome = self.outcomes[name]
        self.assertEqual(outcome.code, 0, msg=outcome.err or outcome.out)
        return outcome

    def test_mechanisms_of_every_guarantee_learn_digits(self):
        for mechanism in _SHORT:
            with self.subTest(mechanism):
                self._ended_well(mechanism)
                result = Run.read(self.folder / mechanism).result
                # 360 test examples: by chance 0.1, with a stddev of 0.016.
                self.assertGreater(result["accuracy"], 3 * _CHANCE)
                self.assertGreater(result["epsilon"], 0)

    def test_every_mechanisms_parameters_are_in_the_help(self):
        text = " ".join(self.outcomes["help"].out.split())
        for mechanism in settings.MECHANISMS:
            for parameter in settings.parameters_of(mechanism):
                self.assertIn(f"--{parameter}:", text)

    def test_it_leaves_its_files_and_says_so(self):
        path = self.folder / "adaptive"
        out = self._ended_well("adaptive").out
        for name in (
            "history.csv",
            "model.keras",
            "privacy.txt",
            "privacy.json",
            "accuracy.png",
            "report.html",
            "config.json",
            "result.json",
        ):
            self.assertIn(name, out)
            self.assertGreater((path / name).stat().st_size, 0, msg=name)
        run = Run.read(path)
        self.assertIn(f"Accuracy: {run.result['accuracy']:.4f}", out)
        self.assertIn("Epsilon:  ", out)
        self.assertIn(str(path), out)
        self.assertEqual(run.history["round"][0], list(range(1, 13)))
        self.assertEqual(run.history["val_accuracy"][0], list(range(2, 13, 2)))
        self.assertAlmostEqual(
            run.history["epsilon"][1][-1], run.result["epsilon"], places=5
        )
        self.assertLessEqual(run.result["epsilon"], 8.0)
        self.assertIn("differentially private", (path / "privacy.txt").read_text())

    def test_the_saved_model_is_the_one_that_was_measured(self):
        path = self.folder / "adaptive"
        self._ended_well("adaptive")
        model = tf.keras.models.load_model(path / "model.keras")
        _, (x, y) = datasets.load_digits(num_clients=500)
        accuracy = np.mean(np.argmax(model.predict(x, verbose=0), -1) == y)
        self.assertAlmostEqual(accuracy, Run.read(path).result["accuracy"], places=5)

    def test_it_stops_before_the_round_that_would_overspend(self):
        self._ended_well("budget")
        run = Run.read(self.folder / "budget")
        self.assertEqual(run.result["stopped"], "budget")
        self.assertLess(run.result["rounds"], 4)
        self.assertGreater(run.result["rounds"], 0)
        self.assertLessEqual(run.result["epsilon"], 1.5)
        self.assertEqual(run.result["accountant"], "pld")
        # On the way epsilon may be a bound that is a little larger.
        self.assertGreaterEqual(
            run.history["epsilon"][1][-1], run.result["epsilon"] - 1e-5
        )

    def test_a_full_directory_is_refused_unless_told_otherwise(self):
        refused = self.outcomes["not empty"]
        self.assertEqual(refused.code, 1)
        self.assertIn("--overwrite or --resume", refused.err)
        others = self.outcomes["resumed with others"]
        self.assertEqual(others.code, 1)
        self.assertIn("--rounds=9", others.err)
        self._ended_well("checkpoints")
        self._ended_well("resumed")
        self._ended_well("overwritten")
        run = Run.read(self.folder / "checkpoints")
        self.assertEqual(run.history["round"][0], [1])
        self.assertFalse((run.path / "checkpoint").exists())

    def test_a_resumed_run_gives_what_it_gave(self):
        first, again = (
            [
                line.split(", after")[0]
                for line in self._ended_well(name).out.splitlines()
                if line.startswith(("Accuracy", "Epsilon"))
            ]
            for name in ("checkpoints", "resumed")
        )
        self.assertLen(first, 2)
        self.assertEqual(first, again)

    def test_bad_flags_are_refused_before_anything_starts(self):
        for number, (line, word) in enumerate(_REFUSED):
            with self.subTest(" ".join(line)):
                outcome = self.outcomes[number]
                self.assertEqual(outcome.code, 1)
                self.assertIn(word, outcome.err)
                self.assertNotIn("Traceback", outcome.err)
                self.assertNotIn("Round 1", outcome.out)
                if "FATAL" not in outcome.err:  # That is absl's own way.
                    self.assertLen(outcome.err.splitlines(), 1)
        self.assertFalse((self.folder / "refused").exists())
