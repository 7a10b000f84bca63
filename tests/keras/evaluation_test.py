"""Validation, metrics of clients, private means of them, what `validate` finds."""

import contextlib
import fractions
import math
import os
import re
import shutil
import warnings
from unittest import mock

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import CohortEngine, layout
from tfdp_fl.keras import checkpoint, evaluation
from tfdp_fl.keras.private_metrics import PrivateMetrics

_HELD_OUT = "Some clients were held out for validation"


def _named(count=toy.NUM_CLIENTS):
    return toy.clients(count).with_ids([f"client {k}" for k in range(count)])


def test_clients_held_out_are_read_for_validation_alone():
    read, own = [], toy.clients(10)
    watched = FederatedDataset.from_client_fn(
        range(10), lambda k: read.append(k) or own.client(k), own.element_spec
    )
    _, held = watched.split_by_id(0.3)
    fed = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=7)
    toy.fit(fed, 4, data=watched, validation_split=0.3, validation_freq=10)
    # All others in each of four rounds; those once, when it is over.
    for client in range(10):
        assert read.count(client) == (1 if client in held.client_ids else 4)
    assert _HELD_OUT in toy.said(fed, 1e-2)
    assert fed.run.account.per_client.num_clients == 10 - held.num_clients
    # Clients that trained at some time are not stated as held out.
    fed = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=5)
    broken = mock.patch.object(CohortEngine, "release", side_effect=KeyError)
    with broken, pytest.raises(KeyError):
        toy.fit(fed, data=_named())  # Charged, and lost.
    toy.fit(fed, data=_named(), validation_split=0.25)
    assert _HELD_OUT not in toy.said(fed, 1e-2)
    for splits in ((0.0, 0.25), (0.25, 0.5)):
        fed._run = None
        for split in splits:
            toy.fit(fed, data=_named(), validation_split=split)
        assert _HELD_OUT not in toy.said(fed, 1e-2)


def test_one_client_more_moves_no_other_to_the_other_side():
    # Else one client more would change many of those that train.
    names = [f"client {k}" for k in range(60)]

    def sides(ids, fraction=0.25):
        clients = FederatedDataset.from_client_fn(ids, lambda _: None)
        return [set(side.client_ids) for side in clients.split_by_id(fraction)]

    for without in names:
        others = [name for name in names if name != without]
        for one, other in zip(sides(names), sides(others), strict=True):
            assert one - {without} == other
    # The share is about what was asked for: 4.4 standard deviations.
    assert abs(len(sides(range(2000), 0.1)[1]) - 200) < 4.4 * 180**0.5
    for fraction in (1e-6, 1 - 1e-6):  # Where one was moved, a third moved it back.
        with pytest.raises(ValueError, match=r"clients must be more.*Moving a client"):
            sides([3, 4], fraction)


def test_metrics_of_clients_held_out_are_those_of_their_examples():
    clients = toy.streamed(_named())
    _, held = clients.split_by_id(0.25)
    compiled = {"metrics": ["accuracy"]}
    fed = toy.federated(None, toy.normalized, 5, compile_options=compiled)
    split = {"validation_split": 0.25, "validation_batch_size": 7}
    history = toy.fit(fed, 2, data=clients, **split).history
    found = fed.evaluate_clients(held, batch_size=4, verbose=0)
    examples = [held.client(k) for k in held.client_ids]
    x, y = (np.concatenate(parts) for parts in zip(*examples, strict=True))
    for name, value in fed.evaluate(x, y, verbose=0, return_dict=True).items():
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-4)
    for place, (x, y) in enumerate(examples):
        wanted = fed.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
        for name, value in wanted.items():
            assert found[name][place] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("together", [2, 1024])
def test_each_client_is_evaluated_on_its_own_rows_alone(together, monkeypatch):
    monkeypatch.setattr(evaluation, "_MAX_GROUP_SIZE", together)
    sizes = {"a": 5, "b": 2, "none": 0, "c": 9, "d": 1}
    clients = {k: toy.arrays(n, seed=n) for k, n in sizes.items()}
    fed = toy.federated(compile_options={"metrics": ["accuracy"]})
    streamed = FederatedDataset.from_client_fn([*clients], clients.get)
    for given in (clients, streamed):
        found = fed.evaluate_clients(given, batch_size=4, verbose=0)
        assert found["num_examples"].tolist() == [*sizes.values()]
        for place, (x, y) in enumerate(clients.values()):
            if not len(x):
                assert np.isnan(found["loss"][place])
                continue
            wanted = fed.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
            for name, value in wanted.items():
                assert found[name][place] == pytest.approx(value, abs=1e-5)


def _read(name):
    if name == "broken":
        raise OSError("secret.csv is not there")
    x, y = toy.arrays(0 if name == "empty" else 5)
    return x, (np.full_like(y, 271828) if name == "odd" else y)


def _caveats(fed):
    return fed.privacy_statement(1e-2, "dict")["caveats"]


def test_a_client_that_cannot_be_read_or_evaluated_on_or_has_nothing():
    clients = FederatedDataset.from_client_fn(
        ["whole", "broken", "empty", "odd"], _read
    )
    fed = toy.federated(sampling="shuffled", clients_per_round=4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        held_out = clients.take([0, 1, 2])  # (Keras raises where labels are odd.)
        history = toy.fit(fed, validation_data=held_out).history
        assert "client_metrics_shown" not in _caveats(fed)
        values = fed.evaluate_clients(clients, verbose=0)
    assert "client_metrics_shown" in _caveats(fed)
    told = "".join(str(w.message) for w in seen)
    assert "1 of 3 clients held out" in told
    assert told.count("'broken': OSError") == 2
    wanted = fed.evaluate(*_read("whole"), verbose=0)
    assert history["val_loss"] == [pytest.approx(wanted, rel=1e-5)]
    np.testing.assert_array_equal(values["num_examples"], [5, 0, 0, 5])
    np.testing.assert_array_equal(np.isnan(values["loss"]), [False, True, True, True])
    with pytest.raises(ValueError, match="none of 1 has") as error:
        fed.evaluate_clients({1: _read("odd")}, verbose=0)
    for said in (told, str(error.value)):
        assert "secret" not in said and "271828" not in said
    # Through another wrapper of the trained model, too.
    fed = toy.federated(sampling="shuffled", model=toy.two_layers)
    toy.fit(fed)
    other = fed.with_setup()
    other.evaluate_clients(toy.clients(2), verbose=0)
    assert "client_metrics_shown" in _caveats(fed)
    # Shown before the first round, it is said after.
    fed = toy.federated(sampling="shuffled")
    fed.evaluate_clients(toy.clients(2), verbose=0)
    toy.fit(fed)
    assert "client_metrics_shown" in _caveats(fed)


class _Vector(tf.keras.metrics.Metric):
    """Has several numbers, and makes their variable late, as F1Score does."""

    def update_state(self, y, predicted, sample_weight=None):
        if not self.variables:
            self.numbers = self.add_weight((3,), "zeros")

    def result(self):
        return self.numbers


class _Odd(_Vector):
    def __init__(self, result):
        super().__init__(name="odd")
        self.own, self.total = result, self.add_weight((), "zeros")

    def result(self):
        return self.own(self.total)


@pytest.mark.parametrize(
    "result, said",
    [
        (lambda total: (total, total), "'odd' as a tuple"),
        (lambda total: {"a": {"b": total}}, "'a' as a dict"),
        (lambda total: None, "'odd' as a NoneType"),
        (lambda total: "good", "'odd' of string"),
    ],
)
def test_a_metric_that_gives_no_number_is_named(result, said):
    fed = toy.federated(model=toy.dense())  # Not lent again: metrics look alike.
    fed.compile("sgd", toy.loss(), metrics=[_Odd(result)])
    with pytest.raises(ValueError, match=f"one number each, .*got {said}"):
        toy.fit(fed)


def test_a_metric_of_several_numbers_and_other_validation_are_refused():
    message = "metrics must give one number each.*got 'by_class'"
    vector = [_Vector(name="by_class")]
    fed = toy.federated(compile_options={"weighted_metrics": ["accuracy", *vector]})
    with pytest.raises(ValueError, match=message):
        toy.fit(fed)
    assert fed.run is None
    fed = toy.federated()
    both = {"validation_split": 0.1, "validation_data": toy.arrays(3)}
    with pytest.raises(ValueError, match="validation_split must be 0 if v"):
        toy.fit(fed, **both)
    with pytest.raises((TypeError, ValueError), match="validation_data must be"):
        toy.fit(fed, validation_data=[1])
    toy.fit(fed)
    fed.compile("sgd", toy.loss(), metrics=vector)
    private = tfdp_fl.PrivateMetrics(bounds={"by_class": (0, 1)}, noise_multiplier=1.0)
    for given in (None, private):
        with pytest.raises(ValueError, match=message):
            fed.evaluate_clients(toy.clients(), verbose=0, private=given)
    assert fed.account.evaluations == 0


_X, _Y = toy.arrays(20)
_ROWS = tf.data.Dataset.from_tensor_slices


@pytest.mark.parametrize(
    "data",
    [
        (_X, np.full(20, toy.NUM_CLASSES)),
        (_X, np.eye(toy.NUM_CLASSES)[_Y]),
        (_X, np.array(["a"] * 20)),
        (_X, np.zeros([20, 2], int)),
        (_X, _Y, np.ones([20, 2], np.float32)),
        _ROWS((_X, _Y)),
        _ROWS((_X[:, :5], _Y)).batch(5),
    ],
    ids=["no class", "one-hot", "text", "two columns", "weights", "rows", "narrow"],
)
def test_validation_data_that_does_not_fit_costs_nothing(tmp_path, data):
    fed = toy.federated()
    before, ledger = toy.flat(fed.model), tmp_path / "ledger.jsonl"
    with pytest.raises((ValueError, tf.errors.OpError)):
        toy.fit(fed, 2, [_Ledger(ledger)], validation_data=data)
    assert fed.run is None
    assert not ledger.exists()
    np.testing.assert_array_equal(toy.flat(fed.model), before)


@pytest.mark.parametrize("data", [(_X, _Y), _ROWS((_X, _Y)).batch(7)])
def test_validation_data_that_fits_is_tried_without_a_trace(data):
    histories, traces = [], {True: 0, False: 0}
    for tries in (True, False):
        fed = toy.federated(
            model=lambda: toy.dense(lambda: tf.keras.layers.Dropout(0.5)),
            compile_options={"metrics": ["accuracy"]},
        )
        options = {"validation_data": data, "validation_freq": 9, "seed": 1}
        tried = mock.patch.object(evaluation.Validation, "try_one_batch")

        def count(*_, tries=tries):
            traces[tries] += 1

        traced = toy.around(tf.keras.Model, "test_step", count)
        with contextlib.nullcontext() if tries else tried, traced:
            for _ in range(2):
                histories.append(toy.fit(fed, 2, **options).history)
        histories.append(toy.flat(fed.model).tolist())
    assert histories[:3] == histories[3:]
    assert traces[True] == traces[False]
    # Nor do metrics change: those of the last evaluation stay.
    shown = fed.model.get_metrics_result()
    evaluation.Validation(data=(_X[:9], _Y[:9]), every=1, batch_size=4).try_one_batch(
        fed.model
    )
    assert fed.model.get_metrics_result() == shown


def test_validate_names_a_problem():
    model = toy.dense()
    assert tfdp_fl.validate(model) == []
    model.trainable = False
    (problem,) = tfdp_fl.validate(model)
    assert "must have trainable variables" in problem
    with pytest.raises(ValueError, match="input shape"):
        tfdp_fl.validate(tf.keras.Sequential([tf.keras.layers.Dense(1)]), strict=True)


_BOUNDS = {"loss": (0.0, 3.0), "accuracy": (0.0, 1.0)}
_DELTA = 1e-3
_Ledger = tfdp_fl.callbacks.Ledger


def _private(**changes):
    return PrivateMetrics(**{"bounds": _BOUNDS, "noise_multiplier": 4.0, **changes})


def _trained(sampling="fixed_size", rounds=1, callbacks=(), data=None, **options):
    compiled = {"metrics": ["accuracy"]}
    fed = toy.federated(sampling=sampling, compile_options=compiled, **options)
    if rounds:
        toy.fit(fed, rounds, callbacks, data)
    return fed


def _evaluated(fed, private=None, clients=None):
    clients = toy.clients() if clients is None else clients
    private = _private() if private is None else private
    return fed.evaluate_clients(clients, private=private, verbose=0)


def test_a_client_contributes_at_most_one():
    ends = [0.0, 1.0, 3.0, -1e308, 1e308, np.nan, np.inf, -np.inf]
    ends += [5e-324, np.nextafter(3.0, 4), np.nextafter(1.0, 0), 0.5, 1.5]
    loss, accuracy = map(np.ravel, np.meshgrid(ends, ends))
    each = _private().contributions({"loss": loss, "accuracy": accuracy})
    norms = np.linalg.norm(each, axis=1)
    # The bound is met: the noise is not measured against too much.
    assert 1 - 1e-12 < norms.max() <= 1 + 1e-12
    unusable = ~(np.isfinite(loss) & np.isfinite(accuracy))
    assert norms[unusable].max() == 0.0
    # One client replaced by any other moves the sum by at most two.
    apart = each[:, None] - each[None]
    assert np.linalg.norm(apart, axis=2).max() <= 2 + 1e-12
    wide = _private(bounds={"loss": (-8e307, 8e307)})
    each = wide.contributions({"loss": np.array([-1e308, 0.0, 1e308])})
    assert np.linalg.norm(each, axis=1).max() <= 1 + 1e-12


def test_a_client_that_is_emptied_leaves_every_released_sum_by_its_contribution():
    # As one of 0 examples it moved a sum by 1.41: epsilon .773 said, 1.144 true.
    fed, sums = _trained("shuffled"), []
    x, y = toy.arrays(10, seed=1)
    some = {"a": (x, y), "b": (x[:4], y[:4]), "c": (x[:0], y[:0])}
    emptied = {**some, "b": some["c"]}
    with pytest.raises(ValueError, match="bounds must name metrics that were compiled"):
        _evaluated(fed, _private(bounds={"num_examples": (0, 10)}), some)
    assert fed.account.evaluations == 0
    for names in (["loss"], ["accuracy"], ["loss", "accuracy"]):
        bounds = {name: _BOUNDS[name] for name in names}
        with toy.around(PrivateMetrics, "total", after=sums.append):
            for clients in (some, emptied, {"c": some["c"], **emptied}):
                _evaluated(fed, _private(bounds=bounds), clients)
        moved = np.linalg.norm(sums[-3] - sums[-2])
        assert 0.5 < moved <= 1 + 1e-12
        np.testing.assert_array_equal(sums[-2], sums[-1])


def test_private_metrics_of_ones_own_kind_are_refused():
    # Its contributions had a norm of 2000, at the price of 1.
    class ByExamples(PrivateMetrics):
        def contributions(self, values):
            return super().contributions(values) * values["num_examples"][:, None]

    fed = _trained()
    own = ByExamples(bounds=_BOUNDS, noise_multiplier=4.0)
    with pytest.raises(TypeError, match="private must be a PrivateMetrics itself"):
        _evaluated(fed, own)
    assert fed.account.evaluations == 0


def test_a_sum_over_many_clients_is_rounded_once():
    # Added one after another in float64, these are 1e-6 of a contribution apart.
    values = {"loss": np.full(500_000, 0.7), "accuracy": np.full(500_000, 0.1)}
    total = _private().total(values)
    one = _private().contributions({name: each[:1] for name, each in values.items()})
    assert total.tolist() == [float(fractions.Fraction(x) * 500_000) for x in one[0]]


def test_noise_has_its_standard_deviation_and_the_sum_is_all_that_is_used():
    # Of 10,000 normal numbers 5 % are 7 standard deviations of their own deviation.
    private, generator = _private(noise_multiplier=2.5), np.random.default_rng(7)
    values = {n: generator.uniform(*bounds, 500) for n, bounds in _BOUNDS.items()}
    account = accounting.PrivacyAccount("central", 1)
    paid = account.charge(private.cost("poisson", 500), uses=10_002)
    results = [private.release(values, generator, paid) for _ in range(10_000)]
    for name in _BOUNDS:
        means = [each[name]["mean"] for each in results]
        assert abs(np.std(means) / results[0][name]["noise_stddev"] - 1) < 0.05
    counts = [each["num_clients"] for each in results]
    assert abs(np.std(counts) / (2.5 * 3**0.5) - 1) < 0.05
    assert results[0]["num_clients_stddev"] == pytest.approx(2.5 * 3**0.5)
    total = private.total(values)
    with mock.patch.object(PrivateMetrics, "contributions", lambda *_: total[None]):
        one = private.release({}, np.random.default_rng(1), paid)
    assert one == private.release(values, np.random.default_rng(1), paid)
    # What was not paid for, or is used up, releases nothing.
    with pytest.raises(accounting.ChargeError, match="needs its own charge"):
        private.release(values, generator, paid)


def test_without_noise_it_is_the_clients_own_and_with_it_each_time_another():
    fed = _trained()
    exact = fed.evaluate_clients(toy.clients(), verbose=0)
    one, other = (_evaluated(fed) for _ in range(2))
    assert one["num_clients"] != other["num_clients"]
    released = _evaluated(fed, _private(noise_multiplier=0.0))
    assert released["num_clients"] == pytest.approx(toy.NUM_CLIENTS)
    for name in _BOUNDS:
        assert released[name]["mean"] == pytest.approx(exact[name].mean(), abs=1e-6)
        assert released[name]["noise_stddev"] == 0.0
    assert fed.epsilon(_DELTA) == math.inf


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_label_that_is_no_class_ends_nothing():
    # An error would tell of one client's data, and cost nothing.
    clients = {k: toy.clients().client(k) for k in range(toy.NUM_CLIENTS)}
    fed, quiet = _trained(data=clients), _private(noise_multiplier=1e-3)
    for label in (toy.NUM_CLASSES, -1):
        x, y = (np.array(leaf) for leaf in clients[3])
        y[2] = label
        bad = {**clients, 3: (x, y)}
        # Kernels of a GPU say NaN, those of a CPU raise.
        found = _evaluated(fed, quiet, bad)["num_clients"]
        assert abs(found - (toy.NUM_CLIENTS - 1)) < 0.1
        # Nor do clients of which not one can be evaluated on; a warning would name one.
        for each in ({3: (x, y)}, {3: (x[:0], y[:0])}):
            assert abs(_evaluated(fed, quiet, each)["num_clients"]) < 0.1
    assert fed.account.evaluations == 6


@pytest.mark.parametrize("held_out", [True, False])
def test_a_label_that_is_no_class_ends_no_fit_after_its_first_round(held_out):
    clients = {f"client {k}": toy.clients().client(k) for k in range(toy.NUM_CLIENTS)}
    _, held = tfdp_fl.datasets.as_federated(clients).split_by_id(0.3)
    (one, *_), spec = held.client_ids, toy.clients().element_spec
    clients[one] = clients[one][0], np.full(len(clients[one][1]), 271828, np.int32)
    streamed = FederatedDataset.from_client_fn(list(clients), clients.get, spec)
    for data in (clients, streamed):
        fed, options = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=5), {}
        options["validation_split" if held_out else "validation_data"] = (
            0.3 if held_out else tfdp_fl.datasets.as_federated(data)
        )
        train = data if held_out else toy.clients()
        if data is clients:
            with pytest.raises(ValueError, match="labels must be") as error:
                toy.fit(fed, 1, data=train, **options)
            assert repr(one) in str(error.value)
            assert fed.run is None
            said = str(error.value)
        else:
            with pytest.warns(RuntimeWarning, match="1 of .* is omitted") as warned:
                toy.fit(fed, 1, data=train, **options)
            assert np.isfinite(fed.history.history["val_loss"]).all()
            said = " ".join(str(each.message) for each in warned)
        assert "271828" not in said


def _rounds(fed):
    """Returns what the rounds alone cost."""
    account = accounting.PrivacyAccountant()
    for charge, count in fed.account.own.items():
        account.add(charge, count)
    return account


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
def test_it_is_in_epsilon(sampling):
    fed = _trained(sampling, 2)
    before, own = fed.epsilon(_DELTA), _rounds(fed)
    assert own.epsilon(_DELTA) == pytest.approx(before)
    for _ in range(2):
        _evaluated(fed)
    kind = "fixed_size" if sampling == "fixed_size" else "poisson"
    all_of_them = {"num_clients": toy.NUM_CLIENTS, "clients_per_round": toy.NUM_CLIENTS}
    event = dp_accounting.GaussianDpEvent(4.0)
    own.add(accounting.RoundCharge(sampling=kind, event=event, **all_of_them), 2)
    assert fed.epsilon(_DELTA) > before + 1e-3
    # PLD takes seconds for cohorts of a fixed size.
    for by in ("rdp",) if sampling == "fixed_size" else ("rdp", "pld"):
        assert fed.epsilon(_DELTA, by) == pytest.approx(own.epsilon(_DELTA, by))
    if sampling == "shuffled":
        statement = toy.said(fed, _DELTA)
        assert "that evaluate_clients released" in statement
        assert "Philox4x64-10" in statement  # Also where the rounds' noise is exact.
    assert fed.rounds == 2
    toy.fit(fed, 1)  # Training goes on with it.
    assert fed.epsilon(_DELTA) > own.epsilon(_DELTA)


@pytest.fixture
def ledger(tmp_path):
    return _Ledger(tmp_path / "a.jsonl")


def _told(ledger):
    """Returns the epsilon of a ledger's file, to compare."""
    told = accounting.PrivacyLedger.read(ledger.path).epsilon(_DELTA)
    return pytest.approx(told, abs=1e-9)


def test_the_line_comes_first_and_the_run_goes_on(tmp_path, ledger):
    also, saved = _Ledger(tmp_path / "b.jsonl"), tmp_path / "run"
    fed, order = _trained("shuffled", rounds=0), []
    toy.fit(fed, 2, [ledger])
    released = lambda *_: order.append(_told(ledger))  # noqa: E731
    with mock.patch.object(PrivateMetrics, "release", released):
        _evaluated(fed)
    after = fed.epsilon(_DELTA)
    assert order == [after]
    # One that is in the first ledger only; then one of before the checkpoints.
    keeps = [[ledger, also], [tfdp_fl.callbacks.RoundCheckpoint(saved)]]
    for released, callbacks in enumerate(keeps, 1):
        toy.fit(fed, 1, callbacks)
        # In two files, and counted once.
        assert fed.account.evaluations == released
        for each in callbacks:
            assert fed.epsilon(_DELTA) == _told(each)
        _evaluated(fed)
    assert fed.epsilon(_DELTA) > after


def test_what_cannot_be_written_or_afforded_is_not_released(ledger):
    fed = _trained(callbacks=[ledger])
    os.unlink(ledger.path)
    ledger.path.mkdir()
    unwritten = pytest.raises((accounting.LedgerError, OSError))
    with mock.patch.object(PrivateMetrics, "release") as released, unwritten:
        _evaluated(fed)
    released.assert_not_called()
    fed = toy.private(3.0, 3, ["accuracy"])
    toy.fit(fed, 3)
    before = fed.epsilon(_DELTA)
    message = r"epsilon to \d.*epsilon=3 of the target of make_private"
    unpaid = pytest.raises(ValueError, match=message)
    with mock.patch.object(evaluation, "evaluate") as called, unpaid:
        _evaluated(fed)
    called.assert_not_called()
    assert fed.epsilon(_DELTA) == before


def test_what_other_runs_wrote_meanwhile_counts_before_a_release(tmp_path):
    path, budget = tmp_path / "all.jsonl", tfdp_fl.callbacks.PrivacyBudget
    first, second = _trained(rounds=0), _trained(rounds=0)
    toy.fit(first, 1, [budget(1e3, _DELTA), _Ledger(path, append=True)])
    alone = first.epsilon(_DELTA)
    toy.fit(second, 2, [_Ledger(path, append=True)])
    _evaluated(first)
    told = accounting.epsilon_from_ledger(path, _DELTA)
    assert first.epsilon(_DELTA) == pytest.approx(told, abs=1e-9)
    first.federated_callbacks[0].epsilon = told  # It is spent, if all are counted.
    with pytest.raises(ValueError, match="of the PrivacyBudget"):
        _evaluated(first)
    assert accounting.epsilon_from_ledger(path, _DELTA) == told > alone


def test_an_interrupt_leaves_no_line_that_the_run_knows_not_of(ledger):
    fed = _trained(callbacks=[ledger])
    interrupted = toy.around(accounting.PrivacyLedger, "record", after=toy.ctrl_c)
    with interrupted, pytest.raises(KeyboardInterrupt):
        _evaluated(fed)
    assert fed.account.evaluations == 1
    toy.fit(fed, 1, [ledger])
    assert fed.epsilon(_DELTA) == _told(ledger)


def test_compiled_anew_a_run_is_told_of_and_charged_as_before(ledger):
    fed = _trained(callbacks=[ledger])
    statement, engine = fed.privacy_statement(_DELTA), fed.engine
    fed.compile("sgd", toy.loss(), ["accuracy"], jit_compile=False)
    assert fed.privacy_statement(_DELTA) == statement
    spent = fed.epsilon(_DELTA)
    _evaluated(fed)
    assert spent < fed.epsilon(_DELTA) == _told(ledger)
    toy.fit(fed, 1, [ledger])
    assert fed.engine is not engine
    _evaluated(fed)
    assert fed.epsilon(_DELTA) == _told(ledger)


def test_within_a_fit_the_directory_stays_locked_and_a_resumed_run_knows(tmp_path):
    path, (fed, other) = tmp_path / "run", (_trained("shuffled", 0) for _ in range(2))
    saved = tfdp_fl.callbacks.RoundCheckpoint(path)

    def evaluate():
        _evaluated(fed)
        with pytest.raises(accounting.LedgerInUseError):
            accounting.PrivacyLedger(path / "ledger.jsonl", "append")

    toy.fit(fed, 3, [saved, toy.at_end(evaluate, 1), toy.stop(fed, 1)], seed=1)
    _evaluated(fed)
    assert "that evaluate_clients released" in toy.said(fed, _DELTA)
    cut = shutil.copytree(path, tmp_path / "cut") / "ledger.jsonl"
    cut.write_bytes(b"".join(cut.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(accounting.LedgerTamperedError):
        toy.fit(other, 3, seed=1, resume_from=cut.parent)
    toy.fit(other, 3, seed=1, resume_from=path)
    assert other.account.evaluations == 2
    assert "rounds_charged_twice" not in other.run.caveats
    rounds = _rounds(other)
    assert rounds.rounds == 3
    rounds.add(_private().cost("shuffled", toy.NUM_CLIENTS), 2)
    assert other.epsilon(_DELTA) == pytest.approx(rounds.epsilon(_DELTA), abs=1e-6)
    assert other.epsilon(_DELTA) > fed.epsilon(_DELTA)
    # What was taken away is not made anew.
    shutil.rmtree(path)
    with pytest.raises(accounting.LedgerTamperedError, match="is missing"):
        _evaluated(fed)
    assert not path.exists()


def test_one_charged_evaluation_at_a_time():
    fed = _trained()
    spent = fed.epsilon(_DELTA)

    def another(*_):
        with pytest.raises(RuntimeError, match="an evaluation that is charged"):
            _evaluated(fed)

    with toy.around(evaluation, "evaluate", another):
        _evaluated(fed)
    assert fed.epsilon(_DELTA) > spent


def test_a_release_of_clients_that_nobody_can_read_is_charged_as_any():
    fed, ids = _trained(), [f"client {k}" for k in range(40)]
    spent, found = fed.epsilon(_DELTA), []
    for readable in (), ids[:1], ids:
        clients = FederatedDataset.from_client_fn(
            ids, lambda k, known=readable: toy.arrays(5) if k in known else 1 / 0
        )
        found.append(_evaluated(fed, _private(noise_multiplier=20.0), clients))
        assert fed.epsilon(_DELTA) > spent
        spent = fed.epsilon(_DELTA)
    for each in found:
        assert each.keys() == found[0].keys() >= _BOUNDS.keys()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("limit", ["memory", "rows"])
def test_a_client_that_is_too_large_fails_alone_at_the_same_cost(streamed, limit):
    sizes = [5, 5, 30, 5]
    clients = tfdp_fl.datasets.as_federated([toy.arrays(n, seed=n) for n in sizes])
    clients = toy.streamed(clients) if streamed else clients
    fed, make = _trained(), evaluation._EvaluationBatch

    def with_little_memory(positions, lengths, *data):
        if 30 in lengths:
            raise MemoryError
        return make(positions, lengths, *data)

    limits = {
        "memory": mock.patch.object(evaluation, "_EvaluationBatch", with_little_memory),
        "rows": mock.patch.object(layout, "MOST_ROWS", 29),
    }
    with limits[limit], mock.patch.object(layout, "CHUNK_BYTES", 700):
        spent = fed.epsilon(_DELTA)
        assert _evaluated(fed, None, clients).keys() >= _BOUNDS.keys()
        assert fed.epsilon(_DELTA) > spent
        with pytest.warns(RuntimeWarning, match="The data of 1 of 4 clients could not"):
            found = fed.evaluate_clients(clients, verbose=0)
    assert np.isnan(found["accuracy"]).tolist() == [False, False, True, False]


def test_what_is_refused():
    fed = _trained(rounds=0)
    with pytest.raises(ValueError, match="before the first fit"):
        _evaluated(fed)
    toy.fit(fed)
    before, unknown = fed.epsilon(_DELTA), _private(bounds={"f1": (0, 1)})
    with pytest.raises(TypeError, match="private must be a PrivateMetrics"):
        _evaluated(fed, 3)
    with pytest.raises(ValueError, match=r"compiled \(.*'accuracy'.*got 'f1'"):
        _evaluated(fed, unknown)
    assert fed.epsilon(_DELTA) == before
    local = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="guarantee is local"):
        _evaluated(_trained(mechanism=local))


def test_progress_does_not_tell_who_has_examples(capsys):
    fed, shown = _trained(), []
    for last in (3, 0):
        clients = {k: toy.clients().client(k) for k in range(5)}
        clients[4] = tuple(part[:last] for part in clients[4])
        streamed = FederatedDataset.from_client_fn(
            range(5), clients.get, toy.clients().element_spec
        )
        capsys.readouterr()
        fed.evaluate_clients(streamed, private=_private(), verbose=1)
        shown.append(set(re.findall(r"\d+/5", capsys.readouterr().out)))
    assert shown == [{"5/5"}] * 2


def test_a_private_evaluation_is_in_the_ledger_of_a_run_whose_resuming_broke(tmp_path):
    path, fed = tmp_path / "run", _trained(rounds=0)
    _trained(rounds=2, callbacks=[tfdp_fl.callbacks.RoundCheckpoint(path)])
    interrupted = toy.around(checkpoint.InterruptedRun, "restore", toy.ctrl_c)
    with interrupted, pytest.raises(KeyboardInterrupt):
        toy.fit(fed, 2, resume_from=path)
    _evaluated(fed)
    told = accounting.PrivacyLedger.read(path / "ledger.jsonl").epsilon(_DELTA)
    assert told == pytest.approx(fed.epsilon(_DELTA), rel=1e-9)
