"""What the coming rounds draw and cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import dp_accounting
import numpy as np

from tfdp_fl import accounting, sampling
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras.run import Run
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.mechanisms import Deployment, Mechanism

# Rounds that a budget is first asked about: as many as most runs have.
_TRIED_FIRST = 2**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """A mechanism under a sampling, on top of what was spent already.

    Attributes:
      mechanism: What is released about a cohort.
      deployment: Where.
      sampler: Draws the cohorts.
      spending: What the rounds so far have cost.
      first_round: The coming round, counted from 0.
      first_event: What `Mechanism.event_index` says of it.
      accountant: "rdp" or "pld", unless a method is told otherwise.
    """

    mechanism: Mechanism
    deployment: Deployment
    sampler: sampling.CohortSampler
    spending: spending_lib.Spending
    first_round: int
    first_event: int
    accountant: str

    @classmethod
    def of(cls, setup: TrainingSetup, run: Run) -> RoundCosts:
        """Returns those of a run that goes on as it was set up."""
        return cls(
            mechanism=setup.mechanism,
            deployment=run.deployment,
            sampler=run.sampler,
            spending=run.spending,
            first_round=run.rounds,
            first_event=setup.mechanism.event_index(
                run.rounds, run.mechanism_state.memory
            ),
            accountant=setup.accountant,
        )

    def draw(
        self, round_index: int, account: accounting.LocalAccount | None = None
    ) -> np.ndarray:
        """Returns the positions (int64 [K]) of a round's clients.

        Those who took part as often as they may sit out.

        Args:
          round_index: The round, counted from 0.
          account: How often they did; None: as it was up to now.
        """
        account = account or self.spending.clients
        positions = self.sampler.cohort(round_index)
        limit = self.mechanism.max_participations
        if limit is None:
            return positions
        return positions[account.participations[positions] < limit]

    def charge(
        self, round_index: int, answered: int | None = None
    ) -> charge_lib.RoundCharge:
        """Returns what a round costs.

        Args:
          round_index: The round, counted from 0.
          answered: How many clients answered; None: as many as expected.
        """
        ahead = round_index - self.first_round
        event = self.mechanism.round_event(self.first_event + ahead, self.deployment)
        size = self.sampler.expected_cohort_size(round_index)
        if answered is not None:
            size = answered
        if (
            self.mechanism.guarantee == spending_lib.LOCAL
            and size < self.deployment.cohort_size(round_index)
        ):  # The noise of those who are missing is missing too.
            event = dp_accounting.NonPrivateDpEvent()
        return self.sampler.charge(round_index, event)

    @property
    def mu_squared(self) -> float:
        """(sensitivity / sigma)^2 of one client's own release; 0 if none."""
        if not self.spending.by_client:
            return 0.0
        return self.mechanism.mu_squared(self.deployment)

    def _mu_squared_after(self, rounds: int) -> Iterator[float]:
        """Yields the most that one client can have spent after each round.

        The cohorts of a shuffled order are known beforehand. Of others it is
        not known which clients they will draw: any that may still take part.
        """
        mu_squared, clients = self.mu_squared, self.spending.clients
        elsewhere = self.spending.mu_squared_elsewhere
        if self.deployment.sampling != "shuffled":
            for draws in range(1, rounds + 1):
                yield elsewhere + clients.max_mu_squared_after_draws(
                    draws, mu_squared, self.mechanism.max_participations
                )
            return
        trial = accounting.LocalAccount(clients.num_clients)
        trial.set_state(clients.get_state())
        for ahead in range(rounds):
            positions = self.draw(self.first_round + ahead, trial)
            trial.add(positions, mu_squared)
            yield elsewhere + trial.max_mu_squared

    def epsilon_after_round(
        self, round_index: int, delta: float, accountant: str | None = None
    ) -> float:
        """Returns what epsilon would be after the coming round."""
        if self.spending.by_client:
            (spent,) = self._mu_squared_after(1)
            return spending_lib.epsilon_of_mu_squared(spent, delta)
        return self.spending.epsilon_after(
            self.charge(round_index),
            self.mu_squared,
            delta,
            accountant or self.accountant,
        )

    def affordable_rounds(
        self,
        epsilon: float,
        delta: float,
        rounds: int,
        accountant: str | None = None,
    ) -> int:
        """Returns how many of the next rounds a budget allows."""
        if self.spending.by_client:
            for done, spent in enumerate(self._mu_squared_after(rounds)):
                if spending_lib.epsilon_of_mu_squared(spent, delta) > epsilon:
                    return done
            return rounds
        # What the rounds ahead are charged, those alike in one.
        charges: list[tuple[charge_lib.RoundCharge, int]] = []
        ahead = itertools.count(self.first_round)

        def cost(count: int) -> float:
            known = sum(alike for _, alike in charges)
            for round_index in itertools.islice(ahead, max(0, count - known)):
                charge, before = self.charge(round_index), 0
                if charges and charges[-1][0] == charge:
                    _, before = charges.pop()
                charges.append((charge, before + 1))
            trial = self.spending.central.copy()
            for charge, alike in charges:
                trial.add(charge, min(alike, count))
                count -= alike
                if count <= 0:
                    break
            return trial.epsilon(delta, accountant or self.accountant)

        # So many are affordable, and so many are perhaps not.
        low, high = 0, min(rounds, _TRIED_FIRST)
        while cost(high) <= epsilon:
            if high == rounds:
                return rounds
            low, high = high, min(2 * high, rounds)
        while high - low > 1:
            middle = (low + high) // 2
            if cost(middle) <= epsilon:
                low = middle
            else:
                high = middle
        return low
