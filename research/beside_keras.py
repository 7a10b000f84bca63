"""Times a round of `fit` beside Keras's epoch over the same examples.

python research/beside_keras.py
"""

from __future__ import annotations

import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import numpy as np

import tfdp_fl


def main() -> None:
    """Prints the seconds of three epochs, and of three rounds of 500 clients."""
    clients, _ = tfdp_fl.datasets.load_digits(num_clients=500)
    examples = zip(*map(clients.client, clients.client_ids), strict=True)
    x, y = map(np.concatenate, examples)
    layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.layers.Input((64,)), *layers])
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    fed = tfdp_fl.DPFederatedModel(keras.models.clone_model(model), mechanism, 500)
    for each, data in ((model, (x, y.astype(int))), (fed, (clients,))):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        each.compile(keras.optimizers.SGD(0.2), loss)
        for _ in range(3):
            start = time.perf_counter()
            each.fit(*data, batch_size=10, verbose=0)
            print(type(each).__name__, time.perf_counter() - start, "seconds")


if __name__ == "__main__":
    main()
