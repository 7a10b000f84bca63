"""Data for federated training: many clients' examples, and loaders of some."""

from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.sources import ClientExamples, ClientFailure

__all__ = ["ClientExamples", "ClientFailure", "FederatedDataset"]
