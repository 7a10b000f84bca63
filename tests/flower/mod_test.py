"""The client's side of the message API."""

from __future__ import annotations

import unittest

import numpy as np
from absl.testing import absltest, parameterized

from tests.flower import flower_messages as fm
from tests.mechanisms import statistics
from tfdp_fl.flower import private_mod


def _message(record, message_type="train", **config):
    config = {"dpfedavg_clip_norm": 0.5, **config}
    config = {k: v for k, v in config.items() if v is not None}
    content = fm.RecordDict({"arrays": record, "config": fm.ConfigRecord(config)})
    return fm.Message(content, 7, message_type)


def _trained(train, record, **config):
    reply = private_mod(_message(record, **config), None, fm.app(train))
    return reply, fm.arrays(reply.content["arrays"])


class ModTest(parameterized.TestCase):
    @parameterized.parameters((0.3, 1), (0.5, 1), (0.500001, 0), (1e-170, 1), (1e18, 0))
    def test_it_clips_the_whole_update_and_says_if_it_was_within(self, norm, bit):
        update = [np.array([0.6, 0.0]) * norm, np.array(0.8) * norm]
        reply, got = _trained(
            fm.adds(update),
            fm.model(np.zeros(2), np.array(0.0)),
            dpfedavg_adaptive_clip_enabled=True,
        )
        scale = min(1, 0.5 / norm)
        for new, change in zip(got, update, strict=True):
            np.testing.assert_allclose(new, scale * change, rtol=1e-12)
        self.assertEqual(reply.content["metrics"]["dpfedavg_norm_bit"], bit)

    def test_float32_rounding_does_not_lead_out_of_s(self):
        w = np.ones(1000, np.float32)
        _, (got,) = _trained(
            fm.adds([np.full(1000, 1e-3)]),
            fm.model(w),
            dpfedavg_clip_norm=1e-6,
        )
        self.assertEqual(got.dtype, np.float32)
        self.assertLessEqual(np.linalg.norm(got.astype(np.float64) - w), 1e-6)

    @parameterized.parameters(np.nan, np.inf)
    def test_what_is_not_finite_becomes_zero(self, value):
        _, (got,) = _trained(fm.adds([np.array([value, 1.0])]), fm.model(np.ones(2)))
        np.testing.assert_array_equal(got, np.ones(2))

    def test_noise_on_request(self):
        zeros = np.zeros([200, 200])
        _, (got,) = _trained(
            fm.adds([zeros]), fm.model(zeros), dpfedavg_noise_stddev=0.25
        )
        statistics.assert_gaussian(np.ravel(got), 0.25)

    @parameterized.parameters("num-examples", "weight")
    def test_the_weight_is_one_and_the_true_number_stays(self, key):
        reply, _ = _trained(
            lambda arrays, config: (arrays, {key: 1234, "loss": 0.5}),
            fm.model(np.zeros(2)),
            dpfedavg_weight_key=None if key == "num-examples" else key,
        )
        self.assertEqual(dict(reply.content["metrics"]), {key: 1, "loss": 0.5})

    @parameterized.parameters("evaluate", "query", "evaluate.twice")
    def test_other_messages_pass(self, message_type):
        message = _message(fm.model(np.zeros(2)), message_type, dpfedavg_clip_norm=None)
        reply = private_mod(message, None, fm.app(fm.adds([np.full(2, 9.0)])))
        np.testing.assert_array_equal(
            fm.arrays(reply.content["arrays"])[0], np.full(2, 9.0)
        )

    def test_named_train_functions_are_clipped_too(self):
        message = _message(fm.model(np.zeros(2)), "train.again")
        reply = private_mod(message, None, fm.app(fm.adds([np.full(2, 9.0)])))
        np.testing.assert_allclose(
            np.linalg.norm(fm.arrays(reply.content["arrays"])[0]), 0.5
        )

    def test_an_error_is_handed_on(self):
        def fails(message, context):
            return fm.Message(fm.Error(3, "no data"), reply_to=message)

        reply = private_mod(_message(fm.model(np.zeros(2))), None, fails)
        self.assertTrue(reply.has_error())
        self.assertEqual(reply.error.reason, "no data")

    @unittest.skipUnless(fm.INSTALLED, fm.WHY_NOT)
    def test_what_was_received_is_not_changed(self):
        # An app may send back the very content it got, trained in place.
        def echo(message, context):
            content = message.content
            content["arrays"] = fm.model(np.full(2, 9.0))
            return fm.Message(content, reply_to=message)

        message = _message(fm.model(np.zeros(2)))
        reply = private_mod(message, None, echo)
        np.testing.assert_allclose(
            np.linalg.norm(fm.arrays(reply.content["arrays"])[0]), 0.5
        )
        self.assertEqual(dict(reply.content["metrics"]), {"num-examples": 1})

    @parameterized.parameters(
        ({"dpfedavg_clip_norm": None}, KeyError, "Is its strategy wrapped"),
        ({"dpfedavg_clip_norm": 0.0}, ValueError, "dpfedavg_clip_norm"),
        ({"dpfedavg_clip_norm": float("nan")}, ValueError, "clip_norm"),
        ({"dpfedavg_clip_norm": "big"}, TypeError, "dpfedavg_clip_norm"),
        ({"dpfedavg_noise_stddev": -1.0}, ValueError, "noise_stddev"),
        ({"dpfedavg_adaptive_clip_enabled": 1}, TypeError, "adaptive"),
    )
    def test_nothing_is_trained_on_a_bad_instruction(self, config, error, pattern):
        def never(message, context):
            raise AssertionError("It was trained.")

        with self.assertRaisesRegex(error, pattern):
            private_mod(_message(fm.model(np.zeros(2)), **config), None, never)

    @parameterized.named_parameters(
        ("names", {"arrays": {"x": np.zeros(2)}}, "those it received"),
        ("fewer", {"arrays": {}}, "those it received"),
        (
            "shapes",
            {"arrays": {"0": np.zeros(3)}},
            "the shapes of those it received",
        ),
        (
            "two_records",
            {"arrays": {"0": np.zeros(2)}, "data": {"x": np.zeros(9)}},
            "leaves in another is not clipped",
        ),
        ("none", {}, "must send one ArrayRecord"),
    )
    def test_other_arrays_do_not_leave(self, records, pattern):
        def sends(message, context):
            content = fm.RecordDict(
                {
                    key: fm.ArrayRecord({k: fm.Array(v) for k, v in arrays.items()})
                    for key, arrays in records.items()
                }
            )
            return fm.Message(content, reply_to=message)

        with self.assertRaisesRegex(ValueError, pattern):
            private_mod(_message(fm.model(np.zeros(2))), None, sends)


if __name__ == "__main__":
    absltest.main()
