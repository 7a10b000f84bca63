"""What holds of every mechanism's declaration."""

import dataclasses
import math
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import rounds
from tfdp_fl import algorithm
from tfdp_fl.mechanisms import PrivacyContext

_CORRELATED = {"clip_norm": 0.5, "noise_multiplier": 1.0, "strategy": "blt:2"}
_CORRELATED |= {"rounds": 12, "min_separation": 4}
_GOOD = {
    tfdp_fl.NoPrivacy: {},
    tfdp_fl.FixedClipping: {"clip_norm": 1.0, "noise_multiplier": 1.5},
    tfdp_fl.AdaptiveClipping: {"noise_multiplier": 1.5},
    tfdp_fl.MedianClipping: {"noise_multiplier": 1.5},
    tfdp_fl.LocalDP: {"clip_norm": 1.0, "epsilon": 8.0, "delta": 1e-5},
    tfdp_fl.AdaptiveLocalDP: {"epsilon": 8.0, "delta": 1e-5},
    tfdp_fl.NbAFL: {"epsilon": 10.0, "constant": 1.0, "weight_clip": 1.0},
    tfdp_fl.CorrelatedNoise: _CORRELATED,
}


@pytest.mark.parametrize("kind", _GOOD)
def test_is_a_frozen_declaration(kind):
    made = kind(**_GOOD[kind])
    assert dataclasses.replace(made) == made
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, 1)
    with pytest.raises(TypeError):
        kind(1.0)
    text = made.describe()
    assert text.endswith(".") and "{" not in text


_REFUSED = {
    tfdp_fl.FixedClipping: {
        # What float32 cannot keep too.
        "clip_norm": (0, -1.0, math.nan, math.inf, "1", True, None, 1e-11, 1e31),
        "noise_multiplier": (
            1e-19,
            1e200,
            -0.1,
            math.nan,
            [1.0, -1.0],
            [],
            lambda t: -1.0,
        ),
    },
    tfdp_fl.AdaptiveClipping: {
        "initial_clip_norm": (0.0, 1e-11, 1e31),
        "target_quantile": (1.1, -0.1),
        "clip_learning_rate": (-0.2,),
        "count_noise_stddev": (-1.0, 1e-200),
    },
    tfdp_fl.MedianClipping: {
        "noise_multiplier": (1e-200,),
        "median_noise_multiplier": (0.0, -1.0, 1e-200),
    },
    tfdp_fl.LocalDP: {
        "clip_norm": (1e-11, 1e31),
        "epsilon": (0.0, None, 1e-200, 1e200),
        "delta": (0.0, 1.0, None),
        "noise_multiplier": (1.0, -1.0),
    },
    tfdp_fl.AdaptiveLocalDP: {"clipping_radius": (0.0,), "window": (0, 2.5)},
    tfdp_fl.NbAFL: {
        "epsilon": (1e-200, 1e200),
        "constant": (0.0,),
        "weight_clip": (-1.0,),
        "mu": (-0.1,),
    },
    tfdp_fl.CorrelatedNoise: {
        "noise_site": ("client",),
        "noise_multiplier": ([1.0, 2.0], -1.0),
        "strategy": ("band", "blt:", "blt:x", "BLT(buffers=2)", 3),
        "min_separation": (0,),
        "clip_norm": (0.0,),
    },
}


@pytest.mark.parametrize("kind", _GOOD)
def test_what_is_not_allowed_is_refused_by_its_name(kind):
    refused = {field.name: (object(),) for field in dataclasses.fields(kind)}
    for name, values in (*refused.items(), *_REFUSED.get(kind, {}).items()):
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name):
                kind(**{**_GOOD[kind], name: value})


@pytest.mark.parametrize("clip, noise", [(1e-10, 1e-20), (1e18, 1e18), (1.0, 1e38)])
def test_noise_that_float32_cannot_keep_is_refused(clip, noise):
    for z in (noise, [noise], lambda _: noise):
        with pytest.raises(ValueError, match="noise_multiplier"):
            made = tfdp_fl.FixedClipping(clip_norm=clip, noise_multiplier=z)
            made.noise_multiplier_at(0)


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_noise_at_the_clients_needs_cohorts_of_fixed_size(sampling):
    context = PrivacyContext(clients_per_round=5, sampling=sampling)
    for mechanism in (
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=0.1, noise_site="client"),
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.1, noise_site="client"),
    ):
        for use in (mechanism.check, mechanism.bind):
            with pytest.raises(ValueError, match=r"noise_site.*fixed_size"):
                use(context)


def test_the_noise_multiplier_follows_its_schedule():
    for schedule in ([1.0, 2.0, 3.0], lambda t: t + 1.0):
        made = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=schedule)
        assert [made.noise_multiplier_at(t) for t in range(3)] == [1, 2, 3]
        context = PrivacyContext(clients_per_round=10)
        events = [made.round_event(t, context) for t in range(3)]
        assert [event.noise_multiplier for event in events] == [1, 2, 3]
    # A callable that answers otherwise when it is asked again is asked once a round.
    answers = iter(range(1, 9))
    made = tfdp_fl.FixedClipping(
        clip_norm=1.0, noise_multiplier=lambda t: next(answers)
    )
    assert len({made.noise_multiplier_at(3) for _ in range(3)}) == 1
    # It is checked in every round.
    for schedule, error, message in (
        ([1.0, 2.0], ValueError, "2 values"),
        (lambda t: 1.0 - t, ValueError, "-1"),
        (lambda t: 1.0 if t == 0 else "much", TypeError, "'much'"),
    ):
        made = tfdp_fl.MedianClipping(noise_multiplier=schedule)
        assert made.noise_multiplier_at(0) == 1.0
        with pytest.raises(error, match=f"noise_multiplier.*{message}"):
            made.noise_multiplier_at(2)


def test_what_is_overridden_is_not_only_scaled():
    # A runtime that believed a wrong flag would release something else side by side.
    class Own(tfdp_fl.FixedClipping):
        def contribution(self, update, round, client, context):
            return super().contribution(update, round, client, context)

    made = Own(clip_norm=1.0, noise_multiplier=1.0)
    assert not made.scales_updates
    assert not made.bind(PrivacyContext(clients_per_round=3)).only_scales
    scales = {kind for kind in _GOOD if kind(**_GOOD[kind]).scales_updates}
    assert set(_GOOD) - scales == {tfdp_fl.AdaptiveLocalDP, tfdp_fl.NbAFL}


def _own(base=tfdp_fl.FixedClipping, **members):
    """Returns a mechanism of somebody's own."""
    members = {"describe": lambda self: "", "__module__": "theirs", **members}
    return type("Own", (base,), members)(clip_norm=1.0, noise_multiplier=5.0)


_OF_COST = {
    "add_noise": lambda self, update, stddev, noise_state: (update, noise_state),
    "clip_to_cohort": lambda self, norms, round: norms[0],
    "round_mu_squared": lambda self, round, context: 0.01,
    "needs_exact_cohort": False,
    "bind": lambda self, context: None,
    "event_at": lambda self, *_: dp_accounting.GaussianDpEvent(9.0),
}


@pytest.mark.parametrize("name", _OF_COST)
def test_what_changes_the_cost_needs_a_cost_of_its_own(name):
    # Each was charged as if it had the noise of the base class.
    member = {name: _OF_COST[name]}
    with pytest.raises(TypeError, match=f"Own must define round_event, because {name}"):
        _own(**member)
    if name == "add_noise":  # Also where another class does it.
        with pytest.raises(TypeError, match="because trust_model"):
            _own(tfdp_fl.NoPrivacy, trust_model="central")
        with pytest.raises(TypeError, match="because add_noise, which Mixed defines"):
            mixed = type("Mixed", (), {**member, "__module__": "theirs"})
            type("Own", (mixed, tfdp_fl.FixedClipping), {"__module__": "theirs"})
    event = tfdp_fl.Mechanism.round_event
    made = _own(**member, round_event=lambda self, *given: event(self, *given))
    assert made.all_caveats() == ("own_cost",)
    assert _own().all_caveats() == ()


_CORRELATED = {"clip_norm": 1.0, "noise_multiplier": 2.0, "rounds": 4}
_CORRELATED |= {"min_separation": 2, "strategy": "banded"}
_LOCAL = {"clip_norm": 1.0, "noise_multiplier": 10.0}


@pytest.mark.parametrize(
    ("base", "given", "members"),
    [
        *(
            (tfdp_fl.CorrelatedNoise, _CORRELATED, members)
            for members in (
                {"noise_stddevs": lambda *_: {"update": 0.02}},
                {"noise_multiplier_at": lambda *_: 0.02},
                {"l2_norm_bound": lambda *_: 100.0},
                {"side_bounds": {"side": 0.5}},
                {"generator": None},
                {"check": lambda *_: None},
                {
                    "__annotations__": {"noise_multiplier": "float"},
                    "noise_multiplier": property(lambda _: 0.02, lambda *_: None),
                },
            )
        ),
        *(
            (tfdp_fl.LocalDP, _LOCAL, members)
            for members in (
                {"client_noise": lambda *_: 0.001},
                {"noise_stddevs": lambda *_: {"update": 0.001}},
                {"contribution": lambda *_: None},
                {"scale": lambda self, norm, round: norm * 0 + 1},
                {"mu_squared": lambda *_: 1.0, "client_noise": lambda *_: 0.001},
            )
        ),
        (tfdp_fl.NbAFL, {}, {"downlink_stddev": lambda *_: 0.0}),
        (tfdp_fl.NbAFL, {}, {"privacy_unit": "client"}),
        (tfdp_fl.FixedClipping, {}, {"trust_model": "local"}),
        # Planning took it for constant: 1.9 planned, 20.5 charged.
        (tfdp_fl.FixedClipping, {}, {"noise_multiplier_at": lambda *_: 0.02}),
        (tfdp_fl.FixedClipping, {}, {"__annotations__": {"add_noise": "Any"}}),
        (tfdp_fl.FixedClipping, {}, {"__getattribute__": object.__getattribute__}),
    ],
)
def test_a_built_in_cost_does_not_cover_what_a_subclass_changes(base, given, members):
    # Each printed the parent's epsilon, for noise that was up to 1000 times smaller.
    names = {"describe": lambda self: "", "__module__": "theirs", **members}
    with pytest.raises(TypeError, match=r"Own must define (round_event|mu_squared)"):
        dataclasses.dataclass(frozen=True)(type("Own", (base,), names))
    if not given:
        return
    names |= {
        cost: lambda self, *some, cost=cost: getattr(base, cost)(self, *some)
        for cost in ("round_event", "mu_squared")
        if cost not in names
    }
    made = type("Own", (base,), names)(**given)
    assert "own_cost" in made.all_caveats()
    # What changes no cost is free; a member that is set later is noticed all the same.
    free = type("Own", (base,), {"describe": lambda self: "", "__module__": "theirs"})
    assert "own_cost" not in free(**given).all_caveats()
    for name, member in members.items():
        setattr(free, name, member)
    with pytest.raises(TypeError, match="Own must define"):
        free(**given).bind(PrivacyContext(clients_per_round=3))


@pytest.mark.parametrize("base", [tfdp_fl.FixedClipping, tfdp_fl.CorrelatedNoise])
@pytest.mark.parametrize("name", ["noise_multiplier_at", "round_event", "describe"])
def test_an_instance_has_no_members_of_its_own(base, name):
    # The charge was made of this one, while what is derived looks at the class.
    given = {"clip_norm": 1.0, "noise_multiplier": 5.0}
    made = base(**given if base is tfdp_fl.FixedClipping else _CORRELATED)
    context = PrivacyContext(clients_per_round=3)
    made.bind(context)  # Also where a property is cached.
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, name, lambda *_: 9.0)
    for set_member in (object.__setattr__, setattr):
        if set_member is setattr:  # A subclass that is no dataclass is not frozen.
            made = _own()
        set_member(made, name, lambda *_: 9.0)
        with pytest.raises(TypeError, match=f"{name} must be defined by a subclass"):
            made.bind(context)


@pytest.mark.parametrize("wrong", range(1, 8))
def test_what_clients_add_is_the_noise_that_is_checked(wrong):
    # A client asked anew, so the check at the end saw another answer.
    asked = []

    def noise_stddevs(self, round, context):
        asked.append(round)
        share = 0.01 if len(asked) == wrong else 1.0
        return {"update": share * round.noise_multiplier * round.clip_norm}

    made = _own(noise_stddevs=noise_stddevs)
    made = dataclasses.replace(made, noise_site="client")
    query, state = rounds.bound(made, 4, sampling="fixed_size")
    asked.clear()
    updates = rounds.zero_updates(4, [(5000,)])
    try:
        done = rounds.run_round(query, state, updates, noise_multiplier=5.0)
    except tf.errors.InvalidArgumentError:
        assert wrong == 1
        return
    # 10 % are 10 standard deviations of it.
    assert np.std(4 * done.mean[0]) == pytest.approx(5.0, rel=0.1)


def test_noise_that_nobody_adds_is_refused():
    made = _own()
    object.__setattr__(made, "noise_site", "every client")
    with pytest.raises(ValueError, match="noise_site must be 'server' or 'client'"):
        made.bind(PrivacyContext(clients_per_round=3))
    # A check of one's own that forgets the cohort's size.
    made = _own(check=lambda self, context: None)
    object.__setattr__(made, "noise_site", "client")
    with pytest.raises(ValueError, match="needs sampling='fixed_size'"):
        made.bind(PrivacyContext(clients_per_round=3, sampling="poisson"))


def test_a_central_mean_knows_no_weights():
    seen = []

    def mean(self, update, weight, round, context):
        seen.append(weight)
        return [tensor / weight for tensor in update]

    weighting = tfdp_fl.ClientWeighting(cap=1.0, mean_weight=0.5)
    query = _own(mean=mean).bind(
        PrivacyContext(clients_per_round=4, client_weighting=weighting)
    )
    state = query.begin_round(query.initial_global_state(), 5.0, 4.0)
    total = query.initial_sample_state([tf.zeros([2])])
    algorithm.release(query, total._replace(weight=tf.constant(3.0)), state, 0.04)
    assert [float(weight) for weight in seen] == [2.0]


class _TwoSums(tfdp_fl.FixedClipping):
    side_bounds = {"one": 1.0, "two": 200.0}  # noqa: RUF012

    def noise_stddevs(self, round, context):
        return {"update": round.noise_multiplier * round.clip_norm, "one": 1, "two": 99}

    def side_statistics(self, norm, round):
        return {"two": norm * 100, "one": norm}


def test_side_sums_keep_their_names_in_any_order():
    query = _TwoSums(clip_norm=1.0, noise_multiplier=1.0).bind(
        PrivacyContext(clients_per_round=2)
    )
    state = query.begin_round(query.initial_global_state(), 1.0, 2.0)
    record = algorithm.make_contribution(query, state, [tf.ones([1])])
    again = query.initial_sample_state([]).with_scalars([], record.scalars())
    assert [float(again.sums[name]) for name in ("one", "two")] == [1.0, 100.0]
    with (
        mock.patch.object(_TwoSums, "side_statistics", lambda *_: {"one": 0.0}),
        pytest.raises(ValueError, match="side_bounds"),
    ):
        algorithm.make_contribution(query, state, [tf.ones([1])])


@pytest.mark.parametrize(("limit", "stddev"), [(1e39, 1e39), (1e-35, 1e-32), (1, 1e39)])
def test_a_side_sum_that_float32_cannot_hold_has_no_noise(limit, stddev):
    # An infinite statistic was within an infinite bound, and noise below float32's
    # numbers vanished.
    def noise_stddevs(self, round, context):
        update = 2**0.5 * round.noise_multiplier * round.clip_norm
        return {"update": update, "one": stddev}

    members = {"side_bounds": {"one": limit}, "noise_stddevs": noise_stddevs}
    members["side_statistics"] = lambda self, norm, round: {"one": norm}
    made = type("Wide", (tfdp_fl.FixedClipping,), members)
    made = made(clip_norm=1.0, noise_multiplier=5.0)
    context = PrivacyContext(clients_per_round=4)
    assert made.round_event(0, context) == dp_accounting.NonPrivateDpEvent()
    query, state = rounds.bound(made, 4)
    state = query.begin_round(state, 5.0, 4.0)
    stddevs = {
        "update": tf.constant(5.0),
        "one": tf.constant(np.array(stddev).astype("f4")),
    }
    assert math.isinf(made.round_mu_squared(state, context, stddevs))


@pytest.mark.parametrize(
    ("base", "members", "arguments", "message"),
    [
        (_TwoSums, {"side_bounds": {"update": 1.0}}, {}, "'update'"),
        (tfdp_fl.LocalDP, {"side_bounds": {"one": 1.0}}, {}, "must be empty"),
        (
            *(tfdp_fl.FixedClipping, {"max_participations": 3}),
            *({"noise_site": "client"}, "max_participations"),
        ),
    ],
)
def test_sums_and_cohorts_that_would_lack_noise_are_refused(
    base, members, arguments, message
):
    if base is tfdp_fl.LocalDP:  # (Otherwise the class itself is refused.)
        members |= {"mu_squared": base.mu_squared, "round_event": base.round_event}
    mechanism = type("Own", (base,), members)(
        clip_norm=1.0, noise_multiplier=1.0, **arguments
    )
    context = PrivacyContext(
        clients_per_round=2, num_clients=4, sampling="fixed_size", rounds=1
    )
    with pytest.raises(ValueError, match=message):
        mechanism.bind(context)
