"""Deliberate mistakes of somebody's first hour, and what they are told.

Every message names the argument, shows the value and says what is allowed, and
comes before anything is trained, charged or written.
"""

import re
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset

_X, _Y = toy.arrays(10)


def _private(**changes: Any) -> tfdp_fl.DPFederatedModel:
    plan = {"target_epsilon": 2.0, "target_delta": 1e-3, "num_clients": 40}
    plan |= {"model": toy.dense(), "clients_per_round": 20, "rounds": 3}
    return tfdp_fl.make_private(**{**plan, **changes})


def _compiled(**options: Any) -> tfdp_fl.DPFederatedModel:
    return toy.federated(compile_options=options)


def _fit(clients: Any = None, m: int = 1, **options: Any) -> Any:
    fed, clients = toy.federated(clients_per_round=m), clients or toy.clients()
    return fed.fit(clients, **{"verbose": 0, **options})


def _after_nobody(x: Any, y: Any) -> Any:
    return _fit({"nobody": (x[:0], y[:0]), "ben": (x, y)})


def _streamed(x: Any) -> Any:
    spec = tf.TensorSpec(x.shape[1:]), tf.TensorSpec([], tf.int64)
    return _fit(FederatedDataset.from_client_fn(["ben"], lambda _: (x, _Y), spec))


def _uncallable() -> Any:
    broken = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.Dense(3)])
    broken.layers[0].call = mock.Mock(side_effect=RuntimeError("mind the gap"))
    return toy.federated(model=broken).fit(toy.clients())


def _frame(**options: Any) -> Any:
    frame = pd.DataFrame({"who": ["a"], "age": [3.0], "sick": [1], "city": "x"})
    return FederatedDataset.from_dataframe(frame, **options)


def _not_compiled() -> Any:
    fed = tfdp_fl.DPFederatedModel(toy.dense(), tfdp_fl.NoPrivacy(), 5)
    return fed.fit(toy.clients())


def _table() -> Any:
    return toy.federated().fit(pd.DataFrame({"who": [1]}))


def _on_batch() -> Any:
    return toy.federated().train_on_batch(_X, _Y)


def _unbuilt() -> Any:
    layers = [tf.keras.layers.Dense(1)]
    return _private(model=tf.keras.Sequential(layers, name="empty"))


# Of one argument: its value, and what the message says is allowed beside both.
_OF_ONE: dict[Any, list[tuple[str, Any, str]]] = {
    _private: [
        ("target_epsilon", -1, "positive"),
        ("target_delta", 2, "0 and 1"),
        ("mechanism", "adaptiv", "'adaptive'"),
        ("num_clients", 0, "at least 1"),
        ("clients_per_round", 50, "at most num_clients=40"),
        ("rounds", 0, "at least 1"),
        ("sampling", "uniform", "'poisso"),
        ("accountant", "moments", "'rdp', 'pld'"),
    ],
    _compiled: [
        ("loss", "sparse_categorical", "sparse_categorical_crossentropy"),
        ("metrics", ["acuracy"], "'accuracy'"),
        ("optimizer", "sdg", "'sgd'"),
        ("server_optimizer", "adan", "'sgd'"),
    ],
    _fit: [
        ("batch_size", 0, "at least 1"),
        ("seed", 1.5, "integer"),
        ("runtime", "tff", "RayWorkers"),
        ("verbose", "loud", "0, 1, 2"),
        ("validation_split", 20, "between 0 and 1"),
    ],
    lambda **options: toy.federated().epsilon(**options): [("delta", 3, "0 and 1")],
}
_WRONG_SHAPE = "clients|float32[7] for each example of client 'ben'|float32[8]"
_LABELS = "clients (client 'ben'): labels"
_FIXED_SIZE = {"sampling": "fixed_size"}
_FRAME = {"client": "who", "features": ["city"], "label": "sick"}
_MISTAKES: list[tuple[Any, dict[str, Any], str]] = [
    *(
        (call, {name: value}, f"{name}|{str([value]).strip('[]')}|{allowed}")
        for call, rows in _OF_ONE.items()
        for name, value, allowed in rows
    ),
    (_private, {"model": "model.keras"}, "model|'model.keras'|Model"),
    (_private, {"clients_per_round": 12.5, **_FIXED_SIZE}, "_per_round|12.5|whole"),
    (_private, {"clip_norm": 1.0}, "clip_norm|initial_clip_norm"),
    (_private, {"mechanism": "fixed"}, "clip_norm|missing"),
    (_unbuilt, {}, "model|'empty'|must be built"),
    (_not_compiled, {}, "compile|before fit"),
    (_table, {}, "clients|DataFrame|from_dataframe"),
    (lambda: toy.federated().fit(_X, _Y), {}, "client_ids|whose row each is|=ids"),
    (_uncallable, {}, "model must be callable on clients|RuntimeError|mind the g"),
    (_after_nobody, {"x": _X[:, :7], "y": _Y}, _WRONG_SHAPE),
    (_streamed, {"x": _X[:, :7]}, _WRONG_SHAPE),
    (_after_nobody, {"x": _X, "y": _Y + 7}, "labels|client 'ben'|from 0 to 2"),
    (_after_nobody, {"x": _X, "y": np.eye(4)[_Y]}, f"{_LABELS}|(4,)|have the shape ()"),
    (_after_nobody, {"x": _X, "y": _Y.astype(str)}, f"{_LABELS}|strings|StringLookup"),
    (_fit, {"clients": {"ben": (_X, _Y[:9])}}, "Client 'ben'|10 in x and 9 in y|same"),
    (_frame, {"client": "user", "label": "sick"}, "client|'user'|'who', 'age'"),
    (_frame, _FRAME, "features|'city'|numbers"),
    (_fit, {"epochs": 3}, "epochs|rounds"),
    (_fit, {"clients": toy.clients(12), "m": 20}, "_per_round|got 20.|num_clients=12"),
    (_fit, {"callbacks": ["early"]}, "callbacks|a str|tf.keras.callbacks.Callback"),
    (_fit, {"validation_data": (_X[:, :7], _Y)}, "validation_data|t32[7]|t32[8]"),
    (_fit, {"class_weight": {3: 1.0}}, "class_weight|sample_weight"),
    (_fit, {"resume_from": "gone"}, "resume|gone|no checkpoint"),
    (_fit, {"target_epsilon": 2.0}, "target_epsilon|make_private"),
    (lambda: toy.federated().privacy_statement(), {}, "fit|before privacy"),
    (_on_batch, {}, "train_on_batch|fit(clients, rounds="),
]
_ERRORS = (ValueError, TypeError, AttributeError, FileNotFoundError)


@pytest.mark.parametrize("call, arguments, said", _MISTAKES)
def test_a_mistake_is_explained(tmp_path, monkeypatch, call, arguments, said):
    monkeypatch.chdir(tmp_path)
    with (
        mock.patch.object(engine.CohortEngine, "collect") as trained,
        pytest.raises(_ERRORS) as caught,
    ):
        call(**arguments)
    trained.assert_not_called()
    assert list(tmp_path.iterdir()) == []
    message = str(caught.value)
    for part in said.split("|"):
        assert part in message
    # One sentence or two, without code of others' or ends of computation.
    assert len(message) < 420
    assert not re.search(r"\n|Traceback|\d\.0\b(?!\d)|\d{9}", message), message
