"""What the coming rounds draw and cost."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
from collections.abc import Iterator

import dp_accounting
import numpy as np

from tfdp_fl import accounting
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras.run import Run
from tfdp_fl.keras.training_setup import TrainingSetup

# Rounds that a budget is first asked about: as many as most runs have.
_TRIED_FIRST = 2**12


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """A mechanism under a sampling, on top of what was spent already.

    Attributes:
      setup: How cohorts are drawn, and what is released of them.
      run: The rounds so far.
    """

    setup: TrainingSetup
    run: Run

    def draw(
        self, round_index: int, account: accounting.LocalAccount | None = None
    ) -> np.ndarray:
        """Returns the positions (int64 [K]) of a round's clients.

        Clients that took part as often as they may sit out.
        """
        positions = self.run.sampler.cohort(round_index)
        limit = self.setup.mechanism.max_participations
        if limit is None:
            return positions
        account = account or self.run.spending.clients
        return positions[account.participations[positions] < limit]

    def charge(
        self, round_index: int, answered: int | None = None
    ) -> accounting.RoundCharge:
        """Returns what a round costs."""
        mechanism, run = self.setup.mechanism, self.run
        first = mechanism.event_index(run.rounds, run.mechanism_state.memory)
        event = mechanism.round_event(first + round_index - run.rounds, run.deployment)
        size = run.sampler.expected_cohort_size(round_index)
        if answered is not None:
            size = answered
        expected = run.deployment.cohort_size(round_index)
        if mechanism.guarantee == spending_lib.LOCAL and size < expected:
            # Clients that are missing did not add their noise.
            event = dp_accounting.NonPrivateDpEvent()
        return run.sampler.charge(round_index, event)

    @property
    def mu_squared(self) -> float:
        """(sensitivity / sigma)^2 of one client's own release; 0 if none."""
        if not self.run.spending.by_client:
            return 0.0
        return self.setup.mechanism.mu_squared(self.run.deployment)

    def _mu_squared_after(self, rounds: int) -> Iterator[float]:
        """Yields the most that one client can have spent after each round.

        The cohorts of a shuffled order are known beforehand. Of others it is
        not known which clients they will draw: any that may still take part.
        """
        run, mu_squared = self.run, self.mu_squared
        clients, elsewhere = run.spending.clients, run.spending.mu_squared_elsewhere
        if self.setup.sampling != "shuffled":
            most = self.setup.mechanism.max_participations
            for ahead in range(1, rounds + 1):
                yield elsewhere + clients.max_mu_squared_after_draws(
                    ahead, mu_squared, most
                )
            return
        trial = clients.copy()
        for ahead in range(rounds):
            trial.add(self.draw(run.rounds + ahead, trial), mu_squared)
            yield elsewhere + trial.max_mu_squared

    def epsilon_after_round(
        self, round_index: int, delta: float, accountant: str | None = None
    ) -> float:
        """Returns what epsilon would be after the coming round."""
        if self.run.spending.by_client:
            (spent,) = self._mu_squared_after(1)
            return accounting.epsilon_of_mu_squared(spent, delta)
        return self.run.spending.epsilon_after(
            self.charge(round_index),
            self.mu_squared,
            delta,
            accountant or self.setup.accountant,
        )

    def affordable_rounds(
        self, epsilon: float, delta: float, rounds: int, accountant: str | None = None
    ) -> int:
        """Returns how many of the next rounds a budget allows."""
        run = self.run
        if run.spending.by_client:
            for done, spent in enumerate(self._mu_squared_after(rounds)):
                if accounting.epsilon_of_mu_squared(spent, delta) > epsilon:
                    return done
            return rounds
        charge = functools.cache(self.charge)

        def cost(count: int) -> float:
            trial = run.spending.central.copy()
            ahead = range(run.rounds, run.rounds + count)
            for kind, rounds_alike in collections.Counter(map(charge, ahead)).items():
                trial.add(kind, rounds_alike)
            return trial.epsilon(delta, accountant or self.setup.accountant)

        most = min(rounds, _TRIED_FIRST)
        while cost(most) <= epsilon:
            if most == rounds:
                return rounds
            most = min(2 * most, rounds)
        return bisect.bisect_right(range(1, most), epsilon, key=cost)
