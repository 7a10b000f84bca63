"""One client that wants to do harm, in a round of four, on every way to train.

The same seed with its data and without (no examples, or for weights that are
averaged: usual ones) gives the same cohort and noise: what is left between the two
models is what the client did. If it changes the sum by c at most (`reach`), and the
mean is divided by m, the model moves by at most c / m in exact arithmetic, and

    1e-5 c / m                            of the clip itself (docs/clipping.md)
    (K + 6) u (|w| + |sum| + |noise|)     u = 2^-24

for K + 6 roundings to float32, each at most u times what it is a rounding of: K - 1
additions of clients, the noise, the division, and the addition to the weights, in
both models (Higham 2002, section 3.1, gamma_n). The sum is at most K c, and the
noise (stddev s, d elements) at most s (sqrt(d) + 6.5), but for a chance of 1e-9.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import toy
from tests.outside.loading import smooth_clipping
from tfdp_fl import secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import ray_workers

FEATURES, CLASSES, EXAMPLES, CLIENTS = 4, 3, 6, 4
HOSTILE = 1  # Which client it is.
CLIP = 0.4
_UNIT = 2.0**-24

ClientContext = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A mechanism, and what one client can do to it."""

    kind: Any
    options: dict[str, Any]
    reach: float = CLIP  # c; NaN: the clip norm of the round, which is measured.
    sampling: str = "fixed_size"
    # The stddev of what a client that drops out takes along; NaN: as measured.
    noise: float = 0.0
    averages: bool = False  # Weights: a client without examples is none.

    def make(self) -> tfdp_fl.Mechanism:
        return self.kind(**self.options)


def _somebodys_own(**options: Any) -> tfdp_fl.Mechanism:
    return smooth_clipping()(**options)


_Z = {"noise_multiplier": 0.5}
_CLIPPED = {"clip_norm": CLIP, **_Z}
_ADAPTIVE = {"initial_clip_norm": CLIP, "count_noise_stddev": 1.0, **_Z}
_BLT = tfdp_fl.BLT(theta=(0.6, 0.1), theta_hat=(0.2, 0.05))
_CORRELATED = {**_CLIPPED, "strategy": _BLT, "rounds": 4, "min_separation": 1}
_DISCO = {"epsilon": 100.0, "delta": 1e-3, "clipping_radius": CLIP}
_NBAFL = {"epsilon": 500.0, "constant": 3.0, "weight_clip": 3.0}
_PRIVATE_MEDIAN = {**_Z, "median_noise_multiplier": 0.01}
_AT_CLIENTS, _SEEN = {"noise_site": "client"}, math.nan
# The clients but the hostile one are alike, so that the median is theirs with one
# more or less. DISCO has a radius for each of four variables. NbAFL's weights may
# turn right round, and are weighted by the examples: 1/4 of the mean is 2 C.
CASES = {
    "fixed": Case(tfdp_fl.FixedClipping, _CLIPPED),
    "fixed_client": Case(tfdp_fl.FixedClipping, _CLIPPED | _AT_CLIENTS),
    "adaptive": Case(tfdp_fl.AdaptiveClipping, _ADAPTIVE),
    "adaptive_client": Case(tfdp_fl.AdaptiveClipping, _ADAPTIVE | _AT_CLIENTS),
    "median": Case(tfdp_fl.MedianClipping, _PRIVATE_MEDIAN, _SEEN),
    "exact_median": Case(tfdp_fl.MedianClipping, _Z, _SEEN),
    "correlated": Case(tfdp_fl.CorrelatedNoise, _CORRELATED, sampling="cyclic"),
    "local": Case(tfdp_fl.LocalDP, _CLIPPED, noise=0.5 * CLIP),
    "adaptive_local": Case(tfdp_fl.AdaptiveLocalDP, _DISCO, 2 * CLIP, noise=_SEEN),
    "nbafl": Case(tfdp_fl.NbAFL, _NBAFL, 6.0, noise=_SEEN, averages=True),
    "somebodys_own": Case(_somebodys_own, {"start_norm": CLIP, **_Z}),
}


def _filled(value: float) -> Callable[[ClientContext], ClientContext]:
    return lambda client: (np.full_like(client[0], value), client[1])


def _one_nan(client):
    return np.where(np.arange(FEATURES) == 2, np.float32(np.nan), client[0]), client[1]


def _cancelling(client):
    """Rows that are large and cancel in pairs, with the same label."""
    x, y = client
    rows = np.repeat(x[: len(x) // 2], 2, axis=0) * np.float32(1e7)
    rows[1::2] *= -1
    return rows + x, np.zeros_like(y)


# What becomes of the client's data. Some counts as nothing, some is clipped.
ATTACKS: dict[str, Callable[[ClientContext], ClientContext]] = {
    "nan": _filled(np.nan),
    "inf": _filled(np.inf),
    "minus_inf": _filled(-np.inf),
    "1e38": _filled(1e38),
    "minus_1e38": _filled(-1e38),
    "1e19": _filled(1e19),
    "denormal": _filled(1e-42),
    "zero": _filled(0.0),
    "one_nan": _one_nan,
    "a_million_times": lambda c: (c[0] * np.float32(1e6), c[1]),
    "cancelling": _cancelling,
}


def _raises(client):
    raise OSError("the disk is gone")


# What is no example at all; only a client that is read may come with it.
FAILURES: dict[str, Callable[[ClientContext], Any]] = {
    "wrong_shape": lambda c: (c[0][:, :2], c[1]),
    "wrong_rank": lambda c: (c[0].ravel(), c[1]),
    "wrong_dtype": lambda c: (c[0].astype("S4"), c[1]),
    "complex": lambda c: (c[0].astype(np.complex64), c[1]),
    "objects": lambda c: (c[0].astype(object), c[1]),
    "fewer_labels": lambda c: (c[0], c[1][:-1]),
    "label_too_large": lambda c: (c[0], c[1] + CLASSES),
    "label_below_0": lambda c: (c[0], c[1] - CLASSES),
    "no_pair": lambda c: c[0],
    "nothing": lambda c: None,
    "raises": _raises,
}


def clients() -> dict[int, ClientContext]:
    """Returns usual clients, but for the hostile one alike."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, EXAMPLES, FEATURES)).astype(np.float32)
    y = rng.integers(0, CLASSES, (2, EXAMPLES))
    kinds = [int(k == HOSTILE) for k in range(CLIENTS)]
    return {k: (x[kind], y[kind]) for k, kind in enumerate(kinds)}


def without_examples(client: ClientContext) -> ClientContext:
    """Returns a client of no examples."""
    return client[0][:0], client[1][:0]


class HereWorkers:
    """Workers that are this very process: shards without a network."""

    num_workers = 2

    def collector(self, cohort_engine, clients):
        return ray_workers.ShardedCohorts(cohort_engine, clients, self, True)

    def run(self, traced, sent, examples, shards):
        run = _runnable(traced)
        return [run([*sent, *(examples or ()), *shard]) for shard in shards]


# As an actor does, it keeps what it runs. TensorFlow optimises a program in the first
# call of each session, which takes far longer than a round.
_runnable = functools.lru_cache(maxsize=64)(ray_workers.runnable)


WAYS = (
    *("one_by_one", "side_by_side", "few_side_by_side", "xla", "streamed"),
    *("streamed_xla", "sharded", "sharded_side_by_side", "streamed_sharded"),
    *("sharded_few_side_by_side", "secure_aggregation", "secure_aggregation_float"),
)


def jit_compile(way: str) -> bool | None:
    """Returns what `compile` is told for a way."""
    return None if way.endswith("side_by_side") else way.endswith("xla")


def fit(
    fed: Any,
    way: str,
    clients: Any,
    runtime: Any = None,
    steps: tuple[int, ...] | None = None,
    **options: Any,
) -> Any:
    """Trains clients in one way; what is streamed is not a mapping any more."""
    beside = way.endswith("side_by_side")
    if way.startswith("streamed") and isinstance(clients, dict):
        clients = FederatedDataset.from_client_fn(list(clients), clients.__getitem__)
    runtime = HereWorkers() if "sharded" in way else runtime
    with cohorts.side_by_side(beside, "few" in way, steps):
        return toy.fit(fed, data=clients, runtime=runtime, **options).history


def model() -> tf.keras.Model:
    """Returns a small dense model that always starts the same."""
    toy.seed(1)
    layers = [tf.keras.layers.Dense(8, "relu"), tf.keras.layers.Dense(CLASSES)]
    return tf.keras.Sequential([tf.keras.layers.Input((FEATURES,)), *layers])


class Outcome(NamedTuple):
    """What a round left: the weights in float64, and its history."""

    weights: np.ndarray
    history: dict[str, float]


class Trainer:
    """Trains one round again and again, from the same weights and seed."""

    def __init__(self, case: Case, way: str, runtime: Any = None):
        self.case, self.way, self._runtime = case, way, runtime
        protocol = None
        if way.startswith("secure"):
            mode = "float" if way.endswith("float") else "ring"
            protocol = secure_aggregation.AdditiveSecretSharing(mode=mode)
        compiled = {"optimizer": tf.keras.optimizers.SGD(0.5), "metrics": ["accuracy"]}
        compiled["jit_compile"] = jit_compile(way)
        self.fed = toy.federated(
            *(case.make(), model, CLIENTS, case.sampling, compiled),
            secure_aggregation=protocol,
        )
        self._weights = self.fed.get_weights()
        self.start = toy.flat(self._weights)

    def round(self, change: Callable[[ClientContext], Any]) -> Outcome:
        """Trains one round, of changed data of the hostile client."""
        data: Any = clients()
        if self.way.startswith("streamed"):

            def read(client):
                return change(data[client]) if client == HOSTILE else data[client]

            dataset = FederatedDataset.from_client_fn(range(CLIENTS), read)
        else:
            dataset = {**data, HOSTILE: change(data[HOSTILE])}
        self.fed.set_weights(self._weights)
        self.fed._run = None  # The same noise again.
        options = {"batch_size": EXAMPLES // 2, "seed": 5, "steps": (2,)}
        history = fit(self.fed, self.way, dataset, self._runtime, **options)
        history = {name: values[-1] for name, values in history.items()}
        return Outcome(toy.flat(self.fed), history)

    def without(self) -> Outcome:
        """Trains one round without the hostile client."""
        usual = self.case.averages
        return self.round(lambda client: client if usual else without_examples(client))

    def bound(self, without: Outcome, dropped_out: bool = False) -> float:
        """Returns how far the hostile client may move the model from there."""
        reach, noise, history = self.case.reach, self.case.noise, without.history
        if math.isnan(reach):
            reach = history["clip_norm"]
        if math.isnan(noise):
            noise = history["noise_stddev"] / CLIENTS**0.5
        weights, size = np.linalg.norm(self.start), self.start.size
        # |N(0, I)| of d elements is above sqrt(d) + 6.5 with less than 1e-9
        # (Laurent and Massart 2000, Lemma 1).
        length = size**0.5 + 6.5
        added = weights + CLIENTS * reach + length * history["noise_stddev"]
        rounding = (CLIENTS + 6) * _UNIT * added
        if self.way.startswith("secure"):
            # Each of K values is off by half a step of the protocol's grid.
            protocol = self.fed.setup.secure_aggregation
            step = 1e-9 if protocol.mode == "float" else protocol.resolution
            rounding += CLIENTS * step * size**0.5
        if dropped_out:
            # A mean over those who answered divides their noises by K - 1
            # too: sqrt((K - 1) (1/(K - 1) - 1/K)^2 + 1/K^2) of one in all.
            reach += length * noise * (CLIENTS / (CLIENTS - 1)) ** 0.5
        return reach / CLIENTS * (1 + 1e-5) + rounding


def moved(one: Outcome, other: Outcome) -> float:
    """Returns how far two models are from each other."""
    return float(np.linalg.norm(one.weights - other.weights))
