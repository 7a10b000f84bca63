"""The factory of each mechanism that releases updates, under its own name."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import tensorflow_federated as tff

from tfdp_fl import mechanisms, schedules
from tfdp_fl.aggregators import mechanism_factory


def factory_of(
    mechanism_class: type[mechanisms.Mechanism],
) -> type[mechanism_factory.MechanismFactory]:
    """Returns the factory that takes a mechanism's parameters as its own.

    Args:
      mechanism_class: A mechanism that releases updates. Its parameters, with
        their defaults, are keyword arguments of the factory, next to
        `clients_per_round`, `inner_factory` and what else `MechanismFactory`
        takes.
    """
    fields = dataclasses.fields(mechanism_class)
    own = {field.name for field in fields}

    class Factory(mechanism_factory.MechanismFactory):
        def __init__(
            self,
            *,
            clients_per_round: schedules.Schedule,
            inner_factory: tff.aggregators.UnweightedAggregationFactory | None = None,
            **options: Any,
        ):
            parameters = {name: options.pop(name) for name in own & options.keys()}
            super().__init__(
                mechanism_class(**parameters),
                clients_per_round,
                inner_factory,
                **options,
            )

    name = f"{mechanism_class.__name__}Factory"
    keyword = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    declared = [
        inspect.Parameter(
            field.name,
            keyword,
            default=empty if field.default is dataclasses.MISSING else field.default,
        )
        for field in fields
    ]
    given = inspect.signature(Factory.__init__).parameters
    Factory.__signature__ = inspect.Signature([*declared, *list(given.values())[1:]])
    Factory.__name__ = Factory.__qualname__ = name
    Factory.__module__ = __name__
    Factory.__doc__ = (
        f"`MechanismFactory` of a `{mechanism_class.__name__}`, whose "
        "parameters are its keyword arguments."
    )
    return Factory


AdaptiveClippingFactory = factory_of(mechanisms.AdaptiveClipping)
AdaptiveLocalDPFactory = factory_of(mechanisms.AdaptiveLocalDP)
CorrelatedNoiseFactory = factory_of(mechanisms.CorrelatedNoise)
FixedClippingFactory = factory_of(mechanisms.FixedClipping)
LocalDPFactory = factory_of(mechanisms.LocalDP)
MedianClippingFactory = factory_of(mechanisms.MedianClipping)
NoPrivacyFactory = factory_of(mechanisms.NoPrivacy)
QueryFactory = factory_of(mechanisms.QueryMechanism)

AdaptiveLocalDPFactory.__doc__ = """DISCO's local DP, without a memory.

    See `AdaptiveLocalDP`. A TFF client has neither a name nor a state, so its
    window of earlier norms is empty in every round, and every layer's radius is
    `clipping_radius`: a local mechanism with a fixed radius for each layer.
    Where clients can be told apart, `WindowedAdaptiveLocalDPFactory` keeps
    their windows.
    """
QueryFactory.__doc__ = """A sum query of TF-Privacy (see `QueryMechanism`).

    Next to `tff.aggregators.DifferentiallyPrivateFactory(query)`: a NaN or an
    Inf is replaced by zero first, the result is the mean, and the event that
    is charged is the one given here. Records are added up by the inner factory;
    a query whose `accumulate_preprocessed_record` is not a sum cannot be used.
    """
