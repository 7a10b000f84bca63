"""Lazy imports: TensorFlow, and packages that few users need.

A mechanism can be accounted for, described, and sent to clients without
TensorFlow. A server that only adds up what clients clipped (`tfdp_fl.flower`)
never imports it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any


class _Module:
    """Stands for a module until something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # What inspection asks of any object.
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)

    def __repr__(self) -> str:
        return f"<{self._name}, imported on use>"


_QUERIES = {
    "DPQuery": "dp_query",
    "SumAggregationDPQuery": "dp_query",
    "DiscreteGaussianSumQuery": "discrete_gaussian_query",
    "GaussianSumQuery": "gaussian_query",
    "NestedSumQuery": "nested_query",
    "NoPrivacyAverageQuery": "no_privacy_query",
    "NoPrivacySumQuery": "no_privacy_query",
    "NormalizedQuery": "normalized_query",
    "QuantileAdaptiveClipSumQuery": "quantile_adaptive_clip_sum_query",
    "TreeResidualSumQuery": "tree_aggregation_query",
}


class _Queries:
    """TensorFlow Privacy's queries, the same classes as in its package.

    Its top-level package imports what TensorFlow no longer has since 2.16, so there
    it is told to define no names (by its own switch), and each query is taken from
    where it stands.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in _QUERIES:
            raise AttributeError(name)
        if importlib.util.find_spec("tensorflow_privacy") is None:
            raise ImportError(
                "QueryMechanism needs tensorflow-privacy, which is not installed: "
                'pip install "tfdp_fl[tf-privacy]" on Python 3.10 or 3.11, or, on '
                "any, pip install --no-deps --ignore-requires-python "
                "tensorflow-privacy==0.9.0 dm-tree"
            )
        if importlib.util.find_spec("tensorflow_estimator") is None:
            switches: Any = sys  # TF-Privacy looks for this flag here.
            switches.skip_tf_privacy_import = True
        module = f"tensorflow_privacy.privacy.dp_query.{_QUERIES[name]}"
        return getattr(importlib.import_module(module), name)


if TYPE_CHECKING:  # So that `tf.Tensor` is a name in annotations.
    import tensorflow as tf
    import tensorflow_privacy as tfp
else:
    tf, tfp = _Module("tensorflow"), _Queries()


@contextlib.contextmanager
def explain_missing(distribution: str, what: str) -> Iterator[None]:
    """Says what to install if an import of the block finds no package.

    Args:
      distribution: What pip calls it.
      what: What needs it, as the beginning of a sentence.

    Raises:
      ImportError: It is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{what} needs {distribution}, which is not installed: "
            f"pip install {distribution}",
            name=error.name,
        ) from error
