"""A Flower App for `tests/flower/runs_test.py`."""
