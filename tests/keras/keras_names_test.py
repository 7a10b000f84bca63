"""What Keras users call on a model works, or says what to call instead."""

from __future__ import annotations

import contextlib
import inspect
import io
import warnings

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import files, toy
from tfdp_fl.keras import keras_names


class NamesTest(parameterized.TestCase):
    def test_what_is_handed_on_is_the_model_s(self):
        fed = toy.federated()
        for name in sorted(keras_names.HANDED_ON):
            if not hasattr(fed.model, name):  # Versions of Keras differ.
                continue
            wanted = type(getattr(fed.model, name)).__name__
            self.assertEqual(type(getattr(fed, name)).__name__, wanted, name)
            self.assertIn(name, dir(fed))

    def test_what_would_train_or_change_the_model_is_not(self):
        fed = toy.federated()
        for name in ("train_on_batch", "train_step", "build", "quantize", "spam"):
            with self.assertRaisesRegex(AttributeError, f"has no '{name}': it trains"):
                getattr(fed, name)
            self.assertFalse(hasattr(fed, name))
            with self.assertRaisesRegex(AttributeError, f"{name} cannot be set"):
                setattr(fed, name, 3)
        with self.assertRaisesRegex(AttributeError, "own"):
            fed.optimizer = 3

    def test_the_usual_calls(self):
        fed = toy.federated()
        toy.fit(fed)
        self.assertIs(fed.get_layer(index=0), fed.model.layers[0])
        self.assertEqual(fed.count_params(), 27)
        x, y = toy.arrays(4)
        np.testing.assert_allclose(
            fed.predict_on_batch(x), fed.predict(x, verbose=0), atol=1e-6
        )
        fed.test_on_batch(x, y)
        path = files.directory(self) / "w.weights.h5"
        fed.save_weights(path)
        other = toy.federated()
        other.load_weights(path)
        toy.assert_same(fed, other)

    def test_a_callback_of_the_user_s_stops(self):
        fed = toy.federated()

        class Stop(tf.keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                fed.stop_training = epoch == 1

        toy.fit(fed, 5, [Stop()])
        self.assertEqual(fed.rounds, 2)


class ArgumentsTest(parameterized.TestCase):
    def test_fit_as_keras_has_it(self):
        fed = toy.federated()
        for options, message in (
            ({"epochs": 3}, "fit takes no epochs; give rounds .*local_epochs"),
            ({"spam": 3}, "fit takes no spam"),
        ):
            with self.assertRaisesRegex(TypeError, message):
                toy.fit(fed, **options)
        own = inspect.signature(tfdp_fl.DPFederatedModel.fit).parameters
        for name in inspect.signature(tf.keras.Model.fit).parameters.keys() - own:
            with self.assertRaisesRegex(TypeError, f"no {name}; give "):
                fed.fit(toy.clients(), **{name: 1})
        with self.assertRaisesRegex(TypeError, "client_ids=ids") as seen:
            fed.fit(*toy.arrays(30))
        self.assertNotIn("[", str(seen.exception))
        self.assertEqual(fed.rounds, 0)

    @parameterized.parameters(
        ({"optimizer": None}, ValueError, "optimizer must be a .*'sgd' or 'adam'"),
        ({"run_eagerly": True}, TypeError, "no run_eagerly; .* compiled"),
    )
    def test_compile(self, given, error, message):
        with self.assertRaisesRegex(error, message):
            toy.federated(compile_options=given)


class OutputTest(absltest.TestCase):
    def test_a_bar_and_a_validation_split_warn_of_nothing(self):
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            warnings.simplefilter("error", UserWarning)
            toy.federated().fit(toy.clients(), 2, verbose=1, validation_split=0.3)
        self.assertIn("val_loss", out.getvalue())
