"""What a mechanism outside this package may override without defining its cost.

The cost of a round is derived from a mechanism's bounds and noise. So the members that
cannot make it too small are listed here. A class that overrides anything else must
also define the cost, and its statement says so (the caveat `own_cost`). An instance
overrides nothing, so a mechanism does what its class says.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tfdp_fl.terms import TrustModel

# No cost relies on these, which get no secrets: `algorithm.release` passes them noised
# sums, and a round without its noise state.
_FREE = {
    *("name", "describe", "caveats", "own_caveats", "parameters", "needs_shapes"),
    *("noise_multiplier_limit", "noise_multiplier_limit_reason"),
    *("from_budget", "with_noise_multiplier", "proximal_weight", "implied_delta"),
    *("mean", "next_clip_norm", "releases_weights"),
}
# Of a central guarantee, the bound holds whatever these return (`bounded_sums`):
_BOUNDED = {
    *("scale", "side_statistics", "contribution_of_norm", "contribution"),
    *("window", "window_norms"),
}
# The derived cost is computed from these, and each release compared with it:
_DERIVED = {
    *("noise_stddevs", "noise_multiplier", "noise_site"),
    *("l2_norm_bound", "side_bounds", "clip_norm", "first_clip_norm"),
    *("max_participations", "min_separation", "epsilon", "event_period"),
    *("static_config", "state_fingerprint", "__post_init__"),
    *("check", "check_parameters"),
}


def require_cost(cls: Any, base: type) -> None:
    """Raises TypeError if a class changes a cost that is defined without it.

    Args:
      cls: A subclass of `base`.
      base: `Mechanism`, which derives the cost.
    """
    classes = cls.__mro__
    for cost in members_with_cost(cls, base):
        definer = definer_of(cls, cost)
        allowed = _FREE if cls.trust_model == TrustModel.LOCAL else _FREE | _BOUNDED
        if definer is base:
            allowed = allowed | _DERIVED
        # Those that are asked before the definer may have overridden something.
        for place, each in enumerate(classes[: classes.index(definer)]):
            if is_of_this_package(each):
                continue
            changed = _overridden_members(each, classes[place + 1 :]) - allowed
            for name in sorted(changed):
                raise TypeError(
                    f"{cls.__name__} must define {cost}, because {name}, which "
                    f"{each.__name__} defines, changes what a round costs."
                )


def require_no_own_members(mechanism: Any) -> None:
    """Raises TypeError if an instance hides a member that its class defines."""
    fields = {field.name for field in dataclasses.fields(mechanism)}
    cls = type(mechanism)
    for name in sorted(vars(mechanism).keys() - fields):
        member = getattr(cls, name, None)
        # (A cached property stores its own result there.)
        if hasattr(cls, name) and not isinstance(member, functools.cached_property):
            raise TypeError(
                f"{name} must be defined by a subclass of {cls.__name__}, which is "
                "checked, got an attribute of a single instance."
            )


def members_with_cost(cls: Any, base: type) -> tuple[str, ...]:
    """Returns the members that define what a round of a class costs."""
    if cls.trust_model == TrustModel.NONE:
        return ()
    if cls.trust_model == TrustModel.CENTRAL:
        return ("round_event",)
    # Unless it claims one, a local mechanism has no central cost.
    claims = definer_of(cls, "round_event") is not base
    return ("mu_squared", "round_event") if claims else ("mu_squared",)


def definer_of(cls: type, name: str) -> type:
    """Returns the class that defines a member."""
    return next(base for base in cls.__mro__ if name in vars(base))


def is_overridden(cls: type, *members: str) -> bool:
    """Returns whether a class outside this package defines any of these members."""
    return not all(is_of_this_package(definer_of(cls, name)) for name in members)


def is_of_this_package(cls: type) -> bool:
    """Returns whether a class is the package's own."""
    return cls.__module__.startswith("tfdp_fl.")


def _overridden_members(cls: type, bases: tuple[type, ...]) -> set[str]:
    """Returns the inherited members that a class defines anew.

    A dataclass field without a default hides a member, too; but to declare a field
    again only changes its default, unless that computes the value.
    """
    members, declared = vars(cls), vars(cls).get("__annotations__", {})
    bases = tuple(base for base in bases if base is not object)
    inherited = {name for base in bases for name in vars(base)}
    fields = {n for base in bases for n in getattr(base, "__dataclass_fields__", {})}
    again = {n for n in fields & {*declared} if not hasattr(members.get(n), "__get__")}
    own = ({*members, *declared} & inherited) - again
    hooks = {"__post_init__", "__getattribute__", "__getattr__"} & members.keys()
    return hooks | {
        name
        for name in own
        if not name.startswith(("__", "_abc_"))
        # (To repeat a constant, such as the trust model, changes nothing.)
        and not (
            isinstance(members.get(name), str)
            and members[name] == getattr(bases[0], name, None)
        )
    }
