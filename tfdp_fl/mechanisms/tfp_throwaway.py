"""Throwaway: TF-Privacy's queries on any stack."""

import sys

sys.skip_tf_privacy_import = True
from tensorflow_privacy.privacy.dp_query.dp_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.gaussian_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.no_privacy_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.normalized_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.quantile_adaptive_clip_sum_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.quantile_estimator_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.tree_aggregation_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.restart_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.nested_query import *  # noqa
from tensorflow_privacy.privacy.dp_query.distributed_discrete_gaussian_query import *  # noqa
