"""Checkpoints on disk: whole or not there, verified, one writer at a time."""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import stat
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tests.keras import toy
from tfdp_fl.keras import checkpoint


def _checkpoint(round_index: int) -> checkpoint.Checkpoint:
    rng = np.random.default_rng(round_index)
    state = {
        "plan": {"seed": round_index, "rate": 0.1},
        "none": None,
        "text": 'the "place of an array": 1',
        "weights": [rng.normal(size=(4, 3)).astype("f4"), np.float32(round_index)],
        "inside": {"windows": np.full((2, 0), np.nan, np.float32)},
        "counts": np.arange(5),
    }
    return checkpoint.Checkpoint(round_index=round_index, state=state)


@pytest.fixture
def directory(tmp_path):
    made = checkpoint.CheckpointDirectory(tmp_path / "run")
    made.acquire()
    yield made
    made.release()


def _write(directory, *rounds, keep=3):
    for round_index in rounds:
        directory.write(_checkpoint(round_index), keep)


def _same(found, expected):
    np.testing.assert_array_equal(found, expected)
    assert np.asarray(found).dtype == np.asarray(expected).dtype


def _assert_is(found, round_index):
    assert found.round_index == round_index
    tf.nest.map_structure(_same, found.state, _checkpoint(round_index).state)


def test_what_is_read_is_what_was_written(directory):
    _write(directory, 7)
    _assert_is(directory.newest(), 7)
    mode = directory.file(7).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600  # For its owner alone.
    _write(directory, 8, 9, 10, keep=2)
    assert directory.rounds() == [10, 9]
    half = {"half": tf.constant([1.5, -2.0], tf.bfloat16).numpy()}
    made = checkpoint.Checkpoint(round_index=1, state=half)
    found = checkpoint.Checkpoint.from_bytes(1, made.to_bytes())
    _same(found.state["half"], np.float32([1.5, -2.0]))
    for state, error, message in (
        ({"a": {1, 2}}, TypeError, "got one of type set"),
        ({"a": [{"place of an array": 1}, np.ones(1)]}, ValueError, "no key 'place"),
    ):
        with pytest.raises(error, match=message):
            checkpoint.Checkpoint(round_index=1, state=state).to_bytes()


def test_it_is_on_the_disk_before_it_takes_its_place(directory):
    done, sync, replace = [], os.fsync, pathlib.Path.replace

    def synced(descriptor):
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if folder else "file")
        sync(descriptor)

    def replaced(file, target):
        done.append("replaced")
        return replace(file, target)

    with (
        mock.patch.object(os, "fsync", synced),
        mock.patch.object(pathlib.Path, "replace", replaced),
    ):
        _write(directory, 1)
    assert done == ["file", "replaced", "folder"]


def test_a_truncated_one_or_a_flipped_bit_is_never_read_as_data(directory):
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        directory.newest()
    _write(directory, 1, 2)
    data = directory.file(2).read_bytes()
    damaged = [data[:length] for length in range(0, len(data), 97)]
    for place in range(0, len(data), 13):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        damaged.append(bytes(flipped))
    for broken in damaged:
        directory.file(2).write_bytes(broken)
        with pytest.warns(RuntimeWarning, match=r"00000002\.npz is damaged"):
            _assert_is(directory.newest(), 1)
    # One of an earlier version is passed over.
    stream = io.BytesIO()
    np.savez(stream, json=np.array('{"format": "tfdp_fl checkpoint 3"}'))
    data = stream.getvalue()
    directory.file(2).write_bytes(data + hashlib.sha256(data).digest())
    with pytest.warns(RuntimeWarning, match="an earlier version wrote it"):
        _assert_is(directory.newest(), 1)
    directory.file(1).write_bytes(b"")
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(checkpoint.CheckpointError, match="No checkpoint"),
    ):
        directory.newest()


def test_two_writers_are_refused_and_leftovers_of_a_killed_one_removed(directory):
    second = checkpoint.CheckpointDirectory(directory.path)
    with pytest.raises(checkpoint.CheckpointInUseError, match="Another run"):
        second.acquire()
    leftover = directory.path / ".writing-round-00000003.npz-1"
    leftover.write_bytes(b"half")
    directory.release()
    second.acquire()
    second.release()
    assert not leftover.exists()


@pytest.mark.parametrize("limit", [0, 500])
def test_a_full_disk_leaves_what_was_there(directory, limit):
    _write(directory, 1, 2)
    error = checkpoint.CheckpointWriteError
    with (
        toy.full_disk(limit),
        pytest.raises(error, match="cannot be written: File too"),
    ):
        _write(directory, 3, keep=1)
    assert directory.rounds() == [2, 1]
    _assert_is(directory.newest(), 2)
    assert not [*directory.path.glob(".writing*")]
    _write(directory, 3)
    _assert_is(directory.newest(), 3)
    # Nor can a directory be made in the place of a file.
    (directory.path / "file").touch()
    inside = checkpoint.CheckpointDirectory(directory.path / "file" / "new")
    with pytest.raises(error, match="new cannot be written"):
        inside.acquire()
