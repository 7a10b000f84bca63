"""What all packages share: checks of arguments, schedules, files, a quiet start."""

import importlib.util
import math
import os
import pathlib
import sys

import numpy as np
import pytest

from tfdp_fl import _files, _progress, _validate, schedules


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (_validate.positive, (1e-300, 1, 2.5), (0, -1e-300, math.inf)),
        (_validate.non_negative, (0, 0.0, 3), (-1e-300, -1, math.inf)),
        (_validate.finite, (0, -5.5, 1e308), (math.inf, -math.inf)),
        (_validate.inside_unit_interval, (1e-300, 0.5), (0, 1, -0.1, 1.1)),
        (_validate.probability, (0, 1, 0.5), (-1e-9, 1.0001)),
        (_validate.positive_integer, (1, 2**63 - 1, np.int64(3)), (0, -1, 2**63)),
        (_validate.non_negative_integer, (0, 2**127, np.uint8(3)), (-1,)),
    ],
)
def test_numbers(check, good, bad):
    whole = check.__name__.endswith("integer")
    for value in good:
        result = check(rounds=value)
        assert type(result) is (int if whole else float)
        assert result == value
    for value in bad if whole else (*bad, math.nan, -(10**400)):
        with pytest.raises(ValueError, match=r"^rounds must be .* got"):
            check(rounds=value)
    for value in ("1", None, True, 1.0 if whole else [1]):
        with pytest.raises(TypeError, match=r"^rounds must be .* got"):
            check(rounds=value)


def _checked(schedule):
    return schedules.check_schedule(schedule, _validate.positive, "clients_per_round")


def test_the_value_of_a_round():
    numbers = [1, 2, 5]
    checked = _checked(numbers)
    numbers.append(-1)  # It cannot change afterwards.
    assert checked == (1.0, 2.0, 5.0)
    for schedule in (5, np.float32(5), np.int64(5), checked, lambda t: 2 * t + 1):
        assert schedules.value_at(_checked(schedule), 2, "m") == 5


_DECREASING = np.array([1.0, -2.0])


@pytest.mark.parametrize(
    "schedule, error",
    [
        *((each, ValueError) for each in (0, [1, 0], [], lambda t: 0.0, _DECREASING)),
        *((each, TypeError) for each in ("many", None, True, ["1"], lambda t: "1")),
    ],
)
def test_schedules_that_are_not_allowed(schedule, error):
    with pytest.raises(error, match="clients_per_round"):
        _checked(schedule)


def test_a_callable_is_asked_once_for_each_round_and_gives_a_number():
    asked = []

    def impure(t):
        asked.append(t)
        return float(len(asked))

    schedule = schedules.fix(impure)
    assert [schedule(t) for t in (0, 4, 0, 4)] == [1, 2, 1, 2]
    assert asked == [0, 4]
    assert schedules.fix(schedule) is schedule
    assert schedules.value_at(schedule, 4, "m") == 2.0
    for value in (None, "3", True, [1.0]):
        with pytest.raises(TypeError, match="m must give a number"):
            schedules.value_at(lambda t, value=value: value, 0, "m")
    with pytest.raises(ValueError, match=r"m is a sequence of 2.*round 2"):
        schedules.value_at([1.0, 2.0], 2, "m")


@pytest.mark.parametrize("sync", [False, True])
def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path, sync):
    path = tmp_path / "file.txt"
    _files.write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), _files.replace_file(path, sync=sync) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    with _files.replace_file(path, sync=sync) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_text() == "old"
        file.write(b"w")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_a_start_is_quiet_unless_it_fails(capfd):
    with _progress.quiet_start():
        os.write(2, b"oneDNN is on\n")
    assert capfd.readouterr().err == ""
    with pytest.raises(ImportError), _progress.quiet_start():
        os.write(2, b"oneDNN is on\n")
        raise ImportError("no cuDNN")
    assert "oneDNN is on\n" in capfd.readouterr().err


def test_every_planted_fault_still_has_its_place():
    # Eleven had lost it, and proved nothing.
    path = pathlib.Path(__file__).parents[1] / "tools" / "mutants.py"
    spec = importlib.util.spec_from_file_location("mutants", path)
    mutants = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutants
    try:
        spec.loader.exec_module(mutants)
    finally:
        del sys.modules[spec.name]
    faults = mutants.faults([])
    assert len(faults) > 300
    for fault in faults:
        text = (path.parents[1] / fault.file).read_text("utf-8")
        assert (fault.name, text.count(fault.old)) == (fault.name, 1)
