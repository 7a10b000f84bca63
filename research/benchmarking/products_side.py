"""The machine's own speed: bare matrix products and convolutions."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from typing import Any

import numpy as np
import tensorflow as tf

from research.benchmarking import machine, workloads
from research.benchmarking.workloads import Operation, Product

LARGE = (Product(2048, 2048, 2048),)


def _operands(operation: Operation) -> tuple[tf.Tensor, tf.Tensor]:
    if isinstance(operation, Product):
        shapes = (
            (operation.rows, operation.inner),
            (operation.inner, operation.columns),
        )
    else:
        batch, size = operation.batch, operation.size
        images = (batch, size, size, operation.inputs)
        out = (batch, size, size, operation.outputs)
        filters = (
            operation.kernel,
            operation.kernel,
            operation.inputs,
            operation.outputs,
        )
        shapes = {
            "forward": (images, filters),
            "filter_gradient": (images, out),
            "input_gradient": (filters, out),
        }[operation.part]
    return tuple(tf.random.uniform(shape, -0.1, 0.1) for shape in shapes)


def _compute(operation: Operation, a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    if isinstance(operation, Product):
        return tf.matmul(a, b)
    options: dict[str, Any] = {"strides": [1, 1, 1, 1], "padding": "SAME"}
    if operation.part == "forward":
        return tf.raw_ops.Conv2D(input=a, filter=b, **options)
    size, kernel = operation.size, operation.kernel
    if operation.part == "filter_gradient":
        return tf.raw_ops.Conv2DBackpropFilter(
            input=a,
            filter_sizes=[kernel, kernel, operation.inputs, operation.outputs],
            out_backprop=b,
            **options,
        )
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[operation.batch, size, size, operation.inputs],
        filter=a,
        out_backprop=b,
        **options,
    )


def steps_function(operations: tuple[Operation, ...]) -> Any:
    """Returns a function that does the operations of so many steps.

    Its arguments are the number of steps and the pairs of operands; it
    returns the last results, all of which are computed in every step.
    """
    groups = [
        (count, tuple(index for index, _ in members))
        for count, members in itertools.groupby(
            enumerate(operations), key=lambda pair: pair[1].count
        )
    ]

    def step(results: list[tf.Tensor], operands: Any) -> list[tf.Tensor]:
        results = list(results)
        for count, members in groups:

            def once(_: Any, *unused: Any, members=members) -> list[tf.Tensor]:
                return [_compute(operations[i], *operands[i]) for i in members]

            if count == 1:
                group = once(0)
            else:
                _, *group = tf.while_loop(
                    lambda i, *_, count=count: i < count,
                    lambda i, *_, once=once: [i + 1, *once(i)],
                    [0, *[results[i] for i in members]],
                    parallel_iterations=1,
                )
            for index, value in zip(members, group, strict=True):
                results[index] = value
        return results

    @tf.function(autograph=False)
    def steps(count: tf.Tensor, operands: Any) -> list[tf.Tensor]:
        first = [
            _compute(operation, *pair)
            for operation, pair in zip(operations, operands, strict=True)
        ]
        _, results = tf.while_loop(
            lambda i, _: i < count,
            lambda i, results: (i + 1, step(results, operands)),
            (tf.ones_like(count), first),
            parallel_iterations=1,
        )
        return results

    return steps


class ProductsSide:
    """Computes the steps' products on all cores, and nothing else."""

    def __init__(self, split: bool = False):
        """Sets TensorFlow's threads.

        Args:
          split: Whether each operation is split over all cores; otherwise
            every core does operations of its own.
        """
        cores = machine.cores()
        self._streams = 1 if split else cores
        threading = tf.config.threading
        threading.set_intra_op_parallelism_threads(cores if split else 1)
        threading.set_inter_op_parallelism_threads(cores)
        # Nothing that does not change is moved out of the loop.
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        self._pool = concurrent.futures.ThreadPoolExecutor(self._streams)
        self._prepared: dict[str, tuple[Any, list[Any], int]] = {}
        self._rates: dict[str, float] = {}

    def add(self, name: str) -> None:
        """Prepares a workload's step, or "large" for 2048 x 2048 x 2048."""
        operations = LARGE if name == "large" else workloads.WORKLOADS[name].step
        operands = [
            [_operands(operation) for operation in operations]
            for _ in range(self._streams)
        ]
        function = steps_function(operations).get_concrete_function(
            tf.TensorSpec([], tf.int32), operands[0]
        )
        flops = sum(operation.flops for operation in operations)
        self._prepared[name] = function, operands, flops
        self._rates[name] = 1e10
        for _ in range(3):  # Also to find out how many steps take how long.
            self._rates[name] = self._rate(name, 0.1)

    def _rate(self, name: str, seconds: float) -> float:
        function, operands, flops = self._prepared[name]
        wanted = seconds * self._rates[name] / (flops * self._streams)
        count = max(2, int(wanted))
        steps = tf.constant(count, tf.int32)
        start = time.perf_counter()
        results = list(
            self._pool.map(lambda own: function(steps, *tf.nest.flatten(own)), operands)
        )
        del results
        elapsed = time.perf_counter() - start
        return count * flops * self._streams / elapsed

    def measure(self, name: str, seconds: float, repeats: int = 3) -> list[float]:
        """Returns the floating-point operations per second, each time."""
        rates = [self._rate(name, seconds / repeats) for _ in range(repeats)]
        self._rates[name] = float(np.median(rates))
        return rates
