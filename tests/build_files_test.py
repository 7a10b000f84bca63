"""Every file is in one BUILD target, whose deps are what it imports."""

from __future__ import annotations

import pathlib
import tempfile

from absl.testing import absltest, parameterized

from tools import update_build_files

_ROOT = pathlib.Path(__file__).resolve().parents[1]

_LOAD = 'load("@rules_python//python:defs.bzl", "py_library")\n'
_A = 'py_library(\n    name = "a",\n    srcs = ["a.py"],\n)\n'
_ROOM = 'py_library(\n    name = "room",\n    srcs = ["__init__.py"],\n'


class RepositoryTest(absltest.TestCase):
    def test_build_files_agree_with_files_and_imports(self):
        found = [
            problem
            for folder in update_build_files.folders(_ROOT)
            for problem in update_build_files.problems(_ROOT, folder)
        ]
        if found:
            self.fail("\n".join([*found, "`make build-files` mends this."]))

    def test_every_build_file_belongs_to_a_folder_with_sources(self):
        tops = (
            *update_build_files.PYTHON_FOLDERS,
            update_build_files.NOTEBOOK_FOLDER,
        )
        there = {
            path.parent.relative_to(_ROOT).as_posix()
            for top in tops
            for path in (_ROOT / top).rglob("BUILD")
        }
        self.assertEmpty(there - {*update_build_files.folders(_ROOT)})

    def test_imports_have_no_cycle(self):
        self.assertEqual(update_build_files.dependency_cycle(_ROOT), [])

    def test_nobody_imports_scripts_and_research_stays_outside(self):
        importers = [
            f"//{folder}:{name} imports {dep}"
            for folder in update_build_files.folders(_ROOT)
            if folder.split("/")[0] in ("tfdp_fl", "scripts", "research")
            for name, target in update_build_files.expected_targets(
                _ROOT, folder
            ).items()
            for dep in target.deps
            if dep.startswith(("//scripts", "//research"))
            and not (folder.startswith("research") and "//research" in dep)
        ]
        self.assertEqual(importers, [])


class CheckerTest(parameterized.TestCase):
    """The check itself, on a folder `tfdp_fl/room` of two files."""

    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name)
        self.folder = self.root / "tfdp_fl" / "room"
        self.folder.mkdir(parents=True)
        (self.folder / "__init__.py").write_text("from tfdp_fl.room import a\n")
        (self.folder / "a.py").write_text("import os\n")

    def _problems(self) -> list[str]:
        return list(update_build_files.problems(self.root, "tfdp_fl/room"))

    def _write(self) -> None:
        text = update_build_files.build_file_text(self.root, "tfdp_fl/room")
        (self.folder / "BUILD").write_text(text)

    @parameterized.named_parameters(
        ("target", _ROOM + '    deps = [":a"],\n)\n', '+    name = "a",'),
        ("dep", _A + _ROOM + ")\n", '+    deps = [":a"],'),
        (
            "needless",
            _A + _ROOM + '    deps = [":a", "//tfdp_fl:b"],\n)\n',
            '-    deps = [":a", "//tfdp_fl:b"],',
        ),
        (
            "no_file",
            _A.replace('"a', '"c') + _A + _ROOM + '    deps = [":a"],\n)\n',
            '-    srcs = ["c.py"],',
        ),
    )
    def test_fault_is_shown(self, rules, expected):
        (self.folder / "BUILD").write_text(
            _LOAD + "\n" + update_build_files.PREAMBLE + "\n" + rules
        )
        lines = self._problems()
        self.assertEqual(lines[0], "--- tfdp_fl/room/BUILD")
        self.assertIn(expected, lines)

    def test_missing_file_is_shown(self):
        lines = self._problems()
        self.assertIn('+licenses(["notice"])', lines)
        self.assertIn("+" + _LOAD.strip(), lines)

    def test_what_is_written_passes_and_keeps_other_attributes(self):
        self._write()
        self.assertEqual(self._problems(), [])
        build = self.folder / "BUILD"
        text = build.read_text()
        build.write_text(
            text.replace(
                'srcs = ["a.py"],', 'srcs = ["a.py"],\n    data = ["x"],'
            )
            + 'filegroup(\n    name = "texts",\n    srcs = ["x"],\n)\n'
        )
        (self.folder / "b.py").write_text("from . import a\n")
        self._write()
        self.assertEqual(self._problems(), [])
        self.assertIn('data = ["x"]', build.read_text())
        self.assertIn('name = "texts"', build.read_text())

    @parameterized.named_parameters(
        ("module", "import tfdp_fl.room.a", ["//tfdp_fl/room:a"]),
        ("attribute", "from tfdp_fl.room import X", ["//tfdp_fl/room:room"]),
        ("name_in_module", "from .a import X", ["//tfdp_fl/room:a"]),
        ("relative", "from . import a", ["//tfdp_fl/room:a"]),
        (
            "inside_function",
            "def f():\n  from tfdp_fl.room import a",
            ["//tfdp_fl/room:a"],
        ),
        (
            "by_name",
            "import importlib\nimportlib.import_module('tfdp_fl.room.a')",
            ["//tfdp_fl/room:a"],
        ),
        (
            "types_only",
            "import typing\nif typing.TYPE_CHECKING:\n"
            "  from tfdp_fl.room import a",
            [],
        ),
        ("third_party", "import numpy as np\nimport tfdp_fl_other", []),
    )
    def test_imports_are_found(self, source, expected):
        path = self.folder / "c.py"
        path.write_text(source + "\n")
        self.assertCountEqual(
            update_build_files.imported_labels(self.root, path), expected
        )

    def test_cycle_is_found(self):
        (self.folder / "a.py").write_text("def f():\n  import tfdp_fl.room\n")
        cycle = update_build_files.dependency_cycle(self.root)
        self.assertEqual({*cycle}, {"//tfdp_fl/room:a", "//tfdp_fl/room:room"})


if __name__ == "__main__":
    absltest.main()
