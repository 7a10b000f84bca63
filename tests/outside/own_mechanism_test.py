"""A mechanism from outside of the package is used like those inside."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp_fl
from tests.engine import cohorts
from tests.mechanisms import rounds, statistics
from tests.outside.loading import FILE, smooth_clipping
from tests.scripts.programs import ROOT
from tfdp_fl import accounting, mechanisms


def _fed(**options):
    model = cohorts.mlp()
    model.compile("sgd", cohorts.cross_entropy(), ["accuracy"])
    mechanism = smooth_clipping()(noise_multiplier=0.0)
    return tfdp_fl.DPFederatedModel(model, mechanism, 4, "fixed_size", **options)


def _clients(count):
    arrays = cohorts.client_arrays((5,) * count)
    return tfdp_fl.datasets.FederatedDataset.from_client_arrays(arrays)


def test_query_is_its_mathematics():
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
    assert float(done.total.sums["length"]) == pytest.approx(2.2, abs=1e-5)
    expected = 0.5 * 1.2 ** (2.2 / 3 - 0.5)
    assert float(done.next_state.clip_norm) == pytest.approx(expected, abs=1e-5)


def test_both_releases_are_noised():
    mechanism = smooth_clipping()(noise_multiplier=1.0)
    query = mechanism.bind(mechanisms.Deployment(clients_per_round=10))
    state = query.initial_global_state()
    done = rounds.run_round(
        query,
        state,
        [],
        noise_multiplier=1.0,
        clients_per_round=10,
        template=rounds.zero_updates(1, [[200, 100]])[0],
    )
    statistics.assert_gaussian(rounds.flat(done.mean), 2**0.5 * 0.5 / 10)

    @tf.function
    def next_clip(_):
        begun = query.begin_round(state, 1.0, 10.0)
        total = query.initial_sample_state([tf.zeros([1])])
        return query.get_noised_result(total, begun)[1].clip_norm

    clips = tf.map_fn(next_clip, tf.zeros([4_000])).numpy()
    lengths = 10 * (np.log(clips / 0.5) / np.log(1.2) + 0.5)
    low, high = stats.chi2.ppf([5e-9, 1 - 5e-9], len(lengths))
    assert low < np.sum(lengths**2) / 2 < high


def test_trains_by_name_and_says_what_it_is():
    smooth_clipping()
    fed = tfdp_fl.make_private(
        _fed().model,
        target_epsilon=4.0,
        target_delta=1e-3,
        num_clients=20,
        clients_per_round=5,
        rounds=3,
        mechanism="smooth",
        start_norm=0.3,
    )
    assert isinstance(fed.mechanism, smooth_clipping())
    fed.compile("sgd", cohorts.cross_entropy())
    history = fed.fit(_clients(20), rounds=3, batch_size=5, verbose=0).history
    first, second, third = history["clip_norm"]
    assert first == pytest.approx(0.3, abs=1e-6)
    assert third != second
    z = fed.mechanism.noise_multiplier
    epsilon = accounting.epsilon(z, "poisson", 20, 5, 3, 1e-3, "pld")
    assert fed.epsilon(1e-3) == pytest.approx(epsilon, abs=1e-6)
    assert epsilon <= 4.0
    statement = fed.privacy_statement()
    assert "squashed smoothly" in statement
    assert "the small ones too" in statement


def test_ways_to_train_are_the_same():
    def trained(jit_compile=None, protocol=None):
        fed = _fed(secure_aggregation=protocol)
        fed.compile("sgd", cohorts.cross_entropy(), jit_compile=jit_compile)
        history = fed.fit(_clients(4), rounds=2, batch_size=5, verbose=0).history
        return rounds.flat(fed.get_weights()), history["clip_norm"][1]

    side_by_side, clip = trained()
    one_by_one, _ = trained(jit_compile=False)
    np.testing.assert_allclose(side_by_side, one_by_one, rtol=1e-4, atol=1e-6)
    # A secure sum adds up its own sum.
    sums = tfdp_fl.secure_aggregation.AdditiveSecretSharing(bits=64)
    assert trained(protocol=sums)[1] == pytest.approx(clip, abs=1e-5)


def test_train_py_has_its_flags(tmp_path):
    flags = ["--num_clients=20", "--clients_per_round=20", "--model=linear"]
    subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "train.py")),
            *(f"--mechanism_module={FILE}", "--mechanism=smooth", "--start_norm=0.25"),
            *(*flags, "--rounds=2", "--verbose=0", f"--output_dir={tmp_path / 'run'}"),
        ],
        check=True,
        capture_output=True,
        cwd=ROOT,
        timeout=300,
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text("utf-8"))
    assert result["mechanism"] == "SmoothClipping"
    assert result["mechanism_parameters"]["start_norm"] == 0.25
    assert result["epsilon"] <= 8.0
