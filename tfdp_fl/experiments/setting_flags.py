"""The fields of `Settings` as flags of a program."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, cast

from absl import flags

from tfdp_fl.experiments.settings import Settings

_DEFINE: dict[type, Any] = {
    bool: flags.DEFINE_bool,
    float: flags.DEFINE_float,
    int: flags.DEFINE_integer,
    str: flags.DEFINE_string,
}


def define(names: Collection[str] | None = None) -> None:
    """Defines a flag for each field.

    Args:
      names: Which fields; None: all.
    """
    for field in dataclasses.fields(Settings):
        if names is not None and field.name not in names:
            continue
        kind = field.metadata["kind"]
        if isinstance(kind, tuple):
            flags.DEFINE_enum(
                field.name,
                cast(Any, field.default),
                kind,
                field.metadata["help"],
            )
        else:
            _DEFINE[kind](field.name, field.default, field.metadata["help"])


def given() -> dict[str, Any]:
    """Returns the fields whose flags stand on the command line."""
    return {
        field.name: flags.FLAGS[field.name].value
        for field in dataclasses.fields(Settings)
        if field.name in flags.FLAGS and flags.FLAGS[field.name].present
    }
