"""Whole rounds: denominators, threads, XLA, chunks, hooks, traces."""

import concurrent.futures
import dataclasses
import functools
import threading
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.keras import hostile, toy
from tests.mechanisms import references, rounds, statistics
from tfdp_fl import engine as engine_lib
from tfdp_fl import keras_versions
from tfdp_fl.engine import cohort, dense_models, devices, layout, program
from tfdp_fl.mechanisms import bounded_sums, noise
from tfdp_fl.mechanisms.contribution import Contribution

_layers = tf.keras.layers
_ADAM = tf.keras.optimizers.Adam(0.1)
_NOBODY = np.zeros(0, int)


def _fixed(clip_norm):
    return tfdp_fl.FixedClipping(clip_norm=clip_norm, noise_multiplier=1.0)


_MECHANISMS = {
    "none": tfdp_fl.NoPrivacy(),
    "fixed": _fixed(0.1),
    "adaptive": tfdp_fl.AdaptiveClipping(noise_multiplier=0.1, count_noise_stddev=1.0),
    "median": tfdp_fl.MedianClipping(noise_multiplier=1.0),
}


@functools.cache
def _engine(name="fixed", units=6, **options):
    """Returns a model and its engine, the same ones for the same options."""
    model, mechanism = cohorts.mlp(units), _MECHANISMS[name]
    options["mechanism"] = mechanism
    return model, cohorts.make_engine(model, cohorts.dataset(), **options)


def _round(dataset, *, count=1, engine=None, **inputs):
    """Returns how rounds move a model from its first weights, and the last logs."""
    model, made = engine or _engine()
    start = cohorts.mlp(model.layers[0].units).get_weights()
    model.set_weights(start)
    state = made.query.initial_global_state()
    for round_index in range(count):
        options = {"seed": np.array([5, round_index]), "state": state, **inputs}
        pending = cohorts.collect(made, dataset, round_index=round_index, **options)
        state, logs = made.release(pending, cohorts.paid())
    return rounds.flat(model.get_weights()) - rounds.flat(start), logs


def test_noise_that_is_another_than_was_charged_is_not_released():
    class Own(tfdp_fl.FixedClipping):
        def noise_stddevs(self, round, context):
            z = round.noise_multiplier
            return {"update": round.clip_norm * (z if isinstance(z, float) else z / 2)}

    model, mechanism = cohorts.mlp(), Own(clip_norm=0.1, noise_multiplier=1.0)
    made = cohorts.make_engine(model, cohorts.dataset(), mechanism=mechanism)
    before = rounds.flat(model.get_weights())
    with pytest.raises(tf.errors.InvalidArgumentError, match="adds less noise"):
        cohorts.run_round(made, cohorts.dataset(), noise_multiplier=1.0)
    np.testing.assert_array_equal(rounds.flat(model.get_weights()), before)


def test_noise_that_is_less_than_was_paid_for_is_not_released():
    model, made = _engine()
    before = rounds.flat(model.get_weights())
    pending = cohorts.collect(made, cohorts.dataset(), noise_multiplier=1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="adds less noise"):
        made.release(pending, cohorts.paid(0.9))
    np.testing.assert_array_equal(rounds.flat(model.get_weights()), before)


@pytest.mark.skipif(not keras_versions.IS_KERAS_3, reason="nobody is side by side")
@pytest.mark.parametrize("on_workers", [False, True])
def test_side_by_side_ends_when_tensorflows_options_change(on_workers):
    options = tf.config.optimizer
    with cohorts.side_by_side(steps=(4,)):
        data = cohorts.dataset()
        made = cohorts.make_engine(cohorts.mlp(), data, jit_compile=None)
        runtime = hostile.HereWorkers().collector(made, data) if on_workers else made
        inputs = cohorts.inputs(data, state=made.query.initial_global_state())
        runtime.collect(data, inputs)
        assert layout.SIDE_BY_SIDE in {s.kind for s in made.used_strategies}
        before = options.get_experimental_options()
        options.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": True})
        try:
            made.used_strategies.clear()
            runtime.collect(data, inputs)
        finally:
            options.set_experimental_options(
                {"auto_mixed_precision_onednn_bfloat16": False, **before}
            )
        assert {s.kind for s in made.used_strategies} == {layout.ONE_BY_ONE}


class _ByTheLongest(tfdp_fl.FixedClipping):
    """Right for one norm; of a vector it would make one factor for all."""

    def scale(self, norm, round):
        factor = round.clip_norm / tf.maximum(tf.reduce_max(norm), round.clip_norm)
        return tf.ones_like(norm) * factor


def test_a_mechanism_of_ones_own_sees_one_client_at_a_time():
    mechanism = _ByTheLongest(clip_norm=0.01, noise_multiplier=1.0)
    with cohorts.side_by_side(steps=(4,)):
        data = cohorts.dataset()
        made = cohorts.make_engine(
            cohorts.mlp(), data, jit_compile=None, mechanism=mechanism
        )
        everyone = np.arange(data.num_clients)

        def added(positions):
            total = cohorts.update_of(cohorts.collect(made, data, positions=positions))
            return rounds.flat(total)

        alone = [added(np.array([k])) for k in everyone]
        np.testing.assert_array_equal(added(everyone), np.sum(alone, axis=0))


def test_rounds_do_not_repeat_and_seeds_do():
    quiet = {"learning_rate": 0.0, "noise_multiplier": 1.0, "count": 2}
    dataset, engine = cohorts.dataset(), _engine(units=200)
    one, same, other = (
        _round(dataset, engine=engine, seed=np.array([1, k]), **quiet)[0]
        for k in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    statistics.assert_uncorrelated(one, other)
    # So does the order of examples, with its generator.
    first, again, other = (
        _round(dataset, shuffle=np.random.default_rng(k))[0] for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_neither_clients_nor_workers_are_sent_what_the_servers_noise_follows_from():
    _, engine = _engine()
    state = engine.query.initial_global_state()._replace(noise_state=[tf.ones([3])])
    inputs = cohorts.inputs(cohorts.dataset(), state=state)
    pending = engine.empty_round(inputs)
    assert pending.state.noise_state
    assert pending.broadcast.params.noise_state == ()
    assert not np.isin(inputs.seed, pending.broadcast.seed).any()
    seeds = [noise.for_clients(np.array([3, k])).tolist() for k in range(4)]
    assert len({word for seed in seeds for word in seed}) == 8


def test_what_an_interrupted_round_still_does_moves_no_other():
    # Its steps would be in the updates of clients that are charged.
    dataset = cohorts.dataset((5, 5, 5, 5))
    one, other = (
        cohorts.make_engine(cohorts.mlp(), dataset, max_parallel_clients=2)
        for _ in range(2)
    )
    call = program.Program.__call__
    go_on, still = threading.Event(), []

    def slow(self, *arguments):
        if threading.current_thread() is threading.main_thread():
            return call(self, *arguments)
        go_on.wait(60)
        still.append(call(self, *arguments))
        return still[-1]

    with (
        mock.patch.object(program.Program, "__call__", slow),
        mock.patch.object(concurrent.futures, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        cohorts.collect(one, dataset)
    go_on.set()
    first, second = (cohorts.collect(engine, dataset) for engine in (one, other))
    assert len(still) == 1
    cohorts.assert_close(first.sums, second.sums, rtol=0, atol=0)


def _assert_same(one, other):
    """However a cohort is run, the released model is the same, and so are the logs."""
    cohorts.assert_close(one, other, rtol=1e-4)


@pytest.mark.parametrize("name", ["adaptive", "median"])
def test_on_threads_in_parts_or_streamed_in_chunks(name):
    dataset = cohorts.dataset((7, 0, 3, 12, 5, 5))
    options = {"count": 2, "noise_multiplier": 0.1}
    usual = _round(dataset, engine=_engine(name), **options)
    threads = _engine(name, max_parallel_clients=2)
    _assert_same(_round(dataset, engine=threads, **options), usual)
    with mock.patch.object(layout, "CHUNK_BYTES", 4 * 51 * 2):
        _assert_same(_round(dataset, engine=_engine(name), **options), usual)
    with mock.patch.object(layout, "CHUNK_BYTES", 150):
        _assert_same(_round(toy.streamed(dataset), engine=threads, **options), usual)


@pytest.mark.parametrize("at_once, m, threads", [(None, 9, 1), (3, 9, 2), (None, 2, 4)])
def test_clients_at_once_share_the_cores(at_once, m, threads):
    with mock.patch.object(devices, "default_parallel_clients", lambda _: 8):
        clients, at_once = cohorts.dataset([3] * m), {"max_parallel_clients": at_once}
        engine = cohorts.make_engine(cohorts.mlp(), clients, **at_once)
        threads_of = engine.programs.threads
        assert threads_of(layout.Strategy(layout.ONE_BY_ONE), 5) == threads
        # A program that is called once at a time uses all of them.
        side_by_side = layout.Strategy(layout.SIDE_BY_SIDE, num_steps=2)
        assert threads_of(side_by_side, 5) is None
        with mock.patch.object(dense_models, "_SMALL", 0):
            assert threads_of(side_by_side, 5) == threads
            with mock.patch.object(dense_models, "_LARGE", 0):
                assert threads_of(side_by_side, 5) is None
        assert devices.threads_per_call("/device:GPU:0", 2) is None


def test_compiled_by_xla_or_not():
    # Equal clients: a batch that is short is never compiled by XLA.
    dataset = cohorts.dataset((10, 0, 5, 15))
    usual = _round(dataset, count=2, engine=_engine(optimizer=_ADAM, jit_compile=False))
    compiled = _engine(optimizer=_ADAM, jit_compile=True)
    _assert_same(_round(dataset, count=2, engine=compiled), usual)
    _assert_same(_round(toy.streamed(dataset), count=2, engine=compiled), usual)


def test_a_cohort_whose_every_client_fails_in_xla_is_pure_noise():
    model, engine = _engine(jit_compile=True)
    train = engine._train

    def fail(pending, chunk, part):
        if part.strategy.xla:
            raise tf.errors.InternalError(None, None, "it")
        return train(pending, chunk, part)

    with mock.patch.object(engine, "_train", fail):
        moved, logs = _round(
            cohorts.dataset((10, 5)), engine=(model, engine), noise_multiplier=1.0
        )
    assert np.any(moved) and np.isnan(logs["loss"])


def test_nobody_is_added_twice_after_an_error_between_two_sums():
    # The part was trained and added again: the sum moved by 2.9 S.
    dataset, (model, engine) = cohorts.dataset((5,) * 8), _engine(jit_compile=False)
    before = model.get_weights()
    add, calls = cohort.ThreadSum.add, []

    def add_once(self, *arguments):
        add(self, *arguments)
        calls.append(1)
        if len(calls) == 2:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    with (
        mock.patch.object(layout, "CHUNK_BYTES", 1),
        mock.patch.object(cohort.ThreadSum, "add", add_once),
        pytest.raises(tf.errors.ResourceExhaustedError),
    ):
        cohorts.run_round(engine, dataset)
    cohorts.assert_close(model.get_weights(), before, atol=0)
    # Whatever would add a client again is refused.
    pending = cohorts.collect(engine, dataset)
    with pytest.raises(RuntimeError, match="added to a round's sum twice"):
        pending.add(np.array([3]), None)


def test_sums_that_are_written_in_place_have_the_same_bits():
    dataset = cohorts.dataset((10, 0, 5, 15, 3))
    options = {"jit_compile": False, "max_parallel_clients": 2}
    usual, logs = _round(dataset, count=2, engine=_engine(units=9, **options))
    _engine.cache_clear()
    with mock.patch.object(bounded_sums, "_LARGE", 4):
        moved, same = _round(dataset, count=2, engine=_engine(units=9, **options))
    _engine.cache_clear()
    np.testing.assert_array_equal(moved, usual)
    assert np.any(moved) and same == logs


def _both(dataset, name="fixed", **options):
    results = []
    with cohorts.side_by_side(few=False, steps=(4,)):
        for jit_compile in (None, False):
            engine = _engine(name, max_parallel_clients=2, jit_compile=jit_compile)
            results.append(_round(dataset, engine=engine, **options))
            assert engine[1].has_trained_side_by_side == (jit_compile is None)
    return results


@pytest.mark.parametrize("name", ["fixed", "adaptive"])
def test_side_by_side_is_what_the_general_engine_does(name):
    for sizes in ((5, 5, 5), (7, 0, 3, 5)):
        _assert_same(*_both(cohorts.dataset(sizes), name))


def test_a_few_at_a_time_is_the_same():
    dataset = cohorts.dataset([5] * 20)
    with mock.patch.object(dense_models, "widths", lambda *_: [16]):
        with mock.patch.object(dense_models, "is_small", lambda *_: False):
            _assert_same(*_both(dataset, count=3))
        # What was added up stays when the next cohort trains.
        _, engine = _engine(max_parallel_clients=1, jit_compile=None)
        with cohorts.side_by_side(steps=(2,)):
            (total,) = cohorts.collect(engine, dataset).sums
            before = [part.numpy().copy() for part in total.contribution.update]
            cohorts.collect(engine, dataset, positions=np.arange(3))
    cohorts.assert_close(before, total.contribution.update, rtol=0, atol=0)


def test_a_width_by_which_a_machine_computes_otherwise_is_not_used():
    dataset = cohorts.dataset([5] * 6)
    model, engine = _engine(jit_compile=None)

    def another_machine(program, broadcast, chunk):
        found = tf.nest.flatten(program(broadcast, chunk))
        changed = [
            np.nextafter(part, np.inf) if part.dtype == tf.float64 else part
            for part in found
        ]
        return [found, changed if len(chunk.table.members) == 8 else found]

    trials = engine_lib.Trials(another_machine)
    with cohorts.side_by_side(steps=(2,)):
        cohorts.collect(engine, dataset)
        (strategy,) = (s for s in engine.programs.traced if s.num_steps == 2)
        # (What other machines tried says nothing of these.)
        assert all(engine.fits(strategy, 5, k) for k in (7, 8, 9))
        fits = [engine.fits(strategy, 5, k, trials) for k in (7, 8, 9)]
        assert fits == [True, False, True]
        # Zeros, say, would let nothing through, and any width would do.
        before = model.get_weights()
        model.set_weights([np.zeros_like(part) for part in before])
        ((added, bits),) = engine._add_synthetic(strategy, 5, 2, None)
        model.set_weights(before)
        assert all(np.any(part) for part in [*added, *bits])
        # Bits that no record reaches count as well: of each dense layer's gradients.
        assert [part.dtype for part in bits[-2:]] == [np.int32] * 2
        chosen = dataclasses.replace(
            engine.layout, fits=lambda *args: engine.fits(*args, trials)
        )
        eight = layout.client_table(np.arange(40), np.full(8, 5), 5, 2)
        ((part,),) = chosen.lay_out(eight, 1, strategy.fine)
        assert part.strategy == strategy
        allowed = dense_models.widths(engine.layout.kernels, 2, 5)
        larger = (k for k in allowed if k > 8 and engine.fits(strategy, 5, k))
        assert 8 in allowed and len(part.table.members) == next(larger)


def test_widths_are_tried_with_enough_clients_for_a_narrow_layer():
    # The six outputs of one made-up client were alike by chance. One client more then
    # moved 1739 coordinates of the sum of 288 others.
    dataset = cohorts.dataset([5] * 6)
    _, engine = _engine(jit_compile=None)
    clients = []

    def another_machine(program, broadcast, chunk):
        found = tf.nest.flatten(program(broadcast, chunk))
        rows = np.asarray(tf.nest.flatten(chunk.x)[0]).tobytes()
        if rows not in clients:
            clients.append(rows)
        if len(chunk.table.members) == 8 and rows == clients[-1]:
            found = [
                np.nextafter(part, 9) if part.dtype == tf.float64 else part
                for part in found
            ]
        return [found]

    trials = engine_lib.Trials(another_machine)
    with cohorts.side_by_side(steps=(2,)):
        cohorts.collect(engine, dataset)
        (strategy,) = (s for s in engine.programs.traced if s.num_steps == 2)
        assert [engine.fits(strategy, 5, k, trials) for k in (7, 8, 9)] == [1, 0, 1]
        narrowest = min(columns for _, columns in engine.layout.kernels)
        assert len(clients) * strategy.num_steps * 5 * narrowest >= 256
        # What was tried belongs to the programs, and goes with them.
        tried = len(trials.fits)
        engine._forget_programs()
        cohorts.collect(engine, dataset)
        assert engine.fits(strategy, 5, 7, trials)
        assert len(trials.fits) == tried + 1


def test_a_metric_that_refuses_made_up_labels_trains_clients_one_by_one():
    # Its error ended the fit.
    metric = tf.keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    clients = {
        k: (rng.normal(size=(5, 4)).astype(np.float32), np.zeros(5, np.float32))
        for k in range(6)
    }
    clients[3][1][2] = 2.0
    dataset = tfdp_fl.datasets.as_federated(clients)
    dense = tf.keras.layers.Dense
    engine = cohorts.make_engine(
        cohorts.sequential([4], dense(6), dense(1)),
        dataset,
        loss="mse",
        training={"metrics": [metric]},
        jit_compile=None,
    )
    with cohorts.side_by_side(steps=(2,)):
        pending = cohorts.collect(engine, dataset)
    assert {used.kind for used in engine.used_strategies} == {layout.ONE_BY_ONE}
    assert [failure.position for failure in pending.failures] == [3]


def test_padding_reads_a_row_where_nobody_has_any():
    empty = layout.client_table(np.zeros(0, int), np.zeros(0, int), 5, 1)
    padded = layout.pad_to(empty, 7)
    assert (padded.rows.tolist(), len(padded.members)) == ([0], 7)


def test_a_width_by_which_norms_differ_below_float32_is_not_used():
    true = dense_models.norm_and_upper_bound

    def in_calls_of_eight(*args, **kwargs):
        norm, bound = true(*args, **kwargs)
        wrong = tf.constant(1 + 2**-50, tf.float64)
        return norm, tf.where(tf.size(bound) == 8, wrong * bound, bound)

    dataset = cohorts.dataset([5] * 6)
    patched = mock.patch.object(dense_models, "norm_and_upper_bound", in_calls_of_eight)
    with patched, cohorts.side_by_side(steps=(2,)):
        _, engine = _engine(units=7, jit_compile=None)  # No other test's.
        cohorts.collect(engine, dataset)
        (strategy,) = (s for s in engine.programs.traced if s.num_steps == 2)
        assert [engine.fits(strategy, 5, k) for k in (7, 8, 9)] == [1, 0, 1]


def test_a_place_that_computes_otherwise_is_not_used():
    # Processors compute the last rows of a product in another way. One more client
    # moved others to the last place, and the sum by 46 clips.
    true = dense_models.norm_and_upper_bound

    def in_the_last_place(*args, **kwargs):
        norm, bound = true(*args, **kwargs)
        is_last = tf.range(tf.size(bound)) == tf.size(bound) - 1
        return norm, tf.where(is_last, bound * (1 + 2**-50), bound)

    dataset = cohorts.dataset([5] * 6)
    patched = mock.patch.object(dense_models, "norm_and_upper_bound", in_the_last_place)
    with patched, cohorts.side_by_side(steps=(2,)):
        _, engine = _engine(units=8, jit_compile=None)  # No other test's.
        cohorts.collect(engine, dataset)
        assert {used.kind for used in engine.used_strategies} == {layout.ONE_BY_ONE}
        (strategy,) = (s for s in engine.programs.traced if s.num_steps == 2)
        assert not any(engine.fits(strategy, 5, k) for k in (7, 8, 9))


@pytest.mark.parametrize("clip", [1e-4, 1e-3, 1e-2])
def test_the_clip_holds_where_a_clients_steps_cancel_out(clip):
    # Large and nearly equal examples with opposite labels: the squared norm is a
    # small difference of large Gram products.
    model = cohorts.sequential([300], _layers.Dense(2, kernel_initializer="zeros"))
    options = {"batch_size": 20, "local_epochs": 1, "learning_rate": 0.01}
    engine = None
    for epsilon in (0.0, 1e-5, 1e-4, 1e-3, 1e-2):
        rng = np.random.default_rng(0)
        base = rng.normal(size=[1, 300])
        x = 50 * (base + epsilon * rng.normal(size=[20, 300]))
        dataset = cohorts.from_arrays({0: (x.astype(np.float32), np.arange(20) % 2)})
        engine = engine or cohorts.make_engine(
            model, dataset, jit_compile=None, mechanism=_fixed(clip)
        )
        with cohorts.side_by_side(steps=(1,)):
            moved = cohorts.update_of(cohorts.collect(engine, dataset, **options))
        assert references.l2_norm(moved) <= clip * 1.001
    assert engine.has_trained_side_by_side


def test_a_step_in_bfloat16_is_kerass_before_it_rounds_the_update():
    rng, moved = np.random.default_rng(0), []
    clients = {
        k: (rng.normal(size=(4, 40)).astype("f4"), rng.integers(0, 3, 4))
        for k in range(3)
    }
    dataset, options = cohorts.from_arrays(clients), {"local_epochs": 1}
    for jit_compile in (None, False):
        with cohorts.policy("mixed_bfloat16"), cohorts.side_by_side(steps=(1,)):
            toy.seed(1)
            model = cohorts.sequential([40], _layers.Dense(3))
            engine = cohorts.make_engine(model, dataset, jit_compile=jit_compile)
            moved.append(cohorts.moved_by(model, engine, dataset, **options))
        assert engine.has_trained_side_by_side == (jit_compile is None)
    for one, other in zip(*moved, strict=True):
        # Keras rounds each client's, here 3, and adds up its examples.
        largest, difference = np.abs(other).max(), np.abs(one - other).max()
        assert 2**-14 * largest < difference <= 2**-8 * largest


def test_cohorts_of_changing_size_trace_once():
    dataset = cohorts.dataset((5, 7, 0, 12, 3, 5, 5, 5))
    _, engine = _engine("median", max_parallel_clients=2)
    # With batches of one size, and of several.
    for positions in ([0, 1, 2], [0, 5, 6], [], [1], [1, 2, 3, 4], range(8), [3, 4]):
        cohorts.run_round(engine, dataset, positions=np.array(positions, int))
        assert len(engine.programs.traced) == 1


def _reference_updates(units=6):
    how = tf.keras.optimizers.SGD(0.1), cohorts.cross_entropy()
    clients = cohorts.client_arrays().values()
    return [cohorts.reference_update(cohorts.mlp(units), c, *how) for c in clients]


@pytest.mark.parametrize("name", ["fixed", "median"])
def test_variance_and_scale_are_those_of_the_unclipped_updates(name):
    engine = _engine(
        name, units=3000, between_client_variance=True, max_parallel_clients=2
    )
    _, logs = _round(cohorts.dataset(), engine=engine)
    found = logs["between_client_variance"], logs["update_scale"]
    wanted = references.variance_and_scale(_reference_updates(units=3000))
    cohorts.assert_close(found, wanted, rtol=1e-4)
    # An empty cohort, which has no median, is noise divided by the fixed m.
    empty = {"positions": _NOBODY, "clients_per_round": 8.0, "noise_multiplier": 3.0}
    moved, logs = _round(cohorts.dataset(), engine=engine, **empty)
    assert (logs["between_client_variance"], logs["update_scale"]) == (0, 0)
    assert logs["mean_update_norm"] == 0
    if name == "fixed":
        statistics.assert_gaussian(moved, 3.0 * 0.1 / 8)


def test_broadcast_hook_changes_what_clients_receive_only():
    def hook(weights, seed):
        return [v + 0.1 * tf.random.stateless_normal(v.shape, seed) for v in weights]

    model, dataset = cohorts.mlp(), cohorts.dataset()
    hooked = cohorts.make_engine(model, dataset, training={"broadcast_hook": hook})

    def moved(seed, *engine):
        return _round(dataset, engine=engine, seed=np.array([1, seed]))[0]

    one, plain = moved(1, model, hooked), moved(1, *_engine("none"))
    assert not np.allclose(one, moved(2, model, hooked), 1e-4)
    assert not np.allclose(one, plain, 1e-4, 1e-6)
    # An update is what the client changed, not the hook.
    cohorts.assert_close(one, plain, atol=0.1)


_SEPARATE = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5, layers="separate")
_ZETA = references.analytic_sigma(1.0, 8.0, 1e-5) * 3**0.5


@pytest.mark.parametrize(
    ("options", "stddevs"),
    [
        ({"training": {"upload_hook": lambda u: noise.add_normal(u, 0.3)}}, (0.3, 0.3)),
        # By each client's own window.
        ({"mechanism": _SEPARATE}, (2 * 0.5 * _ZETA, 2 * 0.1 * _ZETA)),
    ],
)
def test_every_client_draws_noise_of_its_own(options, stddevs):
    windows = np.full([2, 3, 4], 0.5, np.float32)
    windows[1] = 0.1
    model, dataset = cohorts.mlp(3000), cohorts.dataset((2, 2))
    engine = cohorts.make_engine(model, dataset, collect_contributions=True, **options)
    inputs = {"windows": windows} if "mechanism" in options else {}
    pending = cohorts.collect(engine, dataset, learning_rate=0.0, **inputs)
    ((_, collected),) = pending.collected
    for update, stddev in zip(collected.updates.numpy(), stddevs, strict=True):
        statistics.assert_gaussian(update, stddev)
    statistics.assert_uncorrelated(*collected.updates.numpy())


def test_adaptive_local_dp_returns_the_norms_before_noise():
    mechanism = tfdp_fl.AdaptiveLocalDP(epsilon=8.0, delta=1e-5)
    dataset = cohorts.dataset()
    options = {"mechanism": mechanism, "max_parallel_clients": 2}
    engine = cohorts.make_engine(cohorts.mlp(), dataset, **options)
    windows = np.full([4, 3, 4], np.nan, np.float32)
    pending = cohorts.collect(engine, dataset, windows=windows)
    wanted = [[np.linalg.norm(v) for v in each] for each in _reference_updates()]
    cohorts.assert_close(pending.window_norms, np.array(wanted), rtol=1e-4)


@pytest.mark.parametrize("jit_compile", [False, None])
def test_sums_in_steps_are_the_same_however_many_int32_holds(jit_compile, monkeypatch):
    data = cohorts.dataset()
    _, made = _engine(max_parallel_clients=1, jit_compile=jit_compile)
    made.used_strategies.clear()

    def total():
        with cohorts.side_by_side(steps=(4,)):
            pending = cohorts.collect(made, data, noise_multiplier=1.0)
        assert not {used.fine for used in made.used_strategies} - {False}
        assert {part.dtype.name for part in cohorts.update_of(pending)} == {"float64"}
        return rounds.flat(cohorts.update_of(pending))

    at_once = total()
    for most in (1, 3):
        monkeypatch.setattr(bounded_sums, "MAX_INT32_CLIENTS", most)
        np.testing.assert_array_equal(total(), at_once)
    assert np.any(at_once)


def test_int32_never_adds_up_more_clients_than_it_holds():
    # As many as long as they may be, of two programs with steps of their own.
    numbers, nothing = tf.fill([2], 2**21 * 400), tf.zeros([])
    record = Contribution([numbers], {}, *[nothing] * 4)
    total = cohort.CohortSum.zeros()._replace(contribution=record)
    thread = cohort.ThreadSum()
    for step in (0.5, 0.5, 0.5, 0.25, 0.25):
        one = cohort.Trained(total, cohort.PerClient(), tf.constant(step))
        thread.add(400, one)
    (update,) = thread.convert().contribution.update
    np.testing.assert_array_equal(update, [2.0 * 2**21 * 400] * 2)
