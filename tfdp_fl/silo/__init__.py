"""An organisation in a federation that protects each person in its own table."""

from tfdp_fl.silo.directory import (
    SiloChangedError,
    SiloError,
    SiloInUseError,
    SiloMessageError,
    SiloMovedError,
)
from tfdp_fl.silo.silo import Silo, SiloUpdate

__all__ = [
    "Silo",
    "SiloChangedError",
    "SiloError",
    "SiloInUseError",
    "SiloMessageError",
    "SiloMovedError",
    "SiloUpdate",
]
