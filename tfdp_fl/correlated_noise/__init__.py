"""Noise that is correlated across rounds: strategies and their mathematics."""

from tfdp_fl.correlated_noise.comparison import Comparison, compare
from tfdp_fl.correlated_noise.generators import Generator, Memory
from tfdp_fl.correlated_noise.participation import Participation
from tfdp_fl.correlated_noise.participation_record import ParticipationRecord
from tfdp_fl.correlated_noise.strategies import (
    BLT,
    BandedToeplitz,
    Strategy,
    Tree,
)
from tfdp_fl.correlated_noise.workload import Workload

__all__ = [
    "BLT",
    "BandedToeplitz",
    "Comparison",
    "Generator",
    "Memory",
    "Participation",
    "ParticipationRecord",
    "Strategy",
    "Tree",
    "Workload",
    "compare",
]
