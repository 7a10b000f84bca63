"""What may be wrapped: strategies that make of an average what they should.

The guarantee does not hang on this. A wrapped strategy is handed one and the
same noised mean in place of every client's reply, so that whatever it does
with it is post-processing. But then a median, a trimmed mean or Krum *over the
clients* is not what its user gets, and that is not to happen in silence.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

_logger = logging.getLogger(__name__)

# By module and name, as nothing here imports Flower. Read in flwr 1.12: the
# `aggregate_fit` of each averages with the weights it is given, and does no
# more to the clients' replies than that.
_AVERAGING = frozenset(
    {
        ("flwr.server.strategy.fault_tolerant_fedavg", "FaultTolerantFedAvg"),
        ("flwr.server.strategy.fedadagrad", "FedAdagrad"),
        ("flwr.server.strategy.fedadam", "FedAdam"),
        ("flwr.server.strategy.fedavg", "FedAvg"),
        ("flwr.server.strategy.fedavgm", "FedAvgM"),
        ("flwr.server.strategy.fedopt", "FedOpt"),
        ("flwr.server.strategy.fedprox", "FedProx"),
        ("flwr.server.strategy.fedyogi", "FedYogi"),
    }
)
_ABSTRACT = ("flwr.server.strategy.strategy", "Strategy")


def require_averaging(strategy: Any, vouched: bool) -> None:
    """Raises unless a strategy averages, or its user says that it does.

    Accepted are Flower's strategies of the list above, their subclasses that
    leave `aggregate_fit` alone, and objects that are none of Flower's.

    Args:
      strategy: what is to be wrapped.
      vouched: the user's word (`averages=True`).

    Raises:
      TypeError: if it has no `configure_fit` or `aggregate_fit`.
      ValueError: if it is one of Flower's, or derived from one, and not known
        to average.
    """
    for method in ("configure_fit", "aggregate_fit"):
        if not callable(getattr(strategy, method, None)):
            raise TypeError(
                f"strategy must have a method {method}, got {strategy!r}."
            )
    if vouched or not is_flowers(strategy):
        return
    culprit = _not_known_to_average(strategy)
    if culprit is not None:
        known = ", ".join(sorted(name for _, name in _AVERAGING))
        raise ValueError(
            f"strategy must be one that averages ({known}, or a subclass "
            f"without an aggregate_fit of its own), got {strategy!r} with the "
            f"aggregate_fit of {culprit}. All it would be handed is the "
            "clients' noised average, in place of each reply: a median, a "
            "trimmed mean or Krum over the clients would be none. If its "
            "aggregate_fit makes of that what it should, say averages=True."
        )


def is_flowers(strategy: Any) -> bool:
    """Whether an object's class is Flower's, or derived from one."""
    return any(
        cls.__module__.partition(".")[0] == "flwr"
        for cls in type(strategy).__mro__
    )


def _not_known_to_average(strategy: Any) -> str | None:
    """Returns whose `aggregate_fit` is not known; None if all are.

    All of them, not the first: each may call the next one.
    """
    if "aggregate_fit" in getattr(strategy, "__dict__", {}):
        return "the object itself"
    for cls in type(strategy).__mro__:
        name = (cls.__module__, cls.__qualname__)
        if (
            "aggregate_fit" in vars(cls)
            and name not in _AVERAGING
            and name != _ABSTRACT
        ):
            return f"{cls.__module__}.{cls.__qualname__}"
    return None


@contextlib.contextmanager
def metrics_errors_logged(strategy: Any) -> Iterator[None]:
    """Keeps the strategy's metrics function from ending the run.

    It is handed the metrics that clients sent: a key that one of them left out
    is enough for it to raise.
    """
    name = "fit_metrics_aggregation_fn"
    function = getattr(strategy, "__dict__", {}).get(name)
    if not callable(function):
        yield
        return

    def guarded(metrics: Any) -> dict[str, Any]:
        try:
            return function(metrics)
        except Exception:
            _logger.warning(
                "%s failed on the metrics that the clients sent; the round "
                "has none.",
                name,
                exc_info=True,
            )
            return {}

    setattr(strategy, name, guarded)
    try:
        yield
    finally:
        setattr(strategy, name, function)
