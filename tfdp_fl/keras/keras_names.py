"""What Keras users call on a model: handed on, or what to call instead.

Handed on is what reads the model, or sets its weights. Whatever would train it
on data without clipping and noise, or change what was compiled, is not: the
message says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

# Names that are the Keras model's own.
_OF_KERAS = (
    "built compute_dtype compute_output_shape count_params dtype dtype_policy export "
    "get_build_config get_compile_config get_config get_layer get_state_tree "
    "get_weight_paths get_weights history input input_dtype input_names input_shape "
    "input_spec inputs jit_compile layers load_weights loss losses metrics "
    "metrics_names metrics_variables name non_trainable_variables "
    "non_trainable_weights operations optimizer output output_names output_shape "
    "outputs path predict_on_batch quantization_mode reset_metrics run_eagerly "
    "save_weights set_weights steps_per_execution stop_training submodules "
    "supports_jit supports_masking test_on_batch to_json trainable_variables "
    "trainable_weights variable_dtype variables weights"
)
HANDED_ON = frozenset(_OF_KERAS.split())

_BEFORE = "change the Keras model before it is wrapped, and wrap it anew"
_TRAINS = (
    "it would train on data without clipping and noise, which nothing accounts "
    "for: call fit(clients, rounds=...)"
)
_STEP = (
    "the compiled client training has steps of its own: say what is trained by "
    "a loss, a layer's add_loss, an optimizer, or compile(upload_hook=...)"
)
_AFTER = "quantize fed.model when training is over"

# Names that are not, and what to do instead.
INSTEAD = {
    **dict.fromkeys(["add", "build", "finalize_state", "pop", "trainable"], _BEFORE),
    **dict.fromkeys(["fit_generator", "train_on_batch"], _TRAINS),
    **dict.fromkeys(
        ["compute_loss", "compute_metrics", "make_train_function", "train_function"],
        _STEP,
    ),
    "call": "call the model itself: fed(x, training=False)",
    "quantize": _AFTER,
    "set_state_tree": "call set_weights(weights)",
    "stateless_call": "call the model itself: fed(x, training=False)",
    "train_step": _STEP,
}

_RUNTIME = "runtime (which says where clients are trained)"
_MECHANISM = "a mechanism: DPFederatedModel(model, mechanism, ...)"
# What Keras's `fit` takes and `DPFederatedModel.fit` does not.
OF_FIT = {
    "epochs": (
        "rounds (in a round a cohort of clients trains; local_epochs says how "
        "often a client goes over its examples in one)"
    ),
    "initial_epoch": "resume_from (a directory that RoundCheckpoint wrote)",
    "steps_per_epoch": "rounds, and clients_per_round of the model",
    "validation_steps": "validation_data with as many batches",
    **dict.fromkeys(["max_queue_size", "use_multiprocessing", "workers"], _RUNTIME),
    "target_epsilon": "make_private(model, target_epsilon=...), and fit then",
    "target_delta": "make_private(model, target_delta=...), and fit then",
    **dict.fromkeys(["clip_norm", "mechanism", "noise_multiplier"], _MECHANISM),
    "clients_per_round": "DPFederatedModel(..., clients_per_round)",
    "sampling": "DPFederatedModel(..., sampling=...)",
    "learning_rate": "compile(optimizer=SGD(learning_rate))",
}
# What Keras's `compile` takes and `DPFederatedModel.compile` does not.
OF_COMPILE = {
    "run_eagerly": "nothing: the clients' training is always compiled by TensorFlow",
    "steps_per_execution": "nothing: a whole cohort is one call already",
    "auto_scale_loss": "nothing: take mixed_bfloat16, which needs no scale",
}


def handed_on(model: Any, name: str) -> Any:
    """Returns what a Keras model calls by a name; AttributeError says what to call."""
    if name in HANDED_ON:
        return getattr(model, name)
    raise AttributeError(missing(name))


def missing(name: str) -> str:
    """Returns what to tell whoever asks for a name that is not handed on."""
    if name in INSTEAD:
        return f"DPFederatedModel has no {name}: {INSTEAD[name]}."
    return f"DPFederatedModel has no attribute {name!r}; the Keras model is fed.model."


def refuse_arguments(
    method: str, given: Iterable[str], allowed: Iterable[str], of_keras: Mapping
) -> None:
    """Raises TypeError for arguments that `fit` or `compile` does not take.

    Args:
      method: Which of the two.
      given: The arguments' names.
      allowed: Those that it takes.
      of_keras: What to give instead of Keras's own.
    """
    allowed = list(allowed)
    for name in given:
        hint = of_keras.get(name)
        meant = difflib.get_close_matches(name, [*allowed, *of_keras], 1, cutoff=0.7)
        if hint is None and meant:
            hint = of_keras.get(meant[0], f"{meant[0]}, if that is what you mean")
        elif hint is None:
            hint = f"one of {', '.join(allowed)}"
        raise TypeError(f"{method} takes no {name}; give {hint}.")
