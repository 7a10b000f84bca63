"""Functions that run at the same time do not meet."""

from __future__ import annotations

import concurrent.futures
import time

import tensorflow as tf

from tfdp_fl.engine import calls


class TracedFunctionTest(tf.test.TestCase):
    def test_sums_of_several_calls_do_not_meet(self):
        """TensorFlow finds its temporary variables by their nodes' names."""
        x = tf.random.stateless_uniform([2048, 2048], [1, 2])

        def function(x):
            return tf.reduce_sum(tf.add_n([tf.sin(x * n) for n in range(1, 12)]))

        # Two functions with nodes of the same names.
        traced = [calls.TracedFunction(tf.function(function), x) for _ in range(2)]

        def call(number):
            return traced[number % 2](x + float(number % 4)).numpy()

        alone = [call(number) for number in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(call, range(24)))
        self.assertAllClose(found, alone * 6, rtol=1e-4)

    def test_calls_are_told_by_start_and_end(self):
        x = tf.constant([1.0, 2.0])
        spans = []
        traced = calls.TracedFunction(tf.function(tf.reduce_sum), x)
        with calls.timed(lambda *span: spans.append(span)):
            begin = time.perf_counter()
            traced(x)
            end = time.perf_counter()
        traced(x)  # Nobody is told.
        ((start, stop),) = spans
        self.assertTrue(begin <= start <= stop <= end)


if __name__ == "__main__":
    tf.test.main()
