"""10 000 mutations of what is read: documented errors, and no wrong data.

And arguments that no one should give, two at a time, to whatever is public
(`tests/public_api/`): documented errors, in no time, with a message.
"""

import copy
import logging
import os
import random
import resource
import signal
import struct
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdp_fl
from tests.accounting.charges import charge
from tests.flower import flower_messages as fm
from tests.public_api import calls_test as calls
from tfdp_fl import accounting, secure_aggregation
from tfdp_fl.keras import checkpoint

_MUTATIONS = int(os.environ.get("TFDP_FL_MUTATIONS", "10000"))
_CALLS = int(os.environ.get("TFDP_FL_CALLS", "300"))
_MOST_BYTES = 6 * 10**9
_INTERESTING = (
    *(b"\0", b"\xff", b"\n", b'"', b"{}", b"[]", b"null", b"NaN", b"Infinity"),
    *(b"-1", b"1e999", b"9" * 30, b"\x80\x04K\x01.", b"\xf0\x9f\x92\xa9", b"[" * 2000),
)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Returns other bytes: one to three changes of any kind."""
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice([1, 2, 8, 100, 5000]))
        before, within, after = data[:place], data[place:end], data[end:]
        first = bytes(byte ^ 1 << rng.randrange(8) for byte in within[:1])
        other, noise = rng.choice(_INTERESTING), rng.randbytes(end - place)
        cut = [before, before + after, before + other + within + after]
        swaps = (first + within[1:], other, within + within, noise)
        data = rng.choice([*cut, *(before + swap + after for swap in swaps)])
    return data


def test_of_ledgers(tmp_path):
    rng = random.Random(1)
    path = tmp_path / "ledger.jsonl"
    with accounting.PrivacyLedger(path) as ledger:
        for number in range(8):
            ledger.record(number, charge(), 10)
    data = path.read_bytes()
    whole = accounting.PrivacyLedger.read(path).entries
    for _ in range(_MUTATIONS):
        path.write_bytes(mutated(data, rng))
        try:
            found = accounting.PrivacyLedger.read(path)
        except accounting.LedgerError:
            continue
        # Cut short, perhaps; never other than it was.
        assert found.entries == whole[: len(found.entries)]


@pytest.mark.filterwarnings("ignore")
def test_of_checkpoints(tmp_path):
    rng = random.Random(2)
    directory = checkpoint.CheckpointDirectory(tmp_path)
    state = {"seed": 7, "weights": [np.arange(12.0).reshape(3, 4), np.float32(0.5)]}
    directory.write(3, state, 1)
    data = directory.file(3).read_bytes()
    for _ in range(_MUTATIONS):
        directory.file(3).write_bytes(mutated(data, rng))
        try:
            found = directory.newest()
        except checkpoint.CheckpointError:
            continue
        assert found.keys() == state.keys()
        tf.nest.map_structure(np.testing.assert_array_equal, found, state)


def test_of_messages_of_secure_aggregation():
    rng = random.Random(3)
    names, update = ("ann", "bob", "cat"), [np.ones([3, 2], np.float32), np.ones([2])]
    protocol = secure_aggregation.AdditiveSecretSharing()
    options = {"members": names, "session": "s"}
    for _ in range(_MUTATIONS):
        made = {
            name: secure_aggregation.Member(protocol, name, update, **options)
            for name in names
        }
        message = rng.choice([m for each in made.values() for m in each.begin(0.0)])
        data = mutated(message.to_bytes(), rng)
        try:
            bad = secure_aggregation.Message.from_bytes(data)
            made[message.recipient].receive(bad, 0.0)
        except secure_aggregation.RejectedMessageError:
            # It changed nothing: the right one is still taken.
            made[message.recipient].receive(message, 0.0)


_STRANGE = (
    *(None, -1, 2**70, float("nan"), float("inf"), "x", b"\xff", [], {}),
    *((3,), (-1,), (2**40,), True, object()),
)


def test_of_replies_of_flower():
    logging.getLogger("tfdp_fl.flower").setLevel(logging.CRITICAL)
    rng = random.Random(4)
    clip, m = 0.5, 3
    mechanism = tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=clip)
    record, strange = fm.model(np.zeros(m)), lambda: rng.choice(_STRANGE)

    def change(replies):
        (hostile,) = [r for r in replies if r.metadata.src_node_id == 0]
        array = hostile.content["arrays"]["0"]
        kind = rng.randrange(6)
        if kind < 3:
            array.__dict__["data"] = mutated(array.data, rng)
        elif kind == 3:
            name = rng.choice(["dtype", "shape", "stype", "data"])
            array.__dict__[name] = strange()
        elif kind == 4:
            name = rng.choice(["arrays", "metrics"])
            dict.__setitem__(hostile.content, name, strange())
        else:
            metrics = hostile.content["metrics"]
            dict.__setitem__(metrics, rng.choice([*metrics, "new", 3]), strange())
        return replies

    rejected = 0
    for _ in range(_MUTATIONS):
        strategy = fm.private(mechanism, m)
        grid = fm.Grid({i: fm.adds([np.eye(m)[i]]) for i in range(m)}, change)
        with np.errstate(all="ignore"):
            got, _ = fm.a_round(strategy, grid, copy.deepcopy(record))
        moved = fm.arrays(got)[0]
        rejected += strategy.rejected_replies
        # The other two are as they were, and it moved at most S/m. (The noisy mean is
        # float32, so each of its three numbers is rounded by up to 2^-25 of itself.)
        others = np.array([0, clip / m, clip / m])
        rounding = 3 * 2**-25 * clip / m
        assert np.linalg.norm(moved - others) <= clip / m * (1 + 1e-9) + rounding
    assert rejected > _MUTATIONS / 4


# Tens of seconds, where a PLD has to be composed many thousand times.
_SLOW = {"accounting.max_rounds", "training.make_private"}
_VALUES = (
    *(*_STRANGE, False, 100, 10**4, 2**31, 2**63, -(2**63), 0.0, -0.0, 1e-320),
    *(1e308, 1e-10, 0.5, 1.0, 1e30, 0.5j, "", "é\0", "poisson", "fixed_size"),
    *("rdp", "pld", "blt:2", "client", b"", [0.5], [1.0, float("nan")], (3, 1.5)),
    *(np.array([]), np.float32(0.5), np.array([1.0, 2.0]), len, lambda t: 1.0),
    tf.constant(1.0),
)


def _value(rng: random.Random) -> Any:
    (number,) = struct.unpack("d", rng.randbytes(8))
    return rng.choice([number, rng.randint(-3, 5), *[rng.choice(_VALUES)] * 4])


class _TooLongError(BaseException):
    """A call that does not come back."""


def _alarm(*_):
    raise _TooLongError


def _is_large(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) >= 100


@pytest.fixture(name="limits")
def _limits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # Names of files are among what is given.
    # In seconds of a core, however busy the machine is.
    before = signal.signal(signal.SIGPROF, _alarm)
    # A MemoryError here, rather than other programs' end.
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, hard))
    yield
    signal.signal(signal.SIGPROF, before)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@pytest.mark.parametrize("room", calls.ROOMS)
@pytest.mark.filterwarnings("ignore")
def test_of_arguments(room, limits):
    rng = random.Random(5)
    for call in calls.calls(room):
        call()
        name = f"{room}.{getattr(call.function, '__name__', repr(call.function))}"
        slow: list[dict[str, Any]] = []
        for _ in range(_CALLS if call.arguments else 0):
            count = min(rng.randint(1, 2), len(call.arguments))
            chosen = rng.sample(sorted(call.arguments), count)
            strange = {each: _value(rng) for each in chosen}
            large = any(map(_is_large, strange.values()))
            if any(_is_large(strange.get(each)) for each in call.counts):
                continue
            signal.setitimer(signal.ITIMER_PROF, 10)
            try:
                call(**strange)
            except MemoryError:
                assert large
            except _TooLongError:
                # A number of rounds or clients that takes as long as it says, or
                # what composes PLDs of many rounds.
                assert large or name in _SLOW, strange
                slow.append(strange)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        print(f"{name}: {len(slow)} broken off: {slow[:5]}")
        assert len(slow) < 10
