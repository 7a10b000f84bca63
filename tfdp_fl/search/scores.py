"""By what a search compares its trials: public data, or clients held out."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf

from tfdp_fl import _validate, datasets, engine
from tfdp_fl.datasets import FederatedDataset, tables
from tfdp_fl.keras import PrivateMetrics, client_metrics

_MODES = ("auto", "max", "min")
_IS_ERROR = re.compile("loss|error|entropy|divergence|perplexity|mse|mae|mape|msle")
# So many different examples are no coincidence if all of them are the clients'.
_TELLING = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The clients of a search, by what they are used for.

    Attributes:
      training: Those that train.
      held_out: Those that score, or None.
      event: What scoring one trial costs the clients that score, or None.
      is_disjoint: Whether no client is on both sides, and neither side changes when
        a client of the other one comes or goes.
    """

    training: FederatedDataset
    held_out: FederatedDataset | None = None
    event: dp_accounting.DpEvent | None = None
    is_disjoint: bool = True


class PublicScore:
    """A metric of the trial's model on public data; it costs nothing.

    Attributes:
      metric: "loss", or the name of a compiled metric.
      mode: "max": more is better; "min": less is.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        metric: str,
        *,
        mode: str = "auto",
    ):
        """Keeps the data.

        Args:
          x: Features [n, ...] of public examples, or a nest of such arrays.
          y: Labels [n, ...].
          metric: "loss", or the name of a metric that every candidate compiles.
          mode: "max" or "min"; "auto" goes by the metric's name: less is better
            for losses and errors.

        Raises:
          TypeError: `x` is clients' data, which is not public.
        """
        if isinstance(x, FederatedDataset) or hasattr(x, "client_ids"):
            raise TypeError(
                "x must be the features of public examples, got clients' data: "
                "PrivateScore(metric, noise_multiplier=...) scores on clients."
            )
        self.metric, self.mode = _checked(metric, mode)
        self._x, self._y = x, y

    def split(self, clients: FederatedDataset) -> Split:
        """Returns all clients as those that train, if the examples are not theirs."""
        examples = _example_hashes(self._x, self._y)
        if len(examples) >= _TELLING and clients.is_indexed:
            rows, _ = clients.client_rows(np.arange(clients.num_clients))
            x, y = tf.nest.map_structure(
                lambda leaf: leaf.numpy()[np.unique(rows)], clients.flat()
            )
            if examples <= _example_hashes(x, datasets.nests.labels_of(y)):
                raise ValueError(
                    "score must be computed on public data, got a PublicScore whose "
                    "examples are all the training clients' own: no epsilon would "
                    "cover it. PrivateScore(metric, noise_multiplier=...) scores on "
                    "clients that are held out, and is charged."
                )
        return Split(training=clients)

    def __call__(
        self, model: tf.keras.Model, training: engine.LocalTraining, held_out: Any
    ) -> float:
        """Returns the metric of a model, negated if less is better."""
        del training, held_out
        values = model.evaluate(
            self._x, self._y, batch_size=1024, verbose=0, return_dict=True
        )
        return _signed(values[self.metric], self.mode)

    def digest(self) -> str:
        """Returns what tells this score from others."""
        made = hashlib.sha256()
        for each in sorted(_example_hashes(self._x, self._y)):
            made.update(each)
        return f"PublicScore {self.metric} {self.mode} {made.hexdigest()}"


class PrivateScore:
    """The noisy mean of a metric over clients that take no part in training.

    Each client counts once, whatever it holds; its metric is clipped to `bounds`.
    The mean is one Gaussian release (see `PrivateMetrics`), which every trial pays.

    Attributes:
      metric: "loss", or the name of a compiled metric.
      mode: "max": more is better; "min": less is.
    """

    def __init__(
        self,
        metric: str,
        *,
        noise_multiplier: float,
        bounds: tuple[float, float] = (0.0, 1.0),
        held_out: float = 0.2,
        mode: str = "auto",
    ):
        """Checks the arguments.

        Args:
          metric: "loss", or the name of a metric that every candidate compiles.
          noise_multiplier: The noise's standard deviation over the most that one
            client can add to the sum; above 0.
          bounds: The metric's range (low, high), chosen without the clients' data.
          held_out: The share of the search's clients that score and do not train.
            A client's id alone says whether it is one of them. Clients that have
            no names, only places, are charged for both.
          mode: "max" or "min"; "auto" goes by the metric's name.
        """
        self.metric, self.mode = _checked(metric, mode)
        _validate.positive(noise_multiplier=noise_multiplier)
        self._release = PrivateMetrics(
            bounds={metric: bounds}, noise_multiplier=noise_multiplier
        )
        self._share = _validate.inside_unit_interval(held_out=held_out)

    def split(self, clients: FederatedDataset) -> Split:
        """Returns the clients that train, those that score, and what a score costs."""
        training, held_out = clients.split_by_id(self._share)
        are_apart = (
            max(map(tables.place_of, held_out.client_ids))
            < self._share
            <= min(map(tables.place_of, training.client_ids))
        )
        if not are_apart:  # One was moved to the side that has none.
            raise ValueError(
                "clients must be more, so that the hashes of their ids put some on "
                f"each side of held_out={self._share:g}, got {clients.num_clients}: "
                "else a client that comes or goes would move another one."
            )
        return Split(
            training=training,
            held_out=held_out,
            event=dp_accounting.GaussianDpEvent(self._release.noise_multiplier),
            is_disjoint=clients.has_names,
        )

    def __call__(
        self, model: tf.keras.Model, training: engine.LocalTraining, held_out: Any
    ) -> float:
        """Returns the noisy mean for a model, negated if less is better."""
        values = client_metrics.evaluate(
            model, training, held_out, 1024, 0, in_any_case=self._release.bounds
        )
        generator = np.random.Generator(np.random.Philox())
        released = self._release.released(values, generator)
        return _signed(released[self.metric]["mean"], self.mode)

    def digest(self) -> str:
        """Returns what tells this score from others."""
        return f"PrivateScore {self._release!r} {self._share} {self.mode}"


def _checked(metric: str, mode: str) -> tuple[str, str]:
    _validate.instance_of(str, metric=metric)
    _validate.one_of(_MODES, mode=mode)
    if mode == "auto":
        mode = "min" if _IS_ERROR.search(metric) else "max"
    return metric, mode


def _signed(value: float, mode: str) -> float:
    return -float(value) if mode == "min" else float(value)


def _example_hashes(x: Any, y: Any) -> set[bytes]:
    """Returns a hash of each different example."""
    leaves = map(_comparable, tf.nest.flatten((x, y)))
    return {
        hashlib.sha256(b"".join(row.tobytes() for row in rows)).digest()
        for rows in zip(*leaves, strict=False)
    }


def _comparable(values: Any) -> np.ndarray:
    """Returns an array that is the same before and after a dataset keeps it."""
    array = np.asarray(values)
    if array.dtype.kind in "SUO":
        digest = np.vectorize(lambda s: hashlib.sha256(s).hexdigest(), otypes=["U64"])
        return digest(datasets.nests.copied(array))
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    return array.astype(np.float32) if array.dtype.kind == "f" else array
