"""Writes every round into a ledger before it is released."""

from __future__ import annotations

import collections
import os
import pathlib
import warnings
from typing import Any

from tfdp_fl import accounting
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.accounting import spending as spending_lib
from tfdp_fl.keras import resuming, statement
from tfdp_fl.keras.callbacks.federated_callback import FederatedCallback


class Ledger(FederatedCallback):
    """Keeps a `tfdp_fl.accounting.PrivacyLedger` of the training.

    Each round's line is on the disk before its result can be seen by anyone;
    if it cannot be written, the round is not released. Rounds that the model
    was trained for before the ledger began are written first. A later `fit` of
    the same model goes on with the same file.

    Attributes:
      path: The file, readable by its owner only if it is made here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        append: bool = False,
    ):
        """Nothing is opened before training starts.

        Args:
          path: The file; its folder must exist.
          append: Whether to go on with a ledger of another run, so that it
            and the model count all runs on the same clients together: what the
            other runs spent is part of the model's epsilon from then on.
        """
        super().__init__()
        self.path = pathlib.Path(path)
        self._append = append
        self._opened: accounting.PrivacyLedger | None = None
        self._elsewhere = 0.0

    @property
    def head(self) -> str | None:
        """Returns the hash of the last line; None if it is not open."""
        return None if self._opened is None else self._opened.head

    @property
    def _ledger(self) -> accounting.PrivacyLedger:
        if self._opened is None:
            raise accounting.LedgerError(f"The ledger {self.path} is closed.")
        return self._opened

    def on_rounds_planned(self, first_round: int, last_round: int) -> None:
        """Opens the ledger, refusing that of another run."""
        del first_round, last_round
        federated_model, run = self.federated_model, self.federated_model.run
        target = federated_model.target
        name = resuming.ledger_key(self.path)
        known = run.known_ledgers.get(name)
        self._opened = accounting.PrivacyLedger(
            self.path,
            mode="append",
            target_epsilon=None if target is None else target.epsilon,
            target_delta=federated_model.delta if target is None else target.delta,
            mechanism={
                "name": federated_model.mechanism.name,
                "guarantee": federated_model.mechanism.guarantee,
                "description": federated_model.mechanism.describe(),
            },
            unit=statement.unit(federated_model.mechanism),
            expected_head=known or None,
            run=run.run_id,
        )
        contents = self._ledger.contents()
        ahead = name in run.ledgers_ahead
        if contents.entries and not self._append:
            if known is None:
                raise ValueError(
                    f"path must not be the ledger of another run, which "
                    f"{self.path} is ({len(contents.entries)} rounds): go on "
                    "with that run by fit(resume_from=...), choose another "
                    "path, or count both together with append=True."
                )
            if known != contents.head and not ahead:
                raise ValueError(
                    f"path must be a ledger that no other run went on with, "
                    f"and {self.path} has rounds that this model does not "
                    "know of; resume from its directory."
                )
        self._check_runs(contents, ahead)
        run.spending.absorb(contents, run.run_id, name)
        run.ledgers_ahead.discard(name)
        self._catch_up(contents)
        self._remember()

    def _check_runs(self, contents: accounting.LedgerContents, ahead: bool) -> None:
        """Refuses rounds that cannot be told apart from or added to our own."""
        federated_model, run = self.federated_model, self.federated_model.run
        runs = contents.by_run()
        own = len(runs.pop(run.run_id, ()))
        heads = run.known_ledgers.values()
        seen = max((contents.rounds_known(run.run_id, h) for h in heads), default=0)
        if own > seen and not ahead:
            raise ValueError(
                f"path must not hold rounds of this very run that this model "
                f"does not know of, and {self.path} does: the run was gone on "
                "with in two places. Resume from that ledger's directory, or "
                "choose another path."
            )
        if not runs:
            return
        guarantee = federated_model.mechanism.guarantee
        other = contents.header.get("mechanism", {}).get("guarantee", guarantee)
        central = (spending_lib.CENTRAL, spending_lib.NONE)
        if other != guarantee and not {other, guarantee} <= {*central}:
            raise ValueError(
                f"path must be a ledger of runs with a {guarantee} guarantee, "
                f"to be counted together, and {self.path} is one of runs with "
                f"a {other} guarantee."
            )
        relation = charge_lib.relation_of(federated_model.sampling)
        others = [entry for entries in runs.values() for entry in entries]
        for entry in others:
            if entry.charge is not None and entry.charge.relation != relation:
                raise ValueError(
                    "path must be a ledger of rounds whose neighbouring "
                    f"relation is {relation.name}, as for "
                    f"{federated_model.sampling} sampling, and {self.path} has "
                    "rounds of "
                    f"{entry.charge.sampling} sampling; one guarantee cannot "
                    "cover both."
                )
        if federated_model.run.facts.seed_given and any(
            entry.details.get("seeded") for entry in others
        ):
            warnings.warn(
                f"A seed was given, as it was to another run in {self.path}. "
                "If it is the same one, both have the same noise in the same "
                "rounds, and the difference of what they release has none: "
                "give another seed, or none.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _catch_up(self, contents: accounting.LedgerContents) -> None:
        """Writes what was charged while this ledger was not kept."""
        run = self.federated_model.run
        spending, next_round = run.spending, run.rounds
        runs = contents.by_run()
        lost = contents.lost_mu_squared(next_round, run.run_id)
        self._elsewhere = max(0.0, spending.lost_mu_squared - lost)
        written = collections.Counter(
            entry.charge for entry in runs.get(run.run_id, ())
        )
        for charge, count in spending.charges:
            for _ in range(count - written[charge]):
                self._ledger.record(
                    max(0, next_round - 1),
                    charge,
                    round(charge.clients_per_round),
                    local={
                        "mu_squared": 0.0,
                        "max_mu_squared": spending.clients.max_mu_squared
                        + self._elsewhere,
                    }
                    if spending.by_client
                    else None,
                    written_later=True,
                )
        for name, charge in spending.charges_of_evaluations.items():
            if name not in runs:
                self._ledger.record(
                    max(0, next_round - 1),
                    charge,
                    round(charge.clients_per_round),
                    run=name,
                    evaluation=True,
                    written_later=True,
                )

    def on_round_charged(
        self, round_index: int, charge: Any, details: dict[str, Any]
    ) -> None:
        """Writes the round's line and syncs it."""
        rest = dict(details)
        cohort_size = rest.pop("cohort_size")
        spent = {
            "mu_squared": rest.pop("mu_squared"),
            "max_mu_squared": rest.pop("max_mu_squared") + self._elsewhere,
        }
        self._ledger.record(
            round_index,
            charge,
            cohort_size,
            local=spent if self.federated_model.spending.by_client else None,
            **rest,
        )
        self._remember()

    def record_evaluation(self, run: str, charge: charge_lib.RoundCharge) -> None:
        """Writes what was released beside the rounds.

        Args:
          run: The id under which it stands, as if it were another run.
          charge: What it costs.
        """
        fed_run = self.federated_model.run
        key = resuming.ledger_key(self.path)
        if self._opened is not None:  # Inside a callback of `fit`.
            self._opened.record(
                max(0, fed_run.rounds - 1),
                charge,
                round(charge.clients_per_round),
                run=run,
                evaluation=True,
            )
            self._remember()
            return
        with accounting.PrivacyLedger(
            self.path,
            mode="append",
            expected_head=fed_run.known_ledgers.get(key) or None,
            run=run,
        ) as ledger:
            is_known = ledger.head == fed_run.known_ledgers.get(key)
            ledger.record(
                max(0, fed_run.rounds - 1),
                charge,
                round(charge.clients_per_round),
                evaluation=True,
            )
            if is_known:  # Else others wrote, and a later `fit` has to see it.
                fed_run.known_ledgers[key] = ledger.head

    def on_fit_end(self) -> None:
        """Closes the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _remember(self) -> None:
        key = resuming.ledger_key(self.path)
        self.federated_model.run.known_ledgers[key] = self._ledger.head
