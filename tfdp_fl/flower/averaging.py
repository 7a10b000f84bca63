"""What may be wrapped: strategies that take one averaged reply for the mean.

The guarantee does not depend on this. A wrapped strategy is handed the noised
mean and nothing else, so that whatever it does with it is post-processing. But a
strategy that needs the clients' replies one by one would fail, or make something
else of it than its user expects, and it is refused when it is wrapped.
"""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

# Read in flwr 1.12 and 1.42: they average with the weights they are given, and do
# no more to the clients' replies.
_AVERAGING = (
    *("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedOpt", "FedProx", "FedYogi"),
)
_ALSO = "flwr.server.strategy.fault_tolerant_fedavg.FaultTolerantFedAvg"


class Api(NamedTuple):
    """One of Flower's two APIs for strategies.

    Attributes:
      package: where its strategies are.
      configure: the method that makes the clients' messages.
      aggregate: the method that averages.
      metrics: the attribute of the function that aggregates clients' metrics.
    """

    package: str
    configure: str
    aggregate: str
    metrics: str


LEGACY = Api(
    *("flwr.server.strategy", "configure_fit", "aggregate_fit"),
    "fit_metrics_aggregation_fn",
)
MESSAGES = Api(
    *("flwr.serverapp.strategy", "configure_train", "aggregate_train"),
    "train_metrics_aggr_fn",
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
    known = {f"{api.package}.{name.lower()}.{name}" for name in _AVERAGING}
    known |= {_ALSO, f"{api.package}.strategy.Strategy"}
    for where in defining:
        if where not in known and (not vouched or _is_of_flower(where)):
            raise ValueError(
                f"strategy must be one that averages ({', '.join(_AVERAGING)}, or a "
                f"subclass without an {api.aggregate} of its own), got {strategy!r} "
                f"with the {api.aggregate} of {where}: it is handed one reply, the "
                "noised mean. For one of your own that makes of it what it should, "
                "say averages=True."
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
