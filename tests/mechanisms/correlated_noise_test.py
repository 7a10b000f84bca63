from __future__ import annotations

import dp_accounting
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import tfdp_fl
from tests.mechanisms import references, rounds, statistics
from tfdp_fl import accounting
from tfdp_fl.mechanisms import Deployment, noise

_WIDE = [[100, 100], [100, 110]]


def _mechanism(strategy="blt:2", **options):
    return tfdp_fl.CorrelatedNoise(
        **{
            "clip_norm": 0.5,
            "noise_multiplier": 1.0,
            "strategy": strategy,
            "rounds": 12,
            "min_separation": 4,
            **options,
        }
    )


def _query(mechanism, shapes=rounds.SHAPES):
    query = mechanism.bind(
        Deployment(
            clients_per_round=4,
            num_clients=16,
            sampling="cyclic",
            shapes=tuple(map(tuple, shapes)),
        )
    )
    return query, query.initial_global_state()


def _mu_squared(events):
    return sum(
        accounting.RoundCharge(
            sampling="cyclic", num_clients=4, clients_per_round=1, event=event
        ).noise_multiplier
        ** -2
        for event in events
    )


class ReleaseTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("blt:2", "banded", "banded:1")
    def test_without_noise_is_the_papers_mean(self, strategy):
        query, state = _query(_mechanism(strategy))
        norms = (0.0, 0.05, 0.3, 0.5, 7.0, 1e4)
        updates = rounds.updates_with_norms(norms)
        for _ in range(3):
            done = rounds.run_round(query, state, updates, clients_per_round=4)
            wanted = references.fixed_clipping_mean(updates, 0.5, 4)
            for actual, expected in zip(done.mean, wanted, strict=True):
                self.assertAllClose(actual, expected, rtol=1e-5, atol=1e-7)
            state = done.next_state

    def test_with_one_band_is_fixed_clipping_bit_for_bit(self):
        mechanism = _mechanism("banded:1", min_separation=1)
        fixed = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
        query, state = _query(mechanism, _WIDE)
        other = fixed.bind(Deployment(clients_per_round=4))
        other_state = other.initial_global_state()
        updates = rounds.updates_with_norms([1.0, 0.1], _WIDE)
        for t in range(3):
            one, two = (
                rounds.run_round(
                    each, each_state, updates, noise_multiplier=1.5, seed=t
                )
                for each, each_state in ((query, state), (other, other_state))
            )
            for actual, expected in zip(one.mean, two.mean, strict=True):
                self.assertAllEqual(actual, expected)
            state, other_state = one.next_state, two.next_state
        deployment = Deployment(clients_per_round=4)
        for t in range(12):
            self.assertEqual(
                mechanism.round_event(t, deployment),
                fixed.round_event(t, deployment),
            )

    @parameterized.parameters("blt:2", "banded:3")
    def test_noise_undone_is_fresh(self, strategy):
        # Twelve rounds of 21 000 values; statistics states its false alarms.
        mechanism = _mechanism(strategy, noise_multiplier=1.5)
        query, state = _query(mechanism, _WIDE)
        zeros = rounds.zero_updates(4, _WIDE)
        found = []
        for _ in range(12):
            done = rounds.run_round(query, state, zeros, noise_multiplier=1.5)
            state = done.next_state
            found.append(np.concatenate([np.ravel(v) for v in done.mean]))
        c = mechanism.generator.coefficients
        fresh = []
        for t in range(12):
            terms = [c[j] * found[t - j] for j in range(min(t + 1, len(c)))]
            fresh.append(np.sum(terms, axis=0))
            statistics.assert_gaussian(fresh[t], 1.5 * 0.5 / 4)
            if t:
                statistics.assert_uncorrelated(fresh[t], fresh[t - 1])

    def test_a_clip_that_moves_scales_what_is_made_of_unit_noise(self):
        mechanism = _mechanism()
        memory = mechanism.first_memory(
            Deployment(clients_per_round=4, shapes=((50,),))
        )
        moved, plain = memory, memory
        for t, stddev in enumerate((1.0, 0.25, 3.0, 0.5)):
            seed = tf.constant([t, 7], tf.int64)
            zeros = [tf.zeros([50])]
            with noise.seeded(seed):
                one, moved = mechanism.add_noise(zeros, stddev, moved)
            with noise.seeded(seed):
                unit, plain = mechanism.add_noise(zeros, 1.0, plain)
            self.assertAllClose(one[0], stddev * unit[0], rtol=1e-6)

    def test_after_the_last_round_the_memory_is_empty(self):
        mechanism = _mechanism(rounds=3, min_separation=1)
        _, state = _query(mechanism)
        memory = state.memory
        update = [tf.zeros(shape) for shape in rounds.SHAPES]

        def step(memory):
            with noise.seeded(tf.constant([1, 2], tf.int64)):
                return mechanism.add_noise(update, 1.0, memory)

        first, memory = step(memory)
        for _ in range(2):
            _, memory = step(memory)
        self.assertEqual(int(memory.position), 3)
        again, memory = step(memory)
        self.assertEqual(int(memory.position), 1)
        for one, other in zip(first, again, strict=True):
            self.assertAllEqual(one, other)

    def test_a_new_segment_forgets_all_but_the_clip(self):
        query, state = _query(_mechanism())
        done = rounds.run_round(
            query, state, rounds.zero_updates(2), noise_multiplier=1.0
        )
        self.assertEqual(int(done.next_state.memory.position), 1)
        new = query.new_segment(done.next_state)
        self.assertEqual(int(new.memory.position), 0)
        for buffer in new.memory.buffers:
            self.assertAllEqual(buffer, tf.zeros_like(buffer))
        self.assertEqual(float(new.clip_norm), 0.5)
        other = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
        bound = other.bind(Deployment(clients_per_round=4))
        plain = bound.initial_global_state()
        self.assertEqual(bound.new_segment(plain), plain)


class ChargeTest(parameterized.TestCase):
    @parameterized.parameters("blt:2", "blt:3", "banded", "banded:6", "banded:1")
    def test_rounds_add_up_to_one_gaussian(self, strategy):
        for most in (1, 2, None):
            mechanism = _mechanism(
                strategy, noise_multiplier=3.0, max_participations=most
            )
            deployment = Deployment(clients_per_round=4, sampling="cyclic")
            events = [mechanism.round_event(t, deployment) for t in range(12)]
            whole = (mechanism.generator.sensitivity / 3.0) ** 2
            np.testing.assert_allclose(_mu_squared(events), whole, rtol=1e-12)

    def test_the_accountant_composes_them_to_it(self):
        # The design's 32 bands of 1 / sqrt(1 - x), T = 128, b = 32, z = 6.
        steps = np.arange(1, 32)
        root = np.cumprod(np.concatenate([[1], (2 * steps - 1) / (2 * steps)]))
        mechanism = tfdp_fl.CorrelatedNoise(
            clip_norm=1.0,
            noise_multiplier=6.0,
            strategy=tfdp_fl.BandedToeplitz(coefficients=tuple(root)),
            rounds=128,
            min_separation=32,
        )
        deployment = Deployment(
            clients_per_round=32, num_clients=1024, sampling="cyclic"
        )
        history = accounting.PrivacyAccountant()
        for t in range(128):
            history.add(
                accounting.RoundCharge(
                    sampling="cyclic",
                    num_clients=1024,
                    clients_per_round=32,
                    event=mechanism.round_event(t, deployment),
                )
            )
        one = accounting.gaussian_epsilon(6.0 / mechanism.generator.sensitivity, 1e-5)
        self.assertAlmostEqual(history.epsilon(1e-5, "pld"), one, places=9)
        self.assertAlmostEqual(one, 1.9517, delta=5e-5)

    def test_the_query_reports_no_less(self):
        mechanism = _mechanism(noise_multiplier=2.0)
        query, state = _query(mechanism)
        deployment = Deployment(clients_per_round=4)
        for t in range(14):
            done = rounds.run_round(
                query, state, rounds.zero_updates(2), noise_multiplier=2.0
            )
            state = done.next_state
            self.assertAlmostEqual(
                float(done.event.noise_multiplier),
                mechanism.round_event(t, deployment).noise_multiplier,
                places=5,
            )

    def test_without_noise_there_is_no_privacy(self):
        event = _mechanism(noise_multiplier=0.0).round_event(
            3, Deployment(clients_per_round=4)
        )
        self.assertEqual(event, dp_accounting.NonPrivateDpEvent())

    def test_where_the_memory_stands_is_what_is_charged(self):
        mechanism = _mechanism()
        _, state = _query(mechanism)
        memory = state.memory._replace(position=tf.constant(5))
        self.assertEqual(mechanism.event_index(17, memory), 5)
        other = tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
        self.assertEqual(other.event_index(17, ()), 17)


class DeclarationTest(parameterized.TestCase):
    @parameterized.parameters("poisson", "fixed_size", "shuffled")
    def test_other_samplings_are_refused(self, sampling):
        deployment = Deployment(clients_per_round=4, sampling=sampling)
        with self.assertRaisesRegex(ValueError, "sampling must be 'cyclic'"):
            _mechanism().check(deployment)

    def test_clients_who_cannot_be_so_seldom_drawn_are_refused(self):
        def deployment(**options):
            return Deployment(
                **{
                    "clients_per_round": 4,
                    "num_clients": 16,
                    "sampling": "cyclic",
                    **options,
                }
            )

        _mechanism().check(deployment())
        # 4 cohorts of 4 clients need 16.
        with self.assertRaisesRegex(ValueError, "at most .* 15 / 4"):
            _mechanism().check(deployment(num_clients=15))
        once = _mechanism(max_participations=1)
        once.check(deployment(max_participations=1))
        with self.assertRaisesRegex(ValueError, "max_participations"):
            once.check(deployment(max_participations=2))

    def test_cohorts_of_changing_size_are_refused(self):
        deployment = Deployment(clients_per_round=(4, 5), sampling="cyclic")
        with self.assertRaisesRegex(ValueError, "clients_per_round"):
            _mechanism().check(deployment)

    def test_without_shapes_there_is_no_memory(self):
        query = _mechanism().bind(Deployment(clients_per_round=4))
        with self.assertRaisesRegex(ValueError, "shapes"):
            query.initial_global_state()

    @parameterized.parameters(
        ("blt", tfdp_fl.BLT()),
        ("blt:2", tfdp_fl.BLT(2)),
        ("banded", tfdp_fl.BandedToeplitz()),
        ("banded:5", tfdp_fl.BandedToeplitz(5)),
    )
    def test_a_strategy_may_be_a_text(self, text, strategy):
        self.assertEqual(_mechanism(text).strategy, strategy)

    def test_the_server_s_momentum_has_a_part_in_the_choice(self):
        with_momentum = _mechanism(server_momentum=0.9).generator
        self.assertFalse(
            np.allclose(with_momentum.coefficients, _mechanism().generator.coefficients)
        )

    def test_chosen_for_the_optimizer_that_runs(self):
        given = _mechanism("blt:2")
        made = given.for_server(0.9)
        self.assertEqual(made.noise_multiplier, given.noise_multiplier)
        self.assertEqual(made.server_momentum, 0.9)
        self.assertEqual(
            made.generator.numbers,
            _mechanism("blt:2", server_momentum=0.9).generator.numbers,
        )
        told = _mechanism(server_momentum=0.0)
        self.assertEqual(told.for_server(0.9), told)
        fixed = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=1.0)
        self.assertIs(fixed.for_server(0.9, 5), fixed)

    @parameterized.product(strategy=["blt:2", "banded", "banded:2"], rounds=[5, 12, 31])
    def test_where_a_target_is_kept_the_noise_follows(self, strategy, rounds):
        given = _mechanism(strategy)
        made = given.for_server(0.9, rounds)
        deployment = Deployment(clients_per_round=2, num_clients=40, sampling="cyclic")
        before = accounting.PrivacyAccountant()
        after = accounting.PrivacyAccountant()
        for history, mechanism in ((before, given), (after, made)):
            for t in range(rounds):
                history.add(
                    accounting.RoundCharge(
                        sampling="cyclic",
                        num_clients=40,
                        clients_per_round=2,
                        event=mechanism.round_event(t, deployment),
                    )
                )
        self.assertLessEqual(after.epsilon(1e-5), before.epsilon(1e-5))
        self.assertGreater(after.epsilon(1e-5), 0.8 * before.epsilon(1e-5))


if __name__ == "__main__":
    tf.test.main()
