"""The server's side of any mechanism with a trusted server."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, mechanisms, schedules
from tfdp_fl.flower import answers as answers_lib
from tfdp_fl.flower import fixed, keys, population, rounds, updates
from tfdp_fl.mechanisms import registry

# What clients are told to clip to, where the server does it for them.
_NO_CLIP = 1e30
# A factor in float32 may be rounded up by so much of itself.
_ROUNDING = 1e-6


class DPFedAvg(fixed.DPFedAvgFixed):
    """Any central mechanism around any strategy that averages.

    As `DPFedAvgFixed`, but for who clips. The clients send their updates as
    they are, and the server does with them what the mechanism says: it clips
    (to the cohort's median norm, say), adds up, noises, and moves the clip by
    what it released. The server is trusted with each update, therefore, and
    SecAgg+ has nothing to add up; where it is not to be, `DPFedAvgFixed` and
    `DPFedAvgAdaptive` have the clients clip.
    """

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
        if isinstance(mechanism, Mapping):
            kind = registry.by_name(mechanism["name"])
            mechanism = kind(**mechanism["parameters"])
        _validate.instance_of(mechanisms.Mechanism, mechanism=mechanism)
        self._deployment = mechanisms.Deployment(
            clients_per_round=_validate.positive_integer(
                num_sampled_clients=num_sampled_clients
            ),
            sampling="fixed_size",
        )
        if (
            mechanism.guarantee != "central"
            or mechanism.noise_site != "server"
            or not mechanism.scales_updates
            or mechanism.event_period is not None
            or mechanism.first_memory(self._deployment) != ()
        ):
            raise ValueError(
                "mechanism must be a central one that scales updates and whose "
                "noise the server adds, anew in each round, got "
                f"{mechanism!r}."
            )
        mechanism.check(self._deployment)
        if callable(mechanism.noise_multiplier):
            mechanism = mechanism.with_noise_multiplier(
                schedules.fixed(mechanism.noise_multiplier)
            )
        self._declared = mechanism
        first = mechanism.first_clip_norm() if clip_norm is None else clip_norm
        ledger = options.pop("ledger", None)
        super().__init__(
            strategy,
            num_sampled_clients,
            # A clip that only the cohort tells is 0 before there is one.
            first or _NO_CLIP,
            mechanism.noise_multiplier_at(0),
            True,
            **options,
        )
        if ledger is not None:  # Once all arguments are known to be right.
            self._history.open_ledger(ledger, self._mechanism())

    @property
    def mechanism(self) -> mechanisms.Mechanism:
        """The mechanism; it cannot be exchanged in the middle of a run."""
        return self._declared

    def _dp_config(self) -> dict[str, Any]:
        return {keys.CLIP_NORM: _NO_CLIP}

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments()
        for name in ("noise_multiplier", "server_side_noising"):
            del arguments[name]
        return {
            **arguments,
            "mechanism": {
                "name": self.mechanism.registered_name,
                "parameters": self.mechanism.parameters(),
            },
        }

    @property
    def _round_index(self) -> int:
        """The mechanism's count of rounds, which those abandoned are not in."""
        return len(self._history.released)

    def _planned(
        self,
        server_round: int,
        clients: Sequence[Any],
        watched: population.WatchedManager | None,
    ) -> rounds.ReleasedRound:
        """Returns the round at the cost that the mechanism says."""
        plan = super()._planned(server_round, clients, watched)
        event = self.mechanism.round_event(self._round_index, self._deployment)
        multiplier = 0.0
        if not isinstance(event, dp_accounting.NonPrivateDpEvent):
            multiplier = float(event.noise_multiplier)
        return dataclasses.replace(plan, noise_multiplier=multiplier)

    def _noised_mean(
        self, configured: Any, answers: answers_lib.Answers
    ) -> list[np.ndarray]:
        """Returns w + (sum_k c_k Delta_k + noise) / m, as the mechanism says.

        The clip that follows waits for `_next_clip_norm`.
        """
        mechanism, m = self.mechanism, self.num_sampled_clients
        changes = [
            updates.clipped(
                updates.difference(reply.arrays, configured.sent), math.inf
            )
            for *_, reply in answers.valid
        ]
        discarded = np.array([each.discarded for each in changes], bool)
        self.discarded_updates += int(discarded.sum())
        norms = tf.constant(
            [updates.norm(each.arrays) for each in changes], tf.float32
        )
        this = mechanisms.Round(
            configured.clip_norm,
            mechanism.noise_multiplier_at(self._round_index),
            float(m),
        )
        if mechanism.clip_to_cohort is not None:
            clip = mechanism.clip_to_cohort(norms, _as_tensors(this))
            this = this._replace(clip_norm=float(clip))
        each = mechanism.contribution_of_norm(
            norms, tf.constant(~discarded), _as_tensors(this)
        )
        total = [np.zeros(array.shape) for array in configured.sent]
        for factor, change in zip(
            each.update.numpy().astype(np.float64), changes, strict=True
        ):
            for array, part in zip(total, change.arrays, strict=True):
                array += factor * (1 - _ROUNDING) * part
        stddevs = mechanism.noise_stddevs(this, self._deployment)
        total = updates.noised(total, float(stddevs["update"]))
        generator = np.random.default_rng()
        sums = {
            name: float(np.sum(value.numpy(), dtype=np.float64))
            + float(generator.normal(scale=float(stddevs[name])))
            for name, value in each.sums.items()
        }
        self._clip_norm_after = float(mechanism.next_clip_norm(sums, this))
        return updates.applied(configured.sent, [array / m for array in total])

    def _next_clip_norm(
        self, clip_norm: float, norm_bits: Sequence[bool | None]
    ) -> float:
        """Returns what the mechanism makes of what it released."""
        del clip_norm, norm_bits
        return self._clip_norm_after


def _as_tensors(this: mechanisms.Round) -> mechanisms.Round:
    return mechanisms.Round(*(tf.constant(v, tf.float32) for v in this))
