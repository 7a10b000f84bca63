"""The server's side with a fixed clip norm."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import dp_accounting
import numpy as np

from tfdp_fl import _validate
from tfdp_fl.accounting import accountant as accountant_lib
from tfdp_fl.accounting import charge
from tfdp_fl.flower import keys, updates
from tfdp_fl.flower import parameters as parameters_lib
from tfdp_fl.mechanisms import formulas

_logger = logging.getLogger(__name__)

# A client of the last round (a proxy) and what it was sent or returned.
_Messages = list[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class ReleasedRound:
    """A round whose noised updates went on to the wrapped strategy.

    Attributes:
      server_round: its number.
      clip_norm: S, with which its clients clipped.
      noise_multiplier: z, what the round costs: one Gaussian of that
        multiplier, whatever was released in it.
    """

    server_round: int
    clip_norm: float
    noise_multiplier: float


@dataclasses.dataclass(frozen=True)
class _ConfiguredRound:
    server_round: int
    clip_norm: float
    sent: list[np.ndarray] | None


class DPFedAvgFixed:
    """DP-FedAvg with a fixed clip norm around any strategy.

    For any object with `configure_fit(server_round, parameters,
    client_manager)` and `aggregate_fit(server_round, results, failures)` in
    Flower's shape; its clients are wrapped in `DPFedAvgNumPyClient`. All other
    methods are the wrapped strategy's.

    Each round m clients are sampled without replacement. Each client's update
    is clipped to S, the updates are averaged with equal weights, and the sum
    carries noise N(0, (z S)^2). Noise of stddev z S / sqrt(m) is added to each
    of the m updates: by the server as they arrive, or, where
    `server_side_noising` is False, by the clients before they send them (only
    then are they told to, by `dpfedavg_noise_stddev`).

    A round in which a client failed, or that has other than m results, is
    abandoned whole: the model stays, and nothing is charged.

    The server clips once more what it is about to noise itself, so that the
    guarantee does not hang on the clients' code; noise that clients add has to
    be taken on trust. An update that is not finite counts as zero.

    The guarantee holds if the wrapped strategy averages what it is given with
    the weights it is given (as FedAvg and the FedOpt family do) and samples m
    of N clients uniformly. It covers the model. It does not cover what clients
    report beside it: losses, metrics, or the initial parameters, if the server
    asks a client for them.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgFixed`, with the
    noise where `server_side_noising` says; McMahan et al. (2018), Algorithm 1.

    Attributes:
      strategy: the wrapped strategy.
      num_sampled_clients: m.
      clip_norm: S, of the next round.
      noise_multiplier: z, noise stddev on the sum of updates divided by S.
      server_side_noising: whether the server adds the noise.
      discarded_updates: how many updates arrived not finite, and became zero.
    """

    def __init__(
        self,
        strategy: Any,
        num_sampled_clients: int,
        clip_norm: float,
        noise_multiplier: float = 1,
        server_side_noising: bool = True,
    ):
        """Wraps a strategy.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
        """
        for method in ("configure_fit", "aggregate_fit"):
            if not callable(getattr(strategy, method, None)):
                raise TypeError(
                    f"strategy must have a method {method}, got {strategy!r}."
                )
        self.strategy = strategy
        self.num_sampled_clients = _validate.positive_integer(
            num_sampled_clients=num_sampled_clients
        )
        self.clip_norm = _validate.positive(clip_norm=clip_norm)
        self.noise_multiplier = _validate.non_negative(
            noise_multiplier=noise_multiplier
        )
        self.server_side_noising = _validate.instance_of(
            bool, server_side_noising=server_side_noising
        )
        self.discarded_updates = 0
        self._configured: _ConfiguredRound | None = None
        self._released: list[ReleasedRound] = []

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.strategy!r}, "
            f"num_sampled_clients={self.num_sampled_clients}, "
            f"clip_norm={self.clip_norm}, "
            f"noise_multiplier={self.noise_multiplier}, "
            f"server_side_noising={self.server_side_noising})"
        )

    def __getattr__(self, name: str) -> Any:
        if name == "strategy" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.strategy, name)

    @property
    def released_rounds(self) -> tuple[ReleasedRound, ...]:
        """The rounds that were released, and are charged."""
        return tuple(self._released)

    def privacy_epsilon(
        self,
        num_clients: int,
        delta: float,
        sampling: str = "fixed_size",
        accountant: str = "rdp",
    ) -> float:
        """Returns epsilon at delta after the rounds released so far.

        Args:
          num_clients: N, of whom the strategy samples m in each round.
          delta: the failure probability.
          sampling: "fixed_size", if the m clients of each round are drawn
            uniformly without replacement (neighbours: one client replaced by
            another); else "shuffled", which claims nothing for the sampling
            (neighbours: one client added or removed). Poisson sampling is not
            what happens here.
          accountant: "rdp" or "pld".

        Returns:
          Epsilon; infinity if a round was released without noise.
        """
        _validate.one_of(("fixed_size", "shuffled"), sampling=sampling)
        history = accountant_lib.PrivacyAccountant()
        counts = collections.Counter(
            released.noise_multiplier for released in self._released
        )
        for noise_multiplier, count in counts.items():
            history.add(
                charge.RoundCharge(
                    sampling=sampling,
                    num_clients=num_clients,
                    clients_per_round=self.num_sampled_clients,
                    event=dp_accounting.GaussianDpEvent(noise_multiplier),
                ),
                count,
            )
        return history.epsilon(delta, accountant)

    def configure_fit(
        self, server_round: int, parameters: Any, client_manager: Any
    ) -> _Messages:
        """Adds the clip norm (and a noise stddev) to each client's config.

        Returns:
          What the wrapped strategy returned, with copies of its instructions.
          Nothing if it sampled nobody.

        Raises:
          ValueError: if it sampled other than m clients, or sends them
            different models.
        """
        instructions = self.strategy.configure_fit(
            server_round, parameters, client_manager
        )
        self._configured = None
        if not instructions:
            return instructions
        if len(instructions) != self.num_sampled_clients:
            raise ValueError(
                "The wrapped strategy sampled "
                f"{len(instructions)} clients, and num_sampled_clients="
                f"{self.num_sampled_clients}: the noise is made for exactly "
                "that many. (For Flower's FedAvg set min_fit_clients to it and "
                "fraction_fit to 0.)"
            )
        self._configured = _ConfiguredRound(
            server_round, self.clip_norm, _the_one_model(instructions)
        )
        dp_config = self._dp_config()
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
        """Hands the noised updates, equally weighted, to the strategy.

        Returns:
          What the wrapped strategy makes of them; `(None, {})` if the round is
          abandoned.
        """
        configured, self._configured = self._configured, None
        if failures or len(results) != self.num_sampled_clients:
            _logger.warning(
                "Round %s is abandoned: %d results and %d failures, where %d "
                "results are needed.",
                server_round,
                len(results),
                len(failures),
                self.num_sampled_clients,
            )
            return None, {}
        if configured is None or configured.server_round != server_round:
            configured = _ConfiguredRound(server_round, self.clip_norm, None)
        next_clip_norm = self._next_clip_norm(configured.clip_norm, results)
        try:
            released = [
                (client, self._released_result(fit_res, configured))
                for client, fit_res in results
            ]
        except (ValueError, EOFError) as error:
            _logger.warning("Round %s is abandoned: %s", server_round, error)
            return None, {}
        self._released.append(
            ReleasedRound(
                server_round, configured.clip_norm, self.noise_multiplier
            )
        )
        self.clip_norm = next_clip_norm
        return self.strategy.aggregate_fit(server_round, released, failures)

    @property
    def _update_noise_multiplier(self) -> float:
        """The noise multiplier that is left for the updates themselves."""
        return self.noise_multiplier

    def _client_noise_stddev(self, clip_norm: float) -> float:
        return float(
            formulas.client_noise_stddev(
                clip_norm,
                self._update_noise_multiplier,
                self.num_sampled_clients,
            )
        )

    def _dp_config(self) -> dict[str, Any]:
        config = {keys.CLIP_NORM: self.clip_norm}
        if not self.server_side_noising:
            config[keys.NOISE_STDDEV] = self._client_noise_stddev(
                self.clip_norm
            )
        return config

    def _next_clip_norm(self, clip_norm: float, results: _Messages) -> float:
        """The clip norm of the next round; here it never moves."""
        del results
        return clip_norm

    def _released_result(self, fit_res: Any, configured: _ConfiguredRound):
        """Returns a copy of a result: clipped, noised, and of weight one."""
        arrays = parameters_lib.to_arrays(fit_res.parameters)
        sent = configured.sent
        add_noise = self.server_side_noising
        if sent is None:
            if not all(np.all(np.isfinite(array)) for array in arrays):
                raise ValueError(
                    "an update is not finite, and the model that its client "
                    "was sent is not known."
                )
            sent = arrays
            update = [np.zeros(np.shape(array)) for array in arrays]
        else:
            update = updates.difference(arrays, sent)
            update, _, discarded = updates.clipped(update, configured.clip_norm)
            if discarded:
                self.discarded_updates += 1
                # The noise that the client may have added is gone with it.
                add_noise = True
        if add_noise:
            stddev = self._client_noise_stddev(configured.clip_norm)
            arrays = updates.applied(sent, updates.noised(update, stddev))
        # An exact norm bit must not reach the strategy's own metrics.
        metrics = {
            name: value
            for name, value in fit_res.metrics.items()
            if name != keys.NORM_BIT
        }
        return parameters_lib.replaced(
            fit_res,
            parameters=parameters_lib.like(fit_res.parameters, arrays),
            num_examples=1,
            metrics=metrics,
        )


def _the_one_model(instructions: _Messages) -> list[np.ndarray]:
    """Returns the model that all clients are sent."""
    first = instructions[0][1].parameters
    arrays = parameters_lib.to_arrays(first)
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
