"""The client's side as a mod of a `ClientApp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfdp_fl.flower import keys, messages, release

# How Flower packs what a client of the older API returns.
_LEGACY_MODEL = "fitres.parameters"
_LEGACY_METRICS = "fitres.metrics"
_LEGACY_WEIGHT = "num_examples"


def private_mod(
    message: Any, context: Any, call_next: Callable[[Any, Any], Any]
) -> Any:
    """Clips, and on request noises, the update that a `ClientApp` returns.

    To be named among the mods of a `ClientApp`, or of its train function, after
    `secaggplus_mod` if that is there, and before whatever is to see the update
    unclipped:

        app = ClientApp(mods=[tfdp_fl.flower.private_mod])

    What the server asks for stands in the ConfigRecord of a train message,
    under the names that `DPFedAvgNumPyClient` knows. The reply's one
    ArrayRecord is replaced by w + clip(Delta) (+ noise), in the dtypes
    received; its weight (the metric that the strategy averages by,
    `num-examples`) by 1, so that the true number stays where it is; and if the
    server asks, the metric `dpfedavg_norm_bit` says whether ||Delta|| <= S (1)
    or not (0). Clients that were made by a `client_fn` are treated alike.

    Everything else in the reply, its other metrics, and whatever is no train
    message (evaluation, queries) leaves the client as it is, without noise.

    Args:
      message: what the server sent.
      context: handed on.
      call_next: the next mod, or the app.

    Returns:
      The reply. An error of the app's is handed on.

    Raises:
      KeyError: if the server sent no clip norm. Nothing was trained then. (To
        the server this and what follows is a client that failed.)
      TypeError, ValueError: if what the server asks for is not what it should
        be (nothing was trained then), or the reply is none: arrays of other
        names or shapes, or more than one ArrayRecord.
    """
    if message.metadata.message_type.partition(".")[0] != "train":
        return call_next(message, context)
    config = _config(message.content)
    asked = release.instruction(config)
    weight_key = str(config.get(keys.WEIGHT_KEY, messages.DEFAULT_WEIGHT_KEY))
    # The app may train in place.
    _, record = _only_record(message.content, "The server")
    received = {name: np.array(a.numpy()) for name, a in record.items()}
    reply = call_next(message, context)
    if reply.has_error():
        return reply

    key, record = _only_record(reply.content, "The ClientApp")
    if set(record) != set(received):
        raise ValueError(
            "The arrays that a ClientApp returns must be those it received, "
            f"{list(received)}, got {list(record)}."
        )
    done = release.released(
        list(received.values()),
        [record[name].numpy() for name in received],
        asked,
    )
    records = dict(reply.content)  # The app may have sent back what it got.
    records[key] = messages.array_record(
        record, dict(zip(received, done.arrays, strict=True))
    )
    bit = {keys.NORM_BIT: int(done.norm_bit)} if asked.wants_norm_bit else {}
    if key == _LEGACY_MODEL:
        weight_key = _LEGACY_WEIGHT
        old = records[_LEGACY_METRICS]
        records[_LEGACY_METRICS] = type(old)(
            {**old, **{name: bool(value) for name, value in bit.items()}}
        )
        bit = {}
    _set_metrics(records, reply.content, weight_key, bit)
    reply.content = type(reply.content)(records)
    return reply


def _config(content: Any) -> Mapping[str, Any]:
    """Returns the config that tells the clip norm, or all that there is."""
    merged: dict[str, Any] = {}
    for record in content.config_records.values():
        if keys.CLIP_NORM in record:
            return dict(record)
        merged.update(record)
    return merged


def _only_record(content: Any, who: str) -> tuple[str, Any]:
    records = dict(content.array_records)
    if len(records) != 1:
        raise ValueError(
            f"{who} must send one ArrayRecord, the model, got "
            f"{sorted(records)}: what leaves in another is not clipped."
        )
    return next(iter(records.items()))


def _set_metrics(
    records: dict[str, Any],
    content: Any,
    weight_key: str,
    bit: Mapping[str, int],
) -> None:
    """Sets the weight wherever it stands, and the bit beside it."""
    there = dict(content.metric_records)
    if not there:
        kind = messages.flower("MetricRecord")
        records["metrics"] = kind({weight_key: release.NUM_EXAMPLES, **bit})
        return
    with_weight = [key for key, each in there.items() if weight_key in each]
    for key in with_weight or [next(iter(there))]:
        records[key] = type(there[key])(
            {**there[key], weight_key: release.NUM_EXAMPLES, **bit}
        )
