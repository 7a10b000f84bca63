"""What the progress line shows of a round, and what only where there is any."""

from __future__ import annotations

import contextlib
import io
import math
import re

from absl.testing import absltest

from tfdp_fl.keras import progress


def _line(**logs):
    usual = {
        "loss": 0.5,
        "discarded_clients": 0.0,
        "failed_clients": 0.0,
        "abandoned_rounds": 0.0,
        "clipped_fraction": 0.3,
    }
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        bar = progress.RoundProgress(2, 0, 10)
        bar.end_of_round(3, {**usual, **logs}, 0.1)
    return shown.getvalue()


class RoundProgressTest(absltest.TestCase):
    def test_a_round_like_any_other(self):
        line = _line()
        self.assertIn("Round 4/10", line)
        self.assertIn("loss: 0.5", line)
        for name in ("discarded", "failed", "abandoned", "clipped"):
            self.assertNotIn(name, line)

    def test_clients_that_were_discarded_or_failed_are_told(self):
        line = _line(discarded_clients=2.0, failed_clients=1.0)
        self.assertIn("loss: 0.5", line)
        self.assertIn("discarded_clients: 2", line)
        self.assertIn("failed_clients: 1", line)

    def test_an_abandoned_round_has_no_numbers(self):
        line = _line(loss=math.nan, abandoned_rounds=1.0)
        self.assertIn("abandoned_rounds: 1", line)
        self.assertNotIn("loss", line)

    def test_a_line_has_at_most_100_characters(self):
        logs = dict.fromkeys(("val_loss", "val_accuracy", "accuracy", "mean_iou"), 0.5)
        for verbose in (1, 2):
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                bar = progress.RoundProgress(verbose, 0, 1000)
                bar.end_of_round(
                    999, {**logs, "loss": 0.5, "epsilon": 1.25, "x" * 40: 1.0}, 0.1
                )
            plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\x08", "", shown.getvalue())
            for line in re.split(r"[\r\n]", plain):
                self.assertLessEqual(len(line.rstrip()), 100)
            self.assertIn("epsilon: 1.25", plain)
            self.assertIn("val_accuracy: 0.5", plain)


if __name__ == "__main__":
    absltest.main()
