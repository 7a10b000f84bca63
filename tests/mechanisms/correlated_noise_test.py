import dataclasses

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.mechanisms import rounds
from tfdp_fl import accounting, matrix_factorization
from tfdp_fl.mechanisms import PrivacyContext, noise

_CYCLIC = {"clients_per_round": 4, "num_clients": 16, "sampling": "cyclic"}
_DEPLOYMENT = PrivacyContext(**_CYCLIC)


def _mechanism(strategy="blt:2", **options):
    usual = {"clip_norm": 0.5, "noise_multiplier": 1.0, "strategy": strategy}
    usual |= {"rounds": 12, "min_separation": 4}
    return tfdp_fl.CorrelatedNoise(**{**usual, **options})


def _query(mechanism):
    return rounds.bound(mechanism, **_CYCLIC, shapes=tuple(map(tuple, rounds.SHAPES)))


def _history(mechanism, rounds, **where):
    where = {**_CYCLIC, **where}
    events = (mechanism.round_event(t, PrivacyContext(**where)) for t in range(rounds))
    charges = (accounting.RoundCharge(**where, event=event) for event in events)
    return accounting.PrivacyAccountant(charges)


def test_after_the_last_round_the_memory_is_empty():
    mechanism = _mechanism(rounds=3, min_separation=1)
    noise_state = _query(mechanism)[1].noise_state
    update = [tf.zeros(shape) for shape in rounds.SHAPES]
    made, positions = [], []
    for _ in range(4):
        with noise.use_seed(tf.constant([1, 2], tf.int64)):
            one, noise_state = mechanism.add_noise(update, 1.0, noise_state)
        made.append(one)
        positions.append(int(noise_state.round_index))
    assert positions == [1, 2, 3, 1]
    for one, other in zip(made[0], made[3], strict=True):
        np.testing.assert_array_equal(one, other)
    # The first round's noise is the fresh one, of its full scale.
    fresh = noise.standard_normals(
        update, noise.fold_in(tf.constant([1, 2], tf.int64), 1)
    )
    for one, other in zip(made[0], fresh, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_new_segment_forgets_all_but_the_clip():
    query, state = _query(_mechanism())
    done = rounds.run_round(query, state, rounds.zero_updates(2), noise_multiplier=1.0)
    assert int(done.next_state.noise_state.round_index) == 1
    # Clients are told nothing of it.
    assert query.derive_sample_params(done.next_state).noise_state == ()
    new = query.restart_noise(done.next_state)
    assert (int(new.noise_state.round_index), float(new.clip_norm)) == (0, 0.5)
    assert not any(np.any(buffer) for buffer in new.noise_state.buffers)
    query = _mechanism("blt").bind(PrivacyContext(clients_per_round=4))
    with pytest.raises(ValueError, match="shapes"):
        query.initial_global_state()


def test_the_accountant_composes_them_to_one_gaussian():
    # The design's 32 bands of 1 / sqrt(1 - x), T = 128, b = 32, z = 6.
    root = np.cumprod([1, *((2 * n - 1) / (2 * n) for n in range(1, 32))])
    run = {"noise_multiplier": 6.0, "rounds": 128, "min_separation": 32}
    bands = tfdp_fl.BandedToeplitz(coefficients=tuple(root))
    mechanism = _mechanism(bands, clip_norm=1.0, **run)
    history = _history(mechanism, 128, clients_per_round=32, num_clients=1024)
    one = accounting.gaussian_epsilon(6.0 / mechanism.generator.sensitivity, 1e-5)
    assert history.epsilon(1e-5, "pld") == pytest.approx(one, abs=1e-9)
    assert one == pytest.approx(1.9517, abs=5e-5)


def test_what_is_charged_is_where_the_memory_stands():
    mechanism = _mechanism(tfdp_fl.BLT(num_buffers=2))
    assert mechanism == _mechanism("blt:2")  # A strategy may be a text.
    noise_state = _query(mechanism)[1].noise_state._replace(round_index=tf.constant(5))
    assert mechanism.event_index(17, noise_state) == 5
    for t in range(24):  # A new segment costs what the first one did.
        charged = mechanism.round_event(t, _DEPLOYMENT)
        assert charged == mechanism.round_event(t % 12, _DEPLOYMENT)
    quiet = _mechanism(noise_multiplier=0.0)
    event = quiet.round_event(3, _DEPLOYMENT)
    assert event == dp_accounting.NonPrivateDpEvent()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sampling": "poisson"}, "sampling must be 'cyclic'"),
        ({"sampling": "fixed_size"}, "sampling must be 'cyclic'"),
        ({"sampling": "shuffled"}, "sampling must be 'cyclic'"),
        ({"clients_per_round": (4, 5)}, "clients_per_round"),
        # 4 cohorts of 4 clients need 16.
        ({"num_clients": 15}, r"at most .* 15 / 4"),
        ({"max_participations": 2}, "max_participations"),
    ],
)
def test_where_it_may_not_be_used(changes, message):
    mechanism = _mechanism(max_participations=1)
    mechanism.check(PrivacyContext(**_CYCLIC, max_participations=1))
    with pytest.raises(ValueError, match=message):
        mechanism.check(PrivacyContext(**{**_CYCLIC, **changes}))


def test_a_strategy_of_a_subclass_is_refused():
    # Its noise was not what the charge was computed for: 1.9 charged, 2.3 true.
    own = dataclasses.dataclass(frozen=True)(
        type("Own", (matrix_factorization.BandedToeplitz,), {})
    )
    with pytest.raises(ValueError, match="strategy must be a BandedToeplitz or a BLT"):
        _mechanism(own())
