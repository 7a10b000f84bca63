"""The noise in a trained model is what was paid for, variable by variable.

All clients are empty, so that a model moves by the noise alone: every move of a
variable is compared with the formula. More of it, every mechanism and runtime,
is in `tests/stress/noise_stress.py`.
"""

import math
import random

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdp_fl
from tests.keras import hostile, toy
from tests.mechanisms import statistics
from tfdp_fl import accounting
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import callbacks
from tfdp_fl.secure_aggregation import AdditiveSecretSharing

# So little noise that no moving variance gets from 1 to 0, where it is cut off.
CLIENTS, CLIP, Z = 4, 0.05, 1.3
_NOTHING = np.zeros([0, 1], np.float32), np.zeros([0], np.int32)


def empty_clients(count: int = CLIENTS) -> FederatedDataset:
    """Returns clients without examples."""
    return FederatedDataset.from_client_arrays(dict.fromkeys(range(count), _NOTHING))


def model(width: int = 20_000, dtype: str | None = None) -> tf.keras.Model:
    """Returns six variables of `width` elements, two of them not trainable."""
    toy.seed(1)
    layers, of = tf.keras.layers, {"dtype": dtype}
    made = [layers.Input((1,)), layers.Dense(width, **of)]
    made += [layers.BatchNormalization(**of), layers.Reshape((width // 100, 100), **of)]
    return tf.keras.Sequential([*made, layers.GlobalAveragePooling1D(**of)])


def small() -> tf.keras.Model:
    """Returns a model whose noise nobody measures."""
    return model(100)


class Moves(tf.keras.callbacks.Callback):
    """Keeps how far each variable moved in each round: float64 arrays, in `rounds`."""

    def on_train_begin(self, logs=None):
        self._before, self.rounds = self.model.get_weights(), []

    def on_epoch_end(self, epoch, logs=None):
        after = self.model.get_weights()
        pairs = zip(self._before, after, strict=True)
        self.rounds.append([np.subtract(b, a, dtype=float).ravel() for a, b in pairs])
        self._before = after


def federated(mechanism, m, made=None, sampling="fixed_size", jit=False, **options):
    """Returns a compiled model that moves by nothing but noise."""
    compiled = {"optimizer": "sgd", "jit_compile": jit}
    return toy.federated(mechanism, made or model, m, sampling, compiled, **options)


def train(mechanism, rounds=1, made=None, sampling="fixed_size", options=None, **fit):
    """Trains on empty clients; returns the moves and the history."""
    options = {**(options or {})}
    jit = options.pop("jit_compile", False)
    fed, moves = federated(mechanism, CLIENTS, made, sampling, jit, **options), Moves()
    history = toy.fit(fed, rounds, [moves], data=empty_clients(), **fit)
    return moves.rounds, history.history


def fixed(site="server"):
    """Returns a mechanism whose noise on the mean is Z CLIP / CLIENTS."""
    return tfdp_fl.FixedClipping(clip_norm=CLIP, noise_multiplier=Z, noise_site=site)


def assert_is_noise(rounds, stddevs) -> None:
    """Asserts a stddev for each round, the shape, and that all are different.

    `statistics` says how often wrongly. From 2e4 values on a factor 1.1 is
    noticed, from 2e5 on 1.02. The shape is that of a Gaussian by Kolmogorov and
    Smirnov, wrongly refused once in 1e9.
    """
    flat = []
    for variables, stddev in zip(rounds, stddevs, strict=True):
        for values in variables:
            statistics.assert_gaussian(values, stddev)
            assert stats.kstest(values / stddev, "norm").pvalue > 1e-9
            flat.append(values)
    for place, one in enumerate(flat):
        for other in flat[:place]:
            statistics.assert_uncorrelated(one, other)


_EXACT = {"noise_generator": "exact"}


@pytest.mark.parametrize(
    "site, options, sharded",
    [
        ("server", {}, False),
        ("client", {}, False),
        ("server", {"jit_compile": True, "max_parallel_clients": 2, **_EXACT}, False),
        ("server", _EXACT, True),
    ],
)
def test_noise_of_every_variable_and_round(site, options, sharded):
    runtime = hostile.HereWorkers() if sharded else None
    moves, _ = train(fixed(site), 2, options=options, runtime=runtime)
    assert_is_noise(moves, [Z * CLIP / CLIENTS] * 2)
    assert len(moves[0]) == 6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_noise_of_a_short_dtype_is_float32_before_it_is_rounded(dtype):
    # Bit for bit what a float32 model moves to, rounded once.
    short, long = model(dtype=dtype), model()
    long.set_weights([w.astype(np.float32) for w in short.get_weights()])
    for made in (short, long):
        train(fixed(), made=made, seed=4)
    rounded = zip(long.get_weights(), short.get_weights(), strict=True)
    toy.assert_same([one.astype(own.dtype) for one, own in rounded], short)


class _ByTensorFlow(tfdp_fl.FixedClipping):
    """Its noise was the same in every process with the same seed."""

    def add_noise(self, update, stddev, noise_state):
        draws = [tf.random.normal(tensor.shape) for tensor in update]
        noised = zip(update, draws, strict=True)
        return [tf.cast(u, tf.float32) + stddev * g for u, g in noised], noise_state

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)


@pytest.mark.parametrize("kind", [tfdp_fl.FixedClipping, _ByTensorFlow])
def test_noise_without_a_seed_depends_on_nothing_that_a_user_can_set(kind):
    seen, cohorts = [], set()
    for _ in range(2):
        tf.keras.utils.set_random_seed(7)
        for seed in (tf.random.set_seed, np.random.seed, random.seed):
            seed(7)
        mechanism = kind(clip_norm=CLIP, noise_multiplier=Z)
        fed, moves = federated(mechanism, 10, sampling="poisson"), Moves()
        toy.fit(fed, data=empty_clients(200), callbacks=[moves])
        seen.append(moves.rounds[0])
        cohorts.add(tuple(fed.run.sampler.draw().positions))
    assert_is_noise(seen, [Z * CLIP / 10] * 2)
    assert len(cohorts) == 2  # Two alike: less than once in 1e15.


class _ByNumPy(tfdp_fl.Mechanism):
    """Has no parameter for its noise, which NumPy draws once."""

    def first_clip_norm(self):
        return CLIP

    def scale(self, norm, round):
        return tf.math.divide_no_nan(CLIP, tf.maximum(norm, CLIP))

    def noise_stddevs(self, round, context):
        return {"update": Z * CLIP}

    def add_noise(self, update, stddev, noise_state):
        draws = [np.random.normal(size=tensor.shape) for tensor in update]
        return [u + g for u, g in zip(update, draws, strict=True)], noise_state

    def round_event(self, round_index, context):
        return dp_accounting.GaussianDpEvent(Z)

    def describe(self):
        return "Noise by NumPy."


def test_noise_that_would_repeat_is_refused_before_its_charge():
    fed = federated(_ByNumPy(), CLIENTS)
    with pytest.raises(ValueError, match="add_noise must draw its noise by"):
        toy.fit(fed, data=empty_clients())
    assert fed.account.rounds == 0


def test_what_does_not_go_with_exact_noise():
    audit = tfdp_fl.auditing.CanaryAudit(num_canaries=20)
    for options in ({"seed": 3}, {"audit": audit}):
        with pytest.raises(ValueError, match="must be None"):
            toy.fit(toy.federated(**_EXACT), **options)
    with pytest.raises(ValueError, match="secure_aggregation must be"):
        toy.federated(secure_aggregation=AdditiveSecretSharing(), **_EXACT)
    adaptive = tfdp_fl.AdaptiveClipping(noise_multiplier=1.0)
    for mechanism in (fixed("client"), adaptive, tfdp_fl.NoPrivacy()):
        with pytest.raises(ValueError, match="'exact' needs FixedClipping"):
            toy.federated(mechanism, **_EXACT)
    # The grid has no room for it, in one of the rounds.
    for noise in (1e6, 1e-7, (1.0, 2.0**19), lambda t: 1e6**t):
        mechanism = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=noise)
        fed = toy.federated(mechanism, **_EXACT)
        with pytest.raises(ValueError, match="noise_multiplier must be 0"):
            toy.fit(fed, 2)
        assert fed.run is None  # Nothing began.


def test_ledger_and_statement_say_which_noise_it_was(tmp_path):
    kinds = {"philox": "pseudorandom_noise", "exact": "exact_noise"}
    for generator, caveat in kinds.items():
        fed = toy.federated(sampling="shuffled", noise_generator=generator)
        path = tmp_path / generator
        toy.fit(fed, 2, [callbacks.RoundCheckpoint(path)])
        ledger = accounting.PrivacyLedger.read(path / "ledger.jsonl")
        assert ledger.entries[-1].details["noise_generator"] == generator
        found = fed.privacy_statement(1e-3, "dict")["caveats"]
        assert found.keys() & {"pseudorandom_noise", "exact_noise"} == {caveat}
    assert "rounded to that grid" in found["exact_noise"]
    # No statement could say both.
    fed = toy.federated(sampling="shuffled")
    with pytest.raises(ValueError, match="noise_generator must be 'exact', as in"):
        toy.fit(fed, 2, resume_from=path)


def _local(gone=0, rounds=2, sampling="fixed_size", m=5, made=None, **options):
    """Trains five empty clients by local noise; the last ones cannot be read."""

    def read(client):
        if client >= 5 - gone:
            raise OSError("switched off")
        return _NOTHING

    spec = empty_clients().element_spec
    clients = FederatedDataset.from_client_fn(range(5), read, spec)
    mechanism = tfdp_fl.LocalDP(clip_norm=CLIP, noise_multiplier=Z)
    fed, moves = federated(mechanism, m, made, sampling, **options), Moves()
    toy.fit(fed, rounds, [moves], data=clients)
    return fed, [[np.concatenate(variables)] for variables in moves.rounds]


_SECURE = {"secure_aggregation": AdditiveSecretSharing(max_share_value=1.0)}


@pytest.mark.parametrize(
    "gone, answered, options",
    [
        *((gone, 5 - gone, options) for gone in (0, 1) for options in ({}, _SECURE)),
        # Nothing is released; two are no group of secure sums.
        *((5, 0, {}), (1, 0, {"on_client_failure": "abort"}), (3, 0, _SECURE)),
    ],
)
def test_the_mean_of_those_that_answered_has_the_noise_of_each(gone, answered, options):
    fed, moves = _local(gone, made=None if answered else small, **options)
    if answered:
        assert_is_noise(moves, [Z * CLIP / answered**0.5] * 2)
        # The noise of those that are missing is missing too.
        assert math.isinf(fed.central_epsilon(1e-3)) == (gone > 0)
    else:
        assert not np.any(moves)
    # All that were drawn are charged, as what they sent may have been seen.
    assert fed.account.per_client.participations.tolist() == [2] * 5
    wanted = accounting.gaussian_epsilon(Z / (2 * 2**0.5), 1e-3)
    assert fed.epsilon(1e-3) == pytest.approx(wanted)


def test_a_last_cohort_has_the_noise_for_the_fixed_m():
    # The second round has one client, whose m/20 would be too little for a clip.
    seen, adaptive = [], tfdp_fl.AdaptiveClipping(noise_multiplier=0.3)
    for mechanism, made in ((fixed(), model), (adaptive, small)):
        fed, moves = federated(mechanism, 4, made, "shuffled"), Moves()
        toy.fit(fed, 2, [moves], data=empty_clients(5))
        seen.append(moves.rounds)
    assert_is_noise(seen[0], [Z * CLIP / 4] * 2)
    assert np.isfinite(np.concatenate(seen[1][1])).all()
    # Nor is a pass of local noise that ends short of shares a central guarantee.
    for rounds in (1, 2):
        fed, _ = _local(rounds=rounds, sampling="shuffled", m=4, made=small)
        assert math.isinf(fed.central_epsilon(1e-5)) == (rounds == 2)
        assert math.isfinite(fed.epsilon(1e-5))


class _GrowsWithThePlan(tfdp_fl.FixedClipping):
    """As much noise as makes a fit of any number of rounds cost the same."""

    def noise_stddevs(self, round, context):
        z = round.noise_multiplier * math.sqrt(context.rounds or 1)
        return {"update": z * round.clip_norm}

    def round_event(self, round_index, context):
        z = self.noise_multiplier * math.sqrt(context.rounds or 1)
        return dp_accounting.GaussianDpEvent(z)


def test_noise_that_depends_on_the_planned_rounds_follows_each_fit():
    mechanism = _GrowsWithThePlan(clip_norm=CLIP, noise_multiplier=Z)
    fed = federated(mechanism, CLIENTS, small, "shuffled")
    for number in (1, 9):
        history = toy.fit(fed, number, data=empty_clients()).history
        expected = Z * CLIP * math.sqrt(number)
        np.testing.assert_allclose(history["noise_stddev"], expected, rtol=1e-6)
