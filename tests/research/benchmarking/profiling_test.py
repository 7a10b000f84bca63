"""Tests that times are not counted twice, and what operations are for."""

from absl.testing import absltest, parameterized

from research.benchmarking import profiling


class ProfilingTest(parameterized.TestCase):
    def test_self_times_leave_out_what_is_inside(self):
        events = [
            ("inner", 10, 20),
            ("outer", 0, 100),
            ("inner", 40, 30),
            ("innermost", 45, 5),
            ("outer", 100, 10),
            ("later", 200, 1),
        ]
        self.assertEqual(
            profiling.self_times(events),
            {
                "outer": [2, 60],
                "inner": [2, 45],
                "innermost": [1, 5],
                "later": [1, 1],
            },
        )

    @parameterized.parameters(
        ("_MklNativeFusedMatMul", "matrix products and convolutions"),
        ("BatchMatMulV2", "matrix products and convolutions"),
        ("_MklNativeConv2DBackpropFilter", "matrix products and convolutions"),
        ("_XlaRun", "compiled by XLA"),
        ("ResourceApplyGradientDescent", "optimizer steps"),
        ("StatelessRandomNormalV2", "noise"),
        ("GatherV2", "reading examples"),
        ("While", "control, shapes and copies"),
    )
    def test_categories(self, operation, category):
        self.assertEqual(profiling.category(operation), category)

    def test_time_covered_counts_once(self):
        spans = [(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]
        self.assertAlmostEqual(profiling.covered(spans), 4.0)
        self.assertEqual(profiling.covered([]), 0.0)

    def test_operations_of_a_profile(self):
        from tensorflow.tsl.profiler.protobuf import xplane_pb2

        space = xplane_pb2.XSpace()
        plane = space.planes.add(name="/host:CPU")
        names = {1: "loop/MatMul_3:MatMul", 2: "ExecutorState::Process"}
        for key, name in names.items():
            plane.event_metadata[key].id = key
            plane.event_metadata[key].name = name
        for _ in range(2):  # Two threads.
            line = plane.lines.add()
            line.events.add(metadata_id=2, offset_ps=0, duration_ps=10**9)
            for start in (1, 5 * 10**8):
                line.events.add(metadata_id=1, offset_ps=start, duration_ps=10**8)
        found = profiling.operations(space.SerializeToString(), rounds=2)
        self.assertEqual(
            found,
            [
                {
                    "name": "MatMul",
                    "category": "matrix products and convolutions",
                    "count": 2.0,
                    "seconds": 2e-4,
                }
            ],
        )


if __name__ == "__main__":
    absltest.main()
