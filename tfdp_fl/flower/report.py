"""What is guaranteed, and what has to be read together with epsilon."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp_fl import mechanisms
from tfdp_fl.accounting import caveats as caveats_lib
from tfdp_fl.flower import correlated
from tfdp_fl.flower import history as history_lib

_RELATIONS = {
    "fixed_size": "one client is replaced by another",
    "separated": "one client is replaced by nothing, in its place",
}


def facts(
    history: history_lib.RoundHistory,
    mechanism: mechanisms.Mechanism,
    delta: float,
    accountant: str,
    remembered: correlated.Remembered | None,
) -> dict[str, Any]:
    """Returns what was charged, and its caveats, as JSON values.

    Args:
      history: the rounds.
      mechanism: what was released.
      delta: the failure probability.
      accountant: "rdp" or "pld".
      remembered: which clients took part when, where that is kept.
    """
    epsilon = history.epsilon(delta, accountant)
    known = history.epsilon(delta, accountant, cohorts_known=True)
    relation = _RELATIONS["fixed_size" if remembered is None else "separated"]
    if mechanism.guarantee == "local":
        relation = "one client's data are replaced by other data"
    return {
        "epsilon": epsilon if np.isfinite(epsilon) else None,
        "epsilon_if_cohorts_are_known": known if np.isfinite(known) else None,
        "delta": delta,
        "accountant": accountant,
        "guarantee": mechanism.guarantee,
        "relation": relation,
        "rounds": len(history.released),
        "rounds_from_ledger": history.num_from_ledger,
        "caveats": _caveats(history, mechanism, epsilon, known, remembered),
    }


def _caveats(
    history: history_lib.RoundHistory,
    mechanism: mechanisms.Mechanism,
    epsilon: float,
    known: float,
    remembered: correlated.Remembered | None,
) -> list[str]:
    """Returns the sentences that hold, each of which stands by itself."""
    said = [caveats_lib.CAVEATS[key] for key in mechanism.caveats()]
    if remembered is not None:
        names = "by the ids of nodes"
        if remembered.client_of is not None:
            names = "by the names that the server gave to nodes"
        said.append(
            f"{mechanism.own_caveats['participations_checked']} Here they went "
            f"{names}. No amplification by sampling is claimed."
        )
    elif epsilon != known:
        said.append(
            "Epsilon holds towards those who do not know which clients were in "
            "which round, so that must stay secret, and with it the server's log, "
            "which names clients that failed. The server itself, which draws them, "
            f"knows. Towards those who know, epsilon is {known:.4g}."
        )
    if any(r.num_replies < r.clients_per_round for r in history.released):
        said.append(
            "Some drawn clients failed and were left out of their round's sum; "
            "the noise and the divisor stayed as planned. That they failed is "
            "not hidden."
        )
    if mechanism.guarantee == "local":
        said.append(
            "Each client noised its own update, and only that is covered, also "
            "from the server; every client is charged as if it had been in "
            "all rounds. That clients clip and noise is taken on trust."
        )
    elif mechanism.noise_site != "server":
        said.append(
            "Each client added its share of the noise; if clients leave it "
            "out, the noise on the sum is smaller than charged."
        )
    if history.num_from_ledger:
        said.append("Rounds that others wrote into the ledger are charged as well.")
    said.append(
        "The wrapped strategy is handed the noised mean and no metrics of training. "
        "What clients report to an evaluation, and that they failed, carries no "
        "noise and is not covered."
    )
    return said
