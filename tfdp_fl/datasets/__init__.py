"""Data for federated training: clients' examples, and loaders of public data sets."""

from tfdp_fl.datasets.adapters import as_federated, limit_rows_per_client
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.loaders import (
    load_digits,
    load_emnist,
    load_mnist,
    load_shakespeare,
    partition,
    shakespeare_vocabulary,
)
from tfdp_fl.datasets.sources import ClientExamples, ClientFailure

__all__ = [
    "ClientExamples",
    "ClientFailure",
    "FederatedDataset",
    "as_federated",
    "limit_rows_per_client",
    "load_digits",
    "load_emnist",
    "load_mnist",
    "load_shakespeare",
    "partition",
    "shakespeare_vocabulary",
]
