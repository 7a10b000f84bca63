"""How the nodes of a round are drawn, and what that costs."""

import dataclasses

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.mechanisms import statistics
from tfdp_fl import accounting, sampling

_ZEROS = np.zeros(1000)
_ANY_SIZE = pytest.mark.parametrize("way", ["poisson", "random_allocation"])


def _nodes(count):
    return fm.Grid({10 + i: fm.adds([_ZEROS], 1) for i in range(count)})


def _asked(strategy, grid, number):
    """Runs a round; returns the nodes that were asked, and the new model or None."""
    told = fm.configured(strategy, grid, fm.model(_ZEROS), number)
    got, _ = strategy.aggregate_train(number, grid.send_and_receive(told))
    nodes = {message.metadata.dst_node_id for message in told}
    return nodes, None if got is None else fm.arrays(got)[0]


@pytest.mark.parametrize(
    "way, epsilon",
    [("random_allocation", 6.12), ("poisson", 7.05), ("fixed_size", 36.77)],
)
def test_what_a_hundred_rounds_of_a_thousand_nodes_cost(way, epsilon):
    strategy = fm.private(fm.NOISY, m=100, n=1000, sampling=way)
    place = {}
    for _ in range(100):
        if way == "random_allocation":
            place = strategy._allocation.draw(())[1]
        who = dataclasses.replace(strategy._participation, **place)
        event = fm.NOISY.round_event(0, strategy._context)
        strategy._history._account.central.add(who.cost(event))
    assert strategy.privacy_epsilon(1e-5, "pld") == pytest.approx(epsilon, abs=5e-3)


def test_every_node_is_asked_once_a_pass_and_a_new_server_begins_a_pass():
    grid = _nodes(12)
    strategy = fm.private(fm.NOISY, m=3, n=12, sampling="random_allocation")
    for number in range(1, 9, 4):
        asked = [_asked(strategy, grid, number + k)[0] for k in range(4)]
        assert sorted(node for each in asked for node in each) == sorted(grid.trains)
    whole = accounting.epsilon(1.0, "random_allocation", 12, 3, 8, 1e-5, "pld")
    assert strategy.privacy_epsilon(1e-5, "pld") == whole
    report = strategy.privacy_report(1e-5, "pld")
    assert report["relation"] == "one client is added or removed"
    known = accounting.gaussian_epsilon(1 / np.sqrt(2), 1e-5)
    assert report["epsilon_if_cohorts_are_known"] == pytest.approx(known)


@pytest.mark.parametrize("way", ["random_allocation", "fixed_size"])
@pytest.mark.parametrize("rounds", [None, 20])
def test_a_plan_in_passes_says_what_abandoned_rounds_do_to_it(way, rounds):
    strategy = fm.private(fm.NOISY, m=3, n=12, sampling=way, rounds=rounds)
    said = accounting.CAVEATS["plan_assumes_none_abandoned"]
    is_said = said in strategy.privacy_report(1e-5)["caveats"]
    assert is_said == (way == "random_allocation" and rounds is not None)


def test_nodes_draw_unforeseeably_and_by_themselves():
    one, other, secret = (sampling.NamedAllocation(200, 20) for _ in range(3))
    other._key = one._key
    for _ in range(20):
        drawn, _ = one.draw(range(200))
        # A node more changes nobody else's round; another server has other secrets.
        assert [each for each in other.draw(range(201))[0] if each < 200] == drawn
        assert secret.draw(range(200))[0] != drawn


def test_a_ledger_counts_the_passes_of_both_servers(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for rounds in (2, 1):
        strategy = fm.private(
            fm.NOISY, m=3, n=12, sampling="random_allocation", ledger=path
        )
        for number in range(1, 1 + rounds):
            _asked(strategy, _nodes(12), number)
        strategy.close()
    two = accounting.epsilon(1.0, "random_allocation", 12, 3, 5, 1e-5)
    assert accounting.epsilon_from_ledger(path, 1e-5) == pytest.approx(two)


@_ANY_SIZE
def test_cohorts_of_any_size_are_served_and_empty_ones_are_noise(way):
    strategy = fm.private(fm.NOISY, m=1, n=4, sampling=way)
    rounds = [_asked(strategy, _nodes(4), number) for number in range(1, 61)]
    sizes = [len(asked) for asked, _ in rounds]
    assert min(sizes) == 0 and max(sizes) > 1  # Else with a chance below 1e-7.
    assert len(strategy.charged_rounds) == 60
    # The divisor is what is expected, however many there are.
    statistics.assert_gaussian(np.concatenate([model for _, model in rounds]), 0.5)
    # That is N / t where m does not divide N.
    strategy = fm.private(fm.NOISY, m=3, n=7, sampling="random_allocation")
    models = [_asked(strategy, _nodes(7), number)[1] for number in range(1, 61)]
    statistics.assert_gaussian(np.concatenate(models), 0.5 / 3.5)


@_ANY_SIZE
def test_an_abandoned_round_tells_nothing_of_who_was_drawn(way):
    grid = _nodes(4)
    grid.trains.update(dict.fromkeys(grid.trains))  # Nobody replies.
    strategy = fm.private(fm.NOISY, m=2, n=4, sampling=way, on_client_failure="abort")
    models = [_asked(strategy, grid, number) for number in range(1, 30)]
    # Of those without anybody, who could fail, the noise is released.
    assert all((model is None) == bool(asked) for asked, model in models)
    released = sum(not asked for asked, _ in models)
    assert len(strategy.charged_rounds) == released
    assert all(each.is_released for each in strategy.charged_rounds)


def test_a_pass_that_is_not_affordable_is_not_begun():
    budget = accounting.epsilon(1.0, "random_allocation", 8, 2, 4, 1e-3) + 1e-6
    strategy = fm.private(
        *(fm.NOISY, 2, 8),
        sampling="random_allocation",
        target_epsilon=budget,
        target_delta=1e-3,
    )
    ran = [_asked(strategy, _nodes(8), k)[1] is not None for k in range(1, 5)]
    assert all(ran)
    assert fm.configured(strategy, _nodes(8), fm.model(_ZEROS), 5) == []
    assert strategy.stopped_before_round == 5


def test_what_does_not_go_is_refused_by_name():
    allocation = "random_allocation"
    scheduled = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=[1.0, 2.0])
    with pytest.raises(ValueError, match="one noise_multiplier"):
        fm.private(scheduled, m=2, n=8, sampling=allocation)
    with pytest.raises(ValueError, match="sampling='fixed_size'"):
        fm.private(fm.SHARES, m=2, n=8, sampling="poisson")
    with pytest.raises(ValueError, match="sampling must be one of"):
        fm.private(fm.NOISY, m=2, n=8, sampling="shuffled")
    correlated = tfdp_fl.CorrelatedNoise(
        clip_norm=1.0, noise_multiplier=1.0, rounds=4, min_separation=2
    )
    with pytest.raises(ValueError, match="sampling must be None with CorrelatedNoise"):
        fm.private(correlated, m=2, n=8, sampling=allocation)
