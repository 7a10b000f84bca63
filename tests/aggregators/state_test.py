import collections

import attrs
import numpy as np
import pytest
import tensorflow_federated as tff

from tfdp_fl import aggregators
from tfdp_fl.tff import state as state_lib

STATE = state_lib.AggregatorState((), 1, (), ())
SCALAR = tff.TensorType(np.float32)
_Kept = attrs.make_class("Kept", ["inner"])
MOVING = tff.aggregators.PrivateQuantileEstimationProcess.no_noise(1.0, 0.5, 0.2)


def ours(**sums):
    return aggregators.FixedClippingFactory(
        clip_norm=1.0, noise_multiplier=1.0, clients_per_round=2, **sums
    )


def learning_state(aggregator=STATE, client_work=(), **parts):
    usual = {"global_model_weights": (np.zeros(3),), "distributor": ()}
    usual |= {"client_work": client_work, "aggregator": aggregator}
    usual["finalizer"] = collections.OrderedDict(learning_rate=1.0)
    return tff.learning.templates.LearningAlgorithmState(**{**usual, **parts})


def test_federated_averaging():
    rate = collections.OrderedDict(learning_rate=np.float32(0.1))
    for client_work in ((), rate, np.int32(3)):
        state = learning_state(client_work=client_work)
        assert state_lib.accounted_state(state) is STATE


def test_sums_of_constant_bounds():
    constant = {
        "inner_factory": tff.aggregators.SecureSumFactory(4.0, -4.0),
        "scalars_factory": tff.aggregators.SecureSumFactory(99.0),
    }
    state = ours(**constant).create(SCALAR).initialize()
    assert state_lib.accounted_state(state) is state


@pytest.mark.parametrize(
    "wrapped, message",
    [
        (tff.aggregators.zeroing_factory(MOVING, ours()), "follows the clients"),
        (tff.aggregators.clipping_factory(MOVING, ours()), "follows the clients"),
        (tff.aggregators.zeroing_factory(5.0, ours()), "more than the mechanism"),
        (tff.aggregators.UnweightedMeanFactory(ours()), "divides once more"),
        # A sum whose bounds follow the clients.
        *(
            (ours(**{name: tff.aggregators.SecureSumFactory(MOVING)}), "inner_factory")
            for name in ("inner_factory", "scalars_factory")
        ),
    ],
)
def test_what_follows_the_clients_or_is_around_the_mechanism_is_refused(
    wrapped, message
):
    state = wrapped.create(SCALAR).initialize()
    for each in (state, learning_state(state)):
        with pytest.raises(ValueError, match=f"{message}.*build_dp_fed_avg"):
            state_lib.accounted_state(each)
    # Nor a weighted mean.
    state = tff.aggregators.MeanFactory(ours()).create(SCALAR, SCALAR).initialize()
    with pytest.raises(ValueError, match="divides once more"):
        state_lib.accounted_state(learning_state(state))


def test_what_is_no_sum_and_what_else_may_be_released_is_refused():
    theirs = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(1.0, 10, 1.0)
    for inner in (ours(), tff.aggregators.UnweightedMeanFactory(), theirs):
        with pytest.raises(ValueError, match=r"inner_factory.*a sum"):
            ours(inner_factory=inner)
    for parts in (
        {"client_work": ((np.zeros(3),), ())},
        {"client_work": {"momentum": np.zeros(3)}},
        {"distributor": (STATE,)},
        {"finalizer": {"kept": _Kept(STATE)}},
        {"aggregator": ()},
    ):
        with pytest.raises(ValueError, match="build_dp_fed_avg"):
            state_lib.accounted_state(learning_state(**parts))
