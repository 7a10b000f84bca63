"""The words for who is trusted, who adds noise, and how clients are drawn.

Users write the strings; `Term.X == "x"` holds both ways, and JSON keeps the string.
"""

from __future__ import annotations

import enum
from typing import Any

# A JSON object.
Json = dict[str, Any]


class Term(str, enum.Enum):
    """A word with a fixed meaning, which prints as the string that it is."""

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return repr(self.value)


class TrustModel(Term):
    """Against whom a guarantee holds."""

    CENTRAL = "central"  # The server is trusted.
    LOCAL = "local"  # Only the client itself: noise is added before anything is sent.
    NONE = "none"  # No guarantee.


class PrivacyUnit(Term):
    """What is protected as a whole."""

    CLIENT = "client"  # All data of a client.
    RECORD = "record"  # One example of a client's.


class NoiseSite(Term):
    """Who adds the noise."""

    SERVER = "server"
    CLIENT = "client"  # Each of m clients adds a share; exactly m must answer.
    EVERY_CLIENT = "every client"  # Each client adds the full noise.


class Sampling(Term):
    """How the clients of a round are drawn."""

    POISSON = "poisson"
    FIXED_SIZE = "fixed_size"
    SHUFFLED = "shuffled"
    CYCLIC = "cyclic"
    RANDOM_ALLOCATION = "random_allocation"
    MIN_SEPARATION = "min_separation"
