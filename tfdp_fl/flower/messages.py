"""Flower's messages, as the server writes and reads them.

They are known by their shape: a message has `content`, a dictionary of records
of three kinds (`array_records`, `metric_records`, `config_records`). What a
client sent is read as if it were hostile, and Flower's own deserialiser is not
let near it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import importlib
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl.flower import keys, replies

_logger = logging.getLogger(__name__)

DEFAULT_WEIGHT_KEY = "num-examples"
_NUMPY = "numpy.ndarray"


@dataclasses.dataclass(frozen=True)
class Model:
    """The model that a round's clients are sent.

    Attributes:
      record_key: what its record is called.
      record: the record, as the strategy made it.
      names: of its arrays, in their order.
      arrays: those.
    """

    record_key: str
    record: Any
    names: tuple[str, ...]
    arrays: list[np.ndarray]


def the_one_model(messages: Sequence[Any]) -> Model:
    """Returns the model that all messages carry.

    Raises:
      ValueError: if one has none or several, or they differ, or it is not of
        real numbers.
    """
    first = _only_record(messages[0])
    key, record = first
    arrays = [np.array(array.numpy()) for array in record.values()]
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise ValueError(
                "arrays must hold real numbers, got one of dtype "
                f"{array.dtype}: no noise can be added to it."
            )
    for message in messages[1:]:
        if _only_record(message) != first:
            raise ValueError(
                "The wrapped strategy sends its clients different models; the "
                "noise hides an update to one model only."
            )
    return Model(key, record, tuple(record), arrays)


def _only_record(message: Any) -> tuple[str, Any]:
    records = dict(message.content.array_records)
    if len(records) != 1:
        raise ValueError(
            "The wrapped strategy must send one ArrayRecord, the model, got "
            f"{sorted(records)}."
        )
    return next(iter(records.items()))


def with_config(messages: Sequence[Any], config: Mapping[str, Any]) -> list:
    """Returns copies that tell clients more, in their (first) ConfigRecord."""
    made: dict[int, Any] = {}  # Flower gives all messages one content.
    told = []
    for message in messages:
        content = message.content
        if id(content) not in made:
            records = dict(content)
            configs = dict(content.config_records)
            key = next(iter(configs), "config")
            kind = type(configs[key]) if configs else flower("ConfigRecord")
            records[key] = kind({**configs.get(key, {}), **config})
            made[id(content)] = type(content)(records)
        told.append(with_content(message, made[id(content)]))
    return told


def with_content(message: Any, content: Any) -> Any:
    """Returns a copy of a message with another content."""
    other = copy.copy(message)
    other.content = content
    return other


def read(
    message: Any,
    *,
    model: Model,
    wants_norm_bit: bool,
    answers_to: Mapping[int, str],
) -> replies.Reply:
    """Returns what a client replied, or raises.

    Args:
      message: the reply as Flower hands it over; trusted in nothing.
      model: what the client was sent.
      wants_norm_bit: whether it has to say if its norm was within S.
      answers_to: the id of the message that each node was sent.

    Raises:
      ReplyError: if the reply is not what `private_mod` sends.
    """
    with replies.readable():
        metadata = message.metadata
        wanted = answers_to.get(metadata.src_node_id)
        if wanted and metadata.reply_to_message_id != wanted:
            raise replies.ReplyError("it answers another message")
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise replies.ReplyError(
                f"it must hold one ArrayRecord, got {len(records)}"
            )
        record = dict(records[0])
        if record.keys() != set(model.names):
            raise replies.ReplyError(
                f"its arrays must be {list(model.names)!r:.80}, got "
                f"{list(record)!r:.80}"
            )
        arrays = [
            _array(record[name], array.shape)
            for name, array in zip(model.names, model.arrays, strict=True)
        ]
        metrics = {
            name: value
            for each in message.content.metric_records.values()
            for name, value in each.items()
        }
        bit = replies.norm_bit(metrics) if wants_norm_bit else None
        metrics.pop(keys.NORM_BIT, None)
        return replies.Reply(arrays, bit, metrics)


def _array(array: Any, shape: tuple[int, ...]) -> np.ndarray:
    # What it says of its own shape and dtype is not asked.
    if array.stype != _NUMPY:
        raise replies.ReplyError(
            f"an array must be of stype {_NUMPY}, got {array.stype!r:.40}"
        )
    return replies.npy_array(array.data, shape)


def array_record(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns an ArrayRecord of the kind of another one, with these arrays."""
    kind = type(next(iter(like.values())))
    return type(like)({name: kind(np.asarray(array)) for name, array in arrays.items()})


def handed_on(
    valid: Sequence[tuple[Any, Any, replies.Reply]],
    model: Model,
    released: Sequence[np.ndarray],
    weight_key: str,
) -> list[Any]:
    """Returns the replies as the wrapped strategy gets them.

    Each carries the released model, weight one, and of its metrics those that
    all the others have as well: Flower's strategies refuse a round whose
    replies differ in that, and one client must not be able to end the run.
    """
    record = array_record(model.record, dict(zip(model.names, released, strict=True)))
    common = _common([reply.metrics for *_, reply in valid])
    metrics_key = _metrics_key([message for _, message, _ in valid])
    kinds = [
        type(record)
        for _, message, _ in valid
        for record in message.content.metric_records.values()
    ]
    kind = kinds[0] if kinds else flower("MetricRecord")
    handed = []
    for _, message, reply in valid:
        metrics = {name: reply.metrics[name] for name in common}
        metrics[weight_key] = 1
        content = type(message.content)(
            {model.record_key: record, metrics_key: kind(metrics)}
        )
        handed.append(with_content(message, content))
    return handed


def _common(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names that stand for the same kind of number in all."""
    names = set.intersection(*(set(each) for each in metrics))
    common = [
        name
        for name in metrics[0]
        if name in names
        and _kind(metrics[0][name]) is not None
        and len({_kind(each[name]) for each in metrics}) == 1
    ]
    left_out = sorted({name for each in metrics for name in each} - {*common})
    if left_out:
        _logger.warning(
            "Not every client sent these metrics, or not as the others did; "
            "they are left out: %.200s.",
            left_out,
        )
    return common


def _kind(value: Any) -> Any:
    """Returns what two values have to share to be averaged; None: never."""
    if isinstance(value, list):
        return len(value)
    return "number" if isinstance(value, numbers.Real) else None


def _metrics_key(messages: Sequence[Any]) -> str:
    """Returns what most clients call their MetricRecord."""
    called = collections.Counter(
        key for message in messages for key in list(message.content.metric_records)[:1]
    )
    return called.most_common(1)[0][0] if called else "metrics"


def flower(name: str) -> Any:
    """Returns a class of Flower's, which has sent messages by now."""
    return getattr(importlib.import_module("flwr.app"), name)
