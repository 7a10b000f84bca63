"""What may be wrapped: strategies that take one averaged reply for the mean.

The guarantee does not depend on this. A wrapped strategy is handed the noised
mean and nothing else, so that whatever it does with it is post-processing. But a
strategy that needs the clients' replies one by one would fail, or make something
else of it than its user expects, and it is refused when it is wrapped.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any


@dataclasses.dataclass(frozen=True)
class Api:
    """One of Flower's two APIs for strategies.

    Classes are listed by their full names, as nothing here imports Flower.

    Attributes:
      configure: the method that makes the clients' messages.
      aggregate: the method that averages.
      averaging: of the classes, those whose `aggregate` averages with the
        weights it is given, and does no more to the clients' replies.
      metrics: the attribute of the function that aggregates clients' metrics.
    """

    configure: str
    aggregate: str
    averaging: frozenset[str]
    metrics: str


def _averaging(package: str, *more: str) -> frozenset[str]:
    names = "Strategy FedAdagrad FedAdam FedAvg FedAvgM FedOpt FedProx FedYogi"
    listed = [f"{package}.{name.lower()}.{name}" for name in names.split()]
    return frozenset([*listed, *more])


# Read in flwr 1.12 and 1.42.
LEGACY = Api(
    configure="configure_fit",
    aggregate="aggregate_fit",
    averaging=_averaging(
        "flwr.server.strategy",
        "flwr.server.strategy.fault_tolerant_fedavg.FaultTolerantFedAvg",
    ),
    metrics="fit_metrics_aggregation_fn",
)
MESSAGES = Api(
    configure="configure_train",
    aggregate="aggregate_train",
    averaging=_averaging("flwr.serverapp.strategy"),
    metrics="train_metrics_aggr_fn",
)


def require_averaging(strategy: Any, vouched: bool, api: Api) -> None:
    """Raises unless a strategy can do with one averaged reply.

    Accepted are Flower's strategies that are known to average, their subclasses
    that leave the averaging alone (or not, if the user vouches for them by
    `averages=True`), and objects that are none of Flower's.

    Raises:
      TypeError: if it does not have the methods of that API.
      ValueError: if it is one of Flower's, or derived from one, and not known
        to average; or if it has a function of its own for clients' metrics.
    """
    for method in (api.configure, api.aggregate):
        if not callable(getattr(strategy, method, None)):
            raise TypeError(f"strategy must have a method {method}, got {strategy!r}.")
    function = getattr(strategy, api.metrics, None)
    if function is not None and not _is_of_flower(
        getattr(function, "__module__", None) or ""
    ):
        raise ValueError(
            f"strategy must have no {api.metrics}, got {function!r}: it is handed "
            "the noised mean alone. Compute metrics in an evaluation."
        )
    classes = type(strategy).__mro__
    if not any(_is_of_flower(cls.__module__) for cls in classes):
        return
    # All classes that define it, not the first: each may call the next one.
    defining = [
        f"{cls.__module__}.{cls.__qualname__}"
        for cls in classes
        if api.aggregate in vars(cls)
    ]
    if api.aggregate in getattr(strategy, "__dict__", {}):
        defining.append("the object itself")
    for where in defining:
        if where in api.averaging or (vouched and not _is_of_flower(where)):
            continue
        names = {where.rpartition(".")[2] for where in api.averaging}
        known = ", ".join(sorted(names - {"Strategy"}))
        raise ValueError(
            f"strategy must be one that averages ({known}, or a subclass without an "
            f"{api.aggregate} of its own), got {strategy!r} with the {api.aggregate} "
            f"of {where}: it is handed one reply, the noised mean. For one of your own "
            "that makes of it what it should, say averages=True."
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


def _is_of_flower(module: str) -> bool:
    return module.partition(".")[0] == "flwr"
