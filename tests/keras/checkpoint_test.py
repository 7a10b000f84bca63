"""Checkpoints on disk: whole or not there, verified, one writer at a time."""

from __future__ import annotations

import hashlib
import io
import stat
import warnings

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from tests.keras import files
from tfdp_fl.keras import checkpoint


def _checkpoint(round_index: int) -> checkpoint.Checkpoint:
    rng = np.random.default_rng(round_index)
    return checkpoint.Checkpoint(
        round_index=round_index,
        state={
            "plan": {"seed": round_index, "rate": 0.1},
            "none": None,
            "weights": [
                rng.normal(size=(4, 3)).astype(np.float32),
                np.float32(round_index),
            ],
            "inside": {"windows": np.full((2, 0), np.nan, np.float32)},
            "counts": np.arange(5),
        },
    )


class CheckpointDirectoryTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.path = files.directory(self) / "run"
        self.directory = checkpoint.CheckpointDirectory(self.path)
        self.directory.acquire()
        self.addCleanup(self.directory.release)

    def _write(self, *rounds: int, keep: int = 3) -> None:
        for round_index in rounds:
            self.directory.write(_checkpoint(round_index), keep)

    def _assert_is(self, found: checkpoint.Checkpoint, round_index: int):
        expected = _checkpoint(round_index)
        self.assertEqual(found.round_index, round_index)
        self.assertEqual(found.state["plan"], expected.state["plan"])
        tf.nest.map_structure(self._assert_same, found.state, expected.state)

    def _assert_same(self, found, expected):
        np.testing.assert_array_equal(found, expected)
        self.assertEqual(np.asarray(found).dtype, np.asarray(expected).dtype)

    def test_short_floats_come_back_as_float32(self):
        half = tf.constant([1.5, -2.0], tf.bfloat16).numpy()
        made = checkpoint.Checkpoint(round_index=1, state={"half": half})
        found = checkpoint.Checkpoint.from_bytes(1, made.to_bytes())
        self._assert_same(found.state["half"], np.float32([1.5, -2.0]))

    @parameterized.parameters(
        ({"a": {1, 2}}, TypeError, "got one of type set"),
        ({"a": np.array([None])}, TypeError, "got one of type ndarray"),
        ({"a": [{"place of an array": 1}, np.ones(1)]}, ValueError, "no key 'place"),
    )
    def test_what_could_not_be_read_is_not_written(self, state, error, pattern):
        with self.assertRaisesRegex(error, pattern):
            checkpoint.Checkpoint(round_index=1, state=state).to_bytes()

    def test_a_text_may_say_anything(self):
        state = {"a": 'the "place of an array": 1', "b": np.ones(1)}
        made = checkpoint.Checkpoint(round_index=1, state=state)
        found = checkpoint.Checkpoint.from_bytes(1, made.to_bytes())
        self.assertEqual(found.state["a"], state["a"])

    def test_one_of_an_earlier_version_is_passed_over(self):
        self._write(1)
        stream = io.BytesIO()
        np.savez(stream, json=np.array('{"format": "tfdp_fl checkpoint 3"}'))
        data = stream.getvalue()
        self.directory.file(2).write_bytes(data + hashlib.sha256(data).digest())
        with self.assertWarnsRegex(RuntimeWarning, "an earlier version wrote it"):
            self._assert_is(self.directory.newest(), 1)

    def test_what_is_read_is_what_was_written(self):
        self._write(7)
        self._assert_is(self.directory.newest(), 7)

    def test_keeps_the_newest(self):
        self._write(0, 2, 4, 6, keep=2)
        self.assertEqual(self.directory.rounds(), [6, 4])

    def test_is_for_its_owner_alone(self):
        self._write(1)
        mode = self.directory.file(1).stat().st_mode
        self.assertEqual(stat.S_IMODE(mode), 0o600)

    def test_truncated_newest_falls_back_and_says_so(self):
        self._write(1, 2)
        data = self.directory.file(2).read_bytes()
        for length in range(0, len(data), 97):
            self.directory.file(2).write_bytes(data[:length])
            with self.assertWarnsRegex(RuntimeWarning, "00000002.npz is dama"):
                self._assert_is(self.directory.newest(), 1)

    def test_a_flipped_bit_is_never_read_as_data(self):
        self._write(1, 2)
        data = self.directory.file(2).read_bytes()
        fell_back = 0
        for place in range(0, len(data), 13):
            broken = bytearray(data)
            broken[place] ^= 1 << (place % 8)
            self.directory.file(2).write_bytes(broken)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.directory.newest()
            self._assert_is(found, found.round_index)
            fell_back += found.round_index == 1
        # What is left are bytes that say nothing, such as a file's date.
        self.assertGreater(fell_back, 0.6 * len(data) / 13)

    def test_nothing_whole_is_an_error(self):
        with self.assertRaisesRegex(FileNotFoundError, "no checkpoint in"):
            self.directory.newest()
        self._write(1)
        self.directory.file(1).write_bytes(b"")
        with (
            self.assertWarns(RuntimeWarning),
            self.assertRaisesRegex(checkpoint.CheckpointError, "No checkpoint"),
        ):
            self.directory.newest()

    def test_two_writers_are_refused(self):
        second = checkpoint.CheckpointDirectory(self.path)
        with self.assertRaisesRegex(
            checkpoint.CheckpointInUseError, "Another run writes .*of its own"
        ):
            second.acquire()
        self.directory.release()
        second.acquire()
        second.release()

    def test_leftovers_of_a_killed_writer_are_removed(self):
        leftover = self.path / ".writing-round-00000003.npz-1"
        leftover.write_bytes(b"half")
        self.directory.release()
        self.directory.acquire()
        self.assertFalse(leftover.exists())

    @parameterized.parameters(0, 500)
    def test_full_disk_leaves_what_was_there(self, limit):
        self._write(1, 2)
        with (
            files.full_disk(limit),
            self.assertRaisesRegex(
                checkpoint.CheckpointWriteError, "cannot be written: File too"
            ),
        ):
            self._write(3, keep=1)
        self.assertEqual(self.directory.rounds(), [2, 1])
        self._assert_is(self.directory.newest(), 2)
        self.assertEmpty([*self.path.glob(".writing*")])
        self._write(3)
        self._assert_is(self.directory.newest(), 3)

    def test_read_only_directory_is_refused(self):
        self._write(1)
        self.path.chmod(0o755)
        self.directory.file(1).chmod(0o644)
        with files.read_only(self.path):
            with self.assertRaisesRegex(
                checkpoint.CheckpointWriteError, "cannot be written: Perm"
            ):
                self._write(2)
            self._assert_is(self.directory.newest(), 1)
            inside = checkpoint.CheckpointDirectory(self.path / "new")
            with self.assertRaisesRegex(
                checkpoint.CheckpointWriteError, "new cannot be written: Perm"
            ):
                inside.acquire()
        self.assertEqual(self.directory.rounds(), [1])
