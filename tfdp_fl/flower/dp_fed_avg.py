"""The server's side for Flower's older API, under the names it has there."""

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

# A client of the last round (a proxy) and what it was sent or returned.
_Messages: TypeAlias = "list[tuple[ClientProxy, FitIns | FitRes]]"
_Copied = TypeVar("_Copied")


class DPFedAvg(private_rounds.PrivateRounds):
    """Any central mechanism around a strategy of `flwr.server` that averages.

    As `PrivateStrategy`, for objects with `configure_fit(server_round,
    parameters, client_manager)` and `aggregate_fit(server_round, results,
    failures)`; the clients are wrapped in `DPFedAvgNumPyClient`, and the m of a
    round are drawn from the client manager's `all()`. Mechanisms whose
    clip depends on all updates (`MedianClipping`, for example) clip at the server,
    which then sees each update, so SecAgg+ cannot be used.
    """

    _configure, _aggregate = "configure_fit", "aggregate_fit"
    _metrics_function = "fit_metrics_aggregation_fn"

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
          strategy: what is to be wrapped.
          num_sampled_clients: m, how many clients are asked in each round.
          mechanism: a central mechanism without a memory.
          num_clients: N; None means m, which claims nothing for the sampling: a
            round costs as much as if all clients were in it.
          secagg_step: for `SecAggPlusWorkflow`, what it rounds a coordinate of one
            client's update by: 2 clipping_range max_weight / quantization_range. A
            client then counts as adding sqrt(D) of it beside S. None: updates arrive
            one by one, and a secure average is refused.
          **options: the other keyword-only arguments of `PrivateStrategy`.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
          LedgerError: if the ledger cannot be continued.
        """
        m = _validate.positive_integer(num_sampled_clients=num_sampled_clients)
        if options.get("sampling") not in (None, "fixed_size"):
            raise ValueError(
                "sampling must be 'fixed_size' with Flower's older API, which runs no "
                "round without clients, and with SecAgg+, which has no sum of too few, "
                f"got {options['sampling']!r}; PrivateStrategy takes it."
            )
        if secagg_step is not None:
            self._secagg_step = _validate.positive(secagg_step=secagg_step)
        if isinstance(mechanism, mechanisms.CorrelatedNoise):
            raise ValueError(
                "mechanism must be a central one whose noise is new in each round, "
                f"got {mechanism!r}; for this one there is PrivateStrategy."
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
        """Draws the round's clients, and tells them what to clip to (and to noise).

        Returns:
          The drawn clients, and copies of what the wrapped strategy tells its own.
          None if it tells nobody, or if the round would overspend the budget.

        Raises:
          ValueError: if fewer than N clients are connected before the first round,
            or the strategy sends them different instructions, or a model that is
            not of real numbers.
        """
        made = self._ask_strategy(server_round, parameters, client_manager)
        if not made:
            return []
        told = private_rounds.require_identical(
            [instruction for _, instruction in made]
        )
        clients = list(client_manager.all().values())  # Clients come and go.
        configured = self._begin(
            server_round,
            {_name_of(client): client for client in clients},
            _to_arrays(told.parameters),
            told.parameters,
        )
        if configured is None:
            return []
        config = {**told.config, **configured.instruction.config}
        return [
            (client, _with_attribute(told, "config", dict(config)))
            for client in configured.asked.values()
        ]

    def aggregate_fit(
        self, server_round: int, results: _Messages, failures: Sequence[object]
    ) -> tuple[Parameters | None, Json]:
        """Hands the noised mean, as the only result, to the strategy.

        Whatever a client replied, it is no error here: such a client counts
        as failed, or where clients noise its update as zero.

        Returns:
          What the wrapped strategy makes of it; `(None, {})` if the round is
          abandoned.

        Raises:
          ValueError: if SecAgg+ hands over one average, and the server was to clip
            or there is no `secagg_step`.
          RoundNotConfiguredError: if the round's `configure_fit` was not
            called, or its results were here before. Nothing is released then.
          LedgerWriteError: if the round could not be written down. Nothing is
            released then.
        """
        configured = self._open[1]
        averaged = _is_one_average(results)
        if configured is not None and averaged:
            if self._secagg_step is None:
                raise ValueError(
                    "secagg_step must be given under SecAgg+, which rounds what "
                    "is sent by 2 clipping_range max_weight / quantization_range in "
                    "each coordinate, got None."
                )
            if not configured.clients_clip:
                raise ValueError(
                    "mechanism must be FixedClipping or AdaptiveClipping under SecAgg+,"
                    " where what the server clips is the average of all updates, got "
                    f"{self.mechanism!r}."
                )
        released = self._release(
            server_round,
            [(_name_of(client), fit_res) for client, fit_res in results],
            lambda fit_res, asked: replies.read_result(
                fit_res, asked.shapes, asked.instruction, averaged
            ),
            averaged,
        )
        if released is None:
            return None, {}
        configured, model = released
        # The noised mean in the shape of Flower's `FitRes`.
        result = types.SimpleNamespace(
            parameters=_like(configured.template, model), num_examples=1, metrics={}
        )
        # Who was drawn is secret: the proxy of a client would tell.
        nobody = types.SimpleNamespace(cid="", node_id=0, properties={})
        return self.strategy.aggregate_fit(server_round, [(nobody, result)], [])


class DPFedAvgFixed(DPFedAvg):
    """DP-FedAvg with a fixed clip norm around a strategy that averages.

    Flower's name and arguments for `DPFedAvg` with `FixedClipping`. The noise
    N(0, (z S)^2) is added by the server to the sum, or, where
    `server_side_noising` is False, by each client to its update before it sends
    it, with stddev z S / sqrt(m).

    Source: Flower's "Differential Privacy Wrappers", `DPFedAvgFixed`, with the
    noise where `server_side_noising` says; McMahan et al. (2018), Algorithm 1.
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
          strategy: Flower's strategy that is wrapped.
          num_sampled_clients: The number of clients in a round, m.
          clip_norm: The clip norm, S.
          noise_multiplier: The noise multiplier, z.
          server_side_noising: whether the server adds the noise.
          **options: the keyword-only arguments of `DPFedAvg`.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
        """
        mechanism = mechanisms.FixedClipping(
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            noise_site=_noise_site(server_side_noising),
        )
        super().__init__(strategy, num_sampled_clients, mechanism, **options)


class DPFedAvgAdaptive(DPFedAvg):
    """DP-FedAvg with adaptive clipping around a strategy that averages.

    Flower's name and arguments for `DPFedAvg` with `AdaptiveClipping`: each
    client reports whether its update's norm was at most S, and S moves by the
    noised fraction b of those that were, S <- S exp(-eta (b - gamma)). Updates
    and count together cost z. The bits reach the server without noise, which it
    adds to their count: `server_side_noising=False` does not hide a client's bit
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
          strategy: Flower's strategy that is wrapped.
          num_sampled_clients: The number of clients in a round, m.
          init_clip_norm: S of the first round.
          noise_multiplier: z, what a round's two releases together cost.
          server_side_noising: whether the server adds the updates' noise.
          clip_norm_lr: The step of the clip norm, eta.
          clip_norm_target_quantile: The quantile that the clip follows, gamma.
          clip_count_stddev: sigma_b, above z / 2; None means m / 20, or 0 if
            there is no noise at all. Errors call it, and the three above, by
            the names that `AdaptiveClipping` has for them.
          **options: the keyword-only arguments of `DPFedAvg`.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
        """
        mechanism = mechanisms.AdaptiveClipping(
            noise_multiplier=noise_multiplier,
            initial_clip_norm=init_clip_norm,
            target_quantile=clip_norm_target_quantile,
            clip_learning_rate=clip_norm_lr,
            count_noise_stddev=clip_count_stddev,
            noise_site=_noise_site(server_side_noising),
        )
        super().__init__(strategy, num_sampled_clients, mechanism, **options)


def _noise_site(server_side_noising: bool) -> str:
    _validate.instance_of(bool, server_side_noising=server_side_noising)
    return "server" if server_side_noising else "client"


def _is_one_average(results: _Messages) -> bool:
    """Whether results share one object, as they do that SecAgg+ hands over.

    One object then stands for every client's update.
    """
    sent = [getattr(fit_res, "parameters", None) for _, fit_res in results]
    return len(sent) > 1 == len(set(map(id, sent))) and hasattr(sent[0], "tensors")


def _name_of(client: Hashable) -> Hashable:
    """Returns a client's `cid`; an object without one is its own name."""
    return getattr(client, "cid", client)


def _to_arrays(parameters: Parameters) -> list[np.ndarray]:
    """Returns the arrays that the server's own `flwr.common.Parameters` hold."""
    # Pickled objects could execute code: they are never allowed.
    return [
        np.load(io.BytesIO(tensor), allow_pickle=False) for tensor in parameters.tensors
    ]


def _like(parameters: Parameters, arrays: Sequence[np.ndarray]) -> Parameters:
    """Returns parameters of the same form with other arrays."""
    files = [io.BytesIO() for _ in arrays]
    for file, array in zip(files, arrays, strict=True):
        np.save(file, array, allow_pickle=False)
    return _with_attribute(parameters, "tensors", [f.getvalue() for f in files])


def _with_attribute(message: _Copied, name: str, value: object) -> _Copied:
    """Returns a shallow copy with another value; the original stays."""
    other = copy.copy(message)
    setattr(other, name, value)
    return other
