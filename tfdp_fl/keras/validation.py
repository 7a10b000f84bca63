"""Validation during `fit`: on public data, or on clients that are held out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, engine, keras_versions
from tfdp_fl.datasets import ClientFailure, FederatedDataset, adapters, nests
from tfdp_fl.engine import labels
from tfdp_fl.keras import evaluation, example_spec
from tfdp_fl.terms import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validation:
    """The validation settings that `fit` was given.

    Attributes:
      data: `(x, y)`, `(x, y, sample_weight)`, a `tf.data.Dataset` of batches,
        a `FederatedDataset`, or None.
      every: The number of rounds between validations.
      batch_size: Examples in one batch.
      held_out: A digest of the clients held out by `fit`; "" for none.
    """

    data: nests.Nest
    every: int
    batch_size: int
    held_out: str = ""

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if the data cannot be evaluated."""
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
        names = ("validation_data", "y", "sample_weight")
        adapters.check_aligned(**dict(zip(names, data, strict=False)))
        parts = tuple(map(adapters.to_keras_inputs, data, names))
        object.__setattr__(self, "data", parts)

    def hold_out_clients(
        self, clients: FederatedDataset, fraction: float
    ) -> tuple[FederatedDataset, Validation]:
        """Returns the training clients, and the validation on the held-out ones.

        A client's id alone decides which side it is on, so adding or removing a client
        changes only its own side. Each side has at least one client.
        """
        if not _validate.finite(validation_split=fraction):
            return clients, self
        fraction = _validate.inside_unit_interval(validation_split=fraction)
        if self.data is not None or clients.num_clients < 2:
            raise ValueError(
                "validation_split must be 0 if validation_data is given, or with a "
                f"single client, which it would hold out, got {fraction!r}."
            )
        clients, data = clients.split_by_id(fraction)
        held_out = data.clients_digest
        return clients, dataclasses.replace(self, data=data, held_out=held_out)

    def conform(self, model: tf.keras.Model, training: engine.Training) -> Validation:
        """Returns this validation with its clients conformed to a model's inputs.

        Raises:
          ValueError: The data's features do not fit the model.
        """
        if isinstance(self.data, FederatedDataset):
            data = example_spec.conform(model, training, self.data, self._argument)
            with example_spec.locate_features_errors(model, data, self._argument):
                if not self.held_out:  # Otherwise, it was checked with the others.
                    check = labels.IndexCheck(model, data.element_spec[0])
                    data = check.check_clients(data, self._argument)
                return dataclasses.replace(self, data=data)
        if not isinstance(self.data, tuple | list):
            return self
        try:
            spec = tf.nest.map_structure(
                lambda leaf: nests.spec_of(nests.as_array(leaf[:1], "x")),
                nests.with_array_leaves(self.data[0], "x"),
            )
        except (TypeError, ValueError, IndexError):
            return self  # Another type, which Keras may accept.
        example_spec.check_features(model, spec, "validation_data")
        return self

    def check_labels(self, cohort_engine: engine.CohortEngine) -> Validation:
        """Returns this validation with clients whose labels the loss can take."""
        if not isinstance(self.data, FederatedDataset):
            return self
        data = cohort_engine.check_labels(self.data, self._argument)
        return dataclasses.replace(self, data=data)

    @property
    def _argument(self) -> str:
        """The argument of `fit` that the data came from."""
        return "clients" if self.held_out else "validation_data"

    def evaluate(self, model: tf.keras.Model) -> dict[str, float]:
        """Returns the model's metrics on the data, by name with the prefix `val_`."""
        data = self.data
        options: Json = {"verbose": 0, "return_dict": True}
        if isinstance(data, FederatedDataset):
            data = _all_batches(data, self.batch_size)
        if not isinstance(data, tf.data.Dataset):
            data, y, *weight = data
            options |= {"y": y, "batch_size": self.batch_size}
            options["sample_weight"] = weight[0] if weight else None
        with warnings.catch_warnings():
            # Keras does not know how many batches the clients' data make.
            warnings.filterwarnings("ignore", "Your input ran out of data")
            with keras_versions.weights_kept(model):
                results = model.evaluate(data, **options)
        return {f"val_{name}": value for name, value in results.items()}


def _all_batches(clients: FederatedDataset, batch_size: int) -> tf.data.Dataset:
    """Returns all clients' examples as batches for Keras."""
    spec = nests.unpair(*clients.element_spec)

    message = "clients held out for validation could not be read and is omitted"
    if clients.is_indexed:
        all_positions = np.arange(clients.num_clients)
        evaluation.warn_of_failures(clients.failures(all_positions), clients, message)
        stored = nests.unpair(*clients.flat())
        rows, _ = clients.client_rows(all_positions)

        def gather(indices: tf.Tensor) -> nests.Nest:
            return tf.nest.map_structure(lambda leaf: tf.gather(leaf, indices), stored)

        if len(rows):
            return (
                tf.data.Dataset.from_tensor_slices(rows)
                .batch(batch_size)
                .map(tf.autograph.experimental.do_not_convert(gather))
                .prefetch(2)
            )

    def examples() -> Iterator[nests.Nest]:
        failed: list[ClientFailure] = []
        for client in clients.read_clients(None):
            if isinstance(client, ClientFailure):
                failed.append(client)
            elif len(tf.nest.flatten(client.y)[0]):
                yield nests.unpair(client.x, client.y)
        evaluation.warn_of_failures(failed, clients, message)

    return tf.data.Dataset.from_generator(
        examples,
        output_signature=tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape], leaf.dtype), spec
        ),
    ).rebatch(batch_size)
