"""The server's side for Flower's older API, with Flower's own names."""

from __future__ import annotations

import copy
import io
import types
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from tfdp_fl import _validate, mechanisms
from tfdp_fl.flower import private_rounds, replies
from tfdp_fl.terms import Json

if TYPE_CHECKING:
    from flwr.common import FitIns, FitRes, Parameters
    from flwr.server.client_manager import ClientManager
    from flwr.server.client_proxy import ClientProxy
    from flwr.server.strategy import Strategy

# A client (a proxy) of a round, and its instructions or its result.
_Messages: TypeAlias = "list[tuple[ClientProxy, FitIns | FitRes]]"
_Copied = TypeVar("_Copied")


class DPFedAvg(private_rounds.PrivateRounds):
    """Applies any central mechanism to an averaging strategy of `flwr.server`.

    It is like `PrivateStrategy`, but for objects with `configure_fit(server_round,
    parameters, client_manager)` and `aggregate_fit(server_round, results, failures)`.
    The clients are wrapped in `DPFedAvgNumPyClient`, and a round's m clients are drawn
    from the client manager's `all()`. Mechanisms whose clip depends on all updates
    (`MedianClipping`, for example) clip at the server, which then sees each update, so
    SecAgg+ cannot be used.
    """

    _configure_method, _aggregate_method = "configure_fit", "aggregate_fit"
    _metrics_attribute = "fit_metrics_aggregation_fn"

    def __init__(
        self,
        strategy: Strategy,
        num_sampled_clients: int,
        mechanism: mechanisms.Mechanism,
        *,
        num_clients: int | None = None,
        secagg_step: float | None = None,
        **options: Any,
    ):
        """Wraps a strategy.

        Args:
          strategy: The strategy to wrap.
          num_sampled_clients: m, the number of clients asked in each round.
          mechanism: A central mechanism with new noise in each round.
          num_clients: N; None: m. A round then costs as much as if all clients were in
            it, as no amplification by sampling is claimed.
          secagg_step: With `SecAggPlusWorkflow`, its rounding step for a coordinate of
            one client's update: 2 clipping_range max_weight / quantization_range. The
            bound on a client's contribution is then S + sqrt(D) secagg_step. None:
            updates arrive one by one, and a secure average is refused.
          **options: The other keyword-only arguments of `PrivateStrategy`.

        Raises:
          TypeError, ValueError: An argument is invalid.
          LedgerError: The ledger cannot be continued.
        """
        m = _validate.positive_integer(num_sampled_clients=num_sampled_clients)
        if options.get("sampling") not in (None, "fixed_size"):
            raise ValueError(
                "sampling must be 'fixed_size' with Flower's older API, which cannot "
                "run a round without clients (nor SecAgg+ one with too few), got "
                f"{options['sampling']!r}; PrivateStrategy accepts it."
            )
        if secagg_step is not None:
            self._secagg_step = _validate.positive(secagg_step=secagg_step)
        if isinstance(mechanism, mechanisms.CorrelatedNoise):
            raise ValueError(
                "mechanism must be a central one with new noise in each round, got "
                f"{mechanism!r}; PrivateStrategy accepts it."
            )
        super().__init__(
            strategy,
            mechanism,
            num_clients=m if num_clients is None else num_clients,
            clients_per_round=m,
            **options,
        )

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> _Messages:
        """Draws the round's clients; tells them the clip (and the noise to add).

        Returns:
          The drawn clients, with copies of the wrapped strategy's instructions. The
          list is empty if the strategy instructs no client, or if the round would
          exceed the budget.

        Raises:
          ValueError: Fewer than N clients are connected before the first round, or the
            strategy sends clients different instructions, or a model that does not
            consist of real numbers.
        """
        messages = self._ask_strategy(server_round, parameters, client_manager)
        if not messages:
            return []
        instructions = private_rounds.require_identical(
            [instruction for _, instruction in messages]
        )
        clients = list(client_manager.all().values())  # Clients come and go.
        configured = self._begin_round(
            server_round,
            {_name_of(client): client for client in clients},
            _to_arrays(instructions.parameters),
            instructions.parameters,
        )
        if configured is None:
            return []
        config = {**instructions.config, **configured.instruction.config}
        return [
            (client, _with_attribute(instructions, "config", dict(config)))
            for client in configured.clients.values()
        ]

    def aggregate_fit(
        self, server_round: int, results: _Messages, failures: Sequence[object]
    ) -> tuple[Parameters | None, Json]:
        """Passes the noisy mean, as the only result, to the wrapped strategy.

        No reply raises an error here. A client with an invalid reply counts as failed;
        if clients add the noise, its update counts as zero instead.

        Returns:
          The result of the wrapped strategy; `(None, {})` if the round is abandoned.

        Raises:
          ValueError: SecAgg+ passes on one average although the server should clip, or
            although `secagg_step` was not given.
          RoundNotConfiguredError: The round's `configure_fit` was not called, or its
            results have arrived before. Nothing is released then.
          LedgerWriteError: The round could not be recorded. Nothing is released then.
        """
        configured = self._open_round[1]
        sent = None if configured is None else configured.template
        is_average = _is_one_average(results, sent)
        if configured is not None and is_average:
            if self._secagg_step is None:
                raise ValueError(
                    "secagg_step must be given with SecAgg+, which rounds each "
                    "coordinate by 2 clipping_range max_weight / quantization_range, "
                    "got None."
                )
            if not configured.clients_clip:
                raise ValueError(
                    "mechanism must be FixedClipping or AdaptiveClipping with SecAgg+, "
                    "where the server could clip only the average of all updates, got "
                    f"{self.mechanism!r}."
                )
        released = self._finish_round(
            server_round,
            [(_name_of(client), fit_res) for client, fit_res in results],
            lambda fit_res, round_config: replies.read_result(
                fit_res, round_config.shapes, round_config.instruction, is_average
            ),
            is_average,
        )
        if released is None:
            return None, {}
        configured, model = released
        # The noisy mean in the form of Flower's `FitRes`.
        result = types.SimpleNamespace(
            parameters=_to_parameters(configured.template, model),
            num_examples=1,
            metrics={},
        )
        # Not a client's proxy, which would reveal a drawn client.
        anonymous = types.SimpleNamespace(cid="", node_id=0, properties={})
        return self.strategy.aggregate_fit(server_round, [(anonymous, result)], [])


class DPFedAvgFixed(DPFedAvg):
    """Applies DP-FedAvg with a fixed clip norm to a strategy that averages.

    Flower's name and arguments for `DPFedAvg` with `FixedClipping`. The server adds the
    noise N(0, (z S)^2) to the sum. If `server_side_noising` is False, each client adds
    noise of stddev z S / sqrt(m) to its update before sending it.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgFixed`, with the noise
    added as `server_side_noising` specifies; McMahan et al. (2018), Algorithm 1.
    """

    def __init__(
        self,
        strategy: Strategy,
        num_sampled_clients: int,
        clip_norm: float,
        noise_multiplier: float = 1,
        server_side_noising: bool = True,
        **options: Any,
    ):
        """Wraps a strategy.

        Args:
          strategy: The Flower strategy to wrap.
          num_sampled_clients: The number of clients in a round, m.
          clip_norm: The clip norm, S.
          noise_multiplier: The noise multiplier, z.
          server_side_noising: Whether the server adds the noise.
          **options: The keyword-only arguments of `DPFedAvg`.

        Raises:
          TypeError, ValueError: An argument is invalid.
        """
        mechanism = mechanisms.FixedClipping(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            noise_site=_to_noise_site(server_side_noising),
        )
        super().__init__(strategy, num_sampled_clients, mechanism, **options)


class DPFedAvgAdaptive(DPFedAvg):
    """Applies DP-FedAvg with adaptive clipping to a strategy that averages.

    Flower's name and arguments for `DPFedAvg` with `AdaptiveClipping`. Each client
    reports whether its update's norm was at most S. With b, the noisy fraction of
    clients whose norm was, S is updated: S <- S exp(-eta (b - gamma)). Updates and
    count together cost z. The server receives the bits without noise and adds noise
    only to their count, so `server_side_noising=False` does not hide a client's bit
    from the server.

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgAdaptive`;
    Andrew et al. (2021), Algorithm 1 and Theorem 1.
    """

    def __init__(
        self,
        strategy: Strategy,
        num_sampled_clients: int,
        init_clip_norm: float = 0.1,
        noise_multiplier: float = 1,
        server_side_noising: bool = True,
        clip_norm_lr: float = 0.2,
        clip_norm_target_quantile: float = 0.5,
        clip_count_stddev: float | None = None,
        **options: Any,
    ):
        """Wraps a strategy.

        Args:
          strategy: The Flower strategy to wrap.
          num_sampled_clients: The number of clients in a round, m.
          init_clip_norm: S of the first round.
          noise_multiplier: z, the joint cost of a round's two releases.
          server_side_noising: Whether the server adds the updates' noise.
          clip_norm_lr: The step of the clip norm, eta.
          clip_norm_target_quantile: The quantile that the clip follows, gamma.
          clip_count_stddev: sigma_b, above z / 2; None: m / 20, or 0 if there is no
            noise at all. Errors about this argument and those about the clip use the
            names of `AdaptiveClipping`.
          **options: The keyword-only arguments of `DPFedAvg`.

        Raises:
          TypeError, ValueError: An argument is invalid.
        """
        mechanism = mechanisms.AdaptiveClipping(
            noise_multiplier=noise_multiplier,
            initial_clip_norm=init_clip_norm,
            target_quantile=clip_norm_target_quantile,
            clip_learning_rate=clip_norm_lr,
            count_noise_stddev=clip_count_stddev,
            noise_site=_to_noise_site(server_side_noising),
        )
        super().__init__(strategy, num_sampled_clients, mechanism, **options)


def _to_noise_site(server_side_noising: bool) -> str:
    _validate.instance_of(bool, server_side_noising=server_side_noising)
    return "server" if server_side_noising else "client"


def _is_one_average(results: _Messages, sent: object) -> bool:
    """Returns whether all results share one object, as those from SecAgg+ do.

    That object is then the average of all clients' updates, unless it is the one that
    was `sent`: clients of the server's own process may hand it back untrained.
    """
    parameters = [getattr(fit_res, "parameters", None) for _, fit_res in results]
    if len(parameters) < 2 or len(set(map(id, parameters))) > 1:
        return False
    return parameters[0] is not sent and hasattr(parameters[0], "tensors")


def _name_of(client: Hashable) -> Hashable:
    """Returns a client's `cid`; an object without one serves as its own name."""
    return getattr(client, "cid", client)


def _to_arrays(parameters: Parameters) -> list[np.ndarray]:
    """Returns the arrays that the server's own `flwr.common.Parameters` hold."""
    # Pickled objects could execute code, so they are never allowed.
    return [
        np.load(io.BytesIO(tensor), allow_pickle=False) for tensor in parameters.tensors
    ]


def _to_parameters(parameters: Parameters, arrays: Sequence[np.ndarray]) -> Parameters:
    """Returns parameters of the same form with other arrays."""
    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array, allow_pickle=False)
    return _with_attribute(parameters, "tensors", [f.getvalue() for f in files])


def _with_attribute(message: _Copied, name: str, value: object) -> _Copied:
    """Returns a shallow copy with another value; the original does not change."""
    copied = copy.copy(message)
    setattr(copied, name, value)
    return copied
