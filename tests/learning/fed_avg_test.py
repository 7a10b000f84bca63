import asyncio
import contextlib

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff

from tfdp_fl import aggregators, learning, mechanisms
from tfdp_fl.aggregators import accounted_state
from tfdp_fl.tff import fed_avg

CLIENTS = 4
OPTIMIZER = tff.learning.optimizers.build_sgdm(0.1)
DECLARED = {"sampling": "poisson", "num_clients": 100, "clients_per_round": CLIENTS}


@pytest.fixture(name="cohort", scope="module")
def _cohort():
    """Four clients with 20 examples each."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=[CLIENTS, 20, 64]).astype(np.float32)
    y = np.argmax(x[:, :, :10], axis=2).astype(np.int32)
    sliced = tf.data.Dataset.from_tensor_slices
    return [sliced(examples).batch(10) for examples in zip(x, y, strict=True)]


def keras_model():
    start = tf.keras.initializers.GlorotUniform(1)
    dense = tf.keras.layers.Dense(10, kernel_initializer=start)
    return tf.keras.Sequential([tf.keras.layers.InputLayer(64), dense])


LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SPEC = tf.TensorSpec([None, 64], tf.float32), tf.TensorSpec([None], tf.int32)


def model_fn():
    return tff.learning.models.from_keras_model(keras_model(), LOSS, SPEC)


FUNCTIONAL = tff.learning.models.functional_model_from_keras(keras_model, LOSS, SPEC)
FIXED = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)


def build(mechanism, clients_per_round=CLIENTS, model=model_fn, **options):
    return learning.build_dp_fed_avg(
        model, mechanism, clients_per_round, OPTIMIZER, **options
    )


def run(process, cohorts):
    state = process.initialize()
    for cohort in cohorts:
        output = process.next(state, cohort)
        state = output.state
    return state, output.metrics


def assert_close(first, second, atol=1e-5):
    for one, other in zip(first.trainable, second.trainable, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize("model", [model_fn, FUNCTIONAL], ids=["of Keras", "f"])
def test_equals_unweighted_fed_avg_without_clip_and_noise(model, cohort):
    server = tff.learning.optimizers.build_sgdm(0.7, momentum=0.5)
    free = mechanisms.FixedClipping(clip_norm=1e6, noise_multiplier=0.0)
    ours = build(free, model=model, server_optimizer_fn=server)
    theirs = tff.learning.algorithms.build_unweighted_fed_avg(model, OPTIMIZER, server)
    assert isinstance(ours, tff.learning.templates.LearningProcess)
    one, other = (each.get_model_weights.type_signature for each in (ours, theirs))
    assert one.result == other.result
    one, other = ours.next.type_signature, theirs.next.type_signature
    assert one.parameter[1] == other.parameter[1]
    state, metrics = run(ours, [cohort] * 3)
    expected, _ = run(theirs, [cohort] * 3)
    assert_close(ours.get_model_weights(state), theirs.get_model_weights(expected))
    assert metrics["aggregator"]["cohort_size"] == CLIENTS
    assert metrics["aggregator"]["mean_update_norm"] > 0.1


def test_failed_client_programs_and_epsilon(cohort, tmp_path):
    mechanism = mechanisms.AdaptiveClipping(noise_multiplier=1.0)
    process = build(mechanism, CLIENTS * 5, num_clients=1000, local_epochs=2)
    broken = [cohort[0].map(lambda x, y: (x * np.nan, y)), *cohort[1:]]
    state, metrics = run(process, [broken, cohort])
    assert metrics["client_work"]["train"]["num_examples"] == 160
    _, once = run(process, [broken])
    assert once["aggregator"]["discarded_clients"] == 1
    weights = process.get_model_weights(state)
    assert all(np.isfinite(w).all() for w in weights.trainable)

    # What tff.program keeps and releases.
    manager = tff.program.FileProgramStateManager(tmp_path)
    asyncio.run(manager.save(state, 2))
    loaded = asyncio.run(manager.load(2, process.initialize()))
    release = tff.program.MemoryReleaseManager()
    asyncio.run(release.release(metrics, 2))
    assert 2 in release.values()
    assert_close(process.get_model_weights(loaded), weights, atol=0)
    assert accounted_state(loaded).rounds == 2

    # Epsilon is that of the rounds in the state.
    def spent(state):
        return process.epsilon(state, delta=1e-5, sampling="poisson")

    assert spent(process.initialize()) == 0.0
    assert spent(loaded) == spent(state)
    assert spent(process.next(loaded, cohort).state) > spent(state)
    with pytest.raises(ValueError, match="sampling"):
        process.epsilon(state, delta=1e-5)
    with pytest.raises(ValueError, match="num_clients"):
        process.epsilon(state, delta=1e-5, sampling="poisson", num_clients=7)


def test_a_state_that_two_processes_made_costs_what_both_cost(cohort):
    def made(z):
        fixed = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=z)
        return build(fixed, sampling="poisson", num_clients=100)

    first = made(0.1)
    state, _ = run(first, [cohort] * 2)
    alone = first.epsilon(state, delta=1e-5)
    after = made(5.0)
    state = after.next(state, cohort).state
    assert after.epsilon(state, delta=1e-5) >= alone > 100
    bare = learning.epsilon(state, after.mechanism, delta=1e-5, **DECLARED)
    assert bare == after.epsilon(state, delta=1e-5)
    assert "N = 100" in after.privacy_statement(state, delta=1e-5)


def test_releases_past_the_mechanism_have_no_epsilon(cohort):
    given = {"model_aggregator": aggregators.from_mechanism(FIXED, CLIENTS)}
    momentum = tff.learning.optimizers.build_sgdm(0.1, momentum=0.9)
    algorithms = tff.learning.algorithms
    mime = algorithms.build_unweighted_mime_lite(model_fn, momentum, **given)
    plain = algorithms.build_unweighted_fed_avg(model_fn, OPTIMIZER, **given)
    state, _ = run(mime, [cohort])
    with pytest.raises(ValueError, match="full gradients"):
        learning.epsilon(state, FIXED, delta=1e-5, **DECLARED)
    state, _ = run(plain, [cohort])
    value = learning.epsilon(state, FIXED, delta=1e-5, **DECLARED)
    assert value > 0
    assert "what else" in value.statement


def nbafl_of(epsilon, constant=1.0, weight_clip=50.0, **options):
    options |= {"constant": constant, "weight_clip": weight_clip}
    return mechanisms.NbAFL(epsilon=epsilon, **options)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"client_optimizer_fn": tf.keras.optimizers.SGD}, "client_optimizer_fn"),
        ({"model_fn": "model"}, "model_fn"),
        ({"model_fn": keras_model}, "VariableModel"),
        ({"mechanism": 1.0}, "mechanism"),
        ({"num_clients": 4, "server_optimizer_fn": OPTIMIZER}, "server_optimizer_fn"),
        ({}, "num_clients"),
    ],
)
def test_arguments(changes, name):
    arguments = {"model_fn": model_fn, "mechanism": nbafl_of(1.0), "rounds": 3}
    arguments |= {"clients_per_round": 4, "client_optimizer_fn": OPTIMIZER}
    with pytest.raises((TypeError, ValueError), match=name):
        learning.build_dp_fed_avg(**{**arguments, **changes})


@pytest.fixture(name="unequal")
def _unequal(cohort):
    return [cohort[0], *(data.take(1) for data in cohort[1:])]


def _asks_python(x):
    return tf.ensure_shape(tf.py_function(lambda rows: rows, [x], tf.float32), x.shape)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (lambda: tf.keras.layers.Dropout(0.5), None),
        (lambda: tf.keras.layers.Dropout(0.5, seed=1), "without a seed"),
        (lambda: tf.keras.layers.Lambda(_asks_python), "EagerPyFunc"),
    ],
    ids=["dropout", "seeded", "Python"],
)
def test_what_passes_from_client_to_client_does_not_train(layer, said):
    def model_fn():
        layers = [tf.keras.layers.InputLayer(64), layer(), tf.keras.layers.Dense(10)]
        model = tf.keras.Sequential(layers)
        return tff.learning.models.from_keras_model(model, LOSS, SPEC)

    refused = (
        pytest.raises(ValueError, match=said) if said else contextlib.nullcontext()
    )
    with refused:
        build(FIXED, model=model_fn)


class _Jumps(tff.learning.optimizers.Optimizer):
    """Moves the weights at random, by a stream that all clients share."""

    def initialize(self, specs):
        return ()

    def next(self, state, weights, gradients):
        moved = [
            w + tf.random.normal(w.shape, seed=1) for w in tf.nest.flatten(weights)
        ]
        return state, tf.nest.pack_sequence_as(weights, moved)


def test_an_optimizer_that_passes_something_on_does_not_train():
    with pytest.raises(ValueError, match="without a seed"):
        learning.build_dp_fed_avg(model_fn, FIXED, CLIENTS, _Jumps())


def test_nbafl_without_noise_is_weighted_fed_avg_of_weights(unequal):
    facts = {"rounds": 3, "num_clients": CLIENTS, "local_epochs": 2}
    ours = build(nbafl_of(1e12), model=FUNCTIONAL, **facts)
    theirs = tff.learning.algorithms.build_weighted_fed_avg(FUNCTIONAL, OPTIMIZER)
    state, metrics = run(ours, [unequal] * 2)
    expected, _ = run(theirs, [[data.repeat(2) for data in unequal]] * 2)
    assert_close(ours.get_model_weights(state), theirs.get_model_weights(expected))
    assert metrics["aggregator"]["discarded_clients"] == 0


def test_clients_of_one_example_have_noise_after_any_number_of_epochs(cohort):
    # 41 times 1/41 is below 1 in float32.
    facts = {"rounds": 2, "num_clients": CLIENTS, "min_examples": 1}
    process = build(nbafl_of(1.0, 3.0, 1.0), local_epochs=41, **facts)
    alone = [data.unbatch().take(1).batch(1) for data in cohort]
    one, other = (
        run(process, [alone])[0].global_model_weights.trainable[0] for _ in range(2)
    )
    assert np.abs(one - other).max() > 0.1


def test_downlink_noise_is_seen_once_and_the_same_by_all(unequal):
    facts = {"rounds": 50, "num_clients": CLIENTS, "min_examples": 1}
    process = build(nbafl_of(100.0, mu=0.1), 1, **facts)
    state = process.initialize()
    # What nobody's data is in has no noise.
    first = process.get_model_weights(state)
    state = process.next(state, unequal[:1]).state
    seen = process.get_model_weights(state)
    assert_close(seen, state.global_model_weights, atol=0)
    moved = map(np.subtract, seen.trainable, first.trainable)
    stddev = np.std(np.concatenate([np.ravel(part) for part in moved]))
    # 650 coordinates: 20 % are 7 standard deviations (false alarm below 1e-11).
    down = 2 * 50 * (50**2 - CLIENTS) ** 0.5 / (CLIENTS * 100)
    assert stddev / np.hypot(down, 2.5) == pytest.approx(1, abs=0.2)
    # Per record: mu^2 = (epsilon / (T c))^2 a round.
    assert process.epsilon(state, delta=0.5, sampling="poisson") > 0


def test_the_proximal_term_pulls_towards_what_was_received():
    rate, mu = 0.1, 0.5
    inner = tff.learning.optimizers.build_sgdm(rate)
    optimizer = fed_avg.ProximalOptimizer(inner, mu)
    received = np.array([1.0, -2.0], np.float32)
    weights, expected = (tf.constant(received),), received.copy()
    state = optimizer.initialize((tf.TensorSpec([2], tf.float32),))
    for gradient in ([1.0, 1.0], [0.0, 0.0], [0.5, -1.0]):
        state, weights = optimizer.next(state, weights, (tf.constant(gradient),))
        pull = mu * (expected - received)
        expected = expected - rate * (np.array(gradient) + pull)
    np.testing.assert_allclose(weights[0], expected, rtol=1e-6)
