"""Tests the arithmetic that rates and floors are made of."""

import tensorflow as tf
from absl.testing import parameterized

from research.benchmarking import workloads


class WorkloadsTest(parameterized.TestCase, tf.test.TestCase):
    def test_flops_of_a_dense_network(self):
        # Forward and both gradients, but for the gradient of the data.
        weights = (784 * 600, 600 * 100, 100 * 10)
        per_example = 4 * weights[0] + 6 * (weights[1] + weights[2])
        work = workloads.WORKLOADS["mlp_batch60"]
        self.assertEqual(work.flops_per_round, 50 * 600 * per_example)
        self.assertEqual(work.steps_per_round, 500)

    @parameterized.parameters("mlp_small", "mlp", "cnn")
    def test_forward_flops_are_those_that_tensorflow_counts(self, name):
        work = workloads.WORKLOADS[name]
        model = work.make_model()
        graph = (
            tf.function(lambda x: model(x))
            .get_concrete_function(
                tf.TensorSpec((work.batch_size, *work.feature_shape))
            )
            .graph
        )
        options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
        options["output"] = "none"
        options["account_type_regexes"] = ["MatMul", "Conv2D"]
        counted = tf.compat.v1.profiler.profile(
            graph, cmd="op", options=options
        ).total_float_ops
        kernels = {tuple(w.shape) for w in model.weights if w.shape.rank == 2}
        forward = [
            each
            for each in work.step
            if (
                each.part == "forward"
                if isinstance(each, workloads.Convolution)
                else each.rows == work.batch_size
                and (each.inner, each.columns) in kernels
            )
        ]
        self.assertEqual(sum(each.flops for each in forward), counted)


if __name__ == "__main__":
    tf.test.main()
