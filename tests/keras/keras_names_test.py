"""Every public name of a Keras model works, or says what to call instead."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.keras import keras_names

# What `DPFederatedModel` does itself.
_OWN = {
    *(
        "compile",
        "compiled",
        "evaluate",
        "fit",
        "get_weights",
        "predict",
        "save",
    ),
    *("set_weights", "summary"),
}
# Not every model has them: a subclassed one has no input, for instance.
_MAY_BE_MISSING = (AttributeError, NotImplementedError, RuntimeError)


def _names() -> list[str]:
    """Returns all public names of Keras models, on this version of Keras."""
    models = [toy.dense(), tf.keras.Model(x := tf.keras.Input((2,)), x)]
    return sorted(
        {
            name
            for each in (tf.keras.Model, tf.keras.Sequential, *models)
            for name in dir(each)
            if not name.startswith("_")
        }
    )


class NamesTest(parameterized.TestCase):
    def test_every_name_is_listed_once(self):
        for name in _names():
            listed = [
                name in _OWN,
                name in keras_names.HANDED_ON,
                name in keras_names.INSTEAD,
            ]
            self.assertEqual(sum(listed), 1, f"{name}: {listed}")
        self.assertFalse(_OWN & keras_names.HANDED_ON)

    def test_what_is_handed_on_is_the_model_s(self):
        fed = toy.federated()
        for name in sorted(keras_names.HANDED_ON):
            try:
                wanted = getattr(fed.model, name)
            except _MAY_BE_MISSING as error:
                with self.assertRaises(type(error)):
                    getattr(fed, name)
                continue
            self.assertEqual(
                type(getattr(fed, name)).__name__, type(wanted).__name__, name
            )
            self.assertIn(name, dir(fed))

    def test_what_is_not_says_what_to_call(self):
        fed = toy.federated()
        for name in keras_names.INSTEAD:
            with self.assertRaisesRegex(
                AttributeError, f"DPFederatedModel has no {name}: .+\\.$"
            ):
                getattr(fed, name)
            self.assertFalse(hasattr(fed, name))
            with self.assertRaisesRegex(AttributeError, f"no {name}: "):
                setattr(fed, name, 3)

    def test_names_of_nobody(self):
        fed = toy.federated()
        with self.assertRaisesRegex(AttributeError, "'spam'.*fed.model"):
            _ = fed.spam
        with self.assertRaisesRegex(AttributeError, "_hidden"):
            _ = fed._hidden

    def test_setting_what_is_the_model_s(self):
        fed = toy.federated()
        with self.assertRaisesRegex(AttributeError, "before it is wrapped"):
            fed.optimizer = "sgd"
        fed.stop_training = True
        self.assertTrue(fed.model.stop_training)


class CalledTest(parameterized.TestCase):
    def test_the_usual_calls(self):
        fed = toy.federated()
        fed.fit(toy.clients(), verbose=0)
        self.assertLen(fed.layers, 1)
        self.assertIs(fed.get_layer(index=0), fed.model.layers[0])
        self.assertEqual(fed.count_params(), 27)
        self.assertEqual(fed.input_shape, (None, 8))
        x, y = toy.arrays(4)
        np.testing.assert_allclose(
            fed.predict_on_batch(x), fed.predict(x, verbose=0), atol=1e-6
        )
        fed.test_on_batch(x, y)
        self.assertIn("Dense", fed.to_json())
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "w.weights.h5")
            fed.save_weights(path)
            other = toy.federated()
            other.load_weights(path)
        for one, same in zip(fed.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(one, same)

    def test_a_callback_of_the_user_s_stops(self):
        fed = toy.federated()

        class Stop(tf.keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                fed.stop_training = epoch == 1

        fed.fit(toy.clients(), 5, callbacks=[Stop()], verbose=0)
        self.assertEqual(fed.rounds, 2)

    @parameterized.parameters(
        ({"epochs": 3}, "fit takes no epochs; give rounds .*local_epochs"),
        ({"epochs": 2, "batch": 1}, "fit takes no epochs; give rounds"),
        ({"steps_per_epoch": 3}, "give rounds, and clients_per_round"),
        ({"initial_epoch": 3}, "give resume_from"),
        ({"spam": 3}, "fit takes no spam; give one of clients, y, rounds, batch"),
    )
    def test_fit_as_keras_has_it(self, options, message):
        fed = toy.federated()
        with self.assertRaisesRegex(TypeError, message):
            fed.fit(toy.clients(), verbose=0, **options)
        self.assertEqual(fed.rounds, 0)

    def test_every_argument_of_keras_fit_has_an_answer(self):
        import inspect

        own = inspect.signature(tfdp_fl.DPFederatedModel.fit).parameters
        fed = toy.federated()
        for name in inspect.signature(tf.keras.Model.fit).parameters:
            if name in own:
                continue
            with self.assertRaisesRegex(TypeError, f"no {name}; give ") as seen:
                fed.fit(toy.clients(), **{name: 1})
            self.assertNotIn("one of", str(seen.exception), name)

    def test_arrays_as_keras_takes_them(self):
        fed = toy.federated()
        with self.assertRaisesRegex(TypeError, "client_ids=ids") as seen:
            fed.fit(*toy.arrays(30))
        self.assertNotIn("[", str(seen.exception))

    def test_a_train_step_of_its_own(self):
        class Model(tf.keras.Model):
            def __init__(self, **options):
                super().__init__(**options)
                self.dense = tf.keras.layers.Dense(3)

            def call(self, inputs):
                return self.dense(inputs)

            def train_step(self, data):
                return super().train_step(data)

        model = Model()
        model(np.ones((1, 8), np.float32))
        with self.assertRaisesRegex(ValueError, "train_step.*add_loss"):
            tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), 5)
        self.assertRegex(tfdp_fl.validate(model)[0], "train_step")


if __name__ == "__main__":
    absltest.main()
