"""Cohorts are read ahead and laid out, and what comes out is the same."""

import dataclasses
import threading
from unittest import mock

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.engine import cohorts
from tests.keras import hostile, toy
from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import cohort, labels, layout, ray_workers


class _Files:
    """Clients that say when they are read, and in which thread."""

    def __init__(self, failing=()):
        self.arrays = {k: toy.arrays(4 + k % 2, seed=k) for k in range(12)}
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

    def side(self, column, clients):
        return np.concatenate([self.arrays[k][column] for k in clients])

    def assert_quiet(self):
        assert not any(thread.is_alive() for thread in self.threads)


def _inputs(dataset, positions):
    return cohorts.inputs(dataset, positions=np.asarray(positions), local_epochs=1)


def _pending(dataset, positions):
    options = {"state": (), "broadcast": (), "threads": [cohort.ThreadSum()]}
    return cohort.PendingRound(inputs=_inputs(dataset, positions), **options)


def _read(dataset, pending):
    return layout.Layout(element_spec=dataset.element_spec).read(dataset, pending)


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_read_from_a_row_of_zeros(count):
    spec = tf.TensorSpec([2], tf.int32), tf.TensorSpec([2], tf.float32)
    empty = np.zeros([0, 2], np.int32), np.zeros([0, 2], np.float32)
    dataset = FederatedDataset.from_client_fn([0], lambda _: empty, spec)
    pending = _pending(dataset, range(count))
    (chunk,) = _read(dataset, pending)
    assert pending.failures == []
    assert list(chunk.table.num_examples) == [0] * count
    assert chunk.x.shape == chunk.y.shape == (1, 2)


def test_the_next_chunk_is_read_while_this_one_trains():
    files = _Files(failing=(4,))
    dataset = files.dataset()
    pending, members = _pending(dataset, [0, 1, 4, 5]), []
    with mock.patch.object(layout, "CHUNK_BYTES", 1):
        for chunk in _read(dataset, pending):
            members += chunk.table.members.tolist()
            with files.reading:  # Before this chunk is done with.
                wanted = min(4, len(members) + 1)
                assert files.reading.wait_for(lambda n=wanted: len(files.read) >= n, 60)
    assert members == [0, 1, 3]
    assert [each.position for each in pending.failures] == [4]
    assert files.read == [0, 1, 4, 5]
    assert threading.main_thread() not in files.threads
    files.assert_quiet()


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(("rows", "epochs"), [(3_000_000, 2000), (2**20, 2**12)])
def test_a_client_with_too_many_rows_fails_alone(in_memory, rows, epochs):
    # Int32 does not number 2^32 rows, nor is there memory for six billions of them.
    many = toy.arrays(4)
    large = np.zeros([rows, 8], np.float16), np.zeros(rows, np.int8)
    dataset = FederatedDataset.from_client_arrays({0: many, 1: large, 2: many})
    dataset = dataset.conform(
        (tf.TensorSpec([8], tf.float16), tf.TensorSpec([], tf.int8))
    )
    if not in_memory:
        dataset = toy.streamed(dataset)
    pending = _pending(dataset, [0, 1, 2])
    pending.inputs = dataclasses.replace(pending.inputs, local_epochs=epochs)
    (chunk,) = _read(dataset, pending)
    (failure,) = pending.failures
    assert failure.position == 1
    assert "local_epochs must be lower" in failure.reason
    assert chunk.table.members.tolist() == [0, 2]
    assert chunk.table.first_row.tolist() == [0, 4 * epochs]
    assert len(chunk.table.rows) == 8 * epochs


@pytest.mark.parametrize("streamed", [False, True])
@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(lengths=st.lists(st.integers(0, 40), max_size=9))
def test_a_chunk_is_of_bounded_size_or_of_one_client(streamed, lengths):
    arrays = {k: toy.arrays(n, seed=k) for k, n in enumerate([1, *lengths])}
    dataset = FederatedDataset.from_client_arrays(arrays)
    if streamed:
        dataset = toy.streamed(dataset)
    pending = _pending(dataset, range(len(arrays)))
    pending.inputs = dataclasses.replace(pending.inputs, local_epochs=2)
    with mock.patch.object(layout, "CHUNK_BYTES", 400):
        chunks = list(_read(dataset, pending))
    members = np.concatenate([chunk.table.members for chunk in chunks])
    assert members.tolist() == [*arrays]
    for chunk in chunks:
        num_bytes = chunk.table.rows.nbytes
        if streamed:
            num_bytes += chunk.x.numpy().nbytes + chunk.y.numpy().nbytes
        with_examples = np.count_nonzero(chunk.table.num_examples)
        assert num_bytes <= 400 or with_examples <= 1
        rows = np.asarray(chunk.x)[chunk.table.rows]
        own = [np.tile(arrays[k][0], (2, 1)) for k in chunk.table.members]
        np.testing.assert_array_equal(rows, np.concatenate(own))


@pytest.mark.parametrize(("streamed", "num_bytes"), [(False, 60), (True, 500)])
def test_a_client_for_which_memory_does_not_suffice_fails_alone(streamed, num_bytes):
    arrays = {k: toy.arrays(n, seed=k) for k, n in enumerate([3, 30, 4, 5])}
    dataset = FederatedDataset.from_client_arrays(arrays)
    if streamed:
        dataset = toy.streamed(dataset)
    make = layout.client_table

    def with_little_memory(rows, lengths, *others):
        if max(lengths, default=0) == at_fault:
            raise MemoryError
        return make(rows, lengths, *others)

    pending, at_fault = _pending(dataset, range(4)), 30
    little = mock.patch.object(layout, "client_table", with_little_memory)
    with little, mock.patch.object(layout, "CHUNK_BYTES", num_bytes):
        read = list(_read(dataset, pending))
        assert np.concatenate([c.table.members for c in read]).tolist() == [0, 2, 3]
        (failure,) = pending.failures
        assert failure.position == 1
        assert failure.error.__traceback__ is failure.error.__context__ is None
        # Nobody has failed if there is none for several of bounded size.
        at_fault, pending = 5, _pending(dataset, range(4))
        with pytest.raises(tf.errors.ResourceExhaustedError):
            list(_read(dataset, pending))


def test_xla_is_given_a_clients_examples_once():
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=[40, 3]))
    shuffle = [np.random.Philox(1)]
    for rows in (rng.permutation(40)[:13], np.arange(4), np.array([7] * 8)):
        table = layout.client_table(rows, np.array([len(rows)]), 4, 5, shuffle)
        own = layout.gather(layout.Chunk(x, x[:, 0], table), table)
        assert len(own.x) <= 8 * len(rows)
        assert len(own.table.rows) in {4 * 5, 4 * 8 * 5}
        places = own.table.rows[: len(table.rows)]
        np.testing.assert_array_equal(own.x.numpy()[places], x.numpy()[table.rows])


def test_text_that_no_tensor_holds_fails_alone():
    texts = {"a": [b"\xff"], "b": ["\udc80"], "c": ["é"]}
    dataset = FederatedDataset.from_client_fn(
        list(texts), lambda k: (np.array(texts[k]), np.zeros(1, np.float32))
    )
    pending = _pending(dataset, range(3))
    (chunk,) = _read(dataset, pending)
    assert [each.position for each in pending.failures] == [1]
    assert chunk.x.numpy().tolist() == [b"\xff", "é".encode()]


@pytest.mark.parametrize("chunk_bytes", [1, 200, layout.CHUNK_BYTES])
def test_wrong_labels_are_left_out_of_a_chunk_and_nothing_else(chunk_bytes):
    files = _Files(failing=(5,))
    wrong = {0: -1, 4: 3, 7: 10**6, 11: 3}
    for client, label in wrong.items():
        x, y = files.arrays[client]
        files.arrays[client] = x, np.where(np.arange(len(y)) == 2, label, y)
    allowed = [labels.LabelRange(0, 3, None)]
    dataset = labels.check_clients(files.dataset(), allowed)
    good = [k for k in range(12) if k not in wrong and k != 5]
    pending = _pending(dataset, np.arange(12))
    with mock.patch.object(layout, "CHUNK_BYTES", chunk_bytes):
        read = list(_read(dataset, pending))
    members = np.concatenate([chunk.table.members for chunk in read])
    assert members.tolist() == good
    assert [each.position for each in pending.failures] == sorted([*wrong, 5])
    for column, side in enumerate("xy"):
        # And zeros after them, nothing of clients that failed.
        rows = [np.asarray(getattr(chunk, side))[chunk.table.rows] for chunk in read]
        np.testing.assert_array_equal(np.concatenate(rows), files.side(column, good))
    for chunk in read:
        assert not np.asarray(chunk.x)[len(chunk.table.rows) :].any()


@pytest.mark.parametrize("on_workers", [False, True])
def test_where_training_breaks_off_nobody_is_read_any_more(on_workers):
    files, broken = _Files(), mock.Mock(side_effect=RuntimeError("no memory"))
    fed = toy.federated(clients_per_round=9, sampling="fixed_size")
    owner, name = engine.CohortEngine, "train_chunk"
    if on_workers:
        owner, name = ray_workers.ShardedCohorts, "_train_chunk"
    with (
        mock.patch.object(layout, "CHUNK_BYTES", 1),
        mock.patch.object(owner, name, broken),
        # What was raised is kept, and with it all that was going on.
        pytest.raises(RuntimeError, match="no memory") as kept,
    ):
        runtime = hostile.HereWorkers() if on_workers else None
        toy.fit(fed, 1, data=files.dataset(), runtime=runtime)
    files.assert_quiet()
    assert kept.tb
    assert len(files.read) <= 4


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    *(st.lists(st.integers(0, 23), max_size=9), st.integers(1, 12)),
    *(st.integers(1, 3), st.sampled_from([None, 0, 7])),
)
def test_every_pass_is_over_the_clients_own_rows(lengths, batch_size, epochs, seed):
    rows = np.random.default_rng(0).permutation(1000)[: sum(lengths)]
    shuffle = (
        None
        if seed is None
        else [np.random.Philox(seed + n) for n in range(len(lengths))]
    )
    lengths = np.array(lengths, int)
    table = layout.client_table(rows, lengths, batch_size, epochs, shuffle)
    passes = np.split(table.rows, np.cumsum(np.repeat(lengths, epochs)))
    for place, own in enumerate(np.split(rows, np.cumsum(lengths))[:-1]):
        assert table.first_row[place] == sum(lengths[:place]) * epochs
        for seen in passes[place * epochs : (place + 1) * epochs]:
            assert sorted(seen) == sorted(own)
            if seed is None:
                assert seen.tolist() == own.tolist()
    assert table.batch.tolist() == list(range(batch_size))
    assert table.num_examples.tolist() == lengths.tolist()
    assert table.steps.tolist() == [-(-n // batch_size) * epochs for n in lengths]


@pytest.mark.parametrize("others", [[], [1], [3] * 20, [700, 5]])
def test_a_clients_order_does_not_depend_on_others_where_draws_are_equal(others):
    class Coarse(np.random.Generator):
        def random(self, size):
            return np.floor(4 * super().random(size)) / 4

    lengths = np.array([*others, 500])
    where = [*range(1, len(lengths)), 0]
    keys = [np.random.Philox(key=3, counter=[0, 0, 0, k]) for k in where]
    with mock.patch.object(np.random, "Generator", Coarse):
        table = layout.client_table(np.arange(lengths.sum()), lengths, 5, 3, keys)
        key = np.random.Philox(key=3, counter=[0, 0, 0, 0])
        alone = layout.client_table(np.arange(500), lengths[-1:], 5, 3, [key])
    own = table.rows[table.first_row[-1] :] - lengths[:-1].sum()
    np.testing.assert_array_equal(own, alone.rows)


@hypothesis.given(
    st.lists(st.integers(0, 80), min_size=2, max_size=8), st.sampled_from([1, 3, 10])
)
def test_a_clients_program_follows_from_its_own_size(lengths, batch):
    how = layout.Layout(
        element_spec=(tf.TensorSpec([784]), tf.TensorSpec([])),
        kernels=((784, 600),),
    )

    def step_counts(own):
        table = layout.client_table(np.arange(sum(own)), np.array(own), batch, 1)
        return how.step_counts(table).tolist()

    together = step_counts(lengths)
    assert together == [step_counts([own])[0] for own in lengths]
    # Each of these was traced before anybody was looked at.
    allowed = {strategy.num_steps for strategy in how.strategies(batch, True)}
    assert set(together) <= allowed
