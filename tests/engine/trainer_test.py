"""Local training in the engine is what a plain Keras loop does."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl.engine import tff_models, trainer

_layers, _optimizers = tf.keras.layers, tf.keras.optimizers
_Dense, _LSTM = _layers.Dense, _layers.LSTM
_DECAY = _optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)
_net = cohorts.sequential


def _arrays(make_x, make_y=lambda rng, n: rng.integers(0, 3, n)):
    rng = np.random.default_rng(0)
    return {k: (make_x(rng, n), make_y(rng, n)) for k, n in enumerate((4, 6))}


def _normal(*shape):
    return lambda rng, n: rng.normal(size=[n, *shape]).astype(np.float32)


class _Subclassed(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = _Dense(5, "tanh", kernel_regularizer="l2")
        self.out = _Dense(3)
        self(tf.zeros([1, 4]))

    def call(self, x, training=False):
        hidden = self.hidden(x)
        self.add_loss(0.01 * tf.reduce_sum(hidden**2))
        return self.out(hidden)


def _squared(y, predicted):
    return tf.reduce_mean((tf.one_hot(tf.cast(y, tf.int32), 3) - predicted) ** 2, -1)


def _either(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x), lambda: x)


def _of_dtype(dtype):
    return _net([4], _Dense(6, "tanh", dtype=dtype), _Dense(3, dtype=dtype))


def _with_statistics():
    return _net([4], _Dense(6), _layers.BatchNormalization(momentum=0.5), _Dense(3))


def _with_constants():
    normalization = _layers.Normalization()
    normalization.adapt(np.random.default_rng(0).normal(3, 5, [50, 4]))
    constraint = tf.keras.constraints.MaxNorm(0.5)
    frozen = _Dense(6, "tanh", trainable=False)
    model = _net([4], normalization, frozen, _Dense(3, kernel_constraint=constraint))
    model.compile(loss="mse")
    return model


def _with_a_mask():
    embedding = _layers.Embedding(7, 4, mask_zero=True)
    return _net([None], embedding, _LSTM(5, return_sequences=True), _Dense(7))


def _with_states():
    inputs = tf.keras.Input([7, 2])
    _, *states = _LSTM(5, return_state=True)(inputs)
    decoded = _LSTM(5, return_sequences=True)(inputs, states)
    return tf.keras.Model(inputs, _Dense(3)(_LSTM(4)(decoded)))


class _WithStates(tf.keras.Model):
    """Calls its layers in ways of which each is one of Keras's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = _LSTM(5, return_state=True), _LSTM(5)
        self.third, self.out = _LSTM(5), _Dense(3)
        self(tf.zeros([1, 7, 2]))

    def call(self, x, training=False):
        _, h, c = self.first(sequences=x, training=training)
        by_place = self.second(x, (h, c), None, training=training)
        return self.out(by_place + self.third(sequences=x, initial_state=[h, c]))


def _adapted():
    table = _layers.Embedding(10_000, 8)
    model = _net([6], table, _layers.Flatten(), _Dense(6, "tanh"), _Dense(3))
    table.enable_lora(2)
    model.layers[2].enable_lora(3)
    return model


def _masked(rng, size):
    x = rng.integers(1, 7, [size, 6])
    for row in x:
        row[rng.integers(2, 7) :] = 0
    return x


def _two_by_two():
    inputs = {"a": tf.keras.Input([3], name="a"), "b": tf.keras.Input([2], name="b")}
    both = _layers.Concatenate()([*inputs.values()])
    outputs = {
        "p": _Dense(3, "softmax", name="p")(both),
        "q": _Dense(1, name="q")(both),
    }
    return tf.keras.Model(inputs, outputs)


_TWO_BY_TWO = _arrays(
    lambda rng, n: {"a": _normal(3)(rng, n), "b": _normal(2)(rng, n)},
    lambda rng, n: {"p": rng.integers(0, 3, n), "q": _normal(1)(rng, n)},
)
_WORDS = _arrays(_masked, lambda rng, n: rng.integers(0, 7, [n, 6]))
_FEW = _arrays(lambda rng, n: rng.integers(0, 2, [n, 6]))
_ADAMW = _optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.05)
_CLOSE, _LOOSE = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 2e-2, "atol": 3e-3}
_SPARSE = "sparse_categorical_crossentropy"
_REDUCED = {
    "arrays": _arrays(_normal(4), _normal()),  # Labels have no last dimension.
    "loss": tf.keras.losses.MeanSquaredError(reduction="sum"),
    "optimizer": _optimizers.SGD(0.02),
    "rtol": 1e-4,
}
_BY_NAME = {
    "arrays": _TWO_BY_TWO,
    "loss": {"p": _SPARSE, "q": tf.keras.losses.MeanAbsoluteError(reduction="none")},
    "training": {"loss_weights": {"p": 0.3, "q": 2.0}},
}
_CASES = {
    "sgd": (cohorts.mlp, {"optimizer": _optimizers.SGD(0.1)}),
    "adamw_clipnorm": (cohorts.mlp, {"optimizer": _ADAMW}),
    "schedule": (cohorts.mlp, {"optimizer": _optimizers.SGD(_DECAY)}),
    "proximal": (cohorts.mlp, {"training": {"proximal_weight": 2.0}}),
    "loss_and_a_term_of_its_own": (_Subclassed, {"loss": _squared}),
    "moving_statistics": (_with_statistics, {"rtol": 1e-4, "atol": 1e-5}),
    "frozen_weights_adapted_constants_and_a_constraint": (_with_constants, {}),
    "float16": (
        lambda: _of_dtype("float16"),
        {**_LOOSE, "between_client_variance": True},
    ),
    "float64": (
        lambda: _of_dtype("float64"),
        {**_CLOSE, "between_client_variance": True},
    ),
    "gradient_clipping_of_repeated_rows": (
        lambda: _net([6], _layers.Embedding(4, 3), _layers.Flatten(), _Dense(3)),
        {"arrays": _FEW, "training": {"grad_clip": 0.05}},
    ),
    "masks": (_with_a_mask, {"arrays": _WORDS, "rtol": 1e-4}),
    "stacked_lstms": (
        lambda: _net([9, 2], _LSTM(4, return_sequences=True), _LSTM(5), _Dense(3)),
        {"arrays": _arrays(_normal(9, 2)), "rtol": 1e-4},
    ),
    "states_by_place": (
        _with_states,
        {"arrays": _arrays(_normal(7, 2)), "rtol": 1e-4, "atol": 1e-5},
    ),
    "states_in_many_ways": (
        _WithStates,
        {"arrays": _arrays(_normal(7, 2)), "rtol": 1e-4, "atol": 1e-5},
    ),
    "lora": (_adapted, {"arrays": _FEW, "rtol": 1e-4, "atol": 1e-5}),
    "branch": (lambda: _net([4], _Dense(6), _layers.Lambda(_either), _Dense(3)), {}),
    "two_inputs_and_outputs_by_name": (_two_by_two, _BY_NAME),
    "sum_of_labels_without_a_last_dimension": (
        lambda: _net([4], _Dense(1)),
        _REDUCED,
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_every_client_starts_with_fresh_slots(name):
    """Uneven clients, one of them empty, two epochs and rounds, short last batches."""
    make_model, given = _CASES[name]
    options = {
        "arrays": cohorts.client_arrays(),
        "loss": cohorts.cross_entropy(),
        "optimizer": _optimizers.SGD(0.1),
        **{
            "training": {},
            "between_client_variance": False,
            "rtol": 2e-5,
            "atol": 2e-6,
            **given,
        },
    }
    close = {each: options.pop(each) for each in ("rtol", "atol")}
    arrays, model = options.pop("arrays"), make_model()
    dataset = cohorts.from_arrays(arrays)
    engine = cohorts.make_engine(model, dataset, **options)
    optimizer, loss, training = map(options.get, ("optimizer", "loss", "training"))
    for layer in model.layers:  # The user's own model computes as it did.
        assert "call" not in vars(layer)
    rate = float(optimizer.learning_rate)
    for round_index in range(2):
        updates = [
            cohorts.reference_update(model, client, optimizer, loss, **training)
            for client in arrays.values()
        ]
        mean = [np.mean(parts, axis=0) for parts in zip(*updates, strict=True)]
        moved = cohorts.moved_by(
            model, engine, dataset, round_index=round_index, learning_rate=rate
        )
        cohorts.assert_close(moved, mean, **close)
        assert max(np.abs(part).max(initial=0) for part in moved) > 1e-3


def test_the_rate_follows_the_round_and_metrics_are_of_the_local_steps():
    model, arrays, dataset = cohorts.mlp(), cohorts.client_arrays(), cohorts.dataset()
    measured = {"metrics": ["accuracy", "sparse_top_k_categorical_accuracy"]}
    options = {"optimizer": _optimizers.Adam(0.1), "max_parallel_clients": 2}
    engine = cohorts.make_engine(model, dataset, training=measured, **options)
    before = model.get_weights()
    # Rate 0: every step sees the same weights.
    logs = cohorts.run_round(engine, dataset, learning_rate=0.0)
    cohorts.assert_close(before, model.get_weights(), rtol=0, atol=0)
    x, y = map(np.concatenate, zip(*arrays.values(), strict=True))
    model.compile(loss=cohorts.cross_entropy(), metrics=["accuracy"])
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    cohorts.assert_close({name: logs[name] for name in wanted}, wanted, rtol=1e-5)
    assert wanted.keys() == {"loss", "accuracy"}
    assert logs["sparse_top_k_categorical_accuracy"] == 1.0
    moved, *_ = cohorts.moved_by(model, engine, dataset, learning_rate=0.1)
    assert moved.any()


def test_metrics_that_make_their_variables_when_they_see_labels():
    metrics = [tf.keras.metrics.R2Score(), tf.keras.metrics.F1Score(average="macro")]
    x, y = np.random.default_rng(0).normal(size=[9, 4]), np.eye(3)[np.arange(9) % 3]
    model, data = _net([4], _Dense(3)), cohorts.from_arrays({0: (x, y)})
    engine = cohorts.make_engine(model, data, loss="mse", training={"metrics": metrics})
    logs = cohorts.run_round(engine, data, learning_rate=0.0)
    model.compile(loss="mse", metrics=metrics)
    wanted = model.evaluate(x, y, verbose=0, return_dict=True)
    cohorts.assert_close({name: logs[name] for name in wanted}, wanted, rtol=1e-5)


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
        self.scale = self.add_weight(name="s", shape=[shape[-1]], initializer="ones")

    def call(self, x):
        return x * self.scale


@pytest.mark.parametrize("num_layers", [1, 2])
def test_masks_of_dropout_are_of_the_seed_the_client_and_the_layer(num_layers):
    """A gradient of 0 tells which units a client's masks dropped."""
    x = np.ones([1, 2000], np.float32)
    clients = dict.fromkeys(range(2), (x, np.zeros([1, 1], np.float32)))
    drops = [_layers.Dropout(0.5) for _ in range(num_layers)]
    model = _net([2000], _Scale(), *drops, _Dense(1, kernel_initializer="ones"))
    dataset = cohorts.from_arrays(clients)
    engine = cohorts.make_engine(model, dataset, loss="mae", collect_contributions=True)
    kept = []
    for seed in (4, 4, 5):
        inputs = {"batch_size": 1, "local_epochs": 1, "seed": np.array([3, seed])}
        ((members, collected),) = cohorts.collect(engine, dataset, **inputs).collected
        assert list(members) == [0, 1]
        kept.append(collected.updates.numpy()[:, :2000] != 0)
    first, again, other = kept
    np.testing.assert_array_equal(first, again)
    for share in (*first.mean(axis=1), *other.mean(axis=1)):
        assert abs(share - 0.5**num_layers) <= 0.08 - 0.01 * num_layers
    if num_layers == 1:  # Else most units are dropped by both.
        for share in (np.mean(first[0] == first[1]), np.mean(first[0] == other[0])):
            assert 0.43 <= share <= 0.57


def test_an_output_without_a_loss_needs_no_labels():
    clients = {k: (x, {"p": y["p"]}) for k, (x, y) in _TWO_BY_TWO.items()}
    dataset, model = cohorts.from_arrays(clients), _two_by_two()
    for loss in ({"p": _SPARSE, "q": None}, {"p": _SPARSE}):
        engine = cohorts.make_engine(model, dataset, loss=loss)
        of_p, _, of_q, _ = cohorts.moved_by(model, engine, dataset)
        assert of_p.any()
        assert not of_q.any()
    # By their order, labels are one array.
    model = tf.keras.Model(model.inputs, [model.outputs[0], model.outputs[1]])
    dataset = cohorts.from_arrays({k: (x, y["p"]) for k, (x, y) in clients.items()})
    engine = cohorts.make_engine(model, dataset, loss=[_SPARSE, None])
    assert cohorts.moved_by(model, engine, dataset)[0].any()
    clients = {k: (x, {"r": y["p"]}) for k, (x, y) in clients.items()}
    with pytest.raises(ValueError, match="labels must be named as the model's"):
        cohorts.make_engine(model, cohorts.from_arrays(clients), loss=[_SPARSE, None])


class _OwnStep(tf.keras.Sequential):
    def train_step(self, data):
        return {}


_MUST, _LOSSES = "labels must have the shape", tf.keras.losses


@pytest.mark.parametrize(
    ("loss", "shapes", "units", "problem"),
    [
        (_LOSSES.sparse_categorical_crossentropy, [[5, 2]], 3, _MUST),
        ("categorical_crossentropy", [[5, 4]], 3, _MUST),
        (_LOSSES.MeanSquaredError(name="mine"), [[5, 1]], 3, _MUST),
        ("binary_crossentropy", [[5, 2]], 1, _MUST),
        ("mse", [[5, 3], [5]], 3, "labels and loss must be one for each"),
        (_SPARSE, [[5, 1]], 3, None),
        ("circle", [[5]], 3, None),
        ("binary_crossentropy", [[5]], 1, None),
        (lambda y, p: tf.reduce_mean(p, -1) * y[:, 0, 0], [[5, 7, 7]], 3, None),
    ],
)
def test_labels_that_cannot_belong_to_the_output_are_refused(
    loss, shapes, units, problem
):
    labels = [np.zeros(shape, np.float32) for shape in shapes]
    labels = labels[0] if len(labels) == 1 else tuple(labels)
    spec = cohorts.from_arrays({0: (np.zeros([5, 4], "f4"), labels)}).element_spec
    training = trainer.Training(optimizer=_optimizers.SGD(), loss=loss)
    own = _OwnStep([tf.keras.Input([4]), _Dense(3)])
    models = {_net([4], _Dense(units)): problem, own: "train_step"}
    for model, message in models.items():
        refused = pytest.raises(ValueError, match=message)
        with refused if message else contextlib.nullcontext():
            tff_models.make_trainer(model, training, spec)
