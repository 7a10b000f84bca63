"""Nothing passes from client to client, by whatever a program can keep it in."""

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import keras_versions
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import allowed_operations

_layers = tf.keras.layers
_QUEUE = tf.queue.FIFOQueue(1000, [tf.float32], shapes=[[]])


def _queue(x):
    """Adds to a client's features what another one left behind."""
    with tf.control_dependencies([_QUEUE.enqueue(tf.reduce_sum(x))]):
        return x + tf.cond(_QUEUE.size() > 1, _QUEUE.dequeue, lambda: tf.zeros([]))


def _sampling(x):
    return x + tf.random.normal(tf.shape(x))


def _in_a_loop(x):
    return tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, _sampling(y)), (0, x)
    )[1]


def _python(x):
    kept = tf.numpy_function(lambda y: y, [x], tf.float32, stateful=False)
    return tf.ensure_shape(kept, x.shape)


def _model(*inner):
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential([_layers.Input((8,)), *inner, _layers.Dense(3)])


def _assert_refused(message, model, **compiled):
    fed = toy.federated(model=model, compile_options=compiled)
    before = fed.get_weights()
    uses = [lambda: toy.fit(fed)]
    if not compiled.keys() - {"jit_compile"}:
        uses.append(lambda: fed.evaluate_clients(toy.clients(), verbose=0))
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()
    assert fed.run is None
    toy.assert_same(before, fed)


def test_programs_that_tf_debugging_watches_are_refused():
    tf.debugging.enable_check_numerics()
    try:
        _assert_refused(r"disable_check_numerics\(\)", _model())
    finally:
        tf.debugging.disable_check_numerics()


@pytest.mark.parametrize(
    "function, operation, jit_compile",
    [
        (_queue, "QueueEnqueueV2|QueueSizeV2|QueueDequeueV2", None),
        (_sampling, "RandomStandardNormal", True),
        (_in_a_loop, "RandomStandardNormal", False),
        (_python, "PyFuncStateless", False),
    ],
)
def test_a_layer_is_refused_by_its_name(function, operation, jit_compile):
    layer = _layers.Lambda(function, output_shape=(8,), name="channel")
    message = f"({operation}) in layer 'channel'"
    _assert_refused(message, _model(layer), jit_compile=jit_compile)


# What reads, keeps, draws or says something; some write into a constant.
_ON_NO_LIST = """
QueueEnqueueV2 QueueDequeueV2 QueueSizeV2 LookupTableInsertV2 RandomUniform
RandomStandardNormal WriteFile ReadFile PyFuncStateless PrintV2 InplaceAdd Empty
BatchFunction VarHandleOp ReadVariableOp AssignVariableOp PyFunc EagerPyFunc
RandomShuffle StackPushV2 Stage Unstage TemporaryVariable IteratorGetNext
"""


@pytest.mark.parametrize("operation", _ON_NO_LIST.split())
def test_an_operation_is_refused_by_its_name(operation):
    definition = tf.compat.v1.GraphDef()
    definition.library.function.add().node_def.add(op=operation, name="inner")
    with pytest.raises(ValueError, match=operation):
        allowed_operations.check(definition)


def _left_over(x):
    """Adds what was in memory that nobody wrote to."""
    image, ones = tf.reshape(x, [-1, 1, 1, 8]), tf.ones([8])
    found = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=image,
        x=image,
        **dict.fromkeys(["scale", "reserve_space_1", "reserve_space_2"], ones),
        reserve_space_3=ones,
        is_training=False,
    )
    return x + tf.reduce_sum(found.reserve_space_4)


def test_memory_that_nobody_wrote_to_is_not_read():
    layer = _layers.Lambda(_left_over, output_shape=(8,), name="channel")
    _assert_refused("in layer 'channel'", _model(layer))


class _Keeps(tf.keras.metrics.Metric):
    """Says what the largest label was of all that it has seen."""

    def __init__(self, name="keeps", **options):
        super().__init__(name=name, **options)
        self.kept = self.add_weight(shape=(), initializer="zeros", name="kept")

    def update_state(self, y, predicted, sample_weight=None):
        largest = tf.reduce_max(tf.cast(y, tf.float32))
        self.kept.assign(tf.maximum(tf.convert_to_tensor(self.kept), largest))

    def result(self):
        return tf.convert_to_tensor(self.kept)

    def reset_state(self):
        pass


def test_a_loss_that_reads_a_metric_and_losses_and_metrics_that_draw():
    metric = _Keeps()

    def loss(y, predicted):
        return toy.loss()(y, predicted) + tf.convert_to_tensor(metric.kept)

    def draws(y, predicted):
        return tf.reduce_mean(predicted**2, -1) + tf.random.uniform([])

    message = "keep what training reads and changes"
    _assert_refused(message, _model(), loss=loss, metrics=[metric])
    _assert_refused("RandomUniform", _model(), loss=draws)
    _assert_refused("RandomUniform", _model(), metrics=[draws])


class _KeepsInInference(_layers.Layer):
    """Adds what the client before left behind, where it does not train."""

    def build(self, shape):
        options = {"shape": (), "initializer": "zeros", "trainable": False}
        self.kept = self.add_weight(name="kept", **options)

    def call(self, x, training=False):
        if training:
            return x
        before = tf.convert_to_tensor(self.kept)
        self.kept.assign(tf.cast(tf.reduce_max(x), tf.float32))
        return x + before


def test_in_an_evaluation_a_client_moves_its_own_values_alone():
    x, y = toy.arrays(40)
    y, rows, found = np.minimum(y, 1), np.arange(40).reshape(4, 10), []
    for hostile in (False, True):
        own_x, own_y = x.copy(), y.copy()
        if hostile:
            own_x[:10], own_y[:10] = 1234.5, 2
        model, compiled = _model(_KeepsInInference()), {"metrics": [_Keeps()]}
        fed = toy.federated(model=model, compile_options=compiled)
        before = fed.get_weights()
        clients = FederatedDataset.from_indices(own_x, own_y, rows)
        found.append(fed.evaluate_clients(clients, verbose=0))
        toy.assert_same(before, fed)
        kept = [v.numpy() for metric in fed.model.metrics for v in metric.variables]
        assert 2.0 not in kept
    usual, hostile = found
    for name in ("loss", "keeps"):
        assert usual[name][0] != hostile[name][0]
        np.testing.assert_array_equal(usual[name][1:], hostile[name][1:])


class _Largest(_layers.Layer):
    """Keeps the largest number that it has seen, also when it does not train."""

    def build(self, shape):
        del shape
        self.seen = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="seen"
        )

    def call(self, x):
        largest = tf.cast(tf.reduce_max(x), tf.float32)
        self.seen.assign(tf.maximum(tf.convert_to_tensor(self.seen), largest))
        return x


@pytest.mark.skipif(
    not keras_versions.IS_KERAS_3, reason="embeddings are not looked at"
)
@pytest.mark.parametrize("held_out", [0.0, 0.5])
@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_of_a_client_that_was_not_charged_for_is_in_a_weight(
    streamed, held_out
):
    """Clients are looked at before a round, and evaluated after it."""
    layer = _Largest()
    inputs = tf.keras.Input((4,), dtype="int32")
    rows = _layers.Flatten()(_layers.Embedding(1000, 4)(layer(inputs)))
    model = tf.keras.Model(inputs, _layers.Dense(3)(rows))
    clients = {
        f"client {k}": (np.full([3, 4], 900 + k, "i4"), np.zeros(3, "i4"))
        for k in range(8)
    }
    if streamed:
        specs = tf.TensorSpec([4], tf.int32), tf.TensorSpec([], tf.int32)
        clients = FederatedDataset.from_client_fn(
            list(clients), clients.__getitem__, element_spec=specs
        )
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.01, noise_multiplier=0.0)
    fed = tfdp_fl.DPFederatedModel(model, mechanism, 1)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(0.1), loss)
    fed.fit(clients, rounds=2, verbose=0, validation_split=held_out)
    # Of who was drawn it moves by the clip.
    assert float(tf.convert_to_tensor(layer.seen)) <= 2 * 0.01 * 8
