"""A mechanism from outside of the package is used like those inside."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import tensorflow as tf
from absl.testing import absltest
from scipy import stats

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import rounds, statistics
from tests.outside.loading import FILE as _FILE
from tests.outside.loading import smooth_clipping
from tfdp_fl import accounting, mechanisms

_ROOT = pathlib.Path(__file__).parents[2]


def _model():
    model = cohorts.mlp()
    model.compile("sgd", cohorts.cross_entropy(), ["accuracy"])
    return model


class OwnMechanismTest(absltest.TestCase):
    def test_query_is_its_mathematics(self):
        mechanism = smooth_clipping()(noise_multiplier=0.0)
        query = mechanism.bind(mechanisms.Deployment(clients_per_round=3))
        norms = [0.1, 0.5, 1e6]
        updates = rounds.updates_with_norms(norms)
        done = rounds.run_round(query, query.initial_global_state(), updates)
        expected = sum(
            rounds.flat(u) * 0.5 / np.sqrt(0.25 + n**2)
            for u, n in zip(updates, norms, strict=True)
        )
        np.testing.assert_allclose(rounds.flat(done.mean), expected / 3, atol=1e-6)
        self.assertAlmostEqual(float(done.total.sums["length"]), 2.2, places=5)
        fraction = 2.2 / 3
        self.assertAlmostEqual(
            float(done.next_state.clip_norm),
            0.5 * 1.2 ** (fraction - 0.5),
            places=5,
        )

    def test_both_releases_are_noised(self):
        mechanism = smooth_clipping()(noise_multiplier=1.0)
        query = mechanism.bind(mechanisms.Deployment(clients_per_round=10))
        state = query.initial_global_state()
        zeros = rounds.zero_updates(1, [[200, 100]])[0]
        done = rounds.run_round(
            query,
            state,
            [],
            noise_multiplier=1.0,
            clients_per_round=10,
            template=zeros,
        )
        statistics.assert_gaussian(rounds.flat(done.mean), 2**0.5 * 0.5 / 10)
        one = [np.zeros([1], np.float32)]

        @tf.function
        def next_clip(_):
            begun = query.begin_round(state, 1.0, 10.0)
            total = query.initial_sample_state([tf.constant(one[0])])
            return query.get_noised_result(total, begun)[1].clip_norm

        clips = tf.map_fn(next_clip, tf.zeros([4_000])).numpy()
        lengths = 10 * (np.log(clips / 0.5) / np.log(1.2) + 0.5)
        low, high = stats.chi2.ppf([5e-9, 1 - 5e-9], len(lengths))
        self.assertBetween(np.sum(lengths**2) / 2, low, high)

    def test_trains_by_name_and_says_what_it_is(self):
        smooth_clipping()
        clients = tfdp_fl.datasets.FederatedDataset.from_client_arrays(
            cohorts.client_arrays((5,) * 20)
        )
        fed = tfdp_fl.make_private(
            _model(),
            target_epsilon=4.0,
            target_delta=1e-3,
            num_clients=20,
            clients_per_round=5,
            rounds=3,
            mechanism="smooth",
            start_norm=0.3,
        )
        self.assertIsInstance(fed.mechanism, smooth_clipping())
        fed.compile("sgd", cohorts.cross_entropy())
        history = fed.fit(clients, rounds=3, batch_size=5, verbose=0).history
        self.assertAlmostEqual(history["clip_norm"][0], 0.3, places=6)
        self.assertNotEqual(history["clip_norm"][2], history["clip_norm"][1])
        epsilon = accounting.epsilon(
            fed.mechanism.noise_multiplier, "poisson", 20, 5, 3, 1e-3, "pld"
        )
        self.assertAlmostEqual(fed.epsilon(1e-3), epsilon, places=6)
        self.assertLessEqual(epsilon, 4.0)
        statement = fed.privacy_statement()
        self.assertIn("squashed smoothly", statement)
        self.assertIn("the small ones too", statement)

    def test_side_by_side_and_one_by_one_are_the_same(self):
        clients = tfdp_fl.datasets.FederatedDataset.from_client_arrays(
            cohorts.client_arrays((5,) * 4)
        )
        weights = []
        for jit_compile in (None, False):
            fed = tfdp_fl.DPFederatedModel(
                _model(),
                smooth_clipping()(noise_multiplier=0.0),
                clients_per_round=4,
                sampling="fixed_size",
            )
            fed.compile("sgd", cohorts.cross_entropy(), jit_compile=jit_compile)
            fed.fit(clients, rounds=2, batch_size=5, verbose=0)
            weights.append(rounds.flat(fed.get_weights()))
        np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-6)

    def test_secure_aggregation_adds_up_its_own_sum(self):
        clients = tfdp_fl.datasets.FederatedDataset.from_client_arrays(
            cohorts.client_arrays((5,) * 4)
        )
        clips = []
        for protocol in (
            None,
            tfdp_fl.secure_aggregation.AdditiveSecretSharing(bits=64),
        ):
            fed = tfdp_fl.DPFederatedModel(
                _model(),
                smooth_clipping()(noise_multiplier=0.0),
                clients_per_round=4,
                sampling="fixed_size",
                secure_aggregation=protocol,
            )
            fed.compile("sgd", cohorts.cross_entropy())
            history = fed.fit(clients, rounds=2, batch_size=5, verbose=0)
            clips.append(history.history["clip_norm"][1])
        self.assertAlmostEqual(clips[0], clips[1], places=5)

    def test_train_py_has_its_flags(self):
        with tempfile.TemporaryDirectory() as folder:
            output = pathlib.Path(folder) / "run"
            subprocess.run(
                [
                    sys.executable,
                    str(_ROOT / "scripts" / "train.py"),
                    f"--mechanism_module={_FILE}",
                    "--mechanism=smooth",
                    "--start_norm=0.25",
                    "--num_clients=20",
                    "--clients_per_round=20",
                    "--model=linear",
                    "--rounds=2",
                    "--verbose=0",
                    f"--output_dir={output}",
                ],
                check=True,
                capture_output=True,
                cwd=_ROOT,
                timeout=300,
            )
            result = json.loads((output / "result.json").read_text("utf-8"))
        self.assertEqual(result["mechanism"], "SmoothClipping")
        self.assertEqual(result["mechanism_parameters"]["start_norm"], 0.25)
        self.assertLessEqual(result["epsilon"], 8.0)
