"""What is wrong is refused with a reason, wherever it is given.

Every argument of every call that takes no time is each of a few wrong things,
once; `tests/stress/fuzz_stress.py` tries hundreds of all, and two at a time.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
from absl.testing import parameterized

from tests.keras import files
from tests.public_api import calls

_WRONG = (
    *(None, True, -1, 0, 3, 0.5, float("nan"), float("inf"), -0.5, 1e-320),
    *("", "x", b"x", [], {}, (2,), [0.5, float("nan")], object(), len),
    *(np.array([]), np.array([1.0, 2.0]), 1j),
)


class CallsTest(parameterized.TestCase):
    @parameterized.parameters(*(room for room in calls.ROOMS if room != "training"))
    def test_what_is_wrong_is_refused(self, room):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(files.directory(self))
        self.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for call in calls.calls(room):
            call()
            for argument in call.arguments:
                for wrong in _WRONG:
                    with self.subTest(f"{call.function}: {argument}={wrong!r}"):
                        call(**{argument: wrong})
