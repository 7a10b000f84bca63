"""Calls of the Keras front, callbacks, experiments, and TFF's factories."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tests.public_api import calling, names
from tfdp_fl.keras import privacy_target
from tfdp_fl.mechanisms import tf_privacy


def _model() -> calling.Call:
    """Returns a call of `fit`, of a model that is traced once."""
    fed = toy.federated(clients_per_round=3, num_replicas=1)
    fed.model.stop_training = False
    return calling.usual(
        fed.fit,
        clients=toy.clients(6),
        batch_size=10,
        verbose=0,
        paths=("resume_from",),
        counts=("rounds", "local_epochs"),
    )


def _keras() -> calling.Calls:
    yield (
        "keras.DPFederatedModel",
        lambda: calling.usual(
            tfdp_fl.DPFederatedModel,
            model=toy.dense(),
            mechanism=calling.fixed(),
            clients_per_round=3,
        ),
    )
    yield "keras.DPFederatedModel and fit", _model
    yield (
        "keras.DPFederatedModel and compile",
        lambda: calling.usual(
            toy.federated().compile, loss="sparse_categorical_crossentropy"
        ),
    )

    def asked(name, **given):
        fed = toy.federated(clients_per_round=3)
        fed.fit(toy.clients(6), batch_size=10, verbose=0)
        return calling.usual(getattr(fed, name), **given)

    for name in (
        "epsilon",
        "central_epsilon",
        "epsilon_after_round",
        "affordable_rounds",
        "privacy_statement",
    ):
        given = {"delta": 1e-3}
        if name == "affordable_rounds":
            given |= {"epsilon": 50.0, "rounds": 5}
        if name == "epsilon_after_round":
            given["round_index"] = 1
        yield (
            f"keras.DPFederatedModel and {name}",
            lambda n=name, g=given: asked(n, **g),
        )
    yield (
        "keras.DPFederatedModel and evaluate_clients",
        lambda: asked("evaluate_clients", clients=toy.clients(2), verbose=0),
    )
    yield (
        "keras.PrivateMetrics",
        lambda: calling.usual(
            tfdp_fl.PrivateMetrics,
            bounds={"loss": (0.0, 1.0)},
            noise_multiplier=1.0,
            clients_per_round=3.0,
        ),
    )
    score = tfdp_fl.PublicScore(*toy.arrays(4), "loss")
    yield (
        "search.PrivateSearch",
        lambda: calling.usual(
            tfdp_fl.PrivateSearch,
            build=len,
            candidates=[{}],
            expected_trials=2,
            target_epsilon=1.0,
            target_delta=1e-3,
            score=score,
        ),
    )
    yield (
        "search.PrivateScore",
        lambda: calling.usual(
            tfdp_fl.PrivateScore, metric="loss", noise_multiplier=1.0
        ),
    )
    yield (
        "keras.make_private",
        lambda: calling.usual(
            tfdp_fl.make_private,
            model=toy.dense(),
            target_epsilon=2.0,
            target_delta=1e-3,
            num_clients=100,
            clients_per_round=10,
            rounds=5,
            mechanism="fixed",
            clip_norm=1.0,
        ),
    )
    yield (
        "keras.validate",
        lambda: calling.usual(
            tfdp_fl.validate,
            model=toy.dense(),
            clients=toy.clients(2),
            loss=toy.loss(),
        ),
    )


def _callbacks() -> calling.Calls:
    c = tfdp_fl.callbacks
    yield (
        "callbacks.PrivacyBudget",
        lambda: calling.usual(c.PrivacyBudget, epsilon=1.0, delta=1e-3),
    )
    yield (
        "callbacks.KeepTarget",
        lambda: calling.usual(
            c.KeepTarget,
            target=privacy_target.PrivacyTarget(
                epsilon=1.0,
                delta=1e-3,
                accountant="rdp",
                num_clients=10,
                rounds=3,
            ),
        ),
    )
    for kind, name in (
        (c.Ledger, "path"),
        (c.Report, "path"),
        (c.RoundCheckpoint, "directory"),
    ):
        yield (
            f"callbacks.{kind.__name__}",
            lambda k=kind, n=name: calling.usual(k, **{n: "new"}, paths=(n,)),
        )
    yield "callbacks.checked", lambda: calling.usual(c.checked, callbacks=[])
    yield (
        "callbacks.ledger_of_resumed",
        lambda: calling.usual(
            c.ledger_of_resumed,
            directory="new",
            callbacks=[],
            paths=("directory",),
        ),
    )


def _run_directory() -> pathlib.Path:
    """Writes what a run has that did not get far; returns where."""
    here = pathlib.Path("run")
    here.mkdir(exist_ok=True)
    values = tfdp_fl.experiments.Settings().to_dict()
    (here / "config.json").write_text(json.dumps(values))
    (here / "result.json").write_text("{}")
    return here


def _others() -> calling.Calls:
    yield (
        "features.OrientedGradients",
        lambda: calling.usual(tfdp_fl.features.OrientedGradients, name="gradients"),
    )
    yield (
        "losses.BalancedSoftmaxCrossentropy",
        lambda: calling.usual(tfdp_fl.losses.BalancedSoftmaxCrossentropy),
    )
    yield (
        "engine.checked_class_weight",
        lambda: calling.usual(
            tfdp_fl.engine.checked_class_weight, class_weight={0: 1.0}
        ),
    )
    experiments = tfdp_fl.experiments
    yield (
        "experiments.Settings.from_dict",
        lambda: calling.usual(
            experiments.Settings.from_dict,
            values=experiments.Settings().to_dict(),
        ),
    )
    yield (
        "experiments.Settings.read",
        lambda: calling.usual(
            experiments.Settings.read,
            path=_run_directory() / "config.json",
            paths=("path",),
        ),
    )
    yield (
        "experiments.Run.read",
        lambda: calling.usual(
            experiments.Run.read, path=_run_directory(), paths=("path",)
        ),
    )


def _trained(mechanism: Any) -> tuple[Any, Any]:
    """Returns a process of TFF's aggregation, and its state after a round."""
    import tensorflow_federated as tff

    factory = tfdp_fl.aggregators.from_mechanism(mechanism, 2)
    process = factory.create(tff.TensorType(np.float32, [3]))
    state = process.initialize()
    ones = [np.ones(3, np.float32)] * 2
    return process, process.next(state, ones).state


def _tff() -> calling.Calls:
    import tensorflow_federated as tff

    a, learning = tfdp_fl.aggregators, tfdp_fl.learning
    mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
    budget = {"epsilon": 5.0, "delta": 1e-3, "rounds": 4}
    budget["clients_per_round"] = 3
    correlated = {"rounds": 4, "min_separation": 2, "clip_norm": 1.0}
    nbafl = {"constant": 3.0, "weight_clip": 1.0, "num_clients": 9, "rounds": 2}
    gaussian = {
        "query": tf_privacy.GaussianSumQuery(1.0, 1.0),
        "dp_event": dp_accounting.GaussianDpEvent(1.0),
    }
    noise = {"noise_multiplier": 1.0, "clients_per_round": 3}
    for name, given in (
        ("AdaptiveClippingFactory", {**noise, "count_noise_stddev": 3.0}),
        ("AdaptiveLocalDPFactory", budget),
        ("CorrelatedNoiseFactory", {**noise, **correlated}),
        ("FixedClippingFactory", {**noise, "clip_norm": 1.0}),
        ("LocalDPFactory", {**budget, "clip_norm": 1.0}),
        ("MedianClippingFactory", noise),
        ("NoPrivacyFactory", {"clients_per_round": 3}),
        ("QueryFactory", {**gaussian, "clients_per_round": 3}),
        (
            "NbAFLFactory",
            {"epsilon": 5.0, "clients_per_round": 3, **nbafl},
        ),
        ("MechanismFactory", {"mechanism": mechanism, "clients_per_round": 3}),
        ("from_mechanism", {"mechanism": mechanism, "clients_per_round": 3}),
        ("factory_of", {"mechanism_class": tfdp_fl.FixedClipping}),
    ):
        yield (
            f"aggregators.{name}",
            lambda n=name, g=given: calling.usual(getattr(a, n), **g),
        )
    yield (
        "aggregators.accountable_state",
        lambda: calling.usual(a.accountable_state, state=_trained(mechanism)[1]),
    )
    spec = (
        tf.TensorSpec([None, 8], tf.float32),
        tf.TensorSpec([None], tf.int32),
    )
    yield (
        "learning.build_dp_fed_avg",
        lambda: calling.usual(
            learning.build_dp_fed_avg,
            model_fn=tff.learning.models.functional_model_from_keras(
                toy.dense, toy.loss(), spec
            ),
            mechanism=mechanism,
            clients_per_round=3,
            client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1),
        ),
    )
    declared = {
        "sampling": "poisson",
        "num_clients": 10,
        "clients_per_round": 2,
    }
    for function, given in (
        (learning.epsilon, {"delta": 1e-3, **declared}),
        (learning.privacy_charges, declared),
        (learning.privacy_statement, {"delta": 1e-3, **declared}),
    ):
        yield (
            f"learning.{function.__name__}",
            lambda f=function, g=given: calling.usual(
                f,
                state=_trained(mechanism)[1],
                mechanism=mechanism,
                **g,
            ),
        )


def calls() -> calling.Calls:
    """Yields them."""
    yield from _keras()
    yield from _callbacks()
    yield from _others()
    if names.TFF:
        yield from _tff()
