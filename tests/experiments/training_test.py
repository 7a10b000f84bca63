"""What settings become: the loss, the server's schedule, what is reported."""

import contextlib
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tests.keras import toy
from tfdp_fl import accounting, engine, features, losses
from tfdp_fl.experiments import training
from tfdp_fl.experiments.settings import Settings

_SMALL = {
    "dataset": "digits",
    "num_clients": 20,
    "model": "linear",
    # All of them: to count what is not amplified takes no time.
    "clients_per_round": 20,
    "rounds": 4,
    "seed": 1,
}
_GRADIENTS = {"input_features": "oriented_gradients"}


def _prepared(**options):
    return training.prepare(Settings(**{**_SMALL, **options}))


def test_balanced_clients_and_a_schedule():
    server = {"server_learning_rate": 2, "server_schedule": "linear"}
    fed = _prepared(prior_smoothing=0.02, **server).federated_model
    assert isinstance(fed.model.loss, losses.BalancedSoftmaxCrossentropy)
    assert fed.model.loss.smoothing == 0.02
    # The server's rate ends at zero.
    rate = fed._compiled.server_optimizer._learning_rate
    np.testing.assert_allclose([rate(0), rate(2), rate(4)], [2.0, 1.0, 0.0])


def test_features_are_computed_once_and_the_saved_model_takes_images(tmp_path):
    prepared, original = _prepared(**_GRADIENTS), _prepared().task
    layer = features.OrientedGradients()
    for position in (0, 7, 19):
        name = original.clients.client_ids[position]
        images, labels = original.clients.client(name)
        x, y = prepared.task.clients.client(name)
        wanted = layer(np.reshape(images, [-1, 8, 8]))
        np.testing.assert_allclose(x, wanted, atol=1e-6)
        np.testing.assert_array_equal(y, labels)
    result = training.run(prepared, tmp_path / "run", verbose=0)
    path = tmp_path / "run" / training.MODEL
    saved = tf.keras.models.load_model(path, compile=False)
    images, labels = original.test
    right = np.argmax(saved.predict(images, verbose=0), -1) == labels
    assert np.mean(right) == pytest.approx(result["accuracy"], abs=1e-6)


def test_shifted_images_are_the_clients_own():
    with pytest.raises(ValueError, match="input_shifts"):
        _prepared(input_shifts=8)
    original, task = _prepared().task, _prepared(input_shifts=1, **_GRADIENTS).task
    layer = features.OrientedGradients()
    counts = np.zeros(5)
    for name in original.clients.client_ids:
        images, labels = original.clients.client(name)
        x, y = task.clients.client(name)
        np.testing.assert_array_equal(y, labels)
        grid = np.pad(np.reshape(images, [-1, 8, 8]), ((0, 0), (1, 1), (1, 1)))
        versions = [
            layer(grid[:, 1 + down : 9 + down, 1 + right : 9 + right]).numpy()
            for down, right in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
        ]
        x = np.reshape(x, versions[0].shape)
        same = [np.abs(x - v).reshape(len(x), -1).max(1) < 1e-5 for v in versions]
        assert np.any(same, 0).all()
        counts += np.sum(same, 1)
    # Of 400 images each is drawn 80 times; 9 standard deviations.
    assert np.all((counts > 10) & (counts < 150))
    np.testing.assert_array_equal(task.test[1], original.test[1])
    wanted = layer(np.reshape(original.test[0], [-1, 8, 8])).numpy().ravel()
    np.testing.assert_allclose(np.ravel(task.test[0]), wanted, atol=1e-6)


def _interrupted(path, broken_off):
    with mock.patch.object(engine.CohortEngine, "collect", broken_off):
        result = training.run(_prepared(), path, verbose=0)
    assert result["stopped"] == "interrupted"
    assert (path / training.MODEL).exists()
    return result["rounds"]


def _resumed(path):
    result = training.run(_prepared(), path, resume=True, verbose=0)
    assert (result["stopped"], result["rounds"]) == (None, 4)


def test_an_interrupt_while_tensorflow_traces(tmp_path):
    with contextlib.ExitStack() as left:

        def broken_off(*_):
            left.enter_context(tf.__internal__.FuncGraph("traced").as_default())
            raise KeyboardInterrupt

        assert _interrupted(tmp_path, broken_off) == 0
    _resumed(tmp_path)


@toy.same_draws_when_resumed()
def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "path"
    training.run(_prepared(), whole, verbose=0)
    collect, calls = engine.CohortEngine.collect, []

    def broken_off(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return collect(*arguments)

    assert _interrupted(path, broken_off) == 2
    _resumed(path)
    history = pd.read_csv(path / training.HISTORY)
    assert history["round"].tolist() == [1, 2, 3, 4]
    assert not (path / training.CHECKPOINT).exists()
    ledger = accounting.PrivacyLedger.read(path / training.LEDGER)
    assert len(ledger.entries) == 4
    # The same seed, so the same model as without an interrupt.
    one, other = (
        tf.keras.models.load_model(each / training.MODEL).get_weights()
        for each in (whole, path)
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
