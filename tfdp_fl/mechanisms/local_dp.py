"""Local differential privacy: every client adds noise to its own release."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import dp_accounting

from tfdp_fl import _validate
from tfdp_fl.accounting import analytic_noise_multiplier, charge, format_up
from tfdp_fl.mechanisms import (
    cohort_query,
    declaration,
    mechanism,
    noise,
)
from tfdp_fl.mechanisms.contribution import (
    ClientContext,
    PrivacyContext,
    RoundState,
)
from tfdp_fl.terms import Json, NoiseSite, Sampling, TrustModel

# Replacing a client's whole data set moves its clipped release by up to 2S.
SENSITIVITY = 2.0


@functools.lru_cache(maxsize=64)
def noise_over_sensitivity(
    epsilon: float,
    delta: float,
    calibration: str,
    composition: str,
    rounds: int,
    participations: int,
) -> float:
    """Returns the sigma / sensitivity of one release that meets a local budget.

    Args:
      epsilon: The budget of one client over the whole training.
      delta: The delta of that budget.
      calibration: "analytic": Balle & Wang (2018), Algorithm 1; "classic":
        sqrt(2 ln(1.25/delta))/epsilon (Dwork & Roth 2014, Theorem A.1), proven
        for epsilon < 1 only.
      composition: "basic": every round may spend epsilon / T and delta / T.
        "rdp": at every Renyi order, k Gaussian releases of one client have the
        divergence of a single Gaussian with noise sigma / sqrt(k). That single
        Gaussian is calibrated to the whole budget.
      rounds: T, for "basic".
      participations: k, the most rounds in which a client can take part, for "rdp".
    """
    if composition == "basic":
        epsilon, delta, releases = epsilon / rounds, delta / rounds, 1
    else:
        releases = max(participations, 1)
    if calibration == "analytic":
        one_release = analytic_noise_multiplier(epsilon, delta)
    else:
        one_release = math.sqrt(2 * math.log(1.25 / delta)) / epsilon
    return one_release * math.sqrt(releases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalMechanism(mechanism.Mechanism):
    """Base class of mechanisms that protect each release separately.

    `LocalDP` describes the parameters, including `epsilon` and `delta`.
    """

    trust_model: ClassVar[str] = TrustModel.LOCAL
    noise_site = NoiseSite.EVERY_CLIENT
    delta = None  # type: Any
    own_caveats: ClassVar[Mapping[str, str]] = {
        "classic_above_one": (
            "The noise was calibrated by the classic Gaussian formula at an "
            "epsilon of 1 or more, where its proof does not hold; the target "
            "it was calibrated for is not guaranteed, and the epsilon reported "
            "here was computed from the noise actually added."
        ),
    }

    calibration: str = declaration.parameter(
        declaration.OneOf("analytic", "classic"),
        "analytic (Balle & Wang 2018), or the classic formula, proven for epsilon < 1.",
        default="analytic",
    )
    composition: str = declaration.parameter(
        declaration.OneOf("rdp", "basic"),
        "how a client's rounds add up: rdp, or basic (epsilon / T for every round).",
        default="rdp",
    )
    max_participations: int | None = declaration.parameter(
        declaration.optional(_validate.positive_integer),
        "the most rounds that one client takes part in; fewer need less noise in each.",
        default=None,
    )

    @classmethod
    def from_budget(
        cls, target: mechanism.CalibrationTarget, **options: Any
    ) -> mechanism.Mechanism:
        """Implements `Mechanism.from_budget`; the noise is calibrated on use."""
        budget: Json = {"epsilon": target.epsilon, "delta": target.delta}
        return cls(**budget, **options)

    def bind(self, context: PrivacyContext) -> cohort_query.CohortQuery:
        """Implements `Mechanism.bind`; the context must determine the noise."""
        self.noise_stddevs(RoundState(1.0, 0.0, 1.0), context)
        releases = context.rounds if self.composition == "basic" else 1
        epsilon = (self.epsilon or 0.0) / (releases or 1)
        if self.calibration == "classic" and epsilon >= 1:
            warnings.warn(
                "calibration='classic' is proven for epsilon < 1 only, and was "
                f"requested at epsilon={format_up(epsilon)}; the reported epsilon is "
                "computed from the noise itself.",
                stacklevel=2,
            )
        return super().bind(context)

    def releases_per_round(self, context: PrivacyContext) -> int:
        """Returns the number of separately charged releases in a round."""
        return 1

    def noise_over_sensitivity(self, context: PrivacyContext) -> float:
        """Returns sigma / sensitivity of one release, calibrated if necessary.

        Raises:
          ValueError: The mechanism has a budget for a training run whose number of
            rounds the context does not specify.
        """
        if context.rounds is None:
            raise ValueError(
                f"rounds must be known to split epsilon={self.epsilon!r} over "
                f"them, got None; {self.name} needs it."
            )
        return noise_over_sensitivity(
            self.epsilon,
            self.delta,
            self.calibration,
            self.composition,
            rounds=context.rounds,
            participations=context.max_participations or context.rounds,
        )

    def mu_squared(self, context: PrivacyContext) -> float:
        """Returns (sensitivity / sigma)^2 of one client's release in one round.

        It is infinite without noise.
        """
        ratio = self.noise_over_sensitivity(context)
        return self.releases_per_round(context) / ratio**2 if ratio else math.inf

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        if self.calibration == "classic" and (self.epsilon or 0.0) >= 1:
            return ("local_not_central", "classic_above_one")
        return ("local_not_central",)


@declaration.register("local")
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalDP(LocalMechanism):
    """Each client releases Delta min(1, S/||Delta||) + N(0, (z_local S)^2).

    The noise is either given or calibrated to a budget for one client over the whole
    training. The server only averages and need not be trusted.

    Attributes:
      clip_norm: S > 0.
      epsilon: The budget of one client over the training, with `delta`.
      delta: In (0, 1).
      noise_multiplier: z_local >= 0, instead of a budget: the stddev of the noise that
        **one client** adds, divided by S. (A client's share of central noise is smaller
        by a factor of sqrt(m); see `FixedClipping(noise_site="client")`.)
      calibration: "analytic" (Balle & Wang 2018) or "classic" (proven for a
        per-release epsilon < 1; above that, it warns, and the reported epsilon is
        computed from the noise).
      composition: "rdp": a client's own participations are composed;
        "basic": epsilon / T and delta / T for every round.
      max_participations: The maximum number of rounds of a client; a limit needs less
        noise with `composition="rdp"`. None: as often as it is drawn.
    """

    clip_norm: float = declaration.parameter(
        declaration.clip, "the clip S, L2 over the whole update.", start=1.0
    )
    epsilon: float | None = declaration.parameter(
        declaration.optional(noise.require_float32_range(_validate.positive)),
        "the budget of one client over the training.",
        default=None,
    )
    delta: float | None = declaration.parameter(
        declaration.optional(_validate.inside_unit_interval),
        "its delta.",
        default=None,
    )
    noise_multiplier: float | None = declaration.parameter(
        declaration.optional(noise.require_float32_range(_validate.non_negative)),
        "one client's noise stddev over the clip, instead of a budget.",
        default=None,
    )

    def check_parameters(self) -> None:
        """Implements `Mechanism.check_parameters`."""
        by_budget = self.noise_multiplier is None
        if {self.epsilon is not None, self.delta is not None} != {by_budget}:
            raise ValueError(
                "LocalDP needs either epsilon and delta, or noise_multiplier, got "
                f"epsilon={self.epsilon!r}, delta={self.delta!r} and "
                f"noise_multiplier={self.noise_multiplier!r}."
            )

    def noise_multiplier_at(self, round_index: int) -> float:
        """Implements `Mechanism.noise_multiplier_at`: 0, as the server adds none."""
        return self.noise_multiplier or 0.0

    def client_noise(
        self, round: RoundState, client: ClientContext, context: PrivacyContext
    ) -> Any:
        """Implements `Mechanism.client_noise`: z_local S."""
        return self.client_noise_multiplier(context) * round.clip_norm

    def noise_stddevs(self, round: RoundState, context: PrivacyContext) -> Json:
        """Implements `Mechanism.noise_stddevs`: sqrt(m) z S, on a sum of m releases."""
        client_stddev = self.client_noise_multiplier(context) * round.clip_norm
        return {"update": round.clients_per_round**0.5 * client_stddev}

    def noise_over_sensitivity(self, context: PrivacyContext) -> float:
        """Implements `LocalMechanism.noise_over_sensitivity`."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier / SENSITIVITY
        return super().noise_over_sensitivity(context)

    def client_noise_multiplier(self, context: PrivacyContext) -> float:
        """Returns z_local, the noise of one client divided by S."""
        return SENSITIVITY * self.noise_over_sensitivity(context)

    def round_event(
        self, round_index: int, context: PrivacyContext
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: the central guarantee of the mean.

        If exactly m clients answer, their independent noise of stddev z_local S makes a
        central noise multiplier of sqrt(m) z_local. If the cohort size is random, so is
        the number of noise terms, and nothing is claimed.

        The neighbouring relation is that of the local guarantee: one client's data is
        replaced, which moves the sum by 2S. For a fixed-size cohort, the charge itself
        doubles the sensitivity; for a shuffled one, this function does.
        """
        multiplier = self.client_noise_multiplier(context)
        if multiplier == 0 or context.sampling in (*charge.OF_RANDOM_SIZE, None):
            return dp_accounting.NonPrivateDpEvent()
        if context.sampling != Sampling.FIXED_SIZE:
            multiplier /= SENSITIVITY
        return dp_accounting.GaussianDpEvent(
            multiplier * math.sqrt(context.cohort_size(round_index))
        )

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "Local differential privacy: every client clips its update to an "
            f"L2 norm of {self.clip_norm:g} and adds Gaussian noise of its "
            "own before the update leaves it; the server only averages."
        )
