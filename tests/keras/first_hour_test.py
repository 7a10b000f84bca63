"""What a new user gets wrong in the first hour has an answer that helps."""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings

import numpy as np
from absl.testing import absltest, parameterized

import tfdp_fl
from tests.keras import toy
from tfdp_fl.keras import round_loop


class MessagesTest(parameterized.TestCase):
    def _planned(self, **options):
        return tfdp_fl.make_private(
            toy.dense(),
            8.0,
            1e-3,
            clients_per_round=20,
            rounds=2,
            accountant="rdp",
            num_clients=1000,
            **options,
        )

    def test_a_misspelt_option(self):
        with self.assertRaisesRegex(TypeError, "do you mean num_replicas?"):
            self._planned(num_replica=3)

    @parameterized.parameters(
        ({"optimizer": None}, ValueError, "optimizer must be a .*'sgd' or 'adam'"),
        ({"run_eagerly": True}, TypeError, "no run_eagerly; .* always compiled"),
        ({"metric": ["accuracy"]}, TypeError, "no metric; give metrics"),
    )
    def test_compile(self, given, error, message):
        with self.assertRaisesRegex(error, message):
            toy.federated(compile_options=given)

    def test_far_fewer_clients_than_planned_names_both_numbers(self):
        fed = self._planned()
        fed.compile("sgd", toy.loss())
        with self.assertRaisesRegex(ValueError, "num_clients=1000 .* got 40"):
            fed.fit(toy.clients(), 2, verbose=0)
        self.assertIsNone(fed.run)

    def test_features_that_are_no_numbers(self):
        x, y = toy.arrays(10)
        x[3, 5] = np.nan
        (problem,) = tfdp_fl.validate(
            toy.dense(), clients={"a": (x, y)}, loss=toy.loss()
        )
        self.assertIn("column(s) 5 of input 0", problem)


class OutputTest(absltest.TestCase):
    def _printed(self, function):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            function()
        return out.getvalue()

    def test_an_adaptive_optimizer_and_few_steps(self):
        def first(optimizer):
            fed = toy.federated(compile_options={"optimizer": optimizer})
            return self._printed(lambda: fed.fit(toy.clients(), verbose=2))

        self.assertIn("Hint: each client starts Adam anew", first("adam"))
        self.assertNotIn("Hint", first("sgd"))

    def test_a_validation_split_warns_of_nothing(self):
        fed = toy.federated()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            fed.fit(toy.clients(), 2, batch_size=10, verbose=0, validation_split=0.3)

    def _line(self, verbose=2, **logs):
        usual = {"loss": 0.5, "discarded_clients": 0.0, "clipped_fraction": 0.3}
        show = round_loop._progress(verbose, 0, 1000)
        return self._printed(lambda: show(1000, {**usual, **logs}, 0.1))

    def test_a_line_shows_what_matters(self):
        line = self._line()
        self.assertIn("Round 1000/1000", line)
        self.assertIn("loss: 0.5", line)
        for name in ("discarded", "clipped"):
            self.assertNotIn(name, line)
        self.assertIn("discarded_clients: 2", self._line(discarded_clients=2.0))
        abandoned = self._line(loss=math.nan, abandoned_rounds=1.0)
        self.assertIn("abandoned_rounds: 1", abandoned)
        self.assertNotIn("loss", abandoned)

    def test_a_line_has_at_most_100_characters(self):
        logs = dict.fromkeys(("val_loss", "val_accuracy", "accuracy", "x" * 40), 0.5)
        for verbose in (1, 2):
            shown = self._line(verbose, epsilon=1.25, **logs)
            plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\x08", "", shown)
            for line in re.split(r"[\r\n]", plain):
                self.assertLessEqual(len(line.rstrip()), 100)
            self.assertIn("epsilon: 1.25", plain)
            self.assertIn("val_accuracy: 0.5", plain)


if __name__ == "__main__":
    absltest.main()
