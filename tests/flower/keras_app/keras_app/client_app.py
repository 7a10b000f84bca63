"""The clients: Keras, with `private_mod` before whatever leaves them.

The run config's `hostile` says who does what in which round: "nan@2=0 gone@3=1"
has client 0 send a NaN in round 2, and client 1 raise in round 3; "mute" has a
client's process end without a word, "heavy" has it claim many examples, and
"bare" has it leave out `private_mod`.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import tfdp_fl
from keras_app import task


def _acts(message: Message, context: Context) -> set[str]:
    """Returns what this client does in this round."""
    me = context.node_config["partition-id"]
    server_round = message.content["config"]["server-round"]
    acts = [
        act.replace("@", "=").split("=")
        for act in str(context.run_config["hostile"]).split()
    ]
    return {
        name for name, when, who in acts if (int(when), int(who)) == (server_round, me)
    }


def _mod(message: Message, context: Context, call_next) -> Message:
    """`private_mod`, which is all that an honest client names here."""
    if "bare" in _acts(message, context):
        return call_next(message, context)
    return tfdp_fl.flower.private_mod(message, context, call_next)


app = ClientApp(mods=[_mod])


def _model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.Input((64,)),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains for two epochs on every n-th digit."""
    me, ours = context.node_config["partition-id"], _acts(message, context)
    if "mute" in ours:
        os._exit(1)
    if "gone" in ours:
        raise OSError("The disk is full.")
    x, y = task.digits()
    train_set = np.arange(len(x)) % 5 != 0
    x, y = (
        each[train_set][me :: context.node_config["num-partitions"]] for each in (x, y)
    )
    model = _model()
    model.set_weights(message.content["arrays"].to_numpy_ndarrays())
    model.compile(
        tf.keras.optimizers.SGD(0.1),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    weights = model.get_weights()
    if "nan" in ours:
        weights[0][0, 0] = np.nan
    metrics = {
        "num-examples": 10**9 if "heavy" in ours else len(x),
        "loss": float(history.history["loss"][-1]),
    }
    content = RecordDict(
        {"arrays": ArrayRecord(weights), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)
