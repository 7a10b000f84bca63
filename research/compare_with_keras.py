"""Compares training here with Keras's own, for all that the installed Keras has.

    python research/compare_with_keras.py --kinds=layers,losses,metrics,optimizers

One client, no clip, no noise: a round is then Keras's `fit` on the client's examples.
Prints which layers, losses, metrics and optimizers are equal, refused (and why), or
different, which are random (and so have other numbers), and which Keras itself cannot
train in this model. To be run again on the next Keras.
"""

from __future__ import annotations

import collections
import inspect
import os
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

# TensorFlow reports libraries for GPUs that are not there as errors.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# research/ is not installed, and a program finds only its own folder.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdp_fl
from tfdp_fl import keras_versions

_KINDS = flags.DEFINE_list(
    "kinds", ["layers", "losses", "metrics", "optimizers"], "What to compare."
)

_Dense = keras.layers.Dense
EXAMPLES, BATCH = 6, 3
TOLERANCE = 2e-5

# What constructors ask for, by the argument's name.
_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(["units", "output_dim", "output_shape", "num_classes"], 3),
    **dict.fromkeys(["filters", "kernel_size", "n", "num_heads", "num_query_heads"], 2),
    **dict.fromkeys(["key_dim", "head_dim"], 3),
    **dict.fromkeys(["input_dim", "num_tokens", "num_bins"], 5),
    **dict.fromkeys(["rate", "stddev"], 0.3),
    **dict.fromkeys(["factor", "height_factor", "width_factor"], 0.1),
    **dict.fromkeys(["output_size", "pool_size"], 2),
    **dict.fromkeys(["height", "width"], 6),
    **dict.fromkeys(["sensitivity", "specificity", "precision", "recall"], 0.5),
    **{"activation": "tanh", "function": tf.abs, "equation": "ab,bc->ac"},
    **{"bin_boundaries": [0.2, 0.4, 0.6], "target_shape": (2, 3), "rank": 2},
    **{"target_class_ids": [0, 1], "num_key_value_heads": 1, "value_range": (0, 1)},
    **{"axes": 1, "scale": 2.0, "max_number": 3, "groups": 2},
    **{"cell": lambda: keras.layers.LSTMCell(3), "layer": lambda: _Dense(3)},
    "fn": lambda: keras.losses.mean_absolute_error,
}
# Where a shape does not follow from the name, or arguments from the signature.
_SHAPES = {
    **dict.fromkeys(["LSTM", "GRU", "SimpleRNN", "RNN", "TimeDistributed"], (5, 3)),
    **dict.fromkeys(["Bidirectional", "MultiHeadAttention", "Masking"], (5, 3)),
    **dict.fromkeys(["Attention", "AdditiveAttention"], (5, 3)),
    **{"ConvLSTM1D": (3, 8, 2), "ConvLSTM2D": (3, 6, 6, 2)},
    **{"ConvLSTM3D": (3, 4, 4, 4, 2), "Permute": (4, 3), "RepeatVector": (6,)},
    **{"GroupedQueryAttention": (5, 3), "HashedCrossing": (1,)},
    **{"STFTSpectrogram": (600, 1), "MelSpectrogram": (3000,)},
}
_MADE: dict[str, Callable[[], Any]] = {
    "Bidirectional": lambda: keras.layers.Bidirectional(keras.layers.LSTM(3)),
    "Permute": lambda: keras.layers.Permute((2, 1)),
    "StackedRNNCells": lambda: keras.layers.RNN(
        keras.layers.StackedRNNCells([keras.layers.GRUCell(3) for _ in range(2)])
    ),
    "Discretization": lambda: keras.layers.Discretization([0.2, 0.4, 0.6]),
    "GroupNormalization": lambda: keras.layers.GroupNormalization(2),
    "Pipeline": lambda: keras.layers.Pipeline([keras.layers.Rescaling(2.0)]),
    "RandomPosterization": lambda: keras.layers.RandomPosterization(4),
    "IntegerLookup": lambda: keras.layers.IntegerLookup(vocabulary=[0, 1, 2]),
    "CategoryEncoding": lambda: keras.layers.CategoryEncoding(5, "multi_hot"),
    "MeanMetricWrapper": lambda: keras.metrics.MeanMetricWrapper(
        keras.losses.mean_absolute_error
    ),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1)
    ),
}
_OF_INTEGERS = (
    *("Embedding", "ReversibleEmbedding", "IntegerLookup", "CategoryEncoding"),
    *("Hashing", "HashedCrossing", "UnifiedLookup"),
)
_OF_IMAGES = (
    *("Random", "Crop", "Rescal", "Resiz", "Mix", "Contrast", "Solar", "RandAug"),
    *("Histogram", "Pipeline", "BoundingBoxes"),
)
_OF_TWO = (
    *("Add", "Average", "Concatenate", "Dot", "Maximum", "Minimum", "Multiply"),
    *("Subtract", "Attention", "AdditiveAttention", "HashedCrossing"),
)
_OF_TWO_ARGUMENTS = ("MultiHeadAttention", "GroupedQueryAttention")
# No layers that hold numbers of their own, or of other frameworks and of text.
_NOT_TRIED = (
    *("FlaxLayer", "InputLayer", "JaxLayer", "StringLookup", "TFSMLayer"),
    *("TextVectorization", "TorchModuleWrapper", "Wrapper"),
)


def made(kind: type) -> Any:
    """Returns one of a kind, by what its constructor asks for."""
    if kind.__name__ in _MADE:
        return _MADE[kind.__name__]()
    given = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        wanted = parameter.default is inspect.Parameter.empty
        if wanted and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            value = _ARGUMENTS[name]
            is_maker = callable(value) and value.__name__ == "<lambda>"
            given[name] = value() if is_maker else value
    return kind(**given)


def features(shape: tuple[int, ...], integers: bool = False) -> np.ndarray:
    """Returns a client's features."""
    rng = np.random.default_rng(1)
    if integers:
        return rng.integers(0, 5, (EXAMPLES, *shape)).astype(np.int32)
    return rng.uniform(0, 1, (EXAMPLES, *shape)).astype(np.float32)


def with_layer(kind: type) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Returns a function that makes a model, a client's data, and what to compile."""
    name = kind.__name__
    sizes = {"1D": (8, 3), "2D": (8, 8, 3), "3D": (4, 4, 4, 2)}
    shape = next((s for end, s in sizes.items() if end in name), (6,))
    if shape == (6,) and any(word in name for word in _OF_IMAGES):
        shape = (8, 8, 3)
    shape = (5, 3) if name.endswith(("Cell", "Cells")) else _SHAPES.get(name, shape)
    x = features(shape, name in _OF_INTEGERS)

    def model() -> Any:
        layer = made(kind)
        if name.endswith("Cell"):
            layer = keras.layers.RNN(layer)
        if name == "Normalization":
            layer.adapt(x)
        inputs = keras.Input(shape, dtype=x.dtype)
        if name in _OF_TWO:
            h = layer([inputs, inputs])
        elif name in _OF_TWO_ARGUMENTS:
            h = layer(inputs, inputs)
        else:
            h = layer(inputs)
        h = keras.layers.Flatten()(keras.ops.cast(h, "float32"))
        return keras.Model(inputs, _Dense(2)(h))

    return model, x, features((2,)), {"loss": "mse"}


def of_outputs(name: str) -> tuple[Callable[[], Any], np.ndarray]:
    """Returns a function that makes a model for a loss or a metric, and its labels."""
    rng = np.random.default_rng(2)
    classes = rng.integers(0, 3, EXAMPLES)
    if "Binary" in name or name in ("AUC", "Precision", "Recall", "IoU", "MeanIoU"):
        units, activation = 1, "sigmoid"
        y = rng.integers(0, 2, (EXAMPLES, 1)).astype(np.float32)
    elif any(word in name for word in ("Sparse", "Circle", "Generalized")):
        units, activation, y = 3, "softmax", classes.astype(np.int32)
    elif "CTC" in name:
        units, activation, y = 3, "softmax", classes[:, None].astype(np.int32)
    else:
        units, activation = 3, "softmax"
        y = np.eye(3, dtype=np.float32)[classes]

    def model() -> Any:
        return keras.Sequential([keras.Input([6]), _Dense(units, activation)])

    return model, y


def case(kind: type, of: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Returns a model's maker, features, labels, and what is compiled, by a maker."""
    if of == "layers":
        return with_layer(kind)
    model, y = of_outputs(kind.__name__)
    if of == "losses":
        return model, features((6,)), y, {"loss": lambda: made(kind)}
    loss = "sparse_categorical_crossentropy" if y.ndim == 1 else "mse"
    if of == "metrics":
        rate = keras.optimizers.SGD(0.0)  # So that all steps see the same weights.
        compiled = {"metrics": lambda: [made(kind)], "optimizer": lambda: rate}
        return model, features((6,)), y, {"loss": loss, **compiled}
    return model, features((6,)), y, {"loss": "mse", "optimizer": lambda: made(kind)}


def compared(kind: type, of: str) -> tuple[str, str]:
    """Returns what became of one kind: a word, and more about it."""

    def fresh() -> tuple[Any, dict[str, Any]]:
        keras.backend.clear_session()  # Names begin anew.
        keras.utils.set_random_seed(1)
        usual = {"optimizer": keras.optimizers.SGD(0.1), **compiled}
        return make(), {k: v() if callable(v) else v for k, v in usual.items()}

    def close(one: Any, other: Any) -> bool:
        return np.allclose(one, other, TOLERANCE, TOLERANCE, equal_nan=True)

    try:
        make, x, y, compiled = case(kind, of)
        plain, options = fresh()
        plain.compile(**options, run_eagerly=True)
        rows = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        expected = plain.fit(x, y, **rows).history
    except Exception as error:
        return "not trained by Keras", " ".join(f"{error!r:.250}".split())
    try:
        model, options = fresh()
        nothing = tfdp_fl.NoPrivacy()
        usual = {"sampling": "fixed_size", "max_parallel_clients": 1}
        fed = tfdp_fl.DPFederatedModel(model, nothing, 1, **usual)
        fed.compile(**options, jit_compile=False)
        history = fed.fit({"a": (x, y)}, batch_size=BATCH, verbose=0).history
    except Exception as error:
        return "refused", " ".join(f"{error!r:.250}".split())
    pairs = zip(fed.get_weights(), plain.get_weights(), strict=True)
    wrong = [f"{np.max(np.abs(a - b)):.1e}" for a, b in pairs if not close(a, b)]
    for name, (value,) in expected.items():
        if not close(history[name][0], float(value)):
            wrong.append(f"{name} {history[name][0]:.6g}, Keras {float(value):.6g}")
    if wrong and keras_versions.own_random_state(model):
        return "random", ""
    return ("different", ", ".join(wrong)) if wrong else ("equal", "")


def kinds_of(of: str) -> list[type]:
    """Returns the classes that Keras exports, each once."""
    base = {
        "layers": keras.layers.Layer,
        "losses": keras.losses.Loss,
        "metrics": keras.metrics.Metric,
        "optimizers": keras.optimizers.Optimizer,
    }[of]
    exported = vars(getattr(keras, of)).values()
    found = {k for k in exported if inspect.isclass(k) and issubclass(k, base)}
    found = {kind for kind in found if kind.__name__ not in _NOT_TRIED}
    return sorted(found - {base}, key=lambda kind: kind.__name__)


def main(_: Any) -> None:
    """Compares, and prints."""
    warnings.simplefilter("ignore")
    print(f"Keras {keras.version()}, TensorFlow {tf.__version__}")
    for of in _KINDS.value:
        results = collections.defaultdict(list)
        for kind in kinds_of(of):
            word, more = compared(kind, of)
            results[word].append((kind.__name__, more))
        for word, found in sorted(results.items()):
            print(f"\n{of}: {len(found)} {word}")
            for name, more in found:
                print(f"  {name}{more and ': '}{more}", flush=True)


if __name__ == "__main__":
    app.run(main)
