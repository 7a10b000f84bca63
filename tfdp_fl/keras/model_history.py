"""One training at a time, and one account, for each Keras model of the process.

An epsilon is that of all rounds that shaped the weights. It is wrong if two
trainings move the same weights at once, each counting only its own rounds, or if
a second wrapper around a trained model starts counting at 0. So every variable
that a round moves bears a note of who trained it: Keras models may share layers.
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

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Held from the moment that a budget is asked until the charge is written, so that
# nothing else can spend what was promised, nor train the same variables.
charging = threading.Lock()

_TRAINED_BY = "_tfdp_fl_trained_by"


def check_owner(federated_model: Any) -> None:
    """Raises ValueError if another `DPFederatedModel` trained some of the weights."""
    model = federated_model.model
    for variable in keras_versions.tf_variables(model.weights):
        owner = getattr(variable, _TRAINED_BY, None)
        if owner is not None and owner() is not federated_model:
            raise ValueError(
                f"model {model.name!r} was already trained on clients by another "
                "DPFederatedModel, itself or a layer that it shares, and what that "
                "cost is counted there, not here. Go on with that one, resume from "
                "its checkpoint, or build the Keras model anew."
            )


def claim(federated_model: Any, variables: Iterable[tf.Variable]) -> None:
    """Notes that what shaped some variables is counted by a `DPFederatedModel`."""
    owner = weakref.ref(federated_model)
    for variable in variables:
        setattr(variable, _TRAINED_BY, owner)


class ModelHistory:
    """Whether somebody trains a Keras model now."""

    def __init__(self) -> None:
        self._fitting = threading.Lock()

    @property
    def is_fitting(self) -> bool:
        """Whether a `fit` of the model is running."""
        return self._fitting.locked()

    def check_idle(self, what: str) -> None:
        """Raises RuntimeError while a `fit` of the model is running."""
        if self.is_fitting:
            raise RuntimeError(
                f"{what} was called while a fit of the same Keras model is running. "
                "Its rounds and their cost are counted one after the other: wait "
                "until it returns."
            )

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Lets one `fit` run; a second one, nested ones too, raises RuntimeError."""
        if not self._fitting.acquire(blocking=False):
            self.check_idle("fit")
            raise RuntimeError("fit was called while another one ended: call it again.")
        try:
            yield
        finally:
            self._fitting.release()


_histories: weakref.WeakKeyDictionary[tf.keras.Model, ModelHistory] = (
    weakref.WeakKeyDictionary()
)
_adding = threading.Lock()


def history_of(model: tf.keras.Model) -> ModelHistory:
    """Returns the one history of a Keras model in this process."""
    with _adding:
        return _histories.setdefault(model, ModelHistory())


def one_fit_at_a_time(fit: _Method) -> _Method:
    """Has a method `fit` of a `DPFederatedModel` run alone, on its own model.

    With `resume_from` the weights and what they cost come from a checkpoint,
    whoever trained the model before.
    """

    @functools.wraps(fit)
    def alone(self, *args: Any, **kwargs: Any) -> Any:
        history = history_of(self.model)
        with history.fitting():
            if kwargs.get("resume_from") is None:
                check_owner(self)
            return fit(self, *args, **kwargs)

    return alone  # type: ignore[return-value]
