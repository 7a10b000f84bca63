"""The one door into a sum: nothing is broadcast, longer than declared, or rounded."""

import contextlib
import dataclasses
import fractions
from typing import ClassVar
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdp_fl
from tests.engine import cohorts
from tests.keras import toy
from tests.mechanisms import rounds
from tfdp_fl import algorithm, mechanisms
from tfdp_fl._lazy_tf import tfp
from tfdp_fl.mechanisms import bounded_sums, clipping, noise
from tfdp_fl.mechanisms.contribution import Contribution, PrivacyContext

_FIXED = tfdp_fl.FixedClipping(clip_norm=0.3, noise_multiplier=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Own(mechanisms.Mechanism):
    """A mechanism of somebody's own, which does more than it declares."""

    noise_multiplier: float = 1.0
    longer: float = 1.0
    outside: float = 0.0
    heavier: float = 1.0
    negative: bool = False
    noise: float | None = None
    side_bounds: ClassVar = {"side": 0.5}

    def first_clip_norm(self):
        return 0.3

    def scale(self, norm, round):
        scale = self.longer * tf.minimum(1.0, round.clip_norm / norm)
        return -scale if self.negative else scale

    def side_statistics(self, norm, round):
        return {"side": tf.zeros_like(norm) + 0.5 + self.outside}

    def contribution_of_norm(self, norm, usable, round):
        one = super().contribution_of_norm(norm, usable, round)
        return one._replace(weight=one.weight * self.heavier)

    def noise_stddevs(self, round, context):
        update = round.noise_multiplier * round.clip_norm
        if self.noise is not None:
            update = tf.constant(self.noise) if tf.is_tensor(update) else self.noise
        return {"update": update, "side": 5.0}

    def next_clip_norm(self, sums, round):
        return round.clip_norm * 2

    def describe(self):
        return "Somebody's own."


class _OwnContribution(_Own):
    """The same, computed from whole updates."""

    def contribution(self, update, round, client, context):
        return super().contribution(update, round, client, context)


@pytest.mark.parametrize("kind", [_Own, _OwnContribution])
@pytest.mark.parametrize(
    "more",
    [
        {"longer": 1.01},
        {"longer": 20.0},
        {"longer": float("nan")},
        {"outside": 0.01},
        {"outside": float("nan")},
        {"heavier": 1.5},
        {"heavier": float("inf")},
        {"negative": True},
    ],
    ids=str,
)
def test_more_than_is_declared_counts_as_nothing(kind, more):
    updates = rounds.updates_with_norms([5.0])
    for options, discarded in (({}, 0), (more, 1)):
        own = kind(**options)
        query, state = rounds.bound(own)
        one = rounds.run_round(query, state, updates).records[0]
        assert float(one.discarded) == discarded or more == {"negative": True}
        norm = np.linalg.norm(rounds.flat(one.update))
        assert norm <= 0.3 * (1 + 1e-5)
        assert abs(float(one.sums["side"])) <= 0.5 and 0 <= float(one.weight) <= 1
        if discarded and float(one.discarded):
            assert not norm and not float(one.sums["side"]) and not float(one.weight)


_REPEATED = tf.IndexedSlices(
    tf.ones([200, 2]), tf.zeros([200], tf.int64), tf.constant([4, 2], tf.int64)
)


class _Repeats(_Own):
    """Returns one row many times, each of the norm S."""

    def contribution(self, update, round, client, context):
        one = super().contribution(update, round, client, context)
        return one._replace(update=[_REPEATED])


def test_rows_that_repeat_are_added_up_before_they_are_measured():
    # The norm was that of the rows, and what was added their sum: 200 S.
    for made, update in (_FIXED, [_REPEATED]), (_Repeats(), [tf.ones([4, 2])]):
        query = made.bind(PrivacyContext(clients_per_round=2, shapes=((4, 2),)))
        state = query.begin_round(query.initial_global_state(), 1.0, 2.0)
        params = query.derive_sample_params(state)
        one = algorithm.make_contribution(query, params, update)
        (sent,) = bounded_sums.add(
            query.initial_sample_state([tf.ones([4, 2])]), one
        ).update
        assert np.linalg.norm(sent) <= 0.3 * (1 + 1e-5)
        assert (np.linalg.norm(sent) > 0) == (made is _FIXED)
    for wrong in (["text"], [tf.ones([4, 2], tf.int32)]):
        with pytest.raises(ValueError, match="must be a list of float tensors"):
            algorithm.make_contribution(query, params, wrong)


class _Shrinks(_Own):
    """Returns one number for a whole matrix."""

    def contribution(self, update, round, client, context):
        one = super().contribution(update, round, client, context)
        return one._replace(update=[tf.reshape(one.update[0][0, 0], [1, 1])])


def test_a_record_with_other_shapes_than_the_update_is_refused_before_it_is_added():
    # Clipped as one number and broadcast in the sum, it would have had 8 S.
    query = _Shrinks().bind(PrivacyContext(clients_per_round=2, shapes=((8, 8),)))
    state = query.begin_round(query.initial_global_state(), 1.0, 2.0)
    with pytest.raises(ValueError, match="with the variable's shape, got"):
        algorithm.make_contribution(
            query, query.derive_sample_params(state), [tf.ones([8, 8])]
        )


@pytest.mark.parametrize("clip", [1e-25, 1e-11, 1e-10])
def test_below_the_smallest_clip_nothing_is_added(clip):
    # Its elements have the norm 0 in float32: the sum moved by 1e8 clips.
    updates = [tf.fill([8], 1e-20), tf.fill([8], 1.0)]
    for update in updates:
        norm = clipping.global_norm([update])
        factor = Contribution(clipping.clip_factor(norm, clip), {}, *[0.0] * 4)
        whole = factor._replace(update=clipping.multiply([update], factor.update))
        scaled = update * bounded_sums.bound_factor(factor, norm, clip, {}).update
        bounded = bounded_sums.bound(whole, clip, {}).update[0]
        for sent in (scaled, bounded):
            assert np.linalg.norm(np.float64(sent)) <= clip * (1 + 1e-5)
            assert bool(np.any(sent)) == (clip >= 1e-10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Weights(mechanisms.Mechanism):
    """The mean of clipped weights replaces the model."""

    releases_weights = True
    clip_norm: float = 1.0
    noise_multiplier: float = 20.0

    def describe(self):
        return "Weights, clipped and noised."


@pytest.mark.parametrize("readable", [0, 1])
def test_that_nobody_sent_weights_changes_the_model_too(readable):
    # Without noise, whether the model had moved said whether one client had data.
    x, y = toy.arrays(4)
    clients = dict.fromkeys(range(3 - readable), (x[:0], y[:0]))
    clients |= dict.fromkeys(range(3 - readable, 3), (x, y))
    fed = toy.federated(_Weights(), clients_per_round=3, sampling="shuffled")
    before = fed.get_weights()
    toy.fit(fed, 1, data=clients)
    assert not np.array_equal(before[0], fed.get_weights()[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Normalised(mechanisms.Mechanism):
    """Scales every update to the norm S, the small ones up."""

    guard: float
    noise_multiplier: float = 1.0

    def first_clip_norm(self):
        return 0.3

    def scale(self, norm, round):
        return round.clip_norm / (norm + self.guard)

    def describe(self):
        return "Normalised."


@pytest.mark.parametrize(
    ("size", "guard"), [(1e-20, 1e-37), (1e-20, 1e-24), (1e-16, 1e-12), (1.0, 1e-37)]
)
def test_what_no_norm_shows_is_not_scaled_up(size, guard):
    # The squares of such elements are 0 in float32: one moved the sum by 1e18 S.
    query, state = rounds.bound(_Normalised(guard=guard))
    update = [tf.fill([1000], np.float32(size))]
    state = query.begin_round(state, 1.0, 8.0)
    record = algorithm.make_contribution(query, state, update)
    total = np.linalg.norm(record.update[0].numpy().astype(np.float64))
    assert total <= 0.3 * (1 + 1e-5)
    assert float(record.discarded) == (guard < 1e-12 and size < 1)
    norms, usable = tf.zeros([1]), tf.ones([1], tf.bool)
    factors = query.contributions_of_norms(norms, usable, state).update
    assert 1000**0.5 * 1e-19 * float(factors[0]) <= 0.3


def test_a_cost_is_derived_from_bounds_and_noise():
    where = PrivacyContext(clients_per_round=8)
    event = _Own().round_event(0, where)
    # (S / (z S))^2 + (0.5 / 5)^2.
    assert event.noise_multiplier == pytest.approx((1 + 0.1**2) ** -0.5)
    assert _FIXED.round_event(0, where).noise_multiplier == 1.0
    # Noise that stays where the clip doubles is noticed before it is released.
    query, state = rounds.bound(_Own(noise=0.3))
    updates = rounds.updates_with_norms([1.0] * 8)
    done = rounds.run_round(query, state, updates, noise_multiplier=1.0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="adds less noise"):
        rounds.run_round(query, done.next_state, updates, noise_multiplier=1.0)
    with pytest.raises(TypeError, match="because side_names"):
        type("Old", (mechanisms.Mechanism,), {"side_names": ("side",)})


class _Jitter(tfdp_fl.FixedClipping):
    """Says something else whenever it is asked."""

    def noise_stddevs(self, round, context):
        stddev = super().noise_stddevs(round, context)["update"]
        return {"update": stddev * tf.random.uniform([], 0.5, 1.5)}


def test_the_noise_that_was_checked_is_what_is_added():
    query, state = rounds.bound(_Jitter(clip_norm=1.0, noise_multiplier=1.0))
    state = query.begin_round(state, 1.0, 8.0)
    total, added = query.initial_sample_state([tf.zeros([1])]), []

    def add_normal(tensors, stddev):
        added.append(float(stddev))
        return tensors

    with mock.patch.object(noise, "add_normal", add_normal):
        for _ in range(60):  # All refused or none: 2^-59.
            with contextlib.suppress(tf.errors.InvalidArgumentError):
                algorithm.release(query, total, state, 1.0)
    assert 0 < len(added) < 60
    assert min(added) >= 1 - 1e-4


def test_nothing_is_broadcast_into_a_sum():
    query, _ = rounds.bound(_FIXED)
    total = query.initial_sample_state([tf.zeros([4, 1]), tf.zeros([3])])
    fields = dict.fromkeys(Contribution._fields[2:], tf.zeros([]))
    for update in (
        [tf.ones([1, 1]), tf.ones([3])],
        [tf.ones([4, 1]), tf.ones([])],
        [tf.ones([4, 1]), tf.ones([1, 3])],
    ):
        one = Contribution(update=update, sums={}, **fields)
        with pytest.raises(ValueError, match="never broadcast"):
            bounded_sums.add(total, one)
    with pytest.raises(ValueError):
        bounded_sums.add(
            total, Contribution(update=[tf.ones([4, 1])], sums={}, **fields)
        )
    # As a hook may hand it in, on every way to train.
    for options in ({}, {"collect_contributions": True}, {"at_once": 3}):
        with pytest.raises(ValueError, match=r"upload_hook.*one tensor per variable"):
            engine = cohorts.make_engine(
                cohorts.mlp(),
                cohorts.dataset(),
                mechanism=_FIXED,
                training={"upload_hook": lambda tensors: [t[:1] for t in tensors]},
                **options,
            )
            cohorts.collect(engine, cohorts.dataset())


_SIZES = st.sampled_from([1e-10, 1e-3, 0.3, 1.0, 1.9999999, 1e6, 1e29])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), _SIZES, st.randoms()
)
def test_sums_of_records_are_exact_in_any_order(values, clip, random):
    with np.errstate(all="ignore"):
        given_values = np.float32(clip) * np.float32(values)
    step = bounded_sums.fine_grid_step(tf.constant(clip, tf.float32), 10.0)
    (on_grid,) = bounded_sums.to_grid([tf.constant(given_values)], step)
    numbers = on_grid.numpy().astype(np.float64)
    assert float(step) <= clip * 26 * 2.0**-48
    np.testing.assert_array_equal(
        np.round(numbers / float(step)), numbers / float(step)
    )
    np.testing.assert_allclose(numbers, given_values, rtol=2.0**-22, atol=float(step))
    shuffled = numbers.tolist()
    random.shuffle(shuffled)
    together = np.add.reduce(numbers.tolist())
    parts = sum(shuffled[::2]) + sum(shuffled[1::2])
    assert (
        together
        == parts
        == np.float64(float(sum(map(int, numbers / float(step))))) * float(step)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), _SIZES, st.randoms()
)
def test_side_sums_are_exact_in_any_order(values, limit, random):
    with np.errstate(all="ignore"):
        given_values = np.float32(limit) * np.float32(values)

    @tf.function(autograph=False)
    def bounded(value):
        ones = tf.ones([])
        record = Contribution([], {"side": value}, ones, ones, ones, 0 * ones)
        return bounded_sums.bound_factor(
            record._replace(update=ones), ones, 1.0, {"side": limit}
        ).sums["side"]

    limit = float(np.nextafter(np.float32(limit), np.float32(np.inf)))
    numbers = [float(bounded(tf.constant(v))) for v in given_values]
    np.testing.assert_allclose(numbers, given_values, rtol=0, atol=limit * 2.0**-29)
    exact = float(sum(map(fractions.Fraction, numbers)))
    random.shuffle(numbers)
    assert sum(numbers[::2]) + sum(numbers[1::2]) == exact


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40), _SIZES)
def test_rounding_to_whole_steps_never_increases_a_norm(values, clip):
    with np.errstate(all="ignore"):
        given_values = np.float32(clip) * np.float32(values)
    step = bounded_sums.coarse_grid_step(clip)
    assert clip * 2.0**-21 < float(step) <= np.float32(clip) * 2.0**-20
    steps = bounded_sums.to_int32([tf.constant(given_values)], step)
    (numbers,) = bounded_sums.from_int32(steps, step)
    rest = np.abs(given_values.astype(np.float64)) - np.abs(numbers)
    assert np.all((rest >= 0) & (rest < float(step)))
    assert np.all(np.sign(numbers) * np.sign(given_values) >= 0)
    # As many as there may be, each as long as a clip may be, do not overflow.
    most = int(1 + 1.00001 * clip / float(step))
    assert most * bounded_sums.MAX_INT32_CLIENTS < 2**31


@pytest.mark.parametrize("clip", [0.0, 1e-44, 1e-20])
def test_below_the_smallest_clip_a_step_is_a_number(clip):
    step = bounded_sums.coarse_grid_step(clip)
    assert float(step) >= np.finfo(np.float32).tiny
    assert not np.any(bounded_sums.to_int32([tf.zeros([2])], step)[0])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_numbers_of_any_size_are_rounded_to_whole_steps(sign):
    step = bounded_sums.fine_grid_step(tf.constant(0.3, tf.float32), 10.0)
    powers = 2.0 ** np.arange(0, 40)[:, np.newaxis]
    steps = powers * np.array([1.0, 1.25, 1.5, 1.75]) + np.array([0.25, 0.5, 0.75, 0])
    given_values = np.float32(sign * steps * float(step))
    (on_grid,) = bounded_sums.to_grid([tf.constant(given_values)], step)
    numbers = on_grid.numpy().astype(np.float64) / float(step)
    np.testing.assert_array_equal(np.round(numbers), numbers)


@pytest.mark.parametrize("jit_compile", [None, True])
@pytest.mark.parametrize("shape", [(33,), (7, 11), (3, 5, 8)])
def test_a_large_sum_that_is_written_in_place_is_the_same(shape, jit_compile):
    rng = np.random.default_rng(0)
    whole, part = rng.normal(size=shape), rng.normal(size=shape).astype(np.float32)
    specs = [tf.TensorSpec(shape, tf.float64), tf.TensorSpec(shape, tf.float32)]

    @tf.function(input_signature=specs, jit_compile=jit_compile)
    def add_twice(whole, part):
        total = Contribution([whole], {}, *4 * [tf.zeros([])])
        one = total._replace(update=[part])
        return bounded_sums.add(bounded_sums.add(total, one), one).update[0]

    before = tf.constant(whole)
    with mock.patch.object(bounded_sums, "_LARGE", 16):
        total = add_twice(before, tf.constant(part))
    np.testing.assert_array_equal(total, whole + part + part)
    np.testing.assert_array_equal(before, whole)


def test_without_a_bound_there_is_no_grid():
    assert float(bounded_sums.fine_grid_step(tf.constant(np.inf), 10.0)) == 0.0
    (same,) = bounded_sums.to_grid([tf.constant([1e-30, 3.7])], tf.constant(0.0))
    np.testing.assert_array_equal(same, np.float32([1e-30, 3.7]))


def test_ten_thousand_clients_more_move_a_sum_by_their_records():
    # In float32, each addition to a large sum would be lost (5 clips of 20 481).
    query, state = rounds.bound(_FIXED, clients_per_round=20_000)
    params = query.derive_sample_params(query.begin_round(state, 1.0, 20_000.0))
    small = algorithm.make_contribution(query, params, [tf.fill([1], -2.2e-8)])
    large = algorithm.make_contribution(query, params, [tf.fill([1], 7.0)])
    total = query.initial_sample_state([tf.zeros([1])])
    total = total._replace(update=[4097 * tf.cast(large.update[0], tf.float64)])
    for _ in range(1000):
        before = total
        total = bounded_sums.add(before, small)
    moved = 4097 * float(large.update[0][0]) + 1000 * float(small.update[0][0])
    assert float(total.update[0][0]) == moved
    assert float(small.update[0][0]) == pytest.approx(-2.2e-8, rel=0.05)
    # Whole numbers of a step: what is far below one is nothing.
    assert (
        not algorithm.make_contribution(query, params, [tf.fill([1], 1e-13)])
        .update[0]
        .numpy()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["fixed", "per layer", "query"])
def test_short_floats_are_clipped_as_float32(kind, dtype):
    options = {"clip_norm": 0.3, "noise_multiplier": 1.0}
    mechanism = {
        "fixed": lambda: tfdp_fl.FixedClipping(**options),
        "per layer": lambda: tfdp_fl.PerLayerClipping(**options),
        "query": lambda: tfdp_fl.QueryMechanism(
            query=tfp.GaussianSumQuery(0.3, 0.3),
            dp_event=dp_accounting.GaussianDpEvent(1.0),
        ),
    }[kind]()
    query, state = rounds.bound(mechanism, clients_per_round=20)
    params = query.derive_sample_params(query.begin_round(state, 1.0, 20.0))
    generator = np.random.default_rng(0)
    for _ in range(20):
        update = [tf.cast(generator.normal(size=(40, 30)), dtype) for _ in range(3)]
        one = algorithm.make_contribution(query, params, update)
        length = np.linalg.norm(rounds.flat(one.update).astype(float))
        assert 0.29 < length <= 0.3 * (1 + 1e-5)
