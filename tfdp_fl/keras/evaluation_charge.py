"""Charging what is released about clients beside the rounds of training."""

from __future__ import annotations

import collections
import math
from typing import Any

from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras import callbacks as callbacks_lib


def check(federated_model: Any, charge: charge_lib.RoundCharge) -> None:
    """Raises ValueError if a release cannot be paid for.

    Args:
      federated_model: The `DPFederatedModel`.
      charge: What it costs.
    """
    spending, target = federated_model.spending, federated_model.target
    if spending is None:
        raise ValueError(
            "private must be None before the first fit: there is no account "
            "yet that it could be charged to."
        )
    if spending.by_client:
        raise ValueError(
            "private must be None with a mechanism whose guarantee is "
            f"{spending.guarantee}: whoever adds this noise sees the clients' "
            "metrics first, so it has a central guarantee."
        )
    spending.central.would_be(charge)  # Of the same neighbouring relation.
    if target is None or target.on_overspend != "stop":
        return
    after = spending.epsilon_after(charge, 0.0, target.delta, target.accountant)
    if after > target.epsilon:
        raise ValueError(
            f"private would bring epsilon to {_up(after)} at delta="
            f"{target.delta:g}, above the target_epsilon={target.epsilon:g} "
            "that this model keeps: raise its noise_multiplier, ask fewer "
            "clients, train fewer rounds, or make the model with "
            "on_overspend='warn'. Nothing was evaluated."
        )


def pay(
    federated_model: Any,
    charge: charge_lib.RoundCharge,
    keeping: list[callbacks_lib.FederatedCallback],
) -> None:
    """Charges a release: first in every ledger, then in memory.

    Args:
      federated_model: The `DPFederatedModel`.
      charge: What it costs.
      keeping: The ledgers and checkpoints of its last `fit`.

    Raises:
      LedgerError: A ledger could not be written; nothing may be released.
    """
    run = spending_lib.new_evaluation()
    spent = spending_lib.OtherRun(charges=collections.Counter([charge]), mu_squared=0.0)
    checkpoints = []
    for each in keeping:
        ledger = each
        if isinstance(each, callbacks_lib.RoundCheckpoint):
            checkpoints.append(each)
            ledger = each.ledger
        assert isinstance(ledger, callbacks_lib.Ledger)
        ledger.record_evaluation(run, charge)
    federated_model.spending.keep_others({run: spent})
    for checkpoint in checkpoints:
        checkpoint.save_after_evaluation()


def _up(epsilon: float) -> str:
    """Returns epsilon rounded up to three decimals."""
    if not math.isfinite(epsilon):
        return "infinity"
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}"
