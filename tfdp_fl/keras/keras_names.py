"""Keras's names on a `DPFederatedModel`: which are handed on, what replaces others.

Handed on is what reads the model, or sets its weights. Whatever would train it
on data without clipping and noise, or change what was compiled, is not.
"""

from __future__ import annotations

from collections.abc import Iterable

# Names that are the Keras model's own.
_OF_KERAS = (
    "built compute_dtype compute_output_shape count_params dtype dtype_policy export "
    "get_build_config get_compile_config get_config get_layer get_state_tree "
    "get_weight_paths get_weights history input input_dtype input_names input_shape "
    "input_spec inputs jit_compile layers load_weights loss losses metrics "
    "metrics_names metrics_variables name non_trainable_variables "
    "non_trainable_weights operations optimizer output output_names output_shape "
    "outputs path predict_on_batch quantization_mode reset_metrics run_eagerly "
    "save_weights set_weights steps_per_execution stop_training submodules summary "
    "supports_jit supports_masking test_on_batch to_json trainable_variables "
    "trainable_weights variable_dtype variables weights"
)
HANDED_ON = frozenset(_OF_KERAS.split())

_RUNTIME = "runtime (which says where clients are trained)"
_COMPILED = "nothing: a whole cohort is one call that is compiled by TensorFlow"
_MODEL = "DPFederatedModel(model, mechanism, clients_per_round, sampling=...)"
_PRIVATE = "make_private(model, target_epsilon=..., target_delta=...), and fit then"
# What Keras's `fit` and `compile` take, or users expect there: what to give instead.
_INSTEAD = {
    "epochs": (
        "rounds (in a round a cohort of clients trains; local_epochs says how "
        "often a client goes over its examples in one)"
    ),
    "initial_epoch": "resume_from (a directory that RoundCheckpoint wrote)",
    "steps_per_epoch": "rounds, and clients_per_round of the model",
    "validation_steps": "validation_data with as many batches",
    "class_weight": "sample_weight, what its class counts for each example",
    "auto_scale_loss": "nothing: take mixed_bfloat16, which needs no scale",
    **dict.fromkeys(["max_queue_size", "use_multiprocessing", "workers"], _RUNTIME),
    **dict.fromkeys(["run_eagerly", "steps_per_execution"], _COMPILED),
    **dict.fromkeys(["target_epsilon", "target_delta"], _PRIVATE),
    **dict.fromkeys(["mechanism", "clients_per_round", "sampling"], _MODEL),
}


def missing(name: str) -> str:
    """Returns what to tell a user of a name that is not handed on."""
    return (
        f"DPFederatedModel has no {name!r}: it trains by fit(clients, rounds=...), "
        "where clip and noise are accounted for. The Keras model is fed.model."
    )


def refuse_arguments(method: str, given: Iterable[str]) -> None:
    """Raises TypeError for arguments that `fit` or `compile` does not take."""
    for name in given:
        hint = f"; give {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise TypeError(f"{method} takes no {name}{hint}.")
