"""What may be wrapped: strategies that make of an average what they should.

The guarantee does not hang on this. A wrapped strategy is handed one and the
same noised mean in place of every client's reply, so that whatever it does
with it is post-processing. But then a median, a trimmed mean or Krum *over the
clients* is not what its user gets, and that is not to happen in silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import numbers
from collections.abc import Iterator
from typing import Any

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Api:
    """One of Flower's two APIs for strategies.

    Classes are listed by module and name, as nothing here imports Flower.

    Attributes:
      configure: the method that draws a round's clients.
      aggregate: the method that averages.
      averaging: of the classes, those whose `aggregate` averages with the
        weights it is given, and does no more to the clients' replies.
      sampling: those whose `configure` draws uniformly, without replacement,
        from all clients that Flower lists; empty where the drawing is watched.
      abstract: the classes that only name the methods.
      metrics: the attribute of the function that is handed clients' metrics.
      m: what the number of sampled clients is called.
      advice: how Flower's `FedAvg` samples that many.
      drawn_by: who has to draw for the sampling to count.
    """

    configure: str
    aggregate: str
    averaging: frozenset[tuple[str, str]]
    sampling: frozenset[tuple[str, str]]
    abstract: frozenset[tuple[str, str]]
    metrics: str
    m: str
    advice: str
    drawn_by: str

    def no_metrics(self) -> Any:
        """Returns what stands for no metrics at all."""
        if self is LEGACY:
            return {}
        return importlib.import_module("flwr.app").MetricRecord()


def _classes(package: str, *names: str) -> frozenset[tuple[str, str]]:
    return frozenset((f"{package}.{name.lower()}", name) for name in names)


# Read in flwr 1.12.
LEGACY = Api(
    configure="configure_fit",
    aggregate="aggregate_fit",
    averaging=_classes(
        "flwr.server.strategy",
        "FedAdagrad",
        "FedAdam",
        "FedAvg",
        "FedAvgM",
        "FedOpt",
        "FedProx",
        "FedYogi",
    )
    | {("flwr.server.strategy.fault_tolerant_fedavg", "FaultTolerantFedAvg")},
    sampling=frozenset(),
    abstract=_classes("flwr.server.strategy", "Strategy"),
    metrics="fit_metrics_aggregation_fn",
    m="num_sampled_clients",
    advice=("For Flower's FedAvg set min_fit_clients to it and fraction_fit to 0."),
    drawn_by="the client manager's sample",
)
# Read in flwr 1.42: `FedAvg.configure_train` takes `random.sample` of what the
# grid's `get_node_ids` returned last, and the others hand on to it.
MESSAGES = Api(
    configure="configure_train",
    aggregate="aggregate_train",
    averaging=_classes(
        "flwr.serverapp.strategy",
        "FedAdagrad",
        "FedAdam",
        "FedAvg",
        "FedAvgM",
        "FedOpt",
        "FedProx",
        "FedYogi",
    ),
    sampling=_classes(
        "flwr.serverapp.strategy", "FedAvg", "FedAvgM", "FedOpt", "FedProx"
    ),
    abstract=_classes("flwr.serverapp.strategy", "Strategy"),
    metrics="train_metrics_aggr_fn",
    m="clients_per_round",
    advice=(
        "For Flower's FedAvg set min_train_nodes to it and fraction_train to "
        "a number so small that it asks for no more, such as 1e-9: 0 would "
        "switch training off."
    ),
    drawn_by="a strategy of Flower's from the grid's node ids",
)


def require_averaging(strategy: Any, vouched: bool, api: Api = LEGACY) -> None:
    """Raises unless a strategy averages, or its user says that it does.

    Accepted are Flower's strategies that are known to, their subclasses that
    leave the averaging alone, and objects that are none of Flower's.

    Args:
      strategy: what is to be wrapped.
      vouched: the user's word (`averages=True`).
      api: the API it is to be of.

    Raises:
      TypeError: if it has not the methods of that API.
      ValueError: if it is one of Flower's, or derived from one, and not known
        to average.
    """
    for method in (api.configure, api.aggregate):
        if not callable(getattr(strategy, method, None)):
            raise TypeError(f"strategy must have a method {method}, got {strategy!r}.")
    if vouched or not is_flowers(strategy):
        return
    method = api.aggregate
    culprit = _not_of(strategy, method, api.averaging | api.abstract)
    if culprit is not None:
        known = ", ".join(sorted(name for _, name in api.averaging))
        raise ValueError(
            f"strategy must be one that averages ({known}, or a subclass "
            f"without an {method} of its own), got {strategy!r} with the "
            f"{method} of {culprit}. All it would be handed is the "
            "clients' noised average, in place of each reply: a median, a "
            "trimmed mean or Krum over the clients would be none. If its "
            f"{method} makes of that what it should, say averages=True."
        )


def refuses(strategy: Any, num_results: int, num_failures: int) -> bool:
    """Whether a strategy is known to make nothing of a round with failures.

    Those that accept no failures, and `FaultTolerantFedAvg` below its rate.
    """
    if getattr(strategy, "accept_failures", True) is False:
        return True
    rate = getattr(strategy, "completion_rate_fit", 0.0)
    return isinstance(rate, numbers.Real) and (
        num_results / (num_results + num_failures) < float(rate)
    )


def samples_uniformly(strategy: Any, api: Api) -> bool:
    """Whether a strategy is known to draw from all that Flower lists."""
    return (
        is_flowers(strategy)
        and _not_of(strategy, api.configure, api.sampling | api.abstract) is None
    )


def is_flowers(strategy: Any) -> bool:
    """Whether an object's class is Flower's, or derived from one."""
    return any(
        cls.__module__.partition(".")[0] == "flwr" for cls in type(strategy).__mro__
    )


def _not_of(
    strategy: Any, method: str, known: frozenset[tuple[str, str]]
) -> str | None:
    """Returns whose method is not of the classes known; None if all are.

    All of them, not the first: each may call the next one.
    """
    if method in getattr(strategy, "__dict__", {}):
        return "the object itself"
    for cls in type(strategy).__mro__:
        name = (cls.__module__, cls.__qualname__)
        if method in vars(cls) and name not in known:
            return f"{cls.__module__}.{cls.__qualname__}"
    return None


@contextlib.contextmanager
def metrics_errors_logged(strategy: Any, api: Api = LEGACY) -> Iterator[None]:
    """Keeps the strategy's metrics function from ending the run.

    It is handed the metrics that clients sent: a key that one of them left out
    is enough for it to raise.
    """
    name = api.metrics
    function = getattr(strategy, "__dict__", {}).get(name)
    if not callable(function):
        yield
        return

    def guarded(*metrics: Any) -> Any:
        try:
            return function(*metrics)
        except Exception:
            _logger.warning(
                "%s failed on the metrics that the clients sent; the round has none.",
                name,
                exc_info=True,
            )
            return api.no_metrics()

    setattr(strategy, name, guarded)
    try:
        yield
    finally:
        setattr(strategy, name, function)
