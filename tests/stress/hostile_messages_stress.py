"""One hostile client among updates that arrive: TFF's factories, and Flower.

There the client's data is its own affair, and the server gets an update that
may be anything. Without noise (or with noise too small to see), a client that
sends an update and one that sends zeros leave models at most c / m apart, up to
the float32 roundings of `tests/keras/hostile.py`, here 1e-5 of it.
"""

from __future__ import annotations

import importlib.util
import unittest

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.flower import flower_messages as fm
from tests.outside.loading import smooth_clipping

_TFF = importlib.util.find_spec("tensorflow_federated")
_CLIP, _CLIENTS, _SIZE = 0.4, 4, 40
_TINY = 1e-6

# An update, as a function of an honest one; whether it counts as zero.
_ATTACKS = {
    "nan": (lambda u: np.full_like(u, np.nan), True),
    "one_nan": (lambda u: np.where(np.arange(len(u)) == 3, np.nan, u), True),
    "inf": (lambda u: np.full_like(u, np.inf), True),
    "minus_inf": (lambda u: np.full_like(u, -np.inf), True),
    "both_inf": (lambda u: np.where(u > 0, np.inf, -np.inf), True),
    "1e38": (lambda u: np.full_like(u, 1e38), None),
    "minus_1e38": (lambda u: np.full_like(u, -1e38), None),
    "1e19": (lambda u: np.full_like(u, 1e19), None),
    "denormal": (lambda u: np.full_like(u, 1e-42), False),
    "zero": (np.zeros_like, False),
    "a_million_times": (lambda u: u * np.float32(1e6), False),
    "cancelling": (
        lambda u: np.where(np.arange(len(u)) % 2, 1e7, -1e7).astype(np.float32),
        False,
    ),
    "opposite": (lambda u: -3 * u, False),
}


def _mechanisms(rounds=3):
    """Returns each mechanism nearly without noise, and its reach c."""
    return {
        "fixed": (
            tfdp_fl.FixedClipping(clip_norm=_CLIP, noise_multiplier=0.0),
            _CLIP,
        ),
        "fixed_client": (
            tfdp_fl.FixedClipping(
                clip_norm=_CLIP, noise_multiplier=_TINY, noise_site="client"
            ),
            _CLIP,
        ),
        "adaptive": (
            tfdp_fl.AdaptiveClipping(noise_multiplier=0.0, initial_clip_norm=_CLIP),
            _CLIP,
        ),
        # All others have norm 1.
        "median": (tfdp_fl.MedianClipping(noise_multiplier=0.0), 1.0),
        "correlated": (
            tfdp_fl.CorrelatedNoise(
                clip_norm=_CLIP,
                noise_multiplier=_TINY,
                strategy="blt:2",
                rounds=rounds,
                min_separation=1,
            ),
            _CLIP,
        ),
        "local": (
            tfdp_fl.LocalDP(clip_norm=_CLIP, noise_multiplier=_TINY),
            _CLIP,
        ),
        "adaptive_local": (
            tfdp_fl.AdaptiveLocalDP(epsilon=1e12, delta=1e-3, clipping_radius=_CLIP),
            2**0.5 * _CLIP,
        ),
        "somebodys_own": (
            smooth_clipping()(start_norm=_CLIP, noise_multiplier=0.0),
            _CLIP,
        ),
    }


def _updates():
    """Returns honest updates of norm 1, those of the others alike."""
    rng = np.random.default_rng(0)
    own, alike = rng.normal(size=(2, _SIZE)).astype(np.float32)
    own, alike = own / np.linalg.norm(own), alike / np.linalg.norm(alike)
    return [own] + [alike] * (_CLIENTS - 1)


def _bound(reach):
    noise = (2 * _SIZE) ** 0.5 * 10 * _TINY * _CLIP
    return reach / _CLIENTS * (1 + 2e-5) + 1e-6 + noise


class UpdatesTest(parameterized.TestCase):
    @unittest.skipIf(_TFF is None, "TensorFlow Federated is not installed.")
    @parameterized.parameters(*_mechanisms())
    def test_of_tff_factories(self, name):
        import tensorflow_federated as tff

        from tfdp_fl import aggregators

        mechanism, reach = _mechanisms()[name]
        options = {"rounds": 3} if name.endswith("local") else {}
        process = aggregators.from_mechanism(mechanism, _CLIENTS, **options).create(
            tff.to_type([(np.float32, [_SIZE // 2])] * 2)
        )
        state = process.initialize()

        def run(own):
            values = [np.split(u, 2) for u in [own, *_updates()[1:]]]
            output = process.next(state, values)
            return np.concatenate(output.result), output.measurements

        without, _ = run(np.zeros(_SIZE, np.float32))
        for attack, (change, discarded) in _ATTACKS.items():
            result, seen = run(np.asarray(change(_updates()[0]), np.float32))
            self.assertTrue(np.isfinite(result).all(), attack)
            moved = np.linalg.norm(result - without)
            self.assertLessEqual(moved, _bound(reach), attack)
            self.assertEqual(seen["cohort_size"], _CLIENTS)
            if discarded is not None:
                self.assertEqual(seen["discarded_clients"], discarded, attack)
        # Another shape or dtype is no value of a client of this process.
        for value in (
            np.zeros(_SIZE // 4, np.float32),
            np.zeros(_SIZE // 2, np.float64),
            "text",
        ):
            with self.assertRaises((TypeError, ValueError)):
                process.next(state, [[value, value]] * _CLIENTS)

    @unittest.skipIf(_TFF is None, "TensorFlow Federated is not installed.")
    def test_of_tff_weights(self):
        import tensorflow_federated as tff

        from tfdp_fl import aggregators

        process = aggregators.NbAFLFactory(
            epsilon=1e9,
            constant=1.0,
            weight_clip=_CLIP,
            clients_per_round=_CLIENTS,
            num_clients=_CLIENTS,
            rounds=3,
        ).create(tff.TensorType(np.float32, [_SIZE]), tff.TensorType(np.float32))
        state = process.initialize()

        def run(own):
            values = [own, *_updates()[1:]]
            return process.next(state, values, [5.0] * _CLIENTS).result

        without = run(_updates()[0])
        for attack, (change, _) in _ATTACKS.items():
            result = run(np.asarray(change(_updates()[0]), np.float32))
            self.assertTrue(np.isfinite(result).all(), attack)
            # Whichever way its weights turn, or if they are left out.
            self.assertLessEqual(
                np.linalg.norm(result - without), _bound(2 * _CLIP), attack
            )

    @parameterized.product(
        name=[
            "fixed",
            "fixed_client",
            "adaptive",
            "median",
            "somebodys_own",
        ],
        clips=[True, False],
    )
    def test_of_flower(self, name, clips):
        """With a client that clips, as it is told, and one that does not."""
        mechanism, reach = _mechanisms()[name]
        record = fm.model(np.zeros(_SIZE))

        def run(own):
            strategy = tfdp_fl.flower.PrivateStrategy(
                fm.Strategy(_CLIENTS),
                mechanism,
                num_clients=_CLIENTS,
                clients_per_round=_CLIENTS,
            )
            grid = fm.Grid(
                {i: fm.adds([u]) for i, u in enumerate([own, *_updates()[1:]])}
            )
            if not clips:

                def change(replies):
                    (hostile,) = [r for r in replies if r.metadata.src_node_id == 0]
                    hostile.content["arrays"]["0"] = fm.Array(np.asarray(own))
                    return replies

                grid.change = change
            got, _ = fm.a_round(strategy, grid, record)
            return None if got is None else fm.arrays(got)[0]

        without = run(np.zeros(_SIZE))
        if name == "fixed_client":
            # It keeps S + sigma (sqrt(D) + 9) of a client that should noise.
            reach += _TINY * _CLIP * (_SIZE**0.5 + 9)
        for attack, (change, _) in _ATTACKS.items():
            with np.errstate(all="ignore"):
                result = run(np.asarray(change(_updates()[0]), np.float64))
            self.assertTrue(np.isfinite(result).all(), attack)
            moved = np.linalg.norm(result - without)
            self.assertLessEqual(moved, _bound(reach), attack)


if __name__ == "__main__":
    absltest.main()
