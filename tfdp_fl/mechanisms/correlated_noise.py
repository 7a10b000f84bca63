"""DP-FTRL at client level: noise that is correlated across rounds.

A mechanism is one file, so this one holds the proof of its adaptive clip too;
how noise is correlated is `tfdp_fl.correlated_noise`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import dp_accounting

from tfdp_fl import _validate, correlated_noise, schedules
from tfdp_fl._on_use import tf
from tfdp_fl.correlated_noise import comparison, generators, strategies
from tfdp_fl.mechanisms import (
    adaptive_clipping,
    mechanism,
    noise,
    parameters,
    registry,
)
from tfdp_fl.mechanisms.contribution import Deployment, Round

_SAMPLINGS = ("cyclic", "cyclic_poisson", "separated")


def _momentum(**checked: Any) -> float:
    ((name, value),) = checked.items()
    momentum = _validate.non_negative(**checked)
    if momentum >= 1:
        raise ValueError(f"{name} must be below 1, got {value!r}.")
    return momentum


def _rates(**checked: Any) -> tuple[float, ...] | None:
    """Returns rates relative to the largest; None if all are the same.

    Rounded, so that two machines that compute a schedule say the same.
    """
    ((name, value),) = checked.items()
    if isinstance(value, str):
        try:
            value = [float(part) for part in value.split(",")]
        except ValueError as error:
            raise ValueError(
                f"{name} must be numbers with commas, got {value!r}."
            ) from error
    if not isinstance(value, Sequence) or not value:
        raise TypeError(f"{name} must be a sequence of rates, got {value!r}.")
    rates = [_validate.non_negative(**{name: each}) for each in value]
    largest = max(rates)
    if not largest:
        raise ValueError(f"{name} must hold a number above 0, got only zeros.")
    relative = tuple(float(f"{rate / largest:.6g}") for rate in rates)
    return None if min(relative) == 1 else relative


def _server_only(**checked: Any) -> str:
    ((name, value),) = checked.items()
    if value != "server":
        raise ValueError(
            f"{name} must be 'server' with correlated noise, because nobody "
            "but the server knows the noise of earlier rounds, got "
            f"{value!r}."
        )
    return "server"


def _measures(made: generators.Generator, rounds: int) -> list[float]:
    """Returns by how much noise may be less, where any of them is less.

    A run costs by the sensitivity of its rounds, its counts by that of a
    segment, and amplified cycles by one column.
    """
    squares = made.charges**2
    whole, rest = divmod(rounds, len(squares))
    measures = [
        math.sqrt(whole * squares.sum() + squares[:rest].sum()),
        made.sensitivity,
    ]
    if isinstance(made, generators.BandedGenerator):
        measures.append(made.largest_column)
    return measures


def _gaussian(
    column: float, noise_multiplier: float, counts: float
) -> dp_accounting.DpEvent:
    """Returns one Gaussian for updates and a count.

    Args:
      column: How far C x is moved, in clips.
      noise_multiplier: z > 0.
      counts: The count's mu^2.
    """
    if counts:
        squares = (column / noise_multiplier) ** 2 + counts
        return dp_accounting.GaussianDpEvent(squares**-0.5)
    if column == 0:
        return dp_accounting.NoOpDpEvent()
    return dp_accounting.GaussianDpEvent(noise_multiplier / column)


@registry.register("correlated")
@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedNoise(mechanism.Mechanism):
    """DP-FedAvg whose noise cancels itself out in part from round to round.

    DP-FTRL by matrix factorisation (Kairouz et al. 2021,
    https://arxiv.org/abs/2103.00039; Denisov et al. 2022,
    https://arxiv.org/abs/2202.08312; Choquette-Choo et al. 2023,
    https://arxiv.org/abs/2306.08153; McMahan et al. 2024,
    https://arxiv.org/abs/2408.08868). One round releases
    (sum_k Delta_k min(1, S/||Delta_k||) + z S n_t) / m, where n = C^-1 of fresh
    N(0, 1) draws and C is the strategy. All rounds together are one Gaussian
    of z / sens(C), and round t is charged as one of z / col_t
    (`correlated_noise.Generator.charges`).

    That needs no assumption about who is sampled, only that two rounds of a
    client are at least b apart, which `sampling="cyclic"` sees to. With
    `sampling="cyclic_poisson"` and no more than b bands the draw within the
    groups amplifies as well.

    After T released rounds a new segment begins, with empty buffers and
    charges of its own.

    With `target_quantile` the clip adapts as in `AdaptiveClipping` (Andrew et
    al. 2021): S_t <- S_t exp(-eta (b_t - gamma)), b_t from the count of
    unclipped updates with noise of its own, N(0, sigma_b^2), that is
    independent over the rounds. A round then releases S_t (x_t + z n_t) / m,
    x_t the sum of Delta_k min(1/S_t, 1/||Delta_k||): the noise is that of a
    clip of 1, scaled by the clip of its round, and needs no new segment when
    the clip moves. Why one client moves C x no further than sens(C), whatever
    the clips were:

    1. Before round t is released, S_t is known to whoever knows the releases
       before it: it follows from S_0 and the noised counts. To divide by it
       loses nothing, and round t tells as much as x_t + z n_t and the count.
    2. In each of its rounds a client moves x_t by at most 1 in norm, and the
       centred count by 1/2, whatever S_t is; in all others by 0. Only what it
       hands in depends on earlier releases, as it does without a moving clip.
    3. (x_t + z n_t) for all t tells as much as y_t = (C x)_t + z w_t, w fresh
       (C is lower triangular and c_0 = 1). One client moves the mean of y_t
       by some u_t, given all that was released before, and by no choice of
       its updates is the sum of ||u_t||^2 above sens(C)^2: the sensitivity is
       a maximum over all of them. Such Gaussians cost together what one with
       that mean costs, also where u_t is chosen as one goes (Denisov et al.
       2022, theorem 2.1; Smith & Thakurta 2022, https://arxiv.org/abs/
       2210.17520).
    4. The counts are further coordinates, with a C of their own, the identity:
       at most k rounds of 1 / (2 sigma_b), which by round s are at most
       ceil(s / b). So mu^2 = (sens/z)^2 + k / (2 sigma_b)^2, of which rounds
       0, b, 2b, ... (k of them) are charged 1 / (2 sigma_b)^2 each.

    Attributes:
      clip_norm: The clip S > 0, an L2 norm over all variables of the model;
        of the first round, if it adapts.
      noise_multiplier: z >= 0, stddev of the fresh noise on the sum divided by
        S, the same in every round.
      strategy: C: a `BandedToeplitz`, `BLT` or `Tree`, or a text that stands
        for one, such as "blt:2". What it leaves open is chosen so that the
        noise of the last model is the smallest.
      rounds: T, the rounds of a segment.
      min_separation: b.
      max_participations: k, after which a client sits out; None: as many as
        there is room for, ceil(T / b).
      server_momentum: That of the server optimizer, by which C is chosen; it
        has no part in the guarantee. None: that of the optimizer that
        `DPFederatedModel.compile` is given, or 0.
      server_rates: The server's learning rates, one for each of T rounds, by
        which C is chosen as well; only how they relate to each other counts.
        None: those of the optimizer's schedule, or the same in all rounds.
      noise_site: "server".
      target_quantile: gamma, the fraction of clients that should remain
        unclipped; None: the clip stays.
      clip_learning_rate: eta.
      count_noise_stddev: sigma_b > 0, in clients, of a clip that adapts; it is
        charged on top of z. None: so much that the counts cost a twentieth of
        what the updates do.
    """

    # The last two are for where clients come as they like.
    own_caveats: ClassVar[Mapping[str, str]] = {
        "correlated_noise_separation": (
            "The noise is correlated across rounds, and epsilon counts on a "
            "client's rounds being at least the min separation apart, and no "
            "more of them than max_participations, which whoever draws the "
            "cohorts has to keep to."
        ),
        "correlated_noise_secret": (
            "Whoever sees the buffers of the noise, which are in the server's "
            "memory and in checkpoints, and the models, knows the sums of the "
            "updates without noise; they have to be kept as secret as the "
            "data."
        ),
        "participations_checked": (
            "That no client took part sooner again, or more often, was checked "
            "for every cohort before its release, by the names that clients "
            "went by: who came back under another name counts as another."
        ),
        "participations_declared": (
            "That no client took part sooner again, or more often, was "
            "declared, and nobody checked it: the clients had no names here."
        ),
    }

    suggested_run: ClassVar[Mapping[str, Any]] = {
        "target_epsilon": 8.0,
        "sampling": "cyclic",
    }

    clip_norm: float = parameters.parameter(
        parameters.clip, "the clip S, L2 over the whole update.", start=0.5
    )
    noise_multiplier: float = parameters.parameter(
        _validate.non_negative,
        "z, stddev of the fresh noise on the sum of the clipped updates over the clip.",
    )
    strategy: strategies.Strategy = parameters.parameter(
        strategies.checked,
        "how the noise is correlated: blt, banded or tree, with a number of "
        "buffers or bands, as in blt:2.",
        default="blt",
    )
    rounds: int = parameters.parameter(
        _validate.positive_integer, "T, for which the noise is made."
    )
    min_separation: int = parameters.parameter(
        _validate.positive_integer,
        "b, from one round of a client to its next: the number of groups; "
        "make_private and train.py take N / m.",
    )
    max_participations: int | None = parameters.parameter(
        parameters.Optional(_validate.positive_integer),
        "after so many rounds a client sits out; as many as there is room for "
        "unless given.",
        default=None,
    )
    server_momentum: float | None = parameters.parameter(
        parameters.Optional(_momentum),
        "of the server optimizer, by which the noise is chosen; that of the "
        "one that is compiled unless given.",
        default=None,
    )
    server_rates: tuple[float, ...] | None = parameters.parameter(
        parameters.Optional(_rates),
        "learning rates of the server optimizer, one a round, by which the "
        "noise is chosen; those of its schedule unless given.",
        default=None,
    )
    noise_site: str = parameters.parameter(
        _server_only, "who adds the noise: the server.", default="server"
    )
    target_quantile: float | None = parameters.parameter(
        parameters.Optional(_validate.probability),
        "the fraction of clients that should remain unclipped, by which the "
        "clip moves; it stays unless given.",
        default=None,
    )
    clip_learning_rate: float = parameters.parameter(
        _validate.non_negative, "how fast the clip follows.", default=0.2
    )
    count_noise_stddev: float | None = parameters.parameter(
        parameters.Optional(_validate.positive),
        "noise on the count of unclipped clients, charged on top; unless "
        "given, so much that it costs a twentieth of the noise on the updates.",
        default=None,
    )

    def check_parameters(self) -> None:
        """Implements `Mechanism.check_parameters`; makes the coefficients."""
        if self.count_noise_stddev is not None and not self.adapts:
            raise ValueError(
                "count_noise_stddev must be left out without target_quantile, "
                "because a clip that stays needs no count, got "
                f"{self.count_noise_stddev!r}."
            )
        rates = self.server_rates
        if rates is not None and len(rates) != self.rounds:
            raise ValueError(
                f"server_rates must hold one number for each of rounds="
                f"{self.rounds}, got {len(rates)}."
            )
        self.generator  # noqa: B018

    @property
    def adapts(self) -> bool:
        """Whether the clip follows a quantile of the update norms."""
        return self.target_quantile is not None

    @property
    def released_sums(self) -> tuple[str, ...]:  # type: ignore[override]
        """The count of unclipped updates, where the clip adapts."""
        return (adaptive_clipping.BELOW,) if self.adapts else ()

    @property
    def participation(self) -> correlated_noise.Participation:
        """What is promised of every client: (k, b) and T."""
        return correlated_noise.Participation(
            rounds=self.rounds,
            min_separation=self.min_separation,
            max_participations=self.max_participations,
        )

    def participation_record(self) -> correlated_noise.ParticipationRecord:
        """Returns what keeps clients who come as they like to it."""
        return correlated_noise.ParticipationRecord(self.participation)

    @functools.cached_property
    def generator(self) -> generators.Generator:
        """What the strategy comes to in a segment of T rounds."""
        return self.strategy.generator(
            self.participation,
            correlated_noise.Workload(
                momentum=self.server_momentum or 0.0, rates=self.server_rates
            ),
        )

    def for_server(
        self,
        momentum: float,
        rates: Sequence[float] | None,
        charged_rounds: int | None = None,
    ) -> mechanism.Mechanism:
        """Implements `Mechanism.for_server`: chooses C for the optimizer."""
        changes: dict[str, Any] = {}
        if self.server_momentum is None and momentum:
            changes["server_momentum"] = momentum
        if self.server_rates is None and rates is not None:
            changes["server_rates"] = tuple(rates)
        if not changes:
            return self
        made = dataclasses.replace(self, **changes)
        if charged_rounds is None or made.generator is self.generator:
            return made
        ratio = max(
            new / old
            for new, old in zip(
                _measures(made.generator, charged_rounds),
                _measures(self.generator, charged_rounds),
                strict=True,
            )
        )
        # A hair more, for what floating point rounds.
        noise_multiplier = self.noise_multiplier * ratio * (1 + 1e-9)
        return made.with_noise_multiplier(noise_multiplier)

    @property
    def event_period(self) -> int:
        """T: the charges of a new segment begin anew."""
        return self.rounds

    def check(self, deployment: Deployment) -> None:
        """Implements `Mechanism.check`."""
        if deployment.sampling not in (*_SAMPLINGS, None):
            raise ValueError(
                "sampling must be 'cyclic', 'cyclic_poisson' or, of clients "
                "who come as they like, 'separated' with "
                f"{self.name}, because its noise counts on a client's rounds "
                f"being min_separation={self.min_separation} apart, got "
                f"sampling={deployment.sampling!r}."
            )
        if deployment.sampling is not None and not schedules.is_constant(
            deployment.clients_per_round
        ):
            raise ValueError(
                "clients_per_round must be one number under "
                f"{deployment.sampling} sampling, got "
                f"{deployment.clients_per_round!r}."
            )
        self._check_room(deployment)

    def _check_room(self, deployment: Deployment) -> None:
        """Refuses facts under which clients cannot be so seldom in a round."""
        most, declared = self.max_participations, deployment.max_participations
        if most is not None and declared is not None and declared > most:
            raise ValueError(
                "max_participations must be at most that of "
                f"{self.name}, {most}, by which its rounds are charged, got "
                f"{declared}."
            )
        if deployment.sampling is None or deployment.num_clients is None:
            return
        size, population = deployment.cohort_size(0), deployment.num_clients
        if size * self.min_separation > population:
            raise ValueError(
                "min_separation must be at most num_clients / "
                f"clients_per_round = {population} / {size:g}, because so many "
                "cohorts one after the other have no client in common, got "
                f"{self.min_separation}."
            )

    def first_clip_norm(self) -> float:
        """Implements `Mechanism.first_clip_norm`."""
        return self.clip_norm

    def count_noise_stddev_of(self, noise_multiplier: Any) -> Any:
        """Returns sigma_b (number or tensor) of a clip that adapts.

        It does not go by the size of a cohort: k rounds of it are charged
        wherever they lie, so that it must be the same in all of them.

        Args:
          noise_multiplier: z.
        """
        if self.count_noise_stddev is not None:
            return self.count_noise_stddev
        made = self.generator
        of_one = math.sqrt(made.participation.most) / made.sensitivity
        return noise_multiplier * of_one / math.sqrt(4 * comparison.SHARE_OF_COUNTS)

    def noise_stddevs(self, round: Round, deployment: Deployment) -> dict[str, Any]:
        """Implements `Mechanism.noise_stddevs`: z S, and sigma_b."""
        stddevs = super().noise_stddevs(round, deployment)
        if self.adapts:
            stddevs[adaptive_clipping.BELOW] = self.count_noise_stddev_of(
                round.noise_multiplier
            )
        return stddevs

    def sums_of(self, norm: tf.Tensor, round: Round) -> dict[str, tf.Tensor]:
        """Implements `Mechanism.sums_of`: the centred bits, if it adapts."""
        if not self.adapts:
            return {}
        bits = adaptive_clipping.bits_below(norm, round.clip_norm)
        return {adaptive_clipping.BELOW: bits}

    def next_clip_norm(self, sums: Mapping[str, Any], round: Round) -> Any:
        """Implements `Mechanism.next_clip_norm`: S exp(-eta (b - gamma))."""
        if self.target_quantile is None:
            return super().next_clip_norm(sums, round)
        return adaptive_clipping.moved_clip(
            sums, round, self.target_quantile, self.clip_learning_rate
        )

    def first_memory(self, deployment: Deployment) -> generators.Memory:
        """Implements `Mechanism.first_memory`: buffers of zeros."""
        if deployment.shapes is None:
            raise ValueError(
                f"{self.name} needs to know the shapes of an update before its "
                "first round (Deployment.shapes), got None."
            )
        return self.generator.first_memory(deployment.shapes)

    def add_noise(
        self,
        update: list[tf.Tensor],
        stddev: tf.Tensor,
        memory: generators.Memory,
    ) -> tuple[list[tf.Tensor], generators.Memory]:
        """Implements `Mechanism.add_noise`: adds stddev n_t.

        The buffers hold n for noise of stddev 1, so that they outlive a clip
        that moves.
        """
        first, others = noise.next_seed(), noise.next_seed()

        def draw(index: Any) -> list[tf.Tensor]:
            if isinstance(index, int) and index == 0:
                return noise.standard_normals(update, first)
            return noise.standard_normals(update, noise.fold_in(others, index))

        made, memory = self.generator.noise(memory, draw)
        scale = tf.cast(stddev, tf.float32)
        noised = [
            tensor + tf.cast(each * scale, tensor.dtype)
            for tensor, each in zip(update, made, strict=True)
        ]
        return noised, memory

    def event_index(self, round_index: int, memory: generators.Memory) -> int:
        """Implements `Mechanism.event_index`: where the memory stands."""
        del round_index  # Abandoned rounds have no noise.
        return int(memory.position)

    def query_event(self, round: Any) -> dp_accounting.DpEvent:
        """Implements `Mechanism.query_event`, without amplification."""
        charges = tf.constant(self.generator.charges, tf.float32)
        position = round.memory.position % self.rounds
        squares = tf.gather(charges**2, position) / round.noise_multiplier**2
        if self.adapts:
            stddev = self.count_noise_stddev_of(round.noise_multiplier)
            counted = tf.gather(
                [float(self._counts_at(t)) for t in range(self.rounds)],
                position,
            )
            squares += counted / (2.0 * stddev) ** 2
        return dp_accounting.GaussianDpEvent(squares**-0.5)

    def _counts_at(self, position: int) -> bool:
        """Whether a count is charged: at rounds 0, b, 2b, ..., k times."""
        visit, between = divmod(position, self.min_separation)
        return not between and visit < self.generator.participation.most

    def round_event(
        self, round_index: int, deployment: Deployment
    ) -> dp_accounting.DpEvent:
        """Implements `Mechanism.round_event`.

        Args:
          round_index: How many rounds had noise of this memory; past T it
            begins anew.
          deployment: Where it is.
        """
        z = self.noise_multiplier
        if z == 0:
            return dp_accounting.NonPrivateDpEvent()
        position = round_index % self.rounds
        counts = 0.0
        if self.adapts and self._counts_at(position):
            counts = (2 * self.count_noise_stddev_of(z)) ** -2
        probability = self.amplified_probability(deployment)
        if probability is not None:
            if position % self.min_separation:
                return dp_accounting.NoOpDpEvent()  # Its cycle is paid for.
            # What one participation moves, the count among it: further
            # coordinates, in which every column of C has one entry. (After k
            # rounds a client sits out; who is drawn is not known then.)
            banded = cast(generators.BandedGenerator, self.generator)
            if self.adapts:
                counts = (2 * self.count_noise_stddev_of(z)) ** -2
            return dp_accounting.PoissonSampledDpEvent(
                probability, _gaussian(banded.largest_column, z, counts)
            )
        return _gaussian(float(self.generator.charges[position]), z, counts)

    def amplified_probability(self, deployment: Deployment) -> float | None:
        """Returns q = m / floor(N / b) where sampling amplifies, else None.

        Choquette-Choo et al. (2023), theorem 4: with no more bands than
        groups, a cycle over the groups is one Poisson-sampled Gaussian of
        z / ||c|| to every client.
        """
        made = self.generator
        if (
            deployment.sampling != "cyclic_poisson"
            or deployment.num_clients is None
            or not isinstance(made, generators.BandedGenerator)
            or made.bands > self.min_separation
        ):
            return None
        group = deployment.num_clients // self.min_separation
        probability = deployment.cohort_size(0) / max(1, group)
        return probability if probability < 1 else None

    def describe(self) -> str:
        """Implements `Mechanism.describe`."""
        most = self.generator.participation.max_participations
        return (
            "DP-FedAvg with noise that is correlated across rounds (DP-FTRL): "
            f"every client's update is clipped to {self._clip_phrase()}, and "
            "the server adds to the sum Gaussian "
            f"noise that goes by {self.strategy.describe()} over "
            f"{self.rounds} rounds, of which a client is in at most {most}, at "
            f"least {self.min_separation} apart."
        )

    def _clip_phrase(self) -> str:
        if self.target_quantile is None:
            return f"an L2 norm of {self.clip_norm:g}"
        return (
            f"an L2 norm (at first {self.clip_norm:g}) that follows the "
            f"{self.target_quantile:g} quantile of the update norms, estimated "
            "from a noised count whose cost is included"
        )

    def caveats(self) -> tuple[str, ...]:
        """Implements `Mechanism.caveats`."""
        return ("correlated_noise_separation", "correlated_noise_secret")

    def must_not_change(self) -> Any:
        """Implements `Mechanism.must_not_change`: all but the clip.

        Also the coefficients, which another machine may choose otherwise.
        """
        values = self.parameters()
        del values["clip_norm"]
        return (*values.items(), self.generator.numbers)

    def parameters(self) -> dict[str, Any]:
        """Implements `Mechanism.parameters`; the strategy as its text."""
        return {**super().parameters(), "strategy": repr(self.strategy)}
