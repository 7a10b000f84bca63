"""A round's data: its inputs, what its clients receive, and what they return."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.mechanisms import bounded_sums, contribution


class Broadcast(NamedTuple):
    """What the server sends to every client of a round.

    Attributes:
      weights: Values of the variables that clients update.
      unaggregated: Values of the model's other variables.
      params: The query's sample params; () if updates are clipped later.
      learning_rate: Float32 scalar.
      seed: A seed as in `mechanisms.noise`, new in every round. It reveals nothing
        about the server's noise.
      returns_bits: Bool scalar, whether to compute `Trained.bits`. False in a round.
    """

    weights: list[tf.Tensor]
    unaggregated: list[tf.Tensor]
    params: nests.Nest
    learning_rate: tf.Tensor
    seed: tf.Tensor
    returns_bits: tf.Tensor


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
    """The state of the metrics over some examples.

    Attributes:
      sums: How much each additive state has changed from its initial value.
      largest: The states that are merged by taking the maximum over clients.
    """

    sums: list[tf.Tensor]
    largest: list[tf.Tensor]

    def plus(self, other: MetricState) -> MetricState:
        """Returns the state over the examples of both."""
        largest = map(tf.maximum, self.largest, other.largest)
        return MetricState(add_nests(self.sums, other.sums), list(largest))


_NO_METRICS = MetricState([], [])


class CohortSum(NamedTuple):
    """The sum over a group of clients.

    Attributes:
      contribution: The sum of the clients' `Contribution`s; () if each client's
        update is kept separately.
      loss: Float32 scalar, the training loss summed over the examples where it is
        finite.
      examples: Float32 scalar, the number of examples in this sum.
      metrics: The state of the trainer's metrics.
      moments: A `Moments`, or () if not requested.
    """

    contribution: nests.Nest
    loss: tf.Tensor
    examples: tf.Tensor
    metrics: MetricState
    moments: Moments | tuple[()] = ()

    @classmethod
    def zeros(cls, metrics: MetricState = _NO_METRICS) -> CohortSum:
        """Returns the sum of no clients."""
        return cls((), tf.zeros([]), tf.zeros([]), metrics)

    def plus(self, other: CohortSum) -> CohortSum:
        """Returns the sum of both groups of clients."""
        metrics = self.metrics.plus(other.metrics)
        one, two = (each._replace(metrics=_NO_METRICS) for each in (self, other))
        return add_nests(one, two)._replace(metrics=metrics)

    def with_batch(
        self, metrics: MetricState, loss: tf.Tensor, size: tf.Tensor
    ) -> CohortSum:
        """Returns the sum with a batch of `size` examples and its mean loss added."""
        # One client's NaN must not hide the others' loss.
        counts = tf.math.is_finite(loss)
        weight = tf.where(counts, tf.cast(size, tf.float32), 0.0)
        loss = tf.where(counts, bound_loss(loss), 0.0)
        return self._replace(
            metrics=metrics,
            loss=self.loss + loss * weight,
            examples=self.examples + weight,
        )


class PerClient(NamedTuple):
    """What is kept of each client, one row per client; () for what is not needed.

    Attributes:
      updates: Float32 [K, D], flattened and concatenated over variables.
      scalars: Float32 [K, ...], each client's `Contribution.scalars`; for updates not
        yet clipped, the update's norm and the client's number of examples.
      window_norms: Float32 [K, L], the layer norms before noise that each client
        remembers from this round.
    """

    updates: nests.Nest = ()
    scalars: nests.Nest = ()
    window_norms: tf.Tensor | tuple[()] = ()


class Trained(NamedTuple):
    """What a compiled function returns for the clients that it trained.

    Attributes:
      total: Their sum.
      kept: What is kept of each.
      grid_step: If the update in `total` is in int32 (`bounded_sums.to_int32`): the
        step of its grid, float32 scalar; otherwise ().
      bits: Side by side, the bits from which a contribution is made, the smallest and
        the largest over all places, for `CohortEngine.fits`: both results of
        `norm_and_upper_bound`, int32 [2, 2, 2], and each dense layer's inputs and
        gradients, int32 [2, S B, in or out]. All are empty unless
        `Broadcast.returns_bits`.
    """

    total: CohortSum
    kept: PerClient
    grid_step: tf.Tensor | tuple[()] = ()
    bits: nests.Nest = ()

    def whole(self) -> CohortSum:
        """Returns the sum with its update in float64."""
        if isinstance(self.grid_step, tuple):
            return self.total
        grid_step = self.grid_step.numpy()
        update = [_from_int32(part, grid_step) for part in _update(self.total)]
        return _with_update(self.total, update)


def _update(total: CohortSum) -> list[nests.Nest]:
    update: list[nests.Nest] = total.contribution.update
    return update


def _with_update(total: CohortSum, update: list[nests.Nest]) -> CohortSum:
    return total._replace(contribution=total.contribution._replace(update=update))


# With at least this many weights, calling a function is faster than copying.
_MANY_WEIGHTS = 2**20


def _from_int32(part: np.ndarray | tf.Tensor, grid_step: np.floating) -> tf.Tensor:
    numbers = _as_numpy(part)
    if numbers.size >= _MANY_WEIGHTS:
        return _from_int32_in_place(part, tf.constant(grid_step))
    # As `bounded_sums.from_int32`.
    return tf.convert_to_tensor(np.multiply(numbers, grid_step, dtype=np.float64))


@tf.function(autograph=False, reduce_retracing=True)
def _from_int32_in_place(part: tf.Tensor, grid_step: tf.Tensor) -> tf.Tensor:
    # (A function reuses the memory of the cast.)
    return bounded_sums.from_int32([part], grid_step)[0]


@dataclasses.dataclass
class ThreadSum:
    """The sum of the clients of one thread.

    Attributes:
      total: The sum so far; None before the first client.
      int32_sum: Further results, in whole steps of one size; None: none yet. They are
        added in place, unconverted, because converting and allocating take longer than
        adding.
      num_in_int32_sum: The number of clients in them.
    """

    total: CohortSum | None = None
    int32_sum: Trained | None = None
    num_in_int32_sum: int = 0

    def join(self, other: ThreadSum) -> None:
        """Adds another thread's clients."""
        if other.int32_sum is not None:
            self.add(other.num_in_int32_sum, other.int32_sum)
        if other.total is not None:
            self._add_whole(other.total)

    def add(self, count: int, trained: Trained) -> None:
        """Adds the result of a compiled function, of `count` clients."""
        if isinstance(trained.grid_step, tuple):
            self._add_whole(trained.total)
            return
        before = self.int32_sum
        if before is not None and (
            self.num_in_int32_sum + count > bounded_sums.MAX_INT32_CLIENTS
            or before.grid_step != trained.grid_step
        ):
            self.convert()
            before = None
        if before is not None:
            trained = trained._replace(total=_add_in_place(before.total, trained.total))
        self.int32_sum = trained
        self.num_in_int32_sum += count

    def convert(self) -> CohortSum | None:
        """Returns the sum of all clients, with its update in float64."""
        if self.int32_sum is not None:
            self._add_whole(self.int32_sum.whole())
            self.int32_sum, self.num_in_int32_sum = None, 0
        return self.total

    def _add_whole(self, total: CohortSum) -> None:
        self.total = total if self.total is None else self.total.plus(total)


def _as_numpy(part: np.ndarray | tf.Tensor) -> np.ndarray:
    return part if isinstance(part, np.ndarray) else nests.view(part)


def _add_in_place(total: CohortSum, other: CohortSum) -> CohortSum:
    """Returns the sum of both; its update is `total`'s arrays, changed in place."""
    update = [
        part if isinstance(part, np.ndarray) else np.array(nests.view(part))
        for part in _update(total)
    ]
    for part, added in zip(update, _update(other), strict=True):
        np.add(part, _as_numpy(added), out=part)
    rest = _with_update(total, []).plus(_with_update(other, []))
    return _with_update(rest, update)


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """The shapes and dtypes of a client's update, variable by variable."""

    variables: list[tf.TensorSpec]

    @classmethod
    def of(cls, variables: list[tf.Variable]) -> UpdateSpec:
        """Returns the spec of updates of these variables (or of their values)."""
        return cls([tf.TensorSpec(v.shape, upload_dtype(v.dtype)) for v in variables])

    @property
    def sizes(self) -> list[int]:
        """Returns each tensor's number of elements."""
        return [spec.shape.num_elements() for spec in self.variables]

    @property
    def size(self) -> int:
        """Returns D, the number of elements of an update."""
        return sum(self.sizes)

    def require(self, update: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns an update's tensors; raises ValueError if one has another shape."""
        return bounded_sums.as_tensors(update, like=self.variables)

    def unflatten(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Splits a flat vector [D] into the tensors of an update."""
        return [
            tf.cast(tf.reshape(part, spec.shape), spec.dtype)
            for part, spec in zip(
                tf.split(flat, self.sizes), self.variables, strict=True
            )
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """Everything decided about a round before any client trains.

    Attributes:
      round_index: The round, counted from 0.
      state: The query's state before the round.
      positions: Int64 [K], the positions of the cohort's clients in the dataset.
      clients_per_round: The expected cohort size m.
      noise_multiplier: This round's z.
      batch_size: Examples in one local batch.
      local_epochs: Passes over a client's examples.
      learning_rate: The client optimizer's rate.
      seed: A seed as in `mechanisms.noise`, new in every round. Noise and dropout
        follow from it.
      shuffle: Generator from which each client's shuffling is derived, or None.
      windows: Float32 [K, W, L], for mechanisms that remember norms per client.
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
        """Returns the generators that shuffle the given clients' examples.

        Each generator depends on the round and the client's own position, not on how
        many random numbers earlier clients have drawn.
        """
        return [
            np.random.Philox(key=self._shuffle_key, counter=[0, 0, 0, position])
            for position in self.positions[members].tolist()
        ]


@dataclasses.dataclass
class PendingRound:
    """A cohort that was trained and added up, with nothing published yet.

    Attributes:
      inputs: The round.
      state: The query's state, set for this round.
      broadcast: What its clients receive.
      threads: The sum of each thread's clients, until the collection is complete.
      sums: From then on, at least one `CohortSum`.
      window_norms: Float32 [K, L], each client's layer norms before noise, NaN
        for clients that did not answer; None if the mechanism keeps no window.
      collected: What was kept of each client instead of a sum, with the clients'
        positions in the cohort.
      failures: The clients whose data could not be read or trained on.
      without_noise: How many clients in the sum did not add their share of the noise.
    """

    inputs: RoundInputs
    state: contribution.RoundState
    broadcast: Broadcast
    threads: list[ThreadSum]
    sums: list[nests.Nest] = dataclasses.field(default_factory=list)
    window_norms: np.ndarray | None = None
    collected: list[tuple[np.ndarray, PerClient]] = dataclasses.field(
        default_factory=list
    )
    failures: list[ClientFailure] = dataclasses.field(default_factory=list)
    without_noise: int = 0

    def __post_init__(self):
        self._is_added = np.zeros(self.cohort_size, np.bool_)

    @property
    def cohort_size(self) -> int:
        """Returns the number of clients drawn."""
        return len(self.inputs.positions)

    def add(self, members: np.ndarray, trained: Trained, thread: int = 0) -> None:
        """Adds the result of a compiled function.

        Args:
          members: Int [K], its clients' positions in the cohort. The tensors may be
            longer, if padded for a function of fixed shapes.
          trained: The function's result, as tensors.
          thread: The thread that trained the clients.

        Raises:
          RuntimeError: One of the clients was added before, or adding it has failed.
        """
        if self._is_added[members].any():
            raise RuntimeError("A client would be added to a round's sum twice.")
        self._is_added[members] = True
        count = len(members)
        rows = tf.nest.map_structure(lambda tensor: tensor[:count], trained.kept)
        if count and len(rows.updates):
            self.collected.append((members, rows))
        if self.window_norms is not None:
            self.window_norms[members] = rows.window_norms.numpy()
        self.threads[thread].add(count, trained)

    def add_contribution(self, one: contribution.Contribution) -> None:
        """Adds a contribution that was not trained here (a canary's)."""
        first = self.sums[0]
        self.sums[0] = first._replace(
            contribution=bounded_sums.add(first.contribution, one)
        )


class Executor(Protocol):
    """Trains cohorts: this process's engine, or workers elsewhere."""

    @property
    def executor(self) -> str:
        """A description of how clients train, for users."""

    def collect(self, dataset: FederatedDataset, inputs: RoundInputs) -> PendingRound:
        """Trains a cohort and adds up its clients' uploads."""


def upload_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype in which updates of a weight of this dtype are computed.

    With fewer bits than float32, clipping, summing or adding noise would round an
    update by more than the bound on a clip allows.
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
    """Bounds losses so that their sum over a cohort stays finite.

    This concerns reports only; training uses the unbounded loss.
    """
    return tf.clip_by_value(losses, -_LARGEST_LOSS, _LARGEST_LOSS)
