"""What exact noise on a grid would cost: a discrete Gaussian, draw by draw.

    python research/discrete_gaussian.py

Canonne, Kamath & Steinke (2020), "The Discrete Gaussian for Differential
Privacy" (https://arxiv.org/abs/2004.00010), algorithms 1 to 3, in whole numbers
and with the operating system's random numbers: no rounding anywhere. It prints
the microseconds of a draw for some stddevs (in steps of the grid), and how far
the draws are from N(0, sigma^2) by Kolmogorov and Smirnov, which at such
stddevs they should not be. `docs/floating_point.md` says why it is not in the
package.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np
from absl import app, flags
from scipy import stats

_SIGMAS = flags.DEFINE_list("sigmas", ["2", "1024", "1048576"], "In steps.")
_DRAWS = flags.DEFINE_integer("draws", 20_000, "Of each.")

_system = random.SystemRandom()


def bernoulli_exp(numerator: int, denominator: int) -> bool:
    """Returns True with probability exp(-numerator / denominator)."""
    while numerator > denominator:
        if not bernoulli_exp(1, 1):
            return False
        numerator -= denominator
    k = 1
    while _system.randrange(denominator * k) < numerator:
        k += 1
    return k % 2 == 1


def discrete_laplace(scale: int) -> int:
    """Returns x with a probability in proportion to exp(-|x| / scale)."""
    while True:
        low = _system.randrange(scale)
        if not bernoulli_exp(low, scale):
            continue
        high = 0
        while bernoulli_exp(1, 1):
            high += 1
        size = low + scale * high
        negative = _system.getrandbits(1)
        if size or not negative:
            return -size if negative else size


def discrete_gaussian(sigma: int) -> int:
    """Returns x with a probability in proportion to exp(-x^2 / 2 sigma^2)."""
    scale = sigma + 1
    while True:
        x = discrete_laplace(scale)
        # (|x| - sigma^2 / scale)^2 / (2 sigma^2), over one denominator.
        numerator = (abs(x) * scale - sigma**2) ** 2
        if bernoulli_exp(numerator, 2 * sigma**2 * scale**2):
            return x


def main(_: list[str]) -> None:
    for sigma in map(int, _SIGMAS.value):
        started = time.perf_counter()
        draws = [discrete_gaussian(sigma) for _ in range(_DRAWS.value)]
        each = (time.perf_counter() - started) / _DRAWS.value
        values = np.asarray(draws) / sigma
        # Between the steps, so that it is comparable to a continuous one.
        values += (
            np.random.default_rng().uniform(-0.5, 0.5, len(values)) / sigma
        )
        scale = math.sqrt(1 + 1 / (12 * sigma**2))
        p = stats.kstest(values / scale, "norm").pvalue
        print(
            f"sigma = {sigma} steps: {1e6 * each:.1f} us a draw, "
            f"{1e6 * each:.0f} s for a million; p = {p:.3g}",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)
