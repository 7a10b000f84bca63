"""10 000 mutations of what is read: documented errors, and no wrong data.

And arguments that no one should give, to whatever is public: ValueError or
TypeError, in no time, and with a message that says which argument it was.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized
from hypothesis import strategies as st

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.keras import files, toy
from tests.stress import counts
from tfdp_fl import (
    accounting,
    auditing,
    correlated_noise,
    sampling,
    secure_aggregation,
)
from tfdp_fl.experiments import Settings
from tfdp_fl.keras import checkpoint

_MUTATIONS = int(os.environ.get("TFDP_FL_MUTATIONS", "10000"))
_INTERESTING = (
    b"\0",
    b"\xff",
    b"\n",
    b'"',
    b"{}",
    b"[]",
    b"null",
    b"NaN",
    b"Infinity",
    b"-1",
    b"1e999",
    b"9" * 30,
    b"\x80\x04K\x01.",
    b"\xf0\x9f\x92\xa9",
    b"[" * 2000,
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns other bytes: one to three changes of any kind."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(found) + 1)
        end = min(len(found), place + rng.choice([1, 2, 8, 100, 5000]))
        kind = rng.randrange(7)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[place:]
        elif kind == 2:
            del found[place:end]
        elif kind == 3:
            found[place:place] = rng.choice(_INTERESTING)
        elif kind == 4:
            found[place:end] = rng.choice(_INTERESTING)
        elif kind == 5:
            found[place:place] = found[place:end]
        else:
            found[place:end] = rng.randbytes(end - place)
    return bytes(found)


class FilesTest(absltest.TestCase):
    def test_ledger(self):
        started, rng = time.time(), random.Random(1)
        path = files.directory(self) / "ledger.jsonl"
        fed = toy.federated()
        fed.fit(toy.clients(), verbose=0)
        with accounting.PrivacyLedger(path) as ledger:
            for number in range(8):
                ledger.record(number, fed._costs().charge(0), 10)
        data = path.read_bytes()
        whole = accounting.PrivacyLedger.read(path).entries
        read = 0
        for _ in range(_MUTATIONS):
            path.write_bytes(mutated(data, rng))
            try:
                found = accounting.PrivacyLedger.read(path)
            except accounting.LedgerError:
                continue
            read += 1
            # Cut short, perhaps; never other than it was.
            self.assertEqual(found.entries, whole[: len(found.entries)])
        counts.held(
            "A mutated ledger is refused, or read as the beginning of what it "
            f"was ({read} read)",
            _MUTATIONS,
            "mutations",
            time.time() - started,
        )

    def test_checkpoint(self):
        started, rng = time.time(), random.Random(2)
        directory = checkpoint.CheckpointDirectory(files.directory(self))
        arrays = {
            "weights/0": np.arange(12.0).reshape(3, 4),
            "query/0": np.float32(0.5),
        }
        directory.write(
            checkpoint.Checkpoint(
                round_index=3, metadata={"seed": 7, "x": [1]}, arrays=arrays
            ),
            1,
        )
        data = directory.file(3).read_bytes()
        read = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(_MUTATIONS):
                directory.file(3).write_bytes(mutated(data, rng))
                try:
                    found = directory.newest()
                except checkpoint.CheckpointError:
                    continue
                read += 1
                self.assertEqual(found.metadata, {"seed": 7, "x": [1]})
                self.assertEqual(found.arrays.keys(), arrays.keys())
                for name, array in arrays.items():
                    np.testing.assert_array_equal(found.arrays[name], array)
        counts.held(
            "A mutated checkpoint is refused, or read as what it was "
            f"({read} read)",
            _MUTATIONS,
            "mutations",
            time.time() - started,
        )


class MessagesTest(absltest.TestCase):
    def test_of_secure_aggregation(self):
        started, rng = time.time(), random.Random(3)
        names = ("ann", "bob", "cat")
        update = [np.ones([3, 2], np.float32), np.ones([2])]

        def members():
            made = {
                name: secure_aggregation.Member(
                    secure_aggregation.AdditiveSecretSharing(),
                    name,
                    update,
                    members=names,
                    session="s",
                )
                for name in names
            }
            sent = [m for each in made.values() for m in each.begin(0.0)]
            return made, sent

        taken = 0
        for _ in range(_MUTATIONS):
            made, sent = members()
            message = rng.choice(sent)
            data = mutated(message.to_bytes(), rng)
            try:
                bad = secure_aggregation.Message.from_bytes(data)
                made[message.recipient].receive(bad, 0.0)
                taken += 1
            except secure_aggregation.RejectedMessageError:
                # It changed nothing: the right one is still taken.
                made[message.recipient].receive(message, 0.0)
        counts.held(
            "A mutated message of secure aggregation is rejected and changes "
            f"nothing, or is one ({taken} taken)",
            _MUTATIONS,
            "mutations",
            time.time() - started,
        )

    def test_of_flower(self):
        logging.getLogger("tfdp_fl.flower").setLevel(logging.CRITICAL)
        started, rng = time.time(), random.Random(4)
        clip, m = 0.5, 3
        updates = np.eye(m)
        record = fm.model(np.zeros(m))
        strange = (
            None,
            -1,
            2**70,
            float("nan"),
            float("inf"),
            "x",
            b"\xff",
            [],
            {},
            (3,),
            (-1,),
            (2**40,),
            True,
            object(),
        )

        def change(replies):
            (hostile,) = [r for r in replies if r.metadata.src_node_id == 10]
            array = hostile.content["arrays"]["0"]
            kind = rng.randrange(6)
            if kind < 3:
                array.__dict__["data"] = mutated(array.data, rng)
            elif kind == 3:
                name = rng.choice(["dtype", "shape", "stype", "data"])
                array.__dict__[name] = rng.choice(strange)
            elif kind == 4:
                record = rng.choice(["arrays", "metrics"])
                dict.__setitem__(hostile.content, record, rng.choice(strange))
            else:
                metrics = hostile.content["metrics"]
                name = rng.choice([*metrics, "new", 3])
                dict.__setitem__(metrics, name, rng.choice(strange))
            return replies

        rejected = 0
        for _ in range(_MUTATIONS):
            strategy = tfdp_fl.flower.PrivateStrategy(
                fm.Strategy(m),
                tfdp_fl.AdaptiveClipping(
                    noise_multiplier=0.0, initial_clip_norm=clip
                ),
                num_clients=m,
                clients_per_round=m,
            )
            grid = fm.Grid(
                {10 + i: fm.adds([u]) for i, u in enumerate(updates)}, change
            )
            with np.errstate(all="ignore"):
                got, _ = fm.a_round(strategy, grid, copy.deepcopy(record))
            moved = fm.arrays(got)[0]
            rejected += strategy.rejected_replies
            # The other two are as they were, and it moved at most S/m.
            others = np.array([0, clip / m, clip / m])
            self.assertLessEqual(
                np.linalg.norm(moved - others), clip / m * (1 + 1e-9)
            )
        self.assertGreater(rejected, _MUTATIONS / 4)
        counts.held(
            "A mutated reply of Flower's ends no round and moves the mean by "
            f"at most S/m ({rejected} left out)",
            _MUTATIONS,
            "mutations",
            time.time() - started,
        )


# Arguments that somebody may give.
_STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([100, 10**4, 2**31, 2**63, 2**70, -(2**63)]),
    st.floats(),
    st.sampled_from(
        [0.0, -0.0, 1e-320, 1e308, 1e-10, 0.5, 1.0, float("nan"), 2**63, 1e30]
    ),
    st.text(max_size=5),
    st.sampled_from(
        ["poisson", "fixed_size", "rdp", "pld", "blt:2", "tree", "client"]
    ),
    st.binary(max_size=4),
    st.lists(st.floats(), max_size=3),
    st.tuples(st.integers(0, 5), st.floats(0, 2)),
    st.complex_numbers(),
    st.builds(lambda: np.array([])),
    st.builds(lambda: np.float32(0.5)),
    st.builds(lambda: np.array([1.0, 2.0])),
    st.builds(object),
    st.builds(dict),
    st.just(len),
    st.just(lambda t: 1.0),
    st.builds(lambda: tf.constant(1.0)),
)

_MECHANISMS = (
    tfdp_fl.FixedClipping,
    tfdp_fl.AdaptiveClipping,
    tfdp_fl.MedianClipping,
    tfdp_fl.LocalDP,
    tfdp_fl.AdaptiveLocalDP,
    tfdp_fl.NbAFL,
    tfdp_fl.CorrelatedNoise,
)


def _accounting(function) -> tuple[Callable[..., Any], dict[str, Any]]:
    arguments = {
        "noise_multiplier": 1.0,
        "sampling": "poisson",
        "num_clients": 100,
        "clients_per_round": 10,
        "rounds": 5,
        "delta": 1e-3,
    }
    if function is accounting.calibrate_noise_multiplier:
        arguments.pop("noise_multiplier")
        arguments["target_epsilon"] = 2.0
    if function is accounting.max_rounds:
        arguments.pop("rounds")
        arguments["target_epsilon"] = 2.0
    return function, arguments


def _targets() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Returns what is called, with arguments that are right."""
    x, y = toy.arrays(20)
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "Poisson": (
            sampling.PoissonSampler,
            {"num_clients": 10, "clients_per_round": 3, "seed": 1},
        ),
        "FixedSize": (
            sampling.FixedSizeSampler,
            {"num_clients": 10, "clients_per_round": 3, "seed": 1},
        ),
        "Shuffled": (
            sampling.ShuffledSampler,
            {"num_clients": 10, "clients_per_round": 3, "seed": 1},
        ),
        "make_sampler": (
            sampling.make_sampler,
            {
                "sampling": "cyclic",
                "num_clients": 10,
                "clients_per_round": 3,
                "seed": 1,
                "num_groups": 2,
            },
        ),
        "AdditiveSecretSharing": (
            secure_aggregation.AdditiveSecretSharing,
            {
                "min_participants": 3,
                "mode": "ring",
                "max_share_value": 10.0,
                "bits": 64,
                "max_participants": 10,
                "deadline_seconds": 1.0,
            },
        ),
        "CanaryAudit": (
            auditing.CanaryAudit,
            {"num_canaries": 10, "iterates": "final"},
        ),
        "PrivateMetrics": (
            tfdp_fl.PrivateMetrics,
            {
                "bounds": {"loss": (0.0, 1.0)},
                "noise_multiplier": 1.0,
                "quantiles": (0.5,),
                "cells": 20,
                "clients_per_round": 3.0,
            },
        ),
        "OrientedGradients": (
            tfdp_fl.features.OrientedGradients,
            {"cell": 4, "directions": 8, "name": "gradients"},
        ),
        "Participation": (
            correlated_noise.Participation,
            {"rounds": 6, "min_separation": 2, "max_participations": 2},
        ),
        "ParticipationRecord": (
            lambda participation, clients: correlated_noise.ParticipationRecord(
                participation
            ).add(clients),
            {
                "participation": correlated_noise.Participation(
                    rounds=6, min_separation=2
                ),
                "clients": ["a", 3],
            },
        ),
        "PrivateStrategy": (
            tfdp_fl.flower.PrivateStrategy,
            {
                "strategy": fm.Strategy(3),
                "mechanism": tfdp_fl.FixedClipping(
                    clip_norm=1.0, noise_multiplier=1.0
                ),
                "num_clients": 10,
                "clients_per_round": 3,
            },
        ),
        "BLT": (tfdp_fl.BLT, {"num_buffers": 2}),
        "Tree": (tfdp_fl.Tree, {"restart_every": 4}),
        "BandedToeplitz": (tfdp_fl.BandedToeplitz, {"bands": 3}),
        "from_indices": (
            tfdp_fl.datasets.FederatedDataset.from_indices,
            {"x": x, "y": y, "indices": [[0, 1], [2]]},
        ),
        "from_client_arrays": (
            tfdp_fl.datasets.FederatedDataset.from_client_arrays,
            {"clients": {0: (x, y)}},
        ),
        "load_digits": (
            tfdp_fl.datasets.load_digits,
            {"num_clients": 10},
        ),
        "DPFederatedModel": (
            tfdp_fl.DPFederatedModel,
            {
                "model": toy.dense(),
                "mechanism": tfdp_fl.NoPrivacy(),
                "clients_per_round": 3,
                "sampling": "poisson",
                "delta": 1e-3,
                "accountant": "rdp",
                "on_client_failure": "abort",
                "non_trainable_state": "keep",
                "num_replicas": 1,
                "noise_generator": "philox",
            },
        ),
        "PrivacyBudget": (
            tfdp_fl.callbacks.PrivacyBudget,
            {"epsilon": 1.0, "delta": 1e-3},
        ),
    }
    for kind in _MECHANISMS:
        usual = {
            "clip_norm": 0.5,
            "noise_multiplier": 1.0,
            "epsilon": 5.0,
            "delta": 1e-3,
            "constant": 3.0,
            "weight_clip": 1.0,
            "rounds": 4,
            "min_separation": 2,
        }
        names = {field.name for field in dataclasses.fields(kind)}
        if kind is tfdp_fl.LocalDP:
            names -= {"noise_multiplier"}
        found[kind.__name__] = (
            kind,
            {
                **{name: usual[name] for name in usual if name in names},
                # The rest, by their defaults.
                **{
                    field.name: field.default
                    for field in dataclasses.fields(kind)
                    if field.name in names - usual.keys()
                    and field.default is not dataclasses.MISSING
                },
            },
        )
    kind, usual = found["CorrelatedNoise"]
    adapts = {
        "target_quantile": 0.5,
        "clip_learning_rate": 0.2,
        "count_noise_stddev": 2.0,
    }
    found["CorrelatedNoise with target_quantile"] = kind, {**usual, **adapts}
    for function in (
        accounting.epsilon,
        accounting.delta,
        accounting.calibrate_noise_multiplier,
        accounting.max_rounds,
    ):
        name = "noise_multiplier" if function is accounting.delta else ""
        found[function.__name__] = _accounting(function)
        if name:
            arguments = found[function.__name__][1]
            arguments.pop("delta")
            arguments["epsilon"] = 1.0
    return found


class _TooLongError(BaseException):
    """A call that does not come back."""


def _alarm(*_):
    raise _TooLongError


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(*_targets())
    def test_strange_ones(self, name):
        started, tries = time.time(), 0
        function, usual = _targets()[name]
        function(**usual)  # These are right.
        signal.signal(signal.SIGALRM, _alarm)

        @hypothesis.settings(
            max_examples=300,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(data=st.data())
        def check(data):
            nonlocal tries
            chosen = data.draw(
                st.lists(
                    st.sampled_from(sorted(usual)),
                    min_size=1,
                    max_size=2,
                    unique=True,
                )
            )
            strange = {each: data.draw(_STRANGE) for each in chosen}
            tries += 1
            signal.alarm(10)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    function(**{**usual, **strange})
            except (ValueError, TypeError, MemoryError) as error:
                self.assertTrue(str(error), strange)
            except _TooLongError:
                # A number of rounds or clients that takes as long as it says.
                slow.append(strange)
            finally:
                signal.alarm(0)

        slow: list[dict[str, Any]] = []
        check()
        print(f"{name}: {tries} calls, {len(slow)} broken off: {slow[:5]}")
        self.assertLess(len(slow), 10)
        counts.held(
            "Arguments of any kind: ValueError, TypeError, or an answer "
            f"({name}{f', {len(slow)} too long' if slow else ''})",
            tries,
            "calls",
            time.time() - started,
        )

    def test_settings(self):
        started, rng, tries = time.time(), random.Random(6), 0
        values = (
            *(None, True, -1, 0, 1, 3, 1e30, float("nan"), float("inf"), -0.5),
            *("", "x", "1,2", "3x5", "all", "poisson", "1e999", [], {}, b"x"),
        )
        names = [field.name for field in dataclasses.fields(Settings)]
        for _ in range(3000):
            chosen = {
                name: rng.choice(values)
                for name in rng.sample(names, rng.randint(1, 3))
            }
            tries += 1
            try:
                Settings(**chosen).resolved()
            except (ValueError, TypeError, ImportError, OSError) as error:
                self.assertTrue(str(error), chosen)
        counts.held(
            "Settings of any kind: ValueError or TypeError, or settings",
            tries,
            "calls",
            time.time() - started,
        )


if __name__ == "__main__":
    absltest.main()
