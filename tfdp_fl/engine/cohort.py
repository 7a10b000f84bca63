"""A round: what it starts from, what its clients are sent, and what comes back."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.mechanisms import contribution, records


class Broadcast(NamedTuple):
    """What the server sends to every client of a round.

    Attributes:
      weights: Values of the variables that a client's update is about.
      unaggregated: Values of the other variables of the model.
      params: The query's sample params; () where updates are clipped later.
      learning_rate: Float32 scalar.
      seed: Of a kind of `mechanisms.noise`, new for every round; nothing of the
        server's noise follows from it.
    """

    weights: list[tf.Tensor]
    unaggregated: list[tf.Tensor]
    params: nests.Nest
    learning_rate: tf.Tensor
    seed: tf.Tensor


class Moments(NamedTuple):
    """Sums over clients for Geyer's V_c and U_s.

    Attributes:
      count: Float32 scalar, the number of usable updates.
      total: Float32 [D], the sum of the unclipped updates, flattened.
      squares: Float32 scalar, the sum of their squared norms.
    """

    count: tf.Tensor
    total: tf.Tensor
    squares: tf.Tensor


class MetricState(NamedTuple):
    """The state of metrics, of some examples.

    Attributes:
      sums: By how much each state that adds up has moved from its beginning.
      largest: The states of which clients' largest is theirs together.
    """

    sums: list[tf.Tensor]
    largest: list[tf.Tensor]

    def plus(self, other: MetricState) -> MetricState:
        """Returns the state of both's examples."""
        largest = map(tf.maximum, self.largest, other.largest)
        return MetricState(add_nests(self.sums, other.sums), list(largest))


_NO_METRICS = MetricState([], [])


class CohortSum(NamedTuple):
    """What a group of clients adds up to.

    Attributes:
      contribution: The sum of the clients' `Contribution`s; () where each
        client's update is kept.
      loss: Float32 scalar, the sum over examples of the training loss, as far
        as it is a number.
      examples: Float32 scalar, the number of examples that this sum is over.
      metrics: The state of the trainer's metrics.
      moments: A `Moments`, or () if it was not asked for.
    """

    contribution: nests.Nest
    loss: tf.Tensor
    examples: tf.Tensor
    metrics: MetricState
    moments: Moments | tuple[()] = ()

    @classmethod
    def zeros(cls, metrics: MetricState = _NO_METRICS) -> CohortSum:
        """Returns the sum before any client."""
        return cls((), tf.zeros([]), tf.zeros([]), metrics)

    def plus(self, other: CohortSum) -> CohortSum:
        """Returns the sum over both groups of clients."""
        metrics = self.metrics.plus(other.metrics)
        one, two = (each._replace(metrics=_NO_METRICS) for each in (self, other))
        return add_nests(one, two)._replace(metrics=metrics)

    def with_batch(
        self, metrics: MetricState, loss: tf.Tensor, size: tf.Tensor
    ) -> CohortSum:
        """Returns the sum with a batch of `size` examples, and its mean loss."""
        # One client's NaN is no reason not to know the others' loss.
        counts = tf.math.is_finite(loss)
        weight = tf.where(counts, tf.cast(size, tf.float32), 0.0)
        loss = tf.where(counts, bound_loss(loss), 0.0)
        return self._replace(
            metrics=metrics,
            loss=self.loss + loss * weight,
            examples=self.examples + weight,
        )


class PerClient(NamedTuple):
    """What is kept of each client, a row of its own; () for what is not wanted.

    Attributes:
      updates: Float32 [K, D], flattened and concatenated over variables.
      scalars: Float32 [K, ...], `Contribution.scalars` of each; beside an update
        that is not clipped yet its norm, and the client's number of examples.
      window_norms: Float32 [K, L], the layer norms before noise that a client
        remembers of this round.
    """

    updates: nests.Nest = ()
    scalars: nests.Nest = ()
    window_norms: tf.Tensor | tuple[()] = ()


class Trained(NamedTuple):
    """What a compiled function returns of the clients that it trained.

    Attributes:
      total: Their sum.
      kept: What is kept of each.
      bits: Side by side, sums over clients, modulo 2^32, of the bits of what their
        records are made of, for `CohortEngine.fits`: both results of `norm_bound`,
        int32 [2, 2], and each dense layer's gradients, int32 [S B, out].
    """

    total: CohortSum
    kept: PerClient
    bits: nests.Nest = ()


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """The shapes and dtypes of a client's update, variable by variable."""

    variables: list[tf.TensorSpec]

    @classmethod
    def of(cls, variables: list[tf.Variable]) -> UpdateSpec:
        """Returns the spec of updates of some variables, or of their values."""
        return cls([tf.TensorSpec(v.shape, upload_dtype(v.dtype)) for v in variables])

    @property
    def sizes(self) -> list[int]:
        """Returns the numbers of elements."""
        return [spec.shape.num_elements() for spec in self.variables]

    @property
    def size(self) -> int:
        """Returns D, the number of elements of an update."""
        return sum(self.sizes)

    def require(self, update: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns an update; raises ValueError if its tensors have other shapes."""
        shapes = [tf.convert_to_tensor(tensor).shape for tensor in update]
        expected = [spec.shape for spec in self.variables]
        if shapes != expected:
            raise ValueError(
                "upload_hook must return one tensor for each variable, of its shape, "
                f"got {[*map(str, shapes)]} for {[*map(str, expected)]}."
            )
        return update

    def unflatten(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Splits a flat vector, [D], into the tensors of an update."""
        return [
            tf.cast(tf.reshape(part, spec.shape), spec.dtype)
            for part, spec in zip(
                tf.split(flat, self.sizes), self.variables, strict=True
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What is decided about a round before any client trains.

    Attributes:
      round_index: The round, counted from 0.
      state: The query's state, before the round.
      positions: Int64 [K], the cohort, as client positions in the dataset.
      clients_per_round: The expected cohort size m.
      noise_multiplier: This round's z.
      batch_size: Examples in one local batch.
      local_epochs: Passes over a client's examples.
      learning_rate: The client optimizer's rate.
      seed: Of a kind of `mechanisms.noise`, new for every round: noise and
        dropout follow from it.
      shuffle: Generator from which each client's shuffling follows, or None.
      windows: Float32 [K, W, L], for mechanisms that keep norms per client.
    """

    round_index: int
    state: contribution.RoundState
    positions: np.ndarray
    clients_per_round: float
    noise_multiplier: float
    batch_size: int
    local_epochs: int
    learning_rate: float
    seed: np.ndarray
    shuffle: np.random.Generator | None = None
    windows: np.ndarray | None = None

    @functools.cached_property
    def _shuffle_key(self) -> np.ndarray:
        generator = self.shuffle or np.random.default_rng()
        return generator.integers(0, 2**64, 2, np.uint64)

    def shuffle_keys(self, members: np.ndarray) -> list[np.random.Philox]:
        """Returns the generators that shuffle the examples of some clients.

        Each client's follows from the round and its own position, not from how
        many random numbers clients before it took.
        """
        return [
            np.random.Philox(key=self._shuffle_key, counter=[0, 0, 0, position])
            for position in self.positions[members].tolist()
        ]


@dataclasses.dataclass
class PendingRound:
    """A cohort that was trained and added up, and of which nothing is out yet.

    Attributes:
      inputs: The round.
      state: The query's state, with what holds in this round.
      received: What its clients are sent.
      sums: One `CohortSum` for each thread; None for one that has not trained.
      window_norms: Float32 [K, L], each client's layer norms before noise, NaN
        for those that did not answer; None if the mechanism keeps no window.
      collected: What was kept of each client in place of a sum, with the
        clients' places in the cohort.
      failures: The clients whose data could not be read, or not be trained on.
      without_noise: How many clients in the sum have not added the noise of
        their own that others count on.
    """

    inputs: RoundInputs
    state: contribution.RoundState
    received: Broadcast
    sums: list[nests.Nest]
    window_norms: np.ndarray | None = None
    collected: list[tuple[np.ndarray, PerClient]] = dataclasses.field(
        default_factory=list
    )
    failures: list[ClientFailure] = dataclasses.field(default_factory=list)
    without_noise: int = 0

    @property
    def cohort_size(self) -> int:
        """Returns how many clients were drawn."""
        return len(self.inputs.positions)

    def add(self, members: np.ndarray, trained: Trained, thread: int = 0) -> None:
        """Adds what a compiled function returned.

        Args:
          members: Int [K], the places of its clients in the cohort. Tensors
            may be longer: padded for a function of fixed shapes.
          trained: What it returned, tensors.
          thread: Which thread trained them.
        """
        count, total = len(members), trained.total
        rows = tf.nest.map_structure(lambda tensor: tensor[:count], trained.kept)
        if count and len(rows.updates):
            self.collected.append((members, rows))
        if self.window_norms is not None:
            self.window_norms[members] = rows.window_norms.numpy()
        before = self.sums[thread]
        self.sums[thread] = total if before is None else before.plus(total)

    def add_contribution(self, one: contribution.Contribution) -> None:
        """Adds a contribution that was not trained here: a canary's."""
        first = self.sums[0]
        self.sums[0] = first._replace(contribution=records.add(first.contribution, one))


class Receipt(Protocol):
    """What a release needs: that it is paid for (`accounting.Charge`)."""

    def use(self) -> None:
        """Raises an error unless it is paid for, and was not used before."""


class Executor(Protocol):
    """What trains cohorts: this process's engine, or workers elsewhere."""

    @property
    def executor(self) -> str:
        """How clients train, for people to read."""

    def collect(self, dataset: FederatedDataset, inputs: RoundInputs) -> PendingRound:
        """Trains a cohort, and adds up what its clients upload."""


def upload_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which updates of a weight of some dtype are computed.

    With fewer bits than float32 it would, clipped, added up or noised, be
    rounded by more than a clip may be.
    """
    return dtype if dtype.size >= 4 else tf.float32


def flatten(update: list[tf.Tensor]) -> tf.Tensor:
    """Returns an update as one vector, float32 [D]."""
    return tf.concat(
        [tf.reshape(tf.cast(part, tf.float32), [-1]) for part in update], 0
    )


def add_nests(one: nests.Nest, other: nests.Nest) -> nests.Nest:
    """Adds up two nests of tensors."""
    return tf.nest.map_structure(tf.add, one, other)


_LARGEST_LOSS = 1e25


def bound_loss(losses: tf.Tensor) -> tf.Tensor:
    """Returns losses that a whole cohort's sum stays a number with.

    They are only reported: training uses the loss as it is.
    """
    return tf.clip_by_value(losses, -_LARGEST_LOSS, _LARGEST_LOSS)
