"""What is the same is known to be; all else is not taken to be."""

from __future__ import annotations

import dataclasses
import unittest

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tests import stacks
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import fingerprint

_layers = tf.keras.layers


class _Doubled(_layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


class _Own(tf.keras.Sequential):
    pass


def _doubled(x):
    return 2 * x


def _model(*stack, kind=tf.keras.Sequential):
    return kind([_layers.Input((8,)), *stack, _layers.Dense(3)])


def _functional():
    inputs = tf.keras.Input((8,))
    one, other = _layers.Dense(4)(inputs), _layers.Dense(4)(inputs)
    return tf.keras.Model(inputs, _layers.Dense(3)(one + other))


def _arrays(**changes):
    x, y = toy.arrays(40)
    for name, (place, value) in changes.items():
        {"x": x, "y": y}[name][place] = value
    return x, y


def _clients(x, y):
    return FederatedDataset.from_indices(x, y, np.arange(len(x)).reshape(-1, 10))


def _of_work(model=None, clients=None, **compile_options):
    fed = toy.federated(
        model=_model() if model is None else model,
        compile_options=compile_options,
    )
    return fingerprint.of_work(
        fed.model, fed._compiled, clients or _clients(*_arrays())
    )


class OfWorkTest(parameterized.TestCase):
    @parameterized.parameters(
        lambda: _model(_layers.Dense(4, "relu"), _layers.Dropout(0.2)),
        lambda: _model(_layers.BatchNormalization()),
        _functional,
    )
    def test_of_the_same_made_again_whatever_it_is_called(self, make):
        first = _of_work(make())
        self.assertIsNotNone(first)
        self.assertEqual(_of_work(make()), first)

    @parameterized.named_parameters(
        ("model", {"model": lambda: _model(_layers.Dense(4, "tanh"))}),
        ("dropout", {"model": lambda: _model(_layers.Dropout(0.3))}),
        ("an_example", {"clients": lambda: _clients(*_arrays(x=(3, 0.5)))}),
        ("a_label", {"clients": lambda: _clients(*_arrays(y=(3, 2)))}),
        (
            "whose_examples",
            {
                "clients": lambda: FederatedDataset.from_indices(
                    *_arrays(), np.arange(40)[::-1].reshape(-1, 10)
                )
            },
        ),
        ("loss", {"loss": lambda: "mse"}),
        ("a_losss_argument", {"loss": lambda: tf.keras.losses.Huber(0.3)}),
        ("loss_weights", {"loss_weights": lambda: [2.0]}),
    )
    def test_of_something_else(self, changes):
        made = {name: make() for name, make in changes.items()}
        known = [_of_work(), _of_work(loss=tf.keras.losses.Huber(0.2))]
        found = _of_work(**made)
        self.assertIsNotNone(found)
        self.assertNotIn(found, known)

    @parameterized.named_parameters(
        ("layer", {"model": lambda: _model(_Doubled(4))}),
        ("lambda", {"model": lambda: _model(_layers.Lambda(_doubled))}),
        ("activation", {"model": lambda: _model(_layers.Dense(4, _doubled))}),
        ("model", {"model": lambda: _model(kind=_Own)}),
        ("loss", {"loss": lambda: lambda y, z: tf.reduce_mean(z)}),
        ("upload_hook", {"upload_hook": lambda: list}),
        ("broadcast_hook", {"broadcast_hook": lambda: lambda w, s: w}),
        (
            "clients_that_are_read",
            {
                "clients": lambda: FederatedDataset.from_client_fn(
                    range(4), lambda k: _arrays()
                )
            },
        ),
    )
    def test_code_that_may_have_changed_is_not_known(self, changes):
        made = {name: make() for name, make in changes.items()}
        self.assertIsNone(_of_work(**made))

    def test_a_loss_that_holds_an_array_is_not_known(self):
        # And ends no `fit`.
        focal = tf.keras.losses.CategoricalFocalCrossentropy(
            alpha=tf.constant([0.2, 0.3, 0.5])
        )
        self.assertIsNone(_of_work(loss=focal))

    @unittest.skipUnless(stacks.KERAS_3, "Keras 2 has no such operations.")
    def test_an_operation_of_ones_own_is_not_known(self):
        class Twice(tf.keras.Operation):
            def call(self, x):
                return 2 * x

            def compute_output_spec(self, x):
                return tf.keras.KerasTensor(x.shape, x.dtype)

        inputs = tf.keras.Input((8,))
        outputs = _layers.Dense(3)(Twice()(inputs))
        model = tf.keras.Model(inputs, outputs)
        fed = toy.federated()
        self.assertIsNone(
            fingerprint.of_work(model, fed._compiled, _clients(*_arrays()))
        )

    def test_what_classes_count(self):
        fed = toy.federated()
        found = {
            fingerprint.of_work(
                fed.model,
                fed._compiled.with_class_weight(weight),
                _clients(*_arrays()),
            )
            for weight in (None, {0: 2.0}, {0: 3.0})
        }
        self.assertLen(found - {None}, 3)

    def test_the_proximal_weight(self):
        fed = toy.federated()
        training = dataclasses.replace(fed._compiled.training, proximal_weight=0.1)
        changed = dataclasses.replace(fed._compiled, training=training)
        clients = _clients(*_arrays())
        self.assertNotEqual(
            fingerprint.of_work(fed.model, changed, clients),
            fingerprint.of_work(fed.model, fed._compiled, clients),
        )


class OfRoundTest(absltest.TestCase):
    def test_hangs_on_all_that_it_is_given(self):
        weights = [tf.Variable([1.0, 2.0])]
        usual = ["00" * 32, "work", 0.1, [tf.constant(0.5)], weights]
        first = fingerprint.of_round(*usual)
        self.assertEqual(fingerprint.of_round(*usual), first)
        for place, other in enumerate(
            (
                "01" * 32,
                "other",
                0.2,
                [tf.constant(0.6)],
                [tf.Variable([1.0, 2.5])],
            )
        ):
            changed = [*usual[:place], other, *usual[place + 1 :]]
            self.assertNotEqual(fingerprint.of_round(*changed), first)
        self.assertIsNone(fingerprint.of_round("00" * 32, None, *usual[2:]))
        words = [tf.constant(["a word"])]
        self.assertIsNone(fingerprint.of_round(*usual[:-1], words))


if __name__ == "__main__":
    absltest.main()
