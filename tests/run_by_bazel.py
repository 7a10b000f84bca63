"""Runs the file of tests that Bazel names, as pytest does everywhere else."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
