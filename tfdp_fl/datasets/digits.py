"""scikit-learn's handwritten digits: small, and installed with it."""

from __future__ import annotations

import math

import numpy as np

from tfdp_fl import _optional, _validate
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.partitioning import (
    check_held_out,
    partition,
    stratified_split,
)


def load_digits(
    num_clients: int = 100,
    examples_per_client: int = 20,
    shards_per_client: int = 2,
    iid: bool = True,
    test_fraction: float = 0.2,
    validation_examples: int = 0,
    seed: int = 0,
) -> tuple[FederatedDataset, tuple[np.ndarray, np.ndarray]]:
    """Loads the 1797 handwritten digits of 8x8 pixels in scikit-learn.

    One copy of the training examples (1437 by default) is held. More than
    that many places in clients are filled by repeating examples, by index:
    500 clients of 20 examples hold each about seven times. Remember that the
    guarantee is for a client: who repeats examples hides a client, not them.

    Args:
      num_clients: How many clients there are.
      examples_per_client: How many examples each holds, exactly.
      shards_per_client: Without `iid`: clients hold that many label shards,
        see `tfdp_fl.datasets.partition`.
      iid: Whether clients hold random examples (the default: a quick start)
        or label shards.
      test_fraction: The share of the examples that is the test set, always
        the same one, each digit in proportion.
      validation_examples: If not 0, that many training examples, always the
        same ones, are given to no client and returned in place of the test
        set, to choose hyperparameters by.
      seed: Which client gets what.

    Returns:
      The clients, and `(x_test, y_test)`: x float32[n, 64] from 0 to 1, y
      int32[n].

    Raises:
      ImportError: If scikit-learn is not installed.
      TypeError, ValueError: If an argument is out of its range.
    """
    config = {"loader": "digits", **locals()}
    with _optional.needed("scikit-learn", "load_digits"):
        from sklearn import datasets

    test_fraction = _validate.inside_unit_interval(test_fraction=test_fraction)
    digits = datasets.load_digits()
    x = (digits.data / 16).astype(np.float32)
    y = digits.target.astype(np.int32)
    train, test = stratified_split(y, math.ceil(test_fraction * len(y)))
    held_out = check_held_out(len(train), validation_examples=validation_examples)
    if held_out:
        kept, validation = stratified_split(y[train], held_out)
        train, test = train[kept], train[validation]
    indices = partition(
        y[train], num_clients, examples_per_client, shards_per_client, iid, seed
    )
    clients = FederatedDataset.from_indices(x[train], y[train], indices)
    return clients.with_config(config), (x[test], y[test])
