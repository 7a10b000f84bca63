"""What is installed, how packages depend on each other, and light imports."""

import ast
import graphlib
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
from tools import docs_site

_OURS = ("tfdp_fl", "tfdp_fl_scripts", "scripts", "research", "tests", "tools")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_RIVALS = [f"rival-{name}.in" for name in ("fedjax", "flower", "pfl")]
# Where a module's name is not its distribution's.
_DISTRIBUTIONS = {
    "absl": "absl-py",
    "attr": "attrs",
    "keras": "tensorflow",
    "sklearn": "scikit-learn",
}
# From the top; the packages of a row know nothing of each other.
_LAYERS = (
    ("experiments", "search", "silo"),
    ("keras", "aggregators", "learning", "runtimes"),
    ("tff", "flower"),
    ("engine",),
    ("mechanisms", "secure_aggregation"),
    ("accounting", "datasets", "matrix_factorization"),
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
    command = ["git", "ls-files", "-z", *more, *patterns]
    how = {"capture_output": True, "text": True, "check": False}
    listed = subprocess.run(command, cwd=_ROOT, **how)
    if listed.returncode:
        pytest.skip("the sources are in no git repository")
    return [each for each in listed.stdout.split("\0") if (_ROOT / each).is_file()]


def _wanted(*names: str) -> set[str]:
    """Returns the distributions that files of requirements/ ask for."""
    text = "".join(_text(f"requirements/{name}") for name in names)
    lines = re.findall(r"^[^#\s-][^#\n]*", text, re.M)
    return {
        utils.canonicalize_name(requirements.Requirement(line).name) for line in lines
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
    assert (said["name"], said["version"]) == ("tfdp_fl", tfdp_fl.__version__)
    assert f"\nversion: {tfdp_fl.__version__}\n" in _text("CITATION.cff")
    assert f"\n## {tfdp_fl.__version__}" in _text("CHANGELOG.md")
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
    files = ("base.in", "full.in", "test.in", "test-current.in", "extras.in")
    files += ("keras-hub.in", "nvflare.in", *_RIVALS)
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
    lines = re.findall(r"^ *[^#\s].*", _text(name).replace("\\\n", " "), re.M)
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


def test_no_circle_of_imports():
    modules = {
        ".".join(path.relative_to(_ROOT).with_suffix("").parts): path
        for path in (_ROOT / "tfdp_fl").rglob("*.py")
    }
    # Those for type checkers alone count as well.
    below = {}
    for name, path in modules.items():
        found = below.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    own = f"{node.module}.{alias.name}"
                    package = f"{node.module}.__init__"
                    found |= {*[m for m in (own, node.module) if m in modules][:1]}
                    if own not in modules and package in modules:
                        found.add(package)
    del below["tfdp_fl.__init__"]
    graphlib.TopologicalSorter(below).prepare()  # Raises for a circle.


def test_every_python_file_is_a_source_of_a_bazel_target():
    builds = {build: _text(build) for build in _tracked("BUILD", "*/BUILD")}
    sources = {
        path.relative_to(_ROOT).as_posix()
        for build, text in builds.items()
        for pattern in re.findall(r'"([^":]*(?:\.py|\*\*))"', text)
        for path in (_ROOT / build).parent.glob(pattern + "/*" * pattern.endswith("**"))
    }
    assert {*_tracked("*.py")} - sources == set()
    for build, text in builds.items():
        starlark.parse(build, text, starlark.Dialect.extended())


def test_the_sdist_builds_and_the_wheel_runs_from_a_folder_of_its_own(tmp_path):
    # The tests' own stand-ins for environments and results stay behind.
    source, out = tmp_path / "in", tmp_path / "out"
    for each in _tracked(others=True):
        (source / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / each, source / each)
    for command in ("sdist", "bdist_wheel"):
        done = _python("setup.py", command, "--dist-dir", str(out), cwd=source)
        assert done.returncode == 0, done.stderr
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        held = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {
        each
        for each in _tracked(others=True)
        if each.startswith(("tfdp_fl/", "scripts/", "requirements", "re"))
        and not each.endswith((".png", ".ipynb"))
    }
    assert wanted - held == set()
    with zipfile.ZipFile(next(out.glob("*.whl"))) as archive:
        archive.extractall(tmp_path)
        held = set(archive.namelist())
    assert held >= {"tfdp_fl_scripts/configs/digits_epsilon.json", "tfdp_fl/py.typed"}
    assert [each for each in held if each.startswith("tests/")] == []
    (entries,) = tmp_path.glob("*.dist-info/entry_points.txt")
    lines = re.findall(r"^(tfdp-fl-\w+) = ([\w.]+):(\w+)$", entries.read_text(), re.M)
    assert len(lines) == 3
    name, module, function = lines[0]  # Each imports TensorFlow.
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        f"sys.argv = [{name!r}, '--help']; import {module} as m; m.{function}()"
    )
    done = _python("-c", program, cwd=out, env={**os.environ, "PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\ntfdp_fl_scripts.\w+:\n  --", done.stdout)


def test_the_keras_side_needs_and_loads_nothing_else():
    # In a process of its own: what tfdp_fl adds to what TensorFlow brings.
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
