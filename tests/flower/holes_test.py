"""What was found wrong once: mods, replies, cohorts."""

import collections
import copy
import dataclasses
import random

import numpy as np
import pytest

import tfdp_fl
from tests.flower import flower_messages as fm
from tfdp_fl import accounting

_DELTA = 1e-5


def _private(mechanism=fm.NOISY, n=8, **options):
    return fm.private(mechanism, 4, n, **options)


def _grid(n=8, change=None, **options):
    return fm.Grid({i: fm.adds([np.zeros(3)]) for i in range(n)}, change, **options)


def _round(strategy, grid, number=1):
    return fm.a_round(strategy, grid, fm.model(np.zeros(3)), number)


def test_of_clients_without_the_mod_nothing_is_released(caplog):
    strategy = _private(fm.SHARES)
    assert _round(strategy, _grid(mod=None)) == (None, None)
    assert strategy.rejected_replies == 4
    assert strategy.strategy.handed == []

    def mod(message, context, call_next):
        if message.metadata.dst_node_id == grid.sent[0].metadata.dst_node_id:
            return call_next(message, context)
        return tfdp_fl.flower.private_mod(message, context, call_next)

    # One client alone is not in the mean.
    strategy, grid = _private(fm.SHARES), _grid(mod=mod)
    new, _ = _round(strategy, grid)
    assert new is not None
    assert "applied" in caplog.text
    assert strategy.rejected_replies == 1


@pytest.mark.parametrize("value", [0.0, 0.4999, float("nan"), "0.5", [0.5]])
def test_without_the_mods_word_for_clip_and_noise(value):
    for name in ("dpfedavg_applied_clip_norm", "dpfedavg_applied_noise_stddev"):

        def changed(replies, name=name):
            for reply in replies:
                metrics = reply.content["metrics"]
                # Past Flower's own check of types.
                kept = metrics.__dict__["_data"] if fm.INSTALLED else metrics
                kept[name] = value
            return replies

        strategy = _private(fm.SHARES)
        assert _round(strategy, _grid(change=changed)) == (None, None)
        assert strategy.rejected_replies == 4


@pytest.mark.parametrize("mechanism", [fm.NOISY, fm.SHARES])
def test_a_mod_that_makes_updates_longer(mechanism):
    def longer(message, context, call_next):
        reply = call_next(message, context)
        reply.content["arrays"] = fm.model(np.full(3, 1e6))
        return reply

    quiet = dataclasses.replace(mechanism, noise_multiplier=1e-9)
    mods = longer, tfdp_fl.flower.private_mod
    for outer, inner in (mods, mods[::-1]):

        def mod(message, context, call_next, outer=outer, inner=inner):
            return outer(message, context, lambda m, c: inner(m, c, call_next))

        # The context of a `ClientApp`, where state would be, is None here.
        got, _ = _round(_private(quiet), _grid(mod=mod))
        assert np.linalg.norm(fm.arrays(got)[0]) <= 0.5 * (1 + 1e-6)


def _renamed(replies):
    # For each client, as nobody knows of which reply names are taken.
    for reply in replies:
        metrics, model = reply.content.pop("metrics"), reply.content.pop("arrays")
        reply.content["arrays "] = model
        reply.content["arrays"] = metrics
    return replies


def _one_more(**claims):
    return lambda replies: [fm.claim(copy.deepcopy(replies[0]), **claims), *replies]


@pytest.mark.parametrize(
    "change, rejected",
    [
        (_renamed, 0),
        (lambda replies: [*replies, replies[0], replies[0]], 2),
        (_one_more(reply_to_message_id="old"), 1),
        (_one_more(src_node_id=99), 1),
    ],
)
@pytest.mark.parametrize(
    "mechanism, on_client_failure",
    [(fm.FIXED, "exclude"), (fm.FIXED, "abort"), (fm.SHARES, "abort")],
)
def test_a_reply_beside_all_others(change, rejected, mechanism, on_client_failure):
    strategy = _private(mechanism, on_client_failure=on_client_failure)
    got, _ = _round(strategy, _grid(change=change))
    assert got is not None
    assert strategy.rejected_replies == rejected
    (released,) = strategy.released_rounds
    assert (released.num_replies, released.clients_per_round) == (4, 4)


def test_the_strategy_is_handed_the_mean_alone():
    def secret(i):
        return fm.adds([np.full(3, float(i))], 10**i, loss=float(i), secret=9.0 * i)

    strategy = _private()
    got, _ = _round(strategy, fm.Grid({i: secret(i) for i in range(8)}))
    ((handed,),) = strategy.strategy.handed
    assert dict(handed.content["metrics"]) == {"num-examples": 1}
    (mean,) = fm.arrays(handed.content["arrays"])
    np.testing.assert_allclose(mean, fm.arrays(got)[0])
    assert len(dict(handed.content)) == 2
    # A function for the clients' metrics would be handed theirs.
    inner = fm.Strategy(4)
    inner.train_metrics_aggr_fn = lambda contents, key: contents[0]
    with pytest.raises(ValueError, match="train_metrics_aggr_fn"):
        _private(strategy=inner)


def _cohorts(rounds, n=8, **options):
    random.seed(42)
    strategy, grid, model = _private(n=n, **options), _grid(n), fm.model(np.zeros(3))
    told = [fm.configured(strategy, grid, model, number) for number in range(rounds)]
    return [sorted(m.metadata.dst_node_id for m in messages) for messages in told]


def test_pythons_seed_or_a_strategy_that_prefers_some_nodes_foretells_no_cohort():
    # The same 9 cohorts of 70 by chance: 70^-9, less than 3e-17.
    assert _cohorts(9) != _cohorts(9)

    class Stubborn(fm.Strategy):
        def configure_train(self, server_round, arrays, config, grid):
            content = fm.RecordDict({"arrays": arrays, "config": config})
            return [fm.Message(content, node, "train") for node in (0, 1)]

    cohorts = _cohorts(40, strategy=Stubborn(2))
    assert {len(set(cohort)) for cohort in cohorts} == {4}
    assert set().union(*cohorts) == set(range(8))


def test_cohorts_are_uniform():
    # 4 of 6: 15 cohorts, 1500 rounds, chi squared with 14 degrees of freedom
    # is above 90 with a probability below 1e-12.
    counts = collections.Counter(map(tuple, _cohorts(1500, 6)))
    assert len(counts) == 15
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 90


def test_fewer_nodes_than_declared():
    strategy, few = _private(n=9, max_abandoned_rounds=2), _grid(8)
    with pytest.raises(ValueError, match=r"num_clients .* 8, got 9"):
        _round(strategy, _grid(8))
    _round(strategy, _grid(9), 2)
    assert _round(strategy, few, 3) == (None, None)
    assert few.sent == []
    with pytest.raises(tfdp_fl.flower.RoundsAbandonedError, match="8, got 9"):
        _round(strategy, few, 4)
    assert len(strategy.released_rounds) == 1


def test_somebody_who_knows_the_cohorts_is_told_another_epsilon():
    strategy = _private()
    for number in range(1, 4):
        _round(strategy, _grid(), number)
    report = strategy.privacy_report(_DELTA)
    for key, n in (("epsilon", 8), ("epsilon_if_cohorts_are_known", 4)):
        expected = accounting.epsilon(1.0, "fixed_size", n, 4, 3, _DELTA)
        assert report[key] == pytest.approx(expected)
    assert "must stay secret" in " ".join(report["caveats"])
