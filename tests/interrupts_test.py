"""A signal waits for the end of a block; a second one does not."""

from __future__ import annotations

import os
import signal
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import _interrupts
from tfdp_fl.engine import program


class InterruptsTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        for each in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(each, signal.default_int_handler)
            self.addCleanup(signal.signal, each, before)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
    def test_waits_for_the_end(self, number):
        done = []
        with self.assertRaises(KeyboardInterrupt):
            with _interrupts.after_the_block():
                os.kill(os.getpid(), number)
                done.append("to the end")
            done.append("and not on")
        self.assertEqual(done, ["to the end"])
        self.assertIs(signal.getsignal(number), signal.default_int_handler)

    def test_a_second_one_is_heard_at_once(self):
        done = []
        with (
            self.assertRaises(KeyboardInterrupt),
            _interrupts.after_the_block(),
        ):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            done.append("never")
        self.assertEqual(done, [])
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
    def test_an_error_in_the_block_loses_no_signal(self, number):
        with (
            self.assertRaises(KeyboardInterrupt) as raised,
            _interrupts.after_the_block(),
        ):
            os.kill(os.getpid(), number)
            raise OSError("the disk is full")
        self.assertIsInstance(raised.exception.__context__, OSError)
        heard = []
        signal.signal(number, lambda *_: heard.append(number))
        with self.assertRaises(OSError), _interrupts.after_the_block():
            os.kill(os.getpid(), number)
            raise OSError("the disk is full")
        self.assertEqual(heard, [number])

    def test_a_signal_while_handlers_are_put_back(self):
        put = signal.signal

        def interrupted(number, handler):
            put(number, handler)
            if handler is signal.default_int_handler:
                os.kill(os.getpid(), number)

        with (
            mock.patch.object(signal, "signal", interrupted),
            self.assertRaises(KeyboardInterrupt),
            _interrupts.after_the_block(),
        ):
            pass
        # The other handler is still there, and lets nothing wait for ever.
        with self.assertRaises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM)
    def test_tensorflow_traces_to_the_end(self, number):
        """Without the block it was left in the graph, with a KeyboardInterrupt
        or a RuntimeError (seen: 1 of 17 signals, `crash_stress.py`)."""
        ends = []

        def function(x):
            os.kill(os.getpid(), number)
            x = x + 1
            ends.append(tf.inside_function())
            return x

        with self.assertRaises(KeyboardInterrupt):
            program.Program(function, tf.TensorSpec([], tf.float32))
        self.assertEqual(ends, [True])
        self.assertFalse(tf.inside_function())

    @parameterized.parameters(RuntimeError, SystemError)
    def test_one_that_c_code_made_another_error_of(self, kind):
        """As TensorFlow does (seen: 2 of 57 signals, `crash_stress.py`)."""

        def broken_off():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                raise kind("returned a result with an exception set") from None

        with self.assertRaises(KeyboardInterrupt), _interrupts.recognised():
            broken_off()
        for number in (signal.SIGINT, signal.SIGTERM):
            self.assertIs(signal.getsignal(number), signal.default_int_handler)
        with self.assertRaises(kind), _interrupts.recognised():
            raise kind("of its own")
        signal.signal(signal.SIGTERM, lambda *_: None)
        with self.assertRaises(kind), _interrupts.recognised():
            os.kill(os.getpid(), signal.SIGTERM)
            raise kind("after a signal that interrupts nothing")

    def test_fit_recognises_one(self):
        fed = toy.federated(tfdp_fl.AdaptiveClipping(noise_multiplier=1.0))

        class Interrupted(tf.keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                try:
                    os.kill(os.getpid(), signal.SIGINT)
                except KeyboardInterrupt:
                    raise SystemError("a result with an exception") from None

        with self.assertRaises(KeyboardInterrupt):
            fed.fit(toy.clients(), rounds=2, verbose=0, callbacks=[Interrupted()])
