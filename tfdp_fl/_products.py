"""What a product of float32 numbers is, on this machine and now."""

from __future__ import annotations

import os

from tfdp_fl._on_use import tf


def are_float32() -> bool:
    """Returns True if TensorFlow computes a float32 product as one.

    Bounds of rounding rest on it. oneDNN, GPUs and TensorFlow's automatic mixed
    precision can be told to round the factors to fewer bits.
    """
    modes = ("ONEDNN_DEFAULT_FPMATH_MODE", "TF_SET_ONEDNN_FPMATH_MODE")
    if any(os.environ.get(name, "STRICT") not in ("", "STRICT") for name in modes):
        return False
    options = tf.config.optimizer.get_experimental_options()
    if any(options[name] for name in options if "mixed_precision" in name):
        return False
    return not tf.config.list_logical_devices("GPU") or not (
        tf.config.experimental.tensor_float_32_execution_enabled()
    )


def are_float32_in_processes_started_here() -> bool:
    """Returns True if that holds in other processes of this machine, too.

    They have this one's environment, and not what it told TensorFlow: on GPUs
    TensorFloat-32 is on unless a process turns it off.
    """
    return are_float32() and not tf.config.list_physical_devices("GPU")
