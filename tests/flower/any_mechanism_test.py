"""The server's side of any central mechanism."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.mechanisms import rounds, statistics
from tests.outside.loading import smooth_clipping
from tfdp_fl import accounting, flower, mechanisms

_MECHANISMS = {
    "fixed": tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=0.0),
    "adaptive": tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=0.5),
    "median": tfdp_fl.MedianClipping(noise_multiplier=0.0),
    "of one's own": None,
}


@dataclasses.dataclass
class _Message:
    parameters: Any
    config: dict = dataclasses.field(default_factory=dict)
    num_examples: int = 1
    metrics: dict = dataclasses.field(default_factory=dict)


class _Strategy:
    def configure_fit(self, server_round, parameters, client_manager):
        return [(name, _Message(parameters)) for name in client_manager]

    def aggregate_fit(self, server_round, results, failures):
        self.handed = [message for _, message in results]
        return self.handed[0].parameters, {}


def _run_round(wrapper, number, received, changes):
    sent = wrapper.configure_fit(number, received, range(len(changes)))
    replies = []
    for (name, message), change in zip(sent, changes, strict=True):

        class Client:
            def fit(self, parameters, config, change=change):
                moved = zip(parameters, change, strict=True)
                return [p + c for p, c in moved], 7, {}

        arrays, count, metrics = flower.DPFedAvgNumPyClient(Client()).fit(
            message.parameters, message.config
        )
        replies.append((name, _Message(arrays, {}, count, metrics)))
    model, _ = wrapper.aggregate_fit(number, replies, [])
    return model


class AnyMechanismTest(parameterized.TestCase):
    @parameterized.parameters(*_MECHANISMS)
    def test_without_noise_is_the_mechanisms_query(self, name):
        mechanism = _MECHANISMS[name]
        if mechanism is None:
            mechanism = smooth_clipping()(noise_multiplier=0.0)
        wrapper = flower.DPFedAvg(_Strategy(), 4, mechanism)
        query = mechanism.bind(mechanisms.Deployment(clients_per_round=4))
        state = query.initial_global_state()
        changes = rounds.updates_with_norms([0.1, 0.4, 1.0, 1e6])
        model = [np.zeros(v.shape) for v in changes[0]]
        for number in range(1, 4):
            done = rounds.run_round(query, state, changes)
            state = done.next_state
            moved = _run_round(wrapper, number, model, changes)
            for old, new, mean in zip(model, moved, done.mean, strict=True):
                np.testing.assert_allclose(new - old, mean, atol=1e-5)
            model = moved
            if name != "median":
                np.testing.assert_allclose(
                    wrapper.clip_norm, float(state.clip_norm), rtol=1e-5
                )

    def test_noise_goes_by_the_mechanism(self):
        mechanism = tfdp_fl.AdaptiveClipping(
            noise_multiplier=1.0, initial_clip_norm=0.5, count_noise_stddev=1.0
        )
        wrapper = flower.DPFedAvg(_Strategy(), 4, mechanism)
        zeros = [np.zeros([200, 200])]
        moved = _run_round(wrapper, 1, zeros, [zeros] * 4)
        stddev = (1 - 1 / 4) ** -0.5 * 0.5 / 4
        statistics.assert_gaussian(np.ravel(moved[0]), stddev)

    def test_noise_is_what_was_configured_whatever_is_set_since(self):
        wrapper = flower.DPFedAvgFixed(_Strategy(), 2, 0.5, 4.0)
        zeros = [np.zeros([200, 200])]
        sent = wrapper.configure_fit(1, zeros, range(2))
        wrapper.noise_multiplier, wrapper.server_side_noising = 0.01, False
        replies = [(name, _Message(zeros)) for name, _ in sent]
        model, _ = wrapper.aggregate_fit(1, replies, [])
        statistics.assert_gaussian(np.ravel(model[0]), 4.0 * 0.5 / 2)

    def test_both_releases_of_a_private_median_are_charged(self):
        mechanism = tfdp_fl.MedianClipping(
            noise_multiplier=2.0, median_noise_multiplier=2.0
        )
        wrapper = flower.DPFedAvg(_Strategy(), 4, mechanism)
        zeros = [np.zeros([3])]
        _run_round(wrapper, 1, zeros, [zeros] * 4)
        (released,) = wrapper.released_rounds
        self.assertAlmostEqual(released.noise_multiplier, 2 / 2**0.5)
        self.assertAlmostEqual(
            wrapper.privacy_epsilon(100, 1e-5),
            accounting.epsilon(2**0.5, "fixed_size", 100, 4, 1, 1e-5),
        )

    def test_schedules_and_restarts(self):
        mechanism = tfdp_fl.FixedClipping(clip_norm=0.5, noise_multiplier=(1.0, 3.0))
        wrapper = flower.DPFedAvg(_Strategy(), 2, mechanism)
        zeros = [np.zeros([3])]
        _run_round(wrapper, 1, zeros, [zeros] * 2)
        state = json.loads(json.dumps(wrapper.state()))
        again = flower.DPFedAvg.from_state(state, _Strategy())
        _run_round(again, 2, zeros, [zeros] * 2)
        self.assertEqual(
            [each.noise_multiplier for each in again.released_rounds], [1, 3]
        )

    def test_a_client_moves_the_mean_by_s_over_m(self):
        wrapper = flower.DPFedAvg(_Strategy(), 2, _MECHANISMS["fixed"])
        zeros = [np.zeros([3])]
        for value in (1e-170, 1.0, 1e20, np.nan, np.inf):
            changes = [[np.full([3], value)], zeros]
            moved = _run_round(wrapper, 1, zeros, changes)
            self.assertLessEqual(np.linalg.norm(moved[0]), 0.5 / 2)

    @parameterized.parameters(
        (tfdp_fl.NoPrivacy(),),
        (tfdp_fl.LocalDP(clip_norm=1.0, noise_multiplier=1.0),),
        (
            tfdp_fl.FixedClipping(
                clip_norm=1.0, noise_multiplier=1.0, noise_site="client"
            ),
        ),
        (
            tfdp_fl.CorrelatedNoise(
                clip_norm=1.0, noise_multiplier=1.0, rounds=8, min_separation=2
            ),
        ),
    )
    def test_others_are_refused(self, mechanism):
        with self.assertRaisesRegex(ValueError, "mechanism must be a central"):
            flower.DPFedAvg(_Strategy(), 2, mechanism)


if __name__ == "__main__":
    absltest.main()
