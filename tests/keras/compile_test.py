"""What `compile` takes of Keras's, and what it says of it."""

import warnings

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy

_layers, _optimizers = tf.keras.layers, tf.keras.optimizers
_FIXED = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)


class _Endpoint(_layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


class Computes(tf.keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return tf.reduce_mean(y_pred**2)


def _of_its_own(kind=tf.keras.Sequential, *layers):
    toy.seed(1)
    return kind([tf.keras.Input([8]), _layers.Dense(3), *layers])


def _table(x, y):
    """Returns one client of a table, whose columns say what they are."""
    return tfdp_fl.FederatedDataset.from_indices(x, y, [np.arange(len(x))])


def _exact(model, **compiled):
    """Returns a model that is trained by FedAvg alone."""
    nothing = tfdp_fl.NoPrivacy()
    options = {"sampling": "fixed_size", "max_parallel_clients": 1}
    fed = tfdp_fl.DPFederatedModel(model, nothing, 1, **options)
    fed.compile(_optimizers.SGD(0.5), jit_compile=False, **compiled)
    return fed


@pytest.mark.parametrize("own", [(Computes,), (tf.keras.Sequential, _Endpoint())])
def test_a_model_with_losses_of_its_own_needs_no_other(own):
    x, y = toy.arrays(10)
    fed, plain = _exact(_of_its_own(*own)), _of_its_own(*own)
    loss = toy.fit(fed, data=_table(x, y)).history["loss"]
    plain.compile(_optimizers.SGD(0.5))
    assert loss == pytest.approx(plain.fit(x, y, verbose=0).history["loss"], 1e-5)
    np.testing.assert_allclose(toy.flat(fed), toy.flat(plain), 1e-5, 1e-6)


class _Number(_layers.Layer):
    def call(self, text):
        return tf.strings.to_number(tf.strings.join(["0", text]))

    def compute_output_spec(self, text):
        return tf.keras.KerasTensor(text.shape, "float32")


def test_features_that_are_strings_beside_metrics():
    given = tf.keras.Input([2], dtype="string")
    model = tf.keras.Model(given, _layers.Dense(2)(_Number()(given)))
    fed = toy.federated(
        tfdp_fl.NoPrivacy(), lambda: model, 2, compile_options={"metrics": ["accuracy"]}
    )
    x, y = np.array([["1", "2"]] * 3), np.zeros(3, np.int64)
    history = toy.fit(fed, data={"a": (x, y), "b": (x, y)}).history
    assert 0 <= history["accuracy"][0] <= 1


class _Sorts(_layers.Layer):
    """XLA cannot compile it on a CPU."""

    def call(self, x):
        return x + 0 * tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype)


def test_a_model_that_xla_cannot_compile_is_refused_before_anybody_trains():
    fed = toy.federated(
        model=_of_its_own(tf.keras.Sequential, _Sorts()),
        compile_options={"jit_compile": True},
    )
    with pytest.raises(ValueError, match="jit_compile must be False for this model"):
        toy.fit(fed, batch_size=5)
    assert fed.rounds == 0
    assert fed.epsilon(1e-3) == 0.0


def test_a_model_of_several_devices_is_refused():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = _of_its_own()
    with pytest.raises(ValueError, match=r"outside the scope of a tf\.distribute"):
        toy.federated(model=model)


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(ValueError, match="loss must be given for a model that has non"):
        toy.fit(_exact(_of_its_own()))


def test_a_server_optimizer_with_the_state_of_other_weights_is_refused():
    adam = tf.keras.optimizers.Adam(0.1)
    first, second = (
        tfdp_fl.DPFederatedModel(toy.two_layers(), _FIXED, 20, "fixed_size")
        for _ in range(2)
    )
    for fed in (first, second):
        fed.compile("sgd", toy.loss(), server_optimizer=adam)
    toy.fit(first, 1)
    with pytest.raises(ValueError, match="server_optimizer must be a new one"):
        toy.fit(second, 1)
    assert second.run is None
    first.model.layers[0].trainable = False
    first.compile("sgd", toy.loss(), server_optimizer=adam)
    with pytest.raises(ValueError, match="with other trainable layers"):
        toy.fit(first, 1)
    assert first.account.rounds == first.rounds == 1
    first.compile("sgd", toy.loss(), server_optimizer="adam")
    toy.fit(first, 1)
    assert first.account.rounds == first.rounds == 2


class _FailsLate(tfdp_fl.FixedClipping):
    """Its noise cannot be traced."""

    def add_noise(self, update, stddev, noise_state):
        raise RuntimeError("no noise")

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(1.0)


class _LocalFailsLate(tfdp_fl.LocalDP):
    """Its clients' noise cannot be traced; its rounds are charged first."""

    def client_noise(self, round, client, context):
        raise RuntimeError("no noise")

    def mu_squared(self, context):
        return 1.0

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(1.0)


@pytest.mark.parametrize(
    "mechanism",
    [
        _FailsLate(clip_norm=1.0, noise_multiplier=1.0),
        _LocalFailsLate(clip_norm=1.0, noise_multiplier=1.0),
    ],
)
def test_what_cannot_be_traced_costs_nothing(mechanism):
    fed = tfdp_fl.DPFederatedModel(toy.dense(), mechanism, 20, "fixed_size")
    fed.compile("sgd", toy.loss())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no noise"):
            toy.fit(fed, 1)
        assert fed.account is None or fed.account.rounds == 0


def test_names_are_those_of_keras():
    for names in ({"loss": "crossentropy"}, {"metrics": ["ACC"], "loss": "mse"}):
        x, y = toy.arrays(10)
        fed = _exact(_of_its_own(), **names)
        wide = y if "metrics" not in names else np.eye(3, dtype=np.float32)[y]
        assert toy.fit(fed, data=_table(x, wide)).history
    for name in ("acuracy", "crossentropy"):
        with pytest.raises(ValueError, match="metrics must be one of") as raised:
            _exact(_of_its_own(), loss="mse", metrics=[name])
        usual = str(raised.value).partition("(such as ")[2].partition(")")[0]
        _exact(_of_its_own(), loss="mse", metrics=usual.replace("'", "").split(", "))


def _scheduled():
    decay = _optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    toy.federated(compile_options={"optimizer": _optimizers.SGD(decay)})


def _in_float16():
    layers = _layers.Dense(3, dtype="mixed_float16")
    fed = _exact(tf.keras.Sequential([tf.keras.Input([8]), layers]), loss=toy.loss())
    toy.fit(fed)


def _with_large_features(scale, state="aggregate"):
    x, y = toy.arrays(400)
    rows = np.arange(400).reshape(40, 10)
    data = tfdp_fl.datasets.FederatedDataset.from_indices(scale * x, y, rows)
    # Little noise, as it is read from what is released.
    little = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1e-3)
    fed = toy.federated(little, toy.normalized(), non_trainable_state=state)
    toy.fit(fed, 3, data=data)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_scheduled, "LearningRateScheduler"),
        (_in_float16, "mixed_bfloat16"),
        (lambda: _with_large_features(100.0), "non_trainable_state='keep'"),
        (lambda: _with_large_features(1.0), None),
        (lambda: _with_large_features(100.0, "keep"), None),
    ],
)
def test_what_surprises_is_said_once(function, message):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        function()
    found = [str(one.message) for one in said if one.category is RuntimeWarning]
    assert len(found) == bool(message)
    assert all(message in one for one in found)
