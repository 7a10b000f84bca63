"""Exact noise on a grid: its law is that of `noise_test`.

Every mechanism and runtime is in `tests/stress/noise_stress.py`.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile

import tensorflow as tf
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import hostile, noise_test, toy
from tfdp_fl import accounting
from tfdp_fl.keras import callbacks
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

_STDDEV = noise_test.Z * noise_test.CLIP / noise_test.CLIENTS
_DELTA = 1e-3


def _train(mechanism=None, rounds=2, options=None, **fit):
    options = {"noise_generator": "exact", **(options or {})}
    mechanism = mechanism or noise_test.fixed()
    moves, _ = noise_test.train(mechanism, rounds, options=options, **fit)
    return moves


class ExactNoiseTest(parameterized.TestCase):
    @parameterized.parameters(
        {"jit_compile": True, "num_replicas": 2}, {"runtime": True}
    )
    def test_of_every_variable_and_round(self, runtime=False, **options):
        fit = {"runtime": hostile.HereWorkers()} if runtime else {}
        moves = _train(options={"noise_generator": "exact", **options}, **fit)
        noise_test.assert_is_noise(moves, [_STDDEV] * 2)

    @parameterized.parameters(
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0, noise_site="client"),
        tfdp_fl.AdaptiveClipping(noise_multiplier=1.0),
        tfdp_fl.MedianClipping(noise_multiplier=1.0),
        tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0),
        tfdp_fl.NbAFL(epsilon=1.0, constant=1.0, weight_clip=1.0),
        tfdp_fl.CorrelatedNoise(
            clip_norm=1.0, noise_multiplier=1.0, rounds=4, min_separation=2
        ),
        tfdp_fl.NoPrivacy(),
    )
    def test_other_mechanisms_are_refused(self, mechanism):
        with self.assertRaisesRegex(ValueError, "'exact' needs FixedClipping"):
            toy.federated(mechanism, sampling="cyclic", noise_generator="exact")

    @parameterized.parameters(1e6, 1e-7, ((1.0, 2.0**19),), lambda t: 1e6**t)
    def test_noise_that_the_grid_has_no_room_for(self, noise_multiplier):
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=noise_multiplier
        )
        fed = toy.federated(mechanism, noise_generator="exact")
        with self.assertRaisesRegex(ValueError, "noise_multiplier must be 0"):
            fed.fit(toy.clients(), rounds=2, verbose=0)
        self.assertIsNone(fed.run)  # Nothing began.

    def test_what_else_is_refused(self):
        fed = toy.federated(noise_generator="exact")
        with self.assertRaisesRegex(ValueError, "seed must be None"):
            fed.fit(toy.clients(), seed=3, verbose=0)
        with self.assertRaisesRegex(ValueError, "audit must be None"):
            audit = tfdp_fl.auditing.CanaryAudit(num_canaries=20)
            fed.fit(toy.clients(), audit=audit, verbose=0)
        with self.assertRaisesRegex(ValueError, "secure_aggregation must be"):
            toy.federated(
                noise_generator="exact",
                secure_aggregation=AdditiveSecretSharing(),
            )


class WhereItIsSaidTest(parameterized.TestCase):
    def _trained(self, **options):
        fed = toy.federated(**options)
        path = pathlib.Path(tempfile.mkdtemp()) / "ledger.jsonl"
        self.addCleanup(shutil.rmtree, path.parent)
        fed.fit(toy.clients(), verbose=0, callbacks=[callbacks.Ledger(path)])
        (entry,) = accounting.PrivacyLedger.read(path).entries
        return fed, entry.details

    def test_in_the_ledger(self):
        fed, details = self._trained(noise_generator="exact")
        self.assertEqual(details["noise_generator"], "exact")
        caveats = fed.privacy_statement(_DELTA, "dict")["caveats"]
        self.assertIn("rounded to that grid", caveats["exact_noise"])
        self.assertNotIn("floating_point_noise", caveats)
        self.assertNotIn("pseudorandom_noise", caveats)
        fed, details = self._trained()
        caveats = fed.privacy_statement(_DELTA, "dict")["caveats"]
        self.assertNotIn("exact_noise", caveats)
        self.assertIn("pseudorandom_noise", caveats)
        self.assertNotIn("noise_generator", details)

    def test_that_it_was_not(self):
        fed, details = self._trained()
        caveats = fed.privacy_statement(_DELTA, "dict")["caveats"]
        self.assertNotIn("exact_noise", caveats)
        self.assertIn("pseudorandom_noise", caveats)
        self.assertNotIn("noise_generator", details)

    def test_both_where_a_run_goes_on_with_the_other(self):
        directory = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, directory)
        stop = tf.keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: fed.model.__setattr__("stop_training", True)
        )
        for generator, resume in (
            ("philox", None),
            ("exact", directory),
        ):
            fed = toy.federated(noise_generator=generator)
            fed.fit(
                toy.clients(),
                2,
                verbose=0,
                callbacks=[callbacks.RoundCheckpoint(directory), stop],
                resume_from=resume,
            )
        self.assertEqual(fed.rounds, 2)
        caveats = fed.privacy_statement(_DELTA, "dict")["caveats"]
        self.assertContainsSubset(["exact_noise", "pseudorandom_noise"], caveats)


class RefusedTest(parameterized.TestCase):
    def test_a_query_that_draws_by_itself(self):
        with self.assertRaisesRegex(ValueError, "noise_generator.*QueryMech"):
            toy.federated(_query(), noise_generator="exact")


def _query():
    import dp_accounting

    from tfdp_fl.mechanisms import tf_privacy as tfp

    return tfdp_fl.QueryMechanism(
        query=tfp.GaussianSumQuery(1.0, 1.0),
        dp_event=dp_accounting.GaussianDpEvent(1.0),
    )


if __name__ == "__main__":
    absltest.main()
