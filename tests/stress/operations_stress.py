"""Each allowed operation, on what clients could make up: its bytes do not change.

Arguments are drawn at random: empty tensors, NaN, infinities, negative and large
numbers. Each call that succeeds is made again, over blocks of memory in which another
number was left: an operation that returns memory that it did not write, or adds up in
whatever order its threads come, gives other bytes. (An operation that ends the process,
as some do for strides and windows that no model has, is printed and passed over.)
"""

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdp_fl.engine import allowed_operations

_TRIES, _SUCCESSES, _SECONDS = 1500, 40, 120
# Of how many a process is begun anew.
_TOGETHER = 40
_SHAPES = [(), (0,), (1,), (3,), (5,), (16,), (0, 3), (3, 0), (1, 3), (3, 3), (4, 2)]
_SHAPES += [(2, 3, 3), (0, 3, 3), (2, 0, 3), (1, 4, 4, 1), (0, 4, 4, 1), (2, 4, 4, 2)]
_SHAPES += [(4,), (8,), (3, 4), (4, 3), (2, 3, 0), (1, 4, 4, 4, 1), (2, 2), (5000, 3)]
_USUAL = [0, 1, 2, 3], [0.0, 1.0, 2.0, 0.5, -1.0, 3.0]
_UNUSUAL = [-1, -2, 5, 100, 2**31 - 1, -(2**31)], [np.nan, np.inf, -np.inf, 1e38, 1e-40]
_TEXTS = ["", "a", "ab c", "1.5", "-7", "aé b"]
_TYPES = [tf.float32, tf.int32, tf.int64, tf.float64, tf.complex64, tf.bool, tf.string]
# Not asked for, and refused where they are (`allowed_operations.check`).
_KNOWN = {"Eig": "compute_v", "SelfAdjointEigV2": "compute_v", "Svd": "compute_uv"}


def _tensor(rng, dtype):
    shape = rng.choice(_SHAPES)
    count = int(np.prod(shape))
    if dtype == tf.string:
        values = [rng.choice(_TEXTS) for _ in range(count)]
        return tf.reshape(tf.constant(values, dtype), shape)
    real = dtype.is_floating or dtype.is_complex
    pool = _USUAL[real] + (_UNUSUAL[real] if rng.random() < 0.3 else [])
    values = np.array([rng.choice(pool) for _ in range(count)])
    if not real:
        values = np.sort(values) if rng.random() < 0.5 else values
        values = values if dtype == tf.bool else np.clip(values, dtype.min, dtype.max)
    with np.errstate(all="ignore"):
        return tf.constant(values.reshape(shape).astype(dtype.as_numpy_dtype))


def _attribute(rng, attribute):
    """Returns a value for an attribute; its default, often, if it has one."""
    default, kind = attribute.default_value, attribute.type
    if kind in ("type", "list(type)"):
        allowed = [t for t in _TYPES if t.as_datatype_enum in _allowed(attribute)]
        one = rng.choice(allowed or _TYPES[:4])
        return one if kind == "type" else [one] * rng.choice([1, 2])
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "int":
        return max(attribute.minimum, rng.choice([default.i, 0, 1, 2, 3]))
    if kind == "float":
        return rng.choice([default.f, 0.0, 1.0, 0.5])
    if kind == "string":
        names = [*attribute.allowed_values.list.s] or [default.s or b"x"]
        # The layouts of volumes only where there are no others: a model's are right.
        names = [one for one in names if b"D" not in one] or names
        return rng.choice(names).decode()
    if kind == "list(int)":
        return rng.choice([[*default.list.i], [1, 1, 1, 1], [1, 2, 2, 1], [0], [1]])
    return {"shape": rng.choice(_SHAPES), "list(float)": [0.0, 1.0]}.get(kind, [])


def _allowed(attribute):
    return set(attribute.allowed_values.list.type) or {
        t.as_datatype_enum for t in _TYPES
    }


def _arguments(rng, name):
    definition = op_def_registry.get(name)
    values = {each.name: _attribute(rng, each) for each in definition.attr}
    arguments, known = {}, {}
    for each in definition.input_arg:

        def one(dtype):
            if dtype in (tf.variant, tf.resource):
                raise NotImplementedError
            if dtype not in known or rng.random() < 0.6:
                known[dtype] = _tensor(rng, dtype)
            return known[dtype]

        if each.type_list_attr:
            arguments[each.name] = [one(dtype) for dtype in values[each.type_list_attr]]
            continue
        dtype = values[each.type_attr] if each.type_attr else tf.as_dtype(each.type)
        number = each.number_attr and max(1, values[each.number_attr])
        made = [one(dtype) for _ in range(number or 1)]
        arguments[each.name] = made if number else made[0]
    inferred = {name for each in definition.input_arg for name in _inferred(each)}
    return arguments | {k: v for k, v in values.items() if k not in inferred}


def _inferred(argument):
    return argument.type_attr, argument.type_list_attr, argument.number_attr


def _bytes(name, arguments, left):
    """Returns what an operation gives where `left` stands in the memory it is given."""
    for size in (1, 2, 3, 4, 6, 9, 12, 16, 18, 27, 32, 48, 64, 96, 128, 256):
        kept = [tf.fill([size], tf.constant(left, tf.float32)) for _ in range(8)]
        del kept
    try:
        results = tf.nest.flatten(getattr(tf.raw_ops, name)(**arguments))
        found = [each.numpy() for each in results if each is not None]
        return [repr(v.tolist() if v.dtype == object else v.tobytes()) for v in found]
    except Exception as error:
        return type(error).__name__


def _try(name):
    successes = 0
    for number in range(_TRIES):
        rng = random.Random(f"{name} {number}")
        try:
            arguments = _arguments(rng, name)
        except NotImplementedError:
            return
        if not arguments.get(_KNOWN.get(name, ""), True):
            continue
        first = _bytes(name, arguments, 7.0)
        if isinstance(first, str):
            continue
        for left in (-3e5, 0.0, float("nan"), 1.5):
            if _bytes(name, arguments, left) != first:
                print("OTHER BYTES", name, arguments)
                return
        successes += 1
        if successes == _SUCCESSES:
            return


def _run(names):
    """Tries operations in one process; returns what it printed, and who ended it."""
    command = [sys.executable, "-m", __spec__.name, *names]
    said = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watch = threading.Timer(_SECONDS, process.kill)
        for line in process.stdout:
            watch.cancel()
            watch = threading.Timer(_SECONDS, process.kill)
            watch.start()
            said += line
        watch.cancel()
    tried = [line.split()[1] for line in said.splitlines() if line.startswith("TRIES")]
    return said, tried, process.returncode


@pytest.mark.parametrize("start", range(0, len(allowed_operations.ALLOWED), _TOGETHER))
def test_operations_give_the_same_bytes_whatever_was_in_memory(start):
    names = sorted(allowed_operations.ALLOWED)[start : start + _TOGETHER]
    while names:
        said, tried, code = _run(names)
        assert "OTHER BYTES" not in said, said
        if code:
            print(f"{tried[-1]} ended its process with {code}")
            assert tried
        assert code or tried == names
        names = names[len(tried) :]


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print("TRIES", each, flush=True)
        _try(each)
