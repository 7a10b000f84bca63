"""Gaussian noise that is never the same twice.

By default, every call draws from a fresh seed, made from the operating system's entropy
(`entropy`). This holds even inside a `tf.function` or a TFF computation that is traced
once and run many times, on every client. A runtime that must be reproducible bit for
bit, or supplies the entropy itself, wraps the calls in `use_seed` with a seed tensor
that is new for every client of every round.

A seed is uint64 [2], 128 bits, from the operating system or a user's number. The bits
of Philox4x32-10 make the noise (`_box_muller`) and other seeds (`fold_in`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tfdp_fl._lazy_tf import tf

# TensorFlow's number for the generator Philox, and the key with which it turns a seed
# into a key and a counter (`stateless_random_ops.cc`).
_PHILOX, _SCRAMBLE = 1, 0x02461E293EC8F720

# The sources of noise: this module, or exact (`grid`), with Philox for everything else.
PHILOX, EXACT = GENERATORS = ("philox", "exact")

# The first word of a derived seed, by its use.
_CHILD, _DRAW = 1, 2

# Between this and its inverse, float32 has full precision, and the squared noise in
# many coordinates stays finite.
LEAST_STDDEV = 1e-18

# With a standard deviation of two grid steps, rounding alters the distribution of the
# noise by a relative error of only exp(-2 pi^2 2^2) = 5e-35 (Poisson summation).
STEPS_OF_NOISE = 2.0

# How a long draw is divided: a minimum length of chunks, so that they amortise their
# overhead, and a maximum number of them, so that a graph stays small.
_SMALLEST_CHUNK = 2**16
_MOST_CHUNKS = 32

_UUIDS = "/proc/sys/kernel/random/uuid"
# The positions of a UUID's hexadecimal digits that are entirely random.
_DIGITS = [
    place
    for place, form in enumerate("xxxxxxxx-xxxx-4xxx-yxxx-xxxxxxxxxxxx")
    if form == "x"
]
_DIGITS_A_WORD = 8

# For each thread, a seed and the numbers of the draws taken from it.
_active = threading.local()


def require_float32_range(check: Callable[..., float]) -> Callable[..., float]:
    """Returns a check that allows only 0, and numbers whose square float32 holds."""
    low, high = LEAST_STDDEV, 1 / LEAST_STDDEV

    def check_range(**checked: object) -> float:
        ((name, value),) = checked.items()
        number = check(**checked)
        if number and not low <= number <= high:
            raise ValueError(
                f"{name} must be from {low:g} to {high:g}, as noise is in float32, got "
                f"{value!r}."
            )
        return number

    return check_range


@contextlib.contextmanager
def use_seed(seed: tf.Tensor) -> Iterator[None]:
    """Draws the noise inside the block from a given seed.

    Two draws inside one block differ. The seed applies when the code is traced, so a
    traced function uses it in every later run.

    Args:
      seed: Uint64 [2] (or int64, with the same bits); use each value only once.
    """
    outer = getattr(_active, "source", None)
    _active.source = (seed, itertools.count(1))
    try:
        yield
    finally:
        _active.source = outer


def entropy(count: int) -> tf.Tensor:
    """Returns uint32 [count] from the operating system, new in every run of a graph.

    TensorFlow has no operation for this. Its own unseeded operations, and
    `NonDeterministicInts`, use a 64-bit Mersenne Twister that each process seeds once,
    with 32 bits (`tsl/platform/random.cc`). Anyone can try all 2^32 seeds, and after a
    fork, two processes have the same one. So a graph reads Linux's generator from a
    finite file: each read of /proc/sys/kernel/random/uuid returns a new random UUID
    (RFC 9562, version 4; see `man 4 random`), with 122 random bits.

    Raises:
      NotImplementedError: A graph is being built, and the operating system is not
        Linux. (A graph that runs on another machine without Linux raises
        `tf.errors.NotFoundError`.)
    """
    if tf.executing_eagerly():
        return tf.constant(np.frombuffer(os.urandom(4 * count), np.uint32))
    if not pathlib.Path(_UUIDS).exists():
        raise NotImplementedError(
            "Noise in a TensorFlow graph without a seed needs Linux, whose "
            f"entropy is read from {_UUIDS}; there is no such file here."
        )
    reads = -(-count * _DIGITS_A_WORD // len(_DIGITS))
    # TensorFlow considers reading a file stateless. So the file name must depend on an
    # argument that cannot be folded into a constant and differs for every read.
    salt = tf.raw_ops.NonDeterministicInts(shape=[reads], dtype=tf.int64)
    digits = []
    for one in tf.unstack(salt):
        nothing = tf.strings.substr(tf.strings.as_string(one), 0, 0)
        uuid = tf.io.read_file(tf.strings.join([_UUIDS, nothing]))
        letters = tf.gather(
            tf.io.decode_raw(tf.strings.substr(uuid, 0, 36), tf.uint8), _DIGITS
        )
        letters = tf.cast(letters, tf.int64)
        # "0" to "9" are 48 to 57, "a" to "f" 97 to 102.
        digits.append(letters % 16 + 9 * (letters // 64))
    used = tf.concat(digits, 0)[: count * _DIGITS_A_WORD]
    powers = tf.constant([16**place for place in range(_DIGITS_A_WORD)], tf.int64)
    rows = tf.reshape(used, [count, _DIGITS_A_WORD])
    return tf.cast(tf.reduce_sum(rows * powers, axis=1), tf.uint32)


def fresh_seed() -> np.ndarray:
    """Returns a seed (uint64 [2]) from the operating system's entropy, at once."""
    return np.frombuffer(os.urandom(16), np.uint64)


def next_seed() -> tf.Tensor:
    """Returns a seed that no other draw uses."""
    source = getattr(_active, "source", None)
    if source is None:
        return tf.bitcast(tf.reshape(entropy(4), [2, 2]), tf.uint64)
    seed, numbers = source
    return fold_in(seed, next(numbers))


def fold_in(seed: tf.Tensor, data: tf.Tensor | int) -> tf.Tensor:
    """Returns a new seed from a seed and an integer.

    Args:
      seed: Uint64 or int64 [2].
      data: A signed 64-bit integer.
    """
    # TensorFlow's own fold_in puts the data beside 64 fresh bits. Philox is one-to-one
    # for each key, so different data give different blocks.
    data = tf.cast(data, tf.int64)
    words = tf.bitwise.bitwise_xor(
        as_integers(seed), tf.stack([tf.constant(_CHILD, tf.int64), data])
    )
    return _uniform([2], words, tf.uint64)


def _uniform(
    shape: list[int | tf.Tensor], seed: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """Draws integers with uniform bits from a seed, int64 [2].

    They equal those of `tf.random.stateless_uniform(..., alg="philox")`, which takes
    three times as many operations and noticeably delays the first round.
    """
    draw = functools.partial(tf.raw_ops.StatelessRandomUniformFullIntV2, alg=_PHILOX)
    key = tf.constant([_SCRAMBLE], tf.uint64)
    counter = tf.bitcast(seed, tf.uint64)
    key, low = tf.split(draw(shape=[2], key=key, counter=counter, dtype=tf.uint64), 2)
    counter = tf.concat([tf.zeros([1], tf.uint64), low], 0)
    return draw(shape=shape, key=key, counter=counter, dtype=dtype)


def for_clients(seed: np.ndarray) -> np.ndarray:
    """Returns a round's seed for clients and workers, uint64 [2].

    If Philox derived it from the round's seed, it might lead back to the server's
    noise.
    """
    digest = hashlib.sha256(seed.astype(np.uint64).tobytes()).digest()
    return np.frombuffer(digest, np.uint64)[:2]


def as_integers(seed: tf.Tensor) -> tf.Tensor:
    """Returns a seed as int64 [2], for the caller's own draws."""
    return tf.bitcast(seed, tf.int64)


def integer(seed: tf.Tensor, data: int) -> tf.Tensor:
    """Returns a uniform int64 scalar from a seed and an integer.

    It is for random numbers other than noise, such as those of dropout.
    """
    return as_integers(fold_in(seed, data))[0]


# Operations whose results may be random, by their prefixes: with a seed or a state of
# TensorFlow's, and code of the host's, which a graph calls.
_WITH_STATE = (
    *("Random", "Multinomial", "ParameterizedTruncated", "Stateful", "Truncated"),
    *("NonDeterministic", "PyFunc", "EagerPyFunc"),
)
_WITH_SEED = "Stateless"


def with_fresh_draws(
    function: Callable[..., Any],
    update: Any,
    *others: Any,
    must_add_noise: bool,
    argument: str,
) -> Any:
    """Calls a function of a user's own such that no noise in it repeats.

    TensorFlow's own draws follow from 31 bits that are fixed when a graph is made, and
    from `tf.random.set_seed`: a new engine or process would draw the same noise again.
    NumPy's are drawn once, when the function is traced. So the function is traced by
    itself; each draw of `tf.random.normal` in it is replaced by one of `normal`, whose
    entropy is an input; and no other draws are allowed but this module's own.

    Args:
      function: Takes the tensors and returns others.
      update: The sum of the updates, a nest of tensors.
      *others: Further arguments, nests of tensors.
      must_add_noise: Whether the function returns a noised update first, each tensor of
        which must depend on a draw if it depends on `update`.
      argument: What the function is called in errors.

    Raises:
      ValueError: It draws its noise in another way, or does not add any.
    """
    arguments = tf.nest.map_structure(tf.convert_to_tensor, (update, *others))
    own = next_seed()

    def traceable(seed: tf.Tensor, *given: Any) -> Any:
        with use_seed(seed):
            return function(*given)

    specs = tf.nest.map_structure(tf.TensorSpec.from_tensor, (own, *arguments))
    traced = tf.function(traceable, autograph=False).get_concrete_function(*specs)
    seed, *inputs = traced.inputs[: len(tf.nest.flatten(specs))]
    draws = _own_draws(traced.graph, seed, argument)
    entropy_of = {seed.op.name, *(draw.op.name for draw in draws)}
    summands = inputs[: len(tf.nest.flatten(update))]
    of_clients = {each.op.name for each in summands}
    noised = traced.structured_outputs[0] if must_add_noise else ()
    for output in tf.nest.flatten(noised):
        names = _ancestors(traced.graph.get_tensor_by_name(output.name).op)
        if names & of_clients and not names & entropy_of:
            raise ValueError(_how_to_draw(argument, "an output without such a draw"))
    outer = [own, *tf.nest.flatten(arguments)]
    pairs = dict(zip((t.name for t in (seed, *inputs)), outer, strict=True))
    pairs |= {inner.name: each for each, inner in traced.graph.captures}
    for draw in draws:
        fresh = normal(draw.shape.as_list(), tf.ones([]))
        pairs[draw.name] = tf.cast(fresh, draw.dtype)

    def import_graph(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return tf.graph_util.import_graph_def(
            traced.graph.as_graph_def(),
            input_map=dict(zip(pairs, tensors, strict=True)),
            return_elements=[tensor.name for tensor in traced.outputs],
            name="",
        )

    outputs = tf.function(import_graph, autograph=False)(*pairs.values())
    return tf.nest.pack_sequence_as(traced.structured_outputs, outputs)


def _own_draws(graph: Any, seed: tf.Tensor, argument: str) -> list[tf.Tensor]:
    """Returns the normal draws in a graph; raises ValueError if it has any others."""
    draws = []
    for operation in graph.get_operations():
        name = operation.type
        if name == "RandomStandardNormal":
            draws.append(operation.outputs[0])
            if draws[-1].shape.is_fully_defined():
                continue
        elif name.startswith(_WITH_SEED):
            if seed.op.name in _ancestors(operation):
                continue
        elif not name.startswith(_WITH_STATE):
            continue
        raise ValueError(_how_to_draw(argument, f"an operation {name}"))
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            if node.op.startswith((*_WITH_STATE, _WITH_SEED)):
                raise ValueError(_how_to_draw(argument, f"{node.op} in a function"))
    return draws


def _ancestors(operation: Any) -> set[str]:
    """Returns the names of the operations that an operation depends on, and its own."""
    names, waiting = {operation.name}, [operation]
    while waiting:
        for tensor in waiting.pop().inputs:
            if tensor.op.name not in names:
                names.add(tensor.op.name)
                waiting.append(tensor.op)
    return names


def _how_to_draw(argument: str, got: str) -> str:
    return (
        f"{argument} must draw its noise by tf.random.normal, of known shapes and "
        f"outside of tf.function, or by tfdp_fl.mechanisms.add_normal, got {got}: "
        "other draws would be the same in every round, or in every process."
    )


def normal(shape: tf.Tensor | list[int], stddev: tf.Tensor) -> tf.Tensor:
    """Draws float32 N(0, stddev^2) of the given shape."""
    return add_normal([tf.zeros(shape)], stddev)[0]


def _box_muller(length: int | tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws float32 N(0, 1) [length], two of each 96 bits of Philox.

    This is Box & Muller (1958): sqrt(-2 ln u) (cos t, sin t) for u in (0, 1) and a
    direction t. Here v = min(u, 1 - u) has 63 bits and the precision of float32, so u
    is fine at both ends. Near 0, draws end at 9.49, with less than 2^-63 of a pair's
    mass beyond. TensorFlow's u has 23 bits, and its draws end at 5.68. An update that
    is spread over D coordinates crosses such an end in a round with a probability of
    about sqrt(D) phi(end) / z, which reveals that the client took part. For D = 5e5 and
    z = 1, that is 3e-5 at 5.68, more than many a delta, and 1e-17 at 9.49. Near 1, with
    24 bits a pair would be exactly (0, 0) once in 2^25, and otherwise lie on few
    circles: a coordinate that does not move reveals as much.
    """
    half = -(-length // 32) * 16  # A length whose slices need no copy.
    high, low, direction = tf.unstack(_uniform([3, half], seed, tf.int32))
    whole = tf.cast(tf.bitwise.bitwise_and(high, 2**31 - 1), tf.float32)
    rest = tf.abs(tf.cast(low, tf.float32)) * 2.0**-31 + 2.0**-33
    v = (whole + rest) * 2.0**-32
    log_u = tf.where(high < 0, tf.math.log(v), tf.math.log1p(-v))
    radius = tf.sqrt(-2.0 * log_u)
    angle = tf.cast(direction, tf.float32) * (math.pi * 2.0**-31)
    pairs = [radius * tf.cos(angle), radius * tf.sin(angle)]
    return tf.concat(pairs, 0)[:length]


def standard_normals(
    tensors: list[tf.Tensor],
    seed: tf.Tensor,
    use: Callable[[int, Any], Any] = lambda index, draw: draw,
) -> list[Any]:
    """Draws float32 N(0, 1) with the shapes of some tensors, and uses the draws.

    They are what `add_normal` adds with a stddev of 1 and the same seed.

    Args:
      tensors: Tensors of any dtype.
      seed: A seed that no other draw uses.
      use: Called with a tensor's index and its draw. Its results are computed before
        the draws of later tensors, so that these do not all take memory at once.

    Returns:
      For each tensor, the result of `use`; by default the draw.
    """

    def finish(index: int, draw: tf.Tensor) -> Any:
        with tf.control_dependencies([draw]):  # Not all at once at the beginning.
            return use(index, tf.reshape(draw, tf.shape(tensors[index])))

    return _draw_in_chunks(tensors, seed, lambda index, part, draw: draw, finish)


# Uses a draw: called with a tensor's index, the slice of its flattened elements (None:
# all), and the draw.
_Use = Callable[[int, "slice | None", Any], Any]  # (Naming `tf` would import it.)
# Called with a tensor's index and what `_Use` returned for all of its elements, [D].
_Finish = Callable[[int, Any], Any]


def _draw_in_chunks(
    tensors: list[tf.Tensor], seed: tf.Tensor, use: _Use, finish: _Finish
) -> list[Any]:
    """Draws N(0, 1) for every element of some tensors, and calls `use` with them.

    A drawing operation runs on one thread, so several run at the same time, but not
    all: they would take several times the tensors' memory. The number of chunks, and
    hence the result, does not depend on the machine.
    """
    sizes = [tensor.shape.num_elements() for tensor in tensors]
    # Different from the seeds that `fold_in` makes.
    own = tf.bitwise.bitwise_xor(as_integers(seed), tf.constant([_DRAW, 0], tf.int64))
    if None in sizes:
        counts = [tf.size(tensor) for tensor in tensors]
        draws = tf.split(_box_muller(sum(counts), own), counts)
        return [finish(k, use(k, None, draw)) for k, draw in enumerate(draws)]
    return _use_chunks(sizes, own, use, finish)


def _use_chunks(
    sizes: list[int], seed: tf.Tensor, use: _Use, finish: _Finish
) -> list[Any]:
    """Returns each tensor's result; `sizes` are the tensors' numbers of elements."""
    size = sum(sizes)
    chunk = max(size, 1)
    if size > _SMALLEST_CHUNK:
        chunk = max(_SMALLEST_CHUNK, -(-size // (16 * _MOST_CHUNKS)) * 16)
    starts = range(0, max(size, 1), chunk)
    seeds = [seed]
    if len(starts) > 1:
        seeds = tf.unstack(_uniform([len(starts), 2], seed, tf.int64))
    num_parallel = max(2, os.cpu_count() or 2)
    pieces: list[list[tf.Tensor]] = [[] for _ in sizes]
    results: list[Any] = [None] * len(sizes)
    made_of_chunks: list[list[tf.Tensor]] = []
    for number, (start, own) in enumerate(zip(starts, seeds, strict=True)):
        stop, end, parts = min(start + chunk, size), 0, []
        for index, count in enumerate(sizes):
            begin, end = end, end + count
            first = max(start, begin) - begin
            last = max(first, min(stop, end) - begin)
            if first < last or (number == 0 and not count):
                parts.append((index, first, last))
        earlier = number - num_parallel
        with tf.control_dependencies(made_of_chunks[earlier] if earlier >= 0 else []):
            draw = _box_muller(stop - start, own)
        lengths = [last - first for _, first, last in parts]
        draws = tf.split(draw, lengths) if len(lengths) > 1 else [draw]
        made_of_chunks.append([])
        for (index, first, last), draw in zip(parts, draws, strict=True):
            whole = last - first == sizes[index]
            made = use(index, None if whole else slice(first, last), draw)
            pieces[index].append(made)
            if last == sizes[index]:
                joined = made if whole else tf.concat(pieces[index], 0)
                made = results[index] = finish(index, joined)
            made_of_chunks[-1] += tf.nest.flatten(made)
    return results


def add_normal(
    tensors: list[tf.Tensor], stddev: tf.Tensor | list[tf.Tensor]
) -> list[tf.Tensor]:
    """Adds independent N(0, stddev^2) to every element of every tensor.

    Args:
      tensors: Float tensors of any shapes.
      stddev: One scalar, or one scalar for each tensor.

    Returns:
      New tensors of the same shapes and dtypes, except float32 for float64.
    """
    if not tensors:
        return []
    stddevs = stddev if isinstance(stddev, list) else [stddev] * len(tensors)
    flat = [
        (tf.reshape(tensor, [-1]), tf.cast(scale, tf.float32))
        for tensor, scale in zip(tensors, stddevs, strict=True)
    ]

    def add(index: int, elements: slice | None, draw: tf.Tensor) -> tf.Tensor:
        tensor, scale = flat[index]
        part = tensor if elements is None else tensor[elements]
        return add_scaled_noise(part, draw, scale)

    def finish(index: int, noised: tf.Tensor) -> tf.Tensor:
        return tf.reshape(noised, tf.shape(tensors[index]))

    return _draw_in_chunks(tensors, next_seed(), add, finish)


def add_scaled_noise(
    tensor: tf.Tensor, draw: tf.Tensor, stddev: tf.Tensor
) -> tf.Tensor:
    """Returns tensor + stddev draw; for float64 sums as float32, rounded once.

    A float64 sum has digits below those of float32 noise. These digits would reveal
    the sum without any noise, so they are rounded away after the noise is added.
    Rounding the sum first would change it by more than one client does.

    Args:
      tensor: A tensor of any float dtype.
      draw: Float32, of the same shape.
      stddev: Float32 scalar.
    """
    if tensor.dtype != tf.float64:
        return tensor + tf.cast(draw * stddev, tensor.dtype)
    scaled = tf.cast(draw, tf.float64) * tf.cast(stddev, tf.float64)
    return tf.cast(tensor + scaled, tf.float32)
