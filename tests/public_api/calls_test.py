"""What is wrong is refused with a reason, wherever it is given.

Every argument of every call that takes no time is each of a few wrong things,
once. A call raises what is not documented, and where an error says nothing;
`tests/stress/fuzz_stress.py` tries hundreds of all, and two at a time.
"""

import contextlib
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import dp_accounting
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import tfdp_fl
from tests.accounting.charges import charge
from tests.flower import flower_messages as fm
from tests.keras import toy
from tfdp_fl import accounting, datasets
from tfdp_fl._lazy_tf import tfp

_FIXED = {"clip_norm": 1.0, "noise_multiplier": 1.0}
_LOCAL = {"epsilon": 5.0, "delta": 1e-3}
_ROUNDS = {"num_clients": 100, "clients_per_round": 10, "rounds": 5}
_RUN = {"noise_multiplier": 1.0, "sampling": "poisson", **_ROUNDS}
_GAUSSIAN = dp_accounting.GaussianDpEvent(1.0)


class Call(NamedTuple):
    """A call that is right, with arguments by name."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    paths: tuple[str, ...]  # Arguments for which an OSError is documented.
    counts: tuple[str, ...]  # Those that take as long as they say.
    errors: tuple[type[Exception], ...]  # Besides ValueError and TypeError.

    def __call__(self, **strange: Any) -> None:
        """Calls it, with some arguments strange; documented errors are none."""
        documented = (ValueError, TypeError, *self.errors)
        if strange.keys() & {*self.paths}:
            documented = (*documented, OSError)
        try:
            self.function(**{**self.arguments, **strange})
        except documented as error:
            if not strange:
                raise
            assert str(error), "an error says nothing"


def _usual(function: Callable[..., Any], paths=(), counts=(), errors=(), **given: Any):
    """Returns a call with what is given, and every default."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty and not name.startswith("_")
    }
    return Call(function, {**defaults, **given}, paths, counts, errors)


Calls = Iterator[Call]


def _mechanisms() -> Calls:
    m = tfdp_fl
    yield _usual(m.FixedClipping, **_FIXED)
    yield _usual(m.AdaptiveClipping, noise_multiplier=1.0)
    yield _usual(m.MedianClipping, noise_multiplier=1.0)
    yield _usual(m.PerLayerClipping, **_FIXED)
    yield _usual(m.LocalDP, clip_norm=1.0, **_LOCAL)
    yield _usual(m.AdaptiveLocalDP, **_LOCAL)
    yield _usual(m.NbAFL, epsilon=5.0, constant=3.0, weight_clip=1.0)
    # Another strategy is optimized, which takes a second.
    correlated = {"rounds": 4, "min_separation": 2, "strategy": "banded:1"}
    yield _usual(m.CorrelatedNoise, **_FIXED, **correlated)
    query = tfp.GaussianSumQuery(1.0, 1.0)
    yield _usual(m.QueryMechanism, query=query, dp_event=_GAUSSIAN)
    yield _usual(m.ClientWeighting, cap=5.0)
    yield _usual(m.BLT, num_buffers=2)
    yield _usual(m.BandedToeplitz, bands=3)


def _written_ledger(path: str = "written.jsonl", **options: Any) -> str:
    with contextlib.suppress(FileNotFoundError):
        os.unlink("new.jsonl")
    with accounting.PrivacyLedger(path, **options) as made:
        made.record(0, charge(), 10)
    return path


def _accounting() -> Calls:
    a, at = accounting, {"delta": 1e-3}
    target = {"target_epsilon": 2.0, **at}
    without = {k: v for k, v in _RUN.items() if k != "noise_multiplier"}
    no_rounds = {k: v for k, v in _RUN.items() if k != "rounds"}
    yield _usual(a.epsilon, **_RUN, **at)
    yield _usual(a.delta, **_RUN, epsilon=1.0)
    yield _usual(a.calibrate_noise_multiplier, **without, **target)
    yield _usual(a.max_rounds, **no_rounds, **target)
    yield _usual(a.calibrate, make_charges=lambda z: [(charge(z=z), 2)], **target)
    yield _usual(a.PrivacyBudget, epsilon=2.0, **at)
    fields = {"sampling": "poisson", "num_clients": 100, "clients_per_round": 10.0}
    yield _usual(a.RoundCharge, **fields, event=_GAUSSIAN)
    yield _usual(a.RoundCharge.from_json, text=charge().to_json())
    facts = a.StatementFacts(trust_model="central", mechanism="fixed", epsilon_rdp=1.0)
    yield _usual(a.privacy_statement, facts=facts, **at)
    files = {"errors": (a.LedgerError,), "paths": ("path",)}
    options = dict.fromkeys(["target_epsilon", "target_delta", "mechanism"])
    yield _usual(_written_ledger, path="new.jsonl", mode="create", **options, **files)
    yield _usual(a.epsilon_from_ledger, path=_written_ledger(), **at, **files)


class _ClientData:
    """As TFF's `ClientData`."""

    client_ids = ("ann", "bob")

    def create_tf_dataset_for_client(self, client_id):
        return tf.data.Dataset.from_tensor_slices(toy.arrays(4))


def _datasets() -> Calls:
    made = datasets.FederatedDataset
    x, y = toy.arrays(20)
    rows = tf.data.Dataset.from_tensor_slices((x, y))
    frame = pd.DataFrame({"who": ["a", "a", "b"], "size": [1.0, 2, 3], "label": 0})
    yield _usual(made.from_indices, x=x, y=y, indices=[[0, 1], [2]])
    yield _usual(made.from_client_arrays, clients={0: (x, y)})
    yield _usual(made.from_dataframe, frame=frame, client="who")
    yield _usual(made.from_client_data, client_data=_ClientData())
    yield _usual(made.from_client_fn, client_ids=["a", "b"], fn=lambda name: (x, y))
    yield _usual(made.from_tf_datasets, clients={0: rows})
    yield _usual(datasets.as_federated, clients=[(x, y)])
    yield _usual(datasets.load_digits, num_clients=10)


def _flower() -> Calls:
    f, fixed = tfdp_fl.flower, tfdp_fl.FixedClipping(**_FIXED)
    legacy = {
        "strategy": mock.Mock(["configure_fit", "aggregate_fit"]),
        "num_sampled_clients": 3,
    }
    files = {"errors": (accounting.LedgerError,), "paths": ("ledger",)}
    sizes, strategy = {"num_clients": 10, "clients_per_round": 3}, fm.Strategy(3)
    yield _usual(
        f.PrivateStrategy, strategy=strategy, mechanism=fixed, **sizes, **files
    )
    yield _usual(f.DPFedAvg, **legacy, mechanism=fixed)
    yield _usual(f.DPFedAvgFixed, **legacy, clip_norm=1.0, **files)
    yield _usual(f.DPFedAvgAdaptive, **legacy, clip_count_stddev=3.0)
    yield _usual(f.DPFedAvgNumPyClient, client=mock.Mock())


def _keras() -> Calls:
    fixed = tfdp_fl.FixedClipping(**_FIXED)
    at = {"delta": 1e-3}
    target = {"target_epsilon": 1.0, "target_delta": 1e-3}
    model = {"model": toy.dense(), "mechanism": fixed, "clients_per_round": 3}
    yield _usual(tfdp_fl.DPFederatedModel, **model)
    yield _usual(toy.federated().compile, loss="sparse_categorical_crossentropy")
    bounds = {"loss": (0.0, 1.0)}
    yield _usual(tfdp_fl.PrivateMetrics, bounds=bounds, noise_multiplier=1.0)
    score = tfdp_fl.PublicScore(*toy.arrays(4), "loss")
    search = {"build": len, "candidates": [{}], "expected_trials": 2, "score": score}
    yield _usual(tfdp_fl.PrivateSearch, **search, **target)
    yield _usual(tfdp_fl.PrivateScore, metric="loss", noise_multiplier=1.0)
    yield _usual(tfdp_fl.validate, model=toy.dense())
    yield _usual(tfdp_fl.callbacks.PrivacyBudget, epsilon=1.0, **at)
    yield _usual(tfdp_fl.callbacks.Ledger, path="new", paths=("path",))
    yield _usual(tfdp_fl.callbacks.Report, path="new", paths=("path",))
    checkpoint = {"directory": "new", "paths": ("directory",)}
    yield _usual(tfdp_fl.callbacks.RoundCheckpoint, **checkpoint)
    yield _usual(tfdp_fl.features.OrientedGradients, name="gradients")
    yield _usual(tfdp_fl.losses.BalancedSoftmaxCrossentropy)
    if importlib.util.find_spec("ray"):
        yield _usual(tfdp_fl.runtimes.RayWorkers, num_workers=2)


def _fed() -> tfdp_fl.DPFederatedModel:
    fed = toy.federated(clients_per_round=3)
    fed.fit(toy.clients(6), batch_size=10, verbose=0)
    return fed


def _training() -> Calls:
    """Calls that train, or are of what was trained."""
    fed, at = _fed(), {"delta": 1e-3}
    counts = {"paths": ("resume_from",), "counts": ("rounds", "local_epochs")}
    yield _usual(fed.fit, clients=toy.clients(6), batch_size=10, verbose=0, **counts)
    yield _usual(_fed().epsilon, **at)
    yield _usual(_fed().central_epsilon, **at)
    yield _usual(_fed().privacy_statement, **at)
    yield _usual(_fed().evaluate_clients, clients=toy.clients(2), verbose=0)
    target = {"target_epsilon": 2.0, "target_delta": 1e-3}
    fixed = {"mechanism": "fixed", "clip_norm": 1.0}
    yield _usual(tfdp_fl.make_private, model=toy.dense(), **target, **_ROUNDS, **fixed)


def _tff() -> Calls:
    import tensorflow_federated as tff

    a = tfdp_fl.aggregators
    size, budget = {"clients_per_round": 3}, {**_LOCAL, "rounds": 4}
    noise = {"noise_multiplier": 1.0, **size}
    query = {"query": tfp.GaussianSumQuery(1.0, 1.0), "dp_event": _GAUSSIAN}
    fixed = {"mechanism": tfdp_fl.FixedClipping(**_FIXED), **size}
    correlated = {"rounds": 4, "min_separation": 2, "clip_norm": 1.0}
    nbafl = {"constant": 3.0, "weight_clip": 1.0, "num_clients": 9, "rounds": 2}
    yield _usual(a.AdaptiveClippingFactory, **noise, count_noise_stddev=3.0)
    yield _usual(a.CorrelatedNoiseFactory, **noise, **correlated)
    yield _usual(a.LocalDPFactory, **budget, **size, clip_norm=1.0)
    yield _usual(a.QueryFactory, **query, **size)
    yield _usual(a.NbAFLFactory, epsilon=5.0, **size, **nbafl)
    yield _usual(a.MechanismFactory, **fixed)
    yield _usual(a.from_mechanism, **fixed)
    spec = tf.TensorSpec([None, 8], tf.float32), tf.TensorSpec([None], tf.int32)
    model = tff.learning.models.functional_model_from_keras(toy.dense, toy.loss(), spec)
    rate = tff.learning.optimizers.build_sgdm(0.1)
    own = {"model_fn": model, "client_optimizer_fn": rate}
    yield _usual(tfdp_fl.learning.build_dp_fed_avg, **fixed, **own)


_OF = (_mechanisms, _accounting, _datasets, _flower, _keras, _training, _tff)
# By what they are of; those of `training` take time.
ROOMS = {make.__name__[1:]: make for make in _OF}
if not importlib.util.find_spec("tensorflow_federated"):
    del ROOMS["tff"]


@functools.cache
def calls(room: str) -> list[Call]:
    """Returns the calls of a room; some write files into the current folder."""
    return list(ROOMS[room]())


_WRONG = (
    *(None, True, -1, 0, 3, 0.5, float("nan"), float("inf"), -0.5),
    *("", "x", b"x", [], {}, (2,), [0.5, float("nan")], object(), len),
    *(np.array([]), np.array([1.0, 2.0]), 1j),
)


@pytest.mark.parametrize("room", [room for room in ROOMS if room != "training"])
@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_is_refused(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in calls(room):
        call()
        for argument in call.arguments:
            for wrong in _WRONG:
                call(**{argument: wrong})
