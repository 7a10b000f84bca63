"""The client's side: clips each update, and adds noise if the server asks for it.

There is one for each of Flower's APIs: a wrapper for a `NumPyClient`, and a mod for a
`ClientApp`. Both do the same, and neither keeps any state between rounds. A node that
is an organisation is a `tfdp_fl.Silo` as a `ClientApp` (`silo_app`).
"""

from __future__ import annotations

import collections
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.flower import updates
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.client import Client, NumPyClient
    from flwr.clientapp import ClientApp

# Flower's scalars by name, as they came from the server.
Config: TypeAlias = Mapping[str, Any]
# A `tfdp_fl.Silo` and `PrivateMetrics`, whose packages this one must not import.
_Silo: TypeAlias = Any
_Metrics: TypeAlias = Any

_Result = TypeVar("_Result")

_logger = logging.getLogger(__name__)

# The protocol between server and client. Config of a train message:
CLIP_NORM = "dpfedavg_clip_norm"  # S (float)
NOISE_STDDEV = "dpfedavg_noise_stddev"  # Stddev of the client's noise (float), if any.
ADAPTIVE_CLIP_ENABLED = "dpfedavg_adaptive_clip_enabled"  # Whether to send the bit.
WEIGHT_KEY = "dpfedavg_weight_key"  # Message API: the metric to average by.
# Metrics of the reply:
NORM_BIT = "dpfedavg_norm_bit"  # Whether the update's norm was at most S.
APPLIED_CLIP_NORM = "dpfedavg_applied_clip_norm"  # S, to which it was clipped.
APPLIED_NOISE_STDDEV = "dpfedavg_applied_noise_stddev"  # 0.0 without noise.

DEFAULT_WEIGHT_KEY = "num-examples"

# Every client's weight in every later average. With SecAgg+, the client itself
# multiplies its model by this number, under its mask, where no server can correct it.
# The true number of examples would scale the client's share of the average beyond the
# clip.
_NUM_EXAMPLES = 1

# Flower's names for the results of a client of the older API.
_LEGACY_MODEL = "fitres.parameters"
_LEGACY_METRICS = "fitres.metrics"
_LEGACY_WEIGHT = "num_examples"


class Instruction(NamedTuple):
    """The server's instructions for a client.

    Attributes:
      clip_norm: The clip norm, S.
      noise_stddev: The stddev of the noise that the client adds to each coordinate, or
        0.
      wants_norm_bit: Whether it must report if its update's norm was within S.
    """

    clip_norm: float
    noise_stddev: float = 0.0
    wants_norm_bit: bool = False

    @property
    def config(self) -> Json:
        """The config entries that are sent to a client, under Flower's names."""
        config: Json = {CLIP_NORM: self.clip_norm}
        if self.noise_stddev:
            config[NOISE_STDDEV] = self.noise_stddev
        if self.wants_norm_bit:
            config[ADAPTIVE_CLIP_ENABLED] = True
        return config

    @classmethod
    def from_config(cls, config: Config) -> Instruction:
        """Reads the config that came with the model, or raises an error."""
        if CLIP_NORM not in config:
            raise KeyError(
                f"The server sent no clip norm: config has no {CLIP_NORM}, only "
                f"{sorted(config)}. Is its strategy wrapped?"
            )
        wants_bit = config.get(ADAPTIVE_CLIP_ENABLED, False)
        return cls(
            _validate.positive(dpfedavg_clip_norm=config[CLIP_NORM]),
            _validate.non_negative(dpfedavg_noise_stddev=config.get(NOISE_STDDEV, 0.0)),
            _validate.instance_of(bool, dpfedavg_adaptive_clip_enabled=wants_bit),
        )


def make_upload(
    received: Sequence[np.ndarray],
    returned: Sequence[np.ndarray],
    instruction: Instruction,
) -> tuple[list[np.ndarray], Json, bool]:
    """Returns the client's upload, w + clip(Delta) (+ noise), and what was applied.

    Without noise, the upload is within S of the received model, even after rounding. An
    update with a NaN or an infinity is replaced by zero.

    Source: McMahan et al. (2018), Algorithm 1, UserUpdate; Andrew et al.
    (2021), Algorithm 1, for the bit.

    Args:
      received: w, the model that the server sent.
      returned: w + Delta, the client's trained model.
      instruction: The server's instructions.

    Returns:
      The arrays, in the received dtypes, or in float64 if those are too coarse for the
      noise; metrics with the clip, the noise and, if requested, the norm bit; and
      whether the update was not finite.

    Raises:
      ValueError: The numbers or shapes of the arrays differ, or the noise is too small
        relative to the model for any dtype.
    """
    update = updates.clip(updates.difference(returned, received), instruction.clip_norm)
    if update.discarded:
        _logger.warning("The update has NaN or infinity: zero is sent in its place.")
    if instruction.noise_stddev > 0:
        noised = updates.add_noise(update.arrays, instruction.noise_stddev)
        arrays = updates.apply_with_noise(
            received, noised, instruction.noise_stddev, instruction.clip_norm
        )
    else:
        arrays = updates.apply_within(received, update.arrays, instruction.clip_norm)
    metrics: Json = {
        APPLIED_CLIP_NORM: instruction.clip_norm,
        APPLIED_NOISE_STDDEV: instruction.noise_stddev,
    }
    if instruction.wants_norm_bit:
        metrics[NORM_BIT] = update.was_within
    return arrays, metrics, update.discarded


class DPFedAvgNumPyClient:
    """Clips the update that a client returns, and adds noise on request.

    It wraps any object with `fit(parameters, config) -> (parameters, num_examples,
    metrics)` whose parameters are lists of numpy arrays, such as Flower's
    `NumPyClient`. In `config`, the server sends

      * `dpfedavg_clip_norm`: S (required);
      * `dpfedavg_noise_stddev`: the stddev of the noise that this client adds
        to each coordinate of its clipped update, if it should add any;
      * `dpfedavg_adaptive_clip_enabled`: True requests the metric
        `dpfedavg_norm_bit`, which is true if and only if ||Delta|| <= S.

    In its metrics, `dpfedavg_applied_clip_norm` and `dpfedavg_applied_noise_stddev`
    tell the server what was applied. The number of examples sent with the update is
    always 1: all clients have the same weight, and the true number never leaves the
    client.

    Everything else (`get_parameters`, `get_properties`, `evaluate`, ...) is forwarded
    to the wrapped client. Its results, and the client's other metrics, carry no noise.

    Source: Flower's "Differential Privacy Wrappers", client-side logic;
    McMahan et al. (2018), Algorithm 1, UserUpdate; Andrew et al. (2021),
    Algorithm 1, for the bit.

    Attributes:
      client: The wrapped client.
      discarded_updates: The number of updates that were not finite and became zero.
    """

    def __init__(self, client: NumPyClient):
        """Wraps a client.

        Raises:
          TypeError: The client has no method `fit`.
        """
        if not callable(getattr(client, "fit", None)):
            raise TypeError(
                f"client must have a method fit(parameters, config), got {client!r}."
            )
        self.client = client
        self.discarded_updates = 0

    def fit(
        self, parameters: Sequence[np.ndarray], config: Config
    ) -> tuple[list[np.ndarray], int, Json]:
        """Lets the wrapped client train; returns w + clip(Delta) (+ noise).

        Args:
          parameters: w, the model that the server sent.
          config: The server's config, passed on unchanged to the wrapped client.

        Returns:
          The parameters in the received dtypes (without noise, they are within S of
          those received, even after rounding); 1 as the number of examples, whatever
          the wrapped client returns; and its metrics together with those above.

        Raises:
          KeyError: The server sent no clip norm. Nothing was trained then.
          RuntimeError: The wrapped client raised an error; it is logged.
          TypeError, ValueError: A value in `config` is invalid (nothing was trained
            then), or the wrapped client returned arrays of other shapes.
        """
        instruction = Instruction.from_config(config)
        # The wrapped client may train in place.
        received = [np.array(array) for array in parameters]
        returned, _, metrics = call_client_code(self.client.fit, parameters, config)
        arrays, applied, discarded = make_upload(received, returned, instruction)
        self.discarded_updates += discarded
        return arrays, _NUM_EXAMPLES, {**metrics, **applied}

    def get_parameters(self, config: Config) -> list[np.ndarray]:
        """Calls the wrapped client's `get_parameters`."""
        return self.client.get_parameters(config)

    def get_properties(self, config: Config) -> Json:
        """Calls the wrapped client's `get_properties`."""
        return self.client.get_properties(config)

    def evaluate(
        self, parameters: Sequence[np.ndarray], config: Config
    ) -> tuple[float, int, Json]:
        """Calls the wrapped client's `evaluate`."""
        return self.client.evaluate(parameters, config)

    def to_client(self) -> Client:
        """Returns this wrapper as a Flower `Client`.

        It calls the wrapped client's own method on this wrapper, so the result trains
        through the `fit` above.
        """
        return type(self.client).to_client(self)

    def __getattr__(self, name: str) -> Any:
        if name == "client" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.client, name)


def private_mod(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Clips the update that a `ClientApp` returns, and adds noise on request.

    List it among the mods of a `ClientApp`, or of its train function: after
    `secaggplus_mod`, if that is used, and before any mod that should see the unclipped
    update:

        app = ClientApp(mods=[tfdp_fl.flower.private_mod])

    The server's instructions are in the ConfigRecord of a train message, under the same
    names as for `DPFedAvgNumPyClient`. The reply's only ArrayRecord is replaced by
    w + clip(Delta) (+ noise), in the received dtypes. Its weight (the metric
    `num-examples`, with which the strategy averages) is replaced by 1, so the true
    number never leaves the client. In the same record,
    `dpfedavg_applied_clip_norm` and `dpfedavg_applied_noise_stddev` tell the server
    what was applied, and on request `dpfedavg_norm_bit` is 1 if ||Delta|| <= S and
    otherwise 0. Clients made by a `client_fn` are treated in the same way.

    Everything else leaves the client unchanged, without noise: other metrics in the
    reply, and replies to other messages (evaluation, queries).

    Args:
      message: The server's message.
      context: Flower's context, passed on unchanged.
      call_next: The next mod, or the app.

    Returns:
      The reply. An error reply from the app is passed on.

    Raises:
      KeyError: The server sent no clip norm. Nothing was trained then. (To the server,
        this error and the following ones mean a failed client.)
      RuntimeError: The app raised an error; it is logged.
      TypeError, ValueError: The server's instructions are invalid (nothing was trained
        then), or the reply is invalid: arrays with other names or shapes, or more than
        one ArrayRecord.
    """
    if message.metadata.message_type.partition(".")[0] != "train":
        return call_next(message, context)
    # If several records have a name, the first one counts.
    config = collections.ChainMap(*map(dict, message.content.config_records.values()))
    instruction = Instruction.from_config(config)
    weight_key = str(config.get(WEIGHT_KEY, DEFAULT_WEIGHT_KEY))
    # The app may train in place.
    _, record = only_record(message.content, "The server")
    received = {name: np.array(a.numpy()) for name, a in record.items()}
    reply = call_client_code(call_next, message, context)
    if reply.has_error():
        return reply

    key, record = only_record(reply.content, "The ClientApp")
    if set(record) != set(received):
        raise ValueError(
            "The arrays that a ClientApp returns must be those it received, "
            f"{list(received)}, got {list(record)}."
        )
    returned = [record[name].numpy() for name in received]
    arrays, applied, _ = make_upload(list(received.values()), returned, instruction)
    records = dict(reply.content)  # A copy: the app may return the content it received.
    records[key] = array_record(record, dict(zip(received, arrays, strict=True)))
    weight: Json = {weight_key: _NUM_EXAMPLES}
    if key == _LEGACY_MODEL:
        legacy_metrics = records[_LEGACY_METRICS]
        records[_LEGACY_METRICS] = type(legacy_metrics)({**legacy_metrics, **applied})
        weight = {_LEGACY_WEIGHT: _NUM_EXAMPLES}
    else:
        # A MetricRecord cannot hold booleans; + turns them into numbers.
        weight |= {name: +value for name, value in applied.items()}
    _set_metrics(records, reply.content.metric_records, weight)
    for name, metrics in dict(reply.content.metric_records).items():
        # Whichever weight the strategy uses, the true number of examples stays here.
        if DEFAULT_WEIGHT_KEY in metrics:
            public_metrics = {**records[name], DEFAULT_WEIGHT_KEY: _NUM_EXAMPLES}
            records[name] = type(metrics)(public_metrics)
    reply.content = type(reply.content)(records)
    return reply


def silo_app(
    make_silo: Callable[..., _Silo], private_metrics: _Metrics = None
) -> ClientApp:
    """Returns a `ClientApp` whose node is one silo, under any of Flower's strategies.

        app = silo_app(lambda context: tfdp_fl.Silo(build, x, y, ...))

    A train message's only ArrayRecord goes to `Silo.train`. The reply has the answer
    under the same names, and the metrics "num-examples" (the declared number of people,
    which strategies use as the weight), "rounds", "epsilon" and "spent" (0 or 1). The
    process may end after each message, as the silo continues from its directory. If the
    same message is sent again, it gets the same reply. Make the silo once by hand
    before its node starts: problems with its table are then reported to you, whereas
    later the node's error would reveal them to the server.

    Args:
      make_silo: Returns a `tfdp_fl.Silo`. It is called with Flower's `Context` (or
        without arguments, if it takes none) when a node gets its first message in a
        process.
      private_metrics: The `tfdp_fl.PrivateMetrics` that answer each evaluate message,
        and are charged each time; None: answers have only the declared number of
        people.

    Raises:
      RuntimeError: For a message that the silo refuses. Only the type of the error
        leaves the node; the full error is in the node's own log.
    """
    silos: dict[int, _Silo] = {}
    app = importlib.import_module("flwr.clientapp").ClientApp()

    def answer(message: Message, context: Context, kind: str) -> Message:
        if context.node_id not in silos:
            arguments = (context,) if inspect.signature(make_silo).parameters else ()
            silos[context.node_id] = make_silo(*arguments)
        silo = silos[context.node_id]
        metrics: Json = {DEFAULT_WEIGHT_KEY: silo.num_people}
        records: Json = {}
        key, record = only_record(message.content, "The server")
        weights = [array.numpy() for array in record.values()]
        metadata = message.metadata
        message_id = (
            f"{metadata.run_id} {metadata.message_id}" if metadata.message_id else None
        )
        if kind == "train":
            update = silo.train(weights, message_id)
            returned = dict(zip(record, update.weights, strict=True))
            records[key] = array_record(record, returned)
            metrics["rounds"], metrics["spent"] = update.rounds, int(update.spent)
            metrics["epsilon"] = update.epsilon
        elif private_metrics is not None:
            noisy = silo.evaluate(
                weights, private=private_metrics, message_id=message_id
            )
            metrics |= {name: noisy[name]["mean"] for name in private_metrics.bounds}
        records["metrics"] = flower_class("MetricRecord")(metrics)
        content = flower_class("RecordDict")(records)
        return flower_class("Message")(content, reply_to=message)

    for kind in ("train", "evaluate"):

        def handle(message: Message, context: Context, kind: str = kind) -> Message:
            return call_client_code(answer, message, context, kind)

        getattr(app, kind)()(handle)
    return app


def call_client_code(train: Callable[..., _Result], *arguments: Any) -> _Result:
    """Calls a client's own code; reveals only the type of an error that it raises.

    Flower sends the message of an exception to the server, and it may quote examples.
    """
    try:
        return train(*arguments)
    except Exception as error:
        _logger.exception("The client's training failed.")
        kind = type(error).__name__
        raise RuntimeError(
            f"A client's training raised {kind}; its message stays in the client's log."
        ) from None


def only_record(content: RecordDict, sender: str) -> tuple[str, ArrayRecord]:
    """Returns the only ArrayRecord with its name, or raises ValueError."""
    records = dict(content.array_records)
    if len(records) != 1:
        raise ValueError(
            f"{sender} must send one ArrayRecord, the model, got {sorted(records)}: "
            "any other would not be clipped."
        )
    return next(iter(records.items()))


def _set_metrics(
    records: Json, metric_records: Mapping[str, MetricRecord], metrics: Json
) -> None:
    """Sets metrics in every record that has the first one, the weight."""
    weight = next(iter(metrics))
    keys = [key for key, record in metric_records.items() if weight in record]
    for key in keys or list(metric_records)[:1]:
        records[key] = type(metric_records[key])({**metric_records[key], **metrics})
    if not metric_records:
        name = "metrics" if "metrics" not in records else "dpfedavg_metrics"
        records[name] = flower_class("MetricRecord")(metrics)


def array_record(
    template: ArrayRecord, arrays: Mapping[str, np.ndarray]
) -> ArrayRecord:
    """Returns an ArrayRecord with the given arrays, of the same class as another."""
    kind = type(next(iter(template.values())))
    return type(template)(
        {name: kind(np.asarray(array)) for name, array in arrays.items()}
    )


def flower_class(name: str) -> type:
    """Returns one of Flower's classes; Flower must already be imported."""
    return getattr(importlib.import_module("flwr.app"), name)
