"""Two arrays for a client's examples, of which nothing is left to be checked.

Most clients' examples are of that kind. What `sources` does for all others,
such as lists, nests or sequences, takes longer than to read two arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class PlainArrays(NamedTuple):
    """What x and y have to be.

    Attributes:
      expected: The dtype and the shape of one example, of x and of y; nothing
        if a client of this spec is never plain.
    """

    expected: tuple[tuple[np.dtype, tuple[int, ...]], ...]

    @classmethod
    def of(cls, element_spec: Any) -> PlainArrays:
        """Returns what goes with a spec.

        Args:
          element_spec: The `tf.TensorSpec`s (x, y) of one example; None: not
            known yet, so that nothing is plain.
        """
        expected = []
        for spec in element_spec or ():
            if not isinstance(spec, tf.TensorSpec):
                return cls(())
            dtype = np.dtype(spec.dtype.as_numpy_dtype)
            # `nests.as_array` makes float32 of float64, and looks at the items
            # of what is no number.
            if (
                dtype.kind not in "biuf"
                or dtype == np.float64
                or not spec.shape.is_fully_defined()
            ):
                return cls(())
            expected.append((dtype, tuple(spec.shape)))
        return cls(tuple(expected))

    def are(self, examples: Any) -> bool:
        """Returns True for (x, y) or (x, y, None), arrays of this kind."""
        if (
            not self.expected
            or type(examples) is not tuple
            or len(examples) not in (2, 3)
            or (len(examples) == 3 and examples[2] is not None)
        ):
            return False
        for array, (dtype, shape) in zip(examples, self.expected, strict=False):
            if (
                type(array) is not np.ndarray
                or array.dtype != dtype
                or not array.ndim
                or array.shape[1:] != shape
            ):
                return False
        return len(examples[0]) == len(examples[1]) > 0
