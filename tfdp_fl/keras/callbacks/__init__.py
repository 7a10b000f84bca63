"""Callbacks that know about rounds, next to Keras's own."""

from tfdp_fl.keras.callbacks.federated_callback import (
    FederatedCallback,
    KeepTarget,
    PrivacyBudget,
    checked,
)
from tfdp_fl.keras.callbacks.ledger import (
    Ledger,
    RoundCheckpoint,
    ledger_of_resumed,
)
from tfdp_fl.keras.callbacks.report import Report

__all__ = [
    "FederatedCallback",
    "KeepTarget",
    "Ledger",
    "PrivacyBudget",
    "Report",
    "RoundCheckpoint",
    "checked",
    "ledger_of_resumed",
]
