"""Runs one file of tests, as Bazel asks for."""

import sys

import pytest

sys.exit(pytest.main(sys.argv[1:]))
