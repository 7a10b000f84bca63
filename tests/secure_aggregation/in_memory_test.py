"""Faults and deadlines: every miss gives back the own update, and says so."""

from __future__ import annotations

import numpy as np
from absl.testing import absltest, parameterized

from tests.secure_aggregation.network import (
    Fault,
    InMemoryNetwork,
    aggregate_in_memory,
)
from tfdp_fl.secure_aggregation import (
    COORDINATOR,
    AdditiveSecretSharing,
)

_PROTOCOL = AdditiveSecretSharing(deadline_seconds=10.0)
_UPDATES = {
    name: np.random.default_rng(i).normal(size=5).astype(np.float32)
    for i, name in enumerate(("ann", "bob", "cat", "dan"))
}
_TOTAL = sum(update.astype(np.float64) for update in _UPDATES.values())
_WAITS_FOR = {1: "list of members", 2: "shares from", 3: "partial sums from"}


class InMemoryTest(parameterized.TestCase):
    def _succeeded(self, faults) -> set[str]:
        """Runs a round, checks every outcome, returns who succeeded."""
        outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, faults)
        self.assertEqual(list(outcomes), list(_UPDATES))
        for name, outcome in outcomes.items():
            if outcome.succeeded:
                np.testing.assert_allclose(outcome.value, _TOTAL, rtol=0, atol=1e-11)
                self.assertEqual(outcome.members, tuple(_UPDATES))
                self.assertEqual(outcome.reason, "")
            else:
                self.assertIs(outcome.value, _UPDATES[name])
                self.assertEqual(outcome.members, (name,))
                self.assertNotEqual(outcome.reason, "")
        self.outcomes = outcomes
        return {name for name, one in outcomes.items() if one.succeeded}

    def test_without_faults_all_succeed(self):
        self.assertEqual(self._succeeded([]), set(_UPDATES))

    @parameterized.parameters(1, 2, 3)
    def test_a_member_that_crashes_fails_the_others_at_that_step(self, step):
        self.assertEqual(self._succeeded([Fault("crash", step, "bob")]), set())
        self.assertEqual(self.outcomes["bob"].reason, "the member crashed")
        for name in ("ann", "cat", "dan"):
            self.assertIn(_WAITS_FOR[step], self.outcomes[name].reason)
            if step > 1:
                self.assertIn("'bob'", self.outcomes[name].reason)

    @parameterized.parameters("drop", "delay")
    def test_step_1_a_missed_list(self, action):
        # ann never begins, so all others wait for her shares in vain.
        fault = Fault(action, 1, COORDINATOR, "ann", seconds=10.1)
        self.assertEqual(self._succeeded([fault]), set())
        self.assertIn(_WAITS_FOR[1], self.outcomes["ann"].reason)
        for name in ("bob", "cat", "dan"):
            self.assertIn("shares from 'ann'", self.outcomes[name].reason)

    @parameterized.parameters("drop", "delay")
    def test_step_1_a_missed_ready_message(self, action):
        fault = Fault(action, 1, "ann", seconds=10.1)
        self.assertEqual(self._succeeded([fault]), set())
        for outcome in self.outcomes.values():
            self.assertIn(_WAITS_FOR[1], outcome.reason)

    @parameterized.parameters("drop", "delay")
    def test_step_2_a_missed_share(self, action):
        # bob lacks ann's share; without it he has no partial sum for the rest.
        fault = Fault(action, 2, "ann", "bob", seconds=10.1)
        self.assertEqual(self._succeeded([fault]), set())
        self.assertIn("shares from 'ann'", self.outcomes["bob"].reason)
        for name in ("ann", "cat", "dan"):
            self.assertIn("sums from 'bob'", self.outcomes[name].reason)

    @parameterized.parameters("drop", "delay")
    def test_step_3_a_missed_partial_sum(self, action):
        # Only the one who misses it fails: nobody can tell the others.
        fault = Fault(action, 3, "ann", "bob", seconds=10.1)
        self.assertEqual(self._succeeded([fault]), {"ann", "cat", "dan"})
        self.assertIn("sums from 'ann'", self.outcomes["bob"].reason)

    @parameterized.parameters(1, 2, 3)
    def test_a_delay_within_the_deadline_does_no_harm(self, step):
        faults = [Fault("delay", step, "ann", "bob", seconds=9.9)]
        faults.append(Fault("delay", step, COORDINATOR, "cat", seconds=9.5))
        self.assertEqual(self._succeeded(faults), set(_UPDATES))

    @parameterized.parameters(1, 2, 3)
    def test_duplicates_do_no_harm(self, step):
        network = InMemoryNetwork(
            [Fault("duplicate", step, sender) for sender in (*_UPDATES, COORDINATOR)]
        )
        outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, network=network)
        for outcome in outcomes.values():
            self.assertTrue(outcome.succeeded)
            np.testing.assert_allclose(outcome.value, _TOTAL, rtol=0, atol=1e-11)
        self.assertNotEmpty(network.rejected)

    def test_a_slow_network_misses_deadlines(self):
        outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, latency_seconds=5.1)
        self.assertFalse(any(one.succeeded for one in outcomes.values()))
        outcomes = aggregate_in_memory(_UPDATES, _PROTOCOL, latency_seconds=4.9)
        self.assertTrue(all(one.succeeded for one in outcomes.values()))

    def test_members_with_other_shapes_fail(self):
        outcomes = aggregate_in_memory({**_UPDATES, "eve": np.zeros(6)}, _PROTOCOL)
        self.assertFalse(any(one.succeeded for one in outcomes.values()))


if __name__ == "__main__":
    absltest.main()
