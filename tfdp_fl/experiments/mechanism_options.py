"""Settings and flags of mechanisms, made from their declarations."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdp_fl import mechanisms
from tfdp_fl.mechanisms import parameters

MECHANISMS: dict[str, type[mechanisms.Mechanism]] = {
    name: mechanisms.by_name(name) for name in mechanisms.names()
}
CENTRAL = tuple(
    name for name, kind in MECHANISMS.items() if kind.guarantee == "central"
)
CALIBRATED = tuple(
    name for name, kind in MECHANISMS.items() if kind.guarantee != "none"
)

# These come from --target_epsilon and --target_delta.
_BUDGET = ("epsilon", "delta")

# What a flag's text is made of, by the declared type.
_KINDS = {"int": int, "float": float, "bool": bool}


def parameters_of(mechanism: str) -> tuple[str, ...]:
    """Returns the options that are parameters of a mechanism."""
    return tuple(field.name for field in _fields(mechanism))


def _fields(mechanism: str) -> list[dataclasses.Field[Any]]:
    return [
        field
        for field in dataclasses.fields(MECHANISMS[mechanism])
        if field.name not in _BUDGET
    ]


def declared_class(class_name: str) -> type[Any]:
    """Returns a frozen dataclass with every parameter of every mechanism.

    All are None by default, which leaves them to the mechanism. The metadata
    of a field has its `kind`, a type or a tuple of the words allowed, and its
    `help`.
    """
    users: dict[str, list[tuple[str, dataclasses.Field[Any]]]] = {}
    for name in MECHANISMS:
        for field in _fields(name):
            users.setdefault(field.name, []).append((name, field))
    made = [
        (
            name,
            Any,
            dataclasses.field(
                default=None,
                metadata={"kind": _kind(used[0][1]), "help": _help(used)},
            ),
        )
        for name, used in users.items()
    ]
    return dataclasses.make_dataclass(class_name, made, frozen=True, kw_only=True)


def _kind(field: dataclasses.Field[Any]) -> Any:
    words = parameters.words_of(field)
    if words is not None:
        return tuple(words)
    if parameters.none_word_of(field) is not None:
        return str
    # A type, or its text where annotations are kept as text.
    declared = getattr(field.type, "__name__", str(field.type))
    return _KINDS.get(declared.split(" ")[0], str)


def _help(used: list[tuple[str, dataclasses.Field[Any]]]) -> str:
    """Returns what a parameter is, to whom, and what it is if not given."""
    by_text: dict[str, list[str]] = {}
    for name, field in used:
        text = parameters.help_of(field).rstrip(".")
        value = usual(field)
        if value is not None:
            text += f" ({value})"
        by_text.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_text.items())


def usual(field: dataclasses.Field[Any]) -> Any:
    """Returns what `train.py` runs with where a parameter is not given."""
    start = parameters.start_of(field)
    if start is None and field.default is not dataclasses.MISSING:
        return field.default
    return start


def run_defaults(mechanism: str) -> dict[str, Any]:
    """Returns the settings that a mechanism suggests where they are open."""
    starts = {
        field.name: parameters.start_of(field)
        for field in _fields(mechanism)
        if parameters.start_of(field) is not None
    }
    return {**MECHANISMS[mechanism].suggested_run, **starts}


def target_help() -> str:
    """Returns the epsilons that mechanisms suggest, as a clause."""
    targets: dict[float, list[str]] = {}
    for name in CALIBRATED:
        target = MECHANISMS[name].suggested_run.get("target_epsilon")
        if target is not None:
            targets.setdefault(target, []).append(name)
    return "; ".join(
        f"{', '.join(names)}: {target:g}" for target, names in targets.items()
    )


def summary() -> str:
    """Returns every mechanism with the flags that are its parameters."""
    return "; ".join(
        f"{name}: {', '.join(parameters_of(name)) or 'no parameters'}"
        for name in MECHANISMS
    )


def chosen(settings: Any, mechanism: str) -> dict[str, Any]:
    """Returns the mechanism's parameters that are set, noise excepted.

    Raises:
      ValueError: One is a text that stands for nothing.
    """
    options = {}
    for field in _fields(mechanism):
        value = getattr(settings, field.name)
        if field.name == "noise_multiplier" or value is None:
            continue
        word = parameters.none_word_of(field)
        if word is not None and isinstance(value, str):
            try:
                value = None if value == word else float(value)
            except ValueError as error:
                raise ValueError(
                    f"--{field.name} must be a number or {word}, got {value!r}."
                ) from error
        options[field.name] = value
    return options
