"""The device that trains a cohort, and its capabilities.

It is the device that holds the user's model. On a CPU there is one thread per core, on
any other device a single thread. XLA compiles only if the user asks for it.
"""

from __future__ import annotations

import hashlib
import math
import os
import pathlib
import platform
import re
import subprocess

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.terms import Json

# A client's weights, the gradients, the update, and what it started from.
_COPIES_OF_A_CLIENT = 4
# The fraction of a GPU's memory that a batch of clients may take, as estimated.
_SHARE_OF_DEVICE = 0.5


def device_of(model: tf.keras.Model) -> str:
    """Returns the name of the device that holds a model's weights.

    For a model without weights, it is TensorFlow's default device.
    """
    variables = keras_versions.tf_variables(model.weights)
    return str(variables[0].device if variables else tf.zeros([]).device)


def is_cpu(device: str) -> bool:
    """Returns True if this is the name of a CPU device."""
    return tf.DeviceSpec.from_string(device).device_type == "CPU"


def default_parallel_clients(device: str) -> int:
    """Returns how many clients to train at once: one per core on a CPU.

    Two clients at the same time use two cores better than one client whose small
    operations are split.
    """
    if not is_cpu(device):
        return 1
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # Not on every platform.
        return max(1, os.cpu_count() or 1)


def threads_per_call(device: str, calls: int) -> int | None:
    """Returns how many threads an operation may use; None if TensorFlow decides.

    Args:
      device: The device.
      calls: How many calls of programs there are at once. A single one gets all.
    """
    if calls == 1 or not is_cpu(device):
        return None
    return max(1, default_parallel_clients(device) // calls)


def clients_per_call(
    device: str, model: tf.keras.Model, elements: int, batch_size: int
) -> int | None:
    """Returns how many clients to train as one batched program; None on a CPU.

    A client's memory is estimated: copies of its weights, and for each row of a batch
    the layers' outputs and their gradients. If the estimate was too low and memory
    runs out, `CohortEngine` halves the number of clients.

    Args:
      device: The device that trains them.
      model: A built Keras model.
      elements: D, the size of a client's update.
      batch_size: The usual batch size.
    """
    if is_cpu(device):
        return None
    outputs = sum(
        math.prod(size or 1 for size in tensor.shape[1:])
        for layer in keras_versions.layers_of(model)
        for tensor in tf.nest.flatten(getattr(layer, "output", None))
        if tensor is not None
    )
    bytes_per_client = 4.0 * (
        2 * _COPIES_OF_A_CLIENT * elements + 4 * batch_size * outputs
    )
    return max(1, int(_SHARE_OF_DEVICE * _device_bytes(device) / bytes_per_client))


def _device_bytes(device: str) -> float:
    """Returns a GPU's memory minus what TensorFlow already uses; 4 GiB if unknown."""
    name = tf.DeviceSpec.from_string(device)
    index = name.device_index or 0
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True)
        total = 2.0**20 * float(answer.stdout.split()[index])
        memory = tf.config.experimental.get_memory_info(f"{name.device_type}:{index}")
        return total - memory["current"]
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return 4 * 2.0**30


# Environment variables that influence how libraries compute.
_COMPUTE_VARIABLES = re.compile(
    "(ONEDNN_|DNNL_|TF_ENABLE_|TF_SET_|TF_XLA_|TF_CU|XLA_|OMP_|MKL_|NVIDIA_TF32_).*"
)


def collect_facts(threads: int) -> Json:
    """Returns the facts about a machine that decide how its results are rounded.

    Libraries choose kernels by the processor, its caches and the environment. A hash
    of a few results covers whatever else may matter.

    Args:
      threads: The number of threads that compute.
    """
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else platform.processor()
    processor = re.findall(r"^(model name|flags|cache size)\s*:\s*(.*)$", text, re.M)
    environment = {
        k: v for k, v in os.environ.items() if _COMPUTE_VARIABLES.fullmatch(k)
    }
    return {
        "float32_products": products_are_float32(),
        "threads": threads,
        "tensorflow": tf.version.GIT_VERSION,
        "processor": sorted(set(processor)) or text,
        "devices": [
            tf.config.experimental.get_device_details(device).get("device_name")
            for device in tf.config.list_physical_devices("GPU")
        ],
        "environment": environment,
        "results": _hash_results(threads),
    }


def _hash_results(threads: int) -> str:
    """Returns a hash of the results of a few operations on fixed numbers."""
    rng = np.random.default_rng(0)
    images, kernel = rng.normal(size=(4, 9, 9, 5)), rng.normal(size=(3, 3, 5, 7))
    rows, columns = rng.normal(size=(70, 130)), rng.normal(size=(130, 50))
    with tf.Graph().as_default():
        x, y = (tf.constant(part, tf.float32) for part in (rows, columns))
        results = [
            x @ y,
            tf.transpose(x) @ x,
            tf.nn.conv2d(images.astype("f"), kernel.astype("f"), 1, "SAME"),
            *(function(x) for function in (tf.tanh, tf.exp, tf.sigmoid, tf.nn.softmax)),
            tf.reduce_sum(x),
        ]
        config = tf.compat.v1.ConfigProto(
            intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads
        )
        with tf.compat.v1.Session(config=config) as session:
            arrays = session.run(results)
    return hashlib.sha256(b"".join(part.tobytes() for part in arrays)).hexdigest()


def products_are_float32() -> bool:
    """Returns True if TensorFlow computes float32 products in full float32.

    Bounds on rounding errors rely on it. oneDNN, GPUs and TensorFlow's automatic mixed
    precision can be configured to round the factors to fewer bits.
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


def numeric_options() -> tuple[object, ...]:
    """Returns the options that change the bits of results, to be compared.

    TensorFlow applies them when it calls a function, also one traced before.
    """
    return products_are_float32(), tf.config.optimizer.get_experimental_options()
