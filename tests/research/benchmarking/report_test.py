"""Tests what the page, the verdicts and the images say of measurements."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized

from research.benchmarking import (
    plots,
    report,
    results,
    rows,
    verdicts,
    workloads,
)


def _times(seconds):
    return {"median": seconds, "low": seconds, "high": seconds, "count": 9}


def _against_tff(tff, engine):
    return {
        "tff": _times(tff),
        "engine": _times(engine),
        "ratio": tff / engine,
        "ratios": [tff / engine, 1.1 * tff / engine, 0.9 * tff / engine],
        "tried": [
            {"loop": "DATASET_ITERATOR", "concurrent_calls": 1, "seconds": tff},
            {
                "loop": "DATASET_REDUCE",
                "concurrent_calls": 2,
                "seconds": 2 * tff,
            },
        ],
        "engine_first_seconds": 1.25,
        "engine_peak_bytes": 2**30,
        "tff_peak_bytes": 3 * 2**30,
    }


def _streamed(seconds):
    return {
        "memory": _times(0.1),
        "files": _times(seconds),
        "rates": {"files": 0.1 / seconds},
    }


def _on_disk(ratio, start_seconds):
    return {
        "population": 10**6,
        "memory": _times(0.1),
        "disk": _times(0.1 * ratio),
        "ratio": ratio,
        "reading": _times(0.01),
        "start_seconds": start_seconds,
    }


def _in_bfloat16(ratio):
    return {
        "float32": _times(0.1),
        "bfloat16": _times(0.1 / ratio),
        "ways": {"float32": "plain", "bfloat16": "plain"},
        "ratio": ratio,
        "bare": {"float32": 2e11, "bfloat16": 4e11},
        "bare_ratio": 2.0,
    }


def _accuracies(float32, bfloat16):
    return {
        "float32": [float32] * 3,
        "bfloat16": [bfloat16] * 3,
        "means": {"float32": float32, "bfloat16": bfloat16},
        "rounds": 30,
        "real": True,
    }


def _rivals(ratio):
    return {
        "ours": [0.1, 0.11, 0.09],
        "rivals": {
            "fedjax": {
                "title": "FedJAX",
                "versions": {"fedjax": "0.0.17"},
                "tried": {"jit": 0.1 * ratio, "pmap": ratio},
                "setting": "jit",
                "runs": [0.1 * ratio, 0.11 * ratio, 0.09 * ratio],
                "ratios": [ratio] * 3,
            }
        },
    }


def _on_workers(name, seconds):
    """Returns a round of that many seconds on workers, and of 0.1 here."""
    here, there = _times(0.1), _times(seconds)
    both = {"here": here, "there": there, "ratio": 10 * seconds}
    both["messages"] = _times(0.01)
    return {"workers": 2, "workloads": {name: both}}


def _with_replicas(ratio):
    """Returns rounds of a client on each core over those of one, split."""
    each = {"beside": _times(0.1 * ratio), "split": _times(0.1), "ratio": ratio}
    return {"cores": 2, "workloads": {"cnn": each}}


def _over_products(name="cnn", ratio=1.05):
    """Returns rounds as long as their products, but one."""
    each = {"engine": _times(0.1), "rate": 2e11, "bare": 2e11, "ratio": 1.0}
    found = dict.fromkeys(verdicts.OVER_PRODUCTS, each)
    return {
        "workloads": {
            **found,
            name: {**each, "bare": ratio * each["rate"], "ratio": ratio},
        }
    }


def _profile(inside_functions):
    return {
        "seconds": 0.9,
        "profiled_seconds": 1.0,
        "inside_functions": inside_functions,
        "cores": 2,
        "operations": [
            {
                "name": "MatMul",
                "category": "matrix products and convolutions",
                "count": 100.0,
                "seconds": 1.5,
            }
        ],
    }


def _complete():
    """Returns a result for every row, by name."""
    rate = {"beside": _times(4e11), "split": _times(3e11), "best": 4e11}
    half = {"beside": _times(2e11), "split": _times(1e11), "best": 2e11}
    names = list(workloads.WORKLOADS)
    found = {
        "machine": {"rates": {"large": rate, **dict.fromkeys(names, half)}},
        "products": _over_products(),
        "gram": {
            "rows": 60,
            "columns": 784,
            "steps": 6,
            "seconds": {"whole": 1e-3, "halves": 9e-4, "steps": 2e-3},
        },
        "replicas": _with_replicas(0.8),
        "sharded_ray": _on_workers("mlp_small", 0.2025),
        "streaming": {
            "mlp": _streamed(0.11),
            "population": _on_disk(1.2, 4.0),
            "population_mapped": _on_disk(1.1, 4.0),
        },
        "correlated": {
            "fixed": _times(0.1),
            "correlated": _times(0.11),
            "ratio": 1.1,
        },
        **{f"bfloat16_{name}": _in_bfloat16(2.0) for name in verdicts.BFLOAT16_TIMES},
        "bfloat16_accuracy": _accuracies(0.9, 0.897),
        "rivals": _rivals(3.5),
        "cohort": {
            "cohorts": [10, 1000],
            "times": {"10": _times(0.01), "1000": _times(1.0)},
        },
        "population": {
            "populations": [10**3, 10**6],
            "curves": {
                "mlp, poisson": {
                    "times": {"1000": _times(0.1), "1000000": _times(0.105)},
                    "ratio": 1.05,
                }
            },
        },
        "model_size": {
            "sizes": [1e4, 1e6],
            "times": {"mlp_1e+04": _times(0.01), "mlp_1e+06": _times(0.2)},
            "rates": {"mlp_1e+04": 1e9, "mlp_1e+06": 1e11},
        },
        "memory": {
            "points": [
                {
                    "mechanism": mechanism,
                    "way": "side by side",
                    "cohort": cohort,
                    "model_bytes": 4e6,
                    "copies": copies,
                    "copies_per_replica": copies / 2,
                }
                for mechanism, cohort, copies in (
                    ("fixed", 10, 5.0),
                    ("fixed", 1000, 6.0),
                    ("median", 10, 14.0),
                )
            ]
        },
        "uneven": {
            "geometric": {"waste": 0.1},
            "linear": {"waste": 0.2},
        },
        "import": {
            "tfdp_fl": _times(0.8),
            "tensorflow_privacy": _times(0.6),
            "tensorflow": _times(2.0),
            "heavy": [],
        },
        "mnist": {
            "bytes": 2.0e8,
            "copy_bytes": 1.9e8,
            "index_bytes": 5e6,
            "test_bytes": 0,
            "real": True,
        },
    }
    for work in workloads.WORKLOADS.values():
        found[work.name] = _against_tff(1.1 * work.target, 1.0)
        found[f"jit_{work.name}"] = {
            "plain": _times(0.1),
            "auto": _times(0.105),
            "xla": _times(0.2),
            "xla_first_seconds": 3.0,
            "chosen": "plain",
            "ratio": 1.05,
        }
        found[f"stack_{work.name}"] = {
            "tff": _times(0.1),
            "current": _times(0.105),
            "ratio": 1.05,
            "versions": {
                "tff": {"TensorFlow": "2.14.1"},
                "current": {"TensorFlow": "2.21.0"},
            },
        }
        is_small = work.name == "mlp_small"
        found[f"profile_{work.name}"] = _profile(0.86 if is_small else 0.75)
    return found


class ReportTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.results = results.Results()
        self.found = _complete()

    def _put(self, **changed):
        for name, result in {**self.found, **changed}.items():
            self.results.put(name, False, 0.1, result=result, seconds=60.0)

    @parameterized.parameters((False, 1.5, [2.0, 1.1, 1.5]), (True, 2.0, [2.0]))
    def test_the_median_run_stands_for_all(self, quick, ratio, ratios):
        runs = iter([{"ratio": each, "times": -each} for each in (2.0, 1.1, 1.5)])
        found = rows.in_runs(rows.Context(quick=quick), lambda: next(runs))
        self.assertEqual(found, {"ratio": ratio, "times": -ratio, "ratios": ratios})

    @parameterized.parameters("products", "sharded_ray", "stack_cnn", "correlated")
    def test_runs_that_differ_say_so(self, name):
        result = dict(self.found[name])
        each = result
        if "workloads" in result:
            result["workloads"] = {**result["workloads"]}
            work, each = next(iter(result["workloads"].items()))
            each = result["workloads"][work] = dict(each)
        each["ratios"] = [1.375, 0.5, 1.0]
        self._put(**{name: result})
        (verdict,) = (
            each
            for each in verdicts.all_verdicts(self.results)
            if "0.50 to 1.38 in 3 runs)" in each.figure
        )
        self.assertEqual(verdict.row, name)

    def test_there_is_a_result_of_every_row_here(self):
        self.assertSameElements(self.found, [row.name for row in rows.ROWS])

    def test_everything_holds(self):
        self._put()
        judged = verdicts.all_verdicts(self.results)
        self.assertEmpty([each for each in judged if not each.holds])
        self.assertSameElements(
            {each.row for each in judged},
            # Those without a bar of their own.
            {
                row.name
                for row in rows.ROWS
                if (
                    row.group not in ("machine", "profile")
                    and row.name not in ("cohort", "model_size")
                )
                or row.name == "profile_mlp_small"
            },
        )
        text = report.blocks(self.results)
        self.assertEqual(text["misses"], "Every bar that was measured holds.")
        self.assertNotIn("Not measured", "".join(text.values()))

    @parameterized.parameters(
        ("products", _over_products("cnn", 1.11)),
        ("products", _over_products("lstm", 1.11)),
        ("profile_mlp_small", _profile(0.84)),
        ("sharded_ray", {"unavailable": "fit(runtime=RayWorkers(...))"}),
        ("replicas", _with_replicas(1.2)),
        ("sharded_ray", _on_workers("mlp_small", 0.204)),
        ("mlp_small", _against_tff(0.5, 0.01)),
        ("mlp", _against_tff(1.1, 0.1)),
        ("mlp", {**_against_tff(20.0, 1.0), "engine_first_seconds": 3.1}),
        ("cnn", _against_tff(0.2, 0.1)),
        ("streaming", {"mlp": _streamed(0.13)}),
        ("streaming", {"population": _on_disk(1.3, 4.0)}),
        ("streaming", {"population": _on_disk(1.2, 6.0)}),
        ("streaming", {"population_mapped": _on_disk(1.3, 4.0)}),
        (
            "correlated",
            {"fixed": _times(1.0), "correlated": _times(1.2), "ratio": 1.2},
        ),
        ("uneven", {"geometric": {"waste": 0.0}, "linear": {"waste": 0.26}}),
        ("bfloat16_cnn", _in_bfloat16(1.7)),
        ("bfloat16_accuracy", _accuracies(0.9, 0.894)),
        ("rivals", _rivals(2.5)),
        (
            "rivals",
            {
                "ours": [0.1],
                "rivals": {"pfl": {"title": "pfl-research", "unavailable": "No disk."}},
            },
        ),
    )
    def test_a_miss_is_reported_with_its_figure_and_reason(self, name, result):
        self._put(**{name: result})
        (missed,) = [
            each for each in verdicts.all_verdicts(self.results) if not each.holds
        ]
        self.assertEqual(missed.row, name)
        self.assertNotEmpty(missed.reason)
        listed = report.blocks(self.results)["misses"]
        self.assertIn(missed.figure, listed)
        self.assertIn(missed.reason, listed)

    def test_a_rate_is_judged_by_the_share_and_by_the_time(self):
        for ratio, missed in ((1.09, 0), (1.15, 1), (1.19, 2)):
            self._put(products=_over_products("mlp_batch60", ratio))
            judged = verdicts.of_products(self.results)
            self.assertLen([each for each in judged if not each.holds], missed, ratio)

    def test_ratios_have_their_spread_over_the_runs(self):
        measured = _against_tff(20.0, 1.0)
        older = {k: v for k, v in measured.items() if k != "ratios"}
        for result, wanted in ((measured, "18.0 to 22.0"), (older, "–")):
            self._put(mlp=result)
            self.assertIn(
                f"| **20.0** | {wanted} |",
                report.blocks(self.results)["tff"],
            )

    def test_the_reason_names_the_floor_that_is_in_the_way(self):
        work = workloads.WORKLOADS["mlp_batch60"]
        at_peak = work.flops_per_round / 4e11  # As fast as a large product.
        self._put(mlp_batch60=_against_tff(7.5 * 0.9 * at_peak, at_peak * 1.2))
        verdict = verdicts.of_tff(self.results, work)
        self.assertIn("Out of reach on this machine", verdict.reason)
        self._put(mlp_batch60=_against_tff(7.5 * 1.5 * at_peak, at_peak * 3))
        verdict = verdicts.of_tff(self.results, work)
        self.assertNotIn("Out of reach", verdict.reason)
        self.assertIn("one after another", verdict.reason)
        self.assertIn("the other 33 % of the round", verdict.reason)

    def test_the_claim_is_what_was_measured(self):
        changed = {"mlp": _against_tff(5.0, 0.1), "cnn": _against_tff(0.2, 0.1)}
        self._put(**changed)
        claim = report.blocks(self.results)["claim"]
        found = {**self.found, **changed}
        ratios = [found[name]["ratio"] for name in workloads.WORKLOADS]
        self.assertIn(f"{min(ratios):.1f} to {max(ratios):.1f} times", claim)
        bars = verdicts.all_verdicts(self.results)
        held = sum(each.holds for each in bars)
        self.assertLess(held, len(bars))
        self.assertIn(f"Of the {len(bars)} bars", claim)
        self.assertIn(f"{held} hold", claim)

    def test_the_words_around_the_tables_are_kept(self):
        page = (
            "# Title\n\nWords.\n<!-- begin tff -->\nstale\n<!-- end tff -->"
            "\nMore words.\n"
        )
        self._put()
        texts = report.blocks(self.results)
        filled = report.fill(page, texts)
        self.assertIn("Words.\n<!-- begin tff -->\n| a round of", filled)
        self.assertIn("<!-- end tff -->\nMore words.\n", filled)
        self.assertNotIn("stale", filled)
        self.assertIn("## Growth", filled)
        self.assertEqual(report.fill(filled, texts), filled)

    def test_profile_tells_python_from_functions(self):
        self._put()
        text = report.blocks(self.results)["profile"]
        self.assertIn("between compiled functions | 14 % | 25 % |", text)
        self.assertIn("| mlp_small | mlp |", text)

    def test_profile_shares_add_up(self):
        shares = report.by_category(self.found["profile_mlp"])
        self.assertAlmostEqual(sum(shares.values()), 1)
        self.assertAlmostEqual(shares["matrix products and convolutions"], 0.75)
        self.assertAlmostEqual(shares["waiting and dispatch"], 0.25)

    def test_images(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        folder = pathlib.Path(temporary.name)
        self.assertEmpty(plots.draw(self.results, folder))
        self._put()
        self.assertLen(plots.draw(self.results, folder), 2)
        for name in (plots.RATIOS, plots.GROWTH):
            self.assertEqual((folder / name).read_bytes()[1:4], b"PNG")


class RowsTest(parameterized.TestCase):
    @parameterized.parameters(
        (["all"], 39),
        (["tff"], 5),
        (["mlp", "machine"], 3),
        (["jit_mlp", "jit"], 5),
        ([""], 0),
    )
    def test_select(self, names, count):
        selected = rows.select(names)
        self.assertLen(selected, count)
        self.assertEqual(selected, [row for row in rows.ROWS if row in selected])

    def test_unknown_rows(self):
        with self.assertRaisesRegex(ValueError, "rows must be of .*got mpl"):
            rows.select(["mlp", "mpl"])

    def test_sides_take_turns(self):
        turns = []

        def side(name, value):
            def measure():
                turns.append(name)
                return [value, value]

            return measure

        found = rows.alternate(2, {"a": side("a", 1.0), "b": side("b", 3.0)})
        self.assertEqual(turns, ["a", "b", "a", "b"])
        self.assertEqual(found["b"]["median"], 3.0)
        self.assertEqual(found["a"]["count"], 4)


if __name__ == "__main__":
    absltest.main()
