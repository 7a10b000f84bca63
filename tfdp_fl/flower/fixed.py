"""The server's side with a fixed clip norm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdp_fl import _validate, mechanisms
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import configured as configured_lib
from tfdp_fl.flower import parameters as parameters_lib
from tfdp_fl.flower import population, private_rounds, replies, strategies

# A client of the last round (a proxy) and what it was sent or returned.
_Messages = list[tuple[Any, Any]]


class DPFedAvgFixed(private_rounds.PrivateRounds):
    """DP-FedAvg with a fixed clip norm around any strategy that averages.

    For any object with `configure_fit(server_round, parameters,
    client_manager)` and `aggregate_fit(server_round, results, failures)` in
    Flower's shape; its clients are wrapped in `DPFedAvgNumPyClient`. All other
    methods are the wrapped strategy's.

    Each round m clients are sampled without replacement. Each client's update
    is clipped to S, the updates are added, the sum carries noise N(0, (z S)^2)
    and is divided by m, however many replied. The noise is added by the server
    to the sum, or, where `server_side_noising` is False, by each client to its
    update before it sends it, with stddev z S / sqrt(m) (only then are they
    told to, by `dpfedavg_noise_stddev`).

    The wrapped strategy is handed this noised mean in place of every client's
    reply, with equal weights: it averages copies of it, and whatever it makes
    of it costs nothing more.

    A client that failed, or whose reply is not what a wrapped client sends, is
    left out of the sum ("exclude": the noise and m stay, so that the others
    are hidden as before), or the round is abandoned whole ("abort": the model
    stays, and nothing is charged). Noise of the clients is right only if all m
    reply, so there it is "abort"; but a reply that is not what a wrapped client
    sends counts as zero there, and the server adds the noise in its place.

    The server clips once more what it is about to noise itself, so that the
    guarantee does not hang on the clients' code; noise that clients add has to
    be taken on trust, and their replies are only bounded by what an honest
    client's noise can reach. An update that is not finite counts as zero.

    The guarantee is about the model. It does not cover what clients report
    beside it: losses, metrics, that they failed, or the initial parameters, if
    the server asks a client for them.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgFixed`, with the
    noise where `server_side_noising` says; McMahan et al. (2018), Algorithm 1.

    Attributes:
      strategy: the wrapped strategy.
      num_sampled_clients: m.
      clip_norm: S, of the next round.
      noise_multiplier: z, noise stddev on the sum of updates divided by S.
      server_side_noising: whether the server adds the noise.
      on_client_failure: "exclude" or "abort".
      max_abandoned_rounds: after so many abandoned in a row the run ends.
      averages: whether the user vouched for the strategy.
      discarded_updates: how many updates arrived not finite, and became zero.
      rejected_replies: how many replies could not be used.
      stopped_before_round: the server's number of the last round that the
        budget did not allow; None if there was none.
    """

    def __init__(
        self,
        strategy: Any,
        num_sampled_clients: int,
        clip_norm: float,
        noise_multiplier: float = 1,
        server_side_noising: bool = True,
        *,
        on_client_failure: str | None = None,
        max_abandoned_rounds: int | None = 10,
        averages: bool = False,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
    ):
        """Wraps a strategy.

        Args:
          strategy: what is to be wrapped (see `averages`).
          num_sampled_clients: m, how many clients it samples in each round.
          clip_norm: S.
          noise_multiplier: z.
          server_side_noising: whether the server adds the noise.
          on_client_failure: "exclude" or "abort"; None means "exclude" if the
            server adds the noise, else "abort".
          max_abandoned_rounds: how many rounds in a row may be abandoned before
            `aggregate_fit` raises; None for any number.
          averages: the user's word that the strategy makes what it should of a
            mean. Needed for strategies of Flower's that are not known to
            average, and for subclasses with an `aggregate_fit` of their own.
          ledger: a `PrivacyLedger`, or the file of one, made or gone on with. A
            round's line is on the disk before its result is returned. Rounds
            that stand in it already are charged as well.
          target_epsilon: the budget: a round that would bring epsilon above it
            is not begun.
          target_delta: at this delta; both or neither.
          accountant: "rdp" or "pld", for the budget.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
          LedgerError: if the ledger cannot be gone on with.
        """
        self.noise_multiplier = _validate.non_negative(
            noise_multiplier=noise_multiplier
        )
        self.server_side_noising = _validate.instance_of(
            bool, server_side_noising=server_side_noising
        )
        super().__init__(
            strategy,
            _validate.positive_integer(num_sampled_clients=num_sampled_clients),
            _validate.positive(clip_norm=clip_norm),
            not server_side_noising,
            on_client_failure=on_client_failure,
            max_abandoned_rounds=max_abandoned_rounds,
            averages=averages,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            accountant=accountant,
        )
        if type(self) is DPFedAvgFixed:  # Else the arguments are not all known.
            self._open(ledger)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.strategy!r}, "
            f"num_sampled_clients={self.num_sampled_clients}, "
            f"clip_norm={self.clip_norm}, "
            f"noise_multiplier={self.noise_multiplier}, "
            f"server_side_noising={self.server_side_noising})"
        )

    def configure_fit(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> _Messages:
        """Adds the clip norm (and a noise stddev) to each client's config.

        Returns:
          What the wrapped strategy returned, with copies of its instructions.
          Nothing if it sampled nobody, or if the round would overspend the
          budget.

        Raises:
          ValueError: if it sampled other than m clients, or sends them
            different models, or one that is not of real numbers.
        """
        self._configured = self._idle_round = None
        watched = population.watched(client_manager)
        instructions = self.strategy.configure_fit(
            server_round,
            parameters,
            client_manager if watched is None else watched,
        )
        if not instructions:
            self._idle_round = server_round
            return instructions
        clients = [client for client, _ in instructions]
        configured = self._begin(
            server_round,
            clients,
            instructions[0][1].parameters,
            _the_one_model(instructions),
            None if watched is None else watched.population(clients),
        )
        if configured is None:
            return []
        dp_config = self._told(configured)
        return [
            (
                client,
                parameters_lib.replaced(
                    fit_ins, config={**fit_ins.config, **dp_config}
                ),
            )
            for client, fit_ins in instructions
        ]

    def aggregate_fit(
        self, server_round: int, results: _Messages, failures: Sequence[Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Hands the noised mean, in place of each reply, to the strategy.

        Whatever a client replied, it is no error here: such a client counts
        as failed, or where clients noise its update as zero.

        Returns:
          What the wrapped strategy makes of it; `(None, {})` if the round is
          abandoned, as it is if the strategy is known to refuse it.

        Raises:
          RoundNotConfiguredError: if the round's `configure_fit` was not
            called, or its results were here before. Nothing is released then.
          RoundsAbandonedError: if `max_abandoned_rounds` are in a row.
          LedgerWriteError: if the round could not be written down. Nothing is
            released then.
        """
        finished = self._finish(server_round, results, failures, _read)
        if finished is None:
            return None, {}
        answers, configured, model = finished
        released = parameters_lib.like(configured.message, model)
        handed = [
            (
                client,
                parameters_lib.replaced(
                    fit_res,
                    parameters=released,
                    num_examples=1,
                    metrics=reply.metrics,
                ),
            )
            for client, fit_res, reply in answers.valid
        ]
        with strategies.metrics_errors_logged(self.strategy, self._api):
            return self.strategy.aggregate_fit(server_round, handed, answers.failures)

    def _current_mechanism(self) -> mechanisms.Mechanism:
        return mechanisms.FixedClipping(
            clip_norm=self.clip_norm,
            noise_multiplier=self.noise_multiplier,
            noise_site=self._noise_site,
        )

    @property
    def _noise_site(self) -> str:
        return "server" if self.server_side_noising else "client"

    def _arguments(self) -> dict[str, Any]:
        return {
            "num_sampled_clients": self.num_sampled_clients,
            "clip_norm": self.clip_norm,
            "noise_multiplier": self.noise_multiplier,
            "server_side_noising": self.server_side_noising,
            **super()._arguments(),
        }


def _read(
    fit_res: Any,
    configured: configured_lib.ConfiguredRound,
    wants_norm_bit: bool,
) -> replies.Reply:
    shapes = [array.shape for array in configured.sent]
    return replies.read(fit_res, shapes, wants_norm_bit)


def _the_one_model(instructions: _Messages) -> list[np.ndarray]:
    """Returns the model that all clients are sent."""
    first = instructions[0][1].parameters
    arrays = parameters_lib.to_arrays(first)
    for array in arrays:
        if array.dtype.kind not in "fiub":
            raise ValueError(
                "parameters must hold arrays of real numbers, got one of "
                f"dtype {array.dtype}: no noise can be added to it."
            )
    for _, fit_ins in instructions[1:]:
        if fit_ins.parameters is first:
            continue
        others = parameters_lib.to_arrays(fit_ins.parameters)
        if len(others) != len(arrays) or not all(
            np.array_equal(a, b) for a, b in zip(arrays, others, strict=True)
        ):
            raise ValueError(
                "The wrapped strategy sends its clients different models; the "
                "noise hides an update to one model only."
            )
    return [np.array(array) for array in arrays]
