"""A Flower node that is an organisation: a `tfdp_fl.Silo` as a `ClientApp`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tfdp_fl.flower import client as client_lib
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

# A `tfdp_fl.Silo` and `PrivateMetrics`, whose packages this one must not import.
_Silo: TypeAlias = Any
_Metrics: TypeAlias = Any


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
        metrics: Json = {client_lib.DEFAULT_WEIGHT_KEY: silo.num_people}
        records: Json = {}
        key, record = client_lib.only_record(message.content, "The server")
        weights = [array.numpy() for array in record.values()]
        metadata = message.metadata
        message_id = (
            f"{metadata.run_id} {metadata.message_id}" if metadata.message_id else None
        )
        if kind == "train":
            update = silo.train(weights, message_id)
            returned = dict(zip(record, update.weights, strict=True))
            records[key] = client_lib.array_record(record, returned)
            metrics["rounds"], metrics["spent"] = update.rounds, int(update.spent)
            metrics["epsilon"] = update.epsilon
        elif private_metrics is not None:
            noisy = silo.evaluate(
                weights, private=private_metrics, message_id=message_id
            )
            metrics |= {name: noisy[name]["mean"] for name in private_metrics.bounds}
        records["metrics"] = client_lib.flower_class("MetricRecord")(metrics)
        content = client_lib.flower_class("RecordDict")(records)
        return client_lib.flower_class("Message")(content, reply_to=message)

    for kind in ("train", "evaluate"):

        def handle(message: Message, context: Context, kind: str = kind) -> Message:
            call = lambda sent, where: answer(sent, where, kind)  # noqa: E731
            return client_lib.call_client_code(call, message, context)

        getattr(app, kind)()(handle)
    return app
