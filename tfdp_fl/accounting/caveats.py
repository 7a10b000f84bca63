"""What an epsilon does not cover: the sentences that statements end with."""

from __future__ import annotations

import re
from collections.abc import Mapping

# Full sentences that stand by themselves, by their keys.
_TEXT = """
start_and_callbacks_trusted: The weights that the run began with, and any that were set
    between its rounds, are taken as knowing nothing of these clients but what this run
    released, and callbacks are trusted to use only this run's releases and public data.
unnoised_metrics: The training loss, the training metrics and the diagnostics of each
    round (such as norms and clipped fractions) were computed from clients' data without
    noise; publishing them, or choosing by them, is not covered by epsilon.
seed_given: A random seed was given, so anyone who knows it can repeat the cohorts and
    the noise; towards them there is no guarantee, and the seed has to be kept as secret
    as the data. Another run with the same seed has the same noise in the same rounds,
    so that the difference of what the two release has none: a seed must not be used
    again on the same clients.
local_not_central: The guarantee is local: every client adds its own noise before
    anything leaves it, and epsilon is that of one client's releases against the server;
    it is not to be compared with a central epsilon.
per_record: The guarantee is per record, not per client: it covers one example in a
    client's data, and a client with many examples is protected less.
secure_aggregation: Updates were summed by secure aggregation, so that no party saw a
    single client's update; this is in addition to epsilon and does not change it.
secure_aggregation_group_noise: Each secure aggregation runs in a group of g of the m
    clients, and the server and the group's members see the group's sum, which has only
    sqrt(g/m) of the noise on the sum of all; epsilon is that of those who see no more
    than the models.
secure_aggregation_unnoised_groups: The server adds the noise after secure aggregation,
    so the server and the members of each group see the group's sum without noise;
    epsilon is that of those who see no more than the models.
client_noise_needs_honest_clients: Each client added its share of the noise; if clients
    collude or leave their share out, the noise on the sum is smaller than reported.
non_trainable_kept: Non-trainable state (such as the moving statistics of batch
    normalisation) was not taken from clients.
non_trainable_released: Non-trainable state (such as the moving statistics of batch
    normalisation) was clipped and noised together with the weights, under the same
    epsilon.
hyperparameter_search_not_counted: Only this run is counted: other runs on the same
    clients, such as a search for hyperparameters, cost extra.
search_counted: The search for settings is counted: epsilon is that of all its trials,
    however many there were, as long as only the chosen candidate and its model are
    released, and the number of trials and the other ones stay secret. That the
    candidates, what builds their models and a public score know nothing of these
    clients, and that no trial changes a later one by code of the user's own, is taken
    as given.
search_time_not_hidden: The running time of a search is not hidden, and tells about how
    many trials there were: keep it secret, and the directory of a search until it has
    ended.
only_runs_in_ledgers_counted: Only this run and the other runs in its ledgers are
    counted: further runs on the same clients cost extra.
shuffled_zero_out: Cohorts were a shuffled order of all clients; adding or removing a
    client means here that everything it hands in (its update and, where the clip
    adapts, the centred bit or the norm beside it) counts as zero in its place; that it
    has this place, and so the number of clients N, is not protected, and no
    amplification by sampling is claimed.
cyclic_zero_out: Clients were divided into fixed groups, at random, and the groups took
    part in turn. A client counts as absent here when everything it hands in counts as
    zero in its place; that it has this place in its group, and so the number of clients
    N, is not protected.
cyclic_no_amplification: No amplification by sampling is claimed: epsilon holds
    whichever clients of a group take part, and also towards those who know the groups.
separated_zero_out: Clients came as they liked. A client counts as absent here when
    everything it hands in counts as zero in its place; that it has this place in a
    round, and so the number of clients N, is not protected, and no amplification by
    sampling is claimed: epsilon holds also towards those who know who takes part when.
population_stated: The number of clients N and the sizes of the cohorts that were drawn
    are stated as they are; where neighbours differ by one client added or removed,
    these numbers depend on who is among the clients, and stating them is not covered by
    epsilon.
fixed_size_population_known: Cohorts had a fixed size, so neighbouring data sets differ
    by one client replaced by another; that the number of clients is N is not protected.
client_weighting_given: The cap and the expected mean of the clients' weights count as
    given beforehand: where they were chosen by looking at the clients' data, that
    choice is not covered.
clients_excluded: Some drawn clients failed and were left out of their round's sum; the
    noise and the divisor stayed as planned.
rounds_abandoned: Rounds in which a client failed were abandoned: nothing of them was
    released and nothing was charged, but that they failed is not hidden.
rounds_abandoned_charged: Rounds in which a client failed were abandoned: the model did
    not move, but a server had received what the others sent, so each client of their
    cohorts is charged.
rounds_charged_twice: After an interruption, rounds whose result may have been seen were
    run again and are charged twice, so epsilon is on the safe side.
floating_point_noise: The noise was drawn in floating point, so the guarantee is that of
    the ideal Gaussian; attacks on the low bits of floating-point noise are out of its
    scope.
pseudorandom_noise: The noise came from the pseudo-random generator Philox4x32-10, whose
    secret has at most 128 bits (and no more than a seed that was given) and which is
    not made for cryptography; the guarantee is towards those who cannot guess that
    secret or tell the generator's output from true randomness.
exact_noise: Updates were rounded to a grid after the clip, in steps of 2^-20 of it, and
    added as whole numbers; the noise was the ideal Gaussian rounded to that grid, drawn
    from the operating system's random bits without a rounding error, so that floating
    point has no part in what is guaranteed of the rounds.
validation_data_not_covered: Data used for validation, or for choosing a model by it, is
    not covered by epsilon unless it is public.
validation_clients_held_out: Some clients were held out for validation: they were in no
    cohort, are not among the N clients, and have no guarantee; the metrics on them are
    exact.
client_metrics_shown: Metrics of single clients were shown by evaluate_clients without
    noise; those numbers are for readers who may see the clients' data, and epsilon does
    not cover them.
evaluations_counted: What evaluate_clients released of clients' metrics with noise is
    counted in epsilon, as rounds of other runs. That noise was drawn in floating point,
    by numpy's pseudo-random Philox4x64-10 under 128 secret bits, whatever drew the
    noise of the rounds.
delta_not_below_one_over_n: Delta is not below one divided by the number of clients,
    which is larger than is usual: a mechanism that publishes one client outright could
    have that delta.
delta_not_below_one_over_records: Delta is not below one divided by the number of
    records, which is larger than is usual: a mechanism that publishes one record
    outright could have that delta.
epsilon_large: An epsilon above 10 bounds the worst case only weakly.
secure_aggregation_norms_seen: The clip norm of each round was set from the norms of the
    clients' updates, and the norm of each client's update reached the server in the
    clear, outside secure aggregation and without noise; towards the server epsilon does
    not cover those norms.
tff_cohorts_declared: How the cohorts were drawn, from how many clients and how often
    one of them took part was declared by the caller: TensorFlow Federated is handed
    each cohort and cannot see it.
tff_other_releases: Epsilon counts what the mechanism's aggregator released in the
    rounds that led to this state, and the model that follows from it; not the server's
    state, nor what else a process computes from clients' data, nor rounds whose result
    was thrown away, nor a sum by a factory of the user's own that lets a client count
    for more than its clip.
"""

CAVEATS: dict[str, str] = {
    key: " ".join(sentence.split())
    for key, sentence in re.findall(r"^(\w+): (.*(?:\n .*)*)", _TEXT, re.MULTILINE)
}


def add_caveats(sentences: Mapping[str, str]) -> None:
    """Adds what a mechanism declares to `CAVEATS`.

    Args:
      sentences: Full sentences by key.

    Raises:
      ValueError: A key has another sentence already.
    """
    for key, sentence in sentences.items():
        if CAVEATS.setdefault(key, sentence) != sentence:
            raise ValueError(
                f"own_caveats must have new keys, got {key!r}, which stands "
                f"for: {CAVEATS[key]}"
            )
