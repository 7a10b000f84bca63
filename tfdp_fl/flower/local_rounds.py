"""What rounds cost in which each client is private by itself."""

from __future__ import annotations

from typing import Any, cast

from tfdp_fl import _validate
from tfdp_fl.accounting import gaussian, ledger_contents
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import rounds


class LocalHistory(rounds.RoundHistory):
    """The rounds in which clients were asked for a release of their own.

    The guarantee is one for each client: its data are replaced by other data.
    Gaussian releases of one client compose exactly, mu^2 adds up
    (`accounting.LocalAccount`). A client that comes back under another node id
    cannot be told from another client: all are charged as if they had been in
    every round.

    A round is charged when its clients are asked: what a client sends has left
    it, whether the round is finished or not.
    """

    def __init__(
        self,
        target_epsilon: float | None,
        target_delta: float | None,
        accountant: str,
    ):
        super().__init__(target_epsilon, target_delta, accountant)
        self._mu_squared = 0.0
        # What the open ledger's run has spent by its lines, whoever wrote them.
        self._written = 0.0

    def epsilon_after(self, planned: rounds.ReleasedRound) -> float:
        """Implements `RoundHistory.epsilon_after`: exact, for one client."""
        return gaussian.epsilon_of_mu_squared(
            self._mu_squared + self._charge_of(planned),
            cast(float, self.target_delta),
        )

    def epsilon(
        self,
        num_clients: int | None,
        delta: float,
        sampling: str,
        accountant: str,
    ) -> float:
        """Returns epsilon at delta of a client that was in every round."""
        del num_clients, accountant  # Nothing hangs on them here.
        _validate.one_of(rounds.SAMPLINGS, sampling=sampling)
        return gaussian.epsilon_of_mu_squared(self._mu_squared, delta)

    def _spend(self, charge: float) -> None:
        self._mu_squared += charge

    def _charge_of(self, released: rounds.ReleasedRound) -> float:
        # Of rounds in which clients are private by themselves it is known.
        return cast(float, released.mu_squared)

    def _charge_of_entry(
        self,
        entry: ledger_contents.LedgerEntry,
        ledger: ledger_lib.PrivacyLedger,
    ) -> float:
        if entry.local is None:
            raise ValueError(
                "ledger must hold rounds with a local charge only, got "
                f"{ledger.path} with one of {entry.charge!r}: a central "
                "guarantee and a local one are no one epsilon."
            )
        return entry.local["mu_squared"]

    def _charge_to_json(self, charge: float) -> Any:
        return charge

    def _charge_from_json(self, written: Any) -> float:
        return float(written)

    def _charge_unknown(self, ledger: ledger_lib.PrivacyLedger) -> None:
        # A ledger has one run as long as it is open, and may serve several
        # strategies: what the others wrote is in the run's sum too.
        if self._ledger is None or ledger.rounds != self._in_ledger:
            own = ledger.contents().by_run().get(ledger.run, ())
            self._written = ledger_contents.largest_mu_squared(own)
        super()._charge_unknown(ledger)

    def _write(
        self,
        ledger: ledger_lib.PrivacyLedger,
        released: rounds.ReleasedRound,
        **details: Any,
    ) -> None:
        super()._write(ledger, released, **details)
        self._written += self._charge_of(released)

    def _ledger_line(self, released: rounds.ReleasedRound) -> dict[str, Any]:
        return {
            "charge": None,
            "local": {
                "mu_squared": released.mu_squared,
                "max_mu_squared": self._written + self._charge_of(released),
            },
        }
