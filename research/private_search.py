r"""What noise a search takes that is counted, beside one run and an honest grid.

    python research/private_search.py

24 expected trials at epsilon 2 and 8, for digits and for the cohorts of Geyer's table.
Prints JSON into research/private_search.json.
"""

from __future__ import annotations

import json
import pathlib

import dp_accounting

from tfdp_fl import accounting
from tfdp_fl.accounting import search

# N, m, rounds, delta.
_RUNS = [(500, 100, 60, 1e-3), (100, 100, 120, 1e-3), (1_000, 200, 150, 1e-5)]
_RUNS.append((10_000, 400, 300, 1e-6))


def _of_search(plan: tuple, epsilon: float, rounds: int, delta: float, law: str):
    """Returns the noise multiplier of a search of 24 expected trials."""
    count = search.TrialCount.named(24, law)

    def charge(event: dp_accounting.DpEvent, plan=plan) -> accounting.RoundCharge:
        names = ("sampling", "num_clients", "clients_per_round")
        return accounting.RoundCharge(
            **dict(zip(names, plan, strict=True)), event=event
        )

    def charges(z: float) -> list[accounting.RoundCharge]:
        one_round = charge(dp_accounting.GaussianDpEvent(z)).dp_event()
        trial = dp_accounting.SelfComposedDpEvent(one_round, rounds)
        best = search.BestOfTrialsDpEvent((trial,), count.mean, count.shape)
        return [charge(best, ("poisson", plan[1], plan[1]))]

    return accounting.calibrate(charges, epsilon, delta)


def costs() -> list[dict]:
    """Returns the noise that a search takes, beside one run and a grid of 24."""
    rows = []
    for n, m, rounds, delta in _RUNS:
        for epsilon in (2.0, 8.0):
            plan = ("poisson", n, m)
            row = {"n": n, "m": m, "rounds": rounds, "epsilon": epsilon}
            for name, times in (("one", 1), ("grid", 24)):
                row[name] = accounting.calibrate_noise_multiplier(
                    epsilon, *plan, rounds * times, delta
                )
            for law in ("poisson", "geometric", "logarithmic"):
                row[law] = _of_search(plan, epsilon, rounds, delta, law)
            rows.append(row)
    return rows


if __name__ == "__main__":
    found = json.dumps({"costs": costs()}, indent=1)
    print(found)
    pathlib.Path(__file__).with_suffix(".json").write_text(found + "\n", "utf-8")
