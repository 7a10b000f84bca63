r"""Lets a model that was trained on Shakespeare write.

    python scripts/train.py --dataset=shakespeare --data_path=shakespeare.txt \
        --output_dir=runs/shakespeare
    python scripts/sample_text.py --prompt=ROMEO: runs/shakespeare

For each run directory of train.py or sweep.py: what was trained and the
epsilon it cost, then the text. Sampling costs no privacy.
"""

from __future__ import annotations

import os
import pathlib
import sys
import zipfile
from collections.abc import Sequence

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from absl import app, flags

from tfdp_fl import datasets
from tfdp_fl.experiments import Run, models, plots, run_directory, text

_PROMPT = flags.DEFINE_string("prompt", "The ", "What the text begins with.")
_LENGTH = flags.DEFINE_integer("length", 400, "How many characters to add.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.5, "Low: likely and dull; 1: as learned."
)
_SEED = flags.DEFINE_integer("seed", None, "For the same text again.")


def main(argv: Sequence[str]) -> None:
    try:
        if len(argv) < 2:
            raise ValueError("name at least one directory of a run.")
        for path in map(pathlib.Path, argv[1:]):
            run = Run.read(path)
            if run.settings.model != "lstm":
                raise ValueError(f"{path} holds no character model.")
            model = _model(run)
            written = text.sample_text(
                model,
                _PROMPT.value,
                _LENGTH.value,
                temperature=_TEMPERATURE.value,
                context=run.settings.sequence_length,
                seed=_SEED.value,
            )
            print(f"== {plots.title_of(run)}\n{written}\n")
    except (OSError, ValueError) as error:
        sys.exit(f"sample_text.py: {error}")


def _model(run: Run) -> tf.keras.Model:
    """Returns a run's model: built here, with the weights of its file.

    A file of Keras's can hold code and names of functions, which `load_model`
    would run; of this one nothing but numbers is read.
    """
    model = models.lstm(
        len(datasets.shakespeare_vocabulary()),
        **{"hidden_units": units} if (units := run.settings.units()) else {},
    )
    path = run.path / run_directory.MODEL
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no model that train.py saved.")
    model.load_weights(path)
    return model


def run() -> None:
    """Entry point of the program."""
    app.run(main)


if __name__ == "__main__":
    run()
