"""Tests of a run: what is taken of it is what is put back."""

import dataclasses
import json

import numpy as np
import tensorflow as tf
from absl.testing import absltest

import tfdp_fl
from tests.keras import toy
from tfdp_fl.keras import run as run_lib


def _trained(mechanism, **options):
    fed = toy.federated(mechanism, **options)
    fed.fit(toy.clients(), rounds=2, seed=1, verbose=0)
    return fed


def _restored(run, prepared):
    metadata, arrays = run.state()
    metadata = json.loads(json.dumps(metadata))  # As in a checkpoint.
    return run_lib.Run.from_state(metadata, arrays, prepared)


class RunTest(absltest.TestCase):
    def test_state_is_put_back(self):
        fed = _trained(tfdp_fl.AdaptiveClipping(noise_multiplier=0.1))
        # Another run of the same arguments, at another point of its training.
        other = _trained(tfdp_fl.AdaptiveClipping(noise_multiplier=0.1))
        other.fit(toy.clients(), seed=1, verbose=0)
        restored = _restored(fed.run, other.run)
        self.assertNotEqual(other.run.state()[0], fed.run.state()[0])
        wanted, arrays = fed.run.state()
        # What the other knew of ledgers stays known; neither has any here.
        found, found_arrays = restored.state()
        self.assertEqual(found, wanted)
        self.assertEqual(found_arrays.keys(), arrays.keys())
        for name, array in arrays.items():
            np.testing.assert_array_equal(found_arrays[name], array, name)
        self.assertEqual(restored.rounds, 2)
        self.assertEqual(
            restored.spending.epsilon(1e-2), fed.run.spending.epsilon(1e-2)
        )

    def test_every_fact_is_in_the_state(self):
        fed = _trained(tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1))
        fed.run.facts = run_lib.Facts(
            seed_given=True,
            validated=True,
            metrics_shown=True,
            rounds_abandoned=3,
            clients_excluded=4,
            rounds_charged_twice=5,
        )
        restored = _restored(fed.run, dataclasses.replace(fed.run))
        self.assertEqual(restored.facts, fed.run.facts)

    def test_state_of_another_mechanism_is_refused(self):
        fed = _trained(tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1))
        other = dataclasses.replace(fed.run, mechanism_state=[tf.zeros([])] * 17)
        with self.assertRaisesRegex(ValueError, "mechanism"):
            _restored(fed.run, other)


class FailedFitTest(absltest.TestCase):
    def test_a_fit_that_is_refused_changes_nothing(self):
        fed = _trained(tfdp_fl.FixedClipping(clip_norm=1, noise_multiplier=1))
        before = fed.run
        kept = dataclasses.replace(before)
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            fed.fit(toy.clients(num_clients=1), verbose=0)
        self.assertIs(fed.run, before)
        self.assertEqual(fed.run.spending.clients, kept.spending.clients)
        for field in dataclasses.fields(before):
            self.assertIs(getattr(before, field.name), getattr(kept, field.name))


if __name__ == "__main__":
    absltest.main()
