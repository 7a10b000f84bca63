import concurrent.futures
import pickle
import signal
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdp_fl.datasets import (
    ClientExamples,
    ClientFailure,
    FederatedDataset,
    as_federated,
)

_TWO = np.ones(2)
_SPEC = (tf.TensorSpec([3]), tf.TensorSpec([], tf.int64))
_slices = tf.data.Dataset.from_tensor_slices
_from_arrays = FederatedDataset.from_client_arrays
_from_fn = FederatedDataset.from_client_fn


def _examples(n: int, offset: float = 0.0):
    x = offset + np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    return x, np.arange(n, dtype=np.int64)


_UNEVEN = {"few": _examples(2), "none": _examples(0), "many": _examples(5, 100.0)}


def _streamed() -> FederatedDataset:
    return _from_fn(list(_UNEVEN), _UNEVEN.__getitem__)


def _indexed() -> FederatedDataset:
    x, y = map(np.concatenate, zip(*_UNEVEN.values(), strict=True))
    rows = {"few": [0, 1], "none": [], "many": [2, 3, 4, 5, 6]}
    return FederatedDataset.from_indices(x, y, rows)


def _of_tf_data(change):
    return FederatedDataset.from_tf_datasets(
        {client_id: change(_slices(each)) for client_id, each in _UNEVEN.items()}
    )


def _client_data(client_ids=("w1", "w2"), names=("pixels", "label")):
    """Returns what a `tff.simulation.datasets.ClientData` looks like from outside."""

    def create(client_id):
        n, (x, y) = {"w1": 3, "w2": 1}.get(client_id, 2), names
        return _slices({y: np.arange(n), x: np.ones((n, 2, 2), np.float32)})

    made = {"client_ids": client_ids, "create_tf_dataset_for_client": create}
    return types.SimpleNamespace(**made)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _from_arrays(_UNEVEN),
        _indexed,
        _streamed,
        lambda: _streamed().in_memory(),
        lambda: as_federated(_UNEVEN),
        lambda: pickle.loads(pickle.dumps(_from_arrays(_UNEVEN))),
        lambda: _of_tf_data(lambda examples: examples),
        lambda: _of_tf_data(lambda examples: examples.batch(2)),
        lambda: _of_tf_data(lambda each: each.map(lambda x, y: {"x": x, "y": y})),
    ],
)
def test_clients_keep_their_ids_sizes_and_examples(make):
    dataset = make()
    assert dataset.num_clients == 3
    assert list(dataset.client_ids) == list(_UNEVEN)
    assert dataset.element_spec == _SPEC
    assert dataset.client_sizes().tolist() == [2, 0, 5]
    assert dataset.client_sizes([2, 0]).tolist() == [5, 2]
    for client_id, examples in _UNEVEN.items():
        for array, expected in zip(dataset.client(client_id), examples, strict=True):
            np.testing.assert_array_equal(array, expected)
    read = list(dataset.read_clients([2, 0]))
    assert [client.position for client in read] == [2, 0]
    np.testing.assert_array_equal(read[0].x, _UNEVEN["many"][0])
    np.testing.assert_array_equal(read[1].y, [0, 1])
    assert dataset.in_memory().is_indexed
    if dataset.is_indexed:
        assert dataset.in_memory() is dataset
        # The clients' rows, one after the other.
        rows, lengths = dataset.client_rows(np.array([2, 1, 0, 2]))
        assert (rows.dtype, lengths.dtype) == (np.int32, np.int64)
        assert lengths.tolist() == [5, 0, 2, 5]
        assert rows.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]
    else:
        with pytest.raises(ValueError, match="flat must be called on an ind"):
            dataset.flat()
        with pytest.raises(ValueError, match=r"in_memory\(\) makes it"):
            dataset.client_rows([0])


def test_nests_dtypes_and_later_changes_of_the_callers_arrays():
    def client(n):
        x = {"image": np.ones((n, 4, 4)), "words": [np.zeros((n, 2), int)]}
        return x, (np.ones(n, int), np.full((n, 1), 0.5))

    clients = {7: client(3), 8: client(1)}
    dataset = _from_arrays(clients)
    clients[7][0]["image"][:] = -1
    x, (label, score) = dataset.client(7)
    np.testing.assert_array_equal(x["image"], np.ones((3, 4, 4)))
    assert (x["words"][0].shape, label.shape) == ((3, 2), (3,))
    assert score.dtype == np.float32
    flat_x, flat_y = dataset.flat()
    assert flat_x["image"].shape == [4, 4, 4]
    assert isinstance(flat_y, tuple)
    # Only float64 changes its dtype.
    for dtype in ("float64", "float16", "uint8", "int64", "bool"):
        x = np.ones((4, 2), dtype)
        one = _from_arrays({0: (x, x), 1: ([], [])})
        held = "float32" if dtype == "float64" else dtype
        assert one.element_spec[0].dtype.name == held
        assert one.client(0)[1].dtype == held
        assert one.client(1)[0].shape == (0, 2)


@pytest.mark.parametrize(
    "indices, client_ids",
    [
        (np.array([[3, 1], [1, 9]], np.int32), [0, 1]),
        ({"a": np.array([3, 1]), "b": [1, 9]}, ["a", "b"]),
    ],
)
def test_a_client_is_its_rows_in_its_order(indices, client_ids):
    arrays = _examples(10)
    x, y = map(tf.constant, arrays)
    dataset = FederatedDataset.from_indices(x, y, indices)
    assert list(dataset.client_ids) == client_ids
    # Tensors are not copied; arrays, which may change, are.
    assert dataset.flat()[0] is x
    assert dataset.flat()[1] is y
    copied = FederatedDataset.from_indices(*arrays, indices)
    arrays[0][:] = -1
    for each in (dataset, copied):
        first, second = map(each.client, client_ids)
        np.testing.assert_array_equal(first[0], x.numpy()[[3, 1]])
        np.testing.assert_array_equal(second[1], [1, 9])


_Y = np.array([1, 2])
_RAGGED = tf.ragged.constant([[1, 2, 3], [4]])
_OBJECTS = np.array([np.ones(3), np.ones(1)], object)
_PADDED = tf.data.Dataset.from_generator(
    lambda: iter([]), output_signature=(tf.TensorSpec([None]), tf.TensorSpec([]))
).padded_batch(2)
_SPARSE = tf.sparse.from_dense([[1], [2]])


def _of_rows(indices, ids=None):
    dataset = FederatedDataset.from_indices(*_examples(10), indices)
    return dataset if ids is None else dataset.with_ids(ids)


def _of_slices(*clients):
    clients = [_slices(each) if isinstance(each, tuple) else each for each in clients]
    return FederatedDataset.from_tf_datasets(dict(zip("ab", clients, strict=False)))


def _from_slices(clients):
    return _of_slices(*clients.values())


_map = _from_arrays(_UNEVEN).map
_REFUSED = [
    (_from_arrays, [{}], "clients must have at least one client"),
    (_from_arrays, [{"a": ({"u": np.ones(3), "v": _TWO}, np.ones(3))}], "'a': .* 2 in"),
    (_from_arrays, [{"a": np.ones((2, 3))}], r"'a': .* must be \(x, y\) or"),
    (_from_arrays, [{"a": (_TWO, _TWO, np.ones(3))}], "3 in sample_weight"),
    (_from_arrays, [{"a": (_TWO, _TWO, np.array(["secret", "b"]))}], "'a': sample_we"),
    (_from_arrays, [{"a": (np.array([{}, {}]), _TWO)}], "'a': x must be made"),
    (_from_arrays, [{"a": (_SPARSE, _TWO)}], "'a': x .*dense"),
    # Of unequal length.
    *(
        (make, [{"a": (x, _TWO)}], f"'a': {said}.*keras.utils.pad_sequences")
        for make, x, said in (
            (_from_arrays, [[1, 2], ["secret"]], "x must be made of dense.* list"),
            (_from_arrays, [[], [1, 2]], "x must be made of dense.* list"),
            (_from_arrays, _OBJECTS, "x must be made of dense.* object"),
            (_from_arrays, _RAGGED, "x must be made of dense.* RaggedTensor"),
            (_from_slices, _RAGGED, r"element_spec .*RaggedTensorSpec"),
        )
    ),
    (_of_slices, [_PADDED], r"'a': element_spec .* all sizes known.*pad_sequences"),
    (_from_fn, [[1], len, (_SPEC[0], tf.TensorSpec([None]))], "element_spec .*ensure_"),
    *((_of_rows, [[[row]]], "indices must be from 0 to 9") for row in (10, -1)),
    *((_of_rows, [[row]], "indices must be integers") for row in ([0.0], [True] * 10)),
    (_of_rows, [[[1], np.arange(10) < 1]], "indices must be integers"),
    (_of_rows, [np.zeros((0, 3), int)], "indices must have at least one"),
    (_of_rows, [np.arange(3)], "indices must be one 1-D array per client"),
    (_of_rows, [[[0]], ["a", "b"]], "client_ids must have one id"),
    (_of_slices, [_TWO], "Client 'a': dataset must be a "),
    (_of_slices, [tf.data.Dataset.range(3)], r"'a': .* \(x, y\)"),
    (_of_slices, [_slices(_examples(4)).repeat()], "'a': .*must be finite"),
    (_of_slices, [(_SPARSE, _Y)], "Client 'a': element_spec must be"),
    (FederatedDataset.from_client_data, [_client_data()], "a client.s dataset must be"),
    (FederatedDataset.from_client_data, [{}], "client_data must be a tff"),
    (_map, [lambda x, y: (x[1:], y[1:])], "fn must return as many"),
    (_map, [lambda x, y: x], r"fn must return \(x, y\) or"),
    (_map, [None], "fn must be callable"),
    (_from_fn, [[], len], "client_ids must have"),
    (_from_fn, [[(1, float("nan")), (1, float("nan"))], len], r"missing value \(NaN"),
    (_from_fn, [[1], len, tf.TensorSpec([])], "element_spec must be"),
    (as_federated, [_examples(3)], "client_ids=ids"),
    (as_federated, [type("DataFrame", (), {})()], "from_dataframe"),
    (as_federated, [{"a": _examples(3)[0]}], "got a ndarray"),
    (as_federated, [{"a": (*_examples(3), [1], [1])}], "'a': .*a tuple of 4"),
    (as_federated, [[_examples(3), _slices(_examples(3))]], "Client 1: "),
    (as_federated, [_from_arrays(_UNEVEN), _SPEC], "element_spec must be None"),
]


@pytest.mark.parametrize("make, arguments, message", _REFUSED)
def test_what_is_no_clients_examples(make, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        make(*arguments)
    assert "secret" not in str(caught.value)


def test_one_client_that_cannot_be_read_does_not_stop_the_others():
    clients = {"empty": ([], []), "good": _examples(2), "fine": _examples(2)}
    clients["odd"] = np.ones((2, 7)), np.ones(2, int)
    reads = []

    def read(client_id):
        reads.append(client_id)
        return clients[client_id]

    dataset = _from_fn(["bad", "empty", "good", "odd", "fine"], read, _SPEC)
    made = dataset.read_clients([0, 2, 3, 4])
    assert reads == []  # Only when it is asked for.
    read = [next(made)]
    assert reads == ["bad"]
    read += made
    assert [type(client) for client in read] == [ClientFailure, ClientExamples] * 2
    assert [client.position for client in read] == [0, 2, 3, 4]
    assert isinstance(read[0].error, KeyError)
    assert "x must be float32[3] for each example" in str(read[2].error)
    assert dataset.client("empty")[0].shape == (0, 3)
    dataset.client_ids.clear()
    assert dataset.num_clients == 5
    with pytest.raises(KeyError):
        dataset.client("bad")
    (left,) = _from_fn(["a"], sys.exit, _SPEC).read_clients([0])
    assert isinstance(left, ClientFailure)

    def interrupts(client_id):
        raise KeyboardInterrupt

    # Whichever thread reads, nobody pressed Ctrl-C.
    rude = _from_fn(["a"], interrupts, _SPEC)
    with concurrent.futures.ThreadPoolExecutor(1) as reading:
        coming = reading.submit(lambda: list(rude.read_clients([0])))
    assert coming.exception() is None
    for read in (coming.result(), rude.read_clients([0])):
        assert "a KeyboardInterrupt" in str(next(iter(read)).error)

    def is_slow(client_id):
        signal.raise_signal(signal.SIGINT)

    slow = _from_fn(["a"], is_slow, _SPEC)
    for each in (slow, slow.map(lambda x, y: (x, y))):
        with pytest.raises(KeyboardInterrupt):
            list(each.read_clients([0]))
    with pytest.raises(ValueError, match="element_spec must be given"):
        _ = dataset.take([0]).map(lambda x, y: (x, y)).element_spec


def test_a_buffer_that_serves_all_clients_gives_none_anothers_examples():
    buffer = np.zeros((1, 3), np.float32)

    def read(client_id):
        buffer[:] = client_id
        return buffer, np.zeros(1, int)

    held = _from_fn([1, 2], read).in_memory()
    assert [held.client(k)[0][0, 0] for k in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    "fits, given",
    [
        (True, lambda x, y: (x.astype(np.float64), y)),
        (True, lambda x, y: (x.astype(">f4"), y)),
        (True, lambda x, y: (x.tolist(), y)),
        (True, lambda x, y: (tf.constant(x), y)),
        (True, lambda x, y: (np.ma.masked_array(x), y)),
        (True, lambda x, y: (x, y, None)),
        (False, lambda x, y: (x, y[1:])),
        (False, lambda x, y: (x[:, :2], y)),
        (False, lambda x, y: (x[..., None], y)),
        (True, lambda x, y: (x, y.astype(np.uint8))),
        (True, lambda x, y: (x.astype(int), y.astype(float))),
        (False, lambda x, y: (x, y + 0.5)),
        (False, lambda x, y: (x, np.full(4, 2**63, np.uint64))),
        (False, lambda x, y: (x, y.astype(str))),
        (False, lambda x, y: ({"x": x}, y)),
        (False, lambda x, y: (x, y, y)),
        (False, lambda x, y: [x, y]),
        (False, lambda x, y: (x,)),
        (False, lambda x, y: (x[0, 0], y[0])),
    ],
)
def test_examples_are_the_same_however_they_come_or_are_not_of_the_spec(fits, given):
    dataset = _from_fn(["a"], lambda _: given(*_examples(4)), _SPEC)
    (client,) = dataset.read_clients(np.array([0]))
    assert isinstance(client, ClientFailure) != fits
    read = zip((client.x, client.y), _examples(4), strict=True) if fits else ()
    for array, expected in read:
        assert type(array) is np.ndarray
        assert array.dtype.newbyteorder("=") == expected.dtype
        np.testing.assert_array_equal(array, expected)


def test_subsets_keep_ids_and_positions_out_of_range_are_no_client():
    rows = np.arange(100)[:, None] % 10
    hundred = _of_rows(rows)
    taken = hundred.take([7, 3]).take([1])
    assert list(taken.client_ids) == [3]
    assert taken.client(3)[1].tolist() == [3]
    for dataset, unknown in ((taken, 7), (hundred, 100), (hundred, "a")):
        with pytest.raises(KeyError):
            dataset.client(unknown)
    for positions, message in (([1, 1], "distinct"), ([], "at least")):
        with pytest.raises(ValueError, match=f"positions must .*{message}"):
            hundred.take(positions)
    for name in ("take", "client_rows", "read_clients", "client_sizes"):
        for positions in ([100], [-1], [0, 107], [0.5]):
            with pytest.raises(ValueError, match=r"positions must be .* to 99"):
                getattr(hundred, name)(positions)


def test_map():
    x, y = _UNEVEN["many"]
    for made in (_from_arrays(_UNEVEN), _streamed()):
        dataset = made.map(lambda x, y: ({"half": x / 2}, y + 1))
        mapped_x, mapped_y = dataset.client("many")
        np.testing.assert_array_equal(mapped_x["half"], x / 2)
        np.testing.assert_array_equal(mapped_y, y + 1)
        assert dataset.element_spec[0]["half"] == tf.TensorSpec([3])

    def halved(x, y):
        x["whole"] /= 2  # A streamed client's arrays may be changed in place.
        return x["whole"], y

    clients = {0: _slices(({"whole": x}, y))}
    dataset = FederatedDataset.from_tf_datasets(clients).map(halved)
    for _ in range(2):  # Nothing of it stays.
        np.testing.assert_array_equal(dataset.client(0)[0], x / 2)


def test_ids_and_their_order_or_else_what_clients_hold_are_told_apart():
    def of_ids(ids):
        return _of_rows([[0]] * len(ids), ids).clients_digest

    given = [
        *(["a", "b"], ["b", "a"], ["a"], ["ab"], ["a str 'b'", "c"], ["a", "str 'b'c"]),
        *([1, 2], ["1", "2"], [1.0, 2.0], [(1, 2), 3]),
    ]
    assert len({of_ids(ids) for ids in given}) == len(given)
    assert of_ids([np.int64(3), np.str_("a")]) == of_ids([3, "a"])
    # Clients without names are known by what they hold.
    x, y = _examples(6)
    other_x, other_y = x.copy(), y.copy()
    other_x[5, 1] += 1
    other_y[0] += 1

    def digest(rows, x=x, y=y):
        return FederatedDataset.from_indices(x, y, rows).clients_digest

    rows = [[0, 1], [2], [3, 4, 5]]
    changed = (
        *(rows, rows[::-1], [[0, 1], [5], [3, 4, 2]], [[1, 0], [2], [3, 4, 5]]),
        [[0], [1, 2], [3, 4, 5]],
    )
    others = {*map(digest, changed), digest(rows, other_x), digest(rows, x, other_y)}
    assert len(others) == 7
    # The same data has the same one, however it is stored; lists go by their places.
    parts = [(x[r], y[r]) for r in rows]
    packed = _from_arrays(dict(enumerate(parts)))
    assert packed.with_ids(range(3)).clients_digest == digest(rows)
    listed = as_federated(parts).clients_digest
    assert as_federated(tuple(parts)).clients_digest == listed
    assert as_federated(parts[::-1]).clients_digest != listed


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: as_federated(_client_data(ids, ("x", "y"))),
        lambda ids: _from_fn(ids, lambda _: _examples(2)),
        lambda ids: _of_rows([[i] for i in range(4)], ids),
        lambda ids: FederatedDataset(_streamed()._source, ids[1:]),
        lambda ids: _streamed().with_ids(ids[1:]),
    ],
)
def test_repeated_ids_are_refused(make):
    with pytest.raises(ValueError, match="client_ids must be distinct"):
        make(["b", "a", "a", "a"])
    with pytest.raises(ValueError, match="missing value"):
        make(["b", "a", float("nan"), "c"])
    # Those that only a program tells apart are warned of.
    alike = ((1, "1"), (1.0, "1"), ("7", "7.0"), ("a", b"a"), ("x", " x"))
    unseen = (
        ("7", "\ufeff7"),
        ("a\u200bb", "ab"),
        ("007", "7"),
        (7, "07.0"),
        ("a", "A"),
    )
    for one, other in (*alike, *unseen, ("A\u0301 1", "\u00c1  1")):
        with pytest.warns(RuntimeWarning, match="differ only in type, Unicode"):
            make(["d", "c", one, other])


def test_clients_as_they_are():
    one, other = _examples(3), _examples(2)
    dataset = _from_arrays({"a": one})
    assert as_federated(dataset) is dataset
    for clients, ids in (
        ({"a": one, "b": other}, ["a", "b"]),
        ([one, other], [0, 1]),
        ([_slices(one), _slices(other)], [0, 1]),
        ({5: _slices(one), 6: _slices(other)}, [5, 6]),
        (_client_data(names=("x", "y")), ["w1", "w2"]),
    ):
        dataset = as_federated(clients)
        assert list(dataset.client_ids) == ids
        assert dataset.has_names != isinstance(clients, list)
        x = np.ones([1, 2, 2]) if ids == ["w1", "w2"] else other[0]
        np.testing.assert_array_equal(dataset.client(ids[1])[0], x)
    assert dataset.client_sizes().tolist() == [3, 1]
    assert dataset.element_spec == (tf.TensorSpec([2, 2]), _SPEC[1])
