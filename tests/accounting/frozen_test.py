"""No epsilon has become smaller than it was, nor more than 2 % larger.

`frozen.json` holds what was reported before dp-accounting's own accountants were
used. It was made once, at the commit that it names:

    PYTHONPATH=. python tests/accounting/frozen_test.py > tests/accounting/frozen.json
"""

from __future__ import annotations

import itertools
import json
import pathlib
import subprocess

import dp_accounting as dp
import pytest

from tfdp_fl import accounting

_PATH = pathlib.Path(__file__).with_name("frozen.json")
_DELTAS = [10.0**-k for k in range(3, 10)]


def _charge(sampling, n, m, event):
    return accounting.RoundCharge(
        sampling=sampling, num_clients=n, clients_per_round=m, event=event
    )


def _runs():
    """Yields (accountant, [(charge, rounds), ...]) of some 160 runs."""
    gaussian = dp.GaussianDpEvent
    sizes = [(100, 50), (1000, 100), (1000, 10), (100_000, 100)]
    for sampling in ("poisson", "fixed_size"):
        for (n, m), z in itertools.product(sizes, (0.7, 1.0, 3.0)):
            for rounds in (1, 100, 3000):
                yield "rdp", [(_charge(sampling, n, m, gaussian(z)), rounds)]
    for sampling in ("shuffled", "cyclic", "separated"):
        for z, rounds in itertools.product((0.3, 1.0, 4.0, 30.0), (1, 10, 400)):
            yield "rdp", [(_charge(sampling, 1000, 100, gaussian(z)), rounds)]
    sampled = dp.PoissonSampledDpEvent(0.05, gaussian(1.0))
    for event in (
        dp.ComposedDpEvent([gaussian(1.2), gaussian(7.0)]),
        dp.SelfComposedDpEvent(gaussian(4.0), 3),
        dp.LaplaceDpEvent(5.0),
        dp.ZCDpEvent(0.02),
        sampled,
        dp.SelfComposedDpEvent(sampled, 5),
        dp.dp_event.RepeatAndSelectDpEvent(gaussian(6.0), 10.0, 1.0),
    ):
        for rounds in (1, 40):
            yield "rdp", [(_charge("cyclic", 500, 20, event), rounds)]
    mixed = [
        (_charge("poisson", 1000, m, gaussian(z)), rounds)
        for m, z, rounds in ((50, 0.9, 20), (100, 1.1, 20), (200, 1.5, 20))
    ]
    for kinds in (1, 2, 3):
        yield "rdp", [*mixed[:kinds], (_charge("cyclic", 99, 9, gaussian(8.0)), 10)]
    for sampling, (n, m), z in itertools.product(
        ("poisson", "fixed_size", "shuffled"), sizes[1:], (1.0, 3.0)
    ):
        for rounds in (10, 200):
            yield "pld", [(_charge(sampling, n, m, gaussian(z)), rounds)]


def _cases():
    for index, (accountant, charges) in enumerate(_runs()):
        yield {
            "accountant": accountant,
            "charges": [
                [json.loads(charge.to_json()), count] for charge, count in charges
            ],
            "delta": _DELTAS[index % len(_DELTAS)],
        }
    # What a client (local) or a record spent by itself.
    for mu_squared, delta in itertools.product(
        (1e-8, 1e-4, 0.01, 0.3, 2.5, 40.0, 3e4), _DELTAS
    ):
        yield {"mu_squared": mu_squared, "delta": delta}


def _epsilon(case):
    if "mu_squared" in case:
        return accounting.epsilon_of_mu_squared(case["mu_squared"], case["delta"])
    history = accounting.PrivacyAccountant()
    for charge, count in case["charges"]:
        history.add(accounting.RoundCharge.from_json(charge), count)
    return history.epsilon(case["delta"], case["accountant"])


@pytest.mark.parametrize("first", range(10))
def test_no_epsilon_is_smaller_or_much_larger(first):
    for case in json.loads(_PATH.read_text())["cases"][first::10]:
        epsilon = _epsilon(case)
        # PLD is dp-accounting's, as it was; another NumPy's FFT rounds otherwise.
        rounding = 1e-7 if case.get("accountant") == "pld" else 1e-9
        assert epsilon >= case["epsilon"] * (1 - rounding), case
        assert epsilon <= case["epsilon"] * 1.02, case


if __name__ == "__main__":
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    lines = [json.dumps({**case, "epsilon": _epsilon(case)}) for case in _cases()]
    print(f'{{"commit": "{commit}", "cases": [', ",\n".join(lines), "]}", sep="\n")
