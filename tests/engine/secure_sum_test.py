"""What becomes of updates: the sums of secure aggregation, and the server's step."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms.rounds import flat
from tfdp_fl import secure_aggregation
from tfdp_fl.engine import release, secure_sum
from tfdp_fl.secure_aggregation import grouped_sum

_CLIP = 1e-4
_SHARING = secure_aggregation.AdditiveSecretSharing


def _fixed(clip_norm=_CLIP, **options):
    return tfdp_fl.FixedClipping(clip_norm=clip_norm, noise_multiplier=1.0, **options)


def _collected(mechanism, noise_multiplier, sizes=(7, 3, 5)):
    dataset = cohorts.dataset(sizes)
    options = {"mechanism": mechanism, "collect_contributions": True}
    engine = cohorts.make_engine(cohorts.mlp(), dataset, **options)
    inputs = {"batch_size": 2, "local_epochs": 1, "noise_multiplier": noise_multiplier}
    return engine, cohorts.collect(engine, dataset, **inputs)


def _sent(mechanism, protocol, noise_multiplier=1.0):
    engine, pending = _collected(mechanism, noise_multiplier)
    sent, encode = [], _SHARING.encode

    def spy(self, update, *name):
        encoded = encode(self, update, *name)
        sent.append(self.decode(encoded))
        return encoded

    with mock.patch.object(_SHARING, "encode", spy):
        assert secure_sum.sum_securely(engine, pending, protocol) == ()
    return sent


_ADAPTIVE = tfdp_fl.AdaptiveClipping(
    initial_clip_norm=_CLIP, noise_multiplier=1.0, count_noise_stddev=1.0
)


@pytest.mark.parametrize("mechanism", [_fixed(), _ADAPTIVE])
@pytest.mark.parametrize("bits", [32, 64])
def test_is_within_the_clip_where_the_server_adds_the_noise(mechanism, bits):
    # The grid of 32 bits has steps of 7.6e-6: rounded to the nearest, 51
    # coordinates may be up to 27 % longer than this clip.
    sent = _sent(mechanism, _SHARING(bits=bits))
    assert len(sent) == 3
    scalars = len(mechanism.side_names) + 1
    for vector in sent:
        assert 0.5 * _CLIP <= np.linalg.norm(vector[:-scalars]) <= _CLIP
        assert vector[-1] == 1.0


def test_an_error_of_the_sum_that_is_not_small_beside_the_clip_is_refused():
    # It would tell how many clients the sum has.
    _sent(_fixed(1.0), _SHARING(mode="float"))
    coarse = _SHARING(mode="float", max_share_value=1e12)
    with pytest.raises(ValueError, match=r"off by 4.*its bound of 1,"):
        _sent(_fixed(1.0), coarse)
    _sent(tfdp_fl.NoPrivacy(), coarse)


@pytest.mark.parametrize("members", [3, 10, 40])
def test_a_sum_in_floating_point_is_off_by_no_more_than_is_said(members):
    protocol = _SHARING(mode="float", max_participants=members)
    most = protocol.max_share_value
    for values in (most, -most, most * np.linspace(-1, 1, members)[:, None]):
        values = np.broadcast_to(values, [members, 1000])
        total = grouped_sum.sum_in_groups(values, protocol, members).total
        assert np.abs(total - values.sum(0)).max() <= protocol.largest_error


class _WithSum(tfdp_fl.FixedClipping):
    side_bounds = {"count": 0.3}  # noqa: RUF012

    def noise_stddevs(self, round, context):
        return {"update": round.noise_multiplier * round.clip_norm, "count": 1.0}

    def side_statistics(self, norm, round):
        return {"count": 0.3 * tf.ones_like(norm)}


@pytest.mark.parametrize("largest", [1e2, 1e6, 8e6])
def test_a_side_sum_is_within_its_bound_on_any_grid(largest):
    protocol = _SHARING(bits=32, max_share_value=largest)
    mechanism = _WithSum(clip_norm=1.0, noise_multiplier=1.0)
    for values in _sent(mechanism, protocol):
        assert 0 <= values[-2] <= 0.3


def test_a_discarded_client_is_not_in_the_mean_of_those_that_answered():
    mechanism = tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1e-3)
    engine, pending = _collected(mechanism, 1e-3, sizes=(7, 3, 5, 4))
    ((members, rows),) = pending.collected
    updates = rows.updates.numpy()
    updates[1] = 1e30
    pending.collected = [(members, rows._replace(updates=tf.constant(updates)))]
    with pytest.warns(UserWarning, match="were discarded"):
        assert secure_sum.sum_securely(engine, pending, _SHARING()) == ()
    (total,) = pending.sums
    assert float(total.contribution.weight) == pytest.approx(3.0, abs=1e-5)
    assert pending.without_noise == 1
    others = np.delete(updates, 1, axis=0).sum(axis=0)
    np.testing.assert_allclose(flat(cohorts.update_of(pending)), others, atol=1e-5)


def test_a_cohort_that_cannot_be_split_has_failed():
    # As when one of six drops out and groups have three members.
    protocol = _SHARING(min_participants=3, max_participants=4)
    engine, pending = _collected(tfdp_fl.NoPrivacy(), 0.0, sizes=(7, 3, 5, 1, 2))
    with pytest.warns(UserWarning, match="cannot be split"):
        failed = secure_sum.sum_securely(engine, pending, protocol)
    assert failed == (0, 1, 2, 3, 4)


def test_a_client_that_fails_takes_nobody_elses_part_out_of_the_sum():
    # Of three in a group one failed, and the sum moved by three clips: charged are two.
    alone = {}
    for wrong in ((), (1,)):
        engine, pending = _collected(_fixed(), 1.0)
        ((members, rows),) = pending.collected
        kept = np.delete(members, wrong)
        rows = tf.nest.map_structure(
            lambda leaf, kept=kept: tf.gather(leaf, kept), rows
        )
        pending.collected = [(kept, rows)]
        assert secure_sum.sum_securely(engine, pending, _SHARING()) == ()
        alone[wrong] = flat(cohorts.update_of(pending))
    moved = np.linalg.norm(alone[()] - alone[1,])
    assert 0.5 * _CLIP < moved <= _CLIP * (1 + 1e-5)


@pytest.mark.parametrize(
    ("sampling", "clients", "size", "limits", "refused"),
    [
        ("poisson", 40, 20, {}, True),  # P(2 or fewer) = 7.5e-10.
        ("poisson", 2000, 34, {}, True),  # 8e-13, in each of many rounds.
        ("poisson", 400, 60, {}, False),
        ("poisson", 400, 60, {"max_participants": 3}, True),
        ("poisson", 3, 3, {}, True),  # Of two, nobody is in the sum.
        ("poisson", 4, 4, {}, False),
        ("fixed_size", 40, 3, {}, False),
        ("fixed_size", 40, 2, {}, True),
        ("fixed_size", 40, 5, {"max_participants": 4}, True),
        ("shuffled", 40, 6, {"max_participants": 4}, False),
    ],
)
def test_cohorts_without_a_sum_are_refused(sampling, clients, size, limits, refused):
    given = _SHARING(**limits), sampling, clients, size
    if not refused:
        secure_sum.check_cohort_sizes(*given)
        return
    with pytest.raises(ValueError, match=r"secure_aggregation needs.*fixed_size"):
        secure_sum.check_cohort_sizes(*given)


def test_clients_that_are_left_out_make_no_cohort_too_small():
    # A third client moved a sum by three clips, as two had none.
    for sampling in ("poisson", "fixed_size", "shuffled"):
        with pytest.raises(ValueError, match=r"max_participations=1\."):
            secure_sum.check_cohort_sizes(_SHARING(), sampling, 400, 60, 1)
    secure_sum.check_cohort_sizes(_SHARING(), "cyclic", 400, 60, 1)


def test_which_cohorts_can_be_split():
    for limits in ((3, 3), (3, 4), (4, 5), (5, 7), (3, 100)):
        protocol = _SHARING(min_participants=limits[0], max_participants=limits[1])
        for size in range(60):
            try:
                groups = secure_aggregation.split_into_groups(size, protocol)
                can = min(map(len, groups), default=0) >= protocol.min_participants
            except ValueError:
                can = False
            found = grouped_sum.can_be_split(np.array([size]), protocol)
            assert found.tolist() == [can]


def test_the_median_clips_what_is_sent():
    sent = _sent(tfdp_fl.MedianClipping(noise_multiplier=1.0), _SHARING(bits=32))
    norms = sorted(np.linalg.norm(vector[:-1]) for vector in sent)
    assert 0.0 < norms[0] < norms[2]
    # Two of three are as long as the median, up to what is rounded off.
    assert norms[1] / norms[2] == pytest.approx(1.0, abs=5e-4)


def test_a_grid_that_is_too_coarse_is_refused():
    with pytest.raises(ValueError, match=r"bits and the weight.*bits=64"):
        _sent(tfdp_fl.NoPrivacy(), _SHARING(bits=32, max_share_value=1e8), 0.0)
    with pytest.raises(ValueError, match="noise on its update"):
        _sent(_fixed(1e-5, noise_site="client"), _SHARING(bits=32))


@pytest.mark.parametrize("mode", ["ring", "float"])
def test_that_a_client_s_noise_cannot_be_sent_is_refused_before_it_happens(mode):
    # Whether a round is abandoned told a third of the time that one client was there.
    noisy = _fixed(1.0, noise_site="client")
    engine, pending = _collected(noisy, 1.0)
    share = (1 / 3) ** 0.5
    for largest, refused in ((1 + 9 * share, True), (1 + 10.5 * share, False)):
        protocol = _SHARING(mode=mode, max_share_value=largest)
        if refused:
            with pytest.raises(ValueError, match="the largest update that an honest"):
                secure_sum.sum_securely(engine, pending, protocol)
        else:
            assert not len(secure_sum.sum_securely(engine, pending, protocol))


_MEANS = [([0.5, -1.0], [[2.0]]), ([-0.25, 3.0], [[0.0]]), ([1.0, 0.5], [[-1.0]])]


@pytest.mark.parametrize(
    ("optimizer", "rate", "momentum"),
    [(None, 1.0, 0.0), (tf.keras.optimizers.SGD(0.5, momentum=0.9), 0.5, 0.9)],
)
def test_fedavg_and_fedavgm(optimizer, rate, momentum):
    # The update rules of Reddi et al. (2021), Algorithm 2.
    variables = [tf.keras.Variable(value) for value in ([1.0, 2.0], [[3.0]])]
    update = release.ServerUpdate(variables, [], optimizer)
    expected, steps = [v.numpy() for v in variables], [0.0, 0.0]
    for mean in _MEANS:
        update.apply([tf.constant(v) for v in mean])
        for k, part in enumerate(mean):
            steps[k] = momentum * steps[k] + rate * np.array(part)
            expected[k] = expected[k] + steps[k]
        cohorts.assert_close([v.numpy() for v in variables], expected, rtol=1e-5)


def test_state_moves_by_the_mean_and_noise_does_not_make_a_variance_negative():
    weight, *state = (tf.keras.Variable([1.0, 1.0], name="variance") for _ in range(3))
    optimizer = tf.keras.optimizers.SGD(100.0)
    update = release.ServerUpdate([weight], state, optimizer, state[1:])
    change = tf.constant([-3.0, 1.0])

    def values():
        return [v.numpy().tolist() for v in (weight, *state)]

    update.apply([change] * 3)
    assert values() == [[-299.0, 101.0], [-2.0, 2.0], [0.0, 2.0]]
    update.replace([change] * 3)
    assert values() == [[-3.0, 1.0], [-3.0, 1.0], [0.0, 1.0]]
