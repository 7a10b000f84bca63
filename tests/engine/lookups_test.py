"""Tables of which a client trains only its rows: the same update, and no more rows."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tests.keras import toy
from tfdp_fl import mechanisms
from tfdp_fl.engine import lookups
from tfdp_fl.mechanisms import ClientWeighting

_layers = tf.keras.layers
_ITEMS, _SIZES = 50, (7, 0, 3, 12)
_FIXED = mechanisms.FixedClipping(clip_norm=0.01, noise_multiplier=0.0)
_ADAPTIVE = mechanisms.AdaptiveClipping(noise_multiplier=0.0, count_noise_stddev=0.0)

_WEIGHTED = {"mechanism": _FIXED, "client_weighting": ClientWeighting.num_examples(9)}
_LIMITED = {"proximal_weight": 0.5, "grad_clip": 0.3}


def _dataset(first=None):
    rng = np.random.default_rng(0)

    def client(n):
        x = {
            "item": rng.integers(-_ITEMS, _ITEMS, (n, 1)).astype(np.int32),
            "tags": rng.integers(0, _ITEMS, (n, 4)),
            "facts": rng.normal(size=(n, 3)).astype(np.float32),
        }
        return x, rng.normal(size=(n, 1)).astype(np.float32)

    clients = dict(enumerate(map(client, _SIZES)))
    if first is not None:
        clients[0][1][:] = first
    return cohorts.from_arrays(clients)


class _Tied(_layers.Layer):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, inputs):
        return inputs + tf.reduce_mean(tf.convert_to_tensor(self.table.embeddings))


class _Constant(_layers.Layer):
    def build(self, shape):
        self.constant = tf.constant(2.0)

    def call(self, inputs):
        return inputs * self.constant


def _model(kind="plain"):
    """Two tables share a feature, and a third one has several places an example."""
    toy.seed(3)
    item = tf.keras.Input((1,), dtype="int32", name="item")
    tags = tf.keras.Input((4,), dtype="int64", name="tags")
    facts = tf.keras.Input((3,), name="facts")
    inputs = {"item": item, "tags": tags, "facts": facts}
    more, flat, ops = [], _layers.Flatten(), tf.keras.ops
    if kind == "beside other variables":
        facts = _layers.BatchNormalization()(facts)
        facts = _Constant()(_layers.Dense(3, trainable=False)(facts))
        # Too short to be found: the feature is used twice.
        days = ops.floor_divide(item, 10)
        more = [flat(_layers.Embedding(7, 2)(days)) for _ in range(2)]
    if kind == "feature used twice":
        more = [ops.cast(item, "float32")]
    if kind == "computed":
        item = ops.mod(item + 1, _ITEMS)
    regularizer = "l2" if kind == "regularized" else None
    options = {"embeddings_regularizer": regularizer, "mask_zero": kind == "masked"}
    table = _layers.Embedding(_ITEMS, 4, **options)
    of_tags = _layers.Embedding(_ITEMS, 3)(tags)
    parts = [
        *(flat(table(item)), flat(_layers.Embedding(_ITEMS, 1)(item))),
        *(_layers.GlobalAveragePooling1D()(of_tags), facts, *more),
    ]
    out = _layers.Dense(1)(_layers.Concatenate()(parts))
    return tf.keras.Model(inputs, _Tied(table)(out) if kind == "tied" else out)


def _engine(dataset, model, least=1, **options):
    with mock.patch.object(lookups, "_MIN_ELEMENTS", least):
        return cohorts.make_engine(model, dataset, loss="mse", **options)


@pytest.mark.parametrize(
    ("kind", "num_tables", "options"),
    [
        ("plain", 3, _WEIGHTED),
        ("plain", 3, {"mechanism": _ADAPTIVE, "training": _LIMITED}),
        # Negative places count from the end, as in Keras.
        ("beside other variables", 1, {}),
    ],
)
def test_a_cohort_adds_up_to_what_whole_tables_do(kind, num_tables, options):
    dataset, found = _dataset(), []
    for least in (1, 10**9):
        model = _model(kind)
        engine = _engine(dataset, model, least, **options)
        tables = engine.programs.trainer.lookups
        assert len(tables) == (num_tables if least == 1 else 0)
        logs = cohorts.run_round(engine, dataset)
        assert logs["mean_update_norm"] > 0
        found.append((model.get_weights(), logs))
    (narrow, logs), (whole, logs_whole) = found
    cohorts.assert_close(narrow, whole, rtol=1e-6, atol=1e-7)
    cohorts.assert_close(logs, logs_whole, rtol=1e-5)


def test_a_hostile_client_moves_its_rows_by_the_clip_at_most():
    model, weights = _model(), {}
    engine, start = _engine(_dataset(), model, mechanism=_FIXED), model.get_weights()
    for label in (None, 1e20, np.nan):
        model.set_weights(start)
        cohorts.run_round(engine, _dataset(label))
        weights[label] = np.concatenate([w.ravel() for w in model.get_weights()])
    for label in (1e20, np.nan):
        moved = len(_SIZES) * np.linalg.norm(weights[label] - weights[None])
        assert 0.001 <= moved <= 0.0201


@pytest.mark.parametrize(
    "kind", ["masked", "regularized", "tied", "computed", "feature used twice"]
)
def test_other_uses_of_a_table_or_its_feature_train_it_whole(kind):
    trainer = _engine(_dataset(), _model(kind)).programs.trainer
    # The tags are still looked up.
    assert len({lookup.feature for lookup in trainer.lookups}) == 1


def test_optimizers_and_mechanisms_that_move_other_rows_have_whole_tables():
    dataset, model = _dataset(), _model()
    adam = _engine(dataset, model, optimizer=tf.keras.optimizers.Adam())
    assert not adam.programs.trainer.lookups
    local = mechanisms.LocalDP(clip_norm=1.0, noise_multiplier=1.0)
    engine = _engine(dataset, model, mechanism=local)
    assert cohorts.moved_by(model, engine, dataset)[0].all()
