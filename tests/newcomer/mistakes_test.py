"""Deliberate mistakes of somebody's first hour, and what they are told.

Every message names the argument, shows the value and says what is allowed, and
comes before anything is trained, charged or written.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset


def _private(**changes: Any) -> tfdp_fl.DPFederatedModel:
    options = {
        "target_epsilon": 2.0,
        "target_delta": 1e-3,
        "num_clients": 40,
        "clients_per_round": 20,
        "rounds": 3,
    }
    model = changes.pop("model", None) or toy.dense()
    return tfdp_fl.make_private(model, **{**options, **changes})


def _compiled(**options: Any) -> tfdp_fl.DPFederatedModel:
    return toy.federated(compile_options=options)


def _fit(clients: Any = None, **options: Any) -> Any:
    fed = toy.federated(clients_per_round=options.pop("m", 1))
    if clients is None:
        clients = toy.clients()
    return fed.fit(clients, **{"verbose": 0, **options})


def _arrays():
    return toy.arrays(10)


def _labels(y: Any) -> Any:
    return _fit({"nobody": (_arrays()[0][:0], y[:0]), "ben": (_arrays()[0], y)})


def _frame(**options: Any) -> Any:
    import pandas as pd

    frame = pd.DataFrame({"who": ["a"], "age": [3.0], "sick": [1], "city": "x"})
    return FederatedDataset.from_dataframe(frame, **options)


MISTAKES = {
    "epsilon": (lambda: _private(target_epsilon=-1), "target_epsilon|-1|positive"),
    "delta": (lambda: _private(target_delta=2), "target_delta|2|0 and 1"),
    "epsilon_and_the_model": (
        lambda: _private(model="model.keras", target_epsilon=-1),
        "model|'model.keras' of type str|Model",
        TypeError,
    ),
    "epsilon_and_the_mechanism": (
        lambda: _private(mechanism="adaptiv", target_epsilon=-1),
        "mechanism|'adaptiv'|'adaptive'",
    ),
    "population": (lambda: _private(num_clients=0), "num_clients|0|at least 1"),
    "cohorts_of_more_than_all": (
        lambda: _private(clients_per_round=50),
        "clients_per_round|50|at most num_clients=40",
    ),
    "half_a_client": (
        lambda: _private(clients_per_round=12.5, sampling="fixed_size"),
        "clients_per_round|12.5|whole number",
    ),
    "no_rounds": (lambda: _private(rounds=0), "rounds|0|at least 1"),
    "sampling": (lambda: _private(sampling="uniform"), "sampling|'uniform'|'poisso"),
    "accountant": (
        lambda: _private(accountant="moments"),
        "accountant|'moments'|'rdp', 'pld'",
    ),
    "an_option_of_another_s": (
        lambda: _private(clip_norm=1.0),
        "clip_norm|initial_clip_norm",
        TypeError,
    ),
    "no_clip": (
        lambda: _private(mechanism="fixed"),
        "clip_norm|missing",
        TypeError,
    ),
    "clip": (
        lambda: _private(mechanism="fixed", clip_norm=-1),
        "clip_norm|-1|positive",
    ),
    "noise": (
        lambda: tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=-1),
        "noise_multiplier|-1|at least 0",
    ),
    "noise_site": (
        lambda: tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=1.0, noise_site="sever"
        ),
        "noise_site|'sever'|'server', 'client'",
    ),
    "unbuilt": (
        lambda: _private(
            model=tf.keras.Sequential([tf.keras.layers.Dense(1)], name="empty")
        ),
        "model|'empty'|must be built",
    ),
    "loss": (
        lambda: _compiled(loss="sparse_categorical"),
        "loss|'sparse_categorical'|sparse_categorical_crossentropy",
    ),
    "no_loss": (lambda: _compiled(loss=None), "loss|None|given"),
    "metric": (
        lambda: _compiled(metrics=["acuracy"]),
        "metrics|'acuracy'|accuracy, acc",
    ),
    "optimizer": (lambda: _compiled(optimizer="sdg"), "optimizer|'sdg'|'sgd'"),
    "server_optimizer": (
        lambda: _compiled(server_optimizer="momentum"),
        "server_optimizer|'momentum'|'sgd'",
    ),
    "not_compiled": (
        lambda: tfdp_fl.DPFederatedModel(toy.dense(), tfdp_fl.NoPrivacy(), 5).fit(
            toy.clients()
        ),
        "compile|before fit",
    ),
    "a_frame_as_it_is": (
        lambda: _fit(__import__("pandas").DataFrame({"who": [1]})),
        "clients|DataFrame|from_dataframe",
        TypeError,
    ),
    "x_and_y": (
        lambda: toy.federated().fit(*_arrays()),
        "client_ids|whose row each is|client_ids=ids",
        TypeError,
    ),
    "width": (
        lambda: _fit(
            {
                "nobody": (_arrays()[0][:0, :7], _arrays()[1][:0]),
                "ben": (_arrays()[0][:, :7], _arrays()[1]),
            }
        ),
        "clients|float32[7] for each example of client 'ben'|float32[8]",
    ),
    "width_of_what_is_read": (
        lambda: _fit(
            FederatedDataset.from_client_fn(
                ["ben"], lambda _: (_arrays()[0][:, :7], _arrays()[1])
            )
        ),
        "clients|float32[7] for each example of client 'ben'|float32[8]",
    ),
    "label": (lambda: _labels(_arrays()[1] + 7), "labels|client 'ben'|from 0 to 2"),
    "label_shape": (
        lambda: _labels(np.eye(4)[_arrays()[1]]),
        "clients (client 'ben'): labels|(4,)|have the shape ()",
    ),
    "label_text": (
        lambda: _labels(_arrays()[1].astype(str)),
        "clients (client 'ben'): labels|strings|StringLookup",
    ),
    "one_client_is_longer": (
        lambda: _fit({"ben": (_arrays()[0], _arrays()[1][:9])}),
        "Client 'ben'|10 in x and 9 in y|same number of examples",
    ),
    "a_column_that_is_not_there": (
        lambda: _frame(client="user", label="sick"),
        "client|'user'|'who', 'age'",
    ),
    "a_column_of_words": (
        lambda: _frame(client="who", features=["city"], label="sick"),
        "features|'city'|numbers",
    ),
    "epochs": (lambda: _fit(epochs=3), "epochs|rounds", TypeError),
    "fewer_clients_than_a_cohort": (
        lambda: _fit(toy.clients(12), m=20),
        "clients_per_round|got 20.|num_clients=12",
    ),
    "batch_size": (lambda: _fit(batch_size=0), "batch_size|0|at least 1"),
    "seed": (lambda: _fit(seed=1.5), "seed|1.5|integer", TypeError),
    "runtime": (lambda: _fit(runtime="tff"), "runtime|'tff'|RayWorkers", TypeError),
    "verbose": (lambda: _fit(verbose="loud"), "verbose|'loud'|0, 1, 2"),
    "callbacks": (
        lambda: _fit(callbacks=["early"]),
        "callbacks|a str|tf.keras.callbacks.Callback",
        TypeError,
    ),
    "validation_data": (
        lambda: _fit(validation_data=(_arrays()[0][:, :7], _arrays()[1])),
        "validation_data|float32[7]|float32[8]",
    ),
    "validation_split": (
        lambda: _fit(validation_split=20),
        "validation_split|20|between 0 and 1",
    ),
    "class_weight": (lambda: _fit(class_weight={3: 1.0}), "class_weight|3|from 0 to 2"),
    "resume_from": (
        lambda: _fit(resume_from="gone"),
        "resume|gone|no checkpoint",
        FileNotFoundError,
    ),
    "target_in_fit": (
        lambda: _fit(target_epsilon=2.0),
        "target_epsilon|make_private",
        TypeError,
    ),
    "delta_of_epsilon": (lambda: toy.federated().epsilon(delta=3), "delta|3|0 and 1"),
    "nothing_was_trained": (
        lambda: toy.federated().privacy_statement(),
        "fit|before privacy",
    ),
    "train_on_batch": (
        lambda: toy.federated().train_on_batch(*_arrays()),
        "train_on_batch|fit(clients, rounds=",
        AttributeError,
    ),
}


class MistakesTest(parameterized.TestCase):
    @parameterized.named_parameters((name, name) for name in MISTAKES)
    def test_message(self, name):
        make, said, *error = MISTAKES[name]
        with (
            tempfile.TemporaryDirectory() as directory,
            mock.patch.object(engine.CohortEngine, "collect") as trained,
        ):
            before = os.getcwd()
            os.chdir(directory)
            try:
                with self.assertRaises(*error or [ValueError]) as caught:
                    make()
            finally:
                os.chdir(before)
            written = list(pathlib.Path(directory).iterdir())
        trained.assert_not_called()
        self.assertEmpty(written)
        message = str(caught.exception)
        for part in said.split("|"):
            self.assertIn(part, message)
        # One sentence or two, without code of others' or ends of computation.
        self.assertLess(len(message), 420)
        self.assertNotIn("\n", message)
        self.assertNotIn("Traceback", message)
        self.assertIsNone(re.search(r"\d\.0\b(?!\d)", message), message)
        self.assertIsNone(re.search(r"\d{9}", message), message)

    def test_there_are_many(self):
        self.assertGreaterEqual(len(MISTAKES), 30)
