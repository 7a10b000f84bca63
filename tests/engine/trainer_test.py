"""Local training in the engine is what a plain Keras loop does."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl.engine import trainer

_layers, _optimizers = tf.keras.layers, tf.keras.optimizers
_Schedule = _optimizers.schedules.LearningRateSchedule
_DECAY = _optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)


def _arrays(make_x, make_y=None, sizes=(4, 6)):
    """Returns clients of functions of (random generator, size)."""
    rng = np.random.default_rng(0)
    make_y = make_y or (lambda rng, size: rng.integers(0, 3, size))
    return {k: (make_x(rng, n), make_y(rng, n)) for k, n in enumerate(sizes)}


def _normal(*shape):
    return lambda rng, size: rng.normal(size=[size, *shape]).astype(np.float32)


def _assert_trains_like_keras(
    model,
    arrays,
    *,
    optimizer=None,
    loss=None,
    rtol=2e-5,
    atol=2e-6,
    training=None,
    **options,
):
    """Two rounds: the model moves by the mean of a plain Keras loop."""
    optimizer = optimizer or _optimizers.SGD(0.1)
    loss = cohorts.cross_entropy() if loss is None else loss
    training = training or {}
    dataset = cohorts.from_arrays(arrays)
    engine = cohorts.make_engine(
        model, dataset, optimizer=optimizer, loss=loss, training=training, **options
    )
    rate = optimizer.learning_rate
    if not isinstance(rate, _Schedule):
        rate = float(tf.keras.backend.get_value(rate))
    for round_index in range(2):
        updates = [
            cohorts.reference_update(model, client, optimizer, loss, **training)
            for client in arrays.values()
        ]
        mean = [np.mean(parts, axis=0) for parts in zip(*updates, strict=True)]
        moved = cohorts.moved_by(
            model, engine, dataset, round_index=round_index, learning_rate=rate
        )
        cohorts.assert_close(moved, mean, rtol=rtol, atol=atol)
        assert max(np.abs(part).max(initial=0) for part in moved) > 1e-3


class _Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = _layers.Dense(5, "tanh", kernel_regularizer="l2")
        self.out = _layers.Dense(3)
        self(tf.zeros([1, 4]))

    def call(self, x, training=False):
        hidden = self.hidden(x)
        self.add_loss(0.01 * tf.reduce_sum(hidden**2))
        return self.out(hidden)


def _squared(y, predicted):
    one_hot = tf.one_hot(tf.cast(y, tf.int32), 3)
    return tf.reduce_mean((one_hot - predicted) ** 2, -1)


def _of_dtype(dtype):
    dense = _layers.Dense(6, "tanh", dtype=dtype), _layers.Dense(3, dtype=dtype)
    return cohorts.sequential([4], *dense)


def _with_statistics():
    normalization = _layers.BatchNormalization(momentum=0.5)
    return cohorts.sequential([4], _layers.Dense(6), normalization, _layers.Dense(3))


def _with_constants():
    normalization = _layers.Normalization()
    normalization.adapt(np.random.default_rng(0).normal(3, 5, [50, 4]))
    frozen = _layers.Dense(6, "tanh", trainable=False)
    model = cohorts.sequential([4], normalization, frozen, _layers.Dense(3))
    model.compile(loss="mse")
    return model


def _with_constraint():
    constraint = tf.keras.constraints.MaxNorm(0.5)
    return cohorts.sequential([4], _layers.Dense(3, kernel_constraint=constraint))


_ADAMW = _optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.05)
_CLOSE, _LOOSE = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 2e-2, "atol": 3e-3}
_CASES = {
    "sgd": (cohorts.mlp, {"optimizer": _optimizers.SGD(0.1)}),
    "nesterov": (cohorts.mlp, {"optimizer": _optimizers.SGD(0.1, 0.9, nesterov=True)}),
    "adamw_clipnorm": (cohorts.mlp, {"optimizer": _ADAMW}),
    "schedule": (cohorts.mlp, {"optimizer": _optimizers.SGD(_DECAY)}),
    "proximal": (cohorts.mlp, {"training": {"proximal_weight": 2.0}}),
    "loss_and_a_term_of_its_own": (_Subclassed, {"loss": _squared}),
    "moving_statistics": (_with_statistics, {"rtol": 1e-4, "atol": 1e-5}),
    "frozen_weights_and_adapted_constants": (_with_constants, {}),
    "constraint": (_with_constraint, {}),
    "float16": (lambda: _of_dtype("float16"), {**_LOOSE, "moments": True}),
    "float64": (lambda: _of_dtype("float64"), {**_CLOSE, "moments": True}),
}


@pytest.mark.parametrize("name", _CASES)
def test_every_client_starts_with_fresh_slots(name):
    # Uneven clients, one of them empty, two epochs, short last batches.
    make_model, options = _CASES[name]
    _assert_trains_like_keras(make_model(), cohorts.client_arrays(), **options)


def test_the_rate_follows_the_round():
    model, dataset = cohorts.mlp(), cohorts.dataset()
    engine = cohorts.make_engine(model, dataset, optimizer=_optimizers.Adam(0.1))
    moved, *_ = cohorts.moved_by(model, engine, dataset, learning_rate=0.0)
    assert not moved.any()
    moved, *_ = cohorts.moved_by(model, engine, dataset, learning_rate=0.1)
    assert moved.any()


def test_gradient_clipping_of_repeated_rows():
    model = cohorts.sequential(
        [6], _layers.Embedding(4, 3), _layers.Flatten(), _layers.Dense(3)
    )
    arrays = _arrays(lambda rng, size: rng.integers(0, 2, [size, 6]))
    _assert_trains_like_keras(model, arrays, training={"grad_clip": 0.05})


def test_a_train_step_of_ones_own_is_refused():
    class Model(tf.keras.Sequential):
        def train_step(self, data):
            return {}

    model = Model([tf.keras.Input([4]), _layers.Dense(3)])
    with pytest.raises(ValueError, match="train_step"):
        cohorts.make_engine(model, cohorts.dataset())


def test_lstm_embedding_and_masks():
    model = cohorts.sequential(
        [None],
        _layers.Embedding(7, 4, mask_zero=True),
        _layers.LSTM(5, return_sequences=True),
        _layers.Dense(7),
    )

    def masked(rng, size):
        x = rng.integers(1, 7, [size, 6])
        for row in x:
            row[rng.integers(2, 7) :] = 0
        return x

    arrays = _arrays(masked, lambda rng, size: rng.integers(0, 7, [size, 6]))
    _assert_trains_like_keras(model, arrays, rtol=1e-4)


def test_stacked_lstm_without_a_mask():
    # By functions of our own, see `layers`.
    first = _layers.LSTM(4, return_sequences=True)
    model = cohorts.sequential([9, 2], first, _layers.LSTM(5), _layers.Dense(3))
    _assert_trains_like_keras(model, _arrays(_normal(9, 2)), rtol=1e-4)
    for layer in model.layers:  # The user's own model.
        assert "call" not in vars(layer)


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ({"p": "sparse_categorical_crossentropy", "q": "mae"}, None),
        (["sparse_categorical_crossentropy", "mse"], [0.3, 2.0]),
    ],
)
def test_several_inputs_and_outputs_with_losses_by_name(loss, weights):
    inputs = {"a": tf.keras.Input([3], name="a"), "b": tf.keras.Input([2], name="b")}
    both = _layers.Concatenate()([*inputs.values()])
    outputs = {
        "p": _layers.Dense(3, activation="softmax", name="p")(both),
        "q": _layers.Dense(1, name="q")(both),
    }
    by_name = isinstance(loss, dict)
    model = tf.keras.Model(inputs, outputs if by_name else [*outputs.values()])

    def features(rng, size):
        return {"a": _normal(3)(rng, size), "b": _normal(2)(rng, size)}

    def labels(rng, size):
        q = rng.normal(size=[size, 1]).astype(np.float32)
        parts = {"p": rng.integers(0, 3, size), "q": q}
        return parts if by_name else tuple(parts.values())

    training = {} if weights is None else {"loss_weights": weights}
    arrays = _arrays(features, labels)
    _assert_trains_like_keras(model, arrays, loss=loss, training=training)


@pytest.mark.parametrize("how", ["none", "sum"])
def test_reductions_and_labels_without_a_last_dimension(how):
    arrays = {
        k: (x, (y > 0).astype(np.float32))
        for k, (x, y) in cohorts.client_arrays().items()
    }
    _assert_trains_like_keras(
        cohorts.sequential([4], _layers.Dense(1)),
        arrays,
        loss=tf.keras.losses.MeanSquaredError(reduction=how),
        optimizer=_optimizers.SGD(0.02),
        rtol=1e-4,
    )


def test_loss_and_metrics_are_those_of_the_local_steps():
    model, arrays, dataset = cohorts.mlp(), cohorts.client_arrays(), cohorts.dataset()
    training = {"metrics": ["accuracy", "sparse_top_k_categorical_accuracy"]}
    engine = cohorts.make_engine(model, dataset, num_replicas=2, training=training)
    # Rate 0: every step sees the same weights.
    logs = cohorts.run_round(engine, dataset, learning_rate=0.0)
    x, y = map(np.concatenate, zip(*arrays.values(), strict=True))
    model.compile(loss=cohorts.cross_entropy(), metrics=["accuracy"])
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    cohorts.assert_close({name: logs[name] for name in wanted}, wanted, rtol=1e-5)
    assert wanted.keys() == {"loss", "accuracy"}
    assert logs["sparse_top_k_categorical_accuracy"] == 1.0


def test_moving_statistics_may_stay_what_they_were():
    model, dataset = _with_statistics(), cohorts.dataset()
    model.layers[1].moving_mean.assign([1.0] * 6)
    model.layers[1].moving_variance.assign([2.0] * 6)
    engine = cohorts.make_engine(model, dataset, aggregate_non_trainable=False)
    assert engine.num_variables == 6
    kernel, *_ = cohorts.moved_by(model, engine, dataset)
    assert kernel.any()
    np.testing.assert_array_equal(model.layers[1].moving_mean, [1.0] * 6)
    np.testing.assert_array_equal(model.layers[1].moving_variance, [2.0] * 6)


class _Scale(_layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(
            name="scale", shape=[shape[-1]], initializer="ones"
        )

    def call(self, x):
        return x * self.scale


class TestDropout:
    """A gradient of 0 tells which units a client's masks dropped."""

    def _kept(self, num_layers, *seeds):
        """Returns for each of two equal clients which units were kept, by seed."""
        x = np.ones([1, 2000], np.float32)
        dataset = cohorts.from_arrays(
            {k: (x, np.zeros([1, 1], np.float32)) for k in range(2)}
        )
        model = cohorts.sequential(
            [2000],
            _Scale(),
            *(_layers.Dropout(0.5) for _ in range(num_layers)),
            _layers.Dense(1, kernel_initializer="ones"),
        )
        engine = cohorts.make_engine(model, dataset, loss="mae", collect_records=True)
        found = []
        for seed in seeds:
            inputs = {"batch_size": 1, "local_epochs": 1, "seed": np.array([3, seed])}
            pending = cohorts.collect(engine, dataset, **inputs)
            ((members, collected),) = pending.collected
            assert list(members) == [0, 1]
            found.append(collected.updates.numpy()[:, :2000] != 0)
        return found

    def test_a_seed_repeats_and_clients_and_rounds_differ(self):
        first, again, other = self._kept(1, 4, 4, 5)
        np.testing.assert_array_equal(first, again)
        shares = [*first.mean(axis=1), *other.mean(axis=1)]
        shares += [np.mean(first[0] == first[1]), np.mean(first[0] == other[0])]
        for share in shares:
            assert 0.43 <= share <= 0.57

    def test_layers_draw_masks_of_their_own(self):
        (kept,) = self._kept(2, 4)
        for share in kept.mean(axis=1):
            assert 0.19 <= share <= 0.31


_SPARSE = tf.keras.losses.sparse_categorical_crossentropy
_MUST = "labels must have the shape"


@pytest.mark.parametrize(
    ("loss", "shape", "units", "problem"),
    [
        ("sparse_categorical_crossentropy", [5, 3], 3, _MUST),
        (_SPARSE, [5, 2], 3, _MUST),
        ("categorical_crossentropy", [5, 4], 3, _MUST),
        (tf.keras.losses.MeanSquaredError(name="mine"), [5, 1], 3, _MUST),
        ("binary_crossentropy", [5, 2], 1, _MUST),
        ("mse", None, 3, "labels must have one tensor"),
        ("sparse_categorical_crossentropy", [5], 3, None),
        (_SPARSE, [5, 1], 3, None),
        ("mse", [5], 1, None),
        ("binary_crossentropy", [5, 1], 1, None),
        (lambda y, p: tf.reduce_mean(p, -1) * y[:, 0, 0], [5, 7, 7], 3, None),
    ],
)
def test_labels_that_cannot_belong_to_the_output_are_refused(
    loss, shape, units, problem
):
    labels = np.zeros([5, 3], np.float32), np.zeros(5, np.float32)
    if shape is not None:
        labels = np.zeros(shape, np.float32)
    dataset = cohorts.from_arrays({0: (np.zeros([5, 4], np.float32), labels)})
    model = cohorts.sequential([4], _layers.Dense(units))
    training = trainer.LocalTraining(optimizer=_optimizers.SGD(), loss=loss)

    def make():
        trainer.make_trainer(model, training, dataset.element_spec)

    if problem is None:
        make()
    else:
        with pytest.raises(ValueError, match=problem):
            make()
