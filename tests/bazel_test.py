"""The BUILD files are Starlark, and every Python file is in one of them."""

from __future__ import annotations

import fnmatch
import pathlib
import subprocess

import starlark
from absl.testing import absltest

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", *patterns],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.split()


class _Folder:
    """Evaluates a BUILD file as Bazel would, and keeps what it declares."""

    def __init__(self, path: pathlib.Path):
        self._folder = path.parent
        self.targets: dict[str, list[str]] = {}
        module = starlark.Module()
        for rule in ("py_library", "py_binary", "py_test", "filegroup"):
            module.add_callable(rule, self._declare)
        for ignored in ("licenses", "package", "exports_files"):
            module.add_callable(ignored, lambda *_, **__: None)
        module.add_callable("glob", self._glob)
        source = "".join(
            line
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
            if not line.startswith("load(")
        )
        dialect = starlark.Dialect.extended()
        starlark.eval(
            module,
            starlark.parse(path.name, source, dialect),
            starlark.Globals.standard(),
        )

    def _declare(self, name, srcs=(), **_):
        if name in self.targets:
            raise AssertionError(f"{self._folder.name}: {name} is declared twice")
        self.targets[name] = list(srcs)

    def _glob(self, patterns, exclude=()):
        found = set[str]()
        for pattern in patterns:
            for path in self._folder.glob(
                f"{pattern}/*" if pattern.endswith("**") else pattern
            ):
                if path.is_file():
                    found.add(path.relative_to(self._folder).as_posix())
        return sorted(
            path for path in found if not any(fnmatch.fnmatch(path, e) for e in exclude)
        )


class BazelTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folders = {
            path: _Folder(_ROOT / path) for path in _tracked("BUILD", "*/BUILD")
        }

    def test_every_python_file_is_a_source_of_a_target(self):
        sources = set()
        for path, folder in self.folders.items():
            where = pathlib.PurePosixPath(path).parent
            for files in folder.targets.values():
                sources |= {(where / file).as_posix() for file in files}
        self.assertEmpty({*_tracked("*.py")} - sources - {"setup.py"})

    def test_every_test_is_a_target(self):
        declared = self.folders["tests/BUILD"].targets
        tests = [files[0] for name, files in declared.items() if name != "helpers"]
        self.assertCountEqual(
            [f"tests/{test}" for test in tests], _tracked("tests/*_test.py")
        )
