"""Throwaway: TF-Privacy's queries on any stack."""

import sys

import tensorflow as tf

if hasattr(tf.keras, "ops") or not tf.__version__.startswith("2.14"):
    sys.skip_tf_privacy_import = True
    from tensorflow_privacy.privacy.dp_query import (
        dp_query,
        gaussian_query,
        no_privacy_query,
        normalized_query,
        quantile_adaptive_clip_sum_query,
        restart_query,
        tree_aggregation_query,
        nested_query,
    )

    for room in (
        restart_query,
        tree_aggregation_query,
        quantile_adaptive_clip_sum_query,
        normalized_query,
        no_privacy_query,
        nested_query,
        gaussian_query,
        dp_query,
    ):
        globals().update(
            {k: v for k, v in vars(room).items() if isinstance(v, type)}
        )
else:
    from tensorflow_privacy import *  # noqa
