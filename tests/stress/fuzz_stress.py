"""10 000 mutations of what is read: documented errors, and no wrong data.

And arguments that no one should give, to whatever is public
(`tests/public_api/`): documented errors, in no time, with a message.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import resource
import signal
import threading
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

import tfdp_fl
from tests.accounting.charges import charge
from tests.flower import flower_messages as fm
from tests.public_api import calls
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
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(found) + 1)
        end = min(len(found), place + rng.choice([1, 2, 8, 100, 5000]))
        kind = rng.randrange(7)
        if kind == 0 and place < len(found):
            found[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[place:]
        elif kind == 2:
            del found[place:end]
        elif kind == 3:
            found[place:place] = rng.choice(_INTERESTING)
        elif kind == 4:
            found[place:end] = rng.choice(_INTERESTING)
        elif kind == 5:
            found[place:place] = found[place:end]
        else:
            found[place:end] = rng.randbytes(end - place)
    return bytes(found)


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
    directory.write(checkpoint.Checkpoint(round_index=3, state=state), 1)
    data = directory.file(3).read_bytes()
    for _ in range(_MUTATIONS):
        directory.file(3).write_bytes(mutated(data, rng))
        try:
            found = directory.newest()
        except checkpoint.CheckpointError:
            continue
        assert found.state.keys() == state.keys()
        tf.nest.map_structure(np.testing.assert_array_equal, found.state, state)


def test_of_messages_of_secure_aggregation():
    rng = random.Random(3)
    names = ("ann", "bob", "cat")
    update = [np.ones([3, 2], np.float32), np.ones([2])]
    protocol = secure_aggregation.AdditiveSecretSharing()
    for _ in range(_MUTATIONS):
        made = {
            name: secure_aggregation.Member(
                protocol, name, update, members=names, session="s"
            )
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


def test_of_replies_of_flower():
    logging.getLogger("tfdp_fl.flower").setLevel(logging.CRITICAL)
    rng = random.Random(4)
    clip, m = 0.5, 3
    updates = np.eye(m)
    record = fm.model(np.zeros(m))
    strange = (
        *(None, -1, 2**70, float("nan"), float("inf"), "x", b"\xff", [], {}),
        *((3,), (-1,), (2**40,), True, object()),
    )

    def change(replies):
        (hostile,) = [r for r in replies if r.metadata.src_node_id == 10]
        array = hostile.content["arrays"]["0"]
        kind = rng.randrange(6)
        if kind < 3:
            array.__dict__["data"] = mutated(array.data, rng)
        elif kind == 3:
            name = rng.choice(["dtype", "shape", "stype", "data"])
            array.__dict__[name] = rng.choice(strange)
        elif kind == 4:
            name = rng.choice(["arrays", "metrics"])
            dict.__setitem__(hostile.content, name, rng.choice(strange))
        else:
            metrics = hostile.content["metrics"]
            name = rng.choice([*metrics, "new", 3])
            dict.__setitem__(metrics, name, rng.choice(strange))
        return replies

    rejected = 0
    for _ in range(_MUTATIONS):
        strategy = tfdp_fl.flower.PrivateStrategy(
            fm.Strategy(m),
            tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=clip),
            num_clients=m,
            clients_per_round=m,
        )
        grid = fm.Grid({10 + i: fm.adds([u]) for i, u in enumerate(updates)}, change)
        with np.errstate(all="ignore"):
            got, _ = fm.a_round(strategy, grid, copy.deepcopy(record))
        moved = fm.arrays(got)[0]
        rejected += strategy.rejected_replies
        # The other two are as they were, and it moved at most S/m.
        others = np.array([0, clip / m, clip / m])
        assert np.linalg.norm(moved - others) <= clip / m * (1 + 1e-9)
    assert rejected > _MUTATIONS / 4


# Arguments that somebody may give.
_STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([100, 10**4, 2**31, 2**63, 2**70, -(2**63)]),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-320, 1e308, 1e-10, 0.5, 1.0, float("nan"), 1e30]),
    st.text(max_size=5),
    st.sampled_from(["poisson", "fixed_size", "rdp", "pld", "blt:2", "client"]),
    st.binary(max_size=4),
    st.lists(st.floats(), max_size=3),
    st.tuples(st.integers(0, 5), st.floats(0, 2)),
    st.complex_numbers(),
    st.builds(lambda: np.array([])),
    st.builds(lambda: np.float32(0.5)),
    st.builds(lambda: np.array([1.0, 2.0])),
    st.builds(object),
    st.builds(dict),
    st.just(len),
    st.just(lambda t: 1.0),
    st.builds(lambda: tf.constant(1.0)),
)


class _TooLongError(BaseException):
    """A call that does not come back."""


# Tens of seconds, where a PLD has to be composed many thousand times.
_SLOW = {"accounting.max_rounds", "training.make_private"}
_armed = threading.Event()


def _alarm(*_):
    # A signal may come late, in hypothesis's own code.
    if _armed.is_set():
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
    for call in calls.calls(room):
        call()
        if call.arguments:
            name = getattr(call.function, "__name__", repr(call.function))
            _check_call(f"{room}.{name}", call)


def _check_call(name, call):
    slow: list[dict[str, Any]] = []
    some = st.sampled_from(sorted(call.arguments))

    @hypothesis.settings(
        max_examples=_CALLS,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(data=st.data())
    def check(data):
        chosen = data.draw(st.lists(some, min_size=1, max_size=2, unique=True))
        strange = {each: data.draw(_STRANGE) for each in chosen}
        hypothesis.assume(not any(_is_large(strange.get(each)) for each in call.counts))
        signal.setitimer(signal.ITIMER_PROF, 10)
        _armed.set()
        try:
            call(**strange)
        except MemoryError:
            assert any(map(_is_large, strange.values()))
        except _TooLongError:
            # A number of rounds or clients that takes as long as it says, or what
            # composes PLDs of many rounds.
            assert any(map(_is_large, strange.values())) or name in _SLOW, strange
            slow.append(strange)
        finally:
            _armed.clear()
            signal.setitimer(signal.ITIMER_PROF, 0)

    check()
    print(f"{name}: {len(slow)} broken off: {slow[:5]}")
    assert len(slow) < 10
