"""The picture of correlated noise: what is run, kept, chosen and drawn."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from research import correlated_picture
from research.correlated_picture import NO_NOISE, QUICK, RUNS, Table


def _line(stage, method, rate, seed, accuracy, groups=4, epsilon=8.0):
    return {
        "stage": stage,
        "groups": groups,
        "method": method,
        "epsilon": epsilon,
        "rate": rate,
        "seed": seed,
        "accuracy": accuracy,
        "spent": epsilon,
        "noise_multiplier": 1.0,
        "seconds": 0.1,
    }


class PictureTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def _main(self, *more):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = correlated_picture.main(
                [f"--output_dir={self.folder}", "--quick", *more]
            )
        return code, out.getvalue()

    def test_quick_trains_tabulates_draws_and_runs_nothing_twice(self):
        small = dataclasses.replace(
            QUICK, rates=(1.0,), seeds=(1,), rounds=8, methods=("blt",)
        )
        with (
            mock.patch.object(correlated_picture, "QUICK", small),
            mock.patch.object(
                correlated_picture.training, "use_one_thread_per_operation"
            ),
        ):
            code, text = self._main()
            self.assertEqual(code, 0)
            self.assertIn("2/2 b = 4, blt, epsilon = 8", text)
            with (self.folder / RUNS).open() as file:
                lines = list(csv.DictReader(file))
            # No noise and blt, each by one rate, and then with one seed.
            self.assertLen(lines, 4)
            for line in lines:
                self.assertGreater(float(line["accuracy"]), 0.3)
                self.assertLessEqual(float(line["spent"]), 8.0)
            self.assertGreater(float(lines[-1]["spent"]), 7.9)
            picture = self.folder / correlated_picture.PICTURE
            self.assertGreater(picture.stat().st_size, 1000)
            with mock.patch.object(
                correlated_picture.Runner, "run", side_effect=AssertionError
            ):
                self.assertEqual(self._main()[0], 0)

    def test_an_interrupted_run_goes_on(self):
        plan = dataclasses.replace(QUICK, methods=("blt",))
        made = []

        def run(**key):
            made.append(key)
            if len(made) == 4:
                raise KeyboardInterrupt
            return _line(accuracy=0.5, **{k: key[k] for k in key})

        runner = mock.Mock(run=run)
        path = self.folder / RUNS
        with (
            contextlib.redirect_stdout(io.StringIO()),
            self.assertRaises(KeyboardInterrupt),
        ):
            correlated_picture.run_all(plan, runner, Table(path))
        # The process was killed in the middle of a line.
        with path.open("a") as file:
            file.write("choose,4,blt")
        with contextlib.redirect_stdout(io.StringIO()):
            correlated_picture.run_all(plan, runner, Table(path))
        keys = [tuple(sorted(each.items())) for each in made]
        self.assertEqual(keys[3], keys[4])
        del keys[3]
        # 2 cells of 2 rates by 1 seed, and 2 seeds.
        self.assertLen(keys, 8)
        self.assertLen(set(keys), 8)

    def test_the_rate_is_chosen_on_held_out_clients_only(self):
        table = Table(self.folder / RUNS)
        table.add(_line("choose", "blt", 0.5, 101, 0.7))
        table.add(_line("choose", "blt", 1.0, 101, 0.6))
        # What the test set says of the other rate is not looked at.
        table.add(_line("picture", "blt", 1.0, 1, 0.99))
        self.assertEqual(correlated_picture.best_rate(QUICK, table, 4, "blt", 8.0), 0.5)
        for plan in (correlated_picture.Plan(), QUICK):
            self.assertEmpty(set(plan.seeds) & set(plan.tuning_seeds))

    def test_held_out_clients_and_the_test_set_are_nobody_s_data(self):
        data = correlated_picture.load(QUICK, None)
        seen = {
            row.tobytes()
            for client in data.clients.client_ids
            for row in data.clients.client(client)[0]
        }
        self.assertGreater(len(seen), 0.98 * 64 * 10)
        for x, _ in (data.held_out, data.test):
            both = seen & {row.tobytes() for row in x}
            self.assertLess(len(both), 5)  # Digits that look the same.

    @parameterized.parameters(*correlated_picture.METHODS)
    def test_every_method_keeps_its_target(self, method):
        plan = dataclasses.replace(QUICK, rounds=8)
        runner = correlated_picture.Runner(plan, correlated_picture.load(plan, None))
        line = runner.run("picture", 4, method, 8.0, 1.0, 1)
        self.assertBetween(line["spent"], 7.9, 8.0)
        self.assertGreater(line["noise_multiplier"], 0)

    def test_without_noise_there_is_no_epsilon(self):
        cells = list(correlated_picture.cells(QUICK))
        self.assertEqual(cells[0], (4, NO_NOISE, 0.0))
        self.assertLen(cells, 4)

    def test_without_mnist_it_says_so(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = correlated_picture.main(
                [f"--output_dir={self.folder}", "--data_path=nowhere.npz"]
            )
        self.assertEqual(code, 2)
        self.assertIn("nowhere.npz", out.getvalue())


if __name__ == "__main__":
    absltest.main()
