"""Tests of validation: examples with weights, and clients held out."""

import warnings

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

_HELD_OUT = "Some clients were held out for validation"


def _named(count: int = toy.NUM_CLIENTS) -> FederatedDataset:
    return toy.clients(count).with_ids([f"client {k}" for k in range(count)])


class SplitTest(tf.test.TestCase, parameterized.TestCase):
    def test_by_what_is_read(self):
        read, own = [], toy.clients(10)
        watched = FederatedDataset.from_client_fn(
            range(10), lambda k: read.append(k) or own.client(k), own.element_spec
        )
        _, held = watched.split_by_id(0.3)
        fed = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=7)
        toy.fit(fed, 4, data=watched, validation_split=0.3, validation_freq=10)
        # All others in each of four rounds; those once, when it is over.
        for client in range(10):
            times = 1 if client in held.client_ids else 4
            self.assertEqual(read.count(client), times)
        self.assertIn(_HELD_OUT, fed.privacy_statement(1e-2))
        self.assertEqual(fed.run.spending.clients.num_clients, 10 - held.num_clients)

    def test_one_client_more_moves_no_other(self):
        fraction = 0.25
        # Else one client more would change many of those who train.
        data = toy.clients().client(0)
        names = [f"client {k}" for k in range(60)]

        def sides(ids):
            clients = FederatedDataset.from_client_fn(ids, lambda _: data)
            return [set(side.client_ids) for side in clients.split_by_id(fraction)]

        for without in names:
            others = [name for name in names if name != without]
            for one, other in zip(sides(names), sides(others), strict=True):
                self.assertEqual(one - {without}, other)

    def test_the_share_is_about_what_was_asked_for(self):
        # Of ids, not of chance: 4.4 standard deviations either way.
        clients = FederatedDataset.from_client_fn(range(2000), lambda _: None)
        for fraction in (0.1, 0.5, 0.9):
            _, held = clients.split_by_id(fraction)
            far = 4.4 * (2000 * fraction * (1 - fraction)) ** 0.5
            self.assertBetween(
                held.num_clients, 2000 * fraction - far, 2000 * fraction + far
            )
        for fraction in (1e-6, 1 - 1e-6):
            for side in clients.take([3, 4]).split_by_id(fraction):
                self.assertEqual(side.num_clients, 1)

    def test_the_metrics_are_those_of_their_examples(self):
        clients = _named()
        _, held = clients.split_by_id(0.25)
        for each in (
            clients,
            FederatedDataset.from_client_fn(clients.client_ids, clients.client),
        ):
            fed = toy.federated(
                clients_per_round=5,
                compile_options={"metrics": ["accuracy"]},
            )
            split = {"validation_split": 0.25, "validation_batch_size": 7}
            history = toy.fit(fed, 2, data=each, **split).history
            x, y = (
                np.concatenate(parts)
                for parts in zip(
                    *(held.client(k) for k in held.client_ids), strict=True
                )
            )
            wanted = fed.evaluate(x, y, verbose=0, return_dict=True)
            for name, value in wanted.items():
                self.assertAllClose(history[f"val_{name}"][-1], value, rtol=1e-4)

    def test_what_the_statement_does_not_claim(self):
        clients = _named()

        def stated(*splits):
            fed = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=5)
            for split in splits:
                toy.fit(fed, data=clients, validation_split=split)
            return _HELD_OUT in fed.privacy_statement(1e-2)

        # They were trained on before, or afterwards.
        self.assertFalse(stated(0.0, 0.25))
        self.assertFalse(stated(0.25, 0.0))
        self.assertFalse(stated(0.25, 0.5))

    @parameterized.parameters(
        ({"validation_split": 1.0}, ValueError, "validation_split"),
        ({"validation_split": -0.1}, ValueError, "validation_split"),
        ({"validation_split": "half"}, TypeError, "validation_split"),
        (
            {"validation_split": 0.1, "validation_data": toy.arrays(3)},
            ValueError,
            "validation_split must be 0 where validation_data is given",
        ),
        ({"validation_data": 3}, TypeError, "validation_data must be .*int"),
        ({"validation_data": [1]}, TypeError, "validation_data must be"),
    )
    def test_what_is_refused(self, options, error, message):
        fed = toy.federated()
        with self.assertRaisesRegex(error, message):
            toy.fit(fed, **options)
        self.assertEqual(fed.rounds, 0)

    def test_one_client_cannot_be_held_out(self):
        fed = toy.federated(clients_per_round=1)
        with self.assertRaisesRegex(ValueError, "single client"):
            fed.fit([toy.arrays(3)], validation_split=0.5, verbose=0)


class ClientsTest(tf.test.TestCase):
    def test_other_clients_and_one_that_cannot_be_read(self):
        def read(client):
            if client == "broken":
                raise OSError("secret")
            return toy.arrays(6)

        others = FederatedDataset.from_client_fn(["broken", "whole"], read)
        fed = toy.federated()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            history = toy.fit(fed, validation_data=others).history
        told = [str(w.message) for w in seen if "held out" in str(w.message)]
        self.assertRegex("".join(told), "1 of 2 .*'broken': OSError")
        self.assertNotIn("secret", "".join(told))
        wanted = fed.evaluate(*toy.arrays(6), verbose=0)
        self.assertAllClose(history["val_loss"], [wanted], rtol=1e-5)
