"""The README's Python runs, and its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import tempfile

from absl.testing import absltest

from tfdp_fl.experiments import Settings

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_PAGES = sorted((_ROOT / "docs").glob("*.md"))


class ReadmeTest(absltest.TestCase):
    def test_python_block_does_what_is_printed_below_it(self):
        match = re.search(
            r"```python\n(.*?)```\n\nWhat came out:\n\n```\n(.*?)```",
            _README,
            re.DOTALL,
        )
        code, shown = match.groups()
        lines = [line for line in code.splitlines() if line]
        self.assertLessEqual(len(lines), 10)
        out = io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            before = os.getcwd()
            os.chdir(folder)
            try:
                with contextlib.redirect_stdout(out):
                    exec(compile(code, "README.md", "exec"), {})
            finally:
                os.chdir(before)
        figures = r"accuracy (0\.\d+), epsilon (\d+\.\d+)"
        accuracy, epsilon = map(float, re.search(figures, out.getvalue()).groups())
        told_accuracy, told_epsilon = map(float, re.search(figures, shown).groups())
        self.assertLessEqual(epsilon, 2.0)
        self.assertEqual(epsilon, told_epsilon)
        # Fresh noise every time: unseeded runs spread over about 0.02.
        self.assertAlmostEqual(accuracy, told_accuracy, delta=0.08)
        self.assertIn("differentially private", out.getvalue())

    def test_links_lead_to_files(self):
        links = re.findall(r"\]\(([^)#:]+)\)", _README)
        self.assertGreater(len(links), 10)
        missing = [link for link in links if not (_ROOT / link).exists()]
        self.assertEqual(missing, [])

    def test_commands_name_programs_and_flags_that_are_there(self):
        commands = re.findall(r"python (scripts/\w+\.py)((?: .*\\\n)*.*)", _README)
        self.assertNotEmpty(commands)
        names = {*Settings.__dataclass_fields__, "output_dir", "overwrite"}
        for program, flags in commands:
            self.assertTrue((_ROOT / program).exists())
            if program == "scripts/train.py":
                given = {*re.findall(r"--(\w+)", flags)}
                self.assertEqual(given - names, set())

    def test_commands_of_every_page_name_files_that_are_there(self):
        pages = [_README, *(p.read_text("utf-8") for p in _PAGES)]
        files = {
            file
            for page in pages
            for file in re.findall(
                r"\b(?:scripts|research|tools|colab)/[\w./]+\.\w+", page
            )
        }
        self.assertIn("research/reproduce_geyer.py", files)
        self.assertIn("research/configs/local_dp.json", files)
        missing = sorted(f for f in files if not (_ROOT / f).exists())
        self.assertEqual(missing, [])


if __name__ == "__main__":
    absltest.main()
