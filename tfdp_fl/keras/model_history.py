"""One training at a time, and one account, for each Keras model of the process.

An epsilon is that of all rounds that shaped the weights. It is wrong if two
trainings move the same weights at once, each counting only its own rounds, or if
a second wrapper around a trained model starts counting at 0. So every variable
that a round moves bears a note of what trained it: Keras models may share layers.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import tensorflow as tf

from tfdp_fl import keras_versions

_Method = TypeVar("_Method", bound=Callable[..., Any])

# Held from the moment that a budget is asked until the charge is written, so that
# nothing else can spend what was promised, nor train the same variables.
charging = threading.Lock()

_TRAINED_BY = "_tfdp_fl_trained_by"
_fits: weakref.WeakKeyDictionary[tf.keras.Model, threading.Lock] = (
    weakref.WeakKeyDictionary()
)
_adding = threading.Lock()


def check_owner(fed: Any) -> None:
    """Raises ValueError if another `DPFederatedModel` trained some of the weights."""
    for variable in keras_versions.tf_variables(fed.model.weights):
        owner = getattr(variable, _TRAINED_BY, None)
        if owner is not None and owner() is not fed:
            raise ValueError(
                f"model {fed.model.name!r} was already trained on clients by another "
                "DPFederatedModel, itself or a layer that it shares, and what that "
                "cost is counted there, not here. Go on with that one, resume from "
                "its checkpoint, or build the Keras model anew."
            )


def claim(fed: Any, variables: Iterable[tf.Variable]) -> None:
    """Notes that what shaped some variables is counted by a `DPFederatedModel`."""
    owner = weakref.ref(fed)
    for variable in variables:
        setattr(variable, _TRAINED_BY, owner)


def _fit_of(model: tf.keras.Model) -> threading.Lock:
    with _adding:
        return _fits.setdefault(model, threading.Lock())


def is_fitting(model: tf.keras.Model) -> bool:
    """Returns whether a `fit` of the Keras model is running."""
    return _fit_of(model).locked()


def running_error(what: str) -> RuntimeError:
    """Returns what to raise where something was called during a `fit`."""
    return RuntimeError(
        f"{what} was called while a fit of the same Keras model is running. Its "
        "rounds and their cost are counted one after the other: wait until it returns."
    )


def one_fit_at_a_time(fit: _Method) -> _Method:
    """Has a method `fit` of a `DPFederatedModel` run alone, on its own model.

    With `resume_from` the weights and what they cost come from a checkpoint,
    whatever trained the model before.
    """

    @functools.wraps(fit)
    def alone(self, *args: Any, **kwargs: Any) -> Any:
        lock = _fit_of(self.model)
        if not lock.acquire(blocking=False):
            raise running_error("fit")
        try:
            if kwargs.get("resume_from") is None:
                check_owner(self)
            return fit(self, *args, **kwargs)
        finally:
            lock.release()

    return alone  # type: ignore[return-value]
