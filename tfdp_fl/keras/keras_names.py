"""What Keras users call on a model: handed on, or what to call instead.

Handed on is what reads the model, or sets its weights. Whatever would train it
on data without clipping and noise, or change what was compiled, is not: the
message says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# Names that are the Keras model's own.
HANDED_ON = frozenset(
    [
        *("activity_regularizer", "autocast", "autotune_steps_per_execution"),
        "built",
        *("call_signature_parameters", "compiled_loss", "compiled_metrics"),
        *("compute_dtype", "compute_mask", "compute_output_shape"),
        *("compute_output_signature", "compute_output_spec", "count_params"),
        *("distribute_strategy", "dtype", "dtype_policy", "dynamic", "export"),
        *("get_build_config", "get_compile_config", "get_config"),
        *("get_input_at", "get_input_mask_at", "get_input_shape_at"),
        *("get_layer", "get_output_at", "get_output_mask_at"),
        *("get_output_shape_at", "get_quantization_layer_structure"),
        *("get_state_tree", "get_weight_paths", "history", "inbound_nodes"),
        *("input", "input_dtype", "input_mask", "input_names", "input_shape"),
        *("input_spec", "inputs", "jit_compile", "layers", "load_weights"),
        *("loss", "losses", "metrics", "metrics_names", "metrics_variables"),
        *("name", "name_scope", "non_trainable_variables"),
        *("non_trainable_weights", "optimizer", "outbound_nodes", "output"),
        *(
            "operations",
            "output_mask",
            "output_names",
            "output_shape",
            "outputs",
            "path",
        ),
        *("predict_on_batch", "predict_step", "quantization_mode"),
        *("reset_metrics", "run_eagerly", "save_spec", "save_weights"),
        *("stateful", "steps_per_execution", "stop_training", "submodules"),
        *("supports_jit", "supports_masking", "symbolic_call"),
        *("test_on_batch", "test_step", "to_json", "trainable_variables"),
        *("trainable_weights", "variable_dtype", "variables", "weights"),
        "unrolled_steps_per_execution",
    ]
)

_BEFORE = "change the Keras model before it is wrapped, and wrap it anew"
_TRAINS = (
    "it would train on data without clipping and noise, which nothing accounts "
    "for: call fit(clients, rounds=...)"
)
_STEP = (
    "the compiled client training has steps of its own: say what is trained by "
    "a loss, a layer's add_loss, an optimizer, or compile(upload_hook=...)"
)
_INSIDE = "it is Keras's own, and not part of training on clients"
_LATER = "it is none of today's Keras: call evaluate, predict or fit"
_LAYERS = "a layer's own __init__ and call do that, before the model is wrapped"

# Names that are not, and why not.
INSTEAD = {
    "add": _BEFORE,
    "add_loss": _LAYERS,
    "add_metric": "give it to compile(metrics=...)",
    "add_update": _LAYERS,
    "add_variable": _LAYERS,
    "add_weight": _LAYERS,
    "build": "build the Keras model, and wrap it then",
    "build_from_config": "build the Keras model, and wrap it then",
    "call": "call the model itself: fed(x, training=False)",
    "compile_from_config": "call compile(optimizer, loss, ...)",
    "compute_loss": _STEP,
    "compute_metrics": _STEP,
    "distribute_reduction_method": (
        "clients are spread over machines by fit(runtime=...)"
    ),
    "enable_tune_steps_per_execution": _INSIDE,
    "evaluate_generator": _LATER,
    "finalize_state": _BEFORE,
    "fit_generator": _TRAINS,
    "from_config": "call it on the Keras model's class, and wrap what it makes",
    "get_metrics_result": "call evaluate(x, y, return_dict=True)",
    "load_own_variables": "call load_weights(path)",
    "make_predict_function": _INSIDE,
    "make_test_function": _INSIDE,
    "make_train_function": _STEP,
    "pop": _BEFORE,
    "predict_function": _INSIDE,
    "predict_generator": _LATER,
    "quantize": "quantize fed.model when training is over",
    "quantized_build": "quantize fed.model when training is over",
    "quantized_call": "quantize fed.model when training is over",
    "rematerialized_call": _INSIDE,
    "reset_states": "models whose layers keep states cannot be trained",
    "save_own_variables": "call save_weights(path), or save(path)",
    "set_state_tree": "call set_weights(weights)",
    "state_updates": _INSIDE,
    "stateless_call": "call the model itself: fed(x, training=False)",
    "stateless_compute_loss": _STEP,
    "test_function": _INSIDE,
    "to_yaml": "call to_json()",
    "train_function": _STEP,
    "train_on_batch": _TRAINS,
    "train_step": _STEP,
    "train_tf_function": _STEP,
    "trainable": (
        "freeze layers of the Keras model before it is wrapped, and wrap it anew"
    ),
    "updates": _INSIDE,
    "with_name_scope": _INSIDE,
}

# What Keras's `fit` takes and `DPFederatedModel.fit` does not.
_OF_FIT = {
    "epochs": (
        "rounds (in a round a cohort of clients trains; local_epochs says how "
        "often a client goes over its examples in one)"
    ),
    "initial_epoch": "resume_from (a directory that RoundCheckpoint wrote)",
    "max_queue_size": "runtime (which says where clients are trained)",
    "steps_per_epoch": "rounds, and clients_per_round of the model",
    "use_multiprocessing": "runtime (which says where clients are trained)",
    "validation_steps": "validation_data with as many batches",
    "workers": "runtime (which says where clients are trained)",
    "target_epsilon": "make_private(model, target_epsilon=...), and fit then",
    "target_delta": "make_private(model, target_delta=...), and fit then",
    "noise_multiplier": "a mechanism: DPFederatedModel(model, mechanism, ...)",
    "clip_norm": "a mechanism: DPFederatedModel(model, mechanism, ...)",
    "clients_per_round": "DPFederatedModel(..., clients_per_round)",
    "sampling": "DPFederatedModel(..., sampling=...)",
    "mechanism": "DPFederatedModel(model, mechanism, ...)",
    "learning_rate": "compile(optimizer=SGD(learning_rate))",
}


def handed_on(model: Any, name: str) -> Any:
    """Returns what a Keras model calls by a name, or raises.

    Raises:
      AttributeError: It is not handed on; the message says what to call.
    """
    if name in HANDED_ON:
        return getattr(model, name)
    raise AttributeError(missing(name))


def missing(name: str) -> str:
    """Returns what to tell whoever asks for a name that is not handed on."""
    if name in INSTEAD:
        return f"DPFederatedModel has no {name}: {INSTEAD[name]}."
    return f"DPFederatedModel has no attribute {name!r}; the Keras model is fed.model."


def refuse_arguments(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises TypeError for arguments that `fit` does not take.

    Args:
      given: Their names.
      allowed: Those that it takes.
    """
    for name in given:
        hint = _OF_FIT.get(name)
        meant = difflib.get_close_matches(name, [*allowed, *_OF_FIT], 1, cutoff=0.7)
        if hint is None and meant:
            hint = _OF_FIT.get(meant[0], f"{meant[0]}, if that is what you mean")
        elif hint is None:
            hint = f"one of {', '.join(allowed)}"
        raise TypeError(f"fit takes no {name}; give {hint}.")


_OF_COMPILE = {
    "run_eagerly": "the clients' training is always compiled by TensorFlow; to see "
    "what a layer computes, call the Keras model on a batch",
    "steps_per_execution": "a whole cohort is one call already",
    "auto_scale_loss": "give a tf.keras.optimizers.LossScaleOptimizer as optimizer",
}


def refuse_compile_arguments(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises TypeError for arguments that `compile` does not take.

    Args:
      given: Their names.
      allowed: Those that it takes.
    """
    allowed = list(allowed)
    for name in given:
        meant = difflib.get_close_matches(name, allowed, 1)
        hint = _OF_COMPILE.get(name) or (
            f"do you mean {meant[0]}?" if meant else f"it takes {', '.join(allowed)}"
        )
        raise TypeError(f"compile takes no {name}: {hint.rstrip('.')}.")
