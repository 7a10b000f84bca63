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
from collections.abc import Sequence

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf
from absl import app, flags

from tfdp_fl.experiments import Run, plots, run_directory, text

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
            model = tf.keras.models.load_model(path / run_directory.MODEL)
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


def run() -> None:
    """Entry point of the program."""
    app.run(main)


if __name__ == "__main__":
    run()
