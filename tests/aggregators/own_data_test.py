"""TFF's sums are exact, as every executor's of `tests/engine/own_data_test.py`."""

import numpy as np
import pytest
import tensorflow_federated as tff

import tfdp_fl
from tests.engine import cohorts
from tests.outside import smooth_clipping
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

    make_contribution = cohort_process.create_contribution_fn(
        query,
        params.type_signature.result,
        [value_type],
        exact_update=True,
        exact_scalars=True,
    )
    adder = cohort_process.create_sum(
        make_contribution.type_signature.result, None, None
    )
    values = [
        [np.float32(part) for part in update]
        for update in cohorts.hostile_updates(template)
    ]
    sent = params()
    records = [make_contribution(sent, value) for value in values]

    def total(positions):
        found = adder.next(adder.initialize(), [records[k] for k in positions]).result
        flat = np.concatenate([np.ravel(part) for part in found["update"]])
        return flat, [float(v) for v in found["scalars"]["sums"].values()]

    cohorts.check_sums(total, len(values), 10, silent=cohorts.SILENT)
    assert np.any(total(range(8))[0])


class _ByTheSmallDigits(smooth_clipping.SmoothClipping):
    """Its next clip tells what of the sum of lengths lies beyond 1."""

    def next_clip_norm(self, sums, round):
        return (sums["length"] - 1.0) * 2.0**21


def test_side_sums_lose_no_digits():
    # In float32, each 2^-25 would vanish beside a 1 that comes before it, and stay
    # without: one client would move the sum by more than its own number.
    mechanism = _ByTheSmallDigits(noise_multiplier=0.0, start_norm=1.0)
    factory = tfdp_fl.aggregators.from_mechanism(mechanism, clients_per_round=17)
    process = factory.create(tff.to_type((np.float32, [1])))
    updates = [np.float32([size]) for size in [1.0, *[2.0**-25] * 16]]
    state = process.next(process.initialize(), updates).state
    assert state.query_state.clip_norm == 1.0
