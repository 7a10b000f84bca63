"""What is found out about a model on batches that are nobody's."""

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tfdp_fl import mechanisms
from tfdp_fl.engine import synthetic, trainer

_ops, _layers = tf.keras.ops, tf.keras.layers


class _Running(_layers.Layer):
    """Normalizes by its own moving statistics, with names that say nothing."""

    def build(self, shape):
        options = {"shape": [shape[-1]], "trainable": False}
        self.a = self.add_weight(name="running_var", initializer="ones", **options)
        self.b = self.add_weight(name="variance_or_not", initializer="ones", **options)
        share = {"constraint": lambda v: _ops.clip(v, 0.2, 0.8), **options}
        self.c = self.add_weight(name="c", initializer="ones", **share)

    def call(self, x, training=False):
        if training:
            self.a.assign(0.9 * self.a + 0.1 * _ops.var(x, axis=0))
            self.b.assign(0.9 * self.b + 0.1 * _ops.mean(x, axis=0))
            self.c.assign(0.5 * self.c)
        return (x - self.b) / _ops.sqrt(self.a + 1e-3)


_Norm = _layers.BatchNormalization


@pytest.mark.parametrize(
    ("stack", "names"),
    [
        ([_Norm()], {"moving_variance"}),
        ([_layers.Dense(1), _Norm()], {"moving_variance"}),
        # Means of what is not negative are not negative.
        ([_layers.Dense(5, "relu"), _Norm()], {"moving_mean", "moving_variance"}),
        ([_layers.Dense(3), _Running()], {"running_var", "c"}),
        ([_layers.Reshape([2, 2]), _layers.GroupNormalization(2)], set()),
        ([_layers.Dense(64), _Norm(), _layers.Dropout(0.5)], {"moving_variance"}),
    ],
)
def test_what_training_keeps_from_below_zero_is_found_by_what_it_does(stack, names):
    model = cohorts.sequential([4], *stack, _layers.Dense(3))
    before = model.get_weights()
    x = trainer.zeros_like_batch(tf.TensorSpec([4]))
    state = model.non_trainable_weights
    found = synthetic.non_negative_variables(
        model, [v for v in state if "seed" not in v.path], x
    )
    assert {v.name for v in found} == names
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_noise_leaves_statistics_where_they_may_be():
    model = cohorts.sequential([4], _Running(), _layers.Dense(3))
    mechanism = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=50.0)
    engine = cohorts.make_engine(model, cohorts.dataset(), mechanism=mechanism)
    for seed in range(3):
        inputs = {"noise_multiplier": 50.0, "seed": np.array([seed, 1], np.uint64)}
        cohorts.run_round(engine, cohorts.dataset(), **inputs)
    layer = model.layers[0]
    assert np.min(layer.a) == 0.0
    assert np.min(layer.b) < 0
    assert np.min(layer.c) >= np.float32(0.2)
    assert np.max(layer.c) <= np.float32(0.8)


def test_what_a_built_model_keeps_has_places_in_its_weights():
    model = cohorts.sequential([4], _layers.Dense(3), _Norm(), _Running())
    names = [weight.name for weight in model.weights]
    places = synthetic.non_negative_positions(model)
    assert [names[k] for k in places] == ["moving_variance", "running_var", "c"]
    with pytest.raises(ValueError, match="knows its inputs"):
        synthetic.non_negative_positions(tf.keras.Model())
