"""The privacy statement says what ran, and every caveat that holds."""

import warnings
from unittest import mock

import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.keras import callbacks
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_DELTA = 1e-3
_SECURE = {"secure_aggregation": AdditiveSecretSharing()}
_FIXED = {"clip_norm": 0.5, "noise_multiplier": 1.0}


def _trained(mechanism=None, rounds=1, fit=None, **options):
    # Shuffled cohorts are one Gaussian, whose epsilon takes no time.
    fed = toy.federated(mechanism, **{"sampling": "shuffled", **options})
    toy.fit(fed, rounds, **fit or {})
    return fed


def test_what_other_runs_drew_counts_in_the_statement_too(tmp_path):
    # It was called added or removed, and not secret, for what this run had drawn.
    path, fixed = tmp_path / "ledger", tfdp_fl.FixedClipping(**_FIXED)
    ledger = callbacks.Ledger
    for first, second in (("shuffled", "poisson"), ("poisson", "shuffled")):
        path = tmp_path / first
        _trained(fixed, 2, {"callbacks": [ledger(path)]}, sampling=first)
        fit = {"callbacks": [ledger(path, append=True)]}
        fed = _trained(fixed, 1, fit, sampling=second)
        said = fed.privacy_statement(_DELTA, "dict")
        assert said["relation"] == "REPLACE_SPECIAL"
        assert "counted as zero in its place" in said["summary"]
        assert {"shuffled_zero_out", "population_stated"} <= said["caveats"].keys()
        assert "stays secret" in said["secrecy"]
        assert "do not know who took part" in said["meaning"]
        known = fed.account.central.epsilon_if_participation_is_known(_DELTA)
        assert said["epsilon_if_participation_is_known"] == known > said["epsilon"]
        assert f"drawn by {first} sampling" in said["how"]
    alone = _trained(fixed).privacy_statement(_DELTA, "dict")
    assert "need not be secret" in alone["secrecy"]
    assert "other runs" not in alone["how"]


_ALL = {"sampling": "fixed_size", "clients_per_round": 40, **_SECURE}
_AT_CLIENTS = tfdp_fl.FixedClipping(**_FIXED, noise_site="client")
_PRIVATE = tfdp_fl.MedianClipping(noise_multiplier=1.0, median_noise_multiplier=1.0)
_EXACT = tfdp_fl.MedianClipping(noise_multiplier=lambda t: 1.0 + t)
_SUMS = "secure_aggregation"
_HONEST = "client_noise_needs_honest_clients"


@pytest.mark.parametrize(
    "options, there, missing",
    [
        ({"mechanism": _EXACT}, "exact_median", _SUMS),
        (
            {"model": toy.normalized, "fit": {"seed": 1}, "rounds": 2},
            "seed_given non_trainable_released shuffled_zero_out",
            "non_trainable_kept",
        ),
        (
            {"model": toy.normalized, "non_trainable_state": "keep"},
            *("non_trainable_kept", "non_trainable_released seed_given"),
        ),
        (
            {"mechanism": _AT_CLIENTS, **_ALL},
            f"{_SUMS} {_SUMS}_group_noise {_HONEST}",
            f"{_SUMS}_unnoised_groups {_SUMS}_norms_seen",
        ),
        (
            _ALL,
            f"{_SUMS} {_SUMS}_unnoised_groups",
            f"{_SUMS}_group_noise {_SUMS}_norms_seen {_HONEST}",
        ),
        (
            {"mechanism": _PRIVATE, "clients_per_round": 6, **_SECURE},
            *(f"{_SUMS} {_SUMS}_norms_seen", "exact_median"),
        ),
    ],
)
def test_caveats_that_hold(options, there, missing):
    found = _trained(**options).privacy_statement(0.1, "dict")["caveats"].keys()
    assert found >= {*there.split()}
    assert not found & {*missing.split()}


def test_a_central_guarantee():
    fit = {"validation_data": toy.arrays(20)}
    fed = _trained(sampling="poisson", rounds=3, delta=_DELTA, fit=fit)
    facts, sizes = fed.privacy_statement(format="dict"), fed.run.cohort_sizes
    assert (facts["privacy_unit"], facts["relation"]) == ("client", "ADD_OR_REMOVE_ONE")
    assert (facts["rounds"], facts["num_clients"]) == (3, toy.NUM_CLIENTS)
    assert facts["cohort_sizes"]["max"] == max(sizes)
    assert facts["clients_per_round"]["min"] == 20
    assert facts["epsilon_rdp"] == fed.epsilon(_DELTA)
    assert facts["epsilon_pld"] == fed.epsilon(_DELTA, "pld")
    assert facts["mechanism_parameters"]["clip_norm"] == 0.5
    assert {*facts["caveats"]} == {
        *("unnoised_metrics", "validation_data_not_covered"),
        *("hyperparameter_search_not_counted", "floating_point_noise"),
        *("pseudorandom_noise", "population_stated", "start_and_callbacks_trusted"),
        *("plan_fixed_in_advance", "clients_excluded"),
    }
    assert facts["epsilon_if_participation_is_known"] > facts["epsilon"]
    text = toy.said(fed)
    for needed in ("epsilon = ", "one client is added or removed", "N = 40 and"):
        assert needed in text


def test_a_local_guarantee_is_not_called_central():
    mechanism = tfdp_fl.AdaptiveLocalDP(
        epsilon=8.0, delta=_DELTA, calibration="classic", layers="separate"
    )
    fed = _trained(mechanism, 2, sampling="fixed_size")
    facts = fed.privacy_statement(_DELTA, "dict")
    assert (facts["trust_model"], facts["epsilon_rdp"]) == ("local", None)
    assert facts["epsilon"] == fed.epsilon(_DELTA)
    assert facts["max_participations"] == 2
    assert facts["caveats"].keys() >= {
        *("local_not_central", "radius_from_unnoised_norms"),
        *("layers_charged_separately", "classic_above_one"),
    }
    assert "Local differential privacy" in toy.said(fed)
    # The central number of shuffled local noise is for replaced data.
    mechanism = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0)
    fed = _trained(mechanism, 2, clients_per_round=10, accountant="pld")
    facts = fed.privacy_statement(1e-5, "dict")
    assert facts["relation"] == "REPLACE_ONE"
    # 10 noises of 4 S each, against a sum that moves by 2 S; one pass.
    known = accounting.gaussian_epsilon(4.0 * 10**0.5 / 2, 1e-5)
    assert fed.central_epsilon(1e-5) == pytest.approx(known)
    assert known == pytest.approx(0.561, abs=5e-4)
    assert facts["central_epsilon"] >= 0.561
    assert "for the same neighbours" in facts["summary"]


def test_nbafl_is_per_record():
    mechanism = tfdp_fl.NbAFL(epsilon=50.0, constant=3.0, weight_clip=10.0)
    fed = _trained(mechanism)  # 40 clients of 10 records.
    facts = fed.privacy_statement(_DELTA, "dict")
    assert (facts["privacy_unit"], facts["implied_epsilon"]) == ("record", 50.0)
    assert facts["implied_delta"] == pytest.approx(0.0139, abs=5e-5)
    assert "per_record" in facts["caveats"]
    for delta, large in ((1 / 100, True), (1 / 500, False)):
        caveats = fed.privacy_statement(delta, "dict")["caveats"]
        assert ("delta_not_below_one_over_records" in caveats) == large
        assert "delta_not_below_one_over_n" not in caveats
    assert "at most 2C/n" in toy.said(fed)
    assert fed.privacy_statement(format="dict")["delta"] == pytest.approx(0.1 / 400)


def test_no_privacy_or_no_round_says_so():
    fed = _trained(tfdp_fl.NoPrivacy())
    assert "no differential-privacy guarantee" in toy.said(fed, _DELTA)
    facts = fed.privacy_statement(_DELTA, "dict")
    assert (facts["has_guarantee"], facts["epsilon"]) == (False, None)
    assert not facts["caveats"]
    # A delta that nobody gave follows from N.
    assert fed.privacy_statement(format="dict")["delta"] == pytest.approx(0.1 / 40)
    fed, budget = toy.federated(), tfdp_fl.callbacks.PrivacyBudget(0.01, _DELTA)
    toy.fit(fed, callbacks=[budget])
    facts = fed.privacy_statement(format="dict")
    assert (facts["rounds"], facts["epsilon"], facts["delta"]) == (0, 0.0, _DELTA)


def test_a_statement_before_anything_was_charged_takes_a_delta_of_its_own():
    fed = toy.federated()
    with pytest.raises(KeyboardInterrupt):
        toy.fit(fed, 1, [toy.at_end(toy.interrupt, 0, "on_epoch_begin")])
    assert "after 0 rounds" in toy.said(fed)
    assert fed.privacy_statement(None, "dict")["delta"] == pytest.approx(0.1 / 40)


def test_a_frozen_layer_beside_a_normalization_is_not_said_to_be_both():
    fed = toy.federated(
        model=lambda: toy.dense(
            lambda: tf.keras.layers.Dense(8, trainable=False),
            tf.keras.layers.BatchNormalization,
        )
    )
    toy.fit(fed, 1)
    told = {
        key for key in fed.privacy_statement(1e-3, "dict")["caveats"] if "non_tr" in key
    }
    assert told == {"non_trainable_partly_kept"}


def test_a_layer_that_is_frozen_later_does_not_hide_what_was_released(tmp_path):
    fed = toy.federated(model=lambda: toy.dense(tf.keras.layers.BatchNormalization))
    toy.fit(fed, 1, [tfdp_fl.callbacks.RoundCheckpoint(tmp_path)])
    fed.model.layers[0].trainable = False
    fed.compile("sgd", toy.loss())
    toy.fit(fed, 1)
    told = fed.privacy_statement(1e-3, "dict")["caveats"]
    assert [key for key in told if "non_tr" in key] == ["non_trainable_partly_kept"]


def test_an_evaluation_on_other_clients_is_told_of_with_their_number():
    fed = toy.federated(sampling="poisson")
    toy.fit(fed, 1)
    private = tfdp_fl.PrivateMetrics(bounds={"loss": (0.0, 5.0)}, noise_multiplier=2.0)
    fed.evaluate_clients(toy.clients(33), verbose=0, private=private)
    assert "Metrics of 33 clients were released" in toy.said(fed, 1e-3)


class _Stop(tf.keras.callbacks.Callback):
    def __init__(self, after=1):
        super().__init__()
        self.after = after

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch + 1 == self.after


def test_training_that_ended_early_has_the_epsilon_of_what_was_planned():
    # Whoever stops when the models show the most had up to 12 times the delta.
    options = {"rounds": 4, "fit": {"callbacks": [_Stop()]}}
    fed = _trained(tfdp_fl.FixedClipping(**_FIXED), **options)
    facts = fed.privacy_statement(_DELTA, "dict")
    whole = _trained(tfdp_fl.FixedClipping(**_FIXED), 4)
    assert (facts["rounds"], facts["planned_rounds"]) == (1, 4)
    planned = facts["epsilon_of_planned_rounds"]
    assert planned == whole.privacy_statement(_DELTA, "dict")["epsilon"]
    assert planned > facts["epsilon"]
    number = accounting.format_up(planned)
    said = toy.said(fed, _DELTA)
    assert "The plan was 4 rounds: if training ended sooner" in said
    assert f"of the whole plan holds instead, {number}." in said
    toy.fit(fed, 4)
    for done in (fed, whole):
        facts = done.privacy_statement(_DELTA, "dict")
        assert facts["planned_rounds"] is facts["epsilon_of_planned_rounds"] is None
        assert "The plan was" not in toy.said(done)


def test_a_budget_ends_training_whatever_its_models_show():
    cost = _trained(tfdp_fl.FixedClipping(**_FIXED), 2).epsilon(_DELTA)
    budget = callbacks.PrivacyBudget(cost, _DELTA)
    options = {"rounds": 4, "fit": {"callbacks": [budget]}}
    fed = _trained(tfdp_fl.FixedClipping(**_FIXED), **options)
    assert fed.rounds == 2 and budget.stopped_before_round == 2
    assert "The plan was" not in toy.said(fed)
    # It limits what a training could have cost that a callback ended.
    options["fit"] = {"callbacks": [budget, _Stop()]}
    fed = _trained(tfdp_fl.FixedClipping(**_FIXED), **options)
    facts = fed.privacy_statement(_DELTA, "dict")
    assert (facts["rounds"], facts["planned_rounds"]) == (1, 2)
    # And no later budget makes a choice of an earlier fit unseen.
    fed = _trained(tfdp_fl.FixedClipping(**_FIXED), 4, {"callbacks": [_Stop()]})
    toy.fit(fed, 4, [callbacks.PrivacyBudget(fed.epsilon(_DELTA), _DELTA)])
    # (The second round of a pass costs nothing.)
    facts = fed.privacy_statement(_DELTA, "dict")
    assert (facts["rounds"], facts["planned_rounds"]) == (2, 4)


def test_what_an_earlier_fit_planned_costs_what_it_cost_its_own_clients():
    # Priced among ten times as many clients, its rounds would cost little.
    fed = _trained(
        tfdp_fl.FixedClipping(**_FIXED),
        *(4, {"callbacks": [_Stop()]}),
        sampling="poisson",
    )
    before = fed.privacy_statement(_DELTA, "dict")
    toy.fit(fed, 1, data=toy.clients(400))
    facts = fed.privacy_statement(_DELTA, "dict")
    assert facts["planned_rounds"] == before["planned_rounds"] + 1 == 5
    charges = fed.run.account.own.elements()
    first, among_more = sorted(charges, key=lambda charge: charge.num_clients)
    whole = accounting.PrivacyAccountant(((first, 4), (among_more, 1)))
    expected = pytest.approx(whole.epsilon(_DELTA, "pld"), rel=1e-9)
    assert facts["epsilon_of_planned_rounds"] == expected
    # Whether both would have run in full is unknown, if another seed draws the cohorts.
    fed = _trained(tfdp_fl.FixedClipping(**_FIXED), 4, {"callbacks": [_Stop()]})
    toy.fit(fed, 3, seed=5)
    facts = fed.privacy_statement(_DELTA, "dict")
    assert (facts["rounds"], facts["planned_rounds"]) == (4, 7)


def test_rounds_that_cost_nothing_leave_a_budget_what_it_allows():
    x, y = (part.reshape(40, 10, *part.shape[1:]) for part in toy.arrays(400))

    def read(name):
        if name == 0:  # Half of the rounds are abandoned.
            raise OSError
        return x[name], y[name]

    clients = tfdp_fl.datasets.FederatedDataset.from_client_fn([*range(40)], read)
    options = {"sampling": "poisson", "on_client_failure": "abort"}
    cost = _trained(tfdp_fl.FixedClipping(**_FIXED), 5, sampling="poisson")
    limit = cost.epsilon(_DELTA)
    said = []
    for ends in ([], [_Stop(after=6)]):
        budget = callbacks.PrivacyBudget(limit, _DELTA)
        fit = {"data": clients, "seed": 3, "callbacks": [budget, *ends]}
        fed = _trained(tfdp_fl.FixedClipping(**_FIXED), 20, fit, **options)
        said.append(fed.privacy_statement(_DELTA, "dict"))
        assert fed.account.rounds < min(fed.rounds, 6)
    whole, ended = said
    assert whole["rounds"] == 5 and whole["planned_rounds"] is None
    expected = pytest.approx(whole["epsilon"], rel=1e-9)
    assert ended["epsilon_of_planned_rounds"] == expected


def test_a_plan_whose_cost_cannot_be_known_has_no_finite_bound():
    fed = _trained(
        None, 4, {"callbacks": [_Stop()]}, clients_per_round=[20, 20, 20, 20]
    )
    with mock.patch.object(type(fed.run), "costs_ahead", side_effect=ValueError):
        facts = fed.privacy_statement(_DELTA, "dict")
        said = toy.said(fed, _DELTA)
    assert facts["epsilon_of_planned_rounds"] is None and facts["planned_rounds"] == 4
    assert "instead, of which no finite bound is known." in said


@pytest.mark.parametrize("noise_multiplier, warns", [(1e-3, True), (1e3, False)])
def test_that_statistics_fill_the_clip_is_read_from_what_is_released(
    noise_multiplier, warns
):
    # Read from the sum without noise, whether it warned was one client's doing.
    x, y = toy.arrays(400)
    rows = tf.range(400).numpy().reshape(40, 10)
    clients = tfdp_fl.datasets.FederatedDataset.from_indices(100 * x, y, rows)
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.1, noise_multiplier=noise_multiplier)
    fed = toy.federated(mechanism, sampling="shuffled", model=toy.normalized())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fed.fit(clients, rounds=1, verbose=0)
    assert any("fill the clip" in str(one.message) for one in caught) == warns
