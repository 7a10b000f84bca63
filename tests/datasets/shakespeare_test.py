from __future__ import annotations

import os
import pathlib
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tfdp_fl import datasets

_PLAY = """\
First Witch:
When shall we three meet again
In thunder, lightning, or in rain?

Second Witch:
When the hurlyburly's done,

GHOST:

First Witch:
Where the place?


CAT:
Mew
"""
_FIRST = (
    "When shall we three meet again\nIn thunder, lightning, or in rain?\n"
    "Where the place?"
)


def _text(ids) -> str:
    """Returns what ids stand for; padding is nothing."""
    vocabulary = ("", "\ufffd", *datasets.shakespeare_vocabulary()[2:])
    return "".join(vocabulary[k] for k in np.reshape(ids, -1))


class LoadShakespeareTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = os.path.join(directory.name, "play.txt")
        pathlib.Path(self.path).write_text(_PLAY, encoding="utf-8")

    def test_a_client_is_a_role_that_speaks(self):
        clients, _ = datasets.load_shakespeare(self.path)
        self.assertEqual(
            list(clients.client_ids), ["First Witch", "Second Witch", "CAT"]
        )

    def test_labels_are_the_next_characters(self):
        clients, _ = datasets.load_shakespeare(
            self.path, sequence_length=10, test_fraction=0
        )
        x, y = clients.client("First Witch")
        self.assertEqual(x.shape, (9, 10))
        self.assertEqual(
            (x.dtype, y.dtype, clients.element_spec[0].shape),
            (np.int32, np.int32, tf.TensorShape([10])),
        )
        self.assertEqual(_text(x), _FIRST[:-1])
        self.assertEqual(_text(y), _FIRST[1:])

    def test_the_end_of_every_role_is_the_test_set(self):
        clients, (x_test, y_test) = datasets.load_shakespeare(
            self.path, sequence_length=5, test_fraction=0.2
        )
        held = [len(_FIRST) // 5, 27 // 5, 0]
        kept_text = _FIRST[: -held[0]]
        self.assertEqual(
            _text(clients.client("First Witch")[1]),
            kept_text[1:],
        )
        self.assertEqual(
            _text(y_test[: -(-(held[0] - 1) // 5)]),
            _FIRST[-held[0] :][1:],
        )
        self.assertEqual(np.sum(x_test > 0), held[0] - 1 + held[1] - 1)

    def test_a_role_may_be_several_clients(self):
        whole, test = datasets.load_shakespeare(self.path, sequence_length=10)
        parts, other_test = datasets.load_shakespeare(
            self.path, sequence_length=10, clients_per_role=3
        )
        np.testing.assert_array_equal(test[0], other_test[0])
        for role in whole.client_ids:
            names = [n for n in parts.client_ids if n.rsplit("/", 1)[0] == role]
            x, _ = whole.client(role)
            count = min(3, max(1, len(x)))
            self.assertEqual(names, [f"{role}/{k + 1}" for k in range(count)])
            together = zip(*map(parts.client, names), strict=True)
            for array, own in zip(whole.client(role), together, strict=True):
                np.testing.assert_array_equal(array, np.concatenate(own))

    @parameterized.parameters(
        ({"sequence_length": 0}, "sequence_length must be"),
        ({"test_fraction": 1}, "test_fraction must be less than 1"),
        ({"clients_per_role": 0}, "clients_per_role must be"),
    )
    def test_refuses(self, wrong, message):
        with self.assertRaisesRegex(ValueError, message):
            datasets.load_shakespeare(self.path, **wrong)

    @parameterized.parameters(
        ("Once upon a time", "starts with 'Once upon a time'"),
        ("GHOST:\n\n", "in which somebody speaks"),
    )
    def test_refuses_other_files(self, text, message):
        other = pathlib.Path(self.path + ".other")
        other.write_text(text, encoding="utf-8")
        with self.assertRaisesRegex(ValueError, message):
            datasets.load_shakespeare(other)
