"""Runs the rounds of a cohort on this machine's cores.

The way of a client's update, from the dataset to the released model:

    collect                     chunks.Reader: the cohort's examples
      train_chunk               layout.lay_out: who trains with whom, on what
                                  tables.client_table, tables.split
        tracing.prepared        the compiled function and its arguments
          server_update.received  what the server sends
          OneByOne              one client after the other (or SideBySide, or
                                a Batched chunk of them on a GPU):
            Trainer               start, step by step, update
            query                 preprocess_record (clip), accumulate (add)
        PendingRound.take       adds up what the functions return
      complete                  a clip that depends on the whole cohort
    release                     Release: get_noised_result (noise, mean),
                                  ServerUpdate.apply (the model moves)

The cohort of the round after it is read and laid out while this one trains, by
a `background.BackgroundThread`: `RoundInputs.chunk`, `chunks.Reader.expect`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.datasets import ClientFailure, FederatedDataset
from tfdp_fl.engine import (
    allowed_operations,
    background,
    chunks,
    cohort,
    dense_models,
    devices,
    example_weights,
    joint_clip,
    labels,
    layout,
    release,
    rounds,
    server_update,
    tables,
    tracing,
)
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib

# What one client's data can make TensorFlow raise, such as an index that no
# embedding has.
CLIENT_ERRORS = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    tf.errors.UnknownError,
)


class CohortEngine:
    """Trains cohorts of clients, and updates the model.

    A round has two halves: `collect` trains and adds up, `release` adds the
    noise and lets the model change. In between nobody has seen anything, so
    that is where a round is written to the ledger, or abandoned.

    Attributes:
      device: Where everything is computed: where the model's weights are.
      server: The `ServerUpdate` that holds the model's weights.
      query: The mechanism's query.
      state: The query's state, before the coming round.
      update_spec: What one client hands in.
      read_chunks: Yields the examples of `(dataset, pending)`; a
        `chunks.Reader`, who may be told whose come next.
      layout: How cohorts are laid out.
      functions: The compiled functions that train clients.
      num_replicas: How many clients train at once.
      has_trained: Whether anybody's training has ever succeeded.
    """

    def __init__(
        self,
        *,
        model: tf.keras.Model,
        training: trainer_lib.LocalTraining,
        mechanism: mechanism_lib.Mechanism,
        deployment: contribution.Deployment,
        element_spec: tuple[Any, Any],
        server_optimizer: tf.keras.optimizers.Optimizer | None = None,
        broadcast_hook: server_update.BroadcastHook | None = None,
        aggregate_non_trainable: bool = True,
        moments: bool = False,
        collect_records: bool = False,
        num_replicas: int | None = None,
        jit_compile: bool | None = None,
        batch_size: int = 1,
    ):
        """Traces, and so checks, how clients train one by one.

        Other functions are traced when a round needs them.

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
          collect_records: Whether each client's contribution is wanted itself.
          num_replicas: Clients trained at once; None: one for each core.
          jit_compile: Whether XLA compiles local training; None decides by
            `devices.prefers_xla`.
          batch_size: The usual batch size, for that decision.

        Raises:
          ValueError: Something could pass from one client to the next; or the
            model, the training and the mechanism do not go together.
        """
        self._collect_records = collect_records
        self.has_trained = False
        self.device = devices.home_of(model)
        count = num_replicas or devices.default_num_replicas(self.device)
        with tf.device(self.device):
            trainer = trainer_lib.make_trainer(
                model, training, element_spec, aggregate_non_trainable
            )
        example_weights.check_weighting(element_spec[1], deployment.client_weighting)
        self._label_ranges = trainer.label_ranges
        self.query = mechanism.bind(
            dataclasses.replace(
                deployment,
                num_variables=len(trainer.aggregated),
                shapes=tuple(tuple(each.shape) for each in trainer.aggregated),
            )
        )
        self.state = self.query.initial_global_state()
        trainable = len(model.trainable_weights)
        self.server = server_update.ServerUpdate(
            trainer.aggregated[:trainable],
            trainer.aggregated[trainable:],
            server_optimizer,
        )
        self._unaggregated = keras_versions.tf_variables(trainer.unaggregated)
        self.update_spec = cohort.UpdateSpec.of(self.server.variables)
        prefers_xla = devices.prefers_xla(model, batch_size)
        xla = prefers_xla if jit_compile is None else bool(jit_compile)
        summed = self.output == cohort.SUM
        beside = (
            keras_versions.IS_KERAS_3
            and jit_compile is None
            and summed
            and not moments
            and dense_models.supports(model, training, self.query, element_spec[1])
        )
        self.layout = layout.Layout(
            kernels=dense_models.kernels_of(model) if beside else None,
            collected_bytes=None if summed else 4 * self.update_spec.size,
            xla=xla,
            weighting=deployment.client_weighting,
            at_once=devices.clients_at_once(
                self.device, model, self.update_spec.size, batch_size
            ),
        )
        self._broadcasts = server_update.Broadcast(
            self.server, self._unaggregated, broadcast_hook
        )
        self.functions = tracing.CohortFunctions(
            trainer=trainer,
            query=self.query,
            element_spec=element_spec,
            output=self.output,
            moments=moments,
        )
        self.read_chunks = chunks.Reader(
            element_spec=element_spec,
            label_ranges=trainer.label_ranges,
            padded=xla,
        )
        self._joint_clip = joint_clip.JointClip(self.query, self.update_spec)
        self._release = release.Release(
            self.query, self.server, trainer.metric_results, self.update_spec.size
        )
        batched = self.layout.at_once is not None
        if batched or not beside:  # Whose model, loss and optimizer are on a list.
            with tf.device(self.device):
                program = self.functions.trace_one_by_one(
                    (
                        self.state,
                        tf.zeros([3]),
                        tf.zeros([2], tf.uint64),
                        self.server.variables,
                        self._unaggregated,
                    ),
                    weighted=deployment.client_weighting is not None,
                )
            if not allowed_operations.can_be_batched(program.definition):
                self.layout = dataclasses.replace(self.layout, at_once=None)
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self.num_replicas = count

    @property
    def background(self) -> background.BackgroundThread:
        """Returns what works while clients train."""
        return self.read_chunks.thread

    @property
    def jit_compile(self) -> bool:
        """Returns whether local training is compiled by XLA."""
        return self.layout.xla

    @property
    def keeps_non_trainable(self) -> bool:
        """Returns True if there is state that is not taken from clients."""
        return bool(self._unaggregated)

    @property
    def num_variables(self) -> int:
        """Returns how many tensors a client's update has."""
        return len(self.update_spec.shapes)

    @property
    def output(self) -> str:
        """Returns what is wanted of a cohort: see `cohort.SUM`."""
        if self.query.two_phase:
            return cohort.EACH_UPDATE
        return cohort.EACH_CONTRIBUTION if self._collect_records else cohort.SUM

    @property
    def has_trained_side_by_side(self) -> bool:
        """Returns whether any clients so far were trained side by side."""
        return any(way.kind == layout.SIDE_BY_SIDE for way, _ in self.functions.traced)

    @property
    def executor(self) -> str:
        """Returns how clients train here, for people to read."""
        ways = {way.kind for way, _ in self.functions.traced}
        if layout.BATCHED in ways:
            place = tf.DeviceSpec.from_string(self.device)
            where = f"{place.device_type}:{place.device_index or 0}"
            return f"batches of {self.layout.at_once} clients on {where}"
        how = layout.SIDE_BY_SIDE if layout.SIDE_BY_SIDE in ways else layout.ONE_BY_ONE
        return f"clients {how} on {self.num_replicas} threads"

    def check_labels(self, dataset: FederatedDataset) -> None:
        """Raises ValueError if a client's labels cannot be the model's."""
        labels.check_clients(dataset, self._label_ranges)

    # Half one: train and add up. Its steps are public for runtimes that run
    # the functions elsewhere.

    @devices.at_home
    def collect(
        self, dataset: FederatedDataset, inputs: rounds.RoundInputs
    ) -> rounds.PendingRound:
        """Trains a cohort and adds up what its clients hand in.

        Args:
          dataset: Where the cohort's examples come from.
          inputs: The round.

        Returns:
          A `PendingRound`; the model and the state have not changed.
        """
        pending = self.empty_round(inputs)
        ahead = None if self.query.keeps_window else self.lay_out
        for chunk in self.read_chunks(dataset, pending, ahead):
            self.train_chunk(pending, chunk)
        self.complete(pending)
        return pending

    @devices.at_home
    def empty_round(self, inputs: rounds.RoundInputs) -> rounds.PendingRound:
        """Returns a round of which nothing is collected yet."""
        norms = None
        if self.query.keeps_window:
            shape = [len(inputs.positions), self.num_variables]
            norms = np.full(shape, np.nan, np.float32)
        return rounds.PendingRound(
            inputs=inputs,
            state=self.state,
            tensors=inputs.tensors(),
            sent=self._broadcasts(inputs),
            sums=[()] * self.num_replicas,
            metric_states=[()] * self.num_replicas,
            collected=[[] for _ in range(self.num_replicas)],
            window_norms=norms,
        )

    @devices.at_home
    def lay_out(
        self, chunk: chunks.CohortChunk, inputs: rounds.RoundInputs
    ) -> chunks.CohortChunk:
        """Returns a chunk with who trains where, for training here.

        Args:
          chunk: Some clients of a cohort.
          inputs: The round, of which the windows matter as well.
        """
        groups = self.layout.lay_out(chunk, inputs, self.num_replicas)
        groups = [[part.as_tensors() for part in group] for group in groups]
        return dataclasses.replace(chunk, groups=groups)

    @devices.at_home
    def train_chunk(
        self, pending: rounds.PendingRound, chunk: chunks.CohortChunk
    ) -> None:
        """Trains a chunk's clients here; adds to `pending`."""
        if chunk.groups is None:
            chunk = self.lay_out(chunk, pending.inputs)
        chunk = self._traced(pending, chunk)
        groups: list[list[layout.Part]] = chunk.groups
        raised: list[tuple[layout.Part, Exception]] = []
        begun = itertools.count(1)

        @devices.at(self.device)
        def run(thread: int) -> None:
            if next(begun) == len(groups):
                # Not before: who draws meanwhile keeps Python from others.
                draw_ahead()
            waiting = groups[thread][::-1]
            while waiting:
                part = waiting.pop()
                try:
                    trained = self.functions.prepared(pending, chunk, part)()
                except tf.errors.ResourceExhaustedError:
                    if part.way.kind != layout.BATCHED or part.clients.num_clients < 2:
                        raise
                    waiting += self._in_smaller_batches(part, pending.inputs)
                    continue
                except CLIENT_ERRORS as error:
                    raised.append((part, error))
                    continue
                pending.take(part.clients.members, trained, thread)
                self.has_trained |= part.clients.num_clients > 0

        with self.background.computing(at_once=False) as draw_ahead:
            others = [
                self._pool.submit(run, thread) for thread in range(1, len(groups))
            ]
            try:
                run(0)
            finally:
                concurrent.futures.wait(others)
            for each in others:
                each.result()
        for part, error in raised:
            self._train_each_alone(pending, chunk, part, error)

    def _traced(
        self, pending: rounds.PendingRound, chunk: chunks.CohortChunk
    ) -> chunks.CohortChunk:
        """Has a chunk's functions traced, in one thread; returns what trains."""
        for part in itertools.chain.from_iterable(chunk.groups):
            try:
                self.functions.program(pending, part)
            except Exception:
                if part.way.kind != layout.BATCHED:
                    raise
                # Not every operation can be vectorized.
                self.layout = dataclasses.replace(self.layout, at_once=None)
                return self._traced(pending, self.lay_out(chunk, pending.inputs))
        return chunk

    def _in_smaller_batches(
        self, part: layout.Part, inputs: rounds.RoundInputs
    ) -> list[layout.Part]:
        """Returns the parts of a batch of clients that the device had no room for."""
        at_once = part.clients.num_clients // 2
        self.layout = dataclasses.replace(self.layout, at_once=at_once)
        return [each.as_tensors() for each in self.layout.batches(part.clients, inputs)]

    def _train_each_alone(
        self,
        pending: rounds.PendingRound,
        chunk: chunks.CohortChunk,
        part: layout.Part,
        error: Exception,
    ) -> None:
        """Trains the clients of a part in which one's data raised an error.

        Who raises it alone has failed; the others are none the worse for it.
        """

        def train(places: list[int]) -> None:
            clients = tables.select(part.clients, np.array(places, np.int64))
            alone = self.layout.one_by_one(clients)
            trained = self.functions.prepared(pending, chunk, alone)()
            pending.take(clients.members, trained)

        failures = []
        for place, member in enumerate(part.clients.members.tolist()):
            try:
                train([place])
            except CLIENT_ERRORS as own:
                error = own  # Names the operation, too.
                position = int(pending.inputs.positions[member])
                failures.append(ClientFailure(position, own))
        if len(failures) == part.clients.num_clients:
            train([])  # Nothing is a sum as well.
        self.has_trained |= len(failures) < part.clients.num_clients
        pending.failures += failures
        pending.training_error = error

    @devices.at_home
    def complete(self, pending: rounds.PendingRound) -> None:
        """Ends collecting, once every chunk was added.

        Raises:
          tf.errors.OpError: Nobody could ever be trained: it is the model. The
            message names the operation, and quotes nobody's examples.
        """
        if (
            pending.training_error is not None
            and not self.has_trained
            and len(pending.failures) == pending.cohort_size > 1
        ):
            raise _without_examples(pending.training_error) from None
        pending.leave_out_idle_threads()
        if self.query.two_phase:
            params = self._joint_clip.set_clip(pending)
            if self._collect_records:
                self._joint_clip.clip_each(pending, params)
            else:
                self._joint_clip.clip_and_sum(pending, params, self._pool, self.device)

    # Half two.

    @devices.at_home
    def release(self, pending: rounds.PendingRound) -> dict[str, float]:
        """Adds the noise, divides, and updates the model and the state.

        Args:
          pending: What `collect` returned, charged by now.

        Returns:
          The round's values for `History`, by name.
        """
        self.state, logs = self._release(pending)
        return logs


def _without_examples(error: Any) -> Exception:
    """Returns an error of TensorFlow's that names the operation only."""
    found = re.search(r"(?:\{\{node |node '?)([\w./-]+)", str(error))
    where = f" in {found.group(1)}" if found else ""
    return type(error)(
        None,
        None,
        f"No client could be trained: {type(error).__name__}{where}. It may be "
        "the model or the data, such as a number that no embedding has. (The "
        "rest of TensorFlow's message may quote examples and is not shown.)",
    )
