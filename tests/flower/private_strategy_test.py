"""The server wrapper of the message API, without a network."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import subprocess
import sys
import textwrap
from unittest import mock

import dp_accounting
import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.mechanisms import statistics
from tests.outside.loading import smooth_clipping
from tfdp_fl import accounting, mechanisms
from tfdp_fl.flower import (
    PrivateStrategy,
    RoundNotConfiguredError,
    RoundsAbandonedError,
)


def _fixed(z=0.0, site="server"):
    return tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=z, noise_site=site)


def _adaptive(clip, **options):
    return tfdp_fl.AdaptiveClipping(
        **{"noise_multiplier": 0.0, "initial_clip_norm": clip, **options}
    )


_FIXED, _NOISY, _SHARES = _fixed(), _fixed(1.0), _fixed(1.0, "client")
_ZEROS = np.zeros([200, 200])


def _private(mechanism=_FIXED, m=3, n=None, strategy=None, **options):
    return PrivateStrategy(
        fm.Strategy(m) if strategy is None else strategy,
        mechanism,
        num_clients=m if n is None else n,
        clients_per_round=m,
        **options,
    )


def _grid(updates, change=None):
    return fm.Grid({10 + i: fm.adds([u], 10**i) for i, u in enumerate(updates)}, change)


def _moved(strategy, updates, change=None, silent=(), number=1):
    """Runs a round of clients from zeros; returns the new model, or None.

    `change` may do something to the reply of the client that replies first.
    """

    def changed(replies):
        result = change(replies[0])
        return replies if result is None else [*replies, result]

    grid = _grid(updates, change and changed)
    grid.trains.update(silent)
    start = fm.model(np.zeros(np.shape(updates[0])))
    got, _ = fm.a_round(strategy, grid, start, number)
    return None if got is None else fm.arrays(got)[0]


class RoundTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("server", _NOISY, 0.5),
        # All updates are zero: S is the smallest there is.
        ("median", tfdp_fl.MedianClipping(noise_multiplier=1e10), 1.0),
    )
    def test_the_noise_on_the_sum(self, mechanism, stddev):
        got = _moved(_private(mechanism, 4), [_ZEROS] * 4)
        statistics.assert_gaussian(np.ravel(got), stddev / 4)

    def test_the_noise_is_what_was_configured_whatever_is_set_since(self):
        strategy, grid = _private(_NOISY, 4), _grid([_ZEROS] * 4)
        told = strategy.configure_train(1, fm.model(_ZEROS), fm.ConfigRecord(), grid)
        strategy.clip_norm, strategy.clients_per_round = 1e-6, 1000
        with self.assertRaises(AttributeError):
            strategy.mechanism = _FIXED
        got, _ = strategy.aggregate_train(1, grid.send_and_receive(told))
        strategy.clients_per_round = 4
        statistics.assert_gaussian(np.ravel(fm.arrays(got)[0]), 0.5 / 4)

    def test_a_missing_client_pulls_the_clip_neither_way(self):
        strategy = _private(_adaptive(2.0), 4)
        _moved(strategy, [[1.0], [1.0], [3.0], [0.0]], silent={13: None})
        self.assertAlmostEqual(strategy.clip_norm, 2 * np.exp(-0.2 * 0.5 / 4))

    def test_the_strategys_own_messages_and_config_stay(self):
        made = []

        class Remembering(fm.Strategy):
            def configure_train(self, *arguments):
                made.extend(super().configure_train(*arguments))
                return made

        config = fm.ConfigRecord({"lr": 0.1})
        strategy = _private(strategy=Remembering(3))
        told = strategy.configure_train(
            1, fm.model(np.zeros(2)), config, _grid([np.zeros(2)] * 3)
        )
        self.assertEqual(dict(config), {"lr": 0.1, "server-round": 1})
        ours = {"dpfedavg_clip_norm": 0.5, "dpfedavg_weight_key": "num-examples"}
        for own, message in zip(made, told, strict=True):
            self.assertEqual(dict(own.content["config"]), dict(config))
            self.assertEqual(dict(message.content["config"]), {**config, **ours})

    def test_whole_numbers_and_float16_do_not_undo_the_clip(self):
        strategy = _private(m=2)
        grid = fm.Grid(
            {i: fm.adds([np.full(3, 100), np.full(3, 1e-3)]) for i in range(2)}
        )
        record = fm.model(np.zeros(3, np.int64), np.zeros(3, np.float16))
        got, _ = fm.a_round(strategy, grid, record)
        counts, weights = fm.arrays(got)
        self.assertEqual(counts.dtype, np.float64)
        self.assertEqual(weights.dtype.kind, "f")
        self.assertLessEqual(np.linalg.norm([counts, weights]), 0.5)

    def test_start_is_the_wrapped_strategys(self):
        strategy = _private()
        got = strategy.start(
            _grid([[1.0, 0.0]] * 3), fm.model(np.zeros(2)), num_rounds=4
        )
        np.testing.assert_allclose(fm.arrays(got)[0], [4 * 0.5, 0])
        self.assertLen(strategy.released_rounds, 4)
        self.assertEqual(strategy.sampled, 3)  # As all other attributes.

    def test_replies_to_an_evaluation_end_no_run(self):
        with self.assertLogs("tfdp_fl.flower", "WARNING"):
            self.assertIsNone(_private().aggregate_evaluate(1, []))


def _bytes_of(message):
    return message.content["arrays"]["0"].data


def _replace(message, **fields):
    array = message.content["arrays"]["0"]
    whole = {name: getattr(array, name) for name in ("dtype", "shape", "stype", "data")}
    message.content["arrays"]["0"] = fm.Array(**{**whole, **fields})


def _put(value):
    def change(message):
        message.content["arrays"]["0"] = fm.Array(np.asarray(value))

    return change


def _claims(**fields):
    """A reply with other metadata."""
    both = {**fields, **{f"_{name}": value for name, value in fields.items()}}
    return lambda message: message.metadata.__dict__.update(both)


class HostileReplyTest(parameterized.TestCase):
    """One client sends what no honest one does."""

    @parameterized.named_parameters(
        ("shape", _put(np.zeros(5))),
        ("scalar", _put(0.0)),
        ("complex", _put(np.zeros(4, np.complex128))),
        ("text", _put(np.array(["a"] * 4))),
        ("pickle", lambda m: _replace(m, data=b"\x80\x04K\x01.")),
        ("zip", lambda m: _replace(m, data=b"PK\x03\x04" + b"\0" * 99)),
        ("stype", lambda m: _replace(m, stype="pickle")),
        (
            "huge",
            lambda m: _replace(m, data=_bytes_of(m).replace(b"(4,)", b"(9999999999,)")),
        ),
        ("no_arrays", lambda m: m.content.__delitem__("arrays")),
        ("two_records", lambda m: m.content.__setitem__("more", fm.model(np.zeros(4)))),
        (
            "other_names",
            lambda m: m.content.__setitem__(
                "arrays", fm.ArrayRecord({"x": fm.Array(np.zeros(4))})
            ),
        ),
        (
            "more_arrays",
            lambda m: m.content.__setitem__(
                "arrays", fm.model(np.zeros(4), np.zeros(4))
            ),
        ),
        ("of_another_round", _claims(reply_to_message_id="old")),
        ("of_nobody_asked", _claims(src_node_id=99)),
    )
    def test_it_is_left_out_and_the_others_stay(self, change):
        strategy, hostile = _private(m=4), []

        def changed(message):
            hostile.append(message.metadata.src_node_id - 10)
            return change(message)

        with self.assertLogs("tfdp_fl.flower", "WARNING"):
            got = _moved(strategy, np.eye(4), changed)
        wanted = np.full(4, 0.125)
        wanted[hostile] = 0
        np.testing.assert_allclose(got, wanted)
        self.assertEqual(strategy.rejected_replies, 1)
        (released,) = strategy.released_rounds
        self.assertEqual(released.num_replies, 3)
        self.assertLen(strategy.strategy.handed[0], 1)

    @parameterized.parameters(np.nan, np.inf, -np.inf)
    def test_what_is_not_finite_is_zero(self, value):
        strategy = _private(m=2)
        got = _moved(strategy, [[1.0, 0]] * 2, _put(np.array([value, 1.0])))
        np.testing.assert_allclose(got, [0.25, 0])
        self.assertEqual(strategy.discarded_updates, 1)

    @parameterized.product(
        value=(1e-170, 1.0, 1e20, 1e300, np.nan, np.inf), by_server=(False, True)
    )
    def test_without_the_mod_it_moves_the_mean_by_s_over_m(self, value, by_server):
        mechanism = _FIXED
        if by_server:
            mechanism = smooth_clipping()(start_norm=0.5, noise_multiplier=0.0)
        got = _moved(_private(mechanism, 2), [[0.0, 0]] * 2, _put(np.full(2, value)))
        self.assertLessEqual(np.linalg.norm(got), 0.25 * (1 + 1e-12))

    @parameterized.parameters(0, -3, 1e300, np.nan)
    def test_the_weight_it_claims_is_not_looked_at(self, weight):
        def changed(message):
            self.assertEqual(message.content["metrics"]["num-examples"], 1)
            message.content["metrics"]["num-examples"] = weight

        got = _moved(_private(m=2), [[1.0, 0]] * 2, changed)
        np.testing.assert_allclose(got, [0.5, 0])

    def test_a_missing_or_strange_norm_bit_is_a_failure(self):
        def drop(message):
            del message.content["metrics"]["dpfedavg_norm_bit"]

        def strange(message):
            message.content["metrics"]["dpfedavg_norm_bit"] = [1.0]

        for change in (drop, strange):
            strategy = _private(_adaptive(0.5), 4)
            with self.assertLogs("tfdp_fl.flower", "WARNING"):
                _moved(strategy, np.eye(4), change)
            self.assertEqual(strategy.rejected_replies, 1)

    def test_one_client_moves_the_count_by_one(self):
        strategy = _private(_adaptive(1.0), 2)

        def changed(replies):
            for reply, bit in zip(replies, (1e9, 0), strict=True):
                reply.content["metrics"]["dpfedavg_norm_bit"] = bit
            return replies

        fm.a_round(strategy, _grid([[1.0]] * 2, changed), fm.model(np.zeros(1)))
        self.assertEqual(strategy.clip_norm, 1.0)


class FailureTest(parameterized.TestCase):
    _SILENT = {11: None, 12: OSError("no disk")}  # noqa: RUF012

    def test_who_fails_is_left_out_and_the_divisor_stays(self):
        strategy = _private(m=4)
        got = _moved(strategy, [[1.0, 0]] * 4, silent=self._SILENT)
        np.testing.assert_allclose(got, [0.25, 0])
        (released,) = strategy.released_rounds
        self.assertEqual(released.num_replies, 2)

    def test_the_noise_of_the_others_stays_the_planned_one(self):
        got = _moved(_private(_NOISY, 4), [_ZEROS] * 4, silent={11: None})
        statistics.assert_gaussian(np.ravel(got), 0.5 / 4)

    def test_shares_of_noise_need_everybody(self):
        strategy = _private(_SHARES, 4, max_abandoned_rounds=2)
        self.assertEqual(strategy.on_client_failure, "abort")
        self.assertIsNone(_moved(strategy, [[1.0, 0]] * 4, silent=self._SILENT))
        self.assertEqual(strategy.released_rounds, ())
        with self.assertRaisesRegex(RoundsAbandonedError, "2 rounds in a row"):
            _moved(strategy, [[1.0, 0]] * 4, silent=self._SILENT, number=2)
        with self.assertRaisesRegex(ValueError, "on_client_failure"):
            _private(_SHARES, on_client_failure="exclude")

    @parameterized.named_parameters(
        ("discarded", _put(np.full([200, 200], np.nan)), 0),
        ("shape", _put(np.zeros(5)), 1),
        ("no_arrays", lambda m: m.content.__delitem__("arrays"), 1),
    )
    def test_a_share_of_noise_that_is_lost_is_replaced(self, change, rejected):
        strategy = _private(_SHARES, 4)
        got = _moved(strategy, [_ZEROS] * 4, change)
        statistics.assert_gaussian(np.ravel(got), 0.5 / 4)
        self.assertEqual(strategy.rejected_replies, rejected)
        self.assertLen(strategy.strategy.handed[0], 1)

    def test_a_reply_of_somebody_else_is_no_share(self):
        strategy = _private(_SHARES, 4)
        self.assertIsNone(_moved(strategy, [_ZEROS] * 4, _claims(src_node_id=99)))
        self.assertEqual(strategy.released_rounds, ())

    def test_a_reply_of_no_use_pulls_the_clip_neither_way(self):
        mechanism = _adaptive(
            0.5, noise_multiplier=1e-9, count_noise_stddev=1e-8, noise_site="client"
        )
        strategy = _private(mechanism, 4)

        def without_bit(message):
            message.content["metrics"].pop("dpfedavg_norm_bit")

        _moved(strategy, [_ZEROS] * 4, without_bit)
        # 3 of 4 were within, and the fourth counts one half: b - gamma = 3/8.
        self.assertAlmostEqual(
            strategy.clip_norm, 0.5 * math.exp(-0.2 * 3 / 8), places=6
        )

    def test_replies_without_their_round_are_refused(self):
        strategy = _private(m=2)
        grid = _grid([[1.0]] * 2)
        told = strategy.configure_train(
            1, fm.model(np.zeros(1)), fm.ConfigRecord(), grid
        )
        replies = grid.send_and_receive(told)
        with self.assertRaises(RoundNotConfiguredError):
            strategy.aggregate_train(2, replies)
        strategy.aggregate_train(1, replies)
        with self.assertRaises(RoundNotConfiguredError):
            strategy.aggregate_train(1, replies)
        self.assertLen(strategy.released_rounds, 1)

    def test_a_round_without_clients_is_none(self):
        strategy = _private(m=2)
        with mock.patch.object(strategy.strategy, "configure_train", lambda *_: []):
            got = fm.a_round(strategy, _grid([]), fm.model(np.zeros(1)))
        self.assertEqual(got, (None, None))


class AccountingTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("all", _NOISY, 20, 5, 1.0),
        ("more_are_connected", _NOISY, 30, 5, 1.0),
        (  # Both of its releases.
            "private_median",
            tfdp_fl.MedianClipping(noise_multiplier=2.0, median_noise_multiplier=2.0),
            20,
            1,
            2**0.5,
        ),
    )
    def test_a_round_costs_as_m_of_the_declared_n(
        self, mechanism, connected, rounds, z
    ):
        strategy = _private(mechanism, 4, 20)
        for number in range(1, 1 + rounds):
            _moved(strategy, [[1.0]] * connected, number=number)
        self.assertAlmostEqual(
            strategy.privacy_epsilon(delta=1e-5),
            accounting.epsilon(z, "fixed_size", 20, 4, rounds, 1e-5),
        )


class ReportTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("median", tfdp_fl.MedianClipping(noise_multiplier=1.0)),
        (
            "correlated",
            tfdp_fl.CorrelatedNoise(
                clip_norm=1.0, noise_multiplier=1.0, rounds=3, min_separation=2
            ),
        ),
    )
    def test_it_has_the_mechanisms_caveats_in_the_statements_words(self, mechanism):
        strategy = _private(mechanism, 3, 6)
        _moved(strategy, [[1.0, 0]] * 6)
        said = strategy.privacy_report(1e-5)["caveats"]
        self.assertNotEmpty(mechanism.caveats())
        for key in mechanism.caveats():
            self.assertEqual(said.count(accounting.CAVEATS[key]), 1, key)

    def test_a_private_median_needs_no_caveat(self):
        mechanism = tfdp_fl.MedianClipping(
            noise_multiplier=1.0, median_noise_multiplier=1.0
        )
        said = _private(mechanism, 3, 6).privacy_report(1e-5)["caveats"]
        self.assertNotIn(accounting.CAVEATS["exact_median"], said)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Elsewhere(mechanisms.Mechanism):
    """As TF-Privacy's queries: what it does stands elsewhere."""

    scales_updates = False

    def bind(self, deployment):
        raise NotImplementedError

    def describe(self):
        return "elsewhere"

    def round_event(self, round_index, deployment):
        return dp_accounting.GaussianDpEvent(1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Laplace(tfdp_fl.FixedClipping):
    """Its cost is no Gaussian's, though its event has a noise multiplier."""

    def round_event(self, round_index, deployment):
        return dp_accounting.LaplaceDpEvent(1.0)


class ArgumentTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_clients": 0}, "num_clients"),
        ({"clients_per_round": 0}, "clients_per_round"),
        ({"clients_per_round": 1.5}, "clients_per_round"),
        ({"clients_per_round": 11}, "at most num_clients=10"),
        ({"rounds": 0}, "rounds"),
        ({"max_abandoned_rounds": 0}, "max_abandoned_rounds"),
        ({"target_epsilon": 1.0}, "target_delta"),
        ({"accountant": "guess"}, "accountant"),
        ({"mechanism": "fixed"}, "mechanism"),
        ({"mechanism": tfdp_fl.NoPrivacy()}, "mechanism must be a central"),
        (
            {"mechanism": _Laplace(clip_norm=1.0, noise_multiplier=1.0)},
            "costs a Gaussian",
        ),
        # With no noise of ours, and the cost that it states.
        ({"mechanism": _Elsewhere()}, "mechanism must be a central"),
        (
            {
                "mechanism": tfdp_fl.MedianClipping(
                    noise_multiplier=1.0, noise_site="client"
                ),
                "clients_per_round": 3,
            },
            "mechanism must be a central",
        ),
        # Clients are private by themselves: no server of ours has a part in it.
        (
            {"mechanism": tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0)},
            "mechanism must be a central",
        ),
        ({"client_of": str}, "client_of"),
        (
            {
                "mechanism": tfdp_fl.CorrelatedNoise(
                    clip_norm=1.0, noise_multiplier=1.0, rounds=8, min_separation=6
                )
            },
            "min_separation",
        ),
        # m / 20 on the count is too little.
        ({"mechanism": _adaptive(0.1, noise_multiplier=1.0)}, "noise_multiplier"),
        ({"strategy": object()}, "configure_train"),
    )
    def test_bad_arguments_are_named(self, changes, pattern):
        arguments = {
            "strategy": fm.Strategy(2),
            "mechanism": _NOISY,
            "num_clients": 10,
            "clients_per_round": 2,
        }
        with self.assertRaisesRegex((ValueError, TypeError), pattern):
            PrivateStrategy(**{**arguments, **changes})

    def test_one_model_for_all(self):
        class Two(fm.Strategy):
            def configure_train(self, server_round, arrays, config, grid):
                models = [fm.model(np.full(2, float(n))) for n in grid.get_node_ids()]
                return [
                    fm.Message(
                        fm.RecordDict({"arrays": model, "config": config}), 10, "train"
                    )
                    for model in models
                ]

        with self.assertRaisesRegex(ValueError, "one model only"):
            _moved(_private(strategy=Two(3)), [np.zeros(2)] * 3)
        with self.assertRaisesRegex(ValueError, "real numbers"):
            fm.a_round(_private(), _grid([np.zeros(2)] * 3), fm.model(np.array(["a"])))


_LIGHT = """
    import sys
    sys.modules["flwr"] = None  # Flower 1.12 itself imports TensorFlow.
    import numpy as np
    import tfdp_fl
    sys.path.insert(0, "tests/flower")
    import flower_messages as fm
    from tfdp_fl import flower
    for mechanism in (
        tfdp_fl.FixedClipping(clip_norm=1.0, noise_multiplier=1.0),
        tfdp_fl.FixedClipping(
            clip_norm=1.0, noise_multiplier=(1.0, 1.0), noise_site="client"
        ),
        tfdp_fl.AdaptiveClipping(noise_multiplier=1.0, count_noise_stddev=5.0),
    ):
        strategy = flower.PrivateStrategy(
            fm.Strategy(3), mechanism, num_clients=5, clients_per_round=3,
            rounds=2, target_epsilon=1e3, target_delta=1e-5,
        )
        grid = fm.Grid({i: fm.adds([np.ones(3)]) for i in range(5)})
        strategy.start(grid, fm.model(np.zeros(3)), num_rounds=2)
        assert len(strategy.released_rounds) == 2, mechanism
        strategy.privacy_report(1e-5)
    heavy = {"tensorflow", "keras", "tf_keras", "tensorflow_federated"}
    print(sorted(heavy & set(sys.modules)))
"""


class LightTest(absltest.TestCase):
    def test_a_server_whose_clients_clip_imports_no_tensorflow(self):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(_LIGHT)],
            capture_output=True,
            text=True,
            cwd=pathlib.Path(__file__).resolve().parents[2],
        )
        self.assertEqual(done.stdout.strip(), "[]", done.stderr)
