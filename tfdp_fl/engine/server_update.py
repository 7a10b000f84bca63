"""What the server sends, and how the mean moves it (FedOpt, Reddi et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.engine import cohort, rounds
from tfdp_fl.mechanisms import cohort_query, noise

BroadcastHook = Callable[[list[tf.Tensor], tf.Tensor], list[tf.Tensor]]


class ServerUpdate:
    """Applies the mean update to the server's weights.

    Without an optimizer w <- w + mean (FedAvg). With one, the negated mean is
    its gradient: SGD is FedAvg with a server learning rate, SGD with momentum
    FedAvgM, Adam FedAdam. Non-trainable state always moves by the mean.
    """

    def __init__(
        self,
        trainable: list[Any],
        non_trainable: list[Any],
        optimizer: tf.keras.optimizers.Optimizer | None = None,
    ):
        """Makes the optimizer's variables.

        Args:
          trainable: The model's own variables, as Keras has them.
          non_trainable: Likewise, those that are aggregated.
          optimizer: A Keras optimizer, or None.
        """
        self._owned = list(trainable)
        self._trainable = keras_versions.tf_variables(trainable)
        self._non_trainable = keras_versions.tf_variables(non_trainable)
        self.optimizer = optimizer
        self._state: list[tf.Variable] = []
        if optimizer is not None:
            self._state = keras_versions.build_optimizer(optimizer, self._owned)

    @property
    def has_non_trainable(self) -> bool:
        """Returns True if non-trainable state is aggregated too."""
        return bool(self._non_trainable)

    @property
    def variables(self) -> list[tf.Variable]:
        """Returns the server's weights, in the order of an update."""
        return self._trainable + self._non_trainable

    @property
    def state(self) -> list[tf.Variable]:
        """Returns the optimizer's variables, for checkpoints."""
        return self._state

    def apply(self, mean: list[tf.Tensor]) -> None:
        """Moves the model by the released mean update."""
        count = len(self._trainable)
        if self.optimizer is None:
            for variable, value in zip(self._trainable, mean[:count], strict=True):
                if value.dtype == variable.dtype:
                    variable.assign_add(value)
                else:  # Rounded once, with its noise.
                    variable.assign(_moved(variable, value))
        else:
            keras_versions.apply_gradients(
                self.optimizer,
                [
                    -tf.cast(value, variable.dtype)
                    for variable, value in zip(
                        self._trainable, mean[:count], strict=True
                    )
                ],
                self._owned,
            )
        for variable, value in zip(self._non_trainable, mean[count:], strict=True):
            variable.assign(_kept_valid(variable, _moved(variable, value)))

    def finalize(self) -> None:
        """Gives the model its last values, as Keras does at the end of `fit`.

        With `use_ema` they are the average that the optimizer kept: of
        released weights, so it costs no privacy.
        """
        finalize = getattr(self.optimizer, "finalize_variable_values", None)
        if finalize is not None:
            finalize(self._owned)

    def replace(self, weights: list[tf.Tensor]) -> bool:
        """Sets the model to released weights (NbAFL); returns True."""
        for variable, value in zip(self.variables, weights, strict=True):
            value = tf.cast(value, variable.dtype)
            if any(variable is each for each in self._non_trainable):
                value = _kept_valid(variable, value)
            variable.assign(value)
        return True


def _moved(variable: tf.Variable, change: tf.Tensor) -> tf.Tensor:
    """Returns variable + change, of which the change may have more bits."""
    moved = tf.cast(variable, change.dtype) + change
    return tf.cast(moved, variable.dtype)


def _kept_valid(variable: tf.Variable, value: tf.Tensor) -> Any:
    """Noise can push a variance below zero; the released value is cut off."""
    if "variance" in variable.name.split("/")[-1]:
        return tf.maximum(value, 0)
    return value


class Broadcast:
    """Reads the server's model, and lets a hook change what clients get."""

    def __init__(
        self,
        server: ServerUpdate,
        unaggregated: list[tf.Variable],
        hook: BroadcastHook | None,
    ):
        """Prepares the function; nothing is traced yet.

        Args:
          server: Holds the variables that clients train.
          unaggregated: The server's other variables.
          hook: Called on the weights and a seed of the round's; or None.
        """
        self._server = server
        self._unaggregated = unaggregated
        self._hook = (
            None if hook is None else tf.function(_hooked(hook), autograph=False)
        )

    def __call__(
        self, inputs: rounds.RoundInputs
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the weights that clients receive, and the other values."""
        weights = [variable.read_value() for variable in self._server.variables]
        if self._hook is not None:
            weights = self._hook(weights, tf.constant(inputs.seed))
        return weights, [variable.read_value() for variable in self._unaggregated]


def _hooked(hook: BroadcastHook) -> Callable[..., list[tf.Tensor]]:
    def changed(weights: list[tf.Tensor], seed: tf.Tensor) -> list[tf.Tensor]:
        own = noise.as_integers(noise.fold_in(seed, -3))
        with noise.seeded(noise.fold_in(seed, -2)):
            return list(hook(list(weights), own))

    return changed


def received(
    query: cohort_query.CohortQuery,
    state: Any,
    numbers: tf.Tensor,
    seed: tf.Tensor,
    weights: list[tf.Tensor],
    unaggregated: list[tf.Tensor],
) -> cohort.Received:
    """Returns what clients receive, while a function is traced.

    Args:
      query: The mechanism's query.
      state: The query's state, before the round.
      numbers: Float32 [z, m, learning rate].
      seed: The round's seed (see `mechanisms.noise`).
      weights: Of the variables that clients train.
      unaggregated: Of the model's other variables.
    """
    state = query.begin_round(state, numbers[0], numbers[1])
    # Where the clip is not known before all updates are, nobody gets it.
    params: Any = ()
    if not query.two_phase:
        params = query.derive_sample_params(state)
    return cohort.Received(
        weights=list(weights),
        unaggregated=list(unaggregated),
        params=tf.nest.map_structure(tf.convert_to_tensor, params),
        learning_rate=numbers[2],
        seed=noise.for_clients(seed),
    )
