"""A Keras model being trained on clients: the state that all parts of `fit` share.

Each Keras model in the process has one training at a time and one privacy account.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

from tfdp_fl import keras_versions
from tfdp_fl.accounting import PrivacyAccount
from tfdp_fl.engine import CohortEngine, Training
from tfdp_fl.keras.run import Run
from tfdp_fl.keras.training_setup import TrainingSetup
from tfdp_fl.mechanisms import Mechanism


class NotCompiledError(RuntimeError, ValueError):
    """A method that needs `compile` was called before it."""


class FederatedTraining:
    """A Keras model, its settings, and its training so far."""

    def __init__(self, model: tf.keras.Model, setup: TrainingSetup):
        """Starts with a model that has not been trained on clients.

        Args:
          model: The Keras model.
          setup: The settings of its rounds.
        """
        self._model = model
        self._setup = setup
        self._run: Run | None = None
        self._compiled: Training | None = None
        self._engine: CohortEngine | None = None
        self._verbose = 0
        # The budgets, ledgers and checkpoints of the last `fit`.
        self.federated_callbacks: list[tf.keras.callbacks.Callback] = []

    @property
    def model(self) -> tf.keras.Model:
        """The Keras model, which always holds the current weights."""
        return self._model

    @property
    def setup(self) -> TrainingSetup:
        """The arguments that it was made with."""
        return self._setup

    @property
    def run(self) -> Run | None:
        """The training so far; None before the first `fit`.

        It has the rounds, clip, spending, and whatever else later rounds depend on.
        """
        return self._run

    @property
    def engine(self) -> CohortEngine | None:
        """The engine that runs the rounds; None before the first `fit`."""
        return self._engine

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism, which defines what is released about a cohort."""
        return self.setup.mechanism

    @property
    def rounds(self) -> int:
        """The number of rounds run, including abandoned ones."""
        return 0 if self.run is None else self.run.rounds

    @property
    def account(self) -> PrivacyAccount | None:
        """The privacy account; None before the first `fit`."""
        return None if self.run is None else self.run.account

    def require_compiled(self, what: str) -> Training:
        """Returns the arguments of `compile`, or raises NotCompiledError."""
        if self._compiled is None:
            raise NotCompiledError(
                f"compile must be called before {what}, with an optimizer and a loss."
            )
        return self._compiled

    def require_trained(self, what: str) -> tuple[Run, CohortEngine]:
        """Returns the run and its engine; raises ValueError before `fit`."""
        if self.run is None or self.engine is None:
            raise ValueError(
                f"fit must be called before {what}: there is nothing to state yet."
            )
        check_owner(self)
        return self.run, self.engine

    def say(self, message: str) -> None:
        """Prints a message for the user, unless the training is silent."""
        if self._verbose:
            print(f"\n{message}", flush=True)


# Epsilon covers all rounds that changed the weights. It would be wrong if two trainings
# changed the same weights at once, each counting only its own rounds, or if a second
# wrapper around a trained model started counting at 0. So every variable that a round
# changes is marked with its owner. (Variables, as Keras models may share layers.)

_Method = TypeVar("_Method", bound=Callable[..., Any])

_TRAINED_BY = "_tfdp_fl_trained_by"
# Keras models whose clients' metrics have been shown without noise.
showed_client_metrics: weakref.WeakSet[tf.keras.Model] = weakref.WeakSet()
# Keras models and searches with a `fit` that is running.
_fitting: weakref.WeakSet[Any] = weakref.WeakSet()
_begin_lock = threading.Lock()
# The owner of each Keras model and layer, which may replace variables (`quantize`).
_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_mark_lock = threading.RLock()


def check_owner(fed: FederatedTraining) -> None:
    """Raises ValueError if another `DPFederatedModel` trained some of the weights."""
    variables = keras_versions.tf_variables(fed.model.weights)
    marks = [getattr(variable, _TRAINED_BY, None) for variable in variables]
    marks += [
        _owners.get(layer)
        for layer in keras_versions.layers_of(fed.model, include_self=True)
    ]
    if any(owner is not None and owner() is not fed for owner in marks):
        raise ValueError(
            f"model {fed.model.name!r} (or a layer that it shares) was already trained "
            "on clients by another DPFederatedModel, which counts the cost, or a "
            "fit(resume_from=...) did not restore it to the end. Continue with that "
            "one, resume from its checkpoint, or build a new Keras model."
        )


def mark_owner(
    owner: Any, variables: Iterable[tf.Variable], model: tf.keras.Model | None = None
) -> None:
    """Records which `DPFederatedModel` (or search) accounts for some variables.

    The model, and those of its layers that hold such variables, are marked as well, as
    a layer may replace its variables.

    Args:
      owner: The accounting object: a `DPFederatedModel` or a search.
      variables: The variables that its rounds change.
      model: The Keras model; None: the owner's model, no part of which may have been
        trained by another owner.

    Raises:
      ValueError: Another owner trained some of the weights. Nothing is marked.
    """
    with _mark_lock:
        if model is None:
            check_owner(owner)
            model = owner.model
        mark, marked = weakref.ref(owner), set()
        for variable in variables:
            setattr(variable, _TRAINED_BY, mark)
            marked.add(id(variable))
        _owners[model] = mark
        for layer in keras_versions.layers_of(model):
            if any(id(v) in marked for v in keras_versions.tf_variables(layer.weights)):
                _owners[layer] = mark


def is_fitting(model: tf.keras.Model) -> bool:
    """Returns whether a `fit` of this Keras model is running."""
    return model in _fitting


@contextlib.contextmanager
def fit_lock(trained: Any, what: str, kind: str = "Keras model") -> Iterator[None]:
    """Prevents any other training of a Keras model (or a search) inside the block."""
    with _begin_lock:
        if trained in _fitting:
            raise RuntimeError(
                f"{what} was called while a fit of the same {kind} (or an evaluation "
                "that is charged) is running. Their costs must be counted one after "
                "the other: wait until it returns."
            )
        _fitting.add(trained)
    try:
        yield
    finally:
        _fitting.discard(trained)


def exclusive(method: _Method) -> _Method:
    """Decorates a method of `DPFederatedModel` that must not run during a `fit`."""

    @functools.wraps(method)
    def wrapper(self, *args: Any, **kwargs: Any) -> Any:
        with fit_lock(self.model, method.__name__):
            return method(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]
