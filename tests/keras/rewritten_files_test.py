"""Clients' files that change between rounds, or while they are read.

All other clients are empty and there is no noise: what moves is the hostile file.
"""

import io

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.keras import hostile, noise_test, toy
from tfdp_fl.datasets import FederatedDataset

_OWNER = "b"
_ROUNDING = 1e-5 * hostile.CLIP


def _npz(x, y) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=x, y=y)
    return buffer.getvalue()


def _csv(x, y) -> bytes:
    return pd.DataFrame(x).assign(label=y).to_csv(index=False).encode()


def _read_files(folder, suffix):
    """Returns the clients of a folder, each read from its file when it trains."""

    def read(name):
        path = folder / f"{name}.{suffix}"
        if suffix == "npz":
            with np.load(path) as arrays:
                return arrays["x"], arrays["y"]
        frame = pd.read_csv(path)
        features = frame.drop(columns="label").to_numpy(np.float32)
        return features, frame["label"].to_numpy(np.int64)

    return FederatedDataset.from_client_fn([*"abcd"], read)


def _contents(written):
    """Yields what the file becomes."""
    x, y = hostile.clients()[hostile.HOSTILE]
    for attack in hostile.ATTACKS.values():
        yield written(*attack((x, y)))
    for times in (1000, 1, 0):  # It grows, and shrinks to nothing.
        rows = np.arange(times * len(y)) % len(y)
        yield written(x[rows] * np.float32(1e4), y[rows])
    whole = written(x * np.float32(1e4), y)
    for share in (0.0, 0.3, 0.9):  # A part of it is written.
        yield whole[: int(share * len(whole))]
    yield written(x[:, :2], y)
    yield written(x, y + hostile.CLASSES)
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


@pytest.mark.parametrize(
    "suffix, cap, when, xla",
    [
        ("npz", None, "begin", False),
        ("csv", None, "end", False),
        ("npz", 6, "end", True),
        ("csv", 6, "begin", False),
    ],
)
def test_every_round_moves_by_the_clip_at_most(tmp_path, suffix, cap, when, xla):
    written = _npz if suffix == "npz" else _csv
    x, y = hostile.clients()[hostile.HOSTILE]
    for name in "abcd":
        own = slice(None) if name == _OWNER else slice(0)
        (tmp_path / f"{name}.{suffix}").write_bytes(written(x[own], y[own]))
    clients = _read_files(tmp_path, suffix)
    spec = clients.element_spec
    fed = _noise_free(xla, cap)
    coming, moves = list(_contents(written)), noise_test.Moves()

    def rewrite(*_):
        if coming:
            (tmp_path / f"{_OWNER}.{suffix}").write_bytes(coming.pop(0))

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
    assert fed.spending.rounds == fed.rounds
    assert clients.element_spec == spec


def test_a_file_that_is_gone(tmp_path):
    for name, client in zip("abcd", hostile.clients().values(), strict=True):
        (tmp_path / f"{name}.npz").write_bytes(_npz(*client))
    fed, clients = _noise_free(), _read_files(tmp_path, "npz")
    toy.fit(fed, data=clients)
    before = fed.get_weights()
    for file in tmp_path.iterdir():
        file.unlink()
    history = toy.fit(fed, 2, data=clients).history
    assert history["failed_clients"] == [4.0, 4.0]
    toy.assert_same(before, fed)
    assert fed.spending.rounds == 3


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
