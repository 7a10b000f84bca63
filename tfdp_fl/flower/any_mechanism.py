"""The server's side of any mechanism with a trusted server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdp_fl import _validate, mechanisms
from tfdp_fl.flower import declared, fixed, server_clipping


class DPFedAvg(fixed.DPFedAvgFixed):
    """Any central mechanism around any strategy that averages.

    As `DPFedAvgFixed`, but for who clips. The clients send their updates as
    they are, and the server does with them what the mechanism says: it clips
    (to the cohort's median norm, say), adds up, noises, and moves the clip by
    what it released. The server is trusted with each update, therefore, and
    SecAgg+ has nothing to add up; where it is not to be, `DPFedAvgFixed` and
    `DPFedAvgAdaptive` have the clients clip.
    """

    _sum = staticmethod(server_clipping.release)

    def __init__(
        self,
        strategy: Any,
        num_sampled_clients: int,
        mechanism: mechanisms.Mechanism | Mapping[str, Any],
        *,
        clip_norm: float | None = None,
        **options: Any,
    ):
        """Wraps a strategy.

        Args:
          strategy: see `DPFedAvgFixed`.
          num_sampled_clients: m.
          mechanism: a central mechanism whose noise the server adds anew in
            each round; or, as `state` keeps it, its registered name and its
            parameters.
          clip_norm: S of the next round, if it is not the mechanism's first.
          **options: the keyword-only arguments of `DPFedAvgFixed`.

        Raises:
          TypeError, ValueError: if an argument is not what it should be.
        """
        mechanism = declared.mechanism_of(mechanism)
        self.num_sampled_clients = _validate.positive_integer(
            num_sampled_clients=num_sampled_clients
        )
        if not server_clipping.server_can_clip(mechanism, self._deployment):
            raise ValueError(
                "mechanism must be a central one that scales updates and whose "
                "noise the server adds, anew in each round, got "
                f"{mechanism!r}."
            )
        mechanism.check(self._deployment)
        self._declared = mechanism
        first = mechanism.first_clip_norm() if clip_norm is None else clip_norm
        ledger = options.pop("ledger", None)
        super().__init__(
            strategy,
            num_sampled_clients,
            # A clip that only the cohort tells is 0 before there is one.
            first or server_clipping.NO_CLIP,
            mechanism.noise_multiplier_at(0),
            True,
            **options,
        )
        self._open(ledger)

    @property
    def mechanism(self) -> mechanisms.Mechanism:
        """The mechanism; it cannot be exchanged in the middle of a run."""
        return self._declared

    def _current_mechanism(self) -> mechanisms.Mechanism:
        return self._declared

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        for name in ("noise_multiplier", "server_side_noising"):
            del arguments[name]
        return {**arguments, "mechanism": declared.as_json(self.mechanism)}
