"""What is checked before any work, and what a model is validated on."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, datasets
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import CohortEngine, LocalTraining, trainer
from tfdp_fl.keras import training_setup
from tfdp_fl.mechanisms import Deployment, NoPrivacy


def validate(
    model: Any, *, clients: Any = None, loss: Any = None, strict: bool = False
) -> list[str]:
    """Returns why a model cannot be trained or protected, if it cannot.

    In the manner of Opacus's `ModuleValidator.validate`. Nothing is trained.
    With clients and a loss it finds what `fit` would refuse before its first
    round: also a state that would pass from one client to the next, and labels
    that the model has no class for.

    Args:
      model: A Keras model.
      clients: Clients' data, as `fit` takes it; None: the model alone.
      loss: As in Keras's `compile`; with clients only.
      strict: Whether to raise instead of returning the problem.

    Returns:
      The first problem, in a sentence; empty if none was found.

    Raises:
      ValueError: `strict`, and there is a problem; or one of clients and loss
        without the other.
    """
    if (clients is None) != (loss is None):
        raise ValueError(
            "clients and loss must be given together, got "
            f"{'clients' if loss is None else 'loss'} alone."
        )
    try:
        training_setup.check_model(model)
        if clients is not None:
            dataset = datasets.as_federated(clients)
            check_features(model, dataset.element_spec[0], "clients")
            optimizer = tf.keras.optimizers.SGD(0.0)
            CohortEngine(
                model=model,
                training=LocalTraining(optimizer=optimizer, loss=loss),
                mechanism=NoPrivacy(),
                deployment=Deployment(clients_per_round=1),
                element_spec=dataset.element_spec,
                num_replicas=1,
            ).check_labels(dataset)
    except Exception as error:  # Whatever a layer's own code can raise.
        problem = f"{type(error).__name__}: {error}"
        if strict:
            raise ValueError(f"model cannot be trained: {problem}") from error
        return [problem]
    return []


def check_features(
    model: tf.keras.Model, spec: Any, argument: str, whose: str = ""
) -> None:
    """Raises ValueError if a model cannot take features."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """What `fit` was told of validation.

    Attributes:
      data: `(x, y)`, `(x, y, sample_weight)`, a `tf.data.Dataset` of batches,
        a `FederatedDataset`, or None.
      every: Validate every so many rounds.
      batch_size: Examples in one batch.
      held_out: A digest of the clients of `fit` that are held out; "" for none.
    """

    data: Any
    every: int
    batch_size: int
    held_out: str = ""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError unless it can be evaluated on."""
        _validate.positive_integer(validation_freq=self.every)
        data = self.data
        if data is None or isinstance(data, tf.data.Dataset | FederatedDataset):
            return
        if not isinstance(data, tuple | list) or len(data) not in (2, 3):
            raise TypeError(
                "validation_data must be (x, y), (x, y, sample_weight), a "
                "tf.data.Dataset of batches or a FederatedDataset, got a "
                f"{type(data).__name__}."
            )

    def without_held_out(
        self, clients: FederatedDataset, fraction: float
    ) -> tuple[FederatedDataset, Validation]:
        """Returns the clients that train, and validation on the share of the others.

        A client's id says on which side it is, whatever the others are: one client
        more or less is one more or less to train on. There is one at least on each.
        """
        if not _validate.finite(validation_split=fraction):
            return clients, self
        fraction = _validate.inside_unit_interval(validation_split=fraction)
        if self.data is not None or clients.num_clients < 2:
            raise ValueError(
                "validation_split must be 0 where validation_data is given, or with a "
                f"single client, which it would hold out, got {fraction!r}."
            )
        clients, data = clients.split_by_id(fraction)
        held_out = data.clients_digest
        return clients, dataclasses.replace(self, data=data, held_out=held_out)

    def check_features(self, model: tf.keras.Model) -> None:
        """Raises ValueError if the data has other features than a model takes."""
        if isinstance(self.data, FederatedDataset):
            with checked_features(model, self.data, "validation_data"):
                return
        if not isinstance(self.data, tuple | list):
            return
        try:
            spec = tf.nest.map_structure(
                lambda leaf: nests.spec_of(nests.as_array(leaf[:1], "x")),
                nests.with_array_leaves(self.data[0], "x"),
            )
        except (TypeError, ValueError, IndexError):
            return  # Something else that Keras may take.
        check_features(model, spec, "validation_data")

    def evaluate(self, model: tf.keras.Model) -> dict[str, float]:
        """Returns the model's metrics on the data, by `val_` and name."""
        data = self.data
        options: dict[str, Any] = {"verbose": 0, "return_dict": True}
        if isinstance(data, FederatedDataset):
            data = _batches(data, self.batch_size)
        if not isinstance(data, tf.data.Dataset):
            data, y, *weight = data
            options |= {"y": y, "batch_size": self.batch_size}
            options["sample_weight"] = weight[0] if weight else None
        with warnings.catch_warnings():
            # Keras cannot know that the clients' data end where they should.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            results = model.evaluate(data, **options)
        return {f"val_{name}": value for name, value in results.items()}


def _batches(clients: FederatedDataset, batch_size: int) -> tf.data.Dataset:
    """Returns all clients' examples, as Keras takes them."""
    spec = nests.unpaired(*clients.element_spec)

    def examples() -> Iterator[Any]:
        failed: list[ClientFailure] = []
        for client in clients.read_clients(None):
            if isinstance(client, ClientFailure):
                failed.append(client)
            elif len(tf.nest.flatten(client.y)[0]):
                yield nests.unpaired(client.x, client.y)
        if failed:
            warnings.warn(
                f"The data of {len(failed)} of {clients.num_clients} clients held out "
                "for validation could not be read, and are left out of it. The first "
                f"is client {clients.client_ids[failed[0].position]!r}: "
                f"{failed[0].reason}.",
                RuntimeWarning,
                stacklevel=2,
            )

    return tf.data.Dataset.from_generator(
        examples,
        output_signature=tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape], leaf.dtype), spec
        ),
    ).rebatch(batch_size)
