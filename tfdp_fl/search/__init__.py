"""Hyperparameter search within a privacy budget, charged as a whole."""

from tfdp_fl.search.private_search import PrivateSearch
from tfdp_fl.search.trial import PrivateScore, PublicScore

__all__ = ["PrivateScore", "PrivateSearch", "PublicScore"]
