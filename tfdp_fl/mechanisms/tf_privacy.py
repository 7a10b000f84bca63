"""TensorFlow Privacy's queries, imported when one of them is asked for.

Its top-level package imports what TensorFlow no longer has since 2.16, so there
it is told to define no names (by its own switch), and each query is taken from
where it stands. `tf_privacy.GaussianSumQuery` is the same class as
`tensorflow_privacy.GaussianSumQuery`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

_ROOM = "tensorflow_privacy.privacy.dp_query"
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


def __getattr__(name: str) -> Any:
    """Returns one of the queries.

    Raises:
      ImportError: TensorFlow Privacy is not installed.
    """
    if name not in _QUERIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("tensorflow_privacy") is None:
        raise ImportError(
            "QueryMechanism needs tensorflow-privacy, which is not installed: "
            'pip install "tfdp_fl[tf-privacy]" on Python 3.10 or 3.11, or, on '
            "any, pip install --no-deps --ignore-requires-python "
            "tensorflow-privacy==0.9.0 dm-tree"
        )
    if importlib.util.find_spec("tensorflow_estimator") is None:
        switches: Any = sys  # Where the package looks for its own.
        switches.skip_tf_privacy_import = True
    return getattr(importlib.import_module(f"{_ROOM}.{_QUERIES[name]}"), name)
