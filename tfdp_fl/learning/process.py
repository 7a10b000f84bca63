"""A learning process that knows its mechanism."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl.learning import privacy
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib


class DPLearningProcess(tff.learning.templates.LearningProcess):
    """A `tff.learning.templates.LearningProcess` and what it guarantees."""

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        mechanism: mechanism_lib.Mechanism,
        deployment: contribution.Deployment,
        *,
        get_model_weights: tff.Computation | None = None,
        set_model_weights: tff.Computation | None = None,
    ):
        """Takes over the computations of a process.

        Args:
          process: The process.
          mechanism: The mechanism that aggregates in it.
          deployment: Where the mechanism is used.
          get_model_weights: In place of the process's own.
          set_model_weights: In place of the process's own.
        """
        super().__init__(
            process.initialize,
            process.next,
            get_model_weights or process.get_model_weights,
            set_model_weights or process.set_model_weights,
            get_hparams_fn=process.get_hparams,
            set_hparams_fn=process.set_hparams,
        )
        self._mechanism = mechanism
        self._deployment = deployment

    @property
    def mechanism(self) -> mechanism_lib.Mechanism:
        """The mechanism."""
        return self._mechanism

    @property
    def deployment(self) -> contribution.Deployment:
        """Where it is used, as far as it was said when it was built."""
        return self._deployment

    def epsilon(
        self,
        state: Any,
        *,
        delta: float,
        sampling: str | None = None,
        num_clients: int | None = None,
        accountant: str = "rdp",
        max_participations: int | None = None,
    ) -> privacy.Epsilon:
        """Returns epsilon after a state (see `tfdp_fl.learning.epsilon`).

        Args:
          state: A state of this process.
          delta: In (0, 1).
          sampling: How the cohorts were drawn; only if the process was not
            built with it.
          num_clients: N; only if the process was not built with it.
          accountant: "rdp" or "pld".
          max_participations: The most rounds that any one client took part in;
            only if the process was not built with it.
        """
        return privacy.epsilon(
            state,
            self._mechanism,
            sampling=self._known("sampling", sampling),
            num_clients=self._known("num_clients", num_clients),
            clients_per_round=self._deployment.clients_per_round,
            delta=delta,
            accountant=accountant,
            rounds=self._deployment.rounds,
            max_participations=self._known(
                "max_participations", max_participations, optional=True
            ),
        )

    def privacy_statement(
        self, state: Any, *, delta: float, format: str = "text", **declared: Any
    ) -> str | dict[str, Any]:
        """Returns the privacy statement after a state.

        Args:
          state: A state of this process.
          delta: In (0, 1).
          format: "text" or "dict".
          **declared: The other arguments of `epsilon`.
        """
        spent = self.epsilon(state, delta=delta, **declared)
        return privacy.statement_of(spent, delta, format)

    def _known(self, name: str, value: Any, optional: bool = False) -> Any:
        built_with = getattr(self._deployment, name)
        if built_with is None:
            if value is None and not optional:
                raise ValueError(
                    f"{name} must be given here or to build_dp_fed_avg: "
                    "epsilon depends on it, and TFF does not know it."
                )
            return value
        if value not in (None, built_with):
            raise ValueError(
                f"{name} must be what the process was built with, "
                f"{built_with!r}, got {value!r}."
            )
        return built_with
