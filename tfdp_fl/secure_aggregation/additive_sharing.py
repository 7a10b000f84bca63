"""Additive secret sharing of one member's value: encode, split, add, decode.

The n shares of a value x are drawn at random, with the only constraint that they add
up to x. In a ring, the shares in any strict subset are independent and uniform,
whatever x is, so they reveal nothing about it. With floating-point numbers, this is
only approximately true, and the reconstruction is inexact.

Source: DISCO's "Privacy" document (steps 2 and 3, `maxShareValue`,
`minNbOfParticipants`); for the setting, Bonawitz et al., "Practical Secure Aggregation
for Privacy-Preserving Machine Learning" (2017).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfdp_fl import _validate

_FLOAT64_DIGITS = 53


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdditiveSecretSharing:
    """The settings of the secret sharing, on which all members of a group agree.

    In the ring (`mode="ring"`, the default), a value is rounded to a grid with the step
    `resolution`. It is a power of two, chosen so that the sum of `max_participants`
    values of magnitude `max_share_value` fits both the signed range of Z_2^bits and the
    53 bits of a float64:

        resolution = 2^-f,
        f = floor(log2(min(2^(bits-1), 2^53)
                       / (max_participants * max_share_value))).

    So the sum cannot wrap around, it is exact on the grid, and its float64 form is
    exact, too. The only error comes from rounding the members' values, by at most
    `resolution / 2` each. A value that is larger than `max_share_value`, or not finite,
    is refused, never wrapped or clipped.

    Rounding to nearest may make a vector longer, by up to sqrt(D) * resolution / 2. If
    the noise is added after the sum, a member would then move the sum by more than the
    clip. `nearest_within` returns a value on the grid that is no longer than the clip,
    and `encode` does not change it.

    With the defaults, the resolution is 2^-39 = 1.8e-12. With `bits=32`, which halves
    the traffic, it is 2^-17 = 7.6e-6: lower `max_share_value` to what the values need,
    since halving it halves the error.

    With `mode="float"`, the shares are float64 numbers uniform in
    [-max_share_value, max_share_value), as in DISCO. The exception is the remainder,
    which the member keeps to itself. The value is reconstructed with an error of about
    1e-14 * participants^1.5 * max_share_value (`largest_error` bounds it). It is hidden
    only statistically, and less well the larger it is relative to `max_share_value`.
    Prefer the ring.

    Attributes:
      min_participants: The smallest group that may aggregate, at least 3: in a group of
        two, each member can compute the other's value from the sum.
      mode: "ring" or "float".
      max_share_value: The largest magnitude of one coordinate of one member's value,
        including noise; with `mode="float"`, also the bound of the random shares.
      bits: 32 or 64, the size of the ring (`mode="ring"` only).
      max_participants: The largest group that may aggregate.
      deadline_seconds: How long a member waits for the messages of one step.
    """

    min_participants: int = 3
    mode: str = "ring"
    max_share_value: float = 100.0
    bits: int = 64
    max_participants: int = 100
    deadline_seconds: float = 10.0

    def __post_init__(self):
        _validate.positive_integer(min_participants=self.min_participants)
        if self.min_participants < 3:
            raise ValueError(
                "min_participants must be at least 3 (in a group of two, each member "
                "can compute the other's update from the sum), got "
                f"{self.min_participants!r}."
            )
        _validate.one_of(("ring", "float"), mode=self.mode)
        _validate.positive(max_share_value=self.max_share_value)
        if not 1e-30 <= self.max_share_value <= 1e30:
            raise ValueError(
                "max_share_value must be from 1e-30 to 1e30, got "
                f"{self.max_share_value!r}: float64 has no grid for it."
            )
        _validate.one_of((32, 64), bits=self.bits)
        _validate.positive_integer(max_participants=self.max_participants)
        if not self.min_participants <= self.max_participants <= 2**20:
            raise ValueError(
                "max_participants must be at least min_participants="
                f"{self.min_participants} and at most 2^20, as the ring has no room "
                f"for more, got {self.max_participants!r}."
            )
        _validate.positive(deadline_seconds=self.deadline_seconds)

    @property
    def resolution(self) -> float:
        """The step of the fixed-point grid, 2^-f (`mode="ring"`)."""
        # Leave room for rounding each value up by half a step, and for -2^(bits-1),
        # which has no positive counterpart.
        capacity = 2.0 ** min(self.bits - 1, _FLOAT64_DIGITS)
        usable = capacity - self.max_participants / 2 - 1
        largest = self.max_participants * self.max_share_value
        return 2.0 ** -math.floor(math.log2(usable / largest))

    @property
    def largest_error(self) -> float:
        """The most by which a number of a group's sum is off, once values are encoded.

        With `mode="float"`, n members each make, add and send n shares. No remainder is
        above n M, with M = `max_share_value`, no partial sum above 2 n M, and no sum of
        those above 2 n^2 M. Each addition is off by at most 2^-53 of its result: in
        all, by n^3 M for the remainders, and by 2 n^3 M for either kind of sum.
        """
        if self.mode == "ring":
            return 0.0
        return 5 * self.max_participants**3 * self.max_share_value * 2.0**-53

    @property
    def share_dtype(self) -> np.dtype:
        """The dtype of shares and of partial sums."""
        kind = f"<u{self.bits // 8}" if self.mode == "ring" else "<f8"
        return np.dtype(kind)

    @property
    def _signed_dtype(self) -> np.dtype:
        return np.dtype(f"<i{self.bits // 8}")

    def check_group_size(self, participants: int) -> None:
        """Raises ValueError unless this many members may aggregate."""
        if not (self.min_participants <= participants <= self.max_participants):
            raise ValueError(
                f"A group must have from {self.min_participants} (min_participants) to "
                f"{self.max_participants} (max_participants) members, got "
                f"{participants}."
            )

    def nearest_within(self, value: np.ndarray, bound: float) -> np.ndarray:
        """Returns a value that can be sent exactly and is no longer than a bound.

        In the ring, this is the nearest value on the grid if its L2 norm is at most
        `bound` and no coordinate exceeds `max_share_value`. Otherwise, the value is
        scaled to the bound and rounded towards zero, which increases no coordinate in
        magnitude, and so no norm. The norm is computed in float64 from the returned
        numbers.

        Args:
          value: Finite real numbers of any shape, already clipped: the norm should
            exceed the bound by no more than floating-point rounding.
          bound: S, at least 0; infinity for no bound. Then every value is rounded
            towards zero, so that no norm grows.

        Returns:
          A float64 array of the same shape, which `encode` does not change.
        """
        value = np.asarray(value, np.float64)
        step = self.resolution if self.mode == "ring" else 0.0
        if math.isfinite(bound):
            nearest = np.rint(value / step) * step if step else value
            largest = np.max(np.abs(nearest), initial=0.0)
            if _norm(nearest) <= bound and largest <= self.max_share_value:
                return nearest
            value = _scale_to_norm(value, bound)
        return np.trunc(value / step) * step if step else value

    def encode(self, value: np.ndarray, name: str = "value") -> np.ndarray:
        """Returns the ring elements (or float64 numbers) that represent a value.

        Args:
          value: Real numbers of any shape.
          name: The value's name, for errors.

        Returns:
          An array of the same shape and of `share_dtype`. In the ring, negative numbers
          are represented by their two's complement.

        Raises:
          TypeError: The value has something other than real numbers.
          ValueError: A number is not finite or is larger in magnitude than
            `max_share_value`. In the ring, the sum could wrap around, and
            floating-point shares would not hide it.
        """
        value = np.asarray(value)
        if value.dtype.kind not in "fiu":
            raise TypeError(f"{name} must hold real numbers, got dtype {value.dtype}.")
        encoded = value.astype(np.float64)
        magnitude = np.max(np.abs(encoded), initial=0.0)
        if not magnitude <= self.max_share_value:
            exceeds = ~(np.abs(encoded) <= self.max_share_value)
            index = tuple(int(i) for i in np.argwhere(exceeds)[0])
            raise ValueError(
                f"{name} has {encoded[index].item()!r} at index {index}, but "
                "only magnitudes up to max_share_value="
                f"{self.max_share_value!r} can be shared without overflow."
            )
        if self.mode == "float":
            return encoded
        encoded /= self.resolution  # Exact: a power of two.
        np.rint(encoded, out=encoded)
        return encoded.astype(self._signed_dtype).view(self.share_dtype)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Returns the float64 numbers that ring elements represent."""
        if self.mode == "float":
            return total
        return total.view(self._signed_dtype).astype(np.float64) * self.resolution

    def split(
        self,
        encoded: np.ndarray,
        participants: int,
        remainder: int = -1,
        *,
        _random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> list[np.ndarray]:
        """Returns shares that add up to one encoded tensor.

        Every call draws fresh random numbers from the operating system, so no two
        tensors share any. (The published implementation seeds a generator in the same
        way for every tensor, so the difference of two shares is the difference of the
        secrets.)

        Args:
          encoded: The result of `encode`.
          participants: n, the number of shares.
          remainder: The index of the share that is computed, not drawn: `encoded` minus
            the sum of the others. In the ring, it is as uniform as they are. With
            `mode="float"`, it is not, and should stay with its owner.

        Returns:
          n arrays of the shape of `encoded` and of `share_dtype`.
        """
        *shares, remainder_share = self.shares(encoded, participants, _random_bytes)
        shares.insert(remainder % participants, remainder_share)
        return shares

    def shares(
        self,
        encoded: np.ndarray,
        participants: int,
        _random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> Iterator[np.ndarray]:
        """Yields the shares of `split` one by one; the remainder comes last."""
        remainder_share = encoded.copy()
        for _ in range(participants - 1):
            share = self._random_share(encoded.shape, _random_bytes)
            remainder_share -= share
            yield share
        yield remainder_share

    def _random_share(
        self, shape: tuple[int, ...], random_bytes: Callable[[int], bytes]
    ) -> np.ndarray:
        size = math.prod(shape)
        if self.mode == "ring":
            raw = random_bytes(size * self.share_dtype.itemsize)
            return np.frombuffer(raw, self.share_dtype).reshape(shape)
        bits = np.frombuffer(random_bytes(size * 8), np.uint64).reshape(shape)
        unit = (bits >> np.uint64(11)) * 2.0**-_FLOAT64_DIGITS  # In [0, 1).
        return (2.0 * unit - 1.0) * self.max_share_value

    def add(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the sum of shares or of partial sums, in the ring."""
        return functools.reduce(np.add, shares)


def _norm(value: np.ndarray) -> float:
    # Scaled, so that no square underflows or overflows.
    largest = float(np.max(np.abs(value), initial=0.0))
    if not largest:
        return 0.0
    return largest * float(np.linalg.norm(np.ravel(value / largest)))


def _scale_to_norm(value: np.ndarray, bound: float) -> np.ndarray:
    """Returns a value scaled down to a norm of at most `bound`."""
    norm, factor = _norm(value), 1.0
    while norm > bound:
        # Usually once; the margin is for the rounding of this product.
        factor *= bound / norm * (1 - 2.0**-48)
        norm = _norm(value * factor)
    return value * factor
