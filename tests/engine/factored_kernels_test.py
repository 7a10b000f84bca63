"""Kernels held as factors: the same local SGD, and only where it is that."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import factored_kernels

_layers = tf.keras.layers


@contextlib.contextmanager
def _in_use(fewest=1, narrow=1e6):
    """Has small kernels held so, whatever clients hold."""
    with mock.patch.multiple(factored_kernels, FEWEST_ELEMENTS=fewest, NARROW=narrow):
        yield


def _model(*stack):
    return tf.keras.Sequential([_layers.InputLayer((cohorts.FEATURES,)), *stack])


class _Doubled(_layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


class _Tied(tf.keras.Model):
    """Reads a layer's kernel besides calling the layer."""

    def __init__(self):
        super().__init__()
        self.first = _layers.Dense(cohorts.FEATURES)
        self.last = _layers.Dense(cohorts.CLASSES)

    def call(self, x):
        h = self.first(x)
        kernel = tf.convert_to_tensor(self.first.kernel)
        return self.last(h + tf.matmul(x, kernel))

    def get_config(self):
        return {}


class _NeverCalled(_Tied):
    """Computes with a layer's kernel by itself."""

    def build(self, shape):
        self.first.build(shape)

    def call(self, x):
        return self.last(tf.matmul(x, tf.convert_to_tensor(self.first.kernel)))


class _Recomputed(_layers.Layer):
    """Calls a layer again for its gradient."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = _layers.Dense(cohorts.FEATURES)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return tf.recompute_grad(self.inner)(x)


def _called_twice():
    inputs = tf.keras.Input((cohorts.FEATURES,))
    layer = _layers.Dense(cohorts.FEATURES)
    return tf.keras.Model(inputs, _layers.Dense(cohorts.CLASSES)(layer(layer(inputs))))


def _of_sequences():
    inputs = tf.keras.Input((cohorts.FEATURES,))
    wide = _layers.Dense(4)(_layers.Reshape((2, 2))(inputs))
    return tf.keras.Model(
        inputs, _layers.Dense(cohorts.CLASSES)(_layers.Flatten()(wide))
    )


def _built(model):
    model(np.zeros([1, cohorts.FEATURES], np.float32))
    return model


def _branches():
    """Layers side by side, batch normalization, one without a bias."""
    inputs = tf.keras.Input((cohorts.FEATURES,))
    one = _layers.Dense(6, "tanh")(inputs)
    other = _layers.Dense(6, "relu", use_bias=False)(inputs)
    both = _layers.BatchNormalization()(_layers.Add()([one, other]))
    _layers.Dense(5)(both)  # Leads nowhere.
    return tf.keras.Model(inputs, _layers.Dense(cohorts.CLASSES)(both))


def _convolutional(dropout=0.3):
    return _model(
        _layers.Reshape((2, 2, 1)),
        _layers.Conv2D(3, 2, padding="same", activation="relu"),
        _layers.Flatten(),
        _layers.Dense(6, activation="tanh"),
        _layers.Dropout(dropout),
        _layers.Dense(cohorts.CLASSES),
    )


def _dense():
    return _model(_layers.Dense(6, activation="tanh"), _layers.Dense(cohorts.CLASSES))


class WhichTest(parameterized.TestCase):
    """Only what is plain SGD on a kernel that one call of a layer reads."""

    def _engine(self, model, **options):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        with _in_use():
            return cohorts.make_engine(model, dataset, **options)

    def _held(self, engine):
        """Returns the shapes of the kernels, by their places."""
        (trainer,) = engine.functions.trainers.values()
        return {
            place: tuple(trainer.variables[place].shape)
            for place in trainer.factored.places
        }

    @parameterized.named_parameters(
        ("dense", _dense, {0: (4, 6), 2: (6, 3)}),
        ("behind_convolutions", _convolutional, {2: (12, 6), 4: (6, 3)}),
        ("twice", _called_twice, {2: (4, 3)}),
        ("read_besides", lambda: _built(_Tied()), {2: (4, 3)}),
        ("read_by_itself", lambda: _built(_NeverCalled()), None),
        ("of_sequences", _of_sequences, {2: (8, 3)}),
    )
    def test_models(self, make, wanted):
        held = self._held(self._engine(make()))
        if wanted is None:  # Whatever the order of the two.
            self.assertEqual(list(held.values()), [(4, 3)])
        else:
            self.assertEqual(held, wanted)

    @parameterized.parameters(
        {"kernel_regularizer": "l2"},
        {"bias_regularizer": "l2"},
        {"activity_regularizer": "l2"},
        {"kernel_constraint": "non_neg"},
        {"bias_constraint": "non_neg"},
        {"trainable": False},
        {"dtype": "float64"},
    )
    def test_layers_with_more_to_them(self, **options):
        model = _model(_layers.Dense(6, **options), _layers.Dense(cohorts.CLASSES))
        first = [s for s in self._held(self._engine(model)).values() if s[1] == 6]
        self.assertEmpty(first)

    def test_a_layer_of_somebodys_own(self):
        model = _model(_Doubled(6), _layers.Dense(cohorts.CLASSES))
        self.assertEqual(self._held(self._engine(model)), {2: (6, 3)})

    def test_a_layer_that_is_called_again_for_its_gradient(self):
        model = _model(_Recomputed(), _layers.Dense(cohorts.CLASSES))
        self.assertEqual(list(self._held(self._engine(model)).values()), [(4, 3)])

    def test_a_loss_that_reads_kernels(self):
        # A model in whose replica the kernel is penalised, as add_loss does.
        class Penalised(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.only = _layers.Dense(cohorts.CLASSES)

            def call(self, x):
                z = self.only(x)
                kernel = tf.convert_to_tensor(self.only.kernel)
                self.add_loss(tf.reduce_sum(tf.square(kernel)))
                return z

            def get_config(self):
                return {}

        self.assertEmpty(self._held(self._engine(_built(Penalised()))))

    @parameterized.parameters(
        {"optimizer": lambda: tf.keras.optimizers.Adam(0.1)},
        {"optimizer": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9)},
        {"optimizer": lambda: tf.keras.optimizers.SGD(0.1, clipnorm=1.0)},
        {"training": {"proximal_weight": 0.1}},
        {"training": {"grad_clip": 1.0}},
    )
    def test_steps_that_are_not_plain_sgd(self, optimizer=None, **options):
        engine = self._engine(_dense(), optimizer=optimizer and optimizer(), **options)
        self.assertEmpty(self._held(engine))

    def test_not_for_weights_that_are_released(self):
        engine = self._engine(
            _dense(),
            mechanism=tfdp_fl.NbAFL(epsilon=50.0, constant=1.0, weight_clip=1.0),
        )
        self.assertEqual(engine.layout.factored_rows, 0)

    def test_small_kernels_stay_in_the_cache(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        with _in_use(fewest=20):
            engine = cohorts.make_engine(_dense(), dataset)
        self.assertEqual(self._held(engine), {0: (4, 6)})
        self.assertEmpty(self._held(cohorts.make_engine(_dense(), dataset)))

    def test_up_to_so_many_examples(self):
        with _in_use(narrow=10):
            engine = cohorts.make_engine(
                _dense(),
                FederatedDataset.from_client_arrays(cohorts.client_arrays()),
            )
        # 10 x 6 x 3 / (6 + 3), of the smaller kernel.
        self.assertEqual(engine.layout.factored_rows, 20)


class SameResultTest(tf.test.TestCase, parameterized.TestCase):
    """Whether kernels are factors or not, the released model is the same."""

    def setUp(self):
        super().setUp()
        # One without examples, short batches, one with a single example.
        self.arrays = cohorts.client_arrays((7, 0, 3, 12, 5, 1))

    def _trained(self, make_model, held, arrays=None, inputs=None, **options):
        """Returns how two rounds moved a model, their logs, and their ways."""
        dataset = FederatedDataset.from_client_arrays(arrays or self.arrays)
        tf.keras.utils.set_random_seed(1)
        model = make_model()
        before = [np.array(each) for each in model.get_weights()]
        mechanism = options.setdefault(
            "mechanism",
            tfdp_fl.FixedClipping(clip_norm=0.3, noise_multiplier=0.1),
        )
        with _in_use(fewest=1 if held else 2**18):
            engine = cohorts.make_engine(model, dataset, **options)
        logs = [
            cohorts.run_round(
                engine,
                dataset,
                round_index=index,
                noise_multiplier=mechanism.noise_multiplier_at(0),
                seed=np.array([5, index]),
                **(inputs or {}),
            )
            for index in range(2)
        ]
        ways = {way.factored for _, way, _ in engine.functions.traced}
        self.assertEqual(ways, {held})
        moved = [a - b for a, b in zip(model.get_weights(), before, strict=True)]
        return np.concatenate([each.ravel() for each in moved]), logs

    def _assert_same(self, make_model, rtol=1e-4, **options):
        usual, logs = self._trained(make_model, False, **options)
        held, held_logs = self._trained(make_model, True, **options)
        self.assertGreater(np.abs(usual).max(), 1e-3)
        self.assertAllClose(usual, held, rtol=rtol, atol=1e-6)
        for one, other in zip(logs, held_logs, strict=True):
            self.assertAllClose(one, other, rtol=rtol, atol=1e-6)

    @parameterized.parameters(
        (_dense, 1), (_branches, 2), (_convolutional, 2), (_called_twice, 1)
    )
    def test_of_any_model(self, make_model, num_replicas):
        self._assert_same(make_model, num_replicas=num_replicas)

    @parameterized.named_parameters(
        ("none", tfdp_fl.NoPrivacy),
        (
            "adaptive",
            lambda: tfdp_fl.AdaptiveClipping(
                noise_multiplier=0.1, count_noise_stddev=1.0
            ),
        ),
        ("median", lambda: tfdp_fl.MedianClipping(noise_multiplier=0.1)),
        ("local", lambda: tfdp_fl.LocalDP(clip_norm=0.1, noise_multiplier=0.5)),
    )
    def test_under_any_mechanism(self, mechanism):
        self._assert_same(_dense, mechanism=mechanism())

    @parameterized.parameters(
        {"moments": True},
        {"training": {"upload_hook": lambda tensors: [2 * t for t in tensors]}},
        {"training": {"metrics": ["accuracy"], "class_weight": {0: 3.0}}},
        {"inputs": {"shuffle": 7}},
        {"inputs": {"batch_size": 100, "local_epochs": 5}},
    )
    def test_with_whatever_else_there_is(self, inputs=None, **options):
        def made():
            if inputs and "shuffle" in inputs:
                return {"shuffle": np.random.default_rng(inputs["shuffle"])}
            return inputs

        usual, logs = self._trained(_dense, False, inputs=made(), **options)
        held, held_logs = self._trained(_dense, True, inputs=made(), **options)
        self.assertAllClose(usual, held, rtol=1e-4, atol=1e-6)
        self.assertAllClose(logs, held_logs, rtol=1e-4, atol=1e-6)

    def test_as_a_plain_keras_loop(self):
        model = _convolutional(dropout=0.0)
        client = self.arrays[3]
        wanted = cohorts.reference_update(
            model, client, tf.keras.optimizers.SGD(0.1), cohorts.cross_entropy()
        )
        dataset = FederatedDataset.from_client_arrays({0: client})
        with _in_use():
            engine = cohorts.make_engine(model, dataset)
        before = model.get_weights()
        cohorts.run_round(engine, dataset)
        for start, end, update in zip(before, model.get_weights(), wanted, strict=True):
            self.assertAllClose(end - start, update, rtol=1e-4, atol=1e-7)

    @parameterized.parameters(np.nan, np.inf, 1e38, 1e20)
    def test_a_client_leaves_nothing_behind(self, value):
        # Those after it in the same replica train as if it were not there.
        arrays = dict(self.arrays)
        arrays[0] = (np.full_like(arrays[0][0], value), arrays[0][1])
        without = {**self.arrays, 0: tuple(each[:0] for each in self.arrays[0])}
        moved, logs = self._trained(_linear, True, arrays)
        wanted, _ = self._trained(_linear, True, without)
        self.assertEqual(logs[0]["discarded_clients"], 1)
        self.assertAllClose(moved, wanted, rtol=1e-6, atol=1e-7)

    def test_in_bfloat16_the_update_is_held_in_float32(self):
        # Rounded to bfloat16 with the kernel, a small change would be lost.
        def small_changes():
            return _model(
                _layers.Dense(6, "tanh", dtype="mixed_bfloat16"),
                _layers.Dense(cohorts.CLASSES, dtype="float32"),
            )

        inputs = {"learning_rate": 1e-3, "local_epochs": 4}
        none = tfdp_fl.NoPrivacy()
        exact, _ = self._trained(_dense, False, mechanism=none, inputs=inputs)
        held, _ = self._trained(small_changes, True, mechanism=none, inputs=inputs)
        error = np.linalg.norm(held - exact) / np.linalg.norm(exact)
        self.assertLess(error, 0.02)  # 2^-8 for each of a few roundings.


def _linear():
    """Nothing in it saturates, so that what is huge stays huge."""
    return _model(_layers.Dense(6), _layers.Dense(cohorts.CLASSES))


if __name__ == "__main__":
    absltest.main()
