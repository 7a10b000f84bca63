"""Data for federated training: many clients' examples, and loaders of some."""

from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.loaders import (
    load_digits,
    load_emnist,
    load_mnist,
    load_shakespeare,
    partition,
    shakespeare_vocabulary,
)
from tfdp_fl.datasets.persons import as_federated, bound_rows
from tfdp_fl.datasets.sources import ClientExamples, ClientFailure

__all__ = [
    "ClientExamples",
    "ClientFailure",
    "FederatedDataset",
    "as_federated",
    "bound_rows",
    "load_digits",
    "load_emnist",
    "load_mnist",
    "load_shakespeare",
    "partition",
    "shakespeare_vocabulary",
]
