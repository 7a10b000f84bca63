from __future__ import annotations

from absl.testing import absltest, parameterized

from tfdp_fl import datasets


class LoadFromConfigTest(parameterized.TestCase):
    def test_some_of_a_loaders_clients(self):
        clients, _ = datasets.load_digits(num_clients=20)
        taken = clients.take([7, 3]).take([1])
        again = datasets.load_from_config(taken.config)
        self.assertEqual(list(again.client_ids), [3])
        self.assertEqual(again.client(3)[0].tolist(), clients.client(3)[0].tolist())

    def test_what_no_loader_made_has_no_config(self):
        clients, _ = datasets.load_digits(num_clients=20)
        self.assertIsNone(clients.map(lambda x, y: (x + 1, y)).config)

    @parameterized.parameters(
        ({"num_clients": 3}, ValueError, "config must name a loader"),
        ({"loader": "os.system"}, ValueError, "loader must be one of 'digits'"),
        ({"loader": "digits", "colour": 1}, TypeError, "colour"),
        ("digits", TypeError, "config must be a Mapping"),
    )
    def test_refuses(self, config, error, message):
        with self.assertRaisesRegex(error, message):
            datasets.load_from_config(config)


if __name__ == "__main__":
    absltest.main()
