"""A signal waits for the end of a block; a second one does not."""

import contextlib
import os
import signal
from unittest import mock

import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import _signals
from tfdp_fl.engine import devices, program

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_both = pytest.mark.parametrize("number", _SIGNALS)


@pytest.fixture(autouse=True)
def _handlers():
    before = [signal.signal(each, signal.default_int_handler) for each in _SIGNALS]
    yield
    for each, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(each, handler)


def _default_again():
    return all(signal.getsignal(n) is signal.default_int_handler for n in _SIGNALS)


def _send(number=signal.SIGINT):
    os.kill(os.getpid(), number)


@_both
def test_repeated_ones_wait_as_well_where_nothing_may_be_left_half_done(number):
    done = []
    for outer in (contextlib.nullcontext(), _signals.defer_signals()):
        with pytest.raises(KeyboardInterrupt), outer:
            with _signals.defer_signals(repeated=True):
                for _ in range(3):
                    _send(number)
                done.append("to the end")
            done.append("and not on")
        assert _default_again()
    assert done == ["to the end"] * 2


@_both
def test_waits_for_the_end(number):
    done = []
    with pytest.raises(KeyboardInterrupt):
        with _signals.defer_signals():
            _send(number)
            done.append("to the end")
        done.append("and not on")
    assert done == ["to the end"]
    assert _default_again()
    # A second one is heard at once.
    with pytest.raises(KeyboardInterrupt), _signals.defer_signals():
        _send(number)
        _send(number)
        done.append("never")
    assert done == ["to the end"]
    assert _default_again()
    # An error in the block loses no signal.
    heard = []
    for error in (KeyboardInterrupt, OSError):
        with pytest.raises(error) as raised, _signals.defer_signals():
            _send(number)
            raise OSError("the disk is full")
        assert error is OSError or isinstance(raised.value.__context__, OSError)
        signal.signal(number, lambda *_: heard.append(number))
    assert heard == [number]


def test_a_signal_while_handlers_are_put_back():
    put = signal.signal

    def interrupted(number, handler):
        put(number, handler)
        if handler is signal.default_int_handler:
            _send(number)

    with (
        mock.patch.object(signal, "signal", interrupted),
        pytest.raises(KeyboardInterrupt),
        _signals.defer_signals(),
    ):
        pass
    # The other handler is still there, and lets nothing wait for ever.
    with pytest.raises(KeyboardInterrupt):
        _send(signal.SIGTERM)


@_both
def test_tensorflow_traces_to_the_end(number):
    """Without the block it was left in the graph (seen: 1 of 17 signals)."""
    ends = []

    def function(x):
        _send(number)
        x = x + 1
        ends.append(tf.inside_function())
        return x

    with pytest.raises(KeyboardInterrupt):
        program.Program(function, tf.TensorSpec([], tf.float32))
    assert ends == [True]
    assert not tf.inside_function()


class _TooLongError(Exception):
    """What the handler of an alarm raises."""


def _alarm(*_):
    raise _TooLongError("an hour")


class _Slow(tf.keras.layers.Layer):
    """A layer in whose n-th call, counted down, the alarm goes off."""

    left = 0

    def call(self, x):
        _Slow.left -= 1
        if not _Slow.left:
            signal.raise_signal(signal.SIGALRM)
        return x


@pytest.mark.parametrize("at_once", [None, 3])
def test_an_alarm_is_no_fault_of_the_model(at_once):
    # It was said that the model could not take the features, or not train in batches.
    before = signal.signal(signal.SIGALRM, _alarm)
    calls = _Slow.left = 0
    try:
        while _Slow.left <= 0:
            calls, model = calls + 1, toy.dense(_Slow)
            fed = tfdp_fl.DPFederatedModel(model, tfdp_fl.NoPrivacy(), 3)
            fed.compile("sgd", toy.loss(), jit_compile=False)
            _Slow.left = calls
            with mock.patch.object(devices, "clients_per_call", lambda *_: at_once):
                try:
                    toy.fit(fed)
                except _TooLongError as raised:
                    assert raised.args == ("an hour",)
                else:
                    assert _Slow.left > 0
            assert not tf.inside_function()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert calls > 3


@pytest.mark.parametrize("kind", [RuntimeError, SystemError])
def test_one_that_c_code_made_another_error_of(kind):
    """As TensorFlow does (seen: 2 of 57 signals, `crash_stress.py`)."""

    def swallowed(*_):
        try:
            _send(signal.SIGTERM)
        except KeyboardInterrupt:
            raise kind("returned a result with an exception set") from None

    with pytest.raises(KeyboardInterrupt), _signals.handled():
        swallowed()
    assert _default_again()
    fed = toy.federated()
    begin = tf.keras.callbacks.LambdaCallback(on_epoch_begin=swallowed)
    with pytest.raises(KeyboardInterrupt):
        toy.fit(fed, 2, [begin])
    with pytest.raises(kind), _signals.handled():
        raise kind("of its own")
    signal.signal(signal.SIGTERM, lambda *_: None)
    with pytest.raises(kind), _signals.handled():
        _send(signal.SIGTERM)
        raise kind("after a signal that interrupts nothing")
