"""What has to be read together with epsilon."""

from __future__ import annotations

from typing import Any

from tfdp_fl import mechanisms
from tfdp_fl.accounting import caveats as caveats_lib
from tfdp_fl.flower import remembering, rounds


def facts(
    history: rounds.RoundHistory, num_clients: int | None, guarantee: str
) -> dict[str, Any]:
    """Returns what was charged, as JSON values.

    Args:
      history: the rounds.
      num_clients: see `DPFedAvgFixed.privacy_epsilon`.
      guarantee: "central" or "local".
    """
    charged = [r.charge(num_clients).num_clients for r in history.released]
    relation = "one client is replaced by another"
    if isinstance(history, remembering.SeparatedHistory):
        relation = "one client is replaced by nothing, in its place"
    if guarantee == "local":
        relation = "one client's data are replaced by other data"
    return {
        "guarantee": guarantee,
        "relation": relation,
        "rounds": len(history.released),
        "rounds_from_ledger": len(history.earlier),
        "num_clients": [min(charged), max(charged)] if charged else None,
    }


def caveats(
    history: rounds.RoundHistory,
    *,
    averages: bool,
    is_flowers: bool,
    mechanism: mechanisms.Mechanism,
    remembered: remembering.Remembered | None = None,
) -> list[str]:
    """Returns the sentences that hold, each of which stands by itself.

    Args:
      history: the rounds.
      averages: whether the user vouched for the strategy.
      is_flowers: whether the strategy is one of Flower's.
      mechanism: what was released.
      remembered: who took part when, where that is kept.
    """
    released = history.released
    said = []
    if averages:
        said.append(
            "That the wrapped strategy makes of a mean what it should was "
            "vouched for by the user; it was handed nothing else."
        )
    elif not is_flowers:
        said.append(
            "The wrapped strategy is none of Flower's; what it makes of the "
            "noised mean was not looked at, and costs nothing more."
        )
    if any(r.available is None for r in released):
        said.append(
            "The client manager did not tell how many clients there were; "
            "their number is the user's word."
        )
    said += [caveats_lib.CAVEATS[key] for key in mechanism.caveats()]
    central = mechanism.guarantee == "central"
    if remembered is not None:
        said.append(_of_separation(mechanism, remembered))
    elif central and any(
        r.available is not None and r.num_clients == r.clients_per_round < r.available
        for r in released
    ):
        said.append(
            "Rounds whose clients were not seen to be drawn by the client "
            "manager, or by a strategy known to sample uniformly, are charged "
            "without amplification by sampling."
        )
    if any(r.num_replies < r.clients_per_round for r in released):
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
    if history.earlier:
        said.append("Rounds that the ledger held before are charged as well.")
    said.append(
        "Losses, metrics and failures that clients report carry no noise and "
        "are not covered."
    )
    return said


def _of_separation(
    mechanism: mechanisms.Mechanism, remembered: remembering.Remembered
) -> str:
    """Returns what holds of clients who come as they like."""
    names = "by the ids of nodes"
    if remembered.client_of is not None:
        names = "by the names that the server gave to nodes"
    return (
        f"{mechanism.own_caveats['participations_checked']} Here they went "
        f"{names}. No amplification by sampling is claimed."
    )
