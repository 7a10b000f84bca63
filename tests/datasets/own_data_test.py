"""What one client holds changes nothing for the others, however clients are given."""

import re
import types

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import keras_versions
from tfdp_fl.datasets import ClientFailure, FederatedDataset, as_federated, nests
from tfdp_fl.keras import example_spec

# TFF's functional models take no weights, and few losses.
_KERAS_3 = pytest.mark.skipif(not keras_versions.IS_KERAS_3, reason="needs Keras 3")
_TEXT = np.array(["1"] * 4)
_SPEC = (tf.TensorSpec([8]), tf.TensorSpec([], tf.int64))


def _whole(k, n=4):
    x, y = toy.arrays(n, seed=k)
    return x, y.astype(np.int64)


# What the odd client has, and whether it can be cast.
_ODD = {
    "int32": (True, lambda x, y: (x, y.astype(np.int32))),
    "uint8": (True, lambda x, y: (x, y.astype(np.uint8))),
    "float64": (True, lambda x, y: (x.astype(np.float64), y.astype(np.float64))),
    "float16": (True, lambda x, y: (x.astype(np.float16), y)),
    "whole": (True, lambda x, y: (x.astype(np.int16), y > 0)),
    "big endian": (True, lambda x, y: (x.astype(">f4"), y.astype(">i8"))),
    "many": (True, lambda x, y: (np.tile(x, [9, 1]), np.tile(y, 9))),
    "none": (True, lambda x, y: (x[:0], y[:0])),
    "none of others": (True, lambda x, y: (x[:0, :3], y[:0].astype(str))),
    "fractions": (False, lambda x, y: (x, y + 0.5)),
    "nan": (False, lambda x, y: (x, np.full(len(y), np.nan))),
    "too large": (False, lambda x, y: (x, np.full(len(y), 2**63, np.uint64))),
    "features": (False, lambda x, y: (x[:, :7], y)),
    "rank": (False, lambda x, y: (x[:, None], y)),
    "labels": (False, lambda x, y: (x, np.eye(3)[y])),
    "text": (False, lambda x, y: (x, _TEXT)),
    "a dict": (False, lambda x, y: ({"other": x}, y)),
    "nested": (False, lambda x, y: ({"a": {"b": x}}, y)),
    "a tuple": (False, lambda x, y: ((x, x), y)),
}


def _slices(client):
    return tf.data.Dataset.from_tensor_slices(client)


def _client_data(clients):
    def create(name):
        return _slices(clients[name])

    made = {"client_ids": list(clients), "create_tf_dataset_for_client": create}
    return as_federated(types.SimpleNamespace(**made))


def _sliced(make, spec=None):
    return lambda clients: make({k: _slices(c) for k, c in clients.items()}, spec)


_WAYS = {
    "arrays": FederatedDataset.from_client_arrays,
    "arrays of a spec": lambda c: FederatedDataset.from_client_arrays(c, _SPEC),
    "fn": lambda c: FederatedDataset.from_client_fn(list(c), c.get),
    "fn of a spec": lambda c: FederatedDataset.from_client_fn(list(c), c.get, _SPEC),
    "in memory": lambda c: FederatedDataset.from_client_fn([*c], c.get).in_memory(),
    "mapping": as_federated,
    "list": lambda c: as_federated(list(c.values())),
    "tf.data": _sliced(FederatedDataset.from_tf_datasets),
    "tf.data of a spec": _sliced(FederatedDataset.from_tf_datasets, _SPEC),
    "batches": lambda c: FederatedDataset.from_tf_datasets(
        {k: _slices(each).batch(3) for k, each in c.items()}
    ),
    "client data": _client_data,
    "taken": lambda c: as_federated(c).take(range(len(c))),
    "mapped": lambda c: as_federated(c).map(lambda x, y: (x, y)),
    "mapped fn": lambda c: FederatedDataset.from_client_fn([*c], c.get).map(
        lambda x, y: (x, y)
    ),
    "with ids": lambda c: as_federated(c).with_ids([f"id {k}" for k in c]),
}


def _conformed(dataset, model=toy.dense):
    fed = toy.federated(model=model)
    return example_spec.conform(fed.model, fed.require_compiled("a test"), dataset)


@pytest.mark.parametrize("way", _WAYS)
def test_one_clients_data_changes_no_other(way):
    clients = {k: _whole(k) for k in range(3)}
    alone = _conformed(_WAYS[way](clients))
    wanted = list(alone.read_clients(None))
    for name, (fits, change) in _ODD.items():
        for place in 0, 2, 3:
            more = list(clients.values())
            more.insert(place, change(*_whole(9)))
            dataset = _conformed(_WAYS[way](dict(enumerate(more))))
            assert dataset.element_spec == alone.element_spec
            read = list(dataset.read_clients(None))
            odd = read.pop(place)
            assert isinstance(odd, ClientFailure) != fits, name
            for one, other in zip(read, wanted, strict=True):
                got, want = (tf.nest.flatten((c.x, c.y)) for c in (one, other))
                for array, expected in zip(got, want, strict=True):
                    assert array.dtype == expected.dtype
                    np.testing.assert_array_equal(array, expected)
            if dataset.is_indexed:
                failures = dataset.failures(np.arange(4))
                assert [each.position for each in failures] == [place] * (not fits)
                assert dataset.client_rows([place])[1].tolist() == [
                    0 if not fits or name.startswith("none") else len(more[place][1])
                ]
    # Alone it is refused, where it is in memory, or fails.
    for change in _ODD["features"][1], _ODD["labels"][1]:
        dataset = _WAYS[way]({0: change(*_whole(9))})
        fed = toy.federated()
        training = fed.require_compiled("a test")
        if dataset.is_streamed:
            dataset = example_spec.conform_all(fed.model, training, dataset)
            (read,) = dataset.read_clients(None)
            assert isinstance(read, ClientFailure)
            continue
        with pytest.raises(ValueError, match=r"clients.*(client '?(id )?0|labels)"):
            example_spec.conform_all(fed.model, training, dataset)


@pytest.mark.parametrize("way", ["arrays", "fn", "tf.data"])
def test_a_client_that_fails_moves_as_much_as_one_that_has_nothing(way):
    clients = {k: _whole(k) for k in range(4)}
    found = []
    for name in "none", "features", "int32", "fractions":
        more = {9: _ODD[name][1](*_whole(9)), **clients}
        fed = toy.federated(clients_per_round=5)
        history = toy.fit(fed, 2, data=_WAYS[way](more), seed=3).history
        assert history["failed_clients"] == [float(not _ODD[name][0])] * 2
        found.append(toy.flat(fed))
    for place in 1, 3:
        np.testing.assert_array_equal(found[0], found[place])
    assert (found[0] != found[2]).any()


@_KERAS_3
def test_weights_of_some_clients():
    x, y = _whole(0)
    weight = np.array([1, 2, 0, 1], np.float64)
    for make in _WAYS["arrays"], _WAYS["fn"], _WAYS["list"]:
        mixed = _conformed(make({0: (x, y), 1: (x, y, weight), 2: (x, y)}))
        read = [client.y.sample_weight.tolist() for client in mixed.read_clients(None)]
        assert read == [[1] * 4, weight.tolist(), [1] * 4]
    for make in _WAYS["arrays of a spec"], _WAYS["fn of a spec"]:
        declared = make({0: (x, y), 1: (x, y, weight)})
        whole, failed = declared.read_clients(None)
        assert not isinstance(whole.y, nests.Weighted)
        assert "sample_weight must be declared" in failed.reason


def _of_two():
    inputs = {name: tf.keras.Input([2], name=name) for name in ("a", "b")}
    both = tf.keras.layers.Concatenate()([inputs["b"], inputs["a"]])
    return tf.keras.Model(inputs, tf.keras.layers.Dense(3)(both))


def _in_order():
    # (Not that of their names.)
    b, a = (tf.keras.Input([2], name=name) for name in ("b", "a"))
    both = tf.keras.layers.Concatenate()([b, a])
    return tf.keras.Model([b, a], tf.keras.layers.Dense(3)(both))


@pytest.mark.parametrize("model", [_of_two, _in_order])
def test_inputs_go_by_their_names_and_a_missing_one_fails_alone(model):
    a, b, y = np.eye(2), 2 * np.eye(2, dtype=int), np.arange(2)
    clients = [
        ({"b": b, "a": a}, y),
        ({"a": a}, y),
        ([b, a] if model is _in_order else [a, b], y),
        ({"a": a, "b": {"c": b}}, y),
        ({"a": a, "b": b}, y[:, None]),
    ]
    for make in FederatedDataset.from_client_arrays, _WAYS["fn"]:
        dataset = _conformed(make(dict(enumerate(clients))), model)
        read = list(dataset.read_clients(None))
        failed = [isinstance(client, ClientFailure) for client in read]
        assert failed == [False, True, False, True, False]
        order = -1 if model is _in_order else 1
        for client in (each for each in read if not isinstance(each, ClientFailure)):
            first, second = tf.nest.flatten(client.x)[::order]
            np.testing.assert_array_equal(first, a.astype(np.float32))
            np.testing.assert_array_equal(second, b.astype(np.float32))
            np.testing.assert_array_equal(nests.labels_of(client.y), y)


class _Own(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.table = tf.keras.layers.Embedding(5, 3)

    def call(self, x):
        return tf.reduce_mean(self.table(x), axis=1)


def _built():
    model = _Own()
    model(np.zeros([1, 4], int))
    return model


def _sequences():
    layers = [tf.keras.Input([None]), tf.keras.layers.Embedding(5, 3)]
    return tf.keras.Sequential([*layers, tf.keras.layers.GlobalAveragePooling1D()])


def _own_loss(y, predicted):
    return tf.reduce_mean(tf.square(y - predicted), axis=-1)


@_KERAS_3
def test_what_the_model_does_not_tell_must_be_declared():
    x, y = np.zeros([2, 4], int), np.arange(2)
    assert _conformed(as_federated({0: (x, y)}), _built).element_spec[0].shape == [4]
    balanced = {"loss": tfdp_fl.losses.BalancedSoftmaxCrossentropy()}
    fed = toy.federated(compile_options=balanced)
    training = fed.require_compiled("a test")
    dataset = example_spec.conform(fed.model, training, as_federated({0: _whole(0)}))
    assert nests.labels_of(dataset.element_spec[1]) == _SPEC[1]
    number, vector = tf.TensorSpec([], tf.int64), tf.TensorSpec([3])
    tokens = tf.TensorSpec([4], tf.int64)
    for model, loss, message, label in (
        (_sequences, None, "the model does not specify the sizes", number),
        (_built, _own_loss, "the loss does not specify", vector),
    ):
        compiled = {} if loss is None else {"loss": loss}
        fed = toy.federated(model=model, compile_options=compiled, clients_per_round=2)
        labels = y if label is number else np.eye(3)[y]
        clients = dict.fromkeys(range(2), (x, labels))
        with pytest.raises(ValueError, match=f"clients must have an ele.*{message}"):
            toy.fit(fed, data=clients)
        assert fed.run is None
        declared = as_federated(clients, element_spec=(tokens, label))
        assert toy.fit(fed, data=declared).history["failed_clients"] == [0.0]


def _tokens(number=2):
    embedding = tf.keras.layers.Embedding(5, 3, name="words")
    inputs = tf.keras.Input([number], dtype="int32")
    one = tf.keras.layers.Flatten()(embedding(inputs[:, 1:]))
    return tf.keras.Model(inputs, tf.keras.layers.Dense(3)(one))


@_KERAS_3
def test_an_index_that_no_embedding_has_is_refused_or_ends_its_client_alone():
    said = "features must be indexes from 0 to 4 for the embedding 'words'.*column 0"
    wrong, right, y = np.array([[7, 2], [9, 5]]), np.array([[7, -1], [0, 4]]), [0, 1]
    clients = {"a": (right, y), "b": (wrong, y), "c": (right[:0], y[:0])}
    fed = toy.federated(model=_tokens, clients_per_round=3)
    table = FederatedDataset.from_indices(
        np.concatenate([wrong, right]), np.tile(y, 2), {"a": [2, 3], "b": [3, 0, 1]}
    )
    for data in clients, table:
        with pytest.raises(ValueError, match=f"clients: {said}.*for client 'b'"):
            toy.fit(fed, data=data)
        assert fed.run is None
    streamed = FederatedDataset.from_client_fn([*clients], clients.get)
    history = toy.fit(fed, data=streamed).history
    assert history["failed_clients"] == [1.0]
    training = fed.require_compiled("a test")
    read = example_spec.conform_all(fed.model, training, streamed).read_clients(None)
    assert re.search(said, [*read][1].reason)
    alone = example_spec.conform_all(fed.model, training, table.take([0]))
    assert alone.num_clients == 1  # Nobody has such a row.


def _knows_nan(y, predicted):
    y = tf.reshape(y, [-1, 1])
    return (
        tf.where(
            tf.math.is_nan(y), 0.0, tf.where(tf.math.is_nan(y), 0.0, y) - predicted
        )
        ** 2
    )


@_KERAS_3
@pytest.mark.parametrize("loss", ["mse", _knows_nan])
def test_a_label_may_be_nan_however_clients_are_given(loss):
    x, _ = toy.arrays(8)
    y = np.arange(8, dtype=np.float32)
    y[3] = np.nan
    pd = pytest.importorskip("pandas")
    clients, ids = {"a": (x[:4], y[:4]), "b": (x[4:], y[4:])}, [*"aaaabbbb"]
    given = [(clients, {})]
    for labels in y, pd.Series(y):
        given.append((None, {"x": x, "y": labels, "client_ids": ids}))
    weights = []
    for data, options in given:
        toy.seed(1)
        model = tf.keras.Sequential([tf.keras.Input([8]), tf.keras.layers.Dense(1)])
        fed = tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), 2, "fixed_size")
        fed.compile("sgd", loss)
        spec = (tf.TensorSpec([8]), tf.TensorSpec([]))
        data = None if data is None else as_federated(data, element_spec=spec)
        with pytest.warns(RuntimeWarning, match="labels are NaN.*ignore_class=-1"):
            history = fed.fit(data, batch_size=2, verbose=0, **options).history
        assert history["discarded_clients"] == [float(loss == "mse")]
        weights.append(np.concatenate([w.ravel() for w in fed.get_weights()]))
    np.testing.assert_array_equal(weights[0], weights[1])
    np.testing.assert_array_equal(weights[0], weights[2])
    with pytest.raises(ValueError, match="x must have only finite"):
        fed.fit(np.where(x == x[0, 0], np.nan, x), y, client_ids=ids)


def test_batches_of_a_fixed_size_are_not_taken_for_examples(capsys):
    x, y = _whole(0)
    batches = _slices((x, y)).batch(2, drop_remainder=True)
    fed = toy.federated()
    fed.fit([batches] * 20, verbose=2)
    assert "drop_remainder=True), each batch looks like one" in capsys.readouterr().out


@pytest.mark.parametrize("more_kinds", [0, 1, 2])
def test_a_function_that_raises_for_one_client_fails_that_one(more_kinds):
    def one_hot(x, y):
        return x, np.eye(3, dtype=np.float32)[y]

    clients = [_whole(k) for k in range(5)]
    for kind in range(more_kinds):
        x, y = _whole(7 + kind)
        clients.append((x, y.astype([np.int32, np.uint8][kind])))
    clients.append((_whole(9)[0][:0], _whole(9)[1][:0]))
    bad = (clients[1][0], np.full_like(clients[1][1], 7))
    mapped = as_federated([*clients, bad]).map(one_hot)
    assert [each.position for each in mapped.failures(np.arange(len(clients) + 1))] == [
        len(clients)
    ]
    *others, failed = mapped.map(lambda x, y: (x + 1, y)).read_clients(None)
    assert isinstance(failed, ClientFailure)
    for read, (x, y) in zip(others, clients, strict=True):
        np.testing.assert_array_equal(read.x, x + 1)
        np.testing.assert_array_equal(read.y, np.eye(3)[y])
    # Who returns another number of examples fails alone, too.
    short = as_federated(clients).map(lambda x, y: (x[:4], y[:4]))
    assert not short.failures(np.arange(len(clients)))
    x, y = _whole(9, n=5)
    short = as_federated([*clients, (x, y)]).map(lambda x, y: (x[:4], y[:4]))
    assert [each.position for each in short.failures(np.arange(len(clients) + 1))] == [
        len(clients)
    ]
    with pytest.raises(ZeroDivisionError):
        as_federated(clients).map(lambda x, y: (x, 1 // 0))


@pytest.mark.parametrize("kind", ["dict", "declared", "table"])
def test_a_function_computes_alike_whoever_else_is_there(kind):
    # TensorFlow computes the last elements of a tensor in another way. It was called
    # with the whole table, and one client more changed others' features.
    def mapped(count):
        clients = {k: _whole(k, n=7 if k else 5) for k in range(count)}
        if kind == "table":
            x, y = (
                np.concatenate(part) for part in zip(*clients.values(), strict=True)
            )
            rows = np.arange(len(y))
            ends = np.cumsum([len(y) for _, y in clients.values()])
            made = FederatedDataset.from_indices(x, y, np.split(rows, ends[:-1]))
        else:
            made = as_federated(
                clients, element_spec=_SPEC if kind == "declared" else None
            )
        return made.map(lambda x, y: (tf.exp(x).numpy(), y)).read_clients(None)

    for count in (1, 2, 3, 5):
        for one, other in zip(mapped(count), mapped(count + 1), strict=False):
            np.testing.assert_array_equal(one.x, other.x)


@_KERAS_3
def test_a_fraction_of_one_person_rounds_no_others_ids():
    x = np.array([2**24 + 1, 2**24 + 3, 5.5])
    tables = {
        "frame": lambda x: FederatedDataset.from_dataframe(
            pd.DataFrame({"who": [0, 1, 2], "x": x, "y": 1.0}), "who", "x", "y"
        ),
        "rows": lambda x: FederatedDataset.from_indices(x, x, [[0], [1], [2]]),
    }
    inputs = tf.keras.Input((1,), dtype="int64")
    model = tf.keras.Model(inputs, tf.keras.layers.Embedding(9, 1)(inputs))
    for make in tables.values():
        with pytest.raises(ValueError, match="integers where the model takes integers"):
            _conformed(make(x), model)
        _conformed(make(x.astype(np.int64)), model)


@_KERAS_3
@pytest.mark.parametrize("as_dict", [True, False])
def test_a_column_of_integers_does_not_stand_in_for_another(as_dict):
    item = tf.keras.Input((), dtype="int64", name="item")
    age = tf.keras.Input((), name="age")
    embedded = tf.keras.layers.Embedding(9, 1)(item)
    outputs = tf.keras.layers.Concatenate()([embedded, age[:, None]])
    inputs = {"item": item, "age": age} if as_dict else [item, age]
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(outputs))

    def clients(items):
        frame = {"who": [0, 1], "item": items, "age": [20, 30], "y": 1.0}
        features = {"item": "item", "age": "age"}
        return FederatedDataset.from_dataframe(
            pd.DataFrame(frame), "who", features, "y"
        )

    with pytest.raises(ValueError, match="integers where the model takes integers"):
        _conformed(clients([2**24 + 1, 5.5]), model)
    _conformed(clients([2**24 + 1, 5]), model)
