"""The program that lets a trained model write."""

from __future__ import annotations

import json
import os
import pathlib
import tempfile

import tensorflow as tf
from absl.testing import absltest

from tests.scripts import programs

_PLAY = """\
ROMEO:
But, soft! what light through yonder window breaks?

JULIET:
O Romeo, Romeo! wherefore art thou Romeo?
"""


def _save_code(path: pathlib.Path, ran: pathlib.Path, kind: str) -> None:
    """Saves a model with a layer that, once loaded, leaves a folder behind."""
    name = str(ran)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((3,)),
            tf.keras.layers.Lambda(lambda x: (os.mkdir(name), x)[1]),
            tf.keras.layers.Dense(1),
        ]
    )
    if ran.exists():  # It ran as it was built.
        ran.rmdir()
    saved = path.with_suffix(".h5" if kind == "hdf5" else ".keras")
    model.save(saved)
    saved.rename(path)


class SampleTextTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        folder = pathlib.Path(temporary.name)
        (folder / "play.txt").write_text(_PLAY)
        base = {
            "mechanism": "none",
            "clients_per_round": 1,
            "sampling": "fixed_size",
            "rounds": 1,
            "validation_freq": 1,
        }
        shakespeare = {
            "dataset": "shakespeare",
            "data_path": str(folder / "play.txt"),
            "hidden_units": "4",
            "sequence_length": 5,
        }
        digits = {"dataset": "digits", "num_clients": 4, "model": "linear"}
        sweeps = []
        for name, data in (("play", shakespeare), ("digits", digits)):
            config = folder / f"{name}.json"
            config.write_text(json.dumps({"base": {**base, **data}}))
            sweeps.append(
                [
                    "sweep",
                    f"--config={config}",
                    f"--output_dir={folder / name}",
                ]
            )
        play, digits = (
            str(folder / name / "base" / "seed=None") for name in ("play", "digits")
        )
        lines = {
            "play": sweeps[0],
            "digits": sweeps[1],
            "sample": [
                "sample_text",
                "--prompt=Romeo",
                "--length=12",
                "--seed=1",
                play,
                play,
            ],
            "nothing": ["sample_text"],
            "no run": ["sample_text", str(folder)],
            "no text": ["sample_text", digits],
            "bad prompt": ["sample_text", "--prompt=", play],
        }
        cls.ran = folder / "ran"
        for kind in ("hdf5", "keras"):
            evil = folder / f"evil_{kind}"
            evil.mkdir()
            settings = {**base, **shakespeare, "model": "lstm"}
            (evil / "config.json").write_text(json.dumps(settings))
            _save_code(evil / "model.keras", cls.ran, kind)
            lines[f"evil {kind}"] = ["sample_text", str(evil)]
        outcomes = programs.run_all(list(lines.values()))
        cls.outcomes = dict(zip(lines, outcomes, strict=True))

    def test_the_model_goes_on_with_the_prompt(self):
        outcome = self.outcomes["sample"]
        self.assertEqual(outcome.code, 0, msg=outcome.err)
        head = "== shakespeare, lstm, none – accuracy"
        self.assertStartsWith(outcome.out, head)
        first, second = outcome.out.split(head)[1:]
        # The same seed, the same text.
        self.assertEqual(first.strip(), second.strip())
        text = first.partition("\n")[2]
        self.assertStartsWith(text, "Romeo")
        self.assertLen(text, len("Romeo") + 12 + 2)

    def test_refusals_are_one_sentence(self):
        for name, word in (
            ("nothing", "directory"),
            ("no run", "holds no run"),
            ("no text", "no character model"),
            ("bad prompt", "prompt"),
            ("evil hdf5", "no model that train.py saved"),
        ):
            with self.subTest(name):
                outcome = self.outcomes[name]
                self.assertEqual(outcome.code, 1)
                self.assertIn(word, outcome.err)
                self.assertLen(outcome.err.splitlines(), 1)

    def test_code_in_a_file_is_not_run(self):
        for kind in ("hdf5", "keras"):
            self.assertNotEqual(self.outcomes[f"evil {kind}"].code, 0)
        self.assertFalse(self.ran.exists())


if __name__ == "__main__":
    absltest.main()
