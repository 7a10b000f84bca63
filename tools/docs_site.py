"""What mkdocs is told about this project: a hook of mkdocs.yml.

- The API reference has a page for each room of the package, with every name
  that the room hands on, read from its `__init__.py`; nothing is imported.
- Pages link to files of the repository, which the site does not have: what was
  a link becomes the file's path.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]

# What people use, in the order of the pages, with a line for each.
_ROOMS = {
    "tfdp_fl": "Mechanisms, the model, and what makes it private.",
    "tfdp_fl.keras.callbacks": "Callbacks that know about rounds; `tfdp_fl.callbacks`.",
    "tfdp_fl.datasets": "Who holds what, and the loaders.",
    "tfdp_fl.accounting": "What it cost, or would cost.",
    "tfdp_fl.auditing": "Attacks on one's own run.",
    "tfdp_fl.features": "Fixed, public features as Keras layers.",
    "tfdp_fl.losses": "Losses for clients with few of the classes.",
    "tfdp_fl.mechanisms": "What a mechanism is made of.",
    "tfdp_fl.correlated_noise": "The mathematics of noise correlated across rounds.",
    "tfdp_fl.sampling": "Who is drawn in a round.",
    "tfdp_fl.runtimes": "Workers on this machine and on others.",
    "tfdp_fl.aggregators": "TFF aggregation factories.",
    "tfdp_fl.learning": "TFF learning processes that know their epsilon.",
    "tfdp_fl.flower": "Flower's clients and strategies.",
    "tfdp_fl.secure_aggregation": "Sums that nobody sees the terms of.",
}
_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def public_names(room: str) -> Iterator[tuple[str, str]]:
    """Yields (name, where it is defined) of what a room hands on.

    Args:
      room: A package or module, such as "tfdp_fl.datasets".
    """
    folder = _ROOT.joinpath(*room.split("."))
    path = folder / "__init__.py" if folder.is_dir() else None
    tree = ast.parse((path or folder.with_suffix(".py")).read_text("utf-8"))
    found: dict[str, str] = {}
    wanted: list[str] | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                found[each.asname or each.name] = f"{node.module}.{each.name}"
        elif isinstance(node, ast.Assign) and (
            getattr(node.targets[0], "id", "") == "__all__"
        ):
            wanted = [str(name) for name in ast.literal_eval(node.value)]
    if wanted is None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
                not node.name.startswith("_")
            ):
                yield node.name, f"{room}.{node.name}"
        return
    for name in sorted(wanted, key=str.lower):
        where = found.get(name, f"{room}.{name}")
        if not name.startswith("_") and not _is_room(where):
            yield name, _followed(where)


def reference_page(room: str) -> str:
    """Returns a page of the API reference, in Markdown."""
    title = {"tfdp_fl.keras.callbacks": "tfdp_fl.callbacks"}.get(room, room)
    lines = [f"# {title}", "", _ROOMS[room], ""]
    names = list(public_names(room))
    # The model first, then what it is given.
    names.sort(key=lambda each: not each[1].startswith("tfdp_fl.keras."))
    for _, where in names:
        lines += [f"::: {where}", *_options(room, where), ""]
    return "\n".join(lines)


def _options(room: str, where: str) -> list[str]:
    """Returns what is shown of a name other than usual.

    Of a mechanism, its parameters: its methods are for those who write one,
    and stand once, with their base class.
    """
    declared = "tfdp_fl.mechanisms.", "tfdp_fl.correlated_noise.strategies."
    if room == "tfdp_fl" and where.startswith(declared):
        return [
            "    options:",
            "      members: false",
            "      show_signature: false",
        ]
    return []


def _is_room(name: str) -> bool:
    folder = _ROOT.joinpath(*name.split("."))
    return folder.is_dir() or folder.with_suffix(".py").is_file()


def _followed(where: str) -> str:
    """Returns the module that defines a name, past those that hand it on."""
    module, _, name = where.rpartition(".")
    if (_ROOT.joinpath(*module.split(".")) / "__init__.py").is_file():
        for other, origin in public_names(module):
            if other == name and origin != where:
                return origin
    return where


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the API reference; an event of mkdocs."""
    from mkdocs.structure.files import File

    for room in _ROOMS:
        path = f"reference/{_file_name(room)}"
        files.append(File.generated(config, path, content=reference_page(room)))
    return files


def on_config(config: Any) -> Any:
    """Adds them to the navigation; an event of mkdocs."""
    config.nav.append(
        {"Reference": [f"reference/{_file_name(room)}" for room in _ROOMS]}
    )
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turns links to files of the repository into paths; an event of mkdocs."""

    def told(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = target.removeprefix("../").partition("#")[0]
        if path in text.replace("`", ""):
            return text
        return f"{text} (`{path}`)"

    return _OUTSIDE.sub(told, markdown)


def _file_name(room: str) -> str:
    return f"{room.replace('keras.', '').replace('tfdp_fl.', '')}.md"
