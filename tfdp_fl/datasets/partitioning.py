"""Which client holds which examples, where a data set has no clients."""

from __future__ import annotations

import numpy as np

from tfdp_fl import _validate


def partition(
    labels: np.ndarray,
    num_clients: int,
    examples_per_client: int,
    shards_per_client: int = 2,
    iid: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Deals examples to clients of equal size, by label shards or at random.

    By shards, as McMahan et al. 2017 (arXiv:1602.05629, section 3) and Geyer
    et al. 2017 (arXiv:1712.07557, section 4): the examples are sorted by
    label and cut into shards of equal size, and a client gets
    `shards_per_client` of them at random, so that most clients know that many
    labels at most. Where there are more clients than one pass over the
    examples serves, examples are repeated ("for K in {1000, 10000}, data
    points are repeated"): in every pass, examples of the same label are
    shuffled before the shards are cut, so that clients of different passes
    differ. No client holds an example twice; of every pass, what does not
    fill a client is left out at random.

    Args:
      labels: int[n], the examples' labels.
      num_clients: K.
      examples_per_client: How many examples each client gets, exactly.
      shards_per_client: How many shards they come from; divides
        `examples_per_client`. Not used if `iid`.
      iid: Whether clients get random examples instead.
      seed: Who gets what.

    Returns:
      int32[num_clients, examples_per_client], rows of `labels`, in random
      order within a client.

    Raises:
      TypeError, ValueError: If an argument is not as said, or if one client
        needs more examples than there are.
    """
    num_clients = _validate.positive_integer(num_clients=num_clients)
    size = _validate.positive_integer(examples_per_client=examples_per_client)
    shards = _validate.positive_integer(shards_per_client=shards_per_client)
    _validate.instance_of(bool, iid=iid)
    rng = np.random.default_rng(_validate.non_negative_integer(seed=seed))
    if size > len(labels):
        raise ValueError(
            f"examples_per_client must be at most {len(labels)}, the number of "
            f"training examples, got {size}."
        )
    if iid:
        shards = 1
    if size % shards:
        raise ValueError(
            "examples_per_client must be a multiple of shards_per_client "
            f"({shards}), got {size}."
        )
    shard_size = size // shards
    shards_in_pass = len(labels) // shard_size
    clients_in_pass = shards_in_pass // shards
    clients = np.empty((num_clients, size), np.int32)
    for first in range(0, num_clients, clients_in_pass):
        rows = rng.permutation(len(labels))[: shards_in_pass * shard_size]
        if not iid:
            rows = rows[np.argsort(labels[rows], kind="stable")]
        wanted = min(clients_in_pass, num_clients - first)
        dealt = rng.permutation(shards_in_pass)[: wanted * shards]
        clients[first : first + wanted] = rows.reshape(-1, shard_size)[dealt].reshape(
            wanted, size
        )
    # Local training takes batches in order: one label after the other would
    # be another experiment.
    return rng.permuted(clients, axis=1, out=clients)


def stratified_split(
    labels: np.ndarray, held_out: int
) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples in two, each label in proportion; always the same way.

    Args:
      labels: int[n].
      held_out: Size of the second part, less than n.

    Returns:
      int64[n - held_out] and int64[held_out], the rows of either part.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced in the order of labels: proportional, up to one example.
    places = (np.arange(held_out) + 0.5) * len(labels) / max(held_out, 1)
    chosen = places.astype(np.int64)
    return np.sort(np.delete(order, chosen)), np.sort(order[chosen])


def check_held_out(available: int, **checked: int) -> int:
    """Returns a number of examples to hold out, or raises ValueError."""
    ((name, value),) = checked.items()
    value = _validate.non_negative_integer(**checked)
    if value >= available:
        raise ValueError(
            f"{name} must be less than the {available} training examples, got {value}."
        )
    return value
