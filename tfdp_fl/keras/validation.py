"""What keeps a model from being trained here, before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import datasets, keras_versions
from tfdp_fl.engine import CohortEngine, LocalTraining, trainer
from tfdp_fl.mechanisms import Deployment, NoPrivacy

# Clients whose features are looked at.
_CLIENTS_READ = 64


def validate(
    model: Any, *, clients: Any = None, loss: Any = None, strict: bool = False
) -> list[str]:
    """Returns why a model cannot be trained or protected, if it cannot.

    In the manner of Opacus's `ModuleValidator.validate`. Nothing is trained.
    With clients and a loss it finds all that `fit` would refuse before its
    first round: also a state that would pass from one client to the next, and
    labels that the model has no class for.

    Args:
      model: A Keras model.
      clients: Clients' data, as `fit` takes it; None: the model alone.
      loss: As in Keras's `compile`; with clients only.
      strict: Whether to raise instead of returning problems.

    Returns:
      A sentence for each problem; empty if none was found.

    Raises:
      ValueError: `strict`, and there are problems, which it lists; or one of
        clients and loss without the other.
    """
    if (clients is None) != (loss is None):
        raise ValueError(
            "clients and loss must be given together, got "
            f"{'clients' if loss is None else 'loss'} alone."
        )
    problems = _problems(model)
    if not problems and clients is not None:
        problems = _problems_in_training(model, clients, loss)
    if strict and problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        raise ValueError(f"model cannot be trained as it is:{listed}")
    return problems


def _problems(model: Any) -> list[str]:
    if not isinstance(model, tf.keras.Model):
        return [
            f"model must be a {tf.keras.Model.__module__.split('.')[0]} Model, "
            f"got {type(model).__name__}."
        ]
    if not model.built:
        return [
            f"{model.name} has no weights yet: give its first layer an input "
            "shape, or call it on a batch."
        ]
    problems = []
    if not model.trainable_variables:
        problems.append(
            f"{model.name} has no trainable variables: set trainable=True on "
            "the layers that are to learn."
        )
    for check in (
        keras_versions.check_installed,
        lambda: trainer.check_model(model),
    ):
        problems += _raised_by(check)
    return problems


def _problems_in_training(model: Any, clients: Any, loss: Any) -> list[str]:
    def check() -> None:
        dataset = datasets.as_federated(clients)
        _check_numbers(dataset)
        engine = CohortEngine(
            model=model,
            training=LocalTraining(optimizer=tf.keras.optimizers.SGD(0.0), loss=loss),
            mechanism=NoPrivacy(),
            deployment=Deployment(clients_per_round=1),
            element_spec=dataset.element_spec,
            num_replicas=1,
        )
        engine.check_labels(dataset)

    return _raised_by(check)


def _check_numbers(dataset: datasets.FederatedDataset) -> None:
    """Raises ValueError where features of a few clients are no numbers.

    Training replaces the update of such a client by zero, without a word.
    """
    places = np.linspace(0, dataset.num_clients - 1, _CLIENTS_READ).astype(np.int64)
    for client in dataset.read_clients(np.unique(places)):
        if isinstance(client, datasets.ClientFailure):
            continue
        for index, leaf in enumerate(tf.nest.flatten(client.x)):
            if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
                continue
            rows = leaf.reshape(len(leaf), -1)
            columns = np.flatnonzero(~np.isfinite(rows).all(axis=0))
            raise ValueError(
                "clients must have finite features, got NaN or Inf in column(s) "
                f"{', '.join(map(str, columns[:10]))} of input {index}. The update of "
                "a client with one is replaced by zero: fill them in, or leave those "
                "rows out."
            )


def _raised_by(check: Callable[[], Any]) -> list[str]:
    try:
        check()
    except Exception as error:  # Whatever a layer's own code can raise.
        return [f"{type(error).__name__}: {error}"]
    return []
