from __future__ import annotations

import concurrent.futures
import time

import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl.engine import calls


def _flat(x):
    return tf.reduce_sum(x * x)


def _conditional(x):
    return tf.cond(x[0] > 0, lambda: tf.reduce_sum(x * x), lambda: x[0])


def _loop(x):
    return tf.while_loop(
        lambda i, _: i < 4, lambda i, y: (i + 1, y + x[i]), (0, 0.0)
    )[1]


class OneThreadTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (_flat, True, True),
        (_flat, False, False),
        (_conditional, True, False),
        (_loop, True, False),
    )
    def test_is_for_functions_that_call_none(self, function, asked, taken):
        x = tf.constant([1.0, 2.0, 3.0, 4.0])
        traced = calls.concrete_function(tf.function(function), asked, x)
        on_one_thread = calls.executor(traced)
        self.assertEqual(
            type(on_one_thread) is not type(calls.executor(_flat)),
            taken,
        )

        def call(_):  # Many at once would wait for each other for ever.
            with calls.executor(traced):
                return traced(x).numpy()

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(call, range(64)))
        self.assertAllClose(results, [function(x).numpy()] * 64)

    def test_calls_are_told_by_start_and_end(self):
        x = tf.constant([1.0, 2.0])
        spans = []
        for asked in (True, False):
            traced = calls.concrete_function(tf.function(_flat), asked, x)
            with calls.timed(lambda *span: spans.append(span)):
                begin = time.perf_counter()
                with calls.executor(traced):
                    traced(x)
                end = time.perf_counter()
            with calls.executor(traced):  # Nobody is told.
                traced(x)
            start, stop = spans[-1]
            self.assertTrue(begin <= start <= stop <= end)
        self.assertLen(spans, 2)


if __name__ == "__main__":
    tf.test.main()
