"""FedJAX: federated averaging with clipped updates and noise.

Its own federated averaging (`fedjax.algorithms.fed_avg`) has neither; the clip
stands in `client_final`, where each client's update is, and the noise in the
server's update, all compiled. The setting is a backend of `for_each_client`.
"""

from __future__ import annotations

import itertools
import time

import fedjax
import jax
import jax.numpy as jnp
from fedjax.core import for_each_client

from research.rivals import work as work_lib


def _parameters(key, units):
    parameters = []
    for inputs, outputs in itertools.pairwise(units):
        key, own = jax.random.split(key)
        scale = (6 / (inputs + outputs)) ** 0.5
        kernel = jax.random.uniform(own, (inputs, outputs), minval=-scale)
        parameters.append((kernel * scale, jnp.zeros(outputs)))
    return parameters


def _loss(parameters, batch):
    h = batch["x"]
    for kernel, bias in parameters[:-1]:
        h = jax.nn.relu(h @ kernel + bias)
    kernel, bias = parameters[-1]
    scores = jax.nn.log_softmax(h @ kernel + bias)
    return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], 1))


def main() -> None:
    """Runs the rounds."""
    work = work_lib.asked()
    x, y = work.data()
    clients = fedjax.InMemoryFederatedData(
        {k: {"x": x[k], "y": y[k]} for k in range(work.clients)}
    )

    def client_init(parameters, _):
        return parameters

    def client_step(parameters, batch):
        gradients = jax.grad(_loss)(parameters, batch)
        return (
            jax.tree_util.tree_map(
                lambda w, g: w - work.learning_rate * g, parameters, gradients
            ),
            (),
        )

    def client_final(start, parameters):
        update = jax.tree_util.tree_map(jnp.subtract, parameters, start)
        return fedjax.tree_util.tree_clip_by_global_norm(update, work.clip_norm)

    for_each_client.set_for_each_client_backend(work.setting)
    train = for_each_client.for_each_client(
        client_init, client_step, client_final, with_step_result=True
    )
    add = jax.jit(fedjax.tree_util.tree_add)

    @jax.jit
    def release(parameters, total, key):
        leaves, structure = jax.tree_util.tree_flatten(total)
        keys = jax.random.split(key, len(leaves))
        stddev = work.noise_multiplier * work.clip_norm
        noisy = [
            leaf + stddev * jax.random.normal(own, leaf.shape)
            for leaf, own in zip(leaves, keys, strict=True)
        ]
        mean = [leaf / work.clients for leaf in noisy]
        return jax.tree_util.tree_map(
            jnp.add, parameters, jax.tree_util.tree_unflatten(structure, mean)
        )

    key = jax.random.PRNGKey(0)
    parameters = _parameters(key, work.units)
    options = fedjax.ShuffleRepeatBatchHParams(
        batch_size=work.batch_size, num_epochs=1, drop_remainder=False
    )
    ends = []
    for _ in range(work_lib.WARM_UP + work.rounds):
        cohort = [
            (client, dataset.shuffle_repeat_batch(options), ())
            for client, dataset in clients.clients()
        ]
        total = None
        for _, update, _ in train(parameters, cohort):
            total = update if total is None else add(total, update)
        key, own = jax.random.split(key)
        parameters = release(parameters, total, own)
        jax.block_until_ready(parameters)
        ends.append(time.perf_counter())
    work_lib.answer(ends)


if __name__ == "__main__":
    main()
