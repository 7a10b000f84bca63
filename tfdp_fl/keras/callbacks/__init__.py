"""Callbacks that know about rounds, next to Keras's own."""

from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback, PrivacyBudget
from tfdp_fl.keras.callbacks.persistence import Ledger, RoundCheckpoint
from tfdp_fl.keras.callbacks.report import Report

__all__ = [
    "FederatedCallback",
    "Ledger",
    "PrivacyBudget",
    "Report",
    "RoundCheckpoint",
]
