"""What differs between Keras 2 and Keras 3, behind one face.

`keras2` (Keras 2.14, tf_keras) and `keras3` have the same functions; the one
that goes with `tf.keras` is handed on here. Nothing else in the package asks
for a version, and everything else says `tf.keras`, which is whichever of them
TensorFlow was started with.

The engine computes with `tf.Variable`s. Keras 2's variables are that; Keras 3
wraps them, and what its own optimizers are given has to be the wrapped ones.
"""

from typing import TYPE_CHECKING

import tensorflow as tf

# The type checker sees Keras 3's: the functions are the same.
if TYPE_CHECKING or hasattr(tf.keras, "ops"):
    from tfdp_fl.keras_versions import keras3 as _keras
else:
    from tfdp_fl.keras_versions import keras2 as _keras

CompiledModel = _keras.CompiledModel
apply_gradients = _keras.apply_gradients
build_optimizer = _keras.build_optimizer
call_loss = _keras.call_loss
check_installed = _keras.check_installed
check_optimizer = _keras.check_optimizer
copy_adapted = _keras.copy_adapted
has_adapted_weights = _keras.has_adapted_weights
input_rank = _keras.input_rank
is_of_keras = _keras.is_of_keras
layers_of = _keras.layers_of
learning_rate = _keras.learning_rate
loss_options = _keras.loss_options
losses_of_rows = _keras.losses_of_rows
momentum_and_schedule = _keras.momentum_and_schedule
name = _keras.name
own_random_state = _keras.own_random_state
random_state = _keras.random_state
rebuilt = _keras.rebuilt
tf_variable = _keras.tf_variable
tf_variables = _keras.tf_variables

__all__ = [
    "CompiledModel",
    "apply_gradients",
    "build_optimizer",
    "call_loss",
    "check_installed",
    "check_optimizer",
    "copy_adapted",
    "has_adapted_weights",
    "input_rank",
    "is_of_keras",
    "layers_of",
    "learning_rate",
    "loss_options",
    "losses_of_rows",
    "momentum_and_schedule",
    "name",
    "own_random_state",
    "random_state",
    "rebuilt",
    "tf_variable",
    "tf_variables",
]
