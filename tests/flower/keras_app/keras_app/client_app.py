"""The clients: Keras, with `private_mod` before whatever leaves them.

The run config's `hostile` says who does what in which round: "nan@1=0 gone@2=0"
has client 0 send a NaN in round 1 and raise in round 2; "heavy" has a client claim
many examples, and "bare" has it leave out `private_mod`.
"""

from __future__ import annotations

import keras
import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn import datasets

import tfdp_fl


def _acts(message: Message, context: Context) -> set[str]:
    """Returns what this client does in this round."""
    me = context.node_config["partition-id"]
    server_round = message.content["config"]["server-round"]
    acts = str(context.run_config["hostile"]).split()
    return {a.split("@")[0] for a in acts if a.endswith(f"@{server_round}={me}")}


def _mod(message: Message, context: Context, call_next) -> Message:
    """`private_mod`, which is all that an honest client names here."""
    if "bare" in _acts(message, context):
        return call_next(message, context)
    return tfdp_fl.flower.private_mod(message, context, call_next)


app = ClientApp(mods=[_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains a linear model for an epoch on every n-th digit."""
    ours = _acts(message, context)
    if "gone" in ours:
        raise OSError("The disk is full.")
    node, digits = context.node_config, datasets.load_digits()
    part = slice(node["partition-id"], None, node["num-partitions"])
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.set_weights(message.content["arrays"].to_numpy_ndarrays())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    model.fit(digits.data[part] / 16, digits.target[part], batch_size=16, verbose=0)
    weights = model.get_weights()
    if "nan" in ours:
        weights[0][0, 0] = np.nan
    metrics = {"num-examples": 10**9 if "heavy" in ours else 100}
    content = RecordDict(
        {"arrays": ArrayRecord(weights), "metrics": MetricRecord(metrics)}
    )
    return Message(content, reply_to=message)
