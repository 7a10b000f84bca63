import pytest

from tfdp_fl.correlated_noise import participation


@pytest.mark.parametrize(
    ("rounds", "gap", "most", "expected"),
    [
        (10, 3, None, 4),
        (10, 3, 2, 2),
        (10, 3, 9, 4),
        (9, 3, None, 3),
        (5, 1, None, 5),
        (5, 100, None, 1),
    ],
)
def test_a_client_has_room_for_so_many_rounds(rounds, gap, most, expected):
    made = participation.Participation(
        rounds=rounds, min_separation=gap, max_participations=most
    )
    assert made.max_participations == expected


@pytest.mark.parametrize("name", ["rounds", "min_separation", "max_participations"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_what_is_no_count_is_refused(name, value):
    arguments = {"rounds": 8, name: value}
    with pytest.raises((ValueError, TypeError), match=name):
        participation.Participation(**arguments)
