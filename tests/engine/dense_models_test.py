"""What may train side by side is a function of single rows, or a sum of them."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import toy
from tests.mechanisms import rounds
from tfdp_fl import keras_versions
from tfdp_fl import losses as our_losses
from tfdp_fl.engine import dense_models, layout, trainer
from tfdp_fl.mechanisms import PrivacyContext

_ROWS, _CLASSES = 14, 3
_layers, _losses, _metrics = tf.keras.layers, tf.keras.losses, tf.keras.metrics
_OF_NO_LABELS = _metrics.Metric, _metrics.Mean, _metrics.Sum


def _batch(name):
    """Returns labels of the kind that a loss or metric takes, and outputs."""
    rng, name = np.random.default_rng(0), name.lower().replace("_", "")
    outputs = rng.dirichlet(np.ones(_CLASSES), _ROWS).astype(np.float32)
    places = rng.integers(0, _CLASSES, _ROWS)
    if "sparse" in name:
        return places, outputs
    labels = rng.integers(0, 2, [_ROWS, _CLASSES])
    if "categorical" in name:
        labels = np.eye(_CLASSES)[places]
    elif name.startswith(("mean", "poisson", "huber", "log", "cosine", "kl", "root")):
        labels = rng.uniform(0.1, 2, [_ROWS, _CLASSES])
    return labels.astype(np.float32), outputs


def _rows(*arrays):
    return ([array[k : k + 1] for array in arrays] for k in range(_ROWS))


def _model(layers=(), activation="tanh"):
    toy.seed(1)
    dense = _layers.Dense(6, activation), _layers.Dense(_CLASSES, "sigmoid")
    return cohorts.sequential([4], *layers, *dense)


def _is_supported(loss="mse", metrics=None, **options):
    sgd = tf.keras.optimizers.SGD(0.1)
    training = trainer.Training(optimizer=sgd, loss=loss, metrics=metrics)
    query = tfdp_fl.NoPrivacy().bind(PrivacyContext(clients_per_round=3))
    return dense_models.supports(_model(**options), training, query)


def _mixes(x):
    return x - tf.reduce_mean(x, axis=0)


@pytest.mark.parametrize("kind", dense_models.LOSSES)
def test_every_allowed_loss_is_a_mean_over_rows(kind):
    loss, (labels, outputs) = kind(), _batch(kind.__name__)
    assert dense_models.is_mean_over_rows(loss)
    assert dense_models.is_mean_over_rows(loss.fn)
    rows = [float(loss(*row)) for row in _rows(labels, outputs)]
    cohorts.assert_close(loss(labels, outputs), np.mean(rows), rtol=1e-5)
    # The engine takes its gradient from these.
    of_rows = keras_versions.losses_of_rows(loss, labels, outputs)
    cohorts.assert_close(of_rows, np.array(rows), rtol=1e-5, atol=1e-7)


def _is_allowed(kind):
    with contextlib.suppress(TypeError):  # No metric, or one that needs arguments.
        is_one = issubclass(kind, _metrics.Metric) and kind not in _OF_NO_LABELS
        return is_one and dense_models._is_sum_over_rows(kind())


_ALLOWED = filter(_is_allowed, vars(_metrics).values())


@pytest.mark.parametrize("kind", [*_ALLOWED, "accuracy", "mse", "binary_accuracy"])
def test_every_allowed_metric_adds_up_over_rows(kind):
    by_name = isinstance(kind, str)
    labels, outputs = _batch(kind if by_name else kind.__name__)
    metric = kind if by_name else kind()
    assert dense_models._is_sum_over_rows(metric)
    compiled = keras_versions.compiled_loss_and_metrics(
        _model(), "mse", [metric], None, None
    )[1]
    compiled.update_state(labels, outputs)  # Some make their variables then.
    nothing = [tf.zeros(v.shape, v.dtype) for v in compiled.variables]
    update = compiled.stateless_update_state
    whole = update(nothing, labels, outputs, None)
    rows = [update(nothing, *row, None) for row in _rows(labels, outputs)]
    for one, *others in zip(whole, *rows, strict=True):
        cohorts.assert_close(one, np.sum(others, axis=0), rtol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        *map(_layers.Activation, dense_models.ACTIVATIONS),
        *[_layers.Flatten(), _layers.ReLU(), _layers.LeakyReLU()],
        _layers.Rescaling(0.5, 0.1),
    ],
)
def test_every_allowed_layer_or_activation_takes_rows_one_by_one(layer):
    x = np.random.default_rng(0).normal(size=[_ROWS, 4]).astype(np.float32)
    rows = [layer(row)[0] for (row,) in _rows(x)]
    cohorts.assert_close(layer(x), np.array(rows))
    activation = getattr(layer, "activation", "tanh")
    assert _is_supported(layers=[layer], activation=activation)


@pytest.mark.parametrize(
    "options",
    [
        # With ignore_class, Keras rescales by the rows of the whole batch.
        {"loss": _losses.SparseCategoricalCrossentropy(ignore_class=0)},
        {"loss": "hinge"},
        {"loss": _losses.SquaredHinge()},
        {"loss": our_losses.BalancedSoftmaxCrossentropy(0.1)},
        {"loss": _losses.MeanSquaredError(reduction="sum")},
        {"loss": type("Own", (_losses.MeanSquaredError,), {})()},
        {"metrics": [_metrics.Hinge()]},
        {"metrics": [lambda y, p: tf.reduce_max(y - p)]},
        {"layers": [_layers.Activation("relu", activity_regularizer="l2")]},
        {"layers": [_layers.Rescaling(np.ones([1, 4], np.float32))]},
        # What may mix clients.
        {"loss": lambda y, p: tf.reduce_mean(tf.abs(_mixes(p)))},
        {"layers": [_layers.Activation(_mixes)]},
        {"activation": _mixes},
    ],
)
def test_what_is_not_listed_trains_one_by_one(options):
    assert not _is_supported(**options)


def test_one_clients_labels_do_not_move_anothers_update():
    loss = _losses.SparseCategoricalCrossentropy(ignore_class=0)
    clients = cohorts.client_arrays((5, 2))
    dataset = cohorts.from_arrays(clients)
    engine = cohorts.make_engine(_model(), dataset, loss=loss, jit_compile=None)

    def update(*clients):
        dataset = cohorts.from_arrays(dict(enumerate(clients)))
        with cohorts.side_by_side():
            pending = cohorts.collect(engine, dataset, local_epochs=1)
        return rounds.flat(cohorts.update_of(pending))

    alone = update(clients[1])
    assert not engine.has_trained_side_by_side
    x, y = clients[0]
    for labels in (np.zeros_like(y), np.ones_like(y)):
        first = x, labels
        moved = update(first, clients[1]) - update(first)
        cohorts.assert_close(moved, alone, atol=1e-5)


@pytest.mark.parametrize("changes", [False, True])
def test_a_layer_that_changed_after_its_engine_was_made_trains_one_by_one(changes):
    # Of rows that an activation mixes, the norm bound does not hold.
    hidden = tf.keras.layers.Dense(128, "tanh")
    model = tf.keras.Sequential(
        [tf.keras.layers.Input([64]), hidden, tf.keras.layers.Dense(3)]
    )
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    fed = tfdp_fl.DPFederatedModel(model, mechanism, 40, "shuffled")
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(0.1), loss)
    rng = np.random.default_rng(0)
    clients = {
        k: (rng.normal(size=(4, 64)).astype("f4"), rng.integers(0, 3, 4))
        for k in range(40)
    }
    fed.fit(clients, rounds=1, batch_size=32, verbose=0)
    engine, before = fed.engine, set(fed.engine.used_strategies)
    if changes:
        hidden.activation = lambda z: z - tf.reduce_mean(z, axis=0, keepdims=True)
    with cohorts.side_by_side(steps=(2,)):
        fed.fit(clients, rounds=1, batch_size=2, verbose=0)
    assert fed.engine is engine
    new = {each.kind for each in engine.used_strategies - before}
    assert (layout.SIDE_BY_SIDE in new) == (not changes)


def test_gram_matrices_that_overflow_leave_no_finite_bound():
    """Two rows of nearly opposite direction: their product may overflow alone."""
    for infinity in (np.inf, -np.inf, np.nan):
        of_x = np.array([[3e38, infinity], [infinity, 3e38]], np.float32)
        for sign in (1, -1):
            of_d = np.array([[1, sign * 0.5], [sign * 0.5, 1]], np.float32)
            for one, other in ((of_x, of_d), (of_d, of_x)):
                grams = [tf.constant(each[None]) for each in (one, other)]
                _, bound = dense_models.norm_and_upper_bound(
                    [grams[0]], [grams[1]], 10, 2
                )
                assert not np.isfinite(bound).any()
