"""A small training problem for the tests of the Keras front."""

import contextlib
import inspect
import os
import resource
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tfdp_fl import keras_versions
from tfdp_fl.keras import checkpoint, federated_training

NUM_CLIENTS = 40
NUM_CLASSES = 3


def clients(num_clients: int = NUM_CLIENTS, examples: int = 10):
    """Returns clients whose labels follow from their features."""
    x, y = arrays(num_clients * examples)
    rows = np.arange(num_clients * examples).reshape(num_clients, examples)
    return tfdp_fl.datasets.FederatedDataset.from_indices(x, y, rows)


def arrays(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns features [count, 8] and labels [count]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 8)).astype(np.float32)
    y = np.argmax(x[:, :NUM_CLASSES], axis=1).astype(np.int32)
    return x, y


def seed(number: int) -> None:
    """Has the layers that are made next begin alike, in every run.

    Also for TensorFlow's own operations, it would forget what it has compiled: half a
    second for each program that runs again.
    """
    with mock.patch.object(tf.random, "set_seed"):
        tf.keras.utils.set_random_seed(number)


def dense(*inner: Callable[[], Any]) -> tf.keras.Model:
    """Returns layers, and then 8 -> 3 or what there is, that always start the same."""
    seed(1)
    layers = [make() for make in inner]
    layers = [tf.keras.layers.Input((8,)), *layers, tf.keras.layers.Dense(NUM_CLASSES)]
    return tf.keras.Sequential(layers)


class Table(tf.keras.layers.Embedding):
    """An embedding of a kind whose indexes nobody looks at before it trains."""


def dropout() -> tf.keras.Model:
    """Returns `dense` behind a dropout."""
    return dense(lambda: tf.keras.layers.Dropout(0.5))


def normalized() -> tf.keras.Model:
    """Returns `dense` behind a normalization and a dropout."""
    return dense(
        tf.keras.layers.BatchNormalization, lambda: tf.keras.layers.Dropout(0.3)
    )


def two_layers() -> tf.keras.Model:
    """Returns a model of 8 -> 5 -> 3 that always starts the same."""
    return dense(lambda: tf.keras.layers.Dense(5, "tanh"))


def private(epsilon: float, rounds: int, metrics: Any = None, **options: Any):
    """Returns a compiled model of `make_private`, by RDP, which is quick."""
    usual = {"target_delta": 1e-3, "num_clients": NUM_CLIENTS, "clients_per_round": 20}
    usual |= {"accountant": "rdp", "max_parallel_clients": 1, **options}
    fed = tfdp_fl.make_private(dense(), target_epsilon=epsilon, rounds=rounds, **usual)
    fed.compile("sgd", loss(), metrics, jit_compile=False)
    return fed


def fit(fed: Any, rounds: int = 1, callbacks: Any = (), data: Any = None, **options):
    """Trains without a word on `clients`, or on other data."""
    data = clients() if data is None else data
    return fed.fit(data, rounds=rounds, callbacks=list(callbacks), verbose=0, **options)


def loss() -> tf.keras.losses.Loss:
    """Returns cross entropy of logits."""
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def flat(model: Any) -> np.ndarray:
    """Returns all weights of a model, or a list of them, as one float64 vector."""
    weights = model if isinstance(model, list) else model.get_weights()
    return np.concatenate([np.ravel(w).astype(np.float64) for w in weights])


def assert_same(one: Any, other: Any) -> None:
    """Fails unless two models, or lists of weights, are alike to the last bit."""
    np.testing.assert_array_equal(flat(one), flat(other))


def at_end(
    function: Callable[[], Any], round_index: int | None = None, when="on_epoch_end"
):
    """Returns a callback that calls something at a place of a round, or of each."""

    def called(place=None, *_):
        if round_index in (None, place) or not isinstance(place, int):
            function()

    return tf.keras.callbacks.LambdaCallback(**{when: called})


def interrupt(*_: Any, **__: Any) -> None:
    """Does what Ctrl-C does."""
    raise KeyboardInterrupt


def interrupted(fed: Any, after: int, rounds: int, callbacks: Any = (), **options):
    """Trains until Ctrl-C at the end of a round; returns the model."""
    with pytest.raises(KeyboardInterrupt):
        fit(fed, rounds, [*callbacks, at_end(interrupt, after)], **options)
    return fed


@contextlib.contextmanager
def around(
    owner: Any,
    name: str,
    before: Callable[..., Any] | None = None,
    after: Callable[[Any], Any] | None = None,
) -> Iterator[None]:
    """Calls functions before (of the arguments) and after (of the result) each call."""
    original = getattr(owner, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments, **options)
        result = original(*arguments, **options)
        if after is not None:
            after(result)
        return result

    with mock.patch.object(owner, name, wrapped):
        yield


def ctrl_c(*_: Any, **__: Any) -> None:
    """Presses Ctrl-C: a signal, where `interrupt` is what Python makes of it."""
    signal.raise_signal(signal.SIGINT)


def stop(fed: tfdp_fl.DPFederatedModel, round_index: int = 0):
    """Returns a callback that stops a training after a round."""
    return at_end(lambda: setattr(fed, "stop_training", True), round_index)


def streamed(data: Any):
    """Returns clients that are read when they train."""
    return tfdp_fl.FederatedDataset.from_client_fn(
        data.client_ids, data.client, data.element_spec
    )


@contextlib.contextmanager
def same_draws_when_resumed() -> Iterator[None]:
    """Has resumed runs draw what an uninterrupted one draws: all else goes on."""

    def restored(run: Any) -> None:
        run.attempts._num_taken, run.attempts._entropy = run.rounds, ()

    with around(checkpoint.InterruptedRun, "restore", after=restored):
        yield


@contextlib.contextmanager
def full_disk(limit: int = 0) -> Iterator[None]:
    """Has every write beyond `limit` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


class _Loan:
    """A model of `federated`, the test that has it, and what it began with."""

    def __init__(self, fed: tfdp_fl.DPFederatedModel, test: str):
        self.fed, self.test = fed, test
        self.compiled = fed.require_compiled("the loan")
        self._rate = self.compiled.learning_rate
        self._values = [variable.numpy() for variable in fed.model.variables]

    def renewed(self, test: str) -> tfdp_fl.DPFederatedModel:
        """Returns a wrapper of the model, as new but for its programs."""
        before, model = self.fed, self.fed.model
        optimizer = self.compiled.server_optimizer
        for variable, value in zip(model.variables, self._values, strict=True):
            variable.assign(value)
        if before.engine is not None and optimizer is not None:
            new = type(optimizer).from_config(optimizer.get_config())
            state = keras_versions.build_optimizer(new, model.trainable_variables)
            for own, value in zip(before.engine.server.state, state, strict=True):
                own.assign(value)
        model.reset_metrics()
        model.history, model.stop_training = None, False
        federated_training.showed_client_metrics.discard(model)
        self.compiled.set_learning_rate(self._rate)
        self.fed = fed = before.with_setup(mechanism=before.setup.mechanism)
        fed._setup, fed._engine, self.test = before.setup, before.engine, test
        if before.engine is not None:
            before.engine.used_strategies.clear()
        federated_training.mark_owner(
            fed, keras_versions.tf_variables(model.variables), model
        )
        return fed


_loans: dict[str, list[_Loan]] = {}


def lent(make: Callable[[], Any]) -> Callable[[], tfdp_fl.DPFederatedModel]:
    """Returns a function that makes a model once, and then lends it as new.

    Whoever had it before must be done with it.
    """
    loan = _Loan(make(), "")
    return lambda: loan.renewed("")


def pooled(key: str, make: Callable[[], Any]) -> tfdp_fl.DPFederatedModel:
    """Returns a model of `make`, or as new one that an earlier test had of this key.

    To trace takes a second.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    for loan in _loans.get(key, ()):
        if loan.test != test and loan.fed._compiled is loan.compiled:
            return loan.renewed(test)
    fed = make()
    # Objects are told apart by their addresses, which others may have later.
    if test and " at 0x" not in key:
        _loans.setdefault(key, []).append(_Loan(fed, test))
    return fed


def said(trained: Any, *arguments: Any) -> str:
    """Returns a privacy statement in one line."""
    return " ".join(trained.privacy_statement(*arguments).split())


def federated(
    mechanism: tfdp_fl.Mechanism | None = None,
    model: Any = None,
    clients_per_round: Any = 20,
    sampling: str = "fixed_size",
    compile_options: dict[str, Any] | None = None,
    **options: Any,
) -> tfdp_fl.DPFederatedModel:
    """Returns a compiled model in one replica, without XLA: quick to trace.

    It is one that an earlier test was lent, if that is of the same arguments. `model`
    may be a function that makes one.
    """
    mechanism = mechanism or tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
    make, chosen = model or dense, compile_options or {}
    given = {"mechanism": mechanism, "clients_per_round": clients_per_round}
    given |= {"sampling": sampling, "max_parallel_clients": 1, **options}
    described = {
        name: (type(value), getattr(value, "get_config", lambda value=value: value)())
        for name, value in chosen.items()
    }
    name = getattr(make, "__qualname__", "<")  # As lambdas have, and what a test makes.
    name = " at 0x" if "<" in name else f"{make.__module__}.{name}"
    key = repr((name, given, described))

    def made() -> tfdp_fl.DPFederatedModel:
        fed = tfdp_fl.DPFederatedModel(
            make() if inspect.isfunction(make) else make, **given
        )
        usual = {"optimizer": tf.keras.optimizers.SGD(0.1), "loss": loss()}
        fed.compile(**{**usual, "jit_compile": False, **chosen})
        return fed

    return pooled(key, made)
