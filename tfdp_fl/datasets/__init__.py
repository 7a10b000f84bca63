"""Data for federated training: many clients' examples, and loaders of some."""

from tfdp_fl.datasets.accepted import as_federated
from tfdp_fl.datasets.digits import load_digits
from tfdp_fl.datasets.emnist import load_emnist
from tfdp_fl.datasets.federated_dataset import FederatedDataset
from tfdp_fl.datasets.loading import load_from_config
from tfdp_fl.datasets.mnist import load_mnist
from tfdp_fl.datasets.partitioning import partition
from tfdp_fl.datasets.persons import bound_rows
from tfdp_fl.datasets.shakespeare import (
    decode_text,
    encode_text,
    load_shakespeare,
    shakespeare_vocabulary,
)
from tfdp_fl.datasets.sources import ClientExamples, ClientFailure

__all__ = [
    "ClientExamples",
    "ClientFailure",
    "FederatedDataset",
    "as_federated",
    "bound_rows",
    "decode_text",
    "encode_text",
    "load_digits",
    "load_emnist",
    "load_from_config",
    "load_mnist",
    "load_shakespeare",
    "partition",
    "shakespeare_vocabulary",
]
