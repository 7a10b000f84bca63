"""DP-FTRL at client level: noise that is correlated across rounds.

The correlation and its cost are computed in `tfdp_fl.matrix_factorization`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import ClassVar

import dp_accounting

from tfdp_fl import _validate, matrix_factorization, schedules
from tfdp_fl._lazy_tf import tf
from tfdp_fl.matrix_factorization import strategies
from tfdp_fl.mechanisms import declaration, mechanism, noise
from tfdp_fl.mechanisms.contribution import PrivacyContext, Tensors
from tfdp_fl.terms import Json, Sampling


@declaration.register("correlated")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedNoise(mechanism.Mechanism):
    """DP-FedAvg with noise that partly cancels from round to round.

    DP-FTRL by matrix factorisation (Kairouz et al. 2021,
    https://arxiv.org/abs/2103.00039; Denisov et al. 2022,
    https://arxiv.org/abs/2202.08312; Choquette-Choo et al. 2023,
    https://arxiv.org/abs/2306.08153; McMahan et al. 2024,
    https://arxiv.org/abs/2408.08868). One round releases
    (sum_k Delta_k min(1, S/||Delta_k||) + z S n_t) / m, where n = C^-1 of fresh
    N(0, 1) draws and C is the strategy. All rounds together are one Gaussian
    of z / sens(C), and round t is charged as one of z / col_t
    (`matrix_factorization.Generator.round_sensitivities`).

    This needs no assumption about which clients are sampled, except that two rounds of
    a client are at least b apart, which `sampling="cyclic"` ensures.

    After T released rounds, a new segment starts, with empty buffers and separate
    charges.

    Attributes:
      clip_norm: The clip S > 0, an L2 norm over all variables of the model.
      noise_multiplier: z >= 0, stddev of the fresh noise on the sum divided by
        S, the same in every round.
      strategy: C: a `BandedToeplitz` or `BLT`, or a string for one, such as "blt:2".
        Unspecified coefficients are chosen to minimise the noise of the last model.
      rounds: T, the rounds of a segment.
      min_separation: b, the minimum number of rounds from one participation of a
        client to its next.
      max_participations: k, the maximum number of rounds of a client in a segment;
        None: as many as possible, ceil(T / b).
    """

    # The last caveat applies if clients take part whenever they like.
    own_caveats: ClassVar[Mapping[str, str]] = {
        "correlated_noise_separation": (
            "The noise is correlated across rounds. Epsilon holds only if a client's "
            "rounds are at least the min separation apart and at most "
            "max_participations in number. Whatever draws the cohorts must ensure "
            "both."
        ),
        "correlated_noise_secret": (
            "Anyone who sees the models and the buffers of the noise, which are "
            "in the server's memory and in checkpoints, knows the sums of the "
            "updates without noise; keep the buffers as secret as the data."
        ),
        "participations_checked": (
            "That no client took part too soon or too often was checked "
            "for every cohort before its release, by the clients' names: a client "
            "that came back under another name counts as another client."
        ),
    }

    clip_norm: float = declaration.parameter(
        declaration.clip, "the clip S, L2 over the whole update.", start=0.5
    )
    noise_multiplier: float = declaration.parameter(
        _validate.non_negative,
        "z, stddev of the fresh noise on the sum of the clipped updates over the clip.",
    )
    strategy: strategies.Strategy = declaration.parameter(
        strategies.check_strategy,
        "how the noise is correlated: blt or banded, with a number of buffers "
        "or bands, as in blt:2.",
        default="blt",
    )
    rounds: int = declaration.parameter(
        _validate.positive_integer, "T, the rounds of a segment."
    )
    min_separation: int = declaration.parameter(
        _validate.positive_integer,
        "b, the min separation of a client's rounds, and the number of groups; "
        "make_private and train.py take N / m.",
    )
    max_participations: int | None = declaration.parameter(
        declaration.optional(_validate.positive_integer),
        "the most rounds of a client in a segment; ceil(rounds / b) unless given.",
        default=None,
    )

    def check_parameters(self) -> None:
        """Implements `Mechanism.check_parameters`; makes the coefficients."""
        self.generator  # noqa: B018

    @property
    def pattern(self) -> matrix_factorization.ParticipationPattern:
        """The constraints on every client's participation: (k, b) and T."""
        return matrix_factorization.ParticipationPattern(
            rounds=self.rounds,
            min_separation=self.min_separation,
            max_participations=self.max_participations,
        )

    def participation_record(self) -> matrix_factorization.ParticipationRecord:
        """Returns a record that enforces the separation of each client's rounds."""
        return matrix_factorization.ParticipationRecord(self.pattern)

    @functools.cached_property
    def generator(self) -> strategies.Generator:
        """The strategy's noise generator for a segment of T rounds."""
        return self.strategy.generator(self.pattern)

    @property
    def event_period(self) -> int:
        """T, as the charges repeat in each segment."""
        return self.rounds

    def check(self, context: PrivacyContext) -> None:
        """Implements `Mechanism.check`."""
        if context.sampling not in (Sampling.CYCLIC, Sampling.MIN_SEPARATION, None):
            raise ValueError(
                "sampling must be 'cyclic' (or 'min_separation', if clients come "
                f"unasked) with {self.name}, because its noise needs a client's "
                f"rounds to be min_separation={self.min_separation} apart, got "
                f"sampling={context.sampling!r}."
            )
        if context.sampling is not None and not schedules.is_constant(
            context.clients_per_round
        ):
            raise ValueError(
                "clients_per_round must be one number under "
                f"{context.sampling} sampling, got "
                f"{context.clients_per_round!r}."
            )
        limit, declared = self.max_participations, context.max_participations
        if limit is not None and declared is not None and declared > limit:
            raise ValueError(
                "max_participations must be at most the mechanism's "
                f"({self.name}), {limit}, for which rounds are charged, got "
                f"{declared}."
            )
        if context.sampling is None or context.num_clients is None:
            return
        size, population = context.cohort_size(0), context.num_clients
        if size * self.min_separation > population:
            raise ValueError(
                "min_separation must be at most num_clients / "
                f"clients_per_round = {population} / {size:g}, because that many "
                "consecutive cohorts have no client in common, got "
                f"{self.min_separation}."
            )

    def init_noise_state(self, context: PrivacyContext) -> strategies.NoiseState:
        """Implements `Mechanism.init_noise_state`: buffers of zeros."""
        if context.shapes is None:
            raise ValueError(
                f"{self.name} needs to know the shapes of an update before its "
                "first round (PrivacyContext.shapes), got None."
            )
        return self.generator.init_noise_state(context.shapes)

    def add_noise(
        self, update: Tensors, stddev: tf.Tensor, noise_state: strategies.NoiseState
    ) -> tuple[Tensors, strategies.NoiseState]:
        """Implements `Mechanism.add_noise`: adds stddev n_t."""
        noise_state = self.generator.begin_round(noise_state)
        scale = tf.cast(stddev, tf.float32)
        shapes = [part.shape for part in update]
        if [buffer.shape[1:] for buffer in noise_state.buffers] != shapes:
            # Were it broadcast, one draw would be the noise of several elements.
            raise ValueError(
                f"noise_state must have buffers for variables of shapes {shapes}, got "
                f"{[buffer.shape for buffer in noise_state.buffers]}."
            )

        def add(index: int, fresh: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            sample, buffer = self.generator.next_noise(
                noise_state.round_index, noise_state.buffers[index], fresh
            )
            return noise.add_scaled_noise(update[index], sample, scale), buffer

        made = noise.standard_normals(update, noise.next_seed(), add)
        noised, buffers = map(list, zip(*made, strict=True))
        return noised, strategies.NoiseState(noise_state.round_index + 1, buffers)

    def begins_segment(self, noise_state: strategies.NoiseState) -> bool:
        """Implements `Mechanism.begins_segment`: after every T rounds of a state."""
        return int(noise_state.round_index) % self.rounds == 0

    def event_index(self, round_index: int, noise_state: strategies.NoiseState) -> int:
        """Implements `Mechanism.event_index`: the round index in the noise state."""
        del round_index  # Abandoned rounds have no noise.
        return int(noise_state.round_index)

    def round_event(
        self, round_index: int, context: PrivacyContext
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: a Gaussian of z / col_t.

        Args:
          round_index: The number of earlier rounds with noise from this noise state; it
            wraps around at T.
          context: What is known about the run.
        """
        if self.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        column = float(self.generator.round_sensitivities[round_index % self.rounds])
        if column == 0:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(self.noise_multiplier / column)

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        max_participations = self.generator.pattern.max_participations
        return (
            "DP-FedAvg with noise that is correlated across rounds (DP-FTRL): "
            f"every client's update is clipped to an L2 norm of {self.clip_norm:g}, "
            "and the server adds to the sum Gaussian "
            f"noise that is correlated by {self.strategy.describe()} over "
            f"{self.rounds} rounds, of which a client is in at most "
            f"{max_participations}, at least {self.min_separation} apart."
        )

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        return ("correlated_noise_separation", "correlated_noise_secret")

    def static_config(self) -> Hashable:
        """Implements `Mechanism.static_config`: everything except the clip.

        It includes the coefficients, as another machine may choose different ones.
        """
        values = self.parameters()
        del values["clip_norm"]
        return (*values.items(), self.generator.numbers)

    def parameters(self) -> Json:
        """Implements `Mechanism.parameters`, with the strategy as a string."""
        return {**super().parameters(), "strategy": repr(self.strategy)}
