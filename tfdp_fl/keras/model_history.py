"""One training at a time, and one account, for each Keras model of the process.

An epsilon is that of all rounds that shaped the weights. It is wrong if two
trainings move the same weights at once, each counting only its own rounds, or if
a second wrapper around a trained model starts counting at 0. So everything that
is charged goes through the `ModelHistory` of the Keras model.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import tensorflow as tf

_Method = TypeVar("_Method", bound=Callable[..., Any])


class ModelHistory:
    """Who trained a Keras model, and whether somebody does now.

    Attributes:
      charging: Held from the moment that a budget is asked until the charge is
        written, so that nothing else can spend what was promised.
    """

    def __init__(self) -> None:
        self.charging = threading.Lock()
        self._fitting = threading.Lock()
        self._trained_by: weakref.ref[Any] | None = None

    def check_owner(self, federated_model: Any) -> None:
        """Raises ValueError if another `DPFederatedModel` trained the model."""
        if self._trained_by is None or self._trained_by() is federated_model:
            return
        raise ValueError(
            f"model {federated_model.model.name!r} was already trained on clients by "
            "another DPFederatedModel, and what that cost is counted there, not "
            "here. Go on with that one, resume from its checkpoint, or build the "
            "Keras model anew."
        )

    def check_idle(self, what: str) -> None:
        """Raises RuntimeError while a `fit` of the model is running."""
        if self._fitting.locked():
            raise RuntimeError(
                f"{what} was called while a fit of the same Keras model is running. "
                "Its rounds and their cost are counted one after the other: wait "
                "until it returns."
            )

    def claim(self, federated_model: Any) -> None:
        """Notes that a round of this `DPFederatedModel` was charged."""
        self._trained_by = weakref.ref(federated_model)

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
                history.check_owner(self)
            return fit(self, *args, **kwargs)

    return alone  # type: ignore[return-value]
