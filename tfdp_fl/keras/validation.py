"""What keeps a model from being trained here, before any work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import datasets, keras_versions
from tfdp_fl.datasets import FederatedDataset, nests
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
        problems = _raised_by(lambda: _check_training(model, clients, loss))
    if strict and problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        raise ValueError(f"model cannot be trained as it is:{listed}")
    return problems


def _problems(model: Any) -> list[str]:
    if not isinstance(model, tf.keras.Model):
        return [f"model must be a Keras Model, got {type(model).__name__}."]
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
    problems += _raised_by(keras_versions.check_installed)
    return problems + _raised_by(lambda: trainer.check_model(model))


def _check_training(model: Any, clients: Any, loss: Any) -> None:
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


def _check_numbers(dataset: FederatedDataset) -> None:
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


def check_features(
    model: tf.keras.Model, spec: Any, argument: str, whose: str = ""
) -> None:
    """Raises ValueError if a model cannot take features.

    Args:
      model: A built Keras model.
      spec: Nest of `tf.TensorSpec`, the features of one example.
      argument: What they were given as.
      whose: Of which client they are, in words.
    """
    try:
        model(trainer.zeros_like_batch(spec), training=False)
    except Exception as error:  # Whatever a layer's own code can raise.
        # (Of zeros: whatever it quotes, it is nobody's example.)
        raise nests.ExamplesValueError(
            f"{argument} must have features that the model takes{_input_of(model)}, "
            f"got {nests.describe_spec(spec)} for each example{whose}."
        ) from error


@contextlib.contextmanager
def checked_features(
    model: tf.keras.Model, clients: FederatedDataset, argument: str = "clients"
) -> Iterator[None]:
    """Checks clients' features; errors about examples in the block name a client."""
    place = 0
    if clients.is_indexed:
        place = int(np.argmax(clients.client_sizes() > 0))
    whose = f"client {clients.client_ids[place]!r}"
    check_features(model, clients.element_spec[0], argument, f" of {whose}")
    try:
        yield
    except nests.SAFE_ERRORS as error:
        raise type(error)(f"{argument} ({whose}): {error}") from error


def _input_of(model: tf.keras.Model) -> str:
    """Returns what a model takes, in words, if it tells."""
    try:
        shown = [
            nests.describe_spec(tf.TensorSpec(leaf.shape[1:], leaf.dtype))
            for leaf in tf.nest.flatten(list(model.inputs))
        ]
    except (AttributeError, TypeError, ValueError):
        return ""
    return f", {' and '.join(shown)}" if shown else ""
