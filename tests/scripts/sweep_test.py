"""The program that runs sweeps."""

from __future__ import annotations

import json
import pathlib
import tempfile

from absl.testing import absltest

from tests.scripts import programs

_CONFIGS = sorted((programs.ROOT / "scripts" / "configs").glob("*.json"))
_CONFIG = {
    "base": {
        "dataset": "digits",
        "num_clients": 20,
        "clients_per_round": 20,
        "model": "linear",
    },
    "grid": {"mechanism": ["none", "fixed"]},
    "seeds": [0],
}


class SweepTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = folder = pathlib.Path(temporary.name)
        config = folder / "config.json"
        config.write_text(json.dumps(_CONFIG))
        bad = folder / "bad.json"
        bad.write_text(json.dumps({"grid": {"clip_norm": [1.0]}}))
        runs = folder / "runs"
        sweep = ["sweep", f"--config={config}", f"--output_dir={runs}"]
        lines = {
            "dry": [*sweep, "--dry_run"],
            "sweep": [*sweep, "--set=rounds=2"],
            "again": [*sweep, "--set=rounds=2"],
            "no config": ["sweep"],
            "bad config": ["sweep", f"--config={bad}"],
            "bad set": [*sweep, "--set=rounds"],
            "other rounds": [*sweep, "--set=rounds=3"],
        }
        for config in _CONFIGS:
            lines[config.stem] = [
                "sweep",
                "--dry_run",
                f"--config={config}",
                # Wherever the data lies; it is not read.
                f"--set=data_path={config}",
            ]
            if json.loads(config.read_text())["base"]["dataset"] == "digits":
                lines[config.stem].pop()
        outcomes = programs.run_all(list(lines.values()))
        cls.outcomes = dict(zip(lines, outcomes, strict=True))

    def test_a_dry_run_lists_the_runs(self):
        outcome = self.outcomes["dry"]
        self.assertEqual(outcome.code, 0, msg=outcome.err)
        self.assertEqual(
            outcome.out.splitlines(),
            [f"mechanism={mechanism}/seed=0" for mechanism in ("none", "fixed")],
        )

    def test_a_sweep_runs_once(self):
        first, again = self.outcomes["sweep"], self.outcomes["again"]
        self.assertEqual((first.code, again.code), (0, 0), msg=first.err)
        self.assertEqual(first.out.count("accuracy 0."), 2)
        self.assertEqual(again.out.count("there already"), 2)
        rows = (self.folder / "runs" / "runs.csv").read_text().splitlines()
        self.assertLen(rows, 3)

    def test_refusals_are_one_sentence(self):
        for name, word in (
            ("no config", "--config"),
            ("bad config", "--clip_norm"),
            ("bad set", "--set"),
            ("other rounds", "rounds=2"),
        ):
            with self.subTest(name):
                outcome = self.outcomes[name]
                self.assertEqual(outcome.code, 1)
                self.assertIn(word, outcome.err)
                self.assertLen(outcome.err.splitlines(), 1)

    def test_every_configuration_is_one(self):
        self.assertNotEmpty(_CONFIGS)
        for config in _CONFIGS:
            with self.subTest(config.stem):
                outcome = self.outcomes[config.stem]
                self.assertEqual(outcome.code, 0, msg=outcome.err)
                self.assertNotEmpty(outcome.out.splitlines())
