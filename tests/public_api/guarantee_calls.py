"""Calls of mechanisms, accounting, sampling and what belongs to them."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import dp_accounting
import numpy as np

import tfdp_fl
from tests.public_api import calling
from tfdp_fl import accounting, auditing, mechanisms, sampling
from tfdp_fl import correlated_noise as correlated
from tfdp_fl.mechanisms import tf_privacy

_FIXED = {"clip_norm": 1.0, "noise_multiplier": 1.0}
_RUN = {
    "noise_multiplier": 1.0,
    "sampling": "poisson",
    "num_clients": 100,
    "clients_per_round": 10,
    "rounds": 5,
}
_COHORTS = {"num_clients": 10, "clients_per_round": 3, "seed": 1}


def _charge() -> accounting.RoundCharge:
    return accounting.RoundCharge(
        sampling="poisson",
        num_clients=100,
        clients_per_round=10.0,
        event=dp_accounting.GaussianDpEvent(1.0),
    )


def _mechanisms() -> calling.Calls:
    local = {"epsilon": 5.0, "delta": 1e-3}
    query = tf_privacy.GaussianSumQuery(1.0, 1.0)
    correlated_run = {
        **_FIXED,
        "rounds": 4,
        "min_separation": 2,
        "strategy": "banded:1",  # Others are optimized, which takes a second.
    }
    for kind, given in (
        (tfdp_fl.FixedClipping, _FIXED),
        (tfdp_fl.AdaptiveClipping, {"noise_multiplier": 1.0}),
        (tfdp_fl.MedianClipping, {"noise_multiplier": 1.0}),
        (tfdp_fl.LocalDP, {"clip_norm": 1.0, **local}),
        (tfdp_fl.AdaptiveLocalDP, local),
        (
            tfdp_fl.NbAFL,
            {"epsilon": 5.0, "constant": 3.0, "weight_clip": 1.0},
        ),
        (tfdp_fl.CorrelatedNoise, correlated_run),
        (
            tfdp_fl.QueryMechanism,
            {
                "query": query,
                "dp_event": dp_accounting.GaussianDpEvent(1.0),
            },
        ),
        (tfdp_fl.ClientWeighting, {"measure": "num_examples", "cap": 5.0}),
    ):
        yield (
            f"mechanisms.{kind.__name__}",
            lambda k=kind, g=given: calling.usual(k, **g),
        )
    for name in ("num_examples", "sample_weight"):
        way = getattr(tfdp_fl.ClientWeighting, name)
        yield (
            f"mechanisms.ClientWeighting.{name}",
            lambda w=way: calling.usual(w, cap=5.0, mean_weight=0.5),
        )
    yield (
        "mechanisms.by_name",
        lambda: calling.usual(mechanisms.by_name, name="fixed"),
    )
    yield (
        "mechanisms.default_median_noise_multiplier",
        lambda: calling.usual(
            mechanisms.default_median_noise_multiplier,
            noise_multiplier=1.0,
            clients_per_round=10.0,
        ),
    )
    yield (
        "mechanisms.Deployment",
        lambda: calling.usual(mechanisms.Deployment, clients_per_round=3.0),
    )


def _accounting() -> calling.Calls:
    a = accounting
    without = {k: v for k, v in _RUN.items() if k != "noise_multiplier"}
    no_rounds = {k: v for k, v in _RUN.items() if k != "rounds"}
    for function, given in (
        (a.epsilon, {**_RUN, "delta": 1e-3}),
        (a.delta, {**_RUN, "epsilon": 1.0}),
        (
            a.calibrate_noise_multiplier,
            {**without, "target_epsilon": 2.0, "delta": 1e-3},
        ),
        (a.max_rounds, {**no_rounds, "target_epsilon": 2.0, "delta": 1e-3}),
        (a.analytic_noise_multiplier, {"epsilon": 1.0, "delta": 1e-3}),
        (a.classic_noise_multiplier, {"epsilon": 0.5, "delta": 1e-3}),
        (a.gaussian_delta, {"noise_multiplier": 1.0, "epsilon": 1.0}),
        (a.gaussian_epsilon, {"noise_multiplier": 1.0, "delta": 1e-3}),
        (a.epsilon_of_mu_squared, {"mu_squared": 1.0, "delta": 1e-3}),
        (a.Budget, {"epsilon": 2.0, "delta": 1e-3}),
        (a.LocalAccount, {"num_clients": 5}),
        (a.PrivacyAccountant, {}),
    ):
        yield (
            f"accounting.{function.__name__}",
            lambda f=function, g=given: calling.usual(f, **g),
        )
    yield (
        "accounting.calibrate",
        lambda: calling.usual(
            a.calibrate,
            make_charges=lambda z: [
                (
                    dataclasses.replace(
                        _charge(), event=dp_accounting.GaussianDpEvent(z)
                    ),
                    2,
                )
            ],
            target_epsilon=2.0,
            delta=1e-3,
        ),
    )
    yield (
        "accounting.RoundCharge",
        lambda: calling.usual(
            a.RoundCharge,
            sampling="poisson",
            num_clients=100,
            clients_per_round=10.0,
            event=dp_accounting.GaussianDpEvent(1.0),
        ),
    )
    yield (
        "accounting.RoundCharge.from_json",
        lambda: calling.usual(a.RoundCharge.from_json, text=_charge().to_json()),
    )
    yield (
        "accounting.tightest",
        lambda: calling.usual(a.tightest, charges=[_charge()]),
    )
    yield (
        "accounting.StatementFacts",
        lambda: calling.usual(a.StatementFacts, guarantee="central", mechanism="fixed"),
    )
    yield (
        "accounting.privacy_statement",
        lambda: calling.usual(
            a.privacy_statement,
            facts=a.StatementFacts(
                guarantee="central", mechanism="fixed", epsilon_rdp=1.0
            ),
            delta=1e-3,
        ),
    )

    def ledger(path, **options):
        with a.PrivacyLedger(path, **options) as made:
            made.record(0, _charge(), 10)
        return path

    def write(**options):
        with contextlib.suppress(FileNotFoundError):
            os.unlink("new.jsonl")
        ledger(**options)

    yield (
        "accounting.PrivacyLedger",
        lambda: calling.Call(
            function=write,
            arguments={
                "path": "new.jsonl",
                **calling.defaults(a.PrivacyLedger),
            },
            errors=(a.LedgerError,),
            paths=("path",),
        ),
    )
    yield (
        "accounting.epsilon_from_ledger",
        lambda: calling.usual(
            a.epsilon_from_ledger,
            path=ledger("written.jsonl"),
            delta=1e-3,
            errors=(a.LedgerError,),
            paths=("path",),
        ),
    )


def _correlated() -> calling.Calls:
    c = correlated

    def add(participation, clients):
        c.ParticipationRecord(participation).add(clients)

    yield (
        "correlated_noise.Participation",
        lambda: calling.usual(
            c.Participation, rounds=6, min_separation=2, max_participations=2
        ),
    )
    yield (
        "correlated_noise.ParticipationRecord",
        lambda: calling.Call(
            function=add,
            arguments={
                "participation": c.Participation(rounds=6, min_separation=2),
                "clients": ["a", 3],
            },
        ),
    )
    yield "correlated_noise.BLT", lambda: calling.usual(c.BLT, num_buffers=2)
    yield (
        "correlated_noise.BandedToeplitz",
        lambda: calling.usual(c.BandedToeplitz, bands=3),
    )


def _sampling() -> calling.Calls:
    s = sampling
    for kind in (s.PoissonSampler, s.FixedSizeSampler, s.ShuffledSampler):
        yield (
            f"sampling.{kind.__name__}",
            lambda k=kind: calling.usual(k, **_COHORTS),
        )
    yield (
        "sampling.CyclicSampler",
        lambda: calling.usual(s.CyclicSampler, **_COHORTS, num_groups=2),
    )
    yield (
        "sampling.make_sampler",
        lambda: calling.usual(
            s.make_sampler, **_COHORTS, sampling="cyclic", num_groups=2
        ),
    )
    sch = tfdp_fl.schedules
    yield (
        "schedules.OncePerRound",
        lambda: calling.usual(sch.OncePerRound, schedule=lambda t: 1.0),
    )
    yield "schedules.fixed", lambda: calling.usual(sch.fixed, schedule=[1.0])
    yield (
        "schedules.is_constant",
        lambda: calling.usual(sch.is_constant, schedule=1.0),
    )
    yield (
        "schedules.value_at",
        lambda: calling.Call(
            function=lambda schedule: sch.value_at(schedule, 0, "rate"),
            arguments={"schedule": [1.0]},
        ),
    )
    yield (
        "schedules.checked",
        lambda: calling.Call(
            function=lambda schedule: sch.checked(
                schedule, tfdp_fl._validate.positive, "rate"
            ),
            arguments={"schedule": [1.0]},
        ),
    )
    yield (
        "auditing.CanaryAudit",
        lambda: calling.usual(auditing.CanaryAudit, num_canaries=10),
    )
    yield (
        "auditing.Scores",
        lambda: calling.usual(
            auditing.Scores,
            observed=np.arange(5.0),
            unobserved=np.arange(4.0),
            null_std=1.0,
        ),
    )


def calls() -> calling.Calls:
    """Yields them."""
    yield from _mechanisms()
    yield from _accounting()
    yield from _correlated()
    yield from _sampling()
