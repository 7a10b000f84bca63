"""Nothing public is missing, and what is wrong is refused with a reason.

Every argument of every call that takes no time is each of a few wrong things,
once; `tests/stress/fuzz_stress.py` tries hundreds of all, and two at a time.
"""

from __future__ import annotations

import os
import warnings

import numpy as np
from absl.testing import absltest, parameterized

from tests.keras import files
from tests.public_api import calls, names

_WRONG = (
    *(None, True, -1, 0, 3, 0.5, float("nan"), float("inf"), -0.5, 1e-320),
    *("", "x", b"x", [], {}, (2,), [0.5, float("nan")], object(), len),
    *(np.array([]), np.array([1.0, 2.0]), 1j),
)


class CallsTest(parameterized.TestCase):
    def test_nothing_public_is_missing(self):
        called = {name.partition(" ")[0] for name in calls.calls()}
        public = set(names.public_names())
        missing = public - called - names.NOT_CALLED.keys()
        self.assertEmpty(missing, "neither called nor named with a reason")
        self.assertEmpty(called & names.NOT_CALLED.keys())
        # On the stack that has everything, no name is of something that went.
        if names.TFF:
            self.assertContainsSubset(called, public)
            self.assertContainsSubset(names.NOT_CALLED, public)

    @parameterized.parameters(
        *(name for name in calls.calls() if not calls.is_slow(name))
    )
    def test_what_is_wrong_is_refused(self, name):
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(files.directory(self))
        self.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        call = calls.calls()[name]()
        call()
        for argument in call.arguments:
            for wrong in _WRONG:
                with self.subTest(f"{argument}={wrong!r}"):
                    call(**{argument: wrong})


if __name__ == "__main__":
    absltest.main()
