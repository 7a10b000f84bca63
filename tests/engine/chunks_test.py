"""Cohorts are read ahead, and what comes out is the same."""

from __future__ import annotations

import threading
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.engine import cohorts
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import chunks, cohort, labels


class _Files:
    """Clients that say when they are read, and in which thread."""

    def __init__(self, num_clients=12, failing=()):
        self.arrays = {k: toy.arrays(4 + k % 2, seed=k) for k in range(num_clients)}
        self.failing = failing
        self.read = []
        self.threads = set()
        self.reading = threading.Condition()

    def __call__(self, client):
        with self.reading:
            self.read.append(client)
            self.threads.add(threading.current_thread())
            self.reading.notify_all()
        if client in self.failing:
            raise OSError("gone")
        return self.arrays[client]

    def dataset(self):
        x, y = toy.arrays(1)
        spec = (tf.TensorSpec(x.shape[1:]), tf.TensorSpec([], y.dtype))
        return FederatedDataset.from_client_fn(list(self.arrays), self, spec)

    def wait_for(self, count):
        with self.reading:
            assert self.reading.wait_for(lambda: len(self.read) >= count, 60)


def _reader(dataset, label_ranges=()):
    return chunks.Reader(
        element_spec=dataset.element_spec, label_ranges=list(label_ranges)
    )


def _pending(dataset, positions):
    inputs = cohorts.inputs(dataset, positions=np.asarray(positions))
    return cohort.PendingRound(
        inputs=inputs, state=(), tensors=inputs.tensors(), sums=[None]
    )


def _drawing(dataset, positions):
    return lambda: _pending(dataset, positions).inputs


class ReaderTest(tf.test.TestCase):
    def test_nothing_is_read_from_a_row_of_open_length_1(self):
        spec = (
            tf.TensorSpec([None], tf.int32),
            tf.TensorSpec([None], tf.float32),
        )
        empty = np.zeros([0, 0], np.int32), np.zeros([0, 0], np.float32)
        dataset = FederatedDataset.from_client_fn([0], lambda _: empty, spec)
        for name, count in {"nobody": 0, "an empty one": 1}.items():
            with self.subTest(name):
                pending = _pending(dataset, range(count))
                (chunk,) = _reader(dataset)(dataset, pending)
                self.assertEqual(pending.failures, [])
                self.assertAllEqual(chunk.lengths, [0] * count)
                self.assertEqual(chunk.x.shape, [1, 1])
                self.assertEqual(chunk.y.shape, [1, 1])
                self.assertEqual(chunk.y.dtype, tf.float32)

    def test_the_next_round_is_read_while_this_one_trains(self):
        files = _Files(failing=(4,))
        dataset = files.dataset()
        reader = _reader(dataset)
        reader.expect(_drawing(dataset, [3, 4, 5]))
        first = _pending(dataset, [0, 1])
        for chunk in reader(dataset, first):
            self.assertAllEqual(chunk.members, [0, 1])
            reader.read_ahead()
            files.wait_for(5)  # Before the first round's chunk is done with.
        self.assertEqual(first.failures, [])
        second = _pending(dataset, [3, 4, 5])
        (chunk,) = reader(dataset, second)
        self.assertEqual(files.read, [0, 1, 3, 4, 5])  # And not again.
        self.assertAllEqual(chunk.members, [0, 2])
        self.assertAllEqual(
            chunk.x, np.concatenate([files.arrays[k][0] for k in (3, 5)])
        )
        self.assertEqual([each.position for each in second.failures], [4])
        self.assertNotIn(threading.main_thread(), files.threads)
        reader.close()

    def test_another_cohort_than_expected(self):
        files = _Files()
        dataset = files.dataset()
        reader = _reader(dataset)
        reader.expect(_drawing(dataset, [3, 4]))
        list(reader(dataset, _pending(dataset, [0, 1])))
        (chunk,) = reader(dataset, _pending(dataset, [6, 7]))
        self.assertAllEqual(
            chunk.x, np.concatenate([files.arrays[k][0] for k in (6, 7)])
        )
        other = _Files()
        reader.expect(_drawing(dataset, [3, 4]))
        list(reader(dataset, _pending(dataset, [0, 1])))
        list(reader(other.dataset(), _pending(dataset, [3, 4])))
        self.assertEqual(other.read, [3, 4])
        reader.close()

    def test_closed_in_the_middle(self):
        files = _Files()
        dataset = files.dataset()
        reader = _reader(dataset)
        reader.expect(_drawing(dataset, np.arange(3, 12)))
        reading = reader(dataset, _pending(dataset, [0, 1]))
        next(reading)
        reader.close()
        count = len(files.read)
        self.assertFalse(any(each.is_alive() for each in files.threads))
        self.assertEqual(len(files.read), count)
        # And used again.
        (chunk,) = reader(dataset, _pending(dataset, [3, 4]))
        self.assertAllEqual(chunk.lengths, [5, 4])
        reader.close()

    def test_wrong_labels_are_left_out_of_a_chunk_and_nothing_else(self):
        files = _Files(failing=(5,))
        wrong = {0: -1, 4: 3, 7: 10**6, 11: 3}
        for client, label in wrong.items():
            x, y = files.arrays[client]
            files.arrays[client] = x, np.where(np.arange(len(y)) == 2, label, y)
        dataset = files.dataset()
        good = [k for k in range(12) if k not in wrong and k != 5]
        for chunk_bytes in (1, 200, chunks.CHUNK_BYTES):
            reader = _reader(dataset, [labels.LabelRange(0, 3, None)])
            pending = _pending(dataset, np.arange(12))
            with mock.patch.object(chunks, "CHUNK_BYTES", chunk_bytes):
                read = list(reader(dataset, pending))
            reader.close()
            members = np.concatenate([chunk.members for chunk in read])
            self.assertEqual(members.tolist(), good)
            failed = [each.position for each in pending.failures]
            self.assertEqual(failed, sorted([*wrong, 5]))
            for column, side in enumerate("xy"):
                # And zeros after them, nothing of clients that failed.
                self.assertAllEqual(
                    np.concatenate(
                        [np.asarray(getattr(chunk, side))[chunk.rows] for chunk in read]
                    ),
                    np.concatenate([files.arrays[k][column] for k in good]),
                )
            for chunk in read:
                after = np.asarray(chunk.x)[len(chunk.rows) :]
                self.assertAllEqual(after, np.zeros_like(after))

    def test_chunks_of_bounded_size(self):
        files = _Files()
        dataset = files.dataset()
        reader = _reader(dataset)
        with mock.patch.object(chunks, "CHUNK_BYTES", 1):
            for _ in range(2):
                pending = _pending(dataset, np.arange(12))
                reader.expect(_drawing(dataset, np.arange(12)))
                members = [
                    int(m) for chunk in reader(dataset, pending) for m in chunk.members
                ]
                self.assertEqual(members, list(range(12)))
        reader.close()


class FitTest(tf.test.TestCase):
    def test_nobody_is_read_who_takes_no_part(self):
        # After the last round nothing is drawn or read ahead.
        files = _Files()
        fed = toy.federated(sampling="fixed_size", clients_per_round=4)
        history = fed.fit(files.dataset(), rounds=4, verbose=0).history
        self.assertLen(files.read, int(sum(history["cohort_size"])))
        self.assertFalse(any(each.is_alive() for each in files.threads))

    def test_a_training_that_stops_early(self):
        class Stop(tf.keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                self.model.stop_training = True

        files = _Files()
        fed = toy.federated(clients_per_round=4)
        fed.fit(files.dataset(), rounds=9, verbose=0, seed=1, callbacks=[Stop()])
        self.assertFalse(any(each.is_alive() for each in files.threads))
        self.assertLessEqual(len(files.read), 8)
        # What was drawn for nothing changes nothing of what comes.
        one = fed.fit(files.dataset(), rounds=2, verbose=0, seed=1)
        other = toy.federated(clients_per_round=4)
        whole = other.fit(files.dataset(), rounds=3, verbose=0, seed=1)
        self.assertAllClose(one.history["loss"], whole.history["loss"][1:], rtol=1e-5)
