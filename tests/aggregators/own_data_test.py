"""TFF's sums are exact, as every executor's of `tests/engine/own_data_test.py`."""

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdp_fl
from tests.engine import cohorts
from tfdp_fl.mechanisms import PrivacyContext
from tfdp_fl.tff import cohort_process

_FIXED = tfdp_fl.FixedClipping(clip_norm=0.3, noise_multiplier=1.0)
_ADAPTIVE = tfdp_fl.AdaptiveClipping(
    noise_multiplier=1.0, initial_clip_norm=0.3, count_noise_stddev=5.0
)


@pytest.mark.parametrize("mechanism", [_FIXED, _ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_sum_is_that_of_records_made_alone(mechanism):
    template = [np.zeros([4, 3], np.float32), np.ones(3, np.float32)]
    value_type = tff.to_type([(part.dtype.type, part.shape) for part in template])
    query = mechanism.bind(PrivacyContext(clients_per_round=10))

    @tff.tensorflow.computation
    def params():
        begun = query.begin_round(query.initial_global_state(), 1.0, 10.0)
        return query.derive_sample_params(begun)

    make_record = cohort_process.create_record_fn(
        query, params.type_signature.result, [value_type], exact=True
    )
    adder = cohort_process.create_record_sum(
        make_record.type_signature.result, None, None
    )
    values = [
        [np.float32(part) for part in update]
        for update in cohorts.hostile_updates(template)
    ]
    sent = params()
    records = [make_record(sent, value) for value in values]

    def total(positions):
        found = adder.next(adder.initialize(), [records[k] for k in positions]).result
        flat = np.concatenate([np.ravel(part) for part in found["update"]])
        return flat, [float(v) for v in found["scalars"]["sums"].values()]

    cohorts.check_sums(total, len(values), 10, silent=cohorts.SILENT)
    assert np.any(total(range(8))[0])
