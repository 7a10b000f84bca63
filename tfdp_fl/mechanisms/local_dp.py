"""Local differential privacy: every client noises its own release."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import ClassVar

import dp_accounting
import tensorflow as tf

from tfdp_fl import _validate
from tfdp_fl.accounting import gaussian
from tfdp_fl.mechanisms import clipping, mechanism, noise

CALIBRATIONS = ("analytic", "classic")
COMPOSITIONS = ("rdp", "basic")

# Replacing a client's whole data set moves its clipped release by up to 2S.
SENSITIVITY = 2.0


class LocalDPQuery(mechanism.CohortQuery):
    """Each client clips to S and adds N(0, (z S)^2); the server averages.

    The mean is over the clients that answered: each answer is private by
    itself, so nothing depends on how many there are.
    """

    client_noise = "own"

    def __init__(self, clip_norm: float, client_noise_multiplier: float):
        self._clip_norm = clip_norm
        self._client_noise_multiplier = client_noise_multiplier

    def initial_global_state(self) -> mechanism.QueryState:
        """Implements `DPQuery.initial_global_state`."""
        state = super().initial_global_state()
        return state._replace(clip_norm=tf.constant(self._clip_norm))

    def noise_stddev(self, state: mechanism.QueryState) -> tf.Tensor:
        """Returns the noise on the sum of m releases: sqrt(m) z S."""
        return (
            tf.sqrt(state.clients_per_round)
            * self._client_noise_multiplier
            * state.clip_norm
        )

    def derive_sample_params(
        self, state: mechanism.QueryState
    ) -> mechanism.SampleParams:
        """Implements `DPQuery.derive_sample_params`."""
        return mechanism.SampleParams(
            clip_norm=state.clip_norm,
            noise_stddev=self._client_noise_multiplier * state.clip_norm,
            count_noise_stddev=tf.zeros([]),
        )

    def preprocess_record(
        self, params: mechanism.SampleParams, record: list[tf.Tensor]
    ) -> mechanism.Record:
        """Clips one client's update and adds the client's own noise."""
        clipped = clipping.clip_by_norm(record, params.clip_norm)
        return mechanism.Record(
            update=noise.add_normal(clipped.update, params.noise_stddev),
            below_clip=tf.zeros([]),
            weight=tf.ones([]),
            norm=clipped.norm,
            clipped=clipped.clipped,
            discarded=clipped.discarded,
        )

    def get_noised_result(
        self, sample_state: mechanism.Record, global_state: mechanism.QueryState
    ) -> tuple[
        list[tf.Tensor], mechanism.QueryState, dp_accounting.NonPrivateDpEvent
    ]:
        """Returns the mean of the releases; the server adds nothing.

        The event says nothing of the central guarantee; a local one is
        accounted for client by client.
        """
        mean = [
            tf.math.divide_no_nan(
                tensor, tf.cast(sample_state.weight, tensor.dtype)
            )
            for tensor in sample_state.update
        ]
        return mean, global_state, dp_accounting.NonPrivateDpEvent()


def check_budget(
    epsilon: float | None, delta: float | None
) -> tuple[float, float]:
    """Returns a checked (epsilon, delta)."""
    return (
        _validate.positive(epsilon=epsilon),
        _validate.inside_unit_interval(delta=delta),
    )


def check_participations(max_participations: int | None) -> None:
    """Raises unless the limit is None or a positive integer."""
    if max_participations is not None:
        _validate.positive_integer(max_participations=max_participations)


def noise_over_sensitivity(
    epsilon: float,
    delta: float,
    calibration: str,
    composition: str,
    rounds: int,
    participations: int,
) -> float:
    """Returns sigma / sensitivity of one release that keeps a local budget.

    Args:
      epsilon: The budget of one client over the whole training.
      delta: The same.
      calibration: "analytic": Balle & Wang (2018), Algorithm 1; "classic":
        sqrt(2 ln(1.25/delta))/epsilon (Dwork & Roth 2014, Theorem A.1), proven
        for epsilon < 1 only.
      composition: "basic": every round may spend epsilon / T and delta / T.
        "rdp": k Gaussian releases of one client have, at every Renyi order,
        the divergence of one Gaussian with noise sigma / sqrt(k), so that
        single Gaussian is calibrated to the whole budget.
      rounds: T, for "basic".
      participations: k, the most rounds a client can take part in, for "rdp".
    """
    if composition == "basic":
        epsilon, delta, releases = epsilon / rounds, delta / rounds, 1
    else:
        releases = max(participations, 1)
    if calibration == "analytic":
        single = gaussian.analytic_noise_multiplier(epsilon, delta)
    else:
        single = gaussian.classic_noise_multiplier(
            epsilon, delta, allow_epsilon_above_one=True
        )
        if epsilon >= 1:
            warnings.warn(
                "calibration='classic' is proven for epsilon < 1 only, and "
                f"was asked for at epsilon={epsilon:g}; the epsilon that is "
                "reported is computed from the noise itself.",
                stacklevel=2,
            )
    return single * math.sqrt(releases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalMechanism(mechanism.Mechanism):
    """What the mechanisms have in common that protect each release alone."""

    guarantee: ClassVar[str] = "local"

    def releases_per_round(self, deployment: mechanism.Deployment) -> int:
        """Returns how many separately charged releases one round makes."""
        del deployment
        return 1

    def noise_over_sensitivity(self, deployment: mechanism.Deployment) -> float:
        """Returns sigma / sensitivity of one release, calibrated if need be.

        Raises:
          ValueError: The mechanism keeps a budget over a training run, and the
            deployment does not say how long that is.
        """
        if deployment.rounds is None:
            raise ValueError(
                f"rounds must be known to split epsilon={self.epsilon!r} over "
                f"them, got None; {self.name} needs it."
            )
        return noise_over_sensitivity(
            self.epsilon,
            self.delta,
            self.calibration,
            self.composition,
            rounds=deployment.rounds,
            participations=deployment.max_participations or deployment.rounds,
        )

    def mu_squared(self, deployment: mechanism.Deployment) -> float:
        """Returns (sensitivity / sigma)^2 of one client's part in one round.

        Infinite without noise.
        """
        ratio = self.noise_over_sensitivity(deployment)
        if ratio == 0:
            return math.inf
        return self.releases_per_round(deployment) / ratio**2

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        above_one = (
            getattr(self, "calibration", None) == "classic"
            and self.epsilon is not None
            and self.epsilon >= 1
        )
        return ("local_not_central",) + (
            ("classic_above_one",) if above_one else ()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalDP(LocalMechanism):
    """Each client releases Delta min(1, S/||Delta||) + N(0, (z_local S)^2).

    The hands-on tutorial's `dp_client_update`, with the noise either given or
    calibrated to a budget for one client over the whole training. The server
    only averages; it need not be trusted.

    Attributes:
      clip_norm: S > 0.
      epsilon: The budget of one client over the training, with `delta`.
      delta: In (0, 1).
      noise_multiplier: z_local >= 0 instead of a budget: the noise that **one
        client** adds, divided by S. (A client-level share of central noise is
        sqrt(m) times less: see `FixedClipping(noise_site="client")`.)
      calibration: "analytic" (Balle & Wang 2018) or "classic" (proven for a
        per-release epsilon < 1; above it warns, and the reported epsilon is
        computed from the noise).
      composition: "rdp": a client's own participations are composed;
        "basic": epsilon / T and delta / T for every round.
      max_participations: After so many rounds a client sits out, which with
        `composition="rdp"` needs less noise; None: as often as it is drawn.
    """

    clip_norm: float
    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    calibration: str = "analytic"
    composition: str = "rdp"
    max_participations: int | None = None

    def __post_init__(self):
        set_ = object.__setattr__
        set_(self, "clip_norm", _validate.positive(clip_norm=self.clip_norm))
        _validate.one_of(CALIBRATIONS, calibration=self.calibration)
        _validate.one_of(COMPOSITIONS, composition=self.composition)
        check_participations(self.max_participations)
        if self.noise_multiplier is None:
            if self.epsilon is None or self.delta is None:
                raise ValueError(
                    "LocalDP needs either epsilon and delta, or "
                    "noise_multiplier, got "
                    f"epsilon={self.epsilon!r}, delta={self.delta!r} and "
                    "noise_multiplier=None."
                )
            epsilon, delta = check_budget(self.epsilon, self.delta)
            set_(self, "epsilon", epsilon)
            set_(self, "delta", delta)
        else:
            if self.epsilon is not None or self.delta is not None:
                raise ValueError(
                    "noise_multiplier must not be given together with epsilon "
                    f"and delta, got noise_multiplier="
                    f"{self.noise_multiplier!r}, epsilon={self.epsilon!r}, "
                    f"delta={self.delta!r}."
                )
            set_(
                self,
                "noise_multiplier",
                _validate.non_negative(noise_multiplier=self.noise_multiplier),
            )

    def noise_over_sensitivity(self, deployment: mechanism.Deployment) -> float:
        """Implements `LocalMechanism.noise_over_sensitivity`."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier / SENSITIVITY
        return super().noise_over_sensitivity(deployment)

    def client_noise_multiplier(
        self, deployment: mechanism.Deployment
    ) -> float:
        """Returns z_local, the noise of one client divided by S."""
        return SENSITIVITY * self.noise_over_sensitivity(deployment)

    def bind(self, deployment: mechanism.Deployment) -> LocalDPQuery:
        """Implements `Mechanism.bind`."""
        return LocalDPQuery(
            self.clip_norm, self.client_noise_multiplier(deployment)
        )

    def round_event(
        self, round_index: int, deployment: mechanism.Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`: what the mean gives centrally.

        m independent client noises of stddev z_local S are a central noise
        multiplier of sqrt(m) z_local, if exactly m clients answer. A Poisson
        cohort brings a random number of noises: nothing is claimed then.

        Neighbours are those of the local guarantee, one client's data replaced
        by other data, which moves the sum by 2S. The charge of a fixed-size
        cohort doubles the sensitivity itself; for a shuffled one it is done
        here.
        """
        multiplier = self.client_noise_multiplier(deployment)
        if multiplier == 0 or deployment.sampling in ("poisson", None):
            return dp_accounting.NonPrivateDpEvent()
        if deployment.sampling != "fixed_size":
            multiplier /= SENSITIVITY
        return dp_accounting.GaussianDpEvent(
            multiplier * math.sqrt(deployment.cohort_size(round_index))
        )

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        return (
            "Local differential privacy: every client clips its update to an "
            f"L2 norm of {self.clip_norm:g} and adds Gaussian noise of its "
            "own before the update leaves it; the server only averages."
        )
