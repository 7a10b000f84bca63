import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def _seeded():
    """Models of a test have the same first weights in every run."""
    tf.keras.utils.set_random_seed(1)
