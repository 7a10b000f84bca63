"""Draws: each is made once, and trains once."""

import ast
import contextlib
import dataclasses
import os
import types
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting, engine, sampling
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import round_loop
from tfdp_fl.keras import run as run_lib
from tfdp_fl.keras.callbacks import Ledger, PrivacyBudget, RoundCheckpoint
from tfdp_fl.mechanisms import clipping

_Engine = engine.CohortEngine


@contextlib.contextmanager
def _cohorts():
    """Yields which are drawn, which train, and with which seeds."""
    seen = types.SimpleNamespace(drawn=[], trained=[], seeds=[])
    draw = sampling.FixedSizeSampler._draw

    def cohort(sampler, round_index):
        positions = draw(sampler, round_index)
        seen.drawn.append((round_index, positions.tolist()))
        return positions

    def completed(own, pending):
        seen.trained.append(pending.inputs.positions.tolist())
        seen.seeds.append(tuple(pending.inputs.seed.tolist()))

    with (
        mock.patch.object(sampling.FixedSizeSampler, "_draw", cohort),
        toy.around(_Engine, "complete", completed),
    ):
        yield seen


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_is_drawn_trains_once(streamed):
    fed, clients = toy.federated(clients_per_round=5), toy.clients()
    with _cohorts() as cohorts:
        toy.fit(fed, 6, data=toy.streamed(clients) if streamed else clients)
    assert [t for t, _ in cohorts.drawn] == list(range(6))
    assert [positions for _, positions in cohorts.drawn] == cohorts.trained
    assert len(set(cohorts.seeds)) == 6
    counts = np.bincount(np.concatenate(cohorts.trained), minlength=40)
    np.testing.assert_array_equal(fed.run.account.per_client.participations, counts)


def test_another_attempt_at_a_seeded_round_draws_anew():
    seeds = []
    for repeated in (None, 1):
        fed = toy.federated(clients_per_round=5)
        take = toy.at_end(lambda fed=fed: fed.run.attempts.take(), repeated)
        with _cohorts() as cohorts:
            toy.fit(fed, 4, [take] if repeated else [], seed=3)
        seeds.append(cohorts.seeds)
    alike = [one == other for one, other in zip(*seeds, strict=True)]
    assert alike == [True, True, False, False]


def test_an_error_of_drawing_is_the_rounds_own():
    def damaged(sampler, round_index):
        if round_index == 2:
            raise RuntimeError("the sampler is damaged")

    fed = toy.federated(clients_per_round=5)
    with (
        toy.around(sampling.FixedSizeSampler, "_draw", damaged),
        pytest.raises(RuntimeError, match="is damaged"),
    ):
        toy.fit(fed, 4, data=toy.streamed(toy.clients()))
    # What was released is there, and paid for.
    assert (fed.rounds, fed.account.rounds) == (2, 2)


def test_every_attempt_has_a_seed_of_its_own():
    attempts = run_lib.Attempts()
    taken = [attempts.take() for _ in range(3)]
    for _ in range(2):
        attempts.renew()
        taken.append(attempts.take())
    given = 1, 1 + 2**32, 1 + 2**33, 2
    seeds = {tuple(run_lib.round_seed(seed, each)) for seed in given for each in taken}
    assert len(seeds) == len(given) * len(taken)


def test_a_fork_takes_no_attempt_of_its_parent():
    attempts = run_lib.Attempts()
    attempts.take()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, repr([attempts.take() for _ in range(2)]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        there = ast.literal_eval(pipe.read())
    os.waitpid(child, 0)
    here = [attempts.take() for _ in range(2)]
    assert here == [(1,), (2,)]
    assert len({*here, *there}) == 4


def test_runs_that_share_a_ledger_share_no_noise(tmp_path):
    # What they cost together is what two noises cost.
    with _cohorts() as cohorts:
        for _ in range(2):
            ledger = tfdp_fl.callbacks.Ledger(tmp_path / "ledger.jsonl", append=True)
            toy.fit(toy.federated(clients_per_round=5), 2, [ledger], seed=1)
    assert len(set(cohorts.seeds)) == 4


@pytest.mark.parametrize("when", ["in", "after"])
def test_a_round_broken_off_in_or_after_its_release_is_counted(when):
    fed, drawn = toy.federated(clients_per_round=5), []
    release = round_loop.RoundLoop.release

    def broken_off(loop, cohort, pending, paid):
        drawn.append((tuple(pending.inputs.seed), tuple(pending.inputs.positions)))
        if when == "in":
            loop.engine.release = toy.interrupt
        release(loop, cohort, pending, paid)
        raise KeyboardInterrupt

    with mock.patch.object(round_loop.RoundLoop, "release", broken_off):
        for done in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                toy.fit(fed, seed=1)
            # Broken off within, it is charged, as it may have been seen.
            assert fed.account.rounds == done
            assert fed.rounds == (done if when == "after" else 0)
            vars(fed.engine).pop("release", None)
    # Two draws are charged: the same clients twice, with other noise, cost more.
    for each in zip(*drawn, strict=True):
        assert len(set(each)) == 2


_LOCAL = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=4.0)


@pytest.mark.parametrize(
    "options, charged",
    [
        ({"mechanism": _LOCAL}, 1),
        ({"on_client_failure": "abort"}, 1),
        # What a public coin ends, or nobody can see, costs nothing.
        ({"on_client_failure": "abort", "sampling": "poisson"}, 0),
        ({}, 0),
    ],
)
def test_a_round_that_ends_while_clients_train_is_charged_if_that_tells(
    tmp_path, options, charged
):
    path = tmp_path / "ledger.jsonl"
    for attempt in (1, 2):
        fed, ledger = toy.federated(**options), Ledger(path, append=True)
        broken = mock.patch.object(_Engine, "train_chunk", toy.interrupt)
        with broken, pytest.raises(KeyboardInterrupt):
            toy.fit(fed, callbacks=[ledger])
        # On the disk, where the next process finds it.
        entries = accounting.PrivacyLedger.read(path).entries
        assert len(entries) == charged * attempt
        assert fed.account.rounds == charged
    assert toy.fit(fed).epoch == [0]
    assert (fed.rounds, fed.account.rounds) == (1, 1 + charged)
    caveats = fed.privacy_statement(1e-3, format="dict")["caveats"]
    assert ("rounds_charged_twice" in caveats) == bool(charged)


def test_a_charge_that_was_refused_is_not_charged_twice():
    fed = toy.federated(on_client_failure="abort")

    class Refuses(tfdp_fl.callbacks.FederatedCallback):
        def on_round_charged(self, round_index, charge, details):
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        toy.fit(fed, callbacks=[Refuses()])
    toy.fit(fed)
    assert fed.account.rounds == 1
    assert "rounds_charged_twice" not in fed.run.caveats


@pytest.mark.parametrize("on_failure", ["exclude", "abort"])
def test_a_label_that_is_no_class_is_the_fault_of_its_client_alone(capsys, on_failure):
    clients = {f"client {k}": toy.clients(6).client(k) for k in range(6)}
    x, y = clients["client 4"]
    clients["client 4"] = x, np.where(np.arange(len(y)) == 3, 271828, y)
    spec = toy.clients().element_spec
    streamed = FederatedDataset.from_client_fn(list(clients), clients.get, spec)
    options = {"clients_per_round": 6, "on_client_failure": on_failure}
    fed = toy.federated(tfdp_fl.NoPrivacy(), **options)
    history = fed.fit(streamed, rounds=1, verbose=2).history
    said = capsys.readouterr().out
    assert "Client 'client 4': ExamplesValueError: labels must be integers from" in said
    assert "271828" not in said
    assert history["failed_clients"] == [1]
    assert history.get("abandoned_rounds", [0]) == [on_failure == "abort"]
    assert np.isfinite(toy.flat(fed.model)).all()
    # In memory, the user can mend it before the first round.
    fed = toy.federated(tfdp_fl.NoPrivacy(), **options)
    with pytest.raises(ValueError, match=r"labels must be .* for client 'client 4'"):
        toy.fit(fed, 1, data=clients)
    assert fed.run is None


def test_a_client_that_fails_has_paid_once_and_its_noise_is_missed(tmp_path):
    spoilt = toy.clients()
    read = spoilt.client

    def client(name):
        x, y = read(name)
        return (x[:, :7], y) if name == spoilt.client_ids[0] else (x, y)

    data = tfdp_fl.FederatedDataset.from_client_fn(
        list(spoilt.client_ids), client, spoilt.element_spec
    )
    fed = toy.federated(_LOCAL, clients_per_round=toy.NUM_CLIENTS)
    spent = accounting.epsilon_of_mu_squared(2 * (2 / 4) ** 2, 1e-3)
    two = PrivacyBudget(spent, 1e-3)  # It is enough for two rounds.
    keeper = RoundCheckpoint(tmp_path / "run")
    history = toy.fit(fed, 2, data=data, callbacks=[keeper, two]).history
    assert history["failed_clients"] == [1, 1]
    assert fed.account.per_client.participations.tolist() == [2] * toy.NUM_CLIENTS
    assert fed.epsilon(1e-3) == spent
    path = tmp_path / "run" / "ledger.jsonl"
    assert accounting.epsilon_from_ledger(path, 1e-3) == pytest.approx(spent)
    # Whoever sees the model only has one share of noise less than was planned.
    assert fed.central_epsilon(1e-3) == np.inf
    statement = fed.privacy_statement(1e-3, format="dict")
    told = {"local_clients_excluded", "local_rounds_counted_twice"}
    assert told <= set(statement["caveats"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Remembers(tfdp_fl.FixedClipping):
    """Its clients remember the norms of their last two rounds."""

    window: ClassVar = 2

    def window_norms(self, update):
        return tf.stack([clipping.global_norm([tensor]) for tensor in update])


def test_clients_in_another_order_do_not_inherit_what_others_remember():
    # One client's norms decided how another one's update was clipped in the next fit.
    fed = toy.federated(
        _Remembers(clip_norm=1.0, noise_multiplier=1.0),
        clients_per_round=4,
        sampling="poisson",
    )
    clients = {f"client {k}": toy.clients().client(k) for k in range(4)}

    def remembered(data):
        toy.fit(fed, data=data)
        return (~np.isnan(fed.run.windows[:, :, 0])).sum(axis=1).tolist()

    assert [remembered(clients) for _ in range(2)] == [[1] * 4, [2] * 4]
    assert remembered(dict(reversed(clients.items()))) == [1] * 4
    # Nor those of a stream without names, which could be in any order.
    streams = [list(clients.values()) for _ in range(2)]
    spec = toy.clients().element_spec
    a, b = (
        tfdp_fl.datasets.FederatedDataset.from_client_fn(range(4), s.__getitem__, spec)
        for s in streams
    )
    assert [remembered(a), remembered(a), remembered(b)] == [[1] * 4, [2] * 4, [1] * 4]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Annealed(tfdp_fl.FixedClipping):
    """Its clip is a multiple that a callback sets."""

    multiple: ClassVar = [10.0]

    def l2_norm_bound(self, round):
        return round.clip_norm * self.multiple[0]

    def scale(self, norm, round):
        return clipping.clip_factor(norm, self.l2_norm_bound(round))


def test_clips_and_the_charge_are_of_bounds_of_one_moment():
    # Clients were clipped to the first multiple, and charged by the second.
    class Anneal(tf.keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            _Annealed.multiple[0] = 1.0

    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input([8]),
            layers.Reshape([8, 1]),
            layers.Conv1D(3, 8, kernel_initializer="zeros", use_bias=False),
            layers.Flatten(),
        ]
    )
    mechanism = _Annealed(clip_norm=1e-2, noise_multiplier=1e-6)
    fed = tfdp_fl.DPFederatedModel(model, mechanism, 3, "shuffled")
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    fed.compile(tf.keras.optimizers.SGD(100.0), loss)
    toy.fit(fed, 1, data=toy.clients(), callbacks=[Anneal()])
    (kernel,) = model.get_weights()
    assert 1e-3 < np.linalg.norm(kernel) <= 1e-2 * (1 + 1e-3)
