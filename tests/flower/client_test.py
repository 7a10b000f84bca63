"""The client's side: what leaves the client is clipped and noised."""

import pathlib
import re
import subprocess
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.flower import flower_messages as fm
from tests.mechanisms import statistics
from tfdp_fl.flower import DPFedAvgNumPyClient, private_mod, updates
from tfdp_fl.flower import client as client_lib

_SHAPES = ((3, 2), (), (4,))
_BIT = {"dpfedavg_adaptive_clip_enabled": True}


def _random(seed: int, norm: float | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(rng.normal(size=s)) for s in _SHAPES]
    length = np.sqrt(sum(np.sum(a**2) for a in arrays))
    return [a * (1.0 if norm is None else norm / length) for a in arrays]


class _Client:
    """A client whose training adds a given update, in place or not."""

    def __init__(self, update, in_place=False):
        self.update, self.in_place, self.calls = update, in_place, 0
        self.metrics = {"loss": 0.5}

    def fit(self, parameters, config):
        self.calls += 1
        old = parameters if self.in_place else [np.array(a) for a in parameters]
        for array, change in zip(old, self.update, strict=True):
            array[...] += change
        return old, 7, self.metrics

    def evaluate(self, parameters, config):
        return 0.25, 3, {"accuracy": 1.0}


def _fit(update, received, clip_norm=1.0, noise=0.0, **config):
    """What a wrapped client returns."""
    config |= {"dpfedavg_clip_norm": clip_norm, "dpfedavg_noise_stddev": noise}
    client = update if isinstance(update, _Client) else _Client(update)
    return DPFedAvgNumPyClient(client).fit([np.array(a) for a in received], config)


def _applied(clip_norm) -> dict[str, float]:
    """What a client says that it did."""
    applied = {"clip_norm": clip_norm, "noise_stddev": 0.0}
    return {f"dpfedavg_applied_{name}": value for name, value in applied.items()}


@pytest.mark.parametrize("norm", [0.0, 0.3, 0.999, 1.001, 1e6, 1e18])
@pytest.mark.parametrize("how", ["wrapped", "wrapped, in place", "mod"])
def test_the_whole_update_is_clipped_to_one_norm(norm, how):
    update, received = _random(1, norm), _random(0)
    client = _Client(update, "in place" in how)
    if how == "mod":
        told = {"dpfedavg_clip_norm": 1.0, **_BIT}
        reply, returned = _trained(fm.adds(update), fm.model(*received), **told)
        metrics = {"loss": 0.5, **reply.content["metrics"]}
        num_examples = metrics.pop("num-examples")
    else:
        returned, num_examples, metrics = _fit(client, received, **_BIT)
    factor = min(1.0, 1.0 / norm) if norm else 1.0
    for got, old, change in zip(returned, received, update, strict=True):
        np.testing.assert_allclose(got, old + change * factor, rtol=1e-8)
    assert (num_examples, type(num_examples)) == (1, int)
    assert metrics == {"loss": 0.5, "dpfedavg_norm_bit": norm <= 1, **_applied(1.0)}
    assert client.metrics == {"loss": 0.5}


def test_a_norm_is_found_where_numpy_is_told_to_raise():
    with np.errstate(all="raise"):
        assert updates.norm([np.array([1e-200, 1.0]), np.array([1e-310])]) == 1.0
        assert updates.norm([np.array([1e200])]) == np.inf


def test_an_update_that_is_not_finite_becomes_zero_and_a_tiny_clip_holds():
    for bad in (np.nan, np.inf, -np.inf, 1e300):
        update, received = _random(1, 2.0), _random(0)
        update[2][1] = bad
        client = DPFedAvgNumPyClient(_Client(update))
        config = {"dpfedavg_clip_norm": 1.0, **_BIT}
        returned, _, metrics = client.fit([a.copy() for a in received], config)
        for got, old in zip(returned, received, strict=True):
            np.testing.assert_array_equal(got, old)
        assert client.discarded_updates == 1
        assert metrics["dpfedavg_norm_bit"] is True
    for clip_norm in (1e-150, 1e-160, 1e-200, 1e-300):  # Their squares vanish.
        sent = _sent(np.zeros(4), np.full(4, 1e3 * clip_norm), clip_norm, 0.0)
        np.testing.assert_allclose(sent, np.full(4, clip_norm / 2))


def test_the_noise_has_the_stddev_sent_and_is_new_in_each_call_and_array():
    update, received, draws = [np.full(200_000, 1.0)], [np.zeros(200_000)], []
    clean = _fit(update, received, 0.5)[0][0]
    assert np.linalg.norm(clean) == pytest.approx(0.5)
    for _ in range(2):
        np.random.seed(0)  # Nobody's seed may reach the noise.
        draws.append(_fit(update, received, 0.5, 0.3)[0][0] - clean)
    statistics.assert_gaussian(draws[0], 0.3)
    statistics.assert_uncorrelated(*draws)
    arrays, *_ = _fit([0.0, 0.0], [np.zeros(10_000)] * 2, noise=1.0)
    statistics.assert_uncorrelated(*arrays)


def _message(record, message_type="train", **config):
    config = {"dpfedavg_clip_norm": 0.5, **config}
    config = {k: v for k, v in config.items() if v is not None}
    content = fm.RecordDict({"arrays": record, "config": fm.ConfigRecord(config)})
    return fm.Message(content, 7, message_type)


_TWO = fm.model(np.zeros(2))


def _trained(train, record=_TWO, message_type="train", **config):
    message = _message(record, message_type, **config)
    reply = private_mod(message, None, fm.app(train))
    return reply, fm.arrays(reply.content["arrays"])


def test_bad_values_are_named_before_training():
    client = _Client(_random(1, 1.0))

    def never(message, context):
        raise AssertionError("It was trained.")

    for name, value, error, pattern in (
        ("clip_norm", None, KeyError, r"dpfedavg_clip_norm.*strategy wrapped"),
        ("clip_norm", 0.0, ValueError, "dpfedavg_clip_norm"),
        ("clip_norm", float("nan"), ValueError, "dpfedavg_clip_norm"),
        ("noise_stddev", -1.0, ValueError, "dpfedavg_noise_stddev"),
        ("adaptive_clip_enabled", 1, TypeError, "dpfedavg_adaptive_clip"),
    ):
        config = {"dpfedavg_clip_norm": 1.0, f"dpfedavg_{name}": value}
        told = {k: v for k, v in config.items() if v is not None}
        with pytest.raises(error, match=pattern):
            DPFedAvgNumPyClient(client).fit(_random(0), told)
        assert client.calls == 0
        with pytest.raises(error, match=pattern):
            private_mod(_message(fm.model(np.zeros(2)), **config), None, never)


def test_all_that_trains_is_clipped_and_all_else_stays():
    nine = 9 * 2**0.5
    for message_type, norm in (
        ("train.again", 0.5),
        ("evaluate", nine),
        ("query", nine),
    ):
        _, (got,) = _trained(fm.adds([np.full(2, 9.0)]), message_type=message_type)
        assert np.linalg.norm(got) == pytest.approx(norm)
    # The weight is one and the other metrics are the client's.
    for key in ("num-examples", "weight"):
        reply, _ = _trained(
            lambda arrays, config, key=key: (arrays, {key: 1234, "loss": 0.5}),
            dpfedavg_weight_key=None if key == "num-examples" else key,
        )
        expected = {key: 1, "loss": 0.5, **_applied(0.5)}
        assert dict(reply.content["metrics"]) == expected

    def fails(message, context):
        return fm.Message(fm.Error(3, "no data"), reply_to=message)

    reply = private_mod(_message(_TWO), None, fails)
    assert reply.has_error()
    assert reply.error.reason == "no data"

    # Of an error only the kind leaves: Flower tells the server what it says.
    def quotes(*what):
        raise ValueError("a label of 42")

    train = DPFedAvgNumPyClient(mock.Mock(fit=quotes)).fit
    for call, *given in (
        (train, [], {"dpfedavg_clip_norm": 1.0}),
        (private_mod, _message(_TWO), None, quotes),
    ):
        with pytest.raises(
            RuntimeError, match="raised ValueError; its message stays"
        ) as error:
            call(*given)
        assert "42" not in str(error.value)
    inner = _Client(_random(1, 1.0))
    client = DPFedAvgNumPyClient(inner)
    assert client.evaluate([], {}) == (0.25, 3, {"accuracy": 1.0})
    assert inner.calls == 0
    assert not hasattr(client, "nothing")


def test_a_client_that_sets_its_noise_itself_adds_it_whatever_it_is_told():
    page = (pathlib.Path(__file__).parents[2] / "docs/flower.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n([^`]*def own_noise[^`]*)```", page)
    shown: dict[str, Any] = {}
    exec(block, shown)
    own_noise, mod = shown["mods"]
    told = {"dpfedavg_clip_norm": 1e9, "dpfedavg_noise_stddev": 0.0, **_BIT}
    message = _message(fm.model(np.zeros(40_000)), **told)
    train = fm.app(fm.adds([np.full(40_000, 1e6)]))
    reply = own_noise(message, None, lambda m, c: mod(m, c, train))
    statistics.assert_gaussian(fm.arrays(reply.content["arrays"])[0], 20.0)
    assert "dpfedavg_norm_bit" not in reply.content["metrics"]


@fm.NEEDS_FLOWER
def test_what_was_received_is_not_changed():
    # An app may send back the very content it got, trained in place.
    def echo(message, context):
        content = message.content
        content["arrays"] = fm.model(np.full(2, 9.0))
        return fm.Message(content, reply_to=message)

    reply = private_mod(_message(_TWO), None, echo)
    (sent,) = fm.arrays(reply.content["arrays"])
    assert np.linalg.norm(sent) == pytest.approx(0.5)
    expected = {"num-examples": 1, **_applied(0.5)}
    assert dict(reply.content["metrics"]) == expected


def test_other_arrays_do_not_leave():
    shapes, zeros = "the shapes of those it received", {"0": np.zeros(2)}
    beside = {"arrays": zeros, "data": {"x": np.zeros(9)}}
    for records, pattern in (
        ({"arrays": {"x": np.zeros(2)}}, "those it received"),
        ({"arrays": {}}, "those it received"),
        ({"arrays": {"0": np.zeros(3)}}, shapes),
        (beside, "any other would not be clipped"),
        ({}, "must send one ArrayRecord"),
    ):
        content = {
            key: fm.ArrayRecord({k: fm.Array(v) for k, v in arrays.items()})
            for key, arrays in records.items()
        }

        def sends(message, context, content=content):
            return fm.Message(fm.RecordDict(content), reply_to=message)

        with pytest.raises(ValueError, match=pattern):
            private_mod(_message(_TWO), None, sends)
    client = _Client(_random(1, 1.0))
    client.fit = lambda parameters, config: ([np.zeros(2)], 1, {})
    with pytest.raises(ValueError, match="shapes"):
        _fit(client, _random(0))


def _sent(received, update, clip_norm, stddev):
    """Returns what a client sends whose training added `update`."""
    asked = client_lib.Instruction(clip_norm, stddev, False)
    returned = [np.asarray(received, np.float64) + update]
    (array,), *_ = client_lib.make_upload([received], returned, asked)
    return array


def test_what_is_sent_is_within_the_clip_norm_after_rounding():
    for dtype in (np.float16, np.float32):
        # The worst case, 0.501, is twice as long if it is rounded to nearest.
        for in_spacings in (0.501, 0.75, 20.3, 1e3):
            received = np.full(10_000, 8.0, dtype)
            each = in_spacings * float(np.spacing(dtype(8.0)))
            sent = _sent(received, 1.5 * each, 100 * each, 0.0)
            assert sent.dtype == dtype
            moved = sent.astype(np.float64) - received.astype(np.float64)
            assert np.linalg.norm(moved) <= 100 * each * (1 + 1e-12)


def test_shares_that_are_rounded_add_up_to_what_is_charged():
    # The gaps are 9.8e-4, 7.8e-3 and 1.2e-7: a share would be rounded away.
    for dtype, weight, clip_norm in (
        (np.float16, 1.0, 6.5e-4),
        (np.float32, 1e5, 5.2e-3),
        (np.float32, 1.0, 8e-8),
        (np.float64, 1.0, 6.5e-4),
        (np.int64, 7, 6.5e-4),
    ):
        # 20 000 sums: 5 % are ten standard deviations of the estimate.
        received, clients = np.full(20_000, weight, dtype), 100
        total = np.zeros(len(received))
        for _ in range(clients):
            sent = _sent(received, 0.0, clip_norm, clip_norm / clients**0.5)
            total += np.asarray(sent, np.float64) - weight
        assert total.std() / clip_norm == pytest.approx(1.0, abs=0.05)
        assert total.mean() / clip_norm == pytest.approx(0.0, abs=0.07)


def test_the_dtype_goes_by_the_model_and_the_noise_alone():
    for dtype, weight, stddev, expected in (
        (np.float32, 1e5, 0.1, np.float64),
        (np.float32, 1e5, 0.2, np.float32),
        (np.float16, 1.0, 0.1, np.float16),
        (np.float16, 1.0, 0.01, np.float64),
        (np.float16, 1e-3, 2.0, np.float16),
        (np.float16, 1.0, 1e4, np.float64),
        (np.float64, 1e5, 0.1, np.float64),
    ):
        received = np.full(3, weight, dtype)
        for update in (0.0, 1e-9, 1e3, np.nan):
            assert _sent(received, update, 1e-3, stddev).dtype == expected
    with pytest.raises(ValueError, match=r"dpfedavg_noise_stddev.*1e-07"):
        _sent(np.full(3, 1e9), 0.0, 1e-6, 1e-7)  # No dtype has it.


_LIGHT = """
import sys
sys.modules["flwr"] = None  # Flower 1.12 itself imports TensorFlow.
import numpy as np
from tfdp_fl.flower import DPFedAvgNumPyClient
class Client:
    def fit(self, parameters, config):
        return [array + 1 for array in parameters], 7, {}
config = {"dpfedavg_clip_norm": 1.0, "dpfedavg_noise_stddev": 0.5}
weights, _, _ = DPFedAvgNumPyClient(Client()).fit([np.zeros(3)], config)
assert weights[0].any()
print(sorted({"tensorflow", "keras", "tf_keras"} & set(sys.modules)))
"""


def test_a_client_imports_no_tensorflow():
    said = {"cwd": pathlib.Path(__file__).parents[2], "capture_output": True}
    done = subprocess.run([sys.executable, "-c", _LIGHT], **said, text=True)
    assert done.stdout.strip() == "[]", done.stderr
