import functools
import json

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized

from tfdp_fl import accounting, learning, mechanisms
from tfdp_fl.aggregators import AggregatorState, RoundHistory
from tfdp_fl.aggregators.state import history_kind
from tfdp_fl.mechanisms import mechanism as mechanism_lib

DELTA = 1e-5


def state_after(mechanism, rounds, clients_per_round=100, **facts):
    """Returns what an aggregator's state says after a number of rounds."""
    deployment = mechanism_lib.Deployment(
        clients_per_round=clients_per_round, **{"rounds": 10, **facts}
    )
    events = [mechanism.round_event(k, deployment) for k in range(rounds)]
    event = events[-1] if rounds else dp_accounting.NonPrivateDpEvent()
    if mechanism.guarantee in ("local", "record"):
        costs = [mechanism.mu_squared(deployment)] * rounds
        event = dp_accounting.NonPrivateDpEvent()
    else:
        gaussian = dp_accounting.GaussianDpEvent
        costs = [
            each.noise_multiplier if isinstance(each, gaussian) else 0.0
            for each in events
        ]
    kind = history_kind(mechanism, event, deployment.sampling)
    return AggregatorState(
        query_state=(),
        rounds=rounds,
        sum_state=(),
        history=RoundHistory(
            kinds=np.full(rounds, kind),
            costs=np.array(costs, np.float64),
            cohort_sizes=np.array(
                [deployment.cohort_size(k) for k in range(rounds)], np.float64
            ),
            populations=np.full(rounds, deployment.num_clients or 0),
            answered=np.array(
                [deployment.cohort_size(k) for k in range(rounds)], np.float64
            ),
        ),
    )


def one_after_the_other(*states):
    """Returns the state that one process after the other made."""
    return states[-1]._replace(
        rounds=sum(each.rounds for each in states),
        history=RoundHistory(
            *map(
                np.concatenate,
                zip(*(each.history for each in states), strict=True),
            )
        ),
    )


def fixed(noise_multiplier):
    return mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=noise_multiplier)


class EpsilonTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("poisson", "poisson", 7.8993, 7.0466),
        ("fixed_size", "fixed_size", 83.9369, 36.7715),
    )
    def test_table_of_the_design(self, sampling, rdp, pld):
        # N = 1000, m = 100, z = 1, T = 100, delta = 1e-5.
        state = state_after(fixed(1.0), 100)
        arguments = {
            "sampling": sampling,
            "num_clients": 1000,
            "clients_per_round": 100,
            "delta": DELTA,
        }
        value = learning.epsilon(state, fixed(1.0), **arguments)
        self.assertAlmostEqual(value / rdp, 1, delta=0.01)
        value = learning.epsilon(state, fixed(1.0), accountant="pld", **arguments)
        self.assertAlmostEqual(value / pld, 1, delta=0.01)

    def test_shuffled_counts_passes(self):
        # Ten cohorts of 100 are one pass: every client once, no more.
        value = learning.epsilon(
            state_after(fixed(2.0), 10),
            fixed(2.0),
            sampling="shuffled",
            num_clients=1000,
            clients_per_round=100,
            delta=DELTA,
        )
        self.assertAlmostEqual(
            value,
            accounting.epsilon(2.0, "shuffled", 1000, 100, 10, DELTA),
        )

    def test_local_guarantee_is_that_of_one_client(self):
        mechanism = mechanisms.LocalDP(clip_norm=1.0, epsilon=8.0, delta=DELTA)

        def spent(rounds, **options):
            return learning.epsilon(
                state_after(mechanism, rounds),
                mechanism,
                sampling="poisson",
                num_clients=1000,
                clients_per_round=100,
                delta=DELTA,
                rounds=10,
                **options,
            )

        self.assertEqual(spent(0), 0.0)
        self.assertLess(spent(5), 8.0)
        # Nobody was in more than 10 rounds, which is what it was made for.
        self.assertAlmostEqual(spent(10), 8.0, places=4)
        # It had noise for ten, and was in three.
        self.assertLess(spent(10, max_participations=3), 5.0)

    def test_each_round_costs_what_it_cost_when_it_was_run(self):
        # Four rounds nearly without noise, and one with much.
        state = one_after_the_other(
            state_after(fixed(0.1), 4), state_after(fixed(5.0), 1)
        )
        declared = {
            "sampling": "poisson",
            "num_clients": 1000,
            "clients_per_round": 100,
            "delta": DELTA,
        }
        value = learning.epsilon(state, fixed(5.0), **declared)
        expected = accounting.epsilon(
            (0.1,) * 4 + (5.0,), "poisson", 1000, 100, 5, DELTA
        )
        self.assertAlmostEqual(value, expected)
        self.assertGreater(value, 100)
        self.assertIn("0.1 to 5", value.statement)

    def test_so_do_local_releases(self):
        weak, strong = (
            mechanisms.LocalDP(clip_norm=1.0, noise_multiplier=z) for z in (1.0, 100.0)
        )
        state = one_after_the_other(state_after(weak, 2), state_after(strong, 3))

        def spent(mechanism, **options):
            return learning.epsilon(
                state,
                mechanism,
                sampling="poisson",
                num_clients=1000,
                clients_per_round=100,
                delta=DELTA,
                **options,
            )

        mu_squared = 2 * 4.0 + 3 * 4e-4
        self.assertAlmostEqual(
            spent(strong),
            accounting.epsilon_of_mu_squared(mu_squared, DELTA),
        )
        # Of the rounds that it may have been in, the most costly ones.
        self.assertAlmostEqual(
            spent(strong, max_participations=1),
            accounting.epsilon_of_mu_squared(4.0, DELTA),
        )

    @parameterized.named_parameters(
        (
            "another_mechanism",
            state_after(mechanisms.MedianClipping(noise_multiplier=1.0), 2),
            "round 1 of 3 was run by a process of another kind",
        ),
        (
            "noise_elsewhere",
            state_after(
                mechanisms.FixedClipping(
                    clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
                ),
                2,
            ),
            "another kind",
        ),
        (
            "another_sampling",
            state_after(fixed(1.0), 2, sampling="fixed_size"),
            "another kind",
        ),
        (
            "another_population",
            state_after(fixed(1.0), 2, num_clients=100),
            "num_clients must be the 100",
        ),
    )
    def test_rounds_that_cannot_be_priced_here(self, earlier, message):
        state = one_after_the_other(earlier, state_after(fixed(1.0), 1))
        with self.assertRaisesRegex(ValueError, message):
            learning.epsilon(
                state,
                fixed(1.0),
                sampling="poisson",
                num_clients=1000,
                clients_per_round=100,
                delta=DELTA,
            )

    @parameterized.parameters(
        ("fixed_size", 100, 101), ("poisson", 160, 190), ("shuffled", 100, 120)
    )
    def test_cohorts_larger_than_declared(self, sampling, possible, impossible):
        # N = 1000, m = 100: Poisson cohorts above 172 have probability 1e-12.
        for size in (possible, impossible):
            state = state_after(fixed(1.0), 3)
            answered = np.array([90.0, size, 100.0])
            state = state._replace(history=state.history._replace(answered=answered))
            call = functools.partial(
                learning.epsilon,
                state,
                fixed(1.0),
                sampling=sampling,
                num_clients=1000,
                clients_per_round=100,
                delta=1e-5,
            )
            if size == possible:
                self.assertGreater(call(), 0)
                continue
            with self.assertRaisesRegex(ValueError, f"{size} answered in round 2"):
                call()

    def test_a_state_without_its_history(self):
        state = state_after(fixed(1.0), 2)._replace(rounds=3)
        with self.assertRaisesRegex(ValueError, "history"):
            learning.privacy_charges(
                state,
                fixed(1.0),
                sampling="poisson",
                num_clients=1000,
                clients_per_round=100,
            )

    def test_the_statement_says_what_the_number_is(self):
        declared = {
            "sampling": "poisson",
            "num_clients": 1000,
            "clients_per_round": 100,
            "delta": DELTA,
        }
        state = state_after(fixed(1.0), 100)
        value = learning.epsilon(state, fixed(1.0), **declared)
        self.assertIsInstance(value, float)
        self.assertEqual(json.loads(json.dumps(value)), float(value))
        self.assertIn("epsilon = 7.9", value.statement)
        self.assertIn("was declared by the caller", value.statement)
        self.assertIn("not the server's state", value.statement)
        facts = learning.privacy_statement(state, fixed(1.0), format="dict", **declared)
        self.assertEqual(facts["epsilon"], value)
        for caveat in ("tff_cohorts_declared", "tff_other_releases"):
            self.assertIn(caveat, facts["caveats"])

    @parameterized.named_parameters(
        ("noise", fixed(2.0), 100, "noise multiplier of 1.0"),
        ("no_noise", mechanisms.NoPrivacy(), 99, "another kind"),
        ("clients", fixed(1.0), 50, "clients_per_round"),
    )
    def test_declarations_that_the_state_contradicts(
        self, mechanism, clients_per_round, message
    ):
        with self.assertRaisesRegex(ValueError, message):
            learning.epsilon(
                state_after(fixed(1.0), 3),
                mechanism,
                sampling="poisson",
                num_clients=1000,
                clients_per_round=clients_per_round,
                delta=DELTA,
            )


if __name__ == "__main__":
    absltest.main()
