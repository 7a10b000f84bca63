"""The next round is drawn while one trains, and nothing else comes of it."""

from __future__ import annotations

import contextlib
import threading
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl import sampling
from tfdp_fl.engine import chunks
from tfdp_fl.engine import engine as engine_lib


@contextlib.contextmanager
def _in_turn():
    """Has nothing be drawn, read or laid out before it is needed."""
    with mock.patch.object(chunks.Reader, "expect"):
        yield


class _Watch(tf.keras.callbacks.Callback):
    """Calls something after each round."""

    def __init__(self, after_round):
        super().__init__()
        self._after_round = after_round

    def on_epoch_end(self, epoch, logs=None):
        self._after_round(self.model, epoch)


class _Cohorts:
    """Who is drawn, and on which thread; who trains; who is paid for."""

    def __init__(self):
        self.drawn, self.trained, self.threads = [], [], set()
        self.seeds = []
        draw = sampling.FixedSizeSampler.cohort
        complete = engine_lib.CohortEngine.complete

        def cohort(sampler, round_index):
            positions = draw(sampler, round_index)
            self.threads.add(threading.current_thread())
            self.drawn.append((round_index, positions.tolist()))
            return positions

        def completed(engine, pending):
            self.trained.append(pending.inputs.positions.tolist())
            self.seeds.append(tuple(pending.inputs.seed.tolist()))
            return complete(engine, pending)

        self._patches = [
            mock.patch.object(sampling.FixedSizeSampler, "cohort", cohort),
            mock.patch.object(engine_lib.CohortEngine, "complete", completed),
        ]

    def __enter__(self):
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *_):
        for each in self._patches:
            each.stop()


def _uneven():
    x, y = toy.arrays(400)
    ends = np.cumsum(np.random.default_rng(3).integers(0, 20, 39))
    return tfdp_fl.datasets.FederatedDataset.from_indices(
        x, y, np.split(np.arange(ends[-1]), ends[:-1])
    )


def _streamed(clients):
    return tfdp_fl.datasets.FederatedDataset.from_client_fn(
        clients.client_ids, clients.client, clients.element_spec
    )


class DrawnAheadTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (tfdp_fl.MedianClipping(noise_multiplier=1.0), False),
        (
            tfdp_fl.AdaptiveLocalDP(epsilon=100.0, delta=1e-3, clipping_radius=0.3),
            True,
        ),
    )
    def test_a_seeded_run_is_the_same_bit_by_bit(self, mechanism, streamed):
        clients = _streamed(_uneven()) if streamed else _uneven()

        def trained():
            fed = toy.federated(mechanism, clients_per_round=7)
            fit = {"batch_size": 4, "local_epochs": 2, "seed": 5, "shuffle": True}
            history = toy.fit(fed, 7, data=clients, **fit)
            values = [*fed.get_weights(), *history.history.values()]
            toy.give_back(fed)
            return values

        found = trained()
        with _in_turn():
            wanted = trained()
        toy.assert_same(found, wanted)

    @parameterized.parameters(False, True)
    def test_who_is_drawn_trains_once(self, streamed):
        fed = toy.federated(clients_per_round=5)
        clients = toy.clients()
        if streamed:
            clients = _streamed(clients)
        with _Cohorts() as cohorts:
            toy.fit(fed, 6, data=clients)
        self.assertEqual([t for t, _ in cohorts.drawn], list(range(6)))
        self.assertEqual([each for _, each in cohorts.drawn], cohorts.trained)
        self.assertLen(set(cohorts.seeds), 6)
        # All but the first while others trained, on a thread that is gone.
        (other,) = cohorts.threads - {threading.main_thread()}
        self.assertFalse(other.is_alive())
        counts = np.bincount(np.concatenate(cohorts.trained), minlength=40)
        self.assertAllEqual(fed.run.spending.clients.participations, counts)

    def test_the_learning_rate_is_that_of_its_round(self):
        def weights(rate_of):
            quiet = tfdp_fl.FixedClipping(clip_norm=9.0, noise_multiplier=0.0)
            fed = toy.federated(quiet)
            scheduler = tf.keras.callbacks.LearningRateScheduler(rate_of)
            toy.fit(fed, 3, [scheduler], seed=1)
            trained = fed.get_weights()
            toy.give_back(fed)
            return trained

        wanted = weights(lambda t: 0.1 / (1 + t))
        with _in_turn():
            toy.assert_same(wanted, weights(lambda t: 0.1 / (1 + t)))
        self.assertNotAllClose(wanted[0], weights(lambda t: 0.1)[0])

    def test_a_training_that_stops_draws_others_afterwards(self):
        fed = toy.federated(clients_per_round=5)

        def stop(model, epoch):
            model.stop_training = epoch == 1

        with _Cohorts() as cohorts:
            toy.fit(fed, 9, [_Watch(stop)])
            drawn_for_nothing = cohorts.drawn[-1]
            toy.fit(fed, 1)
        self.assertEqual([t for t, _ in cohorts.drawn], [0, 1, 2, 2])
        self.assertNotIn(drawn_for_nothing[1], cohorts.trained)
        self.assertLen(cohorts.trained, 3)

    def test_nor_with_what_was_drawn_before_it_was_known(self):
        def seeds(repeated):
            found, fed = [], toy.federated(clients_per_round=5)
            release = engine_lib.CohortEngine.release

            def noted(engine, pending):
                found.append(pending.inputs.seed.tolist())
                return release(engine, pending)

            def tell(model, epoch):
                if repeated and epoch == 1:
                    fed.run.attempts.take()

            with mock.patch.object(engine_lib.CohortEngine, "release", noted):
                toy.fit(fed, 4, [_Watch(tell)], seed=3)
            return found

        plain, repeated = seeds(False), seeds(True)
        self.assertEqual(plain[:2], repeated[:2])
        self.assertNotEqual(plain[2], repeated[2])
        self.assertNotEqual(plain[3], repeated[3])

    def test_one_that_goes_by_releases_is_not(self):
        correlated = tfdp_fl.CorrelatedNoise(
            clip_norm=0.5,
            noise_multiplier=1.0,
            strategy=tfdp_fl.BandedToeplitz(bands=2),
            rounds=4,
            min_separation=3,
        )
        fed = toy.federated(correlated, None, 4, "cyclic")
        with mock.patch.object(chunks.Reader, "expect") as expect:
            toy.fit(fed, 3)
        expect.assert_not_called()

    def test_an_error_of_drawing_is_the_rounds_own(self):
        draw = sampling.FixedSizeSampler.cohort

        def cohort(sampler, round_index):
            if round_index == 2:
                raise RuntimeError("the sampler is damaged")
            return draw(sampler, round_index)

        fed = toy.federated(clients_per_round=5)
        with (
            mock.patch.object(sampling.FixedSizeSampler, "cohort", cohort),
            self.assertRaisesRegex(RuntimeError, "is damaged"),
        ):
            fed.fit(_streamed(toy.clients()), rounds=4, verbose=0)
        # What was released is there, and paid for.
        self.assertEqual(fed.run.rounds, 2)
