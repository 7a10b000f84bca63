"""Algorithm 1: a round of differentially private federated averaging.

    draw        a cohort, which says who could have been in it
    send        the model, the clip S and the stddev of any client noise
    collect     one contribution per client: clip its update, bound it, add it up
    charge      for what could have happened, before anything is visible
    noise       is added to the sum, as much as was charged for
    divide      by the planned number of clients
    update      the model and the clip

(McMahan et al. 2018, https://arxiv.org/abs/1710.06963; the clip: Andrew et al. 2021.)
Keras's `fit` calls `run_round`; a Flower server clips in flower/sums.py, and calls the
two halves and `release`; TFF compiles `make_contribution` and `release`, and its state
says what to charge. Nothing else calls `release`. The rules:

1. Own data only. `make_contribution` gets what the server sent, and an update computed
   from one client's examples in a program chosen by their number (engine/layout.py).
2. One door. `query.clip` clips an update, and replaces it by zero if it still exceeds
   the mechanism's bounds (mechanisms/bounded_sums.py; engine/side_by_side.py); `add`
   checks shapes. (TF-Privacy's queries and local mechanisms enforce their own bounds.)
3. Exact sums. `CohortQuery.to_grid` (side by side: `_sum_of`) rounds updates to a grid
   on which float64 or int32 adds exactly; clients' noise and weights are not rounded.
4. The charge covers what could have happened. It follows from the cohort drawn, which
   must be released or abandoned before the next draw (sampling.py; in TFF, declared).
5. Charge, noise, release. Only `PrivacyAccount.charge` (accounting/account.py) spends.
   A release redeems its receipt (`Receipt.redeem`). Under a central guarantee, it
   refuses noise below what was paid for. (TF-Privacy's queries state their cost first.)
"""

from __future__ import annotations

from typing import Any, Protocol

from tfdp_fl._lazy_tf import tf
from tfdp_fl.accounting import Receipt
from tfdp_fl.mechanisms import bounded_sums, cohort_query, noise
from tfdp_fl.mechanisms.contribution import ClientContext, Contribution, RoundState
from tfdp_fl.terms import NoiseSite, TrustModel

Cohort = Any  # A `sampling.Cohort`, or another object with a `participation`.
Collected = Any  # What the clients sent, before anything is published.


class Server(Protocol):
    """The party that holds the model: Keras's `fit`, or a Flower server."""

    def charges_first(self, cohort: Cohort) -> bool:
        """Whether to pay before asking clients: abandoning would reveal something."""

    def abandons(self, collected: Collected) -> bool:
        """Returns whether too few clients answered for a release."""

    def abandon(self, cohort: Cohort) -> None:
        """Settles a cohort without any release."""

    def charge(self, cohort: Cohort, collected: Collected = None) -> Receipt:
        """Pays for a round with `PrivacyAccount.charge`, or raises an error."""

    def release(self, cohort: Cohort, collected: Collected, paid: Receipt) -> Any:
        """Settles a cohort; adds noise, divides (`release`), and updates the model."""


class FrontEnd(Server, Protocol):
    """A server that trains the clients itself."""

    def draw(self) -> Cohort:
        """Draws the next round's cohort."""

    def collect(self, cohort: Cohort) -> Collected:
        """Trains the clients; returns the sum of their contributions."""


def run_round(front: FrontEnd) -> Any:
    """Runs a round; see `begin_round` and `finish_round`."""
    cohort = front.draw()
    paid = begin_round(front, cohort)
    return finish_round(front, cohort, front.collect(cohort), paid)


def begin_round(server: Server, cohort: Cohort) -> Receipt | None:
    """Pays before any client is asked, if the server `charges_first`."""
    return server.charge(cohort) if server.charges_first(cohort) else None


def finish_round(
    server: Server, cohort: Cohort, collected: Collected, paid: Receipt | None
) -> Any:
    """Charges and releases a cohort's sum; or abandons the round and returns None."""
    if server.abandons(collected):
        if paid is None and cohort.participation.is_charged_if_abandoned:
            server.charge(cohort, collected)
        server.abandon(cohort)
        return None
    return server.release(cohort, collected, paid or server.charge(cohort, collected))


def make_contribution(
    query: cohort_query.CohortQuery,
    params: RoundState,
    update: list[tf.Tensor],
    client: ClientContext = ClientContext(),  # noqa: B008
) -> Contribution:
    """Returns what one client adds to the sum: clipped, bounded and rounded.

    Args:
      query: The mechanism's query.
      params: What the server sent: `query.derive_sample_params(state)`.
      update: Float tensors with the model's shapes.
      client: Facts about the client, such as its number of examples.
    """
    mechanism, update = query.mechanism, bounded_sums.as_tensors(update)
    # In fewer bits, clipping would round by more than the bound allows.
    update = [tf.cast(t, tf.float32) if t.dtype.size < 4 else t for t in update]
    clipped = query.clip(params, update, client)
    if mechanism.client_noise is not None:  # Local: each adds full noise.
        stddev = mechanism.client_noise(params, client, query.context)
        return clipped._replace(update=noise.add_normal(clipped.update, stddev))
    if mechanism.noise_site == NoiseSite.CLIENT:  # m shares make the full noise.
        return query.add_noise_share(params, clipped)
    return clipped._replace(update=query.to_grid(clipped.update, params))


def release(
    query: cohort_query.CohortQuery,
    total: Contribution,
    state: RoundState,
    charged: float | tf.Tensor,
) -> tuple[list[tf.Tensor], RoundState]:
    """Returns the noisy mean of a cohort's contributions, and the next round's state.

    Args:
      query: The mechanism's query.
      total: The sum of the contributions.
      state: The round's state.
      charged: The largest sum of (bound / stddev)^2 paid for (`query.paid_mu_squared`).

    Raises:
      InvalidArgumentError: The noise is less than what a central guarantee paid for.
    """
    mechanism, weight = query.mechanism, total.weight
    public = state.without_noise_state()  # The noise state reveals the noise.
    stddevs = query.noise_stddevs(state)  # Checked, and added here or by the clients.
    if mechanism.trust_model == TrustModel.CENTRAL:
        assertions = query.check_noise(public, charged, stddevs)
        total = cohort_query.after_assertions(assertions, total)
        weight = query.context.expected_weight(state.clients_per_round)
    update, sums, noise_state = query.add_noise(total, state, stddevs)
    mean = query.divide(update, weight, public)
    clip_norm = mechanism.next_clip_norm(sums, public)
    return mean, state._replace(clip_norm=clip_norm, noise_state=noise_state)
