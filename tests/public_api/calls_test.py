"""What is wrong is refused with a reason, wherever it is given.

Every argument of every call that takes no time is each of a few wrong things,
once. A call raises what is not documented, and where an error says nothing;
`tests/stress/fuzz_stress.py` tries hundreds of all, and two at a time.
"""

import numpy as np
import pytest

from tests.public_api import calls

_WRONG = (
    *(None, True, -1, 0, 3, 0.5, float("nan"), float("inf"), -0.5),
    *("", "x", b"x", [], {}, (2,), [0.5, float("nan")], object(), len),
    *(np.array([]), np.array([1.0, 2.0]), 1j),
)


@pytest.mark.parametrize("room", [room for room in calls.ROOMS if room != "training"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_refused(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in calls.calls(room):
        call()
        for argument in call.arguments:
            for wrong in _WRONG:
                call(**{argument: wrong})
