"""Evaluation: on validation data during `fit`, and on each client's own data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, engine, keras_versions
from tfdp_fl.datasets import (
    ClientExamples,
    ClientFailure,
    FederatedDataset,
    adapters,
    nests,
)
from tfdp_fl.engine import cohort, labels, layout, program, tff_models
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.keras import example_spec
from tfdp_fl.terms import Json

# The largest number of clients that are evaluated in one call of a program.
_MAX_GROUP_SIZE = 1024


class ClientMetrics(NamedTuple):
    """What a model does on each client's own data.

    Attributes:
      num_examples: Int64 [N], each client's number of examples.
      metrics: By name, float64 [N]; NaN for a client that has no examples, or could not
        be read or evaluated. Only these can be released: such a client contributes
        nothing to them, and 0 examples would be a contribution.
    """

    num_examples: np.ndarray
    metrics: dict[str, np.ndarray]


def evaluate(
    model: tf.keras.Model,
    training: engine.Training,
    clients: FederatedDataset,
    batch_size: int,
    verbose: int,
    silent: bool = False,
) -> ClientMetrics:
    """Returns a compiled model's metrics client by client, as `evaluate_clients` does.

    The clients must come from `example_spec.conform`. If `silent`, it raises no error
    and prints no warning, as either would reveal something about a client.
    """
    num_clients = clients.num_clients
    counts = np.zeros(num_clients, np.int64)
    failed: list[ClientFailure] = []
    names, compute_metrics = _make_evaluator(model, training, clients.element_spec)
    values = np.full([len(names), num_clients], np.nan)
    bar = tf.keras.utils.Progbar(num_clients, verbose=verbose, unit_name="client")
    any_failed, any_evaluated = False, False
    for group in _groups(clients, failed):
        counts[group.positions] = group.lengths
        for part in itertools.chain([group], group.one_by_one()):
            try:
                with program.numpy_memory_errors_as_tensorflows():
                    results = compute_metrics(part, batch_size)
            except engine.CLIENT_ERRORS as error:
                if len(part.positions) == 1:
                    failed.append(ClientFailure(int(part.positions[0]), error))
                    any_failed = True
                continue
            values[:, part.positions] = results
            any_evaluated |= bool(part.lengths.any())
            if part is group:
                break
        if not silent:  # Progress would reveal which clients have examples.
            bar.update(
                int(group.positions[-1]) + 1 if len(group.positions) else num_clients
            )
    if silent:
        bar.update(num_clients)
    failed.sort(key=lambda failure: failure.position)
    values[:, counts == 0] = np.nan
    if any_failed and not silent and not any_evaluated:
        raise ValueError(
            "clients must have examples that the model can be evaluated on, but none "
            f"of {num_clients} has: the first error was {failed[0].reason}."
        )
    if not silent:
        message = "clients could not be read or evaluated; their metrics are NaN"
        warn_of_failures(failed, clients, message)
    return ClientMetrics(counts, dict(zip(names, values, strict=True)))


class _EvaluationBatch(NamedTuple):
    """Clients that one call evaluates, one after another.

    Attributes:
      positions: Int64 [k], the clients' positions in the dataset.
      lengths: Int64 [k], each client's number of examples.
      x: Nest of features [sum of lengths, ...], one client after another.
      y: Nest of labels, likewise.
    """

    positions: np.ndarray
    lengths: np.ndarray
    x: nests.Nest
    y: nests.Nest

    def one_by_one(self) -> Iterator[_EvaluationBatch]:
        """Yields each client as a group of its own."""
        if len(self.positions) < 2:
            return
        ends = np.cumsum(self.lengths)
        for index, end in enumerate(ends.tolist()):
            client = slice(index, index + 1)
            rows = slice(end - self.lengths[index], end)
            x, y = nests.take((self.x, self.y), rows)
            yield _EvaluationBatch(self.positions[client], self.lengths[client], x, y)


def _groups(
    clients: FederatedDataset, failures: list[ClientFailure]
) -> Iterator[_EvaluationBatch]:
    """Yields all clients in groups of bounded size or of one client.

    Args:
      clients: The clients.
      failures: Gets those that cannot be read, or are too large for this machine.
    """
    chunks = functools.partial(
        layout.in_chunks, failures=failures, max_clients=_MAX_GROUP_SIZE
    )
    everybody = np.arange(clients.num_clients)

    def has_few_rows(position: int, length: int) -> bool:
        if length <= layout.MOST_ROWS:
            return True
        error = nests.ExamplesValueError(
            f"a client must have at most {layout.MOST_ROWS} examples to be evaluated."
        )
        failures.append(ClientFailure(position, error))
        return False

    if clients.is_indexed:
        stored = nests.views(clients.flat())
        row_bytes = sum(leaf[:1].nbytes for leaf in tf.nest.flatten(stored))
        failures += clients.failures(everybody)
        sizes = clients.client_sizes(everybody).tolist()

        def stored_group(positions: list[int]) -> _EvaluationBatch:
            rows, lengths = clients.client_rows(np.array(positions, np.int64))
            return _EvaluationBatch(
                np.array(positions, np.int64), lengths, *nests.take(stored, rows)
            )

        yield from chunks(
            (
                (position, length * row_bytes, position)
                for position, length in enumerate(sizes)
                if has_few_rows(position, length)
            ),
            stored_group,
        )
        return

    def read() -> Iterator[tuple[int, int, ClientExamples]]:
        for client in clients.read_clients(everybody):
            if isinstance(client, ClientFailure):
                failures.append(client)
                continue
            leaves = tf.nest.flatten((client.x, client.y))
            if len(leaves[-1]) and has_few_rows(client.position, len(leaves[-1])):
                yield client.position, sum(leaf.nbytes for leaf in leaves), client

    def read_group(held: list[ClientExamples]) -> _EvaluationBatch:
        if not held:
            nothing = np.zeros(0, np.int64)
            return _EvaluationBatch(
                nothing, nothing, *nests.no_examples(clients.element_spec)
            )
        x, y = nests.concatenate([(client.x, client.y) for client in held])
        lengths = [len(tf.nest.flatten(client.y)[-1]) for client in held]
        positions = [client.position for client in held]
        return _EvaluationBatch(np.array(positions), np.array(lengths), x, y)

    yield from chunks(read(), read_group)


def _make_evaluator(
    model: tf.keras.Model, training: engine.Training, element_spec: nests.ElementSpec
) -> tuple[list[str], Callable[[_EvaluationBatch, int], np.ndarray]]:
    """Returns the names of loss and metrics, and a function that computes them.

    The function takes a group and a batch size, and returns float64 [number of names,
    k]. It uses the pure function of `engine.trainer`, traced and checked: operations
    that could pass on information between clients are refused, and so are metrics that
    are not one number. It is cached with the compiled settings, so repeated evaluations
    trace it only once.
    """
    weights = keras_versions.tf_variables(model.weights)
    cache_key = element_spec, [variable.ref() for variable in weights]
    cached = vars(training).get("_evaluator")
    if cached is not None and cached[0] == cache_key:
        return cached[1]
    for name in ("test_step", "compute_metrics"):
        if getattr(type(model), name) is not getattr(tf.keras.Model, name):
            raise ValueError(
                f"model must not have a {name} of its own for evaluate_clients, "
                f"which would not call it, got {type(model).__name__}.{name}: "
                "compile metrics, or evaluate fed.model."
            )
    trainer = tff_models.make_trainer(model, training, element_spec)
    names = ["loss", *trainer.metric_results(trainer.no_metrics())]
    step = program.in_own_graph(trainer.evaluate)

    def evaluate_group(
        broadcast: cohort.Broadcast,
        x: nests.Nest,
        y: nests.Nest,
        lengths: tf.Tensor,
        batch_size: tf.Tensor,
    ) -> tf.Tensor:
        def evaluate_client(
            k: tf.Tensor, first: tf.Tensor, rows: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            end = first + lengths[k]

            def evaluate_batch(
                start: tf.Tensor, total: tf.Tensor, metrics: cohort.MetricState
            ) -> tuple[tf.Tensor, tf.Tensor, cohort.MetricState]:
                stop = tf.minimum(start + batch_size, end)
                examples = nests.take((x, y), slice(start, stop))
                loss, metrics = step(broadcast, *examples, metrics)
                return stop, total + loss * tf.cast(stop - start, tf.float32), metrics

            _, total, metrics = tf.while_loop(
                lambda start, *_: start < end,
                evaluate_batch,
                (first, tf.zeros([]), trainer.no_metrics()),
                parallel_iterations=1,
            )
            results = trainer.metric_results(metrics)
            loss = total / tf.cast(lengths[k], tf.float32)
            row = [tf.cast(v, tf.float64) for v in ({"loss": loss} | results).values()]
            rows = tf.tensor_scatter_nd_update(rows, [[k]], tf.stack(row)[None])
            return k + 1, end, rows

        # (Not a constant, because constants cannot be written to.)
        zero = tf.cast(batch_size < 0, tf.float64)
        rows = tf.fill([tf.size(lengths), len(names)], zero)
        return tf.while_loop(
            lambda k, *_: k < tf.size(lengths),
            evaluate_client,
            (0, 0, tf.ensure_shape(rows, [None, len(names)])),
            parallel_iterations=1,
        )[2]

    broadcast = trainer.current_broadcast()
    specs = trainer_lib.specs_of(broadcast), *trainer_lib.batch_specs(element_spec)
    sizes = tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)
    compiled = program.Program(evaluate_group, *specs, *sizes, model=model)

    def compute_metrics(group: _EvaluationBatch, batch_size: int) -> np.ndarray:
        size = np.int32(min(batch_size, np.iinfo(np.int32).max // 2))
        lengths = group.lengths.astype(np.int32)
        return compiled(broadcast, group.x, group.y, lengths, size).numpy().T

    results = names, compute_metrics
    object.__setattr__(training, "_evaluator", (cache_key, results))
    return results


def warn_of_failures(
    failed: list[ClientFailure], clients: FederatedDataset, text: str
) -> None:
    """Warns of clients that could not be read: how many, and why the first."""
    if failed:
        warnings.warn(
            f"The data of {len(failed)} of {clients.num_clients} {text}. The first is "
            f"client {clients.client_ids[failed[0].position]!r}: {failed[0].reason}.",
            RuntimeWarning,
            stacklevel=4,
        )


# Validation during `fit`: on public data, or on clients that are held out.


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

    def try_one_batch(self, model: tf.keras.Model) -> None:
        """Raises what evaluating raises for data that does not fit, before any round.

        Clients were checked when they were conformed; what else they raise is theirs.
        """
        if self.data is None or isinstance(self.data, FederatedDataset):
            return
        states = [state for metric in model.metrics for state in metric.variables]
        values = [tf.identity(state) for state in states]
        try:
            self.evaluate(model, steps=1)
        finally:
            model.reset_metrics()
            for state, value in zip(states, values, strict=True):
                state.assign(value)

    @property
    def _argument(self) -> str:
        """The argument of `fit` that the data came from."""
        return "clients" if self.held_out else "validation_data"

    def evaluate(
        self, model: tf.keras.Model, steps: int | None = None
    ) -> dict[str, float]:
        """Returns the model's metrics on the data, by name with the prefix `val_`.

        Args:
          model: The model.
          steps: How many batches to evaluate; None: all.
        """
        data = self.data
        options: Json = {"verbose": 0, "return_dict": True, "steps": steps}
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
        warn_of_failures(clients.failures(all_positions), clients, message)
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
        warn_of_failures(failed, clients, message)

    return tf.data.Dataset.from_generator(
        examples,
        output_signature=tf.nest.map_structure(
            lambda leaf: tf.TensorSpec([None, *leaf.shape], leaf.dtype), spec
        ),
    ).rebatch(batch_size)
