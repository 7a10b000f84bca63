"""Where a cohort is trained: on the device that holds the user's model.

What was measured on CPUs is chosen on CPUs only: a replica for each core, and
XLA for small dense models. On any other device there is one replica, and XLA
where the user asks for it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context

from tfdp_fl import keras_versions

_Method = TypeVar("_Method", bound=Callable[..., Any])


def home_of(model: tf.keras.Model) -> str:
    """Returns the name of the device that holds a model's weights.

    TensorFlow's own choice for a model that has none.
    """
    variables = keras_versions.tf_variables(model.weights)
    return str(variables[0].device if variables else tf.zeros([]).device)


def is_cpu(device: str) -> bool:
    """Returns True if that is a device's name, and the device a CPU."""
    return tf.DeviceSpec.from_string(device).device_type == "CPU"


def are_all_cpus() -> bool:
    """Returns True if TensorFlow has no device but CPUs."""
    return all(each.device_type == "CPU" for each in tf.config.list_logical_devices())


def enter(device: str) -> None:
    """Has this thread, which is a pool's, compute on a device for good.

    `tf.device` holds for the thread that enters it, not for those it starts.
    """
    tf.device(device).__enter__()


def at_home(method: _Method) -> _Method:
    """Has a method of an object with a `device` compute there."""

    @functools.wraps(method)
    def there(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context.context().device_name == self.device:  # In such a method.
            return method(self, *args, **kwargs)
        with tf.device(self.device):
            return method(self, *args, **kwargs)

    return there  # type: ignore[return-value]


def default_num_replicas(device: str) -> int:
    """Returns how many clients to train at once.

    On CPUs one for each core, where every TensorFlow operation runs on a
    single thread
    (`tf.config.threading.set_intra_op_parallelism_threads(1)`, which the
    scripts set before TensorFlow starts) or has the choice: two clients side
    by side keep two cores busier than one client whose small operations are
    split.

    Args:
      device: Where they are trained.
    """
    if not is_cpu(device):
        return 1
    try:
        return max(1, len(os.sched_getaffinity(0)))
    except AttributeError:  # Not on every platform.
        return max(1, os.cpu_count() or 1)
