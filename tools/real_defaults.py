"""Shows what `parameter(...)` declares as the default: an extension of griffe."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class RealDefaults(griffe.Extension):
    """Puts real defaults into the signatures of mechanisms."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Runs when all is read, and before signatures are made of fields."""
        for module in _modules(pkg):
            for declared in module.classes.values():
                for attribute in declared.attributes.values():
                    call = _call(str(attribute.value))
                    if call is not None:
                        attribute.value = _default(call, attribute, pkg)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [each for each in module.modules.values() if not each.is_alias]
    return [module, *(found for each in inner for found in _modules(each))]


def _call(text: str) -> ast.Call | None:
    """Returns a call of `parameter`, or of a function named for one."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("parameter"):
        return node
    return None


def _default(
    call: ast.Call, attribute: griffe.Attribute, pkg: griffe.Module
) -> str | None:
    name = ast.unparse(call.func)
    if name.endswith("_parameter"):
        path = attribute.parent.resolve(name.split(".")[0])
        path = ".".join([path, *name.split(".")[1:]])
        source = pkg[path.removeprefix(f"{pkg.path}.")].source
        call = next(
            node.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Call)
        )
    for keyword in call.keywords:
        if keyword.arg == "default":
            return ast.unparse(keyword.value)
    return None
