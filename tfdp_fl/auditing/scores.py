"""What an update shows of each canary."""

from __future__ import annotations

import numpy as np

from tfdp_fl.auditing.canaries import Canaries


def scores(
    canaries: Canaries,
    update: np.ndarray,
    added: np.ndarray,
    participations: np.ndarray,
) -> np.ndarray:
    """Returns how much of each canary is in an update, beside what is not it.

    Who attacks one client knows the others. So what all canaries added is
    taken out, by least squares (a share of `added` that explains the update
    best), and the canary's own share is put back.

    Args:
      canaries: All of them.
      update: Float [d], how the model moved.
      added: Float [d], the sum of the canaries' directions that went into it.
      participations: Int [count], how often each did.

    Returns:
      Float64 [count]. A canary that is not in the update has N(0, 1/d), to a
      good approximation for d in the thousands, whatever else the update is.
      Zeros for an update of zero.
    """
    update = np.asarray(update, np.float64)
    added = np.asarray(added, np.float64)
    power = float(added @ added)
    share = float(update @ added) / power if power > 0 else 0.0
    rest = update - share * added
    norm = float(np.linalg.norm(rest))
    if not norm > 0:
        return np.zeros(canaries.count)
    return canaries.projections(rest / norm) + share * participations / norm
