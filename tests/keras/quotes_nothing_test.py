"""No error, warning or line of output quotes anybody's examples."""

import contextlib
import io
import re
import traceback
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_SECRET = 271828


def _embedding() -> tf.keras.Model:
    layers = tf.keras.layers
    inputs, table = layers.Input((4,), dtype="int32"), toy.Table(10, 3)
    return tf.keras.Sequential([inputs, table, layers.Flatten(), layers.Dense(3)])


def _tokens(value: int):
    x = np.zeros((5, 4), np.int32)
    x[2, 1] = value
    return x, np.zeros(5, np.int64)


def _said(function) -> str:
    """Returns all that calling a function says, errors and warnings too."""
    said = io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        try:
            function()
        except Exception as error:
            said.write("".join(traceback.format_exception(error)))
    return said.getvalue() + "".join(str(each.message) for each in seen)


def _read(name):
    if name == "b":
        raise ValueError(f"cannot make a number of {_SECRET}")
    return toy.arrays(5)


def _streamed(*names):
    return FederatedDataset.from_client_fn(names, _read)


_X = np.ones((1, 8), np.float32)


@pytest.mark.parametrize(
    "clients, message",
    [
        # What reading raised.
        (_streamed("a", "b"), "Client 'b': ValueError"),
        (_streamed("b"), "ValueError"),
        # Data that does not fit.
        (np.full(3, _SECRET), "Error"),
        ({"a": np.full(3, _SECRET)}, "Error"),
        ([[_SECRET], [_SECRET]], "Error"),
        ({"a": (_X, [_SECRET])}, "Error"),
        ({"a": (_X, [str(_SECRET)])}, "Error"),
        ({"a": (np.array([{}, _SECRET], object), [0, 1])}, "Error"),
        ({"a": ([[_SECRET, 1], [str(_SECRET)]], [0, 1])}, "Error"),
        ({"a": ([[_SECRET], _SECRET], [0, 1])}, "Error"),
        ({"a": (*toy.arrays(1), [str(_SECRET)])}, "Error"),
        ({"a": (np.full((3, 8), _SECRET), [_SECRET])}, "Error"),
        ({"a": (np.full((3, 7), float(_SECRET)), [0, 1, 2])}, "Error"),
        ({"a": ({"w": _X}, [1]), "b": ({f"w{_SECRET}": _X}, [1])}, "got others"),
        ({"b": ({f"w{_SECRET}": _X}, [1])}, "got others"),
        # A number that no embedding has, with all clients and with one.
        (dict.fromkeys("ab", _tokens(_SECRET)), "2 clients.* in .*Gather"),
        ({"a": _tokens(1), "b": _tokens(_SECRET)}, "1 client.* Client 'b': .*Error"),
    ],
)
def test_a_fit_quotes_nothing(clients, message):
    model = _embedding if "client" in message else toy.dense
    fed = toy.federated(tfdp_fl.NoPrivacy(), model, clients_per_round=2)
    said = _said(lambda: fed.fit(clients, verbose=1))
    assert re.search(message, said)
    assert str(_SECRET) not in said


@pytest.mark.parametrize("arrays", ["x", "y", "sample_weight"])
def test_a_number_that_is_too_large_is_no_warning_and_ends_no_round(arrays):
    clients = {}
    for name, largest in (("a", 1.0), ("b", 1e300)):
        given = dict.fromkeys(("x", "y", "sample_weight"), np.ones((5, 1)))
        given[arrays] = np.full((5, 1), largest)
        clients[name] = tuple(given.values())
    said = []
    for streams in (False, True):
        fed = tfdp_fl.DPFederatedModel(
            tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)]),
            tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0),
            clients_per_round=2,
            sampling="fixed_size",
        )
        fed.compile("sgd", "mse")
        data = clients
        if streams:
            data = FederatedDataset.from_client_fn(list(clients), clients.get)
        with np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            said.append(_said(lambda fed=fed, data=data: fed.fit(data, verbose=0)))
        assert fed.rounds == 1
    assert not "".join(said)


def _as_many(x):
    """Takes as much memory as an example says."""
    numbers = tf.range(tf.cast(tf.reduce_max(x), tf.int64))
    return x + 1e-30 * tf.cast(tf.reduce_sum(numbers), x.dtype)


def _in_its_place(x):
    """Puts a number where an example says, beside the tensor."""
    place = tf.cast(tf.reduce_max(x) / 1e3, tf.int64)
    numbers = tf.sparse.SparseTensor([[place, 0]], [1.0], [1, 2])
    return x + tf.reduce_sum(tf.sparse.to_dense(numbers))


class _Number(tf.keras.layers.Layer):
    def call(self, text):
        return tf.strings.to_number(tf.strings.join(["0", text]))

    def compute_output_spec(self, text):
        return tf.keras.KerasTensor(text.shape, "float32")


def test_a_text_that_looks_like_an_operation_is_not_quoted():
    def model():
        given = tf.keras.Input([2], dtype="string")
        return tf.keras.Model(given, tf.keras.layers.Dense(1)(_Number()(given)))

    fine, y = np.array([["1", "2"]] * 3), np.ones([3, 1], "f")
    for text in (f"node {_SECRET}", f"[[{{{{node {_SECRET}}}}}]]"):
        clients = {"a": (fine, y), "b": (np.array([["1", text]] * 3), y)}
        fed = toy.federated(tfdp_fl.NoPrivacy(), model, clients_per_round=2)
        fed.compile("sgd", "mse")
        said = _said(lambda fed=fed, clients=clients: fed.fit(clients, verbose=1))
        assert re.search("1 client.* Client 'b': InvalidArgument", said)
        assert str(_SECRET) not in said


def test_a_text_that_is_not_utf_8_fails_its_own_client():
    fine, y = np.array([[b"1", b"2"]] * 3, object), np.ones([3, 1], "f")
    given = tf.keras.Input([2], dtype="string")
    model = tf.keras.Model(given, tf.keras.layers.Dense(1)(_Number()(given)))
    bad = np.array([[b"1", b"\xff%d" % _SECRET]] * 3, object)
    clients, found = {"a": (fine, y), "b": (bad, y)}, {}
    fed = toy.federated(tfdp_fl.NoPrivacy(), lambda: model, clients_per_round=2)
    fed.compile("sgd", "mse")
    said = _said(lambda: fed.fit(clients, verbose=1))
    said += _said(lambda: found.update(fed.evaluate_clients(clients)))
    assert re.search("1 client.* Client 'b': UnicodeDecodeError", said)
    assert str(_SECRET) not in said
    assert np.isnan(found["loss"]).tolist() == [False, True]


def test_a_text_before_an_embedding_fails_its_own_client():
    given = tf.keras.Input([2], dtype="string")
    looked_up = tf.keras.layers.Embedding(9, 2)(_Number()(given))
    out = tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(looked_up))
    model, y = tf.keras.Model(given, out), np.ones([3, 1], "f")
    clients = {
        name: (np.array([["1", text]] * 3), y)
        for name, text in {"a": "2", "b": f"{_SECRET} of nobody"}.items()
    }
    fed = toy.federated(tfdp_fl.NoPrivacy(), lambda: model, clients_per_round=2)
    fed.compile("sgd", "mse")
    said = _said(lambda: fed.fit(clients, verbose=1))
    assert re.search("1 client.* Client 'b': InvalidArgument", said)
    assert str(_SECRET) not in said


@pytest.mark.parametrize("layer", [_as_many, _in_its_place])
def test_what_one_example_makes_tensorflow_raise_ends_and_quotes_nothing(layer):
    big = np.full((1, 8), _SECRET * 1e9, np.float32)
    clients = {"a": toy.arrays(5), "b": (big, np.array([1], np.int32))}
    model = toy.dense(lambda: tf.keras.layers.Lambda(layer))
    fed = toy.federated(tfdp_fl.NoPrivacy(), model, clients_per_round=2)
    found = {}
    said = _said(lambda: fed.fit(clients, verbose=1))
    said += _said(lambda: found.update(fed.evaluate_clients(clients)))
    error = "ResourceExhausted" if layer is _as_many else "InvalidArgument"
    assert re.search(f"1 client.* Client 'b': {error}", said)
    assert str(_SECRET) not in said
    assert np.isnan(found["loss"]).tolist() == [False, True]


@pytest.mark.parametrize(
    "make",
    [
        FederatedDataset.from_client_arrays,
        FederatedDataset.from_tf_datasets,
        FederatedDataset.from_client_data,
        lambda data: FederatedDataset.from_dataframe(data, "who"),
        lambda data: tfdp_fl.DPFederatedModel(data, data, 3),
        lambda data: toy.federated().fit(toy.clients(), audit=data),
        lambda data: toy.federated().fit(toy.clients(), validation_data=data),
    ],
)
def test_arguments_that_are_data_are_not_quoted(make):
    said = _said(lambda: make(np.full(3, _SECRET)))
    assert "Error" in said
    assert str(_SECRET) not in said
