"""Runs one round of a query on given updates, as a runtime does."""

import collections

import numpy as np
import tensorflow as tf

from tfdp_fl import algorithm
from tfdp_fl.mechanisms import ClientContext, PrivacyContext
from tfdp_fl.mechanisms import bounded_sums as records_lib

SHAPES = ([3, 4], [4], [4, 2], [2])


# What a round gave; `total` is the sum of the records.
RoundState = collections.namedtuple("Round", "mean total state next_state records")


def updates_with_norms(norms, shapes=SHAPES, seed: int = 0):
    """Returns one update (a list of float32 arrays) for each given norm."""
    rng = np.random.default_rng(seed)
    updates = []
    for norm in norms:
        parts = [rng.normal(size=shape) for shape in shapes]
        size = np.linalg.norm(flat(parts))
        updates.append([(p * norm / size).astype(np.float32) for p in parts])
    return updates


def bound(mechanism, clients_per_round=8, **where):
    """Returns a mechanism's query, and the state before its first round."""
    query = mechanism.bind(PrivacyContext(clients_per_round=clients_per_round, **where))
    return query, query.initial_global_state()


def zero_updates(count: int, shapes=SHAPES):
    """Returns updates that are zero everywhere."""
    return updates_with_norms([0.0] * count, shapes)


def run_round(
    query,
    state,
    updates,
    *,
    noise_multiplier=0.0,
    clients_per_round=None,
    num_examples=None,
    windows=None,
    template=None,
    charged=None,
) -> RoundState:
    """Runs the methods in the order that `mechanism.py` gives."""
    m = len(updates) if clients_per_round is None else clients_per_round
    template = tf.nest.map_structure(tf.constant, template or updates[0])
    updates = [[tf.constant(v) for v in update] for update in updates]
    state = query.begin_round(state, noise_multiplier, m)
    if query.two_phase:
        norms = [query.update_norm(update) for update in updates]
        norms = tf.stack(norms) if norms else tf.zeros([0])
        state = query.clip_to_cohort(state, norms)
    params = query.derive_sample_params(state)
    total, records = query.initial_sample_state(template), []
    for k, update in enumerate(updates):
        told = [each and tf.constant(each[k]) for each in (num_examples, windows)]
        client = ClientContext(*told)
        records.append(algorithm.make_contribution(query, params, update, client))
        total = records_lib.add(total, records[-1])
    if charged is None:
        charged = query.expected_mu_squared(m, noise_multiplier)
    mean, next_state = algorithm.release(query, total, state, charged)
    mean = [np.asarray(v) for v in mean]
    return RoundState(mean, total, state, next_state, records)


def assert_close(tensors, expected, **tolerances) -> None:
    """Asserts that two lists of tensors are alike."""
    np.testing.assert_allclose(flat(tensors), flat(expected), **tolerances)


def flat(tensors) -> np.ndarray:
    """Returns all elements of a list of tensors in one vector."""
    return np.concatenate([np.ravel(v) for v in tensors])
