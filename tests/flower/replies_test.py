"""Whatever a client sends ends no more than its own reply."""

import io
import itertools
import tracemalloc
import types
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from tests.flower import older_api
from tfdp_fl import mechanisms
from tfdp_fl.flower import DPFedAvgAdaptive, client, history, replies, sums


def _result(parameters, metrics=types.MappingProxyType({"dpfedavg_norm_bit": True})):
    return types.SimpleNamespace(parameters=parameters, num_examples=1, metrics=metrics)


def _written(write, value, **options) -> bytes:
    buffer = io.BytesIO()
    write(buffer, value, **options)
    return buffer.getvalue()


def _npy(array: Any) -> bytes:
    return _written(np.save, np.asarray(array))


def _header(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    return _written(np.lib.format.write_array_header_1_0, header)


def _tensors(*tensors: Any) -> Any:
    return types.SimpleNamespace(tensors=list(tensors))


_PICKLED = _written(np.save, np.array([{}, {}, {}], object), allow_pickle=True)
_ZIPPED = _written(np.savez, np.zeros(3))


def test_numbers_that_underflow_end_no_round_where_numpy_is_told_to_raise():
    mechanism = mechanisms.FixedClipping(clip_norm=0.3, noise_multiplier=1.0)
    sent, plan = [np.zeros(4)], history.ChargedRound(1, 0.3, 3, None)
    configured = sums.ConfiguredRound(
        *(sent, dict.fromkeys(range(10)), plan, mechanism),
        mechanisms.PrivacyContext(clients_per_round=10),
        mechanisms.RoundState(0.3, 1.0, 10.0),
        None,
    )
    for evil in ([1e-310] * 4, [5, 1e-310, 0, 0], [1e150, 1e-200, 0, 0], [np.inf] * 4):
        answers = [replies.Reply([np.array(each)], 1) for each in (evil, np.ones(4))]
        with np.errstate(all="raise"):
            (total,) = sums.collect(configured, answers).update
        assert np.linalg.norm(total) <= 0.6 * (1 + 1e-9)


def test_bits_and_what_numpy_writes_are_read():
    for sent in (True, False, np.bool_(True), 1e9, 0):
        result = _result(_GOOD, {"dpfedavg_norm_bit": sent})
        assert replies.read_result(result, *_WANTED).norm_bit is bool(sent)
    dtypes = ("f2", "f4", "f8", ">f4", "i1", "i8", "u2", "?")
    shapes = [(), (0,), (3,), (2, 3, 4)]
    for dtype, shape, order in itertools.product(dtypes, shapes, "CF"):
        values = np.random.default_rng(0).normal(scale=9, size=shape)
        array = np.asarray(values, dtype, order=order)
        got = replies.parse_npy(_npy(array), shape)
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize(
    "data, pattern",
    [
        ("abc", "must be bytes, got str"),
        (b"", "npy format"),
        (b"PK\x03\x04abcdefgh", "npy format"),
        (_ZIPPED, "npy format"),
        (b"\x80\x04K\x01.", "npy format"),
        (_PICKLED, "real numbers"),
        (b"\x93NUMPY\x02\x00" + _npy(np.zeros(3))[8:], "version"),
        (b"\x93NUMPY\x03\x00" + _npy(np.zeros(3))[8:], "version"),
        (_npy(np.zeros(3, complex)), "real numbers"),
        (_npy(np.array(["a", "b", "c"])), "real numbers"),
        (_npy(np.zeros(3, "M8[s]")), "real numbers"),
        (_npy(np.zeros(3, "f4,f4")), "real numbers"),
        (_npy(np.zeros(3, np.longdouble)), "real numbers"),
        (_header((3,), "<f3") + b"\0" * 9, "real numbers"),
        (_header((3 * 10**12, 2)), "shape"),
        (_header((10**30,)), "shape"),
        (_npy(np.zeros((1, 3))), "shape"),
        (_npy(np.zeros(3))[:9], "real numbers"),
        (_npy(np.zeros(3))[:40], "real numbers"),
        (b"\x93NUMPY\x01\x00\xff\xff" + _npy(np.zeros(3))[10:], "real numbers"),
        (_npy(np.zeros(3))[:-1], "bytes"),
        (_header((3,)), "bytes"),
        (_npy(np.zeros(3)) + b"\0", "bytes"),
        (b"\x93NUMPY\x01\x00\x0a\x00exit(255)\n", "real numbers"),
    ],
)
def test_all_else_is_refused(data, pattern):
    with pytest.raises(replies.ReplyError, match=pattern):
        replies.parse_npy(data, (3,))


def test_nothing_is_allocated_for_a_size_that_is_only_stated():
    # 2 GB for the shape that is expected, of which no byte is there.
    data = _header((2**28,))
    tracemalloc.start()
    try:
        with pytest.raises(replies.ReplyError, match="bytes"):
            replies.parse_npy(data, (2**28,))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


class _Raises(dict):
    def __contains__(self, key):
        raise SystemError("gotcha")


_WANTED = [(3,)], client.Instruction(1.0, wants_norm_bit=True)
_ZEROS = _npy(np.zeros(3))
_GOOD = _tensors(_ZEROS)
_NO_BITS = (None, "yes", np.nan, 1j, [True], np.ones(2))


@pytest.mark.parametrize(
    "result",
    [
        None,
        types.SimpleNamespace(metrics={}),
        *(_result(_GOOD, metrics) for metrics in (None, [1], _Raises(), {})),
        _result(None),
        _result(types.SimpleNamespace(tensors=3)),
        _result([np.zeros(3)]),
        _result(_tensors()),
        _result(_tensors(_ZEROS, _ZEROS)),
        _result(_tensors(_npy(np.zeros((3, 1))))),
        _result(_tensors(np.zeros(3))),
        *(_result(_GOOD, {"dpfedavg_norm_bit": bit}) for bit in _NO_BITS),
    ],
)
def test_an_older_reply_that_no_wrapped_client_sends(result):
    with pytest.raises(replies.ReplyError):
        replies.read_result(result, *_WANTED)


_WRONG = st.sampled_from(
    [
        *(None, 3, "abc", b"", b"PK\x03\x04", [], {}, np.zeros(2), 1e400),
        *(_header((3 * 10**12, 2)), _PICKLED, _ZIPPED, 1j),
    ]
)


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


def test_whole_rounds_of_mutated_replies(caplog):
    caplog.set_level("CRITICAL", "tfdp_fl.flower")
    good = _npy(np.full((3, 2), 0.1)), _npy(np.float32(0.2))
    tensors = st.tuples(*map(_mutated, good)).map(lambda both: _tensors(*both))
    each = st.builds(_tensors, *map(st.just, good))
    bits = st.fixed_dictionaries({"dpfedavg_norm_bit": st.just(True) | _WRONG})
    sent = _WRONG | st.builds(
        _result,
        each | tensors | st.builds(_tensors, _WRONG) | _WRONG,
        metrics=bits | _WRONG,
    )
    model = _tensors(_npy(np.zeros((3, 2))), _npy(np.float32(0)))
    strategy = DPFedAvgAdaptive(
        *(older_api.Strategy(), 4, 1.0, 0.5),
        clip_count_stddev=0.5,
    )
    rounds = itertools.count()

    # Deterministic: the same mutations in every run.
    @hypothesis.settings(max_examples=1000, deadline=None)
    @hypothesis.given(st.tuples(sent, sent, sent, sent))
    def run(results):
        number = next(rounds)
        strategy.configure_fit(number, model, older_api.Manager("abcd"))
        returned = list(zip("abcd", results, strict=True))
        got, _ = strategy.aggregate_fit(number, returned, [])
        if got is not None:
            for tensor, shape in zip(got.tensors, ((3, 2), ()), strict=True):
                assert np.all(np.isfinite(replies.parse_npy(tensor, shape)))

    run()
    assert 100 <= len(strategy.charged_rounds) <= 999
    assert strategy.rejected_replies > 1000
