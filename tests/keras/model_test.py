"""`DPFederatedModel` is trained and used like any Keras model."""

import dataclasses
import inspect
import math
import warnings
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import engine
from tfdp_fl import sampling as sampling_lib
from tfdp_fl._lazy_tf import tfp
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import secure_sum
from tfdp_fl.keras import callbacks, checkpoint
from tfdp_fl.keras.model import FORWARDED_ATTRIBUTES
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_DELTA = 1e-3
_SGD = tf.keras.optimizers.SGD
_QUIET = tfdp_fl.FixedClipping(clip_norm=1e6, noise_multiplier=0.0)
_AT_CLIENTS = tfdp_fl.FixedClipping(
    clip_norm=1e4, noise_multiplier=1.0, noise_site="client"
)


def test_learns_reports_saves_and_loads(tmp_path):
    fed = toy.federated(
        tfdp_fl.FixedClipping(clip_norm=2.0, noise_multiplier=0.2),
        delta=_DELTA,
        compile_options={"optimizer": _SGD(0.5), "metrics": ["accuracy"]},
    )
    x, y = toy.arrays(200, seed=9)
    before = fed.evaluate(x, y, verbose=0, return_dict=True)
    validation = {"validation_data": (x, y), "validation_freq": 3}
    history = toy.fit(fed, 8, between_client_variance=True, **validation).history
    after = fed.evaluate(x, y, verbose=0, return_dict=True)
    assert after["accuracy"] > before["accuracy"] + 0.2
    assert {*history} == {
        *("loss", "accuracy", "val_loss", "val_accuracy", "cohort_size"),
        *("clip_norm", "noise_stddev", "clipped_fraction", "epsilon"),
        *("mean_update_norm", "discarded_clients", "failed_clients"),
        *("abandoned_rounds", "between_client_variance", "update_scale"),
    }
    assert len(history["val_loss"]) == 3  # Rounds 3, 6 and the last.
    assert history["val_accuracy"][-1] == after["accuracy"]
    assert history["cohort_size"] == [20.0] * 8
    assert history["clip_norm"] == [2.0] * 8
    np.testing.assert_allclose(history["noise_stddev"], 0.4, rtol=1e-6)
    assert history["epsilon"][-1] == fed.epsilon(_DELTA)
    assert history["loss"][-1] < history["loss"][0]
    # Saved, it is a Keras model and nothing else.
    path = tmp_path / "model.keras"
    fed.save(path)
    loaded = tf.keras.models.load_model(path)
    assert b"tfdp" not in path.read_bytes()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), fed.predict(x, verbose=0))
    np.testing.assert_allclose(fed(x[:4]), loaded(x[:4]))


def test_standard_callbacks_work_as_they_are(tmp_path):
    fed = toy.federated(compile_options={"metrics": ["accuracy"]}, sampling="shuffled")
    rates, seen, keras = [], [], tf.keras.callbacks

    def note():
        rates.append(fed.require_compiled("it").learning_rate)
        seen.append(fed.get_weights())

    stop = {"patience": 1, "min_delta": 99.0, "restore_best_weights": True}
    given = [
        callbacks.RoundCheckpoint(tmp_path),
        keras.LearningRateScheduler(lambda epoch, _: 0.1 / (epoch + 1)),
        toy.at_end(note),
        keras.ModelCheckpoint(f"{tmp_path}/{{epoch}}.keras"),
        keras.CSVLogger(f"{tmp_path}/log.csv"),
        keras.TensorBoard(f"{tmp_path}/board"),
        keras.TerminateOnNaN(),
        keras.EarlyStopping("val_loss", **stop),
    ]
    history = toy.fit(fed, 9, given, validation_data=toy.arrays(30))
    assert history.epoch == [0, 1]
    np.testing.assert_allclose(rates, [0.1, 0.05], rtol=1e-6)
    toy.assert_same(seen[0], fed)
    saved = checkpoint.CheckpointDirectory(tmp_path).newest()["weights"]
    toy.assert_same(saved, fed)  # The best ones, too.
    assert (tmp_path / "2.keras").exists()
    rows = (tmp_path / "log.csv").read_text().splitlines()
    assert len(rows) == 3
    assert "val_accuracy" in rows[0]
    assert [*(tmp_path / "board").rglob("events*")]
    # One of the user's may stop it by either model.
    assert toy.fit(fed, 9, [toy.stop(fed, 2)]).epoch == [2]


def test_further_callbacks_that_the_page_names():
    fed, seen, keras = toy.federated(), [], tf.keras.callbacks
    plateau = keras.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=99.0)
    note = keras.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    toy.fit(fed, 3, [plateau, note])
    assert fed.require_compiled("it").learning_rate == pytest.approx(0.1 / 4)
    assert seen == [0, 1, 2]


def test_names_of_keras_are_the_models_unless_they_train_or_change_it():
    fed = toy.federated()
    for name in FORWARDED_ATTRIBUTES:
        if hasattr(fed.model, name):  # Versions of Keras differ.
            assert type(getattr(fed, name)) is type(getattr(fed.model, name)), name
            assert name in dir(fed)
    for name in ("train_on_batch", "train_step", "build", "quantize", "spam"):
        with pytest.raises(AttributeError, match=f"has no '{name}': it trains"):
            getattr(fed, name)
        with pytest.raises(AttributeError, match=f"{name} cannot be set"):
            setattr(fed, name, 3)
    own = inspect.signature(tfdp_fl.DPFederatedModel.fit).parameters
    for name in inspect.signature(tf.keras.Model.fit).parameters.keys() - own:
        with pytest.raises(TypeError, match=f"no {name}; give "):
            fed.fit(toy.clients(), **{name: 1})
    with pytest.raises(TypeError, match="takes no run_eagerly; give nothing"):
        fed.compile("sgd", toy.loss(), run_eagerly=True)


def test_a_seed_repeats_no_seed_does_not_and_a_second_fit_goes_on():
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=0.8)
    whole, parts = (
        toy.federated(mechanism, toy.dropout, 20, "poisson", compile_options=compiled)
        for _ in range(2)
        for compiled in [{"server_optimizer": _SGD(1.0, momentum=0.9)}]
    )
    start, found, fit = whole.get_weights(), [], {"seed": 1, "shuffle": True}
    clips = toy.fit(whole, 4, **fit).history["clip_norm"]
    spent = whole.epsilon(_DELTA)
    toy.fit(parts, 2, **fit)
    history = toy.fit(parts, 2, **fit)
    assert history.epoch == [2, 3]
    assert history.history["clip_norm"] == clips[2:]
    toy.assert_same(whole, parts)
    assert parts.epsilon(_DELTA) == spent
    # Also after compile, and on other clients.
    parts.compile("sgd", toy.loss(), jit_compile=False)
    history = toy.fit(parts, 1, data=toy.clients(30), seed=1)
    assert history.history["clip_norm"] != clips[:1]
    assert parts.rounds == 5
    assert parts.epsilon(_DELTA) > spent
    facts = parts.privacy_statement(_DELTA, "dict")
    assert facts["populations"] == [40, 30]
    assert "N = 40, then 30" in facts["how"]
    for seed in (1, 2, None, None):
        whole.set_weights(start)
        whole._run = None
        toy.fit(whole, seed=seed, shuffle=True)
        found.append(toy.flat(whole))
    for one, two in ((0, 1), (2, 3)):
        assert np.abs(found[one] - found[two]).max() > 1e-3


def test_averaged_weights_are_what_fit_ends_with():
    averaging = _SGD(1.0, use_ema=True, ema_momentum=0.6)
    fed = toy.federated(compile_options={"server_optimizer": averaging})
    seen = []
    note = lambda *_: seen.append(fed.get_weights()[0])  # noqa: E731
    # Callbacks that save the end of training see it, as in Keras.
    notes = tf.keras.callbacks.LambdaCallback(on_epoch_end=note, on_train_end=note)
    toy.fit(fed, 3, [notes], seed=1)
    average = seen[0]  # It begins with the first step's weights.
    for weights in seen[:3]:
        average = 0.6 * average + 0.4 * weights
    assert np.abs(average - seen[2]).max() > 1e-2
    np.testing.assert_allclose(fed.get_weights()[0], average, rtol=1e-5)
    np.testing.assert_array_equal(fed.get_weights()[0], seen[3])


def _one_fails(count):
    """Returns clients of ten examples; the fourth's cannot be read."""
    whole = toy.clients(count)
    return FederatedDataset.from_client_fn(
        range(count), lambda client: whole.client(client) if client != 3 else 1 / 0
    )


def test_a_client_that_fails():
    fed = toy.federated(_QUIET, sampling="shuffled", on_client_failure="exclude")
    history = toy.fit(fed, 2, data=_one_fails(40), seed=1).history
    assert sorted(history["failed_clients"]) == [0.0, 1.0]
    assert history["abandoned_rounds"] == [0.0, 0.0]
    assert fed.account.rounds == 2
    # What may be published is the same as if none had failed.
    intact = toy.federated(_QUIET, sampling="shuffled", on_client_failure="exclude")
    toy.fit(intact, 2, data=toy.clients(40), seed=1)
    statements = [each.privacy_statement(0.1) for each in (fed, intact)]
    assert statements[0] == statements[1]
    assert "left out of its round's sum" in statements[0].replace("\n", " ")
    # Where it ends its round, the other one stays.
    fed = toy.federated(sampling="shuffled", on_client_failure="abort")
    history = toy.fit(fed, 2, data=_one_fails(40), seed=1).history
    failed = history["failed_clients"].index(1.0)
    assert history["abandoned_rounds"][failed] == 1.0
    assert math.isnan(history["loss"][failed])
    assert (fed.rounds, fed.account.rounds) == (2, 1)
    assert fed.privacy_statement(0.1, "dict")["cohort_sizes"]["count"] == 1


@pytest.mark.parametrize(
    "mechanism, charged",
    [
        (tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=2.0), 3),
        (tfdp_fl.NbAFL(epsilon=9.0, constant=3.0, weight_clip=5.0), 3),
        (tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=2.0), 0),
    ],
)
def test_what_clients_sent_in_abandoned_rounds_is_charged(tmp_path, mechanism, charged):
    path = tmp_path / "ledger.jsonl"
    fed = toy.federated(mechanism, on_client_failure="abort")
    before = fed.get_weights()
    history = toy.fit(fed, 3, [callbacks.Ledger(path)], _one_fails(20)).history
    assert history["abandoned_rounds"] == [1.0] * 3
    toy.assert_same(before, fed)
    assert fed.account.rounds == charged
    assert fed.account.per_client.max_participations == charged
    delta = mechanism.implied_delta or _DELTA
    assert (fed.epsilon(delta) > 0) == (charged > 0)
    facts = fed.privacy_statement(delta, "dict")
    wanted = "rounds_abandoned_charged" if charged else "rounds_abandoned"
    assert wanted in facts["caveats"]
    known = tfdp_fl.accounting.PrivacyLedger.read(path)
    assert len(known.entries) == charged
    if charged:  # What is said of the client that was seen most.
        assert known.epsilon(delta) == pytest.approx(fed.epsilon(delta))


def test_that_a_drawn_cohort_was_abandoned_is_charged(tmp_path):
    # Those that were not abandoned were drawn from the two who do not fail.
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=2.0)
    fed = toy.federated(mechanism, clients_per_round=10, on_client_failure="abort")
    whole, ledger = toy.clients(40), callbacks.Ledger(tmp_path / "ledger.jsonl")
    clients = FederatedDataset.from_client_fn(
        range(40), lambda client: whole.client(client) if client < 2 else 1 / 0
    )
    history = toy.fit(fed, 3, [ledger], clients).history
    assert history["abandoned_rounds"] == [1.0] * 3
    ((charge, count),) = fed.account.own.items()
    assert (charge.known_selection, count) == (True, 3)
    known = tfdp_fl.accounting.PrivacyLedger.read(tmp_path / "ledger.jsonl")
    assert known.epsilon(_DELTA) == fed.epsilon(_DELTA) > 0
    caveats = fed.privacy_statement(_DELTA, "dict")["caveats"]
    assert "rounds_may_be_abandoned" in caveats
    assert "rounds_abandoned" not in caveats


def test_a_record_of_two_clients_or_twice_one_of_one_is_refused():
    mechanism = tfdp_fl.NbAFL(epsilon=9.0, constant=3.0, weight_clip=5.0)
    x, y = toy.arrays(6)
    for rows in ([[0, 1], [1, 2]], [[0, 0], [1, 2]]):
        fed = toy.federated(mechanism, clients_per_round=2)
        data = FederatedDataset.from_indices(x, y, rows)
        # A function gives each client its own copies, which are still one record.
        mapped = data.map(lambda x, y: (x / 2, y))
        for each in (data, mapped, mapped.map(lambda x, y: (x, y))):
            with pytest.raises(ValueError, match="hold each row once with N"):
                toy.fit(fed, data=each)
        assert fed.run is None


def _secure(mechanism, size=7, **options):
    options["secure_aggregation"] = AdditiveSecretSharing()
    return toy.federated(mechanism, None, size, **options)


def test_secure_aggregation_adds_up_the_same():
    median = tfdp_fl.MedianClipping(noise_multiplier=0.1, noise_site="client")
    plain, secure = toy.federated(median, clients_per_round=7), _secure(median)
    start = toy.flat(plain)
    for fed in (plain, secure):
        toy.fit(fed, 2, seed=1)
    np.testing.assert_allclose(toy.flat(plain), toy.flat(secure), atol=1e-6)
    assert not np.array_equal(start, toy.flat(plain))


def test_a_clip_of_the_round_that_a_secure_sum_refuses_is_paid_for():
    # The error depends on the cohort's private median, and quotes it.
    median = tfdp_fl.MedianClipping(
        noise_multiplier=1e4, median_noise_multiplier=0.1, noise_site="client"
    )
    spent = []
    for largest in (2, 1e7):
        protocol = AdditiveSecretSharing(max_share_value=largest)
        fed = toy.federated(median, None, 7, secure_aggregation=protocol)
        try:
            toy.fit(
                fed, data=toy.clients(7)
            )  # All of them, so nothing else is prepaid.
            assert largest > 2
        except ValueError as error:
            assert largest == 2 and "max_share_value of at least" in str(error)
        spent.append(fed.epsilon(1e-5))
    assert spent[0] == spent[1] > 10


def _must_be_small(value):
    return tf.control_dependencies([tf.debugging.assert_less(value, 1e3)])


class _SmallOutputs(tf.keras.metrics.Mean):
    """The mean output, which must be small."""

    def update_state(self, y, p, sample_weight=None):
        return super().update_state(tf.abs(p))

    def result(self):
        with _must_be_small(tf.convert_to_tensor(self.total)):
            return tf.identity(super().result())


class _SmallNorms(tfdp_fl.MedianClipping):
    """A clip that wants small norms."""

    def clip_to_cohort(self, norms, round):
        with _must_be_small(tf.reduce_max(norms)):
            return super().clip_to_cohort(norms, round)

    def round_event(self, round_index, context):
        return super().round_event(round_index, context)


def _with_large_features():
    x, y = toy.arrays(400)
    x[:10] = 1e6  # All of the first client's.
    rows = np.arange(400).reshape(40, 10)
    return FederatedDataset.from_indices(x, y, rows)


def test_an_error_in_a_metric_of_exact_sums_ends_nothing():
    compiled = {"metrics": [_SmallOutputs(name="small")]}
    fixed = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    fed = toy.federated(fixed, None, 40, compile_options=compiled)
    history = toy.fit(fed, 2, data=_with_large_features()).history
    assert np.isnan(history["small"]).all() and np.isfinite(history["loss"]).all()
    assert fed.rounds == fed.account.rounds == 2
    fed = toy.federated(fixed, None, 40, compile_options=compiled)
    assert np.isfinite(toy.fit(fed).history["small"]).all()


def test_an_error_of_a_clip_of_the_cohort_is_paid_for():
    median = _SmallNorms(noise_multiplier=1.0, median_noise_multiplier=1.0)
    fed = toy.federated(median, None, 40)
    with pytest.raises(tf.errors.InvalidArgumentError):
        toy.fit(fed, data=_with_large_features())
    assert fed.account.rounds == 1


def test_a_value_too_large_to_share_does_not_end_the_training(capsys):
    x, y = toy.arrays(400)
    x[13] = 1e6  # The second of 40 clients.
    clients = FederatedDataset.from_indices(x, y, np.arange(400).reshape(40, 10))
    fed = _secure(tfdp_fl.NoPrivacy(), 40)
    before = toy.flat(fed)
    with pytest.warns(UserWarning, match="1 of 40.*max_share_value=100"):
        history = toy.fit(fed, data=clients).history
    assert history["discarded_clients"] == [1.0]
    assert history["failed_clients"] == [0.0]
    assert np.abs(before - toy.flat(fed)).max() < 1.0
    # Nor where warnings are errors: that client would end each round, uncharged.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toy.fit(fed, data=clients).history["discarded_clients"] == [1.0]
    assert "1 of 40" in capsys.readouterr().err
    # Of noise at the clients, without a share of which the mean would lack it.
    fed = _secure(_AT_CLIENTS)
    before = fed.get_weights()
    # An honest client has such a value less often than once in 10^12 rounds.
    with pytest.raises(ValueError, match="must have a max_share_value of at least"):
        toy.fit(fed)
    assert fed.run is None
    honest = mock.patch.object(secure_sum, "check_resolution")
    with honest, pytest.warns(UserWarning, match="lacks their noise"):
        assert toy.fit(fed).history["abandoned_rounds"] == [1.0]
    toy.assert_same(before, fed)
    assert fed.account.rounds == 1
    # Of local noise: what each sent has its noise; the mean lacks that of all.
    fed = _secure(tfdp_fl.LocalDP(clip_norm=1e4, noise_multiplier=1.0))
    with pytest.warns(UserWarning, match="7 of 7.*upload zeros"):
        assert toy.fit(fed).history["discarded_clients"] == [7.0]
    toy.assert_same(before, fed)
    assert math.isfinite(fed.epsilon(_DELTA))
    assert fed.central_epsilon(_DELTA) == math.inf


def test_a_clip_that_outgrows_a_secure_sum_ends_the_training_before_its_charge():
    grows = tfdp_fl.AdaptiveClipping(
        **{"noise_multiplier": 0.5, "noise_site": "client", "initial_clip_norm": 4.0},
        **{
            "target_quantile": 1.0,
            "count_noise_stddev": 0.5,
            "clip_learning_rate": 1.0,
        },
    )
    fed = toy.federated(
        *(grows, None, 4, "fixed_size", {"optimizer": tf.keras.optimizers.SGD(1e3)}),
        secure_aggregation=AdditiveSecretSharing(max_share_value=60.0),
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="must have a max_share_value of at least"):
            toy.fit(fed, 20)
        assert fed.account.rounds == fed.rounds > 0
        assert fed.run.sampler.unsettled is None

    class Limited(tfdp_fl.FixedClipping):
        max_participations = 1

    fed = _secure(Limited(clip_norm=1.0, noise_multiplier=1.0))
    with pytest.raises(ValueError, match="max_participations leaves clients out"):
        toy.fit(fed)
    assert fed.run is None


def test_a_later_fit_is_checked_for_its_own_rounds():
    adaptive = tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)
    fed = toy.federated(adaptive, None, [20, 20, 5], "poisson")
    toy.fit(fed, 2)
    before = fed.run
    with pytest.raises(ValueError, match="count_noise_stddev"):
        toy.fit(fed, 1)
    assert fed.run is before  # Before anybody was drawn or trained.


@dataclasses.dataclass(frozen=True)
class _Person:
    number: int = dataclasses.field(repr=False)


def test_ids_that_look_alike_are_refused():
    # In another order, they would pass for the same clients.
    clients = {_Person(k): toy.arrays(5, seed=k) for k in range(4)}
    fed = toy.federated(sampling="shuffled", clients_per_round=2)
    with pytest.raises(ValueError, match=r"must differ in their repr.*_Person"):
        toy.fit(fed, data=clients)
    assert fed.run is None


def test_what_is_refused_changes_nothing():
    query = tfdp_fl.QueryMechanism(
        query=tfp.QuantileAdaptiveClipSumQuery(1.0, 1.0, 0.5, 0.2, 2.0, 7.0),
        dp_event=dp_accounting.GaussianDpEvent(0.9),
    )
    with pytest.raises(ValueError, match=r"use tfdp_fl\.AdaptiveClip"):
        toy.fit(_secure(query))
    coarse = AdditiveSecretSharing(max_share_value=0.5)
    with pytest.raises(ValueError, match=r"max_share_value of at least.*0\.5"):
        toy.federated(secure_aggregation=coarse)
    weighting = tfdp_fl.ClientWeighting.num_examples(cap=6)
    with pytest.raises(ValueError, match="client_weighting must be None with secure"):
        _secure(tfdp_fl.NoPrivacy(), client_weighting=weighting)
    with pytest.raises(ValueError, match="on_client_failure must be 'abort'"):
        toy.federated(_AT_CLIENTS, on_client_failure="exclude")
    fed = toy.federated(clients_per_round=[20, 20])
    toy.fit(fed)
    run, spent, before = fed.run, fed.epsilon(_DELTA), fed.get_weights()
    for message, fit in (
        ("clients_per_round is a sequence of 2", {"rounds": 3}),
        ("seed must be an integer", {"seed": -1}),
        ("batch_size must be an integer .* below 2", {"batch_size": 2**31}),
        ("clients_per_round .*19.* got 20", {"data": toy.clients(19)}),
    ):
        with pytest.raises(ValueError, match=message):
            toy.fit(fed, **fit)
    assert fed.run is run
    assert (fed.rounds, fed.epsilon(_DELTA)) == (1, spent)
    toy.assert_same(before, fed)


_LOCAL = tfdp_fl.LocalDP(clip_norm=0.5, epsilon=8.0, delta=1e-3)


@pytest.mark.parametrize(
    "mechanism, sampling", [(_LOCAL, "fixed_size"), (None, "shuffled")]
)
@pytest.mark.filterwarnings("ignore:rounds=1 goes beyond")
def test_a_list_in_another_order_that_is_read_anew_is_refused(mechanism, sampling):
    fed = toy.federated(mechanism, None, 20, sampling)
    slices = tf.data.Dataset.from_tensor_slices
    clients = [slices(toy.arrays(10, seed=k)) for k in range(toy.NUM_CLIENTS)]
    toy.fit(fed, data=clients)
    others = [*clients[:-1], slices(toy.arrays(10, seed=99))]
    for list_of_others in (clients[::-1], others):
        with pytest.raises(ValueError, match="was read again"):
            toy.fit(fed, data=list_of_others)
    toy.fit(fed, data=list(clients))
    assert fed.rounds == 2


# Clients are told apart by their ids, not by their number alone.
_OTHERS = toy.clients().take(np.roll(np.arange(toy.NUM_CLIENTS), 1))


@pytest.mark.parametrize(
    "mechanism, sampling, why",
    [
        (_LOCAL, "fixed_size", "tracked for each client"),
        (None, "shuffled", "round 2 continues a pass"),
    ],
)
def test_clients_in_another_order_are_refused(mechanism, sampling, why):
    fed = toy.federated(mechanism, None, 40 if mechanism else 20, sampling)
    toy.fit(fed)
    spent, weights = fed.epsilon(1e-3), fed.get_weights()
    one = fed.account.max_mu_squared
    for wrong, got in ((_OTHERS, "other ids,"), (toy.clients(41), "41")):
        message = f"clients must be the same 40 .*{why}.*got {got}"
        with pytest.raises(ValueError, match=message):
            toy.fit(fed, data=wrong)
    assert fed.epsilon(1e-3) == spent
    toy.assert_same(weights, fed)
    # The same ids in another object are the same clients.
    if sampling == "shuffled":
        toy.fit(fed)
        toy.fit(fed, data=_OTHERS)  # Between passes the order may change.
        assert fed.rounds == 3
    else:  # A second fit of a local budget keeps its noise, and says so.
        with pytest.warns(RuntimeWarning, match="beyond the 1 rounds .* epsilon=8"):
            toy.fit(fed)
        assert fed.account.max_mu_squared == pytest.approx(2 * one)
        assert fed.epsilon(1e-3) > 11.0


def test_a_round_is_charged_for_the_noise_and_cohort_it_had():
    draws, charged = iter(range(10**6)), []
    mechanism = tfdp_fl.FixedClipping(
        clip_norm=0.5, noise_multiplier=lambda t: 1.0 + next(draws) % 7
    )
    fed = toy.federated(mechanism, None, lambda t: 5 + next(draws) % 11)
    watch = callbacks.FederatedCallback()
    watch.on_round_charged = lambda _, *charge: charged.append(charge)
    spy = {"autospec": True, "side_effect": engine.CohortEngine.collect}
    with mock.patch.object(engine.CohortEngine, "collect", **spy) as collect:
        history = toy.fit(fed, 6, [watch]).history
    sizes = [call.args[2].clients_per_round for call in collect.mock_calls]
    assert sizes == [charge.clients_per_round for charge, _ in charged]
    for t, (charge, details) in enumerate(charged):
        z = charge.noise_multiplier
        assert details["noise_multiplier"] == z
        assert history["noise_stddev"][t] == pytest.approx(0.5 * z)
        assert charge.clients_per_round == details["cohort_size"]
    noise = [charge.noise_multiplier for charge, _ in charged]
    parameters = fed.privacy_statement(1e-3, "dict")["mechanism_parameters"]
    wanted = f"{min(noise):g} to {max(noise):g} (scheduled)"
    assert parameters["noise_multiplier"] == wanted


def test_another_seed_does_not_draw_another_cohort_of_a_fixed_size():
    fed = toy.federated(clients_per_round=5)

    def ends(*_):
        raise KeyboardInterrupt

    drawn = []
    for seed in (1, 2, 3):
        with (
            mock.patch.object(engine.CohortEngine, "collect", ends),
            pytest.raises(KeyboardInterrupt),
        ):
            toy.fit(fed, 1, seed=seed)
        drawn.append(fed.run.sampler.unsettled.positions.tolist())
    assert drawn[0] == drawn[1] == drawn[2]
    toy.fit(fed, 1, seed=4)
    assert fed.run.sampler.unsettled is None


def _interrupt(fed, **options):
    def ends(*_):
        raise KeyboardInterrupt

    with (
        mock.patch.object(engine.CohortEngine, "collect", ends),
        pytest.raises(KeyboardInterrupt),
    ):
        toy.fit(fed, 3, **options)


@pytest.mark.parametrize("name", ["poisson", "random_allocation", "shuffled"])
def test_an_interrupted_cohort_is_not_trained_again(name):
    # A client whose data made somebody interrupt a round was in the next one for sure,
    # and charged as if by chance: 0.82 was said, and 3.14 true.
    fed = toy.federated(clients_per_round=4, sampling=name)
    toy.fit(fed, 1)
    draw, drawn = sampling_lib.CohortSampler.draw, []

    def drawing(sampler):
        drawn.append(draw(sampler))
        return drawn[-1]

    with mock.patch.object(sampling_lib.CohortSampler, "draw", drawing):
        _interrupt(fed)
        said = fed.privacy_statement(1e-3, "dict")["caveats"]  # A checkpoint, too.
        toy.fit(fed, 1)
    interrupted, released = drawn
    assert interrupted is not released
    skipped = name == "random_allocation"
    assert released.round_index == interrupted.round_index + skipped == fed.rounds - 1
    if skipped:
        assert not set(interrupted.positions) & set(released.positions)
    for caveats in said, fed.privacy_statement(1e-3, "dict")["caveats"]:
        assert ("rounds_interrupted" in caveats) == (name != "shuffled")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("change", [0, 1])
def test_an_interrupted_cohort_of_a_fixed_size_needs_the_same_clients(named, change):
    # Somebody else took its member's place, for sure: 2.57 was said, and 7.58 true.
    # With fewer clients it was dropped: then all others were known to be without it.
    x, y = toy.arrays(4)
    first = dict.fromkeys(range(10), (x, y))
    other = dict.fromkeys((*range(9 - change), "new"), (x + 1, y))
    if not named:
        first, other = list(first.values()), list(other.values())
    fed = toy.federated(clients_per_round=5, sampling="fixed_size")
    _interrupt(fed, data=first)
    cohort = fed.run.sampler.unsettled
    with pytest.raises(ValueError, match="was interrupted, and its fixed-size cohort"):
        toy.fit(fed, 1, data=other)
    assert fed.run.sampler.unsettled is cohort and not fed.rounds
    toy.fit(fed, 1, data=first)
    toy.fit(fed, 1, data=other)
