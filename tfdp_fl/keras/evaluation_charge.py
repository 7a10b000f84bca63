"""Charging what is released about clients beside the rounds of training."""

from __future__ import annotations

import collections
from typing import Any

from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras import callbacks as callbacks_lib
from tfdp_fl.keras import model_history


def check(federated_model: Any, charge: charge_lib.RoundCharge) -> None:
    """Raises ValueError if a release cannot be paid for.

    Args:
      federated_model: The `DPFederatedModel`.
      charge: What it costs.
    """
    model_history.check_owner(federated_model)
    spending = federated_model.spending
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
    for callback in federated_model.federated_callbacks:
        if callback.federated_model is not federated_model:
            raise ValueError(
                f"private must be None where the {type(callback).__name__} of the last "
                "fit went on to another model, whose account it would ask: give each "
                "model callbacks of its own."
            )
        callback.check_release(charge)


def pay(federated_model: Any, charge: charge_lib.RoundCharge) -> None:
    """Charges a release: first in every ledger, then in memory.

    Budgets are asked again, where nothing else can spend what they allow.

    Args:
      federated_model: The `DPFederatedModel`.
      charge: What it costs.

    Raises:
      ValueError: A budget does not allow it.
      LedgerError: A ledger could not be written; nothing may be released.
    """
    run = spending_lib.new_evaluation()
    spent = spending_lib.OtherRun(charges=collections.Counter([charge]), mu_squared=0.0)
    checkpoints = []
    with model_history.charging:
        check(federated_model, charge)
        for callback in federated_model.federated_callbacks:
            if isinstance(callback, callbacks_lib.RoundCheckpoint):
                checkpoints.append(callback)
                callback.ledger.record_evaluation(run, charge)
            elif isinstance(callback, callbacks_lib.Ledger):
                callback.record_evaluation(run, charge)
        federated_model.spending.keep_others({run: spent})
        for checkpoint in checkpoints:
            checkpoint.save_after_evaluation()
