"""Noise that is correlated across rounds: strategies and their mathematics."""

from tfdp_fl.correlated_noise.participation import (
    Participation,
    ParticipationRecord,
    fold,
)
from tfdp_fl.correlated_noise.strategies import (
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
    "Participation",
    "ParticipationRecord",
    "Strategy",
    "fold",
]
