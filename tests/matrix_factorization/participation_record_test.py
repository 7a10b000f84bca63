import copy
import itertools
import json

import numpy as np
import pytest

from tests.mechanisms import references
from tfdp_fl import matrix_factorization
from tfdp_fl.matrix_factorization import ParticipationPattern, ParticipationRecord


def _record(rounds=8, gap=3, most=None):
    return ParticipationRecord(
        ParticipationPattern(rounds=rounds, min_separation=gap, max_participations=most)
    )


@pytest.mark.parametrize("name", ["rounds", "min_separation", "max_participations"])
def test_a_client_has_room_for_so_many_rounds(name):
    for gap, most, expected in ((3, None, 4), (3, 2, 2), (3, 9, 4), (100, None, 1)):
        made = ParticipationPattern(
            rounds=10, min_separation=gap, max_participations=most
        )
        assert made.max_participations == expected
    for value in (0, 1.5, "2"):
        with pytest.raises((ValueError, TypeError), match=name):
            ParticipationPattern(**{"rounds": 8, name: value})


def test_nobody_comes_too_soon_or_too_often():
    record = _record(most=2)
    record.add(["a", "b"])
    assert record.eligible(["a", "b", "c", "c"]) == ["c"]
    record.add(["c"])
    record.add([])
    assert record.eligible("abc") == ["a", "b"]
    record.add(["a"])
    for _ in range(3):
        record.add([])
    assert record.eligible("abc") == ["b", "c"]
    with pytest.raises(ValueError, match="max_participations=2"):
        record.add(["a"])
    record.add([])
    assert record.released == 8
    # A new segment begins with the next round.
    assert record.eligible("abc") == ["a", "b", "c"]
    record.add(["a"])
    assert record.eligible("abc") == ["b", "c"]


def test_a_restarted_program_knows_who_took_part():
    record, restarted = _record(most=2), _record(most=2)
    record.add(["a", 7])
    record.add(["b"])
    restarted.restore(json.loads(json.dumps(record.state())))
    assert vars(restarted) == vars(record)
    assert restarted.eligible(["a", 7, "b", "c"]) == ["c"]
    restarted.add(["c"])
    assert record.eligible(["c"]) == ["c"]  # It shares nothing.
    with pytest.raises(ValueError, match="state must have the pattern"):
        _record(gap=2).restore(record.state())


def test_what_is_refused_notes_nothing():
    record = _record()
    record.add([1, 2])
    before = copy.deepcopy(vars(record))
    for wrong in ([2], [3, 3], [1]):
        with pytest.raises(ValueError, match="clients"):
            record.add(wrong)
    for wrong in ([None], [True], [1.5], [("a",)]):
        with pytest.raises(TypeError, match="clients"):
            record.add(wrong)
    assert vars(record) == before


def test_whatever_it_lets_through_is_charged():
    # All ways that one client can come in 6 rounds, against the charges.
    where = ParticipationPattern(rounds=6, min_separation=2, max_participations=2)
    strategy = matrix_factorization.BandedToeplitz(coefficients=(1.0, 0.7, 0.4))
    generator = strategy.generator(where)
    dense = references.dense(generator.coefficients, 6)
    allowed = 0
    for pattern in itertools.product([0, 1], repeat=6):
        record = ParticipationRecord(where)
        try:
            for there in pattern:
                record.add(["a"] * there)
        except ValueError:
            continue
        allowed += 1
        moved = np.linalg.norm(dense @ pattern)
        assert moved <= generator.sensitivity * (1 + 1e-12)
    # None, six of one round, ten of two rounds that do not touch.
    assert allowed == 17
