"""The client's side: whatever the wrapped client learned is clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdp_fl.flower import keys, release


class DPFedAvgNumPyClient:
    """Clips, and on request noises, the update that a client returns.

    For any object with `fit(parameters, config) -> (parameters, num_examples,
    metrics)`, parameters being lists of numpy arrays, such as Flower's
    `NumPyClient`. In `config` the server names

      * `dpfedavg_clip_norm`: S (required);
      * `dpfedavg_noise_stddev`: the stddev of the noise that this client adds
        to each coordinate of its clipped update, if it is to add any;
      * `dpfedavg_adaptive_clip_enabled`: True asks for the metric
        `dpfedavg_norm_bit`, which is true if and only if ||Delta|| <= S.

    The number of examples that goes with the update is always 1: every client
    has the same weight, and the true number stays where it is.

    Everything else (`get_parameters`, `get_properties`, `evaluate`, ...) is
    the wrapped client's. What leaves the client by those ways, and the other
    metrics, carries no noise.

    Source: Flower's "Differential Privacy Wrappers", client-side logic;
    McMahan et al. (2018), Algorithm 1, UserUpdate; Andrew et al. (2021),
    Algorithm 1, for the bit.

    Attributes:
      client: the wrapped client.
      discarded_updates: how many updates were not finite and became zero.
    """

    def __init__(self, client: Any):
        """Wraps a client.

        Raises:
          TypeError: if it has no method `fit`.
        """
        if not callable(getattr(client, "fit", None)):
            raise TypeError(
                f"client must have a method fit(parameters, config), got {client!r}."
            )
        self.client = client
        self.discarded_updates = 0

    def fit(
        self, parameters: Sequence[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Lets the wrapped client train; returns w + clip(Delta) (+ noise).

        Args:
          parameters: w, the model that the server sent.
          config: passed on to the wrapped client as it is.

        Returns:
          The parameters in the dtypes received (without noise they are within
          S of those received, after rounding too); 1 as the number of examples,
          whatever the wrapped client says; and its metrics (with the norm bit,
          if asked for).

        Raises:
          KeyError: if the server sent no clip norm. Nothing was trained then.
          TypeError, ValueError: if a value in `config` is not what it should
            be (nothing was trained then), or the wrapped client returns arrays
            of other shapes.
        """
        asked = release.instruction(config)
        # The wrapped client may train in place.
        received = [np.array(array) for array in parameters]
        returned, _, metrics = self.client.fit(parameters, config)
        done = release.released(received, returned, asked)
        self.discarded_updates += done.discarded
        if asked.wants_norm_bit:
            metrics = {**metrics, keys.NORM_BIT: done.norm_bit}
        return done.arrays, release.NUM_EXAMPLES, metrics

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:
        """The wrapped client's `get_parameters`."""
        return self.client.get_parameters(config)

    def get_properties(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The wrapped client's `get_properties`."""
        return self.client.get_properties(config)

    def evaluate(
        self, parameters: Sequence[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """The wrapped client's `evaluate`."""
        return self.client.evaluate(parameters, config)

    def to_client(self) -> Any:
        """What Flower asks of a `NumPyClient`: this one as a `Client`.

        It is the wrapped client's method at work on the wrapper: the client
        that Flower gets trains through the `fit` above.
        """
        return type(self.client).to_client(self)

    def __getattr__(self, name: str) -> Any:
        if name == "client" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.client, name)
