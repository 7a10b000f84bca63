"""Whatever a client sends ends no more than its own reply."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import logging
import tracemalloc
import types
from typing import Any

import hypothesis
import numpy as np
from absl.testing import parameterized
from hypothesis import strategies as st

from tests.flower import older_api
from tfdp_fl.flower import DPFedAvgAdaptive, replies


@dataclasses.dataclass
class _Result:
    parameters: Any
    num_examples: int = 1
    metrics: Any = dataclasses.field(
        default_factory=lambda: {"dpfedavg_norm_bit": True}
    )


def _npy(array: Any, version=None) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asarray(array), version=version)
    return buffer.getvalue()


def _header(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"descr": descr, "fortran_order": False, "shape": shape}
    )
    return buffer.getvalue()


def _pickled() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}, {}, {}], object), allow_pickle=True)
    return buffer.getvalue()


def _zipped() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, np.zeros(3))
    return buffer.getvalue()


def _tensors(*tensors: Any) -> Any:
    return types.SimpleNamespace(tensors=list(tensors))


class NpyTest(parameterized.TestCase):
    @parameterized.product(
        dtype=("f2", "f4", "f8", ">f4", "i1", "i8", "u2", "?"),
        shape=((), (0,), (3,), (3, 2), (2, 3, 4)),
        version=(None, (2, 0)),
        fortran=(False, True),
    )
    def test_what_numpy_writes_is_read(self, dtype, shape, version, fortran):
        values = np.random.default_rng(0).normal(scale=9, size=shape)
        array = np.asarray(values, dtype, order="F" if fortran else "C")
        got = replies.npy_array(_npy(array, version), shape)
        self.assertEqual(got.dtype, array.dtype)
        np.testing.assert_array_equal(got, array)

    @parameterized.named_parameters(
        ("not_bytes", "abc", "must be bytes, got str"),
        ("nothing", b"", "npy format"),
        ("zip", b"PK\x03\x04abcdefgh", "npy format"),
        ("npz", _zipped(), "npy format"),
        ("pickle", b"\x80\x04K\x01.", "npy format"),
        ("pickled_objects", _pickled(), "real numbers"),
        ("version_3", b"\x93NUMPY\x03\x00" + _npy(np.zeros(3))[8:], "version"),
        ("complex", _npy(np.zeros(3, complex)), "real numbers"),
        ("strings", _npy(np.array(["a", "b", "c"])), "real numbers"),
        ("dates", _npy(np.zeros(3, "M8[s]")), "real numbers"),
        ("records", _npy(np.zeros(3, "f4,f4")), "real numbers"),
        ("long_double", _npy(np.zeros(3, np.longdouble)), "refused"),
        ("no_such_dtype", _header((3,), "<f3") + b"\0" * 9, "refused"),
        ("huge", _header((3 * 10**12, 2)), "shape"),
        ("huger", _header((10**30,)), "shape"),
        ("other_shape", _npy(np.zeros((1, 3))), "shape"),
        ("cut_header", _npy(np.zeros(3))[:40], "cut short"),
        ("cut_data", _npy(np.zeros(3))[:-1], "bytes"),
        ("no_data", _header((3,)), "bytes"),
        ("more_data", _npy(np.zeros(3)) + b"\0", "bytes"),
        ("code", b"\x93NUMPY\x01\x00\x0a\x00exit(255)\n", "real numbers"),
    )
    def test_all_else_is_refused(self, data, pattern):
        with self.assertRaisesRegex(replies.ReplyError, pattern):
            replies.npy_array(data, (3,))

    def test_nothing_is_allocated_for_a_size_that_is_only_stated(self):
        # 2 GB for the shape that is expected, of which no byte is there.
        data = _header((2**28,))
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        with self.assertRaisesRegex(replies.ReplyError, "bytes"):
            replies.npy_array(data, (2**28,))
        self.assertLess(tracemalloc.get_traced_memory()[1], 100_000)


_WANTED = replies.Wanted([(3,)], norm_bit=True)
_GOOD = _tensors(_npy(np.zeros(3)))


class ReadTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("no_result", None),
        ("no_parameters", types.SimpleNamespace(metrics={})),
        ("no_metrics", _Result(_GOOD, metrics=None)),
        ("metrics_of_another_kind", _Result(_GOOD, metrics=[1])),
        ("parameters_none", _Result(None)),
        ("tensors_none", _Result(types.SimpleNamespace(tensors=3))),
        ("plain_arrays", _Result([np.zeros(3)])),
        ("no_tensors", _Result(_tensors())),
        ("too_many_tensors", _Result(_tensors(*[_npy(np.zeros(3))] * 2))),
        ("other_shape", _Result(_tensors(_npy(np.zeros((3, 1)))))),
        ("array", _Result(_tensors(np.zeros(3)))),
    )
    def test_it_is_a_reply_error(self, result):
        with self.assertRaises(replies.ReplyError):
            replies.read_result(result, replies.Wanted([(3,)]))

    def test_metrics_that_raise(self):
        class Metrics(dict):
            def __contains__(self, key):
                raise SystemError("gotcha")

        with self.assertRaisesRegex(replies.ReplyError, "SystemError: gotcha"):
            replies.read_result(_Result(_GOOD, 1, Metrics()), _WANTED)

    @parameterized.parameters(
        (True, True), (False, False), (np.bool_(True), True), (1e9, True), (0, False)
    )
    def test_bits(self, sent, bit):
        result = _Result(_GOOD, 1, {"dpfedavg_norm_bit": sent})
        self.assertIs(replies.read_result(result, _WANTED).norm_bit, bit)

    @parameterized.parameters(None, "yes", np.nan, 1j, ([True],), (np.ones(2),))
    def test_what_is_no_bit(self, sent):
        for metrics in ({"dpfedavg_norm_bit": sent}, {}):
            with self.assertRaisesRegex(replies.ReplyError, "norm_bit"):
                replies.read_result(_Result(_GOOD, 1, metrics), _WANTED)


def _read(reply):
    if reply == "garbled":
        raise replies.ReplyError("it is garbled")
    return reply


class CollectTest(parameterized.TestCase):
    """Of the clients 1 and 2; what is dropped spoils nothing beside it."""

    @parameterized.parameters(
        ([(1, "a"), (2, "b")], {1: "a", 2: "b"}, 2),
        ([(1, "a"), (1, "b"), (2, "c")], {1: "a", 2: "c"}, 2),
        ([(3, "a"), (1, "b"), ("1", "c")], {1: "b"}, 1),
        ([(1, "garbled"), (2, "b")], {2: "b"}, 2),
        ([(1, "garbled"), (1, "b")], {1: "b"}, 1),
        ([], {}, 0),
    )
    def test_replies(self, results, usable, num_replied):
        got = replies.collect(1, results, {1, 2}, _read)
        self.assertEqual(got, (usable, num_replied, len(results) - len(usable)))


_WRONG = st.sampled_from(
    [
        *(None, 3, "abc", b"", b"PK\x03\x04", [], {}, np.zeros(2), 1e400),
        *(_header((3 * 10**12, 2)), _pickled(), _zipped(), 1j),
    ]
)
_FUZZ = hypothesis.settings(max_examples=1000, deadline=None, derandomize=True)


def _mutated(data: bytes):
    """Some bytes with pieces of them exchanged, most of them in the header."""
    pieces = st.sampled_from([b"9" * 20, b"O", b"-1", b"((((", b"1e9", b"|V", b""])
    change = st.tuples(st.integers(0, 140), st.integers(0, 20), pieces | st.binary())

    def apply(changes):
        mutated = data
        for at, length, piece in changes:
            mutated = mutated[:at] + piece + mutated[at + length :]
        return mutated

    return st.lists(change, max_size=5).map(apply)


class FuzzTest(parameterized.TestCase):
    """Deterministic: the same mutations in every run."""

    def setUp(self):
        super().setUp()
        logger = logging.getLogger("tfdp_fl.flower")
        self.addCleanup(logger.setLevel, logger.level)
        logger.setLevel("CRITICAL")

    @parameterized.product(dtype=("f4", "f8", "i4"), version=((1, 0), (2, 0)))
    def test_bytes(self, dtype, version):
        shape = (3, 1, 2)
        array = np.arange(6.0, dtype=dtype).reshape(shape)

        @_FUZZ
        @hypothesis.given(_mutated(_npy(array, version)))
        def read(data):
            with contextlib.suppress(replies.ReplyError):
                array = replies.npy_array(data, shape)
                self.assertEqual(array.shape, shape)
                self.assertIn(array.dtype.kind, "fiub")

        read()

    def test_whole_rounds(self):
        good = _npy(np.full((3, 2), 0.1)), _npy(np.float32(0.2))
        tensors = st.tuples(*map(_mutated, good)).map(lambda both: _tensors(*both))
        bits = st.fixed_dictionaries({"dpfedavg_norm_bit": st.just(True) | _WRONG})
        sent = _WRONG | st.builds(
            _Result,
            st.just(_tensors(*good)) | tensors | st.builds(_tensors, _WRONG) | _WRONG,
            metrics=bits | _WRONG,
        )
        model = _tensors(_npy(np.zeros((3, 2))), _npy(np.float32(0)))
        strategy = DPFedAvgAdaptive(
            *(older_api.Strategy(), 4, 1.0, 0.5),
            max_abandoned_rounds=None,
            clip_count_stddev=0.5,
        )
        rounds = itertools.count()

        @_FUZZ
        @hypothesis.given(st.tuples(sent, sent, sent, sent))
        def run(results):
            number = next(rounds)
            strategy.configure_fit(number, model, older_api.Manager("abcd"))
            got, _ = strategy.aggregate_fit(
                number, list(zip("abcd", results, strict=True)), []
            )
            if got is not None:
                for tensor, shape in zip(got.tensors, ((3, 2), ()), strict=True):
                    array = replies.npy_array(tensor, shape)
                    self.assertTrue(np.all(np.isfinite(array)))

        run()
        self.assertBetween(len(strategy.released_rounds), 100, 999)
        self.assertGreater(strategy.rejected_replies, 1000)
