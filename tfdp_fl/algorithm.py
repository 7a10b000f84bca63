"""Algorithm 1: a round of differentially private federated averaging.

    draw        a cohort, which says who could have been in it
    send        the model, the clip S and what clients noise with
    collect     of each client one record: clip its update, let it in, add it up
    charge      what could have happened, before anybody has seen anything
    noise       on the sum, of the size that was charged
    divide      by the planned number of clients
    move        the model, and the clip

(McMahan et al. 2018, https://arxiv.org/abs/1710.06963; the clip: Andrew et al. 2021.)
Keras's `fit` calls `run_round`, a Flower server its two halves; TFF compiles
`make_record` and `release`, and charges what its state wrote down. Nothing goes around:

1. Own data only. `make_record` is given one client's update, and what the server sent;
   the update is made of that client's examples, in a program that is chosen by its own
   size (engine/layout.py).
2. One door. `Query.clip` returns what mechanisms/records.py has let in: of the sum's
   own shapes, within its bounds; only `records.add` adds to a sum.
3. Exact sums. `Query.to_grid` rounds a record to a grid on which float64 adds without
   any error (mechanisms/records.py).
4. Charged is what could have happened. The charge is made of the cohort that `draw`
   returned; it is settled before the next one is drawn (sampling.py).
5. Charge, noise, release. `Server.release` needs the receipt of one
   `PrivacyAccount.charge` (accounting/account.py); `release` adds what noise was paid.
"""

from __future__ import annotations

from typing import Any, Protocol

from tfdp_fl._lazy_tf import tf
from tfdp_fl.accounting import Charge
from tfdp_fl.mechanisms import cohort_query, noise, records
from tfdp_fl.mechanisms.contribution import ClientContext, Contribution, RoundState
from tfdp_fl.terms import NoiseSite, TrustModel

Drawn = Any  # A `sampling.Cohort`, or what else has a `participation`.
Pending = Any  # What came back, and nobody has seen.
Paid = Charge | None  # What `begin_round` returned.


class Server(Protocol):
    """What holds the model: Keras's `fit`, or a Flower server."""

    def pays_first(self, cohort: Drawn) -> bool:
        """Whether a round costs the same if it ends early, by what was seen of it."""

    def abandons(self, pending: Pending) -> bool:
        """Returns whether too little came back for a release."""

    def abandon(self, cohort: Drawn) -> None:
        """Settles a cohort of which nothing is released."""

    def charge(self, cohort: Drawn, pending: Pending = None) -> Charge:
        """Pays for a round by `PrivacyAccount.charge`, or raises."""

    def release(self, cohort: Drawn, pending: Pending, paid: Charge) -> Any:
        """Settles a cohort; adds noise, divides (`release`), and moves the model."""


class FrontEnd(Server, Protocol):
    """A server whose clients train here and now."""

    def draw(self) -> Drawn:
        """Returns the next round's cohort, by its sampler."""

    def collect(self, cohort: Drawn) -> Pending:
        """Lets the clients train; returns the sum of their records."""


def run_round(front: FrontEnd) -> Any:
    """Runs a round; see `begin_round` and `finish_round`."""
    cohort = front.draw()
    paid = begin_round(front, cohort)
    return finish_round(front, cohort, front.collect(cohort), paid)


def begin_round(server: Server, cohort: Drawn) -> Paid:
    """Pays before anybody is asked, if the server `pays_first`, whatever comes then."""
    return server.charge(cohort) if server.pays_first(cohort) else None


def finish_round(server: Server, cohort: Drawn, pending: Pending, paid: Paid) -> Any:
    """Charges and releases what a cohort sent; or abandons it, and returns None.

    Raises what `charge` raises; then nothing is released.
    """
    if server.abandons(pending):
        if paid is None and cohort.participation.charge_if_abandoned:
            server.charge(cohort, pending)
        server.abandon(cohort)
        return None
    return server.release(cohort, pending, paid or server.charge(cohort, pending))


def make_record(
    query: cohort_query.CohortQuery,
    params: RoundState,
    update: list[tf.Tensor],
    client: ClientContext = ClientContext(),  # noqa: B008
) -> Contribution:
    """Returns what one client adds to the sum: clipped, bounded, and rounded.

    Args:
      query: The mechanism's query.
      params: What the server sent: `query.derive_sample_params(state)`.
      update: Float tensors, of the model's shapes.
      client: Facts about the client, such as its number of examples.
    """
    mechanism = query.mechanism
    # With fewer bits a product is rounded by more than a clip may be.
    update = [tf.cast(t, tf.float32) if t.dtype.size < 4 else t for t in update]
    record = query.clip(params, update, client)
    if mechanism.client_noise is not None:  # Local: each client's is enough.
        stddev = mechanism.client_noise(params, client, query.deployment)
        return record._replace(update=noise.add_normal(record.update, stddev))
    record = records.zero_if_empty(record, client.num_examples)
    if mechanism.noise_site == NoiseSite.CLIENT:  # A share each, complete with all m.
        return query.with_shares(params, record)
    return record._replace(update=query.to_grid(record.update, params))


def release(
    query: cohort_query.CohortQuery,
    total: Contribution,
    state: RoundState,
    charged: Any = None,
) -> tuple[list[tf.Tensor], RoundState]:
    """Returns the noised mean of a cohort's records, and the state before the next.

    Args:
      query: The mechanism's query.
      total: The sum of the records.
      state: The round's.
      charged: What the charge was derived from (`query.charged_for`); None: what the
        mechanism says at its first clip.

    Raises:
      InvalidArgumentError: The noise is less than what was charged for.
    """
    mechanism, weight = query.mechanism, total.weight
    if mechanism.trust_model == TrustModel.CENTRAL:
        checked = query.check_noise(state, charged)
        total = cohort_query.after_assertions(checked, total)
        weight = query.deployment.expected_weight(state.clients_per_round)
    update, sums, memory = query.add_noise(total, state)
    mean = query.divide(update, weight, state)
    clip_norm = mechanism.next_clip_norm(sums, state)
    return mean, state._replace(clip_norm=clip_norm, memory=memory)
