import math

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import rounds

_S = 0.5


def test_each_layer_is_clipped_to_its_own_part_of_s():
    mechanism = tfdp_fl.PerLayerClipping(clip_norm=_S, noise_multiplier=1.0)
    query, state = rounds.bound(mechanism)
    updates = rounds.updates_with_norms([0.01, 0.3, 7.0, 100.0])
    updates[1][0] *= 50.0  # One layer takes no room of the others.
    updates[3][2][0] = np.nan
    found = rounds.run_round(query, state, updates, charged=math.inf)
    each = _S / math.sqrt(len(rounds.SHAPES))
    for update, record in zip(updates, found.records, strict=True):
        for layer, clipped in zip(update, record.update, strict=True):
            norm = np.linalg.norm(layer)
            wanted = layer * min(1.0, each / norm)
            if update is updates[3]:
                wanted = np.zeros_like(layer)
            np.testing.assert_allclose(clipped, wanted, rtol=1e-5, atol=1e-9)
        assert np.linalg.norm(rounds.flat(record.update)) <= _S * (1 + 1e-5)
    assert [float(r.clipped) for r in found.records] == [0.0, 1.0, 1.0, 0.0]
    assert [float(r.discarded) for r in found.records] == [0.0, 0.0, 0.0, 1.0]


def test_it_costs_what_a_flat_clip_costs_and_trains():
    options = {"clip_norm": _S, "noise_multiplier": 2.0}
    flat, own = tfdp_fl.FixedClipping(**options), tfdp_fl.PerLayerClipping(**options)
    assert own.round_event(0, None) == flat.round_event(0, None)
    dataset = cohorts.dataset()
    engine = cohorts.make_engine(cohorts.mlp(), dataset, mechanism=own)
    pending = cohorts.collect(engine, dataset)
    (total,) = pending.sums
    assert np.isfinite(rounds.flat(total.contribution.update)).all()
    with pytest.raises(ValueError, match="client_weighting must be None"):
        own.check_weighting(tfdp_fl.ClientWeighting.num_examples(3))
    with pytest.raises(ValueError, match="clip_norm"):
        tfdp_fl.PerLayerClipping(clip_norm=0.0, noise_multiplier=1.0)


def test_all_of_a_client_in_one_layer_is_within_s():
    mechanism = tfdp_fl.PerLayerClipping(clip_norm=_S, noise_multiplier=1.0)
    query, state = rounds.bound(mechanism)
    begun = query.begin_round(state, 1.0, 8.0)
    huge = [tf.fill(shape, 1e18) for shape in rounds.SHAPES]
    one = query.clip(query.derive_sample_params(begun), huge, rounds.ClientContext())
    assert np.linalg.norm(rounds.flat(one.update)) == pytest.approx(_S, rel=1e-5)
    assert not one.discarded
