"""A round that is run again after a broken release has other noise."""

from __future__ import annotations

import ast
import os
from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.keras import files, toy
from tfdp_fl import engine
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import randomness, round_loop


class AttemptsTest(absltest.TestCase):
    def test_every_attempt_has_a_seed_of_its_own(self):
        attempts = randomness.Attempts()
        taken = [attempts.take() for _ in range(3)]
        for _ in range(2):
            attempts.renew()
            taken.append(attempts.take())
        words = 2**32
        seeds = [
            tuple(randomness.round_seed(seed, attempt))
            for seed in (1, 1 + words, 1 + 2 * words, 2)
            for attempt in taken
        ]
        self.assertLen(set(seeds), len(seeds))
        np.testing.assert_array_equal(seeds[0], randomness.round_seed(1, (0,)))

    def test_a_fork_takes_no_attempt_of_its_parent(self):
        attempts = randomness.Attempts()
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
        self.assertEqual(here, [(1,), (2,)])
        self.assertEmpty({*here} & {*there})
        self.assertLen({*there}, 2)

    def test_runs_that_share_a_ledger_share_no_noise(self):
        # What they cost together is what two noises cost.
        seeds, path = [], files.directory(self) / "ledger.jsonl"
        collect = engine.CohortEngine.collect

        def seen(self, dataset, inputs):
            seeds.append(tuple(inputs.seed))
            return collect(self, dataset, inputs)

        with mock.patch.object(engine.CohortEngine, "collect", seen):
            for _ in range(2):
                ledger = tfdp_fl.callbacks.Ledger(path, append=True)
                toy.fit(toy.federated(clients_per_round=5), 2, [ledger], seed=1)
        self.assertLen(set(seeds), 4)


class BrokenOffTest(parameterized.TestCase):
    @parameterized.parameters("in", "after")
    def test_a_round_broken_off_in_or_after_its_release_is_counted(self, when):
        fed = tfdp_fl.DPFederatedModel(
            cohorts.mlp(),
            tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0),
            clients_per_round=2,
        )
        fed.compile("sgd", cohorts.cross_entropy())
        clients = FederatedDataset.from_client_arrays(cohorts.client_arrays((3, 3, 3)))
        release = round_loop.RoundLoop._release
        seeds = []

        def broken_off(loop, pending):
            seeds.append(tuple(pending.inputs.seed))
            if when == "in":
                with mock.patch.object(
                    loop.engine, "release", side_effect=KeyboardInterrupt
                ):
                    release(loop, pending)
            release(loop, pending)
            raise KeyboardInterrupt

        for done in (1, 2):
            with (
                mock.patch.object(round_loop.RoundLoop, "_release", broken_off),
                self.assertRaises(KeyboardInterrupt),
            ):
                toy.fit(fed, data=clients, seed=1)
            # Broken off within, it is charged, as it may have been seen.
            self.assertEqual(fed.spending.rounds, done)
            self.assertEqual(fed.rounds, done if when == "after" else 0)
        self.assertLen(set(seeds), 2)
