"""The server's side for Flower's message API."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from tfdp_fl import _validate, mechanisms
from tfdp_fl.accounting import ledger as ledger_lib
from tfdp_fl.flower import answers as answers_lib
from tfdp_fl.flower import (
    client_clipping,
    declared,
    keys,
    messages,
    population,
    private_rounds,
    remembering,
    replies,
    server_clipping,
    strategies,
)
from tfdp_fl.flower import configured as configured_lib

_logger = logging.getLogger(__name__)


class PrivateStrategy(private_rounds.PrivateRounds):
    """A mechanism around any strategy of `flwr.serverapp` that averages.

    For any object with `configure_train(server_round, arrays, config, grid)`
    and `aggregate_train(server_round, replies)` in Flower's shape; its clients
    have `private_mod` among their mods. All other methods are the wrapped
    strategy's, `start` among them:

        strategy = PrivateStrategy(
            FedAvg(fraction_train=1e-9, min_train_nodes=50, ...),
            tfdp_fl.AdaptiveClipping(noise_multiplier=1.0),
            num_clients=1000, clients_per_round=50,
            target_epsilon=8.0, target_delta=1e-5, ledger="ledger.jsonl")
        result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=99)

    Each round the wrapped strategy draws m clients. What they send is read as
    if it were hostile, clipped, added up, noised and divided by m, however many
    replied; the wrapped strategy is handed that one model in place of every
    client's reply, with equal weights. Whatever it makes of it costs nothing
    more. The number of examples that a client claims is not looked at.

    Who clips: the clients, and the server once more what it noises itself, for
    `FixedClipping`, `AdaptiveClipping` and `LocalDP`, and for mechanisms of
    your own that change no more than the noise or how S moves. The server needs
    numpy and dp-accounting then, and no TensorFlow. All other central
    mechanisms (`MedianClipping`, ...) clip at the server, by the mechanism's
    own TensorFlow functions.

    With `LocalDP` each client noises its own update, and the mean is that of
    those who answered. A round is charged when its clients are asked, to every
    client: what a client sends has left it.

    With `CorrelatedNoise` clients come as they like: the wrapped strategy is
    told only of nodes that are not too soon or too often in a round again, and
    who was in each released round is kept, and checked, by the node's id or by
    the name that `client_of` gives. Neither `state` nor the memory of this
    process may be seen by anybody: with the models they tell the sums without
    noise. After a crash `from_state` goes on with the noise only if a `ledger`
    shows that nothing was released since; else a new segment begins, charged
    anew.

    The guarantee is about the model (and with `LocalDP` about each update). It
    does not cover what clients report beside it: metrics, that they failed, the
    initial arrays if the server asks a client for them.

    Source: McMahan et al. (2018), Algorithm 1, and each mechanism's own.

    Attributes:
      mechanism: what is released; it cannot be exchanged during a run.
      num_clients: N.
      rounds: T, or None.
    """

    _api = strategies.MESSAGES

    def __init__(
        self,
        strategy: Any,
        mechanism: mechanisms.Mechanism | Mapping[str, Any],
        *,
        num_clients: int,
        clients_per_round: int,
        rounds: int | None = None,
        clip_norm: float | None = None,
        on_client_failure: str | None = None,
        max_abandoned_rounds: int | None = 10,
        averages: bool = False,
        ledger: str | os.PathLike[str] | ledger_lib.PrivacyLedger | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        accountant: str = "rdp",
        client_of: Callable[[int], str | int] | None = None,
    ):
        """Wraps a strategy.

        Args:
          strategy: what is to be wrapped (see `averages`).
          mechanism: what is released; or, as `state` keeps it, its registered
            name and its parameters.
          num_clients: N, how many clients there are to draw from. A round is
            charged with the smaller of this and the number of nodes that were
            connected when it was drawn.
          clients_per_round: m, how many clients the strategy draws.
          rounds: T. No more are begun. Needed where a mechanism splits a budget
            over them.
          clip_norm: S of the next round, if it is not the mechanism's first.
          on_client_failure: "exclude" (the others are released) or "abort" (the
            round is abandoned); None means "abort" if the clients share the
            noise (`noise_site="client"`), which is enough only if all of them
            reply, else "exclude". A reply of no use is no failure if they do:
            the update is zero, and the server adds the noise in its place.
          max_abandoned_rounds: how many rounds in a row may be abandoned before
            `aggregate_train` raises; None for any number.
          averages: the user's word that the strategy makes what it should of a
            mean. Needed for strategies of Flower's that are not known to
            average, and for subclasses with an `aggregate_train` of their own.
          ledger: a `PrivacyLedger`, or the file of one, made or gone on with. A
            round's line is on the disk before its result is returned.
          target_epsilon: the budget: a round that would bring epsilon above it
            is not begun.
          target_delta: at this delta; both or neither.
          accountant: "rdp" or "pld", for the budget.
          client_of: for `CorrelatedNoise`: the name (a text or a whole number)
            of the client that a node is, by what the server knows of it. None:
            every node is a client of its own, and must keep its id.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
          LedgerError: if the ledger cannot be gone on with.
        """
        self.mechanism = mechanism = declared.mechanism_of(mechanism)
        self.num_clients = _validate.positive_integer(num_clients=num_clients)
        self.num_sampled_clients = _validate.positive_integer(
            clients_per_round=clients_per_round
        )
        if self.num_sampled_clients > self.num_clients:
            raise ValueError(
                f"clients_per_round must be at most num_clients={num_clients}, "
                f"got {clients_per_round!r}."
            )
        if rounds is not None:
            rounds = _validate.positive_integer(rounds=rounds)
        self.rounds = rounds
        first = mechanism.first_clip_norm()
        if clip_norm is not None:
            first = _validate.positive(clip_norm=clip_norm)
        self._sum = _sum_for(mechanism, self._deployment)
        remembered = remembering.remembered_for(mechanism, client_of)
        super().__init__(
            strategy,
            self.num_sampled_clients,
            # A clip that only the cohort tells is 0 before there is one.
            first or server_clipping.NO_CLIP,
            mechanism.needs_exact_cohort,
            on_client_failure=on_client_failure,
            max_abandoned_rounds=max_abandoned_rounds,
            averages=averages,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            accountant=accountant,
            guarantee=mechanism.guarantee,
            remembered=remembered,
        )
        self._check_sample_size()
        self._check_that_it_does_not_wait()
        self._sent: tuple[messages.Model, list[Any]] | None = None
        self._open(ledger)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.strategy!r}, {self.mechanism!r}, "
            f"num_clients={self.num_clients}, "
            f"clients_per_round={self.num_sampled_clients})"
        )

    @property
    def clients_per_round(self) -> int:
        """The number m of clients that are asked in each round."""
        return self.num_sampled_clients

    def start(self, grid: Any, initial_arrays: Any, *args, **kwargs) -> Any:
        """Runs the wrapped strategy's rounds; arguments and result are its own.

        Once the budget is spent no more clients are asked to train, and the
        model stays as it is.
        """
        return type(self.strategy).start(self, grid, initial_arrays, *args, **kwargs)

    def summary(self) -> None:
        """Logs what is released, and the wrapped strategy's summary."""
        _logger.info("%s", self.mechanism.describe())
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: Any, config: Any, grid: Any
    ) -> list[Any]:
        """Tells the drawn clients what to clip to (and to noise).

        Returns:
          Copies of the messages that the wrapped strategy made. None if it drew
          nobody, if the round would overspend the budget, or if T rounds were
          begun.

        Raises:
          ValueError: if it drew other than m clients, or sends them different
            models, or one that is not of real numbers.
        """
        self._configured = self._idle_round = self._sent = None
        if self._all_rounds_done():
            self._idle_round = server_round
            return []
        remembered = self._remembered
        watched = population.WatchedGrid(
            grid, None if remembered is None else remembered.eligible
        )
        if remembered is not None and self._nobody_is_left(watched):
            self._idle_round = server_round
            return []
        made = list(
            self.strategy.configure_train(server_round, arrays, config, watched)
        )
        if not made:
            self._idle_round = server_round
            return []
        nodes = [answers_lib.Node(m.metadata.dst_node_id) for m in made]
        model = messages.the_one_model(made)
        configured = self._begin(
            server_round,
            nodes,
            model.record,
            model.arrays,
            watched.population(
                nodes,
                strategies.samples_uniformly(self.strategy, self._api),
                self.num_clients,
            )
            if remembered is None
            else population.Population(watched.connected, self.num_clients),
        )
        if configured is None:
            return []
        told = {**self._told(configured), keys.WEIGHT_KEY: self._weight_key}
        self._sent = model, messages.with_config(made, told)
        return self._sent[1]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Any]
    ) -> tuple[Any, Any]:
        """Hands the noised mean, in place of each reply, to the strategy.

        Whatever a client replied, it is no error here: such a client counts as
        failed, or where clients share the noise its update as zero.

        Returns:
          What the wrapped strategy makes of it; `(None, None)` if there is
          nothing to release.

        Raises:
          RoundNotConfiguredError: if the round's `configure_train` was not
            called, or its replies were here before. Nothing is released then.
          RoundsAbandonedError: if `max_abandoned_rounds` are in a row.
          LedgerWriteError: if the round could not be written down. Nothing is
            released then.
        """
        model, told = self._sent or (None, [])
        received = list(replies)
        failures = [message for message in received if message.has_error()]
        results = [
            (answers_lib.Node(message.metadata.src_node_id), message)
            for message in received
            if not message.has_error()
        ]
        ids = {m.metadata.dst_node_id: m.metadata.message_id for m in told}
        read = functools.partial(_read, model=model, answers_to=ids)
        finished = self._finish(server_round, results, failures, read)
        if finished is None:
            return None, None
        answers, _, released = finished
        handed = messages.handed_on(
            answers.valid,
            cast(messages.Model, model),  # What finished was sent.
            released,
            self._weight_key,
        )
        with strategies.metrics_errors_logged(self.strategy, self._api):
            return self.strategy.aggregate_train(server_round, [*handed, *failures])

    def aggregate_evaluate(self, server_round: int, replies: Any) -> Any:
        """The wrapped strategy's; replies that it refuses end no run."""
        try:
            return self.strategy.aggregate_evaluate(server_round, replies)
        except Exception:
            _logger.warning(
                "Round %s, the clients' evaluation cannot be aggregated; the "
                "round has none.",
                server_round,
                exc_info=True,
            )
            return None

    @property
    def _deployment(self) -> mechanisms.Deployment:
        return mechanisms.Deployment(
            clients_per_round=self.num_sampled_clients,
            num_clients=self.num_clients,
            sampling="separated"
            if remembering.remembers(self.mechanism)
            else "fixed_size",
            rounds=self.rounds,
        )

    @property
    def _weight_key(self) -> str:
        return str(
            getattr(self.strategy, "weighted_by_key", messages.DEFAULT_WEIGHT_KEY)
        )

    def _current_mechanism(self) -> mechanisms.Mechanism:
        return self.mechanism

    def _all_rounds_done(self) -> bool:
        begun = len(self._history.released)
        if self.mechanism.guarantee == "local":
            begun += len(self._history.earlier)
        return self.rounds is not None and begun >= self.rounds

    def _check_sample_size(self) -> None:
        """Raises if Flower's strategy will not draw m of N."""
        if not strategies.samples_uniformly(self.strategy, self._api):
            return
        fraction, least = (
            getattr(self.strategy, name, None)
            for name in ("fraction_train", "min_train_nodes")
        )
        if fraction is None or least is None:
            return
        m, n = self.num_sampled_clients, self.num_clients
        drawn = max(int(n * fraction), least) if fraction else 0
        if drawn != m:
            raise ValueError(
                f"strategy must draw clients_per_round={m} of "
                f"num_clients={n}, got one that draws {drawn} "
                f"(fraction_train={fraction!r}, min_train_nodes={least!r}). "
                f"{self._api.advice}"
            )

    def _check_that_it_does_not_wait(self) -> None:
        """Raises if the strategy would wait for nodes that must sit out."""
        if self._remembered is None:
            return
        least = getattr(self.strategy, "min_available_nodes", None)
        gap, m = self.mechanism.min_separation, self.num_sampled_clients
        there = self.num_clients - m * (gap - 1)
        if least is not None and least > there:
            raise ValueError(
                f"strategy must not wait for more than {there} nodes: of "
                f"num_clients={self.num_clients}, {m} in each of the "
                f"{gap - 1} rounds before sit out (min_separation={gap}), got "
                f"min_available_nodes={least!r}."
            )

    def _nobody_is_left(self, watched: population.WatchedGrid) -> bool:
        """Whether all N are there, and too few of them may take part."""
        eligible = watched.get_node_ids()
        needed = max(
            self.num_sampled_clients,
            getattr(self.strategy, "min_available_nodes", None) or 0,
        )
        if watched.connected < self.num_clients or len(eligible) >= needed:
            return False
        _logger.warning(
            "Only %d of %d connected clients may take part, and %d are "
            "needed: the others were in a round too lately, or as often as "
            "they may. No more rounds are begun.",
            len(eligible),
            watched.connected,
            needed,
        )
        return True

    def _arguments(self) -> dict[str, Any]:
        return {
            "mechanism": declared.as_json(self.mechanism),
            "num_clients": self.num_clients,
            "clients_per_round": self.num_sampled_clients,
            "rounds": self.rounds,
            "clip_norm": self.clip_norm,
            **super()._arguments(),
        }


def _read(
    message: Any, configured: configured_lib.ConfiguredRound, **options: Any
) -> replies.Reply:
    del configured  # The model of the messages is the same, with its names.
    return messages.read(message, **options)


def _sum_for(
    mechanism: mechanisms.Mechanism, deployment: mechanisms.Deployment
) -> configured_lib.Release:
    """Returns what sums the replies: of clients that clip, if they can."""
    mechanism.check(deployment)
    if client_clipping.clients_can_clip(mechanism):
        if mechanism.guarantee == "local" and not (
            cast(mechanisms.LocalDP, mechanism).noise_over_sensitivity(deployment) > 0
        ):
            raise ValueError(
                f"mechanism must have noise, got {mechanism!r}: without, a "
                "client hands over its update as it is."
            )
        return client_clipping.release
    if server_clipping.server_can_clip(mechanism, deployment):
        return server_clipping.release
    if server_clipping.server_can_remember(mechanism):
        return server_clipping.release
    raise ValueError(
        "mechanism must be a central one that scales updates and whose noise "
        "is new in each round (FixedClipping, AdaptiveClipping, "
        "MedianClipping with noise_site='server', or your own), "
        "CorrelatedNoise, or LocalDP "
        f"without max_participations, got {mechanism!r}."
    )
