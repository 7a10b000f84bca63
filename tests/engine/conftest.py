import pytest

from tests.keras import toy


@pytest.fixture(autouse=True)
def _seeded():
    """Models of a test have the same first weights in every run."""
    toy.seed(1)
