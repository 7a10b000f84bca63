"""The runtimes that run mechanisms, as one function each: updates in, models out.

Every runtime is brought to hand its clients' updates to the mechanism exactly as a
test gives them. A new runtime is one more function in `RUNTIMES`.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.mechanisms import rounds as one_round
from tfdp_fl import mechanisms

DELTA = 1e-3
NUM_EXAMPLES = 5  # Of each client, where they count.
# What a silent client "sends": it is asked, and does not answer.
SILENT = None


@dataclasses.dataclass(frozen=True)
class Released:
    """What some rounds released.

    Attributes:
      moved: float64 [T, D], by how much each round moved the model.
      epsilon: At `DELTA`, of those rounds; None where the mechanism promises
        nothing, or promises it to others than the whole run's readers.
    """

    moved: np.ndarray
    epsilon: float | None


Run = Callable[..., Released]


def _sampling(mechanism):
    return "cyclic" if mechanism.name == "CorrelatedNoise" else "fixed_size"


def _keras(
    executor: str, runtime: Callable[[], Any] | None = None, **options: Any
) -> Run:
    """Returns the runtime of `DPFederatedModel.fit` with an executor.

    Clients' updates are their examples: of w in |w x - 10^6| the gradient is -x, so
    that one step at rate 1 is x.
    """
    beside, at_once = executor == "side by side", 3 if executor == "batched" else None

    def run(mechanism, rounds, clients_per_round):
        import keras
        import tensorflow as tf

        from tests.engine import cohorts
        from tfdp_fl.engine import devices
        from tfdp_fl.engine import engine as engine_lib

        size, moved = len(rounds[0][0]), []
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input([size]), dense])
        how = (clients_per_round, _sampling(mechanism))
        federated = tfdp_fl.DPFederatedModel(
            model, mechanism, *how, max_parallel_clients=2, **options
        )
        federated.compile(
            keras.optimizers.SGD(1.0),
            keras.losses.MeanAbsoluteError(),
            jit_compile=None if beside else executor == "XLA",
        )
        y = np.full([1, 1], 1e6, np.float32)
        spec = tf.TensorSpec([size], tf.float32), tf.TensorSpec([1], tf.float32)
        worthwhile = cohorts.side_by_side(beside, steps=(1,))
        batches = mock.patch.object(devices, "clients_per_call", lambda *_: at_once)
        # No bit counts here, and one output is narrow: 256 clients would be made up.
        few_tried = mock.patch.object(engine_lib, "_COMPARED", 4)
        with worthwhile, batches, few_tried:
            workers = runtime() if runtime else None
            for updates in rounds:

                def read(client, updates=updates):
                    if updates[client] is SILENT:
                        raise OSError("It does not answer.")
                    return np.asarray(updates[client], np.float32)[None], y

                clients = tfdp_fl.FederatedDataset.from_client_fn(
                    [*range(len(updates))], read, element_spec=spec
                )
                before = model.get_weights()[0]
                federated.fit(clients, batch_size=1, verbose=0, runtime=workers)
                moved.append(np.ravel(model.get_weights()[0].astype(float) - before))
        if beside:
            assert federated.engine.has_trained_side_by_side
        if at_once:
            assert "batches of 3" in federated.engine.executor
        central = mechanism.trust_model == "central"
        spent = federated.epsilon(DELTA) if central else None
        return Released(np.stack(moved), spent)

    return run


@functools.cache
def ray_workers():
    """Returns the two workers of all tests in this process."""
    from tfdp_fl import runtimes

    root = pathlib.Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    # Ray has its workers give way to everybody, and another test runs beside them.
    changes = {"PYTHONPATH": path, "RAY_worker_niceness": "0"}
    with mock.patch.dict(os.environ, changes):
        return runtimes.RayWorkers(num_workers=2).open()


def _tff(mechanism, rounds, clients_per_round):
    import tensorflow_federated as tff

    from tfdp_fl import aggregators, learning

    factory = aggregators.from_mechanism(mechanism, clients_per_round)
    process = factory.create(tff.TensorType(np.float32, [len(rounds[0][0])]))
    state, moved, spent = process.initialize(), [], None
    for updates in rounds:
        output = process.next(
            state, [np.float32(each) for each in updates if each is not SILENT]
        )
        state = output.state
        moved.append(np.asarray(output.result, float))
    if mechanism.trust_model == "central" and mechanism.name != "CorrelatedNoise":
        m = clients_per_round
        sizes = {"num_clients": m, "clients_per_round": m, "delta": DELTA}
        spent = learning.epsilon(state, mechanism, sampling="fixed_size", **sizes)
    return Released(np.stack(moved), spent)


def _flower(mechanism, rounds, clients_per_round):
    strategy = fm.private(mechanism, clients_per_round)
    record, moved = fm.model(np.zeros(len(rounds[0][0]))), []
    for number, updates in enumerate(rounds, start=1):
        clients = [None if each is SILENT else fm.adds([each]) for each in updates]
        after, _ = fm.a_round(
            strategy, fm.Grid(dict(enumerate(clients))), record, number
        )
        moved.append(fm.arrays(after)[0] - fm.arrays(record)[0])
        record = after
    central = mechanism.trust_model == "central"
    spent = strategy.privacy_epsilon(DELTA) if central else None
    return Released(np.stack(moved), spent)


def _query(mechanism, rounds, clients_per_round):
    size = len(rounds[0][0])
    # Two variables, where it is not a layer that is clipped.
    sizes = [size // 2, size - size // 2] if mechanism.scales_updates else [size]
    context = mechanisms.PrivacyContext(
        clients_per_round=clients_per_round,
        num_clients=20,
        sampling=_sampling(mechanism),
        rounds=16,
        num_variables=len(sizes),
        shapes=tuple((part,) for part in sizes),
    )
    query = mechanism.bind(context)
    state, moved = query.initial_global_state(), []
    for updates in rounds:
        answered = [
            np.split(np.asarray(each, np.float32), sizes[:1] * (len(sizes) - 1))
            for each in updates
            if each is not SILENT
        ]
        done = one_round.run_round(
            query,
            state,
            answered,
            noise_multiplier=mechanism.noise_multiplier_at(0),
            clients_per_round=clients_per_round,
            num_examples=[NUM_EXAMPLES] * len(answered),
        )
        state = done.next_state
        moved.append(one_round.flat(done.mean).astype(float))
    return Released(np.stack(moved), None)


RUNTIMES: dict[str, Run] = {
    "query": _query,
    "threads": _keras("one by one"),
    "side by side": _keras("side by side"),
    "XLA": _keras("XLA"),
    "batched": _keras("batched"),
    "Ray": _keras("one by one", ray_workers),
    "TFF": _tff,
    "Flower": _flower,
}


def missing(runtime: str) -> str | None:
    """Returns why a runtime cannot run in this environment, or None."""
    import tensorflow as tf

    needs = {"TFF": "tensorflow_federated", "Ray": "ray"}.get(runtime)
    if needs and importlib.util.find_spec(needs) is None:
        return f"{needs} is not installed: it is the other stack's"
    if runtime not in ("query", "TFF", "Flower") and not hasattr(tf.keras, "ops"):
        return "the Keras front is for Keras 3; here TFF's functional models train"
    return None
