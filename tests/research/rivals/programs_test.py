from __future__ import annotations

import contextlib
import io
import json
import pathlib
import sys
import time
from unittest import mock

import numpy as np
from absl.testing import absltest

from research.rivals import programs, work
from tests.keras import files

_ASKED = {
    "units": [4, 3, 2],
    "clients": 5,
    "examples": 6,
    "batch_size": 3,
    "learning_rate": 0.1,
    "clip_norm": 1.0,
    "noise_multiplier": 0.1,
    "rounds": 2,
}
# A rival that does nothing, and whose clock is its own.
_PROGRAM = """
from research.rivals import work
asked = work.asked()
ends = [100.0 * number for number in range(work.WARM_UP)]
ends += [ends[-1] + 0.5 * number for number in range(1, asked.rounds + 1)]
print("Something that the framework says.")
work.answer(ends)
"""


class WorkTest(absltest.TestCase):
    def test_data(self):
        x, y = work.Work(**_ASKED, setting="").data()
        self.assertEqual(x.shape, (5, 6, 4))
        self.assertEqual(x.dtype, np.float32)
        self.assertEqual(y.shape, (5, 6))
        self.assertBetween(y.min(), 0, y.max())
        self.assertEqual(y.max(), 1)

    def test_the_warm_up_is_not_in_the_answer(self):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            work.answer([10.0, 20.0, 30.0, 31.0, 33.0])
        self.assertEqual(json.loads(output.getvalue()), [1.0, 2.0])


class ProgramsTest(absltest.TestCase):
    def _with_program(self, code):
        start = programs._output

        def run(command, timeout, environment):
            at = command.index("-m")
            command = [*command[:at], "-c", code, command[-1]]
            return start(command, timeout, environment)

        self.enter_context(mock.patch.object(programs, "_output", run))

    def test_seconds_of_the_rounds_that_count(self):
        self._with_program(_PROGRAM)
        found = programs.seconds("fedjax", sys.executable, "jit", **_ASKED)
        self.assertEqual(found, [0.5, 0.5])

    def test_a_program_that_fails_is_told_about(self):
        self._with_program("raise ValueError('not today')")
        with self.assertRaisesRegex(programs.RivalError, "not today"):
            programs.seconds("flower", sys.executable, "1", **_ASKED)

    def test_a_program_that_hangs_is_ended_with_its_children(self):
        path = files.directory(self) / "child"
        script = f"sleep 1000 & echo $! > {path}; wait"
        with self.assertRaisesRegex(programs.RivalError, "more than 3 s"):
            programs._output(["sh", "-c", script], timeout=3)
        state = pathlib.Path(f"/proc/{int(path.read_text())}/stat")
        while state.exists():  # Until somebody takes note of its end.
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                break
            time.sleep(0.1)

    def test_each_has_its_requirements_and_its_program(self):
        for name, rival in programs.RIVALS.items():
            folder = programs._ROOT / "research" / "rivals"
            self.assertTrue((folder / f"{rival.module}.py").exists())
            requirements = programs._ROOT / "requirements" / f"rival-{name}.in"
            self.assertIn(rival.packages[0], requirements.read_text())


if __name__ == "__main__":
    absltest.main()
