"""Flower's messages, and a strategy, clients and a grid without a network.

The messages are the real ones where they are; flwr 1.12, which the TFF stack has,
knows none: there, classes of the same shape stand in for them.
"""

import copy
import importlib.util
import io
import random
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import tfdp_fl
from tfdp_fl import flower
from tfdp_fl.flower import client

try:
    INSTALLED = importlib.util.find_spec("flwr.serverapp") is not None
except ModuleNotFoundError:
    INSTALLED = False
NEEDS_FLOWER = pytest.mark.skipif(
    not INSTALLED,
    reason="flwr with the message API is not installed (tests only; it needs an older "
    "protobuf than requirements-current.txt pins: see CONTRIBUTING.md)",
)

if INSTALLED:
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Error,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.supercore.task_identity import TaskIdentity

    # Messages are made in a task of Flower's; here the test is one.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
else:

    class Array:
        def __init__(self, ndarray=None, *, dtype="", shape=(), stype="", data=b""):
            if ndarray is not None:
                buffer = io.BytesIO()
                np.save(buffer, ndarray, allow_pickle=False)
                dtype, shape = str(ndarray.dtype), ndarray.shape
                stype, data = "numpy.ndarray", buffer.getvalue()
            self.dtype, self.shape = dtype, shape
            self.stype, self.data = stype, data

        def numpy(self):
            return np.load(io.BytesIO(self.data), allow_pickle=False)

    class ArrayRecord(dict):
        def __init__(self, arrays=()):
            if isinstance(arrays, list):
                arrays = {str(i): Array(each) for i, each in enumerate(arrays)}
            super().__init__(arrays)

    class ConfigRecord(dict):
        pass

    class MetricRecord(dict):
        pass

    class RecordDict(dict):
        def _of(self, kind):
            return {k: v for k, v in self.items() if isinstance(v, kind)}

        array_records = property(lambda self: self._of(ArrayRecord))
        metric_records = property(lambda self: self._of(MetricRecord))
        config_records = property(lambda self: self._of(ConfigRecord))

    class Error(types.SimpleNamespace):
        def __init__(self, code, reason=None):
            super().__init__(code=code, reason=reason)

    class Message:
        def __init__(self, content, node=0, message_type="", *, reply_to=None, **other):
            there = reply_to and reply_to.metadata
            self.metadata = types.SimpleNamespace(
                message_id="",
                src_node_id=there.dst_node_id if there else 1,
                dst_node_id=there.src_node_id if there else node,
                reply_to_message_id=there.message_id if there else "",
                message_type=there.message_type if there else message_type,
                **{"ttl": None, "group_id": None, **other},
            )
            self.error = content if isinstance(content, Error) else None
            self.content = None if self.error else content

        def has_error(self):
            return self.error is not None

    # What stands in for Flower's records, where the package makes some.
    client.flower_class = lambda name: globals()[name]


FIXED = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0)
NOISY = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
SHARES = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0, noise_site="client")


class Strategy:
    """Averages with the weights that it is given, as Flower's `FedAvg`."""

    weighted_by_key = "num-examples"

    def __init__(self, sampled: int):
        self.sampled = sampled
        self.handed: list[list[Any]] = []

    def configure_train(self, server_round, arrays, config, grid):
        config["server-round"] = server_round
        nodes = random.sample(list(grid.get_node_ids()), self.sampled)
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, node, "train") for node in nodes]

    def aggregate_train(self, server_round, replies):
        self.handed.append(list(replies))
        contents = [m.content for m in self.handed[-1] if not m.has_error()]
        weights = [c["metrics"][self.weighted_by_key] for c in contents]
        mean = {
            name: np.average(
                [c["arrays"][name].numpy() for c in contents], axis=0, weights=weights
            )
            for name in contents[0]["arrays"]
        }
        return _record(mean), MetricRecord({"count": len(contents)})

    def aggregate_evaluate(self, server_round, replies):
        raise ValueError("inconsistent")

    def start(self, grid, initial_arrays, num_rounds=3):
        arrays = initial_arrays
        for server_round in range(1, num_rounds + 1):
            new, _ = a_round(self, grid, arrays, server_round)
            arrays = arrays if new is None else new
        return arrays


def private(mechanism=FIXED, m=3, n=None, strategy=None, **options: Any) -> Any:
    """A strategy, made private."""
    sizes = {"num_clients": m if n is None else n, "clients_per_round": m}
    inner = Strategy(m) if strategy is None else strategy
    return flower.PrivateStrategy(inner, mechanism, **sizes, **options)


Train = Callable[[list[np.ndarray], dict], tuple[list[np.ndarray], dict]]


class Grid:
    """Nodes that train in this process, each with `private_mod` or another.

    `trains` says by node id what a client makes of arrays and config: new arrays
    and metrics. None: it is silent. An exception: it sends an error. `change` may do
    something to the replies on the way; `sent` are the messages of the last round.
    """

    def __init__(
        self,
        trains: dict[int, Train | Exception | None],
        change: Callable[[list[Any]], list[Any]] | None = None,
        mod: Callable[..., Any] | None = flower.private_mod,
    ):
        self.trains, self.change = trains, change
        self.mod = mod or (lambda message, context, call_next: call_next(message, None))
        self.sent: list[Any] = []

    def get_node_ids(self):
        return list(self.trains)

    def send_and_receive(self, messages, *, timeout=None):
        self.sent, replies = list(messages), []
        own_id = "_message_id" if INSTALLED else "message_id"
        for number, message in enumerate(self.sent):
            message.metadata.__dict__[own_id] = f"{id(message)}-{number}"
            train = self.trains[message.metadata.dst_node_id]
            if isinstance(train, Exception):
                replies.append(Message(Error(0, str(train)), reply_to=message))
            elif train is not None:
                arrived = copy.deepcopy(message)  # As if it went over a wire.
                replies.append(self.mod(arrived, None, app(train)))
        return self.change(replies) if self.change else replies


def app(train: Train) -> Callable[[Any, Any], Any]:
    """A `ClientApp` that trains."""

    def run(message, context):
        record = message.content["arrays"]
        new, metrics = train(arrays(record), dict(message.content["config"]))
        named = dict(zip(record, new, strict=True))
        content = {"arrays": _record(named), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return run


def adds(update: Sequence[Any], num_examples: int = 7, **metrics: float) -> Train:
    """A client that adds the same update to whatever it is sent."""

    def train(arrays, config):
        pairs = zip(arrays, update, strict=True)
        new = [np.asarray(a + np.asarray(u), a.dtype) for a, u in pairs]
        return new, {"num-examples": num_examples, **metrics}

    return train


def _record(named: Mapping[str, Any]) -> Any:
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in named.items()})


def claim(message: Any, **metadata: Any) -> Any:
    """Has a message say other things of itself."""
    both = {**metadata, **{f"_{name}": value for name, value in metadata.items()}}
    message.metadata.__dict__.update(both)
    return message


def model(*arrays: Any) -> Any:
    """An ArrayRecord."""
    return ArrayRecord([np.asarray(each) for each in arrays])


def arrays(record: Any) -> list[np.ndarray]:
    """What is in it."""
    return [each.numpy() for each in record.values()]


def configured(strategy: Any, grid: Any, record: Any, server_round: int = 1) -> Any:
    """Returns the messages of a round."""
    return strategy.configure_train(server_round, record, ConfigRecord(), grid)


def a_round(
    strategy: Any, grid: Any, record: Any, server_round: int = 1
) -> tuple[Any, Any]:
    """Runs one round; returns what the wrapper returns."""
    messages = configured(strategy, grid, record, server_round)
    return strategy.aggregate_train(server_round, grid.send_and_receive(messages))
