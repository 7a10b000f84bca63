"""Attacks on one's own training that estimate its epsilon."""

from tfdp_fl.auditing.audit import CanaryAudit, Estimate, Scores

__all__ = ["CanaryAudit", "Estimate", "Scores"]
