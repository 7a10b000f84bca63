from __future__ import annotations

import collections
import concurrent.futures
import gc
import threading
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from tensorflow.python.eager import context

from tfdp_fl.engine import calls, graphs

_Pair = collections.namedtuple("_Pair", ["nested", "number"])


def _flat(x):
    return tf.reduce_sum(x * x)


def _conditional(x):
    return tf.cond(x[0] > 0, lambda: tf.reduce_sum(x * x), lambda: x[0])


def _loop(x):
    return tf.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, y + x[i]), (0, 0.0))[
        1
    ]


def _accumulated(x):
    return tf.reduce_sum(tf.raw_ops.AccumulateNV2(inputs=[x, x], shape=[4]))


class OneThreadTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (_flat, True, True),
        (_flat, False, False),
        (_conditional, True, False),
        (_loop, True, False),
        (_accumulated, True, False),
    )
    def test_is_for_functions_that_call_none(self, function, asked, taken):
        x = tf.constant([1.0, 2.0, 3.0, 4.0])
        traced = calls.TracedFunction(tf.function(function), asked, x)

        def call(_):  # Many at once would wait for each other for ever.
            return calls.Call(traced, [x])().numpy()

        with (
            mock.patch.object(
                tf.raw_ops,
                "StatefulPartitionedCall",
                wraps=tf.raw_ops.StatefulPartitionedCall,
            ) as operation,
            concurrent.futures.ThreadPoolExecutor(8) as pool,
        ):
            results = list(pool.map(call, range(64)))
        self.assertAllClose(results, [tf.function(function)(x).numpy()] * 64)
        self.assertEqual(operation.call_count, 64 * taken)
        if taken:
            executors = {each.kwargs["executor_type"] for each in operation.mock_calls}
            self.assertEqual(executors, {"SINGLE_THREADED_EXECUTOR"})

    @parameterized.parameters(
        (_flat, True),
        (_conditional, False),
        (_loop, False),
        (_accumulated, False),
    )
    def test_a_part_of_a_function_is_too(self, function, taken):
        variable, read = tf.Variable(3.0), tf.Variable(1.0)

        def part(x, nested):
            variable.assign_add(read)
            return {"a": (function(x) * variable, nested["rows"] + 1)}

        @tf.function
        def whole(x):
            return calls.called_on_one_thread(part, x, {"rows": x[:2]})

        @tf.function
        def by_default(x):
            return whole.python_function(x)

        x = tf.constant([1.0, 2.0, 3.0, 4.0])
        for count in (4.0, 5.0):
            found, rows = whole(x)["a"]
            self.assertAllClose(found, tf.function(function)(x) * count)
            self.assertAllEqual(rows, [2.0, 3.0])
        called = [
            (node.attr["executor_type"].s, node.attr["f"].func.name)
            for node in whole.get_concrete_function(x).graph.as_graph_def().node
            if node.op == "StatefulPartitionedCall"
        ]
        self.assertLen(called, taken)
        for executor, name in called:
            self.assertEqual(executor, b"SINGLE_THREADED_EXECUTOR")
            library = whole.get_concrete_function(x).graph.as_graph_def().library
            (own,) = [each for each in library.function if each.signature.name == name]
            self.assertTrue(own.attr["_noinline"].b)
        self.assertEqual(
            graphs.assigned_resources(whole.get_concrete_function(x)),
            {id(variable.handle)},
        )
        with calls.by_default_executor():
            operations = by_default.get_concrete_function(x).graph
        self.assertNotIn(
            "StatefulPartitionedCall",
            [each.type for each in operations.get_operations() if function is _flat],
        )

    @parameterized.parameters(
        (lambda x: x + tf.random.uniform([]), True),
        (lambda x: x + tf.random.stateless_uniform([], [1, 2]), False),
    )
    def test_a_part_that_keeps_state_is_found(self, function, wanted):
        def whole(x):
            return calls.called_on_one_thread(function, x)

        traced = tf.function(whole).get_concrete_function(tf.zeros([2]))
        self.assertEqual(graphs.keeps_state(traced.graph), wanted)
        # But for the part it would run many at once.
        self.assertTrue(graphs.calls_functions(traced.graph))

    def test_parts_that_write_one_variable_run_in_order(self):
        count, step = tf.Variable(1.0), tf.Variable(2.0)

        def add(x):
            count.assign(count * x + step)
            return count.read_value()

        @tf.function
        def whole(x):
            first = calls.called_on_one_thread(add, x)
            step.assign(5.0)
            second = calls.called_on_one_thread(add, x)
            step.assign(2.0)
            return first, second

        for _ in range(100):
            count.assign(1.0)
            self.assertAllEqual(whole(tf.constant(3.0)), [5.0, 20.0])

    def test_it_is_what_the_function_returns(self):
        variable, other = tf.Variable([1.0, 2.0]), tf.Variable(3.0)

        @tf.function
        def function(x, rows):
            variable.assign_add(x * other)
            read = variable.read_value()
            nested = {"b": (read, ()), "a": [tf.gather(read, rows), rows]}
            return _Pair(nested, read.shape.rank + x[0])

        def called(call):
            variable.assign([1.0, 2.0])
            return tf.nest.map_structure(lambda each: each.numpy(), call())

        x, rows = tf.constant([5.0, 7.0]), np.array([1, 0, 1], np.int32)
        specs = tf.TensorSpec([2]), tf.TensorSpec([None], tf.int32)
        traced = calls.TracedFunction(function, True, *specs)
        wanted = called(lambda: traced.concrete(x, tf.constant(rows)))
        call = calls.Call(traced, (x, rows))
        found = called(call)
        self.assertIsInstance(found, _Pair)
        tf.nest.assert_same_structure(found, wanted)
        tf.nest.map_structure(np.testing.assert_array_equal, found, wanted)
        with calls.by_default_executor():
            by_default = called(call)
        tf.nest.map_structure(np.testing.assert_array_equal, by_default, wanted)

    def test_tensors_of_several_parts_are_made_of_theirs(self):
        x = tf.constant([1.0, 2.0, 3.0])

        def function(x):
            ragged = tf.RaggedTensor.from_row_splits(
                2 * x, tf.constant([0, 1, 3]), validate=False
            )
            return [-x, (ragged, {"sum": tf.reduce_sum(x)}), x]

        traced = calls.TracedFunction(tf.function(function), True, x)
        first, (ragged, named), last = calls.Call(traced, [x])()
        self.assertAllEqual(first, [-1.0, -2.0, -3.0])
        self.assertEqual(ragged.to_list(), [[2.0], [4.0, 6.0]])
        self.assertEqual(named["sum"].numpy(), 6.0)
        self.assertAllEqual(last, [1.0, 2.0, 3.0])

    def test_what_is_no_tensor_is_left_to_tensorflow(self):
        x = tf.constant([1.0, 2.0])
        traced = calls.TracedFunction(tf.function(lambda x: (None, 2 * x)), True, x)
        nothing, found = calls.Call(traced, [x])()
        self.assertIsNone(nothing)
        self.assertAllEqual(found, [2.0, 4.0])

    def test_errors_are_those_of_the_function(self):
        x = tf.constant([1.0, 2.0])
        function = tf.function(lambda x, row: tf.gather(x, row))
        for asked in (True, False):
            traced = calls.TracedFunction(function, asked, x, tf.constant(0))
            with self.assertRaisesRegex(
                tf.errors.InvalidArgumentError, r"7 is not in \[0, 2\)"
            ):
                calls.Call(traced, (x, tf.constant(7)))()

    def test_tensorflow_keeps_nothing_of_a_function_that_is_gone(self):
        x = tf.constant([1.0, 2.0])
        gc.collect()  # Others' functions.
        with mock.patch.object(
            context.Context, "clear_kernel_cache", autospec=True
        ) as clear:
            traced = calls.TracedFunction(tf.function(_flat), True, x)
            calls.Call(traced, [x])()
            gc.collect()
            clear.assert_not_called()
            del traced
            gc.collect()
            clear.assert_called_once()

    def test_functions_that_go_do_others_no_harm(self):
        x = tf.constant([1.0, 2.0])
        kept = calls.TracedFunction(tf.function(_flat), True, x)
        ended = threading.Event()

        def call(_):
            found = set()
            while not ended.is_set():
                found.add(float(calls.Call(kept, [x])()))
            return found

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = pool.map(call, range(2))
            try:
                for _ in range(30):
                    other = calls.TracedFunction(tf.function(_flat), True, x)
                    self.assertEqual(float(calls.Call(other, [x])()), 5.0)
                    del other
                    gc.collect()
            finally:
                ended.set()
            self.assertEqual(list(found), [{5.0}] * 2)

    def test_calls_are_told_by_start_and_end(self):
        x = tf.constant([1.0, 2.0])
        spans = []
        for asked in (True, False):
            traced = calls.TracedFunction(tf.function(_flat), asked, x)
            with calls.timed(lambda *span: spans.append(span)):
                begin = time.perf_counter()
                calls.Call(traced, [x])()
                end = time.perf_counter()
            calls.Call(traced, [x])()  # Nobody is told.
            start, stop = spans[-1]
            self.assertTrue(begin <= start <= stop <= end)
        self.assertLen(spans, 2)


def _counting(xla=False):
    """Returns a `tf.function` that adds to a variable, and its variables."""
    count, rate = tf.Variable(0.0), tf.Variable(2.0)

    @tf.function(jit_compile=xla)
    def function(x):
        count.assign_add(rate * tf.reduce_sum(x))
        return count.read_value()

    return function, count, rate


class OnOthersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((True, False), (False, False), (False, True))
    def test_variables_are_exchanged(self, one_thread, xla):
        x = tf.constant([1.0, 2.0])
        function, count, rate = _counting(xla)
        first = calls.TracedFunction(function, one_thread, x)
        own = tf.Variable(100.0)
        other = first.on_others({id(count.handle): own.handle})
        self.assertEqual(calls.Call(other, [x])().numpy(), 106.0)
        self.assertEqual((count.numpy(), own.numpy()), (0.0, 106.0))
        rate.assign(1.0)  # It only reads this one, which stays.
        self.assertEqual(calls.Call(first, [x])().numpy(), 3.0)
        self.assertEqual(calls.Call(other, [x])().numpy(), 109.0)
        with calls.by_default_executor():
            self.assertEqual(calls.Call(other, [x])().numpy(), 112.0)
        self.assertEqual((count.numpy(), own.numpy()), (3.0, 112.0))

    @parameterized.parameters(True, False)
    def test_not_if_another_variable_would_be_written(self, one_thread):
        x = tf.constant([1.0, 2.0])
        function, count, rate = _counting()
        first = calls.TracedFunction(function, one_thread, x)
        for exchanged, wanted in (
            ([rate], False),
            ([], False),
            ([count], True),
            ([rate, count], True),
        ):
            found = {id(each.handle) for each in exchanged}
            self.assertEqual(first.can_run_on_others(found), wanted)

    @parameterized.parameters((True, False), (False, False), (False, True))
    def test_many_at_once_each_on_its_own(self, one_thread, xla):
        function, count, _ = _counting(xla)
        x = tf.constant([1.0, 2.0])
        first = calls.TracedFunction(function, one_thread, x)
        own = [tf.Variable(float(number)) for number in range(6)]
        others = [first.on_others({id(count.handle): each.handle}) for each in own]

        def call(other):
            return [calls.Call(other, [x])().numpy() for _ in range(50)]

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            found = list(pool.map(call, others))
        for number, values in enumerate(found):
            self.assertAllEqual(values, number + 6.0 * np.arange(1, 51))
        self.assertEqual(count.numpy(), 0.0)

    def test_an_error_of_the_first_call_is_raised(self):
        count = tf.Variable(0.0)

        @tf.function
        def function(x, row):
            count.assign_add(1.0)
            return (
                tf.gather(x, row)
                + tf.while_loop(lambda i: i < 2.0, lambda i: (i + 1.0,), (0.0,))[0]
            )

        x = tf.constant([1.0, 2.0])
        first = calls.TracedFunction(function, True, x, tf.constant(0))
        own = tf.Variable(0.0)
        other = first.on_others({id(count.handle): own.handle})
        with self.assertRaisesRegex(
            tf.errors.InvalidArgumentError, r"7 is not in \[0, 2\)"
        ):
            calls.Call(other, [x, tf.constant(7)])()
        self.assertEqual(calls.Call(other, [x, tf.constant(1)])().numpy(), 4.0)

    @parameterized.parameters(
        (tf.add_n, 2048),
        (
            lambda terms: tf.raw_ops.AccumulateNV2(inputs=terms, shape=terms[0].shape),
            512,
        ),
    )
    def test_sums_of_several_calls_do_not_meet(self, add, size):
        """TensorFlow finds its temporary variables by their nodes' names."""
        x = tf.random.stateless_uniform([size, size], [1, 2])

        def function(x):
            return tf.reduce_sum(add([tf.sin(x * n) for n in range(1, 12)]))

        traced = calls.TracedFunction(tf.function(function), False, x)

        def call(number):
            return calls.Call(traced, [x + float(number % 4)])().numpy()

        alone = [call(number) for number in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(call, range(24)))
        self.assertAllClose(found, alone * 6, rtol=1e-4)

    def test_large_sums_on_one_thread(self):
        """They have no temporary variables, which it could not run."""
        x = tf.random.stateless_uniform([2048, 2048], [1, 2])

        def part(x):
            return tf.reduce_sum(tf.add_n([tf.sin(x * n) for n in range(12)]))

        def whole(x):
            return calls.called_on_one_thread(part, x)

        for one_thread, function in ((True, part), (False, whole)):
            traced = calls.TracedFunction(tf.function(function), one_thread, x)
            self.assertAllClose(calls.Call(traced, [x])(), part(x), rtol=1e-4)


if __name__ == "__main__":
    tf.test.main()
