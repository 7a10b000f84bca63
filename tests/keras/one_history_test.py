"""No way of calling `fit` has rounds that epsilon leaves out."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import itertools
import pickle
import threading
import time
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting, keras_versions
from tfdp_fl.accounting import planning
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import CohortEngine
from tfdp_fl.keras import checkpoint, federated_training

_DELTA = 1e-3
_TRAINED = "already trained on clients"
_PRIVATE = tfdp_fl.PrivateMetrics(bounds={"loss": (0.0, 5.0)}, noise_multiplier=1.0)


def _evaluate(fed):
    fed.evaluate_clients(toy.clients(), verbose=0, private=_PRIVATE)


@pytest.mark.parametrize(
    "when", ["set_model", "on_train_begin", "on_epoch_begin", "on_train_batch_begin"]
)
def test_weights_that_a_callback_brings_are_refused(when):
    trained, fed = toy.federated(), toy.federated()
    toy.fit(trained, 2)
    brings, weights = tf.keras.callbacks.LambdaCallback(), trained.get_weights()
    setattr(brings, when, lambda *_, **__: fed.set_weights(weights))
    with pytest.raises(ValueError, match="must not change the model's weights"):
        toy.fit(fed, 2, callbacks=[brings])
    assert fed.epsilon(_DELTA) == 0.0


def test_only_weights_of_this_run_may_be_restored(tmp_path):
    fed, kept = toy.federated(), []
    keep = toy.at_end(lambda: kept.extend(fed.get_weights()), 0)
    restore = toy.at_end(lambda: fed.set_weights(kept), 2, "on_epoch_begin")
    toy.fit(fed, 3, callbacks=[keep, restore])
    assert fed.rounds == 3
    fed, backup = toy.federated(), tf.keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(ValueError, match="must not have a BackupAndRestore"):
        toy.fit(fed, 2, [backup])
    # A budget inside another callback was never asked.
    inside = tf.keras.callbacks.CallbackList(
        [tfdp_fl.callbacks.PrivacyBudget(1.0, 1e-3)]
    )
    for callbacks in (inside, [inside]):
        with pytest.raises(TypeError, match=r"callbacks must be a list"):
            fed.fit(toy.clients(), rounds=1, callbacks=callbacks, verbose=0)
    assert fed.run is None

    class Holder(tf.keras.callbacks.Callback):
        def set_model(self, model):
            self.inner = tfdp_fl.callbacks.PrivacyBudget(1.0, 1e-3)
            self.inner.set_model(model)

    with pytest.raises(ValueError, match="callbacks must have each PrivacyBudget"):
        toy.fit(fed, 1, [Holder()])
    assert fed.rounds == 0


def test_an_interrupt_while_a_run_is_resumed(tmp_path):
    fed, resumed = (toy.federated(sampling="shuffled") for _ in range(2))
    keep = tfdp_fl.callbacks.RoundCheckpoint(tmp_path)
    toy.interrupted(fed, 1, 3, [keep])
    restored = toy.around(checkpoint.InterruptedRun, "restore", after=toy.ctrl_c)
    with restored, pytest.raises(KeyboardInterrupt):
        toy.fit(resumed, 3, resume_from=tmp_path)
    toy.assert_same(fed, resumed)
    assert resumed.epsilon(_DELTA) == fed.epsilon(_DELTA)
    # A wrapper that resumes brings the cost along.
    second = toy.federated(model=fed.model, sampling="shuffled")
    toy.fit(second, 3, resume_from=tmp_path)
    assert second.account.rounds == 3
    for use in (
        lambda: toy.fit(fed, 2),
        lambda: fed.epsilon(_DELTA),
        lambda: fed.central_epsilon(_DELTA),
        lambda: fed.privacy_statement(_DELTA),
        lambda: _evaluate(fed),
    ):
        with pytest.raises(ValueError, match=_TRAINED):
            use()


def test_fits_at_once():
    fed, start = toy.federated(), threading.Barrier(4)
    toy.fit(fed, 1)

    def train(_):
        start.wait()
        try:
            toy.fit(fed, 20)
        except RuntimeError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        errors = [error for error in pool.map(train, range(4)) if error]
    assert fed.account.rounds == fed.rounds == 1 + 20 * (4 - len(errors))
    assert all("fit" in error for error in errors)


@pytest.mark.parametrize("kind", ["same", "other wrapper", "compile"])
def test_a_fit_or_compile_inside_a_fit(kind):
    fed = toy.federated()
    inner = toy.federated(model=fed.model) if kind == "other wrapper" else fed

    def inside():
        if kind == "compile":
            fed.compile("sgd", toy.loss())
        toy.fit(inner, 2)

    with pytest.raises(RuntimeError, match="while a fit of the same Keras model"):
        toy.fit(fed, 2, callbacks=[toy.at_end(inside, 0)])
    assert fed.account.rounds == 1
    toy.fit(fed, 2)  # The failed one has let go.


def test_what_epsilon_is_computed_from_can_neither_be_copied_nor_set():
    fed = toy.federated()
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            make_copy(fed)
    toy.fit(fed, 2)
    spent = fed.epsilon(_DELTA)
    loud = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=100.0)
    for name in ("run", "setup", "model", "mechanism"):
        for value in (None, getattr(toy.federated(loud), name)):
            with pytest.raises(AttributeError, match=f"{name} cannot be set"):
                setattr(fed, name, value)
    assert fed.epsilon(_DELTA) == spent


def _sharing(model):
    return tf.keras.Sequential([tf.keras.layers.Input((8,)), *model.layers])


class _Peak(tf.keras.layers.Layer):
    """Remembers the largest number that it was called on."""

    def build(self, shape):
        self.peak = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.peak.assign(tf.maximum(self.peak, tf.reduce_max(x)))
        return x


@pytest.mark.parametrize("layer", [_Peak, tf.keras.layers.BatchNormalization])
def test_a_trained_model_learns_nothing_where_it_is_only_called(layer):
    # What it is called on would leave with the next broadcast, uncharged.
    fed = toy.federated(model=lambda: toy.dense(layer), non_trainable_state="keep")
    x, y = toy.arrays(20)
    before = fed.get_weights()
    for call in (
        lambda: fed(x),
        lambda: fed(x, training=True),
        lambda: fed.predict(x, verbose=0),
        lambda: fed.evaluate(x, y, verbose=0),
        lambda: fed.predict_on_batch(x),
        lambda: fed.test_on_batch(x, y),
        tf.function(lambda: fed(tf.constant(x), training=True)),
    ):
        call()
        toy.assert_same(fed.get_weights(), before)


@pytest.mark.skipif(not keras_versions.IS_KERAS_3, reason="enable_lora is of Keras 3")
def test_variables_that_were_replaced_between_fits_are_those_that_train():
    fed = toy.federated(model=toy.two_layers())
    toy.fit(fed)
    layer = fed.model.layers[0]
    layer.enable_lora(2)
    kernel = layer._kernel.numpy()
    toy.fit(fed)
    np.testing.assert_array_equal(layer._kernel.numpy(), kernel)
    assert np.any(layer.lora_kernel_b.numpy())


_BOUND = [4.0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ReadsItsBound(tfdp_fl.mechanisms.Mechanism):
    """Its bound is a number of the user's own, which changes between fits."""

    noise_multiplier: float = 100.0

    def describe(self):
        return "its own."

    def first_clip_norm(self):
        return 1.0

    def l2_norm_bound(self, round):
        return _BOUND[0] * round.clip_norm

    def scale(self, norm, round):
        return tf.minimum(1.0, _BOUND[0] * round.clip_norm / norm)

    def noise_stddevs(self, round, context):
        return {"update": round.noise_multiplier * round.clip_norm}


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_bound_that_changed_between_fits_is_that_of_every_program(interrupted):
    # For another batch size, more programs are needed than are traced already.
    layers = [tf.keras.Input([64]), tf.keras.layers.Dense(64)]
    x = np.random.default_rng(0).normal(size=(640, 64)).astype(np.float32)
    rows = np.arange(640).reshape(10, 64)
    clients = FederatedDataset.from_indices(x, np.zeros([640], np.int64), rows)
    fed = tfdp_fl.DPFederatedModel(
        tf.keras.Sequential(layers), _ReadsItsBound(), 10, "fixed_size"
    )
    fed.compile(tf.keras.optimizers.SGD(1000.0), toy.loss())
    sums = []

    def note(_, pending, paid):
        for total in pending.sums:
            parts = [tf.cast(v, tf.float64) for v in total.contribution.update]
            sums.append(float(tf.linalg.global_norm(parts)))

    begin = mock.patch.object(CohortEngine, "complete", side_effect=KeyboardInterrupt)
    stops = begin if interrupted else contextlib.nullcontext()
    with stops, contextlib.suppress(KeyboardInterrupt):
        toy.fit(fed, data=clients, batch_size=64)
    _BOUND[0] = 0.05
    try:
        with toy.around(CohortEngine, "release", before=note):
            toy.fit(fed, data=clients, batch_size=8)
    finally:
        _BOUND[0] = 4.0
    assert 0.1 < sum(sums) < 10 * 0.0501


@pytest.mark.parametrize("during", ["empty_round", "release"])
def test_an_evaluation_in_another_thread_meets_no_round(during):
    def make():
        return toy.federated(
            tfdp_fl.NoPrivacy(),
            model=lambda: toy.dense(_Peak),
            non_trainable_state="keep",
            clients_per_round=toy.NUM_CLIENTS,
            sampling="fixed_size",
        )

    fed, twin, sent, has_begun = make(), make(), [], threading.Event()
    x, y = toy.arrays(20)
    fed.evaluate(x, y, batch_size=5, verbose=0)  # Traces.

    class Slow(tf.keras.callbacks.Callback):
        def on_test_batch_end(self, *_, **__):
            has_begun.set()  # Now the peak is that of the data.
            time.sleep(0.1)

    def evaluate():
        fed.evaluate(x, y, batch_size=5, verbose=0, callbacks=[Slow()])

    other = threading.Thread(target=evaluate)

    def begin(*_):
        if not has_begun.is_set():
            other.start()
            assert has_begun.wait(60)

    def note(pending):
        sent.extend(np.asarray(value) for value in pending.broadcast.unaggregated)

    with (
        toy.around(CohortEngine, "empty_round", after=note),
        toy.around(CohortEngine, during, before=begin),
    ):
        toy.fit(fed, 3, seed=5)
    other.join()
    toy.fit(twin, 3, seed=5)
    toy.assert_same(fed, twin)
    assert len(sent) >= 3
    assert not any(map(np.any, sent))


@pytest.mark.parametrize("shares_a_layer", [False, True])
def test_a_second_wrapper_of_a_trained_model_or_layer(shares_a_layer):
    model = toy.two_layers()
    fed = toy.federated(model=model)
    second = toy.federated(model=_sharing(model) if shares_a_layer else model)
    toy.fit(fed, 2)
    for use in (lambda: toy.fit(second, 2), lambda: second.epsilon(_DELTA)):
        with pytest.raises(ValueError, match=_TRAINED):
            use()
    del fed  # It is not forgotten with the wrapper.
    with pytest.raises(ValueError, match="or a layer that it shares"):
        toy.fit(second, 2)


def test_two_models_that_share_a_layer_at_once():
    model = toy.two_layers()
    fed, second = toy.federated(model=model), toy.federated(model=_sharing(model))
    waiting = [second]

    def collected(_):
        if waiting:  # As another thread might, while this one's cohort trains.
            toy.fit(waiting.pop(), 2)

    patch = toy.around(CohortEngine, "collect", after=collected)
    with patch, pytest.raises(ValueError, match="a layer that it shares"):
        toy.fit(fed, 2)
    assert (fed.account.rounds, second.account.rounds) == (0, 2)
    # Layers that are not trained may be shared.
    frozen = tf.keras.layers.Dense(8, trainable=False)
    for _ in range(2):
        layers = [tf.keras.layers.Input((8,)), frozen, tf.keras.layers.Dense(3)]
        fed = toy.federated(model=tf.keras.Sequential(layers))
        toy.fit(fed, 2)
        assert fed.account.rounds == 2


def test_a_model_that_replaces_its_variables_stays_whose_it_is():
    # (A bias would be the old one.)
    layer = tf.keras.layers.Dense(toy.NUM_CLASSES, use_bias=False)
    model = tf.keras.Sequential([tf.keras.layers.Input((8,)), layer])
    fed = toy.federated(model=model)
    toy.fit(fed, 2)
    if hasattr(fed.model, "quantize"):
        fed.model.quantize("int8")
    else:
        layer.kernel = tf.Variable(layer.kernel)
    again = tf.keras.Sequential([tf.keras.layers.Input((8,)), layer])
    for model in (fed.model, again):
        with pytest.raises(ValueError, match=_TRAINED):
            federated_training.check_owner(mock.Mock(model=model))


@pytest.mark.parametrize("where", ["on_round_charged", "allow_round"])
def test_an_evaluation_that_is_asked_for_within_a_charge_is_refused(where, tmp_path):
    fed, inside = toy.federated(), tfdp_fl.callbacks.FederatedCallback()
    ledger, calls = tfdp_fl.callbacks.Ledger(tmp_path / "ledger"), itertools.count()

    def evaluate(*_):
        if where == "on_round_charged" or next(
            calls
        ):  # Before a round is drawn it may.
            _evaluate(fed)
        return True

    setattr(inside, where, evaluate)
    with pytest.raises(accounting.ChargeError, match="within it"):
        toy.fit(fed, 2, [ledger, inside])
    assert fed.epsilon(_DELTA) == 0.0
    assert accounting.PrivacyLedger.read(ledger.path).entries == ()
    toy.fit(fed, 1, [ledger])


# What a budget allowed is spent by a private evaluation in a callback.


@pytest.fixture(scope="module")
def most():
    """A little more than four rounds cost."""
    return accounting.epsilon(1.0, "fixed_size", 40, 20, 4, _DELTA) * 1.001


class _Waits(tfdp_fl.callbacks.FederatedCallback):
    """Holds an evaluation between its questions and its lines."""

    def __init__(self):
        super().__init__()
        self.asked, self.closed = threading.Event(), threading.Event()

    def on_release_charged(self, name, charge):
        self.asked.set()
        self.closed.wait(0.5)

    def on_epoch_end(self, epoch, logs=None):
        self.thread = threading.Thread(target=_evaluate, args=(self.federated_model,))
        self.thread.start()
        assert self.asked.wait(60)


def test_a_fit_that_ends_waits_for_a_charge_of_another_thread(tmp_path):
    # The evaluation was released, and its ledger had been closed before its line.
    fed, waits = toy.federated(), _Waits()
    ledger = tfdp_fl.callbacks.Ledger(tmp_path / "ledger")
    closed = lambda _: waits.closed.set()  # noqa: E731
    with toy.around(accounting.PrivacyLedger, "close", after=closed):
        toy.fit(fed, 1, [ledger, waits])
        waits.thread.join()
    lines = accounting.PrivacyLedger.read(tmp_path / "ledger").entries
    assert len(lines) == fed.account.rounds + fed.account.evaluations == 2
    # A fit without the callback keeps the ledger as well.
    toy.fit(fed, 1)
    assert len(accounting.PrivacyLedger.read(ledger.path).entries) == 3


@pytest.mark.parametrize("when", ["on_epoch_begin", "on_epoch_end"])
def test_a_budget_is_asked_in_the_act_of_charging(tmp_path, when, most):
    fed = toy.federated()
    budget = tfdp_fl.callbacks.PrivacyBudget(most, _DELTA)
    ledger = tfdp_fl.callbacks.Ledger(tmp_path / "ledger")
    evaluates = toy.at_end(lambda: _evaluate(fed), 1, when)
    toy.fit(fed, 4, [budget, ledger, evaluates])
    assert fed.account.evaluations == 1
    assert fed.rounds < 4
    assert fed.epsilon(_DELTA) <= most
    told = accounting.PrivacyLedger.read(ledger.path).epsilon(_DELTA)
    assert told == pytest.approx(fed.epsilon(_DELTA), abs=1e-6)


def test_a_budget_or_target_counts_what_is_charged_while_it_plans(most):
    fed = toy.federated()
    toy.fit(fed, 1)
    # As another thread might, between answer and what follows.
    evaluates = lambda _, fed=fed: _evaluate(fed)  # noqa: E731
    with toy.around(planning, "largest_affordable", after=evaluates):
        toy.fit(fed, 3, [tfdp_fl.callbacks.PrivacyBudget(most, _DELTA)])
    assert fed.epsilon(_DELTA) <= most
    fed = toy.private(60.0, 4)
    toy.fit(fed, 4, [toy.at_end(lambda: _evaluate(fed), 1, "on_epoch_begin")])
    assert fed.epsilon(_DELTA) <= 60.0 * (1 + 1e-6)
    assert fed.rounds < 4


def test_a_budget_serves_one_fit_at_a_time_and_its_model_s_evaluations():
    fed, other = toy.federated(), toy.federated()
    budget = tfdp_fl.callbacks.PrivacyBudget(100.0, _DELTA)
    inside = toy.at_end(lambda: toy.fit(other, 1, [budget]), 0)
    with pytest.raises(RuntimeError, match="the PrivacyBudget of a fit that"):
        toy.fit(fed, 2, [budget, inside])
    toy.fit(fed, 1, callbacks=[budget])
    budget.epsilon = fed.epsilon(_DELTA) * 1.01
    with pytest.raises(ValueError, match="of the PrivacyBudget"):
        _evaluate(fed)
    toy.fit(other, 1, [budget])
    with pytest.raises(ValueError, match="now belongs to another model"):
        _evaluate(fed)
    assert fed.account.evaluations == 0
