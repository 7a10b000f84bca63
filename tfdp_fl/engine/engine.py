"""Runs a cohort's round on this machine.

The path of a client's update from the dataset to the released model:

    collect                     Layout.read: reads the cohort's examples
      train_chunk               Layout.lay_out: decides which client trains where
        CohortPrograms            the compiled program: trains clients one by one
                                  (or side by side, or in batches):
            Trainer                 start; step, repeatedly; update
            algorithm               make_contribution (clip); bounded_sums.add
        PendingRound.add        adds up what the programs return
      complete                  DeferredClipping, if each client's update is kept
    release                     Release: algorithm.release (noise, mean),
                                  ServerUpdate.apply (the model moves)
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdp_fl import _signals, accounting, keras_versions
from tfdp_fl.datasets import ClientFailure, FederatedDataset, nests
from tfdp_fl.engine import (
    allowed_operations,
    client_programs,
    cohort,
    dense_models,
    devices,
    labels,
    layout,
    release,
    tff_models,
)
from tfdp_fl.engine import program as program_lib
from tfdp_fl.engine import trainer as trainer_lib
from tfdp_fl.mechanisms import contribution, noise, overriding
from tfdp_fl.mechanisms import mechanism as mechanism_lib
from tfdp_fl.terms import TrustModel

# Calls a program on every machine and returns each machine's flattened results.
RunEverywhere = Callable[
    [program_lib.Program, cohort.Broadcast, layout.Chunk], list[list[np.ndarray]]
]


class CohortEngine:
    """Trains cohorts of clients and updates the model.

    A round has two halves: `collect` trains the clients and adds up their updates;
    `release` adds the noise and changes the model. In between, nothing has been
    published yet, so this is where a round is charged to the ledger or abandoned.

    Attributes:
      device: The device that holds the model's weights and computes everything.
      server: The `ServerUpdate` that holds the model's weights.
      query: The mechanism's query.
      collects_contributions: Whether to return each client's contribution separately.
      update_spec: The shapes of a client's update.
      layout: How cohorts are read and laid out.
      programs: The compiled programs that train clients.
      used_strategies: The strategies that have trained any client so far.
      max_parallel_clients: How many clients train at once.
      keeps_non_trainable: Whether some state stays at the server, unaggregated.
      cache_key: The engine is reused as long as this key is equal.
    """

    cache_key: tuple[object, ...] | None = None

    def __init__(
        self,
        *,
        model: tf.keras.Model,
        training: trainer_lib.Training,
        mechanism: mechanism_lib.Mechanism,
        context: contribution.PrivacyContext,
        element_spec: nests.ElementSpec,
        aggregate_non_trainable: bool = True,
        between_client_variance: bool = False,
        collect_contributions: bool = False,
        max_parallel_clients: int | None = None,
        batch_size: int = 1,
    ):
        """Traces, and thereby checks, the program that trains clients one by one.

        The other programs are traced when the first round begins.

        Args:
          model: The user's built model, which serves as the server's model.
          training: How clients train, and how the model is updated.
          mechanism: Defines what is released about a cohort.
          context: What the mechanism may know about the run; the engine adds the
            number of variables.
          element_spec: `(features, labels)` specs of one example.
          aggregate_non_trainable: Whether clients upload non-trainable state.
          between_client_variance: Whether to compute Geyer's V_c and U_s.
          collect_contributions: Whether to return each client's contribution
            separately.
          max_parallel_clients: Clients trained at once; None: one per core.
          batch_size: The usual batch size, which decides whether XLA is used.

        Raises:
          ValueError: Information could pass from one client to the next; or the
            model, the training and the mechanism are incompatible.
        """
        self.collects_contributions = collect_contributions
        self.device = devices.device_of(model)
        self.max_parallel_clients = (
            max_parallel_clients or devices.default_parallel_clients(self.device)
        )
        with tf.device(self.device):
            trainer = tff_models.make_trainer(
                model, training, element_spec, aggregate_non_trainable
            )
        self.query = mechanism.bind(
            dataclasses.replace(
                context,
                num_variables=len(trainer.aggregated),
                shapes=tuple(tuple(v.shape) for v in trainer.aggregated),
            )
        )
        trainable = len(model.trainable_weights)
        self.server = release.ServerUpdate(
            trainer.aggregated[:trainable],
            trainer.aggregated[trainable:],
            training.server_optimizer,
            trainer.non_negative_variables,
        )
        self._unaggregated = keras_versions.tf_variables(trainer.unaggregated)
        self.keeps_non_trainable = bool(self._unaggregated)
        self._hook = None
        if training.broadcast_hook is not None:
            self._hook = tf.function(
                _seed_hook(training.broadcast_hook), autograph=False
            )
        self.update_spec = cohort.UpdateSpec.of(self.server.variables)
        keeps_updates = collect_contributions or self.query.two_phase
        kernels = None
        self._numeric_options = devices.numeric_options()
        self._is_supported = functools.partial(
            dense_models.supports, model, training, self.query, element_spec[1]
        )
        if (
            keras_versions.IS_KERAS_3
            and training.jit_compile is None
            and devices.products_are_float32()
            and not (keeps_updates or between_client_variance)
            and self._is_supported()
        ):
            kernels = dense_models.kernels_of(model)
        self._trials = Trials()
        self.layout = layout.Layout(
            element_spec=element_spec,
            kernels=kernels,
            collected_bytes=4 * self.update_spec.size if keeps_updates else None,
            xla=bool(training.jit_compile),
            allows_int32_sums=(
                not (keeps_updates or between_client_variance)
                and self._may_add_in_steps(training)
            ),
            fits=self.fits,
            batched_clients=devices.clients_per_call(
                self.device, model, self.update_spec.size, batch_size
            ),
        )
        self._label_ranges = trainer.label_ranges
        self._fallback = ""
        self.used_strategies: set[layout.Strategy] = set()
        # A public number, as the number of threads can decide a result's last bits.
        self._usual_cohort = math.ceil(context.cohort_size(0))
        self.programs = client_programs.CohortPrograms(
            trainer,
            self.query,
            keeps_updates,
            between_client_variance,
            self._threads,
        )
        self._later_clip = None
        if keeps_updates:
            self._later_clip = release.DeferredClipping(self.query, self.update_spec)
        self._release = release.Release(
            self.query, self.server, release.MetricResults(trainer.metric_results)
        )
        self._is_prepared = False
        if self.layout.batched_clients is not None or kernels is None:
            # (`supports` has already checked models that train side by side.)
            with tf.device(self.device):
                self._trace_one_by_one()
        self._pool = concurrent.futures.ThreadPoolExecutor(self.max_parallel_clients)

    def _threads(self, strategy: layout.Strategy, batch: int) -> int | None:
        """Returns `program.Program.threads` for a strategy and a batch size."""
        calls = self.layout.parallel_calls(
            strategy, batch, self._usual_cohort, self.max_parallel_clients
        )
        return devices.threads_per_call(self.device, calls)

    def _may_add_in_steps(self, training: trainer_lib.Training) -> bool:
        """Returns whether int32 may add contributions up (`bounded_sums.to_int32`)."""
        mechanism, size = self.query.mechanism, self.update_spec.size
        return (
            "CPU" in self.device
            # With XLA, a call trains one client, so nothing would be gained.
            and not training.jit_compile
            # (Another's bound might change between its clip and its step.)
            and overriding.is_of_this_package(type(mechanism))
            and self.query.only_scales
            and mechanism.trust_model == TrustModel.CENTRAL
            and not mechanism.releases_weights
            and dense_models.rounding_share(size) <= dense_models.LARGEST_SHARE
        )

    def _trace_one_by_one(self) -> None:
        query = self.query
        nobody = layout.client_table(np.zeros(0, int), np.zeros(0, int), 1, 1)
        seed = np.zeros(2, np.uint64)
        state = self.query.initial_global_state()
        broadcast = self._broadcast(self.server.variables, state, 0.0, seed)
        z, m = query.mechanism.noise_multiplier_at(0), query.context.cohort_size(0)
        part = self.layout.one_by_one(nobody, is_fine(z, m))[0]
        program = self.programs.program(broadcast, part)
        if self.layout.batched_clients is not None:
            refused = allowed_operations.find_unbatchable(program.graph_def)
            if refused:
                self._give_up_batches(f"{', '.join(refused)} cannot be batched")
        if not overriding.is_of_this_package(type(self.query.mechanism)):
            # Its bounds may change until the first round. The programs that clip to
            # them, and the release that checks them, are traced together.
            self.programs.traced.clear()

    def _give_up_batches(self, reason: str) -> None:
        """Makes clients train one by one, not in batches, from now on."""
        self.layout = dataclasses.replace(self.layout, batched_clients=None)
        self._fallback = f", not in batches: {reason}"

    @property
    def num_variables(self) -> int:
        """Returns the number of tensors in a client's update."""
        return len(self.update_spec.variables)

    @property
    def has_trained_side_by_side(self) -> bool:
        """Returns whether any clients have been trained side by side so far."""
        return any(used.kind == layout.SIDE_BY_SIDE for used in self.used_strategies)

    @property
    def executor(self) -> str:
        """Describes to users how clients train here, from public facts only."""
        if self.layout.batched_clients is not None:
            place = tf.DeviceSpec.from_string(self.device)
            where = f"{place.device_type}:{place.device_index or 0}"
            return f"batches of {self.layout.batched_clients} clients on {where}"
        how = layout.ONE_BY_ONE
        if self.layout.kernels is not None:
            how = "side by side where they have few examples"
        threads = self.max_parallel_clients
        where = "1 thread" if threads == 1 else f"{threads} threads"
        return f"clients {how} on {where}{self._fallback}"

    def fits(
        self,
        strategy: layout.Strategy,
        batch: int,
        width: int,
        trials: Trials | None = None,
    ) -> bool:
        """Returns whether this width gives every place the same bits as the reference.

        A call trains the same made-up client, with made-up weights, in every place. All
        results must agree to the last bit, between places and with the reference (the
        first of two widths that agree): the inputs and gradients of each row, the norms
        (of which few bits reach a contribution), and the sum. Some processors compute
        the last rows of a product, or many rows, differently from others. Then at least
        one number in ten differs, so the clients made up have `_COMPARED` numbers in
        the narrowest layer.

        Args:
          strategy: The program's.
          batch: Examples in a step.
          width: The number of clients in a call.
          trials: The trials on the machines that may train clients; None: this one's.
        """
        trials = trials or self._trials
        key = self.programs.traced[strategy], batch, width
        if key not in trials.fits:
            reference = self._reference(strategy, batch, trials)
            machines = self._fingerprints(strategy, batch, width, trials.run)
            trials.fits[key] = (
                reference is not None
                and bool(machines)
                and all(one.is_of_same_client(reference) for one in machines)
            )
        return trials.fits[key]

    def _reference(
        self, strategy: layout.Strategy, batch: int, trials: Trials
    ) -> _Fingerprint | None:
        """Returns what all widths must compute, or None if no width will do."""
        of_kind = self.programs.traced[strategy], batch
        if of_kind not in trials.references:
            kernels = self.layout.kernels or ()
            # Small widths first: large ones, whose bits may differ, waste the most on
            # small cohorts.
            widths = dense_models.widths(kernels, strategy.num_steps, batch)
            seen: list[_Fingerprint] = []
            for width in widths[:_MOST_TRIALS]:
                found = self._fingerprints(strategy, batch, width, trials.run)
                if found and found[0].proves:
                    # (All zeros prove nothing; numbers that overflow yield them.)
                    seen.append(found[0])
                if any(one.is_of_same_client(seen[-1]) for one in seen[:-1]):
                    break
            trials.references[of_kind] = seen[-1] if seen else None
        return trials.references[of_kind]

    def _fingerprints(
        self,
        strategy: layout.Strategy,
        batch: int,
        width: int,
        run: RunEverywhere | None,
    ) -> list[_Fingerprint]:
        """Returns each machine's results for copies of made-up clients (`fits`)."""
        narrowest = min(columns for _, columns in self.layout.kernels or ())
        numbers = strategy.num_steps * batch * narrowest
        try:
            with tf.device(self.device):
                found = [
                    self._add_synthetic(strategy, batch, width, run, client)
                    for client in range(-(-_COMPARED // numbers))
                ]
        except program_lib.CLIENT_ERRORS:  # A metric refuses made-up labels, say.
            return []
        if len({*map(len, found)}) > 1:  # A machine failed.
            return []
        return [_Fingerprint.of(list(each), width) for each in zip(*found, strict=True)]

    def _add_synthetic(
        self,
        strategy: layout.Strategy,
        batch: int,
        width: int,
        run: RunEverywhere | None,
        client: int = 0,
    ) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
        """Returns the sum of `width` copies of one client, and its bits.

        Each machine returns the sum's tensors, and `Trained.bits`.
        """
        rows = strategy.num_steps * batch
        broadcast, chunk = self._make_up(rows, batch, width, client)
        program = self.programs.traced[strategy]
        if run is None:
            found = [tf.nest.flatten(program(broadcast, chunk))]
        else:
            found = run(program, broadcast, chunk)
        packed = [tf.nest.pack_sequence_as(program.structure, each) for each in found]
        return [
            (
                list(map(np.asarray, each.total.contribution.update)),
                list(map(np.asarray, each.bits)),
            )
            for each in packed
        ]

    def _make_up(
        self, rows: int, batch: int, width: int = 1, client: int = 0
    ) -> tuple[cohort.Broadcast, layout.Chunk]:
        """Returns made-up weights, and `width` copies of a client with made-up rows."""
        rng = np.random.default_rng(client)

        def make_random(
            shape: Sequence[int], dtype: tf.DType, inputs: int = 1
        ) -> tf.Tensor:
            if dtype == tf.string:
                return tf.fill(shape, "0")
            # Repeated, as drawing millions of weights would delay the first round.
            size = min(math.prod(shape), _DRAWN)
            if dtype.is_floating:
                numbers = rng.normal(scale=inputs**-0.5, size=size)
            else:
                numbers = rng.integers(0, 2, size).astype(float)
            return tf.constant(np.resize(numbers.astype(dtype.as_numpy_dtype), shape))

        x, y = tf.nest.map_structure(
            lambda spec: make_random([rows, *spec.shape], spec.dtype),
            self.layout.element_spec,
        )
        # Scaled like initial weights: zeros, for example, would pass nothing on.
        weights = [
            make_random(v.shape, v.dtype, math.prod(v.shape[:1]))
            for v in self.server.variables
        ]
        seed = np.zeros(2, np.uint64)
        state = self.query.begin_round(self.query.initial_global_state(), 1.0, 512.0)
        broadcast = self._broadcast(weights, state, 0.1, seed, returns_bits=True)
        own = np.tile(np.arange(rows), width)
        table = layout.client_table(own, np.full(width, rows), batch, 1)
        return broadcast, layout.Chunk(x, y, table)

    def _check_compiles(self, batch: int) -> None:
        """Raises ValueError if XLA cannot compile how clients train.

        Otherwise, every client would seem to have failed.
        """
        broadcast, chunk = self._make_up(batch, batch)
        compiled = layout.Strategy(layout.ONE_BY_ONE, xla=True)
        try:
            self.programs.traced[compiled](broadcast, layout.gather(chunk, chunk.table))
        except program_lib.CLIENT_ERRORS as error:
            with contextlib.suppress(*program_lib.CLIENT_ERRORS):
                plain = layout.Part(compiled._replace(xla=False), chunk.table)
                self.programs.program(broadcast, plain)(broadcast, chunk)
                raise ValueError(
                    "jit_compile must be False for this model, which XLA cannot "
                    f"compile: {str(error).splitlines()[0]}"
                ) from error

    def check_labels(
        self, dataset: FederatedDataset, argument: str = "clients"
    ) -> FederatedDataset:
        """Returns a dataset whose clients' labels fit; see `labels.check_clients`."""
        return labels.check_clients(dataset, self._label_ranges, argument)

    # First half: train and add up.

    def prepare(self, inputs: cohort.RoundInputs) -> None:
        """Traces whatever a round runs, before it is drawn.

        So an error in a mechanism or an optimizer costs nothing.

        Args:
          inputs: The round, whose clients do not matter.
        """
        if self._is_prepared:
            return
        with tf.device(self.device):
            self._trace(self.empty_round(inputs))

    def collect(
        self,
        dataset: FederatedDataset,
        inputs: cohort.RoundInputs,
        train_chunk: Callable[[cohort.PendingRound, layout.Chunk], None] | None = None,
    ) -> cohort.PendingRound:
        """Trains a cohort and adds up its clients' uploads.

        Args:
          dataset: The source of the cohort's examples, from `check_labels`.
          inputs: The round.
          train_chunk: Runs the programs elsewhere; None: this engine's `train_chunk`.

        Returns:
          A `PendingRound`; the model has not changed.
        """
        allowed_operations.check_compilers()
        if devices.numeric_options() != self._numeric_options:
            # Widths were tried, and bounds proven, for the options at that time.
            self.layout = dataclasses.replace(self.layout, kernels=None)
        with tf.device(self.device):
            while True:
                pending = self.empty_round(inputs)
                self._trace(pending)
                try:
                    for chunk in self.layout.read(dataset, pending):
                        (train_chunk or self.train_chunk)(pending, chunk)
                except _NoRoomError:
                    # For this many clients at once. The whole round starts again.
                    smaller = max(1, (self.layout.batched_clients or 1) // 2)
                    self.layout = dataclasses.replace(
                        self.layout, batched_clients=smaller
                    )
                    continue
                self.complete(pending)
                return pending

    def empty_round(self, inputs: cohort.RoundInputs) -> cohort.PendingRound:
        """Returns a round with nothing collected yet."""
        state = self.query.begin_round(
            inputs.state, inputs.noise_multiplier, inputs.clients_per_round
        )
        weights = keras_versions.settled_values(self.server.variables)
        if self._hook is not None:
            own = noise.for_clients(inputs.seed)
            weights = self._hook(weights, tf.constant(own))
        norms = None
        if self.query.keeps_window:
            shape = [len(inputs.positions), self.num_variables]
            norms = np.full(shape, np.nan, np.float32)
        return cohort.PendingRound(
            inputs=inputs,
            state=state,
            broadcast=self._broadcast(
                weights, state, inputs.learning_rate, inputs.seed
            ),
            threads=[cohort.ThreadSum() for _ in range(self.max_parallel_clients)],
            window_norms=norms,
        )

    def _broadcast(
        self,
        weights: list[tf.Tensor],
        state: contribution.RoundState,
        rate: float,
        seed: np.ndarray,
        *,
        returns_bits: bool = False,
    ) -> cohort.Broadcast:
        """Returns what the server sends to a round's clients."""
        params: nests.Nest = ()
        if self._later_clip is None:
            params = self.query.derive_sample_params(state)
        return cohort.Broadcast(
            weights=weights,
            unaggregated=keras_versions.settled_values(self._unaggregated),
            params=params,
            learning_rate=tf.constant(rate, tf.float32),
            seed=tf.constant(noise.for_clients(seed)),
            returns_bits=tf.constant(returns_bits),
        )

    def train_chunk(self, pending: cohort.PendingRound, chunk: layout.Chunk) -> None:
        """Trains a chunk's clients here and adds their sums to `pending`."""
        groups = self._lay_out(pending, chunk)
        raised: list[layout.Part] = []

        def run(thread: int) -> None:
            for part in groups[thread]:
                try:
                    with tf.device(self.device):  # Applies to one thread only.
                        trained = self._train(pending, chunk, part)
                except program_lib.CLIENT_ERRORS as error:
                    no_room = isinstance(error, tf.errors.ResourceExhaustedError)
                    batched = part.strategy.kind == layout.BATCHED
                    if no_room and batched and self.layout.batched_clients != 1:
                        raise _NoRoomError from error
                    raised.append(part)
                else:  # An error in here ends the round: some may be in the sum.
                    pending.add(part.members, trained, thread)
                    del trained  # The next part needs its memory.

        others = [self._pool.submit(run, thread) for thread in range(1, len(groups))]
        try:
            run(0)
        finally:
            concurrent.futures.wait(others)
        for other in others:
            other.result()
        for part in raised:
            train = functools.partial(self._train, pending, chunk)
            self.train_part_one_by_one(pending, part, self.layout, train)

    @_signals.defer_signals()  # Errors in here are taken for the model's.
    def _trace(self, pending: cohort.PendingRound) -> None:
        """Traces every program that a client may need, before any client is read.

        Tracing fixes the model's current attributes: a LeakyReLU's slope, say, or which
        layers are trainable. Suppose a program were traced only when the first client
        needed it, and a callback had changed such an attribute by then. The way in
        which all clients train would then reveal who took part in earlier rounds.
        """
        batch = pending.inputs.batch_size
        fine = needs_fine_grid(pending)
        strategies = self.layout.strategies(batch, fine)
        if self._is_prepared and self.programs.traced.keys() >= {*strategies}:
            return
        if self.layout.kernels is not None and not self._is_supported():
            # A layer has changed since, so its bound would not hold.
            self.layout = dataclasses.replace(self.layout, kernels=None)
            strategies = self.layout.strategies(batch, fine)
        if self._is_prepared:  # For another batch size or grid.
            earlier = filter(self.layout.allows, self.programs.traced)
            strategies = [*dict.fromkeys([*earlier, *strategies])]
            self._forget_programs()
        try:
            self._trace_together(pending, strategies)
        except BaseException:
            self._forget_programs()
            raise

    def _trace_together(
        self, pending: cohort.PendingRound, strategies: list[layout.Strategy]
    ) -> None:
        """Traces all programs that clients may need, the clip and the release.

        Each asks the mechanism for its bounds, and all must get the same answers.
        """
        batch = pending.inputs.batch_size
        nobody = layout.client_table(np.zeros(0, int), np.zeros(0, int), batch, 1)
        if self._later_clip is not None:
            self._later_clip.trace(pending)
        for strategy in strategies:
            try:
                self.programs.program(pending.broadcast, layout.Part(strategy, nobody))
            except Exception as error:
                if strategy.kind != layout.BATCHED:
                    raise
                self._give_up_batches(
                    f"TensorFlow cannot vectorize them ({type(error).__name__})"
                )
                self._trace(pending)  # Its replacement.
                return
        if any(strategy.xla for strategy in strategies):
            self._check_compiles(batch)
        nothing = self.query.initial_sample_state(self.update_spec.variables)
        nothing = tf.nest.map_structure(tf.TensorSpec.from_tensor, nothing)
        total = next(iter(self.programs.traced.values())).results.total
        total = total._replace(contribution=nothing)
        self._release.trace(total, release.with_variables(pending.state))
        self._is_prepared = True

    def _forget_programs(self) -> None:
        """Makes the next round trace everything again."""
        self.programs.traced.clear()
        self._release.forget()
        if self._later_clip is not None:
            self._later_clip.forget()
        self._is_prepared = False

    def _lay_out(
        self, pending: cohort.PendingRound, chunk: layout.Chunk
    ) -> list[list[layout.Part]]:
        """Lays out a chunk and has TensorFlow optimise its programs in one thread."""
        broadcast = pending.broadcast
        groups = self.layout.lay_out(
            chunk.table, self.max_parallel_clients, fine=needs_fine_grid(pending)
        )
        for part in itertools.chain.from_iterable(groups):
            program = self.programs.traced[part.strategy]
            alone = part.strategy.kind == layout.ONE_BY_ONE and not part.strategy.xla
            if len(groups) > 1 and alone and not program.has_run:
                # TensorFlow optimises a program in its first call, and again in every
                # thread that calls it before the first call has finished.
                nobody = layout.select(part.table, np.array([], np.int64))
                with tf.device(self.device):
                    program(broadcast, chunk._replace(table=nobody))
        return groups

    def _train(
        self,
        pending: cohort.PendingRound,
        chunk: layout.Chunk,
        part: layout.Part,
    ) -> cohort.Trained:
        """Trains the clients of a part; adds nothing to the round."""
        program = self.programs.traced[part.strategy]
        self.used_strategies.add(part.strategy)
        chunk = chunk._replace(table=part.table)
        if part.strategy.xla:
            chunk = layout.gather(chunk, part.table)
        trained: cohort.Trained = program(pending.broadcast, chunk)
        return trained

    def train_part_one_by_one(
        self,
        pending: cohort.PendingRound,
        part: layout.Part,
        parts: layout.Layout,
        train_part: Callable[[layout.Part], cohort.Trained],
    ) -> None:
        """Trains the clients of a part in which one client's data raised an error.

        A client that raises the error when it trains alone has failed. The others are
        unaffected: each is trained by the same program, with the same result.

        Args:
          pending: The round.
          part: The clients.
          parts: The layout of whoever trains them.
          train_part: Trains some of them; raises one of `program.CLIENT_ERRORS` if
            their data is at fault.
        """
        # An empty batch first yields the zero sum and surfaces machine errors.
        nobody = layout.select(part.table, np.arange(0))
        empty = parts.part(part.strategy._replace(xla=False), nobody)
        pending.add(empty.members, train_part(empty))
        for place, member in enumerate(part.members):
            alone = parts.part(
                part.strategy, layout.select(part.table, np.array([place]))
            )
            try:
                trained = train_part(alone)
            except program_lib.CLIENT_ERRORS as error:
                position = int(pending.inputs.positions[member])
                operation = self.programs.traced[part.strategy].find_operation(error)
                pending.failures.append(ClientFailure(position, error, operation))
            else:
                pending.add(alone.members, trained)
                del trained

    def complete(self, pending: cohort.PendingRound) -> None:
        """Ends the collection once every chunk has been added.

        If no client could be trained, the round is still released, as pure noise. An
        error would reveal, free of charge, that no client had usable data.
        """
        first, *others = pending.threads
        for thread in others:
            first.join(thread)
        total = first.convert()
        pending.threads, pending.sums = [], [] if total is None else [total]
        if self._later_clip is None:
            return
        clipped = self._later_clip(pending)
        if self.collects_contributions:
            pending.collected = list(clipped)
            return
        update = tf.zeros([self.update_spec.size], tf.float64)
        scalars = tf.zeros([self.query.num_scalars], tf.float64)
        for _, rows in clipped:
            update += tf.reduce_sum(tf.cast(rows.updates, tf.float64), axis=0)
            scalars += tf.reduce_sum(tf.cast(rows.scalars, tf.float64), axis=0)
        self.set_sum(pending, update, scalars)

    def set_sum(
        self, pending: cohort.PendingRound, update: tf.Tensor, scalars: tf.Tensor
    ) -> None:
        """Sets the sum of contributions that were kept separately until now.

        Args:
          pending: The round.
          update: Float64 [D], the exact sum of the flattened contributions.
          scalars: Float64 [n], the sum of `Contribution.scalars`.
        """
        with tf.device(self.device):
            nothing = self.query.initial_sample_state(self.update_spec.variables)
            parts = tf.split(update, self.update_spec.sizes)
            values = [
                tf.cast(value, whole.dtype)
                for value, whole in zip(
                    tf.unstack(scalars, num=self.query.num_scalars),
                    nothing.scalars(),
                    strict=True,
                )
            ]
            one = nothing.with_scalars(
                [
                    tf.reshape(part, whole.shape)
                    for part, whole in zip(parts, nothing.update, strict=True)
                ],
                values,
            )
            total = functools.reduce(cohort.CohortSum.plus, pending.sums)
        pending.sums, pending.collected = [total._replace(contribution=one)], []

    # Second half: release.

    def release(
        self, pending: cohort.PendingRound, paid: accounting.Receipt
    ) -> tuple[contribution.RoundState, dict[str, float]]:
        """Adds the noise, divides, and updates the model.

        Args:
          pending: What `collect` returned.
          paid: The receipt. Nothing is released without it.

        Returns:
          The query's state for the next round, and the round's values for `History`
          by name.
        """
        with keras_versions.moving_weights, tf.device(self.device):
            return self._release(pending, paid.redeem())


class _NoRoomError(Exception):
    """The device has too little memory to train this many clients at once."""


# How many synthetic numbers are drawn before they are repeated (a prime, so that the
# first million rows of a matrix differ).
_DRAWN = 1_000_003

# The fewest numbers of a layer that two widths must compute alike. (If one in ten
# differs, all agree once in 10^11 times.)
_COMPARED = 256

# How many widths are tried as a reference.
_MOST_TRIALS = 8

# How many numbers are hashed at a time, so that a large model needs no copies.
_HASHED = 2**20


@dataclasses.dataclass(frozen=True)
class Trials:
    """What was tried on the machines that may train clients (see `CohortEngine.fits`).

    Attributes:
      run: Calls a program on each of them and returns the flattened results; None: on
        this one.
      fits: By program, batch size and width, whether it gives the reference's bits.
      references: By program and batch size, what all widths must compute.
    """

    run: RunEverywhere | None = None
    fits: dict[tuple[program_lib.Program, int, int], bool] = dataclasses.field(
        default_factory=dict
    )
    references: dict[tuple[program_lib.Program, int], _Fingerprint | None] = (
        dataclasses.field(default_factory=dict)
    )


class _Fingerprint(NamedTuple):
    """What calls computed for copies of some clients, to compare calls of any width.

    Attributes:
      digest: A hash of one copy's share of each sum.
      proves: Whether all copies are the same, all numbers are finite, and the first
        tensor's are not all zero.
      bits: The smallest and largest bits of all copies (`Trained.bits`).
    """

    digest: bytes
    proves: bool
    bits: list[np.ndarray]

    @classmethod
    def of(
        cls, results: list[tuple[list[np.ndarray], list[np.ndarray]]], width: int
    ) -> _Fingerprint:
        """Returns the fingerprint of sums of `width` copies each, and their bits."""
        digest, proves = hashlib.sha256(), True
        for update, bits in results:
            for flat in map(np.ravel, update):
                for start in range(0, len(flat), _HASHED):
                    # Exact, if all copies are equal; -0.0 becomes 0.0.
                    share = flat[start : start + _HASHED] / width + 0.0
                    proves &= bool(np.isfinite(share).all())
                    digest.update(share)
            proves &= all(np.array_equal(*extremes) for extremes in bits)
            proves &= bool(np.any(update[0]))
        return cls(digest.digest(), proves, [b for _, bits in results for b in bits])

    def is_of_same_client(self, other: _Fingerprint) -> bool:
        """Returns whether every copy's results are the same, to the last bit."""
        return self.digest == other.digest and all(
            np.array_equal(a, b) for a, b in zip(self.bits, other.bits, strict=True)
        )


# Noise below this fraction of the clip may be finer than the grid of int32 sums.
_LEAST_COARSE_NOISE = 2.0**-10


def needs_fine_grid(pending: cohort.PendingRound) -> bool:
    """Returns whether a round's contributions need the finer grid of float64 sums."""
    inputs = pending.inputs
    return is_fine(inputs.noise_multiplier, inputs.clients_per_round)


def is_fine(noise_multiplier: float, clients_per_round: float) -> bool:
    """Returns the same for rounds of this z and m.

    Rounding m coordinates towards zero adds up to m steps of 2^-20 S at most, which
    must not be more than an eighth of the noise's stddev.
    """
    rounding = clients_per_round * 2.0**-20
    return noise_multiplier < max(_LEAST_COARSE_NOISE, 8 * rounding)


def _seed_hook(hook: trainer_lib.BroadcastHook) -> Callable[..., list[tf.Tensor]]:
    """Returns a hook whose random numbers follow from the round's seed."""

    def changed(weights: list[tf.Tensor], seed: tf.Tensor) -> list[tf.Tensor]:
        own = noise.as_integers(noise.fold_in(seed, -3))
        with noise.use_seed(noise.fold_in(seed, -2)):
            return list(hook(list(weights), own))

    return changed
