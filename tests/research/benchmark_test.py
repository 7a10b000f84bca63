"""Tests that the benchmark measures, stores, and prints; no timing."""

import contextlib
import io
import pathlib
import tempfile

from absl.testing import absltest

from research import benchmark
from research.benchmarking import results, rows


def _row(name, result):
    return rows.Row(name, "group", f"title of {name}", result)


class BenchmarkScriptTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.store = results.Results(self.folder / "docs" / "page.json")
        self.calls = []
        self.context = rows.Context()

    def _run(self, selected, store=None, **options):
        return benchmark._measure(
            selected, store or self.store, self.context, **options
        )

    def _measured(self, value):
        def measure(context):
            self.calls.append(context)
            if isinstance(value, Exception):
                raise value
            return value

        return measure

    def test_a_row_that_fails_does_not_stop_the_others(self):
        selected = [
            _row("one", self._measured(ValueError("because"))),
            _row("two", self._measured({"figure": 1})),
        ]
        failed = self._run(selected)
        self.assertEqual(failed, ["one"])
        stored = results.Results(self.folder / "docs" / "page.json")
        self.assertEqual(stored.rows["one"]["error"], "because")
        self.assertEqual(stored.result("two"), {"figure": 1})

    def test_resume_measures_only_what_is_missing(self):
        selected = [
            _row("one", self._measured({"figure": 1})),
            _row("two", self._measured(ValueError("because"))),
        ]
        self._run(selected)
        self._run(selected, resume=True)
        self.assertLen(self.calls, 3)
        # Another commit's figures are not this one's.
        self.store.rows["one"]["revision"] = "0123456"
        self._run(selected, resume=True)
        self.assertLen(self.calls, 5)

    def test_unknown_names_are_refused_before_anything_starts(self):
        path = self.folder / "none.json"
        with self.assertRaisesRegex(SystemExit, "rows must be.*everything"):
            benchmark.main(["--rows=everything", f"--json={path}"])
        self.assertFalse(path.exists())

    def test_what_was_measured_is_printed_without_measuring(self):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            benchmark.main(["--rows="])
        for text in ("MLP 64-128-10", "FedJAX", "sharded_ray: mlp"):
            self.assertIn(text, output.getvalue())
