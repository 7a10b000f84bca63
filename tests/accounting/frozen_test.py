"""No epsilon has become smaller than it was, nor more than 2 % larger.

`frozen.json` holds what was reported before dp-accounting's own accountants were
used, at the commit that it names: runs of every sampling, and what a client (local)
or a record spent by itself.
"""

from __future__ import annotations

import json
import pathlib

import pytest

from tfdp_fl import accounting

_CASES = json.loads(pathlib.Path(__file__).with_name("frozen.json").read_text())


def _epsilon(case):
    if "mu_squared" in case:
        return accounting.epsilon_of_mu_squared(case["mu_squared"], case["delta"])
    history = accounting.PrivacyAccountant(
        (accounting.RoundCharge.from_json(charge), count)
        for charge, count in case["charges"]
    )
    return history.epsilon(case["delta"], case["accountant"])


@pytest.mark.parametrize("first", range(10))
def test_no_epsilon_is_smaller_or_much_larger(first):
    assert len(_CASES["cases"]) == 210
    for case in _CASES["cases"][first::10]:
        epsilon = _epsilon(case)
        # PLD is dp-accounting's, as it was; another NumPy's FFT rounds otherwise.
        rounding = 1e-7 if case.get("accountant") == "pld" else 1e-9
        assert epsilon >= case["epsilon"] * (1 - rounding), case
        assert epsilon <= case["epsilon"] * 1.02, case
