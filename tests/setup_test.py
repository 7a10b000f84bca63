"""What is installed, how packages depend on each other, and light imports."""

import ast
import fnmatch
import itertools
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from unittest import mock

import pytest
import setuptools
import starlark
from packaging import requirements, utils

import tfdp_fl
from tfdp_fl import version
from tools import docs_site

_OURS = ("tfdp_fl", "tfdp_fl_scripts", "scripts", "research", "tests", "tools")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RIVALS = [f"rival-{name}.in" for name in ("fedjax", "flower", "pfl")]
# Where a module's name is not its distribution's.
_DISTRIBUTIONS = {
    "absl": "absl-py",
    "attr": "attrs",
    "grpc": "grpcio",
    "keras": "tensorflow",
    "sklearn": "scikit-learn",
}
# From the top; the packages of a row know nothing of each other.
_LAYERS = (
    ("experiments", "search"),
    ("keras", "learning", "runtimes"),
    ("aggregators", "auditing", "flower"),
    ("engine",),
    ("mechanisms", "secure_aggregation"),
    ("accounting", "correlated_noise", "datasets", "features"),
)


def _python(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )


def _text(name: str) -> str:
    return (_ROOT / name).read_text("utf-8")


def _tracked(*patterns: str, others: bool = False) -> list[str]:
    more = ["--cached", "--others", "--exclude-standard"] if others else []
    listed = subprocess.run(
        ["git", "ls-files", "-z", *more, *patterns],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("the sources are in no git repository")
    return [each for each in listed.stdout.split("\0") if (_ROOT / each).is_file()]


def _wanted(*names: str) -> set[str]:
    """Returns the distributions that files of requirements/ ask for."""
    lines = (
        line.split("#")[0].strip()
        for name in names
        for line in _text(f"requirements/{name}").splitlines()
    )
    return {
        utils.canonicalize_name(requirements.Requirement(line).name)
        for line in lines
        if line and not line.startswith("-r")
    }


def _imported(path: pathlib.Path) -> set[str]:
    """Returns the top-level packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return {name.split(".")[0] for name in found}


def test_what_setup_py_says(monkeypatch):
    monkeypatch.chdir(_ROOT)
    with mock.patch.object(setuptools, "setup") as setup:
        runpy.run_path("setup.py")
    said = setup.call_args.kwargs
    assert (said["name"], said["version"]) == ("tfdp_fl", version.__version__)
    assert f"\nversion: {version.__version__}\n" in _text("CITATION.cff")
    assert f"\n## {version.__version__}" in _text("CHANGELOG.md")
    folders = {
        path.parent.relative_to(_ROOT).as_posix().replace("/", ".")
        for path in (_ROOT / "tfdp_fl").rglob("*.py")
    }
    assert {*said["packages"]} == folders | {"tfdp_fl_scripts"}
    names = {requirements.Requirement(line).name for line in said["install_requires"]}
    assert names >= {"tensorflow", "dp-accounting"}
    others = {"tensorflow-federated", "tensorflow-privacy", "flwr"}
    assert not names & {*others, "jax", "jaxlib", "matplotlib"}


def test_imported_packages_are_declared():
    files = ("base.in", "full.in", "test.in", "test-current.in", "extras.in", *_RIVALS)
    declared = _wanted(*files)
    undeclared = [
        f"{path.name} imports {module}"
        for top in ("tfdp_fl", "scripts", "research")
        for path in sorted((_ROOT / top).rglob("*.py"))
        for module in _imported(path) - {*sys.stdlib_module_names, *_OURS}
        if utils.canonicalize_name(_DISTRIBUTIONS.get(module, module)) not in declared
    ]
    assert undeclared == []


@pytest.mark.parametrize("name", ["requirements-full.txt", "requirements-current.txt"])
def test_every_pinned_line_has_a_version_and_hashes_and_no_address(name):
    lines = [
        line
        for line in _text(name).replace("\\\n", " ").splitlines()
        if line.strip() and not line.strip().startswith("#")
    ]
    assert len(lines) > 30
    right = r"[a-z0-9-]+==[\w.]+( ; [^:]+?)?( +--hash=sha256:\w{64})+"
    assert [line for line in lines if not re.fullmatch(right, line)] == []


def test_a_package_imports_only_from_those_below_it():
    imports = docs_site.imports()
    layer = {name: row for row, names in enumerate(_LAYERS) for name in names}
    assert layer.keys() == imports.keys()
    for name, others in imports.items():
        for other in others:
            assert layer[name] < layer[other], f"{name} imports {other}"


def _targets(build: str) -> dict[str, list[str]]:
    """Evaluates a BUILD file as Bazel would; returns its targets' sources."""
    folder, here = (_ROOT / build).parent, pathlib.PurePosixPath(build).parent
    targets: dict[str, list[str]] = {}

    def declare(name, srcs=(), **_):
        assert name not in targets, f"{build}: {name} is declared twice"
        targets[name] = [(here / src).as_posix() for src in srcs]

    def glob(patterns, exclude=()):
        files = (
            path.relative_to(folder).as_posix()
            for pattern in patterns
            for path in folder.glob(pattern + "/*" * pattern.endswith("**"))
            if path.is_file()
        )
        return [f for f in files if not any(fnmatch.fnmatch(f, e) for e in exclude)]

    module = starlark.Module()
    for rule in ("py_library", "py_binary", "py_test", "filegroup"):
        module.add_callable(rule, declare)
    for ignored in ("licenses", "package", "exports_files"):
        module.add_callable(ignored, lambda *_, **__: None)
    module.add_callable("glob", glob)
    source = re.sub(r"^load\(.*\n", "", _text(build), flags=re.MULTILINE)
    parsed = starlark.parse(build, source, starlark.Dialect.extended())
    starlark.eval(module, parsed, starlark.Globals.standard())
    return targets


def test_every_python_file_is_a_source_of_a_bazel_target():
    folders = {build: _targets(build) for build in _tracked("BUILD", "*/BUILD")}
    lists = [files for targets in folders.values() for files in targets.values()]
    assert {*_tracked("*.py")} - {*itertools.chain(*lists)} == set()
    tests = folders["tests/BUILD"]
    declared = [tests[name][0] for name in tests.keys() - {"helpers"}]
    assert sorted(declared) == sorted(_tracked("tests/*_test.py"))


@pytest.fixture(name="built", scope="module")
def _built(tmp_path_factory):
    """The folder of an sdist and a wheel, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("built")
    # The tests' own stand-ins for environments and results stay behind.
    for each in _tracked(others=True):
        (folder / "in" / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / each, folder / "in" / each)
    out = str(folder / "out")
    for command in ("sdist", "bdist_wheel"):
        done = _python("setup.py", command, "--dist-dir", out, cwd=folder / "in")
        assert done.returncode == 0, done.stderr
    return folder / "out"


def test_the_sdist_has_what_is_needed_to_build_and_to_run(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        held = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {
        each
        for each in _tracked(others=True)
        if each.startswith(("tfdp_fl/", "scripts/", "requirements", "re"))
        and not each.endswith((".png", ".ipynb"))
    }
    assert "scripts/configs/digits_epsilon.json" in wanted
    assert wanted - held == set()


def test_the_wheel_runs_from_a_folder_of_its_own(built, tmp_path):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
        held = set(archive.namelist())
    assert held >= {"tfdp_fl_scripts/configs/digits_epsilon.json", "tfdp_fl/py.typed"}
    assert [each for each in held if each.startswith("tests/")] == []
    (entries,) = tmp_path.glob("*.dist-info/entry_points.txt")
    lines = re.findall(r"^(tfdp-fl-\w+) = ([\w.]+):(\w+)$", entries.read_text(), re.M)
    assert len(lines) == 3
    name, module, function = lines[0]  # Each imports TensorFlow.
    source = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        f"sys.argv = [{name!r}, '--help']; import {module} as m; m.{function}()"
    )
    done = _python("-c", source, cwd=built, env={**os.environ, "PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\ntfdp_fl_scripts.\w+:\n  --", done.stdout)


def test_the_keras_side_needs_and_loads_nothing_else():
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
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    result = _python("-c", source, cwd=_ROOT, env={**os.environ, **quiet})
    assert result.returncode == 0, result.stderr
    added = {name.split(".")[0] for name in json.loads(result.stdout.split("\n")[-2])}
    assert "tfdp_fl" in added
    assert not added & {"IPython", "grpc", "jax", "nbclient", "pandas", "sklearn"}


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    message = "^load_digits needs scikit-learn, .*: pip install scikit-learn"
    with pytest.raises(ImportError, match=message):
        tfdp_fl.datasets.load_digits(num_clients=10)
