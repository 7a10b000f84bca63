from __future__ import annotations

import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl.engine import graphs


def _traced(function, *arguments):
    return tf.function(function, autograph=False).get_concrete_function(*arguments)


class AssignedTest(tf.test.TestCase):
    def test_is_what_is_written_anywhere_in_it(self):
        read, written, inside = (tf.Variable(1.0) for _ in range(3))

        def function(x, table):
            def body(i):
                inside.assign_add(x)
                return (i + 1,)

            (steps,) = tf.while_loop(lambda i: i < 3, body, (tf.constant(0),))
            written.assign(x)
            return read * tf.cast(steps, tf.float32) + tf.gather(table, 0)

        # Arguments come first among a graph's inputs.
        found = graphs.assigned_resources(
            _traced(function, tf.constant(1.0), tf.zeros([3]))
        )
        self.assertEqual(found, {id(written.handle), id(inside.handle)})

    def test_in_conditionals_and_functions(self):
        read, written, inside = (tf.Variable(1.0) for _ in range(3))

        @tf.function
        def called(x):
            inside.assign(x * read)
            return x

        def function(x):
            return tf.cond(x > 0, lambda: called(x) + written.assign(x), lambda: -x)

        found = graphs.assigned_resources(_traced(function, tf.constant(1.0)))
        self.assertEqual(found, {id(written.handle), id(inside.handle)})


class KeepsStateTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda x: x + tf.random.uniform([]), True),
        (lambda x: x + tf.random.normal([], seed=3), True),
        (lambda x: x + tf.random.stateless_uniform([], [1, 2]), False),
        (lambda x: tf.numpy_function(lambda y: y, [x], tf.float32), True),
        (
            lambda x: tf.data.Dataset.range(3).reduce(
                x, lambda y, _: y + tf.random.uniform([])
            ),
            True,
        ),
    )
    def test_of_operations(self, function, wanted):
        graph = _traced(function, tf.constant(1.0)).graph
        self.assertEqual(graphs.keeps_state(graph), wanted)

    @parameterized.parameters(tf.random.uniform, tf.zeros)
    def test_inside_of_loops_and_conditionals(self, draw):
        variable = tf.Variable(0.0)
        generator = tf.random.Generator.from_seed(1)

        def function(x):
            def body(i, y):
                y = tf.cond(y > 0, lambda: y + draw([]), lambda: y)
                tf.debugging.assert_less(y, 100.0)
                variable.assign_add(y)
                return i + 1, y + generator.uniform([])

            return tf.while_loop(lambda i, _: i < 3, body, (0, x))

        graph = _traced(function, tf.constant(1.0)).graph
        self.assertEqual(graphs.keeps_state(graph), draw is tf.random.uniform)
        self.assertTrue(graphs.calls_functions(graph))


class TemporaryVariablesTest(tf.test.TestCase):
    def test_are_found_anywhere(self):
        def add(*terms):
            return tf.raw_ops.AccumulateNV2(inputs=terms, shape=[])

        for function, wanted in (
            (lambda x: add(x, x), True),
            (lambda x: tf.cond(x > 0, lambda: add(x, x), lambda: x), True),
            (lambda x: tf.function(add)(x, x), True),
            (lambda x: tf.add_n([x, x]), False),
        ):
            graph = _traced(function, tf.constant(1.0)).graph
            self.assertEqual(graphs.has_temporary_variables(graph), wanted)


if __name__ == "__main__":
    tf.test.main()
