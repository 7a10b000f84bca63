"""Packaging of tfdp_fl: what plain pip can install, on today's TensorFlow.

TensorFlow Federated is not an extra: plain pip cannot resolve it any more.
The stack with TFF is `requirements-full.txt`, which `make` installs.
"""

import pathlib
import re
import sys

import setuptools

# pip would look for a TensorFlow first and complain of that.
if not (3, 10) <= sys.version_info < (3, 14):
    sys.exit(
        "tfdp_fl needs Python 3.10, 3.11, 3.12 or 3.13, as TensorFlow does; "
        f"this is {sys.version.split()[0]}."
    )

_ROOT = pathlib.Path(__file__).resolve().parent


def _version() -> str:
    text = (_ROOT / "tfdp_fl" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def _lines(name: str) -> list[str]:
    text = (_ROOT / "requirements" / name).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _requirements() -> list[str]:
    return [line for line in _lines("base.in") if not line.startswith("#")]


def _extras() -> dict[str, list[str]]:
    """Returns what each extra brings; `# [name]` begins one."""
    extras: dict[str, list[str]] = {}
    for line in _lines("extras.in"):
        if line.startswith("# ["):
            extras[line[3:-1]] = []
        elif not line.startswith("#"):
            extras[[*extras][-1]].append(line)
    return extras


def _description() -> str:
    readme = _ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setuptools.setup(
    name="tfdp_fl",
    version=_version(),
    description=(
        "Client-level differential privacy for Keras models in federated learning"
    ),
    long_description=_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.14",
    install_requires=_requirements(),
    extras_require=_extras(),
    # The programs in scripts/ are installed under a name that cannot meet
    # another project's "scripts", with the configurations of theirs.
    packages=[
        *setuptools.find_packages(include=["tfdp_fl", "tfdp_fl.*"]),
        "tfdp_fl_scripts",
    ],
    package_dir={"tfdp_fl_scripts": "scripts"},
    package_data={
        "tfdp_fl": ["py.typed", "accounting/*.txt", "keras/report.html"],
        "tfdp_fl_scripts": ["configs/*.json"],
    },
    entry_points={
        "console_scripts": [
            f"tfdp-fl-{name} = tfdp_fl_scripts.{name}:run"
            for name in (
                "train",
                "accountant",
                "sweep",
            )
        ],
    },
)
