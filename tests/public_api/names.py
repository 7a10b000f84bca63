"""All that is public and can be called, and what is not called, and why."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import types
from collections.abc import Iterator
from typing import Any

import tfdp_fl

TFF = importlib.util.find_spec("tensorflow_federated") is not None
_ROOMS_OF_TFF = ("aggregators", "learning")
# What a stack without the package cannot make.
_NEEDS = {
    "runtimes.RayWorkers": "ray",
}


def rooms() -> dict[str, types.ModuleType]:
    """Returns the public modules that this stack can open, by name."""
    names = sorted(tfdp_fl._PACKAGES)
    found = {
        name: importlib.import_module(f"tfdp_fl.{name}")
        for name in names
        if TFF or name not in _ROOMS_OF_TFF
    }
    # The package's own names last: most of them are a room's.
    return {**found, "callbacks": tfdp_fl.callbacks, "tfdp_fl": tfdp_fl}


def can_be_made(name: str) -> bool:
    """Returns whether this stack has the package that a class needs."""
    needed = _NEEDS.get(name)
    return needed is None or importlib.util.find_spec(needed) is not None


def _is_alternative(value: Any) -> bool:
    return isinstance(value, (classmethod, staticmethod))


def public_names() -> Iterator[str]:
    """Yields "room.name" of all that is public and can be called.

    And "room.Class.name" of other ways to make one. What is an error, a room
    or a constant is called by nobody.
    """
    seen = set()
    for room, module in rooms().items():
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if not callable(value) or id(value) in seen:
                continue
            seen.add(id(value))
            if not inspect.isclass(value):
                yield f"{room}.{name}"
                continue
            if issubclass(value, BaseException) or not can_be_made(f"{room}.{name}"):
                continue
            yield f"{room}.{name}"
            for other, made in vars(value).items():
                if _is_alternative(made) and not other.startswith("_"):
                    yield f"{room}.{name}.{other}"


# What is not called with strange arguments, and why.
_HANDED_OUT = "handed out, and made by no user"
_ABSTRACT = "abstract: takes nothing"
_NOTHING = "takes no argument"
_ENGINE = "made by `fit`, from what `fit` and `compile` have checked"
_BY_TFF = "made inside TFF's computations"
NOT_CALLED = {
    "accounting.LedgerContents": _HANDED_OUT,
    "accounting.LedgerEntry": _HANDED_OUT,
    "accounting.PrivacyLedger.read": "reads mutated files (FilesTest)",
    "aggregators.AggregatorState": _BY_TFF,
    "aggregators.RoundHistory": _BY_TFF,
    "auditing.Estimate": _HANDED_OUT,
    "callbacks.FederatedCallback": _ABSTRACT,
    "correlated_noise.Generator": _ABSTRACT,
    "correlated_noise.Memory": "made inside the compiled cohort",
    "correlated_noise.ParticipationRecord.from_state": (
        "of a checkpoint, which is read by checksum (FilesTest)"
    ),
    "correlated_noise.Strategy": _ABSTRACT,
    "datasets.ClientExamples": _HANDED_OUT,
    "datasets.ClientFailure": _HANDED_OUT,
    "datasets.FederatedDataset": "made by its `from_...`, which are called",
    "datasets.FederatedDataset.from_parquet": "reads a file, as `from_dataframe` reads",
    "datasets.bound_rows": "as `fit` with the same arrays, in persons_test",
    "datasets.load_emnist": "downloads, by TFF",
    "datasets.shakespeare_vocabulary": _NOTHING,
    "engine.CohortEngine": _ENGINE,
    "engine.LocalTraining": _ENGINE,
    "engine.PendingRound": _ENGINE,
    "engine.RoundInputs": _ENGINE,
    "experiments.Prepared": "made by `prepare`",
    "experiments.Run": "made by its `read`",
    "experiments.Settings": "its 60 fields have a test of their own",
    "experiments.prepare": "takes Settings, which are checked when made",
    "experiments.run": "takes what `prepare` made",
    "flower.ReleasedRound": _HANDED_OUT,
    "flower.private_mod": "its messages are mutated (MessagesTest)",
    "keras.Run": _HANDED_OUT,
    "keras.Run.from_state": ("of a checkpoint, which is read by checksum (FilesTest)"),
    "learning.DPLearningProcess": "made by `build_dp_fed_avg`",
    "learning.Epsilon": _HANDED_OUT,
    "mechanisms.AdaptiveClipping.for_target": "called by `make_private`",
    "mechanisms.Client": "made inside the compiled cohort",
    "mechanisms.CohortQuery": "made by a mechanism's `bind`",
    "mechanisms.CohortQuery.norm_of_scalars": "called by the engine",
    "mechanisms.Contribution": "made inside the compiled cohort",
    "mechanisms.Mechanism": _ABSTRACT,
    "mechanisms.Mechanism.for_target": "called by `make_private`",
    "mechanisms.MedianClipping.for_target": "called by `make_private`",
    "mechanisms.NoPrivacy": _NOTHING,
    "mechanisms.NoPrivacy.for_target": "called by `make_private`",
    "mechanisms.Round": "made inside the compiled cohort",
    "mechanisms.Target": "made by `make_private`",
    "mechanisms.names": _NOTHING,
    "mechanisms.parameter": "a field of a class, for who writes mechanisms",
    "mechanisms.register": "a decorator, for who writes mechanisms",
    "runtimes.WorkerRound": _HANDED_OUT,
    "sampling.seed_sequence": "called by samplers and `fit`",
    "sampling.CohortSampler": "abstract; its subclasses are called",
    "search.PublicScore": "takes whatever `evaluate` takes",
    "secure_aggregation.AggregationOutcome": _HANDED_OUT,
    "secure_aggregation.GroupedSum": _HANDED_OUT,
    "secure_aggregation.Message.from_bytes": ("reads mutated messages (MessagesTest)"),
}
