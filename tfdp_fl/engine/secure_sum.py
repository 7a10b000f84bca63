"""Sums a cohort's contributions through secure aggregation."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from scipy import stats

from tfdp_fl import _signals, mechanisms, secure_aggregation
from tfdp_fl.accounting import charge as charge_lib
from tfdp_fl.engine import cohort, engine
from tfdp_fl.mechanisms import noise
from tfdp_fl.secure_aggregation import grouped_sum
from tfdp_fl.terms import NoiseSite, Sampling, TrustModel

# The relative error of a sum, as in docs/clipping.md.
_LARGEST_ERROR = 1e-5


def sum_securely(
    cohort_engine: engine.CohortEngine,
    pending: cohort.PendingRound,
    protocol: secure_aggregation.AdditiveSecretSharing,
) -> tuple[int, ...]:
    """Adds up collected contributions so that no party sees a single one.

    A client's upload (its clipped update with any noise of its own, its bit, its
    weight) goes through the protocol as one vector. The diagnostics that `History`
    reports (norm, clipped, discarded) do not. They are available only because this is
    a simulation; a deployment has none.

    If the server adds the noise, the update is within the clip even after rounding
    (`AdditiveSecretSharing.nearest_within`). If clients add noise of their own, it is
    rounded with the update to the nearest value.

    Neither the members of the sum nor the size of a group may depend on a client's
    data: one client more or less could move the sum by all others of its group. So if
    the server adds the noise, a client whose data cannot be read or trained on uploads
    zeros, and `check_cohort_sizes` refuses cohorts that may be too small.

    A client with a value above `max_share_value` does not end the round. If the sum
    needs its noise, the client has failed. Otherwise, it counts as discarded and
    uploads zeros.

    Args:
      cohort_engine: The engine that collected the contributions one by one.
      pending: The round, whose sum and `without_noise` are set.
      protocol: The protocol.

    Returns:
      The positions in the cohort of clients that failed, or whose group failed. Their
      updates are not in the sum.

    Raises:
      ValueError: The protocol's grid is too coarse for these contributions.
    """
    query, size = cohort_engine.query, cohort_engine.update_spec.size
    site, state = query.mechanism.noise_site, pending.state
    total = np.zeros(size + query.num_scalars)
    check_resolution(protocol, query, state, len(total))
    collected = {
        position: (result, row)
        for positions, result in pending.collected
        for row, position in enumerate(np.asarray(positions).tolist())
    }
    members = np.arange(pending.cohort_size)
    if site != NoiseSite.SERVER:  # Zeros would lack the client's noise.
        members = np.array(sorted(collected), np.int64)

    def row_of(position: int) -> np.ndarray:
        """Returns a client's row, including diagnostics that are not uploaded."""
        if position not in collected:
            return np.zeros(len(total), np.float32)
        result, row = collected[position]
        parts = result.updates, result.scalars
        return np.concatenate([part[row].numpy() for part in parts])

    def is_allowed(row: np.ndarray) -> np.ndarray:
        uploaded = row[: -mechanisms.NUM_DIAGNOSTICS]
        return np.abs(uploaded) <= protocol.max_share_value

    # One row at a time, here and below, to avoid a second copy of the cohort.
    discarded = {p for p in members.tolist() if not is_allowed(row_of(p)).all()}
    failed = members[:0]
    if discarded:
        positions = np.flatnonzero(np.isin(members, [*discarded]))
        if site == NoiseSite.CLIENT:
            failed = members[positions]
        _warn(members, positions, protocol, fails=len(failed) > 0)
        if site == NoiseSite.EVERY_CLIENT:
            pending.without_noise += len(positions)
    bound = float(query.l2_norm_bound(state)) if site == NoiseSite.SERVER else None

    def upload_of(index: int) -> np.ndarray:
        position = int(members[index])
        row = row_of(position)
        upload = row[: -mechanisms.NUM_DIAGNOSTICS].astype(np.float64)
        if position in discarded:
            upload[~is_allowed(row)] = 0.0
            # A mean over the clients that answered must leave this client out, so its
            # weight is zero too. A fixed divisor ignores weights, and the bit stays.
            upload[: None if site == NoiseSite.EVERY_CLIENT else size] = 0.0
        if bound is not None:
            upload[:size] = protocol.nearest_within(upload[:size], bound)
            for place, limit in enumerate(query.mechanism.side_bounds.values(), size):
                only = slice(place, place + 1)
                upload[only] = protocol.nearest_within(upload[only], limit)
        return upload

    if not len(failed):  # Otherwise the sum lacks noise, whatever the others send.
        try:
            grouped = secure_aggregation.sum_in_groups(
                upload_of, protocol, num_members=len(members), keep_group_sums=False
            )
        except ValueError as error:  # For example, because a client dropped out.
            _signals.warn(f"{error} All of them have failed.", UserWarning)
            failed = members
        else:
            failed = members[list(grouped.failed_members)]
            if grouped.total is not None:
                succeeded = members[list(grouped.succeeded_members)].tolist()
                diagnostics = np.zeros(mechanisms.NUM_DIAGNOSTICS)
                for position in succeeded:
                    client_diagnostics = row_of(position)[-len(diagnostics) :]
                    client_diagnostics[-1] = max(
                        client_diagnostics[-1], position in discarded
                    )
                    diagnostics += client_diagnostics
                total = np.concatenate([grouped.total, diagnostics])
    flat = tf.constant(total)
    cohort_engine.set_sum(pending, flat[:size], flat[size:])
    return tuple(failed.tolist())


# The largest probability allowed, in a round, for a cohort without a sum: no delta
# includes it, however many rounds there are.
_MAX_FAILURE_PROBABILITY = 1e-20


def check_cohort_sizes(
    protocol: secure_aggregation.AdditiveSecretSharing,
    sampling: str,
    num_clients: int,
    clients_per_round: float,
    max_participations: int | None = None,
) -> None:
    """Raises ValueError unless all cohorts have a sum.

    Suppose that k clients are too few for a sum, while k + 1 are enough. Then one more
    client moves the sum by k + 1 clips. So a cohort of random size may lack a sum only
    with a probability negligible against any delta, even with one client more or less.

    Args:
      protocol: The protocol.
      sampling: How cohorts are drawn.
      num_clients: The number of clients, N.
      clients_per_round: m, the expected size.
      max_participations: After how many rounds a client is left out of the cohorts that
        it is drawn for; None: never. (Groups that take turns are left out as a whole.)
    """
    if max_participations is not None and sampling != Sampling.CYCLIC:
        raise ValueError(
            "secure_aggregation must be None if a mechanism's max_participations "
            "leaves clients out: a cohort may become too small for a sum, and one "
            "more client would then move a sum by its whole group, got "
            f"max_participations={max_participations}."
        )
    risk = 0.0
    if sampling not in charge_lib.OF_RANDOM_SIZE:
        size = np.array([int(clients_per_round)])
        risk = float(not grouped_sum.can_be_split(size, protocol)[0])
    else:
        for population in range(num_clients - 1, num_clients + 2):
            sizes = np.arange(population + 1)
            sizes = sizes[~grouped_sum.can_be_split(sizes, protocol)]
            probability = clients_per_round / num_clients
            risk = max(
                risk,
                float(stats.binom.pmf(sizes, population, probability).sum()),
            )
    if risk >= _MAX_FAILURE_PROBABILITY:
        raise ValueError(
            "secure_aggregation needs cohorts that always make groups of "
            f"{protocol.min_participants} (min_participants) to "
            f"{protocol.max_participants} (max_participants), because otherwise one "
            "more client would move a sum by its whole group; with "
            f"clients_per_round={clients_per_round:g} of {num_clients} and {sampling} "
            f"sampling, the probability of other cohorts is {risk:.1g}: use "
            "sampling='fixed_size', more clients a round, or other limits."
        )


def check_round(
    cohort_engine: engine.CohortEngine,
    inputs: cohort.RoundInputs,
    protocol: secure_aggregation.AdditiveSecretSharing,
) -> None:
    """Raises ValueError if a round's clip and noise do not fit the protocol's grid.

    They are public before the round, unless its clip follows from its cohort.
    """
    query = cohort_engine.query
    if not query.two_phase:
        state = query.begin_round(
            inputs.state, inputs.noise_multiplier, inputs.clients_per_round
        )
        num_values = cohort_engine.update_spec.size + query.num_scalars
        check_resolution(protocol, query, state, num_values)


def check_resolution(
    protocol: secure_aggregation.AdditiveSecretSharing,
    query: mechanisms.CohortQuery,
    state: mechanisms.RoundState,
    num_values: int,
) -> None:
    """Raises ValueError if rounding would lose a bit or change the noise.

    Also if an honest client's noise might be too large to be sent. Otherwise, whether
    a round is abandoned would depend on the clients' data.
    """
    shares = {}
    if query.mechanism.noise_site == NoiseSite.CLIENT:
        shares = {name: float(s) for name, s in query.noise_shares(state).items()}
    bounds = {"update": query.l2_norm_bound(state), **query.mechanism.side_bounds}
    draws = float(state.clients_per_round) * num_values
    tail = stats.norm.isf(_MAX_FAILURE_PROBABILITY / (2 * draws))
    for name, share in shares.items():
        largest = float(bounds[name]) + tail * share
        if largest > protocol.max_share_value:
            raise ValueError(
                f"secure_aggregation must have a max_share_value of at least "
                f"{largest:.3g}, the largest {name} that an honest client may send "
                f"with its noise, got {protocol.max_share_value:g}."
            )
    # Its size shows how many clients the sum has, so it must be lost in the noise.
    error = protocol.largest_error * num_values**0.5
    if query.mechanism.trust_model == TrustModel.CENTRAL:
        for name, bound in bounds.items():
            is_known = np.isfinite(float(bound))
            if error > (_LARGEST_ERROR * float(bound) if is_known else 0):
                raise ValueError(
                    "secure_aggregation must have mode='ring', or a smaller "
                    "max_share_value or max_participants, because the sum of each "
                    f"{name} may be off by {error:.3g}, which is not small beside its "
                    f"bound of {float(bound):.3g}, got {protocol!r}."
                )
    if protocol.mode != "ring":
        return
    requirements = [("the bits and the weight of a client", 0.5)]
    requirements += [
        (f"a client's noise on its {name}", share / noise.STEPS_OF_NOISE)
        for name, share in shares.items()
        if share > 0
    ]
    for what, resolution in requirements:
        if protocol.resolution > resolution:
            raise ValueError(
                "secure_aggregation must have a resolution of at most "
                f"{resolution:.3g}, because of {what}, got "
                f"{protocol.resolution:.3g}: use bits=64, or a smaller "
                f"max_share_value than {protocol.max_share_value:g}."
            )


def _warn(
    members: np.ndarray,
    positions: np.ndarray,
    protocol: secure_aggregation.AdditiveSecretSharing,
    fails: bool,
) -> None:
    """Warns about clients with values that cannot be sent, and their fate."""
    what = "were discarded: they upload zeros."
    if fails:
        what = "have failed, and the sum lacks their noise."
    _signals.warn(
        f"{len(positions)} of {len(members)} clients have values that are not "
        f"within max_share_value={protocol.max_share_value:g} (first: place "
        f"{int(members[positions[0]])} in the cohort) and {what} If they are honest, "
        "secure_aggregation needs a larger max_share_value.",
        UserWarning,
    )
