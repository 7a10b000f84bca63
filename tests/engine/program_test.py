"""One pure program for all threads: nothing passes by it, from nobody to nobody."""

import collections
import concurrent.futures
import functools
import gc
import itertools
import os
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tests.keras import toy
from tfdp_fl import mechanisms
from tfdp_fl.datasets import nests
from tfdp_fl.engine import allowed_operations, program
from tfdp_fl.mechanisms import clipping

_layers = tf.keras.layers


def _spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


def test_large_sums_and_clips_of_threads_do_not_meet():
    # As `AddN` they would: TensorFlow's memory optimizer adds up in a variable
    # that it finds by the operation's name.
    def function(x):
        def body(k, total):
            return k + 1, tf.add_n([total, x, x * 2.0, tf.sin(x), x - 1.0])

        whole = tf.add_n([x, x * 2.0, tf.cos(x), x + 1.0])
        return whole, tf.while_loop(lambda k, _: k < 3, body, (0, x))[1]

    traced = program.Program(function, _spec(None))
    functions = (each.node_def for each in traced.graph_def.library.function)
    nodes = itertools.chain(traced.graph_def.node, *functions)
    assert {node.attr["N"].i for node in nodes if node.op == "AddN"} == {2}
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=400_000).astype(np.float32) for _ in range(8)]
    alone = [traced(x) for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            cohorts.assert_close([*pool.map(traced, inputs)], alone, rtol=0, atol=0)
    x = inputs[0].astype(np.float64)
    cohorts.assert_close(alone[0][0], 4 * x + np.cos(x) + 1, rtol=1e-5, atol=1e-5)
    # Nor clips: where the cohort sets it, threads clip by a function of their own.
    clip = tf.function(clipping.global_norm)
    graph = clip.get_concrete_function([_spec(n) for n in (3, 2, 4, 5)]).graph
    assert "AddN" not in {node.op for node in graph.as_graph_def().node}


def test_additions_in_a_row_are_not_joined_to_a_large_sum():
    # Of a known shape, and of more memory than TensorFlow believes the CPU to have.
    def function(x):
        terms = [tf.sin(x * float(k)) for k in range(6)]
        return tf.while_loop(
            lambda k, _: k < 2,
            lambda k, total: (k + 1, functools.reduce(tf.add, terms, total)),
            (0, x),
        )[1]

    traced = program.Program(function, _spec(8_000_000))
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=8_000_000).astype(np.float32) for _ in range(2)]
    alone = [traced(x).numpy() for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            together = pool.map(traced, inputs)
            for one, same in zip(together, alone, strict=True):
                np.testing.assert_array_equal(one, same)


_MATRICES = {
    "not definite": -9 * np.eye(16, dtype=np.float32),
    "nan": np.full([16, 16], np.nan, np.float32),
    "infinite": np.diag(np.full(16, np.inf, np.float32)),
    "rank one": np.ones([16, 16], np.float32),
    "zero": np.zeros([16, 16], np.float32),
}


@pytest.mark.parametrize("kind", _MATRICES)
def test_decompositions_say_nothing_of_the_memory_that_they_find(kind):
    ops, matrix = tf.raw_ops, tf.constant(_MATRICES[kind])
    calls = {
        "LogMatrixDeterminant": lambda: ops.LogMatrixDeterminant(input=matrix),
        "MatrixDeterminant": lambda: ops.MatrixDeterminant(input=matrix),
        "MatrixInverse": lambda: ops.MatrixInverse(input=matrix),
        "MatrixSolve": lambda: ops.MatrixSolve(matrix=matrix, rhs=matrix),
        "Qr": lambda: ops.Qr(input=matrix, full_matrices=True),
        "SelfAdjointEigV2": lambda: ops.SelfAdjointEigV2(input=matrix, compute_v=True),
        "Svd": lambda: ops.Svd(input=matrix, compute_uv=True),
    }
    assert calls.keys() <= allowed_operations.ALLOWED

    def found(call, left):
        # What others before left in blocks of this size.
        for _ in range(20):
            tf.fill([16, 16], left).numpy()
        try:
            return [each.numpy().tobytes() for each in tf.nest.flatten(call())]
        except tf.errors.InvalidArgumentError:
            return "refused"

    for name, call in calls.items():
        first, *others = (found(call, left) for left in (0.0, 7.0, -3e5))
        assert all(each == first for each in others), name
    # These read it, or what lies beside it, or never end.
    struck = {"Cholesky", "CropAndResize", "AdjustHue", "MatrixLogarithm"}
    struck |= {"StatelessRandomBinomial", "StatelessRandomPoisson", "Polygamma", "Zeta"}
    struck |= {"MatrixSolveLs", "SparseSegmentMeanGrad", "HistogramFixedWidth"}
    struck |= {"Bincount", "SparseBincount", "ParallelDynamicStitch", "FakeParam"}
    assert not allowed_operations.ALLOWED & struck


def test_dropout_inside_of_an_operation_and_reading_a_variable_are_refused():
    definition = tf.compat.v1.GraphDef()
    node = definition.node.add(op="CudnnRNNV3", name="rnn")
    allowed_operations.check(definition)
    node.attr["dropout"].f = 0.5
    with pytest.raises(ValueError, match="CudnnRNNV3"):
        allowed_operations.check(definition)
    # Without what they are asked for, these return memory that nobody wrote.
    for name in ("Eig", "SelfAdjointEigV2", "Svd"):
        definition = tf.compat.v1.GraphDef()
        node = definition.node.add(op=name, name="decomposed")
        with pytest.raises(ValueError, match=name):
            allowed_operations.check(definition)
        node.attr["compute_uv" if name == "Svd" else "compute_v"].b = True
        allowed_operations.check(definition)
    # Its threads add up weights in whatever order they come.
    numbers = tf.math.bincount
    counting = lambda x: numbers(tf.cast(x, tf.int32), minlength=3, maxlength=3)  # noqa: E731
    program.Program(counting, _spec())
    with pytest.raises(ValueError, match="DenseBincount"):
        program.Program(
            lambda x: numbers(tf.cast(x, tf.int32), x, minlength=3, maxlength=3),
            _spec(),
        )
    memory = tf.Variable(1.0, name="memory")
    with pytest.raises(ValueError, match="the variable 'memory"):
        program.Program(lambda x: x * memory, _spec())
    # XLA would take a NaN for a number: one client's reached the sum.
    flags = mock.patch.dict(os.environ, XLA_FLAGS="--xla_cpu_enable_fast_math=true")
    with flags, pytest.raises(ValueError, match="XLA_FLAGS must not"):
        program.Program(lambda x: x, _spec())


@pytest.mark.parametrize(
    "flags", ["", "--tf_xla_auto_jit=2", "--tf_xla_min_x=1 --tf_xla_cpu_global_jit"]
)
def test_programs_that_tensorflow_compiles_after_some_calls_are_refused(flags):
    traced = _engine("one thread")
    cohorts.collect(traced, cohorts.dataset())
    try:
        tf.config.optimizer.set_jit(not flags)
        with mock.patch.dict(os.environ, TF_XLA_FLAGS=flags):
            for use in (
                lambda: program.Program(lambda x: x, _spec()),
                lambda: cohorts.collect(traced, cohorts.dataset()),
            ):
                with pytest.raises(ValueError, match=r"must not.*accord.*jit_compile"):
                    use()
    finally:
        tf.config.optimizer.set_jit(False)


def _with_state():
    toy.seed(2)
    random = _layers.Dropout(0.3), _layers.GaussianNoise(0.2)
    normalized = _layers.Dense(5), _layers.BatchNormalization()
    return cohorts.sequential([4], *normalized, *random, _layers.Dense(3))


@functools.cache
def _engine(executor, make_model=_with_state):
    """Returns an engine that keeps each client's update."""
    return cohorts.make_engine(
        cohorts.mlp() if executor == "XLA" else make_model(),
        cohorts.dataset(),
        mechanism=mechanisms.MedianClipping(noise_multiplier=0.0),
        max_parallel_clients=1 if executor == "one thread" else 2,
        jit_compile=executor == "XLA",
        at_once=4 if executor == "batched" else None,
    )


def _rows(clients, *arguments):
    """Returns each client's own update, [D], and its norm."""
    rows, engine = {}, _engine(*arguments)

    def noting(pending, *_):
        for members, collected in pending.collected:
            norms = collected.scalars[:, 0].numpy()
            updates = collected.updates.numpy()
            for member, row, norm in zip(members, updates, norms, strict=True):
                rows[int(member)] = (row, norm)

    engine.complete = noting
    cohorts.collect(engine, cohorts.from_arrays(clients))
    return rows


@pytest.mark.parametrize("executor", ["one thread", "two threads", "XLA", "batched"])
def test_others_are_bit_for_bit_what_they_are_without(executor):
    clients = cohorts.client_arrays((5, 7, 5, 3, 5, 7, 2))
    usual = _rows(clients, executor)
    if executor != "XLA":  # It changes no client's draws.
        atol = 2e-6 if executor == "batched" else 0
        cohorts.assert_close(usual, _rows(clients, "one thread"), rtol=0, atol=atol)
    for place, kind in itertools.product([0, 3, 6], ["nan", "huge", "none"]):
        x, y = clients[place]
        changed = {
            "nan": (np.full_like(x, np.nan), y),
            "huge": (np.full_like(x, 1e30), y),
            "none": (x[:0], y[:0]),
        }[kind]
        hostile = _rows({**clients, place: changed}, executor)
        assert usual.keys() == hostile.keys()
        for member, (row, norm) in usual.items():
            assert norm > 1e-4
            if member == place:
                continue
            if (executor, kind) == ("batched", "none"):
                # Batches of other sizes are other products, of other rounding.
                cohorts.assert_close(row, hostile[member][0])
                continue
            np.testing.assert_array_equal(row, hostile[member][0])
            assert norm == hostile[member][1]


@pytest.mark.parametrize("executor", ["two threads", "batched"])
def test_clients_alike_in_their_data_draw_differently(executor):
    client = cohorts.client_arrays((5,))[0]
    alike = _rows(dict.fromkeys(range(4), client), executor)
    first, *others = [row for row, _ in alike.values()]
    for row in others:
        assert np.abs(first - row).max() > 1e-4


class _Noting(_layers.Layer):
    def call(self, x):
        before = getattr(self, "last", None)
        self.last = x
        return x if before is None else x + 0 * tf.reduce_sum(before)


def test_a_layer_that_writes_a_python_attribute():
    def model():
        return cohorts.sequential([4], _layers.Dense(3, "tanh"), _Noting())

    clients = cohorts.client_arrays((5, 5))
    try:
        both = _rows(clients, "two threads", model)
    except Exception as error:  # Refused is as well as harmless.
        assert not isinstance(error, AssertionError)
        return
    x, y = clients[0]
    clients[0] = np.full_like(x, 1e30), y
    changed = _rows(clients, "two threads", model)
    np.testing.assert_array_equal(both[1][0], changed[1][0])


def test_leaves_are_packed_as_tensorflow_packs_them_and_let_go():
    ordered = collections.OrderedDict(b=0, a=(0, 0))
    structure = {"z": [0, ()], "a": mechanisms.RoundState(0, 0, 0, ordered), "k": ()}
    flat = [np.full(2, number) for number in range(len(tf.nest.flatten(structure)))]
    packed = nests.pack(structure, flat)
    tf.nest.assert_same_structure(packed, structure, check_types=True)
    assert list(packed) == list(structure)
    assert all(map(lambda a, b: a is b, tf.nest.flatten(packed), flat))
    # Results of a large model stayed until the next garbage collection.
    last = weakref.ref(flat[-1])
    gc.disable()
    try:
        del flat, packed
        assert last() is None
    finally:
        gc.enable()
