"""Local training in the engine is what a plain Keras loop does."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.engine import cohorts
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import trainer

_SCHEDULE = tf.keras.optimizers.schedules.LearningRateSchedule
_DECAY = tf.keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.5)


def _arrays(make_x, make_y=None, sizes=(4, 6)):
    """Returns clients of functions of (random generator, size)."""
    rng = np.random.default_rng(0)
    make_y = make_y or (lambda rng, size: rng.integers(0, 3, size))
    return {k: (make_x(rng, n), make_y(rng, n)) for k, n in enumerate(sizes)}


def _normal(*shape):
    return lambda rng, size: rng.normal(size=[size, *shape]).astype(np.float32)


class _TrainingTest(tf.test.TestCase, parameterized.TestCase):
    def assert_trains_like_keras(
        self,
        model,
        arrays,
        *,
        optimizer=None,
        loss=None,
        rtol=2e-5,
        atol=2e-6,
        training=None,
        keras_training=None,
        **options,
    ):
        """Two rounds: the model moves by the mean of a plain Keras loop."""
        optimizer = optimizer or tf.keras.optimizers.SGD(0.1)
        loss = cohorts.cross_entropy() if loss is None else loss
        training = training or {}
        keras_training = training if keras_training is None else keras_training
        dataset = FederatedDataset.from_client_arrays(arrays)
        engine = cohorts.make_engine(
            model,
            dataset,
            optimizer=optimizer,
            loss=loss,
            training=training,
            **options,
        )
        for round_index in range(2):
            before = model.get_weights()
            mean = cohorts.reference_mean(
                model, list(arrays.values()), optimizer, loss, **keras_training
            )
            rate = optimizer.learning_rate
            if not isinstance(rate, _SCHEDULE):
                rate = float(tf.keras.backend.get_value(rate))
            cohorts.run_round(
                engine, dataset, round_index=round_index, learning_rate=rate
            )
            moved = 0.0
            for old, change, new in zip(before, mean, model.get_weights(), strict=True):
                self.assertAllClose(new - old, change, rtol=rtol, atol=atol)
                moved = max(moved, float(np.abs(new - old).max(initial=0)))
            self.assertGreater(moved, 1e-3)


class OptimizerTest(_TrainingTest):
    @parameterized.named_parameters(
        ("sgd", tf.keras.optimizers.SGD(0.1)),
        ("nesterov", tf.keras.optimizers.SGD(0.1, 0.9, nesterov=True)),
        (
            "adamw_clipnorm",
            tf.keras.optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=0.05),
        ),
        ("sgd_schedule", tf.keras.optimizers.SGD(_DECAY)),
    )
    def test_every_client_starts_with_fresh_slots(self, optimizer):
        # Uneven clients, one of them empty, two epochs, short last batches.
        self.assert_trains_like_keras(
            cohorts.mlp(), cohorts.client_arrays(), optimizer=optimizer
        )

    def test_the_rate_follows_the_round(self):
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        model, adam = cohorts.mlp(), tf.keras.optimizers.Adam(0.1)
        engine = cohorts.make_engine(model, dataset, optimizer=adam)
        before = model.get_weights()
        cohorts.run_round(engine, dataset, learning_rate=0.0)
        self.assertAllEqual(model.get_weights()[0], before[0])
        cohorts.run_round(engine, dataset, learning_rate=0.1)
        self.assertNotAllEqual(model.get_weights()[0], before[0])


class LocalTrainingTest(_TrainingTest):
    def test_proximal_term(self):
        self.assert_trains_like_keras(
            cohorts.mlp(),
            cohorts.client_arrays(),
            training={"proximal_weight": 2.0},
        )

    def test_gradient_clipping_of_repeated_rows(self):
        model = tf.keras.Sequential(
            [
                tf.keras.Input([6]),
                tf.keras.layers.Embedding(4, 3),
                tf.keras.layers.Flatten(),
                tf.keras.layers.Dense(3),
            ]
        )
        arrays = _arrays(lambda rng, size: rng.integers(0, 2, [size, 6]))
        self.assert_trains_like_keras(model, arrays, training={"grad_clip": 0.05})

    def test_upload_hook_changes_what_the_mechanism_sees(self):
        model = cohorts.mlp()
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        engine = cohorts.make_engine(
            model,
            dataset,
            training={"upload_hook": lambda update: [tf.ones_like(v) for v in update]},
        )
        before = model.get_weights()
        logs = cohorts.run_round(engine, dataset)
        for old, new in zip(before, model.get_weights(), strict=True):
            self.assertAllClose(new - old, np.ones_like(old))
        size = sum(v.size for v in before)
        self.assertAllClose(logs["mean_update_norm"], size**0.5, rtol=1e-5)

    def test_frozen_weights_and_adapted_constants_are_the_servers(self):
        tf.keras.utils.set_random_seed(2)
        normalization = tf.keras.layers.Normalization()
        normalization.adapt(np.random.default_rng(0).normal(3, 5, [50, 4]))
        model = tf.keras.Sequential(
            [
                tf.keras.Input([4]),
                normalization,
                tf.keras.layers.Dense(6, activation="tanh"),
                tf.keras.layers.Dense(3),
            ]
        )
        model.layers[1].trainable = False
        model.compile(loss="mse")
        self.assert_trains_like_keras(model, cohorts.client_arrays())

    def test_a_train_step_of_ones_own_is_refused(self):
        class Model(tf.keras.Sequential):
            def train_step(self, data):
                return {}

        model = Model([tf.keras.layers.Dense(3, input_shape=(4,))])
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        with self.assertRaisesRegex(ValueError, "train_step"):
            trainer.Trainer(
                model,
                trainer.LocalTraining(
                    optimizer=tf.keras.optimizers.SGD(0.1),
                    loss=cohorts.cross_entropy(),
                ),
                dataset.element_spec,
                True,
            )


class ModelTest(_TrainingTest):
    def test_lstm_embedding_and_masks(self):
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Embedding(7, 4, mask_zero=True, input_shape=(None,)),
                tf.keras.layers.LSTM(5, return_sequences=True),
                tf.keras.layers.Dense(7),
            ]
        )

        def masked(rng, size):
            x = rng.integers(1, 7, [size, 6])
            for row in x:
                row[rng.integers(2, 7) :] = 0
            return x

        arrays = _arrays(masked, lambda rng, size: rng.integers(0, 7, [size, 6]))
        self.assert_trains_like_keras(model, arrays, rtol=1e-4)

    def test_stacked_lstm_without_a_mask(self):
        # By functions of our own, see `layers`.
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.LSTM(4, return_sequences=True, input_shape=(9, 2)),
                tf.keras.layers.LSTM(5),
                tf.keras.layers.Dense(3),
            ]
        )
        self.assert_trains_like_keras(model, _arrays(_normal(9, 2)), rtol=1e-4)
        for layer in model.layers:  # The user's own model.
            self.assertNotIn("call", vars(layer))

    def test_functional_with_two_inputs(self):
        tf.keras.utils.set_random_seed(3)
        left, right = (
            tf.keras.Input([3], name="a"),
            tf.keras.Input([2], name="b"),
        )
        hidden = tf.keras.layers.Concatenate()([left, right])
        output = tf.keras.layers.Dense(3)(
            tf.keras.layers.Dense(4, activation="relu")(hidden)
        )
        model = tf.keras.Model({"a": left, "b": right}, output)
        x = {"a": _normal(3), "b": _normal(2)}
        arrays = _arrays(lambda *args: {name: make(*args) for name, make in x.items()})
        self.assert_trains_like_keras(model, arrays)

    @parameterized.named_parameters(
        ("dict", {"p": "sparse_categorical_crossentropy", "q": "mae"}, None),
        ("weights", ["sparse_categorical_crossentropy", "mse"], [0.3, 2.0]),
    )
    def test_several_outputs_with_losses_by_name(self, loss, weights):
        tf.keras.utils.set_random_seed(3)
        entry = tf.keras.Input([4])
        outputs = {
            "p": tf.keras.layers.Dense(3, activation="softmax", name="p")(entry),
            "q": tf.keras.layers.Dense(1, name="q")(entry),
        }
        by_name = isinstance(loss, dict)
        model = tf.keras.Model(entry, outputs if by_name else [*outputs.values()])

        def labels(rng, size):
            parts = {
                "p": rng.integers(0, 3, size),
                "q": rng.normal(size=[size, 1]).astype(np.float32),
            }
            return parts if by_name else tuple(parts.values())

        arrays = _arrays(_normal(4), labels)
        training = {} if weights is None else {"loss_weights": weights}
        self.assert_trains_like_keras(model, arrays, loss=loss, training=training)

    def test_subclassed_model_with_a_loss_and_a_term_of_its_own(self):
        model = _Subclassed(units=5)
        model(tf.zeros([1, 4]))

        def loss(y, predicted):
            return tf.reduce_mean(
                (tf.one_hot(tf.cast(y, tf.int32), 3) - predicted) ** 2, -1
            )

        self.assert_trains_like_keras(model, cohorts.client_arrays(), loss=loss)

    @parameterized.parameters("none", "sum")
    def test_reductions_and_labels_without_a_last_dimension(self, how):
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(4,))])
        loss = tf.keras.losses.MeanSquaredError(reduction=how)
        arrays = {
            k: (x, (y > 0).astype(np.float32))
            for k, (x, y) in cohorts.client_arrays().items()
        }
        self.assert_trains_like_keras(
            model,
            arrays,
            loss=loss,
            optimizer=tf.keras.optimizers.SGD(0.02),
            rtol=1e-4,
        )

    @parameterized.parameters("float16", "float64")
    def test_other_floating_point_models(self, dtype):
        tf.keras.utils.set_random_seed(3)
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Dense(6, "tanh", input_shape=(4,), dtype=dtype),
                tf.keras.layers.Dense(3, dtype=dtype),
            ]
        )
        self.assert_trains_like_keras(
            model,
            cohorts.client_arrays(),
            rtol=2e-2 if dtype == "float16" else 1e-5,
            atol=3e-3 if dtype == "float16" else 1e-6,
            moments=True,
        )

    def test_loss_and_metrics_are_those_of_the_local_steps(self):
        model = cohorts.mlp()
        arrays = cohorts.client_arrays()
        dataset = FederatedDataset.from_client_arrays(arrays)
        engine = cohorts.make_engine(
            model,
            dataset,
            num_replicas=2,
            training={"metrics": ["accuracy", "sparse_top_k_categorical_accuracy"]},
        )
        # Rate 0: every step sees the same weights.
        logs = cohorts.run_round(engine, dataset, learning_rate=0.0)
        x, y = map(np.concatenate, zip(*arrays.values(), strict=True))
        model.compile(loss=cohorts.cross_entropy(), metrics=["accuracy"])
        wanted = model.evaluate(x, y, verbose=0, return_dict=True)
        self.assertAllClose(logs["loss"], wanted["loss"], rtol=1e-5)
        self.assertAllClose(logs["accuracy"], wanted["accuracy"], rtol=1e-5)
        self.assertEqual(logs["sparse_top_k_categorical_accuracy"], 1.0)


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Subclassed(tf.keras.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden = tf.keras.layers.Dense(
            units, "tanh", kernel_regularizer=tf.keras.regularizers.L2(0.1)
        )
        self.out = tf.keras.layers.Dense(3)

    def call(self, x, training=False):
        hidden = self.hidden(x)
        self.add_loss(0.01 * tf.reduce_sum(hidden**2))
        return self.out(hidden)

    def get_config(self):
        return {"units": self.units}


class BatchNormalizationTest(_TrainingTest):
    def _model(self):
        tf.keras.utils.set_random_seed(3)
        return tf.keras.Sequential(
            [
                tf.keras.layers.Dense(6, input_shape=(4,)),
                tf.keras.layers.BatchNormalization(momentum=0.5),
                tf.keras.layers.Dense(3),
            ]
        )

    def test_moving_statistics_are_part_of_the_update(self):
        self.assert_trains_like_keras(
            self._model(), cohorts.client_arrays(), rtol=1e-4, atol=1e-5
        )

    def test_or_stay_what_they_were(self):
        model = self._model()
        statistics = [np.array([1.0] * 6), np.array([2.0] * 6)]
        model.layers[1].moving_mean.assign(statistics[0])
        model.layers[1].moving_variance.assign(statistics[1])
        dataset = FederatedDataset.from_client_arrays(cohorts.client_arrays())
        engine = cohorts.make_engine(model, dataset, aggregate_non_trainable=False)
        before = model.layers[0].kernel.numpy()
        self.assertEqual(engine.num_variables, 6)
        cohorts.run_round(engine, dataset)
        self.assertAllEqual(model.layers[1].moving_mean, statistics[0])
        self.assertAllEqual(model.layers[1].moving_variance, statistics[1])
        self.assertNotAllEqual(model.layers[0].kernel, before)


class DropoutTest(tf.test.TestCase):
    """A gradient of 0 tells which units a client's masks dropped."""

    def _dropped(self, model, *seeds):
        """Returns for each of two equal clients which units were kept, by seed."""
        x = np.ones([1, 2000], np.float32)
        arrays = {k: (x, np.zeros([1, 1], np.float32)) for k in range(2)}
        dataset = FederatedDataset.from_client_arrays(arrays)
        engine = cohorts.make_engine(model, dataset, loss="mae", collect_records=True)
        found = []
        for seed in seeds:
            inputs = cohorts.inputs(
                dataset, batch_size=1, local_epochs=1, seed=np.array([3, seed])
            )
            ((members, collected),) = engine.collect(dataset, inputs).collected
            self.assertAllEqual(members, [0, 1])
            found.append(collected.updates.numpy()[:, :2000] != 0)
        return found

    def _model(self, layers=1):
        return tf.keras.Sequential(
            [tf.keras.Input([2000]), _Scale()]
            + [tf.keras.layers.Dropout(0.5) for _ in range(layers)]
            + [tf.keras.layers.Dense(1, kernel_initializer="ones")]
        )

    def test_a_seed_repeats_and_clients_and_rounds_differ(self):
        first, again, other = self._dropped(self._model(), 4, 4, 5)
        self.assertAllEqual(first, again)
        for kept in (first, other):
            self.assertAllInRange(kept.mean(axis=1), 0.43, 0.57)
        for one, two in ((first[0], first[1]), (first[0], other[0])):
            self.assertBetween(np.mean(one == two), 0.43, 0.57)

    def test_layers_draw_masks_of_their_own(self):
        (kept,) = self._dropped(self._model(layers=2), 4)
        self.assertAllInRange(kept.mean(axis=1), 0.19, 0.31)


@tf.keras.utils.register_keras_serializable("tfdp_fl_test")
class _Scale(tf.keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(
            name="scale", shape=[shape[-1]], initializer="ones"
        )

    def call(self, x):
        return x * self.scale


class CheckLabelsTest(parameterized.TestCase):
    def _check(self, loss, labels, units=3):
        model = tf.keras.Sequential([tf.keras.layers.Dense(units, input_shape=(4,))])
        arrays = {0: (np.zeros([5, 4], np.float32), labels)}
        spec = FederatedDataset.from_client_arrays(arrays).element_spec
        training = trainer.LocalTraining(optimizer=tf.keras.optimizers.SGD(), loss=loss)
        trainer.make_trainer(model, training, spec)

    @parameterized.parameters(
        ("sparse_categorical_crossentropy", [5, 3], 3),
        (tf.keras.losses.sparse_categorical_crossentropy, [5, 2], 3),
        ("categorical_crossentropy", [5, 4], 3),
        (tf.keras.losses.MeanSquaredError(name="mine"), [5, 1], 3),
        ("binary_crossentropy", [5, 2], 1),
    )
    def test_labels_that_cannot_belong_to_the_output(self, loss, shape, units):
        with self.assertRaisesRegex(ValueError, "labels must have the shape"):
            self._check(loss, np.zeros(shape, np.float32), units)

    def test_the_wrong_number_of_labels(self):
        labels = (np.zeros([5, 3], np.float32), np.zeros(5, np.float32))
        with self.assertRaisesRegex(ValueError, "labels must have one tensor"):
            self._check("mse", labels)

    @parameterized.parameters(
        ("sparse_categorical_crossentropy", [5], 3),
        (tf.keras.losses.sparse_categorical_crossentropy, [5, 1], 3),
        ("mse", [5], 1),
        ("binary_crossentropy", [5, 1], 1),
        (lambda y, p: tf.reduce_mean(p, -1) * y[:, 0, 0], [5, 7, 7], 3),
    )
    def test_labels_that_can(self, loss, shape, units):
        self._check(loss, np.zeros(shape, np.float32), units)
