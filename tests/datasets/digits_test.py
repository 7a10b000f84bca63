from __future__ import annotations

import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import datasets


class LoadDigitsTest(parameterized.TestCase):
    def test_features_and_labels(self):
        clients, (x_test, y_test) = datasets.load_digits()
        x, y = clients.flat()
        self.assertEqual(clients.num_clients, 100)
        self.assertEqual(x.shape, [1437, 64])
        self.assertEqual(x_test.shape, (360, 64))
        for features, labels in ((x.numpy(), y.numpy()), (x_test, y_test)):
            self.assertEqual(features.dtype, np.float32)
            self.assertEqual(labels.dtype, np.int32)
            self.assertEqual((features.min(), features.max()), (0, 1))
            self.assertEqual(set(labels), set(range(10)))

    def test_no_test_example_is_with_a_client(self):
        clients, (x_test, _) = datasets.load_digits()
        train = {row.tobytes() for row in clients.flat()[0].numpy()}
        everything = train | {row.tobytes() for row in x_test}
        self.assertLen(everything, 1797)

    def test_validation_examples_replace_the_test_set(self):
        _, (x_test, _) = datasets.load_digits()
        clients, (x_val, y_val) = datasets.load_digits(validation_examples=200)
        self.assertEqual(clients.flat()[0].shape[0], 1237)
        self.assertLen(y_val, 200)
        tested = {row.tobytes() for row in x_test}
        seen = {row.tobytes() for row in clients.flat()[0].numpy()}
        self.assertEmpty(tested & {row.tobytes() for row in x_val})
        self.assertEmpty(tested & seen)

    @parameterized.parameters(
        ({"num_clients": 0}, "num_clients must be"),
        ({"test_fraction": 1.0}, "test_fraction must be"),
        ({"validation_examples": 1437}, "validation_examples must be less"),
        ({"examples_per_client": 2000}, "examples_per_client must be at most"),
    )
    def test_refuses(self, wrong, message):
        with self.assertRaisesRegex(ValueError, message):
            datasets.load_digits(**wrong)


if __name__ == "__main__":
    absltest.main()
