import pathlib
import re

from absl.testing import absltest

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tff.md"


class PageTest(absltest.TestCase):
    def test_code_runs(self):
        text = PAGE.read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
        self.assertLen(blocks, 2)
        names = {}
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
        spent = names["process"].epsilon(names["output"].state, delta=1e-3)
        self.assertBetween(spent, 0.1, 100.0)


if __name__ == "__main__":
    absltest.main()
