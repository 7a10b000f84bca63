"""What a client adds is its own data's alone, and sums are exact: on every executor.

Three sentences of docs/architecture.md in one equation, bit for bit: for cohorts P
of whatever clients, and any other client k, sum(P with k) = sum(P) + record(k). If
others' data, numbers of examples, order or company changed a bit of anybody's record,
or adding up rounded anything, it would not hold. Whose update is zero moves no bit.
"""

import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.engine import cohorts
from tests.keras import toy
from tests.keras.hostile import HereWorkers
from tfdp_fl import mechanisms, secure_aggregation
from tfdp_fl.engine import dense_models, layout, secure_sum, side_by_side
from tfdp_fl.flower import history, replies, sums
from tfdp_fl.mechanisms import ClientWeighting

_layers = tf.keras.layers
_SIZES = (4, 0, 1, 9, 30, 4, 5, 52, 12, 4, 7, 60, 3, 8, 4, 16, 25, 2, 4, 11)
_FIXED = mechanisms.FixedClipping(clip_norm=0.3, noise_multiplier=1.0)
_ADAPTIVE = mechanisms.AdaptiveClipping(noise_multiplier=1.0, initial_clip_norm=0.3)
_LSTM = _layers.Reshape([4, 1]), _layers.LSTM(6)
_DROPPING = _layers.Dense(6, "relu"), _layers.Dropout(0.4)
_BEYOND = (
    _layers.Activation("tanh"),
    _layers.Dense(20, "tanh"),
    _layers.Dense(7, "gelu"),
)


def _lookup():
    table = _layers.Embedding(20_000, 4)
    return cohorts.sequential([4], table, _layers.Flatten(), _layers.Dense(3))


def _half_more(update):
    return [part + 0.5 for part in update]


# Of these nobody needs a program of 12 steps, which takes seconds to trace.
_LARGE_BATCHES = {"jit_compile": None, "batch": 12}
# By name: layers before the last, and what the engine is told.
EXECUTORS = {
    "one by one": (_BEYOND, {}),
    "one by one, fine": (_BEYOND, {"noise": 1e-4}),
    "one by one, adaptive": (_DROPPING, {"mechanism": _ADAPTIVE}),
    "one by one, two threads": (_BEYOND, {"max_parallel_clients": 2}),
    "streamed": (_BEYOND, {"max_parallel_clients": 2}),
    "XLA": (_DROPPING, {"jit_compile": True}),
    "side by side": (_BEYOND, {"jit_compile": None, "max_parallel_clients": 2}),
    "side by side, fine": (_BEYOND, {**_LARGE_BATCHES, "noise": 1e-4}),
    "side by side, adaptive": (_BEYOND, {**_LARGE_BATCHES, "mechanism": _ADAPTIVE}),
    "side by side, each product alone": (_BEYOND, {**_LARGE_BATCHES}),
    "side by side, on workers": (_BEYOND, {**_LARGE_BATCHES, "workers": True}),
    "hook": (_BEYOND, {"training": {"upload_hook": _half_more}}),
    "weighted": (_BEYOND, {"client_weighting": ClientWeighting.num_examples(9)}),
    "batched": (_BEYOND, {"at_once": 4}),
    "LSTM": (_LSTM, {}),
    "embedding rows": (_lookup, {}),
    "embedding rows, fine": (_lookup, {"noise": 1e-4}),
    "exact noise": (_BEYOND, {"noise_generator": "exact"}),
    "kept updates": (_DROPPING, {"collect_contributions": True}),
    "secure sum": (_BEYOND, {"secure": True, "collect_contributions": True}),
    "on workers": (_BEYOND, {"workers": True}),
    "on workers, XLA": (_DROPPING, {"jit_compile": True, "workers": True}),
}


@functools.cache
def _clients():
    """Returns clients of many sizes; some are hostile, and one has nothing to say."""
    rng = np.random.default_rng(0)
    pool = {
        k: (5 * rng.normal(size=(n, 4)).astype(np.float32), rng.integers(0, 3, n))
        for k, n in enumerate(_SIZES)
    }
    pool[3][0][2] = np.nan
    pool[5][0][:] = 1e30
    for k in (7, 14):  # Whose digits reach far below those of others.
        pool[k][0][:] *= 1e-12
    # Rows that cancel but for rounding: whoever changes its bits changes all of it.
    for k in (0, 8, 10):
        pool[k][0][1:] = pool[k][0][0] * 1e4
    return pool


_SILENT = 1  # It has no examples, and its update is zero.


@functools.cache
def _engine(name):
    """Returns a function of positions: the exact sum of those clients' records."""
    stack, options = EXECUTORS[name]
    options = dict(options)
    toy.seed(1)
    pool = _clients()
    if callable(stack):
        model = stack()
        pool = {
            k: (np.abs(np.nan_to_num(x) * 100).astype(np.int32) % 20_000, y)
            for k, (x, y) in pool.items()
        }
    else:
        model = cohorts.sequential([4], *stack, _layers.Dense(3))
    dataset = cohorts.from_arrays(pool)
    spec = dataset.element_spec
    noise, secure = options.pop("noise", 1.0), options.pop("secure", False)
    workers, batch = options.pop("workers", False), options.pop("batch", 4)
    alone = name.endswith("each product alone")  # As for wide layers.
    usual = {"mechanism": _FIXED}
    if options.pop("noise_generator", None):
        bind = _FIXED.bind

        def exactly(context):
            return bind(dataclasses.replace(context, noise_generator="exact"))

        usual["mechanism"] = mock.Mock(wraps=_FIXED, bind=exactly)
    engine = cohorts.make_engine(model, dataset, **{**usual, **options})
    assert engine.layout.element_spec == spec
    if name == "streamed":
        dataset = toy.streamed(dataset)
    train_chunk = None
    if workers:
        collector = HereWorkers().collector(engine, dataset)
        train_chunk = collector._train_chunk

    def total(positions):
        state = engine.query.initial_global_state()
        inputs = cohorts.inputs(
            dataset,
            state=state,
            positions=np.array(positions, np.int64),
            noise_multiplier=noise,
            clients_per_round=10.0,
            batch_size=batch,
            local_epochs=1,
            learning_rate=0.5,
            shuffle=np.random.default_rng(7),
        )
        steps = None if batch == 4 else (1, 2, 6)
        beside = cohorts.side_by_side("side by side" in name, steps=steps)
        wide = mock.patch.object(side_by_side, "_LONG", 1 if alone else 512)
        large = mock.patch.object(
            dense_models, "MAX_BATCHED_ELEMENTS", 0 if alone else 2**15
        )
        # Of streamed clients, a few in each chunk.
        few = mock.patch.object(layout, "CHUNK_BYTES", 400)
        with beside, wide, large, few:
            pending = engine.collect(dataset, inputs, train_chunk)
        if secure:
            protocol = secure_aggregation.AdditiveSecretSharing(bits=64)
            assert not secure_sum.sum_securely(engine, pending, protocol)
        if pending.collected:
            rows = [row for _, kept in pending.collected for row in kept.updates]
            return sum((row.numpy().astype(float) for row in rows), 0.0), None
        parts = [part.contribution for part in pending.sums]
        whole = functools.reduce(
            lambda a, b: tf.nest.map_structure(np.add, a, b), parts
        )
        flat = [np.ravel(part) for part in whole.update]
        return np.concatenate(flat), [float(v) for v in whole.sums.values()]

    total.engine = engine
    return total


@pytest.mark.parametrize("name", EXECUTORS)
def test_a_sum_is_that_of_records_made_alone(name):
    total = _engine(name)
    few = 2 if "side by side" in name or "workers" in name else 5
    smallest = 3 if name == "secure sum" else 1  # Nobody is summed alone.
    cohorts.check_sums(total, len(_SIZES), few, smallest, _SILENT)
    assert np.any(total(range(8))[0])
    if "side by side" in name:
        assert total.engine.has_trained_side_by_side


@pytest.mark.parametrize("name", [n for n in EXECUTORS if n != "secure sum"])
def test_a_client_without_examples_adds_nothing(name):
    total = _engine(name)
    others, nobody = [0, 4, 9, 12], total([_SILENT])
    found = zip(total(others), total([*others, _SILENT]), strict=True)
    for without, with_it in found:
        np.testing.assert_array_equal(without, with_it)
    assert not np.any(nobody[0]) and not any(nobody[1] or ())


@pytest.mark.parametrize("name", [n for n in EXECUTORS if n != "secure sum"])
def test_a_client_with_too_many_rows_adds_nothing(name):
    total = _engine(name)
    too_many = [k for k, size in enumerate(_SIZES) if size > 30]
    others = [k for k in range(12) if k not in too_many]
    with mock.patch.object(layout, "MOST_ROWS", 30):
        found = zip(total(others), total([*others, *too_many]), strict=True)
        for without, with_them in found:
            np.testing.assert_array_equal(without, with_them)
        if name != "kept updates":  # Of nobody, no row is kept.
            assert not np.any(total(too_many)[0])


@pytest.mark.parametrize("median_noise", [None, 0.2])
def test_a_median_does_not_ask_a_client_without_examples(median_noise):
    mechanism = mechanisms.MedianClipping(
        noise_multiplier=1.0, median_noise_multiplier=median_noise
    )
    dataset = cohorts.from_arrays(_clients())
    engine = cohorts.make_engine(
        cohorts.sequential([4], _layers.Dense(3)), dataset, mechanism=mechanism
    )
    clips = []
    for positions in ([0, 4, 9], [0, 4, 9, _SILENT]):
        pending = cohorts.collect(engine, dataset, positions=np.array(positions))
        clips.append(float(pending.state.clip_norm))
    assert clips[0] == clips[1]


# Elsewhere a client's update comes by a network. (TFF's: `tests/aggregators`.)


def _flower(mechanism):
    """Returns a function of positions: what a Flower server adds up."""
    sent = [np.zeros([4, 3], np.float32), np.ones(3, np.float32)]
    answers = []
    for k, update in enumerate(cohorts.hostile_updates(sent)):
        pairs = zip(sent, update, strict=True)
        answers.append(
            replies.Reply([np.float32(w + part) for w, part in pairs], k % 3)
        )

    def total(positions):
        plan = history.ChargedRound(1, 0.3, len(positions), None)
        where = mechanisms.PrivacyContext(clients_per_round=10)
        this = mechanisms.RoundState(0.3, 1.0, 10.0)
        asked = dict.fromkeys(range(10))
        configured = sums.ConfiguredRound(
            sent, asked, plan, mechanism, where, this, None
        )
        found = sums.collect(configured, [answers[k] for k in positions])
        flat = np.concatenate([np.ravel(part) for part in found.update])
        return flat, list(found.sums.values())

    return total


class _Halved(mechanisms.FixedClipping):
    """Clipped by the server, as it is none that Flower's clients know."""


@pytest.mark.parametrize(
    "mechanism",
    [
        *(_FIXED, _ADAPTIVE),
        _Halved(clip_norm=0.3, noise_multiplier=1.0),
        dataclasses.replace(_FIXED, noise_site="client"),
    ],
    ids=["clients clip", "adaptive", "server clips", "clients noise"],
)
def test_a_flower_server_adds_up_records_exactly(mechanism):
    total = _flower(mechanism)
    few = 15 if isinstance(mechanism, _Halved) else 50  # A clip here takes a while.
    cohorts.check_sums(total, 20, few, silent=cohorts.SILENT)
    assert np.any(total(range(8))[0])


def _after_a_round_with(sizes, change, **options):
    """Returns what moves the model in a round of others, after one with `sizes`."""
    toy.seed(3)
    slope = tf.keras.layers.LeakyReLU(negative_slope=0.5)
    dense = tf.keras.layers.Dense
    model = cohorts.sequential([4], dense(64), slope, dense(64), dense(3))
    others = cohorts.client_arrays((10, 10, 70))
    first = {
        10 + k: (np.full([n, 4], np.nan, "f"), np.zeros(n, "i"))
        for k, n in enumerate(sizes)
    }
    dataset = cohorts.from_arrays({**others, **first})
    server = tf.keras.optimizers.SGD(1.0, momentum=0.9)
    how = {"training": {"server_optimizer": server}, "jit_compile": None, **options}
    engine = cohorts.make_engine(model, dataset, max_parallel_clients=2, **how)
    number = len(others)
    size = {"clients_per_round": 3.0}
    there = np.arange(number, number + len(sizes))
    with cohorts.side_by_side(steps=(2, 4)):
        cohorts.run_round(engine, dataset, positions=there, **size)
        change(slope, server)
        before = [w.copy() for w in model.get_weights()]
        cohorts.run_round(engine, dataset, positions=np.arange(number), **size)
    return [new - old for new, old in zip(model.get_weights(), before, strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Annealed(mechanisms.MedianClipping):
    """Its clip, once all norms are known, is less by a factor that Python knows."""

    factor: list[float]

    def scale(self, norm, round):
        return super().scale(norm, round) * self.factor[0]


@pytest.mark.parametrize("what", ["slope", "nesterov", "clip"])
def test_programs_do_not_tell_who_was_there_when_something_changed(what):
    factor, options = [1.0], {}
    if what == "clip":
        options["mechanism"] = _Annealed(noise_multiplier=1.0, factor=factor)

    def change(slope, server):
        if what == "slope":
            slope.negative_slope = 0.0
        elif what == "nesterov":
            server.nesterov = True
        else:
            factor[0] = 0.1

    def moved_after(sizes):
        factor[0] = 1.0
        return _after_a_round_with(sizes, change, **options)

    # Of one program, and of all.
    for one, other in zip(moved_after((3,)), moved_after((3, 10, 70)), strict=True):
        np.testing.assert_array_equal(one, other)
