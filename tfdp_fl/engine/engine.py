"""Runs the rounds of a cohort on this machine's cores."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import (
    batching,
    client_update,
    cohort,
    compile_choice,
    dense_cohort,
    flat_functions,
    labels,
    replicas,
    server_update,
)
from tfdp_fl.mechanisms import contribution, noise
from tfdp_fl.mechanisms import mechanism as mechanism_lib

# How much of a streamed cohort's data, or of updates that wait for a joint
# clip, is held by one call of a compiled function.
CHUNK_BYTES = 64 * 2**20

# The training of clients side by side: of any, and of a few at a time of which
# none is taken to have a NaN, on one thread.
_LOCKSTEP, _LOCKSTEP_FEW = "lockstep", "lockstep of few"

# What one client's data can make TensorFlow raise, such as an index that no
# embedding has.
_CLIENT_ERRORS = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
)

# Parameters of a model that is released on one thread: its noise is one draw.
_SMALL_RELEASE = 2**16

BroadcastHook = Callable[[list[tf.Tensor], tf.Tensor], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundInputs:
    """What is decided about a round before any client trains.

    Attributes:
      round_index: The round, counted from 0.
      positions: Int64 [K], the cohort, as client positions in the dataset.
      clients_per_round: The expected cohort size m.
      noise_multiplier: This round's z.
      batch_size: Examples in one local batch.
      local_epochs: Passes over a client's examples.
      learning_rate: The client optimizer's rate.
      seed: Int64 [2], new for every round: noise and dropout follow from it.
      shuffle: Generator that shuffles the examples of each client, or None.
      windows: Float32 [K, W, L], for mechanisms that keep norms per client.
    """

    round_index: int
    positions: np.ndarray
    clients_per_round: float
    noise_multiplier: float
    batch_size: int
    local_epochs: int
    learning_rate: float
    seed: np.ndarray
    shuffle: np.random.Generator | None = None
    windows: np.ndarray | None = None


@dataclasses.dataclass
class PendingRound:
    """A cohort that was trained and added up, and of which nothing is out yet.

    Attributes:
      inputs: The round.
      state: The query's state, with the clip of this round.
      tensors: Float32 [z, m, learning rate], and the seed.
      broadcast: The weights that clients receive where a hook changed them;
        () if they receive the server's.
      sums: One `CohortSum` a replica.
      metric_states: One list of metric values a replica.
      collected: For each replica the contributions that were not summed, with
        their clients' places in the cohort.
      window_norms: Float32 [K, L], each client's layer norms before noise, NaN
        for those that did not answer; None if the mechanism keeps no window.
      failures: The clients whose data could not be read, or not be trained on.
      training_error: What training on somebody's data raised, if anything.
    """

    inputs: RoundInputs
    state: Any
    tensors: tuple[tf.Tensor, tf.Tensor]
    broadcast: Any
    sums: list[Any]
    metric_states: list[Any]
    collected: list[list[tuple[np.ndarray, cohort.CollectedUpdates]]]
    window_norms: np.ndarray | None
    failures: list[ClientFailure] = dataclasses.field(default_factory=list)
    training_error: Exception | None = None


@dataclasses.dataclass(frozen=True)
class CohortChunk:
    """Some clients of a cohort with the tensors that hold their examples.

    Attributes:
      x: Nest of feature tensors, leading dimension over stored examples.
      y: Nest of label tensors, likewise.
      rows: Int [sum of lengths], the clients' rows of them.
      lengths: Int64 [K].
      members: Int64 [K], the clients' places in the cohort.
    """

    x: Any
    y: Any
    rows: np.ndarray
    lengths: np.ndarray
    members: np.ndarray


@dataclasses.dataclass(frozen=True)
class CohortPart:
    """Some clients of a chunk, as one compiled function trains them.

    Attributes:
      function: Which function it is: the kind of its output or of lockstep,
        whether all batches are full, and the number of lockstep steps.
      tables: Its arguments that say who trains on what: a `LockstepTable`,
        perhaps with how many of its clients to train at once; or a
        `ClientTable` and the number of clients.
      plan: What the tables were laid out from, without padding.
    """

    function: tuple[str, bool, int | None]
    tables: tuple[Any, ...]
    plan: batching.BatchPlan


class _Call:
    """A compiled function with its arguments, called without ceremony."""

    def __init__(
        self,
        function: Any,
        arguments: list[tf.Tensor],
        part: CohortPart | None = None,
    ):
        """Prepares a call.

        Args:
          function: A `ConcreteFunction`.
          arguments: Its arguments, flattened.
          part: The clients that it is about.
        """
        self._function = function
        self._arguments = arguments
        self.part = part

    def __call__(self) -> Any:
        """Runs the function; returns its structured result.

        The arguments' types were fixed when the function was traced, so the
        check that `function(...)` makes of each, which takes longer than a
        small round, is left out.
        """
        with flat_functions.executor(self._function):
            return self._function._call_flat(
                self._arguments, self._function.captured_inputs
            )


def _added(one: Any, other: Any) -> Any:
    return tf.nest.map_structure(tf.add, one, other)


def _flat(arguments: Any) -> list[Any]:
    return tf.nest.flatten(arguments)


def table_specs(tables: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the specs of a part's tables, for any number of clients.

    The batch width stays free as well: one function serves every size.
    """

    def any_size(value: Any) -> tf.TensorSpec:
        value = np.asarray(value)
        return tf.TensorSpec([None] * value.ndim, value.dtype)

    return tf.nest.map_structure(any_size, tuple(tables))


class CohortEngine:
    """Trains cohorts in replicas of a model, and updates the model.

    A round has two halves: `collect` trains and adds up, `release` adds the
    noise and lets the model change. In between nobody has seen anything, so
    that is where a round is written to the ledger, or abandoned.

    Attributes:
      server: The `ServerUpdate` that holds the model's weights.
      query: The mechanism's query.
      state: The query's state, before the coming round.
    """

    def __init__(
        self,
        *,
        model: tf.keras.Model,
        training: client_update.LocalTraining,
        mechanism: mechanism_lib.Mechanism,
        deployment: contribution.Deployment,
        element_spec: tuple[Any, Any],
        server_optimizer: tf.keras.optimizers.Optimizer | None = None,
        broadcast_hook: BroadcastHook | None = None,
        aggregate_non_trainable: bool = True,
        moments: bool = False,
        collect_records: bool = False,
        num_replicas: int | None = None,
        jit_compile: bool | None = None,
        batch_size: int = 1,
    ):
        """Makes the replicas; nothing is traced yet.

        Args:
          model: The user's built model; it is the server's.
          training: How clients train.
          mechanism: What is released about a cohort.
          deployment: Where; the number of variables is filled in.
          element_spec: `(features, labels)` specs of one example.
          server_optimizer: A Keras optimizer, or None for w <- w + mean.
          broadcast_hook: Called on the weights (a list of tensors) and the
            round's seed before they go to the clients; or None.
          aggregate_non_trainable: Whether non-trainable state leaves clients.
          moments: Whether to compute Geyer's V_c and U_s.
          collect_records: Whether each client's record is wanted by itself.
          num_replicas: Clients trained at once; None: one for each core.
          jit_compile: Whether XLA compiles local training; None decides by
            `compile_choice`.
          batch_size: The usual batch size, for that decision.
        """
        self._model = model
        self._broadcast_hook = broadcast_hook
        self._moments = moments
        self._collect_records = collect_records
        count = num_replicas or replicas.default_num_replicas()
        replicas.check_layers(model)
        models = _replicas_of(model, element_spec[0], count)
        self._trainers = [
            client_update.ClientTrainer(
                each, training, element_spec, aggregate_non_trainable
            )
            for each in models
        ]
        self._check_state(models[0], element_spec)
        query = mechanism.bind(
            dataclasses.replace(
                deployment,
                num_variables=len(self._trainers[0].variables),
                shapes=tuple(
                    tuple(each.shape) for each in self._trainers[0].variables
                ),
            )
        )
        self.query = self._query = query
        self._jit_compile = (
            compile_choice.prefers_xla(model, batch_size)
            if jit_compile is None
            else jit_compile
        )
        first, replica = self._trainers[0], models[0]
        trainable = len(model.trainable_weights)
        matching = {
            id(theirs): ours
            for theirs, ours in zip(
                keras_versions.tf_variables(replica.non_trainable_weights),
                keras_versions.tf_variables(model.non_trainable_weights),
                strict=True,
            )
        }
        self.server = server_update.ServerUpdate(
            model.trainable_weights,
            [matching[id(each)] for each in first.variables[trainable:]],
            server_optimizer,
        )
        self._unheard = [matching[id(each)] for each in first.replica_state]
        self._shapes = [each.shape for each in self.server.variables]
        self._dtypes = [
            client_update.for_record(tf.zeros([], each.dtype)).dtype
            for each in self.server.variables
        ]
        self._element_spec = element_spec
        self._label_ranges = first.label_ranges
        self._has_trained = False
        self.state = query.initial_global_state()
        self._functions: dict[Any, Any] = {}
        self._log_names: list[str] = []
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._models = models
        self._batch_size = batch_size
        self._lockstep = (
            jit_compile is None
            and not moments
            and not collect_records
            and dense_cohort.supports(models[0], training, query)
        )
        self._kernels = (
            dense_cohort.kernels_of(models[0]) if self._lockstep else None
        )

    @property
    def num_replicas(self) -> int:
        """Returns how many clients train at once."""
        return len(self._trainers)

    @property
    def jit_compile(self) -> bool:
        """Returns whether local training is compiled by XLA."""
        return self._jit_compile

    @property
    def keeps_non_trainable(self) -> bool:
        """Returns True if there is state that is not taken from clients."""
        return bool(self._unheard)

    @property
    def num_variables(self) -> int:
        """Returns how many tensors a client's record has."""
        return len(self._shapes)

    def _check_state(self, model: tf.keras.Model, element_spec: Any) -> None:
        """Raises ValueError if something would pass from client to client."""
        trainer = self._trainers[0]

        def client_step() -> Any:
            weights = [each.read_value() for each in trainer.variables]
            others = [each.read_value() for each in trainer.replica_state]
            rate = tf.constant(0.0)
            trainer.start_metrics()
            trainer.start(weights, others, rate, tf.zeros([2], tf.int64))
            x, y = (replicas.zeros_like_batch(each) for each in element_spec)
            # Keras names things in ways that are no names by themselves.
            with tf.name_scope("client"):
                trainer.step(x, y, weights, rate)
            return trainer.update(weights)

        replicas.check_state(
            model,
            client_step,
            [*trainer.assigned_variables, *trainer.noted_variables],
        )

    def check_labels(self, dataset: FederatedDataset) -> None:
        """Raises ValueError if a client's labels cannot be the model's."""
        labels.check_clients(dataset, self._label_ranges)

    # Half one: train and add up.

    def collect(
        self, dataset: FederatedDataset, inputs: RoundInputs
    ) -> PendingRound:
        """Trains a cohort and adds up what its clients hand in.

        Args:
          dataset: Where the cohort's examples come from.
          inputs: The round.

        Returns:
          A `PendingRound`; the model and the state have not changed.
        """
        pending = self.empty_round(inputs)
        pending.broadcast = self._broadcast(inputs)
        for chunk in self.chunks(dataset, inputs, pending.failures):
            self.run_chunk(pending, chunk)
        self.complete(pending)
        return pending

    # The steps of `collect`, for runtimes that run the functions elsewhere.

    @property
    def output(self) -> str:
        """Returns what a cohort function has to return: see `CohortOptions`."""
        if self._query.two_phase:
            return cohort.COLLECT_UPDATES
        return cohort.COLLECT_RECORDS if self._collect_records else cohort.SUM

    def empty_round(self, inputs: RoundInputs) -> PendingRound:
        """Returns a round of which nothing is collected yet."""
        pending = PendingRound(
            inputs=inputs,
            state=self.state,
            tensors=self._round_tensors(inputs),
            broadcast=(),
            sums=[()] * self.num_replicas,
            metric_states=[()] * self.num_replicas,
            collected=[[] for _ in range(self.num_replicas)],
            window_norms=None,
        )
        if self._query.keeps_window:
            pending.window_norms = np.full(
                [len(inputs.positions), self.num_variables], np.nan, np.float32
            )
        return pending

    def complete(self, pending: PendingRound) -> None:
        """Ends collecting, once every chunk was added.

        Raises:
          tf.errors.OpError: Nobody could ever be trained: it is the model.
        """
        cohort_size = len(pending.inputs.positions)
        if (
            pending.training_error is not None
            and not self._has_trained
            and len(pending.failures) == cohort_size > 1
        ):
            raise pending.training_error
        ran = [r for r, total in enumerate(pending.sums) if total != ()]
        for name in ("sums", "metric_states", "collected"):
            each = getattr(pending, name)
            setattr(pending, name, [each[replica] for replica in ran])
        if self._query.two_phase:
            params = self._set_clip(pending)
            if self._collect_records:
                self._clip_each(pending, params)
            else:
                self._clip_and_sum(pending, params)

    def begin(self, inputs: RoundInputs) -> tuple[Any, Any, Any, Any]:
        """Returns what clients need of the server.

        Returns:
          `(state, params, weights, unheard)`: the query's state and sample
          params, and the values of the variables that clients train and of
          those that they only use.
        """
        return self._once("begin", self._begin)(
            self.state, *self._round_tensors(inputs)
        )

    @staticmethod
    def _round_tensors(inputs: RoundInputs) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a round's numbers: float32 [z, m, learning rate], seed."""
        numbers = np.array(
            [
                inputs.noise_multiplier,
                inputs.clients_per_round,
                inputs.learning_rate,
            ],
            np.float32,
        )
        seed = np.asarray(inputs.seed, np.int64)
        return tf.convert_to_tensor(numbers), tf.convert_to_tensor(seed)

    def _broadcast(self, inputs: RoundInputs) -> Any:
        """Returns one set of noised weights for all replicas, () for none."""
        if self._broadcast_hook is None:
            return ()
        return self.begin(inputs)[2]

    def _begin(self, state, numbers, seed, broadcast=()):
        state = self._query.begin_round(state, numbers[0], numbers[1])
        weights = list(broadcast)
        if not weights:
            weights = [each.read_value() for each in self.server.variables]
            if self._broadcast_hook is not None:
                with noise.seeded(noise.fold_in(seed, -2)):
                    weights = list(
                        self._broadcast_hook(weights, noise.fold_in(seed, -3))
                    )
        unheard = [each.read_value() for each in self._unheard]
        params = tf.nest.map_structure(
            tf.convert_to_tensor,
            ()
            if self._query.two_phase
            else self._query.derive_sample_params(state),
        )
        return state, params, weights, unheard

    def chunks(
        self,
        dataset: FederatedDataset,
        inputs: RoundInputs,
        failures: list[ClientFailure],
    ) -> Iterator[CohortChunk]:
        """Yields the cohort's data, at least one chunk, in bounded pieces."""
        positions = inputs.positions
        if dataset.is_indexed:
            x, y = dataset.flat()
            rows, lengths = dataset.client_rows(positions)
            yield CohortChunk(x, y, rows, lengths, np.arange(len(positions)))
            return
        with concurrent.futures.ThreadPoolExecutor(1) as reader:
            chunks = _streamed_chunks(
                dataset,
                positions,
                failures,
                self._element_spec,
                self._label_ranges,
                # XLA compiles for every number of rows that it meets.
                batching.padded_length if self._jit_compile else int,
            )
            ahead = reader.submit(next, chunks, None)
            while (chunk := ahead.result()) is not None:
                ahead = reader.submit(next, chunks, None)
                yield chunk

    def parts(
        self,
        chunk: CohortChunk,
        inputs: RoundInputs,
        num_groups: int,
        *,
        if_small: int = 1,
        portable: bool = False,
    ) -> list[list[CohortPart]]:
        """Shares a chunk's clients out and lays out their training.

        Args:
          chunk: The clients.
          inputs: The round.
          num_groups: How many groups may train at the same time.
          if_small: How many, where starting another thread would cost more
            than it saves.
          portable: Whether one function, without XLA, has to serve all parts.

        Returns:
          At most so many groups, at least one. The parts of a group come one
          after the other: each is bounded in the memory that it takes.
        """
        whole = _plan(chunk, inputs)
        side_by_side = self._lockstep and dense_cohort.pays(
            self._kernels,
            chunk.lengths,
            inputs.batch_size,
            inputs.local_epochs,
        )
        all_clients = at_once = len(chunk.lengths) or 1
        if side_by_side:
            examples = int(chunk.lengths.max()) * inputs.local_epochs
            at_once = dense_cohort.clients_at_once(self._kernels, examples)
        elif self.output != cohort.SUM:
            width = sum(shape.num_elements() for shape in self._shapes)
            at_once = max(1, CHUNK_BYTES // (4 * width))
        inside = None
        if portable and side_by_side:  # A second call costs a second message.
            inside, at_once = at_once, all_clients
        small = side_by_side and dense_cohort.is_small(
            self._kernels, chunk.lengths, inputs.local_epochs
        )
        if small:
            num_groups = min(num_groups, if_small)
        groups = [np.arange(whole.num_clients)]
        if num_groups > 1:
            groups = batching.share_out(np.diff(whole.first_step), num_groups)
            groups = [group for group in groups if len(group)] or groups[:1]
        most = max(map(len, groups))
        if side_by_side and at_once < most and not portable:
            # One call, which adds up in place.
            inside, at_once, small = at_once, all_clients, False
        return [
            [
                self._part(
                    batching.select(whole, group[start : start + at_once]),
                    inputs,
                    side_by_side,
                    whole if portable else None,
                    inside,
                    few=small and not portable,
                )
                for start in range(0, max(len(group), 1), at_once)
            ]
            for group in groups
        ]

    def _part(
        self,
        plan: batching.BatchPlan,
        inputs: RoundInputs,
        side_by_side: bool,
        serving: batching.BatchPlan | None = None,
        at_once: int | None = None,
        few: bool = False,
    ) -> CohortPart:
        """Lays out a part, perhaps for a function that serves a whole plan."""
        portable = serving is not None
        serving = serving if portable else plan
        full = not serving.has_short_batches
        if side_by_side and plan.num_clients:
            steps = np.diff(serving.first_step)
            most = int(steps.max())
            full = full and bool((steps == most).all())
            table = dense_cohort.lockstep(plan, most)
            tables = (table,) if at_once is None else (table, np.int32(at_once))
            kind = _LOCKSTEP_FEW if few else _LOCKSTEP
            return CohortPart((kind, full, most), tables, plan)
        windows = np.zeros([plan.num_clients, 0, 0], np.float32)
        if self._query.keeps_window:
            windows = inputs.windows[plan.members].astype(np.float32)
        padded = plan
        if self._compiles(full) and not portable:
            padded = batching.pad_plan(plan)
            more = len(padded.members) - plan.num_clients
            windows = np.pad(
                windows, ((0, more), (0, 0), (0, 0)), constant_values=np.nan
            )
        table = cohort.ClientTable(
            padded.rows,
            padded.batch_sizes,
            padded.first_step,
            padded.members,
            padded.num_examples,
            windows,
        )
        return CohortPart(
            (self.output, full, None),
            (table, np.int32(plan.num_clients)),
            plan,
        )

    def _compiles(self, full: bool, kind: str | None = None) -> bool:
        lockstep = kind in (_LOCKSTEP, _LOCKSTEP_FEW)
        return bool(self._jit_compile and full and not lockstep)

    def part_function(
        self,
        function: tuple[str, bool, int | None],
        replica: int = 0,
        jit_compile: bool = False,
    ) -> Callable[..., tuple[Any, list[tf.Tensor], tf.Tensor]]:
        """Returns the function that trains a part's clients, not traced.

        It takes (weights, unheard, params, learning rate, seed, x, y, *tables)
        and returns what `CohortFunction` does. It trains in one replica's
        variables, and assigns all of `assigned_variables` before it reads them.
        """
        kind, full, steps = function
        trainer = self._trainers[replica]
        if kind in (_LOCKSTEP, _LOCKSTEP_FEW):
            dense = dense_cohort.DenseCohortFunction(
                self._models[replica],
                trainer,
                self._query,
                steps,
                full,
                all_usable=kind == _LOCKSTEP_FEW,
            )

            def side_by_side(
                weights,
                unheard,
                params,
                learning_rate,
                seed,
                x,
                y,
                table,
                at_once=None,
            ):
                del unheard, seed
                (x,), (y,) = tf.nest.flatten(x), tf.nest.flatten(y)
                arguments = (weights, params, x, y, table, learning_rate)
                if at_once is None:
                    result, metrics = dense(*arguments)
                else:
                    result, metrics = dense.in_groups(*arguments, at_once)
                return result, metrics, tf.zeros([0, 0])

            return side_by_side
        general = cohort.CohortFunction(
            trainer,
            self._query,
            cohort.CohortOptions(
                output=kind,
                full_batches=full,
                moments=self._moments,
                jit_compile=jit_compile,
            ),
        )

        def one_by_one(
            weights, unheard, params, learning_rate, seed, x, y, table, count
        ):
            return general(
                weights,
                unheard,
                params,
                x,
                y,
                table,
                count,
                learning_rate,
                seed,
            )

        return one_by_one

    def assigned_variables(self, replica: int = 0) -> list[tf.Variable]:
        """Returns what a replica's functions assign before they read it."""
        return self._trainers[replica].assigned_variables

    def run_chunk(self, pending: PendingRound, chunk: CohortChunk) -> None:
        """Trains a chunk's clients here; adds to `pending`."""
        groups = self.parts(chunk, pending.inputs, self.num_replicas)
        calls = [
            [self._prepared(replica, pending, chunk, part) for part in group]
            for replica, group in enumerate(groups)
        ]

        raised: list[tuple[CohortPart, Exception]] = []

        def run(replica: int) -> None:
            for call in calls[replica]:
                try:
                    returned = call()
                except _CLIENT_ERRORS as error:
                    raised.append((call.part, error))
                    continue
                kind, *rest = call.part.function
                if kind == _LOCKSTEP_FEW and not (
                    returned[0].record.discarded.numpy() == 0
                    and math.isfinite(returned[0].loss.numpy())
                ):
                    careful = dataclasses.replace(
                        call.part, function=(_LOCKSTEP, *rest)
                    )
                    returned = self._prepared(
                        replica, pending, chunk, careful
                    )()
                self.take(pending, call.part, returned, replica)
                self._has_trained |= call.part.plan.num_clients > 0

        if len(calls) == 1:
            run(0)
        else:
            list(self._pool.map(run, range(len(calls))))
        for part, error in raised:
            self._run_one_by_one(pending, chunk, part, error)

    def _run_one_by_one(
        self,
        pending: PendingRound,
        chunk: CohortChunk,
        part: CohortPart,
        error: Exception,
    ) -> None:
        """Trains the clients of a part in which one's data raised an error.

        Who raises it alone has failed; the others are none the worse for it.
        """
        failures, members = [], part.plan.members.tolist()
        for place, member in enumerate(members):
            alone = self._part(
                batching.select(part.plan, np.array([place])),
                pending.inputs,
                side_by_side=False,
            )
            try:
                self.take(
                    pending,
                    alone,
                    self._prepared(0, pending, chunk, alone)(),
                )
            except _CLIENT_ERRORS as own:
                position = int(pending.inputs.positions[member])
                failures.append(ClientFailure(position, own))
        if len(failures) == len(members):  # Nothing is a sum as well.
            nobody = self._part(
                batching.select(part.plan, np.zeros(0, np.int64)),
                pending.inputs,
                side_by_side=False,
            )
            returned = self._prepared(0, pending, chunk, nobody)()
            self.take(pending, nobody, returned)
        self._has_trained |= len(failures) < len(members)
        pending.failures += failures
        pending.training_error = error

    def _prepared(
        self,
        replica: int,
        pending: PendingRound,
        chunk: CohortChunk,
        part: CohortPart,
    ) -> _Call:
        """Has a part's function traced, and its arguments made.

        Everything that is Python happens here, in one thread.
        """
        arguments = (
            pending.state,
            *pending.tensors,
            pending.broadcast,
            chunk.x,
            chunk.y,
            *part.tables,
        )
        key = (replica, *part.function, len(part.tables))
        if key not in self._functions:
            self._functions[key] = self._traced(
                replica, part.function, arguments
            )
        flat = [
            each if isinstance(each, tf.Tensor) else tf.convert_to_tensor(each)
            for each in _flat(arguments)
        ]
        return _Call(self._functions[key], flat, part)

    def _traced(
        self,
        replica: int,
        which: tuple[str, bool, int | None],
        arguments: tuple,
    ) -> Any:
        """Returns a compiled function of one replica, for any cohort size."""
        kind, full, _ = which
        jit_compile = self._compiles(full, kind)
        train = self.part_function(which, replica, jit_compile)

        def function(state, numbers, seed, broadcast, x, y, *tables):
            # TensorFlow may turn sums into temporary variables, which it names
            # by the graph's nodes, in one place for all that runs: replicas
            # must not share names.
            with tf.name_scope(f"replica_{replica}"):
                _, params, weights, unheard = self._begin(
                    state, numbers, seed, broadcast
                )
                return train(
                    weights, unheard, params, numbers[2], seed, x, y, *tables
                )

        fixed, tables = arguments[:4], arguments[6:]
        return flat_functions.concrete_function(
            tf.function(
                function,
                jit_compile=jit_compile,
                autograph=False,
            ),
            kind == _LOCKSTEP_FEW,
            *tf.nest.map_structure(
                lambda each: tf.TensorSpec(each.shape, each.dtype), fixed
            ),
            *self.example_specs(),
            *table_specs(tables),
        )

    def example_specs(self) -> tuple[Any, Any]:
        """Returns the specs of (x, y), for any number of stored examples."""
        return tf.nest.map_structure(
            lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype),
            self._element_spec,
        )

    def take(
        self,
        pending: PendingRound,
        part: CohortPart,
        returned: tuple[Any, Any, Any],
        replica: int = 0,
    ) -> None:
        """Adds what a part's function returned (tensors) to `pending`."""
        result, metrics, norms = returned
        members, count = part.plan.members, part.plan.num_clients
        if isinstance(result[0], cohort.CollectedUpdates):
            collected, result = result
            if count < len(collected.norms):
                collected = tf.nest.map_structure(
                    lambda each: each[:count], collected
                )
            if count:
                pending.collected[replica].append((members, collected))
        if self._query.keeps_window:
            pending.window_norms[members] = norms.numpy()[:count]
        self.add(pending, result, metrics, replica)

    def add(
        self,
        pending: PendingRound,
        result: cohort.CohortSum,
        metrics: list[tf.Tensor],
        replica: int = 0,
    ) -> None:
        """Adds the sum of some clients to `pending`."""
        if pending.sums[replica] != ():
            result = _added(pending.sums[replica], result)
            metrics = _added(pending.metric_states[replica], metrics)
        pending.sums[replica] = result
        pending.metric_states[replica] = metrics

    def _set_clip(self, pending: PendingRound) -> Any:
        """Sets the clip from all norms; returns the sample params."""
        parts = [part for group in pending.collected for part in group]
        norms = np.zeros(len(pending.inputs.positions), np.float32)
        answered = np.zeros(len(norms), bool)
        for members, collected in parts:
            norms[members] = collected.norms.numpy()
            answered[members] = True
        pending.state, params = self._once("clip", self._clip_to_cohort)(
            pending.state,
            *pending.tensors,
            tf.constant(norms[answered]),
        )
        return params

    def _clip_each(self, pending: PendingRound, params: Any) -> None:
        """Makes records of the updates, for a sum that is formed elsewhere."""
        preprocess = self._once("clip_each", self._preprocess_collected)
        seed = tf.constant(pending.inputs.seed)
        for group in pending.collected:
            for place, (members, collected) in enumerate(group):
                records = preprocess(
                    params, collected.updates, tf.constant(members), seed
                )
                group[place] = (members, records)

    def _clip_and_sum(self, pending: PendingRound, params: Any) -> None:
        """Clips and adds up each update."""
        parts = [part for group in pending.collected for part in group]
        seed = tf.constant(pending.inputs.seed)
        add_up = self._once("add_up", self._sum_collected)

        def run(replica: int) -> Any:
            total = self._query.initial_sample_state(
                [
                    tf.zeros(shape, dtype)
                    for shape, dtype in zip(
                        self._shapes, self._dtypes, strict=True
                    )
                ]
            )
            for members, collected in pending.collected[replica]:
                total = _added(
                    total,
                    add_up(
                        params, collected.updates, tf.constant(members), seed
                    ),
                )
            return total

        for members, collected in parts[:1]:  # Traced before the threads run.
            add_up(params, collected.updates[:0], members[:0], seed)
        records = list(self._pool.map(run, range(len(pending.sums))))
        pending.sums = [
            each._replace(record=record)
            for each, record in zip(pending.sums, records, strict=True)
        ]
        pending.collected = []

    def _clip_to_cohort(self, state, numbers, seed, norms):
        state = self._query.begin_round(state, numbers[0], numbers[1])
        with noise.seeded(noise.fold_in(seed, -4)):
            state = self._query.clip_to_cohort(state, norms)
        return state, self._query.derive_sample_params(state)

    def _sum_collected(self, params, updates, members, seed):
        return cohort.sum_collected(
            self._query,
            params,
            updates,
            members,
            seed,
            self._shapes,
            self._dtypes,
        )

    def _preprocess_collected(self, params, updates, members, seed):
        return cohort.preprocess_collected(
            self._query,
            params,
            updates,
            members,
            seed,
            self._shapes,
            self._dtypes,
        )

    def _once(self, name: str, function: Callable[..., Any]) -> Any:
        if name not in self._functions:
            self._functions[name] = tf.function(
                function, reduce_retracing=True, autograph=False
            )
        return self._functions[name]

    def set_record_sum(
        self, pending: PendingRound, total: np.ndarray | None
    ) -> None:
        """Takes the sum of the records from elsewhere (secure aggregation).

        Args:
          pending: A round whose records were collected one by one.
          total: Float [D + ...], the sum over clients of the flattened update
            followed by the record's scalars; None if there is nothing.
        """
        width = sum(shape.num_elements() for shape in self._shapes)
        if total is None:
            total = np.zeros(width + self._query.num_scalars)
        total = tf.constant(total, tf.float32)
        update = cohort.unflatten(total[:width], self._shapes, self._dtypes)
        record = self._query.initial_sample_state([]).with_scalars(
            update, tf.unstack(total[width:], num=self._query.num_scalars)
        )
        zeros = tf.nest.map_structure(tf.zeros_like, record)
        pending.sums = [
            each._replace(record=record if replica == 0 else zeros)
            for replica, each in enumerate(pending.sums)
        ]
        pending.collected = []

    # Half two: release.

    def release(self, pending: PendingRound) -> dict[str, float]:
        """Adds the noise, divides, and updates the model and the state.

        Args:
          pending: What `collect` returned, charged by now.

        Returns:
          The round's values for `History`, by name.
        """
        answered = len(pending.inputs.positions) - len(pending.failures)
        arguments = (
            pending.sums,
            pending.metric_states,
            pending.state,
            *pending.tensors,
            tf.convert_to_tensor(np.float32(answered)),
        )
        key = ("release", len(pending.sums))
        if key not in self._functions:
            size = sum(shape.num_elements() for shape in self._shapes)
            self._functions[key] = flat_functions.concrete_function(
                tf.function(self._release_round, autograph=False),
                size <= _SMALL_RELEASE,
                *arguments,
            )
        call = _Call(self._functions[key], _flat(arguments))
        self.state, values = call()
        return dict(zip(self._log_names, values.numpy().tolist(), strict=True))

    def _release_round(
        self, sums, metric_states, state, numbers, seed, answered
    ):
        state = self._query.begin_round(state, numbers[0], numbers[1])
        total = sums[0]
        for each in sums[1:]:
            merged = self._query.merge_sample_states(total.record, each.record)
            total = tf.nest.map_structure(
                tf.add, total._replace(record=()), each._replace(record=())
            )._replace(record=merged)
        with noise.seeded(noise.fold_in(seed, -1)):
            mean, new_state, _ = self._query.get_noised_result(
                total.record, state
            )
        record = total.record
        if self._query.mechanism.releases_weights:
            tf.cond(
                record.weight > 0,
                lambda: self._replaced(mean),
                lambda: True,
            )
        else:
            self.server.apply(mean)
        metrics = [
            tf.add_n(list(each)) for each in zip(*metric_states, strict=True)
        ]
        logs = {"loss": tf.math.divide_no_nan(total.loss, total.examples)}
        logs.update(self._trainers[0].metric_results(metrics))
        logs.update(self._query.derive_metrics(state))
        logs["clipped_fraction"] = tf.math.divide_no_nan(
            record.clipped, answered
        )
        logs["mean_update_norm"] = tf.math.divide_no_nan(record.norm, answered)
        logs["discarded_clients"] = record.discarded
        if self._moments:
            logs.update(_variance_and_scale(total.moments))
        self._log_names = list(logs)
        values = [tf.cast(value, tf.float32) for value in logs.values()]
        return new_state, tf.stack(values)

    def _replaced(self, weights: list[tf.Tensor]) -> bool:
        self.server.replace(weights)
        return True


def _variance_and_scale(moments: cohort.Moments) -> dict[str, tf.Tensor]:
    """Returns Geyer's V_c and U_s (Geyer et al. 2017, Section 3).

    V_c is the mean over parameters of the variance across clients, U_s the
    mean over parameters of the squared mean.
    """
    variance, scale, size = 0.0, 0.0, 0
    for first, second in zip(moments.first, moments.second, strict=True):
        mean = tf.math.divide_no_nan(first, moments.count)
        spread = tf.math.divide_no_nan(second, moments.count) - mean * mean
        variance += tf.reduce_sum(tf.maximum(spread, 0))
        scale += tf.reduce_sum(mean * mean)
        size += first.shape.num_elements()
    return {
        "between_client_variance": variance / size,
        "update_scale": scale / size,
    }


def _replicas_of(
    model: tf.keras.Model, features: Any, count: int
) -> list[tf.keras.Model]:
    return [replicas.clone(model, features) for _ in range(count)]


def _plan(chunk: CohortChunk, inputs: RoundInputs) -> batching.BatchPlan:
    """Lays out the training of a chunk's clients."""
    plan = batching.make_plan(
        chunk.rows,
        chunk.lengths,
        inputs.batch_size,
        inputs.local_epochs,
        inputs.shuffle,
    )
    return dataclasses.replace(plan, members=chunk.members.astype(np.int32))


def _streamed_chunks(
    dataset: FederatedDataset,
    positions: np.ndarray,
    failures: list[ClientFailure],
    element_spec: tuple[Any, Any],
    label_ranges: list[labels.LabelRange],
    rows_for: Callable[[int], int],
) -> Iterator[CohortChunk]:
    """Reads clients one after the other into chunks of bounded size.

    A client with labels that are not allowed failed.

    A chunk of n examples has `rows_for(n)` rows, the rest of them zeros.
    """
    held: list[tuple[int, Any, Any]] = []
    size = 0
    sent = False
    for member, client in enumerate(dataset.read_clients(positions)):
        if isinstance(client, ClientFailure):
            failures.append(client)
            continue
        problem = labels.problem_of_client(client.y, label_ranges)
        if problem is not None:
            failures.append(ClientFailure(int(positions[member]), problem))
            continue
        if held and _shapes(held[-1]) != _shapes((member, client.x, client.y)):
            # Of another length, where the spec leaves it open.
            yield _packed(held, element_spec, rows_for)
            held, size, sent = [], 0, True
        held.append((member, client.x, client.y))
        size += sum(
            array.nbytes for array in tf.nest.flatten((client.x, client.y))
        )
        if size >= CHUNK_BYTES:
            yield _packed(held, element_spec, rows_for)
            held, size, sent = [], 0, True
    if held or not sent:
        yield _packed(held, element_spec, rows_for)


def _shapes(client: tuple[int, Any, Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of one example of a client, tensor by tensor."""
    _, x, y = client
    return [np.shape(each)[1:] for each in tf.nest.flatten((x, y))]


def _packed(
    clients: list[tuple[int, Any, Any]],
    element_spec: tuple[Any, Any],
    rows_for: Callable[[int], int],
) -> CohortChunk:
    """Puts some clients' examples into one tensor for each feature."""
    lengths = np.asarray(
        [len(tf.nest.flatten(y)[0]) for _, _, y in clients], np.int64
    )
    total = int(lengths.sum())
    padding = rows_for(total) - total

    def pack(spec: tf.TensorSpec, *arrays: np.ndarray) -> tf.Tensor:
        if not total:  # A gather needs a tensor to read nothing from.
            shape = [max(1, padding), *[dim or 1 for dim in spec.shape]]
            return tf.zeros(shape, spec.dtype)
        if padding:
            none = np.zeros([padding, *arrays[0].shape[1:]], arrays[0].dtype)
            arrays = (*arrays, none)
        return tf.constant(np.concatenate(arrays), spec.dtype)

    x = tf.nest.map_structure(
        pack, element_spec[0], *[x for _, x, _ in clients]
    )
    y = tf.nest.map_structure(
        pack, element_spec[1], *[y for _, _, y in clients]
    )
    return CohortChunk(
        x,
        y,
        np.arange(total),
        lengths,
        np.asarray([member for member, _, _ in clients], np.int64),
    )
