"""Noise that is correlated across rounds: strategies and their mathematics."""

from tfdp_fl.matrix_factorization.participation_pattern import (
    ParticipationPattern,
    ParticipationRecord,
    fold,
)
from tfdp_fl.matrix_factorization.strategies import (
    BLT,
    BandedToeplitz,
    Generator,
    NoiseState,
    Strategy,
)

__all__ = [
    "BLT",
    "BandedToeplitz",
    "Generator",
    "NoiseState",
    "ParticipationPattern",
    "ParticipationRecord",
    "Strategy",
    "fold",
]
