"""What a training run has spent, whatever its mechanism protects."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import local as local_lib
from tfdp_fl.accounting.local import epsilon_of_mu_squared

CENTRAL, LOCAL, RECORD, NONE = "central", "local", "record", "none"


class Spending:
    """The cost of the rounds that ran.

    A central guarantee is composed over rounds under the sampling that ran. A
    local one (and a guarantee per record) is composed for each client over the
    rounds it took part in; the client that was seen most sets the epsilon.

    Attributes:
      guarantee: "central", "local", "record" or "none".
      central: The `PrivacyAccountant` of the rounds.
      clients: The `LocalAccount` of the clients' own releases.
      lost_mu_squared: What any one client may have spent on top in rounds that
        a crash cut off between their charge and their checkpoint: nobody can
        tell any more which clients those were.
    """

    def __init__(self, guarantee: str, num_clients: int):
        self.guarantee = guarantee
        self.central = accountant_lib.PrivacyAccountant()
        self.clients = local_lib.LocalAccount(num_clients)
        self.lost_mu_squared = 0.0

    @property
    def rounds(self) -> int:
        """Returns how many rounds were charged."""
        return self.central.rounds

    @property
    def by_client(self) -> bool:
        """Returns True if the guarantee is composed client by client."""
        return self.guarantee in (LOCAL, RECORD)

    @property
    def max_mu_squared(self) -> float:
        """Returns the most that one client can have spent."""
        return self.clients.max_mu_squared + self.lost_mu_squared

    def charge(
        self,
        charge: charge_lib.RoundCharge,
        positions: np.ndarray,
        mu_squared: float,
    ) -> None:
        """Charges one round.

        Args:
          charge: What the round costs centrally.
          positions: Int64 [K], the clients that took part.
          mu_squared: (sensitivity / sigma)^2 of one client's release; used
            only if the guarantee is composed client by client.
        """
        self.central.add(charge)
        self.clients.add(positions, mu_squared if self.by_client else 0.0)

    def epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns the epsilon of the mechanism's own guarantee at delta.

        A composition of Gaussian releases of one client is converted exactly
        (Balle & Wang 2018), so `accountant` makes no difference there.
        """
        if self.by_client:
            return epsilon_of_mu_squared(self.max_mu_squared, delta)
        return self.central.epsilon(delta, accountant)

    def central_epsilon(self, delta: float, accountant: str = "rdp") -> float:
        """Returns what the same noise gives against who sees the model only.

        Infinite where no central guarantee is claimed.
        """
        return self.central.epsilon(delta, accountant)

    def epsilon_after(
        self,
        charge: charge_lib.RoundCharge,
        mu_squared: float,
        delta: float,
        accountant: str = "rdp",
    ) -> float:
        """Returns what epsilon would be after one more round.

        Which clients the round will draw is not known yet: the client that was
        seen most is taken to be among them.
        """
        if self.by_client:
            return epsilon_of_mu_squared(
                self.max_mu_squared + mu_squared, delta
            )
        return self.central.epsilon_after(charge, delta, accountant)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must keep: JSON values and arrays."""
        clients = self.clients.get_state()
        return {
            "guarantee": self.guarantee,
            "charges": [
                [charge.to_json(), count]
                for charge, count in self.central.charges
            ],
            "mu_squared": clients["mu_squared"],
            "participations": clients["participations"],
            "lost_mu_squared": self.lost_mu_squared,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Spending:
        """Returns the spending that `state` was taken of."""
        spending = cls(state["guarantee"], len(state["mu_squared"]))
        for charge, count in state["charges"]:
            spending.central.add(
                charge_lib.RoundCharge.from_json(charge), int(count)
            )
        spending.clients.set_state(state)
        spending.lost_mu_squared = float(state.get("lost_mu_squared", 0.0))
        return spending
