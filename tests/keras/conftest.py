import pytest


@pytest.fixture(autouse=True)
def _wide_cells(wide_cells):
    """Statements take seconds each, if cells are narrow."""
