"""The noise of every mechanism in every runtime, to 2 % and better.

The conformance suite with 200 000 elements in place of 20 000:
`statistics.assert_gaussian` lets a stddev through that is within 1 %, and sees a factor
1.02 (planted below). Besides: sums that are shared secretly, noise on a grid, and
DISCO's as published.
"""

import itertools
import math
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp_fl
from tests.conformance import conformance_test, mechanisms, runtimes
from tests.keras import hostile, noise_test
from tests.mechanisms import statistics
from tfdp_fl import sampling, secure_aggregation
from tfdp_fl.mechanisms import noise

# No wider: side by side, a norm is bounded for so many columns at most.
_WIDTH, _S, _M = 160_000, noise_test.CLIP, 4
_SUMS = secure_aggregation.AdditiveSecretSharing(max_share_value=1000.0)
_SECURE = runtimes._keras("one by one", secure_aggregation=_SUMS)
_FIXED = mechanisms.CASES["FixedClipping"]
_EXACT = {"noise_generator": "exact"}


def _check(case, run):
    check = conformance_test.test_noise_has_its_scale_is_new_each_round_and_is_charged
    with mock.patch.object(conformance_test, "_WIDE", _WIDTH):
        check(case, run)


@pytest.mark.parametrize(("case", "run"), conformance_test._CELLS)
def test_is_that_of_the_formula(case, run):
    _check(case, run)


@pytest.mark.parametrize("name", mechanisms.CASES)
def test_in_a_secure_sum(name):
    if "threads" in mechanisms.CASES[name].not_in:
        pytest.skip("only the query runs it")
    _check(mechanisms.CASES[name], _SECURE)


@pytest.mark.parametrize("executor", ["one by one", "XLA", "shards"])
def test_on_a_grid(executor):
    runtime = hostile.HereWorkers if executor == "shards" else None
    _check(_FIXED, runtimes._keras(executor, runtime, **_EXACT))


@pytest.mark.parametrize("runtime", ["query", "threads", "TFF"])
def test_a_factor_of_two_percent_is_noticed(runtime):
    if runtimes.missing(runtime):
        pytest.skip(runtimes.missing(runtime))
    add = noise.add_normal

    def more(tensors, stddev):
        return add(tensors, stddev * 1.02)

    with (
        mock.patch.object(noise, "add_normal", more),
        pytest.raises(AssertionError, match="stddev"),
    ):
        _check(_FIXED, runtimes.RUNTIMES[runtime])


@pytest.mark.parametrize("xla", [False, True])
def test_of_adaptive_local_noise(xla):
    """sigma_l = 2 r sqrt(2 ln(1.25 / delta_r)) / epsilon_r, of one round."""
    published = {"calibration": "classic", "composition": "basic", "layers": "separate"}
    mechanism = tfdp_fl.AdaptiveLocalDP(
        epsilon=1.0, delta=1e-3, clipping_radius=_S, **published
    )
    options = {"jit_compile": xla, "max_parallel_clients": 1 + xla}
    made = noise_test.model(_WIDTH)
    rounds, _ = noise_test.train(mechanism, 1, made, options=options)
    stddev = 2 * _S * math.sqrt(2 * math.log(1.25 / 1e-3)) / _M**0.5
    noise_test.assert_is_noise(rounds, [stddev])


def test_far_draws_are_as_frequent_as_a_gaussians():
    # TensorFlow's own end at 5.678, where 57 are expected beyond.
    bounds = [5.0, 5.4, 5.678]

    @tf.function(autograph=False)
    def beyond(seed):
        draws = tf.abs(noise._box_muller(2**22, seed))
        return [tf.math.count_nonzero(draws > each) for each in bounds]

    seeds = np.random.default_rng().integers(2**62, size=(1000, 2))
    seen = np.sum([beyond(tf.constant(each)) for each in seeds], axis=0)
    expected = 2 * stats.norm.sf(bounds) * len(seeds) * 2**22
    # Each wrongly refused once in 1e9.
    for k, m in zip(seen, expected, strict=True):
        chance = min(stats.poisson.cdf(k, m), stats.poisson.sf(k - 1, m))
        assert chance > 5e-10, (seen, expected)


def draw_with_seeds_set(path):
    for seed in (tf.keras.utils.set_random_seed, tf.random.set_seed):
        seed(5)
    rounds, _ = noise_test.train(noise_test.fixed())
    cohort = sampling.make_sampler("poisson", 500, 50.0).cohort(0)
    np.savez(path, noise=np.concatenate(rounds[0]), cohort=cohort)


def test_processes_that_start_again(tmp_path):
    source = "from tests.stress import noise_stress as s; s.draw_with_seeds_set({!r})"
    same = {**os.environ, "PYTHONHASHSEED": "0", "TF_DETERMINISTIC_OPS": "1"}
    drawn = []
    for number in range(3):
        path = str(tmp_path / f"{number}.npz")
        command = [sys.executable, "-c", source.format(path)]
        subprocess.run(command, check=True, env=same)
        drawn.append(np.load(path))
    for one, other in itertools.combinations(drawn, 2):
        statistics.assert_uncorrelated(one["noise"], other["noise"])
        assert one["cohort"].tolist() != other["cohort"].tolist()
