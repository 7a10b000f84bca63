"""Rounds of a random allocation: everybody once a pass, in secret."""

import functools

import dp_accounting
import numpy as np
import pytest

import tfdp_fl
from tests.keras import toy
from tfdp_fl import accounting, sampling
from tfdp_fl.auditing import CanaryAudit
from tfdp_fl.keras.callbacks import Ledger, PrivacyBudget, RoundCheckpoint
from tfdp_fl.keras.private_metrics import PrivateMetrics

_DELTA = 1e-3
_ALLOCATION = "random_allocation"


def _allocated(z=1.0, m=10, **options):
    """Returns a model of 40 clients in passes of four rounds."""
    mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=z)
    usual = {"accountant": "pld", "delta": _DELTA, "sampling": _ALLOCATION}
    return toy.federated(mechanism, None, m, **{**usual, **options})


@functools.cache
def _planned(rounds, z=1.0, n=toy.NUM_CLIENTS, m=10):
    return accounting.epsilon(z, _ALLOCATION, n, m, rounds, _DELTA, "pld")


@pytest.fixture
def drawn():
    """The cohorts that samplers draw, in their order."""
    cohorts = []
    with toy.around(sampling.RandomAllocationSampler, "draw", after=cohorts.append):
        yield cohorts


def _members(cohorts):
    return np.sort(np.concatenate([each.positions for each in cohorts]))


def test_everybody_takes_part_once_a_pass_and_each_pass_is_charged_whole(drawn):
    fed = _allocated()
    history = toy.fit(fed, 6).history
    assert history["epsilon"] == pytest.approx(
        [_planned(1)] * 4 + [_planned(5)] * 2, rel=1e-3
    )
    toy.fit(fed, 2)  # Goes on with the pass.
    for one in (drawn[:4], drawn[4:]):
        np.testing.assert_array_equal(_members(one), np.arange(40))
    assert fed.epsilon(_DELTA) == _planned(8)
    assert history["cohort_size"] == [len(each.positions) for each in drawn[:6]]
    facts = fed.privacy_statement(_DELTA, "dict")
    assert facts["relation"] == "ADD_OR_REMOVE_ONE"
    assert facts["epsilon"] == _planned(8)
    known = facts["epsilon_if_participation_is_known"]
    exact = accounting.gaussian_epsilon(1 / np.sqrt(2), _DELTA)
    assert known == pytest.approx(exact) and known > facts["epsilon"]
    assert "stays secret" in facts["secrecy"]
    assert "counts one round of each pass" in facts["secrecy"]
    assert {"allocation_charged_whole", "population_stated"} <= facts["caveats"].keys()
    # A mean is divided by the expected size, N / t, of m that does not divide N.
    fed = _allocated(m=12)
    toy.fit(fed)
    assert fed.run.context.cohort_size(0) == pytest.approx(40 / 3)
    assert fed.epsilon(_DELTA) == _planned(1, m=12)


@pytest.mark.parametrize(
    "mechanism",
    [
        tfdp_fl.AdaptiveClipping(noise_multiplier=0.9),
        tfdp_fl.MedianClipping(noise_multiplier=1.0, median_noise_multiplier=2.0),
    ],
)
def test_what_a_round_releases_costs_what_it_does_elsewhere(mechanism):
    fed = toy.federated(mechanism, None, 10, _ALLOCATION, accountant="pld")
    toy.fit(fed, 2)
    z = next(iter(fed.account.own)).noise_multiplier
    assert fed.epsilon(_DELTA) == pytest.approx(_planned(1, z), rel=1e-9)


def test_a_client_s_own_noise_is_charged_once_a_pass():
    mechanism = tfdp_fl.LocalDP(clip_norm=0.5, noise_multiplier=2.0)
    fed = toy.federated(mechanism, None, 10, _ALLOCATION)
    toy.fit(fed, 9)
    assert fed.account.per_client.max_participations in (2, 3)
    assert fed.account.per_client.participations.min() == 2
    assert fed.privacy_statement(_DELTA, "dict")["central_epsilon"] is None


def test_a_pass_that_cannot_be_afforded_is_not_begun():
    fed = _allocated()
    budget = PrivacyBudget(1.001 * _planned(8), _DELTA)
    assert toy.fit(fed, 20, [budget]).epoch == list(range(8))
    assert budget.stopped_before_round == 8
    fed = _allocated()
    small = PrivacyBudget(0.999 * _planned(1), _DELTA)
    assert toy.fit(fed, 1, [small]).epoch == []
    # Over several fits, of which one ends within a pass.
    fed = _allocated()
    for rounds, ran in ((3, 3), (3, 3), (9, 2)):
        assert len(toy.fit(fed, rounds, [budget]).epoch) == ran
    assert fed.epsilon(_DELTA) == _planned(8)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_run_that_is_resumed_in_mid_pass_allocates_the_rest_anew(
    tmp_path, drawn, seed
):
    first, path = _allocated(), tmp_path / "run"
    stopped = [RoundCheckpoint(path), toy.stop(first, 1)]
    toy.fit(first, 4, stopped, seed=seed)
    assert first.rounds == 2
    for again in range(2):  # Twice from one place: its rounds are seen twice.
        resumed = _allocated()
        # As if the last round was not saved.
        (path / f"round-{2 if not again else 3:08}.npz").unlink(missing_ok=True)
        toy.fit(resumed, 4, seed=seed, resume_from=path)
    assert len({each.participation.partition for each in drawn}) == 3
    assert max(np.bincount([each.round_index for each in drawn])) == 3
    (event,) = {charge.event for charge in first.account.own}
    expected = accounting.PrivacyAccountant(
        each.participation.cost(event) for each in drawn
    ).epsilon(_DELTA, "pld")
    assert expected > _planned(1)
    told = accounting.PrivacyLedger.read(path / "ledger.jsonl")
    assert told.epsilon(_DELTA, "pld") == pytest.approx(expected, rel=1e-9)
    assert resumed.epsilon(_DELTA) == pytest.approx(expected, rel=1e-9)


def test_other_clients_or_another_seed_begin_a_pass_of_their_own(drawn):
    fed = _allocated()
    toy.fit(fed, 3)
    for others in (toy.clients(41), toy.clients().take(np.arange(40)[::-1])):
        with pytest.raises(ValueError, match="round 4 continues a pass"):
            toy.fit(fed, data=others)
    with pytest.raises(ValueError, match="round 4 continues a pass"):
        toy.fit(fed, validation_split=0.3)
    # With a seed it is another sampler: what is left of the pass is not gone on with.
    toy.fit(fed, seed=1)
    assert drawn[-1].participation.pass_index == 3
    assert fed.epsilon(_DELTA) == _planned(8)
    assert drawn[-1].participation.partition != drawn[0].participation.partition
    toy.fit(fed, 3, seed=1)
    # Between passes N may change.
    toy.fit(fed, 1, data=toy.clients(45), seed=1)
    who = drawn[-1].participation
    assert (who.num_clients, who.pass_index, who.pass_offset) == (45, 7, 0)
    assert who.clients_per_round == 45 / 4
    expected = accounting.PrivacyAccountant()
    for each in drawn:
        expected.add(each.participation.cost(next(iter(fed.account.own)).event))
    assert fed.epsilon(_DELTA) == pytest.approx(expected.epsilon(_DELTA, "pld"))
    assert fed.epsilon(_DELTA) > _planned(8)


def test_held_out_clients_are_in_no_pass(drawn):
    fed = _allocated(m=5)
    toy.fit(fed, 5, validation_split=0.4)
    n, t = fed.run.population[0], drawn[0].participation.rounds_per_pass
    assert n < 40 and t == n // 5
    np.testing.assert_array_equal(_members(drawn[:t]), np.arange(n))


def test_what_changes_within_a_pass_is_refused_before_it_is_trained():
    fed = _allocated([1.0, 1.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="noise_multiplier must be the same in all"):
        toy.fit(fed, 4)
    assert fed.rounds == 0
    fed = _allocated(m=[10, 10, 20, 10])
    with pytest.raises(ValueError, match="clients_per_round must give all rounds"):
        toy.fit(fed, 3)
    assert fed.run is None
    # From pass to pass both may.
    fed = _allocated([1.0] * 4 + [2.0] * 2, m=[10] * 4 + [20] * 2)
    toy.fit(fed, 6)
    each = accounting.PrivacyAccountant(
        accounting.RoundCharge(
            sampling=_ALLOCATION,
            num_clients=40,
            clients_per_round=m,
            event=tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=z).round_event(
                0, fed.run.context
            ),
        )
        for z, m in ((1.0, 10), (2.0, 20))
    )
    assert fed.epsilon(_DELTA) == pytest.approx(each.epsilon(_DELTA, "pld"))


def test_abandoned_rounds_lose_the_turn_of_their_clients(drawn):
    fed = _allocated(on_client_failure="abort")
    whole = toy.clients()
    clients = tfdp_fl.FederatedDataset.from_client_fn(
        range(40), lambda client: whole.client(client) if client != 3 else 1 / 0
    )
    history = toy.fit(fed, 4, data=clients).history
    assert sorted(history["abandoned_rounds"]) == [0.0, 0.0, 0.0, 1.0]
    np.testing.assert_array_equal(_members(drawn), np.arange(40))
    assert fed.account.rounds == 3
    assert fed.epsilon(_DELTA) == _planned(4)


def test_runs_of_one_ledger_are_passes_of_their_own(tmp_path, drawn):
    path, feds = tmp_path / "ledger.jsonl", [_allocated(), _allocated()]
    for fed, rounds in zip(feds, (4, 1), strict=True):
        toy.fit(fed, rounds, [Ledger(path, append=True)], seed=7)
    told = accounting.PrivacyLedger.read(path)
    assert told.epsilon(_DELTA, "pld") == feds[1].epsilon(_DELTA) == _planned(5)
    # Of one seed they would be one draw that is seen twice.
    assert not np.array_equal(drawn[0].positions, drawn[4].positions)
    again = _allocated()
    toy.fit(again, 1, seed=7)
    np.testing.assert_array_equal(drawn[0].positions, drawn[5].positions)


def test_private_evaluations_compose_with_it():
    fed = _allocated(compile_options={"metrics": ["accuracy"]})
    toy.fit(fed, 2)
    private = PrivateMetrics(bounds={"accuracy": (0, 1)}, noise_multiplier=4.0)
    fed.evaluate_clients(toy.clients(), private=private)
    history = accounting.PrivacyAccountant(fed.account.own.items())
    history.add(private.cost(_ALLOCATION, toy.NUM_CLIENTS))
    assert fed.epsilon(_DELTA) == pytest.approx(history.epsilon(_DELTA, "pld"))
    assert fed.epsilon(_DELTA) > _planned(2)


@pytest.mark.parametrize("mechanism", ["adaptive", "fixed", "median"])
def test_make_private_keeps_its_target_and_uses_it_up(mechanism):
    fed = toy.private(
        *(2.0, 10),
        accountant=None,
        clients_per_round=12,
        mechanism=mechanism,
        sampling=_ALLOCATION,
        **({"clip_norm": 0.5} if mechanism == "fixed" else {}),
    )
    assert fed.setup.accountant == "pld"
    assert toy.fit(fed, 14).epoch == list(range(12))  # The fourth pass is whole.
    assert 2.0 * (1 - 1e-3) <= fed.epsilon(_DELTA) <= 2.0 * (1 + 1e-9)


def test_canaries_are_in_one_round_of_each_pass():
    audit = CanaryAudit(num_canaries=300)
    audit._positions, audit._rng = {}, np.random.default_rng(0)
    drawn = [
        audit._draw(
            accounting.RoundCharge(
                sampling=_ALLOCATION,
                num_clients=40,
                clients_per_round=40 / 3,
                event=dp_accounting.GaussianDpEvent(1.0),
                pass_index=begin,
                pass_offset=offset,
                partition="secret",
            )
        )
        for begin in (0, 3)
        for offset in range(3)
    ]
    for each in (drawn[:3], drawn[3:]):
        np.testing.assert_array_equal(np.sort(np.concatenate(each)), np.arange(300))
        assert min(map(len, each)) > 40  # Of 100; else with a chance below 1e-11.


def test_correlated_noise_and_shares_of_noise_need_other_samplings():
    with pytest.raises(ValueError, match="sampling must be 'cyclic'"):
        toy.private(2.0, 8, mechanism="correlated", clip_norm=1.0, sampling=_ALLOCATION)
    shares = tfdp_fl.FixedClipping(
        clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
    )
    with pytest.raises(ValueError, match="sampling='fixed_size'"):
        toy.federated(shares, None, 10, _ALLOCATION)
