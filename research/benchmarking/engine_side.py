"""Our side: rounds as a user runs them, through `DPFederatedModel.fit`."""

from __future__ import annotations

import pathlib
import platform
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from research.benchmarking import machine, profiling, workloads
from tfdp_fl import correlated_noise, datasets, keras, mechanisms
from tfdp_fl.engine import calls
from tfdp_fl.experiments import training

MECHANISMS = {
    "fixed": lambda: mechanisms.FixedClipping(
        clip_norm=workloads.CLIP_NORM,
        noise_multiplier=workloads.NOISE_MULTIPLIER,
    ),
    "median": lambda: mechanisms.MedianClipping(
        noise_multiplier=workloads.NOISE_MULTIPLIER
    ),
    # Three buffers, which the best ones of few rounds would be fewer than.
    "correlated": lambda: mechanisms.CorrelatedNoise(
        clip_norm=workloads.CLIP_NORM,
        noise_multiplier=workloads.NOISE_MULTIPLIER,
        strategy=correlated_noise.BLT(
            theta=(0.99, 0.9, 0.5), theta_hat=(0.95, 0.7, 0.2)
        ),
        rounds=4096,
        min_separation=GROUPS,
    ),
}

# Groups of clients that take part in turn, under cyclic sampling.
GROUPS = 8

# Clients of a large population share so many stored examples.
_SHARED_EXAMPLES = 5000
# Clients whose examples are repeated in a file of a large population.
_WRITTEN_AT_ONCE = 1000
_FILE_BYTES = 4 * 10**9

UNEVEN = {
    # 1 to 1000 examples in one cohort of 50: many small ones, and evenly.
    "geometric": lambda count: np.geomspace(1, 1000, count),
    "linear": lambda count: np.linspace(1, 1000, count),
}


class RoundTimes(tf.keras.callbacks.Callback):
    """Notes how long each round took, all that happens between two included."""

    def __init__(self):
        super().__init__()
        self._marks: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Marks the beginning of a round."""
        self._marks.append(time.perf_counter())

    def on_train_end(self, logs: Any = None) -> None:
        """Marks the end of the last round."""
        self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """The rounds' times."""
        return np.diff(self._marks).tolist()


class _Run:
    """A compiled model and its clients."""

    def __init__(
        self,
        workload: workloads.Workload,
        clients: datasets.FederatedDataset,
        cohort: int,
        sampling: str,
        mechanism: str,
        jit_compile: bool | None,
        runtime: Any,
        num_replicas: int | None = None,
    ):
        self._workload = workload
        self._clients = clients
        self._runtime = runtime
        self.federated_model = keras.DPFederatedModel(
            workload.make_model(),
            MECHANISMS[mechanism](),
            clients_per_round=cohort,
            sampling=sampling,
            num_replicas=num_replicas,
        )
        self.federated_model.compile(
            optimizer=tf.keras.optimizers.SGD(workloads.LEARNING_RATE),
            loss=workloads.loss(),
            metrics=workloads.metrics(),
            jit_compile=jit_compile,
        )
        self.estimate: float | None = None
        self.rounds = 0

    def fit(self, rounds: int) -> list[float]:
        """Runs some rounds; returns their seconds."""
        times = RoundTimes()
        self.federated_model.fit(
            self._clients,
            rounds=rounds,
            batch_size=self._workload.batch_size,
            callbacks=[times],
            verbose=0,
            runtime=self._runtime,
        )
        return times.seconds


def evenly(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Returns client sizes with the same number of batches, shared evenly."""
    batches = int(-(-sizes // batch_size).sum())
    return batch_size * np.asarray(
        [len(part) for part in np.array_split(np.arange(batches), len(sizes))]
    )


def streamed(
    clients: datasets.FederatedDataset, how: str, folder: str | None
) -> datasets.FederatedDataset:
    """Returns the same clients, read when they take part.

    Args:
      clients: In memory.
      how: "files", one `.npz` for each client; or "tf_data", a
        `tf.data.Dataset` for each.
      folder: Where the files are written.
    """
    if how == "tf_data":
        return datasets.FederatedDataset.from_tf_datasets(
            {
                each: clients.create_tf_dataset_for_client(each)
                for each in clients.client_ids
            }
        )
    for each in clients.client_ids:
        x, y = clients.client(each)
        np.savez(pathlib.Path(str(folder)) / f"{each:06}.npz", x=x, y=y)
    return datasets.FederatedDataset.from_directory(str(folder))


ReadClient = Callable[[int], tuple[np.ndarray, np.ndarray]]


def population_on_disk(
    work: workloads.Workload,
    population: int,
    folder: str,
    mapped: bool = False,
) -> ReadClient:
    """Returns what reads a client, who has a place in one large file on disk.

    A file of 4 GB at most: where that is too little, some share a place.

    Args:
      work: Says what their examples are like; features are float32.
      population: How many they are.
      folder: Where the file is written, for all alike.
      mapped: Whether the file is mapped into memory once; if not, it is opened
        for each client.
    """
    path = pathlib.Path(folder) / "clients.bin"
    shape = (work.examples, *work.feature_shape)
    size = int(np.prod(shape))
    places = min(population, _FILE_BYTES // (4 * size))
    at_once = min(places, _WRITTEN_AT_ONCE)
    x, y = work.data(at_once * work.examples)
    labels = y.reshape(at_once, work.examples)
    if not path.exists():
        with path.open("wb") as file:
            for start in range(0, places, at_once):
                count = min(at_once, places - start)
                x[: count * work.examples].tofile(file)

    def read(client: int) -> tuple[np.ndarray, np.ndarray]:
        place = client % places
        own = np.fromfile(path, np.float32, size, offset=4 * size * place)
        return own.reshape(shape), labels[place % at_once]

    if not mapped:
        return read
    file_in_memory = np.asarray(
        np.memmap(path, np.float32, "r", shape=(places, *shape))
    )

    def read_mapped(client: int) -> tuple[np.ndarray, np.ndarray]:
        place = client % places
        return file_in_memory[place], labels[place % at_once]

    return read_mapped


def _workers(
    clients: datasets.FederatedDataset,
    count: int,
    folder: str | None,
) -> Any:
    """Returns workers that read the examples in a folder, or None."""
    if not count:
        return None
    from tfdp_fl import runtimes

    runtimes.export_for_workers(clients, folder)
    return runtimes.RayWorkers(num_workers=count, data=folder)


def _way_of(federated_model: keras.DPFederatedModel) -> str:
    """Returns how the rounds so far were computed in this process."""
    if federated_model.engine.has_trained_side_by_side:
        return "side by side"
    return "XLA" if federated_model.engine.jit_compile else "plain"


def _hooks_seconds(rounds: int = 1000) -> float:
    """Returns what Keras's hooks take of a round, which has eight values."""
    times = RoundTimes()
    hooks = tf.keras.callbacks.CallbackList(
        [times], add_history=True, model=workloads.mlp(1, 1)
    )
    hooks.on_train_begin()
    for index in range(rounds):
        hooks.on_epoch_begin(index)
        hooks.on_train_batch_begin(0)
        logs = {f"value_{number}": 0.5 for number in range(8)}
        hooks.on_train_batch_end(0, logs)
        hooks.on_epoch_end(index, logs)
    hooks.on_train_end()
    return float(np.median(times.seconds))


class EngineSide:
    """Any number of runs in one process, that are measured in turns."""

    def __init__(self, one_thread_per_operation: bool = True):
        """Sets TensorFlow's threads as scripts/train.py does."""
        if one_thread_per_operation:
            training.use_one_thread_per_operation()
        self._runs: dict[str, _Run] = {}

    def add(
        self,
        run: str,
        workload: str,
        *,
        jit_compile: bool | None = None,
        sampling: str = "fixed_size",
        cohort: int | None = None,
        population: int | None = None,
        sizes: str | None = None,
        even: bool = False,
        workers: int = 0,
        worker_data: str | None = None,
        mechanism: str = "fixed",
        stream: str | None = None,
        stream_folder: str | None = None,
        policy: str = "float32",
        num_replicas: int | None = None,
        warm_up: int = 3,
    ) -> dict[str, Any]:
        """Makes a run, and runs its first rounds.

        Args:
          run: Its name.
          workload: A workload's name.
          jit_compile: As in `compile`.
          sampling: As in `DPFederatedModel`.
          cohort: Clients per round; None: the workload's.
          population: Clients in all, who share stored examples; None: as many
            as in the cohort, each with examples of its own.
          sizes: A key of `UNEVEN`; None: all clients are as large as the
            workload says.
          even: Whether to share the batches of `sizes` out evenly.
          workers: Workers that train and read the data; 0: this process.
          worker_data: A folder that they read it from; it is written here.
          mechanism: A key of `MECHANISMS`.
          stream: "files" or "tf_data", see `streamed`; "population" or
            "population_mapped", see `population_on_disk`; None: in memory.
          stream_folder: Where files are written.
          policy: Keras's dtype policy.
          num_replicas: How many clients train at once; None: one a core.
          warm_up: Rounds after the first.

        Returns:
          Seconds of the first round (engine made and traced), whether XLA
          compiles, and bytes of memory the rounds have taken at their peak.
        """
        work = workloads.by_name(workload)
        cohort = cohort or work.clients
        started = time.perf_counter()
        if stream in ("population", "population_mapped"):
            count = int(population or work.clients)
            mapped = stream == "population_mapped"
            clients = datasets.FederatedDataset.from_client_fn(
                list(range(count)),
                population_on_disk(work, count, str(stream_folder), mapped),
            )
        else:
            clients = self._clients(work, cohort, population, sizes, even)
            if stream is not None:
                clients = streamed(clients, stream, stream_folder)
        constructed = time.perf_counter() - started
        tf.keras.mixed_precision.set_global_policy(policy)
        made = _Run(
            work,
            clients,
            cohort,
            sampling,
            mechanism,
            jit_compile,
            _workers(clients, workers, worker_data),
            num_replicas,
        )
        before = machine.memory_bytes()
        machine.reset_peak()
        start = time.perf_counter()
        made.fit(1)
        first = time.perf_counter() - start
        made.estimate = first
        if warm_up:
            made.estimate = float(np.min(made.fit(warm_up)))
        self._runs[run] = made
        peak = machine.memory_bytes(field="VmHWM")
        engine = made.federated_model.engine
        return {
            "first_seconds": first,
            "constructed_seconds": constructed,
            "seconds": made.estimate,
            "jit_compile": getattr(engine, "jit_compile", None),
            "way": _way_of(made.federated_model),
            "num_replicas": getattr(engine, "num_replicas", None),
            "memory_bytes": peak - before,
            "peak_bytes": peak,
        }

    def _clients(
        self,
        work: workloads.Workload,
        cohort: int,
        population: int | None,
        sizes: str | None,
        even: bool,
    ) -> datasets.FederatedDataset:
        if sizes is not None:
            lengths = np.round(UNEVEN[sizes](cohort)).astype(np.int64)
            if even:
                lengths = evenly(lengths, work.batch_size)
            x, y = work.data(int(lengths.sum()))
            indices = np.split(np.arange(len(x)), np.cumsum(lengths)[:-1])
            return datasets.FederatedDataset.from_indices(x, y, indices)
        if population is None:
            x, y = work.data(cohort * work.examples)
            indices = np.arange(len(x), dtype=np.int32)
            indices = indices.reshape(cohort, work.examples)
        else:
            x, y = work.data(_SHARED_EXAMPLES)
            indices = np.random.default_rng(1).integers(
                len(x), size=(population, work.examples), dtype=np.int32
            )
        return datasets.FederatedDataset.from_indices(x, y, indices)

    def measure(
        self,
        run: str,
        seconds: float,
        min_rounds: int = 1,
        max_rounds: int = 200,
    ) -> list[float]:
        """Runs rounds for about so long; returns the seconds of each.

        Every call runs as many rounds as the first one, which is a run of its
        own to warm up: a `fit` of another number of rounds is another plan.
        """
        made = self._runs[run]
        if not made.rounds:
            made.rounds = int(np.clip(seconds / made.estimate, min_rounds, max_rounds))
            made.fit(made.rounds)
        return made.fit(made.rounds)

    def reading(self, workload: str, population: int, folder: str) -> list[float]:
        """Returns what reading a cohort takes by itself, in seconds.

        Args:
          workload: A workload's name.
          population: How many clients there are, see `population_on_disk`.
          folder: Where their file is.
        """
        work = workloads.by_name(workload)
        read = population_on_disk(work, population, folder)
        rng = np.random.default_rng(0)
        seconds = []
        for _ in range(100):
            cohort = rng.integers(population, size=work.clients).tolist()
            start = time.perf_counter()
            for client in cohort:
                read(client)
            seconds.append(time.perf_counter() - start)
        return seconds

    def versions(self) -> dict[str, str]:
        """Returns what runs here."""
        return {
            "Python": platform.python_version(),
            "TensorFlow": tf.__version__,
            "Keras": getattr(tf.keras, "__version__", tf.keras.__name__),
        }

    def memory(
        self,
        workload: str,
        cohort: int,
        mechanism: str = "fixed",
        side_by_side: bool = True,
    ) -> dict[str, Any]:
        """Returns what two rounds need beside the data, in bytes.

        The data, the user's model, and all that TensorFlow and Keras take for
        their first training (measured with a tiny model) are not counted.

        Args:
          workload: A workload's name.
          cohort: Clients per round.
          mechanism: A key of `MECHANISMS`.
          side_by_side: Whether dense models' clients may train side by side.
        """
        jit_compile = None if side_by_side else False
        tiny = workloads.by_name("mlp_1e+04")
        _Run(
            tiny,
            self._clients(tiny, 4, None, None, False),
            4,
            "fixed_size",
            mechanism,
            jit_compile,
            None,
        ).fit(2)
        work = workloads.by_name(workload)
        run = _Run(
            work,
            self._clients(work, cohort, None, None, False),
            cohort,
            "fixed_size",
            mechanism,
            jit_compile,
            None,
        )
        before = machine.memory_bytes()
        exact = machine.reset_peak()
        run.fit(2)
        peak = machine.memory_bytes(field="VmHWM")
        engine = run.federated_model.engine
        return {
            "bytes": peak - before,
            "model_bytes": 4 * run.federated_model.model.count_params(),
            "replicas": engine.num_replicas,
            "exact": exact,
        }

    def mnist_memory(self, path: str, num_clients: int) -> dict[str, int]:
        """Returns what MNIST takes, dealt to so many clients, in bytes."""
        before = machine.memory_bytes()
        loaded = datasets.load_mnist(num_clients=num_clients, path=path)
        after = machine.memory_bytes()
        images = loaded[0].flat()[0]
        indices = num_clients * 600 * 4
        test = loaded[1][0].nbytes
        return {
            "bytes": after - before,
            "copy_bytes": int(np.prod(images.shape)) * 4,
            "index_bytes": indices,
            "test_bytes": test,
        }

    def mnist_accuracy(self, path: str, policy: str, seed: int, rounds: int) -> float:
        """Returns the test accuracy of the MLP, with noise, after training.

        On MNIST among 100 clients, of whom 50 train in a round.

        Args:
          path: The file of MNIST.
          policy: Keras's dtype policy.
          seed: Of the model, and of cohorts and noise.
          rounds: How many.
        """
        clients, test = datasets.load_mnist(num_clients=100, path=path)
        tf.keras.mixed_precision.set_global_policy(policy)
        tf.keras.utils.set_random_seed(seed)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input(clients.element_spec[0].shape),
                tf.keras.layers.Flatten(),
                *workloads.WORKLOADS["mlp_batch60"].make_model().layers,
            ]
        )
        federated_model = keras.DPFederatedModel(
            model,
            MECHANISMS["fixed"](),
            clients_per_round=workloads.CLIENTS_PER_ROUND,
        )
        federated_model.compile(
            optimizer=tf.keras.optimizers.SGD(workloads.LEARNING_RATE),
            loss=workloads.loss(),
            metrics=workloads.metrics(),
        )
        federated_model.fit(clients, rounds=rounds, batch_size=60, verbose=0, seed=seed)
        return float(federated_model.evaluate(*test, verbose=0)[1])

    def profile(self, run: str) -> dict[str, Any]:
        """Returns where the time of rounds goes, see `profiling`.

        As many rounds as one call of `measure` runs, which comes before.
        """
        made = self._runs[run]
        spans: list[tuple[float, float]] = []
        with calls.timed(lambda *span: spans.append(span)):
            times = made.fit(made.rounds)
        inside = profiling.covered(spans) / np.sum(times)
        found = self._profiled(made)
        return {
            **found,
            "inside_functions": float(inside),
            "hooks_seconds": _hooks_seconds(),
        }

    def _profiled(self, made: _Run) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            options = tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=2, python_tracer_level=0
            )
            tf.profiler.experimental.start(folder, options)
            try:
                times = made.fit(made.rounds)
            finally:
                tf.profiler.experimental.stop()
            (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
            operations = profiling.operations(path.read_bytes(), made.rounds)
        return {
            "profiled_seconds": float(np.median(times)),
            "rounds": made.rounds,
            "operations": operations,
        }
