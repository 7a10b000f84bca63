"""What a client hands over of what it learned: clipped, noised on request.

The same for every way in which Flower calls a client (`client`, `mod`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdp_fl import _validate
from tfdp_fl.flower import keys, updates

_logger = logging.getLogger(__name__)

NUM_EXAMPLES = 1
"""The weight of every client in every average downstream.

With SecAgg+ it is the client itself that multiplies its model by this number,
under its mask, where no server can put it right: the true number of examples
would be the client's share of the average, whatever it was clipped to.
"""


class Instruction(NamedTuple):
    """What the server asks of a client.

    Attributes:
      clip_norm: S.
      noise_stddev: what the client adds to each coordinate, 0 for nothing.
      wants_norm_bit: whether it has to say if its norm was within S.
    """

    clip_norm: float
    noise_stddev: float
    wants_norm_bit: bool


class Release(NamedTuple):
    """What leaves the client.

    Attributes:
      arrays: w + clip(Delta) (+ noise), in the dtypes received; in float64
        where those are too coarse for the noise.
      norm_bit: whether ||Delta|| <= S.
      discarded: whether the update was not finite, and zero replaced it.
    """

    arrays: list[np.ndarray]
    norm_bit: bool
    discarded: bool


def instruction(config: Mapping[str, Any]) -> Instruction:
    """Reads what a wrapped strategy sends.

    Args:
      config: the config that came with the model.

    Raises:
      KeyError: if there is no clip norm in it.
      TypeError, ValueError: if a value is not what it should be.
    """
    if keys.CLIP_NORM not in config:
        raise KeyError(
            f"The server sent no clip norm: config has no {keys.CLIP_NORM}"
            f", only {sorted(config)}. Is its strategy wrapped?"
        )
    return Instruction(
        _validate.positive(dpfedavg_clip_norm=config[keys.CLIP_NORM]),
        _validate.non_negative(
            dpfedavg_noise_stddev=config.get(keys.NOISE_STDDEV, 0.0)
        ),
        _validate.instance_of(
            bool,
            dpfedavg_adaptive_clip_enabled=config.get(
                keys.ADAPTIVE_CLIP_ENABLED, False
            ),
        ),
    )


def released(
    received: Sequence[np.ndarray],
    returned: Sequence[np.ndarray],
    asked: Instruction,
) -> Release:
    """Returns w + clip(Delta) (+ noise).

    Without noise it is within S of what was received, after rounding too. An
    update with a NaN or an infinity is zero.

    Source: McMahan et al. (2018), Algorithm 1, UserUpdate; Andrew et al.
    (2021), Algorithm 1, for the bit.

    Args:
      received: w, the model that the server sent.
      returned: w + Delta, what the client made of it.
      asked: what the server asked for.

    Raises:
      ValueError: unless both have the same number of arrays, of same shapes;
        if the noise is too small beside the model for any dtype.
    """
    update = updates.clipped(updates.difference(returned, received), asked.clip_norm)
    if update.discarded:
        _logger.warning("The update holds NaN or infinity: zero is sent in its place.")
    if asked.noise_stddev > 0:
        noised = updates.noised(update.arrays, asked.noise_stddev)
        arrays = updates.applied_with_noise(
            received, noised, asked.noise_stddev, asked.clip_norm
        )
    else:
        arrays = updates.applied_within(received, update.arrays, asked.clip_norm)
    return Release(arrays, update.within, update.discarded)
