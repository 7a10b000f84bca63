"""What ends a run.

One client's reply does not, unless the user chose to abort rounds for it.
"""

from __future__ import annotations


class RoundError(RuntimeError):
    """A round cannot be released, or the run cannot go on."""


class RoundNotConfiguredError(RoundError):
    """Results came for a round whose model and clip norm are not known."""


class RoundsAbandonedError(RoundError):
    """Round after round was abandoned; the message says why."""
