"""Metrics as functions of tensors, and how the clients' metric states are merged.

A state is merged as a sum (relative to its initial value), or as the largest or the
smallest of the clients' values. Which of these applies is tested on synthetic batches.
Metrics are diagnostics: no client's training reads a state that others have changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import nests
from tfdp_fl.engine import cohort, labels, synthetic

# The initial values of the variables of each metric passed to `record_initial_values`.
_initial_values: weakref.WeakKeyDictionary[
    tf.keras.metrics.Metric, list[np.ndarray]
] = weakref.WeakKeyDictionary()

# Returns the values of a model's own metrics after a batch (x, y).
_OwnAfter: TypeAlias = Callable[
    [list[tf.Tensor], nests.Nest, nests.Nest], list[tf.Tensor]
]

# Candidate rules that compute s(a, b), the state after batch a and then b, from s(a),
# s(b) and the initial state. The first rule that holds is used.
_MERGES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "sum": lambda a, b, begin: a + b - begin,
    "largest": lambda a, b, begin: np.maximum(a, b),
    "smallest": lambda a, b, begin: np.minimum(a, b),
}
_BATCHES = 6


def record_initial_values(metrics: nests.Nest) -> None:
    """Records the metrics' initial values, before they see any data.

    Keras's `reset_state` sets zeros, whatever the initial values were.
    """
    for metric in tf.nest.flatten(metrics):
        is_metric = isinstance(metric, tf.keras.metrics.Metric) and metric.variables
        if is_metric and metric not in _initial_values:
            _initial_values[metric] = keras_versions.values_of(metric.variables)


class Metrics:
    """Compiled metrics, and the metrics of the model and its layers.

    Attributes:
      own: The model's metrics, updated by forward passes.
    """

    def __init__(
        self,
        compiled: tf.keras.metrics.Metric,
        own: list[tf.keras.metrics.Metric],
        y: nests.Nest,
        predicted: nests.Nest,
    ):
        """Makes the metrics' variables.

        Args:
          compiled: What Keras's `compile` makes from `metrics`.
          own: The model's and its layers' metrics.
          y: Nest of labels of a batch.
          predicted: The model's outputs for it.
        """
        self._compiled = compiled
        compiled.build(y, predicted)
        if compiled.metrics:  # Some make their variables only when they see labels.
            with keras_versions.stateless([]):
                compiled.update_state(y, predicted, None)
        self.own = [
            m
            for m in own
            if all(m is not compiled_metric for compiled_metric in compiled.metrics)
        ]
        all_metrics = [*compiled.metrics, *self.own]
        record_initial_values(all_metrics)
        self._variables = [v for metric in all_metrics for v in metric.variables]
        self._names = [metric.name for metric in all_metrics for _ in metric.variables]
        self._initial = [
            v for metric in all_metrics for v in _initial_values_of(metric)
        ]
        self._merges = ["sum"] * len(self._variables)

    def find_merges(
        self,
        own_after: _OwnAfter,
        x: nests.Nest,
        y: nests.Nest,
        predicted: nests.Nest,
        ranges: Iterable[labels.LabelRange],
    ) -> None:
        """Finds out how to merge the states of several clients.

        Args:
          own_after: Returns the values of the variables of `own` after a forward pass
            on a batch of features and labels, starting from the given values.
          x: Nest of features of a batch.
          y: Nest of labels, without weights.
          predicted: Nest of the model's outputs.
          ranges: The allowed class labels.

        Raises:
          ValueError: A state is neither a sum nor a largest or smallest value.
        """
        if not self._variables:
            return
        rng = np.random.default_rng(0)
        initial = self._initial
        candidates = [
            {k: v for k, v in _MERGES.items() if k != "sum" or value.dtype != bool}
            for value in initial
        ]
        previous = initial
        classes = {label_range.leaf: label_range.num_classes for label_range in ranges}
        for number in range(_BATCHES):
            shares = number % 2 == 0
            batch = (
                synthetic.batch(rng, x, shares),
                synthetic.batch(rng, y, shares, classes),
                synthetic.batch(rng, predicted, shares),
            )
            try:
                from_begin = self._update(initial, batch, own_after)
                updated = self._update(previous, batch, own_after)
                repeated = self._update(previous, batch, own_after)
            except Exception:  # Some metrics cannot handle synthetic numbers.
                continue
            if any(np.isnan(value).any() for value in updated) or not all(
                map(np.array_equal, updated, repeated)
            ):
                continue  # (`Program` refuses metrics that draw random numbers.)
            for merges, *states in zip(
                candidates, previous, from_begin, initial, updated, strict=True
            ):
                a, b, start, combined = (np.asarray(v, np.float64) for v in states)
                with np.errstate(invalid="ignore"):
                    for name, merge in list(merges.items()):
                        if not np.allclose(combined, merge(a, b, start), 1e-4, 1e-5):
                            del merges[name]
            previous = updated
        for name, merges in zip(self._names, candidates, strict=True):
            if not merges:
                raise ValueError(
                    "metrics must keep sums (such as a total and a count), or a "
                    "largest or smallest value, so that clients' states can be "
                    f"merged, got {name!r}, whose state cannot. Divide in result(), or "
                    "compute it after the training, with fed.model."
                )
        self._merges = [next(iter(merges)) for merges in candidates]

    def _update(
        self,
        values: list[tf.Tensor],
        batch: tuple[nests.Nest, nests.Nest, nests.Nest],
        own_after: _OwnAfter,
    ) -> list[np.ndarray]:
        x, y, predicted = batch
        first = len(self._variables) - len(self.own_variables)
        tensors = list(map(tf.constant, values))
        updated = self._values_after(tensors[:first], y, predicted, None)
        if self.own:
            updated += own_after(tensors[first:], x, y)
        return [np.asarray(value) for value in updated]

    def _values_after(
        self, values: list[tf.Tensor], *batch: nests.Nest
    ) -> list[tf.Tensor]:
        """Returns the compiled metrics' variables after a batch."""
        if not self._compiled.metrics:
            return []
        updated = self._compiled.stateless_update_state(values, *batch)
        return list(map(tf.convert_to_tensor, updated))

    def initial_state(self) -> cohort.MetricState:
        """Returns the state before any example."""
        return self._encode(self._constants())

    def _constants(self) -> list[tf.Tensor]:
        # Zeros made from a shape are not stored as constants in the function's graph.
        return [
            tf.constant(value) if value.any() else tf.zeros(value.shape, value.dtype)
            for value in self._initial
        ]

    def own_initial_values(self) -> list[tf.Tensor]:
        """Returns the values of the variables of `own` before any batch."""
        return self._constants()[len(self._variables) - len(self.own_variables) :]

    @property
    def own_variables(self) -> list[keras_versions.KerasVariable]:
        """Returns the variables of `own`."""
        return [variable for metric in self.own for variable in metric.variables]

    def with_batch(
        self,
        state: cohort.MetricState,
        y: nests.Nest,
        predicted: nests.Nest,
        weight: tf.Tensor | None,
    ) -> cohort.MetricState:
        """Updates the compiled metrics' state with a batch; a NaN counts as 0.

        Args:
          state: The state before the batch.
          y: Nest of labels.
          predicted: Nest of the model's outputs.
          weight: The examples' weights in the weighted metrics; None: all equal.
        """
        count = len(self._variables) - len(self.own_variables)
        if not self._compiled.metrics:
            return state
        y, predicted, weight = tf.nest.map_structure(
            with_numbers_only, (y, predicted, weight)
        )
        values = self._decode(state)
        values[:count] = self._values_after(values[:count], y, predicted, weight)
        return self._encode(values)

    def with_own(
        self, state: cohort.MetricState, after: list[tf.Tensor]
    ) -> cohort.MetricState:
        """Updates the state with `own` after a forward pass, where it is finite.

        Args:
          state: The state before the forward pass.
          after: The values of the variables of `own` after a forward pass that started
            from their initial values.
        """
        if not self.own:
            return state
        first = len(self._variables) - len(after)
        initial = self._constants()
        usable = tf.constant(True)
        for value in after:
            if value.dtype.is_floating:
                usable &= tf.reduce_all(tf.math.is_finite(value))
        values = [
            tf.where(usable, value, start)
            for value, start in zip(after, initial[first:], strict=True)
        ]
        return state.plus(self._encode([*initial[:first], *values]))

    def results(self, state: cohort.MetricState) -> dict[str, tf.Tensor]:
        """Returns the metrics' results for a state, by name."""
        mapping = list(zip(self._variables, self._decode(state), strict=True))
        results: dict[str, tf.Tensor] = {}
        with keras_versions.stateless(mapping):
            # The loss of a round is always reported anyway.
            own = {
                metric.name: metric.result()
                for metric in self.own
                if metric.name != "loss"
            }
            for key, value in {**self._compiled.result(), **own}.items():
                parts = value if isinstance(value, Mapping) else {key: value}
                # Inside the scope, as a result may itself be a variable.
                results.update({k: _as_tensor(k, v) for k, v in parts.items()})
        return results

    def _encode(self, values: list[tf.Tensor]) -> cohort.MetricState:
        """Sorts the states by how they are merged."""
        state = cohort.MetricState([], [])
        for value, initial, merge in zip(
            values, self._initial, self._merges, strict=True
        ):
            if merge == "sum":
                state.sums.append(value - initial if initial.any() else value)
            else:
                value = _to_signed(value)
                state.largest.append(-value if merge == "smallest" else value)
        return state

    def _decode(self, state: cohort.MetricState) -> list[tf.Tensor]:
        sums, largest = iter(state.sums), iter(state.largest)
        values = []
        for initial, merge in zip(self._initial, self._merges, strict=True):
            if merge == "sum":
                value = next(sums)
                values.append(value + initial if initial.any() else value)
            else:
                value = next(largest)
                value = -value if merge == "smallest" else value
                values.append(tf.cast(value, initial.dtype))
        return values


def _initial_values_of(metric: tf.keras.metrics.Metric) -> list[np.ndarray]:
    """Returns the initial values of a metric's variables."""
    resets_itself = type(metric).reset_state is not tf.keras.metrics.Metric.reset_state
    if metric.variables and not resets_itself:
        return _initial_values[metric]
    metric.reset_state()
    return keras_versions.values_of(metric.variables)


def _to_signed(value: nests.Nest) -> tf.Tensor:
    """Casts a value to a dtype that can be negated."""
    value = tf.convert_to_tensor(value)
    has_sign = value.dtype.is_floating or value.dtype in (tf.int32, tf.int64)
    return value if has_sign else tf.cast(value, tf.int64)


def _as_tensor(name: str, value: object) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except Exception as error:  # Its type depends on the value.
        raise ValueError(
            _NOT_SCALAR % (name, f"as a {type(value).__name__}")
        ) from error


_NOT_SCALAR = (
    "metrics must give one number each, or a dict of numbers, got %r %s. Take an "
    "average (as F1Score does with average='macro'), give a dict that names each "
    "number, or compute it after the training, by fed.model."
)


def check(results: Mapping[str, object]) -> None:
    """Raises ValueError that names a metric whose result is not one number."""
    for name, value in results.items():
        tensor = _as_tensor(name, value)
        if tensor.dtype.is_complex or tensor.dtype == tf.string:
            raise ValueError(_NOT_SCALAR % (name, f"of {tensor.dtype.name}"))
        if tensor.shape.rank != 0:
            raise ValueError(_NOT_SCALAR % (name, f"of shape {tensor.shape}"))


def with_numbers_only(tensor: tf.Tensor | None) -> tf.Tensor | None:
    """Returns a tensor with 0 for NaN and Inf, and with its Keras mask."""
    if tensor is None or not tensor.dtype.is_floating:
        return tensor
    numbers = tf.where(tf.math.is_finite(tensor), tensor, tf.zeros([], tensor.dtype))
    mask = getattr(tensor, "_keras_mask", None)
    if mask is not None:
        numbers._keras_mask = mask
    return numbers
