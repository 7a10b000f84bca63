"""Secure aggregation: sums a group's updates without showing any one of them."""

from tfdp_fl.secure_aggregation.additive_sharing import AdditiveSecretSharing
from tfdp_fl.secure_aggregation.grouped_sum import (
    GroupedSum,
    split_into_groups,
    sum_in_groups,
)
from tfdp_fl.secure_aggregation.member import (
    AggregationOutcome,
    Member,
    Message,
    RejectedMessageError,
)

__all__ = [
    "AdditiveSecretSharing",
    "AggregationOutcome",
    "GroupedSum",
    "Member",
    "Message",
    "RejectedMessageError",
    "split_into_groups",
    "sum_in_groups",
]
