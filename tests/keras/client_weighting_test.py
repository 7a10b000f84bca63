"""A weighted mean: what clients count, and that none adds more than S."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.engine import cohorts
from tests.keras import hostile, toy
from tfdp_fl import secure_aggregation
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.engine import dense_models

_S = 0.05
_SIZES = (8, 0, 3, 5)
_NUM_EXAMPLES = tfdp_fl.ClientWeighting.num_examples
_SAMPLE_WEIGHT = tfdp_fl.ClientWeighting.sample_weight
_FIXED = tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=0.0)
_PATHS = {
    "one_by_one": {},
    "side_by_side": {"beside": True},
    "a_few_at_a_time": {"beside": True, "few": True},
    "in_groups": {"beside": True, "at_once": 2},
    "streamed": {"streamed": True},
    "xla": {"xla": True, "batch_size": 1},
    "sharded": {"runtime": hostile.HereWorkers()},
}


def _clients(sizes=_SIZES):
    return {k: toy.arrays(size, seed=k) for k, size in enumerate(sizes)}


def _moved(
    clients,
    weighting,
    *,
    mechanism=_FIXED,
    beside=False,
    few=False,
    at_once=None,
    streamed=False,
    xla=False,
    replicas=1,
    runtime=None,
    batch_size=2,
    **options,
):
    """Returns what one round of all clients moves, and the model."""
    if streamed:
        dataset = FederatedDataset.from_client_fn(list(clients), clients.__getitem__)
    else:
        dataset = FederatedDataset.from_client_arrays(clients)
    fed = toy.federated(
        mechanism,
        toy.two_layers,
        len(clients),
        client_weighting=weighting,
        num_replicas=replicas,
        compile_options={"jit_compile": None if beside else xla},
        **options,
    )
    before = fed.get_weights()
    changes = {"is_worthwhile": lambda *_: beside, "is_small": lambda *_: few}
    if at_once is not None:
        changes["clients_at_once"] = lambda *_: at_once
    with mock.patch.multiple(dense_models, **changes):
        history = fed.fit(
            dataset,
            rounds=1,
            batch_size=batch_size,
            local_epochs=2,
            verbose=0,
            seed=1,
            runtime=runtime,
        )
    assert not beside or fed.engine.has_trained_side_by_side
    after = fed.get_weights()
    return [b.astype(np.float64) - a for a, b in zip(before, after, strict=True)], (
        fed,
        history.history,
    )


@functools.cache
def _updates(sizes=_SIZES, batch_size=2):
    """Returns the update of each of `_clients` by a plain loop, in float64."""
    return [
        [
            each.astype(np.float64)
            for each in cohorts.reference_update(
                toy.two_layers(),
                client,
                tf.keras.optimizers.SGD(0.1),
                toy.loss(),
                batch_size=batch_size,
                local_epochs=2,
            )
        ]
        for client in _clients(sizes).values()
    ]


def _norm(tensors):
    return np.sqrt(sum(np.sum(np.square(each)) for each in tensors))


def _expected(counted, clip=_S, divisor=4, batch_size=2, sizes=_SIZES):
    """Returns sum_k w_k clip(Delta_k, S) / divisor, in float64."""
    updates = _updates(sizes, batch_size)
    total = [np.zeros_like(each) for each in updates[0]]
    for update, w in zip(updates, counted, strict=True):
        factor = w * min(1.0, clip / max(_norm(update), 1e-30))
        for part, each in zip(total, update, strict=True):
            part += factor * each / divisor
    return total


class MeanTest(tf.test.TestCase, parameterized.TestCase):
    def _assert_close(self, moved, wanted):
        self.assertGreater(_norm(wanted), 1e-3)
        for one, other in zip(moved, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-7)

    @parameterized.parameters(*sorted(_PATHS))
    def test_the_papers_estimator(self, path):
        options = _PATHS[path]
        clients = _clients()
        moved, (_, history) = _moved(
            clients, _NUM_EXAMPLES(cap=6, mean_weight=0.4), **options
        )
        counted = [min(size / 6, 1.0) for size in _SIZES]
        wanted = _expected(
            counted,
            divisor=4 * 0.4,
            batch_size=options.get("batch_size", 2),
        )
        self._assert_close(moved, wanted)
        # Whoever counts less was clipped all the same.
        self.assertEqual(history["clipped_fraction"], [0.75])

    def test_clients_add_their_noise_to_what_counts(self):
        mechanism = tfdp_fl.FixedClipping(
            clip_norm=_S, noise_multiplier=1e-6, noise_site="client"
        )
        clients = _clients()
        moved, _ = _moved(clients, _NUM_EXAMPLES(cap=6), mechanism=mechanism)
        counted = [min(size / 6, 1.0) for size in _SIZES]
        self._assert_close(moved, _expected(counted))

    @parameterized.parameters("one_by_one", "side_by_side", "streamed")
    def test_by_the_weights_of_examples(self, path):
        # Weights of 1 train as none do, and count as they add up.
        clients = {
            k: (x, y, np.ones(len(y), np.float32)) for k, (x, y) in _clients().items()
        }
        moved, _ = _moved(clients, _SAMPLE_WEIGHT(cap=6), **_PATHS[path])
        counted = [min(size / 6, 1.0) for size in _SIZES]
        self._assert_close(moved, _expected(counted))

    def test_a_median_is_of_the_norms_and_not_of_weights(self):
        mechanism = tfdp_fl.MedianClipping(noise_multiplier=0.0)
        clients = _clients((8, 6, 3, 5))
        moved, (_, history) = _moved(
            clients,
            _NUM_EXAMPLES(cap=6),
            mechanism=mechanism,
            replicas=2,
        )
        median = float(np.median([_norm(each) for each in _updates((8, 6, 3, 5))]))
        self.assertAllClose(history["clip_norm"], [median], rtol=1e-5)
        counted = [min(size / 6, 1.0) for size in (8, 6, 3, 5)]
        self._assert_close(moved, _expected(counted, clip=median, sizes=(8, 6, 3, 5)))

    def test_adaptive_clipping_counts_each_bit_once(self):
        clips = []
        for weighting in (None, _NUM_EXAMPLES(cap=1000)):
            _, (fed, _) = _moved(
                _clients(),
                weighting,
                mechanism=tfdp_fl.AdaptiveClipping(
                    noise_multiplier=0.0,
                    initial_clip_norm=_S,
                    count_noise_stddev=0.0,
                ),
            )
            clips.append(float(fed.engine.state.clip_norm))
        self.assertEqual(clips[0], clips[1])
        self.assertGreater(clips[0], _S)

    def test_without_privacy_it_is_mcmahans_weighted_mean(self):
        clients = _clients()
        moved, _ = _moved(
            clients, _NUM_EXAMPLES(cap=100), mechanism=tfdp_fl.NoPrivacy()
        )
        wanted = _expected(_SIZES, clip=np.inf, divisor=sum(_SIZES))
        self._assert_close(moved, wanted)

    def test_the_noise_and_its_price_are_the_same(self):
        # Noise of stddev z S on the sum, over m * mean_weight. 10 000 numbers
        # tell 2 % of a stddev at 5e-8 (chi-squared, normal approximation:
        # 5.45 stddevs of 0.7 % are 3.9 %), and a tenth is far beyond.
        x, y = toy.arrays(4)
        clients = dict.fromkeys(range(4), (x[:1], y[:1]))

        def model():
            tf.keras.utils.set_random_seed(1)
            return tf.keras.Sequential(
                [
                    tf.keras.layers.Input((8,)),
                    tf.keras.layers.Dense(1100),
                    tf.keras.layers.Dense(toy.NUM_CLASSES),
                ]
            )

        spent = []
        for weighting in (None, _NUM_EXAMPLES(cap=2, mean_weight=0.5)):
            fed = toy.federated(
                tfdp_fl.FixedClipping(clip_norm=1e-3, noise_multiplier=50.0),
                model(),
                4,
                client_weighting=weighting,
            )
            before = fed.get_weights()
            fed.fit(clients, rounds=1, verbose=0, seed=5)
            moved = np.concatenate(
                [
                    (b - a).ravel()
                    for a, b in zip(before, fed.get_weights(), strict=True)
                ]
            )
            share = 1.0 if weighting is None else 0.5
            self.assertAllClose(np.std(moved), 50.0 * 1e-3 / (4 * share), rtol=0.04)
            spent.append(fed.epsilon(1e-5))
        self.assertEqual(*spent)


class AttackTest(tf.test.TestCase, parameterized.TestCase):
    """The sum moves by S at most, whatever a client says that it counts."""

    def _added(self, client, path, weighting):
        nobody = tuple(each[:0] for each in client)
        options = {**_PATHS[path], "batch_size": 150}
        moved, _ = _moved({0: client, 1: nobody}, weighting, **options)
        return 2 * _norm(moved)

    @parameterized.product(
        value=[1e38, -300.0, np.nan], path=["one_by_one", "side_by_side"]
    )
    def test_weights_of_examples(self, value, path):
        x, y = toy.arrays(9)
        weight = np.ones(9, np.float32)
        weight[5] = value
        added = self._added((x, y, weight), path, _SAMPLE_WEIGHT(cap=0.1))
        self.assertLessEqual(added, _S * (1 + 1e-5))
        if not value > 0:
            self.assertEqual(added, 0.0)

    @parameterized.parameters("one_by_one", "side_by_side", "xla")
    def test_many_examples(self, path):
        x, y = toy.arrays(300)
        added = self._added((x, y), path, _NUM_EXAMPLES(cap=1))
        self.assertBetween(added, 0.999 * _S, _S * (1 + 1e-5))

    @parameterized.parameters("one_by_one", "side_by_side")
    def test_a_nan_of_one_is_nobody_elses(self, path):
        x, y = toy.arrays(9)
        weight = np.ones(9, np.float32)
        bad = np.where(np.arange(9) == 5, np.nan, weight).astype(np.float32)
        sums = []
        for other in ((x, y, bad), (x[:0], y[:0], weight[:0])):
            # On both sides of it.
            clients = {0: (x, y, weight), 1: other, 2: (x, y, weight)}
            moved, _ = _moved(clients, _SAMPLE_WEIGHT(cap=9), **_PATHS[path])
            sums.append(moved)
        self.assertGreater(_norm(sums[1]), 1e-3)
        for one, other in zip(*sums, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


class FrontTest(tf.test.TestCase, parameterized.TestCase):
    def test_the_statement_says_it(self):
        _, (fed, _) = _moved(
            _clients(),
            _NUM_EXAMPLES(cap=6, mean_weight=0.4),
            mechanism=tfdp_fl.FixedClipping(clip_norm=_S, noise_multiplier=1.0),
        )
        text = " ".join(fed.privacy_statement(1e-3).split())
        for part in (
            "counts by its number of examples n, as min(n / 6, 1)",
            "divided by m times 0.4, which was given beforehand",
            "the expected mean of the clients' weights count as given before",
        ):
            self.assertIn(part, text)
        facts = fed.privacy_statement(1e-3, format="dict")
        self.assertIn("cap=6.0", str(facts))
        _, (fed, _) = _moved(_clients(), None)
        self.assertNotIn("counts by", fed.privacy_statement(1e-3))

    @parameterized.parameters(
        (
            {"mechanism": tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1)},
            ValueError,
            "client_weighting must be None with LocalDP",
        ),
        (
            {"secure_aggregation": secure_aggregation.AdditiveSecretSharing()},
            ValueError,
            "client_weighting must be None with secure_aggregation",
        ),
        (
            {"client_weighting": 0.5},
            TypeError,
            "client_weighting must be",
        ),
    )
    def test_refused_when_made(self, options, error, message):
        with self.assertRaisesRegex(error, message):
            toy.federated(**{"client_weighting": _NUM_EXAMPLES(cap=6), **options})

    def test_clients_without_weights_of_examples(self):
        fed = toy.federated(client_weighting=_SAMPLE_WEIGHT(cap=6))
        with self.assertRaisesRegex(
            ValueError, "client_weighting must be .*sample_weight"
        ):
            fed.fit(toy.clients(), verbose=0)
        self.assertEqual(fed.rounds, 0)


if __name__ == "__main__":
    tf.test.main()
