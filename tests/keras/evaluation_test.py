"""Validation, metrics client by client, and what `validate` finds."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl.datasets import FederatedDataset

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
    assert _HELD_OUT in fed.privacy_statement(1e-2)
    assert fed.run.spending.clients.num_clients == 10 - held.num_clients
    # Clients that trained at some time are not stated as held out.
    fed = toy.federated(tfdp_fl.NoPrivacy(), clients_per_round=5)
    for splits in ((0.0, 0.25), (0.25, 0.5)):
        fed._forget_run()
        for split in splits:
            toy.fit(fed, data=_named(), validation_split=split)
        assert _HELD_OUT not in fed.privacy_statement(1e-2)


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
    for fraction in (1e-6, 1 - 1e-6):
        assert [len(side) for side in sides([3, 4], fraction)] == [1, 1]


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
    # Shown before the first round, it is said after.
    fed = toy.federated(sampling="shuffled")
    fed.evaluate_clients(toy.clients(2), verbose=0)
    toy.fit(fed)
    assert "client_metrics_shown" in _caveats(fed)


class _Vector(tf.keras.metrics.Metric):
    """Has several numbers."""

    def update_state(self, y, predicted, sample_weight=None):
        pass

    def result(self):
        return tf.zeros([3])


def test_a_metric_of_several_numbers_and_other_validation_are_refused():
    message = "metrics must give one number each, got 'by_class'"
    vector = [_Vector(name="by_class")]
    fed = toy.federated(compile_options={"weighted_metrics": ["accuracy", *vector]})
    with pytest.raises(ValueError, match=message):
        toy.fit(fed)
    assert fed.run is None
    fed = toy.federated()
    both = {"validation_split": 0.1, "validation_data": toy.arrays(3)}
    with pytest.raises(ValueError, match="validation_split must be 0 where v"):
        toy.fit(fed, **both)
    with pytest.raises((TypeError, ValueError), match="validation_data must be"):
        toy.fit(fed, validation_data=[1])
    toy.fit(fed)
    fed.compile("sgd", toy.loss(), metrics=vector)
    private = tfdp_fl.PrivateMetrics(bounds={"by_class": (0, 1)}, noise_multiplier=1.0)
    for given in (None, private):
        with pytest.raises(ValueError, match=message):
            fed.evaluate_clients(toy.clients(), verbose=0, private=given)
    assert fed.spending.evaluations == 0


def test_validate_names_a_problem():
    model, loss, (x, y) = toy.dense(), toy.loss(), toy.arrays(10)
    assert tfdp_fl.validate(model) == []
    assert tfdp_fl.validate(model, clients=toy.clients(), loss=loss) == []
    (problem,) = tfdp_fl.validate(model, clients={"a": (x, y + 7)}, loss=loss)
    assert "label" in problem
    model.trainable = False
    (problem,) = tfdp_fl.validate(model)
    assert "must have trainable variables" in problem
    with pytest.raises(ValueError, match="input shape"):
        tfdp_fl.validate(tf.keras.Sequential([tf.keras.layers.Dense(1)]), strict=True)
