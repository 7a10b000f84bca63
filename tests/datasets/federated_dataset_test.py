from __future__ import annotations

import pickle

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from tfdp_fl.datasets import (
    ClientExamples,
    ClientFailure,
    FederatedDataset,
    as_federated,
)

_TWO = np.ones(2)
_slices = tf.data.Dataset.from_tensor_slices


def _examples(n: int, offset: float = 0.0):
    x = offset + np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    return x, np.arange(n, dtype=np.int64)


def _uneven() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        "few": _examples(2),
        "none": _examples(0),
        "many": _examples(5, 100.0),
    }


def _streamed(arrays) -> FederatedDataset:
    return FederatedDataset.from_client_fn(list(arrays), arrays.__getitem__)


def _assert_same_clients(test, actual, expected):
    test.assertEqual(list(actual.client_ids), list(expected.client_ids))
    test.assertEqual(actual.element_spec, expected.element_spec)
    for client_id in expected.client_ids:
        tf.nest.map_structure(
            np.testing.assert_array_equal,
            actual.client(client_id),
            expected.client(client_id),
        )


class FromClientArraysTest(parameterized.TestCase):
    def test_clients_keep_their_ids_sizes_and_examples(self):
        arrays = _uneven()
        dataset = FederatedDataset.from_client_arrays(arrays)

        self.assertEqual(dataset.num_clients, 3)
        self.assertEqual(list(dataset.client_ids), ["few", "none", "many"])
        self.assertEqual(dataset.client_sizes().tolist(), [2, 0, 5])
        self.assertEqual(dataset.client_sizes([2, 0]).tolist(), [5, 2])
        self.assertEqual(dataset.num_examples(), 7)
        self.assertTrue(dataset.is_indexed)
        for client_id, (x, y) in arrays.items():
            client_x, client_y = dataset.client(client_id)
            np.testing.assert_array_equal(client_x, x)
            np.testing.assert_array_equal(client_y, y)

    @parameterized.parameters(
        (np.float64, tf.float32),
        (np.float32, tf.float32),
        (np.float16, tf.float16),
        (np.uint8, tf.uint8),
        (np.int64, tf.int64),
        (np.bool_, tf.bool),
    )
    def test_only_float64_changes_its_dtype(self, given, held):
        x = np.ones((4, 2), given)
        dataset = FederatedDataset.from_client_arrays({0: (x, x)})
        self.assertEqual(dataset.element_spec[0].dtype, held)
        self.assertEqual(dataset.client(0)[1].dtype, held.as_numpy_dtype)

    def test_nests_of_arrays(self):
        def client(n):
            x = {"image": np.ones((n, 4, 4)), "words": [np.zeros((n, 2), int)]}
            return x, (np.ones(n, int), np.full((n, 1), 0.5))

        dataset = FederatedDataset.from_client_arrays({7: client(3), 8: client(1)})
        x, (label, score) = dataset.client(7)
        self.assertEqual(x["image"].shape, (3, 4, 4))
        self.assertEqual(x["words"][0].shape, (3, 2))
        self.assertEqual(label.shape, (3,))
        self.assertEqual(score.dtype, np.float32)
        flat_x, flat_y = dataset.flat()
        self.assertEqual(flat_x["image"].shape, [4, 4, 4])
        self.assertIsInstance(flat_y, tuple)

    def test_empty_lists_are_a_client_without_examples(self):
        dataset = FederatedDataset.from_client_arrays({0: ([], []), 1: _examples(2)})
        self.assertEqual(dataset.client_sizes().tolist(), [0, 2])
        self.assertEqual(dataset.client(0)[0].shape, (0, 3))

    def test_later_changes_of_the_callers_arrays_change_nothing(self):
        x, y = _examples(3)
        packed = FederatedDataset.from_client_arrays({0: (x, y)})
        indexed = FederatedDataset.from_indices(x, y, [[0, 1, 2]])
        before = x.copy()
        x[:] = -1
        np.testing.assert_array_equal(packed.client(0)[0], before)
        np.testing.assert_array_equal(indexed.client(0)[0], before)

    @parameterized.parameters(
        ({}, ValueError, "clients must hold at least one client"),
        ([(_TWO, _TWO)], TypeError, "clients must be"),
        (
            {"a": ({"u": np.ones(3), "v": _TWO}, np.ones(3))},
            ValueError,
            "Client 'a': .* got 2 in x and 3 in x and 3 in y",
        ),
        (
            {"a": ({"u": _TWO}, _TWO), "b": ({"v": _TWO}, _TWO)},
            ValueError,
            "Client 'b': x must be of the same names",
        ),
        (
            {"a": (np.ones((3, 2)), np.ones(3)), "b": (np.ones((3, 1)), np.ones(3))},
            ValueError,
            r"Client 'b': x must be of .*float32\[2\], got float32\[1\]",
        ),
        (
            {"a": (_TWO, np.ones(2, int)), "b": (_TWO, _TWO)},
            ValueError,
            r"Client 'b': y must be of .*int64\[\], got float32\[\]",
        ),
        ({"a": np.ones((2, 3))}, TypeError, r"Client 'a': .* must be \(x, y\) or"),
        ({"a": (_TWO, _TWO, _TWO, _TWO)}, TypeError, "got a tuple of 4"),
        (
            {"a": (_TWO, _TWO, np.ones(3))},
            ValueError,
            "x, y, sample_weight must have .* 2 in y and 3 in sample_weight",
        ),
        (
            {"a": (_TWO, _TWO, _TWO), "b": (_TWO, _TWO)},
            ValueError,
            "Client 'b': sample_weight must be given for every client or for",
        ),
        (
            {"a": (_TWO, _TWO, np.array(["secret", "b"]))},
            TypeError,
            "Client 'a': sample_weight must be made of numbers, got dtype <U6",
        ),
        ({"a": (_TWO, 3)}, ValueError, "Client 'a': y must have a leading dimension"),
        (
            {"a": (np.array([{}, {}]), _TWO)},
            TypeError,
            "Client 'a': x must be made of arrays of numbers",
        ),
        (
            {"a": (tf.sparse.from_dense([[1], [2]]), _TWO)},
            TypeError,
            "Client 'a': x must be made of dense arrays, got a SparseTensor",
        ),
        (
            {"a": ([[1, 2], ["secret"]], _TWO)},
            TypeError,
            "Client 'a': x must be made of sequences of numbers or strings",
        ),
    )
    def test_refuses(self, clients, error, message):
        with self.assertRaisesRegex(error, message):
            FederatedDataset.from_client_arrays(clients)


class FromIndicesTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.x, self.y = _examples(10)

    @parameterized.named_parameters(
        ("lines", np.array([[3, 1], [1, 9]]), [0, 1]),
        ("int32_lines", np.array([[3, 1], [1, 9]], np.int32), [0, 1]),
        ("lists", [[3, 1], [1, 9]], [0, 1]),
        ("mapping", {"a": np.array([3, 1]), "b": [1, 9]}, ["a", "b"]),
    )
    def test_a_client_is_its_rows_in_its_order(self, indices, client_ids):
        dataset = FederatedDataset.from_indices(self.x, self.y, indices)
        self.assertEqual(list(dataset.client_ids), client_ids)
        first, second = client_ids
        np.testing.assert_array_equal(dataset.client(first)[0], self.x[[3, 1]])
        np.testing.assert_array_equal(dataset.client(second)[1], [1, 9])

    def test_tensors_are_not_copied(self):
        x, y = tf.constant(self.x), tf.constant(self.y)
        dataset = FederatedDataset.from_indices(x, y, [[0]])
        self.assertIs(dataset.flat()[0], x)
        self.assertIs(dataset.flat()[1], y)

    @parameterized.parameters(
        ([[0], [10]], ValueError, "indices must be from 0 to 9"),
        ([[0], [-1]], ValueError, "indices must be from 0 to 9"),
        ([[0.0]], TypeError, "indices must be integers"),
        ([np.ones(10, bool)], TypeError, "indices must be integers"),
        (np.zeros((0, 3), int), ValueError, "indices must hold at least one client"),
        (np.arange(3), ValueError, "indices must be 2-D"),
        ([[[0]]], ValueError, "2 dimensions for client number 0"),
    )
    def test_refuses(self, indices, error, message):
        with self.assertRaisesRegex(error, message):
            FederatedDataset.from_indices(self.x, self.y, indices)

    def test_refuses_ids_that_do_not_fit(self):
        make = FederatedDataset.from_indices
        with self.assertRaisesRegex(ValueError, "client_ids must have one id"):
            make(self.x, self.y, [[0]], client_ids=["a", "b"])
        with self.assertRaisesRegex(ValueError, "client_ids must be distinct"):
            make(self.x, self.y, [[0], [1]], client_ids=["a", "a"])
        with self.assertRaisesRegex(ValueError, "client_ids must be None"):
            make(self.x, self.y, {"a": [0]}, client_ids=["a"])


class EngineInterfaceTest(parameterized.TestCase):
    def _datasets(self):
        arrays = _uneven()
        packed = FederatedDataset.from_client_arrays(arrays)
        x = np.concatenate([x for x, _ in arrays.values()])
        y = np.concatenate([y for _, y in arrays.values()])
        indexed = FederatedDataset.from_indices(
            x, y, {"few": [0, 1], "none": [], "many": [2, 3, 4, 5, 6]}
        )
        return packed, indexed

    def test_rows_are_the_clients_one_after_the_other(self):
        for dataset in self._datasets():
            rows, lengths = dataset.client_rows(np.array([2, 1, 0, 2]))
            self.assertEqual(rows.dtype, np.int32)
            self.assertEqual(lengths.dtype, np.int64)
            self.assertEqual(lengths.tolist(), [5, 0, 2, 5])
            self.assertEqual(rows.tolist(), [2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6])

    @parameterized.parameters([[3]], [[-1]], [[0, 7]])
    def test_refuses_positions_out_of_range(self, positions):
        dataset, _ = self._datasets()
        for method in (
            dataset.client_rows,
            dataset.read_clients,
            dataset.client_sizes,
            dataset.take,
        ):
            with self.assertRaisesRegex(ValueError, "positions must be from 0"):
                method(positions)
            with self.assertRaisesRegex(TypeError, "positions must be a 1-D array"):
                method([0.5])

    def test_reads_what_the_rows_say(self):
        for dataset in self._datasets():
            read = list(dataset.read_clients([2, 0]))
            self.assertEqual([client.position for client in read], [2, 0])
            np.testing.assert_array_equal(read[0].x, dataset.client("many")[0])
            np.testing.assert_array_equal(read[1].y, [0, 1])

    def test_a_streamed_dataset_has_no_rows(self):
        dataset = _streamed(_uneven())
        self.assertFalse(dataset.is_indexed)
        with self.assertRaisesRegex(ValueError, "flat must be called on an ind"):
            dataset.flat()
        with self.assertRaisesRegex(ValueError, r"in_memory\(\) makes it"):
            dataset.client_rows([0])


class StreamedTest(parameterized.TestCase):
    def test_tf_datasets(self):
        arrays = _uneven()
        dataset = FederatedDataset.from_tf_datasets(
            {client_id: _slices(examples) for client_id, examples in arrays.items()}
        )
        self.assertFalse(dataset.is_indexed)
        _assert_same_clients(self, dataset, FederatedDataset.from_client_arrays(arrays))

    @parameterized.parameters(
        (dict, ValueError, "clients must hold at least one"),
        (lambda: {"a": _TWO}, TypeError, "Client 'a': dataset must be a "),
        (
            lambda: {"a": _slices(_examples(4)).batch(2)},
            ValueError,
            "Client 'a': .* must be single examples, got what looks like batch",
        ),
        (
            lambda: {"a": tf.data.Dataset.range(3)},
            TypeError,
            r"Client 'a': .*must be single examples \(x, y\)",
        ),
        (
            lambda: {"a": _slices(_examples(4)).repeat()},
            ValueError,
            "Client 'a': .* must end",
        ),
        (
            lambda: {"a": _slices((_TWO, [1, 2])), "b": _slices(([1, 2], [1, 2]))},
            ValueError,
            "Client 'b': x must be of the same names",
        ),
        (
            lambda: {"a": _slices((tf.sparse.from_dense([[1], [2]]), [1, 2]))},
            TypeError,
            "Client 'a': .* must be dense tensors",
        ),
    )
    def test_tf_datasets_refuses(self, clients, error, message):
        with self.assertRaisesRegex(error, message):
            FederatedDataset.from_tf_datasets(clients())

    def test_one_client_that_cannot_be_read_does_not_stop_the_others(self):
        def read(client_id):
            if client_id == "bad":
                raise OSError("disk on fire")
            if client_id == "odd":
                return np.ones((2, 7)), np.ones(2, int)
            return _examples(2)

        dataset = FederatedDataset.from_client_fn(["bad", "good", "odd", "fine"], read)
        read = list(dataset.read_clients([0, 1, 2, 3]))

        self.assertEqual(
            [type(client) for client in read],
            [ClientFailure, ClientExamples, ClientFailure, ClientExamples],
        )
        self.assertEqual([client.position for client in read], [0, 1, 2, 3])
        self.assertIsInstance(read[0].error, OSError)
        self.assertRegex(str(read[2].error), "x must be of the same .* shape")
        with self.assertRaisesRegex(OSError, "disk on fire"):
            dataset.client("bad")

    def test_clients_are_read_only_when_asked_for(self):
        reads = []

        def read(client_id):
            reads.append(client_id)
            return _examples(2)

        spec = (tf.TensorSpec([3], tf.float32), tf.TensorSpec([], tf.int64))
        dataset = FederatedDataset.from_client_fn(range(1000), read, spec)
        clients = dataset.read_clients([5, 3, 8])
        self.assertEqual(reads, [])
        next(clients)
        self.assertEqual(reads, [5])

    def test_the_spec_comes_from_the_first_client_that_has_examples(self):
        def read(client_id):
            if client_id == 0:
                raise OSError
            return ([], []) if client_id == 1 else _examples(2)

        dataset = FederatedDataset.from_client_fn([0, 1, 2], read)
        self.assertEqual(dataset.element_spec[0], tf.TensorSpec([3]))
        self.assertEqual(dataset.client(1)[0].shape, (0, 3))

    def test_no_spec_without_a_client_that_can_be_read(self):
        def read(client_id):
            raise OSError("gone")

        dataset = FederatedDataset.from_client_fn([0, 1], read)
        with self.assertRaisesRegex(ValueError, "element_spec must be given"):
            _ = dataset.element_spec

    def test_from_client_fn_refuses(self):
        make = FederatedDataset.from_client_fn
        with self.assertRaisesRegex(TypeError, "fn must be callable"):
            make([0], 3)
        with self.assertRaisesRegex(ValueError, "client_ids must hold"):
            make([], len)
        with self.assertRaisesRegex(ValueError, "client_ids must be distinct"):
            make([1, 1], len)
        with self.assertRaisesRegex(TypeError, "element_spec must be"):
            make([1], len, element_spec=tf.TensorSpec([]))

    def test_in_memory(self):
        arrays = _uneven()
        dataset = _streamed(arrays).in_memory()
        self.assertTrue(dataset.is_indexed)
        _assert_same_clients(self, dataset, FederatedDataset.from_client_arrays(arrays))
        self.assertIs(dataset.in_memory(), dataset)

    @parameterized.parameters(
        lambda x, y: (x.astype(np.float64), y),
        lambda x, y: (x.astype(">f4"), y),
        lambda x, y: (x.tolist(), y),
        lambda x, y: (tf.constant(x), y),
        lambda x, y: (np.ma.masked_array(x), y),
        lambda x, y: (x, y, None),
        lambda x, y: (x, y),
    )
    def test_examples_are_the_same_however_they_come(self, given):
        spec = (tf.TensorSpec([3]), tf.TensorSpec([], tf.int64))
        made = FederatedDataset.from_client_fn(
            ["a"], lambda _: given(*_examples(4)), spec
        )
        for array, expected in zip(made.client("a"), _examples(4), strict=True):
            self.assertIs(type(array), np.ndarray)
            self.assertEqual(array.dtype.newbyteorder("="), expected.dtype)
            np.testing.assert_array_equal(array, expected)

    @parameterized.parameters(
        lambda x, y: (x, y[1:]),
        lambda x, y: (x[:, :2], y),
        lambda x, y: (x[..., None], y),
        lambda x, y: (x, y.astype(np.int32)),
        lambda x, y: (x, y, y),
        lambda x, y: [x, y],
        lambda x, y: (x,),
        lambda x, y: (x[0, 0], y[0]),
    )
    def test_what_is_not_of_the_spec_fails(self, given):
        spec = (tf.TensorSpec([3]), tf.TensorSpec([], tf.int64))
        made = FederatedDataset.from_client_fn(
            ["a"], lambda _: given(*_examples(4)), spec
        )
        (read,) = made.read_clients(np.array([0]))
        self.assertIsInstance(read, ClientFailure)


class _ClientData:
    """As a `tff.simulation.datasets.ClientData` looks from outside."""

    client_ids = ("w1", "w2")

    def create_tf_dataset_for_client(self, client_id):
        n = {"w1": 3, "w2": 1}[client_id]
        return _slices(
            {"label": np.arange(n), "pixels": np.ones((n, 2, 2), np.float32)}
        )


class FromClientDataTest(absltest.TestCase):
    def test_reads_clients_through_the_preprocessing(self):
        dataset = FederatedDataset.from_client_data(
            _ClientData(),
            lambda clients: clients.map(lambda e: (e["pixels"], e["label"])),
        )
        self.assertEqual(list(dataset.client_ids), ["w1", "w2"])
        self.assertEqual(
            dataset.element_spec,
            (tf.TensorSpec([2, 2]), tf.TensorSpec([], tf.int64)),
        )
        self.assertEqual(dataset.client_sizes().tolist(), [3, 1])
        self.assertEqual(dataset.client("w1")[1].tolist(), [0, 1, 2])

    def test_refuses(self):
        with self.assertRaisesRegex(TypeError, "preprocess_fn can make them"):
            FederatedDataset.from_client_data(_ClientData())
        with self.assertRaisesRegex(TypeError, "client_data must be a tff"):
            FederatedDataset.from_client_data({})


class DerivedTest(parameterized.TestCase):
    def _hundred(self):
        return FederatedDataset.from_indices(
            *_examples(10), np.arange(100)[:, None] % 10
        )

    def test_subsets_keep_ids(self):
        taken = self._hundred().take([7, 3]).take([1])
        self.assertEqual(list(taken.client_ids), [3])
        self.assertEqual(taken.client(3)[1].tolist(), [3])
        with self.assertRaises(KeyError):
            taken.client(7)

    def test_refuses_clients_twice_or_none(self):
        with self.assertRaisesRegex(ValueError, "positions must be distinct"):
            self._hundred().take([1, 1])
        with self.assertRaisesRegex(ValueError, "must name at least one"):
            self._hundred().take([])
        for unknown in (100, "a"):
            with self.assertRaises(KeyError):
                self._hundred().client(unknown)

    @parameterized.parameters(FederatedDataset.from_client_arrays, _streamed)
    def test_map(self, make):
        dataset = make(_uneven()).map(lambda x, y: ({"half": x / 2}, y + 1))
        x, y = _uneven()["many"]
        mapped_x, mapped_y = dataset.client("many")
        np.testing.assert_array_equal(mapped_x["half"], x / 2)
        np.testing.assert_array_equal(mapped_y, y + 1)
        self.assertEqual(dataset.element_spec[0]["half"], tf.TensorSpec([3]))

    def test_a_streamed_clients_arrays_may_be_changed_in_place(self):
        def halved(x, y):
            x["whole"] /= 2
            return x["whole"], y

        x, y = _uneven()["many"]
        dataset = FederatedDataset.from_tf_datasets(
            {0: _slices(({"whole": x}, y))}
        ).map(halved)
        for _ in range(2):  # Nothing of it stays.
            np.testing.assert_array_equal(dataset.client(0)[0], x / 2)

    def test_map_refuses(self):
        dataset = FederatedDataset.from_client_arrays(_uneven())
        with self.assertRaisesRegex(ValueError, "fn must return as many"):
            dataset.map(lambda x, y: (x[:2], y[:2]))
        with self.assertRaisesRegex(TypeError, r"fn must return \(x, y\) or"):
            dataset.map(lambda x, y: x)
        with self.assertRaisesRegex(TypeError, "fn must be callable"):
            dataset.map(None)

    def test_pickles(self):
        dataset = FederatedDataset.from_client_arrays(_uneven())
        _assert_same_clients(self, pickle.loads(pickle.dumps(dataset)), dataset)


class ClientIdsDigestTest(absltest.TestCase):
    def _of(self, ids):
        rows = np.zeros([len(ids), 1], np.int32)
        x, y = np.zeros([1, 2], np.float32), np.zeros([1], np.int32)
        return FederatedDataset.from_indices(x, y, rows, ids).client_ids_digest

    def test_it_tells_ids_and_their_order_apart(self):
        given = [
            ["a", "b"],
            ["b", "a"],
            ["a", "c"],
            ["a"],
            ["ab"],
            ["a str 'b'", "c"],
            ["a", "str 'b'c"],
            [1, 2],
            ["1", "2"],
            [1.0, 2.0],
            [(1, 2), 3],
        ]
        self.assertLen({self._of(ids) for ids in given}, len(given))

    def test_the_same_ids_have_the_same_one(self):
        self.assertEqual(self._of(range(9000)), self._of(list(range(9000))))
        self.assertEqual(self._of([np.int64(3), np.str_("a")]), self._of([3, "a"]))


class ClientsDigestTest(absltest.TestCase):
    """Clients without names are known by what they hold."""

    def setUp(self):
        super().setUp()
        self.x = np.arange(12, dtype=np.float32).reshape(6, 2)
        self.y = np.arange(6)

    def _of(self, rows, x=None, y=None, ids=None):
        return FederatedDataset.from_indices(
            self.x if x is None else x,
            self.y if y is None else y,
            rows,
            ids,
        ).clients_digest

    def test_the_same_data_has_the_same_one(self):
        rows = [[0, 1], [2], [3, 4, 5]]
        self.assertEqual(self._of(rows), self._of([np.array(r) for r in rows]))
        # However it is stored.
        self.assertEqual(
            self._of(rows),
            FederatedDataset.from_client_arrays(
                {i: (self.x[r], self.y[r]) for i, r in enumerate(rows)}
            )
            .with_ids(range(3))
            .clients_digest,
        )

    def test_other_data_and_another_order_have_others(self):
        rows = [[0, 1], [2], [3, 4, 5]]
        x, y = self.x.copy(), self.y.copy()
        x[5, 1] += 1
        y[0] += 1
        self.assertLen(
            {
                self._of(rows),
                self._of(rows[::-1]),
                self._of([[0, 1], [5], [3, 4, 2]]),
                self._of([[1, 0], [2], [3, 4, 5]]),
                self._of([[0], [1, 2], [3, 4, 5]]),
                self._of(rows, x=x),
                self._of(rows, y=y),
            },
            7,
        )

    def test_lists_are_known_by_their_places(self):
        one, two = (self.x[:3], self.y[:3]), (self.x[3:], self.y[3:])
        self.assertEqual(
            as_federated([one, two]).clients_digest,
            as_federated((one, two)).clients_digest,
        )
        self.assertNotEqual(
            as_federated([one, two]).clients_digest,
            as_federated([two, one]).clients_digest,
        )


class _RepeatingClientData:
    """A `ClientData` that lists ids as it was told."""

    def __init__(self, client_ids):
        self.client_ids = client_ids

    def create_tf_dataset_for_client(self, client_id):
        del client_id
        return _slices(_examples(2))


class RepeatedIdsTest(parameterized.TestCase):
    """A client under two ids would be in a sum twice."""

    @parameterized.named_parameters(
        (
            "client_data",
            lambda ids: FederatedDataset.from_client_data(_RepeatingClientData(ids)),
        ),
        ("as_federated", lambda ids: as_federated(_RepeatingClientData(ids))),
        (
            "client_fn",
            lambda ids: FederatedDataset.from_client_fn(ids, lambda _: _examples(2)),
        ),
        (
            "indices",
            lambda ids: FederatedDataset.from_indices(
                *_examples(4), [[i] for i in range(4)], client_ids=ids
            ),
        ),
        (
            "constructor",
            lambda ids: FederatedDataset(_streamed(_uneven())._source, ids[1:]),
        ),
        (
            "with_ids",
            lambda ids: _streamed(_uneven()).with_ids(ids[1:]),
        ),
    )
    def test_are_refused(self, make):
        with self.assertRaisesRegex(ValueError, "client_ids must be distinct"):
            make(["b", "a", "a", "a"])
        with self.assertRaisesRegex(ValueError, "missing value"):
            make(["b", "a", float("nan"), "c"])
        with self.assertWarnsRegex(RuntimeWarning, "differ only in type, Unicode"):
            make(["d", "a", "A\u0301 1", "\u00c1  1"])

    @parameterized.parameters(([1, "1"],), (["a", b"a"],), (["x", " x"],))
    def test_that_only_a_program_tells_apart_are_warned_of(self, client_ids):
        with self.assertWarnsRegex(RuntimeWarning, "differ only in type"):
            FederatedDataset.from_client_fn(client_ids, lambda _: _examples(2))
