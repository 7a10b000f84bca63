"""The ledger: nothing lost, nothing changed, nothing shared."""

import errno
import json
import math
import os
import random
import signal
import time
from unittest import mock

import dp_accounting
import numpy as np
import pytest

import tfdp_fl
from tests.accounting.charges import charge
from tfdp_fl import accounting
from tfdp_fl.accounting import ledger as ledger_lib

PrivacyLedger = accounting.PrivacyLedger
read = PrivacyLedger.read


def _spent(one, total):
    return {"mu_squared": one, "max_mu_squared": total}


@pytest.fixture(name="path")
def _path(tmp_path):
    return tmp_path / "ledger.jsonl"


@pytest.fixture(name="open_ledger")
def _open_ledger(path):
    with PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 5)
        yield ledger


def _write(path, rounds):
    with PrivacyLedger(path) as ledger:
        for t in range(rounds):
            ledger.record(t, charge(z=1.0 + t / 7), 90 + t, clip_norm=0.1)
        return ledger.head


def _append(path, **options):
    return PrivacyLedger(path, "append", **options)


def _forked(function):
    """Returns a child that does something and ends, whatever happens."""
    child = os.fork()
    if not child:
        try:
            function()
        finally:
            os._exit(0)
    return child


def test_what_cannot_be_begun_leaves_the_folder_as_it_was(path):
    for name, value in {"expected_head": 3, "run": "", "mechanism": ""}.items():
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            _append(path, **{name: value})
    full = mock.patch.object(os, "pwrite", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(accounting.LedgerWriteError, match="full"):
        PrivacyLedger(path)
    assert not path.exists()
    _write(path, 2)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="mode='append'"):
        PrivacyLedger(path)
    assert path.read_bytes() == before


def test_a_ledger_that_another_run_began_is_neither_taken_nor_removed(path):
    lock = ledger_lib.fcntl.flock

    def late(*arguments):
        with (
            mock.patch.object(ledger_lib.fcntl, "flock", lock),
            PrivacyLedger(path, "append") as other,
        ):
            other.record(0, charge(), 5)
        return lock(*arguments)

    with (
        mock.patch.object(ledger_lib.fcntl, "flock", late),
        pytest.raises(accounting.LedgerInUseError, match="its own ledger"),
    ):
        PrivacyLedger(path, "create")
    assert len(read(path).entries) == 1


def test_what_is_written_is_read(path):
    mechanism = {"name": "FixedClipping", "clip_norm": 0.1}
    header = {"privacy_unit": "client", "target_epsilon": 8.0, "mechanism": mechanism}
    with PrivacyLedger(path, **header) as ledger:
        details = {"clip_norm": np.float32(0.5), "radii": np.array([1.0, 2.0])}
        ledger.record(0, charge(z=0.1 + 0.2), np.int64(97), **details)
        assert ledger.rounds == 1
        head = ledger.head
    contents = read(path)
    assert (contents.truncated, contents.head) == (False, head)
    assert header.items() <= contents.header.items()
    assert "version" in contents.header
    (entry,) = contents.entries
    assert entry.charge == charge(z=0.1 + 0.2)
    assert (entry.round_index, entry.cohort_size) == (0, 97)
    assert entry.details == {"clip_norm": 0.5, "radii": [1.0, 2.0]}


def test_a_line_is_on_the_disk_before_record_returns(path, open_ledger):
    synced, fsync = [], os.fsync

    def spy(descriptor):
        fsync(descriptor)
        synced.append(path.read_bytes().count(b"\n"))

    with mock.patch.object(os, "fsync", spy):
        open_ledger.record(1, charge(), 1)
        assert synced == [3]


def test_an_interrupt_waits_until_the_ledger_knows_of_its_line(path, open_ledger):
    append = PrivacyLedger._append

    def interrupted(self, body):
        head = append(self, body)
        signal.raise_signal(signal.SIGINT)
        return head

    patched = mock.patch.object(PrivacyLedger, "_append", interrupted)
    with patched, pytest.raises(KeyboardInterrupt):
        open_ledger.record(1, charge(), 5)
    open_ledger.record(2, charge(), 5)
    assert len(read(path).entries) == 3


def test_a_round_run_again_is_charged_twice(path):
    with PrivacyLedger(path) as ledger:
        for t in (0, 1, 1):
            ledger.record(t, charge(), 100)
        with pytest.raises(ValueError, match="charge or local"):
            ledger.record(0, None, 3)  # What costs nothing is no round.
    expected = accounting.epsilon(1.0, "poisson", 1000, 100, 3, 1e-5)
    assert accounting.epsilon_from_ledger(path, 1e-5) == pytest.approx(expected)


def test_no_two_lines_have_one_charge(path):
    with PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 100, charge_id="one")
        with pytest.raises(accounting.LedgerEntryError, match="charge_id must be new"):
            ledger.record(1, charge(), 100, charge_id="one")
        ledger.record(1, charge(), 100)
        ids = {entry.charge_id for entry in ledger.entries}
        assert len(ids) == ledger.rounds == 2
    with _append(path) as ledger, pytest.raises(accounting.LedgerEntryError):
        ledger.record(2, charge(), 100, charge_id="one")
    body = json.loads(path.read_bytes().splitlines()[1])
    del body["previous"], body["hash"]
    with path.open("ab") as file:
        file.write(ledger_lib.line_after(read(path).head, body)[0] + b"\n")
    with pytest.raises(accounting.LedgerTamperedError, match="charge_id must be new"):
        read(path)


def test_branches_of_a_segment_cost_what_their_chains_do():
    # A session goes on from a position of an earlier one, of which all is kept.
    random = np.random.default_rng(0)
    for _ in range(300):
        chains, places = {"0": [("0", p) for p in range(random.integers(1, 6))]}, {}
        for number in range(1, random.integers(2, 7)):
            parent = chains[str(random.integers(number))]
            kept = parent[: random.integers(len(parent) + 1)]
            new = range(len(kept), len(kept) + random.integers(1, 5))
            chains[str(number)] = [*kept, *((str(number), p) for p in new)]
        rounds = [*{each for chain in chains.values() for each in chain}]
        random.shuffle(rounds)
        for session, position in rounds:
            place = "segment", str(session), int(position)
            places[f"{session} {position}"] = place
        again = ledger_lib.repeated_by_branches(places)
        # Each chain that no other goes on from is a segment's releases of its own.
        whole = [
            chain
            for chain in chains.values()
            if not any(
                other[: len(chain)] == chain and len(other) > len(chain)
                for other in chains.values()
            )
        ]
        assert len(rounds) + len(again) >= sum(map(len, whole))
        if len(whole) == 1:
            assert not again
        # What is written down is not missing any more.
        written = {**places, **dict.fromkeys(again)}
        assert not ledger_lib.repeated_by_branches(written)


def test_a_budget_counts_what_branches_repeat(path):
    budget = accounting.PrivacyBudget(6.0, 1e-5, "pld")
    first = charge("cyclic", 100, 10, 1.0)
    rest = charge("cyclic", 100, 10, event=dp_accounting.NoOpDpEvent())
    with PrivacyLedger(path) as ledger:
        for session, position in [("a", 0), ("a", 1), ("b", 1), ("c", 1), ("d", 1)]:
            place = {ledger_lib.PLACE: ["segment", session, position]}
            cost = rest if position else first
            try:
                ledger.record(position, cost, 10, budget=budget, **place)
            except accounting.BudgetExceededError:
                break
            assert ledger.contents().epsilon(1e-5, "pld") <= 6.0
    assert session == "b"  # Which costs the first round again.


def test_local_spending(path):
    exact = accounting.epsilon_of_mu_squared
    with PrivacyLedger(path) as ledger:
        for t, total in enumerate((0.5, 0.5, 1.0, 1.25)):
            ledger.record(t, None, 5, local=_spent(0.5, total))
    assert accounting.epsilon_from_ledger(path, 1e-5) == exact(1.25, 1e-5)
    # A run resumed at round 2 forgot what rounds 2 and 3 released.
    with _append(path, run=ledger.run) as ledger:
        ledger.record(2, None, 5, local=_spent(0.5, 0.75))
    assert read(path).local_epsilon(1e-5) == exact(0.75 + 0.5 + 0.5, 1e-5)


def test_the_total_of_a_line_is_of_all_before_it(path):
    exact, covers = accounting.epsilon_of_mu_squared, {ledger_lib.COVERS_ALL: True}
    with PrivacyLedger(path) as ledger:
        for t, total in enumerate((0.5, 0.5, 1.0)):
            ledger.record(t, None, 5, local=_spent(0.5, total))
        ledger.record(1, None, 5, local=_spent(0.5, 1.5), **covers)
        assert read(path).local_epsilon(1e-5) == exact(1.5, 1e-5)
        ledger.record(2, None, 5, local=_spent(0.5, 0.25))
    # One that does not say so may know of nothing.
    assert read(path).local_epsilon(1e-5) == exact(1.5 + 0.5, 1e-5)


def test_local_spending_of_runs_adds_up(path):
    with PrivacyLedger(path) as first:
        for t in range(10):
            first.record(t, charge(), 5, local=_spent(0.5, 0.5 * (t + 1)))
    # The same rounds again: of the same run they would be resumed ones.
    with _append(path) as second:
        for t in range(10, 20):
            second.record(t, charge(), 5, local=_spent(0.5, 0.5 * (t + 1)))
    contents = read(path)
    runs = [entry.run for entry in contents.entries]
    assert runs == [first.run] * 10 + [second.run] * 10
    assert first.run != second.run
    expected = accounting.epsilon_of_mu_squared(5.0 + 10.0, 1e-5)
    assert contents.local_epsilon(1e-5) == expected


def test_a_guarantee_that_one_round_lacks_is_none(path):
    with PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 5, local=_spent(0.5, 0.5))
        ledger.record(1, charge(), 5)
        assert read(path).local_epsilon(1e-5) == math.inf
        ledger.record(2, None, 5, local=_spent(0.5, 0.5))
    assert accounting.epsilon_from_ledger(path, 1e-5) == math.inf
    path.unlink()
    # A release without noise may cost everything.
    with PrivacyLedger(path) as ledger:
        ledger.record(0, charge(z=0.0), 5, local=_spent(math.inf, math.inf))
        ledger.record(1, None, 5, local=_spent(math.inf, math.inf))
    assert read(path).local_epsilon(1e-5) == math.inf


def test_another_format_is_refused_and_left_alone(path):
    name = "tfdp_fl privacy ledger 6"
    PrivacyLedger(path).close()
    body = {**json.loads(path.read_bytes()), "format": name}
    del body["hash"]
    data = ledger_lib.line_after(body.pop("previous"), body)[0] + b"\n"
    path.write_bytes(data)
    message = f"{name}.*which version {tfdp_fl.__version__}"
    for use in (read, _append):
        with pytest.raises(accounting.LedgerError, match=message):
            use(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    "change, number",
    [
        (lambda lines: lines[:3] + lines[4:], 4),  # Removed.
        (lambda lines: lines[1:], 1),
        (lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]], 3),  # Moved.
        (lambda lines: lines[:3] + lines[2:], 4),  # Twice.
        (lambda lines: [each.replace(b":1.0", b":9.0") for each in lines], 2),
        (lambda lines: [lines[0].replace(b"client", b"cohort"), *lines[1:]], 1),
        # JSON nests as deep as Python recurses.
        (lambda lines: [*lines, b"[" * 100_000 + b"\n"], 7),
    ],
)
def test_lines_that_were_changed(path, change, number):
    _write(path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))
    for use in (read, _append):
        with pytest.raises(accounting.LedgerTamperedError, match=f"Line {number} of"):
            use(path)


def test_any_changed_byte_is_found(path):
    _write(path, 3)
    data = bytearray(path.read_bytes())
    generator = random.Random(0)
    # The last newline is left out: without it the line is whole still.
    for position in generator.sample(range(len(data) - 1), 300):
        changed = data.copy()
        changed[position] ^= generator.randrange(1, 256)
        path.write_bytes(changed)
        with pytest.raises(accounting.LedgerTamperedError):
            read(path)


def test_lines_cut_off_at_the_end_need_a_head_from_elsewhere(path):
    head = _write(path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert len(read(path).entries) == 4
    with pytest.raises(accounting.LedgerTamperedError, match=head):
        read(path, expected_head=head)
    # A ledger that has grown since still contains the head.
    earlier = read(path).head
    path.write_bytes(b"".join(lines))
    read(path, expected_head=earlier)
    for wrong in (3, b"x", [earlier]):  # A mistake, and nobody tampered.
        with pytest.raises(TypeError, match=r"^expected_head must be a str"):
            read(path, expected_head=wrong)


def test_a_file_cut_anywhere_keeps_its_whole_lines(path):
    _write(path, 3)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    sizes = {*range(0, len(data) + 1, 7)}
    sizes.update(end + shift for end in ends for shift in (-2, -1, 0))
    cuts = [(size, data[:size]) for size in sorted(sizes)]
    # What a file system may leave after a power cut.
    cuts.append((len(data), data + b"\0" * 300))
    for size, left in cuts:
        path.write_bytes(left)
        contents = read(path)
        # A line that lacks only its newline is whole, and is charged.
        whole = max(0, sum(size >= end - 1 for end in ends) - 1)
        assert len(contents.entries) == whole
        at_an_end = any(len(left) in (end, end - 1) for end in ends)
        assert contents.truncated != at_an_end
        # To go on with it repairs it.
        with _append(path) as ledger:
            assert ledger.rounds == whole
            ledger.record(whole, charge(), 7)
        contents = read(path)
        assert (len(contents.entries), contents.truncated) == (whole + 1, False)


def test_no_bit_of_the_last_newline_undoes_a_round(path):
    _write(path, 3)
    data = path.read_bytes()
    for rest in (*(bytes([10 ^ 1 << bit]) for bit in range(8)), b"}", b"\0" * 9):
        path.write_bytes(data[:-1] + rest)
        assert len(read(path).entries) == 3
        with _append(path) as ledger:
            assert ledger.rounds == 3
        assert path.read_bytes() == data


def test_kill_9_at_random_moments(path):
    generator = random.Random(1)
    released_in_all = 0
    for number in range(15):
        reader, writer = os.pipe()

        def train(writer=writer):
            ledger = _append(path)
            for t in range(ledger.rounds, 10**9):
                ledger.record(t, charge(), 100)
                os.write(writer, b".")  # The result is seen.

        child = _forked(train)
        os.close(writer)
        if number % 2:  # Also where the machine is busy, some get so far.
            released_in_all += len(os.read(reader, 1))
        time.sleep(generator.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        released_in_all += len(os.read(reader, 1 << 16))
        os.close(reader)
        if path.exists():
            assert len(read(path).entries) >= released_in_all
    assert released_in_all > 0


def _refused(ledger, error, message):
    with pytest.raises(error, match=message):
        ledger.record(1, charge(), 5)
    assert ledger.rounds == 1


def test_deleted_moved_replaced_and_put_back(path, open_ledger):
    elsewhere = path.with_name("elsewhere.jsonl")
    path.rename(elsewhere)
    before = elsewhere.read_bytes()
    _refused(open_ledger, accounting.LedgerMovedError, "was deleted, moved or")
    assert not path.exists()
    path.write_bytes(before)  # A copy is another file.
    _refused(open_ledger, accounting.LedgerMovedError, "replaced")
    assert elsewhere.read_bytes() == before
    elsewhere.replace(path)
    open_ledger.record(1, charge(), 5)
    assert len(read(path).entries) == 2


@pytest.mark.parametrize(
    "change", [lambda data: data + b"one line more\n", lambda data: data[:-10]]
)
def test_written_by_something_else_or_cut_short(path, open_ledger, change):
    changed = change(path.read_bytes())
    with path.open("r+b") as file:
        file.write(changed)
        file.truncate()
    _refused(open_ledger, accounting.LedgerTamperedError, "something else changed")


def test_a_fork_cannot_write_and_does_not_unlock(path, open_ledger):
    said = path.with_name("said")

    def write():
        try:
            open_ledger.record(1, charge(z=2.0), 5)
        except accounting.LedgerForkedError as error:
            said.write_text(str(error))
        open_ledger.close()

    os.waitpid(_forked(write), 0)
    assert f"opened by process {os.getpid()}" in said.read_text()
    with pytest.raises(accounting.LedgerInUseError):
        _append(path)
    open_ledger.record(1, charge(), 5)
    assert len(read(path).entries) == 2
    # One that lives on does not hold the lock.
    child = _forked(lambda: time.sleep(60))
    try:
        open_ledger.close()
        _append(path).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_two_runs_on_one_ledger(path, open_ledger):
    before = path.read_bytes()
    with pytest.raises(accounting.LedgerInUseError, match="Another run"):
        _append(path)
    assert path.read_bytes() == before
    read(path)  # Reading needs no lock.
    open_ledger.record(1, charge(), 5)
    open_ledger.close()
    with _append(path) as other:
        other.record(0, charge(), 5)
    with pytest.raises(accounting.LedgerError, match="closed"):
        open_ledger.record(2, charge(), 5)
    assert len(read(path).entries) == 3
    # One that is closed is read anew.
    assert open_ledger.contents().entries == other.entries


def test_the_process_may_change_its_folder(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with PrivacyLedger("relative.jsonl") as ledger:
        monkeypatch.chdir("/")
        ledger.record(0, charge(), 5)
        assert len(ledger.contents().entries) == 1
    assert path.with_name("relative.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "local, message",
    [
        (_spent(-1.0, 1.0), "mu_squared .* got -1"),
        (_spent(math.nan, 1.0), "mu_squared .*nan"),
        (_spent(1.0, math.nan), "max_mu_s.*nan"),
        (_spent(1.0, -0.5), "max_mu_s.*-0.5"),
        (_spent(math.inf, math.inf), "finite in a round with noise"),
    ],
)
def test_spending_that_cannot_be(path, open_ledger, local, message):
    before = path.read_bytes()
    with pytest.raises(accounting.LedgerEntryError, match=message):
        open_ledger.record(1, charge(), 5, local=local)
    assert path.read_bytes() == before
    # Nor does a reader believe it.
    with mock.patch.object(ledger_lib, "check_local", lambda local, charge: local):
        open_ledger.record(1, charge(), 5, local=local)
    with pytest.raises(accounting.LedgerTamperedError, match=message):
        read(path)


@pytest.mark.parametrize(
    "name, code",
    [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("fsync", errno.EIO)],
)
def test_a_full_disk_or_a_failed_sync_is_no_record(path, open_ledger, name, code):
    before, pwrite = path.read_bytes(), os.pwrite
    failure = OSError(code, os.strerror(code))

    def half(descriptor, data, offset):
        pwrite(descriptor, data[: len(data) // 2], offset)
        raise failure

    failing = {"pwrite": half, "fsync": mock.Mock(side_effect=[failure, None])}[name]
    with mock.patch.object(os, name, failing):
        message = f"{failure.strerror}.*must not be released"
        _refused(open_ledger, accounting.LedgerWriteError, message)
    assert path.read_bytes() == before
    open_ledger.record(1, charge(), 5)  # There is room again.
    assert len(read(path).entries) == 2


_ONE = {"type": "GaussianDpEvent", "noise_multiplier": 1.0}
_DEEP = _ONE
for _ in range(20):
    _DEEP = {"type": "SelfComposedDpEvent", "count": 1, "event": _DEEP}


@pytest.mark.parametrize(
    "event",
    [
        {
            "type": "DiscreteLaplaceDpEvent",
            "noise_parameter": 1e-9,
            "sensitivity": 9**9,
        },
        {
            **{"type": "MixtureOfGaussiansDpEvent", "standard_deviation": 1e-9},
            **{"sensitivities": [1.0], "sampling_probs": [1.0]},
        },
        {"type": "BestOfTrialsDpEvent", "events": [_ONE] * 999, "mean": 2, "shape": 1},
        {"type": "BestOfTrialsDpEvent", "events": [_ONE], "mean": 1e30, "shape": 1},
        {"type": "GaussianDpEvent", "noise_multiplier": "1"},
        {"type": "GaussianDpEvent", "noise_multiplier": True},
        {"type": "SelfComposedDpEvent", "count": 2**70, "event": _ONE},
        {"type": "LaplaceDpEvent", "noise_multiplier": 1e-12},
        {"type": "ComposedDpEvent", "events": [_ONE] * 20_000},
        _DEEP,
        [],
    ],
)
def test_an_event_that_nobody_can_compute_is_refused_by_its_line(path, event):
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 5)
        body = json.loads(path.read_bytes().splitlines()[-1])
        head, _ = body.pop("hash"), body.pop("previous")
    body["charge"]["event"] = event
    line, _ = ledger_lib.line_after(head, body)
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=r"Line 3 of the ledger .* cannot be read"):
        read(path)


@pytest.mark.parametrize(
    "field, value", [("round", "1"), ("cohort_size", 2.5), ("run", 3), ("time", None)]
)
def test_a_field_of_another_type_is_refused_by_its_line(path, field, value):
    with accounting.PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 5)
        body = json.loads(path.read_bytes().splitlines()[-1])
        head, _ = body.pop("hash"), body.pop("previous")
    line, _ = ledger_lib.line_after(head, {**body, field: value})
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(ValueError, match=f"Line 3 .* {field} must not be"):
        read(path)


def test_orders_without_a_name_are_never_one_pass(path):
    place = {"pass_index": 0, "sampling": "shuffled", "n": 100, "m": 10}
    for run in range(4):  # Each has an order of its own, and a client in one cohort.
        with _append(path) as ledger:
            ledger.record(0, charge(**place, pass_offset=10 * run), 10)
    exact = accounting.epsilon_of_mu_squared(4.0, 1e-5)
    assert accounting.epsilon_from_ledger(path, 1e-5, "pld") == exact


def test_what_a_round_cost_a_client_it_has_spent(path):
    with PrivacyLedger(path) as ledger:
        ledger.record(0, None, 5, local=_spent(4.0, 0.0))
    exact = accounting.epsilon_of_mu_squared(4.0, 1e-5)
    assert accounting.epsilon_from_ledger(path, 1e-5) == exact


def test_a_budget_counts_a_line_without_a_central_charge(path):
    budget = accounting.PrivacyBudget(8.0, 1e-5)
    with PrivacyLedger(path) as ledger:
        ledger.record(0, charge(), 5, budget=budget)
        ledger.record(1, None, 5, local=_spent(9.0, 9.0))
        with pytest.raises(accounting.BudgetExceededError, match="epsilon to inf"):
            ledger.record(2, charge(), 5, budget=budget)
    with pytest.raises(ValueError, match="1 of 2 rounds without"):
        read(path).accountant()
