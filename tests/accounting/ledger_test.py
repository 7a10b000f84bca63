"""The ledger: nothing lost, nothing changed, nothing shared."""

from __future__ import annotations

import errno
import json
import math
import os
import pathlib
import random
import resource
import signal
import tempfile
import time
import unittest.mock

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import accounting, version
from tfdp_fl.accounting import ledger as ledger_lib

PrivacyLedger = accounting.PrivacyLedger


def _charge(z=1.0, sampling="poisson", **place):
    return accounting.RoundCharge(
        sampling=sampling,
        num_clients=1000,
        clients_per_round=100,
        event=dp_accounting.GaussianDpEvent(z),
        **place,
    )


class _Folder(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "ledger.jsonl"

    def _write(self, rounds, path=None, **arguments):
        with PrivacyLedger(path or self.path, **arguments) as ledger:
            for t in range(rounds):
                ledger.record(t, _charge(1.0 + t / 7), 90 + t, clip_norm=0.1)
            return ledger.head


class LedgerTest(_Folder):
    def test_a_head_that_is_none_writes_nothing(self):
        with self.assertRaisesRegex(TypeError, "^expected_head must"):
            PrivacyLedger(self.path, "append", expected_head=3)
        self.assertEmpty(list(self.folder.iterdir()))

    def test_what_is_written_is_read(self):
        with PrivacyLedger(
            self.path,
            unit="client",
            target_epsilon=8.0,
            target_delta=1e-5,
            mechanism={"name": "FixedClipping", "clip_norm": 0.1},
        ) as ledger:
            ledger.record(
                0,
                _charge(0.1 + 0.2),
                np.int64(97),
                clip_norm=np.float32(0.5),
                radii=np.array([1.0, 2.0]),
            )
            self.assertEqual(ledger.rounds, 1)
            head = ledger.head
        contents = PrivacyLedger.read(self.path)
        self.assertFalse(contents.truncated)
        self.assertEqual(contents.head, head)
        self.assertEqual(contents.header["unit"], "client")
        self.assertEqual(contents.header["target_epsilon"], 8.0)
        self.assertEqual(contents.header["mechanism"]["name"], "FixedClipping")
        self.assertIn("version", contents.header)
        (entry,) = contents.entries
        self.assertEqual(entry.charge, _charge(0.1 + 0.2))
        self.assertEqual(entry.round_index, 0)
        self.assertEqual(entry.cohort_size, 97)
        self.assertEqual(entry.details, {"clip_norm": 0.5, "radii": [1.0, 2.0]})

    def test_epsilon_without_the_model(self):
        self._write(5)
        expected = accounting.epsilon(
            [1.0 + t / 7 for t in range(5)], "poisson", 1000, 100, 5, 1e-5
        )
        self.assertAlmostEqual(
            accounting.epsilon_from_ledger(self.path, 1e-5), expected, places=12
        )

    def test_a_line_is_on_the_disk_before_record_returns(self):
        with PrivacyLedger(self.path) as ledger:
            synced = []
            fsync = os.fsync

            def spy(descriptor):
                fsync(descriptor)
                synced.append(self.path.read_bytes().count(b"\n"))

            with unittest.mock.patch.object(os, "fsync", spy):
                ledger.record(0, _charge(), 1)
                self.assertEqual(synced, [2])

    def test_append_goes_on_where_it_was(self):
        self._write(2)
        with PrivacyLedger(self.path, "append") as ledger:
            self.assertEqual(ledger.rounds, 2)
            ledger.record(2, _charge(), 3)
            self.assertLen(ledger.contents().entries, 3)
        self.assertLen(PrivacyLedger.read(self.path).entries, 3)

    def test_create_leaves_an_existing_file_alone(self):
        self._write(2)
        before = self.path.read_bytes()
        with self.assertRaisesRegex(FileExistsError, "mode='append'"):
            PrivacyLedger(self.path)
        self.assertEqual(self.path.read_bytes(), before)

    def test_a_round_run_again_is_charged_twice(self):
        with PrivacyLedger(self.path) as ledger:
            for t in (0, 1, 1):
                ledger.record(t, _charge(), 100)
        self.assertAlmostEqual(
            accounting.epsilon_from_ledger(self.path, 1e-5),
            accounting.epsilon(1.0, "poisson", 1000, 100, 3, 1e-5),
        )

    def test_local_spending(self):
        with PrivacyLedger(self.path) as ledger:
            for t, total in enumerate((0.5, 0.5, 1.0, 1.25)):
                ledger.record(
                    t,
                    None,
                    5,
                    local={"mu_squared": 0.5, "max_mu_squared": total},
                )
        expected = accounting.epsilon_of_mu_squared(1.25, 1e-5)
        self.assertEqual(accounting.epsilon_from_ledger(self.path, 1e-5), expected)
        # A run resumed at round 2 forgot what rounds 2 and 3 released.
        with PrivacyLedger(self.path, "append", run=ledger.run) as ledger:
            ledger.record(2, None, 5, local={"mu_squared": 0.5, "max_mu_squared": 0.75})
        self.assertEqual(
            PrivacyLedger.read(self.path).local_epsilon(1e-5),
            accounting.epsilon_of_mu_squared(0.75 + 0.5 + 0.5, 1e-5),
        )

    def test_a_round_that_costs_nothing_is_not_taken(self):
        with (
            PrivacyLedger(self.path) as ledger,
            self.assertRaisesRegex(ValueError, "charge or local"),
        ):
            ledger.record(0, None, 3)


class RunsTest(_Folder):
    def _local(self, ledger, rounds, first=0):
        for t in range(first, first + rounds):
            ledger.record(
                t,
                _charge(),
                5,
                local={"mu_squared": 0.5, "max_mu_squared": 0.5 * (t + 1)},
            )

    def test_every_line_names_its_run(self):
        with PrivacyLedger(self.path) as first:
            first.record(0, _charge(), 5)
        with PrivacyLedger(self.path, "append") as second:
            second.record(0, _charge(), 5)
        with PrivacyLedger(self.path, "append", run=first.run) as again:
            again.record(1, _charge(), 5)
        self.assertNotEqual(first.run, second.run)
        entries = PrivacyLedger.read(self.path).entries
        self.assertEqual(
            [entry.run for entry in entries],
            [first.run, second.run, first.run],
        )
        with self.assertRaisesRegex(ValueError, "run must be a text"):
            PrivacyLedger(self.path, "append", run="")

    def test_local_spending_of_runs_adds_up(self):
        with PrivacyLedger(self.path) as first:
            self._local(first, 10)
        # The same rounds again: of the same run they would be resumed ones.
        with PrivacyLedger(self.path, "append") as second:
            self._local(second, 10, first=10)
        contents = PrivacyLedger.read(self.path)
        self.assertEqual(
            contents.local_epsilon(1e-5),
            accounting.epsilon_of_mu_squared(5.0 + 10.0, 1e-5),
        )
        self.assertEqual(contents.lost_mu_squared(15, second.run), 2.5)
        self.assertEqual(contents.lost_mu_squared(15, first.run), 0.0)

    def test_a_round_without_a_local_guarantee_has_no_local_epsilon(self):
        with PrivacyLedger(self.path) as ledger:
            self._local(ledger, 1)
            ledger.record(1, _charge(), 5)
        self.assertEqual(PrivacyLedger.read(self.path).local_epsilon(1e-5), math.inf)

    def test_a_round_without_a_central_guarantee_has_no_central_epsilon(self):
        with PrivacyLedger(self.path) as ledger:
            ledger.record(0, _charge(), 5)
            ledger.record(1, None, 5, local={"mu_squared": 0.5, "max_mu_squared": 0.5})
        self.assertEqual(accounting.epsilon_from_ledger(self.path, 1e-5), math.inf)

    @parameterized.parameters("tfdp_fl privacy ledger 2", "tfdp_fl privacy ledger 4")
    def test_another_format_is_refused_and_left_alone(self, name):
        PrivacyLedger(self.path).close()
        body = {**json.loads(self.path.read_bytes()), "format": name}
        del body["hash"]
        body["hash"] = ledger_lib.digest_of(body)
        data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        self.path.write_bytes(data)
        for use in (PrivacyLedger.read, lambda path: PrivacyLedger(path, "append")):
            with self.assertRaisesRegex(
                accounting.LedgerError, f"{name}.*which version {version.__version__}"
            ):
                use(self.path)
        self.assertEqual(self.path.read_bytes(), data)


class TamperingTest(_Folder):
    def _lines(self):
        return self.path.read_bytes().splitlines(keepends=True)

    @parameterized.parameters(
        ("removed", lambda lines: lines[:3] + lines[4:], 4),
        ("header removed", lambda lines: lines[1:], 1),
        (
            "moved",
            lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
            3,
        ),
        ("twice", lambda lines: lines[:3] + lines[2:], 4),
        (
            "noise",
            lambda lines: [
                line.replace(b'"noise_multiplier":1.0', b'"noise_multiplier":9.0')
                for line in lines
            ],
            2,
        ),
        (
            "header changed",
            lambda lines: [lines[0].replace(b"client", b"cohort"), *lines[1:]],
            1,
        ),
    )
    def test_lines_that_were_changed(self, _, change, number):
        self._write(5)
        self.path.write_bytes(b"".join(change(self._lines())))
        for use in (
            PrivacyLedger.read,
            lambda path: PrivacyLedger(path, "append"),
        ):
            with self.assertRaisesRegex(
                accounting.LedgerTamperedError, f"Line {number} of"
            ):
                use(self.path)

    def test_any_changed_byte_is_found(self):
        self._write(3)
        data = bytearray(self.path.read_bytes())
        generator = random.Random(0)
        # The last newline is left out: without it the line is whole still.
        for position in generator.sample(range(len(data) - 1), 300):
            changed = data.copy()
            changed[position] ^= generator.randrange(1, 256)
            self.path.write_bytes(changed)
            try:
                contents = PrivacyLedger.read(self.path)
            except accounting.LedgerTamperedError:
                continue
            self.fail(f"byte {position} changed unseen: {contents}")

    def test_lines_cut_off_at_the_end_need_a_head_from_elsewhere(self):
        head = self._write(5)
        lines = self._lines()
        self.path.write_bytes(b"".join(lines[:-1]))
        self.assertLen(PrivacyLedger.read(self.path).entries, 4)
        with self.assertRaisesRegex(accounting.LedgerTamperedError, head):
            PrivacyLedger.read(self.path, expected_head=head)
        # A ledger that has grown since still contains the head.
        earlier = PrivacyLedger.read(self.path).head
        self.path.write_bytes(b"".join(lines))
        PrivacyLedger.read(self.path, expected_head=earlier)


class CrashTest(_Folder):
    def test_a_line_of_brackets_is_no_line(self):
        # JSON nests as deep as Python recurses.
        self._write(2)
        with self.path.open("ab") as file:
            file.write(b"[" * 100_000 + b"\n")
        with self.assertRaises(accounting.LedgerTamperedError):
            PrivacyLedger.read(self.path)

    def test_a_file_cut_anywhere_keeps_its_whole_lines(self):
        self._write(3)
        data = self.path.read_bytes()
        ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
        sizes = {*range(0, len(data) + 1, 7)}
        sizes.update(end + shift for end in ends for shift in (-2, -1, 0))
        for size in sorted(sizes):
            self.path.write_bytes(data[:size])
            contents = PrivacyLedger.read(self.path)
            # A line that lacks only its newline is whole, and is charged.
            whole = sum(size >= end - 1 for end in ends)
            self.assertLen(contents.entries, max(0, whole - 1))
            at_an_end = any(size in (end, end - 1) for end in ends)
            self.assertEqual(contents.truncated, not at_an_end)

    def test_no_bit_of_the_last_newline_undoes_a_round(self):
        self._write(3)
        data = self.path.read_bytes()
        changed = [data[:-1] + bytes([10 ^ 1 << bit]) for bit in range(8)]
        changed += [data[:-1] + rest for rest in (b"}", b"\0" * 9, b"\xff")]
        for each in changed:
            self.path.write_bytes(each)
            contents = PrivacyLedger.read(self.path)
            self.assertLen(contents.entries, 3)
            with PrivacyLedger(self.path, "append") as ledger:
                self.assertEqual(ledger.rounds, 3)
            self.assertEqual(self.path.read_bytes(), data)

    def test_append_repairs_a_line_cut_short(self):
        self._write(3)
        data = self.path.read_bytes()
        ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
        for size in (0, 10, ends[0] - 1, ends[0], ends[2] + 9, ends[3] - 1):
            self.path.write_bytes(data[:size])
            whole = max(0, sum(size >= end - 1 for end in ends) - 1)
            with PrivacyLedger(self.path, "append") as ledger:
                self.assertEqual(ledger.rounds, whole)
                ledger.record(whole, _charge(), 7)
            contents = PrivacyLedger.read(self.path)
            self.assertLen(contents.entries, whole + 1)
            self.assertFalse(contents.truncated)

    def test_zeros_after_the_last_line_are_a_crash_too(self):
        # What a file system may leave after a power cut.
        self._write(2)
        with self.path.open("ab") as file:
            file.write(b"\0" * 300)
        self.assertTrue(PrivacyLedger.read(self.path).truncated)
        with PrivacyLedger(self.path, "append") as ledger:
            ledger.record(2, _charge(), 7)
        self.assertLen(PrivacyLedger.read(self.path).entries, 3)

    def test_kill_9_at_random_moments(self):
        generator = random.Random(1)
        released_in_all = 0
        for _ in range(15):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                try:
                    ledger = PrivacyLedger(self.path, "append")
                    t = ledger.rounds
                    while True:
                        ledger.record(t, _charge(), 100)
                        os.write(writer, b".")  # The result is seen.
                        t += 1
                finally:
                    os._exit(1)
            os.close(writer)
            time.sleep(generator.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            released_in_all += len(os.read(reader, 1 << 16))
            os.close(reader)
            if self.path.exists():
                recorded = len(PrivacyLedger.read(self.path).entries)
                self.assertGreaterEqual(recorded, released_in_all)
        self.assertGreater(released_in_all, 0)


class OpenFileTest(_Folder):
    """What happens to the file while a run has it open is noticed."""

    def setUp(self):
        super().setUp()
        self.ledger = PrivacyLedger(self.path)
        self.addCleanup(self.ledger.close)
        self.ledger.record(0, _charge(), 5)

    def _refused(self, error, message):
        with self.assertRaisesRegex(error, message):
            self.ledger.record(1, _charge(), 5)
        self.assertEqual(self.ledger.rounds, 1)

    def test_deleted(self):
        self.path.unlink()
        self._refused(accounting.LedgerMovedError, "was deleted, moved or")
        self.assertFalse(self.path.exists())

    def test_moved_and_put_back(self):
        elsewhere = self.folder / "elsewhere.jsonl"
        self.path.rename(elsewhere)
        before = elsewhere.read_bytes()
        self._refused(accounting.LedgerMovedError, "Put it back")
        self.assertEqual(elsewhere.read_bytes(), before)
        elsewhere.rename(self.path)
        self.ledger.record(1, _charge(), 5)
        self.assertLen(PrivacyLedger.read(self.path).entries, 2)

    def test_replaced_by_a_copy(self):
        copy = self.folder / "copy.jsonl"
        copy.write_bytes(self.path.read_bytes())
        copy.replace(self.path)
        self._refused(accounting.LedgerMovedError, "replaced")

    def test_written_by_something_else(self):
        with self.path.open("ab") as file:
            file.write(b"one line more\n")
        self._refused(accounting.LedgerTamperedError, "something else changed")

    def test_cut_short(self):
        os.truncate(self.path, self.path.stat().st_size - 10)
        self._refused(accounting.LedgerTamperedError, "something else changed")

    def test_a_fork_cannot_write_and_does_not_unlock(self):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                try:
                    self.ledger.record(1, _charge(2.0), 5)
                except accounting.LedgerForkedError as error:
                    os.write(writer, str(error).encode())
                self.ledger.close()
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read().decode()
        self.assertIn(f"opened by process {os.getpid()}", said)
        with self.assertRaises(accounting.LedgerInUseError):
            PrivacyLedger(self.path, "append")
        self.ledger.record(1, _charge(), 5)
        self.assertLen(PrivacyLedger.read(self.path).entries, 2)

    def test_a_fork_that_lives_on_does_not_hold_the_lock(self):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        try:
            self.ledger.close()
            PrivacyLedger(self.path, "append").close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_the_process_may_change_its_folder(self):
        here = os.getcwd()
        try:
            os.chdir(self.folder)
            with PrivacyLedger("relative.jsonl") as ledger:
                os.chdir(here)
                ledger.record(0, _charge(), 5)
                self.assertLen(ledger.contents().entries, 1)
        finally:
            os.chdir(here)

    def test_only_its_owner_can_read_it(self):
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)

    @parameterized.parameters(
        ({"mu_squared": -1.0, "max_mu_squared": 1.0}, "mu_squared .* got -1"),
        ({"mu_squared": math.nan, "max_mu_squared": 1.0}, "mu_squared .*nan"),
        ({"mu_squared": 1.0, "max_mu_squared": math.nan}, "max_mu_s.*nan"),
        ({"mu_squared": 1.0, "max_mu_squared": -0.5}, "max_mu_s.*-0.5"),
        (
            {"mu_squared": math.inf, "max_mu_squared": math.inf},
            "finite in a round with noise",
        ),
    )
    def test_spending_that_cannot_be(self, local, message):
        before = self.path.read_bytes()
        with self.assertRaisesRegex(accounting.LedgerEntryError, message):
            self.ledger.record(1, _charge(), 5, local=local)
        self.assertEqual(self.path.read_bytes(), before)
        # Nor does a reader believe it.
        with (
            unittest.mock.patch.object(
                ledger_lib, "checked_local", lambda local, charge: local
            ),
        ):
            self.ledger.record(1, _charge(), 5, local=local)
        with self.assertRaisesRegex(accounting.LedgerTamperedError, message):
            PrivacyLedger.read(self.path)

    def test_a_release_without_noise_may_cost_everything(self):
        infinite = {"mu_squared": math.inf, "max_mu_squared": math.inf}
        self.ledger.close()
        other = self.folder / "other.jsonl"
        with PrivacyLedger(other) as ledger:
            ledger.record(0, _charge(0.0), 5, local=infinite)
            ledger.record(1, None, 5, local=infinite)
        self.assertEqual(PrivacyLedger.read(other).local_epsilon(1e-5), math.inf)


class RefusalTest(_Folder):
    def test_two_runs_on_one_ledger(self):
        with PrivacyLedger(self.path) as ledger:
            ledger.record(0, _charge(), 5)
            before = self.path.read_bytes()
            with self.assertRaisesRegex(accounting.LedgerInUseError, "another run"):
                PrivacyLedger(self.path, "append")
            self.assertEqual(self.path.read_bytes(), before)
            PrivacyLedger.read(self.path)  # Reading needs no lock.
            ledger.record(1, _charge(), 5)
        PrivacyLedger(self.path, "append").close()

    @parameterized.parameters(errno.ENOSPC, errno.EIO)
    def test_a_full_disk_damages_nothing(self, code):
        with PrivacyLedger(self.path) as ledger:
            ledger.record(0, _charge(), 5)
            before = self.path.read_bytes()
            pwrite = os.pwrite

            def half(descriptor, data, offset):
                pwrite(descriptor, data[: len(data) // 2], offset)
                raise OSError(code, os.strerror(code))

            with (
                unittest.mock.patch.object(os, "pwrite", half),
                self.assertRaisesRegex(accounting.LedgerWriteError, os.strerror(code)),
            ):
                ledger.record(1, _charge(), 5)
            self.assertEqual(self.path.read_bytes(), before)
            self.assertEqual(ledger.rounds, 1)
            ledger.record(1, _charge(), 5)  # There is room again.
        self.assertLen(PrivacyLedger.read(self.path).entries, 2)

    def test_a_failed_sync_is_no_record(self):
        with PrivacyLedger(self.path) as ledger:
            before = self.path.read_bytes()
            fsync = os.fsync
            calls = []

            def fail_once(descriptor):
                calls.append(descriptor)
                if len(calls) == 1:
                    raise OSError(errno.EIO, "Input/output error")
                fsync(descriptor)

            with (
                unittest.mock.patch.object(os, "fsync", fail_once),
                self.assertRaises(accounting.LedgerWriteError),
            ):
                ledger.record(0, _charge(), 5)
            self.assertEqual(self.path.read_bytes(), before)

    def test_a_real_limit_on_the_file_s_size(self):
        with PrivacyLedger(self.path) as ledger:
            ledger.record(0, _charge(), 5)
            size = self.path.stat().st_size
        child = os.fork()
        if not child:
            code = 1
            try:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, size + 100))
                with PrivacyLedger(self.path, "append") as ledger:
                    try:
                        ledger.record(1, _charge(), 5)
                    except accounting.LedgerWriteError:
                        code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        self.assertEqual(os.waitstatus_to_exitcode(status), 0)
        self.assertEqual(self.path.stat().st_size, size)
        self.assertLen(PrivacyLedger.read(self.path).entries, 1)

    def test_a_new_ledger_that_cannot_be_written_leaves_no_file(self):
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with (
            unittest.mock.patch.object(os, "pwrite", full),
            self.assertRaisesRegex(accounting.LedgerWriteError, "No space"),
        ):
            PrivacyLedger(self.path)
        self.assertFalse(self.path.exists())


if __name__ == "__main__":
    absltest.main()
