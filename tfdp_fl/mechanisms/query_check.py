"""Whether a TF-Privacy query can be a mechanism at the cost declared for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import dp_accounting
from dp_accounting import rdp

from tfdp_fl._on_use import tf
from tfdp_fl.accounting import charge
from tfdp_fl.mechanisms import tf_privacy as tfp

_ALLOWED = (
    "GaussianSumQuery",
    "NestedSumQuery",
    "NoPrivacySumQuery",
    "NormalizedQuery",
    "QuantileAdaptiveClipSumQuery",
)
_USE_INSTEAD = (
    "use tfdp_fl.FixedClipping, AdaptiveClipping or MedianClipping, or one of "
    f"TF-Privacy's {', '.join(_ALLOWED)}"
)
# Noise that is there is not zero in so many coordinates, however coarse.
VECTOR = (1000,)
# Where an event is compared with another: the tails and the body of its
# privacy loss, and what many rounds of it cost.
_DELTAS = (1e-3, 1e-6, 1e-9)
_COUNTS = (1, 100)
# A query computes its noise multiplier in float32.
_ROUNDING = 1e-5


def check_query(
    query: tfp.SumAggregationDPQuery,
    dp_event: dp_accounting.DpEvent,
    shapes: Sequence[Sequence[int]],
    must_run: bool = False,
) -> None:
    """Raises ValueError unless a query can be run, and charged as declared.

    Args:
      query: The query.
      dp_event: What one round of it is to be charged as.
      shapes: Those of the tensors of an update that it is tried on.
      must_run: Whether they are those of the model, so that a query that does
        not take them is refused. Else it is not looked at any further.

    Raises:
      ValueError: It is a query of TF-Privacy that is not known to work, it fails
        and must run, its state does not keep its shape, it reports no event that
        can be accounted for, or it costs more than is declared.
    """
    _check_classes(query)
    name, declared = type(query).__name__, charge.normalised(dp_event)
    with tf.init_scope():
        try:
            if not tf.executing_eagerly():
                raise RuntimeError("it can only be tried outside of graphs")
            rounds = list(_two_rounds(query, shapes))
        except Exception as error:  # Of whatever kind: the query is not ours.
            if not must_run:
                return
            raise ValueError(
                "query must take tensors of zeros of the model's shapes, so that the "
                "event that it reports can be compared with dp_event, got "
                f"{name}, which fails: {error}"
            ) from error
    spent = _epsilons(declared)
    has_price = spent != _epsilons(dp_accounting.NonPrivateDpEvent())
    for state, result, new_state, event in rounds:
        if _layout(state) != _layout(new_state):
            raise ValueError(
                "query must have a state that keeps its structure and shapes "
                f"from round to round, got {name}; {_USE_INSTEAD}."
            )
        reported = charge.normalised(event)
        if reported != declared:
            least = _epsilons(reported)
            if least is None:
                raise ValueError(
                    "query must report an event that can be accounted for, got "
                    f"{name} with {reported!r}; {_USE_INSTEAD}."
                )
            if spent is None or any(
                one < other * (1 - _ROUNDING)
                for one, other in zip(spent, least, strict=True)
            ):
                raise ValueError(
                    f"dp_event must not cost less than what {name} reports of a "
                    f"round, {reported!r}, and be comparable with it, got "
                    f"{declared!r}."
                )
        if has_price and not all(map(_has_noise, tf.nest.flatten(result))):
            raise ValueError(
                f"dp_event must not be {declared!r} for a query that adds no "
                f"noise, got {name}, whose result on zeros is "
                "zero; dp_accounting.NonPrivateDpEvent() is what it costs."
            )


def _check_classes(query: Any) -> None:
    """Raises ValueError for a class of TF-Privacy that is not known to work."""
    base = next(
        kind
        for kind in type(query).__mro__
        if kind.__module__.startswith("tensorflow_privacy.")
    )
    abstract = (tfp.SumAggregationDPQuery, tfp.DPQuery)
    if base not in (*abstract, *(getattr(tfp, name) for name in _ALLOWED)):
        why = ""
        if "Tree" in base.__name__:
            why = (
                ", whose noise is correlated over the rounds (it is seeded by the "
                "clock, its state changes shape, and it reports no event that can "
                "be accounted for round by round; tfdp_fl.CorrelatedNoise does what "
                "it is for, with less noise)"
            )
        raise ValueError(
            "query must be one whose state and cost are known here, got "
            f"{type(query).__name__}{why}; {_USE_INSTEAD}."
        )
    if isinstance(query, tfp.NormalizedQuery):
        _check_classes(query._numerator)
    if isinstance(query, tfp.NestedSumQuery):
        for inner in tf.nest.flatten(query._queries):
            _check_classes(inner)


def _has_noise(result: tf.Tensor) -> bool:
    """Returns False where noise would have moved some coordinate.

    One of fewer coordinates may by chance be zero, when noise is coarse.
    """
    return tf.size(result) < VECTOR[0] or bool(tf.reduce_any(tf.not_equal(result, 0)))


def _two_rounds(
    query: tfp.SumAggregationDPQuery, shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[Any, Any, Any, dp_accounting.DpEvent]]:
    """Yields state, result, next state and event of rounds without data."""
    template = [tf.zeros(shape) for shape in shapes]
    state = query.initial_global_state()
    for _ in range(2):
        params = query.derive_sample_params(state)
        total = query.accumulate_preprocessed_record(
            query.initial_sample_state(template),
            query.preprocess_record(params, template),
        )
        result, new_state, event = query.get_noised_result(total, state)
        yield state, result, new_state, event
        state = new_state


def _layout(state: Any) -> list[tuple[Any, Any]]:
    leaves = [tf.convert_to_tensor(each) for each in tf.nest.flatten(state)]
    return [(leaf.shape.as_list(), leaf.dtype) for leaf in leaves]


def _epsilons(event: dp_accounting.DpEvent) -> list[float] | None:
    """Returns what an event costs in some respects; None if not known."""
    epsilons = []
    for count in _COUNTS:
        accountant = rdp.RdpAccountant()
        try:
            accountant.compose(event, count)
        except Exception:  # Each version of dp-accounting raises its own.
            return None
        epsilons += [accountant.get_epsilon(delta) for delta in _DELTAS]
    return epsilons
