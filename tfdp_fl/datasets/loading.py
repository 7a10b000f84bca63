"""The same dataset again, on another machine, from a few words about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfdp_fl import _validate
from tfdp_fl.datasets.digits import load_digits
from tfdp_fl.datasets.emnist import load_emnist
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.mnist import load_mnist
from tfdp_fl.datasets.shakespeare import load_shakespeare


def _take(dataset: Mapping[str, Any], positions: Any) -> FederatedDataset:
    return load_from_config(dataset).take(positions)


_LOADERS: dict[str, Callable[..., FederatedDataset]] = {
    "digits": lambda **arguments: load_digits(**arguments)[0],
    "emnist": lambda **arguments: load_emnist(**arguments)[0],
    "mnist": lambda **arguments: load_mnist(**arguments)[0],
    "npz": FederatedDataset.from_npz,
    "shakespeare": lambda **arguments: load_shakespeare(**arguments)[0],
    "take": _take,
}


def load_from_config(config: Mapping[str, Any]) -> FederatedDataset:
    """Loads the dataset that a config describes, client by client the same.

    Args:
      config: What `FederatedDataset.config` gave, which survives JSON: the
        name of a loader under `"loader"`, and its arguments. Paths in it are
        absolute; the process that loads must see the same files there.

    Raises:
      TypeError, ValueError: If this is no such config.
      OSError: If its files are not there.
    """
    _validate.instance_of(Mapping, config=config)
    if "loader" not in config:
        raise ValueError(
            f"config must name a loader under 'loader', got {dict(config)!r}."
        )
    name = _validate.one_of(sorted(_LOADERS), loader=config["loader"])
    arguments = {key: config[key] for key in config if key != "loader"}
    return _LOADERS[name](**arguments)
