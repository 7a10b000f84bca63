"""A learning process that knows its mechanism."""

from __future__ import annotations

from typing import Any

import tensorflow_federated as tff

from tfdp_fl.learning import privacy
from tfdp_fl.mechanisms import contribution
from tfdp_fl.mechanisms import mechanism as mechanism_lib


class DPLearningProcess(tff.learning.templates.LearningProcess):
    """A `tff.learning.templates.LearningProcess` and what it guarantees.

    Attributes:
      mechanism: The mechanism.
      deployment: Where it is used, as far as it was said when it was built.
    """

    def __init__(
        self,
        process: tff.learning.templates.LearningProcess,
        mechanism: mechanism_lib.Mechanism,
        deployment: contribution.Deployment,
    ):
        """Takes over the computations of a process.

        Args:
          process: The process.
          mechanism: The mechanism that aggregates in it.
          deployment: Where the mechanism is used.
        """
        super().__init__(
            process.initialize,
            process.next,
            process.get_model_weights,
            process.set_model_weights,
            get_hparams_fn=process.get_hparams,
            set_hparams_fn=process.set_hparams,
        )
        self.mechanism = mechanism
        self.deployment = deployment

    def epsilon(
        self, state: Any, *, delta: float, accountant: str = "rdp", **declared: Any
    ) -> privacy.Epsilon:
        """Returns epsilon after a state (see `tfdp_fl.learning.epsilon`).

        Args:
          state: A state of this process.
          delta: In (0, 1).
          accountant: "rdp" or "pld".
          **declared: `sampling`, `num_clients` and `max_participations`, where the
            process was not built with them.
        """
        for name in ("sampling", "num_clients", "max_participations"):
            built_with = getattr(self.deployment, name)
            if declared.setdefault(name, built_with) is None:
                declared[name] = built_with
            if built_with not in (None, declared[name]):
                raise ValueError(
                    f"{name} must be what the process was built with, "
                    f"{built_with!r}, got {declared[name]!r}."
                )
            if declared[name] is None and name != "max_participations":
                raise ValueError(
                    f"{name} must be given here or to build_dp_fed_avg: "
                    "epsilon depends on it, and TFF does not know it."
                )
        return privacy.epsilon(
            state,
            self.mechanism,
            clients_per_round=self.deployment.clients_per_round,
            delta=delta,
            accountant=accountant,
            rounds=self.deployment.rounds,
            **declared,
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
        return self.epsilon(state, delta=delta, **declared).in_words(format)
