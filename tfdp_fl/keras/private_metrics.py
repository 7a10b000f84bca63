"""Private means of metrics on each client's own data.

They take one Gaussian release over a cohort of clients. Client i with values v_ij of k
metrics, each in its declared range [a_j, b_j], contributes the vector

    g_i = (1, c_i1, ..., c_ik) / sqrt(1 + k),
    c_ij = (2 v_ij - a_j - b_j) / (b_j - a_j), in [-1, 1].

So ||g_i|| <= 1: adding or removing a client moves the sum by at most 1, and replacing
one by at most 2. The sum gets Gaussian noise of standard deviation z. Everything
reported, including the number of clients, is computed from the noisy sum alone (Dwork &
Roth, The Algorithmic Foundations of Differential Privacy, 2014, appendix A).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping

import dp_accounting
import numpy as np

from tfdp_fl import _signals, _validate
from tfdp_fl.accounting import Receipt
from tfdp_fl.accounting import account as account_lib
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras import evaluation, federated_training
from tfdp_fl.keras.callbacks import (
    Ledger,
    PrivacyBudget,
    callback_session,
    missing_ledgers,
)
from tfdp_fl.keras.federated_training import FederatedTraining
from tfdp_fl.terms import Json, Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivateMetrics:
    """The metrics that `evaluate_clients` releases privately, and their noise.

    Attributes:
      bounds: Maps a metric's name ("loss", or a compiled metric) to its range (low,
        high). Values outside are clipped to it. Choose the bounds without looking at
        the clients.
      noise_multiplier: z, the noise's standard deviation divided by the largest
        contribution of a client to the sum. 0 releases without privacy.
    """

    bounds: Mapping[str, tuple[float, float]]
    noise_multiplier: float

    def __post_init__(self) -> None:
        _validate.instance_of(Mapping, bounds=self.bounds)
        bounds = {}  # A copy: it decides the noise and the cost alike.
        for name, ends in self.bounds.items():
            pair = ends if isinstance(ends, tuple | list) and len(ends) == 2 else (0, 0)
            low, high = (_validate.finite(bounds=end) for end in pair)
            if not (low < high and math.isfinite(high - low)):
                raise ValueError(
                    "bounds must map a metric's name to (low, high) with low < high, "
                    f"got {name!r}: {ends!r}."
                )
            bounds[name] = low, high
        if not bounds:
            raise ValueError("bounds must name at least one metric, got none.")
        object.__setattr__(self, "bounds", bounds)
        z = _validate.non_negative(noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", float(z))

    @property
    def _scale(self) -> float:
        return math.sqrt(1 + len(self.bounds))

    def cost(self, sampling: str, num_clients: int) -> charge_lib.RoundCharge:
        """Returns the cost of releasing all clients' metrics.

        It has the neighbouring relation of the training's sampling: for cohorts of a
        fixed size, one client is replaced by another.
        """
        participation = charge_lib.Participation(
            sampling="fixed_size" if sampling == Sampling.FIXED_SIZE else "poisson",
            num_clients=num_clients,
            clients_per_round=num_clients,
        )
        event = dp_accounting.GaussianDpEvent(float(self.noise_multiplier))
        return participation.cost(event)

    def contributions(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the clients' contributions, float64 [N, 1 + k], with norms <= 1.

        A client with a metric that is NaN contributes zeros.
        """
        for name in self.bounds:
            if name not in values:
                raise ValueError(
                    "bounds must name metrics that were compiled "
                    f"({', '.join(map(repr, values))}), got {name!r}."
                )
        columns = [np.asarray(values[name], np.float64) for name in self.bounds]
        usable = np.all(np.isfinite(columns), axis=0)
        parts: list[np.ndarray] = [np.ones([len(usable), 1])]
        for column, (low, high) in zip(columns, self.bounds.values(), strict=True):
            with np.errstate(all="ignore"):  # A warning would reveal a value.
                share = np.clip((column - low) / (high - low), 0.0, 1.0)
            parts.append(2 * np.where(usable, share, 0.0)[:, None] - 1)
        vectors = np.concatenate(parts, axis=1) / self._scale
        return np.where(usable[:, None], vectors, 0.0)

    def total(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns the sum of the contributions, float64 [1 + k].

        It is rounded once: rounding after each client would add up with their number.
        """
        return np.array([math.fsum(each) for each in self.contributions(values).T])

    def release(
        self,
        values: Mapping[str, np.ndarray],
        generator: np.random.Generator,
        paid: Receipt,
    ) -> Json:
        """Returns the noisy results; `values` are the clients' metrics by name, [N]."""
        paid.redeem()
        total = self.total(values)
        noise = generator.normal(size=total.shape)
        # Everything below is computed from the noisy sum alone.
        noisy = (total + self.noise_multiplier * noise) * self._scale
        stddev = self.noise_multiplier * self._scale
        count = max(float(noisy[0]), 1.0)
        result: Json = {"num_clients": float(noisy[0]), "num_clients_stddev": stddev}
        for index, (name, (low, high)) in enumerate(self.bounds.items()):
            half, middle = (high - low) / 2, (high + low) / 2
            centred = float(np.clip(noisy[1 + index] / count, -1.0, 1.0))
            result[name] = {
                "mean": middle + half * centred,
                "noise_stddev": half * stddev / count * math.sqrt(1 + centred**2),
            }
        return result


def release(
    fed: FederatedTraining,
    private: PrivateMetrics,
    clients: FederatedDataset,
    batch_size: int,
    verbose: int,
) -> Json:
    """Evaluates on clients, charges for the noisy result, and returns it."""
    way_out = ": compile what it computes as a metric, and declare its range in bounds"
    _validate.exactly(PrivateMetrics, way_out, private=private)
    cost = private.cost(fed.setup.sampling, clients.num_clients)
    _require_account(fed)
    with contextlib.ExitStack() as stack:
        # One evaluation at a time, even within a fit: each closes what it opened.
        stack.enter_context(federated_training.fit_lock(fed, "evaluate_clients"))
        if not federated_training.is_fitting(fed.model):
            # Ledgers are opened as in a fit without rounds, and all their lines count.
            model_lock = federated_training.fit_lock(fed.model, "evaluate_clients")
            stack.enter_context(model_lock)
            ledgers = [c for c in fed.federated_callbacks if isinstance(c, Ledger)]
            for each in missing_ledgers(fed.run, None, ledgers):
                each.federated_model = fed
                ledgers.append(each)
            stack.enter_context(callback_session(ledgers, fed.rounds, fed.rounds))
        _require_allowed(fed, cost)
        _, values = evaluation.evaluate(
            fed.model,
            fed.require_compiled("evaluate_clients"),
            clients,
            batch_size,
            verbose,
            True,
        )
        private.contributions(values)  # Raises before anything is charged.
        with _signals.defer_signals():
            # An interrupt in between would leave a ledger line that the run lacks.
            paid = _charge(fed, cost)
            generator = np.random.Generator(np.random.Philox())
            return private.release(values, generator, paid)


def _require_account(fed: FederatedTraining) -> account_lib.PrivacyAccount:
    """Returns the account for releases outside the rounds, or raises ValueError."""
    federated_training.check_owner(fed)
    account = fed.account
    if account is None:
        raise ValueError(
            "private must be None before the first fit, as there is no account yet "
            "to charge."
        )
    if account.by_client:
        raise ValueError(
            "private must be None with a mechanism whose guarantee is "
            f"{account.trust_model}: these means would have only a central guarantee, "
            "as the party that adds their noise sees the clients' metrics."
        )
    for callback in fed.federated_callbacks:
        if callback.federated_model is not fed:
            raise ValueError(
                f"private must be None, as the {type(callback).__name__} of the last "
                "fit now belongs to another model, whose account it would check: give "
                "each model its own callbacks."
            )
    return account


def _require_allowed(fed: FederatedTraining, cost: charge_lib.RoundCharge) -> None:
    """Raises ValueError if a release outside the rounds is not allowed."""
    _require_account(fed).central.check(cost)
    for callback in fed.federated_callbacks:
        callback.check_release(cost)


def _charge(fed: FederatedTraining, cost: charge_lib.RoundCharge) -> Receipt:
    """Charges a release; returns the receipt."""
    name = account_lib.new_evaluation_id()

    def ask(_: Receipt) -> None:
        _require_allowed(fed, cost)
        for callback in fed.federated_callbacks:
            callback.on_release_charged(name, cost)

    budgets = [
        c.budget for c in fed.federated_callbacks if isinstance(c, PrivacyBudget)
    ]
    return _require_account(fed).charge(
        cost,
        budgets=budgets,
        ask=ask,
        name=name,
        round_index=max(0, fed.rounds - 1),
        details={
            "evaluation": True,
            **fed.require_trained("evaluate_clients")[0].facts_of_line(),
        },
    )
