"""Loads the mechanism from outside for one test module, and forgets it."""

import pathlib
import sys
import unittest
from typing import Any

from tfdp_fl.mechanisms import declaration

FILE = pathlib.Path(__file__).with_name("smooth_clipping.py")


def smooth_clipping() -> Any:
    """Returns the class, known by its name until the test module ends."""
    if "smooth" not in declaration.names():
        declaration.load(str(FILE))
        unittest.addModuleCleanup(declaration._by_name.pop, "smooth", None)
        unittest.addModuleCleanup(sys.modules.pop, FILE.stem, None)
    return sys.modules[FILE.stem].SmoothClipping
