"""Markdown tables of sweeps."""

from __future__ import annotations

import pathlib
import tempfile

from absl.testing import absltest

from tfdp_fl.experiments import tables

_SUMMARY = """\
target_epsilon,constant,runs,accuracy,stddev,epsilon,delta,central_epsilon
10,1,3,0.5,0.01,3.001,0.758163,
10,3,3,0.25,0.02,8,0.0138862,
50,1,1,0.75,,inf,0.758163,0.1
"""


class TablesTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        (self.folder / "summary.csv").write_text(_SUMMARY)
        self.rows = tables.read_summary(self.folder)

    def test_a_row_a_setting(self):
        # An epsilon is rounded up, and an exact one stays.
        self.assertEqual(
            tables.markdown(
                self.rows,
                ["target_epsilon"],
                values=["accuracy", "epsilon", "central_epsilon", "delta"],
            ).splitlines(),
            [
                "| target_epsilon | accuracy | epsilon | central_epsilon | delta |",
                "| --- | --- | --- | --- | --- |",
                "| 10 | 0.500 ± 0.010 | 3.01 | – | 0.76 |",
                "| 10 | 0.250 ± 0.020 | 8.00 | – | 0.014 |",
                "| 50 | 0.750 | none | 0.10 | 0.76 |",
            ],
        )

    def test_a_column_a_value(self):
        self.assertEqual(
            tables.markdown(
                self.rows, ["target_epsilon"], columns="delta"
            ).splitlines(),
            [
                "| target_epsilon | delta=0.76 | delta=0.014 |",
                "| --- | --- | --- |",
                "| 10 | 0.500 ± 0.010 | 0.250 ± 0.020 |",
                "| 50 | 0.750 | – |",
            ],
        )

    def test_only_some(self):
        table = tables.markdown(self.rows, ["constant"], where={"target_epsilon": "10"})
        self.assertLen(table.splitlines(), 4)

    def test_refusals(self):
        with self.assertRaisesRegex(ValueError, "colour"):
            tables.markdown(self.rows, ["colour"])
        with self.assertRaisesRegex(ValueError, "tell the runs apart"):
            tables.markdown(self.rows, ["runs"], columns="target_epsilon")
        with self.assertRaisesRegex(ValueError, "values must be one"):
            tables.markdown(
                self.rows,
                ["constant"],
                columns="runs",
                values=["accuracy", "epsilon"],
            )
        with self.assertRaisesRegex(ValueError, "not there"):
            tables.read_summary(self.folder / "none")
        (self.folder / "summary.csv").write_text("a,b\n")
        with self.assertRaisesRegex(ValueError, "no rows"):
            tables.read_summary(self.folder)


if __name__ == "__main__":
    absltest.main()
