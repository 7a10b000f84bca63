"""Packaging of tfdp_fl: the Keras side, which plain pip can install.

TensorFlow Federated is not an extra: plain pip cannot resolve it any more.
The whole stack is `requirements-full.txt`, which `make` installs.
"""

import pathlib
import re
import sys

import setuptools

# pip would look for a TensorFlow first and complain of that.
if not (3, 10) <= sys.version_info < (3, 12):
    sys.exit(
        "tfdp_fl needs Python 3.10 or 3.11, as TensorFlow 2.14 does; this is "
        f"{sys.version.split()[0]}."
    )

_ROOT = pathlib.Path(__file__).resolve().parent


def _version() -> str:
    text = (_ROOT / "tfdp_fl" / "version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def _requirements() -> list[str]:
    text = (_ROOT / "requirements" / "base.in").read_text(encoding="utf-8")
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _description() -> str:
    readme = _ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


setuptools.setup(
    name="tfdp_fl",
    version=_version(),
    description=(
        "Client-level differential privacy for Keras models in federated "
        "learning"
    ),
    long_description=_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.12",
    install_requires=_requirements(),
    # The programs in scripts/ are installed under a name that cannot meet
    # another project's "scripts".
    packages=[
        *setuptools.find_packages(include=["tfdp_fl", "tfdp_fl.*"]),
        "tfdp_fl_scripts",
    ],
    package_dir={"tfdp_fl_scripts": "scripts"},
    entry_points={
        "console_scripts": [
            "tfdp-fl-train = tfdp_fl_scripts.train:run",
            "tfdp-fl-accountant = tfdp_fl_scripts.accountant:run",
        ],
    },
)
