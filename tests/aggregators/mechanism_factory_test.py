import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import ClassVar

import dp_accounting
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_federated as tff
import tensorflow_privacy as tfp

from tfdp_fl import aggregators, learning, mechanisms
from tfdp_fl.tff import state as state_lib

SCALAR = tff.TensorType(np.float32)
VECTOR = tff.TensorType(np.float32, [4])
NESTED = tff.types.to_type(
    collections.OrderedDict(
        z=(np.float32, [2]), a=[np.float32, collections.OrderedDict(c=SCALAR)]
    )
)
FIXED = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
COMPRESSION = tff.aggregators.EncodedSumFactory.quantize_above_threshold(
    quantization_bits=8, threshold=1
)


def nested(first, second, third, fourth):
    z, c = np.float32([first, second]), np.float32(fourth)
    a = [np.float32(third), collections.OrderedDict(c=c)]
    return collections.OrderedDict(z=z, a=a)


def quiet(clip_norm=1.0, clients_per_round=4, noise_multiplier=0.0, **options):
    options |= {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier}
    options["clients_per_round"] = clients_per_round
    return aggregators.FixedClippingFactory(**options)


class _Unasked(mechanisms.FixedClipping):
    """Says right before a round what it costs, which TFF's rounds do not ask."""

    def event_at(self, round_index, context, state):
        return self.round_event(round_index, context)

    def round_event(self, round_index, context):
        return super().round_event(round_index, context)


def test_refuses_mechanisms_whose_cost_would_not_be_asked():
    mechanism = _Unasked(clip_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="must not define event_at"):
        aggregators.from_mechanism(mechanism, 4)


@pytest.mark.parametrize(
    "value, message",
    [
        (collections.OrderedDict(n=np.int32), "float.*got int32 in <n=int32>"),
        ([], "at least one"),
        ([tff.SequenceType(np.float32)], "tensors"),
        ((np.float16, [3]), "float16 or bfloat16"),
        (tff.TensorType(ml_dtypes.bfloat16, [3]), "float16 or bfloat16"),
    ],
)
def test_refuses_other_values(value, message):
    factory = aggregators.NoPrivacyFactory(clients_per_round=1)
    with pytest.raises(TypeError, match=message):
        factory.create(tff.types.to_type(value))


STRUCT = tff.structure.Struct


# What TFF makes of a struct without a Python container.
DICT = collections.OrderedDict(b=2.0, a=4.0)
TWO = [STRUCT([("b", 1.0), ("a", 2.0)]), STRUCT([("b", 3.0), ("a", 6.0)])]


@pytest.mark.parametrize(
    "value_type, values, expected",
    [
        (SCALAR, [np.float32(1), np.float32(2)], np.float32(1.5)),
        (NESTED, [nested(1, 2, 3, 4)] * 2, nested(1, 2, 3, 4)),
        (tff.StructType([("b", SCALAR), ("a", np.float64)]), TWO, DICT),
    ],
)
def test_values_keep_their_structure(value_type, values, expected):
    factory = quiet(100.0, 2)
    process = factory.create(value_type)
    result = process.next(process.initialize(), values).result
    tf.nest.map_structure(np.testing.assert_allclose, result, expected)
    assert isinstance(factory, tff.aggregators.UnweightedAggregationFactory)
    assert isinstance(process, tff.templates.AggregationProcess)
    state_type = process.initialize.type_signature.result
    assert process.next.type_signature.parameter[0] == state_type
    assert process.next.type_signature.result.state == state_type
    # Containers too: tff.learning insists on it.
    assert process.next.type_signature.result.result.member == value_type


def test_the_clip_holds_whatever_the_size():
    clip, size = 0.01, 1_000_000
    process = quiet(clip, 1).create(tff.TensorType(np.float32, [size]))
    state = process.initialize()
    for part in ([1], [1e-30], [1e15], [1e15, -1e15, 3.0]):
        output = process.next(state, [np.resize(np.float32(part), size)])
        norm = np.linalg.norm(output.result.astype(np.float64))
        assert norm <= clip * (1 + 1e-5)


@pytest.mark.parametrize(
    "options, right, wrong",
    [
        ({"noise_site": "client"}, 2, (1, 3)),
        ({"sampling": "fixed_size"}, 2, (3,)),
        ({"num_clients": 2}, 2, (3,)),
        # Poisson sampling of 200 with rate .01 gives 17 with probability 1e-11.
        ({"num_clients": 200, "sampling": "poisson"}, 16, (20, 200)),
    ],
)
def test_wrong_cohort_size_fails_the_round(options, right, wrong):
    process = quiet(1.0, 2, 1.0, **options).create(SCALAR)
    state = process.initialize()
    for size in wrong:
        with pytest.raises(Exception, match="cohort size"):
            process.next(state, [1.0] * size)
    assert process.next(state, [1.0] * right).state.rounds == 1


def _epsilon(state, sampling, num_clients):
    declared = {"num_clients": num_clients, "clients_per_round": 2, "delta": 1e-5}
    return learning.epsilon(state, FIXED, sampling=sampling, **declared)


def test_how_many_answered_is_written_down_and_priced():
    process = quiet(1.0, 2, 1.0).create(SCALAR)
    state = process.initialize()
    for size in (2, 3, 60):
        state = process.next(state, [1.0] * size).state
        assert state.history.answered[-1] == size
    for sampling in ("fixed_size", "poisson", "shuffled"):
        with pytest.raises(ValueError, match=r"answered in round [23]"):
            _epsilon(state, sampling, 200)


def test_schedules():
    process = quiet(2.0, [4, 8], lambda r: 1.0 + r, rounds=2).create(SCALAR)
    state = process.initialize()
    for index, (noise, size) in enumerate(((2.0, 4), (4.0, 8))):
        output = process.next(state, [1.0, 1.0])
        state = output.state
        assert output.measurements["noise_stddev"] == pytest.approx(noise)
        assert state.query_state.clients_per_round == size
        assert len(state.history.lines) == index + 1
        line = json.loads(state.history.lines[-1])
        assert line["clients_per_round"] == size
        assert line["event"]["noise_multiplier"] == 1.0 + index
    with pytest.raises(Exception, match="past its end"):
        process.next(state, [1.0])


@pytest.mark.parametrize("name", ["inner_factory", "scalars_factory"])
@pytest.mark.parametrize(
    "inner",
    [
        COMPRESSION,
        tff.aggregators.add_measurements(
            tff.aggregators.SumFactory(),
            server_measurement_fn=lambda _: collections.OrderedDict(),
        ),
        tff.aggregators.zeroing_factory(99.0, tff.aggregators.SumFactory()),
        tff.aggregators.SecureSumFactory(5.0, 3.0),
        tff.aggregators.SecureSumFactory(np.float32(-3), np.float32(-5)),
    ],
)
def test_what_may_enlarge_a_share_is_refused(name, inner):
    # What clients noised by themselves is theirs, whatever becomes of it.
    local = mechanisms.LocalDP(clip_norm=1.0, epsilon=1.0, delta=1e-5)
    for mechanism in (local, mechanisms.NoPrivacy()):
        aggregators.from_mechanism(mechanism, 4, COMPRESSION, rounds=3)
    with pytest.raises(ValueError, match=f"{name} must be None"):
        aggregators.MechanismFactory(
            mechanisms.AdaptiveClipping(noise_multiplier=0.1), 4, **{name: inner}
        )


def test_a_secure_sum_that_rounds_beside_the_clip_is_refused():
    wide = tff.TensorType(np.float32, [4096])
    for value_type, bound in ((SCALAR, 1e6), (wide, 1e3)):
        secure = tff.aggregators.SecureSumFactory(bound)
        with pytest.raises(ValueError, match="inner_factory must have closer"):
            aggregators.from_mechanism(FIXED, 4, secure).create(value_type)
    options = {"scalars_factory": tff.aggregators.SecureSumFactory(1e6)}
    with pytest.raises(ValueError, match="scalars_factory must have closer"):
        aggregators.from_mechanism(FIXED, 4, **options).create(SCALAR)


def test_a_secure_sum_that_cuts_off_noise_or_the_count_is_refused():
    # With m = 4 and z = 1, one client adds noise of S / 2: no draw is above 9.5 of it.
    at_clients = {"noise_multiplier": 1.0, "noise_site": "client"}
    narrow, wide = map(tff.aggregators.SecureSumFactory, (5.7, 5.8))
    quiet(**at_clients, inner_factory=wide).create(SCALAR)
    quiet(noise_multiplier=1.0, inner_factory=narrow).create(SCALAR)
    with pytest.raises(ValueError, match=r"inner_factory .* bounds of 5\.75"):
        quiet(**at_clients, inner_factory=narrow).create(SCALAR)
    count = {"clients_per_round": 4, "count_noise_stddev": 2.0}
    adaptive = aggregators.AdaptiveClippingFactory(
        **at_clients, **count, scalars_factory=tff.aggregators.SecureSumFactory(9.9)
    )
    # The bit is centred, so it is 0.5 at most.
    with pytest.raises(ValueError, match=r"scalars_factory .* bounds of 10 or more"):
        adaptive.create(SCALAR)
    with pytest.raises(ValueError, match="scalars_factory must have an upper bound"):
        quiet(scalars_factory=tff.aggregators.SecureSumFactory(0.5))
    # Where there was no noise in a first round, there may be some in a later one.
    with pytest.raises(ValueError, match="inner_factory must be None"):
        quiet(noise_multiplier=[0.0, 1.0], inner_factory=COMPRESSION)


@pytest.mark.parametrize(
    "site, clip, z, message",
    [
        ("server", 0.25, 0.0, None),
        ("server", 0.24, 0.0, "not negligible"),
        ("server", float("inf"), 0.0, "states no bound"),
        ("server", float("nan"), 0.0, "states no bound"),
        # One of four clients adds half of z times the clip.
        ("client", 0.25, 4.0, None),
        ("client", 0.25, 4.8, "cut off noise"),
        ("client", 0.25, 0.0017, None),
        ("client", 0.25, 0.0015, "too coarse for noise"),
        ("client", 0.25, 0.0, None),
    ],
)
def test_what_a_secure_sum_changes_in_a_later_round(site, clip, z, message):
    mechanism = mechanisms.FixedClipping(
        clip_norm=1.0, noise_multiplier=1.0, noise_site=site
    )
    query = mechanism.bind(mechanisms.PrivacyContext(clients_per_round=4))
    grid = state_lib.SumGrid("inner_factory", limit=5.0, step=1e-4, rounding=2.5e-4)
    plain = grid._replace(step=0.0)
    plan = {"noise_multiplier": 1.0, "clients_per_round": 4.0, "charged": 1.0}
    check, unchecked = (
        state_lib.RoundPlan(**plan, lines="", update_grid=of_updates, scalar_grid=plain)
        for of_updates in (grid, plain)
    )
    state = query.begin_round(query.initial_global_state(), z, 4.0)
    state = query.with_clip(state, tf.constant(clip))
    unchecked.check_sums(query, state)
    if message is None:
        check.check_sums(query, state)
        return
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        check.check_sums(query, state)


def _measuring(bound, **parameters):
    """Returns a mechanism that also releases a number beside the updates."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Measuring(mechanisms.Mechanism):
        side_bounds: ClassVar[Mapping[str, float]] = {"x": bound}
        noise_multiplier: float = 1.0
        noise_site: str = "server"

        def first_clip_norm(self):
            return 1.0

        def side_statistics(self, norm, round):
            return {"x": bound * tf.ones_like(norm)}

        def noise_stddevs(self, round, context):
            z = round.noise_multiplier
            return {"update": z * round.clip_norm, "x": z * bound}

        def describe(self):
            return "Measuring."

    return Measuring(**parameters)


# Steps of a secure sum are 2^-23 of its bound.
@pytest.mark.parametrize(
    "bound, site, secure, z, message",
    [
        (2e-3, "server", 16.0, 1.0, None),
        (2e-3, "server", 17.0, 1.0, "closer bounds: its sum rounds a client's x"),
        (0.0, "server", 1.0, 1.0, "closer bounds: its sum rounds a client's x"),
        (100.0, "server", 50.0, 1.0, None),
        (100.0, "server", 8400.0, 1.0, "closer .* rounds a client's part of the coh"),
        (100.0, "client", 576.0, 1.0, None),
        (100.0, "client", 574.0, 1.0, "bounds of 575 or more for a client's x"),
        (1.0, "client", 8000.0, 0.0039, None),
        (1.0, "client", 8000.0, 0.0038, "a client's x to steps of .* too coarse for"),
    ],
)
def test_side_sums_have_their_own_bounds_in_a_secure_sum(
    bound, site, secure, z, message
):
    mechanism = _measuring(bound, noise_multiplier=z, noise_site=site)
    scalars = tff.aggregators.SecureSumFactory(secure)
    factory = aggregators.from_mechanism(mechanism, 4, scalars_factory=scalars)
    if message is None:
        factory.create(SCALAR)
        return
    with pytest.raises(ValueError, match=f"scalars_factory must have .*{message}"):
        factory.create(SCALAR)


def test_a_query_that_states_no_bound_has_no_secure_sum():
    # With 287 080 weights, rounding moved the sum by two clips, and none was charged.
    query, event = tfp.GaussianSumQuery(1e-3, 1e-3), dp_accounting.GaussianDpEvent(1.0)
    mechanism = mechanisms.QueryMechanism(query=query, dp_event=event)
    secure = tff.aggregators.SecureSumFactory(8000.0)
    with pytest.raises(ValueError, match=r"inner_factory must be None .*states no bou"):
        aggregators.from_mechanism(mechanism, 3, secure).create(VECTOR)
    # The number of clients is no number of the query's.
    aggregators.from_mechanism(mechanism, 3, scalars_factory=secure).create(VECTOR)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"clients_per_round": 0}, "clients_per_round"),
        ({"clients_per_round": 5, "num_clients": 4}, "at most num_clients=4"),
        ({"clients_per_round": 2.5, "sampling": "fixed_size"}, "whole number"),
        ({"clients_per_round": lambda r: 4}, "pass rounds="),
        ({"clients_per_round": [4, 4], "rounds": 3}, "rounds=3"),
        ({"clients_per_round": 4, "sampling": "all"}, "sampling"),
        ({"clients_per_round": 4, "rounds": 0}, "rounds"),
        ({"noise_site": "client", "sampling": "poisson"}, "fixed_size"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ValueError, match=message):
        quiet(**{"noise_multiplier": 1.0, **options})
    with pytest.raises(TypeError, match="mechanism"):
        aggregators.from_mechanism(tfp.GaussianSumQuery(1.0, 1.0), 2)
    mechanism = mechanisms.NbAFL(epsilon=1.0, constant=1.0, weight_clip=1.0)
    with pytest.raises(ValueError, match="NbAFLFactory"):
        aggregators.from_mechanism(mechanism, 2, rounds=1, num_clients=2)
