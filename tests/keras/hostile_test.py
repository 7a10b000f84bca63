"""One hostile client moves a mean by S/m, ends nothing, and is counted.

So does its file that changes between rounds, or while it is read. Every way with
every mechanism is in `tests/stress/hostile_stress.py`.
"""

import io

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import hostile, noise_test, toy
from tfdp_fl.datasets import FederatedDataset

# What has no finite update: it is replaced by zero, and counted.
DISCARDED = ("nan", "inf", "minus_inf", "1e38", "minus_1e38", "one_nan")


def check_attack(trainer, without, name):
    """Asserts what holds of one client's attack."""
    outcome = trainer.round(hostile.ATTACKS[name])
    assert np.isfinite(outcome.weights).all()
    assert hostile.moved(outcome, without) <= trainer.bound(without), name
    assert outcome.history["cohort_size"] == hostile.CLIENTS
    assert outcome.history["failed_clients"] == 0
    if name in DISCARDED:
        assert outcome.history["discarded_clients"] == 1, name
    for each in ("loss", "accuracy", "mean_update_norm", "clipped_fraction"):
        assert np.isfinite(outcome.history[each]), (name, each)


def check_failure(trainer, without, name):
    """Asserts what holds where a client's data is no data."""
    outcome = trainer.round(hostile.FAILURES[name])
    assert outcome.history["failed_clients"] == 1, name
    if trainer.case.make().needs_exact_cohort:
        # Without its share the noise would fall short.
        assert outcome.history["abandoned_rounds"] == 1, name
        np.testing.assert_array_equal(outcome.weights, trainer.start)
        return
    most = trainer.bound(without, dropped_out=True)
    assert hostile.moved(outcome, without) <= most, name


@pytest.mark.parametrize(
    "name", ["fixed", "median", "correlated", "adaptive_local", "nbafl"]
)
def test_every_attack(name):
    trainer = hostile.Trainer(hostile.CASES[name], "streamed")
    without = trainer.without()
    for attack in hostile.ATTACKS:
        check_attack(trainer, without, attack)
    for failure in hostile.FAILURES:
        check_failure(trainer, without, failure)


@pytest.mark.parametrize(
    "way",
    [
        *("side_by_side", "few_side_by_side", "xla", "secure_aggregation"),
        *("sharded_side_by_side", "sharded_few_side_by_side"),
    ],
)
def test_other_ways(way):
    trainer = hostile.Trainer(hostile.CASES["fixed"], way)
    without = trainer.without()
    for attack in ("nan", "1e38", "denormal", "a_million_times", "cancelling"):
        check_attack(trainer, without, attack)
    beside = way.endswith("side_by_side")
    assert trainer.fed.engine.has_trained_side_by_side == beside


def test_the_bound_is_reached_and_arrays_are_refused_before_anything_starts():
    trainer = hostile.Trainer(hostile.CASES["fixed"], "one_by_one")
    # Others are numbers that can be made real, or the caller's own error; or they fail
    # alone, as no client says what the others look like.
    alone = {"wrong_shape", "wrong_dtype"}
    without = trainer.without()
    for name in alone:
        check_failure(trainer, without, name)
    trainer.fed._run = None
    for name in hostile.FAILURES.keys() - {"raises", "complex", "objects"} - alone:
        with pytest.raises((ValueError, TypeError)):
            trainer.round(hostile.FAILURES[name])
        assert trainer.fed.run is None
    attack = hostile.ATTACKS["a_million_times"]
    share = hostile.moved(trainer.round(attack), trainer.without())
    assert share > 0.9999 * hostile.CLIP / hostile.CLIENTS


# Files: others are empty and there is no noise, so that what moves is the hostile one.

_OWNER = "b"
_ROUNDING = 1e-5 * hostile.CLIP


def _npz(x, y) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=x, y=y)
    return buffer.getvalue()


def _read_files(folder):
    """Returns the clients of a folder, each read from its file when it trains."""

    def read(name):
        with np.load(folder / f"{name}.npz") as arrays:
            return arrays["x"], arrays["y"]

    return FederatedDataset.from_client_fn([*"abcd"], read)


def _contents():
    """Yields what the file becomes."""
    x, y = hostile.clients()[hostile.HOSTILE]
    for attack in hostile.ATTACKS.values():
        yield _npz(*attack((x, y)))
    for times in (1000, 1, 0):  # It grows, and shrinks to nothing.
        rows = np.arange(times * len(y)) % len(y)
        yield _npz(x[rows] * np.float32(1e4), y[rows])
    whole = _npz(x * np.float32(1e4), y)
    for share in (0.0, 0.3, 0.9):  # A part of it is written.
        yield whole[: int(share * len(whole))]
    yield _npz(x[:, :2], y)
    yield _npz(x, y + hostile.CLASSES)
    yield b"no such format"
    yield whole


def _noise_free(xla=False, cap=None):
    quiet = tfdp_fl.FixedClipping(clip_norm=hostile.CLIP, noise_multiplier=0.0)
    weighting = cap and tfdp_fl.ClientWeighting.num_examples(cap=cap)
    compiled = {"optimizer": tf.keras.optimizers.SGD(0.5), "jit_compile": xla}
    return toy.federated(
        *(quiet, hostile.model, hostile.CLIENTS, "fixed_size", compiled),
        client_weighting=weighting,
    )


@pytest.mark.parametrize("cap, when, xla", [(None, "begin", False), (6, "end", True)])
def test_every_round_moves_by_the_clip_at_most(tmp_path, cap, when, xla):
    x, y = hostile.clients()[hostile.HOSTILE]
    for name in "abcd":
        own = slice(None) if name == _OWNER else slice(0)
        (tmp_path / f"{name}.npz").write_bytes(_npz(x[own], y[own]))
    clients = _read_files(tmp_path)
    spec = clients.element_spec
    fed = _noise_free(xla, cap)
    coming, moves = list(_contents()), noise_test.Moves()

    def rewrite(*_):
        if coming:
            (tmp_path / f"{_OWNER}.npz").write_bytes(coming.pop(0))

    rewrites = tf.keras.callbacks.LambdaCallback(**{f"on_epoch_{when}": rewrite})
    rounds = len(coming) + 2
    history = toy.fit(fed, rounds, [moves, rewrites], clients, batch_size=3).history
    norms = [np.linalg.norm(np.concatenate(each)) for each in moves.rounds]
    bound = hostile.CLIP / hostile.CLIENTS
    assert max(norms) <= bound + _ROUNDING
    assert norms[-1] > 0.999 * bound  # It was read again.
    failed = np.array(history["failed_clients"])
    assert failed.sum() >= 4
    assert np.all(np.array(norms)[failed > 0] == 0.0)
    assert fed.account.rounds == fed.rounds
    assert clients.element_spec == spec


def test_arrays_that_are_mapped_from_a_file_are_read_once(tmp_path):
    x, y = map(np.concatenate, zip(*hostile.clients().values(), strict=True))
    rows = np.arange(len(y)).reshape(hostile.CLIENTS, -1)
    weights = []
    for rewritten in (False, True):
        mapped = []
        for array in (x, y):
            np.save(file := tmp_path / f"{rewritten}-{len(mapped)}.npy", array)
            mapped.append(np.load(file, mmap_mode="r+"))
        fed, clients = _noise_free(), FederatedDataset.from_indices(*mapped, rows)
        toy.fit(fed, data=clients, seed=1)
        if rewritten:
            mapped[0][:], mapped[1][:] = 1e30, 99
        toy.fit(fed, data=clients, seed=1)
        weights.append(fed.get_weights())
    toy.assert_same(*weights)


def test_one_record_of_nan_does_not_silence_its_client_under_nbafl():
    # The model of a single client stayed as it was, to the last bit.
    mechanism = tfdp_fl.NbAFL(epsilon=0.5, constant=5.0, weight_clip=1.0)
    x, y = toy.arrays(100)
    x[7] = np.nan
    fed = toy.federated(mechanism, clients_per_round=1, sampling="shuffled")
    before = fed.get_weights()
    history = toy.fit(fed, data={"a": (x, y)}).history
    assert history["discarded_clients"] == [1.0]
    assert np.abs(toy.flat(fed) - toy.flat(before)).max() > 0.01
