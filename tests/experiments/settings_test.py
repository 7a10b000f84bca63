"""Settings: defaults that go together, schedules, refusals; and the models."""

import numpy as np
import pytest
import tensorflow as tf

from tfdp_fl.experiments import settings as settings_lib
from tfdp_fl.experiments import tasks
from tfdp_fl.experiments.settings import Settings


@pytest.mark.parametrize("mechanism", settings_lib.MECHANISMS)
@pytest.mark.parametrize("dataset", ["digits", "mnist", "shakespeare"])
def test_defaults_go_together_for_every_mechanism(mechanism, dataset):
    path = __file__ if dataset == "shakespeare" else None
    settings = Settings(dataset=dataset, mechanism=mechanism, data_path=path)
    resolved = settings.resolve()
    for name in ("model", "clients_per_round", "rounds", "batch_size"):
        assert getattr(resolved, name) is not None, name
    assert (resolved.target_epsilon is None) == (mechanism == "none")
    assert resolved == resolved.resolve()


def test_what_is_given_is_kept():
    given = Settings(mechanism="local", model="mlp", rounds=7, target_epsilon=3.0)
    resolved = given.resolve()
    for name in ("model", "rounds", "target_epsilon"):
        assert getattr(resolved, name) == getattr(given, name)
    assert resolved.units() == (128,)
    assert Settings(dataset="mnist").resolve().units() == (600, 100)
    # Given noise is not calibrated.
    resolved = Settings(noise_multiplier="1.5").resolve()
    assert resolved.target_epsilon is None
    assert resolved.schedule("noise_multiplier") == 1.5
    resolved = Settings(clients_per_round="all", num_clients=37).resolve()
    assert resolved.clients_per_round == 37


def test_schedules():
    def schedule(text):
        settings = Settings(clients_per_round=text, rounds=3)
        return settings.schedule("clients_per_round")

    assert schedule("100") == schedule(100) == 100
    assert schedule("10,20,30") == (10.0, 20.0, 30.0)
    assert schedule("2x10,1x30") == (10.0, 10.0, 30.0)
    assert schedule("2x1.5e1, 7") == (15.0, 15.0, 7.0)
    for bad in ("", "ten", "1,,2", "x5", "-x3", "1 2"):
        with pytest.raises(ValueError, match="--clients_per_round"):
            schedule(bad)


def test_delta_and_the_median():
    assert Settings().delta(1000) == pytest.approx(1e-4)
    assert Settings(target_delta=1e-4).delta(1000) == 1e-4
    nbafl = Settings(mechanism="nbafl", constant=3.0)
    assert nbafl.delta(1000) == pytest.approx(0.0139, abs=5e-5)
    assert Settings(mechanism="median").mechanism_options() == {}
    for value, meant in (("exact", None), ("4.5", 4.5), (4.5, 4.5)):
        settings = Settings(mechanism="median", median_noise_multiplier=value)
        assert settings.mechanism_options() == {"median_noise_multiplier": meant}


_GRADIENTS = {"input_features": "oriented_gradients"}
_PLAYS = {"dataset": "shakespeare", "data_path": __file__}


@pytest.mark.parametrize(
    "values, word",
    [
        ({"mechanism": "magic"}, "--mechanism"),
        ({"mechanism": "none", "target_epsilon": 1.0}, "--target_epsilon"),
        ({"mechanism": "nbafl", "target_delta": 1e-3}, "--target_delta"),
        ({"model": "linear", "hidden_units": "3"}, "--hidden_units"),
        ({**_PLAYS, "input_shifts": 1}, "--input_shifts"),
        ({**_PLAYS, "input_pooling": 2}, "--input_pooling"),
        ({"model": "mlp", "input_pooling": 2, **_GRADIENTS}, "--input_features"),
        ({**_PLAYS, **_GRADIENTS}, "--input_features"),
        ({"clip_norm": "wide", "mechanism": "fixed"}, "--clip_norm"),
        ({"median_noise_multiplier": "some", "mechanism": "median"}, "exact"),
    ],
)
def test_what_does_not_go_together(values, word):
    with pytest.raises((TypeError, ValueError), match=word):
        Settings(**values).resolve()


def test_pooled_images_keep_their_norm():
    model = tasks.mlp(36, 10, (7,), pooling=2)
    assert model.count_params() == (9 + 1) * 7 + 8 * 10
    before = tf.keras.Model(model.inputs, model.layers[-3].output)
    blocks = np.kron(np.arange(9.0).reshape(3, 3), np.ones((2, 2)))
    pooled = before(blocks.reshape(1, 36))
    np.testing.assert_allclose(pooled, [2 * np.arange(9.0)])
    assert np.linalg.norm(pooled) == pytest.approx(np.linalg.norm(blocks))


def test_lstm_does_not_count_padding():
    model = tasks.lstm(11, (6,))
    model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.array([[3, 4, 5, 0, 0]])
    one, other, unlike = (
        model.evaluate(x, np.array([labels]), verbose=0)
        for labels in ([4, 5, 6, 0, 0], [4, 5, 6, 7, 7], [4, 5, 9, 0, 0])
    )
    assert one == pytest.approx(other)
    assert one != pytest.approx(unlike)
