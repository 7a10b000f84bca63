"""Writes or checks the BUILD files of the repository from its imports.

Every Python file is in one target named by its stem (`__init__.py`: by its
folder), whose deps are the first-party modules it imports, wherever in the
file. Third-party packages are left out: they come from requirements-full.txt.

    python tools/update_build_files.py            # says what is wrong
    python tools/update_build_files.py --write    # writes the BUILD files

Attributes that are not derived (`data`, `size`, `tags`, ...) are kept, and so
are targets of other rules.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import pathlib
import sys
from collections.abc import Iterator

PYTHON_FOLDERS = ("tfdp_fl", "scripts", "research", "tests", "tools")
NOTEBOOK_FOLDER = "colab"
RULES_FILE = "@rules_python//python:defs.bzl"
PREAMBLE = """\
licenses(["notice"])

package(default_visibility = ["//visibility:public"])
"""
_PYTHON_RULES = ("py_binary", "py_library", "py_test")
_DERIVED = frozenset({"name", "srcs", "deps", "testonly"})


@dataclasses.dataclass
class Target:
    """One target of a BUILD file.

    Attributes:
      rule: Name of the rule, such as `py_library`.
      name: The target's name.
      srcs: File names relative to the folder.
      deps: Full labels, `//folder:name`.
      extra: The other attributes, as source text.
    """

    rule: str
    name: str
    srcs: list[str] = dataclasses.field(default_factory=list)
    deps: set[str] = dataclasses.field(default_factory=set)
    extra: dict[str, str] = dataclasses.field(default_factory=dict)


def folders(root: pathlib.Path) -> list[str]:
    """Returns the folders that need a BUILD file, relative to `root`."""
    found = {
        path.parent.relative_to(root).as_posix()
        for top in PYTHON_FOLDERS
        for path in (root / top).rglob("*.py")
    }
    if any((root / NOTEBOOK_FOLDER).glob("*.ipynb")):
        found.add(NOTEBOOK_FOLDER)
    return sorted(found)


def label_of(path: pathlib.PurePosixPath) -> str:
    """Returns the label of the target that holds the file at `path`."""
    folder = path.parent
    name = folder.name if path.name == "__init__.py" else path.stem
    return f"//{folder}:{name}"


def _label_of_module(root: pathlib.Path, module: str) -> str | None:
    """Returns the label of a dotted module, or None if it is not ours."""
    # Also under the name that setup.py installs scripts/ under.
    path = pathlib.PurePosixPath(
        module.replace("tfdp_fl_scripts", "scripts", 1).replace(".", "/")
    )
    if path.parts[0] not in PYTHON_FOLDERS:
        return None
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (root / candidate).is_file():
            return label_of(candidate)
    return None


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walks like `ast.walk`, past blocks that only type checkers read."""
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.orelse:
            yield from _walk(child)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def imported_modules(
    source: str, package: str
) -> Iterator[tuple[str, str | None]]:
    """Yields what a file imports, at its top or inside functions.

    Args:
      source: The file's text.
      package: Dotted name of the folder the file is in, for relative imports.

    Yields:
      Pairs of a dotted module and the name taken from it: `import a.b` gives
      `("a.b", None)`, `from a import b` gives `("a", "b")`.
      `importlib.import_module("a.b")` counts as an import.
    """
    for node in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                module = ".".join([*parts, module] if module else parts)
            yield from ((module, alias.name) for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value), None


def imported_labels(root: pathlib.Path, path: pathlib.Path) -> set[str]:
    """Returns the labels of the first-party modules that a file imports."""
    package = path.parent.relative_to(root).as_posix().replace("/", ".")
    labels = set()
    source = path.read_text(encoding="utf-8")
    for module, name in imported_modules(source, package):
        label = name and _label_of_module(root, f"{module}.{name}")
        labels.add(label or _label_of_module(root, module))
    return labels - {None}


def _rule_for(folder: str, path: pathlib.Path) -> str:
    if path.name.endswith("_test.py"):
        return "py_test"
    is_program = folder in ("scripts", "research", "tools")
    if is_program and "__main__" in path.read_text(encoding="utf-8"):
        return "py_binary"
    return "py_library"


def expected_targets(root: pathlib.Path, folder: str) -> dict[str, Target]:
    """Returns the targets, by name, that the files of a folder ask for."""
    targets = {}
    for path in sorted((root / folder).glob("*.py")):
        label = label_of(pathlib.PurePosixPath(folder, path.name))
        name = label.split(":")[1]
        target = targets.setdefault(name, Target(_rule_for(folder, path), name))
        target.srcs.append(path.name)
        target.deps |= imported_labels(root, path) - {label}
        if target.rule == "py_library" and folder.split("/")[0] == "tests":
            target.extra["testonly"] = "True"
    if folder == NOTEBOOK_FOLDER:
        notebooks = sorted(p.name for p in (root / folder).glob("*.ipynb"))
        targets["notebooks"] = Target("filegroup", "notebooks", notebooks)
    return targets


def _full_label(label: str, folder: str) -> str:
    if label.startswith(":"):
        return f"//{folder}{label}"
    if label.startswith("//") and ":" not in label:
        return f"{label}:{label.rsplit('/', 1)[-1]}"
    return label


def read_build_file(path: pathlib.Path, folder: str) -> list[Target]:
    """Reads a BUILD file's targets; Starlark is also Python syntax.

    Args:
      path: The BUILD file.
      folder: Its folder relative to the repository.

    Returns:
      Its targets in order.

    Raises:
      ValueError: A statement is not a call of a rule.
    """
    targets = []
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        call = getattr(statement, "value", None)
        if isinstance(call, ast.Constant):  # The file's docstring.
            continue
        if not isinstance(call, ast.Call):
            raise ValueError(
                f"{path}:{statement.lineno}: only calls of rules are expected."
            )
        attributes = {k.arg: k.value for k in call.keywords}
        if "name" not in attributes:  # `load`, `package`, `licenses`.
            continue
        literal = {
            key: ast.literal_eval(value)
            for key, value in attributes.items()
            if key in _DERIVED
        }
        targets.append(
            Target(
                rule=ast.unparse(call.func),
                name=literal["name"],
                srcs=list(literal.get("srcs", [])),
                deps={_full_label(d, folder) for d in literal.get("deps", [])},
                extra={
                    key: ast.unparse(value).replace("'", '"')
                    for key, value in attributes.items()
                    if key not in _DERIVED or key == "testonly"
                },
            )
        )
    return targets


def _dep_text(dep: str, folder: str) -> str:
    package, name = dep.removeprefix("//").split(":")
    return f":{name}" if package == folder else dep


def _list_text(values: list[str]) -> str:
    quoted = [f'"{value}"' for value in values]
    if len(quoted) == 1:
        return f"[{quoted[0]}]"
    return "[\n" + "".join(f"        {q},\n" for q in quoted) + "    ]"


def build_file_text(root: pathlib.Path, folder: str) -> str:
    """Returns the BUILD file that a folder should have."""
    targets = expected_targets(root, folder)
    path = root / folder / "BUILD"
    for old in read_build_file(path, folder) if path.exists() else []:
        if old.name in targets:
            targets[old.name].extra = {**old.extra, **targets[old.name].extra}
        elif old.rule not in _PYTHON_RULES:
            targets[old.name] = old
    blocks = []
    rules = sorted({t.rule for t in targets.values()} & {*_PYTHON_RULES})
    if rules:
        quoted = ", ".join(f'"{rule}"' for rule in rules)
        blocks.append(f'load("{RULES_FILE}", {quoted})\n')
    blocks.append(PREAMBLE)
    for _, target in sorted(targets.items()):
        lines = {"name": f'"{target.name}"'}
        if target.srcs:
            lines["srcs"] = _list_text(sorted(target.srcs))
        lines |= dict(sorted(target.extra.items()))
        if target.deps:
            # Of the same folder first, as Bazel's formatter has them.
            deps = {_dep_text(dep, folder) for dep in target.deps}
            ordered = sorted(deps, key=lambda d: (d[0] != ":", d))
            lines["deps"] = _list_text(ordered)
        body = "".join(f"    {k} = {v},\n" for k, v in lines.items())
        blocks.append(f"{target.rule}(\n{body})\n")
    return "\n".join(blocks)


def problems(root: pathlib.Path, folder: str) -> Iterator[str]:
    """Yields how a folder's BUILD file differs from what it should be."""
    path = root / folder / "BUILD"
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    yield from difflib.unified_diff(
        found.splitlines(),
        build_file_text(root, folder).splitlines(),
        f"{folder}/BUILD",
        f"{folder}/BUILD, of what its files import",
        n=1,
        lineterm="",
    )


def dependency_cycle(root: pathlib.Path) -> list[str]:
    """Returns the labels along one cycle of imports, or an empty list."""
    graph = {
        f"//{folder}:{name}": sorted(target.deps)
        for folder in folders(root)
        for name, target in expected_targets(root, folder).items()
    }
    done: set[str] = set()

    def visit(label: str, path: list[str]) -> list[str]:
        if label in path:
            return [*path[path.index(label) :], label]
        if label in done:
            return []
        done.add(label)
        for dep in graph.get(label, []):
            cycle = visit(dep, [*path, label])
            if cycle:
                return cycle
        return []

    for label in graph:
        cycle = visit(label, [])
        if cycle:
            return cycle
    return []


def main() -> int:
    """Writes the BUILD files or says what is wrong with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    root = pathlib.Path(__file__).resolve().parents[1]
    if parser.parse_args().write:
        for folder in folders(root):
            text = build_file_text(root, folder)
            path = root / folder / "BUILD"
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(f"wrote {folder}/BUILD")
        return 0
    found = [p for folder in folders(root) for p in problems(root, folder)]
    print("\n".join(found) or "Every BUILD file is right.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
