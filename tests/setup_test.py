"""What is installed: setup.py, the pinned requirements, light imports."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from unittest import mock

import setuptools
from absl.testing import absltest, parameterized
from packaging import requirements, utils

from tfdp_fl import version

_OURS = ("tfdp_fl", "tfdp_fl_scripts", "scripts", "research", "tests", "tools")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PINNED_FILES = ("requirements-full.txt", "requirements-current.txt")
# Where a module's name is not its distribution's.
_DISTRIBUTIONS = {
    "absl": "absl-py",
    "attr": "attrs",
    "grpc": "grpcio",
    "keras": "tensorflow",
    "sklearn": "scikit-learn",
}


def _setup_arguments() -> dict:
    """Returns the arguments with which setup.py calls setuptools."""
    directory = os.getcwd()
    os.chdir(_ROOT)
    try:
        with mock.patch.object(setuptools, "setup") as setup:
            runpy.run_path("setup.py")
    finally:
        os.chdir(directory)
    return setup.call_args.kwargs


def _wanted(name: str) -> dict[str, requirements.Requirement]:
    """Returns the requirements of one file of requirements/, by name."""
    text = (_ROOT / "requirements" / name).read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    parsed = [
        requirements.Requirement(line)
        for line in lines
        if line and not line.startswith("-r")
    ]
    return {utils.canonicalize_name(r.name): r for r in parsed}


def _pinned_lines(name: str) -> list[str]:
    """Returns the logical lines of a pinned file, hashes included."""
    text = (_ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
    return [line for line in text.splitlines() if not line.strip().startswith("#")]


class SetupTest(absltest.TestCase):
    def test_name_and_version(self):
        arguments = _setup_arguments()
        self.assertEqual(arguments["name"], "tfdp_fl")
        self.assertEqual(arguments["version"], version.__version__)

    def test_citation_and_changelog_know_the_version(self):
        citation = (_ROOT / "CITATION.cff").read_text(encoding="utf-8")
        self.assertIn(f"\nversion: {version.__version__}\n", citation)
        changelog = (_ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        self.assertIn(f"\n## {version.__version__}", changelog)

    def test_every_folder_is_packaged(self):
        folders = {
            path.parent.relative_to(_ROOT).as_posix().replace("/", ".")
            for path in (_ROOT / "tfdp_fl").rglob("*.py")
        }
        arguments = _setup_arguments()
        self.assertEqual({*arguments["packages"]}, folders | {"tfdp_fl_scripts"})
        self.assertEqual(arguments["package_dir"], {"tfdp_fl_scripts": "scripts"})

    def test_plain_install_needs_neither_tff_nor_tf_privacy(self):
        names = {
            requirements.Requirement(line).name
            for line in _setup_arguments()["install_requires"]
        }
        self.assertContainsSubset({"tensorflow", "dp-accounting"}, names)
        self.assertNoCommonElements(
            names,
            {
                *("tensorflow-federated", "tensorflow-privacy", "flwr"),
                *("jax", "jaxlib", "matplotlib"),
            },
        )

    def test_imported_packages_are_declared(self):
        declared = {
            name
            for file in (
                "base.in",
                "full.in",
                "test.in",
                "test-current.in",
                "extras.in",
                *(f"rival-{name}.in" for name in ("fedjax", "flower", "pfl")),
            )
            for name in _wanted(file)
        }
        undeclared = []
        for top in ("tfdp_fl", "scripts", "research"):
            for path in sorted((_ROOT / top).rglob("*.py")):
                for module in _imported(path) - {*sys.stdlib_module_names, *_OURS}:
                    distribution = _DISTRIBUTIONS.get(module, module)
                    if utils.canonicalize_name(distribution) not in declared:
                        undeclared.append(f"{path.name} imports {module}")
        self.assertEqual(undeclared, [])


def _imported(path: pathlib.Path) -> set[str]:
    """Returns the top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return {name.split(".")[0] for name in found}


class BuiltTest(absltest.TestCase):
    """What is in a wheel and in an sdist, built from a copy of the sources."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        folder = pathlib.Path(temporary.name)
        # The tests' own stand-ins for environments and results stay behind.
        tracked = subprocess.run(
            [
                *("git", "ls-files", "-z", "--cached", "--others"),
                "--exclude-standard",
            ],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if tracked.returncode:
            raise unittest.SkipTest("the sources are in no git repository")
        cls.sources = [each for each in tracked.stdout.split("\0") if each]
        for each in cls.sources:
            if (_ROOT / each).is_file():
                (folder / "in" / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(_ROOT / each, folder / "in" / each)
        for command in ("sdist", "bdist_wheel"):
            subprocess.run(
                [
                    *(sys.executable, "setup.py", "-q", command),
                    *("--dist-dir", str(folder / "out")),
                ],
                cwd=folder / "in",
                capture_output=True,
                check=True,
            )
        (cls.sdist,) = (folder / "out").glob("*.tar.gz")
        (cls.wheel,) = (folder / "out").glob("*.whl")
        cls.folder = folder

    def test_the_sdist_has_what_is_needed_to_build_and_to_run(self):
        with tarfile.open(self.sdist) as archive:
            held = {name.split("/", 1)[-1] for name in archive.getnames()}
        wanted = [
            each
            for each in self.sources
            if each.startswith(("tfdp_fl/", "scripts/", "requirements", "re"))
            and (_ROOT / each).is_file()
            and not each.endswith((".png", ".ipynb"))
        ]
        self.assertIn("scripts/configs/digits_epsilon.json", wanted)
        self.assertEqual(sorted(set(wanted) - held), [])

    def test_the_wheel_runs_from_a_folder_of_its_own(self):
        there = self.folder / "installed"
        with zipfile.ZipFile(self.wheel) as archive:
            archive.extractall(there)
        held = {path.relative_to(there).as_posix() for path in there.rglob("*")}
        self.assertIn("tfdp_fl_scripts/configs/digits_epsilon.json", held)
        self.assertIn("tfdp_fl/py.typed", held)
        self.assertFalse([each for each in held if each.startswith("tests/")])
        (entries,) = there.glob("*.dist-info/entry_points.txt")
        lines = re.findall(
            r"^(tfdp-fl-\w+) = ([\w.]+):(\w+)$", entries.read_text(), re.M
        )
        self.assertLen(lines, 3)
        for name, module, function in lines[:2]:  # Each imports TensorFlow.
            done = subprocess.run(
                [
                    *(sys.executable, "-c"),
                    f"import sys; sys.path.insert(0, {str(there)!r});"
                    f"sys.argv = [{name!r}, '--help'];"
                    f"import {module} as m; m.{function}()",
                ],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": ""},
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr, "", name)
            self.assertRegex(done.stdout, r"\ntfdp_fl_scripts.\w+:\n  --")


class PinnedRequirementsTest(parameterized.TestCase):
    @parameterized.parameters(*_PINNED_FILES)
    def test_every_line_has_a_version_and_hashes_and_no_address(self, name):
        lines = [line for line in _pinned_lines(name) if line.strip()]
        self.assertGreater(len(lines), 30)
        for line in lines:
            self.assertRegex(
                line,
                r"^[a-z0-9-]+==[\w.]+( ; [^:]+?)?( +--hash=sha256:\w{64})+$",
            )


class ImportTest(absltest.TestCase):
    def test_the_keras_side_needs_and_loads_nothing_else(self):
        # In a process of its own, because this one has imported everything.
        # TensorFlow brings jax where it is installed; what counts is what
        # tfdp_fl adds.
        source = """
import json, sys, tensorflow
for name in ("tensorflow_federated", "tensorflow_privacy", "flwr", "nbformat",
             "cryptography", "matplotlib", "hypothesis", "pytest"):
    sys.modules[name] = None
before = set(sys.modules)
import tfdp_fl
tfdp_fl.DPFederatedModel
added = sorted(set(sys.modules) - before)
tfdp_fl.datasets.load_digits(num_clients=10)
tfdp_fl.accounting.epsilon
print(json.dumps(added))
"""
        result = subprocess.run(
            [sys.executable, "-c", source],
            cwd=_ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(result.returncode, 0, msg=result.stderr)
        added = json.loads(result.stdout.splitlines()[-1])
        self.assertIn("tfdp_fl", added)
        late = {"IPython", "grpc", "jax", "nbclient", "pandas", "sklearn"}
        self.assertNoCommonElements({name.split(".")[0] for name in added}, late)
