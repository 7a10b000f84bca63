import collections
import itertools

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff
from absl.testing import absltest, parameterized

from tfdp_fl import aggregators, learning, mechanisms
from tfdp_fl.aggregators import round_plan

SCALAR = tff.TensorType(np.float32)
VECTOR = tff.TensorType(np.float32, [3])
NESTED = tff.types.to_type(
    collections.OrderedDict(
        z=(np.float32, [2]), a=[np.float32, collections.OrderedDict(c=SCALAR)]
    )
)


def nested(first, second=0.0, third=0.0, fourth=0.0):
    f = np.float32
    return collections.OrderedDict(
        z=np.array([first, second], f),
        a=[f(third), collections.OrderedDict(c=f(fourth))],
    )


def factories():
    common = {"clients_per_round": 4}
    return (
        ("no_privacy", aggregators.NoPrivacyFactory(**common)),
        (
            "fixed_clipping",
            aggregators.FixedClippingFactory(
                clip_norm=1.0, noise_multiplier=1.0, **common
            ),
        ),
        (
            "fixed_clipping_client",
            aggregators.FixedClippingFactory(
                clip_norm=1.0,
                noise_multiplier=1.0,
                noise_site="client",
                **common,
            ),
        ),
        (
            "adaptive_clipping",
            aggregators.AdaptiveClippingFactory(noise_multiplier=0.1, **common),
        ),
        (
            "median_clipping",
            aggregators.MedianClippingFactory(
                noise_multiplier=1.0, median_noise_multiplier=1.0, **common
            ),
        ),
        (
            "local_dp",
            aggregators.LocalDPFactory(
                clip_norm=1.0, epsilon=5.0, delta=1e-5, rounds=10, **common
            ),
        ),
        (
            "adaptive_local_dp",
            aggregators.AdaptiveLocalDPFactory(
                epsilon=5.0, delta=1e-5, rounds=10, **common
            ),
        ),
    )


class TypesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (f"{name}_{kind}", factory, value_type)
        for (name, factory), (kind, value_type) in itertools.product(
            factories()[2:5], (("vector", VECTOR), ("nested", NESTED))
        )
    )
    def test_signatures(self, factory, value_type):
        process = factory.create(value_type)

        self.assertIsInstance(factory, tff.aggregators.UnweightedAggregationFactory)
        self.assertIsInstance(process, tff.templates.AggregationProcess)
        query_state = collections.OrderedDict(
            clip_norm=SCALAR,
            noise_multiplier=SCALAR,
            clients_per_round=SCALAR,
            memory=tff.StructType([]),
        )
        history = collections.OrderedDict(
            kinds=tff.TensorType(np.int64, [None]),
            costs=tff.TensorType(np.float64, [None]),
            cohort_sizes=tff.TensorType(np.float64, [None]),
            populations=tff.TensorType(np.int64, [None]),
            answered=tff.TensorType(np.float64, [None]),
        )
        state_type = tff.FederatedType(
            tff.StructType(
                [
                    ("query_state", tff.types.to_type(query_state)),
                    ("rounds", tff.TensorType(np.int32)),
                    ("sum_state", tff.StructType([])),
                    ("history", tff.types.to_type(history)),
                ]
            ),
            tff.SERVER,
        )
        measurements = tff.FederatedType(
            tff.types.to_type(
                collections.OrderedDict(
                    clip_norm=np.float32,
                    noise_stddev=np.float32,
                    clipped_fraction=np.float32,
                    mean_update_norm=np.float32,
                    discarded_clients=np.int32,
                    cohort_size=np.int32,
                )
            ),
            tff.SERVER,
        )
        self.assertTrue(
            process.initialize.type_signature.is_equivalent_to(
                tff.FunctionType(None, state_type)
            )
        )
        expected = tff.FunctionType(
            tff.StructType(
                [
                    ("state", state_type),
                    ("value", tff.FederatedType(value_type, tff.CLIENTS)),
                ]
            ),
            tff.StructType(
                [
                    ("state", state_type),
                    ("result", tff.FederatedType(value_type, tff.SERVER)),
                    ("measurements", measurements),
                ]
            ),
        )
        self.assertTrue(
            process.next.type_signature.is_equivalent_to(expected),
            process.next.type_signature,
        )
        # Containers too: tff.learning insists on it.
        result = process.next.type_signature.result.result.member
        self.assertEqual(result, value_type)

    @parameterized.named_parameters(
        ("integer", tff.TensorType(np.int32), "float"),
        (
            "integer_inside",
            tff.types.to_type(collections.OrderedDict(w=VECTOR, n=np.int32)),
            r"value\['n'\]",
        ),
        ("bool", tff.types.to_type([np.bool_]), "float"),
        ("empty", tff.types.to_type([]), "at least one"),
        ("sequence", tff.SequenceType(np.float32), "TensorType"),
        (
            "nested_sequence",
            tff.types.to_type([tff.SequenceType(np.float32)]),
            "tensors",
        ),
    )
    def test_refuses_other_values(self, value_type, message):
        factory = aggregators.NoPrivacyFactory(clients_per_round=1)
        with self.assertRaisesRegex(TypeError, message):
            factory.create(value_type)

    def test_values_keep_their_structure(self):
        factory = aggregators.FixedClippingFactory(
            clip_norm=100.0, noise_multiplier=0.0, clients_per_round=2
        )
        named = tff.StructType([("b", SCALAR), ("a", np.float64)])
        cases = (
            (SCALAR, [np.float32(1), np.float32(2)], np.float32(1.5)),
            (NESTED, [nested(1, 2, 3, 4)] * 2, nested(1, 2, 3, 4)),
            (
                named,
                [
                    tff.structure.Struct([("b", 1.0), ("a", 2.0)]),
                    tff.structure.Struct([("b", 3.0), ("a", 6.0)]),
                ],
                # What TFF makes of a struct without a Python container.
                collections.OrderedDict(b=2.0, a=4.0),
            ),
        )
        for value_type, values, expected in cases:
            process = factory.create(value_type)
            result = process.next(process.initialize(), values).result
            tf.nest.map_structure(np.testing.assert_allclose, result, expected)
            output_type = process.next.type_signature.result.result.member
            self.assertEqual(output_type, value_type)


class BehaviourTest(parameterized.TestCase):
    def test_equals_tff_gaussian_fixed_without_noise(self):
        rng = np.random.default_rng(0)
        values = [nested(*(rng.normal(size=4) * scale)) for scale in (0.1, 0.5, 2, 9)]
        ours = aggregators.from_mechanism(
            mechanisms.FixedClipping(clip_norm=0.7, noise_multiplier=0.0), 4
        ).create(NESTED)
        theirs = tff.aggregators.DifferentiallyPrivateFactory.gaussian_fixed(
            0.0, 4.0, 0.7
        ).create(NESTED)
        output = ours.next(ours.initialize(), values)
        expected = theirs.next(theirs.initialize(), values).result
        tf.nest.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
            output.result,
            expected,
        )
        self.assertEqual(output.measurements["cohort_size"], 4)
        self.assertAlmostEqual(output.measurements["clip_norm"], 0.7, places=6)

    def test_half_precision_is_refused(self):
        import ml_dtypes

        factory = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=0.0, clients_per_round=1
        )
        for dtype in (np.float16, ml_dtypes.bfloat16):
            with self.assertRaisesRegex(TypeError, "float16 or bfloat16"):
                factory.create(tff.TensorType(dtype, [3]))

    def test_the_clip_holds_whatever_the_size(self):
        clip, size = 0.01, 1_000_000
        process = aggregators.FixedClippingFactory(
            clip_norm=clip, noise_multiplier=0.0, clients_per_round=1
        ).create(tff.TensorType(np.float32, [size]))
        state = process.initialize()
        cancelling = np.resize(np.float32([1e15, -1e15, 3.0]), size)
        for value in (
            np.ones(size, np.float32),
            np.full(size, 1e-30, np.float32),
            np.full(size, 1e15, np.float32),
            cancelling,
        ):
            output = process.next(state, [value])
            norm = np.linalg.norm(output.result.astype(np.float64))
            self.assertLessEqual(norm, clip * (1 + 1e-5))

    def test_nan_and_inf_are_zeroed_before_clipping(self):
        process = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=0.0, clients_per_round=4
        ).create(NESTED)
        values = [nested(0.5), nested(np.nan), nested(0.0, np.inf), nested(3.0)]
        output = process.next(process.initialize(), values)
        np.testing.assert_allclose(output.result["z"], [(0.5 + 1) / 4, 0])
        measured = output.measurements
        self.assertEqual(measured["discarded_clients"], 2)
        self.assertEqual(measured["cohort_size"], 4)
        self.assertAlmostEqual(measured["clipped_fraction"], 0.25)
        self.assertAlmostEqual(measured["mean_update_norm"], 3.5 / 4)

    def test_fewer_clients_lower_the_sum_only(self):
        process = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=0.0, clients_per_round=4
        ).create(SCALAR)
        state = process.initialize()
        for values in ([1.0], [], [1.0] * 6):
            output = process.next(state, values)
            self.assertAlmostEqual(output.result, len(values) / 4)
            self.assertEqual(output.measurements["cohort_size"], len(values))
            state = output.state
        self.assertEqual(state.rounds, 3)

    @parameterized.named_parameters(
        ("client_noise", {"noise_site": "client"}, 2, (1, 3)),
        ("fixed_size", {"sampling": "fixed_size"}, 2, (3,)),
        ("population", {"num_clients": 2}, 2, (3,)),
        # Poisson sampling of 200 with rate .01 gives 17 with probability 1e-11.
        ("poisson", {"num_clients": 200, "sampling": "poisson"}, 16, (20, 200)),
    )
    def test_wrong_cohort_size_fails_the_round(self, options, right, wrong):
        process = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=1.0, clients_per_round=2, **options
        ).create(SCALAR)
        state = process.initialize()
        for size in wrong:
            with self.assertRaisesRegex(Exception, "cohort size"):
                process.next(state, [1.0] * size)
        state = process.next(state, [1.0] * right).state
        self.assertEqual(state.rounds, 1)

    def test_how_many_answered_is_written_down_and_priced(self):
        """A cohort of 200 where 2 were planned is not what was declared."""
        factory = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=1.0, clients_per_round=2
        )
        process = factory.create(SCALAR)
        state = process.initialize()
        for size in (2, 3, 60):
            state = process.next(state, [1.0] * size).state
            np.testing.assert_array_equal(state.history.answered[-1], size)
        for sampling in ("fixed_size", "poisson", "shuffled"):
            with self.assertRaisesRegex(ValueError, "answered in round [23]"):
                learning.epsilon(
                    state,
                    factory.mechanism,
                    sampling=sampling,
                    num_clients=200,
                    clients_per_round=2,
                    delta=1e-5,
                )

    def test_how_many_there_are_is_written_down(self):
        """Of more clients than there were, sampling would hide one better."""
        factory = aggregators.FixedClippingFactory(
            clip_norm=1.0, noise_multiplier=1.0, clients_per_round=2, num_clients=10
        )
        process = factory.create(SCALAR)
        state = process.next(process.initialize(), [1.0] * 2).state
        for num_clients in (9, 1000):
            with self.assertRaisesRegex(ValueError, "num_clients must be the 10"):
                learning.epsilon(
                    state,
                    factory.mechanism,
                    sampling="poisson",
                    num_clients=num_clients,
                    clients_per_round=2,
                    delta=1e-5,
                )

    def test_schedules(self):
        process = aggregators.FixedClippingFactory(
            clip_norm=2.0,
            noise_multiplier=lambda r: 1.0 + r,
            clients_per_round=[4, 8],
            rounds=2,
        ).create(SCALAR)
        state = process.initialize()
        for index, (noise, size) in enumerate(((2.0, 4), (4.0, 8))):
            output = process.next(state, [1.0, 1.0])
            state = output.state
            self.assertAlmostEqual(output.measurements["noise_stddev"], noise)
            self.assertEqual(state.query_state.clients_per_round, size)
            self.assertEqual(state.history.costs[-1], 1.0 + index)
            self.assertEqual(state.history.cohort_sizes[-1], size)
            self.assertLen(state.history.kinds, index + 1)
        with self.assertRaisesRegex(Exception, "past its end"):
            process.next(state, [1.0])


class CompositionTest(absltest.TestCase):
    def test_inside_tff_clipping_and_zeroing(self):
        inner = aggregators.FixedClippingFactory(
            clip_norm=10.0, noise_multiplier=0.0, clients_per_round=3
        )
        process = tff.aggregators.zeroing_factory(
            5.0, tff.aggregators.clipping_factory(1.0, inner)
        ).create(VECTOR)
        values = [np.array([x, 0, 0], np.float32) for x in (0.5, 2.0, 7.0)]
        output = process.next(process.initialize(), values)
        np.testing.assert_allclose(output.result, [(0.5 + 1) / 3, 0, 0])
        self.assertEqual(aggregators.accountable_state(output.state).rounds, 1)

    def test_compression_sums_the_updates(self):
        compression = tff.aggregators.EncodedSumFactory.quantize_above_threshold(
            quantization_bits=8, threshold=1
        )
        process = aggregators.FixedClippingFactory(
            clip_norm=1.0,
            noise_multiplier=0.0,
            clients_per_round=2,
            inner_factory=tff.aggregators.add_measurements(
                compression,
                server_measurement_fn=lambda _: collections.OrderedDict(
                    seen=tff.federated_value(np.int32(1), tff.SERVER)
                ),
            ),
        ).create(VECTOR)
        values = [np.array(v, np.float32) for v in ([2, 0, 0], [0, 0.5, 0])]
        output = process.next(process.initialize(), values)
        np.testing.assert_allclose(output.result, [0.5, 0.25, 0], atol=0.01)
        self.assertEqual(output.measurements["inner"]["seen"], 1)
        # The numbers beside the update are not compressed.
        self.assertEqual(output.measurements["clipped_fraction"], 0.5)

    def test_what_may_enlarge_a_share_is_refused(self):
        plain = tff.aggregators.SumFactory()
        compression = tff.aggregators.EncodedSumFactory
        for inner in (
            compression.quantize_above_threshold(quantization_bits=8, threshold=1),
            tff.aggregators.add_measurements(
                plain, server_measurement_fn=lambda _: collections.OrderedDict()
            ),
            tff.aggregators.zeroing_factory(99.0, plain),
            tff.aggregators.SecureSumFactory(5.0, 3.0),
            tff.aggregators.SecureSumFactory(np.float32(-3), np.float32(-5)),
        ):
            for name in ("inner_factory", "scalars_factory"):
                with (
                    self.subTest(f"{name}: {type(inner).__name__}"),
                    self.assertRaisesRegex(ValueError, f"{name} must be None"),
                ):
                    aggregators.MechanismFactory(
                        mechanisms.AdaptiveClipping(noise_multiplier=0.1),
                        4,
                        **{name: inner},
                    )

    def test_what_keeps_each_share(self):
        compression = tff.aggregators.EncodedSumFactory.quantize_above_threshold(
            quantization_bits=8, threshold=1
        )
        fixed = mechanisms.FixedClipping(clip_norm=1, noise_multiplier=1)
        # What clients noised by themselves is theirs, whatever becomes of it.
        local = mechanisms.LocalDP(clip_norm=1.0, epsilon=1.0, delta=1e-5)
        for mechanism, inner in (
            (fixed, tff.aggregators.SumFactory()),
            (fixed, tff.aggregators.SecureSumFactory(4.0)),
            (local, compression),
            (mechanisms.NoPrivacy(), compression),
        ):
            aggregators.from_mechanism(
                mechanism, 4, inner, rounds=3, max_participations=3
            )

    def test_a_secure_sum_that_rounds_beside_the_clip_is_refused(self):
        fixed = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)
        wide = tff.TensorType(np.float32, [4096])
        for value_type, bound in ((SCALAR, 1e6), (wide, 1e3)):
            secure = tff.aggregators.SecureSumFactory(bound)
            with self.assertRaisesRegex(ValueError, "inner_factory must have closer"):
                aggregators.from_mechanism(fixed, 4, secure).create(value_type)
        with self.assertRaisesRegex(ValueError, "scalars_factory must have closer"):
            aggregators.from_mechanism(
                fixed, 4, scalars_factory=tff.aggregators.SecureSumFactory(1e6)
            ).create(SCALAR)

    def test_a_clip_that_falls_below_a_secure_sums_rounding(self):
        check = round_plan.CohortSizeCheck(smallest_clip=0.25)
        four = tf.constant(4.0)
        self.assertEqual(check.checked(four, four, four, clip_norm=0.25), 4)
        with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "counts beside"):
            check.checked(four, four, four, clip_norm=0.24)


class ArgumentsTest(parameterized.TestCase):
    fixed = mechanisms.FixedClipping(clip_norm=1.0, noise_multiplier=1.0)

    @parameterized.named_parameters(
        ("clients", {"clients_per_round": 0}, "clients_per_round"),
        (
            "more_than_population",
            {"clients_per_round": 5, "num_clients": 4},
            "at most num_clients=4",
        ),
        (
            "fraction",
            {"clients_per_round": 2.5, "sampling": "fixed_size"},
            "whole number",
        ),
        (
            "callable_without_rounds",
            {"clients_per_round": lambda r: 4},
            "pass rounds=",
        ),
        (
            "callable_turns_bad",
            {"clients_per_round": lambda r: 2 - r, "rounds": 3},
            "clients_per_round",
        ),
        (
            "short_sequence",
            {"clients_per_round": [4, 4], "rounds": 3},
            "rounds=3",
        ),
        ("sampling", {"clients_per_round": 4, "sampling": "all"}, "sampling"),
        ("rounds", {"clients_per_round": 4, "rounds": 0}, "rounds"),
    )
    def test_bad_values(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            aggregators.from_mechanism(self.fixed, **options)

    def test_client_noise_needs_a_fixed_size(self):
        with self.assertRaisesRegex(ValueError, "fixed_size"):
            aggregators.FixedClippingFactory(
                clip_norm=1.0,
                noise_multiplier=1.0,
                clients_per_round=2,
                noise_site="client",
                sampling="poisson",
            )

    def test_weights_are_not_updates(self):
        mechanism = mechanisms.NbAFL(epsilon=1.0, constant=1.0, weight_clip=1.0)
        with self.assertRaisesRegex(ValueError, "NbAFLFactory"):
            aggregators.from_mechanism(mechanism, 2, rounds=1, num_clients=2)


if __name__ == "__main__":
    absltest.main()
