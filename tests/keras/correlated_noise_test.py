"""Training with noise that is correlated across rounds."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting, auditing, secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import CohortEngine, release
from tfdp_fl.keras import callbacks
from tfdp_fl.keras import run as run_lib

_DELTA = 1e-3
_T, _B = 8, 4
_SGD = tf.keras.optimizers.SGD


def _mechanism(strategy="banded", **options):
    usual = {"clip_norm": 0.5, "noise_multiplier": 2.0, "rounds": _T}
    usual |= {"strategy": strategy, "min_separation": _B}
    return tfdp_fl.CorrelatedNoise(**{**usual, **options})


def _federated(mechanism=None, model=None, **options):
    return toy.federated(mechanism or _mechanism(), model, 10, "cyclic", **options)


def _memory(fed):
    """Returns where the noise is, and its buffers."""
    noise_state = fed.run.mechanism_state.noise_state
    return int(noise_state.round_index), [b.numpy() for b in noise_state.buffers]


def _squares(fed):
    """Returns the mu^2 of each round of a segment."""
    return (
        fed.mechanism.generator.round_sensitivities / fed.mechanism.noise_multiplier
    ) ** 2


def _spent(fed):
    """Returns the mu^2 of all charges, to be compared too."""
    charges = fed.account.own.items()
    total = sum(count * charge.noise_multiplier**-2 for charge, count in charges)
    return pytest.approx(total)


class _Killed(callbacks.RoundCheckpoint):
    """Saves nothing at the end, as where the process is killed."""

    def on_fit_end(self):
        self._begun = False
        super().on_fit_end()


def _breaks(owner, name):
    """Has a method raise what Ctrl-C raises."""
    return mock.patch.object(owner, name, side_effect=KeyboardInterrupt)


@pytest.mark.parametrize("strategy", ["banded", "blt:2"])
def test_a_run_costs_one_gaussian(strategy):
    fed = _federated(_mechanism(strategy), accountant="pld")
    squares = np.cumsum(_squares(fed))
    limit = accounting.gaussian_epsilon(squares[4:6].mean() ** -0.5, _DELTA)
    toy.fit(fed, _T, [callbacks.PrivacyBudget(epsilon=limit, delta=_DELTA)])
    assert fed.rounds == 5
    history = toy.fit(fed, _T - 5).history
    whole = (fed.mechanism.generator.sensitivity / 2.0) ** 2
    assert whole == _spent(fed)
    wanted = accounting.gaussian_epsilon(whole**-0.5, _DELTA)
    assert fed.epsilon(_DELTA) == pytest.approx(wanted, abs=1e-6)
    assert _memory(fed)[0] == _T
    assert not any("buffer" in name or "memory" in name for name in history)
    text = toy.said(fed, _DELTA)
    for words in ("at least the min separation apart", "as secret as the data"):
        assert words in text
    # Later rounds are a segment of their own.
    toy.fit(fed, 3)
    assert _memory(fed)[0] == 3
    assert whole + _squares(fed)[:3].sum() == _spent(fed)


def test_a_client_sits_out_after_its_last_round():
    fed = _federated(_mechanism(max_participations=1))
    toy.fit(fed, 6)
    assert fed.run.cohort_sizes == {10: 4, 0: 2}
    assert (fed.mechanism.generator.sensitivity / 2.0) ** 2 == _spent(fed)
    # In each segment of T = 8 rounds; other clients begin one of their own.
    toy.fit(fed, 2 + 3)
    assert fed.run.cohort_sizes == {10: 4 + 3, 0: 2 + 2}
    toy.fit(fed, 4, data=toy.clients(examples=9))
    assert fed.run.cohort_sizes == {10: 4 + 3 + 4, 0: 2 + 2}


def test_what_clients_had_part_in_is_kept_where_it_counts():
    limited, free = _federated(_mechanism(max_participations=1)), toy.federated()
    for fed in (limited, free):
        toy.fit(fed, 2)
    assert limited.run.state()["spending"]["participations"].sum() == 20
    # A central guarantee alone needs nothing of each client.
    assert free.run.state()["spending"]["participations"] is None
    state = limited.run.state()
    again = run_lib.Run.from_state(state, limited.run)
    toy.assert_same(
        [again.account.per_client.participations],
        [limited.account.per_client.participations],
    )


@pytest.mark.parametrize("strategy", ["banded", "blt:2"])
def test_large_buffers_are_overwritten_in_place(monkeypatch, tmp_path, strategy):
    # (Of a clip that no other test has, as programs of the patched size are kept.)
    mechanism = _mechanism(strategy, clip_norm=0.25)
    usual = _federated(mechanism)
    toy.fit(usual, _T + 2, seed=3)
    monkeypatch.setattr(release, "_LARGE", 0)
    fed = _federated(mechanism)
    toy.fit(fed, 3, [callbacks.RoundCheckpoint(tmp_path)], seed=3)
    buffers = fed.run.mechanism_state.noise_state.buffers
    assert all(isinstance(buffer, tf.Variable) for buffer in buffers)
    before = _memory(fed)
    again = _federated(mechanism)
    toy.fit(again, 3, resume_from=tmp_path, seed=3)
    assert again.rounds == 3
    toy.fit(fed, _T - 1, seed=3)
    assert fed.run.mechanism_state.noise_state.buffers[0] is buffers[0]
    toy.assert_same(fed.model.get_weights(), usual.model.get_weights())
    toy.assert_same(_memory(fed)[1], _memory(usual)[1])
    # Who resumed has buffers of its own, of the round that was saved.
    toy.assert_same(_memory(again)[1], before[1])


def test_other_variables_begin_a_segment():
    # The first round failed in its release, after it was charged.
    fed = _federated(model=toy.two_layers())
    toy.fit(fed, 2)
    fed.model.layers[0].trainable = False
    fed.compile("sgd", toy.loss())
    toy.fit(fed, 2)
    assert _memory(fed)[0] == 2
    squares = _squares(fed)
    assert 2 * squares[:2].sum() == _spent(fed)
    # The same variables go on.
    fed.compile("sgd", toy.loss())
    toy.fit(fed, 1)
    assert _memory(fed)[0] == 3


@pytest.mark.parametrize("strategy", ["banded", "blt:2"])
def test_a_refused_fit_does_not_pass_on_the_noise_of_other_variables(strategy):
    # Noise of shape [1, 4] could be broadcast to [4, 4].
    layers = [tf.keras.layers.Dense(4, use_bias=False) for _ in range(2)]
    model = tf.keras.Sequential([tf.keras.Input([1]), *layers])
    x = np.ones([40, 1], np.float32)
    clients = FederatedDataset.from_indices(x, np.ones([40, 4]), np.arange(40)[:, None])
    fed = tfdp_fl.DPFederatedModel(model, _mechanism(strategy), 10, "cyclic")
    used, charged = auditing.CanaryAudit(4), []
    for trained, frozen in (layers, layers[::-1]):
        trained.trainable, frozen.trainable = True, False
        fed.compile("sgd", "mse")
        if charged:
            with pytest.raises(ValueError, match="audit must be a new"):
                toy.fit(fed, data=clients, audit=used)
        toy.fit(fed, data=clients, audit=None if charged else used)
        assert _memory(fed)[0] == 1
        charged.append(_squares(fed)[0])
    assert sum(charged) == _spent(fed)
    with pytest.raises(ValueError, match="noise_state must have buffers for variables"):
        fed.mechanism.add_noise(
            [tf.zeros([1, 4])], tf.constant(1.0), fed.run.mechanism_state.noise_state
        )


def test_an_abandoned_round_moves_nothing():
    fed = _federated(on_client_failure="abort")
    toy.fit(fed, 2)
    before, spent = _memory(fed)[1], _squares(fed)[:2]
    group = fed.run.sampler.participation(2).group
    assert any(np.any(b) for b in before)
    failure = mock.Mock(position=3, error=OSError("lost"))
    failing = lambda pending: pending.failures.append(failure)  # noqa: E731
    with toy.around(fed.engine, "collect", after=failing):
        history = toy.fit(fed, 2)
    assert history.history["abandoned_rounds"] == [1.0, 1.0]
    # Nor does one that is broken off.
    with _breaks(CohortEngine, "collect"), pytest.raises(KeyboardInterrupt):
        toy.fit(fed)
    assert (_memory(fed)[0], fed.rounds) == (2, 4)
    assert spent.sum() == _spent(fed)
    toy.assert_same(before, _memory(fed)[1])
    assert fed.run.sampler.participation(fed.rounds).group == group
    toy.fit(fed, 2)
    assert _squares(fed)[:4].sum() == _spent(fed)


@pytest.mark.parametrize("kind", ["correlated", "fixed"])
def test_no_noise_is_released_twice(tmp_path, kind):
    # Also by who resumes, and if the audit, which looks last, broke the round off.
    def quiet():
        options = {"compile_options": {"optimizer": _SGD(0.0)}}
        if kind == "correlated":
            return _federated(**options)
        return toy.federated(clients_per_round=10, sampling="shuffled", **options)

    released, release = [], CohortEngine.release

    def recorded(engine, pending, paid):
        before = engine.server.variables[0].numpy()
        values = release(engine, pending, paid)
        released.append(engine.server.variables[0].numpy() - before)
        if len(released) == 2:
            raise KeyboardInterrupt
        return values

    fed, broken = quiet(), pytest.raises(KeyboardInterrupt)
    with mock.patch.object(CohortEngine, "release", recorded):
        with broken:
            toy.fit(fed, 2, seed=3)
        with _breaks(CohortEngine, "collect"), broken:
            toy.fit(fed, 1, [_Killed(tmp_path)], seed=3)
        fed, audit = quiet(), auditing.CanaryAudit(2)
        toy.fit(fed, 1, seed=3, resume_from=tmp_path)
        with (
            mock.patch.object(audit, "join"),
            _breaks(audit, "observe_release"),
            broken,
        ):
            toy.fit(fed, 1, seed=3, audit=audit)
        toy.fit(fed, 1, seed=3)
    assert fed.account.rounds == 5
    assert len(released) == 5
    flat = np.reshape(released, [5, -1])
    # None is a combination of others: as little as this at random in less
    # than 1 of 1e8 runs (5 vectors of 24 values), and the seed is fixed.
    directions = flat / np.linalg.norm(flat, axis=1)[:, None]
    assert np.linalg.svd(directions)[1][-1] > 1e-2


def test_a_broken_release_is_not_saved_by_an_evaluation(tmp_path):
    # Else a run that is resumed goes on with a noise state that knows nothing of it.
    fed, resumed = _federated(), _federated()
    keep, bounds = callbacks.RoundCheckpoint(tmp_path), {"loss": (0.0, 5.0)}
    toy.fit(fed, 2, [keep])
    with _breaks(CohortEngine, "release"), pytest.raises(KeyboardInterrupt):
        toy.fit(fed, 2, [keep])
    private = tfdp_fl.PrivateMetrics(bounds=bounds, noise_multiplier=9.0)
    fed.evaluate_clients(toy.clients(), verbose=0, private=private)
    assert (fed.rounds, fed.account.rounds) == (2, 3)
    toy.fit(resumed, 2, resume_from=tmp_path)
    assert (resumed.rounds, resumed.account.rounds) == (4, 5)
    assert resumed.account.evaluations == 1
    assert _memory(resumed)[0] == 2  # A segment of its own.
    squares = _squares(resumed)
    assert squares[:3].sum() + squares[:2].sum() == _spent(resumed)


def test_other_groups_or_clients_or_a_broken_release_end_the_segment():
    fed = _federated()
    toy.fit(fed, 3)
    toy.fit(fed, 1, seed=5)  # A sampler of its own.
    assert _memory(fed)[0] == 1
    others = toy.clients().with_ids([f"other-{i:02}" for i in range(40)])
    for position in (1, 2):
        toy.fit(fed, 1, data=others, seed=5)
        assert _memory(fed)[0] == position
    before = fed.account.rounds
    with _breaks(fed.engine, "release"), pytest.raises(KeyboardInterrupt):
        toy.fit(fed, 1, data=others, seed=5)
    toy.fit(fed, 1, data=others, seed=5)
    assert (_memory(fed)[0], fed.account.rounds) == (1, before + 2)
    squares = _squares(fed)
    segments = squares[:3], squares[:1], squares[:3], squares[:1]
    assert sum(each.sum() for each in segments) == _spent(fed)
    # Nameless clients in another order: one may have been in every round.
    x, y = toy.arrays(toy.NUM_CLIENTS * 10)
    rows, fed = np.arange(len(y)).reshape(toy.NUM_CLIENTS, 10), _federated()
    for order in (rows, rows[::-1], rows, rows[::-1]):
        toy.fit(fed, 1, data=FederatedDataset.from_indices(x, y, order))
        assert _memory(fed)[0] == 1
    assert _spent(fed).expected >= 4 * 2.0**-2 * (1 - 1e-6)


def test_coefficients_that_were_chosen_otherwise_end_the_segment(tmp_path):
    made = [_federated(_mechanism("blt:2")) for _ in range(3)]  # Lent once more.
    toy.fit(made[0], 3, [_Killed(tmp_path)])
    generator = made[1].mechanism.generator
    numbers = tuple(n + 1e-7 for n in generator.numbers)
    with mock.patch.object(generator, "numbers", numbers):
        toy.fit(made[1], 3, resume_from=tmp_path)
    assert _memory(made[1])[0] == 0
    toy.fit(made[2], 3, resume_from=tmp_path)
    assert _memory(made[2])[0] == 3
    with pytest.raises(ValueError, match="strategy"):
        toy.fit(_federated(), 3, resume_from=tmp_path)


def test_make_private_finds_the_noise_for_a_target():
    options = {"mechanism": "correlated", "strategy": "blt:2", "sampling": "cyclic"}
    fed = toy.private(3.0, _T, clients_per_round=10, clip_norm=0.5, **options)
    toy.fit(fed, _T)
    assert 2.99 < fed.epsilon(_DELTA) <= 3.0


def test_a_secure_sum_takes_large_buffers(monkeypatch):
    monkeypatch.setattr(release, "_LARGE", 1)  # Then they are variables.
    mechanism = tfdp_fl.CorrelatedNoise(
        clip_norm=1.0,
        noise_multiplier=1.0,
        strategy="banded:2",
        rounds=4,
        min_separation=2,
    )
    protocol = secure_aggregation.AdditiveSecretSharing()
    fed = toy.federated(mechanism, None, 10, "cyclic", secure_aggregation=protocol)
    toy.fit(fed, 2)
    assert int(fed.run.mechanism_state.noise_state.round_index) == 2
    buffers = fed.run.mechanism_state.noise_state.buffers
    assert all(isinstance(each, tf.Variable) for each in buffers)
    assert all(np.any(each.numpy()) for each in buffers)
