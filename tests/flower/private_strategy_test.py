"""The server wrapper of the message API, without a network."""

from contextlib import nullcontext
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.mechanisms import statistics
from tests.outside.loading import smooth_clipping
from tfdp_fl import accounting, mechanisms
from tfdp_fl.flower import RoundNotConfiguredError

_ZEROS = np.zeros([200, 200])


def _adaptive(clip, noise_multiplier=0.0, **options):
    return tfdp_fl.AdaptiveClipping(
        noise_multiplier=noise_multiplier, initial_clip_norm=clip, **options
    )


def _grid(updates, change=None):
    return fm.Grid({10 + i: fm.adds([u], 10**i) for i, u in enumerate(updates)}, change)


def _moved(strategy, updates, change=None, silent=(), number=1):
    """Runs a round of clients from zeros; returns the new model, or None.

    `change` may do something to the reply of the client that replies first.
    """

    def changed(replies):
        change(replies[0])
        return replies

    grid = _grid(updates, change and changed)
    grid.trains.update(silent)
    start = fm.model(np.zeros(np.shape(updates[0])))
    got, _ = fm.a_round(strategy, grid, start, number)
    return None if got is None else fm.arrays(got)[0]


def test_a_strategy_that_is_private_already_is_refused():
    inner = fm.private(fm.NOISY, 4)
    with pytest.raises(TypeError, match="must not be private already"):
        tfdp_fl.flower.PrivateStrategy(
            inner, fm.NOISY, num_clients=4, clients_per_round=4
        )


def test_the_noise_is_what_was_configured_whatever_is_set_since():
    strategy, grid = fm.private(fm.NOISY, 4), _grid([_ZEROS] * 4)
    told = fm.configured(strategy, grid, fm.model(_ZEROS))
    strategy.clip_norm = 1e-6
    got, _ = strategy.aggregate_train(1, grid.send_and_receive(told))
    statistics.assert_gaussian(np.ravel(fm.arrays(got)[0]), 0.5 / 4)


def _without_bit(message):
    del message.content["metrics"]["dpfedavg_norm_bit"]


def test_a_client_that_is_missing_pulls_the_clip_neither_way():
    for noise_site in ("server", "client"):
        options = {"count_noise_stddev": 1e-8, "noise_site": noise_site}
        strategy, updates = fm.private(_adaptive(2.0, 1e-9, **options), 4), [[0.0]] * 4
        if noise_site == "server":
            _moved(strategy, updates, silent={13: None})
        else:
            _moved(strategy, updates, _without_bit)
            assert strategy.rejected_replies == 1
        # 3 of 4 were within, and the fourth counts one half: b - gamma = 3/8.
        assert strategy.clip_norm == pytest.approx(2 * np.exp(-0.2 * 3 / 8), rel=1e-6)


def test_whole_numbers_and_float16_do_not_undo_the_clip():
    grid = fm.Grid({i: fm.adds([np.full(3, 100), np.full(3, 1e-3)]) for i in range(2)})
    record = fm.model(np.zeros(3, np.int64), np.zeros(3, np.float16))
    got, _ = fm.a_round(fm.private(m=2), grid, record)
    counts, weights = fm.arrays(got)
    assert (counts.dtype, weights.dtype.kind) == (np.float64, "f")
    assert np.linalg.norm([counts, weights]) <= 0.5


def _replace(message, **fields):
    array = message.content["arrays"]["0"]
    whole = {name: getattr(array, name) for name in ("dtype", "shape", "stype", "data")}
    message.content["arrays"]["0"] = fm.Array(**{**whole, **fields})


def _sets(**records):
    return lambda message: message.content.update(records)


def _put(value):
    return lambda m: m.content["arrays"].update({"0": fm.Array(np.asarray(value))})


def _claims(**fields):
    return lambda message: fm.claim(message, **fields)


_FOUR = np.zeros(4)


@pytest.mark.parametrize(
    "change",
    [
        _put(np.zeros(5)),
        lambda m: _replace(m, data=b"\x80\x04K\x01."),
        lambda m: _replace(m, stype="pickle"),
        lambda m: m.content.__delitem__("arrays"),
        _sets(more=fm.model(_FOUR)),
        _sets(arrays=fm.ArrayRecord({"other name": fm.Array(_FOUR)})),
        _sets(arrays=fm.model(_FOUR, _FOUR)),
        _claims(reply_to_message_id="old"),
        _claims(src_node_id=99),
    ],
)
def test_a_hostile_reply_is_left_out_and_the_others_stay(change):
    strategy, hostile = fm.private(m=4), []

    def changed(message):
        hostile.append(message.metadata.src_node_id - 10)
        change(message)

    got = _moved(strategy, np.eye(4), changed)
    wanted = np.full(4, 0.125)
    wanted[hostile] = 0
    np.testing.assert_allclose(got, wanted)
    assert strategy.rejected_replies == 1
    (released,) = strategy.charged_rounds
    assert released.num_replies == 3
    assert len(strategy.strategy.handed[0]) == 1


def test_what_is_not_finite_is_zero_and_weights_are_not_believed():
    for value in (np.nan, np.inf, -np.inf):
        strategy = fm.private(m=2)
        got = _moved(strategy, [[1.0, 0]] * 2, _put(np.array([value, 1.0])))
        np.testing.assert_allclose(got, [0.25, 0])
        assert strategy.discarded_updates == 1
    for weight in (0, -3, 1e300, np.nan):  # The weight it claims is not looked at.

        def changed(message, weight=weight):
            assert message.content["metrics"]["num-examples"] == 1
            message.content["metrics"]["num-examples"] = weight

        got = _moved(fm.private(m=2), [[1.0, 0]] * 2, changed)
        np.testing.assert_allclose(got, [0.5, 0])


@pytest.mark.parametrize("value", [1e-170, 1.0, 1e20, 1e300, np.nan, np.inf])
def test_without_the_mod_it_moves_the_mean_by_s_over_m(value):
    by_server = smooth_clipping()(start_norm=0.5, noise_multiplier=0.0)
    for mechanism in (fm.FIXED, by_server):
        strategy = fm.private(mechanism, 2)
        got = _moved(strategy, [[0.0, 0]] * 2, _put(np.full(2, value)))
        assert np.linalg.norm(got) <= 0.25 * (1 + 1e-12)


def test_one_client_moves_the_count_by_one():
    strategy = fm.private(_adaptive(1.0), 2)

    def changed(replies):
        for reply, bit in zip(replies, (1e9, 0), strict=True):
            reply.content["metrics"]["dpfedavg_norm_bit"] = bit
        return replies

    fm.a_round(strategy, _grid([[1.0]] * 2, changed), fm.model(np.zeros(1)))
    assert strategy.clip_norm == 1.0

    strange = {"num-examples": 1, "dpfedavg_norm_bit": [1.0]}
    for change in (_without_bit, _sets(metrics=fm.MetricRecord(strange))):
        strategy = fm.private(_adaptive(0.5), 4)
        _moved(strategy, np.eye(4), change)
        assert strategy.rejected_replies == 1


_SILENT = {11: None, 12: OSError("no disk")}


def test_the_noise_and_divisor_of_the_others_stay_the_planned_ones():
    strategy = fm.private(fm.NOISY, 4)
    got = _moved(strategy, [_ZEROS] * 4, silent=_SILENT)
    statistics.assert_gaussian(np.ravel(got), 0.5 / 4)
    assert [released.num_replies for released in strategy.charged_rounds] == [2]


def test_shares_of_noise_need_everybody():
    strategy = fm.private(fm.SHARES, 4)
    assert strategy.on_client_failure == "abort"
    assert _moved(strategy, [[1.0, 0]] * 4, silent=_SILENT) is None
    # A reply of somebody else is no share.
    changed = _claims(src_node_id=99)
    assert _moved(strategy, [[1.0, 0]] * 4, changed, number=2) is None
    # Nothing was released. But shares with less noise have arrived.
    assert [each.is_released for each in strategy.charged_rounds] == [False] * 2
    report = strategy.privacy_report(1e-5)
    spent = accounting.gaussian_epsilon(8**-0.5, 1e-5)  # One replaced by another.
    assert report["epsilon"] == pytest.approx(spent)
    assert any("every round that was begun" in each for each in report["caveats"])
    with pytest.raises(ValueError, match="on_client_failure"):
        fm.private(fm.SHARES, on_client_failure="exclude")


def test_a_share_of_noise_that_is_lost_is_replaced():
    for change, rejected in (
        (_put(np.full([200, 200], np.nan)), 0),
        (_put(np.zeros(5)), 1),
        (lambda m: m.content.__delitem__("arrays"), 1),
    ):
        strategy = fm.private(fm.SHARES, 4)
        got = _moved(strategy, [_ZEROS] * 4, change)
        statistics.assert_gaussian(np.ravel(got), 0.5 / 4)
        assert strategy.rejected_replies == rejected
        assert len(strategy.strategy.handed[0]) == 1


def test_replies_without_their_round_are_refused():
    strategy, grid = fm.private(m=2), _grid([[1.0]] * 2)
    start = fm.model(np.zeros(1))
    replies = grid.send_and_receive(fm.configured(strategy, grid, start))
    for number, refused in ((2, True), (1, False), (1, True)):
        with pytest.raises(RoundNotConfiguredError) if refused else nullcontext():
            strategy.aggregate_train(number, replies)
    assert len(strategy.charged_rounds) == 1
    # A round without clients is none.
    with mock.patch.object(strategy.strategy, "configure_train", lambda *_: []):
        assert fm.a_round(strategy, _grid([]), start, 2) == (None, None)


_CORRELATED = {"clip_norm": 1.0, "noise_multiplier": 1.0}


def test_the_report_has_the_mechanisms_caveats_in_the_statements_words():
    for mechanism in (
        tfdp_fl.MedianClipping(noise_multiplier=1.0),
        tfdp_fl.MedianClipping(noise_multiplier=1.0, median_noise_multiplier=1.0),
        tfdp_fl.CorrelatedNoise(**_CORRELATED, rounds=3, min_separation=2),
    ):
        strategy = fm.private(mechanism, 3, 6)
        _moved(strategy, [[1.0, 0]] * 6)
        said = strategy.privacy_report(1e-5)["caveats"]
        usual = ("floating_point_noise", "hyperparameter_search_not_counted")
        for key in (*mechanism.caveats(), *usual):
            assert said.count(accounting.CAVEATS[key]) == 1, key
        exact = "exact_median" in mechanism.caveats()
        assert (accounting.CAVEATS["exact_median"] in said) == exact


class _Elsewhere(mechanisms.Mechanism):
    """As TF-Privacy's queries: with no noise of ours, and the cost that it states."""

    scales_updates = False
    describe = bind = None

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(1.0)


class _Laplace(tfdp_fl.FixedClipping):
    """Its cost is no Gaussian's, though its event has a noise multiplier."""

    def round_event(self, round_index, context):
        return dp_accounting.LaplaceDpEvent(1.0)


class _Unasked(tfdp_fl.FixedClipping):
    """Says right before a round what it costs, which Flower's rounds do not ask."""

    def event_at(self, round_index, context, state):
        return dp_accounting.GaussianDpEvent(0.1)

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(1.0)


def test_only_central_mechanisms_that_cost_a_gaussian_are_taken():
    central, at_clients = "mechanism must be a central", {"noise_site": "client"}
    too_long = tfdp_fl.CorrelatedNoise(**_CORRELATED, rounds=8, min_separation=6)
    for mechanism, pattern in (
        (tfdp_fl.NoPrivacy(), central),
        (tfdp_fl.LocalDP(**_CORRELATED), central),
        (tfdp_fl.MedianClipping(noise_multiplier=1.0, **at_clients), central),
        (_Elsewhere(), central),
        (_Laplace(**_CORRELATED), "costs one Gaussian"),
        (_Unasked(**_CORRELATED), central),
        (too_long, "min_separation"),
        # m / 20 on the count is too little.
        (_adaptive(0.1, 1.0), "noise_multiplier"),
    ):
        with pytest.raises((ValueError, TypeError), match=pattern):
            fm.private(mechanism, 3, 10)
    with pytest.raises(ValueError, match="at most num_clients=10"):
        fm.private(fm.NOISY, 11, 10)


def test_one_model_for_all():
    class Two(fm.Strategy):
        def configure_train(self, server_round, arrays, config, grid):
            for n in grid.get_node_ids():
                content = {"arrays": fm.model([float(n)] * 2), "config": config}
                yield fm.Message(fm.RecordDict(content), 10, "train")

    with pytest.raises(ValueError, match="one model only"):
        _moved(fm.private(strategy=Two(3)), [np.zeros(2)] * 3)
    # All else is the wrapped strategy's; replies to an evaluation end no run.
    strategy = fm.private()
    got = strategy.start(_grid([[1.0, 0.0]] * 3), fm.model([0.0, 0.0]), num_rounds=4)
    np.testing.assert_allclose(fm.arrays(got)[0], [4 * 0.5, 0])
    assert (len(strategy.charged_rounds), strategy.sampled) == (4, 3)
    assert strategy.aggregate_evaluate(1, []) is None
    for wrong in (np.array(["a"]), np.ones(1, np.longdouble)):
        with pytest.raises(ValueError, match="real numbers of at most 64 bits"):
            fm.a_round(fm.private(), _grid([np.zeros(2)] * 3), fm.model(wrong))


def test_noise_leaves_what_is_said_to_be_non_negative_at_zero_or_above(caplog):
    ones = np.ones([500]), np.ones([500])

    def released(**options):
        mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=9.0)
        strategy = fm.private(mechanism, 2, **options)
        grid = fm.Grid({i: fm.adds([np.zeros([500])] * 2) for i in range(2)})
        got, _ = fm.a_round(strategy, grid, fm.model(*ones))
        return [np.min(array) for array in fm.arrays(got)]

    assert max(released()) < 0
    assert caplog.text.count("give non_negative=[...]") == 1
    caplog.clear()
    for places in ([1], ("1",)):
        weight, variance = released(non_negative=places)
        assert weight < 0
        assert variance == 0
    assert max(released(non_negative=())) < 0
    assert not caplog.text
    for wrong in ([2], ["variance"]):
        with pytest.raises(ValueError, match="must name arrays of the model"):
            released(non_negative=wrong)
    with pytest.raises(TypeError, match="or a built Keras model"):
        released(non_negative="1")


class _Loose(mechanisms.Mechanism):
    """Says that it clips to 0.5, and does not; its noise stays where its clip grows."""

    clip_norm, noise_multiplier = 0.5, 1.0
    noise_stddevs = mock.Mock(return_value={"update": 0.5})

    def scale(self, norm, round):
        return norm * 0 + 1.0

    def next_clip_norm(self, sums, round):
        return 3 * round.clip_norm

    def describe(self):
        return "Loose."


def test_a_mechanism_of_ones_own_passes_the_same_door_as_everywhere():
    strategy = fm.private(_Loose(), m=4)
    got = _moved(strategy, [[1e6] * 4, *[[0.0] * 4] * 3])
    assert np.linalg.norm(4 * got) <= 0.5 + 0.5 * 20
    # 1.5 with noise of 0.5: a third of what is charged.
    with pytest.raises(Exception, match="than it is charged"):
        _moved(strategy, np.zeros([4, 4]), number=2)
    assert len(strategy.charged_rounds) == 1  # It is not charged.


def test_noise_that_shrinks_after_the_charge_is_not_released(monkeypatch):
    mechanism, charge = _Loose(), accounting.PrivacyAccount.charge
    monkeypatch.setattr(mechanism.noise_stddevs, "return_value", {"update": 0.5})

    def shrinks(account, *args, **options):
        paid = charge(account, *args, **options)
        mechanism.noise_stddevs.return_value = {"update": 0.01}
        return paid

    monkeypatch.setattr(accounting.PrivacyAccount, "charge", shrinks)
    with pytest.raises(tf.errors.InvalidArgumentError, match="adds less noise"):
        _moved(fm.private(mechanism, m=4), np.zeros([4, 4]))


def test_what_rounds_are_charged_by_cannot_be_exchanged():
    strategy = fm.private(m=2, n=4)
    for name in ("num_clients", "clients_per_round", "mechanism", "on_client_failure"):
        with pytest.raises(AttributeError, match="no setter"):
            setattr(strategy, name, 4)


def test_a_reply_to_a_message_that_has_no_id_is_nobodys():
    def without(replies):
        for message in grid.sent:
            fm.claim(message, message_id="")
        return [fm.claim(reply, reply_to_message_id="") for reply in replies]

    strategy = fm.private(m=4)
    grid = _grid(np.eye(4), without)
    fm.a_round(strategy, grid, fm.model(np.zeros(4)))
    assert strategy.rejected_replies == 4


def test_a_round_that_a_failing_run_leaves_behind_is_charged():
    class Fails(fm.Strategy):
        def start(self, grid, initial_arrays, num_rounds=3):
            fm.configured(self, grid, initial_arrays)
            raise RuntimeError("the network")

    strategy = fm.private(fm.NOISY, m=2, n=4, strategy=Fails(2))
    with pytest.raises(RuntimeError, match="the network"):
        strategy.start(_grid(np.eye(4)), fm.model(np.zeros(4)))
    (left,) = strategy.charged_rounds
    assert left.charge.known_selection and not left.is_released
