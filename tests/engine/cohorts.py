"""Small cohorts for the engine, and the same training in a plain Keras loop."""

import contextlib
from typing import Any
from unittest import mock

import dp_accounting
import hypothesis
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

from tests.keras import toy
from tfdp_fl import accounting, engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models, devices
from tfdp_fl.mechanisms import ClientWeighting, NoPrivacy, PrivacyContext

SIZES = (7, 0, 3, 5)
FEATURES, CLASSES = 4, 3

from_arrays = FederatedDataset.from_client_arrays


def client_arrays(sizes=SIZES, seed: int = 0):
    """Returns `{client: (x, y)}`, a few Gaussian examples for each client."""
    rng = np.random.default_rng(seed)
    return {
        k: (
            rng.normal(size=(size, FEATURES)).astype(np.float32),
            rng.integers(0, CLASSES, size),
        )
        for k, size in enumerate(sizes)
    }


def dataset(sizes=SIZES) -> FederatedDataset:
    return from_arrays(client_arrays(sizes))


def sequential(shape, *layers, **options: Any) -> tf.keras.Sequential:
    return tf.keras.Sequential([tf.keras.Input(shape, **options), *layers])


def mlp(units: int = 6) -> tf.keras.Sequential:
    """Returns a small model whose weights are always the same."""
    toy.seed(1)
    dense = tf.keras.layers.Dense
    return sequential([FEATURES], dense(units, "tanh"), dense(CLASSES))


def cross_entropy(**options: Any) -> tf.keras.losses.Loss:
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def make_engine(
    model: tf.keras.Model,
    dataset: FederatedDataset,
    *,
    optimizer: Any = None,
    loss: Any = None,
    jit_compile: bool | None = False,
    training: dict[str, Any] | None = None,
    client_weighting: ClientWeighting | None = None,
    at_once: int | None = None,
    **options: Any,
) -> engine.CohortEngine:
    """Returns an engine, for cohorts of a fixed size; `at_once`: as on a GPU."""
    usual = {"mechanism": NoPrivacy(), "max_parallel_clients": 1}
    made = engine.Training(
        optimizer=optimizer or tf.keras.optimizers.SGD(0.1),
        loss=cross_entropy() if loss is None else loss,
        jit_compile=jit_compile,
        **(training or {}),
    )
    context = PrivacyContext(
        clients_per_round=dataset.num_clients,
        num_clients=dataset.num_clients,
        sampling="fixed_size",
        rounds=3,
        min_examples=1,
        client_weighting=client_weighting,
    )
    how = {"training": made, "context": context, **usual, **options}
    spec = dataset.element_spec
    with mock.patch.object(devices, "clients_per_call", lambda *_: at_once):
        return engine.CohortEngine(model=model, element_spec=spec, **how)


def inputs(dataset: FederatedDataset, **changes: Any) -> engine.RoundInputs:
    """Returns a round of all clients."""
    values = {
        "round_index": 0,
        "state": (),
        "positions": np.arange(dataset.num_clients),
        "clients_per_round": float(dataset.num_clients),
        "noise_multiplier": 0.0,
        "batch_size": 5,
        "local_epochs": 2,
        "learning_rate": 0.1,
        "seed": np.array([3, 4], np.uint64),
        **changes,
    }
    return engine.RoundInputs(**values)


def collect(cohort_engine, dataset: FederatedDataset, **changes: Any):
    changes = {"state": cohort_engine.query.initial_global_state(), **changes}
    return cohort_engine.collect(dataset, inputs(dataset, **changes))


def update_of(pending) -> list[np.ndarray]:
    """Returns what the clients of a round add up to."""
    (total,) = pending.sums
    return [part.numpy() for part in total.contribution.update]


def paid(mu_squared: float = np.inf) -> Any:
    """Returns the receipt of a charge that nobody counts, for a Gaussian of so much."""
    event = dp_accounting.NonPrivateDpEvent()
    if 0 < mu_squared < np.inf:
        event = dp_accounting.GaussianDpEvent(mu_squared**-0.5)
    charge = accounting.Participation(
        sampling="poisson", num_clients=10, clients_per_round=5
    ).cost(event)
    return accounting.PrivacyAccount("central", 10).charge(
        charge, round_index=0, cohort_size=5, positions=np.arange(5)
    )


def run_round(cohort_engine, dataset, **changes: Any) -> dict[str, float]:
    pending = collect(cohort_engine, dataset, **changes)
    inputs = pending.inputs
    charged = cohort_engine.query.expected_mu_squared(
        inputs.clients_per_round, inputs.noise_multiplier
    )
    return cohort_engine.release(pending, paid(charged))[1]


def moved_by(model, cohort_engine, dataset, **changes: Any) -> list[np.ndarray]:
    """Returns how one round moves each variable of a model."""
    before = model.get_weights()
    run_round(cohort_engine, dataset, **changes)
    return [b - a for a, b in zip(before, model.get_weights(), strict=True)]


def side_by_side(
    beside: bool = True, few: bool | None = None, steps: tuple[int, ...] | None = None
):
    """Trains dense models side by side or not.

    Args:
      beside: Whether, even where it does not pay.
      few: Whether as if they were small.
      steps: The numbers of steps that there are programs for, if not all: one of 12
        takes seconds to trace. No client that has a program else may go without.
    """
    programs = list(steps or dense_models.PROGRAM_STEPS)
    patches: dict[str, Any] = {"worthwhile_steps": lambda *_: programs * beside}
    program_steps = dense_models.program_steps

    def checked(kernels, counts, batch):
        assert not any(
            max(programs) < n <= dense_models.PROGRAM_STEPS[-1] for n in counts
        )
        return program_steps(kernels, counts, batch)

    patches["program_steps"] = checked
    if few is not None:
        patches["is_small"] = lambda *_: few
    return mock.patch.multiple(dense_models, **patches)


@contextlib.contextmanager
def policy(name: str):
    tf.keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy("float32")


def assert_close(one: Any, other: Any, rtol: float = 1e-6, atol: float = 1e-6):
    for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def reference_update(
    model: tf.keras.Model,
    client: tuple[Any, Any],
    optimizer: tf.keras.optimizers.Optimizer,
    loss: Any,
    *,
    batch_size: int = 5,
    local_epochs: int = 2,
    loss_weights: Any = None,
    proximal_weight: float = 0.0,
    grad_clip: float = 0.0,
) -> list[np.ndarray]:
    """Returns what one client's training changes, by Keras's own steps.

    The model is put back, and the optimizer's slots are fresh.
    """
    before = model.get_weights()
    received = [tf.identity(v) for v in model.trainable_variables]
    own = type(optimizer).from_config(optimizer.get_config())
    apply = own.apply

    def limited(gradients, variables):
        gradients = [
            tf.convert_to_tensor(g) + proximal_weight * (w - w0)
            for g, w, w0 in zip(gradients, variables, received, strict=True)
        ]
        if grad_clip:
            gradients, _ = tf.clip_by_global_norm(gradients, grad_clip)
        apply(gradients, variables)

    own.apply = limited
    model.compile(own, loss, loss_weights=loss_weights, run_eagerly=True)
    size = len(tf.nest.flatten(client)[0])
    for start in [*range(0, size, batch_size)] * local_epochs:
        batch = slice(start, start + batch_size)
        model.train_on_batch(*tf.nest.map_structure(lambda a, b=batch: a[b], client))
    after = model.get_weights()
    model.set_weights(before)
    return [b - a for a, b in zip(before, after, strict=True)]


SILENT = 1


def hostile_updates(template, count=20):
    """Returns updates like `template`: hostile ones, and one that is zero (SILENT)."""
    rng = np.random.default_rng(0)
    updates = [
        [rng.normal(size=np.shape(part)) * 10.0 ** (k % 7 - 4) for part in template]
        for k in range(count)
    ]
    updates[3][0][0] = np.nan
    updates[5] = [1e30 + part for part in updates[5]]
    updates[SILENT] = [0 * part for part in updates[SILENT]]
    return updates


def check_sums(total, count, few, smallest=1, silent=None):
    """Asserts sum(P with k) = sum(P) + record(k), bit for bit, in any order.

    Args:
      total: Returns, of positions, a sum of contributions and the side sums.
      count: How many clients there are.
      few: How many cohorts are tried.
      smallest: If not 1, nobody is summed alone, and only this is tried:
      silent: whose record is zero moves no bit.
    """

    @hypothesis.settings(max_examples=few, deadline=None)
    @hypothesis.given(
        st.sets(st.integers(0, count - 1), min_size=smallest),
        st.integers(0, count - 1),
    )
    def check(others, client):
        others.discard(client)
        hypothesis.assume(len(others) >= smallest)
        without, sums_without = total(sorted(others))
        together, sums = total(sorted({*others, client}))
        if client == silent:
            np.testing.assert_array_equal(together, without)
        if smallest > 1:
            return
        alone, own_sums = total([client])
        np.testing.assert_array_equal(together, without + alone)
        np.testing.assert_array_equal(
            sums or 0, np.add(sums_without or 0, own_sums or 0)
        )
        # In whatever order the clients stand.
        again, _ = total([client, *sorted(others, reverse=True)])
        np.testing.assert_array_equal(together, again)

    check()
