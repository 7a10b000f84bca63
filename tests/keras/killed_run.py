"""A training run in a process of its own, to be killed."""

from __future__ import annotations

import os
import pathlib

import tfdp_fl
from tests.keras import toy
from tfdp_fl.keras import callbacks

ROUNDS = 60
DELTA = 1e-3
WITNESS = "witness.txt"
FINAL = "final.weights.h5"


class _Witness(callbacks.FederatedCallback):
    """Writes down what an outsider has seen, as soon as it can be seen."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def on_round_released(self, round_index, logs):
        del logs
        epsilon = self.federated_model.epsilon(DELTA)
        os.write(self._file, f"{round_index} {epsilon!r}\n".encode())


def has_checkpoint(directory: pathlib.Path) -> bool:
    """Returns True if there is something to resume from."""
    return any(directory.glob("round-*.npz"))


@toy.same_draws_when_resumed()
def run(directory: str, mechanism: str) -> None:
    """Trains to the end, from where an earlier process was killed."""
    path = pathlib.Path(directory)
    if mechanism == "local":
        made = tfdp_fl.LocalDP(clip_norm=0.5, epsilon=8.0, delta=DELTA)
    else:
        made = tfdp_fl.AdaptiveClipping(noise_multiplier=0.8)
    fed = toy.federated(made, sampling="shuffled")
    fed.fit(
        toy.clients(),
        rounds=ROUNDS,
        batch_size=10,
        seed=3,
        verbose=0,
        # The witness first: a kill between the two must not leave a round that
        # is saved, and so not run again, and that nobody has written down.
        callbacks=[
            _Witness(path / WITNESS),
            callbacks.RoundCheckpoint(path, every=3, delta=DELTA),
        ],
        resume_from=path if has_checkpoint(path) else None,
    )
    fed.model.save_weights(path / FINAL)
