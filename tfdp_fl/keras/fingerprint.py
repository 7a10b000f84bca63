"""Whether a round that is run again is the round that it was.

With a seed, a round that a crash cut off from its checkpoint is run again with
the same clients and the same noise. Its release is then the one that was
charged, and tells nobody more. If anything else were trained on (other data, a
loss, a rate), the difference of the two releases would have no noise at all.

So a seeded round's line in the ledger has a fingerprint of all that its sum of
updates follows from, under a key that only the checkpoints have. Where a lost
round's is not known, or is another one, the round is drawn anew.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdp_fl import keras_versions, version
from tfdp_fl.datasets import FederatedDataset
from tfdp_fl.keras.compiled import Compiled

# Whose code is as it was if the versions are.
_KNOWN = ("keras", "tf_keras", "tensorflow", "builtins", "numpy")
_MODELS = ("Functional", "Sequential")
# What Keras's losses hold that changes no number: names, and the dtype that is
# in the model's description as well.
_OF_NO_MATTER = ("name", "_dtype_policy", "_name_scope", "_auto_config")


class _UnknownError(Exception):
    """Something may do what nobody can compare."""


def of_work(
    model: tf.keras.Model, compiled: Compiled, clients: FederatedDataset
) -> str | None:
    """Returns a digest of what `fit` trains, how, and on what.

    What else it hangs on is compared by name where a run is resumed.

    Args:
      model: The Keras model, without its weights.
      compiled: What `compile` was given.
      clients: The clients, with all that they hold.

    Returns:
      Hexadecimal; None where it cannot be known: code of the user's own, or
      clients that are read when they are asked for.
    """
    training = compiled.training
    contents = clients.digest_of_contents()
    if contents is None or training.upload_hook or compiled.broadcast_hook:
        return None
    try:
        described = json.dumps(
            [
                contents,
                version.__version__,
                tf.version.VERSION,
                keras_versions.name(),
                _model(model),
                _value(training.loss),
                _value(training.loss_weights),
                _value(training.class_weight),
                float(training.proximal_weight),
                _value(compiled.jit_compile),
            ],
            sort_keys=True,
        )
    except Exception:  # Keras's own as well: what has no description, say.
        return None
    return hashlib.sha256(described.encode()).hexdigest()


def of_round(
    key: str,
    work: str | None,
    learning_rate: float,
    state: Iterable[Any],
    weights: Iterable[tf.Variable],
) -> str | None:
    """Returns a digest of what a round's sum of updates follows from.

    Args:
      key: A secret, hexadecimal: whoever had none could tell by the digest
        whether a guess of all clients' data is right.
      work: What `of_work` returned.
      learning_rate: Of the clients.
      state: The mechanism's, tensors.
      weights: The server's.

    Returns:
      Hexadecimal; None if `work` is, or where weights are no numbers.
    """
    if work is None:
        return None
    # Half of the time that BLAKE2 takes, where a processor has instructions.
    digest = hmac.new(bytes.fromhex(key), work.encode(), "sha256")
    digest.update(np.float64(learning_rate).tobytes())
    for each in (*state, *weights):
        value = np.ascontiguousarray(tf.convert_to_tensor(each).numpy())
        if value.dtype.hasobject:  # A vocabulary.
            return None
        digest.update(repr((value.shape, value.dtype.str)).encode())
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _model(model: tf.keras.Model) -> Any:
    """Describes a model, whatever its layers happen to be called."""
    for layer in keras_versions.layers_of(model, include_self=True):
        _check_known(layer)
        kind = type(layer).__name__
        if isinstance(layer, tf.keras.Model) and kind not in _MODELS:
            raise _UnknownError
    whole = {"class_name": type(model).__name__, "config": model.get_config()}
    whole = json.loads(json.dumps(whole))
    return _renamed(whole, _given_names(whole, {}))


def _given_names(config: Any, names: dict[str, str]) -> dict[str, str]:
    """Returns what stands for the names that Keras gave, which have numbers."""
    if isinstance(config, dict):
        if "class_name" in config and config.get("module") is not None:
            _check_module(config["module"])
        kind, own = config.get("class_name"), config.get("config")
        name = own.get("name") if isinstance(own, dict) else None
        if isinstance(kind, str) and isinstance(name, str):
            stem = re.sub(r"_\d+$", "", name)
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower()
            given = (snake.replace("_", ""), "input", "model")
            if stem.replace("_", "") in given or name.startswith("tf."):
                names.setdefault(name, f"#{len(names)}")
        config = list(config.values())
    if isinstance(config, list):
        for each in config:
            _given_names(each, names)
    return names


def _renamed(config: Any, names: Mapping[str, str]) -> Any:
    if isinstance(config, dict):
        return {name: _renamed(each, names) for name, each in config.items()}
    if isinstance(config, list):
        return [_renamed(each, names) for each in config]
    return names.get(config, config) if isinstance(config, str) else config


def _value(value: Any) -> Any:
    """Describes an argument of `compile` for JSON."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return [[str(each), _value(value[each])] for each in value]
    if isinstance(value, Sequence):
        return [_value(each) for each in value]
    _check_known(value)
    if isinstance(value, types.FunctionType):
        return [value.__module__, value.__qualname__]
    if isinstance(value, tf.keras.losses.Loss):
        # Not all that it was made with is in Keras's `get_config`.
        held = {
            name: _value(each)
            for name, each in vars(value).items()
            if name not in _OF_NO_MATTER
        }
        return [type(value).__qualname__, value.get_config(), held]
    raise _UnknownError


def _check_known(thing: Any) -> None:
    """Raises `_UnknownError` for code that is not Keras's."""
    inner = list(getattr(thing, "__dict__", {}).values())
    for each in (thing, *inner):
        if each is not thing and not callable(each):
            continue
        _check_module(getattr(each, "__module__", None) or type(each).__module__)
    if isinstance(thing, tf.keras.layers.Lambda):
        raise _UnknownError


def _check_module(name: Any) -> None:
    if str(name).split(".")[0] not in _KNOWN:
        raise _UnknownError
